//go:build unix

package realtest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/internal/realtest"
)

// This file harms the servers under Loaders: masters that are replaced, slots that move, replicas, restarts, stalls. A
// server that is replaced may have acknowledged writes that its successor never saw. So two nodes may hold one lease;
// the promise is that this costs a load, and never a newer value.

// A farm is some nodes of a fleet in this process, each with a client of its own, and the database that they load from.
type farm struct {
	t       testing.TB
	base    time.Time
	version atomic.Int64  // what stands in the database, for every key
	took    time.Duration // by a load
	nodes   []*farmNode
	// hold, if set, is called within a load that has read its version, and may wait.
	hold func(n *farmNode, key string)

	mu    sync.Mutex // guards all below
	loads []farmLoad // in the order of their beginnings
}

// farmLoad is one load. ended is zero while it runs.
type farmLoad struct {
	node         *farmNode
	key          string
	began, ended time.Time
}

type farmNode struct {
	*refill.Loader[string]
	name  string
	rdb   redis.UniversalClient
	store *goredis.Store
	cfg   refill.Config

	mu     sync.Mutex // guards all below
	events map[refill.EventKind]int
	errors map[string][]time.Time // by key: when the store did not answer
	up     bool                   // announcements are heard
	texts  []string
}

// longTTL is that of keys that begin with "long": only a push, or a voiding, replaces them within a test.
const longTTL = time.Minute

// newFarm makes n nodes and waits until each hears announcements. At the end they have to close without complaint.
func newFarm(t testing.TB, n int, open func() redis.UniversalClient, cfg refill.Config) *farm {
	t.Helper()
	f := &farm{t: t, base: time.Now(), took: 20 * time.Millisecond}
	f.version.Store(1)
	for i := range n {
		node := &farmNode{name: string(rune('A' + i)), rdb: open(), cfg: cfg, events: map[refill.EventKind]int{}, errors: map[string][]time.Time{}}
		t.Cleanup(func() { _ = node.rdb.Close() })
		node.store = goredis.New(node.rdb)
		cfg.Shared, cfg.OnEvent, cfg.Jitter = node.store, node.see, -1
		l, err := refill.New("farm", func(ctx context.Context, key string) (string, error) { return f.load(ctx, node, key) }, cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		})
		node.Loader = l
		f.nodes = append(f.nodes, node)
	}
	eventually(t, "all nodes hear announcements", f.hears)
	return f
}

// load answers with the version that the database has, and when that was read.
func (f *farm) load(ctx context.Context, n *farmNode, key string) (string, error) {
	f.mu.Lock()
	i, began := len(f.loads), time.Now()
	f.loads = append(f.loads, farmLoad{node: n, key: key, began: began})
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.loads[i].ended = time.Now()
	}()
	if strings.HasPrefix(key, "long") {
		refill.FillFrom(ctx).SetTTL(longTTL)
	}
	value := fmt.Sprintf("%s v%d %d", key, f.version.Load(), began.Sub(f.base))
	if f.hold != nil {
		f.hold(n, key)
	}
	select {
	case <-time.After(f.took):
	case <-ctx.Done():
		return "", ctx.Err()
	}
	return value, nil
}

// versionOf and bornOf take a value apart.
func versionOf(value string) string { return strings.Split(value+"  ", " ")[1] }

func (f *farm) bornOf(value string) time.Time {
	n, _ := strconv.ParseInt(strings.Split(value+"  ", " ")[2], 10, 64)
	return f.base.Add(time.Duration(n))
}

func (n *farmNode) see(e refill.Event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.events[e.Kind]++
	switch e.Kind {
	case refill.EventStoreError:
		n.errors[e.Key] = append(n.errors[e.Key], time.Now())
	case refill.EventStoreUp:
		n.up = true
	case refill.EventStoreDown:
		n.up = false
	case refill.EventStoreDoubt:
		n.texts = append(n.texts, e.Err.Error())
	case refill.EventVoidRetried:
		if e.Err != nil {
			n.texts = append(n.texts, e.Err.Error())
		}
	}
}

func (n *farmNode) saw(kind refill.EventKind) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.events[kind]
}

func (n *farmNode) hears() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.up
}

