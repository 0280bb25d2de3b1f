package refill_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// This file tests GetMany, and Refresh of many keys. batch_test.go tests which keys share a bulk load.

func TestGetMany(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 50 * ms, lacks: map[string]bool{"k0003": true}}
		s := newSpy(memory.New())
		l := bulk(t, d, refill.Config{Shared: s, NotFoundTTL: time.Minute, Jitter: -1})
		get(t, l, "k0000")
		if calls := d.asked(); len(calls) != 1 || len(calls[0]) != 1 {
			t.Fatalf("got calls %v after one Get, want one of one key", calls)
		}
		before := s.gets.Load()
		keys := append(names(0, 10), "k0001") // k0001 twice
		for range 2 {                         // the second GetMany is served from L1
			got, err := l.GetMany(t.Context(), keys)
			synctest.Wait() // until L1 has all values: the part of L1 behind its hot table stores in the background
			if err != nil || len(got) != 9 || got["k0007"] != "row k0007" {
				t.Errorf("got %v, %v; want nine rows", got, err)
			}
			if v, there := got["k0003"]; there {
				t.Errorf("got %q for a key that is not found, want no value", v)
			}
		}
		if calls := d.asked(); len(calls) != 1 || !slices.Equal(calls[0], names(1, 10)) {
			t.Errorf("got calls %v, want one for exactly the nine missing keys", calls)
		}
		if n := s.many.Load(); n != 1 || s.gets.Load() != before {
			t.Errorf("got %d GetManys and %d Gets of the store, want 1 and 0", n, s.gets.Load()-before)
		}
		if got, err := l.GetMany(t.Context(), nil); err != nil || len(got) != 0 {
			t.Errorf("GetMany of no keys: got %v, %v; want an empty map", got, err)
		}
	})
}

// Callers on two nodes ask for overlapping keys in opposite orders. Each key must be loaded once. Each caller may cause
// at most one bulk load. No node may wait for ever for a key that the other node loads.
func TestGetManyOfOverlappingKeys(t *testing.T) {
	for _, callers := range []int{1, 3} {
		t.Run(fmt.Sprint(callers, " on each"), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &table{took: 100 * ms}
				shared := memory.New()
				cfg := refill.Config{Shared: shared}
				a, b := bulk(t, d, cfg), bulk(t, d, cfg)
				all(t, a, names(0, 700))
				d.asked()
				back := names(600, 1000)
				slices.Reverse(back)
				var wg sync.WaitGroup
				for range callers {
					wg.Go(func() { all(t, a, names(500, 900)) })
					wg.Go(func() { all(t, b, back) })
				}
				wg.Wait()
				loaded := map[string]int{}
				calls := d.asked()
				for _, call := range calls {
					for _, key := range call {
						loaded[key]++
					}
				}
				if len(loaded) != 300 || len(calls) > 2*callers {
					t.Errorf("got %d keys in %d calls, want the 300 missing keys in at most %d calls",
						len(loaded), len(calls), 2*callers)
				}
				for key, n := range loaded {
					if n != 1 {
						t.Errorf("%s was loaded %d times, want once", key, n)
					}
				}
			})
		})
	}
}

// GetMany must serve stale keys at once. One bulk load must refresh the stale keys and load the missing keys.
func TestGetManyOfStaleKeys(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{}
		l := bulk(t, d, refill.Config{TTL: time.Second, StaleFor: time.Minute, Jitter: -1})
		all(t, l, names(0, 50))
		time.Sleep(1100 * ms)
		d.asked()
		all(t, l, names(20, 80))
		synctest.Wait()
		if calls := d.asked(); len(calls) != 1 || !slices.Equal(calls[0], names(20, 80)) {
			t.Errorf("got calls %v, want one of 30 stale and 30 missing keys", calls)
		}
		d.took = time.Second
		time.Sleep(1100 * ms)
		began := time.Now()
		all(t, l, names(20, 80))
		if took := time.Since(began); took > 0 {
			t.Errorf("stale values took %v, want them at once", took)
		}
	})
}

