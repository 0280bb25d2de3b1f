package refill

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/running"
)

// This file runs the load function: step 4 of doc.go. It handles slots, time-outs, panics and the renewal of the lease.
// The callers of runLoad decide what happens to the value.

var (
	errGoexit      = errors.New("refill: the load function ended its goroutine")
	errLoadTimeout = errors.New("refill: longer than LoadTimeout")
	errOutlived    = errors.New("refill: a load of this key has outlived LoadTimeout and still runs")
	errNoSlot      = errors.New("refill: no load slot is free")
)

// noSlotPause is how long a refresh waits for its next try after it has found no load slot.
const noSlotPause = 50 * time.Millisecond

// loaded is what a load function returned, or how the function ended without returning.
type loaded[V any] struct {
	value    V
	err      error
	panicked bool
	terms    terms
	took     time.Duration
}

// failed reports whether the load gave neither a value nor an absence.
func (v *loaded[V]) failed() bool { return v.err != nil && !errors.Is(v.err, ErrNotFound) }

// keep is how long the store keeps the value after the end of its life, see Fill.SetKeep.
func (v *loaded[V]) keep() time.Duration {
	if v.err != nil { // an absence, which Previous never returns
		return 0
	}
	return v.terms.keep
}

// tryLoadSlot takes one of MaxLoads load slots, and returns the function that gives the slot back. It returns nil if
// all slots are taken.
func (l *Loader[V]) tryLoadSlot() (free func()) {
	if l.loadSlots == nil {
		return func() {}
	}
	select {
	case l.loadSlots <- struct{}{}:
		return l.freeSlot
	default:
		return nil
	}
}

// noLoadSlot reports whether all load slots are taken. A refresh that no caller waits for is then not started.
func (l *Loader[V]) noLoadSlot() bool {
	return l.loadSlots != nil && len(l.loadSlots) == cap(l.loadSlots)
}

// loadSlot waits for one of MaxLoads slots, for an announcement in inbox, or for giveUp. loadSlot returns exactly one
// of its three results. An announcement may make the load needless, because another node has loaded. At giveUp the
// error is ErrOverloaded. A refresh that no caller waits for does not queue: the error is errNoSlot. If an urgent
// caller waits (see nesting), the refill does not queue either, but loads without a slot. The reason: the load that the
// urgent caller runs inside of may hold the last slot.
func (r *refill[V]) loadSlot(
	inbox <-chan driver.Announcement, giveUp <-chan time.Time,
) (free func(), announced *driver.Announcement, err error) {
	if r.loadKey == nil {
		return r.batchSlot(inbox, giveUp)
	}
	if free := r.tryLoadSlot(); free != nil {
		return free, nil, nil
	}
	eased, urgent := r.flight.Eased(), r.flight.Urgent()
	for {
		if r.flight.Unawaited() {
			return nil, nil, errNoSlot
		}
		select {
		case r.loadSlots <- struct{}{}:
			return r.freeSlot, nil, nil
		case <-eased:
			continue
		case <-urgent:
			return func() {}, nil, nil
		case a := <-inbox:
			return nil, &a, nil
		case <-r.loads.Stuck():
			return nil, nil, ErrOverloaded
		case <-giveUp:
			return nil, nil, ErrOverloaded
		case <-r.flight.Context().Done():
			return nil, nil, context.Cause(r.flight.Context())
		}
	}
}

// loadCall is one call of the load function. The goroutine that owns the refill makes the call. That goroutine loses
// the refill if the ctx of the call ends before the function returns: at LoadTimeout, when the last caller has left, or
// at Close. Then takeOver owns the refill, on another goroutine, and the load function may still run. So a function
// that ignores its ctx harms only this refill.
type loadCall[V any] struct {
	*refill[V]
	fill   Fill
	ctx    context.Context
	cancel context.CancelFunc
	began  time.Time
	call   *running.Load
	then   func(loaded[V]) next // the step after the load
	stop   func() bool          // keeps takeOver from being called, unless it was called already
}

// The states of a load. The change from loadRuns decides which goroutine owns the refill from then on.
const (
	noLoad    int32 = iota // no load has begun; a refill loads once at most
	loadRuns               // the load function runs
	loadEnded              // the load function has ended, and its goroutine still owns the refill
	loadTaken              // takeOver owns the refill
)

