package refill_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// This file tests background refreshes: when a refresh begins, and which value is served during the refresh.

// A hot key is refreshed while its value is fresh. No Get waits, no Get is served a stale value, and each refresh
// costs the fleet one load.
func TestEarlyRefresh(t *testing.T) {
	for name, cfg := range map[string]refill.Config{
		"a share of TTL": {EarlyRefresh: 0.8},
		"XFetch":         {XFetch: 1},
		"without L1":     {EarlyRefresh: 0.8, LocalTTL: -1},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 50 * time.Millisecond}
				var waited, stale atomic.Int64
				cfg.TTL, cfg.Jitter = time.Second, -1
				cfg.OnEvent = func(e refill.Event) {
					switch e.Outcome {
					case refill.OutcomeStale:
						stale.Add(1)
					case refill.OutcomeLoaded, refill.OutcomeCoalesced, refill.OutcomeLoadedElsewhere:
						if e.Took > 0 {
							waited.Add(1)
						}
					}
				}
				nodes := fleet(t, 4, d, cfg)
				for _, l := range nodes {
					get(t, l, "k")
				}
				began, cold := time.Now(), waited.Load()
				for time.Since(began) < 10*time.Second {
					for _, l := range nodes {
						get(t, l, "k")
					}
					time.Sleep(5 * time.Millisecond)
				}
				synctest.Wait()
				if d.most.Load() != 1 {
					t.Errorf("got %d loads at once, want 1", d.most.Load())
				}
				if cfg.XFetch > 0 { // XFetch may draw a moment so late that the load ends after TTL
					return
				}
				if n := d.loads.Load(); n < 12 || n > 13 {
					t.Errorf("got %d loads in 10s, refreshed at 80 %% of 1s, want 12 or 13", n)
				}
				if n := waited.Load() - cold; n != 0 || stale.Load() != 0 {
					t.Errorf("got %d Gets that waited and %d stale values, want none", n, stale.Load())
				}
			})
		})
	}
}

// Early refreshes of a value fail. The value must still be served until the end of its TTL. Each of the two nodes may
// try the refresh once per ErrorTTL, which is the length of the back-off.
func TestEarlyRefreshThatFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		nodes := fleet(t, 2, d, refill.Config{
			TTL: 10 * time.Second, EarlyRefresh: 0.5, ErrorTTL: 2 * time.Second, Jitter: -1,
		})
		get(t, nodes[0], "k")
		d.fail(errors.New("boom"))
		for range 99 {
			time.Sleep(100 * time.Millisecond)
			for _, l := range nodes {
				if v := get(t, l, "k"); v != "k v0" {
					t.Fatalf("got %q, want \"k v0\"", v)
				}
			}
		}
		if n := d.loads.Load(); n < 5 || n > 7 {
			t.Errorf("got %d loads, want 5 to 7: the first one, and two per back-off from 5s on", n)
		}
	})
}

// An early refresh fails, and then the TTL of the value ends. The value must not be served any longer.
func TestEarlyRefreshServesNothingLate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		l := node(t, d.load, refill.Config{TTL: 10 * time.Second, EarlyRefresh: 0.9, LockTTL: 5 * time.Second, Jitter: -1})
		get(t, l, "k")
		d.fail(errors.New("boom"))
		time.Sleep(9500 * ms)
		get(t, l, "k")
		time.Sleep(600 * ms)
		if v, err := l.Get(t.Context(), "k"); err == nil {
			t.Errorf("got %q past TTL, want an error", v)
		}
	})
}

