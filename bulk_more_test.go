package refill_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// A GetMany counts among those who wait until it has all its keys.
func TestGetManyWaitsForItsLastKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := node(t, func(_ context.Context, key string) (string, error) {
			if key != "quick" {
				time.Sleep(time.Second)
			}
			return key, nil
		}, refill.Config{TTL: time.Minute, MaxWaiters: 1})
		var wg sync.WaitGroup
		wg.Go(func() {
			if got, err := l.GetMany(t.Context(), []string{"quick", "slow"}); err != nil || len(got) != 2 {
				t.Errorf("%v, %v", got, err)
			}
		})
		time.Sleep(500 * ms)
		if _, err := l.Get(t.Context(), "other"); !errors.Is(err, refill.ErrOverloaded) {
			t.Errorf("a second caller: %v, want ErrOverloaded", err)
		}
		wg.Wait()
		get(t, l, "other") // the place is free again
	})
}

// A node that did not get the lease gives its place among MaxLoads back: a flight that waits for another node loads nothing.
func TestBulkGivesItsSlotBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: time.Second}
		shared := refill.NewMemory()
		a, b := bulk(t, d, refill.Config{Shared: shared}), bulk(t, d, refill.Config{Shared: shared, MaxLoads: 1})
		defer behind(t, a, "k")()
		time.Sleep(10 * ms)
		defer behind(t, b, "k")()
		time.Sleep(10 * ms)
		began := time.Now()
		if v := get(t, b, "other"); v != "row other" || time.Since(began) != time.Second {
			t.Errorf("%q after %v, want it after its load's second", v, time.Since(began))
		}
	})
}

// Without the store, a Get of a bulk Loader queues no longer than StoreTimeout for one of the MaxLoads.
func TestBulkOverloadedWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 2 * time.Second}
		s := newSpy(refill.NewMemory())
		l := bulk(t, d, refill.Config{Shared: s, MaxLoads: 1})
		s.cut(true)
		defer behind(t, l, "a")()
		time.Sleep(10 * ms)
		began := time.Now()
		if _, err := l.Get(t.Context(), "b"); !errors.Is(err, refill.ErrOverloaded) || time.Since(began) > 300*ms {
			t.Errorf("%v after %v, want ErrOverloaded after StoreTimeout", err, time.Since(began))
		}
	})
}

// A flight that everybody has left while it queued for one of the MaxLoads is over: it asks the store for nothing more.
func TestBulkIsLeftInTheQueue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: time.Second}
		s := &leaseCounter{spy: newSpy(refill.NewMemory())}
		l := bulk(t, d, refill.Config{Shared: s, MaxLoads: 1})
		wait := behind(t, l, "a")
		time.Sleep(10 * ms)
		ctx, cancel := context.WithTimeout(t.Context(), 100*ms)
		defer cancel()
		before := s.calls.Load()
		if _, err := l.Get(ctx, "b"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		if n := s.calls.Load() - before; n != 1 {
			t.Errorf("%d calls of the store by a Get that queued, want one look", n)
		}
		wait()
		synctest.Wait()
		if n := s.leases.Load(); n != 1 {
			t.Errorf("%d tries for a lease, want that of a: b is for nobody", n)
		}
		get(t, l, "b") // and it holds no place
	})
}

// A load that asks for its own key through a bulk load of another Loader is told so: it would wait for itself.
func TestNestedThroughABulkLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var inner *refill.Loader[string]
		outer := node(t, func(ctx context.Context, key string) (string, error) {
			_, err := inner.Get(ctx, "x")
			return key, err
		}, refill.Config{TTL: time.Minute, LoadTimeout: time.Second})
		inner, err := refill.NewBulk("inner", func(ctx context.Context, keys []string) (map[string]string, error) {
			if _, err := outer.Get(ctx, "k"); !errors.Is(err, refill.ErrInvalid) {
				t.Errorf("%v, want ErrInvalid", err)
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

// A Refresh that finds an ordinary flight on its way loads when that has ended: the flight may have been no load.
func TestRefreshAfterAnOrdinaryFlight(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: time.Second}
		l := bulk(t, d, refill.Config{})
		defer behind(t, l, "b")()
		time.Sleep(500 * ms)
		began := time.Now()
		if err := l.Refresh(t.Context(), "a", "b", "c"); err != nil {
			t.Fatal(err)
		}
		if calls := d.asked(); len(calls) != 3 || len(calls[1]) != 2 || len(calls[2]) != 1 || calls[2][0] != "b" {
			t.Errorf("calls %v, want b; a and c at once; b again", calls)
		}
		if took := time.Since(began); took < 1500*ms || took > 2100*ms {
			t.Errorf("it took %v", took)
		}
		wait := behind(t, l, "d") // who does not wait so long is told so
		time.Sleep(500 * ms)
		ctx, cancel := context.WithTimeout(t.Context(), 100*ms)
		defer cancel()
		if err := l.Refresh(ctx, "d"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v, want the ctx's error", err)
		}
		wait()
	})
}

