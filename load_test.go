package refill_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests how a load runs: its load slot, its time-out and its panics. It also tests store slots. A call of the
// store needs a store slot, so the number of slots limits how many calls a Loader makes at once.

func TestPanicAndGoexitAreErrors(t *testing.T) {
	cause := errors.New("cause")
	for name, load := range map[string]func(context.Context, string) (string, error){
		"panic":       func(context.Context, string) (string, error) { panic("ouch") },
		"panic error": func(context.Context, string) (string, error) { panic(cause) },
		"nil pointer": func(context.Context, string) (string, error) { var p *string; return *p, nil },
		"Goexit":      func(context.Context, string) (string, error) { runtime.Goexit(); return "", nil },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				shared := memory.New()
				a, a2 := node(t, load, refill.Config{Shared: shared}), node(t, load, refill.Config{Shared: shared})
				b := node(t, func(context.Context, string) (string, error) {
					return "fine", nil
				}, refill.Config{Shared: shared})
				_, err := a.Get(t.Context(), "k")
				var le *refill.LoadError
				if !errors.As(err, &le) || !le.Panic || le.Timeout || le.RetryAfter != time.Second {
					t.Fatalf("got %v, want a LoadError with Panic set", err)
				}
				if name == "panic error" && !errors.Is(err, cause) {
					t.Errorf("got %v, want an error that wraps the one of the panic", err)
				}
				_, _ = a2.Get(t.Context(), "k")
				_, err = b.Get(t.Context(), "k") // b finds the back-off of a and a2 in the store
				if !errors.As(err, &le) || !le.Panic || strings.Contains(err.Error(), "\n") {
					t.Errorf("on another node: got %v, want a LoadError of one line with Panic set", err)
				}
				get(t, b, "other")
				time.Sleep(1001 * ms)
				get(t, b, "k")
			})
		})
	}
}

// A load function ignores its ctx and runs past LoadTimeout. At LoadTimeout, its callers must get an error, and its
// load slot must be free for other keys. Another node must load the key at once. The first node must not load the key
// again until the load function has returned.
func TestLoadTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan struct{})
		var runs atomic.Int64
		load := func(ctx context.Context, key string) (string, error) {
			if key == "k" && runs.Add(1) == 1 {
				<-release
			}
			return "v", nil
		}
		shared := memory.New()
		l := node(t, load, refill.Config{Shared: shared, LoadTimeout: 2 * time.Second, MaxLoads: 1})
		other := node(t, load, refill.Config{Shared: shared})
		began := time.Now()
		var wg sync.WaitGroup
		timedOut := func(where string, err error) {
			var le *refill.LoadError
			if !errors.As(err, &le) || !le.Timeout || !errors.Is(err, context.DeadlineExceeded) ||
				time.Since(began) != 2*time.Second {
				t.Errorf("%s: got %v after %v, want a time-out after 2 s", where, err, time.Since(began))
			}
		}
		wg.Go(func() {
			_, err := l.Get(t.Context(), "k")
			timedOut("the loading node", err)
		})
		synctest.Wait() // until the load on l has begun
		if get(t, other, "k"); time.Since(began) != 2*time.Second {
			t.Errorf("the waiting node loaded after %v, want 2 s", time.Since(began))
		}
		wg.Wait()
		get(t, l, "new")
		get(t, l, "k") // the value of the other node
		if err := other.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(1001 * ms) // the back-off is over
		_, err := l.Get(t.Context(), "k")
		if began = time.Now().Add(-2 * time.Second); runs.Load() != 2 {
			t.Errorf("got %d loads of the key, want 2: the first one still runs", runs.Load())
		}
		timedOut("while the load still runs", err)
		close(release)
		synctest.Wait()
		get(t, l, "k")
	})
}

func TestMaxLoads(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		s := newSpy(memory.New())
		l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: s, MaxLoads: 4})
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() { get(t, l, fmt.Sprint(i)) }) // the store answers, so the loads wait for a load slot
		}
		wg.Wait()
		if d.most.Load() != 4 || d.loads.Load() != 20 {
			t.Errorf("got %d loads at once, %d in all; want 4 and 20", d.most.Load(), d.loads.Load())
		}
		s.cut(true)
		d.slow(time.Second)
		var shed, served atomic.Int64
		began := time.Now()
		for i := range 20 {
			wg.Go(func() {
				switch _, err := l.Get(t.Context(), fmt.Sprint("new ", i)); {
				case err == nil:
					served.Add(1)
				case errors.Is(err, refill.ErrOverloaded) && time.Since(began) == 250*ms:
					shed.Add(1)
				default:
					t.Errorf("got %v after %v, want a value, or ErrOverloaded after 250 ms", err, time.Since(began))
				}
			})
		}
		wg.Wait()
		if shed.Load() != 16 || served.Load() != 4 || d.most.Load() != 4 {
			t.Errorf("got %d shed, %d served, %d loads at once; want 16, 4, 4", shed.Load(), served.Load(), d.most.Load())
		}
	})
}

