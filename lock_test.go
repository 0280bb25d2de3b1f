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
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests Locker and Lock. Some tests use a driver whose calls fail or hang.

// flaky is a driver.Locks whose calls can fail or hang.
type flaky struct {
	driver.Locks
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

func (f *flaky) TryLock(ctx context.Context, key, token string, ttl time.Duration) (driver.LockResult, error) {
	s, err := f.Locks.TryLock(ctx, key, token, ttl) // the store executes the call, even if flaky then loses the reply
	return s, errors.Join(err, f.broken(ctx))
}

func (f *flaky) Extend(ctx context.Context, key, token string, ttl time.Duration) (bool, error) {
	f.extends.Add(1)
	if err := f.broken(ctx); err != nil {
		return false, err
	}
	return f.Locks.Extend(ctx, key, token, ttl)
}

func (f *flaky) Unlock(ctx context.Context, key, token string) (bool, error) {
	f.unlocks.Add(1)
	if err := f.broken(ctx); err != nil {
		return false, err
	}
	return f.Locks.Unlock(ctx, key, token)
}

func locker(t *testing.T, d driver.Locks) *refill.Locker {
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
		m := memory.New()
		a, b := locker(t, m), locker(t, m)
		k, err := a.TryLock(t.Context(), "refund 42")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.TryLock(t.Context(), "refund 42"); !errors.Is(err, refill.ErrLocked) {
			t.Errorf("TryLock of a held lock: got %v, want ErrLocked", err)
		}
		time.Sleep(10 * time.Second) // ten times the TTL of the lock
		if lost(k) || k.Context().Err() != nil || time.Until(k.Until()) < 600*ms {
			t.Errorf("got lost %v, ctx error %v, %v left, want a lock that was renewed",
				lost(k), k.Context().Err(), time.Until(k.Until()))
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			began := time.Now()
			next, err := b.Lock(t.Context(), "refund 42")
			if err != nil || time.Since(began) != 100*ms {
				t.Errorf("Lock: got %v after %v, want the lock at its release after 100ms", err, time.Since(began))
				return
			}
			if next.Fence() <= k.Fence() || next.Token() == k.Token() {
				t.Errorf("got fence %d, token %q after fence %d, token %q, want a larger fence and a new token",
					next.Fence(), next.Token(), k.Fence(), k.Token())
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
			t.Errorf("after Release: got lost %v, cause %v, want false, context.Canceled", lost(k), context.Cause(k.Context()))
		}
		if err := k.Release(t.Context()); err != nil {
			t.Errorf("second Release: got %v, want no error", err)
		}
	})
}

func TestLockWaitsForCtxOnly(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := locker(t, memory.New())
		k, err := l.Lock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = k.Release(t.Context()) }()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		began := time.Now()
		_, err = l.Lock(ctx, "k")
		if !errors.Is(err, refill.ErrLocked) || !errors.Is(err, context.DeadlineExceeded) ||
			time.Since(began) != 5*time.Second {
			t.Errorf("Lock: got %v after %v, want ErrLocked and DeadlineExceeded after 5s", err, time.Since(began))
		}
	})
}

// A renewal of a held lock fails, with an error or because the store does not answer. The Lock must retry the renewal
// until the lease of the lock ends. If no retry succeeds, Lock must close the channel that Lost returns, at the latest
// when the lease ends.
func TestLockIsLostInTime(t *testing.T) {
	for name, breakIt := range map[string]func(*flaky){
		"errors":  func(f *flaky) { f.down.Store(true) },
		"silence": func(f *flaky) { f.hang.Store(true) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := &flaky{Locks: memory.New()}
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
					t.Fatal("the lock was lost although the store came back within the lease")
				}
				breakIt(f)
				broke, until := time.Now(), k.Until()
				<-k.Lost()
				if time.Now().After(until) || time.Since(broke) > time.Second {
					t.Errorf("Lost was closed %v after the failure and %v after the end of the lease, want at most 1s and 0s",
						time.Since(broke), time.Since(until))
				}
				<-k.Context().Done()
				if cause := context.Cause(k.Context()); !errors.Is(cause, refill.ErrLost) {
					t.Errorf("got cause %v, want ErrLost", cause)
				}
				f.down.Store(false)
				f.hang.Store(false)
				time.Sleep(time.Second)
				if err := k.Release(t.Context()); !errors.Is(err, refill.ErrLost) {
					t.Errorf("Release of a lost lock: got %v, want ErrLost", err)
				}
			})
		})
	}
}