// GetMany also works with a load function for single keys. The loads then run in parallel, at most MaxLoads at once.
func TestGetManyWithSingleLoads(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		l := node(t, d.load, refill.Config{TTL: time.Minute, MaxLoads: 5})
		began := time.Now()
		got, err := l.GetMany(t.Context(), names(0, 20))
		if err != nil || len(got) != 20 || got["k0007"] != "k0007 v0" {
			t.Errorf("got %v, %v; want 20 values", got, err)
		}
		if took := time.Since(began); d.most.Load() != 5 || took != 400*ms {
			t.Errorf("got %d loads at once, %v in all; want 5 and 400 ms", d.most.Load(), took)
		}
		empty := node(t, nil, refill.Config{TTL: time.Minute})
		if _, err := empty.GetMany(t.Context(), []string{"a"}); !errors.Is(err, refill.ErrInvalid) {
			t.Errorf("without a load function: got %v, want ErrInvalid", err)
		}
	})
}

// Node a dies during a bulk load of 100 keys, while it holds the leases. Node b asks for 50 of these keys and for 50
// other keys. When the leases end, node b loads the 50 keys of node a with one more call. No lease is left.
func TestGetManyAndANodeThatDies(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: time.Second}
		shared := memory.New()
		s := newSpy(shared)
		a, b := bulk(t, d, refill.Config{Shared: s}), bulk(t, d, refill.Config{Shared: shared})
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = a.GetMany(t.Context(), names(0, 100)) })
		time.Sleep(10 * ms)
		s.died.Store(true)
		began := time.Now()
		all(t, b, names(50, 150))
		if took := time.Since(began); took > 2600*ms {
			t.Errorf("GetMany took %v, want 2.6 s at most: leases of 1 s, then a load of 1 s", took)
		}
		if calls := d.asked(); len(calls) != 3 {
			t.Errorf("got %d calls, want 3: one of the node that died, two of the other", len(calls))
		}
		wg.Wait()
		for _, key := range names(0, 150) {
			lockIsFree(t, shared, key)
		}
	})
}

// Keys a and b are cached. A bulk load of other keys then ends with an error, a panic or Goexit. GetMany must return
// the values of a and b, and an error for each other key.
func TestGetManyThatFails(t *testing.T) {
	boom := errors.New("boom")
	for name, end := range map[string]func(){
		"an error": func() {},
		"a panic":  func() { panic(boom) },
		"Goexit":   runtime.Goexit,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var failing atomic.Bool
				var calls atomic.Int64
				l, err := refill.NewBulk("thing", func(_ context.Context, keys []string) (map[string]string, error) {
					calls.Add(1)
					if failing.Load() {
						end()
						return map[string]string{keys[0]: "half"}, boom
					}
					return map[string]string{"a": "1", "b": "2"}, nil
				}, refill.Config{TTL: time.Minute})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				if _, err := l.GetMany(t.Context(), []string{"a", "b"}); err != nil {
					t.Fatal(err)
				}
				failing.Store(true)
				for range 2 { // the second GetMany is within the back-off
					got, err := l.GetMany(t.Context(), []string{"a", "c", "b", "d", ""})
					var keys *refill.KeyErrors
					var load *refill.LoadError
					if !errors.As(err, &keys) || len(keys.Errs) != 3 || !errors.As(keys.Errs["c"], &load) ||
						!errors.As(keys.Errs["d"], &load) || !errors.Is(keys.Errs[""], refill.ErrInvalid) ||
						!errors.Is(err, refill.ErrInvalid) {
						t.Errorf("got %v, want errors of c, d and the empty key", err)
					}
					if name != "Goexit" && !errors.Is(err, boom) {
						t.Errorf("got %v, want an error that wraps the cause", err)
					}
					if len(got) != 2 || got["a"] != "1" || got["b"] != "2" {
						t.Errorf("got values %v with the error, want those of a and b", got)
					}
				}
				if n := calls.Load(); n != 2 {
					t.Errorf("got %d calls, want 2: the back-off holds for each key of a call", n)
				}
			})
		})
	}
}

