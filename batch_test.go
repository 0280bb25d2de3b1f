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

// This file tests the calls of a bulk load function: which keys share a call, the load slot and the time-out of a call,
// and Gets inside a bulk load.

// Gets of single keys share a call of the bulk load function if they begin within BulkWindow.
func TestBulkWindow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 50 * ms}
		l := bulk(t, d, refill.Config{BulkWindow: 10 * ms, MaxLoads: 1})
		var wg sync.WaitGroup
		for i, key := range names(0, 90) {
			wg.Go(func() {
				time.Sleep(time.Duration(i/30) * 7 * ms) // three waves: at 0, 7 and 14 ms
				if v := get(t, l, key); v != "row "+key {
					t.Errorf("got %q, want %q", v, "row "+key)
				}
			})
		}
		wg.Wait()
		if calls := d.asked(); len(calls) != 2 || len(calls[0]) != 60 || len(calls[1]) != 30 {
			t.Errorf("got calls %v, want one of 60 keys and one of 30", calls)
		}
	})
}

// No call of the bulk load function gets a key twice, even if the key has two flights at the same time. Here an
// Invalidate between two Gets keeps the second Get from joining the flight of the first.
func TestBulkKeysAreDistinct(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 10 * ms}
		l := bulk(t, d, refill.Config{BulkWindow: 50 * ms})
		wait := behind(t, l, "k")
		defer wait()
		time.Sleep(10 * ms)
		if err := l.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		get(t, l, "k")
		for _, keys := range d.asked() {
			if len(slices.Compact(slices.Clone(keys))) != len(keys) {
				t.Errorf("a call got keys %q, want distinct keys", keys)
			}
		}
	})
}

// Two Gets of key k begin within one BulkWindow. Between their starts, another node invalidates a tag that k does not
// have. Each Get must return the tag that the load function set for k.
func TestTwoFlightsOfAKeyInABulkLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var calls [][]string
		s := newSpy(memory.New())
		l, err := refill.NewBulk("thing", func(ctx context.Context, keys []string) (map[string]string, error) {
			calls = append(calls, keys)
			got := map[string]string{}
			for _, key := range keys {
				refill.FillFrom(ctx).For(key).Tag("red")
				got[key] = "v"
			}
			return got, nil
		}, refill.Config{TTL: time.Hour, BulkWindow: 50 * ms, Shared: s})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		s.down.Store(true) // from here on, every call of the store fails
		var wg sync.WaitGroup
		getTagged := func() {
			r, err := l.GetResult(t.Context(), "k")
			if err != nil || len(r.Tags) != 1 {
				t.Errorf("got %+v, %v; want the tag that its load set; calls %q", r, err, calls)
			}
		}
		wg.Go(getTagged)
		time.Sleep(10 * ms)
		// Another node invalidates blue, a tag that k does not have.
		s.announce(driver.Announcement{Kind: driver.TagInvalidated, Key: "thing:blue", At: time.Now()})
		wg.Go(getTagged)
		wg.Wait()
	})
}

// SetTTL of the Fill of a bulk load must hold for all keys of the load. SetTTL, SetValidator and NoStore of a Fill that
// Fill.For returned must hold for one key only.
func TestFillOfABulkLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		long := fmt.Sprint("long ", string(make([]byte, 600)))
		l, err := refill.NewBulk("thing", func(ctx context.Context, keys []string) (map[string]string, error) {
			f := refill.FillFrom(ctx)
			f.SetTTL(time.Hour)
			f.For("short").SetTTL(time.Second)
			f.For(long).SetValidator("v7")
			f.For("unknown").NoStore()
			rows := map[string]string{}
			for _, key := range keys {
				rows[key] = key
			}
			return rows, nil
		}, refill.Config{TTL: time.Minute, Jitter: -1})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if _, err := l.GetMany(t.Context(), []string{"short", "plain", long}); err != nil {
			t.Fatal(err)
		}
		for key, want := range map[string]time.Duration{"short": time.Second, "plain": time.Hour, long: time.Hour} {
			if r, ok := l.Peek(t.Context(), key); !ok || r.Remaining != want || r.Value != key {
				t.Errorf("%.10s…: got Remaining %v, want %v", key, r.Remaining, want)
			}
		}
		if r, _ := l.Peek(t.Context(), long); r.Validator != "v7" {
			t.Errorf("got validator %q, want v7", r.Validator)
		}
	})
}

