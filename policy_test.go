package refill_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
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
		const ttl, took, values = 100 * time.Second, time.Second, 200
		d := &db{took: took}
		// LocalTTL so short that the record is read again at every Get.
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
		// The mean of beta·delta·−ln(rnd) is 1 s; that of 200 draws is within 0.35 s but once in a million runs. A draw per Get,
		// 20 a second, would make it 3.6 s: delta·(ln 20 + 0.577).
		if mean := sum / values; mean < 650*ms || mean > 1350*ms {
			t.Errorf("refreshed %v before the end on the average, want 1 s", mean)
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

// A value that must not be stored makes nobody queue: once that is known, every node loads for itself, at the same time.
func TestNoStoreIsRemembered(t *testing.T) {
	for name, localTTL := range map[string]time.Duration{"with L1": 0, "without L1": -1} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: time.Second}
				var store atomic.Bool
				cfg := refill.Config{TTL: time.Minute, Shared: refill.NewMemory(), LocalTTL: localTTL}
				nodes := make([]*refill.Loader[string], 5)
				for i := range nodes {
					nodes[i] = node(t, func(ctx context.Context, key string) (string, error) {
						if !store.Load() {
							refill.FillFrom(ctx).NoStore()
						}
						return d.load(ctx, fmt.Sprint(i))
					}, cfg)
				}
				all := func(own bool) (took time.Duration) {
					began := time.Now()
					var wg sync.WaitGroup
					for i, l := range nodes {
						for range 3 {
							wg.Go(func() {
								if v := get(t, l, "k"); own && v != fmt.Sprint(i, " v0") {
									t.Errorf("node %d was served %q: another's value that was not to be stored", i, v)
								}
							})
						}
					}
					wg.Wait()
					return time.Since(began)
				}
				if took := all(true); took > 2100*time.Millisecond {
					t.Errorf("%v until all had one: the nodes queued", took)
				}
				if took := all(true); took > 1100*time.Millisecond {
					t.Errorf("%v, although nobody can help anybody: want one load's time", took)
				}
				if n := d.loads.Load(); n > 11 {
					t.Errorf("%d loads for two rounds on five nodes", n)
				}
				store.Store(true)
				time.Sleep(11 * time.Second) // the mark is over
				before := d.loads.Load()
				all(false)
				if n := d.loads.Load() - before; n != 1 {
					t.Errorf("%d loads of a value that may be stored, want 1", n)
				}
			})
		})
	}
}

// A mark is nothing that could be served: not by Peek, not while the store is gone; and Refresh looks whether it still holds.
func TestNoStoreMarkIsNoValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var store atomic.Bool
		shared := refill.NewMemory()
		s := newSpy(shared)
		l := node(t, func(ctx context.Context, key string) (string, error) {
			if !store.Load() {
				refill.FillFrom(ctx).NoStore()
			}
			return "real", nil
		}, refill.Config{TTL: time.Minute, Shared: s})
		for range 3 {
			if v := get(t, l, "k"); v != "real" {
				t.Errorf("got %q", v)
			}
		}
		if r, ok := l.Peek(t.Context(), "k"); ok {
			t.Errorf("Peek found %+v", r)
		}
		s.cut(true)
		if v := get(t, l, "k"); v != "real" {
			t.Errorf("got %q without the store", v)
		}
		s.cut(false)
		store.Store(true)
		if err := l.Refresh(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		if r, ok := l.Peek(t.Context(), "k"); !ok || r.Value != "real" {
			t.Errorf("Refresh of a key that may be stored again left %+v, %v", r, ok)
		}
	})
}