// OnEvent panics during a GetMany, and the caller recovers the panic, as net/http does. The GetMany must leave no
// flight behind. The test does not use a bubble, because the panic would end the bubble.
func TestGetManyWhoseOnEventPanics(t *testing.T) {
	d := &table{}
	var bad atomic.Bool
	onEvent := func(e refill.Event) {
		if e.Outcome == refill.OutcomeHit && bad.Swap(false) {
			panic("OnEvent")
		}
	}
	l, err := refill.NewBulk("thing", d.load, refill.Config{
		TTL: time.Hour, LoadTimeout: 100 * ms, OnEvent: onEvent,
	})
	if err != nil {
		t.Fatal(err)
	}
	get(t, l, "hit")
	bad.Store(true)
	func() {
		defer func() { _ = recover() }()
		_, _ = l.GetMany(t.Context(), []string{"cold", "hit"})
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if v, err := l.Get(ctx, "cold"); err != nil {
		t.Errorf("Get of the cold key: got %q, %v; want its row", v, err)
	}
	closed := make(chan struct{})
	go func() { _ = l.Close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(2 * time.Second):
		t.Error("Close took more than 2 s, want LoadTimeout (100 ms) at most")
	}
}

// The ctx of a GetMany ends during a bulk load. GetMany must return the value that L1 had, and the error of the ctx for
// the keys of the load. Another caller waits for one of these keys, so the load must go on. When that caller leaves as
// well, the load must be cancelled.
func TestGetManyIsLeft(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ended := make(chan error, 9)
		l, err := refill.NewBulk("thing", func(ctx context.Context, keys []string) (map[string]string, error) {
			if keys[0] == "there" {
				return map[string]string{"there": "yes"}, nil
			}
			<-ctx.Done()
			ended <- ctx.Err()
			return nil, ctx.Err()
		}, refill.Config{TTL: time.Minute, LoadTimeout: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		get(t, l, "there")
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		long, cancelLong := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancelLong()
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = l.Get(long, "b") }) // starts another load
		wg.Go(func() {
			time.Sleep(10 * ms)
			_, _ = l.Get(long, "c") // joins the flight of c that the GetMany below starts
		})
		synctest.Wait()
		began := time.Now()
		got, err := l.GetMany(short, []string{"there", "c", "d"})
		if !errors.Is(err, context.DeadlineExceeded) || got["there"] != "yes" || time.Since(began) > 1010*ms {
			t.Errorf("got %v, %v after %v; want the cached key and the ctx's error after 1 s", got, err, time.Since(began))
		}
		time.Sleep(time.Second)
		if len(ended) > 0 {
			t.Error("the load was cancelled, although a caller waits for c")
		}
		wg.Wait()
		synctest.Wait()
		if len(ended) != 2 {
			t.Errorf("got %d cancelled loads, want 2", len(ended))
		}
	})
}

// slowMany is a store whose GetMany takes 100 ms while slow is set.
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

// The caller of a GetMany leaves while the store reads the keys a and b. A second caller has joined the flight of a.
// The second caller must still get the value of a.
func TestGetManyIsLeftWhileItReads(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{}
		s := newSpy(memory.New())
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
			t.Errorf("got %q, want %q", v, "row a")
		}
		wg.Wait()
		// Usually there are 3 calls: one read of a and b, then Acquire and Publish of a. The flight of b needs no further
		// call, because no caller waits for b any longer. The bound of 6 allows some calls more.
		if n := s.calls.Load() - before; n > 4+2 {
			t.Errorf("got %d calls of the store, want 6 at most: the read of the GetMany was lost", n)
		}
	})
}

// afterMany is a store whose GetMany reads the values, then calls the function in the field do, and then returns.
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

// A GetMany reads a key. Another node invalidates the key while the reply of the store is on its way. The GetMany may
// return the old value, but a later Get must not find the old value in L1.
func TestInvalidateWhileManyAreRead(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := &afterMany{spy: newSpy(memory.New())}
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
			t.Errorf("got %v, %v; want both values", got, err)
		}
		if v := get(t, l, "a"); v != "a v1" {
			t.Errorf("got %q after the Invalidate, want %q", v, "a v1")
		}
	})
}

