//go:build unix

package realtest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
)

// The tests of this file check the main guarantees on a fleet of real processes over a real Redis.

func init() { Child("fleet", fleetNode) }

// fleetArgs are the arguments of a process of the fleet. Callers goroutines of the process call Get of one key: for the
// time For, with the time Pause between two calls, or once if For is 0.
type fleetArgs struct {
	Addr                   string
	Callers                int
	For, Pause             time.Duration // For 0 = one Get per goroutine
	TTL, StaleFor, LockTTL time.Duration
	ErrorTTL, MaxErrorTTL  time.Duration
	Load                   time.Duration // how long a load takes
	Fails                  bool          // each load fails
}

// fleetLine is a line that a process of the fleet writes. Times are nanoseconds since 1970. Times of different
// processes can be compared, because all processes run on one machine.
type fleetLine struct {
	Ready  bool        `json:",omitempty"`
	Begins int64       `json:",omitempty"` // when a load began
	Ended  *loadSpan   `json:",omitempty"` // a load has ended
	Done   *fleetCount `json:",omitempty"`

	Rejected bool `json:",omitempty"` // a publication was rejected
}

type loadSpan struct{ Began, Ended int64 }

type fleetCount struct {
	Gets     int64
	Errors   []string // the first three
	Failed   int64
	Outcomes map[string]int64
	Late     map[string]int64 // as Outcomes, without the first Get of each goroutine
	Longest  time.Duration
	Missed   int64 // number of store errors and of lost leases
}

func fleetNode(ctx context.Context, raw json.RawMessage, out *json.Encoder) error {
	var args fleetArgs
	if err := json.Unmarshal(raw, &args); err != nil {
		return err
	}
	rdb := redis.NewClient(&redis.Options{Addr: args.Addr, ContextTimeoutEnabled: true})
	defer rdb.Close()
	n := &fleetProcess{args: args, out: out}
	l, err := refill.New("fleet", n.load, refill.Config{
		TTL: args.TTL, StaleFor: args.StaleFor, LockTTL: args.LockTTL, ErrorTTL: args.ErrorTTL,
		MaxErrorTTL: args.MaxErrorTTL, Jitter: -1, Shared: goredis.New(rdb), OnEvent: n.onEvent,
	})
	if err != nil {
		return err
	}
	n.write(fleetLine{Ready: true})
	if err := rdb.BLPop(ctx, time.Minute, "go").Err(); err != nil { // the test lets all processes begin at once
		return err
	}
	count := n.run(ctx, l)
	count.Missed = n.missed.Load()
	if err := l.Close(); err != nil {
		return err
	}
	n.write(fleetLine{Done: &count})
	return nil
}

type fleetProcess struct {
	args   fleetArgs
	missed atomic.Int64
	mu     sync.Mutex // guards out
	out    *json.Encoder
}

func (n *fleetProcess) onEvent(e refill.Event) {
	switch e.Kind {
	case refill.EventStoreError, refill.EventLeaseLost:
		n.missed.Add(1)
	case refill.EventPublishRejected:
		n.write(fleetLine{Rejected: true})
	}
}

func (n *fleetProcess) write(s fleetLine) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_ = n.out.Encode(s) // the test fails if a line is missing
}

func (n *fleetProcess) load(ctx context.Context, key string) (string, error) {
	began := time.Now().UnixNano()
	n.write(fleetLine{Begins: began})
	defer func() { n.write(fleetLine{Ended: &loadSpan{began, time.Now().UnixNano()}}) }()
	select {
	case <-time.After(n.args.Load):
	case <-ctx.Done():
		return "", ctx.Err()
	}
	if n.args.Fails {
		return "", errors.New("the database is down")
	}
	return fmt.Sprint(key, " of ", began), nil
}

