//go:build unix

package realtest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
)

// This file tests tags after a restart of Redis, which loses the states of all tags.

// taggedNodes starts Redis and nodes whose values all have a tag, and stores a value. Then it restarts Redis, which is
// empty afterwards, and waits until all nodes have subscribed again.
func taggedNodes(t *testing.T, n int, cfg refill.Config) []*rigNode {
	t.Helper()
	r := newRig(t)
	cfg.Tags = []string{"all"}
	// These timeouts are long, so that a second without an answer on a busy machine does not look like an outage.
	cfg.LockTTL, cfg.StoreTimeout = 4*time.Second, time.Second
	var nodes []*rigNode
	for range n {
		nodes = append(nodes, r.node(redis.Options{}, cfg))
	}
	nodes[0].gets("before", "before")
	r.server.Restart()
	for _, n := range nodes {
		n.waitSubscribed()
	}
	<-time.After(3 * time.Second) // so that the loads of the tests begin some time after the restart
	return nodes
}

// Redis has restarted empty, and the values have a tag of Config.Tags. Redis no longer knows this tag, and a value with
// an unknown tag is invalid. Four nodes ask for one key at once. The fleet must load it once, so the first load must
// make the tag known.
func TestTagsAfterARestart(t *testing.T) {
	nodes := taggedNodes(t, 4, refill.Config{})
	loads := int64(0)
	for _, n := range nodes {
		loads -= n.loads.Load()
		n.load = func(context.Context, string) (string, error) {
			<-time.After(100 * time.Millisecond)
			return "value", nil
		}
	}
	var wg sync.WaitGroup
	for _, n := range nodes {
		wg.Go(func() { n.gets("k", "value") })
	}
	wg.Wait()
	for _, n := range nodes {
		loads += n.loads.Load()
	}
	t.Logf("result: %d load for 4 nodes", loads)
	if loads != 1 {
		t.Errorf("4 nodes made %d loads, want 1", loads)
	}
}

// Redis has restarted empty, the values have a tag of Config.Tags, and L1 is off. Redis no longer knows this tag, and a
// value with an unknown tag is invalid. 100 Gets of one key must cause one load, because that load makes the tag known,
// and its value is valid.
func TestTagsAfterARestartWithoutL1(t *testing.T) {
	n := taggedNodes(t, 1, refill.Config{LocalTTL: -1})[0]
	before := n.loads.Load()
	for range 100 {
		n.gets("k", "k")
	}
	loads := n.loads.Load() - before
	t.Logf("result: %d load for 100 Gets", loads)
	if loads != 1 {
		t.Errorf("100 Gets made %d loads, want 1", loads)
	}
}
