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
	"github.com/refill-go/refill/backend/memory"
)

// This file tests that refill does not have certain bugs of other libraries about waiting, contexts, errors and
// panics. The comment at the top of regress_lock_test.go explains the regress files. Tests in other files check that
// refill does not have these bugs:
//
//	goo#196, autumn#2563: without the store, every load reaches the database      TestMaxLoads
//	FusionCache: a node waits while another node does an early refresh            TestARefreshThatLosesIsNotRepeated
//	janos/singleflight#4: another node joins a flight whose load was cancelled    TestTheLastCallerCancelsTheLoad
//	Varnish: a waiter of a load longer than its TTL starts another load           TestLoadLongerThanTTLAndLockTTL

// In rockscache, sturdyc, otter, bool64/cache, eko/gocache and go-chi/stampede the load runs with the ctx of the first
// caller. When the first caller leaves, all waiters get the cancellation of its ctx. This bug caused an outage at
// bucketeer-io (#2552): more than a fifth of all requests failed after each invalidation. bool64/cache even caches the
// cancellation as an error for 20 s. Here a load goes on while it has a waiter. When the last waiter leaves, the load
// is cancelled, and no back-off begins.
func TestWaitersOutliveTheirLeader(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Hour, ErrorTTL: time.Hour})
		leader, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := nodes[0].Get(leader, "k"); !errors.Is(err, context.Canceled) {
				t.Errorf("the leader got %v, want context.Canceled", err)
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
			t.Errorf("got %d loads, want 1: the load still had waiters", n)
		}
		alone, cancel := context.WithTimeout(t.Context(), 10*ms)
		defer cancel()
		if _, err := nodes[0].Get(alone, "k2"); err == nil {
			t.Error("Get returned no error, want a load that outlives its only caller")
		}
		synctest.Wait()
		get(t, nodes[1], "k2") // a cancellation leaves no back-off
	})
}

// In tailscale (#18919) the last caller leaves, and its flight is cancelled. The next caller joins the cancelled
// flight and gets the cancellation. Here no caller joins a cancelled flight, although the flight takes another 200 ms
// to end.
func TestCancelledFlightIsNotJoined(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newSpy(memory.New())
		s.onStep(func(_ context.Context, did string) error {
			if did == "release" {
				time.Sleep(200 * ms)
			}
			return nil
		})
		d := &db{took: time.Second}
		l := fleet(t, 1, d, refill.Config{TTL: time.Hour, Shared: s})[0]
		ctx, cancel := context.WithTimeout(t.Context(), 100*ms)
		defer cancel()
		if _, err := l.Get(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want DeadlineExceeded", err)
		}
		time.Sleep(100 * ms)
		if get(t, l, "k"); d.loads.Load() != 2 {
			t.Errorf("got %d loads, want 2: the second Get must not join the cancelled flight", d.loads.Load())
		}
	})
}

// rockscache refreshes with `go fetchNew(ctx…)`. The ctx of an HTTP request ends as soon as the stale value is served.
// So the refresh never stores its value, and never frees its lock. Here a refresh outlives the ctx of the Get that
// started it.
func TestRefreshOutlivesItsCaller(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		shared := memory.New()
		cfg := refill.Config{TTL: time.Second, StaleFor: time.Hour, Shared: shared, Jitter: -1}
		warm := fleet(t, 1, d, cfg)[0]
		get(t, warm, "k")
		time.Sleep(2 * time.Second)
		// The first node of the list finds the stale value in the store. The second node, warm, finds it in L1.
		for _, l := range []*refill.Loader[string]{fleet(t, 1, d, cfg)[0], warm} {
			d.version.Add(1)
			ctx, cancel := context.WithCancel(t.Context())
			if r, err := l.GetResult(ctx, "k"); err != nil || r.Outcome != refill.OutcomeStale {
				t.Errorf("got %+v, %v, want a stale value", r, err)
			}
			cancel()
			time.Sleep(150 * ms)
			if v, want := get(t, l, "k"), fmt.Sprintf("k v%d", d.version.Load()); v != want {
				t.Errorf("got %q after the refresh, want %q", v, want)
			}
			lockIsFree(t, shared, "k")
			time.Sleep(2 * time.Second)
		}
	})
}

