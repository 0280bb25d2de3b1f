// Package deadline has time-outs and alarms that share their timers. A call of the store needs a context for its
// time-out, and a lease needs a renewal after some time. Nearly every call ends long before its time-out, and nearly
// every lease long before its renewal. So a timer for each of them would nearly always be started and stopped in vain.
package deadline

import (
	"context"
	"sync/atomic"
	"time"
)

// shares is how many timers a Timeout or Alarm that is always busy starts in the time of one time-out. The contexts or
// values that share a timer end together, when the time of the oldest one is over. So the time of a context or value
// can be shorter by up to 1/shares.
const shares = 32

// Timeout makes contexts that end after the same time. Create it with New.
type Timeout struct {
	length  time.Duration
	current atomic.Pointer[group]
}

// group is shared by the contexts that were made within length/shares. These contexts end together.
type group struct {
	end  time.Time
	full time.Time     // later contexts belong to the next group
	done chan struct{} // closed at end
}

// New returns a Timeout of the given length.
func New(length time.Duration) *Timeout { return &Timeout{length: length} }

// Context returns a context that has the values of the context values, but does not end with it. The new context ends
// with context.DeadlineExceeded after the length of t, or up to 1/32 of that length earlier. The new context needs no
// cancel function.
func (t *Timeout) Context(values context.Context) context.Context {
	now, g := time.Now(), t.current.Load()
	if g == nil || !now.Before(g.full) {
		g = t.replace(g, now)
	}
	return &deadlineCtx{values, g}
}

// replace makes the next group, and returns it. If another goroutine has made a group since old was read, replace
// returns that group instead.
func (t *Timeout) replace(old *group, now time.Time) *group {
	next := &group{end: now.Add(t.length), full: now.Add(t.length / shares), done: make(chan struct{})}
	if !t.current.CompareAndSwap(old, next) {
		return t.current.Load()
	}
	time.AfterFunc(t.length, func() { close(next.done) })
	return next
}

// deadlineCtx is a context that Timeout.Context has returned.
type deadlineCtx struct {
	context.Context // for the values
	group           *group
}

func (c *deadlineCtx) Deadline() (time.Time, bool) { return c.group.end, true }

func (c *deadlineCtx) Done() <-chan struct{} { return c.group.done }

func (c *deadlineCtx) Err() error {
	select {
	case <-c.group.done:
		return context.DeadlineExceeded
	default:
		return nil
	}
}
