package refilltest

import (
	"context"
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill"
)

var raceCases = []storeCase{
	{
		"ctx-over",
		`A call whose ctx is over already returns an error and changes nothing. The caller has gone; who could use the
lease that it takes?`,
		ctxOver,
	},
	{
		"race-one-winner",
		`However many nodes race for a key, one load runs at a time, and each record replaces exactly the one that its load
saw. A step made of two commands passes every test of one node and breaks here (seeds row 6).`,
		raceOneWinner,
	},
	{
		"race-void",
		`After Invalidate or Expire returns, no load that began before is ever served as fresh, whatever runs at the same
time (G2). This is what a user means when he says that the cache is broken.`,
		raceVoid,
	},
}

func ctxOver(s *stores) {
	const free = "product:43"
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	s.begin(s.A, key, "a#2", long)
	e := s.listen(s.B, "product")
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	for _, c := range s.calls(key, free) {
		if err := c.do(ctx); err == nil {
			s.Fatalf("%s with a ctx that is over gives no error", c.name)
		}
	}
	s.holds(key, v1)
	s.alive(s.A, key, "a#2")
	s.begin(s.B, free, "b#1", long)
	s.unknown(key, free)
	e.heardAll(key)
}

// calls are all calls of A: about key by the token a#2, and for the lease of free by a#3. The two are tags as well.
func (s *stores) calls(key, free string) []call {
	rec := s.record("a#2", "x")
	bid := func(key, token string, how refill.Ask) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := s.A.Begin(ctx, refill.Bid{Key: key, Token: token, LeaseTTL: long, ClaimTTL: long, Ask: how})
			return err
		}
	}
	return []call{
		{"Get", func(ctx context.Context) error { _, err := s.A.Get(ctx, key); return err }},
		{"Begin", bid(free, "a#3", refill.AskOnce)},
		{"Begin with AskLeft", bid(free, "a#3", refill.AskLeft)},
		{"Begin with AskForce", bid(free, "a#3", refill.AskForce)},
		{"Begin of the holder", bid(key, "a#2", refill.AskLeft)},
		{"Renew", func(ctx context.Context) error { _, err := s.A.Renew(ctx, key, "a#2", long); return err }},
		{"Publish", func(ctx context.Context) error {
			_, err := s.A.Publish(ctx, refill.Publication{Key: key, Token: "a#2", Record: rec, Keep: long})
			return err
		}},
		{"Fail", func(ctx context.Context) error { return s.A.Fail(ctx, key, "a#2", "boom", long) }},
		{"Release", func(ctx context.Context) error { return s.A.Release(ctx, key, "a#2") }},
		{"Invalidate", func(ctx context.Context) error { return s.A.Invalidate(ctx, "a#4", key, free) }},
		{"Expire", func(ctx context.Context) error { return s.A.Expire(ctx, "a#4", key, free) }},
		{"GetMany", func(ctx context.Context) error { _, err := s.A.GetMany(ctx, key, free); return err }},
		{"Tags", func(ctx context.Context) error { _, err := s.A.Tags(ctx, key, free); return err }},
		{"HoldTags", func(ctx context.Context) error { return s.A.HoldTags(ctx, time.Hour, long, key, free) }},
		{"InvalidateTags", func(ctx context.Context) error { return s.A.InvalidateTags(ctx, "a#4", long, key, free) }},
		{"ExpireTags", func(ctx context.Context) error { return s.A.ExpireTags(ctx, "a#4", long, key, free) }},
	}
}

// racers are many enough to meet, and few enough for a laptop.
const (
	racers = 16
	rounds = 25
)

func (s *stores) node(i int) refill.Store {
	if i%2 == 0 {
		return s.A
	}
	return s.B
}