// In e2b-dev/infra (#1916) and in FusionCache (Altinn/dialogporten #4252, #4300) one hung query blocks its key until
// the process is restarted. The reason is that a load has no time-out, or that the time-out frees the callers but not
// the key. Here the callers on the node of the hung query get an error after LoadTimeout, and another node loads the
// key at once.
func TestHungLoadFreesItsKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		hung := make(chan struct{})
		var loads, values atomic.Int64
		load := func(context.Context, string) (string, error) {
			if loads.Add(1) == 1 {
				<-hung // ignores its ctx
			}
			return "v", nil
		}
		shared := memory.New()
		cfg := refill.Config{TTL: time.Hour, LoadTimeout: 2 * time.Second, Shared: shared}
		nodes := []*refill.Loader[string]{node(t, load, cfg), node(t, load, cfg)}
		began := time.Now()
		var wg sync.WaitGroup
		for i := range 96 {
			wg.Go(func() {
				switch _, err := nodes[i%2].Get(t.Context(), "k"); {
				case err == nil:
					values.Add(1)
				case !errors.Is(err, context.DeadlineExceeded):
					t.Errorf("got %v, want DeadlineExceeded", err)
				}
			})
		}
		wg.Wait()
		if took := time.Since(began); took != 2*time.Second || values.Load() != 48 {
			t.Errorf("the Gets returned after %v, %d of them with a value; want LoadTimeout, and half of them",
				took, values.Load())
		}
		for _, l := range nodes {
			get(t, l, "k")
		}
		close(hung)
	})
}

// In otter, sturdyc, motoki317/sc, bool64/cache, and all users of singleflight.Do, a caller that waits for the load of
// another caller ignores its own deadline. In otter a caller with a deadline of 30 ms waited 201 ms. Here the deadline
// of a caller ends each kind of wait.
func TestWaitersKeepTheirDeadlines(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Hour, MaxLoads: 1})
		var wg sync.WaitGroup
		defer wg.Wait()
		wg.Go(func() { get(t, nodes[0], "k") })
		synctest.Wait()
		for name, wait := range map[string]func(context.Context) error{
			"Get, for a flight":         func(ctx context.Context) error { _, err := nodes[0].Get(ctx, "k"); return err },
			"Get, for another node":     func(ctx context.Context) error { _, err := nodes[1].Get(ctx, "k"); return err },
			"Get, for a load slot":      func(ctx context.Context) error { _, err := nodes[0].Get(ctx, "k2"); return err },
			"Refresh, for a flight":     func(ctx context.Context) error { return nodes[0].Refresh(ctx, "k") },
			"Refresh, for another node": func(ctx context.Context) error { return nodes[1].Refresh(ctx, "k") },
		} {
			ctx, cancel := context.WithTimeout(t.Context(), 30*ms)
			began := time.Now()
			if err := wait(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 30*ms {
				t.Errorf("%s: got %v after %v, want DeadlineExceeded after 30ms", name, err, time.Since(began))
			}
			cancel()
		}
	})
}

// In motoki317/sc every Get after a panic in a load hangs. In go-zero and bool64/cache the waiters get nil and no
// error. Older versions of x/sync/singleflight had these two bugs and a bug with Goexit (golang/go#41133, #33519). Here
// all waiters on two nodes get an error, and the key can be loaded again after the back-off.
func TestPanicReachesAllWaiters(t *testing.T) {
	for name, end := range map[string]func(){
		"panic": func() { panic("ouch") }, "panic(nil)": func() { panic(nil) }, "Goexit": runtime.Goexit,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var works atomic.Bool
				load := func(context.Context, string) (string, error) {
					time.Sleep(100 * ms)
					if !works.Load() {
						end()
					}
					return "v", nil
				}
				cfg := refill.Config{TTL: time.Hour, Shared: memory.New()}
				nodes := []*refill.Loader[string]{node(t, load, cfg), node(t, load, cfg)}
				var wg sync.WaitGroup
				for i := range 20 {
					wg.Go(func() {
						var failed *refill.LoadError
						v, err := nodes[i%2].Get(t.Context(), "k")
						if v != "" || !errors.As(err, &failed) || !failed.Panic {
							t.Errorf("got %q, %v, want a LoadError with Panic", v, err)
						}
					})
				}
				wg.Wait()
				works.Store(true)
				time.Sleep(1001 * ms)
				for _, l := range nodes {
					get(t, l, "k")
				}
			})
		})
	}
}

