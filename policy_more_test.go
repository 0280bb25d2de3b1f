package refill_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// Close cancels what nobody waits for, however the flight came to be a refresh.
func TestCloseCancelsRefreshes(t *testing.T) {
	for name, cfg := range map[string]refill.Config{
		"stale, from L1":        {StaleFor: time.Minute},
		"stale, from the store": {StaleFor: time.Minute, LocalTTL: -1},
		"early, from L1":        {TTL: 2 * time.Second, EarlyRefresh: 0.5},
		"early, from the store": {TTL: 2 * time.Second, EarlyRefresh: 0.5, LocalTTL: -1},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				cfg.Jitter = -1
				l := node(t, d.load, cfg)
				get(t, l, "k")
				time.Sleep(1100 * ms)
				d.slow(5 * time.Second)
				began := time.Now()
				get(t, l, "k")
				synctest.Wait()
				if n := d.now.Load(); n != 1 {
					t.Fatalf("%d refreshes run", n)
				}
				if err := l.Close(); err != nil || time.Since(began) > 0 {
					t.Errorf("Close took %v, %v", time.Since(began), err)
				}
			})
		})
	}
}

// Whoever comes when the value that a refresh has handed out is over waits for the refresh.
func TestTooLateForWhatWasHandedOut(t *testing.T) {
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
						t.Errorf("%q, want the old one at once", v)
					}
					time.Sleep(300 * ms)
					if v := get(t, l, "k"); v != "k v1" {
						t.Errorf("%q, want what the refresh loads", v)
					}
				})
			})
		}
	}
}

// Close lets a refresh finish that callers wait for.
func TestCloseLetsARefreshFinish(t *testing.T) {
	t.Run("within SoftTimeout", func(t *testing.T) {
		closeDuringARefresh(t, refill.Config{StaleFor: time.Minute, SoftTimeout: 5 * time.Second})
	})
	t.Run("too late for what was handed out", func(t *testing.T) {
		closeDuringARefresh(t, refill.Config{StaleFor: 200 * ms})
	})
}

func closeDuringARefresh(t *testing.T, cfg refill.Config) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		cfg.Jitter = -1
		l := node(t, d.load, cfg)
		get(t, l, "k")
		time.Sleep(1100 * ms)
		d.slow(time.Second)
		d.version.Store(1)
		if cfg.SoftTimeout == 0 {
			get(t, l, "k")
			time.Sleep(300 * ms)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("%q, want what the refresh loads", v)
			}
		})
		time.Sleep(100 * ms)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
	})
}

// A value that is refreshed early is served until its end and not longer, whatever becomes of the refresh.
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
			t.Errorf("%q is served past its end", v)
		}
	})
}

// A node that read a stale value while another one refreshes it tries once, not with each Get.
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
			t.Errorf("%d calls of the store by ten Gets", n)
		}
	})
}

// marking is a load function whose values must not be stored, until it is told otherwise.
type marking struct {
	db
	stores atomic.Bool
	ttl    time.Duration // of the mark; 0 = its default, below 0 = SetTTL(0)
}

func (m *marking) load(ctx context.Context, key string) (string, error) {
	f := refill.FillFrom(ctx)
	if m.ttl != 0 {
		f.SetTTL(m.ttl)
	}
	if !m.stores.Load() {
		f.NoStore()
	}
	return m.db.load(ctx, key)
}

// A NoStore is remembered from the end of its load: the slower that is, the more it is needed.
func TestNoStoreOfASlowLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := &marking{db: db{took: 12 * time.Second}}
		cfg := refill.Config{TTL: time.Minute, LoadTimeout: time.Minute, Shared: refill.NewMemory()}
		a, b := node(t, m.load, cfg), node(t, m.load, cfg)
		get(t, a, "k")
		began := time.Now()
		wait := behind(t, a, "k")
		get(t, b, "k")
		wait()
		if took := time.Since(began); took != 12*time.Second {
			t.Errorf("%v, want one load's time: none can help the other", took)
		}
	})
}

// SetTTL says how long a NoStore is remembered, 0 not at all.
func TestHowLongNoStoreIsRemembered(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for ttl, want := range map[time.Duration]time.Duration{0: 10 * time.Second, time.Minute: time.Minute, -1: 0} {
			m, shared := &marking{ttl: ttl}, refill.NewMemory()
			get(t, node(t, m.load, refill.Config{TTL: time.Hour, Shared: shared}), "k")
			b, err := shared.Get(t.Context(), "thing:k")
			if err != nil {
				t.Fatal(err)
			}
			r, err := refill.DecodeRecord(b)
			if left := r.FreshUntil.Sub(shared.Now()); want > 0 && (err != nil || left != want) || want == 0 && b != nil {
				t.Errorf("%v: %v left, %v; want %v", ttl, left, err, want)
			}
		}
	})
}

