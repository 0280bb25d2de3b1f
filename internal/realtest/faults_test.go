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
)

// This file harms Loaders over a real Redis, one fault at a time, and demands that nothing is left behind by any.

// rig is some nodes over one Redis, and what they leave behind.
type rig struct {
	t      *testing.T
	server *Redis
	proxy  *Proxy // in front of the server, for those who are to be harmed
	rdb    *redis.Client
	nodes  []*rigNode
	before map[string]bool // goroutines that other tests left
}

// rigNode is a Loader with a client of its own, and a database that counts.
type rigNode struct {
	*refill.Loader[string]
	t      *testing.T
	client *redis.Client
	up     chan struct{} // announcements are heard
	heard  sync.Map      // refill.EventKind → *atomic.Int64
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

// node adds a node; through the proxy if o.Addr says so. It returns when announcements are heard.
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
	cfg.Shared, cfg.Jitter, cfg.OnEvent = goredis.New(n.client), -1, n.hear
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
	n.isUp()
	return n
}

func (n *rigNode) hear(e refill.Event) {
	count, _ := n.heard.LoadOrStore(e.Kind, new(atomic.Int64))
	count.(*atomic.Int64).Add(1)
	if e.Kind == refill.EventStoreUp {
		select {
		case n.up <- struct{}{}:
		default:
		}
	}
}

func (n *rigNode) isUp() {
	n.t.Helper()
	select {
	case <-n.up:
	case <-time.After(waitLimit):
		n.t.Fatal("announcements are not heard")
	}
}

// events is how often a node told of something.
func (n *rigNode) events(k refill.EventKind) int64 {
	count, _ := n.heard.LoadOrStore(k, new(atomic.Int64))
	return count.(*atomic.Int64).Load()
}

// gets demands a value, and how it came.
func (n *rigNode) gets(key, want string, how ...refill.EventKind) {
	n.t.Helper()
	r, err := n.GetResult(n.t.Context(), key)
	right := len(how) == 0
	for _, kind := range how {
		right = right || r.Outcome == kind
	}
	if err != nil || r.Value != want || !right {
		n.t.Errorf("Get(%q): %q (%v), %v; want %q, %v", key, r.Value, r.Outcome, err, want, how)
	}
}

// end closes everything and demands that nothing is left: no key without an end, no lease or claim, no connection, no
// goroutine.
func (r *rig) end() {
	r.proxy.Heal()
	for _, n := range r.nodes {
		if err := n.Close(); err != nil {
			r.t.Error(err)
		}
		n.client.Close()
	}
	ctx := context.Background()
	r.gone("leases, claims or keys without an end", func() (left []string) {
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
			// Ours, and those of go-redis and ristretto that we caused; not the test's own.
			ours := strings.Contains(g, "refill-go/refill.") || strings.Contains(g, "refill/backend") ||
				strings.Contains(g, "redis/go-redis") || strings.Contains(g, "ristretto")
			if ours && !strings.Contains(g, "(*rig).end") && !r.before[idOf(g)] {
				left = append(left, g)
			}
		}
		return left
	})
}

// goroutines are the stacks of all, each with a first line that names it.
func goroutines() []string {
	buf := make([]byte, 1<<20)
	return strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
}

// idOf is the name of a goroutine: "goroutine 7".
func idOf(stack string) string {
	id, _, _ := strings.Cut(stack, " [")
	return id
}

// gone waits until nothing is left.
func (r *rig) gone(what string, find func() []string) {
	var left []string
	if !eventually(func() bool { left = find(); return len(left) == 0 }) {
		r.t.Errorf("%s are left behind: %s", what, strings.Join(left, "\n"))
	}
}

// warm lets the server learn all scripts of a fill, so that the first request that names one runs it. It returns by what
// hash each is called.
func (r *rig) warm() map[string]string {
	r.t.Helper()
	source := func(name string) string {
		text, err := os.ReadFile(filepath.Join("..", "..", "backend", "goredis", "lua", name+".lua"))
		if err != nil {
			r.t.Fatal(err)
		}
		return string(text)
	}
	hashes := map[string]string{}
	for _, name := range []string{"begin", "renew", "publish", "fail", "release", "invalidate", "expire"} {
		hash, err := r.rdb.ScriptLoad(r.t.Context(), source("common")+source(name)).Result()
		if err != nil {
			r.t.Fatalf("script %s: %v", name, err)
		}
		hashes[name] = hash
	}
	return hashes
}

