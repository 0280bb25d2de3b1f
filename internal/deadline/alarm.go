package deadline

import (
	"sync"
	"time"
)

// Alarm calls a function for each value when a fixed time has passed since the Add of the value, unless the value was
// removed before. Values that are added at nearly the same time share a timer. Create an Alarm with NewAlarm.
type Alarm[T comparable] struct {
	after time.Duration
	ring  func(T)

	mu     sync.Mutex // guards newest, and the values of all cohorts
	newest *Cohort[T] // the cohort that Add adds to until it is full; nil if its timer has fired, and before the first Add
}

// Cohort has the values that were added within after/shares, and that were not removed.
type Cohort[T comparable] struct {
	alarm  *Alarm[T]
	full   time.Time      // later values belong to the next cohort
	values map[T]struct{} // nil when the timer has fired
}

// NewAlarm returns an Alarm that calls ring for each value, when the time after has passed since the Add of the value,
// or up to 1/32 of that time earlier. Calls of ring for different values may overlap.
func NewAlarm[T comparable](after time.Duration, ring func(T)) *Alarm[T] {
	return &Alarm[T]{after: after, ring: ring}
}

// Add adds v, which was not added before. It returns the cohort of v, for Remove.
func (a *Alarm[T]) Add(v T) *Cohort[T] {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if a.newest == nil || !now.Before(a.newest.full) {
		c := &Cohort[T]{alarm: a, full: now.Add(a.after / shares), values: make(map[T]struct{})}
		a.newest = c
		time.AfterFunc(a.after, c.ringAll)
	}
	a.newest.values[v] = struct{}{}
	return a.newest
}

// Remove keeps the Alarm from calling ring for v, if the call has not begun. A second call has no effect.
func (c *Cohort[T]) Remove(v T) {
	c.alarm.mu.Lock()
	defer c.alarm.mu.Unlock()
	delete(c.values, v)
}

func (c *Cohort[T]) ringAll() {
	a := c.alarm
	a.mu.Lock()
	values := c.values
	c.values = nil
	if a.newest == c {
		a.newest = nil
	}
	a.mu.Unlock()
	for v := range values {
		a.ring(v)
	}
}
