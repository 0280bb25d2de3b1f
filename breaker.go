package refill

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// breaker is the circuit breaker before the shared store: one that does not answer must not cost every Get a time-out.
// After breakAfter slow failures in a row it is open: the steps of a flight fail at once, and the process does without
// the store (see alone) until a probe is answered. No caller pays for the probes.
//
// It is this Loader's own, in memory: a breaker must not live in what it guards. A failure that came at once does not
// count: it cost nothing, and the server that sent it (it is full, or a replica) may still answer reads. Renewals and
// voidings pass through: they have a rhythm of their own.
type breaker struct {
	Store
	timeout time.Duration
	tell    func(EventKind, error)

	failed atomic.Int32  // slow failures in a row
	open   atomic.Bool   // set under mu, so that one probe runs; which ends it
	bell   chan struct{} // rung when the store may be back

	mu     sync.Mutex // guards closed, and the begin of a probe
	closed bool
	ctx    context.Context // of the probes
	stop   context.CancelFunc
	probes sync.WaitGroup
}

const (
	breakAfter = 5
	probeEvery = 500 * time.Millisecond
)

var errBreaker = errors.New("refill: the circuit breaker is open: the store did not answer")

func newBreaker(s Store, timeout time.Duration, tell func(EventKind, error)) *breaker {
	b := &breaker{Store: s, timeout: timeout, tell: tell, bell: make(chan struct{}, 1)}
	b.ctx, b.stop = context.WithCancel(context.Background())
	return b
}

// through makes one call of the store, if the breaker is not open.
func through[T any](b *breaker, key string, call func() (T, error)) (T, error) {
	if b.open.Load() {
		var none T
		return none, errBreaker
	}
	began := time.Now()
	v, err := call()
	switch {
	case err == nil:
		if b.failed.Load() != 0 { // a load is cheaper than a store that every core wants
			b.failed.Store(0)
		}
	case time.Since(began) >= b.timeout/10 && b.failed.Add(1) >= breakAfter:
		b.trip(key, err)
	}
	return v, err
}

// trip opens the breaker. key is probed: where a part of a store is gone, it is one that the failing part has.
func (b *breaker) trip(key string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.open.Load() {
		return
	}
	select {
	case <-b.bell: // rung before, so it says nothing
	default:
	}
	b.open.Store(true)
	b.tell(EventBreakerOpen, err)
	b.probes.Go(func() { b.probe(key) })
}

// probe asks until the store answers.
func (b *breaker) probe(key string) {
	timer := time.NewTimer(probeEvery)
	defer timer.Stop()
	for {
		select {
		case <-b.ctx.Done():
			return
		case <-b.bell:
		case <-timer.C:
		}
		ctx, cancel := context.WithTimeout(b.ctx, b.timeout)
		_, err := b.Store.Get(ctx, key)
		cancel()
		if err == nil {
			b.failed.Store(0)
			b.open.Store(false)
			b.tell(EventBreakerClosed, nil)
			return
		}
		timer.Reset(probeEvery)
	}
}

// wake probes at once: the subscription has come back.
func (b *breaker) wake() { ring(b.bell) }

func (b *breaker) close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.stop()
	b.probes.Wait()
}

// The steps of a flight.

func (b *breaker) Get(ctx context.Context, key string) ([]byte, error) {
	return through(b, key, func() ([]byte, error) { return b.Store.Get(ctx, key) })
}

func (b *breaker) GetMany(ctx context.Context, keys ...string) ([][]byte, error) {
	return through(b, first(keys), func() ([][]byte, error) { return b.Store.GetMany(ctx, keys...) })
}

func (b *breaker) Tags(ctx context.Context, tags ...string) ([]TagState, error) {
	return through(b, first(tags), func() ([]TagState, error) { return b.Store.Tags(ctx, tags...) })
}

func (b *breaker) HoldTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	_, err := through(b, first(tags), func() (any, error) { return nil, b.Store.HoldTags(ctx, reach, keep, tags...) })
	return err
}

// first is the key to probe where a call has many. A tag is probed as the key of the same text, which is as good: stores
// place the two alike.
func first(keys []string) string {
	if len(keys) == 0 {
		return ""
	}
	return keys[0]
}

func (b *breaker) Begin(ctx context.Context, bid Bid) (Begun, error) {
	return through(b, bid.Key, func() (Begun, error) { return b.Store.Begin(ctx, bid) })
}

func (b *breaker) Publish(ctx context.Context, p Publication) (Published, error) {
	return through(b, p.Key, func() (Published, error) { return b.Store.Publish(ctx, p) })
}

func (b *breaker) Fail(ctx context.Context, key, token, failure string, ttl time.Duration) error {
	_, err := through(b, key, func() (any, error) { return nil, b.Store.Fail(ctx, key, token, failure, ttl) })
	return err
}

func (b *breaker) Release(ctx context.Context, key, token string) error {
	_, err := through(b, key, func() (any, error) { return nil, b.Store.Release(ctx, key, token) })
	return err
}
