//go:build unix

package realtest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
)

// The tests of this file use many keys at once on real servers: with GetMany, and with a tag.

func init() { Child("many", manyNode) }

// rows is a fake database whose load function loads many keys at once.
type rows struct {
	took    time.Duration
	version atomic.Int64
	calls   atomic.Int64
	mu      sync.Mutex
	times   map[string]int // how often each key was loaded
}

func (d *rows) load(ctx context.Context, keys []string) (map[string]string, error) {
	d.calls.Add(1)
	version := d.version.Load()
	found := make(map[string]string, len(keys))
	d.mu.Lock()
	if d.times == nil {
		d.times = make(map[string]int)
	}
	for _, key := range keys {
		d.times[key]++
		found[key] = fmt.Sprint(key, " v", version)
	}
	d.mu.Unlock()
	refill.FillFrom(ctx).Tag("all")
	select {
	case <-time.After(d.took):
	case <-ctx.Done():
	}
	return found, ctx.Err()
}

// forget resets the counts.
func (d *rows) forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls.Store(0)
	d.times = nil
}

// manyWorld is a single server or a Cluster.
type manyWorld struct {
	connect func() redis.UniversalClient
	servers []*Redis
}

func manyWorlds(t *testing.T, run func(t *testing.T, w manyWorld)) {
	t.Run("single", func(t *testing.T) {
		server := StartRedis(t)
		run(t, manyWorld{servers: []*Redis{server}, connect: func() redis.UniversalClient {
			return redis.NewClient(&redis.Options{Addr: server.Addr(), ContextTimeoutEnabled: true})
		}})
	})
	t.Run("cluster", func(t *testing.T) {
		c := StartCluster(t, 3, 0)
		w := manyWorld{connect: func() redis.UniversalClient {
			return redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs(), ContextTimeoutEnabled: true})
		}}
		for _, key := range []string{"{a}", "{b}", "{c}", "{d}", "{e}", "{f}", "{g}", "{h}"} {
			if one := c.NodeFor(key); !slices.Contains(w.servers, one) {
				w.servers = append(w.servers, one)
			}
		}
		if len(w.servers) != 3 {
			t.Fatalf("%d masters", len(w.servers))
		}
		run(t, w)
	})
}

func (w manyWorld) reset(t *testing.T) {
	for _, s := range w.servers {
		s.ResetStats(t)
	}
}

// commands returns how often all servers together executed each command.
func (w manyWorld) commands(t *testing.T) map[string]int64 {
	total := map[string]int64{}
	for _, s := range w.servers {
		for name, n := range s.Commandstats(t) {
			total[name] += n
		}
	}
	return total
}

// node makes a bulk Loader with its own connections, and waits until the Loader has subscribed.
func (w manyWorld) node(t *testing.T, d *rows, cfg refill.Config) (*refill.Loader[string], redis.UniversalClient) {
	t.Helper()
	rdb := w.connect()
	t.Cleanup(func() { rdb.Close() })
	up, missed := make(chan struct{}, 1), new(atomic.Int64)
	cfg.Shared, cfg.Jitter = goredis.New(rdb), -1
	if cfg.LockTTL == 0 {
		cfg.LockTTL = 8 * time.Second // long, because thousands of keys keep the machine busy
		cfg.StoreTimeout = 2 * time.Second
	}
	onEvent := cfg.OnEvent
	cfg.OnEvent = func(e refill.Event) {
		if onEvent != nil {
			onEvent(e)
		}
		switch e.Kind {
		case refill.EventStoreUp:
			up <- struct{}{}
		case refill.EventStoreError, refill.EventLeaseLost:
			missed.Add(1)
		}
	}
	l, err := refill.NewBulk("many", d.load, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if n := missed.Load(); n > 0 {
			t.Errorf("%d calls of Redis took longer than StoreTimeout", n)
		}
	})
	select {
	case <-up:
	case <-time.After(waitLimit):
		t.Fatal("no subscription")
	}
	return l, rdb
}

func numbered(from, to int) (keys []string) {
	for i := from; i < to; i++ {
		keys = append(keys, fmt.Sprintf("k%06d", i))
	}
	return keys
}

func getsAll(t *testing.T, l *refill.Loader[string], keys []string, want string) {
	t.Helper()
	got, err := l.GetMany(t.Context(), keys)
	if err != nil {
		t.Error(err)
	}
	for _, key := range keys {
		if got[key] != key+want {
			t.Errorf("%s is %q, want %q", key, got[key], key+want)
			return
		}
	}
}

