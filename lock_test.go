package refill_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

// flaky is a LockDriver whose calls can fail or hang.
type flaky struct {
	refill.LockDriver
	down    atomic.Bool
	hang    atomic.Bool
	extends atomic.Int64
	unlocks atomic.Int64
}

func (f *flaky) broken(ctx context.Context) error {
	if f.hang.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	if f.down.Load() {
		return errDown
	}
	return nil
}

func (f *flaky) TryLock(ctx context.Context, key, token string, ttl time.Duration) (refill.LockState, error) {
	s, err := f.LockDriver.TryLock(ctx, key, token, ttl) // executed, and then the reply is lost
	return s, errors.Join(err, f.broken(ctx))
}

func (f *flaky) Extend(ctx context.Context, key, token string, ttl time.Duration) (bool, error) {
	f.extends.Add(1)
	if err := f.broken(ctx); err != nil {
		return false, err
	}
	return f.LockDriver.Extend(ctx, key, token, ttl)
}

func (f *flaky) Unlock(ctx context.Context, key, token string) (bool, error) {
	f.unlocks.Add(1)
	if err := f.broken(ctx); err != nil {
		return false, err
	}
	return f.LockDriver.Unlock(ctx, key, token)
}

func locker(t *testing.T, d refill.LockDriver) *refill.Locker {
	t.Helper()
	l, err := refill.NewLocker("job", d, refill.LockConfig{TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func lost(k *refill.Lock) bool {
	select {
	case <-k.Lost():
		return true
	default:
		return false
	}
}

func TestLockIsRenewedAndReleased(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := refill.NewMemory()
		a, b := locker(t, m), locker(t, m)
		k, err := a.TryLock(t.Context(), "refund 42")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.TryLock(t.Context(), "refund 42"); !errors.Is(err, refill.ErrLocked) {
			t.Errorf("second holder: %v", err)
		}
		time.Sleep(10 * time.Second) // ten times its TTL
		if lost(k) || k.Context().Err() != nil || time.Until(k.Until()) < 600*ms {
			t.Errorf("lost %v, ctx %v, until %v", lost(k), k.Context().Err(), time.Until(k.Until()))
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			began := time.Now()
			next, err := b.Lock(t.Context(), "refund 42")
			if err != nil || time.Since(began) != 100*ms {
				t.Errorf("woken after %v, %v, want 100 ms: at the release", time.Since(began), err)
				return
			}
			if next.Fence() <= k.Fence() || next.Token() == k.Token() {
				t.Errorf("fence %d after %d", next.Fence(), k.Fence())
			}
			if err := next.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
		time.Sleep(100 * ms)
		if err := k.Release(t.Context()); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if lost(k) || !errors.Is(context.Cause(k.Context()), context.Canceled) {
			t.Errorf("after Release: lost %v, cause %v", lost(k), context.Cause(k.Context()))
		}
		if err := k.Release(t.Context()); err != nil {
			t.Errorf("second Release: %v", err)
		}
	})
}

func TestLockWaitsForCtxOnly(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := locker(t, refill.NewMemory())
		k, err := l.Lock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = k.Release(t.Context()) }()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		began := time.Now()
		_, err = l.Lock(ctx, "k")
		if !errors.Is(err, refill.ErrLocked) || !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 5*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

// A renewal that fails is tried again while the lease is proven; Lost fires no later than its end, also when the store
// is silent.
func TestLockIsLostInTime(t *testing.T) {
	for name, breakIt := range map[string]func(*flaky){
		"errors":  func(f *flaky) { f.down.Store(true) },
		"silence": func(f *flaky) { f.hang.Store(true) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := &flaky{LockDriver: refill.NewMemory()}
				k, err := locker(t, f).TryLock(t.Context(), "k")
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(350 * ms) // renewed at 333 ms
				breakIt(f)
				time.Sleep(600 * ms)
				f.down.Store(false)
				f.hang.Store(false)
				time.Sleep(5 * time.Second)
				if lost(k) {
					t.Fatal("lost, though the store came back within the lease")
				}
				breakIt(f)
				broke, until := time.Now(), k.Until()
				<-k.Lost()
				if time.Now().After(until) || time.Since(broke) > time.Second {
					t.Errorf("told %v after the lease's end", time.Since(until))
				}
				<-k.Context().Done()
				if cause := context.Cause(k.Context()); !errors.Is(cause, refill.ErrLost) {
					t.Errorf("cause %v", cause)
				}
				f.down.Store(false)
				f.hang.Store(false)
				time.Sleep(time.Second)
				if err := k.Release(t.Context()); !errors.Is(err, refill.ErrLost) {
					t.Errorf("Release: %v, want ErrLost", err)
				}
			})
		})
	}
}

func TestLockTakenAwayIsNoticed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := refill.NewMemory()
		k, err := locker(t, m).TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = m.Unlock(t.Context(), "job:k", k.Token()) // somebody deleted it
		other, err := locker(t, m).TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(340 * ms)
		if !lost(k) || lost(other) {
			t.Errorf("lost: old %v, new %v", lost(k), lost(other))
		}
		if err := k.Release(t.Context()); !errors.Is(err, refill.ErrLost) {
			t.Errorf("Release: %v", err)
		}
		if _, err := locker(t, m).TryLock(t.Context(), "k"); !errors.Is(err, refill.ErrLocked) {
			t.Error("the old holder's Release freed the new holder's lock")
		}
		_ = other.Release(t.Context())
	})
}

// The reply to TryLock is lost: nobody holds the lock on its behalf.
func TestLockReplyLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := refill.NewMemory()
		f := &flaky{LockDriver: m}
		f.hang.Store(true)
		began := time.Now()
		if _, err := locker(t, f).TryLock(t.Context(), "k"); err == nil || errors.Is(err, refill.ErrLocked) || time.Since(began) != 250*ms {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		time.Sleep(100 * ms) // the first try to take it back finds the store still silent
		f.hang.Store(false)
		time.Sleep(300 * ms)
		k, err := locker(t, m).TryLock(t.Context(), "k")
		if err != nil {
			t.Fatalf("still locked: %v", err)
		}
		_ = k.Release(t.Context())
	})
}

func TestLockerBadInput(t *testing.T) {
	m := refill.NewMemory()
	for field, f := range map[string]func() (*refill.Locker, error){
		"name":   func() (*refill.Locker, error) { return refill.NewLocker("a:b", m, refill.LockConfig{}) },
		"driver": func() (*refill.Locker, error) { return refill.NewLocker("a", nil, refill.LockConfig{}) },
		"TTL":    func() (*refill.Locker, error) { return refill.NewLocker("a", m, refill.LockConfig{TTL: ms}) },
		"StoreTimeout": func() (*refill.Locker, error) {
			return refill.NewLocker("a", m, refill.LockConfig{TTL: time.Second, StoreTimeout: time.Second})
		},
	} {
		if l, err := f(); l != nil || !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v, %v", field, l, err)
		}
	}
	if _, err := refill.NewLocker("a", (*refill.Memory)(nil), refill.LockConfig{}); !errors.Is(err, refill.ErrInvalid) {
		t.Errorf("typed nil: %v", err)
	}
	l := locker(t, m)
	if _, err := l.TryLock(t.Context(), ""); !errors.Is(err, refill.ErrInvalid) {
		t.Errorf("empty key: %v", err)
	}
	if _, err := l.Lock(t.Context(), ""); !errors.Is(err, refill.ErrInvalid) {
		t.Errorf("empty key: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Lock(ctx, "k"); !errors.Is(err, context.Canceled) {
		t.Errorf("a ctx that is over: %v", err)
	}
}