// The reply to one step is lost after the server carried it out; with a client that tries again, and with one that does
// not. Every Get has its answer, the other node is not kept waiting, nothing is left behind.
func TestLostReplies(t *testing.T) {
	for _, retries := range []int{0, -1} { // 0 = go-redis' default, 3
		for _, c := range lostReplies {
			t.Run(fmt.Sprintf("%s, MaxRetries %d", c.step, retries), func(t *testing.T) {
				r := newRig(t)
				hashes := r.warm()
				cfg := refill.Config{TTL: c.ttl, StaleFor: c.staleFor, LockTTL: 400 * time.Millisecond, ErrorTTL: 100 * time.Millisecond}
				a := r.node(redis.Options{Addr: r.proxy.Addr(), MaxRetries: retries}, cfg)
				b := r.node(redis.Options{}, cfg)
				if c.before != nil {
					c.before(a)
				}
				match := "nx"
				if c.step != "lease" {
					match = hashes[c.step]
				}
				lost := r.proxy.LoseReply(match)
				c.run(a, retries == 0)
				select {
				case <-lost:
				case <-time.After(waitLimit):
					t.Fatal("no reply was lost")
				}
				if c.after != nil {
					c.after(a, b, retries == 0)
				}
				voided := c.step == "invalidate" || c.step == "expire" // at a second try, perhaps in the middle of the fill
				if a.events(refill.EventRefused) > 0 && !voided {
					t.Error("a fill was told that it was refused: nobody came between")
				}
			})
		}
	}
}

// lostReplies says for each step what to do on node a while its reply is lost, and what holds after.
var lostReplies = []struct {
	step          string
	ttl, staleFor time.Duration // 0 = a minute, and none
	before        func(a *rigNode)
	run           func(a *rigNode, retried bool)
	after         func(a, b *rigNode, retried bool)
}{
	{
		step: "lease", // of a refresh
		ttl:  500 * time.Millisecond, staleFor: time.Minute,
		before: (*rigNode).warmed,
		run: func(a *rigNode, _ bool) {
			if !eventually(func() bool { r, _ := a.GetResult(a.t.Context(), "k"); return r.Outcome == refill.EventStale }) ||
				!eventually(func() bool { v, _ := a.Get(a.t.Context(), "k"); return v == "new" }) {
				a.t.Error("it does not become stale, or is not refreshed then")
			}
		},
		after: func(a, _ *rigNode, retried bool) {
			if a.events(refill.EventPublished) < 2 && retried {
				a.t.Error("the refresh did not know its own lease")
			}
		},
	},
	{
		step: "begin", // without a retry a loads for itself alone, and gives the lease back that it may have
		run:  func(a *rigNode, _ bool) { a.gets("k", "k", refill.EventLed) },
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
				<-time.After(time.Second) // longer than two lives of the lock
				return "slow", nil
			}
		},
		run: func(a *rigNode, _ bool) { a.gets("k", "slow", refill.EventLed) },
		after: func(a, b *rigNode, _ bool) {
			b.gets("k", "slow", refill.EventShared)
			if n := a.events(refill.EventLeaseLost); n != 0 {
				a.t.Errorf("the lease was lost %d times: a renewal is tried again", n)
			}
		},
	},
	{
		step: "publish",
		run:  func(a *rigNode, _ bool) { a.gets("k", "k", refill.EventLed) },
		after: func(a, b *rigNode, _ bool) {
			b.gets("k", "k", refill.EventShared)
			a.gets("k", "k", refill.EventHit, refill.EventShared)
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
			if _, err := b.Get(b.t.Context(), "k"); err == nil || b.loads.Load() > 0 {
				b.t.Errorf("%v, %d loads: the back-off was left before the reply was lost", err, b.loads.Load())
			}
			eventually(func() bool { _, err := b.Get(b.t.Context(), "k"); return err == nil })
			b.gets("k", "k")
		},
	},
	{
		step: "release",
		before: func(a *rigNode) {
			a.load = func(ctx context.Context, key string) (string, error) {
				fill := refill.FillFrom(ctx)
				fill.NoStore()
				fill.SetTTL(0) // nothing is left in the store
				return key, nil
			}
		},
		run: func(a *rigNode, _ bool) { a.gets("k", "k", refill.EventLed) },
		after: func(a, b *rigNode, _ bool) {
			if left := a.client.Keys(a.t.Context(), "*/*").Val(); len(left) > 0 {
				a.t.Errorf("%v are still there", left)
			}
			b.gets("k", "k", refill.EventLed)
		},
	},
	{"invalidate", 0, 0, (*rigNode).warmed, voidLost((*refill.Loader[string]).Invalidate), voidDone},
	{"expire", 0, 0, (*rigNode).warmed, voidLost((*refill.Loader[string]).Expire), voidDone},
}

