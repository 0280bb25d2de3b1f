package refill_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests callers that join a flight late: when the flight has already answered with an old value, or when its
// load has begun. The flight must not give a late caller a value that a Get without a flight would refuse at that time.

// joinPair makes two nodes that share one store and have a database each: l has d, and peer has other. Node l reaches
// the store through s.
func joinPair(t *testing.T, cfg refill.Config) (s *spy, l, peer *refill.Loader[string], d, other *db) {
	t.Helper()
	shared := memory.New()
	s = newSpy(shared)
	d, other = new(db), new(db)
	other.version.Store(1)
	cfg.Jitter, cfg.Shared = -1, s
	l = node(t, d.load, cfg)
	cfg.Shared = shared
	return s, l, node(t, other.load, cfg), d, other
}

// A Get on node l returns the value of L1 and starts an early refresh. During the load of the refresh, the subscription
// of l breaks, and the peer invalidates the key and loads a newer value. A second Get on l joins the refresh. The
// second Get must return the newer value from the store at once. Without a subscription, node l must not trust L1,
// which still has the old value.
func TestJoiningARefreshWithoutASubscription(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, l, peer, d, _ := joinPair(t, refill.Config{TTL: 10 * time.Second, EarlyRefresh: 0.5})
		get(t, l, "k")
		time.Sleep(6 * time.Second)
		d.slow(3 * time.Second)
		get(t, l, "k")
		synctest.Wait()
		s.mute.Store(true)
		s.announce(driver.Announcement{Kind: driver.Disconnected, Err: errDown})
		if err := peer.Invalidate(t.Context(), "k"); err != nil {
			t.Error(err)
		}
		get(t, peer, "k")
		time.Sleep(time.Second)
		began := time.Now()
		if v := get(t, l, "k"); v != "k v1" || time.Since(began) != 0 {
			t.Errorf("got %q after %v, want the newer value \"k v1\" at once", v, time.Since(began))
		}
	})
}

// A Get on node l returns the value of the store and starts an early refresh, whose load takes 8 s. The peer
// invalidates the key and loads a newer value. Node l misses the announcements and does not notice the loss. A Get on l
// within LocalTTL (1 s) gets the old value. A Get that joins the refresh after LocalTTL must get the newer value.
func TestJoiningARefreshAfterLocalTTL(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, l, peer, d, _ := joinPair(t, refill.Config{TTL: 20 * time.Second, EarlyRefresh: 0.5, LocalTTL: time.Second})
		get(t, l, "k")
		time.Sleep(11 * time.Second)
		d.slow(8 * time.Second)
		get(t, l, "k")
		synctest.Wait()
		s.mute.Store(true)
		if err := peer.Invalidate(t.Context(), "k"); err != nil {
			t.Error(err)
		}
		get(t, peer, "k")
		time.Sleep(500 * ms)
		if v := get(t, l, "k"); v != "k v0" {
			t.Errorf("got %q within LocalTTL, want the value of L1", v)
		}
		time.Sleep(4500 * ms)
		began := time.Now()
		if v := get(t, l, "k"); v != "k v1" || time.Since(began) != 0 {
			t.Errorf("got %q after %v, want the newer value \"k v1\" at once", v, time.Since(began))
		}
	})
}

// L1 of node l has room for one key.
//
//  1. A Get on l returns the value of L1 and starts an early refresh. Its Acquire takes 100 ms to reach the store.
//  2. A Get of another key makes L1 drop the first key.
//  3. The peer publishes a newer value. Node l receives the announcement, but L1 has no entry to replace.
//  4. A second Get on l joins the refresh, which has answered with the old value. This Get must get the newer value.
func TestJoiningARefreshOfAnEvictedKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		cfg := refill.Config{TTL: 10 * time.Second, EarlyRefresh: 0.5, Jitter: -1, Shared: shared}
		d := new(db)
		peer := node(t, d.load, cfg)
		cfg.Shared, cfg.LocalEntries = &farAway{Store: shared, took: 100 * ms}, 1
		l := node(t, d.load, cfg)
		get(t, peer, "other")
		get(t, peer, "k")
		get(t, l, "k")
		time.Sleep(6 * time.Second)
		d.version.Store(1)
		d.slow(50 * ms)
		refreshed := make(chan error)
		go func() { refreshed <- peer.Refresh(t.Context(), "k") }()
		synctest.Wait()
		get(t, l, "k")
		get(t, l, "other")
		if err := <-refreshed; err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q after the announcement of the newer value, want \"k v1\"", v)
		}
	})
}