// Node a loads key k. Node b has one load slot, and its flight of k waits for the lease that node a has. While this
// flight waits, it must not keep the load slot, so that node b can load another key.
func TestBulkGivesItsSlotBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: time.Second}
		shared := memory.New()
		a, b := bulk(t, d, refill.Config{Shared: shared}), bulk(t, d, refill.Config{Shared: shared, MaxLoads: 1})
		defer behind(t, a, "k")()
		time.Sleep(10 * ms)
		defer behind(t, b, "k")()
		time.Sleep(10 * ms)
		began := time.Now()
		if v := get(t, b, "other"); v != "row other" || time.Since(began) != time.Second {
			t.Errorf("got %q after %v, want %q after 1 s: the time of its load", v, time.Since(began), "row other")
		}
	})
}

// MaxLoads is 1, and a load of key a has the load slot. The only caller of the flight of key b leaves while the flight
// waits for the load slot. The flight of b must not call the store again.
func TestBulkIsLeftInTheQueue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: time.Second}
		s := newSpy(memory.New())
		l := bulk(t, d, refill.Config{Shared: s, MaxLoads: 1})
		wait := behind(t, l, "a")
		time.Sleep(10 * ms)
		ctx, cancel := context.WithTimeout(t.Context(), 100*ms)
		defer cancel()
		before := s.calls.Load()
		if _, err := l.Get(ctx, "b"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the error of the ctx", err)
		}
		if n := s.calls.Load() - before; n != 1 {
			t.Errorf("a Get that queued made %d calls of the store, want 1: the lookup", n)
		}
		wait()
		synctest.Wait()
		if n := s.acquires.Load(); n != 1 {
			t.Errorf("got %d acquires, want 1: that of a; no caller waits for b", n)
		}
		get(t, l, "b") // this load needs the slot, so the earlier flight of b must not hold the slot
	})
}

// A load function of keys a and b hangs. GetMany must return a time-out error for each of the two keys at LoadTimeout.
// Other keys can be loaded while the load function still runs. Keys a and b can be loaded again when the load function
// has returned.
func TestBulkLoadTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		hang, free := atomic.Bool{}, make(chan struct{})
		hang.Store(true)
		l, err := refill.NewBulk("thing", func(_ context.Context, keys []string) (map[string]string, error) {
			if hang.Load() {
				<-free // ignores its ctx
			}
			return map[string]string{"a": "1", "b": "2"}, nil
		}, refill.Config{TTL: time.Minute, LoadTimeout: time.Second, ErrorTTL: -1, MaxLoads: 1})
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		_, err = l.GetMany(t.Context(), []string{"a", "b"})
		var keys *refill.KeyErrors
		var load *refill.LoadError
		if !errors.As(err, &keys) || len(keys.Errs) != 2 || !errors.As(err, &load) || !load.Timeout ||
			time.Since(began) > 1100*ms {
			t.Errorf("got %v after %v, want time-outs of both keys after 1 s", err, time.Since(began))
		}
		hang.Store(false)
		if got, err := l.GetMany(t.Context(), []string{"a", "b"}); err == nil || len(got) != 0 {
			t.Errorf("while the load function runs: got %v, %v; want errors", got, err)
		}
		if _, err := l.GetMany(t.Context(), []string{"c", "d"}); err != nil {
			t.Errorf("other keys while the load function runs: %v", err)
		}
		close(free)
		synctest.Wait()
		if got, err := l.GetMany(t.Context(), []string{"a", "b"}); err != nil || len(got) != 2 {
			t.Errorf("after the load function has returned: got %v, %v; want both values", got, err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
}

// BulkWindow is longer than LoadTimeout, and the load function needs a little less than LoadTimeout. LoadTimeout counts
// from the call of the load function, not from the start of BulkWindow, so the load must succeed. The claim must live
// until the call has ended, so that the store accepts the value. L1 is off, so the second Get finds only a stored
// value.
func TestBulkLoadTimeoutBeginsWithTheCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		loads := 0
		l, err := refill.NewBulk("thing", func(_ context.Context, keys []string) (map[string]string, error) {
			loads++
			time.Sleep(900 * ms)
			return map[string]string{keys[0]: "1"}, nil
		}, refill.Config{
			TTL: time.Minute, LoadTimeout: time.Second, BulkWindow: 5 * time.Second, LocalTTL: -1,
			Shared: memory.New(),
		})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if got, err := l.Get(t.Context(), "a"); got != "1" || err != nil {
				t.Errorf("got %q, %v; want the value", got, err)
			}
		}
		if loads != 1 {
			t.Errorf("got %d loads, want 1: the value of the first load was stored", loads)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
}

