package refill_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// This file tests a Loader whose store does not answer, the breaker, and stale values that are served in place of an
// error.

func TestWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		shared := memory.New()
		s := newSpy(shared)
		var ev events
		cfg := refill.Config{TTL: time.Minute, StaleFor: time.Minute, Shared: s, Jitter: -1, OnEvent: ev.on}
		l := node(t, d.load, cfg)
		peer := node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared})
		get(t, l, "k")
		get(t, peer, "gone")
		get(t, l, "gone")
		s.cut(true)
		if v := get(t, l, "k"); v != "k v0" || d.loads.Load() != 2 {
			t.Errorf("got %q after %d loads, want \"k v0\" from L1 after 2 loads", v, d.loads.Load())
		}
		get(t, l, "new")
		get(t, l, "new") // the value must come from L1
		if n := d.loads.Load(); n != 3 {
			t.Errorf("got %d loads, want 3", n)
		}
		d.version.Store(1)
		if err := l.Invalidate(t.Context(), "k", "gone"); err == nil {
			t.Error("Invalidate returned no error although it could not reach the store")
		}
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("Get after Invalidate without the store: got %q, want \"k v1\"", v)
		}
		s.cut(false)
		time.Sleep(time.Second)
		if n := ev.of(refill.EventInvalidateRetried); n != 2 {
			t.Errorf("got %d retried invalidations after the store came back, want 2", n)
		}
		if v := get(t, peer, "gone"); v != "gone v1" {
			t.Errorf("the peer serves %q, want \"gone v1\": the Invalidate was lost", v)
		}
		get(t, l, "k")
		calls := s.calls.Load()
		get(t, l, "k")
		if s.calls.Load() != calls {
			t.Error("a Get of an entry in L1 called the store after it came back")
		}
	})
}

// The age of a value counts from the start of its load. The age must count in this way also for a load during an outage
// of the store.
func TestAgeWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		s, l, _ := pair(t, d, refill.Config{TTL: time.Minute, Jitter: -1})
		s.cut(true)
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Age != time.Second || r.Remaining != 59*time.Second {
			t.Errorf("got age %v, %v left, %v, want age 1s, 59s left", r.Age, r.Remaining, err)
		}
	})
}

// During an outage of the store, a Get of a bulk Loader waits for a load slot. After StoreTimeout at most, the Get must
// fail with ErrOverloaded.
func TestBulkOverloadedWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 2 * time.Second}
		s := newSpy(memory.New())
		l := bulk(t, d, refill.Config{Shared: s, MaxLoads: 1})
		s.cut(true)
		defer behind(t, l, "a")()
		time.Sleep(10 * ms)
		began := time.Now()
		if _, err := l.Get(t.Context(), "b"); !errors.Is(err, refill.ErrOverloaded) || time.Since(began) > 300*ms {
			t.Errorf("got %v after %v, want ErrOverloaded after StoreTimeout", err, time.Since(began))
		}
	})
}

// A value that was invalidated or expired before an outage of the store is not served from L1 during the outage.
func TestInvalidatedBeforeAnOutage(t *testing.T) {
	for name, invalidate := range invalidationsOfRed {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				s, l, _ := tagPair(t, d, refill.Config{TTL: time.Hour})
				get(t, l, "red:1")
				d.version.Store(1)
				time.Sleep(ms)
				if err := invalidate(t.Context(), l); err != nil {
					t.Fatal(err)
				}
				s.cut(true)
				if v := get(t, l, "red:1"); v != "red:1 v1" {
					t.Errorf("got %q, want \"red:1 v1\": the old value is invalid, and StaleFor is 0", v)
				}
			})
		})
	}
}

// The store hangs. Each of the first five Gets waits for StoreTimeout. Then the breaker must open. Later Gets must not
// call the store until the store has answered a probe.
func TestBreaker(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s := newSpy(memory.New())
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
				t.Errorf("Get %d took %v, want 260ms: StoreTimeout and the load", i, took)
			}
		}
		calls := s.calls.Load()
		for range 20 {
			if took := timed(); took != 10*ms {
				t.Errorf("a Get with an open breaker took %v, want 10ms: the load alone", took)
			}
		}
		if n := ev.of(refill.EventBreakerOpen); n != 1 {
			t.Errorf("the breaker opened %d times, want once", n)
		}
		time.Sleep(10 * time.Second)
		// A probe takes StoreTimeout (250 ms). The next probe begins half a second after the end of the previous probe.
		if n := s.calls.Load() - calls; n < 12 || n > 15 {
			t.Errorf("got %d calls of the store in 10s, want 12 to 15: the probes alone", n)
		}
		s.stuck.Store(false)
		time.Sleep(750 * ms)
		if n := ev.of(refill.EventBreakerClosed); n != 1 {
			t.Fatalf("the breaker closed %d times, want once", n)
		}
		published := ev.of(refill.EventPublished)
		if timed(); ev.of(refill.EventPublished) != published+1 {
			t.Error("the store is back, but a loaded value was not published")
		}
	})
}