func (f *farm) hears() bool {
	return !slices.ContainsFunc(f.nodes, func(n *farmNode) bool { return !n.hears() })
}

// loadsOf are the loads of a key that began after a moment.
func (f *farm) loadsOf(key string, after time.Time) (of []farmLoad) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range f.loads {
		if l.key == key && l.began.After(after) {
			of = append(of, l)
		}
	}
	return of
}

// running counts the loads of a node that have not ended.
func (f *farm) running(n *farmNode) (count int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range f.loads {
		if l.node == n && l.ended.IsZero() {
			count++
		}
	}
	return count
}

// mostAtOnce is the largest number of loads that one node had at one time.
func (f *farm) mostAtOnce() (most int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range f.loads {
		count := 0
		for _, o := range f.loads {
			if o.node == l.node && !o.began.After(l.began) && (o.ended.IsZero() || o.ended.After(l.began)) {
				count++
			}
		}
		most = max(most, count)
	}
	return most
}

// led leaves out loads that a node began for itself alone, because the store did not answer in time: that is what it has to
// do then, and on a busy machine it may happen to a healthy store.
func led(loads []farmLoad) []farmLoad {
	return slices.DeleteFunc(slices.Clone(loads), func(x farmLoad) bool {
		x.node.mu.Lock()
		defer x.node.mu.Unlock()
		return slices.ContainsFunc(x.node.errors[x.key], func(at time.Time) bool {
			return !at.After(x.began) && x.began.Sub(at) < 500*time.Millisecond
		})
	})
}

// oneLoadPerExpiry waits for further loads of a key, and fails the test if two of them overlap or are closer than a TTL.
func (f *farm) oneLoadPerExpiry(key string, ttl time.Duration, after time.Time, n int) {
	f.t.Helper()
	var loads []farmLoad
	eventually(f.t, fmt.Sprintf("%q has been loaded %d times more", key, n), func() bool {
		loads = led(f.loadsOf(key, after))
		return len(loads) >= n && !loads[n-1].ended.IsZero()
	})
	for i := 1; i < n; i++ {
		// TTL counts from the claim, a moment before the load begins; a busy machine makes it a long one.
		if gap := loads[i].began.Sub(loads[i-1].began); gap < ttl-ttl/4 || loads[i].began.Before(loads[i-1].ended) {
			f.t.Errorf("%q: load %d by %s began %v after load %d by %s, at a TTL of %v",
				key, i, loads[i].node.name, gap, i-1, loads[i-1].node.name, ttl)
		}
	}
}

// traffic is many Gets, on all nodes, without end.
type traffic struct {
	f    *farm
	stop context.CancelFunc
	wg   sync.WaitGroup
	gets atomic.Int64

	mu       sync.Mutex // guards all below
	longest  time.Duration
	oldest   time.Duration // beyond TTL and StaleFor
	complain []string      // the first few
	bad      int
	outcomes map[refill.EventKind]int
}

// startTraffic lets one caller per node and key Get. A Get that fails or is answered by what is too old is a complaint.
func (f *farm) startTraffic(keys ...string) *traffic {
	ctx, stop := context.WithCancel(context.Background())
	tr := &traffic{f: f, stop: stop, outcomes: map[refill.EventKind]int{}}
	for _, n := range f.nodes {
		for _, key := range keys {
			tr.wg.Go(func() {
				for ctx.Err() == nil {
					tr.get(n, key)
					select {
					case <-time.After(2 * time.Millisecond): // the pace of a caller
					case <-ctx.Done():
					}
				}
			})
		}
	}
	f.t.Cleanup(func() { // should the test end before end
		stop()
		tr.wg.Wait()
	})
	return tr
}

func (tr *traffic) get(n *farmNode, key string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	asked := time.Now()
	r, err := n.GetResult(ctx, key)
	took := time.Since(asked)
	tr.gets.Add(1)
	limit := n.cfg.TTL + n.cfg.StaleFor
	if strings.HasPrefix(key, "long") {
		limit = longTTL + n.cfg.StaleFor
	}
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.longest = max(tr.longest, took)
	tr.outcomes[r.Outcome]++
	at := asked.Sub(tr.f.base).Round(time.Millisecond)
	if err != nil {
		tr.complainOf("at %v %s: %s: %v after %v", at, n.name, key, err, took)
		return
	}
	// Taken before the Get, so that a busy machine makes nobody look older. Who waited for a load gets it whatever its age.
	if old := asked.Sub(tr.f.bornOf(r.Value)) - limit; old > ageSlack && !waitedFor(r.Outcome) {
		tr.oldest = max(tr.oldest, old)
		tr.complainOf("at %v %s: %s (%v) is %v older than it may be", at, n.name, r.Value, r.Outcome, old)
	}
}

