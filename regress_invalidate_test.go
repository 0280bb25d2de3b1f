package refill_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests bugs of other libraries where an invalidation meets a fill. The head of regress_lock_test.go explains
// these files. Tests in other files cover these bugs:
//
//	FusionCache (fixed): a message about a value older than the one in L1      TestAnAnnouncementOutOfOrder
//	FusionCache (fixed): an invalidation that could not be sent is lost        TestWithoutTheStore
//	scylladb#10117: a read begins before the invalidation, and ends after it   TestAReadOvertakenByAnInvalidate

// In sturdyc, hot, gocache, jetcache-go, go-redis/cache, go-zero (#3000) and Guava (#1881, open since 2014) a value
// that is deleted during its load comes back for a whole TTL. Here the loading node or another node invalidates or
// expires the key during the load. Afterwards neither the store nor the L1 of any node may have the old value as fresh.
func TestInvalidateDuringALoad(t *testing.T) {
	for by, name := range []string{"the node that loads", "another node"} {
		for _, expire := range []bool{false, true} {
			t.Run(fmt.Sprintf("by %s, Expire %v", name, expire), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					d := &db{took: 100 * ms}
					cfg := refill.Config{TTL: time.Hour, StaleFor: time.Hour, Shared: memory.New()}
					nodes := fleet(t, 2, d, cfg)
					var wg sync.WaitGroup
					wg.Go(func() { get(t, nodes[0], "k") })
					time.Sleep(50 * ms)
					d.version.Store(1)
					invalidate := nodes[by].Invalidate
					if expire {
						invalidate = nodes[by].Expire
					}
					if err := invalidate(t.Context(), "k"); err != nil {
						t.Fatal(err)
					}
					wg.Wait()
					synctest.Wait()
					for i, l := range append(nodes, fleet(t, 1, d, cfg)...) { // and a new node with an empty L1
						if v := get(t, l, "k"); v != "k v1" {
							t.Errorf("node %d: got %q, want \"k v1\"", i, v)
						}
					}
				})
			})
		}
	}
}

// layered-loader#414, lakekeeper#1843, and all libraries that compare the value or its time have the ABA problem.
//
//  1. A slow load begins. The store has no value.
//  2. Another node invalidates the key and loads it, twice, and then invalidates it once more.
//  3. The slow load ends. The store has no value, as before, so these libraries store the old value.
//
// Here the Invalidates have ended the claim of the slow load, so the old value is not stored.
func TestTwoInvalidatesDuringALoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		cfg := refill.Config{TTL: time.Hour, Shared: shared}
		slow, fast := node(t, says("old", time.Second), cfg), node(t, says("new", 10*ms), cfg)
		defer behind(t, slow, "k")()
		time.Sleep(100 * ms)
		for range 2 {
			if err := fast.Invalidate(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			get(t, fast, "k")
		}
		if err := fast.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if b, err := shared.Get(t.Context(), "thing:k"); b != nil || err != nil {
			t.Errorf("got record %q, %v, want none: the value of the first load is old", b, err)
		}
	})
}

// FusionCache (in the background), bentocache and dogpile.cache stamp a value with the end of its load. An invalidation
// during the load then seems older than the value, and the value lives too long by the length of the load. Here the age
// of a value counts from the start of its load.
func TestAgeCountsFromTheStartOfTheLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 600 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, Jitter: -1})
		get(t, nodes[0], "k")
		r, err := nodes[1].GetResult(t.Context(), "k")
		if err != nil || r.Age != 600*ms || r.Remaining != 400*ms {
			t.Errorf("got %+v, %v, want age 600ms, 400ms left: both count from the start of the load", r, err)
		}
		time.Sleep(450 * ms) // and a tick of the coarse clock
		for _, l := range nodes {
			get(t, l, "k")
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2: TTL counts from the start of the load", n)
		}
	})
}

// sturdyc's Delete removes the value from memory alone. The next Get brings the old value back from the shared store.
// Here Invalidate removes the value from the store and from the L1 of every node.
func TestInvalidateReachesStoreAndL1(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		cfg := refill.Config{TTL: time.Hour, Shared: memory.New()}
		nodes := fleet(t, 2, d, cfg)
		for _, l := range nodes {
			get(t, l, "k")
		}
		d.version.Store(1)
		if err := nodes[0].Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		if b, err := cfg.Shared.Get(t.Context(), "thing:k"); b != nil || err != nil {
			t.Errorf("got record %q, %v in the store, want none", b, err)
		}
		synctest.Wait()                                           // for the announcement
		for i, l := range append(nodes, fleet(t, 1, d, cfg)...) { // and a new node with an empty L1
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d: got %q, want \"k v1\"", i, v)
			}
		}
	})
}

