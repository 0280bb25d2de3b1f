package refill_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// Bugs of peers about waiting, contexts, errors and panics. Those of this group that another test shows precisely:
//
//	goo#196, autumn#2563: without the store, every node sends every load to the database    TestMaxLoads
//	FusionCache: a loser of an early refresh waits for the winner                           TestARefreshThatLosesKeepsQuiet
//	janos/singleflight#4: a flight whose load was cancelled is joined, on another node      TestTheLastCallerTakesTheLoadAlong
//	Varnish: who waited for a load that took longer than its TTL starts another one         TestLoadLongerThanTTLAndLockTTL

// rockscache, sturdyc, otter, bool64/cache, eko/gocache, go-chi/stampede: the load runs on the first caller's ctx, and when
// that caller leaves, all who wait get its cancellation: an outage at bucketeer-io (#2552), more than a fifth of all requests
// after each invalidation. bool64 then keeps that error for 20 s.
func TestPeerLeaderTakesAllAlong(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Hour, ErrorTTL: time.Hour})
		leader, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := nodes[0].Get(leader, "k"); !errors.Is(err, context.Canceled) {
				t.Errorf("the leader got %v", err)
			}
		})
		synctest.Wait()
		for i := range 20 {
			wg.Go(func() { get(t, nodes[i%2], "k") })
		}
		time.Sleep(500 * ms)
		cancel()
		wg.Wait()
		if n := d.loads.Load(); n != 1 {
			t.Errorf("%d loads, want 1: somebody still waited for it", n)
		}
		alone, cancel := context.WithTimeout(t.Context(), 10*ms)
		defer cancel()
		if _, err := nodes[0].Get(alone, "k2"); err == nil {
			t.Error("the test is void")
		}
		synctest.Wait()
		get(t, nodes[1], "k2") // no back-off for a cancellation
	})
}

// tailscale#18919: the last caller leaves, and the next one joins the flight that dies of it and gets a cancellation that is
// not its own. Here a flight takes its time to die.
func TestPeerDyingFlightIsJoined(t *testing.T) {
	bubble(t, func(t *testing.T) {
		way := &tap{Store: refill.NewMemory()}
		way.on(func(_ context.Context, did string) error {
			if did == "release" {
				time.Sleep(200 * ms)
			}
			return nil
		})
		d := &db{took: time.Second}
		l := fleet(t, 1, d, refill.Config{TTL: time.Hour, Shared: way})[0]
		ctx, cancel := context.WithTimeout(t.Context(), 100*ms)
		defer cancel()
		if _, err := l.Get(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		time.Sleep(100 * ms)
		if get(t, l, "k"); d.loads.Load() != 2 {
			t.Errorf("%d loads", d.loads.Load())
		}
	})
}

// rockscache refreshes with `go fetchNew(ctx…)`: with the ctx of an HTTP request, which ends as soon as the stale value is
// answered, the refresh never stores anything, and its lock stays.
func TestPeerRefreshOnTheCtxOfTheRequest(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		shared := refill.NewMemory()
		cfg := refill.Config{TTL: time.Second, StaleFor: time.Hour, Shared: shared, Jitter: -1}
		warm := fleet(t, 1, d, cfg)[0]
		get(t, warm, "k")
		time.Sleep(2 * time.Second)
		for _, l := range []*refill.Loader[string]{fleet(t, 1, d, cfg)[0], warm} { // one that finds it in the store, too
			d.version.Add(1)
			ctx, cancel := context.WithCancel(t.Context())
			if r, err := l.GetResult(ctx, "k"); err != nil || r.Outcome != refill.EventStale {
				t.Errorf("%+v, %v", r, err)
			}
			cancel()
			time.Sleep(150 * ms)
			if v, want := get(t, l, "k"), fmt.Sprintf("k v%d", d.version.Load()); v != want {
				t.Errorf("%q after the refresh, want %q", v, want)
			}
			nobodyHas(t, shared, "k")
			time.Sleep(2 * time.Second)
		}
	})
}