func (n *fleetProcess) run(ctx context.Context, l *refill.Loader[string]) fleetCount {
	count := fleetCount{Outcomes: map[string]int64{}, Late: map[string]int64{}}
	var mu sync.Mutex // guards count
	var wg sync.WaitGroup
	end := time.Now().Add(n.args.For)
	for range n.args.Callers {
		wg.Go(func() {
			for first := true; first || time.Now().Before(end); first = false {
				began := time.Now()
				r, err := l.GetResult(ctx, "hot")
				took := time.Since(began)
				mu.Lock()
				count.Gets++
				count.Outcomes[r.Outcome.String()]++
				if !first {
					count.Late[r.Outcome.String()]++
				}
				count.Longest = max(count.Longest, took)
				if err != nil {
					if count.Failed++; count.Failed <= 3 {
						count.Errors = append(count.Errors, err.Error())
					}
				}
				mu.Unlock()
				select {
				case <-time.After(n.args.Pause):
				case <-ctx.Done():
					return
				}
			}
		})
	}
	wg.Wait()
	return count
}

// runFleet runs n processes with args on a healthy Redis. The guarantees that the tests check hold only while Redis
// answers within StoreTimeout. If Redis answered too late, because the machine was busy, runFleet repeats the run.
func runFleet(t *testing.T, n int, args fleetArgs) (server *Redis, loads []loadSpan, total fleetCount) {
	t.Helper()
	for range 4 {
		server = StartRedis(t)
		if loads, total = tryFleet(t, server, n, args); total.Missed == 0 {
			return server, loads, total
		}
		t.Logf("%d calls of Redis took too long: the run is repeated", total.Missed)
	}
	t.Fatal("this machine is too busy for this test")
	return nil, nil, total
}

// tryFleet starts n processes, lets all processes begin together, and collects their lines.
func tryFleet(t *testing.T, server *Redis, n int, args fleetArgs) (loads []loadSpan, total fleetCount) {
	t.Helper()
	args.Addr = server.Addr()
	nodes := make([]*Proc, n)
	for i := range nodes {
		nodes[i] = StartChild(t, "fleet", args)
	}
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()
	for _, node := range nodes {
		var line fleetLine
		if node.Next(&line); !line.Ready {
			t.Fatalf("a node wrote %+v before it was ready", line)
		}
	}
	for range nodes {
		rdb.RPush(t.Context(), "go", 1)
	}
	total = fleetCount{Outcomes: map[string]int64{}, Late: map[string]int64{}}
	for _, node := range nodes {
		for done := false; !done; {
			var line fleetLine
			if !node.NextWithin(&line, args.For+30*time.Second) {
				t.Fatal("a node wrote no further line")
			}
			if line.Ended != nil {
				loads = append(loads, *line.Ended)
			}
			if line.Done != nil {
				total.add(*line.Done)
				done = true
			}
		}
		if err := node.Wait(); err != nil {
			t.Error(err)
		}
	}
	slices.SortFunc(loads, func(a, b loadSpan) int { return cmp.Compare(a.Began, b.Began) })
	return loads, total
}

func (c *fleetCount) add(o fleetCount) {
	c.Gets += o.Gets
	c.Failed += o.Failed
	c.Errors = append(c.Errors, o.Errors...)
	c.Longest = max(c.Longest, o.Longest)
	c.Missed += o.Missed
	for k, v := range o.Outcomes {
		c.Outcomes[k] += v
	}
	for k, v := range o.Late {
		c.Late[k] += v
	}
}

// noOverlap fails the test if two loads ran at the same time.
func noOverlap(t *testing.T, loads []loadSpan) {
	t.Helper()
	for i := 1; i < len(loads); i++ {
		if loads[i].Began < loads[i-1].Ended {
			t.Errorf("load %d began %v before load %d had ended", i, time.Duration(loads[i-1].Ended-loads[i].Began), i-1)
		}
	}
}

