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

// This file tests that refill does not have certain bugs of other libraries in which an invalidation and a fill
// overlap. The comment at the top of regress_lock_test.go explains the regress files. Tests in other files check that
// refill does not have these bugs:
//
//	FusionCache (fixed): a message about a value older than the one in L1      TestAnAnnouncementOutOfOrder
//	FusionCache (fixed): an invalidation that could not be sent is lost        TestWithoutTheStore
//	scylladb#10117: a read begins before the invalidation, and ends after it   TestAReadOvertakenByAnInvalidate

// In sturdyc, hot, gocache, jetcache-go, go-redis/cache, go-zero (#3000) and Guava (#1881, open since 2014) a value
// that is deleted during its load comes back for a whole TTL. Here the loading node or another node invalidates or
// expires the key during the load. After that, neither the store nor the L1 of any node has the old value as fresh.
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
					for i, l := range append(nodes, fleet(t, 1, d, cfg)...) { // the last node is new and has an empty L1
						if v := get(t, l, "k"); v != "k v1" {
							t.Errorf("node %d: got %q, want \"k v1\"", i, v)
						}
					}
				})
			})
		}
	}
}

// Some libraries store a loaded value if the stored value, or the time of the stored value, is the same as before the
// load. These libraries have the ABA problem (layered-loader#414, lakekeeper#1843).
//
//  1. A slow load begins. The store has no value.
//  2. Another node invalidates the key and loads it, twice, and then invalidates it once more.
//  3. The slow load ends. The store has no value, as in step 1, so these libraries store the old value.
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

// FusionCache (in the background), bentocache and dogpile.cache stamp a value with the end of its load. An
// invalidation during the load then seems older than the value. Also, the value lives too long by the duration of the
// load. Here the age of a value counts from the start of its load.
func TestAgeCountsFromTheStartOfTheLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 600 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, Jitter: -1})
		get(t, nodes[0], "k")
		r, err := nodes[1].GetResult(t.Context(), "k")
		if err != nil || r.Age != 600*ms || r.Remaining != 400*ms {
			t.Errorf("got %+v, %v, want age 600ms, 400ms left: both count from the start of the load", r, err)
		}
		time.Sleep(450 * ms) // the 400 ms that are left, and the 50 ms by which the clock of L1 may be late
		for _, l := range nodes {
			get(t, l, "k")
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2: TTL counts from the start of the load", n)
		}
	})
}

// Delete of sturdyc removes the value from memory alone, so the next Get reads the old value from the shared store
// again. Here Invalidate removes the value from the store and from the L1 of every node.
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
		synctest.Wait()                                           // until node 1 has handled the announcement
		for i, l := range append(nodes, fleet(t, 1, d, cfg)...) { // the last node is new and has an empty L1
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d: got %q, want \"k v1\"", i, v)
			}
		}
	})
}

// A refresh of redcache stores its value if the key exists and is not locked.
//
//  1. A refresh reads v0.
//  2. Another node deletes the key and fills it with v1.
//  3. The refresh ends. The key exists and is not locked, so v0 overwrites v1.
//
// Here the store rejects v0, because the refresh has lost its claim.
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
		time.Sleep(500 * ms) // until the refresh has ended
		for i, l := range nodes {
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d: got %q, want \"k v1\": the refresh overwrote it", i, v)
			}
		}
	})
}

// In maypok86/otter (#137) one of the callers gets "" and no error if the key is invalidated during the load. Here
// every caller gets a value.
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

// ristretto, which L1 uses, queues a Set but executes a Del at once (dgraph-io/ristretto#52). So a Get after Set and
// Del can still find the value. The local cache of go-redis/cache (#72, #105) queues writes as well, and does not
// overwrite a value. Here a Get returns the current value after each Invalidate and after each Refresh.
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

// A node of viney-shih/go-cache publishes an eviction whenever it fills its memory, even from the shared store. So the
// nodes evict each other's entries for ever. Here a node that fills its L1 from the store announces nothing.
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

// If every node reads every announced key from the store, the store is overloaded. The same happens if nodes also read
// the keys of their own announcements. FusionCache therefore ignores messages about keys that a node does not have.
// Here a node makes no call of the store for an announced key that its L1 does not have.
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

// FusionCache sends no message about a value if the write of the value failed. Otherwise other nodes would read the
// old value again. Here refill does not announce a value that the store rejected.
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
		get(t, l, "k") // stores a value, because a Refresh that replaces no value would not be announced in any case
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

// If a message says only that a key has changed, other nodes delete their value even after a mere expiry. No old value
// is then left to serve when the load fails. So FusionCache has separate messages for Remove and Expire. Here every
// node keeps the stale value after an Expire.
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

// FusionCache keeps only the last message about a key that it could not send. If that message is an Expire after a
// Remove, a value survives that must no longer be served. Here an Expire does not replace an Invalidate that waits for
// its retry.
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

// In FusionCache with SkipDistributedCacheReadWhenStale, a node whose L1 entry is stale loads without a look at the
// shared store. But another node may have refreshed the value, and only the announcement was lost. Here the refresh
// first asks the store, which returns the new value instead of the lease.
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

// With race_condition_ttl of Rails, one process refreshes an expired value. For the length of race_condition_ttl, the
// other processes get the stale value. Rails reads and writes in two steps, so two processes can both begin the
// refresh. After the length of race_condition_ttl, all processes load. Here eight nodes call Get at the same moment, in
// one run while the value is stale, and in another run after it has expired. In each run only one node loads.
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