// runLoad calls the load function, and then goes on with then. It owns free, and frees the load slot when the function
// has returned, or has outlived LoadTimeout.
func (r *refill[V]) runLoad(free func(), then func(loaded[V]) next) next {
	r.flight.MarkLate()
	c := &loadCall[V]{refill: r, then: then, fill: Fill{loader: r.Loader, key: r.key, given: r.given}}
	if !r.flight.Unawaited() { // otherwise no outer load waits for this load
		c.fill.outer = outerFill(r.flight.Context())
	}
	if old := r.fallback; old != nil && old.Data.err() == nil {
		c.fill.previous = old.Data.value
		c.fill.previousExtra = old.Data.extra()
	}
	c.ctx = context.WithValue(r.flight.Context(), fillKey{}, &c.fill)
	if r.loadKey == nil {
		c.ctx, c.cancel = r.batched.limit(c.ctx)
	} else {
		c.ctx, c.cancel = context.WithTimeoutCause(c.ctx, r.cfg.LoadTimeout, errLoadTimeout)
	}
	c.began, c.call = time.Now(), r.loads.Begin(free, r.key)
	r.loading.Store(loadRuns)
	c.stop = context.AfterFunc(c.ctx, c.takeOver)
	return c.callFunction()
}

// callFunction calls the load function. A panic or a runtime.Goexit of the function becomes an error. After a Goexit
// only deferred functions run, so all further steps of the refill then follow in the deferred function.
func (c *loadCall[V]) callFunction() (n next) {
	returned := false
	defer func() {
		if returned {
			return
		}
		p := recover()
		if n = c.returned(unreturned[V](p)); p == nil {
			c.steps(n)
		}
	}()
	v := c.callLoad(c.ctx)
	returned = true
	return c.returned(v)
}

// returned is called when the load function has ended.
func (c *loadCall[V]) returned(v loaded[V]) next {
	c.loads.End(c.call)
	if !c.loading.CompareAndSwap(loadRuns, loadEnded) {
		return next{step: stepTakenOver}
	}
	c.stop()
	return c.ended(v)
}

// takeOver is called on a goroutine of its own when the ctx of the load has ended. It takes all further steps of the
// refill, unless the load function has ended before.
func (c *loadCall[V]) takeOver() {
	if !c.loading.CompareAndSwap(loadRuns, loadTaken) {
		return
	}
	defer c.end()
	if c.loadKey != nil { // for a bulk load, batch.run calls Outlive
		c.loads.Outlive(c.call, c.began.Add(c.cfg.LoadTimeout))
	}
	c.steps(c.ended(loaded[V]{err: context.Cause(c.ctx)}))
}

// ended goes on with the refill after its load. v is the result. If takeOver calls ended, the load has ended only for
// the refill, and the load function may still run.
func (c *loadCall[V]) ended(v loaded[V]) next {
	if v.failed() && errors.Is(context.Cause(c.ctx), errLoadTimeout) {
		v.err = errLoadTimeout
	}
	c.cancel()
	v.terms, v.took = c.fill.seal(), time.Since(c.began)
	c.failing.note(c.key, v.failed(), v.took)
	kind := EventLoaded
	switch {
	case v.failed():
		kind = EventLoadFailed
	case v.err != nil:
		kind = EventNotFound
	}
	c.emit(Event{Kind: kind, Key: c.key, Took: v.took, Err: v.err})
	return c.then(v)
}

func (r *refill[V]) callLoad(ctx context.Context) loaded[V] {
	if r.loadKey == nil {
		return r.batched.load()
	}
	value, err := r.loadKey(ctx, r.given)
	return loaded[V]{value: value, err: err}
}

// protect calls report with what call returns. A panic or runtime.Goexit in call becomes an error. protect calls report
// from a deferred function, because only deferred functions run after a Goexit.
func protect[V any](call func() loaded[V], report func(loaded[V])) {
	var v loaded[V]
	returned := false
	defer func() {
		if !returned {
			v = unreturned[V](recover())
		}
		report(v)
	}()
	v = call()
	returned = true
}

// unreturned is the result of a load function that has not returned. recovered is what recover has returned, and nil
// after a runtime.Goexit.
func unreturned[V any](recovered any) loaded[V] {
	if recovered == nil {
		return loaded[V]{err: errGoexit, panicked: true}
	}
	return loaded[V]{err: &panicError{recovered, debug.Stack()}, panicked: true}
}

// panicError is a panic of a load function.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v\n\n%s", e.value, e.stack) }

func (e *panicError) Unwrap() error {
	err, _ := e.value.(error)
	return err
}

// missRate is the recent share of misses. A miss is a refill whose first call of the store found no record.
type missRate struct{ average atomic.Int32 } // share of misses in about the last 32 refills, times 1<<20

func (m *missRate) note(miss bool) {
	now, was := int32(0), m.average.Load()
	if miss {
		now = 1 << 20
	}
	m.average.Store(was + (now-was)/32) // two concurrent notes may count as one: an estimate is enough
}

// high reports whether Acquire at once is cheaper than a read first. An Acquire that finds a record costs as much as
// 1.6 reads. A read that finds no record is wasted, because Acquire has to follow. So Acquire at once is cheaper if
// more than three of eight refills are misses. The limit here is one half, because the share is only an estimate.
func (m *missRate) high() bool { return m.average.Load() > 1<<19 }
