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

// The tests of this file inject faults into the servers under Loaders: masters that are replaced, slots that move,
// replicas, restarts, stalls. A server that is replaced may have acknowledged writes that its successor never received,
// for instance a lease. So two nodes may hold the lease of one key. In that case both nodes may load, but an older
// value must not replace a newer value.

// A farm is several nodes in this process, each with its own client, and the database that they load from.
type farm struct {
	t       testing.TB
	base    time.Time     // when newFarm was called
	version atomic.Int64  // what the database holds under every key
	took    time.Duration // the length of a load
	nodes   []*farmNode
	// duringLoad, if set, is called by a load after the load has read the version. duringLoad may wait.
	duringLoad func(n *farmNode, key string)

	mu    sync.Mutex // guards all below
	loads []farmLoad // sorted by began
}

// farmLoad is one load. ended is zero while the load runs.
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

	mu         sync.Mutex // guards all below
	events     map[refill.EventKind]int
	errors     map[string][]time.Time // by key: when EventStoreError was reported
	subscribed bool
	warnings   []string
}

// longTTL is the TTL of keys that begin with "long". longTTL is longer than every test, so only an invalidation
// replaces the values of these keys.
const longTTL = time.Minute

// newFarm makes n nodes and waits until each node has subscribed. At the end of the test, the Close of each node
// must return no error.
func newFarm(t testing.TB, n int, open func() redis.UniversalClient, cfg refill.Config) *farm {
	t.Helper()
	f := &farm{t: t, base: time.Now(), took: 20 * time.Millisecond}
	f.version.Store(1)
	for i := range n {
		node := &farmNode{
			name: string(rune('A' + i)), rdb: open(), cfg: cfg,
			events: map[refill.EventKind]int{}, errors: map[string][]time.Time{},
		}
		t.Cleanup(func() { _ = node.rdb.Close() })
		node.store = goredis.New(node.rdb)
		cfg.Shared, cfg.OnEvent, cfg.Jitter = node.store, node.onEvent, -1
		l, err := refill.New("farm", func(ctx context.Context, key string) (string, error) {
			return f.load(ctx, node, key)
		}, cfg)
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
	eventually(t, "all nodes have subscribed", f.allSubscribed)
	return f
}

// load is the load function of the nodes. The value names the key, the version in the database, and the time of the
// read.
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
	if f.duringLoad != nil {
		f.duringLoad(n, key)
	}
	select {
	case <-time.After(f.took):
	case <-ctx.Done():
		return "", ctx.Err()
	}
	return value, nil
}

// versionOf returns the version in a value. readAt returns when the load read that version.
func versionOf(value string) string { return strings.Split(value+"  ", " ")[1] }

func (f *farm) readAt(value string) time.Time {
	n, _ := strconv.ParseInt(strings.Split(value+"  ", " ")[2], 10, 64)
	return f.base.Add(time.Duration(n))
}

func (n *farmNode) onEvent(e refill.Event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.events[e.Kind]++
	switch e.Kind {
	case refill.EventStoreError:
		n.errors[e.Key] = append(n.errors[e.Key], time.Now())
	case refill.EventStoreUp:
		n.subscribed = true
	case refill.EventStoreDown:
		n.subscribed = false
	case refill.EventStoreWarning:
		n.warnings = append(n.warnings, e.Err.Error())
	case refill.EventInvalidateRetried:
		if e.Err != nil {
			n.warnings = append(n.warnings, e.Err.Error())
		}
	}
}

func (n *farmNode) count(kind refill.EventKind) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.events[kind]
}

func (n *farmNode) isSubscribed() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.subscribed
}

func (f *farm) allSubscribed() bool {
	return !slices.ContainsFunc(f.nodes, func(n *farmNode) bool { return !n.isSubscribed() })
}

// loadsOf returns the loads of a key that began after the given time.
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

// mostAtOnce returns the largest number of loads that any one node ran at the same time.
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

