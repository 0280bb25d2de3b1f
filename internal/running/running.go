// Package running counts the load functions that run. A load function that outlives its time-out gives its load slot
// back, so that it does not keep other keys from being loaded. At most as many such functions as there are slots may
// run without a slot. A further function that outlives its time-out keeps its slot.
package running

import (
	"slices"
	"sync"
	"time"
)

// Loads are the calls of load functions that have not returned.
type Loads struct {
	slots int // how many load slots there are

	mu       sync.Mutex // guards all below
	calls    map[*Load]struct{}
	outlived map[string]int // how many calls have outlived their time-out, by key
	apart    int            // how many calls have outlived their time-out and may run without a slot; at most slots
	freed    int            // how many of the apart calls have given their slot back
	full     chan struct{}  // closed when freed reaches slots; made by Stuck
	idle     chan struct{}  // made by Wait, closed when no load function runs
}

// New returns Loads for load functions that share the given number of load slots.
func New(slots int) *Loads {
	return &Loads{slots: slots, calls: make(map[*Load]struct{}), outlived: make(map[string]int)}
}

// Load is one call of a load function. Its fields are guarded by Loads.mu.
type Load struct {
	keys     []string
	free     func()      // gives the load slot back; nil after Outlive has given the slot back
	outlived bool        // the function still ran at its time-out
	apart    bool        // this call is counted in Loads.apart
	timer    *time.Timer // fires at the time-out of a call whose callers have left earlier
}

// Begin counts a call. free gives the load slot of the call back. Outlive or End calls free, exactly once.
func (r *Loads) Begin(free func(), keys ...string) *Load {
	c := &Load{keys: keys, free: free}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls[c] = struct{}{}
	return c
}

// End is called when the load function has returned.
func (r *Loads) End(c *Load) {
	if free := r.remove(c); free != nil {
		free()
	}
}

func (r *Loads) remove(c *Load) (free func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.timer != nil {
		c.timer.Stop()
	}
	if c.outlived {
		for _, key := range c.keys {
			if r.outlived[key]--; r.outlived[key] == 0 {
				delete(r.outlived, key)
			}
		}
	}
	if c.apart {
		if r.freed == r.slots {
			r.full = nil // this channel, if there is one, is closed; the next Stuck makes another one
		}
		r.apart--
		r.freed--
	}
	if delete(r.calls, c); len(r.calls) == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
	return c.free
}

// Outlive is called when the callers of a load no longer wait for it. If the load function still runs at deadline,
// HasOutlived is true for its keys until the load function returns. Outlive then also frees its load slot, unless the
// number of loads that run without a slot already equals the number of slots.
func (r *Loads) Outlive(c *Load, deadline time.Time) {
	if left := time.Until(deadline); left > 0 {
		r.mu.Lock()
		defer r.mu.Unlock()
		if _, runs := r.calls[c]; runs && c.timer == nil {
			c.timer = time.AfterFunc(left, func() { r.Outlive(c, deadline) })
		}
		return
	}
	free := r.markOutlived(c)
	if free == nil {
		return
	}
	free()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.freed++; r.freed == r.slots && r.full != nil {
		close(r.full)
	}
}

func (r *Loads) markOutlived(c *Load) (free func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, runs := r.calls[c]; !runs || c.outlived {
		return nil
	}
	c.outlived = true
	for _, key := range c.keys {
		r.outlived[key]++
	}
	if r.apart >= r.slots {
		return nil // the call keeps its slot
	}
	c.apart = true
	r.apart++
	free, c.free = c.free, nil
	return free
}

// HasOutlived reports whether a load of key has outlived its time-out and still runs.
func (r *Loads) HasOutlived(key string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.outlived[key] > 0
}

// Stuck returns a channel that is closed when as many calls as there are slots have given their slot back and still
// run. Further calls that outlive their time-out keep their slot, so a queue for a load slot may then never move.
func (r *Loads) Stuck() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.full == nil {
		r.full = make(chan struct{})
		if r.freed >= r.slots {
			close(r.full)
		}
	}
	return r.full
}

// Wait waits for the end of all flights and load functions. It returns true when flightsDone is closed and no load
// function runs, and false at timeout. No load begins after flightsDone is closed.
func (r *Loads) Wait(flightsDone <-chan struct{}, timeout <-chan time.Time) bool {
	select {
	case <-flightsDone:
	case <-timeout:
		return false
	}
	r.mu.Lock()
	if len(r.calls) == 0 {
		r.mu.Unlock()
		return true
	}
	idle := make(chan struct{})
	r.idle = idle
	r.mu.Unlock()
	select {
	case <-idle:
		return true
	case <-timeout:
		return false
	}
}

// Keys returns the keys whose load function runs.
func (r *Loads) Keys() (keys []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.calls {
		keys = append(keys, c.keys...)
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}