// Two nodes get the same 1,000 keys at once, of which 700 are in the store. Each of the 300 missing keys must be
// loaded once, in at most two calls of the load function.
func TestGetManyOnTwoNodes(t *testing.T) {
	manyWorlds(t, func(t *testing.T, w manyWorld) {
		d := &rows{}
		first, _ := w.node(t, d, refill.Config{TTL: time.Minute})
		a, _ := w.node(t, d, refill.Config{TTL: time.Minute})
		b, _ := w.node(t, d, refill.Config{TTL: time.Minute})
		getsAll(t, first, numbered(0, 700), " v0")
		d.forget()
		d.took = 100 * time.Millisecond
		w.reset(t)
		back := numbered(0, 1000)
		slices.Reverse(back)
		var wg sync.WaitGroup
		began := time.Now()
		wg.Go(func() { getsAll(t, a, numbered(0, 1000), " v0") })
		wg.Go(func() { getsAll(t, b, back, " v0") })
		wg.Wait()
		took := time.Since(began)
		calls := w.commands(t)
		t.Logf("result: %d bulk loads of %d keys, %v with a load of 100 ms, %v",
			d.calls.Load(), len(d.times), took.Round(time.Millisecond), calls)
		if len(d.times) != 300 || d.calls.Load() > 2 {
			t.Errorf("%d keys in %d calls, want the 300 missing keys in at most two calls", len(d.times), d.calls.Load())
		}
		for key, n := range d.times {
			if n != 1 {
				t.Errorf("%s was loaded %d times", key, n)
			}
		}
		// GET: each node reads each key once and the tag state once. For each key that the other node has loaded, a
		// node may read the tag state again. SET: a node sets a lease, a claim and a value for each missing key. MGET:
		// each call of a script sends one MGET. The scripts are an Acquire per missing key and node, a Publish per
		// missing key, EnsureTags, and few renewals.
		if calls["get"] > 2*(1000+1)+300 || calls["set"] > 3*300+10 || calls["publish"] != 300 || calls["mget"] > 3*300+100 {
			t.Errorf("more commands than needed: %v", calls)
		}
	})
}

// manyArgs are the arguments of a process whose loads never end.
type manyArgs struct {
	Addrs []string // the servers of a Cluster, or a single server
	Keys  []string
}

func manyNode(ctx context.Context, raw json.RawMessage, out *json.Encoder) error {
	var args manyArgs
	if err := json.Unmarshal(raw, &args); err != nil {
		return err
	}
	rdb := redis.NewUniversalClient(&redis.UniversalOptions{Addrs: args.Addrs, ContextTimeoutEnabled: true})
	defer rdb.Close()
	up := make(chan struct{}, 1)
	l, err := refill.NewBulk("many", func(ctx context.Context, keys []string) (map[string]string, error) {
		_ = out.Encode(len(keys)) // the test fails if a line is missing
		<-ctx.Done()
		return nil, ctx.Err()
	}, refill.Config{TTL: time.Minute, LoadTimeout: time.Minute, Shared: goredis.New(rdb), OnEvent: func(e refill.Event) {
		if e.Kind == refill.EventStoreUp {
			up <- struct{}{}
		}
	}})
	if err != nil {
		return err
	}
	defer l.Close()
	<-up
	_, err = l.GetMany(ctx, args.Keys)
	return err
}

// A node is killed while it loads 300 keys. A second node calls GetMany for 400 keys, of which the killed node was
// loading 200. The second node must have all 400 values within LockTTL + 500 ms after the kill, or a second later on a
// busy machine. No lease may be left behind.
func TestGetManyAndAKilledNode(t *testing.T) {
	manyWorlds(t, func(t *testing.T, w manyWorld) {
		d := &rows{}
		l, rdb := w.node(t, d, refill.Config{TTL: time.Minute})
		addrs := make([]string, len(w.servers))
		for i, s := range w.servers {
			addrs[i] = s.Addr()
		}
		child := StartChild(t, "many", manyArgs{Addrs: addrs, Keys: numbered(0, 300)})
		for loading := 0; loading < 300; { // on a busy machine the child loads the keys in more than one call
			var more int
			if !child.NextWithin(&more, waitLimit) {
				t.Fatalf("the other node loads only %d keys", loading)
			}
			loading += more
		}
		child.Kill()
		killed := time.Now()
		getsAll(t, l, numbered(100, 500), " v0")
		after := time.Since(killed)
		t.Logf("result: all 400 keys %v after the kill, LockTTL 1 s, %d calls", after.Round(time.Millisecond), d.calls.Load())
		for key, n := range d.times {
			if n != 1 {
				t.Errorf("%s was loaded %d times", key, n)
			}
		}
		if after > 1500*time.Millisecond+time.Second { // one second more for 400 keys on a busy machine
			t.Errorf("all keys were loaded only %v after the kill", after)
		}
		ctx := t.Context()
		if !eventually(func() bool {
			for _, s := range w.servers {
				one := redis.NewClient(&redis.Options{Addr: s.Addr()})
				defer one.Close()
				if len(one.Keys(ctx, "*/lease:*").Val()) > 0 {
					return false
				}
			}
			return rdb.Ping(ctx).Err() == nil
		}) {
			t.Error("leases are left behind")
		}
	})
}