// MaxLoads is 1, and the load of key outer has the load slot. A Get of an uncacheable key waits for the slot. Then the
// load of outer gets the uncacheable key. Now the uncacheable key must be loaded without a slot. Otherwise the load of
// outer would wait for the inner Get, and the inner Get for the slot of outer.
func TestNestedLoadOfAnUncacheableKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var l *refill.Loader[string]
		l = node(t, func(ctx context.Context, key string) (string, error) {
			if key == "outer" {
				time.Sleep(100 * ms)
				return l.Get(ctx, "uncacheable")
			}
			refill.FillFrom(ctx).NoStore()
			return key, nil
		}, refill.Config{TTL: time.Minute, MaxLoads: 1})
		get(t, l, "uncacheable") // leaves a no-store record in the store
		began := time.Now()
		defer behind(t, l, "outer")()
		time.Sleep(50 * ms)
		get(t, l, "uncacheable")
		if took := time.Since(began); took != 100*ms {
			t.Errorf("Get returned after %v, want 100 ms: when the outer load asks for the key", took)
		}
	})
}

// pooled is a store behind a pool of connections. A call waits until a connection is free, or until its ctx ends.
type pooled struct {
	driver.Store
	conns chan struct{}
	took  time.Duration
}

func (s *pooled) call(ctx context.Context) error {
	select {
	case s.conns <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.conns }()
	time.Sleep(s.took)
	return ctx.Err()
}

func (s *pooled) Get(ctx context.Context, key string) ([]byte, error) {
	if err := s.call(ctx); err != nil {
		return nil, err
	}
	return s.Store.Get(ctx, key)
}

func (s *pooled) Acquire(ctx context.Context, b driver.AcquireRequest) (driver.AcquireResult, error) {
	if err := s.call(ctx); err != nil {
		return driver.AcquireResult{}, err
	}
	return s.Store.Acquire(ctx, b)
}

// A thousand Gets of keys without a value arrive at the same time, and the pool has as many connections as go-redis has
// by default. So most Gets wait for a connection. The Loader must not count this wait as an outage of the store, and
// the breaker must not open.
func TestAQueueForConnectionsIsNoOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var outages atomic.Int64
		d := &db{took: ms}
		l := node(t, d.load, refill.Config{
			TTL: time.Hour,
			Shared: &pooled{
				Store: memory.New(), took: 50 * ms,
				conns: make(chan struct{}, 10*runtime.GOMAXPROCS(0)),
			},
			OnEvent: func(e refill.Event) {
				if e.Kind == refill.EventStoreError || e.Kind == refill.EventBreakerOpen {
					outages.Add(1)
				}
			},
		})
		var wg sync.WaitGroup
		for i := range 1000 {
			wg.Go(func() { get(t, l, fmt.Sprint(i)) })
		}
		wg.Wait()
		if n := outages.Load(); n != 0 {
			t.Errorf("got %d events of an outage, want 0: the store answers", n)
		}
		if n := d.loads.Load(); n != 1000 {
			t.Errorf("got %d loads, want 1000: one per key", n)
		}
	})
}

// Other Gets hold all store slots. A Get that waits for a store slot must return when its ctx ends.
func TestACallerLeavesTheQueueForTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		slots := 30 * runtime.GOMAXPROCS(0) // the number of store slots of a Loader
		l := node(t, (&db{}).load, refill.Config{
			TTL: time.Hour, Shared: &pooled{Store: memory.New(), took: 200 * ms, conns: make(chan struct{}, slots)},
		})
		for i := range slots {
			defer behind(t, l, fmt.Sprint(i))()
		}
		time.Sleep(ms)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*ms, cancel)
		began := time.Now()
		if _, err := l.Get(ctx, "late"); err == nil || time.Since(began) != 10*ms {
			t.Errorf("got %v after %v, want the ctx's error after 10 ms", err, time.Since(began))
		}
	})
}

// A load function ignores its ctx and outlives LoadTimeout, so the refill goes on without it. Then the function
// returns, panics or ends its goroutine. That must have no effect: the error of the time-out stays the answer, and the
// next Get loads the key.
func TestALoadThatEndsAfterItsRefill(t *testing.T) {
	for name, end := range map[string]func(){
		"returns":            func() {},
		"panics":             func() { panic("late") },
		"ends its goroutine": runtime.Goexit,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				release, loads := make(chan struct{}), 0
				shared := memory.New()
				var ev events
				l := node(t, func(context.Context, string) (string, error) {
					if loads++; loads == 1 {
						<-release
						end()
					}
					return fmt.Sprint("v", loads), nil
				}, refill.Config{TTL: time.Hour, LoadTimeout: time.Second, ErrorTTL: -1, Shared: shared, OnEvent: ev.on})
				var failed *refill.LoadError
				if _, err := l.Get(t.Context(), "k"); !errors.As(err, &failed) || !failed.Timeout {
					t.Errorf("got %v, want a time-out", err)
				}
				lockIsFree(t, shared, "k")
				close(release)
				synctest.Wait()
				ended := ev.of(refill.EventLoaded) + ev.of(refill.EventLoadFailed) + ev.of(refill.EventPublishRejected)
				if ended != 1 {
					t.Errorf("got %d events about the end of the load, want 1", ended)
				}
				if v := get(t, l, "k"); v != "v2" || loads != 2 {
					t.Errorf("got %q after %d loads, want v2 after 2", v, loads)
				}
			})
		})
	}
}