// A GetMany reads all its keys in one call of the store. Close must wait until that call has ended, even if no flight
// needs the values any longer.
func TestCloseWaitsForTheReadOfAGetMany(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSpy(memory.New())
		l, err := refill.New("thing", d.load, refill.Config{TTL: time.Second, StaleIfError: time.Hour, Shared: s})
		if err != nil {
			t.Fatal(err)
		}
		get(t, l, "a")
		time.Sleep(2 * time.Second) // past TTL, so the refill skips the lookup and does not need the read of the GetMany
		s.manyTook = 200 * ms
		if _, err := l.GetMany(t.Context(), []string{"a"}); err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if n := s.reading.Load(); n != 0 {
			t.Errorf("got %d reads of the store that go on after Close, want 0", n)
		}
		time.Sleep(time.Second)
	})
}

// A GetMany of any number of keys counts as one caller towards MaxWaiters.
func TestGetManyAndMaxWaiters(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: time.Second}
		l := bulk(t, d, refill.Config{MaxWaiters: 2})
		var wg sync.WaitGroup
		wg.Go(func() { all(t, l, names(0, 100)) })
		wg.Go(func() { all(t, l, names(50, 150)) })
		synctest.Wait()
		if _, err := l.GetMany(t.Context(), names(0, 3)); !errors.Is(err, refill.ErrOverloaded) {
			t.Errorf("a third caller: got %v, want ErrOverloaded", err)
		}
		wg.Wait()
		all(t, l, names(200, 300))
	})
}

// MaxWaiters is 1. A GetMany already has the value of one of its two keys, and waits for the other key, so the GetMany
// still counts as a waiter. A Get of a third key must fail with ErrOverloaded.
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
				t.Errorf("got %v, %v; want both values", got, err)
			}
		})
		time.Sleep(500 * ms)
		if _, err := l.Get(t.Context(), "other"); !errors.Is(err, refill.ErrOverloaded) {
			t.Errorf("a second caller: got %v, want ErrOverloaded", err)
		}
		wg.Wait()
		get(t, l, "other") // the GetMany has ended, so no other caller waits
	})
}

// MaxWaiters is 1. A GetMany waits for the last of its keys. A Get of that key would join the same flight, but the Get
// counts as a second waiter, so it must fail with ErrOverloaded.
func TestGetManyIsCountedToItsEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		load := func(ctx context.Context, key string) (string, error) {
			if key == "slow" {
				time.Sleep(time.Second)
			}
			return "v", nil
		}
		l := node(t, load, refill.Config{TTL: time.Hour, MaxWaiters: 1})
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = l.GetMany(t.Context(), []string{"fast", "slow"}) })
		time.Sleep(100 * ms)
		if _, err := l.Get(t.Context(), "slow"); !errors.Is(err, refill.ErrOverloaded) {
			t.Errorf("a second caller: got %v, want ErrOverloaded: MaxWaiters is 1", err)
		}
		wg.Wait()
	})
}

// During an outage of the store, GetMany serves the keys that L1 has. One bulk load loads the other keys.
func TestGetManyWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 50 * ms}
		s := newSpy(memory.New())
		l := bulk(t, d, refill.Config{Shared: s})
		all(t, l, names(0, 100))
		synctest.Wait() // until L1 has all values: the part of L1 behind its hot table stores in the background
		d.asked()
		s.cut(true)
		all(t, l, names(50, 200))
		if calls := d.asked(); len(calls) != 1 || len(calls[0]) != 100 {
			t.Errorf("got calls %v, want one for the 100 keys that L1 does not have", calls)
		}
	})
}

