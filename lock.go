package refill

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// This file is the lease engine. A lease is held by whoever has its token in the store, for a time that the store counts
// down; the engine lengthens that time while the holder lives, tells the holder when it may be over, and gives it back
// exactly once. The Loader's refill lease and users' locks both run on it.
//
// The lock is for efficiency; correctness comes from the claim (for a refill) or from the fencing token (for a Lock):
// a holder that was frozen does not know that its lease is over.

// lease is one that is held, until it is ended or lost. Its holder waits for the first renewal to be due, beside whatever else
// it waits for, and runs keep then: most loads are over before, and a goroutine for nothing would cost an idle process as
// much as the rest of the load.
type lease struct {
	ttl     time.Duration
	timeout time.Duration // of one renewal
	renew   func(context.Context) (mine bool, err error)

	until   atomic.Pointer[time.Time] // the lease is proven until then; only keep writes it
	due     *time.Timer               // for the first renewal
	renewed bool                      // keep runs, or has run; only the holder uses it
	lost    chan struct{}             // closed by keep, once
	ctx     context.Context           // of renewals
	stop    context.CancelFunc        // asks keep to end, and cuts short a renewal under way
	stopped chan struct{}             // closed when keep has ended
}

// hold is a lease that was asked for at asked: before the request, since nobody knows when the store answered it.
func hold(asked time.Time, ttl, timeout time.Duration, renew func(context.Context) (bool, error)) *lease {
	l := &lease{
		ttl: ttl, timeout: timeout, renew: renew,
		due: time.NewTimer(renewEvery(ttl)), lost: make(chan struct{}), stopped: make(chan struct{}),
	}
	l.ctx, l.stop = context.WithCancel(context.Background())
	until := asked.Add(ttl)
	l.until.Store(&until)
	return l
}

// renewal is ready once, when keep has to run. A lease that is nil needs none.
func (l *lease) renewal() <-chan time.Time {
	if l == nil {
		return nil
	}
	return l.due.C
}

// keep renews now, and at each further third of the lease. A renewal that fails is tried again while the lease is still
// proven; only "not yours" and the end of the proven time are final, the latter also when the store says nothing at all.
// (It begins without a timer: hundreds that are due at once in a testing/synctest bubble crash the race detector of Go 1.26.)
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

