package refill_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// Bugs of peers where an invalidation meets a fill. Those of this group that another test shows precisely:
//
//	FusionCache had to learn: a message about an older value than memory has    TestAnAnnouncementOutOfOrder
//	FusionCache had to learn: an invalidation that could not be sent            TestWithoutTheStore
//	scylladb#10117: a read begins before the invalidation, and ends after it    TestAReadOvertakenByAnInvalidate

// sturdyc, hot, gocache, jetcache-go, go-redis/cache, go-zero (#3000), Guava (#1881, open since 2014): a value that was
// deleted while its load was running comes back, for a whole TTL. Whoever invalidates, here or elsewhere, softly or not,
// no level of any node may have it.
func TestPeerDeleteDuringAFill(t *testing.T) {
	for by, name := range []string{"the node that loads", "another node"} {
		for _, soft := range []bool{false, true} {
			t.Run(fmt.Sprintf("by %s, soft %v", name, soft), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					d := &db{took: 100 * ms}
					cfg := refill.Config{TTL: time.Hour, StaleFor: time.Hour, Shared: refill.NewMemory()}
					nodes := fleet(t, 2, d, cfg)
					var wg sync.WaitGroup
					wg.Go(func() { get(t, nodes[0], "k") })
					time.Sleep(50 * ms)
					d.version.Store(1)
					void := nodes[by].Invalidate
					if soft {
						void = nodes[by].Expire
					}
					if err := void(t.Context(), "k"); err != nil {
						t.Fatal(err)
					}
					wg.Wait()
					synctest.Wait()
					for i, l := range append(nodes, fleet(t, 1, d, cfg)...) { // one without a memory, too
						if v := get(t, l, "k"); v != "k v1" {
							t.Errorf("node %d: %q came back", i, v)
						}
					}
				})
			})
		}
	}
}

// layered-loader#414, lakekeeper#1843, and all that compare the value or its time: nothing was there when the load began,
// nothing is there when it ends (ABA), and in between the key was invalidated twice and loaded once.
func TestPeerDeleteDuringAFillTwice(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
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
			t.Errorf("%q, %v: the first load's value was stored", b, err)
		}
	})
}

// FusionCache (in the background), bentocache and dogpile.cache stamp a value with the end of its load, so that what was
// invalidated during the load seems older than the value; and it lives too long by the length of the load.
func TestPeerStampedAtTheEndOfTheLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 600 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, Jitter: -1})
		get(t, nodes[0], "k")
		r, err := nodes[1].GetResult(t.Context(), "k")
		if err != nil || r.Age != 600*ms || r.Remaining != 400*ms {
			t.Errorf("%+v, %v; want an age from the start of the load", r, err)
		}
		time.Sleep(450 * ms) // and a tick of the coarse clock
		for _, l := range nodes {
			get(t, l, "k")
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("%d loads, want 2: TTL counts from the start", n)
		}
	})
}

// sturdyc's Delete forgets a level: it removes from memory alone, and the next Get brings the old value back from the
// shared store.
func TestPeerDeleteForgetsALevel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		cfg := refill.Config{TTL: time.Hour, Shared: refill.NewMemory()}
		nodes := fleet(t, 2, d, cfg)
		for _, l := range nodes {
			get(t, l, "k")
		}
		d.version.Store(1)
		if err := nodes[0].Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		if b, err := cfg.Shared.Get(t.Context(), "thing:k"); b != nil || err != nil {
			t.Errorf("the store still has %q, %v", b, err)
		}
		synctest.Wait()                                           // the push
		for i, l := range append(nodes, fleet(t, 1, d, cfg)...) { // one without a memory, too
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d: %q", i, v)
			}
		}
	})
}

// redcache's refresh writes "if the key is there and no lock": delete, fill with v2 during a refresh, and the refresh puts
// v1 back over it.
func TestPeerRefreshOverANewerValue(t *testing.T) {
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
		time.Sleep(500 * ms) // the refresh is over
		for i, l := range nodes {
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d: %q, the refresh has put back", i, v)
			}
		}
	})
}