// In otter, hot, motoki317/sc, bool64/cache and replicate/go a panic in a background refresh ends the process, because
// no caller can recover the panic. Here a panic counts as a failed refresh: callers get the stale value, and the key is
// refreshed again after the back-off.
func TestPanicOfARefreshIsContained(t *testing.T) {
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
		for range 2 { // the first refresh panics; the second refresh, after the back-off, does not
			time.Sleep(2 * time.Second)
			if v := get(t, l, "k"); v != "1" {
				t.Errorf("got %q, want the stale value \"1\"", v)
			}
			synctest.Wait()
		}
		if v := get(t, l, "k"); v != "3" {
			t.Errorf("got %q, want \"3\" from the second refresh", v)
		}
	})
}

// In GetObject of seaguest/cache the load sends its result to a caller that has left, so the goroutine of the load
// never ends. Here every goroutine ends. The bubble fails the test if a goroutine is left.
func TestCallersThatLeaveLeaveNoGoroutine(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		cfg := refill.Config{TTL: time.Hour, LoadTimeout: 500 * ms, Shared: shared}
		l, peer := node(t, says("v", time.Second), cfg), node(t, says("v", time.Second), cfg) // the loads ignore their ctx
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+100*(i%8))*ms)
				defer cancel()
				_, e1 := l.Get(ctx, fmt.Sprint(i%3))
				_, e2 := peer.Get(ctx, fmt.Sprint(i%3))
				if e1 == nil || e2 == nil {
					t.Errorf("got errors %v and %v, want both: every caller leaves before the load ends", e1, e2)
				}
			})
		}
		wg.Wait()
		time.Sleep(2 * time.Second) // until the loads have returned
		if err := errors.Join(l.Close(), peer.Close()); err != nil {
			t.Error(err)
		}
	})
}

// jetcache-go has one flight per list of ids, so calls with [a b] and [b c] load b twice. If the load fails, a waiter
// gets only some of its values, and no error. Here each key of a list has its own flight. If the load of a key fails,
// every Refresh of that key returns the error.
func TestOneFlightPerKeyOfAList(t *testing.T) {
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
					t.Errorf("Refresh of %v: got %v, want the error of b", keys, err)
				}
			})
		}
		wg.Wait()
		loads.Range(func(key, n any) bool {
			if got := n.(*atomic.Int64).Load(); got != 1 {
				t.Errorf("got %d loads of %v, want 1", got, key)
			}
			return true
		})
	})
}

// In rueidisaside and redcache 50 callers of a failing load wait for one another and run 50 loads in a row. In
// BitFaster (#477) a load fails after 1 s, but the last of a hundred callers gets the error after 100 s. Here all
// waiters of a node share one error. After the failure of one node, one other node tries. The waiters of the remaining
// nodes share the error of that node, with and without a back-off.
func TestWaitersShareOneError(t *testing.T) {
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
							t.Error("Get returned no error although the load failed")
						}
					})
				}
				wg.Wait()
				if took := time.Since(began); took != 2*time.Second || d.loads.Load() != 2 {
					t.Errorf("got %d loads and the last error after %v, want 2 loads and 2s", d.loads.Load(), took)
				}
			})
		})
	}
}