func (n *rigNode) warmed() {
	n.gets("k", "k")
	n.load = func(context.Context, string) (string, error) { return "new", nil }
}

func voidLost(void func(*refill.Loader[string], context.Context, ...string) error) func(*rigNode, bool) {
	return func(a *rigNode, retried bool) {
		if err := void(a.Loader, a.t.Context(), "k"); retried && err != nil {
			a.t.Errorf("%v: the client tries again", err)
		} else if !retried && err == nil {
			a.t.Error("nobody knows what became of it, and there is no error")
		}
		a.gets("k", "new")
	}
}

func voidDone(a, b *rigNode, retried bool) {
	b.load = a.load // the same database
	b.gets("k", "new")
	if !retried && !eventually(func() bool { return a.events(refill.EventVoidRetried) == 1 }) {
		a.t.Error("it was not tried again")
	}
}

// Messages of the subscription are lost and nobody notices: waiters look again when the lease that they wait for is over,
// L1 after LocalTTL.
func TestLostMessages(t *testing.T) {
	r := newRig(t)
	const localTTL = 300 * time.Millisecond
	cfg := refill.Config{LockTTL: time.Second, LocalTTL: localTTL}
	a := r.node(redis.Options{}, cfg)
	b := r.node(redis.Options{Addr: r.proxy.Addr()}, cfg)
	a.gets("k", "k")
	b.gets("k", "k")
	b.gets("k", "k", refill.EventHit)
	r.proxy.LoseMessages("RN1 ")
	a.load = func(context.Context, string) (string, error) { return "new", nil }
	if err := a.Invalidate(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	a.gets("k", "new")
	if !eventually(func() bool { v, _ := b.Get(t.Context(), "k"); return v == "new" }) {
		t.Error("L1 does not follow within LocalTTL")
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
	eventually(func() bool { return r.server.Commandstats(t)["append"] > 0 }) // b waits for a's lease
	close(goOn)
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Error("a waiter whose message was lost waits longer than the lease lives")
	}
	if b.loads.Load() > 0 {
		t.Errorf("%d loads by the node that heard nothing", b.loads.Load())
	}
}

// A reply, or a message of the subscription, that is cut in the middle is none: no value is taken from half a record, and
// the node goes on over a new connection.
func TestCutReplies(t *testing.T) {
	value := strings.Repeat("0123456789", refill.MaxNoteRecord/10) // does not travel with its announcement
	for _, bytes := range []int{0, 1, 10, 60, 110, 4000} {
		t.Run(fmt.Sprint(bytes, " bytes"), func(t *testing.T) {
			r := newRig(t)
			a, b := r.node(redis.Options{}, refill.Config{}), r.node(redis.Options{Addr: r.proxy.Addr()}, refill.Config{})
			a.load = func(context.Context, string) (string, error) { return value, nil }
			b.load = a.load
			a.gets("k", value)
			cut := r.proxy.CutReply("RF1", bytes) // of a record
			b.gets("k", value, refill.EventShared)
			<-cut
			cut = r.proxy.CutReply("RN1", bytes) // of an announcement
			if err := a.Invalidate(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			<-cut
			b.isUp() // again
			a.gets("k", value)
			b.gets("k", value, refill.EventShared, refill.EventHit, refill.EventWaited)
			if n := b.events(refill.EventBadRecord); n > 0 {
				t.Errorf("%d half records were taken for records", n)
			}
		})
	}
}

// Messages come late: what was invalidated is served on until then, and not after; nothing old comes back with them.
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
		for range 3 { // once it has followed, it stays
			if !eventually(func() bool { v, err := b.Get(t.Context(), "k"); return err == nil && v == want }) {
				t.Fatalf("it does not follow to %q", want)
			}
		}
	}
}

// The server dies behind a network that swallows everything: connections that nobody ends. The node answers meanwhile, and
// is back when the network is.
func TestHalfOpenConnections(t *testing.T) {
	r := newRig(t)
	a, b := r.node(redis.Options{}, refill.Config{}), r.node(redis.Options{Addr: r.proxy.Addr()}, refill.Config{})
	b.gets("k", "k")
	r.proxy.BlackHole()
	r.server.Restart() // b's connections are open on its side only
	for i := range 20 {
		key := fmt.Sprint("new ", i)
		b.gets(key, key, refill.EventLed)
		b.gets("k", "k")
	}
	a.isUp() // again
	r.proxy.Heal()
	b.isUp()
	a.gets("k", "k")
	b.load = func(context.Context, string) (string, error) { return "b's own", nil }
	tries := 0
	if !eventually(func() bool { // what goes into a connection that is dead costs a time-out and is loaded for b alone
		tries++
		key := fmt.Sprint("after ", tries)
		b.gets(key, "b's own", refill.EventLed)
		r, err := a.GetResult(t.Context(), key)
		return err == nil && r.Value == "b's own" && r.Outcome == refill.EventShared
	}) {
		t.Error("what b loads does not reach a")
	}
}

