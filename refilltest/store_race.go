package refilltest

import (
	"context"
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
)

var raceCases = []storeCase{
	{
		"ctx-ended",
		`A call whose ctx has already ended returns an error and changes nothing. Its caller has left, so a lease that it
takes locks the key while no node loads.`,
		ctxEnded,
	},
	{
		"race-one-winner",
		`For any number of nodes that race for a key, one load runs at a time, and each record replaces exactly the one
that its load has seen. A step that consists of two commands passes every test with one node and fails here: another
node acts between the two.`,
		raceOneWinner,
	},
	{
		"race-invalidate",
		`After Invalidate or Expire has returned, no load that began before it is served as fresh, whatever runs at the same
time (G2). Otherwise users see old data right after they have changed it.`,
		raceInvalidate,
	},
}

func ctxEnded(s *stores) {
	const free = "product:43"
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	s.start(s.A, key, "a#2", long)
	sub := s.subscribe(s.B, "product")
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	for _, c := range s.calls(key, free) {
		if err := c.do(ctx); err == nil {
			s.Fatalf("%s with a ctx that has ended returns no error", c.name)
		}
	}
	s.wantValue(key, v1)
	s.wantRunning(s.A, key, "a#2")
	s.start(s.B, free, "b#1", long)
	s.wantUnknown(key, free)
	sub.wantNoMore(key)
}

// calls returns calls of store A: one of each method, but Acquire once in each mode and once by the holder of key. key
// has a lease, held with the token a#2. free has no lease, and the Acquires of free use the token a#3. The methods for
// tags get both names as tags.
func (s *stores) calls(key, free string) []call {
	rec := s.record("a#2", "x")
	acquire := func(key, token string, mode driver.Mode) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := s.A.Acquire(ctx, driver.AcquireRequest{Key: key, Token: token, LeaseTTL: long, ClaimTTL: long, Mode: mode})
			return err
		}
	}
	return []call{
		{"Get", func(ctx context.Context) error { _, err := s.A.Get(ctx, key); return err }},
		{"Acquire in mode Try", acquire(free, "a#3", driver.Try)},
		{"Acquire in mode Wait", acquire(free, "a#3", driver.Wait)},
		{"Acquire in mode Force", acquire(free, "a#3", driver.Force)},
		{"Acquire in mode Look", acquire(free, "a#3", driver.Look)},
		{"Acquire by the holder", acquire(key, "a#2", driver.Wait)},
		{"Renew", func(ctx context.Context) error {
			_, err := s.A.Renew(ctx, long, driver.Lease{Key: key, Token: "a#2"})
			return err
		}},
		{"Publish", func(ctx context.Context) error {
			_, err := s.A.Publish(ctx, driver.PublishRequest{Key: key, Token: "a#2", Record: rec, Keep: long})
			return err
		}},
		{"Fail", func(ctx context.Context) error {
			return s.A.Fail(ctx, driver.FailRequest{Key: key, Token: "a#2", Failure: "boom", TTL: long})
		}},
		{"Release", func(ctx context.Context) error { return s.A.Release(ctx, key, "a#2") }},
		{"Invalidate", func(ctx context.Context) error { return s.A.Invalidate(ctx, "a#4", key, free) }},
		{"Expire", func(ctx context.Context) error { return s.A.Expire(ctx, "a#4", key, free) }},
		{"GetMany", func(ctx context.Context) error { _, err := s.A.GetMany(ctx, key, free); return err }},
		{"Tags", func(ctx context.Context) error { _, err := s.A.Tags(ctx, key, free); return err }},
		{"EnsureTags", func(ctx context.Context) error { return s.A.EnsureTags(ctx, time.Hour, long, key, free) }},
		{"InvalidateTags", func(ctx context.Context) error { return s.A.InvalidateTags(ctx, "a#4", long, key, free) }},
		{"ExpireTags", func(ctx context.Context) error { return s.A.ExpireTags(ctx, "a#4", long, key, free) }},
	}
}

// racers is how many nodes race, and rounds is how many fills each of them tries. These numbers are large enough that
// steps of different fills interleave, and small enough for a laptop.
const (
	racers = 16
	rounds = 25
)

func (s *stores) node(i int) driver.Store {
	if i%2 == 0 {
		return s.A
	}
	return s.B
}

