// Package breaker is a circuit breaker around a [driver.Store]. Without it, a store that does not answer would cost
// every Get a time-out.
package breaker

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
)

const (
	openAfter  = 5 // slow failures in a row
	probeEvery = 500 * time.Millisecond
)

// ErrOpen is returned by every step of a refill while the breaker is open.
var ErrOpen = errors.New("refill: the circuit breaker is open: the store did not answer")

// Breaker opens after openAfter slow failures in a row. While it is open, the steps of a refill fail at once, until a
// probe is answered. The probes run on a goroutine of their own, so no caller waits for them.
//
// A failure that came at once does not count: it cost no time, and the server that sent it (a full one, or a replica)
// may still answer reads. Renewals, invalidations and the subscription bypass the breaker, because they are repeated at
// intervals of their own.
//
// Each Loader has its own Breaker, in memory: a breaker must not depend on the store that it guards.
type Breaker struct {
	driver.Store
	timeout  time.Duration // of a call and of a probe
	onOpen   func(error)
	onClosed func()

	failed  atomic.Int32  // slow failures in a row
	open    atomic.Bool   // set under mu, so that one probe runs; cleared by that probe
	recheck chan struct{} // holds one request to probe now

	mu     sync.Mutex // guards closed and the start of a probe
	closed bool
	ctx    context.Context // of the probes
	stop   context.CancelFunc
	probes sync.WaitGroup
}

// New returns a closed Breaker around s. onOpen and onClosed are called one after the other, on a goroutine of the
// Breaker, without a mutex held.
func New(s driver.Store, timeout time.Duration, onOpen func(error), onClosed func()) *Breaker {
	b := &Breaker{Store: s, timeout: timeout, onOpen: onOpen, onClosed: onClosed, recheck: make(chan struct{}, 1)}
	b.ctx, b.stop = context.WithCancel(context.Background())
	return b
}

// Open reports whether the breaker is open.
func (b *Breaker) Open() bool { return b.open.Load() }

// trip opens the breaker. The probe reads key. If only a part of the store is down, key is in that part.
func (b *Breaker) trip(key string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.open.Load() {
		return
	}
	select {
	case <-b.recheck: // requested before the breaker opened
	default:
	}
	b.open.Store(true)
	b.probes.Go(func() {
		b.onOpen(err)
		b.probe(key)
	})
}

// probe reads key at intervals until the store answers. Then it closes the breaker.
func (b *Breaker) probe(key string) {
	timer := time.NewTimer(probeEvery)
	defer timer.Stop()
	for {
		select {
		case <-b.ctx.Done():
			return
		case <-b.recheck:
		case <-timer.C:
		}
		ctx, cancel := context.WithTimeout(b.ctx, b.timeout)
		_, err := b.Store.Get(ctx, key)
		cancel()
		if err == nil {
			b.failed.Store(0)
			b.open.Store(false)
			b.onClosed()
			return
		}
		timer.Reset(probeEvery)
	}
}

// Probe makes an open breaker probe at once. It is called when the store may be back.
func (b *Breaker) Probe() {
	select {
	case b.recheck <- struct{}{}:
	default:
	}
}

// Close ends the probes and waits for them. It must not be called from onOpen or onClosed.
func (b *Breaker) Close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.stop()
	b.probes.Wait()
}