// ageSlack is for the tick of the coarse clock, and a goroutine that was not scheduled in between.
const ageSlack = 100 * time.Millisecond

func waitedFor(how refill.EventKind) bool {
	return how == refill.EventLed || how == refill.EventJoined || how == refill.EventWaited
}

// complainOf is called with mu held.
func (tr *traffic) complainOf(format string, args ...any) {
	if tr.bad++; len(tr.complain) < 5 {
		tr.complain = append(tr.complain, fmt.Sprintf(format, args...))
	}
}

// more waits until every caller has had the time for some more Gets.
func (tr *traffic) more() {
	tr.f.t.Helper()
	before := tr.gets.Load()
	eventually(tr.f.t, "there were more Gets", func() bool { return tr.gets.Load() > before+int64(100*len(tr.f.nodes)) })
}

// end stops the traffic, and fails the test if there were complaints.
func (tr *traffic) end() {
	tr.f.t.Helper()
	tr.stop()
	tr.wg.Wait()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.f.t.Logf("%d Gets, longest %v, %v", tr.gets.Load(), tr.longest.Round(time.Millisecond), tr.outcomes)
	if tr.bad > 0 {
		tr.f.t.Errorf("%d of %d Gets:\n%s", tr.bad, tr.gets.Load(), strings.Join(tr.complain, "\n"))
	}
}

// invalidateReachesAll changes the database and invalidates a long key at one node. The L1 of the others must hear of it.
func (f *farm) invalidateReachesAll(key string) {
	f.t.Helper()
	want, began := fmt.Sprint("v", f.version.Add(1)), time.Now()
	if err := f.nodes[0].Invalidate(context.Background(), key); err != nil {
		f.t.Errorf("Invalidate: %v", err)
	}
	for _, n := range f.nodes {
		eventually(f.t, fmt.Sprintf("%s has %s of %q", n.name, want, key), func() bool {
			value, err := n.Get(context.Background(), key)
			return err == nil && versionOf(value) == want
		})
	}
	f.t.Logf("an Invalidate was everywhere after %v", time.Since(began).Round(time.Millisecond))
}

// writable waits until every node's client is at servers that take writes.
func (f *farm) writable() {
	f.t.Helper()
	for _, n := range f.nodes {
		eventually(f.t, n.name+" can write", func() bool {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			return n.store.Invalidate(ctx, "", "farm:probe") == nil
		})
	}
}

// close ends the nodes, after which no server may have a subscriber.
func (f *farm) close(servers ...*realtest.Redis) {
	f.t.Helper()
	for _, n := range f.nodes {
		if err := n.Close(); err != nil {
			f.t.Error(err)
		}
	}
	for _, r := range servers {
		c := redis.NewClient(&redis.Options{Addr: r.Addr()})
		eventually(f.t, "no subscriber is left at "+r.Addr(), func() bool {
			return c.PubSubNumSub(context.Background(), "refill:notes").Val()["refill:notes"] == 0
		})
		_ = c.Close()
	}
}

func overSentinel(s *realtest.Sentinel) func() redis.UniversalClient {
	return func() redis.UniversalClient {
		return redis.NewFailoverClient(&redis.FailoverOptions{
			MasterName: s.MasterName(), SentinelAddrs: s.Addrs(), ContextTimeoutEnabled: true,
		})
	}
}

func overNodes(c *realtest.Cluster) func() redis.UniversalClient {
	return func() redis.UniversalClient {
		return redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs(), ContextTimeoutEnabled: true})
	}
}

func overOne(r *realtest.Redis) func() redis.UniversalClient {
	return func() redis.UniversalClient {
		return redis.NewClient(&redis.Options{Addr: r.Addr(), ContextTimeoutEnabled: true})
	}
}