// While a mark stands, what is loaded is not kept; failures have their back-off, and MaxLoads holds.
func TestLoadsBesideAMark(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := &marking{}
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
			t.Errorf("%d loads, want 6: each Get its own", n)
		}
		m.slow(100 * ms)
		var wg sync.WaitGroup
		for _, key := range keys {
			wg.Go(func() { get(t, l, key) })
		}
		wg.Wait()
		if n := m.most.Load(); n != 1 {
			t.Errorf("%d loads at once", n)
		}
		m.fail(errors.New("boom"))
		before := m.loads.Load()
		for range 5 {
			if _, err := l.Get(t.Context(), "a"); err == nil {
				t.Error("no error")
			}
		}
		if n := m.loads.Load() - before; n != 1 {
			t.Errorf("%d loads within the back-off", n)
		}
	})
}

// A background refresh that finds a mark loads nothing: nobody waits for it, and it could not be stored.
func TestRefreshThatFindsAMark(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := &marking{}
		m.stores.Store(true)
		s := newSpy(refill.NewMemory())
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
		get(t, l, "k") // stale: the try does not look, and is told by the claim
		synctest.Wait()
		if n := m.loads.Load(); n != 2 {
			t.Errorf("%d loads, want 2", n)
		}
	})
}

// Without the store, too, a value's age counts from the start of its load.
func TestAgeWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		s, l, _ := pair(t, d, refill.Config{TTL: time.Minute, Jitter: -1})
		s.cut(true)
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Age != time.Second || r.Remaining != 59*time.Second {
			t.Errorf("age %v, %v left, %v", r.Age, r.Remaining, err)
		}
	})
}

// A long back-off counts on a node that has just started.
func TestLongBackOffOnANewNode(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		d.fail(errors.New("boom"))
		cfg := refill.Config{ErrorTTL: time.Second, MaxErrorTTL: time.Hour, Shared: refill.NewMemory()}
		l := node(t, d.load, cfg)
		var failed *refill.LoadError
		for range 9 {
			_, err := l.Get(t.Context(), "k")
			if !errors.As(err, &failed) {
				t.Fatal(err)
			}
			if failed.RetryAfter > 2*time.Minute {
				break
			}
			time.Sleep(failed.RetryAfter)
		}
		before := d.loads.Load()
		if _, err := node(t, d.load, cfg).Get(t.Context(), "k"); !errors.As(err, &failed) || failed.RetryAfter < 2*time.Minute {
			t.Errorf("%v, want the error that is left there", err)
		}
		if n := d.loads.Load() - before; n != 0 {
			t.Errorf("%d loads within the back-off", n)
		}
	})
}

// What ends a row of failures: a success on another node, Invalidate, and a pause. Then the back-off is ErrorTTL again.
func TestRowOfFailuresEnds(t *testing.T) {
	for name, end := range map[string]func(*testing.T, *db, *refill.Loader[string]){
		"a success elsewhere": func(t *testing.T, d *db, peer *refill.Loader[string]) {
			d.fail(nil)
			if err := peer.Refresh(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(1100 * ms)
			d.fail(errors.New("boom"))
		},
		"Invalidate": func(t *testing.T, _ *db, peer *refill.Loader[string]) {
			if err := peer.Invalidate(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		},
		"a pause": func(*testing.T, *db, *refill.Loader[string]) { time.Sleep(time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				d.fail(errors.New("boom"))
				_, l, peer := pair(t, d, refill.Config{ErrorTTL: 2 * time.Second, MaxErrorTTL: time.Minute, Jitter: -1})
				after := func() time.Duration {
					var failed *refill.LoadError
					if _, err := l.Get(t.Context(), "k"); !errors.As(err, &failed) {
						t.Fatal(err)
					}
					return failed.RetryAfter
				}
				after()
				time.Sleep(2 * time.Second)
				if got := after(); got != 4*time.Second {
					t.Fatalf("the second failure's back-off is %v", got)
				}
				end(t, d, peer)
				if got := after(); got != 2*time.Second {
					t.Errorf("back-off %v, want that of a first failure", got)
				}
			})
		})
	}
}

