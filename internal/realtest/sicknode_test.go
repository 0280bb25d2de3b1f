//go:build unix

package realtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
)

// The tests of this file run four nodes over a real Redis. The database of one node, or of all nodes, fails.

var errNoDatabase = errors.New("no route to the database")

const (
	sickNodes = 4
	sickMost  = 10 * time.Second // the longest test
)

// sickFleet makes four nodes with a TTL of 1 s, without StaleFor. The loads of a healthy node take 20 ms. The loads of
// the last node call sick.
func sickFleet(t *testing.T, sick func(context.Context, string) (string, error)) []*rigNode {
	t.Helper()
	r := newRig(t)
	nodes := make([]*rigNode, sickNodes)
	for i := range nodes {
		nodes[i] = r.node(redis.Options{}, refill.Config{
			TTL: time.Second, LoadTimeout: 2 * time.Second,
			LockTTL: 4 * time.Second, StoreTimeout: time.Second, // a busy machine must not look like an outage of Redis
		})
		nodes[i].load = func(ctx context.Context, key string) (string, error) {
			select {
			case <-time.After(20 * time.Millisecond):
				return key, nil
			case <-ctx.Done():
				return "", ctx.Err()
			}
		}
	}
	nodes[sickNodes-1].load = sick
	return nodes
}

// answers counts the Gets of one node by the second in which they began. gets counts all of these Gets, and failed
// those that returned an error. other counts those whose error is not the error of a load that cannot reach its
// database.
type answers [sickMost / time.Second]struct{ gets, failed, other atomic.Int64 }

// between returns how many Gets began from second from up to, but without, second to, and how many of these Gets
// failed.
func (a *answers) between(from, to int) (gets, failed int64) {
	for i := from; i < to; i++ {
		gets += a[i].gets.Load()
		failed += a[i].failed.Load()
	}
	return gets, failed
}

// others returns how many Gets failed with another error than that of a load that cannot reach its database.
func (a *answers) others() (n int64) {
	for i := range a {
		n += a[i].other.Load()
	}
	return n
}

// traffic is what each node gets: Gets for keys chosen at random. A Get does not wait for the end of earlier Gets.
type traffic struct {
	perTick  int           // Gets that begin every 5 ms
	patience time.Duration // the deadline of a Get
	length   time.Duration
}

// run sends the traffic to each node, and returns the counts of each node.
func (tr traffic) run(t *testing.T, nodes []*rigNode, keys []string) []answers {
	t.Helper()
	counts := make([]answers, len(nodes))
	var wg sync.WaitGroup
	began := time.Now()
	for i, n := range nodes {
		random := rand.New(rand.NewPCG(uint64(i), 1))
		wg.Go(func() {
			ticker := time.NewTicker(5 * time.Millisecond)
			defer ticker.Stop()
			for since := time.Duration(0); since < tr.length; since = time.Since(began) {
				count := &counts[i][since/time.Second]
				for range tr.perTick {
					key := keys[random.IntN(len(keys))]
					wg.Go(func() {
						ctx, cancel := context.WithTimeout(t.Context(), tr.patience)
						defer cancel()
						_, err := n.Get(ctx, key)
						count.gets.Add(1)
						if err != nil {
							count.failed.Add(1)
						}
						var failure *refill.LoadError
						if err != nil && (!errors.As(err, &failure) || failure.Err.Error() != errNoDatabase.Error()) {
							count.other.Add(1)
						}
					})
				}
				<-ticker.C
			}
		})
	}
	wg.Wait()
	for _, n := range nodes {
		if e := n.count(refill.EventStoreError) + n.count(refill.EventLeaseLost); e > 0 {
			t.Errorf("%d calls of Redis took longer than 1 s: this machine is too busy for this test", e)
		}
	}
	return counts
}

// sickKeys returns the keys that the nodes ask for.
func sickKeys(n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprint("k", i))
	}
	return keys
}