// raceOneWinner has no voids and no ends of leases, so nothing but the lease and the claim decides.
func raceOneWinner(s *stores) {
	var (
		running atomic.Int32
		mu      sync.Mutex
		heir    = map[string]string{} // guarded by mu: which token replaced which
		wg      sync.WaitGroup
	)
	for i := range racers {
		wg.Go(func() {
			for r := range rounds {
				token := fmt.Sprintf("n%d#%d", i, r)
				err := s.raceFill(s.node(i), token, asks()[(i+r)%3], func(seen string) {
					if n := running.Add(1); n > 1 {
						s.Errorf("%d loads of one key at once", n)
					}
					for range 3 {
						runtime.Gosched()
					}
					mu.Lock()
					defer mu.Unlock()
					if other, taken := heir[seen]; taken {
						s.Errorf("%s and %s both replaced %q", other, token, seen)
					}
					heir[seen] = token
					running.Add(-1)
				})
				if err != nil {
					s.Errorf("%s: %v", token, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if len(heir) == 0 {
		s.Fatalf("nobody won once in %d tries", racers*rounds)
	}
	last := ""
	for range heir {
		last = heir[last]
	}
	if got := refill.RecordToken(s.get(s.A, key)); got != last || last == "" {
		s.Fatalf("the value is %q's, want %q's: each record replaces the one that its load saw", got, last)
	}
}

// raceFill tries for one fill as a Loader does; load runs between Begin and the publication.
func (s *stores) raceFill(st refill.Store, token string, how refill.Ask, load func(seen string)) error {
	rec, err := st.Get(s.ctx, key)
	if err != nil {
		return err
	}
	seen := refill.RecordToken(rec)
	b := refill.Bid{Key: key, Token: token, Seen: seen, LeaseTTL: long, ClaimTTL: long, Ask: how}
	if r, err := st.Begin(s.ctx, b); err != nil || r.State != refill.BeginTaken {
		return err
	}
	load(seen)
	rec, err = (&refill.Record{Token: token, Kind: "race"}).Append(nil)
	if err != nil {
		return err
	}
	state, err := st.Publish(s.ctx, refill.Publication{Key: key, Token: token, Replaced: seen, Record: rec, Keep: long})
	if err == nil && state != refill.PublishStored {
		return fmt.Errorf("publish: %s although nobody took the claim", publishedName(state))
	}
	return err
}

// raceVoid runs fills of a number, the database, beside writers who raise the number and void the key: one of each, where
// nothing but the void stands between an old load and the store, and more of them, where others take its place.
func raceVoid(s *stores) {
	for _, n := range []int{1, 2, 4} {
		s.raceVoids(&number{key: fmt.Sprintf("product:%d", n)}, n)
	}
}

// number is a row of the database.
type number struct {
	key string
	now atomic.Int64
}

func (s *stores) raceVoids(row *number, nodes int) {
	var writing atomic.Int64
	var wg sync.WaitGroup
	writing.Store(int64(nodes))
	for i := range nodes {
		wg.Go(func() {
			for r := 0; writing.Load() > 0 && !s.Failed(); r++ {
				if err := s.fillNumber(s.node(i), fmt.Sprintf("f%d#%d", i, r), r, row); err != nil {
					s.Errorf("fill: %v", err)
				}
			}
		})
		wg.Go(func() {
			defer writing.Add(-1)
			for r := 0; r < 4*rounds && !s.Failed(); r++ {
				if err := s.raiseNumber(s.node(i+1), fmt.Sprintf("w%d#%d", i, r), r%2 == 0, row); err != nil {
					s.Errorf("after a void: %v", err)
				}
			}
		})
	}
	wg.Wait()
}

// fillNumber makes a record of the number as it is when the load begins. Some loads are quick, others so slow that the
// number was raised meanwhile, as far as that can be waited for.
func (s *stores) fillNumber(st refill.Store, token string, round int, row *number) error {
	runtime.Gosched()
	rec, err := st.Get(s.ctx, row.key)
	if err != nil {
		return err
	}
	b := refill.Bid{Key: row.key, Token: token, Seen: refill.RecordToken(rec), LeaseTTL: long, ClaimTTL: long}
	if round%2 == 0 {
		b.Ask = refill.AskLeft
	}
	if r, err := st.Begin(s.ctx, b); err != nil || r.State != refill.BeginTaken {
		return err
	}
	loaded := row.now.Load()
	for turn := 0; turn < 100 && round%3 != 0 && row.now.Load() == loaded; turn++ {
		runtime.Gosched()
	}
	for range round % 8 {
		runtime.Gosched()
	}
	r := refill.Record{Token: token, Payload: strconv.AppendInt(nil, loaded, 10)}
	if rec, err = r.Append(nil); err != nil {
		return err
	}
	_, err = st.Publish(s.ctx, refill.Publication{Key: row.key, Token: token, Record: rec, Keep: long})
	return err
}

// raiseNumber changes the database, voids the key, and then watches what is served as fresh, until it is this change or
// a later one.
func (s *stores) raiseNumber(st refill.Store, by string, soft bool, row *number) error {
	mine, void := row.now.Add(1), st.Invalidate
	if soft {
		void = st.Expire
	}
	runtime.Gosched()
	if err := void(s.ctx, by, row.key); err != nil {
		return err
	}
	for range 50 {
		b, err := st.Get(s.ctx, row.key)
		if err != nil {
			return err
		}
		runtime.Gosched()
		r, err := refill.DecodeRecord(b)
		if err != nil || !r.ExpiredAt.IsZero() {
			continue // nothing there, or nothing fresh
		}
		n, err := strconv.ParseInt(string(r.Payload), 10, 64)
		if err != nil || n < mine {
			return fmt.Errorf("the number %q is served as fresh, it is %d since before", r.Payload, mine)
		}
		return nil
	}
	return nil
}
