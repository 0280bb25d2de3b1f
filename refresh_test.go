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

// This file tests background refreshes: when a refresh begins, and what is served meanwhile.

// A hot key is refreshed while it is fresh. No Get waits, no Get is served a stale value, and the fleet loads once per
// refresh.
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
				if cfg.XFetch > 0 { // the draw may be too late for the load to end within TTL
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

// An early refresh fails. The value is served until its end, and the fleet tries to refresh it once per back-off.
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
		if n := d.loads.Load(); n != 4 {
			t.Errorf("got %d loads, want 4: the first one, and one each 2s from 5s on", n)
		}
	})
}

// A value whose early refresh fails is not served past its end.
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

// XFetch draws once per value and node. Neither another Get nor another read of the record draws again.
func TestXFetchDrawsOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const ttl, took, values = 100 * time.Second, time.Second, 200
		d := &db{took: took}
		// LocalTTL is so short that every Get reads the record again.
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
		// The mean of beta·delta·−ln(rnd) is 1 s. The mean of 200 draws is off by more than 0.35 s once in a million runs.
		// With a draw per Get, 20 Gets a second, the mean would be 3.6 s: delta·(ln 20 + 0.577).
		if mean := sum / values; mean < 650*ms || mean > 1350*ms {
			t.Errorf("got refreshes %v before the end on average, want 1s", mean)
		}
	})
}

// With XFetch under the lease the fleet loads once per TTL, however many nodes draw, and the moments of the loads
// follow the formula. A node draws X = beta·delta·−ln(rnd) once per value, so P(X ≤ x) = 1 − e^(−x/(beta·delta)). The
// earliest of n nodes refreshes, so the head start of the fleet is at most x with probability P(X ≤ x)^n. The published
// algorithm draws at every request and loads e^(1/beta) times per TTL.
func TestXFetchDistribution(t *testing.T) {
	const values, beta = 200, 1.0
	for _, n := range []int{1, 8} {
		t.Run(fmt.Sprint(n, " nodes"), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				// The load takes long compared with the tick of the coarse clock, which delays each refresh by up to 50 ms.
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
				ahead := make([]float64, values) // in units of delta
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
				// Kolmogorov–Smirnov: the distance exceeds 2.5/√values once in about 100,000 runs.
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

				time.Sleep(time.Second) // stale, with a quick refresh: Gets on both nodes wait for it
				d.version.Store(1)
				wait := behind(t, nodes[0], "k")
				time.Sleep(10 * time.Millisecond)
				if v := get(t, nodes[1], "k"); v != "k v1" {
					t.Errorf("got %q, want \"k v1\", loaded within SoftTimeout", v)
				}
				wait()

				time.Sleep(2 * time.Second) // stale, with a slow refresh: served stale after SoftTimeout
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

// A Get does not wait for SoftTimeout during a back-off: no refresh will begin.
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

// A Get that would wait for SoftTimeout beyond MaxWaiters is served the stale value.
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

// SoftTimeout also bounds a Get that waits for a Refresh.
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

// The first callers of a refresh are served the old value. A caller that comes after the end of the old value waits for
// the refresh.
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

// A background refresh finds that another node is refreshing the key. The background refresh ends, and later Gets do
// not repeat it.
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

// A node reads a stale value from the store while another node refreshes the value. The reading node tries to refresh
// the value once, not at each Get.
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