// e2b-dev/infra#1916, FusionCache at Altinn/dialogporten (#4252, #4300): a load that is not cancelled with its callers and has
// no time-out of its own, or whose time-out frees the callers and not the key: one hung query, and the key is dead until
// the process is restarted.
func TestPeerHungLoadWedgesItsKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		hung := make(chan struct{})
		var loads atomic.Int64
		load := func(context.Context, string) (string, error) {
			if loads.Add(1) == 1 {
				<-hung // whatever its ctx says
			}
			return "v", nil
		}
		shared := refill.NewMemory()
		cfg := refill.Config{TTL: time.Hour, LoadTimeout: 2 * time.Second, Shared: shared}
		nodes := []*refill.Loader[string]{node(t, load, cfg), node(t, load, cfg)}
		began := time.Now()
		var wg sync.WaitGroup
		for i := range 96 {
			wg.Go(func() {
				if _, err := nodes[i%2].Get(t.Context(), "k"); !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if took := time.Since(began); took != 2*time.Second {
			t.Errorf("freed after %v, want LoadTimeout", took)
		}
		time.Sleep(1001 * ms)
		for _, l := range nodes {
			get(t, l, "k")
		}
		close(hung)
	})
}

// otter (a deadline of 30 ms waited 201 ms), sturdyc, sc, bool64/cache, and everything on singleflight.Do: who waits for the
// load of another waits without a deadline of his own. Here are the ways to wait.
func TestPeerFollowersIgnoreTheirDeadline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Hour, MaxLoads: 1})
		var wg sync.WaitGroup
		defer wg.Wait()
		wg.Go(func() { get(t, nodes[0], "k") })
		synctest.Wait()
		for name, wait := range map[string]func(context.Context) error{
			"behind a flight":       func(ctx context.Context) error { _, err := nodes[0].Get(ctx, "k"); return err },
			"behind another node":   func(ctx context.Context) error { _, err := nodes[1].Get(ctx, "k"); return err },
			"for a place":           func(ctx context.Context) error { _, err := nodes[0].Get(ctx, "k2"); return err },
			"a Refresh":             func(ctx context.Context) error { return nodes[0].Refresh(ctx, "k") },
			"a Refresh, over there": func(ctx context.Context) error { return nodes[1].Refresh(ctx, "k") },
		} {
			ctx, cancel := context.WithTimeout(t.Context(), 30*ms)
			began := time.Now()
			if err := wait(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 30*ms {
				t.Errorf("%s: %v after %v, want its deadline after 30 ms", name, err, time.Since(began))
			}
			cancel()
		}
	})
}

// After a panic in a load, every later Get hangs in sc; followers get nil and no error in go-zero and bool64/cache;
// x/sync's singleflight had to be mended for both, and for Goexit (golang/go#41133, #33519). Followers are here and on
// another node; then the key works again.
func TestPeerPanicOfALoad(t *testing.T) {
	for name, end := range map[string]func(){
		"panic": func() { panic("ouch") }, "panic(nil)": func() { panic(nil) }, "Goexit": runtime.Goexit,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var well atomic.Bool
				load := func(context.Context, string) (string, error) {
					time.Sleep(100 * ms)
					if !well.Load() {
						end()
					}
					return "v", nil
				}
				cfg := refill.Config{TTL: time.Hour, Shared: refill.NewMemory()}
				nodes := []*refill.Loader[string]{node(t, load, cfg), node(t, load, cfg)}
				var wg sync.WaitGroup
				for i := range 20 {
					wg.Go(func() {
						var failed *refill.LoadError
						if v, err := nodes[i%2].Get(t.Context(), "k"); v != "" || !errors.As(err, &failed) || !failed.Panic {
							t.Errorf("%q, %v", v, err)
						}
					})
				}
				wg.Wait()
				well.Store(true)
				time.Sleep(1001 * ms)
				for _, l := range nodes {
					get(t, l, "k")
				}
			})
		})
	}
}

// otter, hot, sc, bool64/cache, replicate/go: a panic in a background refresh has no caller who could recover it, and ends
// the process.
func TestPeerPanicOfARefresh(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var loads atomic.Int64
		load := func(context.Context, string) (string, error) {
			n := loads.Add(1)
			if n == 2 {
				panic("ouch")
			}
			return fmt.Sprint(n), nil
		}
		l := node(t, load, refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1})
		get(t, l, "k")
		for range 2 { // the refresh that panics; and, the back-off over, one that does not
			time.Sleep(2 * time.Second)
			if v := get(t, l, "k"); v != "1" {
				t.Errorf("%q, want the stale value", v)
			}
			synctest.Wait()
		}
		if v := get(t, l, "k"); v != "3" {
			t.Errorf("%q, want what the second refresh has loaded", v)
		}
	})
}

