//go:build unix

package realtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/driver"
)

// The tests of this file inject one fault at a time into Loaders over a real Redis. After each test, rig.end checks
// that no lease, claim, connection, goroutine or key without a TTL is left behind.

// rig is several nodes over one Redis. Its end method checks what the nodes leave behind.
type rig struct {
	t      *testing.T
	server *Redis
	proxy  *Proxy // in front of the server, for nodes that get a fault
	rdb    *redis.Client
	nodes  []*rigNode
	before map[string]bool // the goroutines that ran before this test, by name
}

// rigNode is a Loader with its own client and its own load function, whose calls it counts.
type rigNode struct {
	*refill.Loader[string]
	t      *testing.T
	client *redis.Client
	up     chan struct{} // receives a value when the node has subscribed
	events sync.Map      // refill.EventKind → *atomic.Int64
	load   func(context.Context, string) (string, error)
	loads  atomic.Int64
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t, server: StartRedis(t), before: map[string]bool{}}
	for _, g := range goroutines() {
		r.before[idOf(g)] = true
	}
	r.proxy = StartProxy(t, r.server.Addr())
	r.rdb = redis.NewClient(&redis.Options{Addr: r.server.Addr()})
	t.Cleanup(r.end)
	return r
}

// node adds a node, and returns when that node has subscribed. For a node behind the proxy, o.Addr must be the
// proxy's address.
func (r *rig) node(o redis.Options, cfg refill.Config) *rigNode {
	r.t.Helper()
	if o.Addr == "" {
		o.Addr = r.server.Addr()
	}
	o.ContextTimeoutEnabled = true
	n := &rigNode{t: r.t, client: redis.NewClient(&o), up: make(chan struct{}, 1)}
	if cfg.TTL == 0 {
		cfg.TTL = time.Minute
	}
	cfg.Shared, cfg.Jitter, cfg.OnEvent = goredis.New(n.client), -1, n.onEvent
	n.load = func(_ context.Context, key string) (string, error) { return key, nil }
	var err error
	n.Loader, err = refill.New("rig", func(ctx context.Context, key string) (string, error) {
		n.loads.Add(1)
		return n.load(ctx, key)
	}, cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.nodes = append(r.nodes, n)
	n.waitSubscribed()
	return n
}

func (n *rigNode) onEvent(e refill.Event) {
	count, _ := n.events.LoadOrStore(e.Kind, new(atomic.Int64))
	count.(*atomic.Int64).Add(1)
	if e.Kind == refill.EventStoreUp {
		select {
		case n.up <- struct{}{}:
		default:
		}
	}
}

func (n *rigNode) waitSubscribed() {
	n.t.Helper()
	select {
	case <-n.up:
	case <-time.After(waitLimit):
		n.t.Fatal("the node did not subscribe")
	}
}

// count returns how often OnEvent was called with this kind of event.
func (n *rigNode) count(k refill.EventKind) int64 {
	count, _ := n.events.LoadOrStore(k, new(atomic.Int64))
	return count.(*atomic.Int64).Load()
}

// gets fails the test unless GetResult returns this value with one of these outcomes. Without outcomes, any outcome
// is right.
func (n *rigNode) gets(key, want string, outcomes ...refill.Outcome) {
	n.t.Helper()
	r, err := n.GetResult(n.t.Context(), key)
	right := len(outcomes) == 0
	for _, outcome := range outcomes {
		right = right || r.Outcome == outcome
	}
	if err != nil || r.Value != want || !right {
		n.t.Errorf("Get(%q): %q (%v), %v; want %q, %v", key, r.Value, r.Outcome, err, want, outcomes)
	}
}

// end closes everything, and checks that nothing is left behind: no key without a TTL, no lease or claim, no
// connection, no goroutine.
func (r *rig) end() {
	r.proxy.Heal()
	for _, n := range r.nodes {
		if err := n.Close(); err != nil {
			r.t.Error(err)
		}
		n.client.Close()
	}
	ctx := context.Background()
	r.gone("leases, claims or keys without a TTL", func() (left []string) {
		for _, key := range r.rdb.Keys(ctx, "*").Val() {
			if strings.Contains(key, "/lease:") || r.rdb.PTTL(ctx, key).Val() == -1 {
				left = append(left, key)
			}
		}
		return left
	})
	r.gone("connections", func() (left []string) {
		for line := range strings.Lines(r.rdb.ClientList(ctx).Val()) {
			if !strings.Contains(line, "cmd=client|list") {
				left = append(left, line)
			}
		}
		return left
	})
	r.rdb.Close()
	r.gone("goroutines", func() (left []string) {
		for _, g := range goroutines() {
			// These are the goroutines of refill, go-redis and ristretto. Goroutines of the test do not count.
			ours := strings.Contains(g, "refill-go/refill.") || strings.Contains(g, "refill/backend") ||
				strings.Contains(g, "redis/go-redis") || strings.Contains(g, "ristretto")
			if ours && !strings.Contains(g, "(*rig).end") && !r.before[idOf(g)] {
				left = append(left, g)
			}
		}
		return left
	})
}

// goroutines returns the stacks of all goroutines. The first line of a stack names the goroutine.
func goroutines() []string {
	buf := make([]byte, 1<<20)
	return strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
}

// idOf returns the name of a goroutine, for instance "goroutine 7".
func idOf(stack string) string {
	id, _, _ := strings.Cut(stack, " [")
	return id
}

// gone waits until find returns nothing. After waitLimit it fails the test.
func (r *rig) gone(what string, find func() []string) {
	var left []string
	if !eventually(func() bool { left = find(); return len(left) == 0 }) {
		r.t.Errorf("%s are left behind: %s", what, strings.Join(left, "\n"))
	}
}

// scriptSource returns the source of a script without the part that all scripts share.
func scriptSource(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "backend", "goredis", "lua", name+".lua"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// loadScripts loads the scripts of a refill into the server, so that the first EVALSHA finds its script. loadScripts
// returns the hashes of the scripts, by the names of the scripts.
func (r *rig) loadScripts() map[string]string {
	r.t.Helper()
	hashes := map[string]string{}
	for _, name := range []string{"acquire", "renew", "publish", "fail", "release", "invalidate", "expire"} {
		hash, err := r.rdb.ScriptLoad(r.t.Context(), scriptSource(r.t, "common")+scriptSource(r.t, name)).Result()
		if err != nil {
			r.t.Fatalf("script %s: %v", name, err)
		}
		hashes[name] = hash
	}
	return hashes
}

// The server executes one step of node a, and the reply is lost. Each step is tested with a client of node a that
// retries, and with a client that does not. Every Get must be answered, node b must not wait, and nothing may be left
// behind.
func TestLostReplies(t *testing.T) {
	for _, retries := range []int{0, -1} { // MaxRetries: 0 = three retries, the default of go-redis; -1 = none
		for _, c := range lostReplies {
			t.Run(fmt.Sprintf("%s, MaxRetries %d", c.step, retries), func(t *testing.T) {
				r := newRig(t)
				hashes := r.loadScripts()
				cfg := refill.Config{
					TTL: c.ttl, StaleFor: c.staleFor, LockTTL: 400 * time.Millisecond, ErrorTTL: 100 * time.Millisecond,
				}
				a := r.node(redis.Options{Addr: r.proxy.Addr(), MaxRetries: retries}, cfg)
				b := r.node(redis.Options{}, cfg)
				if c.before != nil {
					c.before(a)
				}
				match := []string{"nx"}
				if c.step != "lease" { // all other steps are scripts, which the Store sends by their source or by their hash
					match = []string{hashes[c.step], scriptSource(t, c.step)}
				}
				lost := r.proxy.LoseReply(match...)
				c.run(a, retries == 0)
				select {
				case <-lost:
				case <-time.After(waitLimit):
					t.Fatal("no reply was lost")
				}
				if c.after != nil {
					c.after(a, b, retries == 0)
				}
				invalidated := c.step == "invalidate" || c.step == "expire" // a late retry may remove the claim of a running load
				if a.count(refill.EventPublishRejected) > 0 && !invalidated {
					t.Error("a publish was rejected although no other node has taken the claim")
				}
			})
		}
	}
}

// lostReplies lists, for each step, what node a does while the reply is lost (run), and checks afterwards (after).
var lostReplies = []struct {
	step          string
	ttl, staleFor time.Duration // 0 = a minute for ttl, none for staleFor
	before        func(a *rigNode)
	run           func(a *rigNode, retried bool)
	after         func(a, b *rigNode, retried bool)
}{
	{
		step: "lease", // the SET NX of a background refresh
		ttl:  500 * time.Millisecond, staleFor: time.Minute,
		before: (*rigNode).getThenChange,
		run: func(a *rigNode, _ bool) {
			if !eventually(func() bool { r, _ := a.GetResult(a.t.Context(), "k"); return r.Outcome == refill.OutcomeStale }) ||
				!eventually(func() bool { v, _ := a.Get(a.t.Context(), "k"); return v == "new" }) {
				a.t.Error("the value did not become stale, or was not refreshed")
			}
		},
		after: func(a, _ *rigNode, retried bool) {
			if a.count(refill.EventPublished) < 2 && retried {
				a.t.Error("the refresh did not recognize its own lease")
			}
		},
	},
	{
		step: "acquire", // if its client does not retry, a loads without a lease, and releases the lease that it may have
		run:  func(a *rigNode, _ bool) { a.gets("k", "k", refill.OutcomeLoaded) },
		after: func(a, b *rigNode, retried bool) {
			b.gets("k", "k")
			if want := map[bool]int64{true: 1, false: 2}[retried]; a.loads.Load()+b.loads.Load() != want {
				a.t.Errorf("%d loads here, %d there", a.loads.Load(), b.loads.Load())
			}
		},
	},
	{
		step: "renew",
		before: func(a *rigNode) {
			a.load = func(context.Context, string) (string, error) {
				<-time.After(time.Second) // longer than twice LockTTL, so the lease must be renewed
				return "slow", nil
			}
		},
		run: func(a *rigNode, _ bool) { a.gets("k", "slow", refill.OutcomeLoaded) },
		after: func(a, b *rigNode, _ bool) {
			b.gets("k", "slow", refill.OutcomeShared)
			if n := a.count(refill.EventLeaseLost); n != 0 {
				a.t.Errorf("the lease was lost %d times, want a retry of the renewal", n)
			}
		},
	},
	{
		step: "publish",
		run:  func(a *rigNode, _ bool) { a.gets("k", "k", refill.OutcomeLoaded) },
		after: func(a, b *rigNode, _ bool) {
			b.gets("k", "k", refill.OutcomeShared)
			a.gets("k", "k", refill.OutcomeHit, refill.OutcomeShared)
		},
	},
	{
		step: "fail",
		before: func(a *rigNode) {
			a.load = func(context.Context, string) (string, error) { return "", errors.New("the database is down") }
		},
		run: func(a *rigNode, _ bool) {
			if _, err := a.Get(a.t.Context(), "k"); err == nil || !strings.Contains(err.Error(), "the database is down") {
				a.t.Errorf("%v", err)
			}
		},
		after: func(_, b *rigNode, _ bool) {
			b.gets("k", "k", refill.OutcomeLoaded) // the failure holds back only node a, so b may load at once
		},
	},
	{
		step: "release",
		before: func(a *rigNode) {
			a.load = func(ctx context.Context, key string) (string, error) {
				fill := refill.FillFrom(ctx)
				fill.NoStore()
				fill.SetTTL(0) // the store keeps no value
				return key, nil
			}
		},
		run: func(a *rigNode, _ bool) { a.gets("k", "k", refill.OutcomeLoaded) },
		after: func(a, b *rigNode, _ bool) {
			if left := a.client.Keys(a.t.Context(), "*/*").Val(); len(left) > 0 {
				a.t.Errorf("%v are left behind", left)
			}
			b.gets("k", "k", refill.OutcomeLoaded)
		},
	},
	{
		step: "invalidate", before: (*rigNode).getThenChange,
		run: invalidateUnanswered((*refill.Loader[string]).Invalidate), after: isInvalidated,
	},
	{
		step: "expire", before: (*rigNode).getThenChange,
		run: invalidateUnanswered((*refill.Loader[string]).Expire), after: isInvalidated,
	},
}

// getThenChange gets k, and then lets the load function return another value.
func (n *rigNode) getThenChange() {
	n.gets("k", "k")
	n.load = func(context.Context, string) (string, error) { return "new", nil }
}

// invalidateUnanswered returns a run function that calls Invalidate or Expire. The call must return an error unless
// the client retries the request whose reply was lost.
func invalidateUnanswered(
	invalidate func(*refill.Loader[string], context.Context, ...string) error,
) func(*rigNode, bool) {
	return func(a *rigNode, retried bool) {
		if err := invalidate(a.Loader, a.t.Context(), "k"); retried && err != nil {
			a.t.Errorf("%v although the client retries", err)
		} else if !retried && err == nil {
			a.t.Error("there is no error although the reply was lost")
		}
		a.gets("k", "new")
	}
}

func isInvalidated(a, b *rigNode, retried bool) {
	b.load = a.load // the same database
	b.gets("k", "new")
	if !retried && !eventually(func() bool { return a.count(refill.EventInvalidateRetried) == 1 }) {
		a.t.Error("the invalidation was not retried")
	}
}

// Node b's messages of the subscription are lost unnoticed. After LocalTTL, node b must no longer serve an
// invalidated value from L1. A caller on node b that waits for a load of node a must get that load's value. Node b
// itself must not load.
func TestLostMessages(t *testing.T) {
	r := newRig(t)
	const localTTL = 300 * time.Millisecond
	cfg := refill.Config{LockTTL: time.Second, LocalTTL: localTTL}
	a := r.node(redis.Options{}, cfg)
	b := r.node(redis.Options{Addr: r.proxy.Addr()}, cfg)
	a.gets("k", "k")
	b.gets("k", "k")
	b.gets("k", "k", refill.OutcomeHit)
	r.proxy.LoseMessages("RN1 ")
	a.load = func(context.Context, string) (string, error) { return "new", nil }
	if err := a.Invalidate(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	a.gets("k", "new")
	if !eventually(func() bool { v, _ := b.Get(t.Context(), "k"); return v == "new" }) {
		t.Error("L1 still has the old value after LocalTTL")
	}
	loading, goOn := make(chan struct{}), make(chan struct{})
	a.load = func(context.Context, string) (string, error) {
		close(loading)
		<-goOn
		return "waited for", nil
	}
	go func() { _, _ = a.Get(context.Background(), "other") }()
	<-loading
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.gets("other", "waited for")
	}()
	eventually(func() bool { return r.server.Commandstats(t)["append"] > 0 }) // until b has registered as a waiter
	close(goOn)
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Error("a waiter whose announcement was lost waits longer than the lease lasts")
	}
	if b.loads.Load() > 0 {
		t.Errorf("%d loads by the node that received no announcement", b.loads.Load())
	}
}

// A reply to node b, and then a message of its subscription, is cut in the middle. Node b must not take a value from
// half a record, and must continue over a new connection.
func TestCutReplies(t *testing.T) {
	value := strings.Repeat("0123456789", driver.MaxAnnouncedRecord/10) // too large for its announcement
	for _, bytes := range []int{0, 1, 10, 60, 110, 4000} {
		t.Run(fmt.Sprint(bytes, " bytes"), func(t *testing.T) {
			r := newRig(t)
			a, b := r.node(redis.Options{}, refill.Config{}), r.node(redis.Options{Addr: r.proxy.Addr()}, refill.Config{})
			a.load = func(context.Context, string) (string, error) { return value, nil }
			b.load = a.load
			a.gets("k", value)
			cut := r.proxy.CutReply("RF1", bytes) // every record begins with RF1
			b.gets("k", value, refill.OutcomeShared)
			<-cut
			cut = r.proxy.CutReply("RN1", bytes) // every announcement begins with RN1
			if err := a.Invalidate(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			<-cut
			b.waitSubscribed() // b must subscribe again
			a.gets("k", value)
			b.gets("k", value, refill.OutcomeShared, refill.OutcomeHit, refill.OutcomeLoadedElsewhere)
			if n := b.count(refill.EventBadRecord); n > 0 {
				t.Errorf("%d half records were decoded as records", n)
			}
		})
	}
}

// Everything that Redis sends to node b is 100 ms late. After an Invalidate on node a, node b must at some moment serve
// the new value. From then on, no late message may bring the old value back.
func TestDelayedMessages(t *testing.T) {
	r := newRig(t)
	a, b := r.node(redis.Options{}, refill.Config{}), r.node(redis.Options{Addr: r.proxy.Addr()}, refill.Config{})
	b.gets("k", "k")
	r.proxy.Delay(100 * time.Millisecond) // within StoreTimeout
	for i := range 5 {
		want := fmt.Sprint("new ", i)
		a.load = func(context.Context, string) (string, error) { return want, nil }
		b.load = a.load
		if err := a.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		a.gets("k", want)
		for range 3 { // b must not return to the old value
			if !eventually(func() bool { v, err := b.Get(t.Context(), "k"); return err == nil && v == want }) {
				t.Fatalf("b did not get %q", want)
			}
		}
	}
}

// The server restarts while the network to node b swallows everything, so b's connections are never closed. Node b
// must answer meanwhile. When the network is back, b must use Redis again.
func TestHalfOpenConnections(t *testing.T) {
	r := newRig(t)
	a, b := r.node(redis.Options{}, refill.Config{}), r.node(redis.Options{Addr: r.proxy.Addr()}, refill.Config{})
	b.gets("k", "k")
	r.proxy.BlackHole()
	r.server.Restart() // b does not learn that the server has closed its connections
	for i := range 20 {
		key := fmt.Sprint("new ", i)
		b.gets(key, key, refill.OutcomeLoaded)
		b.gets("k", "k")
	}
	a.waitSubscribed() // a must subscribe again
	r.proxy.Heal()
	b.waitSubscribed()
	a.gets("k", "k")
	b.load = func(context.Context, string) (string, error) { return "b's own", nil }
	tries := 0
	if !eventually(func() bool { // a command on a dead connection times out, and b then loads without a lease
		tries++
		key := fmt.Sprint("after ", tries)
		b.gets(key, "b's own", refill.OutcomeLoaded)
		r, err := a.GetResult(t.Context(), key)
		return err == nil && r.Value == "b's own" && r.Outcome == refill.OutcomeShared
	}) {
		t.Error("no value that b loaded reached a")
	}
}

// Redis is full. Nodes must still load and return values, and Invalidate must work. When Redis has memory again, a
// value of one node must reach the other node.
func TestFullRedis(t *testing.T) {
	r := newRig(t)
	cfg := refill.Config{TTL: 200 * time.Millisecond, StaleFor: time.Minute}
	a, b := r.node(redis.Options{}, cfg), r.node(redis.Options{}, cfg)
	a.gets("k", "k")
	b.gets("k", "k")
	if err := r.rdb.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		for _, n := range []*rigNode{a, b} {
			n.gets("k", "k")
			key := fmt.Sprint("new ", i)
			n.gets(key, key)
			if err := n.Invalidate(t.Context(), key); err != nil {
				t.Errorf("Invalidate, which frees memory, fails: %v", err)
			}
		}
	}
	r.rdb.ConfigSet(t.Context(), "maxmemory", "0")
	a.gets("last", "last", refill.OutcomeLoaded)
	b.gets("last", "last", refill.OutcomeShared)
}

// Redis is at maxmemory with noeviction, and 4 nodes ask at once for a key that Redis does not have. The refill lock
// must work: there must be one load, and every node must get the value of this load.
func TestFullRedisKeepsTheRefillLock(t *testing.T) {
	r := newRig(t)
	var nodes []*rigNode
	for range 4 {
		n := r.node(redis.Options{}, refill.Config{})
		n.load = func(_ context.Context, key string) (string, error) {
			<-time.After(300 * time.Millisecond)
			return key, nil
		}
		nodes = append(nodes, n)
	}
	if err := r.rdb.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for _, n := range nodes {
		wg.Go(func() { n.gets("k", "k") })
	}
	wg.Wait()
	loads := int64(0)
	for _, n := range nodes {
		loads += n.loads.Load()
		if errs := n.count(refill.EventStoreError); errs > 0 {
			t.Errorf("%d errors of the store", errs)
		}
	}
	if loads != 1 {
		t.Errorf("%d loads by 4 nodes, want 1", loads)
	}
}

// The test writes foreign bytes, damaged records and records of another version under refill's keys. Such a value
// must count as a miss. A foreign lease or claim must count as absent.
func TestForeignBytes(t *testing.T) {
	r := newRig(t)
	a, b := r.node(redis.Options{}, refill.Config{}), r.node(redis.Options{}, refill.Config{})
	a.gets("k", "k")
	keys := r.rdb.Keys(t.Context(), "*").Val()
	if len(keys) != 1 {
		t.Fatal(keys)
	}
	value := keys[0] // prefix:{b}:name:key
	record := r.rdb.Get(t.Context(), value).Val()
	damaged := []byte(record)
	damaged[len(damaged)-1] ^= 1
	ctx := t.Context()
	plants := map[string]func(){
		"nothing":            func() { r.rdb.Set(ctx, value, "", 0) },
		"text":               func() { r.rdb.Set(ctx, value, "hello", 0) },
		"the older version":  func() { r.rdb.Set(ctx, value, "RF0"+record[3:], 0) },
		"a future version":   func() { r.rdb.Set(ctx, value, "RF2"+record[3:], 0) },
		"a damaged record":   func() { r.rdb.Set(ctx, value, damaged, 0) },
		"half a record":      func() { r.rdb.Set(ctx, value, record[:len(record)/2], 0) },
		"a list":             func() { r.rdb.RPush(ctx, value, "x") },
		"a lease for ever":   func() { r.rdb.Set(ctx, part(value, "lease"), "other#1", 0) },
		"a lease of a list":  func() { r.rdb.RPush(ctx, part(value, "lease"), "x") },
		"a claim for ever":   func() { r.rdb.Set(ctx, part(value, "claim"), "other#1", 0) },
		"a claim of a list":  func() { r.rdb.RPush(ctx, part(value, "claim"), "x") },
		"a back-off of junk": func() { r.rdb.Set(ctx, part(value, "lease"), "!{", 50*time.Millisecond) },
	}
	for name, plant := range plants {
		t.Run(name, func(t *testing.T) {
			if err := a.Invalidate(ctx, "k"); err != nil {
				t.Fatal(err)
			}
			eventually(func() bool { _, found := b.Peek(ctx, "k"); return !found })
			plant()
			if strings.Contains(name, "junk") {
				if _, err := a.Get(ctx, "k"); err == nil {
					t.Error("a back-off was ignored")
				}
				eventually(func() bool { _, err := a.Get(ctx, "k"); return err == nil })
			}
			loads := a.loads.Load() + b.loads.Load()
			a.gets("k", "k", refill.OutcomeLoaded, refill.OutcomeHit)
			b.gets("k", "k", refill.OutcomeShared, refill.OutcomeHit)
			if n := a.loads.Load() + b.loads.Load() - loads; n > 1 {
				t.Errorf("%d loads", n)
			}
		})
	}
}

// part takes the Redis key of a value, and returns the Redis key of the lease or claim of the same key.
func part(value, name string) string {
	i := strings.LastIndex(value, ":")
	return value[:i] + "/" + name + value[i:]
}

// A process is frozen during its load until another node has taken over the lease, and then continues. The value of the
// frozen process must not be stored, whether or not the new holder has already published its own value.
func TestFrozenLoader(t *testing.T) {
	for _, done := range []bool{true, false} {
		t.Run(fmt.Sprintf("the new holder has published %v", done), func(t *testing.T) {
			r := newRig(t)
			args := fleetArgs{
				Addr: r.server.Addr(), Callers: 5,
				TTL: time.Minute, LockTTL: 500 * time.Millisecond, Load: 300 * time.Millisecond,
			}
			frozen := StartChild(t, "fleet", args)
			var line fleetLine
			frozen.Next(&line)
			r.rdb.RPush(t.Context(), "go", 1)
			frozen.Next(&line)
			frozen.Freeze()
			at := time.Now()
			holder, began, goOn := newHolder(t, r, args)
			got := make(chan string)
			go func() {
				v, err := holder.Get(context.Background(), "hot")
				got <- fmt.Sprint(v, err)
			}()
			took := (<-began).Sub(at)
			t.Logf("result: taken over %v after the freeze, LockTTL 500 ms", took.Round(time.Millisecond))
			if took > args.LockTTL+500*time.Millisecond {
				t.Errorf("taken over after %v, want LockTTL + 500 ms at most", took)
			}
			if done {
				close(goOn)
				<-got
			}
			frozen.Thaw()
			for !line.Rejected {
				frozen.Next(&line)
			}
			if !done {
				if _, found := holder.Peek(t.Context(), "hot"); found {
					t.Error("the frozen process stored its value while the new holder was loading")
				}
				close(goOn) // lets the new holder finish; callers of the thawed process may wait for that load
				<-got
			}
			for line.Done == nil {
				frozen.Next(&line)
			}
			if line.Done.Failed > 0 {
				t.Errorf("%d callers of the frozen load failed: %v", line.Done.Failed, line.Done.Errors)
			}
			third, _, _ := newHolder(t, r, args)
			v, err := third.GetResult(t.Context(), "hot")
			if err != nil || v.Value != "newer" || v.Outcome != refill.OutcomeShared {
				t.Errorf("%+v, %v: want the value of the new holder", v, err)
			}
		})
	}
}

// newHolder returns another node of the fleet. The load of that node sends to began, and then waits until goOn is
// closed.
func newHolder(
	t *testing.T, r *rig, args fleetArgs,
) (l *refill.Loader[string], began chan time.Time, goOn chan struct{}) {
	t.Helper()
	began, goOn = make(chan time.Time, 1), make(chan struct{})
	rdb := redis.NewClient(&redis.Options{Addr: r.server.Addr(), ContextTimeoutEnabled: true})
	l, err := refill.New("fleet", func(context.Context, string) (string, error) {
		began <- time.Now()
		<-goOn
		return "newer", nil
	}, refill.Config{TTL: args.TTL, LockTTL: args.LockTTL, Shared: goredis.New(rdb)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		rdb.Close()
	})
	return l, began, goOn
}

func init() { Child("locker", lockerNode) }

// lockerNode acquires a lock and waits until the lock is lost. Then it writes what Release returns.
func lockerNode(ctx context.Context, raw json.RawMessage, out *json.Encoder) error {
	var addr string
	if err := json.Unmarshal(raw, &addr); err != nil {
		return err
	}
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	defer rdb.Close()
	locks, err := refill.NewLocker("job", goredis.New(rdb), refill.LockConfig{TTL: 500 * time.Millisecond})
	if err != nil {
		return err
	}
	lock, err := locks.Lock(ctx, "cron")
	if err != nil {
		return err
	}
	if err := out.Encode(lock.Fence()); err != nil {
		return err
	}
	select {
	case <-lock.Lost():
	case <-ctx.Done():
	}
	return out.Encode(fmt.Sprint(lock.Release(context.Background())))
}

// The holder of a lock is frozen, and a second holder acquires the lock. When the first holder continues, its Lock must
// report the loss. The fence of the first holder must be smaller than the fence of the second holder.
func TestFrozenHolderOfALock(t *testing.T) {
	r := newRig(t)
	child := StartChild(t, "locker", r.server.Addr())
	var fence uint64
	child.Next(&fence)
	child.Freeze()
	at := time.Now()
	const ttl = 500 * time.Millisecond
	locks, err := refill.NewLocker("job", goredis.New(r.rdb), refill.LockConfig{TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	lock, err := locks.Lock(t.Context(), "cron")
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(at)
	t.Logf("result: taken over %v after the freeze, TTL 500 ms", took.Round(time.Millisecond))
	if took > ttl+500*time.Millisecond {
		t.Errorf("taken over after %v, want TTL + 500 ms at most", took)
	}
	if lock.Fence() <= fence {
		t.Errorf("fence %d after %d", lock.Fence(), fence)
	}
	child.Thaw()
	var released string
	child.Next(&released)
	if released != refill.ErrLost.Error() {
		t.Errorf("Release of the frozen holder: %s", released)
	}
	if err := lock.Release(t.Context()); err != nil {
		t.Errorf("the frozen holder released the lock of the new one: %v", err)
	}
}
