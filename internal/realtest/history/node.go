//go:build unix

package history

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
)

// Name is the Loader's.
const Name = "history"

// Keys are what the fleet reads. The last one is never written, so that G1 can be checked on it without excuses.
var Keys = []string{"a", "b", "c", "d", "calm"}

// Promised is what the Loaders of a run are set to, as Check takes it. One run in three has values that outlive a void that
// failed and is tried again; in the others they live shorter, which makes for more loads.
func Promised(seed uint64) Limits {
	l := short
	if seed%3 == 0 {
		l.TTL, l.LocalTTL = 1500*time.Millisecond, 1200*time.Millisecond
	}
	return l
}

var short = Limits{
	TTL: 400 * time.Millisecond, StaleFor: 400 * time.Millisecond, StaleIfError: 800 * time.Millisecond,
	LocalTTL: 300 * time.Millisecond, LockTTL: 300 * time.Millisecond, StoreTimeout: 50 * time.Millisecond,
	LoadTimeout: time.Second, ErrorTTL: 150 * time.Millisecond, NotFoundTTL: 200 * time.Millisecond,
	Jitter: 0.1, MaxLoads: 4,
}

func (l Limits) config() refill.Config {
	return refill.Config{
		TTL: l.TTL, StaleFor: l.StaleFor, StaleIfError: l.StaleIfError, LocalTTL: l.LocalTTL, LockTTL: l.LockTTL,
		StoreTimeout: l.StoreTimeout, LoadTimeout: l.LoadTimeout, ErrorTTL: l.ErrorTTL, NotFoundTTL: l.NotFoundTTL,
		Jitter: l.Jitter, MaxLoads: l.MaxLoads,
	}
}

// Args is what a process of the fleet has to know.
type Args struct {
	Process string
	Addr    string // of its way to Redis
	Dir     string // where its history and the database are
	Seed    uint64
	Limits  Limits
}

// process is one life of a node.
type process struct {
	Args
	log    *Log
	db     *DB
	loader *refill.Loader[Value]
	loads  atomic.Int64
	ops    atomic.Int64
	nudge  chan string // keys that the writer shall write right now
}

// Run is a process of the fleet: it works until ctx ends.
func Run(ctx context.Context, args Args) error {
	log, err := Create(filepath.Join(args.Dir, args.Process+".jsonl"))
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	db, err := OpenDB(filepath.Join(args.Dir, "db"))
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	rdb := redis.NewClient(&redis.Options{Addr: args.Addr, ContextTimeoutEnabled: true})
	defer func() { _ = rdb.Close() }()
	p := &process{Args: args, log: log, db: db, nudge: make(chan string)}
	cfg := args.Limits.config()
	cfg.Shared, cfg.OnEvent = goredis.New(rdb), p.note
	if p.loader, err = refill.New(Name, p.load, cfg); err != nil {
		return err
	}
	var all sync.WaitGroup
	worker := func(number uint64, f func(context.Context, *rand.Rand)) {
		all.Go(func() { f(ctx, rand.New(rand.NewPCG(args.Seed, number))) })
	}
	for i := range uint64(5) {
		worker(i, p.reader)
	}
	worker(10, p.writer)
	worker(11, p.refresher)
	all.Go(func() { Heartbeat(ctx, log, args.Process) })
	all.Wait()
	return p.loader.Close()
}

// Heartbeat notes when this process did not run: it was frozen, or the machine had no time for it.
func Heartbeat(ctx context.Context, log *Log, who string) {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for last := Now(); ctx.Err() == nil; {
		<-ticker.C
		now := Now()
		if now-last > int64(leastGap) {
			log.Write(Event{Kind: Gap, Process: who, Begin: last, End: now})
		}
		last = now
	}
}

// leastGap is how long a process may not run before that is worth a line.
const leastGap = 40 * time.Millisecond

// note writes down events that Check wants to know of.
func (p *process) note(e refill.Event) {
	switch e.Kind {
	case refill.EventPublished, refill.EventRefused, refill.EventAbandoned, refill.EventLeaseLost, refill.EventVoidRetried,
		refill.EventStoreError:
		now := Now()
		line := Event{Kind: Note, Process: p.Process, Key: e.Key, Begin: now, End: now, Op: e.Kind.String()}
		if e.Err != nil {
			line.Err = e.Err.Error()
		}
		p.log.Write(line)
	}
}

// load is the load function: it reads the version first and takes its time then.
func (p *process) load(ctx context.Context, key string) (Value, error) {
	e := Event{Kind: Load, Process: p.Process, ID: p.loads.Add(1), Key: key, Begin: Now()}
	e.Version = p.db.Row(row(key)).Load()
	p.log.Write(e)
	v := Value{Key: key, Version: e.Version, Began: e.Begin, Process: p.Process, Load: e.ID}
	timer := time.NewTimer(p.loadTime())
	defer timer.Stop()
	e.Outcome = "ok"
	select {
	case <-timer.C:
	case <-ctx.Done():
		e.Outcome = "ended"
	}
	what := rand.IntN(100)
	switch {
	case e.Outcome == "ended":
	case what < 5:
		e.Outcome = "failed"
	case what < 9:
		e.Outcome = "absent"
	}
	defer func() {
		e.End = Now()
		p.log.Write(e)
	}()
	p.provoke(key, 12)
	text, _ := json.Marshal(v)
	switch {
	case e.Outcome == "ended":
		return v, ctx.Err()
	case e.Outcome == "absent":
		return v, fmt.Errorf("%s: %w", text, refill.ErrNotFound)
	case what == 0:
		panic(string(text))
	case e.Outcome == "failed":
		return v, errors.New(string(text))
	}
	return v, nil
}