// An absence is no previous value; and a value that is not modified keeps its tags.
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
			t.Error("an absence is a previous value")
		}
		there.Store(true)
		for range 2 {
			if err := l.Refresh(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
		}
		if r, ok := l.Peek(t.Context(), "k"); !ok || !had.Load() || !slices.Equal(r.Tags, []string{"red", "blue"}) {
			t.Errorf("%+v, %v, previous %v; want both tags, once each", r, ok, had.Load())
		}
		if err := l.InvalidateTag(t.Context(), "blue"); err != nil {
			t.Fatal(err)
		}
		if r, ok := l.Peek(t.Context(), "k"); ok {
			t.Errorf("Peek found %+v, which is void", r)
		}
	})
}

// As many tags as are allowed, and the same one as often as one likes.
func TestMostTags(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := node(t, func(ctx context.Context, _ string) (string, error) {
			for i := range 64 {
				refill.FillFrom(ctx).Tag(fmt.Sprint(i), "0")
			}
			return "v", nil
		}, refill.Config{TTL: time.Minute})
		if r, err := l.GetResult(t.Context(), "k"); err != nil || len(r.Tags) != 64 {
			t.Errorf("%d tags, %v", len(r.Tags), err)
		}
	})
}

// A key that is spelled otherwise is the load's own, too: it may speak of it, and not ask for it.
func TestLoadOfALongKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		long := strings.Repeat("x", 600)
		var l *refill.Loader[string]
		l = node(t, func(ctx context.Context, key string) (string, error) {
			refill.FillFrom(ctx).For(key).SetTTL(time.Hour)
			refill.FillFrom(ctx).For("").SetTTL(time.Second)
			if _, err := l.Get(ctx, key); !errors.Is(err, refill.ErrInvalid) {
				t.Errorf("a load that asks for its own key: %v", err)
			}
			return "v", nil
		}, refill.Config{TTL: time.Minute, Jitter: -1, LoadTimeout: time.Second})
		if r, err := l.GetResult(t.Context(), long); err != nil || r.Remaining != time.Hour {
			t.Errorf("%v left, %v", r.Remaining, err)
		}
	})
}

// What is spelled as it is given: up to 512 bytes, spaces, any letters.
func TestKeysThatStayAsTheyAre(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newSpy(refill.NewMemory())
		d := &db{}
		l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: s})
		for _, key := range []string{strings.Repeat("x", 512), "a b", "ключ", "a#"} {
			get(t, l, key)
			s.mu.Lock()
			if !slices.Contains(s.keys, "thing:"+key) {
				t.Errorf("%.10s… does not stand under itself", key)
			}
			s.mu.Unlock()
		}
	})
}

// A name is in use until the last Loader of it is closed.
func TestNameIsInUse(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cfg := refill.Config{TTL: time.Minute, Shared: refill.NewMemory()}
		a, b := node(t, never(t), cfg), node(t, never(t), cfg)
		number := func(context.Context, string) (int, error) { return 1, nil }
		for i, l := range []*refill.Loader[string]{a, b} {
			if _, err := refill.New("thing", number, cfg); !errors.Is(err, refill.ErrInvalid) {
				t.Errorf("%d of 2 closed: %v", i, err)
			}
			_ = l.Close()
		}
		n, err := refill.New("thing", number, cfg)
		if err != nil {
			t.Fatal(err)
		}
		_ = n.Close()
		// A store that cannot be compared is never the same.
		cfg.Shared = struct {
			refill.Store
			_ []int
		}{Store: cfg.Shared}
		node(t, never(t), cfg)
	})
}

// Defaults are not doubted, whatever TTL.
func TestNoAdviceAboutDefaults(t *testing.T) {
	for _, ttl := range []time.Duration{100 * ms, time.Second, time.Minute, 24 * time.Hour} {
		l := node(t, never(t), refill.Config{TTL: ttl, StaleIfError: time.Hour, OnEvent: func(e refill.Event) {
			if e.Kind == refill.EventConfigDoubt {
				t.Errorf("TTL %v: %v", ttl, e.Err)
			}
		}})
		_ = l.Close()
	}
}

// Settings at their bounds.
func TestConfigBounds(t *testing.T) {
	for name, cfg := range map[string]refill.Config{
		"a back-off that may not grow": {ErrorTTL: 5 * time.Second, MaxErrorTTL: 5 * time.Second},
		"the largest XFetch":           {XFetch: 100},
	} {
		cfg.TTL = time.Minute
		if l, err := refill.New("x", never(t), cfg); err != nil {
			t.Errorf("%s: %v", name, err)
		} else {
			_ = l.Close()
		}
	}
	for name, cfg := range map[string]refill.Config{"BulkWindow": {BulkWindow: -1}, "XFetch": {XFetch: 101}} {
		cfg.TTL = time.Minute
		if _, err := refill.New("x", never(t), cfg); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