// raceOneWinner invalidates nothing and lets no lease end. So only lease and claim decide which fill is stored.
func raceOneWinner(s *stores) {
	var (
		running atomic.Int32
		mu      sync.Mutex
		next    = map[string]string{} // guarded by mu: next[a] is the token that replaced a
		wg      sync.WaitGroup
	)
	for i := range racers {
		wg.Go(func() {
			for r := range rounds {
				token := fmt.Sprintf("n%d#%d", i, r)
				err := s.raceFill(s.node(i), token, modes()[(i+r)%3], func(seen string) {
					if n := running.Add(1); n > 1 {
						s.Errorf("%d loads of one key at once", n)
					}
					for range 3 {
						runtime.Gosched()
					}
					mu.Lock()
					defer mu.Unlock()
					if other, replaced := next[seen]; replaced {
						s.Errorf("%s and %s both replaced %q", other, token, seen)
					}
					next[seen] = token
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
	if len(next) == 0 {
		s.Fatalf("no node acquired the lease in %d tries", racers*rounds)
	}
	last := ""
	for range next {
		last = next[last]
	}
	if got := driver.RecordToken(s.get(s.A, key)); got != last || last == "" {
		s.Fatalf("the value is from %q, want it from %q: each record replaces the one that its load has seen", got, last)
	}
}

// raceFill tries one fill as a Loader does. load runs between Acquire and Publish.
func (s *stores) raceFill(st driver.Store, token string, mode driver.Mode, load func(seen string)) error {
	rec, err := st.Get(s.ctx, key)
	if err != nil {
		return err
	}
	seen := driver.RecordToken(rec)
	req := driver.AcquireRequest{Key: key, Token: token, Seen: seen, LeaseTTL: long, ClaimTTL: long, Mode: mode}
	if r, err := st.Acquire(s.ctx, req); err != nil || r.State != driver.Acquired {
		return err
	}
	load(seen)
	rec, err = (&driver.Record{Token: token, Kind: "race"}).Append(nil)
	if err != nil {
		return err
	}
	state, err := st.Publish(s.ctx, driver.PublishRequest{Key: key, Token: token, Replaced: seen, Record: rec, Keep: long})
	if err == nil && state != driver.Stored {
		return fmt.Errorf("publish: %s although no other fill took the claim", publishText(state))
	}
	return err
}

// raceInvalidate runs fills of a number while writers raise the number and invalidate or expire the key. The number
// stands for the database. With one filler and one writer, only the writer's Invalidate or Expire keeps an old load out
// of the store. With more fillers, another fill can replace the old value as well.
func raceInvalidate(s *stores) {
	for _, n := range []int{1, 2, 4} {
		s.raceRow(&number{key: fmt.Sprintf("product:%d", n)}, n)
	}
}

// number is a row of a database. It contains a number that only rises.
type number struct {
	key string
	now atomic.Int64
}

func (s *stores) raceRow(row *number, nodes int) {
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
					s.Errorf("after Invalidate or Expire: %v", err)
				}
			}
		})
	}
	wg.Wait()
}

// fillNumber publishes the number that it reads when the load begins. Some loads then end at once. The other loads
// first wait a while for the number to be raised.
func (s *stores) fillNumber(st driver.Store, token string, round int, row *number) error {
	runtime.Gosched()
	rec, err := st.Get(s.ctx, row.key)
	if err != nil {
		return err
	}
	req := driver.AcquireRequest{Key: row.key, Token: token, Seen: driver.RecordToken(rec), LeaseTTL: long, ClaimTTL: long}
	if round%2 == 0 {
		req.Mode = driver.Wait
	}
	if r, err := st.Acquire(s.ctx, req); err != nil || r.State != driver.Acquired {
		return err
	}
	loaded := row.now.Load()
	for try := 0; try < 100 && round%3 != 0 && row.now.Load() == loaded; try++ {
		runtime.Gosched()
	}
	for range round % 8 {
		runtime.Gosched()
	}
	r := driver.Record{Token: token, Payload: strconv.AppendInt(nil, loaded, 10)}
	if rec, err = r.Append(nil); err != nil {
		return err
	}
	_, err = st.Publish(s.ctx, driver.PublishRequest{Key: row.key, Token: token, Record: rec, Keep: long})
	return err
}

// raiseNumber changes the database and invalidates or expires the key. Then it reads the key until the store serves
// this change or a later one as fresh.
func (s *stores) raiseNumber(st driver.Store, by string, expire bool, row *number) error {
	mine, remove := row.now.Add(1), st.Invalidate
	if expire {
		remove = st.Expire
	}
	runtime.Gosched()
	if err := remove(s.ctx, by, row.key); err != nil {
		return err
	}
	for range 50 {
		b, err := st.Get(s.ctx, row.key)
		if err != nil {
			return err
		}
		runtime.Gosched()
		r, err := driver.DecodeRecord(b)
		if err != nil || !r.ExpiredAt.IsZero() {
			continue // there is no value, or no fresh value
		}
		n, err := strconv.ParseInt(string(r.Payload), 10, 64)
		if err != nil || n < mine {
			return fmt.Errorf("the number %q is served as fresh, although it was raised to %d before", r.Payload, mine)
		}
		return nil
	}
	return nil
}