// MaxLoads is 1, and a bulk load has the only load slot. The load function asks its own Loader for other keys. The load
// of the other keys must not wait for a load slot, because the outer load keeps the slot until the inner load has
// ended.
func TestNestedGetMany(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var l *refill.Loader[string]
		l, err := refill.NewBulk("thing", func(ctx context.Context, keys []string) (map[string]string, error) {
			rows := map[string]string{}
			for _, key := range keys {
				rows[key] = key
			}
			if slices.Contains(keys, "outer") {
				inner, err := l.GetMany(ctx, []string{"x", "y"})
				if err != nil || len(inner) != 2 {
					t.Errorf("inner GetMany: got %v, %v; want both values", inner, err)
				}
				if _, err := l.Get(ctx, "outer"); !errors.Is(err, refill.ErrInvalid) {
					t.Errorf("a load that asks for its own key: got %v, want ErrInvalid", err)
				}
			}
			return rows, nil
		}, refill.Config{TTL: time.Minute, MaxLoads: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if got, err := l.GetMany(t.Context(), []string{"outer", "other"}); err != nil || len(got) != 2 {
			t.Errorf("got %v, %v; want both values", got, err)
		}
	})
}

// The load of key k calls Get of a bulk Loader. The load function of the bulk Loader calls Get of k. The load of k
// would wait for itself, so the inner Get of k must return ErrInvalid.
func TestNestedThroughABulkLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var inner *refill.Loader[string]
		outer := node(t, func(ctx context.Context, key string) (string, error) {
			_, err := inner.Get(ctx, "x")
			return key, err
		}, refill.Config{TTL: time.Minute, LoadTimeout: time.Second})
		inner, err := refill.NewBulk("inner", func(ctx context.Context, keys []string) (map[string]string, error) {
			if _, err := outer.Get(ctx, "k"); !errors.Is(err, refill.ErrInvalid) {
				t.Errorf("got %v, want ErrInvalid", err)
			}
			return map[string]string{"x": "1"}, nil
		}, refill.Config{TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		defer inner.Close()
		get(t, outer, "k")
	})
}

// The load of key a in Loader x calls Get of a bulk Loader. The load function of the bulk Loader calls Get of a in x.
// The two loads would wait for each other, so the inner Get of a must return ErrInvalid. In the second run, a Get of
// another key has started the batch of the bulk Loader before the load of a asks the bulk Loader.
func TestNestedThroughTwoLoaders(t *testing.T) {
	for _, first := range []bool{false, true} {
		t.Run(fmt.Sprint("another key first ", first), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var x *refill.Loader[string]
				l, err := refill.NewBulk("bulk", func(ctx context.Context, keys []string) (map[string]string, error) {
					_, err := x.Get(ctx, "a")
					return nil, err
				}, refill.Config{TTL: time.Hour, BulkWindow: 10 * ms})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				x = node(t, func(ctx context.Context, key string) (string, error) {
					return l.Get(ctx, "1")
				}, refill.Config{TTL: time.Hour})
				if first {
					go func() { _, _ = l.Get(t.Context(), "2") }()
					time.Sleep(ms)
				}
				began := time.Now()
				_, err = x.Get(t.Context(), "a")
				if took := time.Since(began); took > time.Second || !errors.Is(err, refill.ErrInvalid) {
					t.Errorf("got %v after %v, want ErrInvalid within a second", err, took)
				}
			})
		})
	}
}