// stored is the name under which a value stands in Redis.
func stored(key string) string { return goredisPrefix("refill").key("farm:"+key, "") }

// gate lets loads of one node and key wait for the test.
type gate struct {
	mu    sync.Mutex
	gates map[string]chan struct{}
}

// shut makes the loads of this node and key wait; it is called before they begin.
func (g *gate) shut(n *farmNode, keys ...string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.gates == nil {
		g.gates = map[string]chan struct{}{}
	}
	for _, key := range keys {
		g.gates[n.name+key] = make(chan struct{})
	}
}

func (g *gate) open(n *farmNode, key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.gates[n.name+key])
	delete(g.gates, n.name+key)
}

// openAll is for the end of a test that has failed.
func (g *gate) openAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for name, wait := range g.gates {
		close(wait)
		delete(g.gates, name)
	}
}

func (g *gate) hold(n *farmNode, key string) {
	g.mu.Lock()
	wait := g.gates[n.name+key]
	g.mu.Unlock()
	if wait != nil {
		<-wait
	}
}

// getters Get in the background. What each got is there for got.
type getters struct {
	t       testing.TB
	answers map[string]chan string
}

func (g *getters) start(n *farmNode, keys ...string) {
	if g.answers == nil {
		g.answers = map[string]chan string{}
	}
	for _, key := range keys {
		answer := make(chan string, 1)
		g.answers[n.name+key] = answer
		go func() {
			value, err := n.Get(context.Background(), key)
			if err != nil {
				value = "error " + err.Error()
			}
			answer <- value
		}()
	}
}

func (g *getters) got(n *farmNode, key, version string) {
	g.t.Helper()
	select {
	case value := <-g.answers[n.name+key]:
		if versionOf(value) != version {
			g.t.Errorf("%s waited for %q and got %q, want %s", n.name, key, value, version)
		}
	case <-time.After(10 * time.Second):
		g.t.Errorf("%s waits for %q", n.name, key)
	}
}

// A lease and a claim that die with their master. B gets them again from the next one while A, who has lost nothing as far
// as it knows, still loads. Whoever publishes in whatever order: A's value, which is older, is never stored.
func TestFailoverTwoHolders(t *testing.T) {
	s := realtest.StartSentinel(t)
	f := newFarm(t, 3, overSentinel(s), refill.Config{TTL: time.Minute, LoadTimeout: 30 * time.Second})
	a, b, c := f.nodes[0], f.nodes[1], f.nodes[2]
	var gates gate
	f.hold = gates.hold
	t.Cleanup(gates.openAll)
	get := getters{t: t}
	before, after := []string{"before-1", "before-2", "before-3"}, []string{"after-1", "after-2", "after-3"}
	both := slices.Concat(before, after)
	all := append(slices.Clone(both), "alone")
	gates.shut(a, all...)
	gates.shut(b, both...)

	s.CutReplicas()
	get.start(a, all...)
	eventually(t, "A loads all", func() bool { return f.running(a) == len(all) })
	f.version.Store(2) // the database changes: what A read is old now
	old := s.KillMaster()
	began := time.Now()
	s.ThawReplicas()
	s.NextMaster(old)
	f.writable()
	took := time.Since(began)
	get.start(b, both...)
	eventually(t, "B loads the same", func() bool { return f.running(b) == len(both) })
	if n := f.running(a); n != len(all) {
		t.Fatalf("A loads %d keys: there are no two holders", n)
	}
	t.Logf("result: %d leases with two holders, %v after the kill", len(both), took.Round(time.Millisecond))

	refused := a.saw(refill.EventRefused)
	for _, key := range before { // A publishes while B loads
		gates.open(a, key)
		get.got(a, key, "v1") // it has waited for that very load
		eventually(t, "A was refused", func() bool { return a.saw(refill.EventRefused) > refused })
		refused++
		if r, there := c.Peek(context.Background(), key); there {
			t.Errorf("%q was stored by A, who has no claim: %q", key, r.Value)
		}
		gates.open(b, key)
		get.got(b, key, "v2")
	}
	for _, key := range after { // A publishes after B
		gates.open(b, key)
		get.got(b, key, "v2")
		gates.open(a, key)
		get.got(a, key, "v1")
		eventually(t, "A was refused", func() bool { return a.saw(refill.EventRefused) > refused })
		refused++
	}
	gates.open(a, "alone") // B never asked
	get.got(a, "alone", "v1")
	for _, n := range []*farmNode{c, a, b} {
		for _, key := range all {
			if value, err := n.Get(context.Background(), key); err != nil || versionOf(value) != "v2" {
				t.Errorf("%s: %q, %v: A's value was kept", n.name, value, err)
			}
		}
	}
	if n := b.saw(refill.EventPublished); n != len(both) || a.saw(refill.EventPublished) != 0 {
		t.Errorf("A published %d, B %d of %d", a.saw(refill.EventPublished), n, len(both))
	}
	f.close(s.Master())
}