// leftBehind fails the test if the fleet left a key without a TTL, or a subscriber.
func leftBehind(t *testing.T, server *Redis) {
	t.Helper()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()
	keys, err := rdb.Keys(t.Context(), "refill:*").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if ttl := rdb.PTTL(t.Context(), key).Val(); ttl < 0 && ttl != -2 {
			t.Errorf("%s has no TTL", key)
		}
	}
	if subscribers := rdb.PubSubNumSub(t.Context(), "refill:notes").Val()["refill:notes"]; subscribers != 0 {
		t.Errorf("%d subscribers are left", subscribers)
	}
}

func TestOneLoadPerExpiry(t *testing.T) {
	for _, staleFor := range []time.Duration{0, time.Minute} {
		t.Run(fmt.Sprint("StaleFor ", staleFor), func(t *testing.T) {
			const ttl, load = time.Second, 100 * time.Millisecond
			server, loads, total := runFleet(t, 8, fleetArgs{
				Callers: 200, For: 10 * time.Second, Pause: 20 * time.Millisecond, TTL: ttl, StaleFor: staleFor,
				Load: load,
			})
			t.Logf("result: StaleFor %v: %d loads in 10 s, %d Gets, %d failed", staleFor, len(loads), total.Gets, total.Failed)
			t.Logf("longest Get %v, outcomes %v", total.Longest, total.Outcomes)
			t.Logf("commands, including start and end: %v", server.Commandstats(t))
			if total.Failed > 0 {
				t.Errorf("%d Gets failed: %v", total.Failed, total.Errors)
			}
			noOverlap(t, loads)
			for i := 1; i < len(loads); i++ {
				// TTL counts from the claim, which the node takes before the load begins. So the time between two loads may be a
				// little shorter than TTL.
				if gap := time.Duration(loads[i].Began - loads[i-1].Began); gap < ttl-250*time.Millisecond {
					t.Errorf("load %d began %v after the previous one, within its TTL", i, gap)
				}
			}
			if len(loads) < 8 || len(loads) > 11 {
				t.Errorf("%d loads in 10 s at a TTL of 1 s", len(loads))
			}
			if staleFor > 0 {
				for outcome, n := range total.Late {
					if outcome != "hit" && outcome != "stale" {
						t.Errorf("%d Gets after the cold start were %q: with StaleFor no Get waits", n, outcome)
					}
				}
			}
			leftBehind(t, server)
		})
	}
}

// A load takes 3 s, at a TTL and LockTTL of 1 s. There must be one load, and all callers must get its value.
func TestLoadOutlastsTTLAndLock(t *testing.T) {
	server, loads, total := runFleet(t, 8, fleetArgs{
		Callers: 25, TTL: time.Second, LockTTL: time.Second, Load: 3 * time.Second,
	})
	t.Logf("result: %d load, %d of %d callers got it", len(loads), total.Gets-total.Failed, total.Gets)
	if len(loads) != 1 || total.Failed != 0 || total.Gets != 200 {
		t.Errorf("%d loads, %d of %d Gets failed: %v; want one load for all callers",
			len(loads), total.Failed, total.Gets, total.Errors)
	}
	leftBehind(t, server)
}

// 8 processes read a cold key from a failing database. In the whole fleet there must be two loads per back-off: one
// node loads and fails, and then a second node tries, because the cause may be the first node alone. After the failure
// of the second node, no node may load during the back-off. Each back-off must be twice as long as the last, up to
// MaxErrorTTL, whichever nodes load. All callers must get the error.
func TestFailingLoad(t *testing.T) {
	server, loads, total := runFleet(t, 8, fleetArgs{
		Callers: 10, For: 8 * time.Second, Pause: 20 * time.Millisecond, TTL: time.Second,
		ErrorTTL: time.Second, MaxErrorTTL: 4 * time.Second, Load: 50 * time.Millisecond, Fails: true,
	})
	noOverlap(t, loads)
	var gaps []time.Duration
	for i := 1; i < len(loads); i++ {
		gap, want := time.Duration(loads[i].Began-loads[i-1].Ended), time.Duration(0)
		if i%2 == 0 {
			want = min(time.Second<<(i/2-1), 4*time.Second)
		}
		if gap < want-5*time.Millisecond {
			t.Errorf("load %d began %v after the failure before it, want %v", i, gap, want)
		}
		gaps = append(gaps, gap.Round(10*time.Millisecond))
	}
	t.Logf("result: %d loads in 8 s, %v apart, %d Gets", len(loads), gaps, total.Gets)
	if len(loads) < 6 || len(loads) > 8 || total.Failed != total.Gets {
		t.Errorf("%d loads in 8 s, %d of %d Gets failed", len(loads), total.Failed, total.Gets)
	}
	leftBehind(t, server)
}