// A load has the value that it replaces in hand, and may give it another life; on every node, with its validator.
func TestNotModified(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var version atomic.Int64
		var full, kept atomic.Int64
		load := func(ctx context.Context, key string) (string, error) {
			now := fmt.Sprint("v", version.Load())
			if old, validator, ok := refill.Previous[string](ctx); ok && validator == now {
				if old != key+" "+now {
					t.Errorf("the previous value is %q", old)
				}
				kept.Add(1)
				return refill.NotModified[string](ctx)
			}
			full.Add(1)
			refill.FillFrom(ctx).SetValidator(now)
			return key + " " + now, nil
		}
		shared := refill.NewMemory()
		cfg := refill.Config{TTL: time.Second, StaleFor: time.Minute, Jitter: -1, Shared: shared}
		nodes := []*refill.Loader[string]{node(t, load, cfg), node(t, load, cfg)}
		get(t, nodes[0], "k")
		for i := range 6 {
			if i == 4 {
				version.Store(1)
			}
			time.Sleep(1100 * time.Millisecond)
			get(t, nodes[i%2], "k") // stale: refreshed behind
			synctest.Wait()
			r, err := nodes[(i+1)%2].GetResult(t.Context(), "k")
			want := fmt.Sprint("v", version.Load())
			if err != nil || r.Value != "k "+want || r.Validator != want || r.Age > time.Second {
				t.Errorf("round %d: %+v, %v; want a fresh %s", i, r, err, want)
			}
		}
		if full.Load() != 2 || kept.Load() != 5 {
			t.Errorf("%d loads in full, %d said not modified; want 2 and 5", full.Load(), kept.Load())
		}
		// A node that knows nothing finds the old value in the store.
		time.Sleep(1100 * time.Millisecond)
		get(t, node(t, load, cfg), "k")
		synctest.Wait()
		if kept.Load() != 6 {
			t.Errorf("a new node had no previous value in hand")
		}
		// Nothing, an absence, or a value of another type is no previous value.
		if _, err := refill.NotModified[string](t.Context()); !errors.Is(err, refill.ErrInvalid) {
			t.Errorf("NotModified outside of a load: %v", err)
		}
		if err := nodes[0].Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		get(t, nodes[0], "k")
		if full.Load() != 3 {
			t.Error("after Invalidate there was a previous value")
		}
	})
}

// Keys of any length and any bytes: the load function gets them as they are, and the store a spelling that harms nobody.
func TestKeysAreSpelled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		long := strings.Repeat("x", 513)
		// What a long key is spelled like must not be another key's: that would be a way to read it.
		sum := sha256.Sum256([]byte(long))
		twin := "#" + hex.EncodeToString(sum[:])
		keys := []string{long, twin, long[:512], "a\nb", "a\x7fb", "#", "ключ", "a b", "\xff", "{x}:y"}
		s := newSpy(refill.NewMemory())
		peerLoads := never(t)
		var loads atomic.Int64
		l := node(t, func(_ context.Context, key string) (string, error) {
			loads.Add(1)
			return "of " + key, nil
		}, refill.Config{TTL: time.Minute, Shared: s})
		peer := node(t, peerLoads, refill.Config{TTL: time.Minute, Shared: s.Store})
		for range 2 { // the second time from L1
			for _, key := range keys {
				if v := get(t, l, key); v != "of "+key {
					t.Errorf("Get(%q) = %q", key, v)
				}
			}
		}
		if n := loads.Load(); n != int64(len(keys)) {
			t.Errorf("%d loads of %d keys", n, len(keys))
		}
		for _, key := range keys {
			if v := get(t, peer, key); v != "of "+key {
				t.Errorf("on another node Get(%q) = %q", key, v)
			}
			if r, ok := peer.Peek(t.Context(), key); !ok || r.Value != "of "+key {
				t.Errorf("Peek(%q) = %q, %v", key, r.Value, ok)
			}
		}
		s.mu.Lock()
		for _, key := range s.keys {
			if len(key) > 513+len("thing:") || strings.ContainsAny(key, "\n\x7f") {
				t.Errorf("%q went to the store", key)
			}
		}
		s.mu.Unlock()
		if err := peer.Invalidate(t.Context(), keys...); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for _, key := range keys {
			get(t, l, key)
		}
		if n := loads.Load(); n != 2*int64(len(keys)) {
			t.Errorf("%d loads after Invalidate of all on another node, want twice %d", n, len(keys))
		}
	})
}

// One name with two types would be misses without end.
func TestOneNameTwoTypes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		number := func(context.Context, string) (int, error) { return 1, nil }
		l, err := refill.New("x", never(t), refill.Config{TTL: time.Minute, Shared: shared})
		if err != nil {
			t.Fatal(err)
		}
		_, err = refill.New("x", number, refill.Config{TTL: time.Minute, Shared: shared})
		if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "name") || !strings.Contains(err.Error(), "raw string") {
			t.Errorf("a second type under the name: %v", err)
		}
		for _, c := range []struct {
			name   string
			shared refill.Store
		}{{"y", shared}, {"x", refill.NewMemory()}} { // another name, another store
			n, err := refill.New(c.name, number, refill.Config{TTL: time.Minute, Shared: c.shared})
			if err != nil {
				t.Error(err)
				continue
			}
			defer n.Close()
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		n, err := refill.New("x", number, refill.Config{TTL: time.Minute, Shared: shared})
		if err != nil {
			t.Fatalf("the name is free again: %v", err)
		}
		defer n.Close()
	})
}