// Calls of the store that fail at once must not open the breaker, because a server that answers with an error is alive.
// For example, a full server or a replica rejects writes but still answers reads.
func TestBreakerIgnoresQuickFailures(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s := newSpy(memory.New())
		var ev events
		l := node(t, d.load, refill.Config{Shared: s, OnEvent: ev.on})
		s.down.Store(true)
		for i := range 20 {
			get(t, l, fmt.Sprint(i))
		}
		if ev.of(refill.EventBreakerOpen) != 0 || s.calls.Load() < 20 {
			t.Errorf("got %d calls of the store for 20 Gets, want at least 20 and a closed breaker: %v",
				s.calls.Load(), ev.count)
		}
	})
}

// The breaker is open. When the subscription returns, the breaker must send a probe at once.
func TestBreakerProbesWhenTheSubscriptionReturns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSpy(memory.New())
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
			t.Errorf("the breaker closed %d times right after the subscription came back, want once", n)
		}
	})
}

func TestStaleIfError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		var ev events
		cfg := refill.Config{TTL: time.Second, StaleIfError: 5 * time.Second, Jitter: -1, OnEvent: ev.on}
		nodes := fleet(t, 2, d, cfg)
		get(t, nodes[0], "k")
		d.fail(errors.New("boom"))
		time.Sleep(2 * time.Second) // the TTL is over and StaleFor is 0, so callers wait for the load
		for i, l := range nodes {
			r, err := l.GetResult(t.Context(), "k")
			if err != nil || r.Value != "k v0" || r.Outcome != refill.OutcomeStaleOnError ||
				r.Age < 2*time.Second || r.Remaining != 0 {
				t.Errorf("node %d: got %+v, %v, want the old value as stale-on-error", i, r, err)
			}
		}
		if n := d.loads.Load(); n != 3 {
			t.Errorf("got %d loads, want 3: after the first value, one failed load of each node", n)
		}
		time.Sleep(4 * time.Second)
		if _, err := nodes[0].Get(t.Context(), "k"); err == nil {
			t.Error("the old value is served past StaleIfError")
		}
	})
}

// A load fails during an outage of the store. Gets must return the old value within StaleIfError, and no further load
// may begin within ErrorTTL.
func TestStaleIfErrorWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s := newSpy(memory.New())
		l := node(t, d.load, refill.Config{
			TTL: time.Second, StaleIfError: time.Hour, ErrorTTL: 2 * time.Second, Jitter: -1, Shared: s,
		})
		get(t, l, "k")
		s.cut(true)
		d.fail(errors.New("database is down"))
		time.Sleep(1100 * ms)
		for range 10 {
			r, err := l.GetResult(t.Context(), "k")
			if err != nil || r.Outcome != refill.OutcomeStaleOnError || r.Value != "k v0" {
				t.Errorf("got %+v, %v, want \"k v0\" as stale-on-error", r, err)
			}
			time.Sleep(100 * ms)
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2: the first one and one probe", n)
		}
	})
}

// The time in which an old value is error-only (StaleIfError) ends during a load. Then the load fails. The old value
// must not be served.
func TestStaleOnErrorKeepsItsBound(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		l := fleet(t, 1, d, refill.Config{TTL: time.Second, StaleIfError: 2 * time.Second, Jitter: -1})[0]
		get(t, l, "k")
		time.Sleep(2 * time.Second)
		d.fail(errDown)
		d.slow(3 * time.Second)
		if v, err := l.Get(t.Context(), "k"); err == nil {
			t.Errorf("got %q of age 5s, past TTL + StaleIfError, want the error of the load", v)
		}
	})
}

// An error-only value is invalidated during a load. Then the load fails. The invalidated value must not be served.
func TestStaleOnErrorAfterAnInvalidate(t *testing.T) {
	for name, invalidate := range map[string]func(context.Context, *refill.Loader[string]) error{
		"Invalidate":    func(ctx context.Context, l *refill.Loader[string]) error { return l.Invalidate(ctx, "red:1") },
		"InvalidateTag": func(ctx context.Context, l *refill.Loader[string]) error { return l.InvalidateTag(ctx, "red") },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				_, l, _ := tagPair(t, d, refill.Config{TTL: time.Second, StaleIfError: time.Hour, Jitter: -1})
				get(t, l, "red:1")
				time.Sleep(2 * time.Second)
				d.slow(time.Second)
				d.fail(errors.New("boom"))
				var wg sync.WaitGroup
				wg.Go(func() {
					var failed *refill.LoadError
					if v, err := l.Get(t.Context(), "red:1"); !errors.As(err, &failed) {
						t.Errorf("got %q, %v, want the error of the load", v, err)
					}
				})
				time.Sleep(500 * ms)
				if err := invalidate(t.Context(), l); err != nil {
					t.Fatal(err)
				}
				wg.Wait()
			})
		})
	}
}
