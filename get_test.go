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

// This file tests Get as a caller sees it: hits in L1, callers that join and leave a flight, and MaxWaiters.

func TestAHitAllocatesNothing(t *testing.T) {
	d := &db{}
	l := node(t, d.load, refill.Config{TTL: time.Hour})
	ctx := t.Context()
	get(t, l, "k")
	if n := testing.AllocsPerRun(1000, func() { _, _ = l.Get(ctx, "k") }); n != 0 {
		t.Errorf("got %v allocations per hit, want 0", n)
	}
}

// ristretto, the cache inside L1, returns a new key only after a delay and rejects some keys. So L1 keeps the values
// that were just loaded in a hot table in front of ristretto. A Get right after the load of its key must be a hit.
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
		for range 3 { // the first Get starts a refresh; all three Gets are served the stale value
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

// When the last caller of a flight leaves, the ctx of its load must end, and no back-off may start. A later caller must
// not join the cancelled flight. Another node that waits for the lease must get the lease and load at once.
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
			if took := time.Since(began); took != 1100*ms { // 100 ms until the cancel, then a load of 1 s on this node
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

// Callers beyond MaxWaiters get ErrOverloaded at once. Three things must not count as waiters: a caller that has left,
// a Get that L1 answers, and a background refresh.
func TestMaxWaiters(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		l := node(t, d.load, refill.Config{TTL: 10 * time.Second, StaleFor: time.Hour, MaxWaiters: 3, Jitter: -1})
		get(t, l, "warm")
		time.Sleep(11 * time.Second)
		get(t, l, "warm") // stale: starts a background refresh
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
		get(t, l, "last") // succeeds, because the callers that have left no longer count
	})
}

// MaxWaiters is 1, and one caller waits for a load. The load itself calls Get. This inner Get must be admitted, because
// the caller that waits for the load counts already.
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

// L1 has a value that is fresh, but has been in L1 for longer than LocalTTL. Another node has replaced the value, and
// the announcement of the new value was lost. A Get with NoStale must wait for the read of the store. The Get must
// return the new value, not the value of L1.
func TestNoStaleAfterLocalTTL(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour, StaleFor: time.Hour, LocalTTL: time.Second})
		get(t, l, "k")
		s.mute.Store(true)
		d.version.Store(1)
		if err := peer.Refresh(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		r, err := l.GetResultWith(t.Context(), "k", refill.GetOptions[string]{NoStale: true})
		if err != nil || r.Value != "k v1" || r.Outcome == refill.OutcomeStale {
			t.Errorf("got %q, %v, %v; want the fresh value \"k v1\"", r.Value, r.Outcome, err)
		}
	})
}

// Node l loads a key and misses the announcement of an Invalidate by the other node. After the Invalidate, a second
// caller joins the load on l. The store refuses the value of the load, so the second caller must get the value of a new
// load. The caller that started the first load must get the value of the first load.
func TestJoinALoadThatIsRefused(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		s.mute.Store(true)
		first := behind(t, l, "k")
		time.Sleep(500 * ms)
		d.version.Store(1)
		if err := peer.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("a Get after Invalidate got %q, want \"k v1\"", v)
		}
		first()
	})
}