// seaguest/cache GetObject: the load sends its result to a caller who has left, and its goroutine never ends. The bubble
// fails the test when one is left.
func TestPeerGoroutineOfACallerWhoLeft(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		cfg := refill.Config{TTL: time.Hour, LoadTimeout: 500 * ms, Shared: shared}
		l, peer := node(t, says("v", time.Second), cfg), node(t, says("v", time.Second), cfg) // deaf to their ctx
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+100*(i%8))*ms)
				defer cancel()
				_, e1 := l.Get(ctx, fmt.Sprint(i%3))
				_, e2 := peer.Get(ctx, fmt.Sprint(i%3))
				if e1 == nil || e2 == nil {
					t.Error("the load is longer than anybody waits: the test is void")
				}
			})
		}
		wg.Wait()
		time.Sleep(2 * time.Second) // the loads return
		if err := errors.Join(l.Close(), peer.Close()); err != nil {
			t.Error(err)
		}
	})
}

// jetcache-go: one flight per list of ids, so [a b] and [b c] load b twice; and a follower gets a part of its values with
// no error when the leader's load has failed.
func TestPeerFlightPerListOfKeys(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var loads sync.Map
		load := func(_ context.Context, key string) (string, error) {
			n, _ := loads.LoadOrStore(key, new(atomic.Int64))
			n.(*atomic.Int64).Add(1)
			time.Sleep(100 * ms)
			if key == "b" {
				return "", errDown
			}
			return key, nil
		}
		l := node(t, load, refill.Config{TTL: time.Hour})
		var wg sync.WaitGroup
		for _, keys := range [][]string{{"a", "b"}, {"b", "c"}, {"b"}} {
			wg.Go(func() {
				if err := l.Refresh(t.Context(), keys...); !errors.Is(err, errDown) {
					t.Errorf("%v: %v, want the error of b", keys, err)
				}
			})
		}
		wg.Wait()
		loads.Range(func(key, n any) bool {
			if got := n.(*atomic.Int64).Load(); got != 1 {
				t.Errorf("%d loads of %v", got, key)
			}
			return true
		})
	})
}

// rueidisaside and redcache turn a failing load into a convoy: 50 callers wait for one another and run 50 loads in a row.
// BitFaster#477: a hundred callers and a load that fails after 1 s, the last has its error after 100 s. Without a back-off, too.
func TestPeerConvoyOfErrors(t *testing.T) {
	for _, errorTTL := range []time.Duration{-1, 0} {
		t.Run(fmt.Sprint("ErrorTTL ", errorTTL), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: time.Second, err: errDown}
				nodes := fleet(t, 4, d, refill.Config{ErrorTTL: errorTTL})
				began := time.Now()
				var wg sync.WaitGroup
				for i := range 100 {
					wg.Go(func() {
						if _, err := nodes[i%4].Get(t.Context(), "k"); err == nil {
							t.Error("no error")
						}
					})
				}
				wg.Wait()
				if took := time.Since(began); took != time.Second || d.loads.Load() != 1 {
					t.Errorf("%d loads, the last caller had its error after %v", d.loads.Load(), took)
				}
			})
		})
	}
}

// Caffeine (#504) and gocache retry a failed refresh with the next Get: a database that is down gets a load per request.
func TestPeerFailedRefreshIsHammered(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1})
		for _, l := range nodes {
			get(t, l, "k")
		}
		d.fail(errDown)
		time.Sleep(2 * time.Second)
		for range 1000 {
			for _, l := range nodes {
				get(t, l, "k")
			}
			time.Sleep(10 * ms)
		}
		// The back-off is 1 s, and the next Get after it may be a tick of the coarse clock late.
		if n := d.loads.Load() - 1; n < 8 || n > 10 {
			t.Errorf("%d tries in 10 s, want one per ErrorTTL in the fleet", n)
		}
	})
}

// hot's KeepOnError stores the old value again for a whole TTL, bool64/cache and bentocache for some seconds: while the
// database is down, a value never dies.
func TestPeerErrorsKeepAValueAlive(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleFor: 5 * time.Second, Jitter: -1})
		for _, l := range nodes {
			get(t, l, "k")
		}
		born := time.Now()
		d.fail(errDown)
		for time.Since(born) < 20*time.Second {
			for _, l := range nodes {
				if _, err := l.Get(t.Context(), "k"); err == nil && time.Since(born) > 6050*ms { // and a tick
					t.Fatalf("served %v after its load, past TTL + StaleFor", time.Since(born))
				}
			}
			time.Sleep(100 * ms)
		}
	})
}

