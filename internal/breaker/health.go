package breaker

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file is about what the Breakers of one store share: the suspicion that the store does not answer. A Breaker
// opens after openAfter slow failures. The suspicion begins after the first slow failure, for all Breakers of the
// store. So the callers of all Loaders wait for one time-out, and not for openAfter time-outs per Loader.

// ErrSuspect is returned by UnlessSuspect while the store is suspect.
var ErrSuspect = errors.New("refill: the store is suspect: its last call was not answered in time")

// health is what the Breakers of one store share. The first Breaker of the store makes the health, and the Close of the
// last Breaker ends it.
type health struct {
	store    driver.Store // the key in shared.health; a store that cannot be a map key is wrapped anew for each Breaker
	breakers int          // guarded by shared.mu

	suspect atomic.Bool  // changes under mu
	opened  atomic.Int32 // how many Breakers are open; their probes also end a suspicion

	recheck chan struct{}   // holds one request to probe now
	ctx     context.Context // of the probes
	stop    context.CancelFunc
	probes  sync.WaitGroup

	mu    sync.Mutex    // guards all below, and the start of a probe
	ended bool          // the last Breaker has closed, so no probe may start
	begun chan struct{} // closed while the store is suspect
	over  chan struct{} // closed when the suspicion ends
	said  map[any]bool  // the values that Once was called with, and that Reset was not called with since then
}

// shared holds the health of every store that has a Breaker in this process.
var shared = struct {
	mu     sync.Mutex
	health map[driver.Store]*health
}{health: make(map[driver.Store]*health)}

// healthOf returns the health of s, and counts one more Breaker. The caller calls leave once.
func healthOf(s driver.Store) *health {
	if !reflect.ValueOf(s).Comparable() {
		s = &struct{ driver.Store }{s}
	}
	shared.mu.Lock()
	defer shared.mu.Unlock()
	h := shared.health[s]
	if h == nil {
		h = &health{store: s, recheck: make(chan struct{}, 1), begun: make(chan struct{}), said: make(map[any]bool)}
		h.ctx, h.stop = context.WithCancel(context.Background())
		shared.health[s] = h
	}
	h.breakers++
	return h
}

// leave is called by a Breaker that closes. The last Breaker of a store ends the probe of health, and waits for it.
func (h *health) leave() {
	shared.mu.Lock()
	h.breakers--
	last := h.breakers == 0
	if last {
		delete(shared.health, h.store)
	}
	shared.mu.Unlock()
	if !last {
		return
	}
	h.mu.Lock()
	h.ended = true
	h.mu.Unlock()
	h.stop()
	h.probes.Wait()
}

// doubt makes the store suspect, after a slow failure of a call about key, and starts the probe of the suspicion.
func (h *health) doubt(key string, timeout time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended || h.suspect.Load() {
		return
	}
	select {
	case <-h.recheck: // drops a request from before the suspicion
	default:
	}
	h.suspect.Store(true)
	close(h.begun)
	h.over = make(chan struct{})
	over := h.over
	h.probes.Go(func() { h.probe(key, timeout, over) })
}

// answered ends a suspicion. It is called after each call that the store has answered.
func (h *health) answered() {
	if !h.suspect.Load() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.suspect.Load() {
		h.suspect.Store(false)
		h.begun = make(chan struct{})
		close(h.over)
	}
}

// suspicion returns a channel that is closed while the store is suspect.
func (h *health) suspicion() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.begun
}

// probe asks the store at once, and then at intervals, until the suspicion is over. While a Breaker of the store is
// open, health.probe does not ask, because the probe of that Breaker asks.
func (h *health) probe(key string, timeout time.Duration, over <-chan struct{}) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-h.ctx.Done():
			return
		case <-over:
			return
		case <-h.recheck:
		case <-timer.C:
		}
		if h.opened.Load() == 0 && ask(h.ctx, h.store, key, timeout) == nil {
			h.answered()
			return
		}
		timer.Reset(probeEvery)
	}
}

// ask reads something small from the server that holds key. The value of key may be the reason why the store did not
// answer in time, if the value is large. So ask reads the state of a tag with the text of the key. A store places a tag
// where it places the key with the same text, and the state of a tag is small.
func ask(ctx context.Context, s driver.Store, key string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	_, err := s.Tags(ctx, key)
	return err
}

// Suspect returns a channel that is closed while the store is suspect. A suspicion begins with the first slow failure
// of a call, and ends with the first answer of the store. The Breakers of one store in one process share the
// suspicion.
//
// The Breakers still send calls to a suspect store. A caller that can do without a suspect store should do so.
func (b *Breaker) Suspect() <-chan struct{} { return b.health.suspicion() }

// UnlessSuspect returns what call returns. If the store is suspect, or becomes suspect meanwhile, UnlessSuspect
// returns ErrSuspect at once. The call then goes on in the background, and Close waits for it. suspect is the result
// of Suspect.
func UnlessSuspect[T any](b *Breaker, suspect <-chan struct{}, call func() (T, error)) (v T, err error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	b.probes.Go(func() {
		v, err := call()
		done <- result{v, err}
	})
	select {
	case r := <-done:
		return r.value, r.err
	case <-suspect:
		return v, ErrSuspect
	}
}

// maxSaid bounds the memory of Once.
const maxSaid = 64

// Once reports whether this is the first call of Once with the value what, counted over all Breakers of the store in
// this process. what identifies a log message. If ten Loaders of one store notice the same outage, only one of them
// gets true, and logs the message. After Reset(what), the next Once(what) returns true again.
func (b *Breaker) Once(what any) bool {
	h := b.health
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.said[what] {
		return false
	}
	if len(h.said) >= maxSaid {
		clear(h.said) // so some messages may be logged twice
	}
	h.said[what] = true
	return true
}

// Reset makes the next Once(what) return true. Reset reports whether Once(what) was called since the last Reset(what).
func (b *Breaker) Reset(what any) bool {
	h := b.health
	h.mu.Lock()
	defer h.mu.Unlock()
	was := h.said[what]
	delete(h.said, what)
	return was
}
