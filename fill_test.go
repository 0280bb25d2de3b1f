package refill_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests what a load can set for its value with SetTTL, SetStaleFor, NoStore and SetValidator. It also tests
// Previous and NotModified. tags_test.go tests tags.

func TestFill(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var loads atomic.Int64
		var kept *refill.Fill
		load := func(ctx context.Context, key string) (string, error) {
			n := loads.Add(1)
			f := refill.FillFrom(ctx)
			kept = f
			switch key {
			case "long":
				f.SetTTL(time.Hour)
			case "stale":
				f.SetStaleFor(time.Hour)
			case "over":
				f.SetTTL(-time.Second)
			case "never":
				f.NoStore()
			}
			return fmt.Sprint(n), nil
		}
		shared := memory.New()
		l := node(t, load, refill.Config{TTL: time.Second, Jitter: -1, Shared: shared})
		other := node(t, load, refill.Config{TTL: time.Second, Jitter: -1, Shared: shared})
		long, stale := get(t, l, "long"), get(t, l, "stale")
		kept.NoStore() // no effect: the load has ended
		time.Sleep(30 * time.Minute)
		if v := get(t, other, "long"); v != long {
			t.Errorf("own TTL: got %q, want %q", v, long)
		}
		r, err := other.GetResult(t.Context(), "stale")
		if err != nil || r.Value != stale || r.Outcome != refill.OutcomeStale {
			t.Errorf("own StaleFor: got %+v, %v; want %q as a stale value", r, err, stale)
		}
		time.Sleep(ms)
		for _, key := range []string{"never", "over"} {
			if a, b := get(t, l, key), get(t, l, key); a == b {
				t.Errorf("%s: got %q twice, want two loads: the value must not be cached", key, a)
			}
		}
		b, _ := shared.Get(t.Context(), "thing:never")
		if r, err := driver.DecodeRecord(b); err != nil || !r.NoStore || len(r.Payload) > 0 {
			t.Errorf("NoStore left %+v, %v; want a no-store record without a value", r, err)
		}
		refill.FillFrom(t.Context()).SetTTL(time.Hour) // outside of a load: no effect, and no panic
	})
}

// In a load, Previous returns the value that the load is about to replace, and the validator of that value. Both must
// work on every node, also on one that has never had the value. If the load returns NotModified, that value must live
// for another TTL.
func TestNotModified(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var version atomic.Int64
		var full, kept atomic.Int64
		load := func(ctx context.Context, key string) (string, error) {
			now := fmt.Sprint("v", version.Load())
			if old, validator, ok := refill.Previous[string](ctx); ok && validator == now {
				if old != key+" "+now {
					t.Errorf("got previous value %q, want %q", old, key+" "+now)
				}
				kept.Add(1)
				return refill.NotModified[string](ctx)
			}
			full.Add(1)
			refill.FillFrom(ctx).SetValidator(now)
			return key + " " + now, nil
		}
		shared := memory.New()
		cfg := refill.Config{TTL: time.Second, StaleFor: time.Minute, Jitter: -1, Shared: shared}
		nodes := []*refill.Loader[string]{node(t, load, cfg), node(t, load, cfg)}
		get(t, nodes[0], "k")
		for i := range 6 {
			if i == 4 {
				version.Store(1)
			}
			time.Sleep(1100 * time.Millisecond)
			get(t, nodes[i%2], "k") // stale: starts a background refresh
			synctest.Wait()
			r, err := nodes[(i+1)%2].GetResult(t.Context(), "k")
			want := fmt.Sprint("v", version.Load())
			if err != nil || r.Value != "k "+want || r.Validator != want || r.Age > time.Second {
				t.Errorf("round %d: got %+v, %v; want a fresh %s", i, r, err, want)
			}
		}
		if full.Load() != 2 || kept.Load() != 5 {
			t.Errorf("got %d full loads and %d NotModified, want 2 and 5", full.Load(), kept.Load())
		}
		// A new node finds the previous value in the store.
		time.Sleep(1100 * time.Millisecond)
		get(t, node(t, load, cfg), "k")
		synctest.Wait()
		if kept.Load() != 6 {
			t.Errorf("got %d NotModified, want 6: a new node must find the previous value", kept.Load())
		}
		// Without a previous value, NotModified returns ErrInvalid.
		if _, err := refill.NotModified[string](t.Context()); !errors.Is(err, refill.ErrInvalid) {
			t.Errorf("NotModified outside of a load: got %v, want ErrInvalid", err)
		}
		if err := nodes[0].Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		get(t, nodes[0], "k")
		if full.Load() != 3 {
			t.Errorf("got %d full loads after Invalidate, want 3: an invalidated value is no previous value", full.Load())
		}
	})
}