// The same for users' locks: they cannot be held by one alone, as long as the first holder, cut off, knows of nothing. Then
// it is told, and the second one's fence is larger, with or without the counter of the old master.
func TestFailoverTwoLockHolders(t *testing.T) {
	s := realtest.StartSentinel(t)
	var cutOff atomic.Bool
	dialer := &net.Dialer{Timeout: time.Second}
	clients := [2]redis.UniversalClient{
		redis.NewFailoverClient(&redis.FailoverOptions{
			MasterName: s.MasterName(), SentinelAddrs: s.Addrs(), ContextTimeoutEnabled: true,
			Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
				if cutOff.Load() {
					return nil, errors.New("cut off")
				}
				return dialer.DialContext(ctx, network, addr)
			},
		}),
		overSentinel(s)(),
	}
	var lockers [2]*refill.Locker
	for i, rdb := range clients {
		t.Cleanup(func() { _ = rdb.Close() })
		var err error
		// Long enough to outlast the failover: it is not time that takes the lock from the first holder.
		if lockers[i], err = refill.NewLocker("job", goredis.New(rdb), refill.LockConfig{TTL: 9 * time.Second}); err != nil {
			t.Fatal(err)
		}
	}
	ctx := context.Background()
	known, err := lockers[0].TryLock(ctx, "known")
	if err != nil {
		t.Fatal(err)
	}
	if err := known.Release(ctx); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the replicas have the counter", func() bool {
		return !slices.ContainsFunc(s.Replicas(), func(r *realtest.Redis) bool { return (&goredisServer{r}).do(t, "dbsize") != int64(1) })
	})
	s.CutReplicas()
	var first, second [2]*refill.Lock
	keys := []string{"known", "new"}
	for i, key := range keys {
		if first[i], err = lockers[0].TryLock(ctx, key); err != nil {
			t.Fatal(err)
		}
	}
	cutOff.Store(true)
	old := s.KillMaster()
	s.ThawReplicas()
	s.NextMaster(old)
	for i, key := range keys {
		eventually(t, "the lock is taken at the next master", func() bool {
			var err error
			second[i], err = lockers[1].TryLock(ctx, key)
			return err == nil
		})
		select {
		case <-first[i].Lost():
			t.Errorf("%q was not held twice: this test shows nothing", key)
		default:
		}
	}
	cutOff.Store(false)
	healed := time.Now()
	for i, key := range keys {
		if second[i].Fence() <= first[i].Fence() {
			t.Errorf("%q: fence %d after %d", key, second[i].Fence(), first[i].Fence())
		}
		select {
		case <-first[i].Context().Done():
		case <-time.After(time.Until(first[i].Until()) + time.Second):
		}
		if cause := context.Cause(first[i].Context()); !errors.Is(cause, refill.ErrLost) {
			t.Errorf("%q: the first holder is told %v", key, cause)
		}
		if err := first[i].Release(ctx); !errors.Is(err, refill.ErrLost) {
			t.Errorf("%q: the first holder's Release: %v", key, err)
		}
		if err := second[i].Release(ctx); err != nil {
			t.Errorf("%q: the second holder's Release: %v", key, err)
		}
	}
	t.Logf("result: %d locks with two holders; the first ones were told within %v", len(keys), time.Since(healed).Round(time.Millisecond))
}

