package refill

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file holds the lease engine, and the locks for users. A lease ends in the store when its TTL is over. While the
// holder lives, the engine renews the lease. The engine also tells the holder when the lease may have ended. It stops
// the renewals before the holder releases the lease. The refill lock of a Loader and the locks of a Locker both use the
// engine.
//
// The lock is for efficiency. Correctness comes from the claim (for a refill) or from the fencing token (for a Lock).
// The reason: a holder that was frozen does not know that its lease has ended.

// lease is a lease that this process holds. keep renews the lease. Most loads end before the first renewal is due, so
// most leases need no goroutine for renewals: Loader.firstRenewals starts keep only when the first renewal is due.
type lease struct {
	ttl     time.Duration
	timeout time.Duration                                // of one renewal
	renew   func(context.Context) (mine bool, err error) // asks the store; mine: the lease still belongs to this process

	granted time.Time                 // the end of the lease as granted, to which until points at first
	until   atomic.Pointer[time.Time] // confirmed end of the lease; after newLease, only keep changes until

	mu      sync.Mutex // guards the next two, and the call of prepare by startRenewal
	renewed bool       // startRenewal has started keep
	ended   bool       // end was called

	// prepare makes these four. Before that, they are nil.
	lost    chan struct{}      // closed by keep when the lease has ended or may have ended
	ctx     context.Context    // of renewals
	stop    context.CancelFunc // ends keep, and a renewal in progress
	stopped chan struct{}      // closed when keep has ended
}

// newLease returns a lease that the store has granted. The request for the lease was sent at asked, and the TTL counts
// from asked. The store granted the lease at an unknown moment after asked, so the lease cannot end before asked plus
// ttl.
func newLease(asked time.Time, ttl, timeout time.Duration, renew func(context.Context) (bool, error)) *lease {
	l := &lease{ttl: ttl, timeout: timeout, renew: renew, granted: asked.Add(ttl)}
	l.until.Store(&l.granted)
	return l
}

// prepare makes what keep needs. The lease of a short load never needs it.
func (l *lease) prepare() {
	l.lost, l.stopped = make(chan struct{}), make(chan struct{})
	l.ctx, l.stop = context.WithCancel(context.Background())
}

// keep renews the lease now, and then each third of its TTL. If a renewal fails, keep repeats the renewal until the
// moment in l.until. keep closes lost in two cases: the store replies that this process no longer has the lease, or the
// moment in l.until has passed. The holder runs keep as a goroutine, and not by time.AfterFunc. The reason: hundreds of
// timers that are due at once in a testing/synctest bubble crash the race detector of Go 1.26.
func (l *lease) keep() {
	defer close(l.stopped)
	timer := time.NewTimer(renewEvery(l.ttl))
	defer timer.Stop()
	for {
		mine, err := l.renewOnce(l.ctx)
		now := time.Now()
		switch {
		case l.ctx.Err() != nil:
			return
		case err == nil && mine:
			timer.Reset(renewEvery(l.ttl))
		case err == nil || !now.Before(*l.until.Load()):
			close(l.lost)
			return
		default:
			timer.Reset(min(l.ttl/10, l.until.Load().Sub(now)))
		}
		select {
		case <-l.ctx.Done():
			return
		case <-timer.C:
		}
	}
}

func (l *lease) renewOnce(ctx context.Context) (mine bool, err error) {
	asked := time.Now()
	ctx, cancel := context.WithDeadline(ctx, earlier(asked.Add(l.timeout), *l.until.Load()))
	defer cancel()
	if mine, err = l.renew(ctx); mine && err == nil {
		until := asked.Add(l.ttl)
		l.until.Store(&until)
	}
	return mine, err
}

// keepFor starts the renewals now if the lease is not certain to live for d.
func (l *lease) keepFor(d time.Duration) {
	if time.Until(*l.until.Load()) < d {
		l.startRenewal()
	}
}

// startRenewal runs keep on a goroutine of its own, unless keep runs already or the lease was ended.
func (l *lease) startRenewal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.renewed && !l.ended {
		l.renewed = true
		l.prepare()
		go l.keep()
	}
}

