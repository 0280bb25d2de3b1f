package deadline

import (
	"sync"
	"time"
)

// Alarm calls a function for each value that was added and not removed, some time after it was added. Values that are
// added at nearly the same time share a timer. Create an Alarm with NewAlarm.
type Alarm[T comparable] struct {
	after time.Duration
	ring  func(T)

	mu     sync.Mutex // guards the next two, and the values of all cohorts
	newest *cohort[T]
	of     map[T]*cohort[T]
}

// cohort has the values that were added within after/shares.
type cohort[T comparable] struct {
	full   time.Time // later values belong to the next cohort
	values map[T]struct{}
}

// NewAlarm returns an Alarm. It calls ring when a value was added as long ago as after, or up to 1/32 earlier. Calls of
// ring for different values may overlap.
func NewAlarm[T comparable](after time.Duration, ring func(T)) *Alarm[T] {
	return &Alarm[T]{after: after, ring: ring, of: make(map[T]*cohort[T])}
}

// Add adds v, which was not added before.
func (a *Alarm[T]) Add(v T) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if a.newest == nil || !now.Before(a.newest.full) {
		c := &cohort[T]{full: now.Add(a.after / shares), values: make(map[T]struct{})}
		a.newest = c
		time.AfterFunc(a.after, func() { a.ringAll(c) })
	}
	a.newest.values[v] = struct{}{}
	a.of[v] = a.newest
}

// Remove keeps the Alarm from calling ring for v, if the call has not begun. A second call has no effect.
func (a *Alarm[T]) Remove(v T) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.of[v]; c != nil {
		delete(c.values, v)
		delete(a.of, v)
	}
}

func (a *Alarm[T]) ringAll(c *cohort[T]) {
	a.mu.Lock()
	values := c.values
	c.values = nil // Remove deletes from a nil map without effect
	for v := range values {
		delete(a.of, v)
	}
	if a.newest == c {
		a.newest = nil
	}
	a.mu.Unlock()
	for v := range values {
		a.ring(v)
	}
}