// One of four nodes cannot reach its database, and each of its loads fails at once. No Get on the other three nodes may
// fail. A Get on the sick node may fail only with the error of its own load.
func TestOneNodeWhoseLoadsFail(t *testing.T) {
	nodes := sickFleet(t, func(context.Context, string) (string, error) { return "", errNoDatabase })
	counts := traffic{perTick: 5, patience: waitLimit, length: 5 * time.Second}.run(t, nodes, sickKeys(200))
	for i := range nodes {
		gets, failed := counts[i].between(0, len(counts[i]))
		t.Logf("result: node %d: %d of %d Gets failed, %d loads", i, failed, gets, nodes[i].loads.Load())
		if i < sickNodes-1 && failed > 0 {
			t.Errorf("node %d: %d of %d Gets failed, want 0", i, failed, gets)
		}
	}
	if n := counts[sickNodes-1].others(); n > 0 {
		t.Errorf("%d Gets on the sick node failed with an error that is not of its loads, want 0", n)
	}
	if n := nodes[sickNodes-1].loads.Load(); n == 0 {
		t.Error("the sick node made no load: the test has tested nothing")
	}
}

// The database of one of four nodes does not answer: each load of that node takes until its ctx ends. LoadTimeout is
// 2 s. Of the Gets that begin after the first 2 s, at most 1 % may fail on each of the other three nodes.
func TestOneNodeWhoseLoadsHang(t *testing.T) {
	nodes := sickFleet(t, func(ctx context.Context, _ string) (string, error) {
		<-ctx.Done()
		return "", ctx.Err()
	})
	counts := traffic{perTick: 10, patience: time.Second, length: sickMost}.run(t, nodes, sickKeys(200))
	for i := range nodes {
		var seconds []string
		for s := range counts[i] {
			gets, failed := counts[i].between(s, s+1)
			seconds = append(seconds, fmt.Sprintf("%.2f %%", 100*float64(failed)/float64(max(gets, 1))))
		}
		t.Logf("result: node %d: %v of the Gets of each second failed, %d loads", i, seconds, nodes[i].loads.Load())
		gets, failed := counts[i].between(2, len(counts[i]))
		if i < sickNodes-1 && failed*100 > gets {
			t.Errorf("node %d: %d of %d Gets failed after the first 2 s, want 1 %% at most", i, failed, gets)
		}
	}
	if n := nodes[sickNodes-1].loads.Load(); n == 0 {
		t.Error("the sick node made no load: the test has tested nothing")
	}
}

// The databases of all four nodes are gone. The fleet may load each key at most twice within any ErrorTTL (1 s): once
// on the first node that fails, and once on a second node.
func TestAllNodesWithoutADatabase(t *testing.T) {
	var mu sync.Mutex // guards began
	began := map[string][]time.Time{}
	dead := func(_ context.Context, key string) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		began[key] = append(began[key], time.Now())
		return "", errNoDatabase
	}
	nodes := sickFleet(t, dead)
	for _, n := range nodes {
		n.load = dead
	}
	keys, length := sickKeys(200), 5*time.Second
	// No value is ever loaded, so each of these Gets asks Redis.
	counts := traffic{perTick: 2, patience: waitLimit, length: length}.run(t, nodes, keys)
	loads, shortest := 0, length
	for _, key := range keys {
		all := began[key]
		loads += len(all)
		for i := 2; i < len(all); i++ {
			between := all[i].Sub(all[i-2])
			shortest = min(shortest, between)
			if between < time.Second-5*time.Millisecond { // 5 ms less, because Redis counts whole milliseconds
				t.Errorf("%s: three loads within %v, want at most two within 1 s", key, between)
			}
		}
		if len(all) < 4 {
			t.Errorf("%s: %d loads in %v, want 4 at least: the fleet has given up", key, len(all), length)
		}
	}
	t.Logf("result: %d loads of %d keys in %v; the shortest time with three loads of a key was %v",
		loads, len(keys), length, shortest)
	for i := range counts {
		if gets, failed := counts[i].between(0, len(counts[i])); gets != failed || counts[i].others() > 0 {
			t.Errorf("node %d: %d of %d Gets failed, %d with an error that is not of a load; want all and 0",
				i, failed, gets, counts[i].others())
		}
	}
}