// end stops the renewal and waits for it, so that nothing lengthens the lease afterwards.
func (l *lease) end() {
	l.due.Stop()
	l.stop()
	if l.renewed {
		<-l.stopped
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// LockDriver is what a store of locks provides to a [Locker]. backend/goredis and [NewMemory] implement it; package
// refilltest holds the suite that an implementation has to pass. The rules of [Store] for keys, tokens and ctx hold
// here, too.
type LockDriver interface {
	// TryLock takes the lock for ttl if it is free. The token's own lock counts as taken: the reply to an earlier try
	// was lost.
	TryLock(ctx context.Context, key, token string, ttl time.Duration) (LockState, error)
	// Extend lets the lock live for ttl from now if it is the token's. It never creates one.
	Extend(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error)
	// Unlock frees the lock if it is the token's, and wakes those who watch it.
	Unlock(ctx context.Context, key, token string) (mine bool, err error)
	// Watch makes wake ready whenever the lock may have become free, from its return until stop is called. Wake-ups are
	// hints: a Locker tries again, and sleeps no longer than the lock's life in any case.
	Watch(key string) (wake <-chan struct{}, stop func())
	// Check says what is wrong with the driver as it was set up, without calling the store.
	Check() error
}

// LockState is the answer of [LockDriver.TryLock].
type LockState struct {
	Won   bool
	Fence uint64        // if won: larger than that of every earlier holder of this key; 0 = the store has none
	Left  time.Duration // if not: how long the holder's lease has to live
}

// LockConfig is how a Locker works.
type LockConfig struct {
	// TTL is how long a lock outlives a holder that died with it; it is renewed at each third while it is held.
	// Default 10 s, at least 200 ms.
	TTL time.Duration
	// StoreTimeout bounds every call of the driver. Default 250 ms, or TTL/4 where that is less, and never more.
	StoreTimeout time.Duration
}

// Locker hands out locks by key: at most one holder per key in the fleet, while leases are honoured. A holder that was
// frozen past its lease does not know it; where that would corrupt data, let the resource check Lock.Fence.
type Locker struct {
	name   string
	node   *node
	driver LockDriver
	cfg    LockConfig
}

// NewLocker returns a Locker over driver, for instance a goredis.Store. The name keeps its keys apart from those of others:
// letters, digits, '.', '_' and '-'. An error wraps ErrInvalid and names the argument.
func NewLocker(name string, driver LockDriver, cfg LockConfig) (*Locker, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	if isNil(driver) {
		return nil, invalid("driver", "nil %T", driver)
	}
	if err := driver.Check(); err != nil {
		return nil, invalid("driver", "%v", err)
	}
	for _, s := range []setting{
		{"TTL", &cfg.TTL, 10 * time.Second, 200 * time.Millisecond, false},
		{"StoreTimeout", &cfg.StoreTimeout, 0, time.Millisecond, false},
	} {
		if err := s.settle(); err != nil {
			return nil, err
		}
	}
	var err error
	if cfg.StoreTimeout, err = storeTimeout(cfg.StoreTimeout, cfg.TTL, "TTL"); err != nil {
		return nil, err
	}
	return &Locker{name: name, node: newNode(), driver: driver, cfg: cfg}, nil
}

// TryLock takes the lock of key, or returns ErrLocked at once if somebody else has it. Any other error means that the
// store did not answer; then nobody holds the lock on this call's behalf, at the latest after TTL.
func (l *Locker) TryLock(ctx context.Context, key string) (*Lock, error) {
	lock, _, err := l.try(ctx, key)
	return lock, err
}

// Lock takes the lock of key, and waits for it until ctx ends; then the error is both ErrLocked and the ctx error. A
// release wakes those who wait; which of them is next is not defined.
func (l *Locker) Lock(ctx context.Context, key string) (*Lock, error) {
	if key == "" {
		return nil, invalid("key", "empty")
	}
	// Watch before the first try: a release between a failed try and a later Watch would wake nobody.
	wake, stop := l.driver.Watch(l.name + ":" + key)
	defer stop()
	for waited := false; ; waited = true {
		lock, left, err := l.try(ctx, key)
		if err != nil && ctx.Err() != nil && waited {
			return nil, errors.Join(ErrLocked, ctx.Err())
		}
		if !errors.Is(err, ErrLocked) {
			return lock, err
		}
		timer := time.NewTimer(lookAgain(left, l.cfg.TTL))
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
	s, err := l.driver.TryLock(callCtx, full, token, l.cfg.TTL)
	cancel()
	if err != nil {
		go l.takeBack(full, token, asked.Add(l.cfg.TTL)) // the store may have executed it all the same
		return nil, 0, fmt.Errorf("refill: lock %q: %w", key, err)
	}
	if !s.Won {
		return nil, s.Left, ErrLocked
	}
	return l.held(full, token, s.Fence, asked), 0, nil
}

// takeBack frees a lock that nobody knows to be held, as soon as the store answers, or leaves it to its end.
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
	return l.driver.Unlock(ctx, key, token)
}

func (l *Locker) held(key, token string, fence uint64, asked time.Time) *Lock {
	k := &Lock{locker: l, key: key, token: token, fence: fence}
	k.ctx, k.cancel = context.WithCancelCause(context.Background())
	k.lease = hold(asked, l.cfg.TTL, l.cfg.StoreTimeout, func(ctx context.Context) (bool, error) {
		return l.driver.Extend(ctx, key, token, l.cfg.TTL)
	})
	go k.watch()
	return k
}

// Lock is a lock that is held, until Release or until it is lost. It is renewed meanwhile.
type Lock struct {
	locker *Locker
	key    string // with the Locker's name
	token  string
	fence  uint64
	lease  *lease
	ctx    context.Context
	cancel context.CancelCauseFunc

	once sync.Once
	err  error // of Release, written within once
}

// watch renews the lease, and ends the lock's context with it: with ErrLost, or without a cause after Release.
func (k *Lock) watch() {
	select {
	case <-k.lease.renewal():
		k.lease.keep()
	case <-k.lease.ctx.Done():
		k.lease.due.Stop()
	}
	select {
	case <-k.lease.lost:
		k.cancel(ErrLost)
	default:
		k.cancel(nil)
	}
}

// Token is the random name of this holder, as it stands in the store.
func (k *Lock) Token() string { return k.token }

// Fence is larger than that of every earlier holder of the same key. Send it along with what you write, and let the
// resource refuse what carries a smaller one than it has seen: that is the only protection against a holder that
// was frozen. 0 = this driver has none.
func (k *Lock) Fence() uint64 { return k.fence }

// Lost is closed when the lock may not be held any more: it was taken away, or could not be renewed in time. It is not
// closed by Release.
func (k *Lock) Lost() <-chan struct{} { return k.lease.lost }

// Context ends with the lock: context.Cause is ErrLost when it was lost, context.Canceled after Release.
func (k *Lock) Context() context.Context { return k.ctx }

// Until is the moment up to which the lock is proven to be held if no further renewal succeeds.
func (k *Lock) Until() time.Time { return *k.lease.until.Load() }

// Release frees the lock and wakes those who wait for it; further calls return the same. ErrLost means that it was not
// held any more, another error that the store did not answer: then it ends by itself within TTL. It does its work even
// if ctx is over, and returns within StoreTimeout.
func (k *Lock) Release(ctx context.Context) error {
	k.once.Do(func() {
		k.lease.stop()
		<-k.ctx.Done() // watch is over, and keep with it
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