// The store is down, so the read of a GetMany fails. GetMany must load all keys without a further call of the store.
func TestGetManyReadsOnceWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{}
		s := newSpy(memory.New())
		l := bulk(t, d, refill.Config{Shared: s})
		s.cut(true)
		before := s.calls.Load()
		all(t, l, names(0, 100))
		if n := s.calls.Load() - before; n != 1 {
			t.Errorf("got %d calls of a store that is down, want 1", n)
		}
	})
}

// Refresh loads all its keys, even keys that are cached. Each call of the bulk load function gets at most 1,024 keys.
func TestRefreshMany(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 10 * ms}
		l := bulk(t, d, refill.Config{})
		all(t, l, names(0, 1100))
		synctest.Wait() // until all flights have ended: Refresh would load the key of a running flight in a call of its own
		d.asked()
		if err := l.Refresh(t.Context(), names(0, 1100)...); err != nil {
			t.Fatal(err)
		}
		if calls := d.asked(); len(calls) != 2 || len(calls[0]) != 1024 {
			t.Errorf("got %d calls, want 2: one per 1,024 keys", len(calls))
		}
		d.fail(errors.New("boom"))
		if err := l.Refresh(t.Context(), "k0001", "new"); err == nil {
			t.Error("Refresh succeeded, want the error of the load")
		}
		all(t, l, names(0, 300))
	})
}

// A Get has started a flight of key b. Then Refresh is called with a, b and c. The Refresh must wait for the end of the
// flight and then load b again, because the flight of a Get may end without a load.
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
			t.Errorf("got calls %v, want b; a and c in one call; b again", calls)
		}
		if took := time.Since(began); took < 1500*ms || took > 2100*ms {
			t.Errorf("Refresh took %v, want 1.5 to 2.1 s", took)
		}
		wait := behind(t, l, "d") // a Refresh of d whose ctx ends before this flight must return the error of its ctx
		time.Sleep(500 * ms)
		ctx, cancel := context.WithTimeout(t.Context(), 100*ms)
		defer cancel()
		if err := l.Refresh(ctx, "d"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the ctx's error", err)
		}
		wait()
	})
}

// Refresh uses no stored value, so Refresh must not call GetMany of the store. A call of GetMany with no keys would
// succeed without a request to the server. The breaker would take that success as a sign that the server answers.
func TestRefreshOfManyMakesNoSharedRead(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newSpy(memory.New())
		l := node(t, (&db{}).load, refill.Config{TTL: time.Hour, Shared: s})
		if err := l.Refresh(t.Context(), "a", "b", "c"); err != nil {
			t.Fatal(err)
		}
		if n := s.many.Load(); n != 0 {
			t.Errorf("got %d GetManys of the store, want 0", n)
		}
	})
}