// replaced is a topology in which the master that has a key is replaced.
type replaced struct {
	open    func() redis.UniversalClient
	servers []*realtest.Redis
	kill    func(t *testing.T) *realtest.Redis
	next    func(t *testing.T, old *realtest.Redis)
}

// A master dies under traffic. No Get fails; what each node loads by itself meanwhile is bounded; afterwards all is as it
// was before, and an Invalidate reaches every L1 although the subscriptions were made elsewhere.
func TestFailoverUnderTraffic(t *testing.T) {
	for name, start := range map[string]func(t *testing.T) replaced{
		"sentinel": func(t *testing.T) replaced {
			s := realtest.StartSentinel(t)
			return replaced{
				open: overSentinel(s), servers: append(s.Replicas(), s.Master()),
				kill: func(*testing.T) *realtest.Redis { return s.KillMaster() },
				next: func(_ *testing.T, old *realtest.Redis) { s.NextMaster(old) },
			}
		},
		"cluster": func(t *testing.T) replaced {
			c := realtest.StartCluster(t, 3, 1)
			return replaced{
				open: overNodes(c), servers: c.Servers(),
				kill: func(*testing.T) *realtest.Redis { r := c.NodeFor(stored("hot")); r.Kill(); return r },
				next: func(_ *testing.T, old *realtest.Redis) { c.NextMaster(stored("hot"), old) },
			}
		},
	} {
		t.Run(name, func(t *testing.T) { masterDiesUnderTraffic(t, start(t)) })
	}
}

func masterDiesUnderTraffic(t *testing.T, w replaced) {
	const ttl = 400 * time.Millisecond
	f := newFarm(t, 3, w.open, refill.Config{TTL: ttl, StaleFor: time.Minute, LocalTTL: longTTL, MaxLoads: 2})
	tr := f.startTraffic("hot", "long")
	f.oneLoadPerExpiry("hot", ttl, f.base, 3)
	killed := time.Now()
	old := w.kill(t)
	w.next(t, old)
	t.Logf("result: the next master is known %v after the kill", time.Since(killed).Round(time.Millisecond))
	f.writable()
	eventually(t, "all nodes hear announcements", f.hears)
	healed := time.Now()
	t.Logf("result: all nodes are well %v after the kill", healed.Sub(killed).Round(time.Millisecond))
	meanwhile := len(f.loadsOf("hot", killed))
	if most := 3 * (int(healed.Sub(killed)/ttl) + 2); meanwhile > most {
		t.Errorf("%d loads while there was no master, at most %d", meanwhile, most)
	}
	// Some were begun by a node alone, and may end only now.
	f.oneLoadPerExpiry("hot", ttl, healed.Add(ttl), 4)
	t.Logf("result: %d loads in the %v without a master", meanwhile, healed.Sub(killed).Round(time.Millisecond))
	f.invalidateReachesAll("long")
	f.invalidateReachesAll("long")
	if n := f.mostAtOnce(); n > 2 {
		t.Errorf("%d loads at once in one node", n)
	}
	tr.end()
	f.close(slices.DeleteFunc(w.servers, func(r *realtest.Redis) bool { return r == old })...)
}