// isLost reports whether keep has found that the lease may have ended.
func (l *lease) isLost() bool {
	l.mu.Lock()
	lost := l.lost
	l.mu.Unlock()
	return isClosed(lost)
}

// end stops the renewals. If keep runs, end waits until keep has returned. So no renewal reaches the store after end.
func (l *lease) end() {
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	if l.renewed { // read without mu: renewed no longer changes, because ended is set
		l.stop()
		<-l.stopped
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// LockConfig holds the settings of a Locker. A field that is zero gets its default. A negative value is an error.
type LockConfig struct {
	// TTL is how long a lock stays taken after its holder has died. While a lock is held, the Locker renews the lock each
	// third of TTL. Default 10 s, at least 200 ms.
	TTL time.Duration
	// StoreTimeout bounds each call of the lock service. Default: 250 ms or TTL/4, whichever is shorter. At most TTL/4.
	StoreTimeout time.Duration
}

// Locker hands out locks by key. A key has at most one holder in the fleet, if each holder stops when its lease ends. A
// holder that was frozen past the end of its lease does not know that the lease has ended. If such a holder could
// corrupt data, let the resource check Lock.Fence.
//
// The lock is for efficiency. Correctness comes from the fence.
type Locker struct {
	name  string
	node  *node
	locks driver.Locks
	cfg   LockConfig
}

// NewLocker returns a Locker over locks, for instance a goredis.Store. The name keeps the keys of this Locker apart
// from the keys of other Lockers. A name has at most 64 letters, digits, '.', '_' and '-'. An error of NewLocker wraps
// [ErrInvalid] and names the argument.
func NewLocker(name string, locks driver.Locks, cfg LockConfig) (*Locker, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	if isNil(locks) {
		return nil, invalid("locks", "nil %T", locks)
	}
	if err := locks.Check(); err != nil {
		return nil, invalid("locks", "%v", err)
	}
	for _, s := range []setting{
		{"TTL", &cfg.TTL, 10 * time.Second, 200 * time.Millisecond, false},
		{"StoreTimeout", &cfg.StoreTimeout, 0, time.Millisecond, false},
	} {
		if err := s.apply(); err != nil {
			return nil, err
		}
	}
	var err error
	if cfg.StoreTimeout, err = storeTimeout(cfg.StoreTimeout, cfg.TTL, "TTL"); err != nil {
		return nil, err
	}
	return &Locker{name: name, node: newNode(), locks: locks, cfg: cfg}, nil
}

// TryLock takes the lock of key. If another holder has the lock, TryLock returns [ErrLocked] at once. An empty key is
// an error that wraps [ErrInvalid]. Any other error means that the lock service failed, or that ctx ended. After such
// an error the lock service may have taken the lock although no caller holds it, for TTL at most.
func (l *Locker) TryLock(ctx context.Context, key string) (*Lock, error) {
	lock, _, err := l.try(ctx, key)
	return lock, err
}

// Lock takes the lock of key. If another holder has the lock, Lock waits until it gets the lock or ctx ends. If ctx
// ends first, the error wraps both [ErrLocked] and the error of ctx. A release wakes all waiters. Which waiter gets the
// lock next is not defined.
func (l *Locker) Lock(ctx context.Context, key string) (*Lock, error) {
	if key == "" {
		return nil, invalid("key", "empty")
	}
	// Watch before the first try: a release between a failed try and a later Watch would not wake this caller.
	wake, stop := l.locks.Watch(l.name + ":" + key)
	defer stop()
	for waited := false; ; waited = true {
		lock, left, err := l.try(ctx, key)
		if err != nil && ctx.Err() != nil && waited {
			return nil, errors.Join(ErrLocked, ctx.Err())
		}
		if !errors.Is(err, ErrLocked) {
			return lock, err
		}
		timer := time.NewTimer(waitFor(left, l.cfg.TTL))
		select {
		case <-wake:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

func (l *Locker) try(ctx context.Context, key string) (*Lock, time.Duration, error) {
	if key == "" {
		return nil, 0, invalid("key", "empty")
	}
	if err := ctx.Err(); err != nil {
		return nil, 0, err
	}
	full, token, asked := l.name+":"+key, l.node.token(), time.Now()
	callCtx, cancel := context.WithTimeout(ctx, l.cfg.StoreTimeout)
	s, err := l.locks.TryLock(callCtx, full, token, l.cfg.TTL)
	cancel()
	if err != nil {
		go l.takeBack(full, token, asked.Add(l.cfg.TTL)) // the service may have taken the lock, and the reply was lost
		return nil, 0, fmt.Errorf("refill: lock %q: %w", key, err)
	}
	if !s.Won {
		return nil, s.Left, ErrLocked
	}
	return l.newLock(full, token, s.Fence, asked), 0, nil
}

// takeBack frees a lock that the service may have taken for a TryLock that failed. It tries until the service answers,
// or until end, when the lock has ended by itself.
func (l *Locker) takeBack(key, token string, end time.Time) {
	for time.Now().Before(end) {
		if _, err := l.unlock(key, token); err == nil {
			return
		}
		<-time.After(l.cfg.TTL / 20)
	}
}

func (l *Locker) unlock(key, token string) (mine bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), l.cfg.StoreTimeout)
	defer cancel()
	return l.locks.Unlock(ctx, key, token)
}

func (l *Locker) newLock(key, token string, fence uint64, asked time.Time) *Lock {
	k := &Lock{locker: l, key: key, token: token, fence: fence}
	k.ctx, k.cancel = context.WithCancelCause(context.Background())
	k.lease = newLease(asked, l.cfg.TTL, l.cfg.StoreTimeout, func(ctx context.Context) (bool, error) {
		return l.locks.Extend(ctx, key, token, l.cfg.TTL)
	})
	k.lease.prepare()
	go k.watch()
	return k
}

// Lock is a lock that its holder has until Release, or until the lock is lost. The Locker renews the lock meanwhile.
type Lock struct {
	locker *Locker
	key    string // with the name of the Locker in front
	token  string
	fence  uint64
	lease  *lease
	ctx    context.Context
	cancel context.CancelCauseFunc

	once sync.Once // for Release
	err  error     // result of Release, written by once.Do
}

// watch renews the lease, and ends the context of the lock when the lease ends. The cause is ErrLost if the lease was
// lost, and context.Canceled after Release.
func (k *Lock) watch() {
	due := time.NewTimer(renewEvery(k.lease.ttl))
	defer due.Stop()
	select {
	case <-due.C:
		k.lease.keep()
	case <-k.lease.ctx.Done():
	}
	if k.lease.isLost() {
		k.cancel(ErrLost)
	} else {
		k.cancel(nil)
	}
}

// Token is the unique name of this holder, as it stands in the store.
func (k *Lock) Token() string { return k.token }

// Fence is larger than the fence of every earlier holder of the same key. Send the fence with every write, and let the
// resource refuse a write whose fence is smaller than the largest fence that the resource has seen. Only this check
// protects against a holder that was frozen. 0 = the lock service has no fences.
func (k *Lock) Fence() uint64 { return k.fence }

// Lost returns a channel that is closed when the lock may no longer be held. Either the lock was deleted or taken by
// another holder, or the lock could not be renewed in time. Release does not close the channel.
func (k *Lock) Lost() <-chan struct{} { return k.lease.lost }

// Context returns a context that ends with the lock. Its context.Cause is [ErrLost] if the lock was lost, and
// context.Canceled after Release.
func (k *Lock) Context() context.Context { return k.ctx }

// Until is the moment up to which the lock is certainly held if no further renewal succeeds.
func (k *Lock) Until() time.Time { return *k.lease.until.Load() }

// Release frees the lock and wakes the callers that wait for it. Further calls return the same error. [ErrLost] means
// that the lock was no longer held. Any other error means that the lock service failed. In that case the lock ends by
// itself within TTL. Release works even if ctx has ended, and returns within StoreTimeout.
func (k *Lock) Release(ctx context.Context) error {
	k.once.Do(func() {
		k.lease.stop()
		<-k.ctx.Done() // watch and keep have ended
		mine, err := k.locker.unlock(k.key, k.token)
		switch {
		case err != nil:
			k.err = fmt.Errorf("refill: release %q: %w", k.key, err)
		case !mine:
			k.err = ErrLost
		}
	})
	return k.err
}
