package refilltest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill"
)

var watchCases = []lockCase{
	{
		"watch-wakes",
		`Unlock wakes those who watch the key, all of them, on every node, and none misses it who watched before the try that he
lost. A wake-up that is missed is waited out for the whole lease.`,
		watchWakes,
	},
	{
		"watch-again",
		`A watch wakes again and again until it is stopped: the one who was woken may lose the next try, too.`,
		watchAgain,
	},
	{
		"watch-stops",
		`Nothing wakes a watch that was stopped, and the others of the key go on. A watch that stays is a leak per wait (G8);
a stop that ends the others' makes them wait out the lease.`,
		watchStops,
	},
	{
		"watch-breaks",
		`A watch whose connection breaks wakes when it stands again, since an Unlock may have been missed.`,
		watchBreaks,
	},
}

// woken waits until the lock can be taken, trying again only when woken: a wake-up is a hint, so there may be more.
func (l *locks) woken(d refill.LockDriver, wake <-chan struct{}, key, token string) {
	l.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for !l.try(d, key, token, long).Won {
		select {
		case <-wake:
		case <-timer.C:
			l.Fatalf("TryLock(%q, %s) was lost, and nothing woke it for %v after the Unlock", key, token, patience)
		}
	}
}

func watchWakes(l *locks) {
	l.win(l.A, key, "a#1", long)
	same, stopSame := l.A.Watch(key)
	defer stopSame()
	first, stopFirst := l.B.Watch(key)
	defer stopFirst()
	second, stopSecond := l.B.Watch(key)
	defer stopSecond()
	l.lose(l.B, key, "b#1", long)
	l.unlock(l.A, key, "a#1", true)
	all := []<-chan struct{}{same, first, second}
	for _, wake := range all {
		l.ringing(wake)
	}
	for i, wake := range all {
		token := fmt.Sprintf("b#%d", i)
		l.woken(l.B, wake, key, token)
		l.unlock(l.B, key, token, true)
	}
}

// ringing demands a wake-up.
func (l *locks) ringing(wake <-chan struct{}) {
	l.Helper()
	wait(l, wake, "a wake-up after an Unlock")
}

func watchAgain(l *locks) {
	wake, stop := l.B.Watch(key)
	defer stop()
	for i := range 5 {
		a, b := fmt.Sprintf("a#%d", i), fmt.Sprintf("b#%d", i)
		drain(wake)
		l.win(l.A, key, a, long)
		l.lose(l.B, key, b, long)
		l.unlock(l.A, key, a, true)
		l.ringing(wake)
		l.woken(l.B, wake, key, b)
		l.unlock(l.B, key, b, true)
	}
}

func watchStops(l *locks) {
	stays, stopStays := l.B.Watch(key)
	defer stopStays()
	ends, stop := l.B.Watch(key)
	l.win(l.A, key, "a#1", long)
	l.unlock(l.A, key, "a#1", true)
	l.ringing(stays)
	l.ringing(ends)
	stop()
	drain(ends)
	drain(stays)
	for i := range 3 {
		a, b := fmt.Sprintf("a#%d", i), fmt.Sprintf("b#%d", i)
		l.win(l.A, key, a, long)
		l.lose(l.B, key, b, long)
		l.unlock(l.A, key, a, true)
		l.ringing(stays)
		l.woken(l.B, stays, key, b)
		l.unlock(l.B, key, b, true)
	}
	if drain(ends) {
		l.Fatalf("a watch was woken after it had been stopped")
	}
}

func watchBreaks(l *locks) {
	needs(l, "LockWorld.Break", l.Break != nil)
	wake, stop := l.B.Watch(key)
	defer stop()
	for i := range 2 {
		a, b := fmt.Sprintf("a#%d", i), fmt.Sprintf("b#%d", i)
		l.win(l.A, key, a, long)
		l.lose(l.B, key, b, long)
		drain(wake)
		l.Break()
		l.unlock(l.A, key, a, true)
		l.ringing(wake)
		l.woken(l.B, wake, key, b)
		l.unlock(l.B, key, b, true)
	}
}

// drain takes a wake-up that may be there; a channel that was closed has none.
func drain(wake <-chan struct{}) bool {
	select {
	case _, rung := <-wake:
		return rung
	default:
		return false
	}
}

var lockRaceCases = []lockCase{
	{
		"race",
		`However many race, one holds the lock at a time, and the fences rise in the order of holding. A step made of two
commands passes every test of one node and breaks here (seeds rows 6 and 9).`,
		lockRace,
	},
}