// The caller of a GetMany leaves while its keys are read: another one that has joined a key does not fail with it.
func TestGetManyIsLeftWhileItReads(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{}
		s := newSpy(refill.NewMemory())
		var slow atomic.Bool
		l := bulk(t, d, refill.Config{Shared: slowMany{s, &slow}, StoreTimeout: 200 * ms})
		get(t, l, "warm")
		slow.Store(true)
		before := s.calls.Load()
		ctx, cancel := context.WithTimeout(t.Context(), 50*ms)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = l.GetMany(ctx, []string{"a", "b"}) })
		time.Sleep(10 * ms)
		if v := get(t, l, "a"); v != "row a" {
			t.Errorf("%q", v)
		}
		wg.Wait()
		// The read of both, and for a lease, claim and publication. b was left.
		if n := s.calls.Load() - before; n > 4+2 {
			t.Errorf("%d calls of the store: what the group read was lost", n)
		}
	})
}

// slowMany reads many keys slowly.
type slowMany struct {
	*spy
	slow *atomic.Bool
}

func (s slowMany) GetMany(ctx context.Context, keys ...string) ([][]byte, error) {
	if s.slow.Load() {
		select {
		case <-time.After(100 * ms):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.spy.GetMany(ctx, keys...)
}

// afterMany runs something when a GetMany has its reply and has not returned yet.
type afterMany struct {
	*spy
	do func()
}

func (s *afterMany) GetMany(ctx context.Context, keys ...string) ([][]byte, error) {
	records, err := s.spy.GetMany(ctx, keys...)
	if s.do != nil {
		s.do()
	}
	return records, err
}

// What is invalidated while a GetMany's reply is on its way is not served from L1 later.
func TestInvalidateWhileManyAreRead(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := &afterMany{spy: newSpy(refill.NewMemory())}
		l := node(t, d.load, refill.Config{TTL: time.Hour, Shared: s})
		peer := node(t, d.load, refill.Config{TTL: time.Hour, Shared: s.Store})
		get(t, peer, "a")
		get(t, peer, "b")
		s.do = func() {
			d.version.Store(1)
			if err := peer.Invalidate(t.Context(), "a"); err != nil {
				t.Error(err)
			}
			time.Sleep(ms)
		}
		if got, err := l.GetMany(t.Context(), []string{"a", "b"}); err != nil || len(got) != 2 {
			t.Errorf("%v, %v", got, err)
		}
		if v := get(t, l, "a"); v != "a v1" {
			t.Errorf("%q: L1 kept what was invalidated", v)
		}
	})
}

// A store that refuses the read of many keys is not asked for each of them, too.
func TestGetManyAsksOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{}
		s := newSpy(refill.NewMemory())
		l := bulk(t, d, refill.Config{Shared: s})
		s.cut(true)
		before := s.calls.Load()
		all(t, l, names(0, 100))
		if n := s.calls.Load() - before; n != 1 {
			t.Errorf("%d calls of a store that is down", n)
		}
	})
}

// leaseCounter counts the tries for a lease.
type leaseCounter struct {
	*spy
	leases atomic.Int64
}

func (s *leaseCounter) Begin(ctx context.Context, b refill.Bid) (refill.Begun, error) {
	s.leases.Add(1)
	return s.spy.Begin(ctx, b)
}