// What is allowed and still doubtful is said once, by name.
func TestAdvice(t *testing.T) {
	for field, cfg := range map[string]refill.Config{
		" short":       {TTL: time.Second}, // the defaults beside it are nobody's mistake
		"":             {TTL: time.Minute, StaleFor: time.Hour, SoftTimeout: time.Second, EarlyRefresh: 0.9, LocalBytes: 1 << 20},
		"SoftTimeout":  {TTL: time.Minute, SoftTimeout: time.Second},
		"LocalTTL":     {TTL: time.Minute, LocalTTL: time.Hour},
		"LoadTimeout":  {TTL: time.Minute, LoadTimeout: time.Hour},
		"NotFoundTTL":  {TTL: time.Minute, NotFoundTTL: time.Hour},
		"StaleIfError": {TTL: time.Minute, StaleFor: time.Hour, StaleIfError: time.Second},
		"ErrorTTL":     {TTL: time.Minute, ErrorTTL: time.Hour},
		"LocalBytes":   {TTL: time.Minute, LocalTTL: -1, LocalBytes: 1},
		"EarlyRefresh": {TTL: time.Minute, EarlyRefresh: 0.1},
	} {
		var said []error
		cfg.OnEvent = func(e refill.Event) {
			if e.Kind == refill.EventConfigDoubt {
				said = append(said, e.Err)
			}
		}
		l, err := refill.New("x", never(t), cfg)
		if err != nil {
			t.Errorf("%s: %v", field, err)
			continue
		}
		fine := field == "" || field == " short"
		if fine && len(said) > 0 || !fine && (len(said) != 1 || !strings.HasPrefix(said[0].Error(), "refill: "+field+": ")) {
			t.Errorf("%q: said %q", field, said)
		}
		_ = l.Close()
	}
}

// XFetch under the lease: one load per TTL however many nodes draw, and the moments follow the formula. A node draws
// X = beta·delta·−ln(rnd) once per value, so P(X ≤ x) = 1 − e^(−x/(beta·delta)); of n nodes the first one counts, so the
// fleet's head start has P(X ≤ x)^n. The published algorithm draws at every request and loads e^(1/beta) times per TTL.
func TestXFetchDistribution(t *testing.T) {
	const values, beta = 200, 1.0
	for _, n := range []int{1, 8} {
		t.Run(fmt.Sprint(n, " nodes"), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: time.Second} // long beside the tick of the coarse clock, which delays every moment by up to 50 ms
				const ttl = 100 * time.Second
				nodes := fleet(t, n, d, refill.Config{TTL: ttl, XFetch: beta, Jitter: -1})
				everybody := func() {
					for _, l := range nodes {
						get(t, l, "k")
					}
				}
				everybody()
				for i := int64(1); i <= values; i++ {
					time.Sleep(ttl - 13*d.took)
					for d.loads.Load() == i { // Gets all the time
						everybody()
						time.Sleep(40 * ms)
					}
					time.Sleep(2 * d.took)
					everybody()
				}
				if loads := d.loads.Load(); loads != values+1 || d.most.Load() != 1 {
					t.Errorf("%d loads for %d values, %d at once; want one per TTL, one at a time", loads, values+1, d.most.Load())
				}
				ahead := make([]float64, values) // in units of delta
				for i := range ahead {
					ahead[i] = float64(ttl-d.begins[i+1].Sub(d.begins[i])) / float64(d.took)
				}
				slices.Sort(ahead)
				formula := func(x float64) float64 { return math.Pow(1-math.Exp(-max(x, 0)/beta), float64(n)) }
				t.Logf("refreshed before the end, in load times: of %d values # measured, + by the formula", values)
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
				// Kolmogorov–Smirnov: above 2.5/√values once in some 100,000 runs.
				if off > 2.5/math.Sqrt(values) {
					t.Errorf("the distribution is off by %.3f", off)
				}
			})
		})
	}
}