func lockRace(l *locks) {
	var wg sync.WaitGroup
	var held atomic.Int32
	var last, wins atomic.Uint64
	for i := range racers {
		d := l.A
		if i%2 == 1 {
			d = l.B
		}
		wg.Go(func() {
			for r := range rounds {
				token := fmt.Sprintf("n%d#%d", i, r)
				s, err := d.TryLock(l.ctx, key, token, long)
				if err != nil {
					l.Errorf("TryLock: %v", err)
					return
				}
				if !s.Won {
					runtime.Gosched()
					continue
				}
				l.alone(&held, &last, s.Fence)
				wins.Add(1)
				if mine, err := d.Unlock(l.ctx, key, token); err != nil || !mine {
					l.Errorf("Unlock of the holder = %v, %v", mine, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if wins.Load() == 0 {
		l.Fatalf("nobody won once in %d tries", racers*rounds)
	}
	l.win(l.A, key, "a#1", long)
}

// alone is what a holder does: it looks whether it is alone, and for how long fences have been rising.
func (l *locks) alone(held *atomic.Int32, last *atomic.Uint64, fence uint64) {
	if n := held.Add(1); n > 1 {
		l.Errorf("%d hold the lock at once", n)
	}
	before := last.Swap(fence)
	for range 3 {
		runtime.Gosched()
	}
	if !l.noFence && fence <= before {
		l.Errorf("fence %d after %d, want it larger", fence, before)
	}
	held.Add(-1)
}

var lockerCases = []lockCase{
	{
		"locker-excludes",
		`Lock waits for its turn, and one holds the lock at a time. It is what users call.`,
		lockerExcludes,
	},
	{
		"locker-wakes",
		`A Lock that waits gets the lock when it is released, on whatever node, and not when the lease would have ended.`,
		lockerWakes,
	},
	{
		"locker-gives-up",
		`TryLock of a lock that is held answers ErrLocked at once, and Lock at its deadline ErrLocked and the ctx error, so
that the caller can tell "busy" from "the store is down".`,
		lockerGivesUp,
	},
	{
		"locker-takes-over",
		`A Lock that waits gets the lock of a holder that died when its lease ends, although nothing wakes it.`,
		lockerTakesOver,
	},
	{
		"locker-renews",
		`A lock is renewed while it is held, for work of any length, and free after Release.`,
		lockerRenews,
	},
	{
		"locker-loses",
		`A lock that was taken away is Lost at its next renewal, its Context ends with ErrLost, and Release says so. Work that
goes on without being told runs beside another's.`,
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

// hold takes a lock that is free.
func (l *locks) hold(lk *refill.Locker, key string) *refill.Lock {
	l.Helper()
	lock, err := lk.Lock(l.ctx, key)
	l.ok(err, "Lock(%q)", key)
	l.releaseLater(lock)
	return lock
}

// releaseLater ends the renewal of a lock also where the case fails.
func (l *locks) releaseLater(lock *refill.Lock) {
	l.Cleanup(func() { _ = lock.Release(context.Background()) })
}

// held demands ErrLocked.
func (l *locks) held(lock *refill.Lock, err error, call string) {
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
	lock := l.hold(a, "42")
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
	l.pass(20 * time.Millisecond) // it waits by now, as a rule; if not, it finds the lock free
	l.ok(lock.Release(l.ctx), "Release")
	l.ok(<-done, "Lock beside a lock that was released")
	l.ok(lock.Release(l.ctx), "a second Release")
}

func lockerGivesUp(l *locks) {
	a, b := l.lockers(long)
	l.hold(a, "42")
	for _, lk := range []*refill.Locker{a, b} {
		asked := time.Now()
		lock, err := lk.TryLock(l.ctx, "42")
		l.held(lock, err, "TryLock")
		if took := time.Since(asked); took > patience {
			l.Fatalf("TryLock took %v", took)
		}
		ctx, cancel := context.WithTimeout(l.ctx, 150*time.Millisecond)
		lock, err = lk.Lock(ctx, "42")
		cancel()
		l.held(lock, err, "Lock, at its deadline,")
		if !errors.Is(err, context.DeadlineExceeded) {
			l.Fatalf("Lock at its deadline: %v, want DeadlineExceeded joined to it", err)
		}
	}
}

func lockerTakesOver(l *locks) {
	_, b := l.lockers(long)
	fence := l.win(l.A, key, "dead#1", l.short)
	done := make(chan *refill.Lock)
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(l.ctx, 3*l.short+patience)
		defer cancel()
		lock, err := b.Lock(ctx, "42")
		if err != nil {
			l.Errorf("Lock behind a dead holder: %v", err)
			return
		}
		done <- lock
	}()
	l.pass(l.short)
	if lock := <-done; lock != nil {
		l.after(lock.Fence(), fence)
		l.ok(lock.Release(l.ctx), "Release")
	}
}

func lockerRenews(l *locks) {
	needs(l, "time that passes by itself (LockWorld.Pass is set)", l.Pass == nil)
	a, b := l.lockers(l.short)
	lock := l.hold(a, "42")
	l.pass(2*l.short + l.short/2)
	second, err := b.TryLock(l.ctx, "42")
	l.held(second, err, "TryLock")
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
	lock := l.hold(a, "42")
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
