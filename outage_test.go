package refill_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// A store that hangs costs the first few Gets a time-out, later ones nothing; and it is used again once it answers.
func TestBreaker(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s := newSpy(refill.NewMemory())
		var ev events
		l := node(t, d.load, refill.Config{TTL: time.Hour, Shared: s, OnEvent: ev.on})
		count := 0
		timed := func() time.Duration {
			began := time.Now()
			get(t, l, fmt.Sprint("key ", count))
			count++
			return time.Since(began)
		}
		s.stuck.Store(true)
		for i := range 5 {
			if took := timed(); took != 260*ms {
				t.Errorf("Get %d took %v, want a StoreTimeout and the load", i, took)
			}
		}
		calls := s.calls.Load()
		for range 20 {
			if took := timed(); took != 10*ms {
				t.Errorf("a Get behind the open breaker took %v, want the load alone", took)
			}
		}
		if n := ev.of(refill.EventBreakerOpen); n != 1 {
			t.Errorf("the breaker opened %d times, want once", n)
		}
		time.Sleep(10 * time.Second)
		// Each probe waits for a StoreTimeout and half a second.
		if n := s.calls.Load() - calls; n < 12 || n > 15 {
			t.Errorf("%d calls of the store in 10 s, want the probes alone", n)
		}
		s.stuck.Store(false)
		time.Sleep(750 * ms)
		if n := ev.of(refill.EventBreakerClosed); n != 1 {
			t.Fatalf("the breaker closed %d times, want once", n)
		}
		published := ev.of(refill.EventPublished)
		if timed(); ev.of(refill.EventPublished) != published+1 {
			t.Error("the store is back, and what is loaded is not stored")
		}
	})
}

// Failures that come at once say that the server lives: a full one, or a replica, still answers reads.
func TestBreakerIgnoresQuickFailures(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s := newSpy(refill.NewMemory())
		var ev events
		l := node(t, d.load, refill.Config{Shared: s, OnEvent: ev.on})
		s.down.Store(true)
		for i := range 20 {
			get(t, l, fmt.Sprint(i))
		}
		if ev.of(refill.EventBreakerOpen) != 0 || s.calls.Load() < 20 {
			t.Errorf("%d calls of the store for 20 Gets: %v", s.calls.Load(), ev.count)
		}
	})
}

// The breaker tries again at once when the subscription is back.
func TestBreakerHearsTheReturn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSpy(refill.NewMemory())
		var ev events
		l := node(t, d.load, refill.Config{TTL: time.Hour, Shared: s, OnEvent: ev.on})
		s.stuck.Store(true)
		for i := range 5 {
			get(t, l, fmt.Sprint(i))
		}
		s.stuck.Store(false)
		s.cut(true)
		s.cut(false)
		synctest.Wait()
		if n := ev.of(refill.EventBreakerClosed); n != 1 {
			t.Errorf("closed %d times right after the return, want once", n)
		}
	})
}

// A failing database is left alone for ErrorTTL, with a store or without one; and whoever asks where the load ran gets the
// load's own error, from the back-off, too.
func TestBackOffKeepsTheError(t *testing.T) {
	for _, down := range []bool{false, true} {
		t.Run(fmt.Sprint("store down ", down), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				broken := errors.New("connection refused")
				d := &db{took: 10 * ms, err: broken}
				s := newSpy(refill.NewMemory())
				l := node(t, d.load, refill.Config{TTL: time.Minute, ErrorTTL: 2 * time.Second, Shared: s})
				if down {
					s.cut(true)
				}
				for range 20 {
					_, err := l.Get(t.Context(), "k")
					var failed *refill.LoadError
					if !errors.Is(err, broken) || !errors.As(err, &failed) || failed.RetryAfter <= 0 || failed.RetryAfter > 2*time.Second {
						t.Errorf("%v, want the load's own error and when to try again", err)
					}
					time.Sleep(200 * ms)
				}
				if n := d.loads.Load(); n != 2 {
					t.Errorf("%d loads in 4 s at an ErrorTTL of 2 s, want 2", n)
				}
				d.fail(nil)
				if err := l.Refresh(t.Context(), "k"); err != nil {
					t.Errorf("Refresh within the back-off: %v", err)
				}
				get(t, l, "k")
			})
		})
	}
}

// A failed refresh without the store serves what is left of the old value, and does not load at every Get.
func TestStaleIfErrorWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s := newSpy(refill.NewMemory())
		l := node(t, d.load, refill.Config{TTL: time.Second, StaleIfError: time.Hour, ErrorTTL: 2 * time.Second, Jitter: -1, Shared: s})
		get(t, l, "k")
		s.cut(true)
		d.fail(errors.New("down, too"))
		time.Sleep(1100 * ms)
		for range 10 {
			r, err := l.GetResult(t.Context(), "k")
			if err != nil || r.Outcome != refill.EventStaleOnError || r.Value != "k v0" {
				t.Errorf("%+v, %v", r, err)
			}
			time.Sleep(100 * ms)
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("%d loads, want the first and one probe", n)
		}
	})
}

// More than MaxWaiters are refused at once, and places come back. What L1 answers does not wait, nor does a refresh count.
func TestMaxWaiters(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		l := node(t, d.load, refill.Config{TTL: 10 * time.Second, StaleFor: time.Hour, MaxWaiters: 3, Jitter: -1})
		get(t, l, "warm")
		time.Sleep(11 * time.Second)
		get(t, l, "warm") // its refresh runs
		var wg sync.WaitGroup
		var shed atomic.Int64
		for i := range 5 {
			wg.Go(func() {
				began := time.Now()
				_, err := l.Get(t.Context(), fmt.Sprint("cold ", i%2))
				if errors.Is(err, refill.ErrOverloaded) && time.Since(began) == 0 {
					shed.Add(1)
				} else if err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		get(t, l, "warm")
		wg.Wait()
		if shed.Load() != 2 {
			t.Errorf("%d of 5 were refused, want 2", shed.Load())
		}
		for i := range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*ms)
			wg.Go(func() {
				defer cancel()
				if _, err := l.Get(ctx, fmt.Sprint("another ", i)); !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		get(t, l, "last") // those who left have given their places back
	})
}

// A load that needs another key is let in: it holds a place already that somebody waits for.
func TestMaxWaitersLetsLoadsIn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var l *refill.Loader[string]
		l = node(t, func(ctx context.Context, key string) (string, error) {
			if key == "inner" {
				return "v", nil
			}
			return l.Get(ctx, "inner")
		}, refill.Config{MaxWaiters: 1})
		if v := get(t, l, "outer"); v != "v" {
			t.Errorf("%q", v)
		}
	})
}

// A load from before an Invalidate that fails after it leaves no back-off. (TestHistory found it.)
func TestAFailureFromBeforeAnInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms, err: errors.New("read before the write")}
		s := newSpy(refill.NewMemory())
		l := node(t, d.load, refill.Config{TTL: time.Hour, ErrorTTL: time.Minute, Shared: s})
		s.cut(true)
		failed := make(chan error)
		go func() {
			_, err := l.Get(t.Context(), "k")
			failed <- err
		}()
		time.Sleep(50 * ms)
		d.fail(nil)
		if err := l.Invalidate(t.Context(), "k"); err == nil {
			t.Error("the store does not answer, and there is no error")
		}
		if err := <-failed; err == nil {
			t.Error("the load did not fail")
		}
		get(t, l, "k")
	})
}