// Two nodes ask for the same keys. The bulk load function returns values together with a *KeyErrors. Only the keys that
// the KeyErrors names must fail, each with its own error. The other keys must be stored, or be not found if the load
// returned no value for them.
func TestBulkLoadThatNamesItsFailures(t *testing.T) {
	boom, gone := errors.New("boom in shard 2"), fmt.Errorf("gone: %w", refill.ErrNotFound)
	named := &refill.KeyErrors{Errs: map[string]error{"2": boom, "gone": gone, "none": nil}}
	for name, c := range map[string]struct {
		err       error
		allFailed bool // every key fails
		noFailure bool // no key fails
	}{
		"named":           {err: named},
		"wrapped":         {err: fmt.Errorf("products: %w", named)},
		"no key":          {err: &refill.KeyErrors{}, noFailure: true},
		"nil":             {err: (*refill.KeyErrors)(nil), noFailure: true},
		"nil, wrapped":    {err: fmt.Errorf("boom: %w", (*refill.KeyErrors)(nil)), allFailed: true},
		"no key, wrapped": {err: errors.Join(boom, &refill.KeyErrors{}), allFailed: true},
		"another error":   {err: boom, allFailed: true},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var calls atomic.Int64
				load := func(context.Context, []string) (map[string]string, error) {
					calls.Add(1)
					time.Sleep(100 * ms)
					return map[string]string{"1": "one", "2": "half"}, c.err
				}
				shared := memory.New()
				keys := []string{"1", "2", "3", "gone"}
				want := map[string]string{"1": "one"}
				failed := 1
				switch {
				case c.allFailed:
					want, failed = map[string]string{}, len(keys)
				case c.noFailure:
					want["2"], failed = "half", 0
				}
				var wg sync.WaitGroup
				for range 2 {
					l, err := refill.NewBulk("thing", load, refill.Config{TTL: time.Minute, Shared: shared})
					if err != nil {
						t.Fatal(err)
					}
					defer l.Close()
					time.Sleep(10 * ms) // so that the first node gets all leases
					wg.Go(func() {
						for range 2 { // the second GetMany is within the back-off
							got, err := l.GetMany(t.Context(), keys)
							errs := new(refill.KeyErrors)
							if errors.As(err, &errs); !maps.Equal(got, want) || len(errs.Errs) != failed || (err == nil) != (failed == 0) {
								t.Errorf("got %v, %v; want %v and %d errors", got, err, want, failed)
							}
							var cause *refill.LoadError
							if failed > 0 && (!errors.As(errs.Errs["2"], &cause) || !strings.Contains(cause.Error(), "boom")) {
								t.Errorf("got %v, want a *LoadError with the cause for key 2", err)
							}
						}
					})
				}
				wg.Wait()
				wantCalls := int64(2) // the second node tries the keys that failed on the first node
				if failed == 0 {
					wantCalls = 1
				}
				if n := calls.Load(); n != wantCalls {
					t.Errorf("got %d calls, want %d: keys that failed have a back-off, the others are stored", n, wantCalls)
				}
			})
		})
	}
}

// A bulk load fails for key b, whose old value is error-only. The old value of b must stay in the store, and GetMany
// must return it in place of the error.
func TestBulkLoadKeepsTheOldValueOfAKeyThatFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var failing atomic.Bool
		load := func(_ context.Context, keys []string) (map[string]string, error) {
			if failing.Load() {
				return map[string]string{"a": "new"}, &refill.KeyErrors{Errs: map[string]error{"b": errors.New("boom")}}
			}
			return map[string]string{"a": "old", "b": "old"}, nil
		}
		l, err := refill.NewBulk("thing", load, refill.Config{TTL: time.Second, StaleIfError: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if _, err := l.GetMany(t.Context(), []string{"a", "b"}); err != nil {
			t.Fatal(err)
		}
		failing.Store(true)
		time.Sleep(2 * time.Second)
		got, err := l.GetMany(t.Context(), []string{"a", "b"})
		if err != nil || got["a"] != "new" || got["b"] != "old" {
			t.Errorf("got %v, %v; want the new a and the old b", got, err)
		}
	})
}

// The codec cannot encode the loaded values. GetMany must return the value and an error for each key, as Get does.
func TestGetManyOfAValueThatCannotBeEncoded(t *testing.T) {
	type row struct {
		N int
		C chan int // JSON refuses a channel
	}
	bubble(t, func(t *testing.T) {
		one := func(context.Context, string) (row, error) { return row{N: 7, C: make(chan int)}, nil }
		many := func(_ context.Context, keys []string) (map[string]row, error) {
			rows := make(map[string]row)
			for _, key := range keys {
				rows[key] = row{N: 7, C: make(chan int)}
			}
			return rows, nil
		}
		single, err := refill.New("single", one, refill.Config{TTL: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer single.Close()
		bulk, err := refill.NewBulk("bulk", many, refill.Config{TTL: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer bulk.Close()
		for _, l := range []*refill.Loader[row]{single, bulk} {
			got, err := l.GetMany(t.Context(), []string{"a", "b"})
			var errs *refill.KeyErrors
			if !errors.As(err, &errs) || !errors.Is(errs.Errs["a"], refill.ErrInvalid) ||
				!errors.Is(errs.Errs["b"], refill.ErrInvalid) || got["a"].N != 7 || got["b"].N != 7 {
				t.Errorf("got %v, %v; want both values and ErrInvalid for both keys", got, err)
			}
		}
	})
}
