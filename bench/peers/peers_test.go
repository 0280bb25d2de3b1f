package peers_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

// The test runs each peer with and without L1. The first Get must return the loaded value, a later Get must not load,
// and a Get after an Invalidate must load again.
func TestPeers(t *testing.T) {
	for _, p := range peers.All() {
		for _, noLocal := range []bool{false, true} {
			if noLocal && (!p.Shared || !p.Local) {
				continue
			}
			name := p.Name
			if noLocal {
				name += "-without-L1"
			}
			t.Run(name, func(t *testing.T) { testPeer(t, p, noLocal) })
		}
	}
}

func testPeer(t *testing.T, p peers.Peer, noLocal bool) {
	var loads atomic.Int64
	s := peers.Settings{TTL: time.Minute, StaleFor: time.Minute, Entries: 1000, NoLocal: noLocal}
	s.Load = func(_ context.Context, key string) (*peers.Product, error) {
		return &peers.Product{ID: key, Seq: loads.Add(1)}, nil
	}
	if p.Shared {
		s.Redis = realtest.StartRedis(t).Addr()
	}
	c, err := p.Open(s)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	get := func() *peers.Product {
		t.Helper()
		got, err := c.Get(t.Context(), "42")
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := get(); got.ID != "42" || got.Seq != 1 {
		t.Fatalf("the first Get gives %+v", got)
	}
	// sturdyc stores a value in the background after it has answered, so a second Get may load again. So the test
	// repeats get until a Get does not load.
	for before := int64(0); before != loads.Load(); {
		before = loads.Load()
		get()
	}
	before := loads.Load()
	if got := get(); loads.Load() != before || p.Name != "goredis-get" && p.Name != "rueidis-get" && got.ID != "42" {
		t.Fatalf("a later Get gives %+v, loads: %d, then %d", got, before, loads.Load())
	}
	// The test repeats Invalidate and get until a Get loads. There are two reasons: rocks-weak answers with the old
	// value before it loads, and gocache may store the old value again after the Invalidate.
	if i, ok := c.(peers.Invalidator); ok {
		for loads.Load() == before {
			if err := i.Invalidate(t.Context(), "42"); err != nil {
				t.Fatal(err)
			}
			get()
		}
	}
}