// A slot moves while its keys are read, loaded and invalidated.
func TestSlotMovesUnderTraffic(t *testing.T) {
	const ttl = 400 * time.Millisecond
	const lockTTL = 2 * time.Second
	cluster := realtest.StartCluster(t, 3, 0)
	f := newFarm(t, 3, overNodes(cluster), refill.Config{
		TTL: ttl, StaleFor: time.Minute, LocalTTL: longTTL, LockTTL: lockTTL, MaxLoads: 4,
	})
	var gates gate
	f.hold = gates.hold
	t.Cleanup(gates.openAll)
	get := getters{t: t}
	tr := f.startTraffic("hot", "long")
	f.oneLoadPerExpiry("hot", ttl, f.base, 3)
	move := func(key string, during func()) {
		t.Helper()
		from, to := cluster.NodeFor(stored(key)), (*realtest.Redis)(nil)
		for _, r := range cluster.Servers() {
			if r != from {
				to = r
			}
		}
		m := cluster.OpenSlot(cluster.Slot(stored(key)), to)
		during()
		m.Finish()
	}

	opened := time.Now()
	move("hot", func() { tr.more() })
	moved := time.Now()
	f.oneLoadPerExpiry("hot", ttl, moved.Add(ttl), 3)
	most := 3 * (int(moved.Add(ttl).Sub(opened)/ttl) + 1)
	n := len(f.loadsOf("hot", opened)) - len(f.loadsOf("hot", moved.Add(ttl)))
	t.Logf("result: %d loads in and just after the %v in which the slot was open", n, moved.Sub(opened).Round(time.Millisecond))
	if n > most {
		t.Errorf("%d loads, at most %d", n, most)
	}

	// A load whose lease and claim move under it goes on to hold them, and is published.
	a, b := f.nodes[0], f.nodes[1]
	gates.shut(a, "long-flight")
	get.start(a, "long-flight")
	eventually(t, "A loads", func() bool { return len(f.loadsOf("long-flight", f.base)) == 1 })
	get.start(b, "long-flight")
	pass := func(d time.Duration) {
		t.Helper()
		end := time.Now().Add(d)
		eventually(t, "some time has passed", func() bool { return time.Now().After(end) })
	}
	move("long-flight", func() { pass(lockTTL/3 + 50*time.Millisecond) }) // a renewal fails: there is no value yet, hence TRYAGAIN
	pass(lockTTL)                                                         // a lease that was not renewed at its new place is over
	gates.open(a, "long-flight")
	get.got(a, "long-flight", "v1")
	get.got(b, "long-flight", "v1")
	if n := len(f.loadsOf("long-flight", f.base)); n != 1 || a.saw(refill.EventLeaseLost) != 0 {
		t.Errorf("%d loads of a key that moved, %d leases lost", n, a.saw(refill.EventLeaseLost))
	}

	// A voiding while the slot is open: what it cannot do at once it says, and does it when it can.
	f.version.Add(1)
	move("long", func() {
		err := a.Invalidate(context.Background(), "long")
		t.Logf("Invalidate while the slot is open: %v", err)
	})
	for _, n := range f.nodes {
		eventually(t, n.name+" has the new version", func() bool {
			value, err := n.Get(context.Background(), "long")
			return err == nil && versionOf(value) == "v2"
		})
	}
	f.invalidateReachesAll("long")
	tr.end()
	f.close(cluster.Servers()...)
}

// Clients that were sent to a replica: they can read and not write. All is answered, no lease can be taken, and when the
// replica becomes a master everything heals.
func TestReadOnlyReplica(t *testing.T) {
	const ttl = 300 * time.Millisecond
	master := realtest.StartRedis(t, "--repl-diskless-sync-delay", "0")
	host, port, _ := net.SplitHostPort(master.Addr())
	replica := realtest.StartRedis(t, "--replicaof", host, port)
	eventually(t, "the replica is linked", func() bool {
		info, _ := (&goredisServer{replica}).do(t, "info", "replication").(string)
		return strings.Contains(info, "master_link_status:up")
	})
	f := newFarm(t, 2, overOne(replica), refill.Config{TTL: ttl, StaleFor: time.Minute, LocalTTL: longTTL, MaxLoads: 2})
	for _, n := range f.nodes {
		eventually(t, n.name+" was warned", func() bool { return n.saw(refill.EventStoreDoubt) > 0 })
		if text := n.texts[0]; !strings.Contains(text, "replica") {
			t.Errorf("%s was warned of something else: %s", n.name, text)
		}
	}
	tr := f.startTraffic("hot", "long")
	tr.more() // else these wait for a load, too, and with too many of them
	var wg sync.WaitGroup
	for i := range 8 { // more than MaxLoads
		wg.Go(func() {
			key := fmt.Sprint("cold-", i)
			if value, err := f.nodes[0].Get(context.Background(), key); err != nil && !errors.Is(err, refill.ErrOverloaded) {
				t.Errorf("%q, %v", value, err)
			}
		})
	}
	wg.Wait()
	tr.more()
	if n := f.mostAtOnce(); n > 2 {
		t.Errorf("%d loads at once in one node, MaxLoads is 2", n)
	}
	for _, n := range f.nodes {
		if err := n.Invalidate(context.Background(), "long"); err == nil {
			t.Errorf("%s: Invalidate at a replica", n.name)
		}
	}
	alone := len(f.loadsOf("hot", f.base))
	began := time.Now()
	(&goredisServer{replica}).do(t, "replicaof", "no", "one")
	for _, n := range f.nodes {
		eventually(t, n.name+" has made up for its Invalidate", func() bool { return n.saw(refill.EventVoidRetried) > 0 })
	}
	t.Logf("result: %d loads alone; the Invalidates were made up for %v after the promotion", alone, time.Since(began).Round(time.Millisecond))
	f.writable()
	f.oneLoadPerExpiry("hot", ttl, time.Now().Add(ttl), 4)
	f.invalidateReachesAll("long")
	tr.end()
	f.close(replica)
}