func TestLockTakenAwayIsNoticed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := memory.New()
		k, err := locker(t, m).TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = m.Unlock(t.Context(), "job:k", k.Token()) // as if another client had deleted the lock
		other, err := locker(t, m).TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(340 * ms)
		if !lost(k) || lost(other) {
			t.Errorf("got lost %v for the old lock, %v for the new one, want true, false", lost(k), lost(other))
		}
		if err := k.Release(t.Context()); !errors.Is(err, refill.ErrLost) {
			t.Errorf("Release of the old lock: got %v, want ErrLost", err)
		}
		if _, err := locker(t, m).TryLock(t.Context(), "k"); !errors.Is(err, refill.ErrLocked) {
			t.Errorf("got %v, want ErrLocked: the Release of the old holder freed the lock of the new holder", err)
		}
		_ = other.Release(t.Context())
	})
}

// The store executes a TryLock, but the reply is lost. TryLock returns an error. Then the Locker must release the lock
// in the background, because the store may have granted the lock.
func TestLockReplyLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := memory.New()
		f := &flaky{Locks: m}
		f.hang.Store(true)
		began := time.Now()
		_, err := locker(t, f).TryLock(t.Context(), "k")
		if err == nil || errors.Is(err, refill.ErrLocked) || time.Since(began) != 250*ms {
			t.Errorf("TryLock: got %v after %v, want an error other than ErrLocked after 250ms", err, time.Since(began))
		}
		time.Sleep(100 * ms) // the first attempt to release the lock gets no reply either
		f.hang.Store(false)
		time.Sleep(300 * ms)
		k, err := locker(t, m).TryLock(t.Context(), "k")
		if err != nil {
			t.Fatalf("TryLock after the store came back: got %v, want the lock", err)
		}
		_ = k.Release(t.Context())
	})
}

func TestLockerBadInput(t *testing.T) {
	m := memory.New()
	for field, f := range map[string]func() (*refill.Locker, error){
		"name":  func() (*refill.Locker, error) { return refill.NewLocker("a:b", m, refill.LockConfig{}) },
		"locks": func() (*refill.Locker, error) { return refill.NewLocker("a", nil, refill.LockConfig{}) },
		"TTL":   func() (*refill.Locker, error) { return refill.NewLocker("a", m, refill.LockConfig{TTL: ms}) },
		"StoreTimeout": func() (*refill.Locker, error) {
			return refill.NewLocker("a", m, refill.LockConfig{TTL: time.Second, StoreTimeout: time.Second})
		},
	} {
		if l, err := f(); l != nil || !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), field) {
			t.Errorf("bad %s: got %v, %v, want ErrInvalid that names the field", field, l, err)
		}
	}
	if _, err := refill.NewLocker("a", (*memory.Store)(nil), refill.LockConfig{}); !errors.Is(err, refill.ErrInvalid) {
		t.Errorf("NewLocker with a nil *memory.Store: got %v, want ErrInvalid", err)
	}
	l := locker(t, m)
	if _, err := l.TryLock(t.Context(), ""); !errors.Is(err, refill.ErrInvalid) {
		t.Errorf("TryLock of an empty key: got %v, want ErrInvalid", err)
	}
	if _, err := l.Lock(t.Context(), ""); !errors.Is(err, refill.ErrInvalid) {
		t.Errorf("Lock of an empty key: got %v, want ErrInvalid", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Lock(ctx, "k"); !errors.Is(err, context.Canceled) {
		t.Errorf("Lock with a cancelled ctx: got %v, want context.Canceled", err)
	}
}
