package breaker

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

	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

const timeout = 250 * time.Millisecond

var errStore = errors.New("store error")

// store is a driver.Store. While broken is set, the calls that go through the breaker fail after the time took.
type store struct {
	driver.Store
	took   time.Duration
	broken atomic.Bool
	big    atomic.Bool // Get fails after took, as it does for a value that is too large for its time-out
	calls  atomic.Int64

	mu     sync.Mutex
	probes []string // arguments of Tags since the last call of probed
}

// probed returns the arguments of the calls of Tags since the last call of probed.
func (s *store) probed() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	probes := s.probes
	s.probes = nil
	return probes
}

func (s *store) call(ctx context.Context) error {
	s.calls.Add(1)
	if !s.broken.Load() {
		return nil
	}
	return s.hang(ctx)
}

func (s *store) hang(ctx context.Context) error {
	select {
	case <-time.After(s.took):
		return errStore
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *store) Get(ctx context.Context, _ string) ([]byte, error) {
	if s.big.Load() {
		return nil, s.hang(ctx)
	}
	return nil, s.call(ctx)
}

func (s *store) GetMany(ctx context.Context, _ ...string) ([][]byte, error) { return nil, s.call(ctx) }

func (s *store) Acquire(ctx context.Context, _ driver.AcquireRequest) (driver.AcquireResult, error) {
	return driver.AcquireResult{}, s.call(ctx)
}

func (s *store) Publish(ctx context.Context, _ driver.PublishRequest) (driver.PublishResult, error) {
	return 0, s.call(ctx)
}

func (s *store) Fail(ctx context.Context, _ driver.FailRequest) error { return s.call(ctx) }

func (s *store) Release(ctx context.Context, _, _ string) error { return s.call(ctx) }

func (s *store) Tags(ctx context.Context, tags ...string) ([]driver.TagState, error) {
	s.mu.Lock()
	s.probes = append(s.probes, tags...)
	s.mu.Unlock()
	return nil, s.call(ctx)
}

func (s *store) EnsureTags(ctx context.Context, _, _ time.Duration, _ ...string) error {
	return s.call(ctx)
}

// world is a breaker around a broken store.
type world struct {
	*Breaker
	store   *store
	changes []string // "open" for each call of onOpen, "closed" for each call of onClosed
}

func newWorld(t *testing.T, took time.Duration) *world {
	w := &world{store: &store{Store: memory.New(), took: took}}
	w.store.broken.Store(true)
	w.Breaker = New(w.store, timeout,
		func(error) { w.changes = append(w.changes, "open") }, func() { w.changes = append(w.changes, "closed") })
	t.Cleanup(w.Close)
	return w
}

// steps makes every call that goes through the breaker, and returns the errors of these calls.
func (w *world) steps(ctx context.Context) []error {
	_, get := w.Get(ctx, "thing:k")
	_, many := w.GetMany(ctx, "thing:k", "thing:l")
	_, none := w.GetMany(ctx)
	_, acquire := w.Acquire(ctx, driver.AcquireRequest{Key: "thing:k"})
	_, publish := w.Publish(ctx, driver.PublishRequest{Key: "thing:k"})
	_, tags := w.Tags(ctx, "thing:t")
	return []error{
		get, many, none, acquire, publish, tags, w.EnsureTags(ctx, 0, 0, "thing:t"),
		w.Fail(ctx, driver.FailRequest{Key: "thing:k", Token: "n#1"}), w.Release(ctx, "thing:k", "n#1"),
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

// Acquire of one key fails until the breaker opens. The breaker must then ask for the state of a tag with the text of
// this key each half second, and must close when the store answers again.
func TestProbeClosesTheBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := newWorld(t, timeout), t.Context()
		for range openAfter {
			_, _ = w.Acquire(ctx, driver.AcquireRequest{Key: "thing:k"})
		}
		w.store.probed() // forgets the probe that began with the first failure, when the store became suspect
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

// The value of one key is so large that each Get of the key times out. Five Gets of this key open the breaker. The
// store answers all other calls, so the next probe must close the breaker.
func TestLargeValueDoesNotKeepTheBreakerOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, timeout)
		w.store.broken.Store(false)
		w.store.big.Store(true)
		for range openAfter {
			_, _ = w.Get(t.Context(), "thing:big")
		}
		if !w.Open() {
			t.Fatal("not open after five slow failures")
		}
		time.Sleep(10 * time.Minute)
		if w.Open() {
			t.Error("still open after ten minutes, although the store answers everything but one key")
		}
	})
}

func TestProbeAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := newWorld(t, timeout), t.Context()
		w.Probe() // before the breaker opens: must not cause a probe when the breaker has opened
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