// InvalidateTag must cost the same number of commands for 10 values and for thousands. A value whose load began
// before InvalidateTag must not be fresh on any node afterwards.
func TestInvalidateTagOfAnySize(t *testing.T) {
	manyWorlds(t, func(t *testing.T, w manyWorld) {
		d := &rows{}
		a, _ := w.node(t, d, refill.Config{TTL: time.Hour})
		b, _ := w.node(t, d, refill.Config{TTL: time.Hour, LocalTTL: -1})
		many := 5000
		if os.Getenv("REFILL_TORTURE") != "" {
			many = 100_000
		}
		var cost []map[string]int64
		for _, n := range []int{10, many} {
			for some := range slices.Chunk(numbered(0, n), 5000) {
				getsAll(t, a, some, fmt.Sprint(" v", d.version.Load()))
			}
			w.reset(t)
			began := time.Now()
			if err := a.InvalidateTag(t.Context(), "all"); err != nil {
				t.Fatal(err)
			}
			took := time.Since(began)
			calls := w.commands(t)
			delete(calls, "ping")
			t.Logf("result: InvalidateTag of %d values: %v, %v", n, took.Round(10*time.Microsecond), calls)
			cost = append(cost, calls)
			d.version.Add(1)
			getsAll(t, b, numbered(0, 10), fmt.Sprint(" v", d.version.Load())) // no old value is served
		}
		for name, n := range cost[1] {
			if name != "eval" && n > max(cost[0][name], 1) {
				t.Errorf("%d %s for %d values, %d for 10", n, name, many, cost[0][name])
			}
		}
		// A load is running on a when b invalidates the tag.
		d.took = 500 * time.Millisecond
		var wg sync.WaitGroup
		wg.Go(func() { getsAll(t, a, numbered(200_000, 200_100), " v2") })
		for d.calls.Load() == 0 || func() bool { d.mu.Lock(); defer d.mu.Unlock(); return d.times["k200000"] == 0 }() {
			time.Sleep(time.Millisecond)
		}
		d.version.Add(1)
		if err := b.InvalidateTag(t.Context(), "all"); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		d.took = 0
		for _, l := range []*refill.Loader[string]{b, a} {
			getsAll(t, l, numbered(200_000, 200_100), " v3")
		}
	})
}

// A node loads 1,024 values of 200 KB each, 200 MB in all. GetMany on a new node must read all values from Redis,
// without a load.
func TestGetManyOfLargeValues(t *testing.T) {
	server := StartRedis(t)
	var loads atomic.Int64
	large := strings.Repeat("0123456789", 20_000)
	load := func(_ context.Context, keys []string) (map[string]string, error) {
		loads.Add(int64(len(keys)))
		found := make(map[string]string, len(keys))
		for _, key := range keys {
			found[key] = key + large[len(key):]
		}
		return found, nil
	}
	node := func(cfg refill.Config) *refill.Loader[string] {
		rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), ContextTimeoutEnabled: true})
		t.Cleanup(func() { rdb.Close() })
		cfg.TTL, cfg.Shared = time.Minute, goredis.New(rdb)
		l, err := refill.NewBulk("large", load, cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		})
		return l
	}
	// These timeouts are long, so that the first node can publish all values, also on a busy machine.
	a, keys := node(refill.Config{LockTTL: 20 * time.Second, StoreTimeout: 5 * time.Second}), numbered(0, 1024)
	for some := range slices.Chunk(keys, 64) {
		if _, err := a.GetMany(t.Context(), some); err != nil {
			t.Fatal(err)
		}
	}
	first := loads.Load()
	began := time.Now()
	got, err := node(refill.Config{}).GetMany(t.Context(), keys)
	took := time.Since(began)
	right := 0
	for _, key := range keys {
		if got[key] == key+large[len(key):] {
			right++
		}
	}
	t.Logf("result: %d values of 200 KB after %v, %d loads, error %v",
		right, took.Round(time.Millisecond), loads.Load()-first, err)
	if right != len(keys) || err != nil || loads.Load() != first {
		t.Errorf("%d right values, %d loads, error %v; want %d, 0 and nil", right, loads.Load()-first, err, len(keys))
	}
}