// A refresh of redcache writes its value if the key exists and is not locked.
//
//  1. A refresh reads v0.
//  2. Another node deletes the key and fills it with v1.
//  3. The refresh ends. The key exists and is not locked, so v0 overwrites v1. Here v0 is rejected.
func TestRefreshKeepsANewerValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1})
		get(t, nodes[0], "k")
		time.Sleep(2 * time.Second)
		d.slow(500 * ms)
		get(t, nodes[0], "k") // stale: a refresh begins, and reads v0
		time.Sleep(100 * ms)
		d.slow(0)
		d.version.Store(1)
		if err := nodes[1].Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		get(t, nodes[1], "k")
		time.Sleep(500 * ms) // the refresh has ended
		for i, l := range nodes {
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d: got %q, want \"k v1\": the refresh overwrote it", i, v)
			}
		}
	})
}

// maypok86/otter#137: after an invalidation during a load, one of the callers gets "" and no error. Here every caller
// gets a value.
func TestGetsDuringInvalidatesHaveAValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Hour})
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * ms)
				v, err := nodes[i%2].Get(t.Context(), "k")
				if err != nil || v != "k v0" {
					t.Errorf("caller %d: got %q, %v, want \"k v0\"", i, v, err)
				}
			})
		}
		for range 30 {
			time.Sleep(7 * ms)
			if err := nodes[0].Invalidate(t.Context(), "k"); err != nil {
				t.Error(err)
			}
		}
		wg.Wait()
	})
}

// ristretto (dgraph-io/ristretto#52), which our L1 uses, queues a Set and executes a Del at once. A Get after Set and
// Del can therefore find the value. go-redis/cache (#72, #105) has a local cache of the same kind, which does not
// overwrite. Here a Get returns the current value after each Invalidate and each Refresh.
func TestL1KeepsTheOrderOfWrites(t *testing.T) {
	var version atomic.Int64
	d := &db{}
	l := node(t, d.load, refill.Config{TTL: time.Hour, LocalEntries: 1000})
	for i := range 2000 {
		key := fmt.Sprint(i % 50)
		want := func(what string) {
			t.Helper()
			if v, now := get(t, l, key), fmt.Sprintf("%s v%d", key, version.Load()); v != now {
				t.Fatalf("round %d, after %s: got %q, want %q", i, what, v, now)
			}
		}
		d.version.Store(version.Add(1))
		if err := l.Invalidate(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		want("Invalidate")
		d.version.Store(version.Add(1))
		if err := l.Refresh(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		want("Refresh")
	}
}

// viney-shih/go-cache publishes an eviction whenever it fills its memory, even from the shared store. So the nodes
// evict each other's entries for ever. Here a node that fills its L1 from the store announces nothing.
func TestFillOfL1IsNotAnnounced(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		var announcements atomic.Int64
		defer shared.Subscribe("thing", func(n driver.Announcement) {
			if n.Kind != driver.Subscribed {
				announcements.Add(1)
			}
		})()
		d := &db{}
		nodes := fleet(t, 5, d, refill.Config{TTL: time.Hour, Shared: shared})
		for range 10 {
			for _, l := range nodes {
				get(t, l, "k")
			}
			synctest.Wait()
		}
		if n := announcements.Load(); n != 0 {
			t.Errorf("got %d announcements of one load without waiters on other nodes, want 0", n)
		}
	})
}

// Nodes that fetch announced keys which they do not have cause a stampede. FusionCache drops such messages. Nodes that
// handle their own announcements cause a stampede as well. Here an announcement of a key that the node does not have
// costs no call of the store.
func TestAnnouncementsOfOtherKeysCostNoCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, l, peer := pair(t, &db{}, refill.Config{TTL: time.Hour})
		get(t, l, "own")
		calls := s.calls.Load()
		for i := range 20 {
			get(t, peer, fmt.Sprint(i))
			if err := peer.Refresh(t.Context(), fmt.Sprint(i)); err != nil { // replaces a value, so it is announced
				t.Fatal(err)
			}
		}
		if err := peer.Invalidate(t.Context(), "7", "8"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		get(t, l, "own")
		if n := s.calls.Load() - calls; n != 0 {
			t.Errorf("got %d calls of the store for keys that this node does not have, want 0", n)
		}
	})
}