// withLease returns loads without those that a node began without a lease. A node loads without a lease if the store
// does not answer in time. Such loads are allowed, because on a busy machine even a healthy store may answer too late.
func withLease(loads []farmLoad) []farmLoad {
	return slices.DeleteFunc(slices.Clone(loads), func(x farmLoad) bool {
		x.node.mu.Lock()
		defer x.node.mu.Unlock()
		return slices.ContainsFunc(x.node.errors[x.key], func(at time.Time) bool {
			return !at.After(x.began) && x.began.Sub(at) < 500*time.Millisecond
		})
	})
}

// oneLoadPerExpiry waits for n loads of a key that began later than after. oneLoadPerExpiry fails the test if two of
// these loads overlap, or if a load begins within the TTL of the load before it.
func (f *farm) oneLoadPerExpiry(key string, ttl time.Duration, after time.Time, n int) {
	f.t.Helper()
	var loads []farmLoad
	eventually(f.t, fmt.Sprintf("%q has been loaded %d more times", key, n), func() bool {
		loads = withLease(f.loadsOf(key, after))
		return len(loads) >= n && !loads[n-1].ended.IsZero()
	})
	for i := 1; i < n; i++ {
		// TTL counts from the claim, which the node takes before the load begins. So the time between two loads may be a
		// little shorter than TTL.
		if gap := loads[i].began.Sub(loads[i-1].began); gap < ttl-ttl/4 || loads[i].began.Before(loads[i-1].ended) {
			f.t.Errorf("%q: load %d of node %s began %v after load %d of node %s, at a TTL of %v",
				key, i, loads[i].node.name, gap, i-1, loads[i-1].node.name, ttl)
		}
	}
}

// traffic calls Get on all nodes until end.
type traffic struct {
	f    *farm
	stop context.CancelFunc
	wg   sync.WaitGroup
	gets atomic.Int64

	mu       sync.Mutex // guards all below
	longest  time.Duration
	oldest   time.Duration // of the values that were too old: the largest age minus (TTL + StaleFor)
	failures []string      // the first five
	failed   int
	outcomes map[refill.Outcome]int
}

// startTraffic starts one caller per node and key. A Get that returns an error, or a value that is too old, counts
// as failed.
func (f *farm) startTraffic(keys ...string) *traffic {
	ctx, stop := context.WithCancel(context.Background())
	tr := &traffic{f: f, stop: stop, outcomes: map[refill.Outcome]int{}}
	for _, n := range f.nodes {
		for _, key := range keys {
			tr.wg.Go(func() {
				for ctx.Err() == nil {
					tr.get(n, key)
					select {
					case <-time.After(2 * time.Millisecond): // the pause between two Gets of a caller
					case <-ctx.Done():
					}
				}
			})
		}
	}
	f.t.Cleanup(func() { // stops the callers if the test ends before it calls end
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
		tr.fail("at %v %s: %s: %v after %v", at, n.name, key, err, took)
		return
	}
	// The age is that at the start of the Get, so that a slow Get on a busy machine is no failure. A caller that has
	// waited for a load may get the value of that load, however old the value is.
	if old := asked.Sub(tr.f.readAt(r.Value)) - limit; old > ageSlack && !waitedFor(r.Outcome) {
		tr.oldest = max(tr.oldest, old)
		tr.fail("at %v %s: %s (%v) is %v older than allowed", at, n.name, r.Value, r.Outcome, old)
	}
}

// ageSlack is how much older than TTL + StaleFor a value may be. The 100 ms cover a tick of the coarse clock, and the
// delay until a goroutine is scheduled.
const ageSlack = 100 * time.Millisecond

func waitedFor(o refill.Outcome) bool {
	return o == refill.OutcomeLoaded || o == refill.OutcomeCoalesced || o == refill.OutcomeLoadedElsewhere
}

// fail counts a failed Get. The caller holds mu.
func (tr *traffic) fail(format string, args ...any) {
	if tr.failed++; len(tr.failures) < 5 {
		tr.failures = append(tr.failures, fmt.Sprintf(format, args...))
	}
}

// waitForGets waits until each node has made about 100 more Gets.
func (tr *traffic) waitForGets() {
	tr.f.t.Helper()
	before := tr.gets.Load()
	eventually(tr.f.t, "more Gets have returned", func() bool {
		return tr.gets.Load() > before+int64(100*len(tr.f.nodes))
	})
}

// end stops the traffic, and fails the test if a Get failed.
func (tr *traffic) end() {
	tr.f.t.Helper()
	tr.stop()
	tr.wg.Wait()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.f.t.Logf("%d Gets, longest %v, %v", tr.gets.Load(), tr.longest.Round(time.Millisecond), tr.outcomes)
	if tr.failed > 0 {
		tr.f.t.Errorf("%d of %d Gets failed:\n%s", tr.failed, tr.gets.Load(), strings.Join(tr.failures, "\n"))
	}
}

// invalidateReachesAll changes the database and invalidates a key on one node. The key must begin with "long". Then all
// nodes must return the new value, so the old value must leave their L1.
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
	f.t.Logf("an Invalidate reached all nodes after %v", time.Since(began).Round(time.Millisecond))
}