// Caffeine (#504) and gocache retry a failed refresh at the next Get. So each request asks a database that is down.
// Here two nodes of the fleet retry a failed refresh once per back-off.
func TestFailedRefreshBacksOff(t *testing.T) {
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
		// The back-off is 1 s, which allows 20 loads by two nodes in 10 s. The clock of L1 may be late by up to 50 ms, so
		// there may be fewer loads.
		if n := d.loads.Load() - 1; n < 16 || n > 20 {
			t.Errorf("got %d failed loads in 10s, want 16 to 20: two per ErrorTTL in the fleet", n)
		}
	})
}

// When a load fails, KeepOnError of hot stores the old value again for a whole TTL. bool64/cache and bentocache store
// the old value again for some seconds. So the value never expires while the database is down. Here a failed load does
// not move the end of a value, so the value of this test ends at TTL + StaleFor.
func TestErrorsDoNotProlongAValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleFor: 5 * time.Second, Jitter: -1})
		for _, l := range nodes {
			get(t, l, "k")
		}
		loaded := time.Now()
		d.fail(errDown)
		for time.Since(loaded) < 20*time.Second {
			for _, l := range nodes {
				// The value may be served until 6 s after its load. 50 ms more are allowed, because the clock of L1 may be late by
				// this time.
				if _, err := l.Get(t.Context(), "k"); err == nil && time.Since(loaded) > 6050*ms {
					t.Fatalf("got a value %v after its load, past TTL + StaleFor", time.Since(loaded))
				}
			}
			time.Sleep(100 * ms)
		}
	})
}

// In bentocache (#103) and in FusionCache with its distributed lock, a caller waits for the lock of a refresh although
// the caller could be served the stale value. Here no such caller waits. The stale value is in the L1 of the first two
// nodes. The third node finds the stale value in the store.
func TestStaleValueIsServedDuringARefresh(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		cfg := refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1, Shared: memory.New()}
		nodes := fleet(t, 3, d, cfg)
		get(t, nodes[0], "k")
		get(t, nodes[1], "k")
		time.Sleep(2 * time.Second)
		d.slow(5 * time.Second)
		for i, l := range nodes { // the Get on the first node starts the refresh
			began := time.Now()
			if get(t, l, "k"); time.Since(began) != 0 {
				t.Errorf("node %d waited %v although it has a stale value, want 0s", i, time.Since(began))
			}
		}
		time.Sleep(6 * time.Second)
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2", n)
		}
	})
}

// In FusionCache a caller gets its value even if the lock fails. Here a Get returns a value even if a call of the store
// fails. The test has one run per call: Acquire, Renew and Publish.
func TestStoreErrorsDoNotFailAGet(t *testing.T) {
	for _, step := range []string{"acquire", "renew", "publish"} {
		t.Run(step, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newSpy(memory.New())
				s.onStep(func(_ context.Context, did string) error {
					if did == step {
						return errDown
					}
					return nil
				})
				l := node(t, says("v", 2*time.Second), refill.Config{TTL: time.Hour, Shared: s})
				for range 2 {
					if v := get(t, l, "k"); v != "v" {
						t.Errorf("got %q, want \"v\"", v)
					}
				}
			})
		})
	}
}

// In Varnish (fixed) the waiting list rejected a value with TTL 0, so the waiters loaded one after another. Here all
// waiters of a load share its value, even if its TTL is 0.
func TestWaitersShareAValueWithoutATTL(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var loads atomic.Int64
		load := func(ctx context.Context, _ string) (string, error) {
			loads.Add(1)
			refill.FillFrom(ctx).SetTTL(0)
			time.Sleep(100 * ms)
			return "v", nil
		}
		cfg := refill.Config{Shared: memory.New()}
		nodes := []*refill.Loader[string]{node(t, load, cfg), node(t, load, cfg), node(t, load, cfg)}
		began := time.Now()
		var wg sync.WaitGroup
		for i := range 60 {
			wg.Go(func() { get(t, nodes[i%3], "k") })
		}
		wg.Wait()
		if took := time.Since(began); took != 100*ms || loads.Load() != 1 {
			t.Errorf("got %d loads in %v, want 1 load in 100ms for all waiters", loads.Load(), took)
		}
	})
}