// maypok86/otter#137: an invalidation during a load gives one of its callers "" and no error.
func TestPeerInvalidateGivesNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Hour})
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * ms)
				v, err := nodes[i%2].Get(t.Context(), "k")
				if err != nil || v != "k v0" {
					t.Errorf("caller %d: %q, %v", i, v, err)
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

// ristretto (dgraph-io/ristretto#52) queues a Set and carries out a Del at once, so that Set, Del, Get can find the value.
// go-redis/cache (#72, #105): its local cache, of the same kind, does not overwrite. L1 stands on ristretto.
func TestPeerLocalCacheOutOfOrder(t *testing.T) {
	var version atomic.Int64
	d := &db{}
	l := node(t, d.load, refill.Config{TTL: time.Hour, LocalEntries: 1000})
	for i := range 2000 {
		key := fmt.Sprint(i % 50)
		want := func(what string) {
			t.Helper()
			if v, now := get(t, l, key), fmt.Sprintf("%s v%d", key, version.Load()); v != now {
				t.Fatalf("round %d, after %s: %q, want %q", i, what, v, now)
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

// viney-shih/go-cache publishes an eviction whenever memory is filled, from the shared store, too: nodes evict each other's
// entries in a ring for ever.
func TestPeerFillOfMemoryIsAnnounced(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		var notes atomic.Int64
		defer shared.Listen("thing", func(n refill.Note) {
			if n.Kind != refill.NoteUp {
				notes.Add(1)
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
		if n := notes.Load(); n != 0 {
			t.Errorf("%d announcements of one load that nobody waited for", n)
		}
	})
}

// A receiver that fetches what it is told of, though it does not hold it, makes a herd of its own (FusionCache drops such
// messages); and so does one that obeys its own.
func TestPeerPushOfWhatNobodyHolds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, l, peer := pair(t, &db{}, refill.Config{TTL: time.Hour})
		get(t, l, "own")
		calls := s.calls.Load()
		for i := range 20 {
			get(t, peer, fmt.Sprint(i))
			if err := peer.Refresh(t.Context(), fmt.Sprint(i)); err != nil { // what replaces something is announced
				t.Fatal(err)
			}
		}
		if err := peer.Invalidate(t.Context(), "7", "8"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		get(t, l, "own")
		if n := s.calls.Load() - calls; n != 0 {
			t.Errorf("%d calls of the store for keys that this node does not hold", n)
		}
	})
}

// A fill that could not be stored must not be announced as one: the others would read the old value again (FusionCache: no
// notification if the write failed).
func TestPeerAnnouncedThoughNotStored(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		var filled atomic.Int64
		defer shared.Listen("thing", func(n refill.Note) {
			if n.Kind == refill.NoteFilled {
				filled.Add(1)
			}
		})()
		d := &db{took: 100 * ms}
		l := fleet(t, 1, d, refill.Config{TTL: time.Hour, Shared: shared})[0]
		get(t, l, "k") // only what replaces something, or is waited for, is announced at all
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
			t.Errorf("%d announcements of a value that is stored nowhere", n)
		}
	})
}

// A message that says only "changed" makes an expired value a deleted one, and then there is nothing to serve when the load
// fails (FusionCache tells Remove from Expire for that reason).
func TestPeerExpireTakesTheSpareValue(t *testing.T) {
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
			if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.EventStaleOnError {
				t.Errorf("node %d: %+v, %v", i, r, err)
			}
		}
	})
}

// FusionCache keeps only the last of the messages that it could not send: an Expire after a Remove then keeps a value that
// must not be served any more.
func TestPeerOnlyTheLastMissedMessage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, l, peer := pair(t, &db{}, refill.Config{TTL: time.Hour, StaleFor: time.Hour})
		get(t, peer, "k")
		s.cut(true)
		if l.Invalidate(t.Context(), "k") == nil || l.Expire(t.Context(), "k") == nil {
			t.Error("the store was not reached, and nobody is told")
		}
		s.cut(false)
		time.Sleep(time.Second)
		if b, err := s.Get(t.Context(), "thing:k"); b != nil || err != nil {
			t.Errorf("%d bytes, %v: the Invalidate has become an Expire", len(b), err)
		}
	})
}

// FusionCache SkipDistributedCacheReadWhenStale, Laravel without its comparison of "created": a node whose memory is stale
// loads, though another node has refreshed the value since and only the message was lost.
func TestPeerRefreshWithoutALookAtTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1})
		get(t, l, "k")
		get(t, peer, "k")
		s.mute.Store(true)
		time.Sleep(2 * time.Second)
		d.version.Store(1)
		get(t, peer, "k") // stale, and refreshed behind
		synctest.Wait()
		get(t, l, "k")
		synctest.Wait()
		if v := get(t, l, "k"); v != "k v1" || d.loads.Load() != 2 {
			t.Errorf("%q after %d loads, want the peer's value without a third one", v, d.loads.Load())
		}
	})
}

// Rails' race_condition_ttl reads and then writes, so that two processes both win the refresh; and past it everybody
// stampedes. Here are eight nodes at the very same moment, once while the value is stale and once when it is dead.
func TestPeerTwoWinnersOfARefresh(t *testing.T) {
	for state, after := range map[string]time.Duration{"stale": 2 * time.Second, "dead": time.Minute} {
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
					t.Errorf("%d loads, want that of the start and one more", n)
				}
			})
		})
	}
}
