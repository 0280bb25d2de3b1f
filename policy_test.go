package refill_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// This file is about when a value is refreshed, and what is served meanwhile.

// A hot key is refreshed before its end: no Get waits, none is served anything stale, and the fleet loads once per refresh.
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
					switch e.Kind {
					case refill.EventStale:
						stale.Add(1)
					case refill.EventLed, refill.EventJoined, refill.EventWaited:
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
					t.Errorf("%d loads at once", d.most.Load())
				}
				if cfg.XFetch > 0 { // a draw may be too late for the load to end in time
					return
				}
				if n := d.loads.Load(); n < 12 || n > 13 {
					t.Errorf("%d loads in 10 s, refreshed at 80 %% of 1 s; want 12 or 13", n)
				}
				if n := waited.Load() - cold; n != 0 || stale.Load() != 0 {
					t.Errorf("%d Gets waited, %d were stale", n, stale.Load())
				}
			})
		})
	}
}

// A refresh that fails before the value ends costs nobody anything: one try per back-off, and the value is served on.
func TestEarlyRefreshThatFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		nodes := fleet(t, 2, d, refill.Config{TTL: 10 * time.Second, EarlyRefresh: 0.5, ErrorTTL: 2 * time.Second, Jitter: -1})
		get(t, nodes[0], "k")
		d.fail(errors.New("boom"))
		for range 99 {
			time.Sleep(100 * time.Millisecond)
			for _, l := range nodes {
				if v := get(t, l, "k"); v != "k v0" {
					t.Fatalf("got %q", v)
				}
			}
		}
		if n := d.loads.Load(); n != 4 {
			t.Errorf("%d loads, want the first and one each 2 s from 5 s on: 4", n)
		}
	})
}

// XFetch draws once per value and node: Gets neither draw again nor pay for it, and reading a record again does not, either.
func TestXFetchDrawsOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * time.Millisecond}
		// LocalTTL so short that the record is read again many times over.
		nodes := fleet(t, 1, d, refill.Config{TTL: 10 * time.Second, XFetch: 1, Jitter: -1, LocalTTL: 10 * time.Millisecond})
		var ahead []time.Duration
		for range 200 {
			get(t, nodes[0], "k")
			for began := time.Now(); d.loads.Load() == int64(len(ahead)+1); time.Sleep(20 * time.Millisecond) {
				get(t, nodes[0], "k")
				if time.Since(began) > 11*time.Second {
					t.Fatal("never refreshed")
				}
			}
			synctest.Wait()
			d.mu.Lock()
			gap := d.begins[len(d.begins)-1].Sub(d.begins[len(d.begins)-2])
			d.mu.Unlock()
			ahead = append(ahead, 10*time.Second-gap)
			time.Sleep(200 * time.Millisecond)
		}
		var sum time.Duration
		for _, a := range ahead {
			sum += a
		}
		// The mean of beta·delta·−ln(rnd) is 100 ms; of 200 draws it is within 30 ms but once in 40,000 runs. 500 draws a
		// value (one per Get) would make it the largest of 500: 680 ms.
		if mean := sum / time.Duration(len(ahead)); mean < 60*time.Millisecond || mean > 140*time.Millisecond {
			t.Errorf("refreshed %v before the end on the average, want 100 ms", mean)
		}
	})
}

// SoftTimeout: a Get waits so long for the refill of a stale value, and not longer; the refill goes on.
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

				time.Sleep(time.Second) // stale; its refill is quick: waited for, on both nodes
				d.version.Store(1)
				wait := behind(t, nodes[0], "k")
				time.Sleep(10 * time.Millisecond)
				if v := get(t, nodes[1], "k"); v != "k v1" {
					t.Errorf("%q, want the one that was loaded within SoftTimeout", v)
				}
				wait()

				time.Sleep(2 * time.Second) // stale; its refill is slow: served after SoftTimeout
				d.slow(3 * time.Second)
				d.version.Store(2)
				for i, l := range nodes {
					began := time.Now()
					r, err := l.GetResult(t.Context(), "k")
					if took := time.Since(began); err != nil || r.Value != "k v1" || r.Outcome != refill.EventStale ||
						took < 90*time.Millisecond || took > 110*time.Millisecond {
						t.Errorf("node %d: %q (%v), %v after %v; want the stale one after 100 ms", i, r.Value, r.Outcome, err, took)
					}
				}
				time.Sleep(4 * time.Second) // the refill has gone on, and its value was stored
				if n := d.loads.Load(); n != 3 {
					t.Errorf("%d loads, want 3", n)
				}
				d.slow(0)
				if v := get(t, nodes[1], "k"); v != "k v2" {
					t.Errorf("%q, want what was loaded behind the callers' backs", v)
				}
			})
		})
	}
}

// Nothing that could be waited for is waited for: the refill has failed a moment ago, and there is a back-off.
func TestSoftTimeoutDuringABackOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		nodes := fleet(t, 1, d, refill.Config{StaleFor: time.Minute, SoftTimeout: time.Second, ErrorTTL: 10 * time.Second, Jitter: -1})
		get(t, nodes[0], "k")
		time.Sleep(1100 * time.Millisecond)
		d.fail(errors.New("boom"))
		for i := range 5 {
			began := time.Now()
			r, err := nodes[0].GetResult(t.Context(), "k")
			if took := time.Since(began); err != nil || r.Value != "k v0" || took > 0 {
				t.Errorf("Get %d: %q (%v), %v after %v; want the stale value at once", i, r.Value, r.Outcome, err, took)
			}
		}
	})
}

// The back-off doubles with each failure in a row, whichever node failed, up to MaxErrorTTL; a success ends the row.
func TestBackOffGrows(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		d.fail(errors.New("boom"))
		nodes := fleet(t, 8, d, refill.Config{ErrorTTL: time.Second, MaxErrorTTL: 5 * time.Second, Jitter: -1})
		probes := func(total time.Duration) (at []time.Duration) {
			began := time.Now()
			d.mu.Lock()
			d.begins = nil
			d.mu.Unlock()
			for time.Since(began) < total {
				for i := range nodes { // another node is first each time
					_, _ = nodes[(i+len(at))%len(nodes)].Get(t.Context(), "k")
				}
				d.mu.Lock()
				if n := len(d.begins); n > len(at) {
					at = append(at, d.begins[n-1].Sub(began).Round(10*time.Millisecond))
				}
				d.mu.Unlock()
				time.Sleep(10 * time.Millisecond)
			}
			return at
		}
		got := probes(18 * time.Second)
		for i, want := range []time.Duration{0, 1, 3, 7, 12, 17} {
			if off := got[min(i, len(got)-1)] - want*time.Second; len(got) != 6 || off < 0 || off > 100*time.Millisecond {
				t.Fatalf("probes at %v, want 0, 1, 3, 7, 12, 17 s", got)
			}
		}
		d.fail(nil)
		time.Sleep(5 * time.Second)
		get(t, nodes[3], "k")
		d.fail(errors.New("boom again"))
		time.Sleep(2 * time.Second)
		if got := probes(2500 * time.Millisecond); len(got) != 2 {
			t.Errorf("probes at %v after a success, want a second one 1 s after the first", got)
		}
	})
}