// Any number of quick failures must not open the breaker. Slow failures must not open it either if a call in between
// succeeds.
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

// sharedError is the error of a call that the store has sent together with other calls, see Breaker.first.
type sharedError struct{ counts bool }

func (e *sharedError) Error() string  { return "the pipeline failed" }
func (e *sharedError) First(any) bool { return e.counts }

// The errors of some slow failures have a method First. A failure for which First returns true must count. A failure
// for which First returns false must not count, and must not make the store suspect.
func TestFailureOfManyCallsCountsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newWorld(t, timeout).Breaker
		fails := func(counts bool) {
			_, _ = call(b, "thing:k", func() (int, error) {
				time.Sleep(timeout)
				return 0, fmt.Errorf("get: %w", &sharedError{counts})
			})
		}
		for range 10 * openAfter {
			fails(false)
		}
		if b.Open() || b.health.suspect.Load() {
			t.Errorf("open: %v, suspect: %v after failures that do not count", b.Open(), b.health.suspect.Load())
		}
		for range openAfter {
			fails(true)
		}
		if !b.Open() {
			t.Error("not open after failures that count")
		}
	})
}

// onOpen calls trip, which locks the mutex of the breaker. onOpen must return, so the breaker must not hold this
// mutex while onOpen runs.
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

// Two breakers share a store. The first slow failure of one breaker must make the store suspect for both. A suspicion
// must end with the first answer of the store, and not by itself.
func TestSuspicion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := newWorld(t, timeout), t.Context()
		other := New(w.store, timeout, func(error) {}, func() {})
		defer other.Close()
		stranger := newWorld(t, timeout)
		suspect := func(b *Breaker) bool {
			select {
			case <-b.Suspect():
				return true
			default:
				return false
			}
		}
		w.store.took = timeout / 20
		_, _ = w.Get(ctx, "thing:k")
		if suspect(w.Breaker) {
			t.Error("suspect after a quick failure")
		}
		w.store.took = timeout
		_, _ = w.Get(ctx, "thing:k")
		if !suspect(w.Breaker) || !suspect(other) || suspect(stranger.Breaker) {
			t.Error("a slow failure must make the store suspect for both breakers, and no other store")
		}
		w.store.probed()
		time.Sleep(10*(timeout+probeEvery) + timeout)
		synctest.Wait()
		if n := len(w.store.probed()); !suspect(other) || n < 10 || n > 11 {
			t.Errorf("suspect: %v, %d probes, want 10 or 11", suspect(other), n)
		}
		w.store.broken.Store(false)
		if _, err := other.Get(ctx, "thing:l"); err != nil || suspect(w.Breaker) {
			t.Errorf("%v, suspect: %v, want no suspicion after an answer", err, suspect(w.Breaker))
		}
	})
}

// A store becomes suspect during a call. UnlessSuspect must return at once. Close must wait for the call.
func TestUnlessSuspect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := newWorld(t, timeout), t.Context()
		go func() { _, _ = w.Get(ctx, "thing:k") }()
		time.Sleep(timeout / 2)
		began, returned := time.Now(), false
		_, err := UnlessSuspect(w.Breaker, w.Suspect(), func() ([]byte, error) {
			b, err := w.Get(ctx, "thing:l")
			returned = true
			return b, err
		})
		if took := time.Since(began); !errors.Is(err, ErrSuspect) || took != timeout/2 {
			t.Errorf("%v after %v, want ErrSuspect after %v", err, took, timeout/2)
		}
		w.Close()
		if !returned {
			t.Error("Close did not wait for the call that was left behind")
		}
	})
}

// Two breakers share a store. Once must return true only for the first breaker that calls Once with a value, until
// Reset is called with this value.
func TestOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, timeout)
		other := New(w.store, timeout, func(error) {}, func() {})
		defer other.Close()
		if !w.Once("down") || other.Once("down") || !other.Once("up") {
			t.Error("Once: want true for the first caller alone")
		}
		if !other.Reset("down") || w.Reset("down") || !w.Once("down") {
			t.Error("Reset: want true if something was said, and then nothing is")
		}
	})
}

// Go cannot compare values of this Store type, so the store cannot be a key of the map shared.health. A breaker of the
// store must work nevertheless, and Close must return.
func TestStoreThatCannotBeCompared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &store{Store: memory.New(), took: timeout}
		s.broken.Store(true)
		b := New(struct {
			driver.Store
			_ []int
		}{Store: s}, timeout, func(error) {}, func() {})
		_, _ = b.Get(t.Context(), "thing:k")
		select {
		case <-b.Suspect():
		default:
			t.Error("not suspect")
		}
		b.Close()
	})
}