// writable waits until every node's client is connected to servers that accept writes.
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

// close closes the nodes. After that, close fails the test if one of the given servers still has a subscriber.
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

// redisKey returns the key under which Redis holds the farm's value of key.
func redisKey(key string) string { return goredisPrefix("refill").key("farm:"+key, "") }

// gate makes the loads of chosen nodes and keys wait until the test opens the gate.
type gate struct {
	mu    sync.Mutex
	gates map[string]chan struct{}
}

// shut makes the loads of this node and these keys wait. The test calls shut before these loads begin.
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

// openAll lets all loads continue. The clean-up of a test calls openAll, because after a failure some loads may still
// wait at the gate, and Close waits for these loads.
func (g *gate) openAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for name, opened := range g.gates {
		close(opened)
		delete(g.gates, name)
	}
}

func (g *gate) wait(n *farmNode, key string) {
	g.mu.Lock()
	opened := g.gates[n.name+key]
	g.mu.Unlock()
	if opened != nil {
		<-opened
	}
}

// getters calls Get in the background. The method got waits until one of these calls has returned, and checks the
// returned value.
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
			g.t.Errorf("%s: Get(%q) returned %q, want %s", n.name, key, value, version)
		}
	case <-time.After(10 * time.Second):
		g.t.Errorf("%s: Get(%q) did not return", n.name, key)
	}
}

