// Package coalesce shares one call between all callers that need it at the same time. Each caller adds keys to the
// call. For instance, a bulk load ends with hundreds of values that have the same tags. With this package, reading
// the states of these tags costs one or two calls of the store, instead of hundreds.
package coalesce

import (
	"context"
	"maps"
	"slices"
	"sync"
)

// Calls makes one call at a time. All callers that come while a call runs share the next call.
type Calls[K comparable, R any] struct {
	call func(keys []K) (R, error)

	group   sync.WaitGroup // of the goroutines that execute run
	mu      sync.Mutex     // guards running and next
	running bool           // a goroutine executes run, or is about to
	next    *shared[K, R]  // the call after the running one; nil if no caller has come
}

// shared is one call, while it collects callers and while it runs.
type shared[K comparable, R any] struct {
	keys   map[K]bool
	done   chan struct{} // closed when result and err can be read
	result R
	err    error
}

// New returns Calls that make call. call must bound its own time. It gets the distinct keys of all its callers, in no
// order.
func New[K comparable, R any](call func(keys []K) (R, error)) *Calls[K, R] {
	return &Calls[K, R]{call: call}
}

// Do returns the result of a call that includes keys and that begins after Do was called. Do waits for the call that
// is running, if there is one, and for its own call. If ctx ends first, Do returns the error of ctx, and the call
// goes on for the other callers. If no call runs and ctx never ends, Do makes the call on this goroutine.
func (c *Calls[K, R]) Do(ctx context.Context, keys ...K) (r R, err error) {
	c.mu.Lock()
	if c.next == nil {
		c.next = &shared[K, R]{keys: make(map[K]bool), done: make(chan struct{})}
	}
	mine := c.next
	for _, key := range keys {
		mine.keys[key] = true
	}
	first := !c.running
	c.running = true
	if first && ctx.Done() != nil {
		c.group.Go(c.run)
	}
	c.mu.Unlock()
	if first && ctx.Done() == nil {
		c.run()
	}
	select {
	case <-mine.done:
		return mine.result, mine.err
	case <-ctx.Done():
		return r, ctx.Err()
	}
}

// run makes the next call. If more callers have come meanwhile, run makes their call on a new goroutine. So no caller
// works for later callers.
func (c *Calls[K, R]) run() {
	c.mu.Lock()
	this := c.next
	c.next = nil
	c.mu.Unlock()
	this.result, this.err = c.call(slices.Collect(maps.Keys(this.keys)))
	close(this.done)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running = c.next != nil; c.running {
		c.group.Go(c.run)
	}
}

// Wait waits until no call runs. No Do may begin during Wait or after it.
func (c *Calls[K, R]) Wait() { c.group.Wait() }
