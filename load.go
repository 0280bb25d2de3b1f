package refill

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file runs the load function: step 4 of doc.go. It handles slots, time-outs, panics and the renewal of the lease.
// It does not know what happens to the value.

var (
	errGoexit      = errors.New("refill: the load function ended its goroutine")
	errLoadTimeout = errors.New("refill: longer than LoadTimeout")
)

// loaded is what a load function returned, or how the function ended.
type loaded[V any] struct {
	value    V
	err      error
	panicked bool
	terms    terms
	took     time.Duration
}

// failed reports whether there is neither a value nor an absence.
func (v *loaded[V]) failed() bool { return v.err != nil && !errors.Is(v.err, ErrNotFound) }

// tryLoadSlot returns a slot among MaxLoads, or nil if all are taken.
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

// loadSlot waits for a slot among MaxLoads, for an announcement in inbox, or for giveUp. It returns exactly one of the
// three. The announcement matters because the load of another node may make this load needless. If another load waits
// for this refill, the refill does not queue for a slot: the waiting load may hold the last slot itself.
func (r *refill[V]) loadSlot(
	inbox <-chan driver.Announcement, giveUp <-chan time.Time,
) (free func(), announced *driver.Announcement, err error) {
	if r.loadKey == nil {
		return r.batchSlot(inbox, giveUp)
	}
	if free := r.tryLoadSlot(); free != nil {
		return free, nil, nil
	}
	select {
	case r.loadSlots <- struct{}{}:
		return func() { <-r.loadSlots }, nil, nil
	case <-r.flight.Urgent():
		return func() {}, nil, nil
	case a := <-inbox:
		return nil, &a, nil
	case <-giveUp:
		return nil, nil, ErrOverloaded
	case <-r.flight.Context().Done():
		return nil, nil, context.Cause(r.flight.Context())
	}
}

// runLoad calls the load function on a goroutine of its own. So a panic, or a function that ignores its ctx, harms only
// this refill. runLoad owns free, and frees the slot when the function has returned. lease is nil for a load without a
// lease.
func (r *refill[V]) runLoad(free func(), lease *lease) loaded[V] {
	fill := &Fill{loader: r.Loader, key: r.key, given: r.given, outer: outerFill(r.flight.Context())}
	if old := r.fallback; old != nil && old.Data.err == nil {
		fill.previous = old.Data.value
		fill.previousExtra = old.Data.extra
	}
	ctx := context.WithValue(r.flight.Context(), fillKey{}, fill)
	ctx, cancel := context.WithTimeoutCause(ctx, r.cfg.LoadTimeout, errLoadTimeout)
	defer cancel()
	done := make(chan loaded[V], 1)
	began := time.Now()
	r.loads.begin(fill)
	go func() {
		defer r.loads.end(fill)
		defer free()
		protect(func() loaded[V] { return r.callLoad(ctx) }, func(v loaded[V]) { done <- v })
	}()
	v := awaitLoad(ctx, done, lease)
	if v.failed() && errors.Is(context.Cause(ctx), errLoadTimeout) {
		v.err = errLoadTimeout
	}
	v.terms, v.took = fill.seal(), time.Since(began)
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

// awaitLoad waits for the end of a load or of its ctx. Meanwhile it starts the renewal of the lease when the renewal is
// due.
func awaitLoad[V any](ctx context.Context, done <-chan loaded[V], lease *lease) loaded[V] {
	for {
		select {
		case v := <-done:
			return v
		case <-lease.renewal():
			lease.renewed = true
			go lease.keep()
		case <-ctx.Done():
			select {
			case v := <-done: // the load and ctx ended at once: a value is worth more than an error
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

// runningLoads are the load functions that have not returned. Close waits for them, and names their keys.
type runningLoads struct {
	mu    sync.Mutex
	fills map[*Fill]struct{}
	idle  chan struct{} // made by wait, closed when no load function runs
}

func (r *runningLoads) begin(f *Fill) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fills == nil {
		r.fills = make(map[*Fill]struct{})
	}
	r.fills[f] = struct{}{}
}

func (r *runningLoads) end(f *Fill) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if delete(r.fills, f); len(r.fills) == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
}

// wait waits for the end of all flights and load functions. It returns true when flightsDone is closed and no load
// function runs, and false at timeout. No load begins after flightsDone is closed.
func (r *runningLoads) wait(flightsDone <-chan struct{}, timeout <-chan time.Time) bool {
	select {
	case <-flightsDone:
	case <-timeout:
		return false
	}
	r.mu.Lock()
	if len(r.fills) == 0 {
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

// keys are the keys whose load function runs.
func (r *runningLoads) keys() (keys []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for f := range r.fills {
		keys = append(keys, f.key)
	}
	slices.Sort(keys)
	return keys
}

// missRate is the recent share of misses: first reads of the store, by a refill, that found nothing.
type missRate struct{ average atomic.Int32 } // of 1<<20, over some 32 reads

func (m *missRate) note(miss bool) {
	now, was := int32(0), m.average.Load()
	if miss {
		now = 1 << 20
	}
	m.average.Store(was + (now-was)/32) // a concurrent note may be lost: this is an estimate
}

// high reports whether Acquire at once is cheaper than a read first. An Acquire script that finds a value costs as much
// as 1.6 reads. A read that finds nothing costs one read and saves none.
func (m *missRate) high() bool { return m.average.Load() > 1<<19 }