// bentocache#103, FusionCache's distributed lock: a caller that could have the stale value waits for the lock of the one who
// refreshes it; on a node that has it in memory, and on one that finds it in the store.
func TestPeerWaitWithAStaleValueAtHand(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		cfg := refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1, Shared: refill.NewMemory()}
		nodes := fleet(t, 3, d, cfg)
		get(t, nodes[0], "k")
		get(t, nodes[1], "k")
		time.Sleep(2 * time.Second)
		d.slow(5 * time.Second)
		for i, l := range nodes { // the first one refreshes
			began := time.Now()
			if get(t, l, "k"); time.Since(began) != 0 {
				t.Errorf("node %d waited %v with a stale value at hand", i, time.Since(began))
			}
		}
		time.Sleep(6 * time.Second)
		if n := d.loads.Load(); n != 2 {
			t.Errorf("%d loads, want 2", n)
		}
	})
}

// nosy is a ctx that does something when it is asked for a value for the nth time: in the middle of a Get.
type nosy struct {
	context.Context
	left atomic.Int64
	do   func()
}

func (c *nosy) Value(key any) any {
	if c.left.Add(-1) == 0 {
		c.do()
	}
	return c.Context.Value(key)
}

// MS HybridCache: a caller misses in memory, the flight of another one stores the value and ends, and the caller starts a
// flight that loads again, since nothing looks at the memory inside. A Get asks its ctx for values in between.
func TestPeerMissBesideTheEndOfAFlight(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, _ := pair(t, d, refill.Config{TTL: time.Hour})
		for n := 1; n <= 2; n++ { // before the look into memory, and after it; later it asks from within the flight
			key := fmt.Sprint(n)
			var calls int64
			ctx := &nosy{Context: t.Context()}
			ctx.left.Store(int64(n))
			ctx.do = func() {
				patience, cancel := context.WithTimeout(t.Context(), 10*ms)
				defer cancel()
				if _, err := l.Get(patience, key); err != nil {
					t.Errorf("at value %d: %v, so that the test is void", n, err)
				}
				calls = s.calls.Load()
			}
			if _, err := l.Get(ctx, key); err != nil {
				t.Error(err)
			}
			if more := s.calls.Load() - calls; more != 0 || d.loads.Load() != int64(n) {
				t.Errorf("at value %d: %d loads, %d calls of the store for what was in memory already", n, d.loads.Load(), more)
			}
		}
	})
}

// FusionCache had to say it: an error of the lock is no error of the data. Whatever of the store fails, the caller gets a
// value.
func TestPeerErrorOfTheLock(t *testing.T) {
	for _, step := range []string{"begin", "renew", "publish"} {
		t.Run(step, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				way := &tap{Store: refill.NewMemory()}
				way.on(func(_ context.Context, did string) error {
					if did == step {
						return errDown
					}
					return nil
				})
				l := node(t, says("v", 2*time.Second), refill.Config{TTL: time.Hour, Shared: way})
				for range 2 {
					if v := get(t, l, "k"); v != "v" {
						t.Errorf("%q", v)
					}
				}
			})
		})
	}
}

// Varnish had to learn it for its waiting list: a value of TTL 0 is still the answer for those who waited, or they run one
// behind the other.
func TestPeerWaitersOfAValueThatIsOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var loads atomic.Int64
		load := func(ctx context.Context, _ string) (string, error) {
			loads.Add(1)
			refill.FillFrom(ctx).SetTTL(0)
			time.Sleep(100 * ms)
			return "v", nil
		}
		cfg := refill.Config{Shared: refill.NewMemory()}
		nodes := []*refill.Loader[string]{node(t, load, cfg), node(t, load, cfg), node(t, load, cfg)}
		began := time.Now()
		var wg sync.WaitGroup
		for i := range 60 {
			wg.Go(func() { get(t, nodes[i%3], "k") })
		}
		wg.Wait()
		if took := time.Since(began); took != 100*ms || loads.Load() != 1 {
			t.Errorf("%d loads in %v, want one for all who waited", loads.Load(), took)
		}
	})
}
