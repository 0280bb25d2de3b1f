// Package breaker is a circuit breaker around a [driver.Store]. Without a breaker, a store that does not answer would
// cost every Get a time-out.
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
// A failure that came within a tenth of the time-out does not count, because such a failure cost little time, and its
// server may still answer reads. For example, a full server or a read-only replica refuses writes at once. Renewals,
// invalidations and the subscription bypass the breaker, because the Loader repeats them at intervals. Before the first
// try of an invalidation, the Loader asks Err, so that its caller does not wait for a store that does not answer.
//
// Each Loader has its own Breaker. A Breaker keeps its state in memory, because it must not depend on the store that it
// guards. The Breakers of one store share the suspicion that Suspect describes.
type Breaker struct {
	driver.Store
	health   *health
	timeout  time.Duration // of a call and of a probe
	onOpen   func(error)
	onClosed func()

	failed  atomic.Int32  // slow failures in a row
	open    atomic.Bool   // set under mu, so that only one probe runs; cleared by that probe when the store answers
	recheck chan struct{} // holds one request to probe now

	mu     sync.Mutex      // guards closed and the start of a probe
	closed bool            // Close was called
	ctx    context.Context // of the probes
	stop   context.CancelFunc
	probes sync.WaitGroup // probes, and the calls of UnlessSuspect
}

// New returns a Breaker around s that lets all calls through. When the Breaker opens, it calls onOpen with the last
// failure. When it lets calls through again, it calls onClosed. The two are called one after the other, on a goroutine
// of the Breaker, without a mutex held.
func New(s driver.Store, timeout time.Duration, onOpen func(error), onClosed func()) *Breaker {
	b := &Breaker{Store: s, timeout: timeout, onOpen: onOpen, onClosed: onClosed, recheck: make(chan struct{}, 1)}
	b.ctx, b.stop = context.WithCancel(context.Background())
	b.health = healthOf(s)
	return b
}

// Open reports whether the breaker is open.
func (b *Breaker) Open() bool { return b.open.Load() }

// Err returns ErrOpen if the breaker is open. Invalidations bypass the breaker, and their callers ask Err first.
func (b *Breaker) Err() error {
	if b.Open() {
		return ErrOpen
	}
	return nil
}

// trip opens the breaker. key is the key of the call that failed, and the probe asks the server that holds key. So if
// only a part of the store is down, the probe asks that part.
func (b *Breaker) trip(key string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.open.Load() {
		return
	}
	select {
	case <-b.recheck: // drops a request from before the breaker opened
	default:
	}
	b.open.Store(true)
	b.health.opened.Add(1)
	b.probes.Go(func() {
		b.onOpen(err)
		b.probe(key)
	})
}

// probe asks the store at intervals until the store answers. Then probe closes the breaker, so that it lets calls
// through again.
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
		if ask(b.ctx, b.Store, key, b.timeout) == nil {
			b.failed.Store(0)
			b.open.Store(false)
			b.health.opened.Add(-1)
			b.health.answered()
			b.onClosed()
			return
		}
		timer.Reset(probeEvery)
	}
}

// Probe makes an open breaker probe at once. A suspect store is probed at once, too. The Loader calls Probe when the
// store may be back.
func (b *Breaker) Probe() {
	for _, recheck := range []chan struct{}{b.recheck, b.health.recheck} {
		select {
		case recheck <- struct{}{}:
		default:
		}
	}
}

// Close ends the probes and waits for them. It must not be called from onOpen or onClosed.
func (b *Breaker) Close() {
	b.mu.Lock()
	again := b.closed
	b.closed = true
	b.mu.Unlock()
	if again {
		return
	}
	b.stop()
	b.probes.Wait()
	if b.Open() {
		b.health.opened.Add(-1)
	}
	b.health.leave()
}
