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

// Name is the name of the fleet's Loaders.
const Name = "history"

// Keys are the keys that the fleet reads. No process writes the last key. So no invalidation excuses an extra load
// of that key.
var Keys = []string{"a", "b", "c", "d", "calm"}

// Promised returns the settings of the Loaders of a run, by which Check judges the history. In one run of three, TTL is
// so long that a Loader can retry a failed Invalidate before the value expires. In the other runs TTL is shorter, which
// causes more loads.
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

// Args are the arguments of a process of the fleet.
type Args struct {
	Process string
	Node    int
	Addr    string // address of the node's proxy in front of Redis
	Dir     string // the directory of the histories and the database
	Seed    uint64
	Limits  Limits
}

// process is one process of a node.
type process struct {
	Args
	log    *Log
	db     *DB
	loader *refill.Loader[Value]
	loads  atomic.Int64
	ops    atomic.Int64
	write  chan string // keys that the writer has to write now
}

// Run is the work of a process of the fleet, until ctx ends.
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
	p := &process{Args: args, log: log, db: db, write: make(chan string)}
	cfg := args.Limits.config()
	cfg.Shared, cfg.OnEvent = goredis.New(rdb), p.onEvent
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

// Heartbeat writes a Gap for each time in which this process did not run, because it was frozen or the machine was
// busy.
func Heartbeat(ctx context.Context, log *Log, process string) {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for last := Now(); ctx.Err() == nil; {
		<-ticker.C
		now := Now()
		if now-last > int64(leastGap) {
			log.Write(Event{Kind: Gap, Process: process, Begin: last, End: now})
		}
		last = now
	}
}

// leastGap is the shortest pause of a process that is written as a Gap.
const leastGap = 40 * time.Millisecond

// onEvent writes the events that Check needs.
func (p *process) onEvent(e refill.Event) {
	switch e.Kind {
	case refill.EventPublished, refill.EventPublishRejected, refill.EventLoadAbandoned, refill.EventLeaseLost,
		refill.EventInvalidateRetried, refill.EventStoreError:
		now := Now()
		line := Event{Kind: OnEvent, Process: p.Process, Key: e.Key, Begin: now, End: now, Op: e.Kind.String()}
		if e.Err != nil {
			line.Err = e.Err.Error()
		}
		p.log.Write(line)
	}
}

// load is the load function. As a query does, load reads the version in the database first, and then takes a while.
func (p *process) load(ctx context.Context, key string) (Value, error) {
	e := Event{Kind: Load, Process: p.Process, ID: p.loads.Add(1), Key: key, Begin: Now()}
	e.Version = p.db.Row(row(key)).Load()
	p.log.Write(e)
	v := Value{Key: key, Version: e.Version, Began: e.Begin, Process: p.Process, Load: e.ID}
	if p.db.Gone(p.Node).Load() != 0 {
		e.Op, e.Outcome, e.End = FaultNoDB, "failed", Now()
		p.log.Write(e)
		text, _ := json.Marshal(v)
		return v, errors.New(string(text))
	}
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

// In one of oneIn calls, provoke makes the writer write and invalidate the key at once. Reads and ends of loads call
// provoke, because otherwise an Invalidate would rarely happen in the same millisecond as a read or the end of a load.
func (p *process) provoke(key string, oneIn int) {
	if rand.IntN(oneIn) > 0 || row(key) == len(Keys)-1 {
		return
	}
	select {
	case p.write <- key:
	default: // the writer is busy
	}
}

// loadTime draws the length of a load. Sometimes the load takes almost no time, sometimes longer than LockTTL, and
// rarely longer than LoadTimeout.
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

// reader calls Get again and again, for random keys. The first keys of Keys are chosen more often than the last keys.
func (p *process) reader(ctx context.Context, rnd *rand.Rand) {
	for pause(ctx, rnd, 3, 25) {
		key := Keys[min(rnd.IntN(len(Keys)), rnd.IntN(2*len(Keys)))]
		p.provoke(key, 150)
		p.get(rnd, key)
	}
}

// get calls Get, GetResult or Peek once.
func (p *process) get(rnd *rand.Rand, key string) {
	limit := between(rnd, 500, 3500)
	if rnd.IntN(12) == 0 {
		limit = between(rnd, 10, 80) // shorter than most loads
	}
	e := Event{Kind: Get, Process: p.Process, Key: key, Begin: Now()}
	deadline := time.Now().Add(limit)
	e.Deadline = deadline.UnixNano()
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	var v Value
	var err error
	switch rnd.IntN(16) {
	case 0, 1, 2, 3: // plain Get, which returns no Outcome
		v, err = p.loader.Get(ctx, key)
	case 4:
		r, ok := p.loader.Peek(ctx, key)
		if !ok {
			return // Peek found nothing; there is nothing to check
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

// classify returns the kind of an error, and the load that caused it.
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

// writer changes the database and then invalidates or expires the cached value, as users do.
func (p *process) writer(ctx context.Context, rnd *rand.Rand) {
	for {
		timer := time.NewTimer(between(rnd, 100, 900))
		key := Keys[rnd.IntN(len(Keys)-1)]
		select {
		case <-ctx.Done():
			return
		case key = <-p.write:
		case <-timer.C:
		}
		op, invalidate := "invalidate", p.loader.Invalidate
		if rnd.IntN(5) < 2 {
			op, invalidate = "expire", p.loader.Expire
		}
		version := p.db.Row(row(key)).Add(1)
		p.do(Event{Kind: Invalidation, Op: op, Key: key, Version: version}, invalidate)
	}
}

func (p *process) refresher(ctx context.Context, rnd *rand.Rand) {
	for pause(ctx, rnd, 500, 2500) {
		p.do(Event{Kind: Refresh, Key: Keys[rnd.IntN(len(Keys))]}, p.loader.Refresh)
	}
}

// do calls f, and writes e at the begin and at the end of the call.
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

// pause sleeps for a random time of least to most milliseconds. If ctx ends before that, pause returns false.
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

// RedisKeys returns the Redis keys of the value, the lease and the claim of a key.
func RedisKeys(key string) [3]string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(Name + ":" + key)) // never fails
	head := "refill:{" + strconv.FormatUint(uint64(h.Sum32()%1024), 10) + "}:" + Name
	return [3]string{head + ":" + key, head + "/lease:" + key, head + "/claim:" + key}
}