// Previous does not return an absence. A value that a load keeps with NotModified also keeps its tags.
func TestPreviousAbsenceAndTags(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var there, had atomic.Bool
		l := node(t, func(ctx context.Context, key string) (string, error) {
			_, _, ok := refill.Previous[string](ctx)
			had.Store(ok)
			switch {
			case !there.Load():
				return "", refill.ErrNotFound
			case ok:
				return refill.NotModified[string](ctx)
			}
			refill.FillFrom(ctx).Tag("red", "blue", "red")
			return "v", nil
		}, refill.Config{TTL: time.Minute})
		for range 2 {
			if err := l.Refresh(t.Context(), "k"); err != nil { // an absence is no failure
				t.Fatal(err)
			}
		}
		if had.Load() {
			t.Error("Previous returned an absence, want no previous value")
		}
		there.Store(true)
		for range 2 {
			if err := l.Refresh(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
		}
		if r, ok := l.Peek(t.Context(), "k"); !ok || !had.Load() || !slices.Equal(r.Tags, []string{"red", "blue"}) {
			t.Errorf("got %+v, %v, previous %v; want both tags, once each", r, ok, had.Load())
		}
		if err := l.InvalidateTag(t.Context(), "blue"); err != nil {
			t.Fatal(err)
		}
		if r, ok := l.Peek(t.Context(), "k"); ok {
			t.Errorf("Peek found %+v after InvalidateTag, want no value", r)
		}
	})
}

// Five nodes ask for a key whose load calls NoStore. When the nodes ask for the key a second time, all of them must
// load in parallel, because the store remembers the no-store. Later the no-store record has expired, and the load no
// longer calls NoStore. Then all callers must share one load again.
func TestNoStoreIsRemembered(t *testing.T) {
	for name, localTTL := range map[string]time.Duration{"with L1": 0, "without L1": -1} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: time.Second}
				var store atomic.Bool
				cfg := refill.Config{TTL: time.Minute, Shared: memory.New(), LocalTTL: localTTL}
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
									t.Errorf("node %d got %q, want its own value: no value may be stored", i, v)
								}
							})
						}
					}
					wg.Wait()
					return time.Since(began)
				}
				if took := all(true); took > 2100*time.Millisecond {
					t.Errorf("the first round took %v, want 2.1 s at most: the nodes queued", took)
				}
				if took := all(true); took > 1100*time.Millisecond {
					t.Errorf("the second round took %v, want 1.1 s at most: the time of one load", took)
				}
				if n := d.loads.Load(); n > 11 {
					t.Errorf("got %d loads in two rounds on five nodes, want 11 at most", n)
				}
				store.Store(true)
				time.Sleep(11 * time.Second) // until the no-store record has expired
				before := d.loads.Load()
				all(false)
				if n := d.loads.Load() - before; n != 1 {
					t.Errorf("got %d loads of a value that may be stored, want 1", n)
				}
			})
		})
	}
}

// The store has a no-store record of a key. Peek must find no value. A Get must load the real value, with and without
// the store. A Refresh whose load no longer calls NoStore must store its value.
func TestNoStoreRecordIsNoValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var store atomic.Bool
		shared := memory.New()
		s := newSpy(shared)
		l := node(t, func(ctx context.Context, key string) (string, error) {
			if !store.Load() {
				refill.FillFrom(ctx).NoStore()
			}
			return "real", nil
		}, refill.Config{TTL: time.Minute, Shared: s})
		for range 3 {
			if v := get(t, l, "k"); v != "real" {
				t.Errorf("got %q, want %q", v, "real")
			}
		}
		if r, ok := l.Peek(t.Context(), "k"); ok {
			t.Errorf("Peek found %+v, want no value", r)
		}
		s.cut(true)
		if v := get(t, l, "k"); v != "real" {
			t.Errorf("without the store: got %q, want %q", v, "real")
		}
		s.cut(false)
		store.Store(true)
		if err := l.Refresh(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		if r, ok := l.Peek(t.Context(), "k"); !ok || r.Value != "real" {
			t.Errorf("after a Refresh, Peek found %+v, %v; want the stored value", r, ok)
		}
	})
}

// A failed load of an uncacheable key starts a back-off, even if the key was invalidated before its first load.
func TestNoStoreKeyBacksOff(t *testing.T) {
	for _, before := range []bool{false, true} {
		t.Run(fmt.Sprint("invalidated before ", before), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var loads atomic.Int64
				var broken atomic.Bool
				l := node(t, func(ctx context.Context, key string) (string, error) {
					loads.Add(1)
					if broken.Load() {
						return "", errors.New("no")
					}
					refill.FillFrom(ctx).NoStore()
					return "v", nil
				}, refill.Config{TTL: time.Hour, ErrorTTL: time.Second})
				if before {
					_ = l.Invalidate(t.Context(), "k")
				}
				get(t, l, "k")
				synctest.Wait()
				broken.Store(true)
				loads.Store(0)
				for range 10 {
					_, _ = l.Get(t.Context(), "k")
					time.Sleep(10 * ms)
				}
				if n := loads.Load(); n != 1 {
					t.Errorf("got %d loads in 100 ms, want 1: ErrorTTL is 1 s", n)
				}
			})
		})
	}
}