// A server that comes back with nothing: the fleet loads each key once. Until then L1 answers.
func TestRestartEmptyUnderTraffic(t *testing.T) {
	server := realtest.StartRedis(t)
	f := newFarm(t, 3, overOne(server), refill.Config{TTL: time.Minute, StaleFor: time.Minute})
	var keys []string
	for i := range 10 {
		keys = append(keys, fmt.Sprint("long-", i))
	}
	loads := func() (n int) {
		for _, key := range keys {
			n += len(f.loadsOf(key, f.base))
		}
		return n
	}
	tr := f.startTraffic(keys...)
	tr.more()
	eventually(t, "every key has been loaded", func() bool { return loads() >= len(keys) })
	server.Kill()
	for _, n := range f.nodes {
		eventually(t, n.name+" knows", func() bool { return !n.hears() })
	}
	tr.more()
	server.Restart()
	began := time.Now()
	eventually(t, "all nodes hear announcements", f.hears)
	eventually(t, "every key was loaded again", func() bool { return loads() >= 2*len(keys) })
	t.Logf("result: all is back %v after the restart", time.Since(began).Round(time.Millisecond))
	tr.more()
	tr.more()
	for _, key := range keys {
		all := f.loadsOf(key, f.base)
		if n := len(led(all)); n > 2 || n < 2 && n == len(all) {
			t.Errorf("%q was loaded %d times, want once before and once after", key, n)
		}
	}
	f.invalidateReachesAll(keys[0])
	tr.end()
	f.close(server)
}

// Writes that have to wait, a server that does nothing for a while, and one that forgets its scripts again and again.
func TestServerStalls(t *testing.T) {
	const ttl = 200 * time.Millisecond
	server := realtest.StartRedis(t)
	f := newFarm(t, 2, overOne(server), refill.Config{TTL: ttl, StaleFor: time.Minute, LocalTTL: longTTL})
	a, b := f.nodes[0], f.nodes[1]
	var gates gate
	f.hold = gates.hold
	t.Cleanup(gates.openAll)
	get := getters{t: t}
	admin := &goredisServer{server}
	tr := f.startTraffic("hot", "long")
	f.oneLoadPerExpiry("hot", ttl, f.base, 2)

	for pause, most := range map[time.Duration]int{100 * time.Millisecond: 1, 600 * time.Millisecond: 2} {
		key := fmt.Sprint("long-pause-of-", pause)
		gates.shut(a, key)
		get.start(a, key)
		eventually(t, "A loads", func() bool { return len(f.loadsOf(key, f.base)) == 1 })
		get.start(b, key)
		admin.do(t, "client", "pause", pause.Milliseconds(), "write")
		gates.open(a, key)
		get.got(a, key, "v1")
		get.got(b, key, "v1")
		if n := len(f.loadsOf(key, f.base)); n > most { // beyond StoreTimeout A's publish may be lost
			t.Errorf("%d loads over a pause of %v, at most %d", n, pause, most)
		}
	}
	admin.do(t, "debug", "sleep", "0.8")
	f.writable()
	eventually(t, "all nodes hear announcements", f.hears)
	f.oneLoadPerExpiry("hot", ttl, time.Now().Add(ttl), 3)

	began := time.Now()
	for len(f.loadsOf("hot", began)) < 6 {
		admin.do(t, "script", "flush")
	}
	f.oneLoadPerExpiry("hot", ttl, began, 5)
	f.invalidateReachesAll("long")
	tr.end()
	f.close(server)
}
