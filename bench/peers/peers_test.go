package peers_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

// Every peer answers with what was loaded, then without a load, and loads again after an Invalidate.
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
	// sturdyc stores after it has answered: for a moment, another load is correct.
	for before := int64(0); before != loads.Load(); {
		before = loads.Load()
		get()
	}
	before := loads.Load()
	if got := get(); loads.Load() != before || p.Name != "goredis-get" && got.ID != "42" {
		t.Fatalf("a later Get gives %+v, loads: %d, then %d", got, before, loads.Load())
	}
	// rocks-weak loads after it has answered with the old value. gocache may put back what it was about to store.
	if i, ok := c.(peers.Invalidator); ok {
		for loads.Load() == before {
			if err := i.Invalidate(t.Context(), "42"); err != nil {
				t.Fatal(err)
			}
			get()
		}
	}
}