// noStoreDB is a database whose values must not be stored until stores is set.
type noStoreDB struct {
	db
	stores atomic.Bool
	ttl    time.Duration // passed to SetTTL; 0 = load does not call SetTTL
}

func (m *noStoreDB) load(ctx context.Context, key string) (string, error) {
	f := refill.FillFrom(ctx)
	if m.ttl != 0 {
		f.SetTTL(m.ttl)
	}
	if !m.stores.Load() {
		f.NoStore()
	}
	return m.db.load(ctx, key)
}

// By default the store remembers a NoStore for 10 s from the end of its load. If the 10 s counted from the start of the
// load, the store would forget the NoStore of a load of 12 s at once. Two nodes would then load one after the other.
func TestNoStoreOfASlowLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := &noStoreDB{db: db{took: 12 * time.Second}}
		cfg := refill.Config{TTL: time.Minute, LoadTimeout: time.Minute, Shared: memory.New()}
		a, b := node(t, m.load, cfg), node(t, m.load, cfg)
		get(t, a, "k")
		began := time.Now()
		wait := behind(t, a, "k")
		get(t, b, "k")
		wait()
		if took := time.Since(began); took != 12*time.Second {
			t.Errorf("two loads took %v, want 12 s: they run in parallel", took)
		}
	})
}

// A load calls SetTTL and NoStore. The store must remember the no-store for that TTL. With a zero or negative TTL, the
// store must not remember the no-store. Without SetTTL, the store must remember the no-store for 10 s.
func TestHowLongNoStoreIsRemembered(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for ttl, want := range map[time.Duration]time.Duration{0: 10 * time.Second, time.Minute: time.Minute, -1: 0} {
			m, shared := &noStoreDB{ttl: ttl}, memory.New()
			get(t, node(t, m.load, refill.Config{TTL: time.Hour, Shared: shared}), "k")
			b, err := shared.Get(t.Context(), "thing:k")
			if err != nil {
				t.Fatal(err)
			}
			r, err := driver.DecodeRecord(b)
			left := r.FreshUntil.Sub(shared.Now())
			switch {
			case want > 0 && (err != nil || left != want):
				t.Errorf("ttl %v: got a record for %v, %v; want %v", ttl, left, err, want)
			case want == 0 && b != nil:
				t.Errorf("ttl %v: got record %q, want none", ttl, b)
			}
		}
	})
}

// While a no-store record is fresh, every Get loads, even if the loads no longer call NoStore. A failed load still
// starts a back-off, and MaxLoads still limits the loads.
func TestLoadsOfANoStoreKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := &noStoreDB{}
		l := node(t, m.load, refill.Config{TTL: time.Minute, MaxLoads: 1})
		keys := []string{"a", "b", "c"}
		for _, key := range keys {
			get(t, l, key)
		}
		m.stores.Store(true)
		for range 3 {
			get(t, l, "a")
		}
		if n := m.loads.Load(); n != 6 {
			t.Errorf("got %d loads, want 6: one per Get", n)
		}
		m.slow(100 * ms)
		var wg sync.WaitGroup
		for _, key := range keys {
			wg.Go(func() { get(t, l, key) })
		}
		wg.Wait()
		if n := m.most.Load(); n != 1 {
			t.Errorf("got %d loads at once, want 1", n)
		}
		m.fail(errors.New("boom"))
		before := m.loads.Load()
		for range 5 {
			if _, err := l.Get(t.Context(), "a"); err == nil {
				t.Error("Get succeeded, want the error of the load")
			}
		}
		if n := m.loads.Load() - before; n != 1 {
			t.Errorf("got %d loads of a key that fails, want 1: the others are within the back-off", n)
		}
	})
}

// A load on another node calls NoStore, so the store has a no-store record of the key. Node l misses the announcement,
// so its L1 still has an older value. When that value is stale, a Get starts a background refresh. The refresh must not
// load, because no caller waits for the value and the value could not be stored.
func TestRefreshOfANoStoreKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := &noStoreDB{}
		m.stores.Store(true)
		s := newSpy(memory.New())
		cfg := refill.Config{TTL: time.Second, StaleFor: time.Minute, Jitter: -1, Shared: s}
		l := node(t, m.load, cfg)
		cfg.Shared = s.Store
		peer := node(t, m.load, cfg)
		get(t, l, "k")
		s.mute.Store(true)
		m.stores.Store(false)
		if err := peer.Refresh(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(1100 * ms)
		get(t, l, "k") // stale: the refresh skips the lookup, and gets the no-store record from Acquire
		synctest.Wait()
		if n := m.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2", n)
		}
	})
}
