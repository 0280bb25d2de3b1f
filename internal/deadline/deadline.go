// Package deadline has time-outs and alarms that share their timers. A call of the store needs a context for its
// time-out, and a lease needs a renewal after some time. Nearly every call and lease ends long before. So one timer per
// call and lease would nearly always be started and stopped in vain.
package deadline

import (
	"context"
	"sync/atomic"
	"time"
)

// shares is how many timers a Timeout or Alarm that is always busy starts in the time of one time-out. All that share a
// timer end together, when the time of the first one is over. So a time-out may be shorter by one part in shares.
const shares = 32

// Timeout makes contexts that end after the same time. Create it with New.
type Timeout struct {
	length  time.Duration
	current atomic.Pointer[group]
}

// group is what the contexts have that were made within length/shares.
type group struct {
	end  time.Time
	full time.Time     // later contexts belong to the next group
	done chan struct{} // closed at end
}

// New returns a Timeout of the given length.
func New(length time.Duration) *Timeout { return &Timeout{length: length} }

// Context returns a context with the values of values. It ends with context.DeadlineExceeded after the length of t, or
// up to 1/32 earlier. It does not end with values. It needs no cancel function.
func (t *Timeout) Context(values context.Context) context.Context {
	now, g := time.Now(), t.current.Load()
	if g == nil || !now.Before(g.full) {
		g = t.replace(g, now)
	}
	return &deadlineCtx{values, g}
}

// replace makes the next group. If another goroutine has made one since old was read, replace returns that group.
func (t *Timeout) replace(old *group, now time.Time) *group {
	next := &group{end: now.Add(t.length), full: now.Add(t.length / shares), done: make(chan struct{})}
	if !t.current.CompareAndSwap(old, next) {
		return t.current.Load()
	}
	time.AfterFunc(t.length, func() { close(next.done) })
	return next
}

// deadlineCtx is a context of a group.
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