// The process that loads is killed (kill -9). Another process must begin a load within LockTTL + 500 ms.
func TestKilledLoader(t *testing.T) {
	server := StartRedis(t)
	args := fleetArgs{
		Addr: server.Addr(), Callers: 20, TTL: time.Minute, LockTTL: time.Second, Load: 5 * time.Second,
	}
	first, second := StartChild(t, "fleet", args), StartChild(t, "fleet", args)
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()
	var line fleetLine
	first.Next(&line)
	second.Next(&line)
	rdb.RPush(t.Context(), "go", 1, 1)
	// The process that loads is killed during its load, after the first renewals.
	holder, other := first, second
	if line = (fleetLine{}); !first.NextWithin(&line, 2*time.Second) {
		holder, other = second, first
		second.Next(&line)
	}
	if line.Begins == 0 {
		t.Fatalf("the first line is %+v, want the begin of a load", line)
	}
	<-time.After(1200 * time.Millisecond) // any moment of the load will do
	killed := time.Now()
	holder.Kill()
	line = fleetLine{}
	other.Next(&line)
	after := time.Unix(0, line.Begins).Sub(killed)
	t.Logf("result: the next load began %v after the kill, LockTTL 1 s", after.Round(time.Millisecond))
	if line.Begins == 0 || after > args.LockTTL+500*time.Millisecond || after < 0 {
		t.Errorf("the other process wrote %+v, %v after the kill; want a load within LockTTL + 500 ms", line, after)
	}
	for line.Done == nil {
		other.NextWithin(&line, 10*time.Second)
	}
	if line.Done.Failed != 0 {
		t.Errorf("%d Gets failed: %v", line.Done.Failed, line.Done.Errors)
	}
}

// twoNodes makes two nodes, each with its own connections, and waits until both have subscribed.
func twoNodes(
	t testing.TB, addr string, load func(context.Context, string) (string, error), cfg refill.Config,
) (a, b *refill.Loader[string]) {
	t.Helper()
	nodes := make([]*refill.Loader[string], 2)
	for i := range nodes {
		rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
		t.Cleanup(func() { rdb.Close() })
		up := make(chan struct{})
		cfg := cfg
		cfg.Shared = goredis.New(rdb)
		cfg.OnEvent = func(e refill.Event) {
			if e.Kind == refill.EventStoreUp {
				close(up)
			}
		}
		l, err := refill.New("two", load, cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		})
		select {
		case <-up:
		case <-time.After(10 * time.Second):
			t.Fatal("no subscription")
		}
		nodes[i] = l
	}
	return nodes[0], nodes[1]
}