// XFetch draws the moment of the early refresh once per value and node. Neither another Get nor another read of the
// record may draw again.
func TestXFetchDrawsOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const ttl, took, values = 100 * time.Second, time.Second, 200
		d := &db{took: took}
		// LocalTTL is shorter than the pause between two Gets, so every Get reads the record again.
		l := fleet(t, 1, d, refill.Config{TTL: ttl, XFetch: 1, Jitter: -1, LocalTTL: 10 * ms})[0]
		get(t, l, "k")
		for i := int64(1); i <= values; i++ {
			time.Sleep(ttl - 20*took)
			for d.loads.Load() == i {
				get(t, l, "k")
				time.Sleep(50 * ms)
			}
			time.Sleep(2 * took)
			get(t, l, "k")
		}
		var sum time.Duration
		for i := range values {
			sum += ttl - d.begins[i+1].Sub(d.begins[i])
		}
		// Each draw gives the time from the early refresh to the end of TTL: beta·delta·−ln(rnd). Here beta is 1, delta
		// is the duration of the load (1 s), and rnd is a random number from 0 to 1. So the expected mean is 1 s. The
		// mean of 200 draws is off by more than 0.35 s once in a million runs. If each Get drew again, at 20 Gets per
		// second, the mean would be delta·(ln 20 + 0.577) = 3.6 s.
		if mean := sum / values; mean < 650*ms || mean > 1350*ms {
			t.Errorf("got refreshes %v before the end on average, want 1s", mean)
		}
	})
}

// The head start X of a node is the time from its early refresh to the end of TTL. With XFetch each node draws X =
// beta·delta·−ln(rnd) once per value. delta is the duration of the load, and rnd is a random number from 0 to 1. So
// P(X ≤ x) = 1 − e^(−x/(beta·delta)). Of n nodes, the node with the largest X refreshes the value. So the head start
// of that refresh is at most x with probability P(X ≤ x)^n. The measured head starts must follow this formula, and the
// fleet must load once per TTL. (The published algorithm has no lease and draws at every request. With that algorithm,
// the fleet would load e^(1/beta) times per TTL.)
func TestXFetchDistribution(t *testing.T) {
	const values, beta = 200, 1.0
	for _, n := range []int{1, 8} {
		t.Run(fmt.Sprint(n, " nodes"), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				// L1 takes the time from a clock that is late by up to 50 ms, and so is each refresh. A load takes 1 s, so that
				// this delay hardly changes the distribution.
				d := &db{took: time.Second}
				const ttl = 100 * time.Second
				nodes := fleet(t, n, d, refill.Config{TTL: ttl, XFetch: beta, Jitter: -1})
				getAll := func() {
					for _, l := range nodes {
						get(t, l, "k")
					}
				}
				getAll()
				for i := int64(1); i <= values; i++ {
					time.Sleep(ttl - 13*d.took)
					for d.loads.Load() == i { // Get until a refresh begins
						getAll()
						time.Sleep(40 * ms)
					}
					time.Sleep(2 * d.took)
					getAll()
				}
				if loads := d.loads.Load(); loads != values+1 || d.most.Load() != 1 {
					t.Errorf("got %d loads, %d at once, want %d, one at a time", loads, d.most.Load(), values+1)
				}
				ahead := make([]float64, values) // head starts, in units of delta (the duration of a load, 1 s)
				for i := range ahead {
					ahead[i] = float64(ttl-d.begins[i+1].Sub(d.begins[i])) / float64(d.took)
				}
				slices.Sort(ahead)
				formula := func(x float64) float64 { return math.Pow(1-math.Exp(-max(x, 0)/beta), float64(n)) }
				t.Logf("head starts of %d refreshes in units of delta: # measured, + by the formula", values)
				var off float64
				for i, x := range ahead {
					off = max(off, math.Abs(formula(x)-float64(i)/values))
				}
				for x := 0.0; x < 8; x += 0.5 {
					from, _ := slices.BinarySearch(ahead, x)
					to, _ := slices.BinarySearch(ahead, x+0.5)
					want := int(math.Round(values * (formula(x+0.5) - formula(x))))
					t.Logf("%.1f %3d %s", x, to-from, strings.Repeat("#", (to-from)/2))
					t.Logf("    %3d %s", want, strings.Repeat("+", want/2))
				}
				// off is the Kolmogorov–Smirnov distance between the measured head starts and the formula. If the formula
				// holds, off exceeds 2.5/√values once in about 100,000 runs.
				if off > 2.5/math.Sqrt(values) {
					t.Errorf("got a distribution that is off by %.3f, want at most %.3f", off, 2.5/math.Sqrt(values))
				}
			})
		})
	}
}

