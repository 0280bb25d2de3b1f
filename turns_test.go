package refill_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

// pooled is a store behind as many connections as go-redis has by default. Who finds none free waits, on the time of its ctx.
type pooled struct {
	refill.Store
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

func (s *pooled) Begin(ctx context.Context, b refill.Bid) (refill.Begun, error) {
	if err := s.call(ctx); err != nil {
		return refill.Begun{}, err
	}
	return s.Store.Begin(ctx, b)
}

// A queue for connections is no outage: a thousand Gets of cold keys at once are answered one after the other, and the
// circuit breaker stays closed.
func TestAQueueForConnectionsIsNoOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var doubts atomic.Int64
		d := &db{took: ms}
		l := node(t, d.load, refill.Config{
			TTL: time.Hour,
			Shared: &pooled{
				Store: refill.NewMemory(), took: 50 * ms,
				conns: make(chan struct{}, 10*runtime.GOMAXPROCS(0)),
			},
			OnEvent: func(e refill.Event) {
				if e.Kind == refill.EventStoreError || e.Kind == refill.EventBreakerOpen {
					doubts.Add(1)
				}
			},
		})
		var wg sync.WaitGroup
		for i := range 1000 {
			wg.Go(func() { get(t, l, fmt.Sprint(i)) })
		}
		wg.Wait()
		if n := doubts.Load(); n != 0 {
			t.Errorf("%d errors of a store that answers", n)
		}
		if n := d.loads.Load(); n != 1000 {
			t.Errorf("%d loads of 1000 keys", n)
		}
	})
}

// A caller who waits for its turn leaves when its ctx ends.
func TestACallerLeavesTheQueue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		turns := 30 * runtime.GOMAXPROCS(0)
		l := node(t, (&db{}).load, refill.Config{
			TTL: time.Hour, Shared: &pooled{Store: refill.NewMemory(), took: 200 * ms, conns: make(chan struct{}, turns)},
		})
		for i := range turns {
			defer behind(t, l, fmt.Sprint(i))()
		}
		time.Sleep(ms)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*ms, cancel)
		began := time.Now()
		if _, err := l.Get(ctx, "late"); err == nil || time.Since(began) != 10*ms {
			t.Errorf("%v after %v, want the ctx's error after 10ms", err, time.Since(began))
		}
	})
}

// A value that must not be stored is loaded by each node for itself, and that load may wait for its turn. It must not wait
// for a load that waits for it.
func TestALoadWaitsForAPassThatQueues(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var l *refill.Loader[string]
		l = node(t, func(ctx context.Context, key string) (string, error) {
			if key == "outer" {
				time.Sleep(100 * ms)
				return l.Get(ctx, "passed")
			}
			refill.FillFrom(ctx).NoStore()
			return key, nil
		}, refill.Config{TTL: time.Minute, MaxLoads: 1})
		get(t, l, "passed") // leaves the mark
		began := time.Now()
		defer behind(t, l, "outer")()
		time.Sleep(50 * ms)
		get(t, l, "passed")
		if took := time.Since(began); took != 100*ms {
			t.Errorf("%v, want the 100ms after which the outer load asks", took)
		}
	})
}