// Node A loads, and its lease and claim are lost with their master. Node B acquires lease and claim from the next
// master while A still loads. A's value is older than B's value. A's value must not be stored, whether A publishes
// before or after B.
func TestFailoverTwoHolders(t *testing.T) {
	s := realtest.StartSentinel(t)
	f := newFarm(t, 3, overSentinel(s), refill.Config{TTL: time.Minute, LoadTimeout: 30 * time.Second})
	a, b, c := f.nodes[0], f.nodes[1], f.nodes[2]
	var gates gate
	f.duringLoad = gates.wait
	t.Cleanup(gates.openAll)
	get := getters{t: t}
	before, after := []string{"before-1", "before-2", "before-3"}, []string{"after-1", "after-2", "after-3"}
	both := slices.Concat(before, after)
	all := append(slices.Clone(both), "alone")
	gates.shut(a, all...)
	gates.shut(b, both...)

	s.CutReplicas()
	get.start(a, all...)
	eventually(t, "A loads all keys", func() bool { return f.running(a) == len(all) })
	f.version.Store(2) // the database changes, so the values that A has read are outdated
	old := s.KillMaster()
	began := time.Now()
	s.ThawReplicas()
	s.NextMaster(old)
	f.writable()
	took := time.Since(began)
	get.start(b, both...)
	eventually(t, "B loads the same keys", func() bool { return f.running(b) == len(both) })
	if n := f.running(a); n != len(all) {
		t.Fatalf("A loads %d keys: no lease has two holders", n)
	}
	t.Logf("result: %d leases with two holders, %v after the kill", len(both), took.Round(time.Millisecond))

	rejected := a.count(refill.EventPublishRejected)
	for _, key := range before { // A publishes while B loads
		gates.open(a, key)
		get.got(a, key, "v1") // A's own caller waited for A's load, so it gets the old value
		eventually(t, "the publish of A was rejected", func() bool {
			return a.count(refill.EventPublishRejected) > rejected
		})
		rejected++
		if r, found := c.Peek(context.Background(), key); found {
			t.Errorf("%q was stored by A, which has no claim: %q", key, r.Value)
		}
		gates.open(b, key)
		get.got(b, key, "v2")
	}
	for _, key := range after { // A publishes after B
		gates.open(b, key)
		get.got(b, key, "v2")
		gates.open(a, key)
		get.got(a, key, "v1")
		eventually(t, "the publish of A was rejected", func() bool {
			return a.count(refill.EventPublishRejected) > rejected
		})
		rejected++
	}
	gates.open(a, "alone") // B has not acquired this key
	get.got(a, "alone", "v1")
	for _, n := range []*farmNode{c, a, b} {
		for _, key := range all {
			if value, err := n.Get(context.Background(), key); err != nil || versionOf(value) != "v2" {
				t.Errorf("%s: %q, %v: A's value was stored", n.name, value, err)
			}
		}
	}
	if n := b.count(refill.EventPublished); n != len(both) || a.count(refill.EventPublished) != 0 {
		t.Errorf("A published %d keys, B %d of %d", a.count(refill.EventPublished), n, len(both))
	}
	f.close(s.Master())
}

// A user's lock is lost with its master, and a second holder acquires it while the first holder is cut off. The first
// holder must be notified once it can reach Redis again. The second holder's fence must be larger. The test has two
// locks. The new master has the fence counter of lock "known", but not that of lock "new".
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
		// This TTL is longer than the failover. Otherwise the lock of the first holder would end by its TTL, before the
		// failover takes the lock away.
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
		return !slices.ContainsFunc(s.Replicas(), func(r *realtest.Redis) bool {
			return (&goredisServer{r}).do(t, "dbsize") != int64(1)
		})
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
		eventually(t, "the lock is acquired at the next master", func() bool {
			var err error
			second[i], err = lockers[1].TryLock(ctx, key)
			return err == nil
		})
		select {
		case <-first[i].Lost():
			t.Errorf("%q was not held twice: this test proves nothing", key)
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
			t.Errorf("%q: the context of the first holder ended with %v", key, cause)
		}
		if err := first[i].Release(ctx); !errors.Is(err, refill.ErrLost) {
			t.Errorf("%q: the first holder's Release: %v", key, err)
		}
		if err := second[i].Release(ctx); err != nil {
			t.Errorf("%q: the second holder's Release: %v", key, err)
		}
	}
	t.Logf("result: %d locks with two holders; the first holders were notified within %v",
		len(keys), time.Since(healed).Round(time.Millisecond))
}

// replaced is a topology in which the master of a key can be killed and is replaced.
type replaced struct {
	open    func() redis.UniversalClient
	servers []*realtest.Redis
	kill    func(t *testing.T) *realtest.Redis
	next    func(t *testing.T, old *realtest.Redis)
}

