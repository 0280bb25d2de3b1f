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
	"github.com/refill-go/refill/backend/memory"
)

// This file tests Get as its callers see it: hits in L1, callers that join and leave a flight, and MaxWaiters.

func TestAHitAllocatesNothing(t *testing.T) {
	d := &db{}
	l := node(t, d.load, refill.Config{TTL: time.Hour})
	ctx := t.Context()
	get(t, l, "k")
	if n := testing.AllocsPerRun(1000, func() { _, _ = l.Get(ctx, "k") }); n != 0 {
		t.Errorf("got %v allocations per hit, want 0", n)
	}
}

// ristretto shows a new key late and rejects some keys. The hot table in front of ristretto holds the values that were
// just loaded.
func TestAJustLoadedValueIsThere(t *testing.T) {
	for name, cfg := range map[string]refill.Config{
		"default":     {},
		"1 MiB":       {LocalBytes: 1 << 20},
		"16 KiB":      {LocalBytes: 1 << 14},
		"100 entries": {LocalEntries: 100},
	} {
		t.Run(name, func(t *testing.T) {
			d := &db{}
			s := newSpy(memory.New())
			cfg.TTL, cfg.Shared = time.Minute, s
			l := node(t, d.load, cfg)
			for i := range 2000 {
				key := fmt.Sprint(i)
				get(t, l, key)
				calls := s.calls.Load()
				get(t, l, key)
				if s.calls.Load() != calls {
					t.Fatalf("key %d: the second Get asked the store, want a hit", i)
				}
			}
			if n := d.loads.Load(); n != 2000 {
				t.Errorf("got %d loads, want 2000", n)
			}
		})
	}
}

func TestLocalTTLOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		s := newSpy(memory.New())
		l := node(t, d.load, refill.Config{
			TTL: time.Second, StaleFor: 10 * time.Second, LocalTTL: -1, Jitter: -1, Shared: s,
		})
		get(t, l, "k")
		gets := s.gets.Load()
		get(t, l, "k")
		if s.gets.Load() != gets+1 {
			t.Errorf("got %d Gets of the store, want 1: there is no L1", s.gets.Load()-gets)
		}
		time.Sleep(time.Second)
		for range 3 { // the first Get starts a refresh; all three are served the stale value
			if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.OutcomeStale {
				t.Errorf("got %+v, %v; want a stale value", r, err)
			}
		}
		time.Sleep(150 * ms)
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2", n)
		}
	})
}

func TestCallersLeaveOnTheirOwn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		l := fleet(t, 1, d, refill.Config{})[0]
		leader, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := l.Get(leader, "k"); !errors.Is(err, context.Canceled) {
				t.Errorf("leader: got %v, want its cancellation", err)
			}
		})
		time.Sleep(100 * ms)
		wg.Go(func() { get(t, l, "k") }) // a waiter
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 30*ms)
			defer cancel()
			began := time.Now()
			if _, err := l.Get(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 30*ms {
				t.Errorf("waiter with a deadline: got %v after %v, want its ctx's error after 30 ms", err, time.Since(began))
			}
		})
		time.Sleep(100 * ms)
		cancel()
		wg.Wait()
		if n := d.loads.Load(); n != 1 {
			t.Errorf("got %d loads, want 1", n)
		}
	})
}

// When the last caller leaves, the load's ctx ends and no back-off starts. No later caller joins the flight. Another
// node that waits for the lease continues at once.
func TestTheLastCallerCancelsTheLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		var ev events
		nodes := fleet(t, 2, d, refill.Config{OnEvent: ev.on})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = nodes[0].Get(ctx, "k") })
		time.Sleep(100 * ms)
		wg.Go(func() {
			began := time.Now()
			get(t, nodes[1], "k")
			if took := time.Since(began); took != 1100*ms { // 100 ms until the cancel, then its own load
				t.Errorf("the waiting node had its value after %v, want 1.1 s", took)
			}
		})
		time.Sleep(100 * ms)
		cancel()
		synctest.Wait() // the caller has left
		get(t, nodes[0], "k")
		wg.Wait()
		if ev.of(refill.EventLoadAbandoned) != 1 || d.loads.Load() != 2 {
			t.Errorf("got %d loads and events %v, want 2 loads and one EventLoadAbandoned", d.loads.Load(), ev.count)
		}
	})
}

// Callers beyond MaxWaiters get ErrOverloaded at once. A caller that leaves no longer counts. A Get that L1 answers
// does not wait and does not count. A background refresh does not count either.
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
			t.Errorf("got ErrOverloaded for %d of 5 callers, want 2", shed.Load())
		}
		for i := range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*ms)
			wg.Go(func() {
				defer cancel()
				if _, err := l.Get(ctx, fmt.Sprint("another ", i)); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("got %v, want the error of the ctx", err)
				}
			})
		}
		wg.Wait()
		get(t, l, "last") // the callers that left no longer count
	})
}

// A Get inside a load is admitted beyond MaxWaiters, because the caller that waits for the load counts already.
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
			t.Errorf("got %q, want %q", v, "v")
		}
	})
}
