package breaker

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

const timeout = 250 * time.Millisecond

var errStore = errors.New("store error")

// store is a store whose steps take a time and fail.
type store struct {
	driver.Store
	took   time.Duration
	broken atomic.Bool
	calls  atomic.Int64

	mu   sync.Mutex
	gets []string // keys of Gets since the last call of probed
}

// probed returns the keys of the Gets since its last call.
func (s *store) probed() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	gets := s.gets
	s.gets = nil
	return gets
}

func (s *store) call(ctx context.Context) error {
	s.calls.Add(1)
	if !s.broken.Load() {
		return nil
	}
	select {
	case <-time.After(s.took):
		return errStore
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *store) Get(ctx context.Context, key string) ([]byte, error) {
	s.mu.Lock()
	s.gets = append(s.gets, key)
	s.mu.Unlock()
	return nil, s.call(ctx)
}

func (s *store) GetMany(ctx context.Context, _ ...string) ([][]byte, error) { return nil, s.call(ctx) }

func (s *store) Acquire(ctx context.Context, _ driver.AcquireRequest) (driver.AcquireResult, error) {
	return driver.AcquireResult{}, s.call(ctx)
}

func (s *store) Publish(ctx context.Context, _ driver.PublishRequest) (driver.PublishResult, error) {
	return 0, s.call(ctx)
}

func (s *store) Fail(ctx context.Context, _, _, _ string, _ time.Duration) error { return s.call(ctx) }

func (s *store) Release(ctx context.Context, _, _ string) error { return s.call(ctx) }

func (s *store) Tags(ctx context.Context, _ ...string) ([]driver.TagState, error) {
	return nil, s.call(ctx)
}

func (s *store) EnsureTags(ctx context.Context, _, _ time.Duration, _ ...string) error {
	return s.call(ctx)
}

// world is a breaker around a broken store.
type world struct {
	*Breaker
	store   *store
	changes []string // opened, closed
}

func newWorld(t *testing.T, took time.Duration) *world {
	w := &world{store: &store{Store: memory.New(), took: took}}
	w.store.broken.Store(true)
	w.Breaker = New(w.store, timeout,
		func(error) { w.changes = append(w.changes, "open") }, func() { w.changes = append(w.changes, "closed") })
	t.Cleanup(w.Close)
	return w
}

// steps are the calls that go through the breaker.
func (w *world) steps(ctx context.Context) []error {
	_, get := w.Get(ctx, "thing:k")
	_, many := w.GetMany(ctx, "thing:k", "thing:l")
	_, none := w.GetMany(ctx)
	_, acquire := w.Acquire(ctx, driver.AcquireRequest{Key: "thing:k"})
	_, publish := w.Publish(ctx, driver.PublishRequest{Key: "thing:k"})
	_, tags := w.Tags(ctx, "thing:t")
	return []error{
		get, many, none, acquire, publish, tags, w.EnsureTags(ctx, 0, 0, "thing:t"),
		w.Fail(ctx, "thing:k", "n#1", "", 0), w.Release(ctx, "thing:k", "n#1"),
	}
}

func TestSlowFailuresOpenTheBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := newWorld(t, timeout), t.Context()
		for i := range openAfter {
			if w.Open() {
				t.Fatalf("open after %d failures", i)
			}
			if _, err := w.Get(ctx, "thing:k"); !errors.Is(err, errStore) {
				t.Fatal(err)
			}
		}
		if !w.Open() {
			t.Fatal("not open")
		}
		before := w.store.calls.Load()
		for i, err := range w.steps(ctx) {
			if !errors.Is(err, ErrOpen) {
				t.Errorf("step %d of an open breaker: %v", i, err)
			}
		}
		if n := w.store.calls.Load() - before; n != 0 {
			t.Errorf("%d calls of the store through an open breaker", n)
		}
		if err := w.Invalidate(ctx, "n#1", "thing:k"); err != nil {
			t.Errorf("Invalidate does not pass through: %v", err)
		}
		synctest.Wait()
		if !slices.Equal(w.changes, []string{"open"}) {
			t.Errorf("reported %v", w.changes)
		}
	})
}

// The breaker probes the key that failed, each half second, and closes when the store answers.
func TestProbeClosesTheBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := newWorld(t, timeout), t.Context()
		for range openAfter {
			_, _ = w.Acquire(ctx, driver.AcquireRequest{Key: "thing:k"})
		}
		time.Sleep(3 * probeEvery)
		synctest.Wait()
		if probed := w.store.probed(); !w.Open() || !slices.Equal(probed, []string{"thing:k", "thing:k"}) {
			t.Errorf("open: %v, probed %v", w.Open(), probed)
		}
		w.store.broken.Store(false)
		time.Sleep(probeEvery + timeout)
		synctest.Wait()
		if w.Open() || !slices.Equal(w.changes, []string{"open", "closed"}) {
			t.Errorf("open: %v, reported %v", w.Open(), w.changes)
		}
		for i, err := range w.steps(ctx) {
			if err != nil {
				t.Errorf("step %d of a closed breaker: %v", i, err)
			}
		}
	})
}

func TestProbeAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := newWorld(t, timeout), t.Context()
		w.Probe() // a Probe of a closed breaker has no effect after the breaker has opened
		for range openAfter {
			_, _ = w.Get(ctx, "thing:k")
		}
		w.store.probed()
		synctest.Wait()
		if w.store.probed() != nil {
			t.Error("probed because of an earlier Probe")
		}
		w.store.broken.Store(false)
		w.Probe()
		w.Probe()
		synctest.Wait()
		if w.Open() {
			t.Error("still open")
		}
	})
}

// A failure that comes at once costs nothing and does not count. A success ends a row of failures.
func TestWhatDoesNotOpenTheBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quick, slow, ctx := newWorld(t, timeout/10-1), newWorld(t, timeout), t.Context()
		for range 10 * openAfter {
			_, _ = quick.Get(ctx, "thing:k")
		}
		if quick.Open() {
			t.Error("open after quick failures")
		}
		for range 3 {
			for range openAfter - 1 {
				_, _ = slow.Get(ctx, "thing:k")
			}
			slow.store.broken.Store(false)
			_, _ = slow.Get(ctx, "thing:k")
			slow.store.broken.Store(true)
		}
		if slow.Open() {
			t.Error("open although a call between the failures succeeded")
		}
	})
}

// No mutex is held while onOpen runs: it may use the breaker.
func TestCallbacksRunWithoutAMutex(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &store{Store: memory.New(), took: timeout}
		s.broken.Store(true)
		var b *Breaker
		called := false
		b = New(s, timeout, func(error) {
			b.trip("thing:k", errStore)
			called = true
		}, func() {})
		defer b.Close()
		for range openAfter {
			_, _ = b.Get(t.Context(), "thing:k")
		}
		synctest.Wait()
		if !called {
			t.Error("onOpen did not return")
		}
	})
}

func TestClosedBreakerDoesNotOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := newWorld(t, timeout), t.Context()
		w.Close()
		for range 2 * openAfter {
			_, _ = w.Get(ctx, "thing:k")
		}
		if w.Open() || w.changes != nil {
			t.Errorf("open: %v, reported %v", w.Open(), w.changes)
		}
	})
}