// A master is killed under traffic. No Get may fail, and the number of loads without a master is bounded. With the
// next master there must be one load per expiry again. An Invalidate must reach every L1, although the nodes first
// subscribed at another server.
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
				kill: func(*testing.T) *realtest.Redis { r := c.NodeFor(redisKey("hot")); r.Kill(); return r },
				next: func(_ *testing.T, old *realtest.Redis) { c.NextMaster(redisKey("hot"), old) },
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
	t.Logf("result: all agreed on the next master %v after the kill", time.Since(killed).Round(time.Millisecond))
	f.writable()
	eventually(t, "all nodes have subscribed", f.allSubscribed)
	healed := time.Now()
	t.Logf("result: all nodes worked as before %v after the kill", healed.Sub(killed).Round(time.Millisecond))
	meanwhile := len(f.loadsOf("hot", killed))
	if most := 3 * (int(healed.Sub(killed)/ttl) + 2); meanwhile > most {
		t.Errorf("%d loads while there was no master, want at most %d", meanwhile, most)
	}
	// Loads that began without a lease may still run. So the check begins one TTL later.
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

// A slot moves to another master while the nodes read, load and invalidate its keys. No Get may fail, loads are
// bounded, a running load keeps its lease, and an Invalidate takes effect in the end.
func TestSlotMovesUnderTraffic(t *testing.T) {
	const ttl = 400 * time.Millisecond
	const lockTTL = 2 * time.Second
	cluster := realtest.StartCluster(t, 3, 0)
	f := newFarm(t, 3, overNodes(cluster), refill.Config{
		TTL: ttl, StaleFor: time.Minute, LocalTTL: longTTL, LockTTL: lockTTL, MaxLoads: 4,
	})
	var gates gate
	f.duringLoad = gates.wait
	t.Cleanup(gates.openAll)
	get := getters{t: t}
	tr := f.startTraffic("hot", "long")
	f.oneLoadPerExpiry("hot", ttl, f.base, 3)
	move := func(key string, during func()) {
		t.Helper()
		from, to := cluster.NodeFor(redisKey(key)), (*realtest.Redis)(nil)
		for _, r := range cluster.Servers() {
			if r != from {
				to = r
			}
		}
		m := cluster.OpenSlot(cluster.Slot(redisKey(key)), to)
		during()
		m.Finish()
	}

	opened := time.Now()
	move("hot", func() { tr.waitForGets() })
	moved := time.Now()
	f.oneLoadPerExpiry("hot", ttl, moved.Add(ttl), 3)
	most := 3 * (int(moved.Add(ttl).Sub(opened)/ttl) + 1)
	n := len(f.loadsOf("hot", opened)) - len(f.loadsOf("hot", moved.Add(ttl)))
	t.Logf("result: the slot was open for %v; %d loads in that time and just after it",
		moved.Sub(opened).Round(time.Millisecond), n)
	if n > most {
		t.Errorf("%d loads, want at most %d", n, most)
	}

	// While a load runs, the slot with its lease and claim moves to another master. The load must keep lease and claim,
	// and its value must be published.
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
	move("long-flight", func() { pass(lockTTL/3 + 50*time.Millisecond) }) // a renewal fails with TRYAGAIN
	pass(lockTTL)                                                         // without a renewal, the lease has ended
	gates.open(a, "long-flight")
	get.got(a, "long-flight", "v1")
	get.got(b, "long-flight", "v1")
	if n := len(f.loadsOf("long-flight", f.base)); n != 1 || a.count(refill.EventLeaseLost) != 0 {
		t.Errorf("%d loads of a key that moved, %d leases lost, want 1 and 0", n, a.count(refill.EventLeaseLost))
	}

	// Invalidate runs while the slot is open. If Invalidate cannot remove the key at once, Invalidate returns an error,
	// and the Loader retries the invalidation.
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

// The clients are connected to a replica, so they can read but not write, and no node can acquire a lease. A Get must
// return a value, or, beyond MaxLoads, ErrOverloaded. When the replica becomes a master, there must be one load per
// expiry again.
func TestReadOnlyReplica(t *testing.T) {
	const ttl = 300 * time.Millisecond
	master := realtest.StartRedis(t, "--repl-diskless-sync-delay", "0")
	host, port, _ := net.SplitHostPort(master.Addr())
	replica := realtest.StartRedis(t, "--replicaof", host, port)
	eventually(t, "the replica follows the master", func() bool {
		info, _ := (&goredisServer{replica}).do(t, "info", "replication").(string)
		return strings.Contains(info, "master_link_status:up")
	})
	f := newFarm(t, 2, overOne(replica), refill.Config{TTL: ttl, StaleFor: time.Minute, LocalTTL: longTTL, MaxLoads: 2})
	for _, n := range f.nodes {
		eventually(t, n.name+" was warned", func() bool { return n.count(refill.EventStoreWarning) > 0 })
		if text := n.warnings[0]; !strings.Contains(text, "replica") {
			t.Errorf("%s: the warning does not name the replica: %s", n.name, text)
		}
	}
	tr := f.startTraffic("hot", "long")
	tr.waitForGets() // fills L1, so that the Gets of the traffic need no load slots below
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
	tr.waitForGets()
	if n := f.mostAtOnce(); n > 2 {
		t.Errorf("%d loads at once in one node, MaxLoads is 2", n)
	}
	for _, n := range f.nodes {
		if err := n.Invalidate(context.Background(), "long"); err == nil {
			t.Errorf("%s: Invalidate on a replica returns no error", n.name)
		}
	}
	without := len(f.loadsOf("hot", f.base))
	began := time.Now()
	(&goredisServer{replica}).do(t, "replicaof", "no", "one")
	for _, n := range f.nodes {
		eventually(t, n.name+" has retried its Invalidate", func() bool {
			return n.count(refill.EventInvalidateRetried) > 0
		})
	}
	t.Logf("result: %d loads without a lease; the Invalidates were executed %v after the promotion",
		without, time.Since(began).Round(time.Millisecond))
	f.writable()
	f.oneLoadPerExpiry("hot", ttl, time.Now().Add(ttl), 4)
	f.invalidateReachesAll("long")
	tr.end()
	f.close(replica)
}

// A server is killed under traffic and comes back empty. L1 must answer while the server is down. After the restart
// the fleet must load each key once.
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
	tr.waitForGets()
	eventually(t, "every key has been loaded", func() bool { return loads() >= len(keys) })
	server.Kill()
	for _, n := range f.nodes {
		eventually(t, n.name+" is disconnected", func() bool { return !n.isSubscribed() })
	}
	tr.waitForGets()
	server.Restart()
	began := time.Now()
	eventually(t, "all nodes have subscribed", f.allSubscribed)
	eventually(t, "every key was loaded again", func() bool { return loads() >= 2*len(keys) })
	t.Logf("result: all keys were loaded again %v after the restart", time.Since(began).Round(time.Millisecond))
	tr.waitForGets()
	tr.waitForGets()
	for _, key := range keys {
		all := f.loadsOf(key, f.base)
		if n := len(withLease(all)); n > 2 || n < 2 && n == len(all) {
			t.Errorf("%q was loaded %d times, want once before the restart and once after it", key, n)
		}
	}
	f.invalidateReachesAll(keys[0])
	tr.end()
	f.close(server)
}

// Redis pauses writes, then sleeps for 0.8 s, and then loses its scripts repeatedly. No Get may fail. After each
// fault there must be one load per expiry again.
func TestServerStalls(t *testing.T) {
	const ttl = 200 * time.Millisecond
	server := realtest.StartRedis(t)
	f := newFarm(t, 2, overOne(server), refill.Config{TTL: ttl, StaleFor: time.Minute, LocalTTL: longTTL})
	a, b := f.nodes[0], f.nodes[1]
	var gates gate
	f.duringLoad = gates.wait
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
		if n := len(f.loadsOf(key, f.base)); n > most { // a publish that exceeds StoreTimeout may be lost
			t.Errorf("%d loads over a pause of %v, want at most %d", n, pause, most)
		}
	}
	admin.do(t, "debug", "sleep", "0.8")
	f.writable()
	eventually(t, "all nodes have subscribed", f.allSubscribed)
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