// A fill that could not be stored must not be announced. Otherwise other nodes would read the old value again.
// FusionCache sends no notification if the write failed. Here a rejected publication is not announced either.
func TestRejectedPublishIsNotAnnounced(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		var filled atomic.Int64
		defer shared.Subscribe("thing", func(n driver.Announcement) {
			if n.Kind == driver.Filled {
				filled.Add(1)
			}
		})()
		d := &db{took: 100 * ms}
		l := fleet(t, 1, d, refill.Config{TTL: time.Hour, Shared: shared})[0]
		get(t, l, "k") // so that the refresh replaces a value: otherwise it would not be announced in any case
		refreshed := make(chan error, 1)
		go func() { refreshed <- l.Refresh(t.Context(), "k") }()
		defer func() {
			if err := <-refreshed; err != nil {
				t.Error(err)
			}
		}()
		time.Sleep(50 * ms)
		if err := l.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * ms)
		synctest.Wait()
		if n := filled.Load(); n != 0 {
			t.Errorf("got %d announcements of a value that was not stored, want 0", n)
		}
	})
}

// A message that says only "changed" turns an expired value into a deleted one. No value is then left to serve when the
// load fails. FusionCache distinguishes Remove and Expire for that reason. Here Expire keeps the stale value on every
// node.
func TestExpireKeepsTheStaleValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Hour, StaleIfError: time.Hour})
		for _, l := range nodes {
			get(t, l, "k")
		}
		d.fail(errDown)
		if err := nodes[0].Expire(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for i, l := range nodes {
			if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.OutcomeStaleOnError {
				t.Errorf("node %d: got %+v, %v, want the old value as stale-on-error", i, r, err)
			}
		}
	})
}

// FusionCache keeps only the last of the messages that it could not send. An Expire after a Remove then keeps a value
// that must no longer be served. Here an Expire does not replace an Invalidate that waits for the store.
func TestExpireDoesNotReplaceAPendingInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, l, peer := pair(t, &db{}, refill.Config{TTL: time.Hour, StaleFor: time.Hour})
		get(t, peer, "k")
		s.cut(true)
		if l.Invalidate(t.Context(), "k") == nil || l.Expire(t.Context(), "k") == nil {
			t.Error("Invalidate or Expire returned no error although it could not reach the store")
		}
		s.cut(false)
		time.Sleep(time.Second)
		if b, err := s.Get(t.Context(), "thing:k"); b != nil || err != nil {
			t.Errorf("got a record of %d bytes, %v, want none: Expire replaced the pending Invalidate", len(b), err)
		}
	})
}

// In FusionCache with SkipDistributedCacheReadWhenStale, and in Laravel without its comparison of "created", a node
// whose L1 entry is stale loads at once. Another node may have refreshed the value, and only its announcement was lost.
// Here the node reads the store first and finds the new value.
func TestRefreshReadsTheStoreFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1})
		get(t, l, "k")
		get(t, peer, "k")
		s.mute.Store(true)
		time.Sleep(2 * time.Second)
		d.version.Store(1)
		get(t, peer, "k") // stale: starts a background refresh
		synctest.Wait()
		get(t, l, "k")
		synctest.Wait()
		if v := get(t, l, "k"); v != "k v1" || d.loads.Load() != 2 {
			t.Errorf("got %q after %d loads, want \"k v1\" from the peer after 2 loads", v, d.loads.Load())
		}
	})
}

// Rails' race_condition_ttl is the time after expiry in which one process refreshes and the others get the stale value.
// Rails reads and then writes, so two processes can both win the refresh. Once that time is over, all processes load.
// Here eight nodes call Get at the same moment, once while the value is stale and once after it has
// expired. Each time one node loads.
func TestOneLoadIfAllNodesRefresh(t *testing.T) {
	for state, after := range map[string]time.Duration{"stale": 2 * time.Second, "expired": time.Minute} {
		t.Run(state, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 100 * ms}
				nodes := fleet(t, 8, d, refill.Config{TTL: time.Second, StaleFor: 10 * time.Second})
				for _, l := range nodes {
					get(t, l, "k")
				}
				time.Sleep(after)
				var wg sync.WaitGroup
				for i := range 80 {
					wg.Go(func() { get(t, nodes[i%8], "k") })
				}
				wg.Wait()
				time.Sleep(200 * ms)
				if n := d.loads.Load(); n != 2 {
					t.Errorf("got %d loads, want 2: the first one and one more", n)
				}
			})
		})
	}
}
