package refill

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
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
		return func() { <-l.loadSlots }
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
	for {
		if r.flight.Unawaited() {
			return nil, nil, errNoSlot
		}
		select {
		case r.loadSlots <- struct{}{}:
			return func() { <-r.loadSlots }, nil, nil
		case <-r.flight.Eased():
			continue
		case <-r.flight.Urgent():
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

// runLoad calls the load function on a goroutine of its own. So a panic of the function, or a function that ignores its
// ctx, harms only this refill. runLoad owns free, and frees the slot when the function has returned, or has outlived
// LoadTimeout. lease is nil for a load without a lease.
func (r *refill[V]) runLoad(free func(), lease *lease) loaded[V] {
	r.flight.MarkLate()
	fill := &Fill{loader: r.Loader, key: r.key, given: r.given}
	if !r.flight.Unawaited() { // otherwise no outer load waits for this load
		fill.outer = outerFill(r.flight.Context())
	}
	if old := r.fallback; old != nil && old.Data.err == nil {
		fill.previous = old.Data.value
		fill.previousExtra = old.Data.extra
	}
	ctx := context.WithValue(r.flight.Context(), fillKey{}, fill)
	ctx, cancel := context.WithTimeoutCause(ctx, r.cfg.LoadTimeout, errLoadTimeout)
	defer cancel()
	done := make(chan loaded[V], 1)
	began := time.Now()
	call := r.loads.Begin(free, r.key)
	go func() {
		defer r.loads.End(call)
		protect(func() loaded[V] { return r.callLoad(ctx) }, func(v loaded[V]) { done <- v })
	}()
	v := awaitLoad(ctx, done, lease)
	if ctx.Err() != nil && r.loadKey != nil { // for a bulk load, batch.run calls Outlive
		r.loads.Outlive(call, began.Add(r.cfg.LoadTimeout))
	}
	if v.failed() && errors.Is(context.Cause(ctx), errLoadTimeout) {
		v.err = errLoadTimeout
	}
	v.terms, v.took = fill.seal(), time.Since(began)
	r.failing.note(r.key, v.failed(), v.took)
	kind := EventLoaded
	switch {
	case v.failed():
		kind = EventLoadFailed
	case v.err != nil:
		kind = EventNotFound
	}
	r.emit(Event{Kind: kind, Key: r.key, Took: v.took, Err: v.err})
	return v
}

func (r *refill[V]) callLoad(ctx context.Context) loaded[V] {
	if r.loadKey == nil {
		return r.batched.load(ctx)
	}
	value, err := r.loadKey(ctx, r.given)
	return loaded[V]{value: value, err: err}
}

// awaitLoad waits until the load has ended or ctx ends. When the first renewal of the lease is due, awaitLoad starts
// the renewals. lease may be nil.
func awaitLoad[V any](ctx context.Context, done <-chan loaded[V], lease *lease) loaded[V] {
	for {
		select {
		case v := <-done:
			return v
		case <-lease.renewal():
			lease.startRenewal()
		case <-ctx.Done():
			select {
			case v := <-done: // the load and ctx ended at the same time: prefer the result of the load
				return v
			default:
				return loaded[V]{err: context.Cause(ctx)}
			}
		}
	}
}

// protect calls report with what call returns. A panic or runtime.Goexit in call becomes an error. protect calls report
// from a deferred function, because only deferred functions run after a Goexit.
func protect[V any](call func() loaded[V], report func(loaded[V])) {
	v := loaded[V]{err: errGoexit, panicked: true}
	defer func() {
		if p := recover(); p != nil {
			v.err = &panicError{p, debug.Stack()}
		}
		report(v)
	}()
	v = call()
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