// One node calls Invalidate during a load of another node. The value of that load must not be stored, whether or not
// a second load runs meanwhile.
func TestInvalidateDuringALoadElsewhere(t *testing.T) {
	for _, meanwhile := range []bool{true, false} {
		t.Run(fmt.Sprintf("another load meanwhile %v", meanwhile), func(t *testing.T) {
			server := StartRedis(t)
			var version atomic.Int64
			loading, goOn := make(chan struct{}), make(chan struct{})
			load := func(context.Context, string) (string, error) {
				v := version.Load() // as a query does, the load reads first, and then takes a while
				if v == 0 {
					loading <- struct{}{}
					<-goOn
				}
				return fmt.Sprint("v", v), nil
			}
			a, b := twoNodes(t, server.Addr(), load, refill.Config{TTL: time.Minute})
			first := make(chan string)
			go func() {
				v, err := a.Get(t.Context(), "k")
				first <- fmt.Sprint(v, err)
			}()
			<-loading
			version.Store(1)
			if err := b.Invalidate(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			if meanwhile {
				if v, err := b.Get(t.Context(), "k"); err != nil || v != "v1" { // at once, while the old load still runs
					t.Errorf("%q, %v immediately after Invalidate", v, err)
				}
			}
			close(goOn)
			if got := <-first; got != "v0<nil>" {
				t.Errorf("the caller that waited for the old load got %s", got)
			}
			for _, l := range []*refill.Loader[string]{b, a} {
				if v, err := l.Get(t.Context(), "k"); err != nil || v != "v1" {
					t.Errorf("%q, %v: the old load's value was stored", v, err)
				}
			}
		})
	}
}

// 20 callers on one node wait 2.5 s for a load of another node. Their node must not poll. The node may read the lease
// once per LockTTL, to find out whether the holder was killed.
func TestWaitersDoNotPoll(t *testing.T) {
	server := StartRedis(t)
	loading, goOn := make(chan struct{}), make(chan struct{})
	load := func(context.Context, string) (string, error) {
		loading <- struct{}{}
		<-goOn
		return "v", nil
	}
	a, b := twoNodes(t, server.Addr(), load, refill.Config{TTL: time.Minute, LockTTL: time.Second})
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = a.Get(t.Context(), "k") })
	<-loading
	server.ResetStats(t)
	began := time.Now()
	for range 20 {
		wg.Go(func() {
			if v, err := b.Get(t.Context(), "k"); v != "v" || err != nil {
				t.Error(v, err)
			}
		})
	}
	<-time.After(2500 * time.Millisecond) // the length of the load
	calls := server.Commandstats(t)
	reads := int64(time.Since(began)/time.Second) + 2
	t.Logf("result: while 20 callers waited 2.5 s, their node read the lease %d times and registered as a waiter %d times",
		calls["pttl"], calls["append"])
	if calls["pttl"] > reads || calls["append"] > 1 || calls["set"] > 0 || calls["get"] > 1 {
		t.Errorf("%v while 20 callers waited for 2.5 s: want one read of the lease per LockTTL, a script with a PTTL", calls)
	}
	server.ResetStats(t)
	close(goOn)
	wg.Wait()
	if calls := server.Commandstats(t); calls["get"] > 0 || calls["set"] > 1 {
		t.Errorf("%v to deliver the result: want the publish, and no command of the waiters", calls)
	}
}

// BenchmarkWait measures the time from the end of a load on one node until a waiter on another node has the value.
func BenchmarkWait(b *testing.B) {
	server := StartRedis(b)
	var ended atomic.Int64
	loading, goOn := make(chan struct{}), make(chan struct{})
	load := func(context.Context, string) (string, error) {
		loading <- struct{}{}
		<-goOn
		ended.Store(time.Now().UnixNano())
		return "v", nil
	}
	x, y := twoNodes(b, server.Addr(), load, refill.Config{TTL: time.Minute})
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()
	var waits []time.Duration
	for i := 0; b.Loop(); i++ {
		key := fmt.Sprint(i)
		go func() { _, _ = x.Get(context.Background(), key) }()
		<-loading
		sets := server.Commandstats(b)["set"]
		got := make(chan int64)
		go func() {
			_, err := y.Get(context.Background(), key)
			if err != nil {
				b.Error(err)
			}
			got <- time.Now().UnixNano()
		}()
		for server.Commandstats(b)["set"] == sets { // until the waiter has failed to acquire the lease
		}
		goOn <- struct{}{}
		waits = append(waits, time.Duration(<-got-ended.Load()))
	}
	slices.Sort(waits)
	b.ReportMetric(float64(waits[len(waits)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(waits[len(waits)*99/100].Microseconds()), "p99-µs")
	b.ReportMetric(0, "ns/op")
}