// provoke makes the writer write the key at this very moment, one time out of so many: what goes wrong when a void meets the
// end of a load, or a read, takes less than a millisecond.
func (p *process) provoke(key string, oneIn int) {
	if rand.IntN(oneIn) > 0 || row(key) == len(Keys)-1 {
		return
	}
	select {
	case p.nudge <- key:
	default: // the writer is at it
	}
}

// loadTime draws how long a load takes: sometimes next to nothing, sometimes more than the lock and the value last, and
// now and then more than LoadTimeout.
func (p *process) loadTime() time.Duration {
	ms := func(least, most int) time.Duration {
		return time.Duration(least*1000+rand.IntN((most-least)*1000)) * time.Microsecond
	}
	switch n := rand.IntN(200); {
	case n < 40:
		return ms(0, 3)
	case n < 170:
		return ms(5, 150)
	case n < 199:
		return ms(320, 750)
	}
	return 2 * p.Limits.LoadTimeout
}

func row(key string) int {
	for i, k := range Keys {
		if k == key {
			return i
		}
	}
	panic("no such key: " + key)
}

// reader Gets, the first keys more often than the last ones.
func (p *process) reader(ctx context.Context, rnd *rand.Rand) {
	for pause(ctx, rnd, 3, 25) {
		key := Keys[min(rnd.IntN(len(Keys)), rnd.IntN(2*len(Keys)))]
		p.provoke(key, 150)
		p.get(rnd, key)
	}
}

// get is one Get, GetResult or Peek.
func (p *process) get(rnd *rand.Rand, key string) {
	limit := between(rnd, 500, 3500)
	if rnd.IntN(12) == 0 {
		limit = between(rnd, 10, 80) // leaves before most loads are done
	}
	e := Event{Kind: Get, Process: p.Process, Key: key, Begin: Now()}
	deadline := time.Now().Add(limit)
	e.Deadline = deadline.UnixNano()
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	var v Value
	var err error
	switch rnd.IntN(16) {
	case 0, 1, 2, 3: // it has a shorter way than GetResult
		v, err = p.loader.Get(ctx, key)
	case 4:
		r, ok := p.loader.Peek(ctx, key)
		if !ok {
			return // it does not tell why
		}
		v, e.Outcome = r.Value, r.Outcome.String()
	default:
		var r refill.Result[Value]
		r, err = p.loader.GetResult(ctx, key)
		v, e.Outcome = r.Value, r.Outcome.String()
	}
	e.End = Now()
	if err == nil {
		e.Value = &v
	} else {
		e.Err, e.Value = classify(err)
	}
	p.log.Write(e)
}

// classify says what kind of error it is, and which load it comes from.
func classify(err error) (string, *Value) {
	var failed *refill.LoadError
	switch {
	case errors.As(err, &failed) && failed.Timeout:
		return ErrTimeout, nil
	case errors.As(err, &failed):
		if v := named(failed.Err.Error()); v != nil {
			return ErrLoad, v
		}
	case errors.Is(err, refill.ErrNotFound):
		if v := named(err.Error()); v != nil {
			return ErrAbsent, v
		}
	case errors.Is(err, refill.ErrOverloaded):
		return ErrOverloaded, nil
	case errors.Is(err, context.DeadlineExceeded):
		return ErrCtx, nil
	}
	return err.Error(), nil
}

// named finds the value in the text of an error.
func named(text string) *Value {
	_, rest, found := strings.Cut(text, "{")
	if !found {
		return nil
	}
	rest, _, _ = strings.Cut(rest, "}")
	var v Value
	if json.Unmarshal([]byte("{"+rest+"}"), &v) != nil {
		return nil
	}
	return &v
}

// writer changes the database and voids what is cached of it, as users do: the write first.
func (p *process) writer(ctx context.Context, rnd *rand.Rand) {
	for {
		timer := time.NewTimer(between(rnd, 100, 900))
		key := Keys[rnd.IntN(len(Keys)-1)]
		select {
		case <-ctx.Done():
			return
		case key = <-p.nudge:
		case <-timer.C:
		}
		op, void := "invalidate", p.loader.Invalidate
		if rnd.IntN(5) < 2 {
			op, void = "expire", p.loader.Expire
		}
		version := p.db.Row(row(key)).Add(1)
		p.do(Event{Kind: Void, Op: op, Key: key, Version: version}, void)
	}
}

func (p *process) refresher(ctx context.Context, rnd *rand.Rand) {
	for pause(ctx, rnd, 500, 2500) {
		p.do(Event{Kind: Refresh, Key: Keys[rnd.IntN(len(Keys))]}, p.loader.Refresh)
	}
}

// do writes down the beginning and the end of f.
func (p *process) do(e Event, f func(context.Context, ...string) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	e.Process, e.ID, e.Begin = p.Process, p.ops.Add(1), Now()
	p.log.Write(e)
	err := f(ctx, e.Key)
	e.End = Now()
	if err != nil {
		e.Err = ErrStore
	}
	p.log.Write(e)
}

// pause sleeps for so many milliseconds; false when ctx ended.
func pause(ctx context.Context, rnd *rand.Rand, least, most int) bool {
	timer := time.NewTimer(between(rnd, least, most))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// RedisKeys are where goredis keeps value, lease and claim of a key.
func RedisKeys(key string) [3]string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(Name + ":" + key)) // never fails
	head := "refill:{" + strconv.FormatUint(uint64(h.Sum32()%1024), 10) + "}:" + Name
	return [3]string{head + ":" + key, head + "/lease:" + key, head + "/claim:" + key}
}
