package refilltest

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill"
)

// These cases use the lock service through a refill.Locker, as users do.
var lockerCases = []lockCase{
	{
		"locker-excludes",
		`Lock waits until the lock is free, and there is one holder at a time. Users call it, so two holders here are two
holders in production.`,
		lockerExcludes,
	},
	{
		"locker-wakes",
		`A Lock that waits gets the lock as soon as it is released on any node. Otherwise it gets the lock only when the lease
would have ended.`,
		lockerWakes,
	},
	{
		"locker-gives-up",
		`If the lock is held, TryLock returns ErrLocked at once, and Lock returns ErrLocked and the ctx error at its deadline.
Otherwise a caller cannot distinguish a lock that is held from a service that is down.`,
		lockerGivesUp,
	},
	{
		"locker-takes-over",
		`A Lock that waits for a holder that has died gets the lock when the lease ends, although no wake-up comes.
Otherwise it waits for ever.`,
		lockerTakesOver,
	},
	{
		"locker-renews",
		`A lock is renewed while it is held, for work of any length, and is free after Release. Otherwise long work loses its
lock, or the next holder waits for a lease without a holder.`,
		lockerRenews,
	},
	{
		"locker-loses",
		`A lock that was removed is Lost at its next renewal: its Context ends with ErrLost, and Release returns ErrLost. A
holder that does not learn of it works at the same time as the next one.`,
		lockerLoses,
	},
}

// lockers returns a Locker on each node.
func (l *locks) lockers(ttl time.Duration) (a, b *refill.Locker) {
	l.Helper()
	a, err := refill.NewLocker("product", l.A, refill.LockConfig{TTL: ttl})
	l.ok(err, "NewLocker over A")
	b, err = refill.NewLocker("product", l.B, refill.LockConfig{TTL: ttl})
	l.ok(err, "NewLocker over B")
	return a, b
}

// lock takes a lock, which must be free.
func (l *locks) lock(lk *refill.Locker, key string) *refill.Lock {
	l.Helper()
	lock, err := lk.Lock(l.ctx, key)
	l.ok(err, "Lock(%q)", key)
	l.releaseLater(lock)
	return lock
}

// releaseLater releases the lock at the end of the case. So the renewal of the lock ends even if the case fails.
func (l *locks) releaseLater(lock *refill.Lock) {
	l.Cleanup(func() { _ = lock.Release(context.Background()) })
}

// wantLocked demands ErrLocked.
func (l *locks) wantLocked(lock *refill.Lock, err error, call string) {
	l.Helper()
	if lock != nil {
		l.releaseLater(lock)
	}
	if !errors.Is(err, refill.ErrLocked) {
		l.Fatalf("%s of a lock that is held: %v, want ErrLocked", call, err)
	}
}

func lockerExcludes(l *locks) {
	var held atomic.Int32
	var last atomic.Uint64
	var wg sync.WaitGroup
	a, b := l.lockers(long)
	for i := range 8 {
		lk := a
		if i%2 == 1 {
			lk = b
		}
		wg.Go(func() {
			for range 4 {
				lock, err := lk.Lock(l.ctx, "42")
				if err != nil {
					l.Errorf("Lock: %v", err)
					return
				}
				l.alone(&held, &last, lock.Fence())
				if err := lock.Release(l.ctx); err != nil {
					l.Errorf("Release: %v", err)
				}
			}
		})
	}
	wg.Wait()
	l.win(l.A, key, "a#1", long)
}

func lockerWakes(l *locks) {
	a, b := l.lockers(long)
	lock := l.lock(a, "42")
	ctx, cancel := context.WithTimeout(l.ctx, patience)
	defer cancel()
	done := make(chan error)
	go func() {
		next, err := b.Lock(ctx, "42")
		if err == nil {
			err = next.Release(l.ctx)
		}
		done <- err
	}()
	l.pass(20 * time.Millisecond) // by now, b usually waits; otherwise b will find the lock free
	l.ok(lock.Release(l.ctx), "Release")
	l.ok(<-done, "Lock after the release of another holder")
	l.ok(lock.Release(l.ctx), "a second Release")
}

func lockerGivesUp(l *locks) {
	a, b := l.lockers(long)
	l.lock(a, "42")
	for _, lk := range []*refill.Locker{a, b} {
		asked := time.Now()
		lock, err := lk.TryLock(l.ctx, "42")
		l.wantLocked(lock, err, "TryLock")
		if took := time.Since(asked); took > patience {
			l.Fatalf("TryLock of a lock that is held took %v, want it to return at once", took)
		}
		ctx, cancel := context.WithTimeout(l.ctx, 150*time.Millisecond)
		lock, err = lk.Lock(ctx, "42")
		cancel()
		l.wantLocked(lock, err, "Lock, at its deadline,")
		if !errors.Is(err, context.DeadlineExceeded) {
			l.Fatalf("Lock at its deadline: %v, want it to wrap DeadlineExceeded as well", err)
		}
	}
}

func lockerTakesOver(l *locks) {
	_, b := l.lockers(long)
	fence := l.win(l.A, key, "gone#1", l.short)
	done := make(chan *refill.Lock)
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(l.ctx, 3*l.short+patience)
		defer cancel()
		lock, err := b.Lock(ctx, "42")
		if err != nil {
			l.Errorf("Lock after a holder that died: %v", err)
			return
		}
		done <- lock
	}()
	l.pass(l.short)
	if lock := <-done; lock != nil {
		l.wantLarger(lock.Fence(), fence)
		l.ok(lock.Release(l.ctx), "Release")
	}
}

func lockerRenews(l *locks) {
	needs(l, "time that passes by itself (LockWorld.Pass is set)", l.Pass == nil)
	a, b := l.lockers(l.short)
	lock := l.lock(a, "42")
	l.pass(2*l.short + l.short/2)
	second, err := b.TryLock(l.ctx, "42")
	l.wantLocked(second, err, "TryLock")
	select {
	case <-lock.Lost():
		l.Fatalf("a lock that is renewed was lost")
	default:
	}
	l.ok(lock.Release(l.ctx), "Release")
	l.win(l.B, key, "b#1", long)
}

func lockerLoses(l *locks) {
	needs(l, "LockWorld.Delete", l.Delete != nil)
	a, _ := l.lockers(l.short)
	lock := l.lock(a, "42")
	l.Delete(key)
	wait(l, lock.Lost(), "Lost")
	wait(l, lock.Context().Done(), "the end of the Context")
	if cause := context.Cause(lock.Context()); !errors.Is(cause, refill.ErrLost) {
		l.Errorf("the cause of a lost lock's Context is %v, want ErrLost", cause)
	}
	if err := lock.Release(l.ctx); !errors.Is(err, refill.ErrLost) {
		l.Errorf("Release of a lost lock: %v, want ErrLost", err)
	}
	l.win(l.B, key, "b#1", long)
}