// A Redis without room: values are loaded and handed out, nobody is kept waiting, and it heals.
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
				t.Errorf("Invalidate frees memory, and fails: %v", err)
			}
		}
	}
	r.rdb.ConfigSet(t.Context(), "maxmemory", "0")
	a.gets("last", "last", refill.EventLed)
	b.gets("last", "last", refill.EventShared)
}

// Foreign and damaged bytes under our keys, and records of another version, are a miss; a foreign lease or claim is none.
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
		"a lease for ever":   func() { r.rdb.Set(ctx, part(value, "lease"), "dead#1", 0) },
		"a lease of a list":  func() { r.rdb.RPush(ctx, part(value, "lease"), "x") },
		"a claim for ever":   func() { r.rdb.Set(ctx, part(value, "claim"), "dead#1", 0) },
		"a claim of a list":  func() { r.rdb.RPush(ctx, part(value, "claim"), "x") },
		"a back-off of junk": func() { r.rdb.Set(ctx, part(value, "lease"), "!{", 50*time.Millisecond) },
	}
	for name, plant := range plants {
		t.Run(name, func(t *testing.T) {
			if err := a.Invalidate(ctx, "k"); err != nil {
				t.Fatal(err)
			}
			eventually(func() bool { _, there := b.Peek(ctx, "k"); return !there })
			plant()
			if strings.Contains(name, "junk") {
				if _, err := a.Get(ctx, "k"); err == nil {
					t.Error("a back-off was ignored")
				}
				eventually(func() bool { _, err := a.Get(ctx, "k"); return err == nil })
			}
			loads := a.loads.Load() + b.loads.Load()
			a.gets("k", "k", refill.EventLed, refill.EventHit)
			b.gets("k", "k", refill.EventShared, refill.EventHit)
			if n := a.loads.Load() + b.loads.Load() - loads; n > 1 {
				t.Errorf("%d loads", n)
			}
		})
	}
}

// part is the key of a lease or claim beside that of a value.
func part(value, name string) string {
	i := strings.LastIndex(value, ":")
	return value[:i] + "/" + name + value[i:]
}

// A loader that was frozen past its lease, and goes on when another has taken over: what it loaded is not stored.
func TestFrozenLoader(t *testing.T) {
	for _, done := range []bool{true, false} {
		t.Run(fmt.Sprintf("the heir is done %v", done), func(t *testing.T) {
			r := newRig(t)
			args := fleetArgs{
				Addr: r.server.Addr(), Callers: 5, TTL: time.Minute, LockTTL: 500 * time.Millisecond, Load: 300 * time.Millisecond,
			}
			frozen := StartChild(t, "fleet", args)
			var said fleetSaid
			frozen.Next(&said)
			r.rdb.RPush(t.Context(), "go", 1)
			frozen.Next(&said)
			frozen.Freeze()
			at := time.Now()
			heir, began, goOn := heirOf(t, r, args)
			got := make(chan string)
			go func() {
				v, err := heir.Get(context.Background(), "hot")
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
			for said.Done == nil {
				frozen.Next(&said)
			}
			if said.Done.Failed > 0 {
				t.Errorf("%d callers of the frozen load failed: %v", said.Done.Failed, said.Done.Errors)
			}
			if !done {
				if _, there := heir.Peek(t.Context(), "hot"); there {
					t.Error("the frozen loader stored its value while its heir was loading")
				}
				close(goOn)
				<-got
			}
			third, _, _ := heirOf(t, r, args)
			if v, err := third.GetResult(t.Context(), "hot"); err != nil || v.Value != "newer" || v.Outcome != refill.EventShared {
				t.Errorf("%+v, %v: want the heir's value", v, err)
			}
		})
	}
}

// heirOf is another node of the fleet. Its loads wait for goOn.
func heirOf(t *testing.T, r *rig, args fleetArgs) (l *refill.Loader[string], began chan time.Time, goOn chan struct{}) {
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

// lockerNode holds a lock until it is lost, and says what its Release returns.
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

// A holder of a lock that is frozen is replaced; it learns of it when it goes on, and its fence is the smaller one.
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
		t.Errorf("Release of the frozen one: %s", released)
	}
	if err := lock.Release(t.Context()); err != nil {
		t.Errorf("the frozen one took the lock along: %v", err)
	}
}