// A Get waits at most SoftTimeout for the refresh of a stale value. After SoftTimeout the Get is served the stale
// value, and the refresh goes on.
func TestSoftTimeout(t *testing.T) {
	for name, localTTL := range map[string]time.Duration{"with L1": 0, "without L1": -1} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 50 * time.Millisecond}
				nodes := fleet(t, 2, d, refill.Config{
					StaleFor: time.Minute, SoftTimeout: 100 * time.Millisecond, Jitter: -1, LocalTTL: localTTL,
				})
				get(t, nodes[0], "k")
				get(t, nodes[1], "k")

				time.Sleep(time.Second) // the value is stale; the refresh is quick, so Gets on both nodes wait for it
				d.version.Store(1)
				wait := behind(t, nodes[0], "k")
				time.Sleep(10 * time.Millisecond)
				if v := get(t, nodes[1], "k"); v != "k v1" {
					t.Errorf("got %q, want \"k v1\", loaded within SoftTimeout", v)
				}
				wait()

				time.Sleep(2 * time.Second) // the value is stale; the refresh is slow, so Gets return the stale value
				d.slow(3 * time.Second)
				d.version.Store(2)
				for i, l := range nodes {
					began := time.Now()
					r, err := l.GetResult(t.Context(), "k")
					if took := time.Since(began); err != nil || r.Value != "k v1" || r.Outcome != refill.OutcomeStale ||
						took < 90*time.Millisecond || took > 110*time.Millisecond {
						t.Errorf("node %d: got %q (%v), %v after %v, want the stale value after 100ms",
							i, r.Value, r.Outcome, err, took)
					}
				}
				time.Sleep(4 * time.Second) // the refresh goes on, and its value is stored
				if n := d.loads.Load(); n != 3 {
					t.Errorf("got %d loads, want 3", n)
				}
				d.slow(0)
				if v := get(t, nodes[1], "k"); v != "k v2" {
					t.Errorf("got %q, want \"k v2\" from the background refresh", v)
				}
			})
		})
	}
}

// A load has failed, so no refresh begins during the back-off. A Get of a stale value must return the value at once,
// and must not wait for SoftTimeout.
func TestSoftTimeoutDuringABackOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		nodes := fleet(t, 1, d, refill.Config{
			StaleFor: time.Minute, SoftTimeout: time.Second, ErrorTTL: 10 * time.Second, Jitter: -1,
		})
		get(t, nodes[0], "k")
		time.Sleep(1100 * time.Millisecond)
		d.fail(errors.New("boom"))
		for i := range 5 {
			began := time.Now()
			r, err := nodes[0].GetResult(t.Context(), "k")
			if took := time.Since(began); err != nil || r.Value != "k v0" || took > 0 {
				t.Errorf("Get %d: got %q (%v), %v after %v, want the stale value at once",
					i, r.Value, r.Outcome, err, took)
			}
		}
	})
}

// Five Gets of a stale value run at once, and MaxWaiters is 1. One Get may wait for the refresh. The other four Gets
// must return the stale value, and not ErrOverloaded.
func TestSoftTimeoutAtMaxWaiters(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		l := node(t, d.load, refill.Config{
			TTL: time.Second, StaleFor: time.Hour, SoftTimeout: 100 * ms, MaxWaiters: 1, Jitter: -1,
		})
		get(t, l, "k")
		time.Sleep(2 * time.Second)
		d.slow(time.Second)
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() { get(t, l, "k") })
		}
		wg.Wait()
	})
}