// Node l has no L1. A Get on l reads the old value, whose refresh is due. Before the reply arrives, the peer publishes
// a newer value, and node l hears the announcement. The Get may return the old value, because it began before. A second
// Get, which joins the refresh of the first one, must get the newer value.
func TestJoiningARefreshOfAReplacedValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		cfg := refill.Config{TTL: 10 * time.Second, EarlyRefresh: 0.5, Jitter: -1, Shared: shared}
		d := new(db)
		peer := node(t, d.load, cfg)
		s := newSpy(&farAway{Store: shared, took: 100 * ms})
		cfg.Shared, cfg.LocalTTL = s, -1
		l := node(t, d.load, cfg)
		get(t, peer, "k")
		time.Sleep(6 * time.Second)
		d.version.Store(1)
		s.onGet(func() {
			s.onGet(nil)
			if err := peer.Refresh(t.Context(), "k"); err != nil {
				t.Error(err)
			}
			synctest.Wait()
		})
		get(t, l, "k")
		synctest.Wait() // now the Acquire of the refresh runs
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q after the announcement of the newer value, want \"k v1\"", v)
		}
	})
}

// Node l loads a key. The peer invalidates the key meanwhile, and node l misses the announcement. The store rejects the
// value of the load. A caller that joined before the load began must get the rejected value. A caller that joined
// during the load must load again and get a newer value.
func TestJoiningALoadThatIsRejected(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Minute})
		s.mute.Store(true)
		s.onGet(func() { time.Sleep(100 * ms) })
		var wg sync.WaitGroup
		at := func(delay time.Duration, want string) {
			wg.Go(func() {
				time.Sleep(delay)
				if v := get(t, l, "k"); v != want {
					t.Errorf("the caller after %v got %q, want %q", delay, v, want)
				}
			})
		}
		at(0, "k v0")
		at(50*ms, "k v0")
		at(500*ms, "k v1")
		at(600*ms, "k v1")
		time.Sleep(300 * ms)
		d.version.Store(1)
		if err := peer.Invalidate(t.Context(), "k"); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2", n)
		}
	})
}

// A refresh runs on node l and has answered with a stale value. The peer invalidates the key during the load of the
// refresh, and node l misses the announcement. A caller then joins the refresh and waits for its final answer, because
// the caller refuses stale values, or because the value is no longer stale but expired. The store rejects the value of
// the refresh, so the caller must get the value of a new load.
func TestJoiningARefreshThatIsRejected(t *testing.T) {
	for name, c := range map[string]struct {
		staleFor time.Duration
		o        refill.GetOptions[string]
	}{
		"NoStale":               {staleFor: time.Hour, o: refill.GetOptions[string]{NoStale: true}},
		"past the end of stale": {staleFor: 1200 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				s, l, peer := pair(t, d, refill.Config{TTL: 10 * time.Second, StaleFor: c.staleFor, Jitter: -1})
				get(t, l, "k")
				time.Sleep(11 * time.Second)
				d.slow(time.Second)
				get(t, l, "k") // stale: starts the refresh
				s.mute.Store(true)
				time.Sleep(300 * ms)
				d.version.Store(1)
				if err := peer.Invalidate(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
				if r, err := l.GetResultWith(t.Context(), "k", c.o); err != nil || r.Value != "k v1" {
					t.Errorf("got %q, %v, %v after the Invalidate, want \"k v1\"", r.Value, r.Outcome, err)
				}
			})
		})
	}
}

// Each load takes 1 s, and the peer invalidates the key every 300 ms. So the store rejects the value of every load.
// Each caller must get an answer after two loads at most.
func TestJoiningLoadsThatAreAllRejected(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Minute})
		s.mute.Store(true)
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				case <-time.After(300 * ms):
				}
				d.version.Add(1)
				if err := peer.Invalidate(t.Context(), "k"); err != nil {
					t.Error(err)
				}
			}
		}()
		var wg sync.WaitGroup
		for i := range 30 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 100 * ms)
				began := time.Now()
				get(t, l, "k")
				if took := time.Since(began); took > 2*time.Second {
					t.Errorf("caller %d waited %v, want two loads (2 s) at most", i, took)
				}
				began = time.Now()
				if _, err := l.GetMany(t.Context(), []string{"k"}); err != nil || time.Since(began) > 2*time.Second {
					t.Errorf("GetMany of caller %d: %v after %v, want an answer within 2 s", i, err, time.Since(began))
				}
			})
		}
		wg.Wait()
		close(stop)
		<-stopped
	})
}