// A Get of a stale value joins the flight of a Refresh, whose load is slow. The Get must wait at most SoftTimeout, and
// then return the stale value.
func TestSoftTimeoutDuringARefresh(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		l := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, SoftTimeout: 100 * ms, Jitter: -1})
		get(t, l, "k")
		time.Sleep(2 * time.Second)
		d.slow(8 * time.Second)
		var wg sync.WaitGroup
		wg.Go(func() { _ = l.Refresh(t.Context(), "k") })
		time.Sleep(ms)
		began := time.Now()
		get(t, l, "k")
		if took := time.Since(began); took > 150*ms {
			t.Errorf("Get took %v, want at most 150ms: SoftTimeout is 100ms", took)
		}
		wg.Wait()
	})
}

// A background refresh takes 1 s. Meanwhile callers are served the old value, in the case "stale" until StaleFor of the
// old value ends, and in the case "early" until its TTL ends. A caller after that end must wait for the refresh, and
// must get the new value.
func TestCallersPastTheOldValueWaitForItsRefresh(t *testing.T) {
	for name, cfg := range map[string]refill.Config{
		"stale": {StaleFor: 200 * ms},
		"early": {TTL: 1300 * ms, EarlyRefresh: 0.8},
	} {
		for _, localTTL := range []time.Duration{0, -1} {
			t.Run(fmt.Sprint(name, ", LocalTTL ", localTTL), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					d := &db{}
					cfg.Jitter, cfg.LocalTTL = -1, localTTL
					l := node(t, d.load, cfg)
					get(t, l, "k")
					time.Sleep(1100 * ms)
					d.slow(time.Second)
					d.version.Store(1)
					if v := get(t, l, "k"); v != "k v0" {
						t.Errorf("got %q, want \"k v0\" at once", v)
					}
					time.Sleep(300 * ms)
					if v := get(t, l, "k"); v != "k v1" {
						t.Errorf("got %q, want \"k v1\" from the refresh", v)
					}
				})
			})
		}
	}
}

// A background refresh finds that another node holds the lease, so the refresh ends. Later Gets must not start another
// background refresh while the other node loads.
func TestARefreshThatLosesIsNotRepeated(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 800 * ms}
		shared := memory.New()
		s := newSpy(shared)
		var ev events
		l := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1, Shared: s, OnEvent: ev.on})
		peer := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1, Shared: shared})
		get(t, peer, "k")
		get(t, l, "k")
		time.Sleep(300 * ms)
		get(t, peer, "k") // stale: starts a refresh
		synctest.Wait()
		calls := s.calls.Load()
		for range 700 {
			get(t, l, "k")
			time.Sleep(ms)
		}
		if n := s.calls.Load() - calls; n != 1 || ev.of(refill.EventRefreshSkipped) != 1 {
			t.Errorf("got %d calls of the store and %d refresh-skipped events for 700 Gets, want 1 and 1",
				n, ev.of(refill.EventRefreshSkipped))
		}
		time.Sleep(200 * ms)
		gets := s.gets.Load()
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.OutcomeHit || s.gets.Load() != gets {
			t.Errorf("got %+v, %v, want a hit of the announced value without a GET", r, err)
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2", n)
		}
	})
}

// A node reads a stale value from the store while another node refreshes the value. The first Get on the reading node
// starts a refresh, which ends because the other node has the lease. Ten further Gets return the stale value of L1.
// They must not call the store.
func TestOneTryPerRefreshElsewhere(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := pair(t, d, refill.Config{StaleFor: time.Minute, Jitter: -1})
		get(t, peer, "k")
		time.Sleep(1100 * ms)
		d.slow(500 * ms)
		get(t, peer, "k")
		synctest.Wait()
		get(t, l, "k")
		synctest.Wait()
		before := s.calls.Load()
		for range 10 {
			get(t, l, "k")
			synctest.Wait()
		}
		if n := s.calls.Load() - before; n != 0 {
			t.Errorf("got %d calls of the store for ten Gets, want 0", n)
		}
	})
}
