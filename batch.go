package refill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file collects keys for one call of a bulk load function, and makes the call.

// batch is one call of a bulk load function. A refill enters the batch before it asks the store for its lease. If the
// refill gets the lease, it asks the batch to load its key. Otherwise the refill leaves the batch. The call begins when
// no further refill can enter and every refill in the batch has either asked or left. So the call loads exactly the
// keys whose leases were acquired.
type batch[V any] struct {
	l *Loader[V]

	ready  chan struct{} // closed when the batch has a load slot, or needs none
	unused chan struct{} // closed when all entries have left: the batch needs no slot
	urgent chan struct{} // closed by hurry: the batch must not wait for a slot

	mu       sync.Mutex      // guards all fields below, and left of each entry
	open     bool            // refills can enter
	keys     map[string]bool // of all entries, including those that have left
	pending  int             // entries that have neither left nor asked
	asked    []*batchEntry[V]
	running  bool               // the call has begun, or all entries have left
	awaited  int                // while the call runs: entries that have not given up, see giveUp
	cancel   context.CancelFunc // of the ctx of the call; nil before the call begins
	isUrgent bool               // urgent is closed
	queues   bool               // queueForSlot runs or has run
	hasSlot  bool               // the batch has got a load slot or needs none; never reset
	free     func()             // gives the load slot back; nil before there is a slot, and after it was given back
}

// batchEntry is the place of one refill in a batch.
type batchEntry[V any] struct {
	batch *batch[V]
	key   string // as given
	left  bool   // the entry has left, or asked; guarded by batch.mu

	ctx    context.Context         // of the refill's load; limit writes ctx, end and fill before the entry asks
	end    context.CancelCauseFunc // ends ctx
	fill   *Fill
	done   chan struct{} // closed when result can be read
	result loaded[V]
}

func newBatch[V any](l *Loader[V]) *batch[V] {
	return &batch[V]{
		l: l, open: true, keys: make(map[string]bool),
		ready: make(chan struct{}), unused: make(chan struct{}), urgent: make(chan struct{}),
	}
}

// enter returns an entry for a key. It returns nil if the batch is closed, or if the batch has the key already. The
// reason for the second case: in one call, two refills of one key would share one Fill, so one refill would get the
// tags and times that the load has set for the other refill.
func (b *batch[V]) enter(given string) *batchEntry[V] {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.open || b.keys[given] {
		return nil
	}
	b.keys[given] = true
	b.pending++
	return &batchEntry[V]{batch: b, key: given, done: make(chan struct{})}
}

// close keeps further refills from entering.
func (b *batch[V]) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open = false
	b.check()
}

// leave says that the entry needs no load. The batch then no longer waits for the entry. leave does nothing if the
// refill of the entry has already asked the batch to load the key.
func (e *batchEntry[V]) leave() {
	b := e.batch
	b.mu.Lock()
	defer b.mu.Unlock()
	if !e.left {
		e.left = true
		b.pending--
		b.check()
	}
}

func (e *batchEntry[V]) hasLeft() bool {
	e.batch.mu.Lock()
	defer e.batch.mu.Unlock()
	return e.left
}

// check starts the call when no refill can enter and every entry has left or asked for its key. If all entries have
// left, check ends the batch without a call. The caller holds b.mu.
func (b *batch[V]) check() {
	switch {
	case b.open || b.pending > 0 || b.running:
	case len(b.asked) > 0:
		b.running, b.awaited = true, len(b.asked)
		go b.run(b.asked)
	default:
		b.running = true
		close(b.unused)
		b.freeSlot()
	}
}

// freeSlot gives the load slot back. The caller holds b.mu.
func (b *batch[V]) freeSlot() {
	if b.free != nil {
		b.free()
		b.free = nil
	}
}

// acquireSlot takes a load slot for the batch, and reports whether the batch has one. If no slot is free and queue is
// set, the batch queues for a slot. When the batch has got a slot, ready is closed.
func (b *batch[V]) acquireSlot(queue bool) (ready bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.hasSlot || b.queues {
		return b.hasSlot
	}
	if free := b.l.tryLoadSlot(); free != nil {
		b.slotAcquired(free)
	} else if b.queues = queue; queue {
		go b.queueForSlot()
	}
	return b.hasSlot
}

func (b *batch[V]) queueForSlot() {
	free := func() {}
	select {
	case b.l.loadSlots <- struct{}{}:
		free = b.l.freeSlot
	case <-b.urgent: // the batch goes on without a slot
	case <-b.unused:
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.slotAcquired(free)
	if b.running && len(b.asked) == 0 { // all entries have left before the slot was free
		b.freeSlot()
	}
}

// slotAcquired lets the entries go on. The caller holds b.mu.
func (b *batch[V]) slotAcquired(free func()) {
	b.hasSlot, b.free = true, free
	close(b.ready)
}

// hurry lets the batch go on without a load slot. It is called for an urgent caller (see nesting), which runs inside of
// another load. That other load may hold the last slot, so the batch and that load would wait for each other.
func (b *batch[V]) hurry() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.isUrgent {
		b.isUrgent = true
		close(b.urgent)
	}
}

// limit returns the ctx of the refill's load. The ctx ends LoadTimeout after the call of the batch has begun.
func (e *batchEntry[V]) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	e.fill = outerFill(ctx)
	e.ctx, e.end = context.WithCancelCause(ctx)
	return e.ctx, func() { e.end(nil) }
}

// load asks the batch for the key of the entry, and returns the result of the call. The caller must have called limit.
func (e *batchEntry[V]) load() loaded[V] {
	b := e.batch
	b.mu.Lock()
	if e.left { // the ctx of the load had ended, so takeOver has ended the refill, and the entry has left
		b.mu.Unlock()
		return loaded[V]{err: context.Cause(e.ctx)}
	}
	e.left = true
	b.pending--
	b.asked = append(b.asked, e)
	b.check()
	b.mu.Unlock()
	stop := context.AfterFunc(e.ctx, e.giveUp)
	defer stop()
	<-e.done
	return e.result
}

// giveUp is called when no caller waits for the key any longer, or when the load of the key has timed out. If the call
// has not begun yet, giveUp removes the entry from the batch. If the call has begun, giveUp cancels the call as soon as
// all entries have given up.
func (e *batchEntry[V]) giveUp() {
	b := e.batch
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running {
		if b.awaited--; b.awaited == 0 && b.cancel != nil {
			b.cancel()
		}
		return
	}
	if i := slices.Index(b.asked, e); i >= 0 {
		b.asked = slices.Delete(b.asked, i, i+1)
		e.result.err = context.Cause(e.ctx)
		close(e.done)
		b.check()
	}
}

// run calls the load function for all entries, and hands out the values that the function returns. run has a goroutine
// of its own.
func (b *batch[V]) run(entries []*batchEntry[V]) {
	first := entries[0]
	fill := &Fill{loader: b.l, outer: first.fill.outer, parts: make(map[string]*Fill, len(entries))}
	keys, storeKeys := make([]string, len(entries)), make([]string, len(entries))
	for i, e := range entries {
		keys[i], storeKeys[i] = e.key, e.fill.key
		fill.parts[e.key] = e.fill
	}
	// ctx has the values of the first entry's ctx, but does not end with it. giveUp cancels ctx when all entries have
	// given up.
	ctx := context.WithValue(context.WithoutCancel(first.ctx), fillKey{}, fill)
	ctx, cancel := context.WithTimeoutCause(ctx, b.l.cfg.LoadTimeout, errLoadTimeout)
	defer cancel()
	b.mu.Lock()
	b.cancel = cancel
	if b.awaited == 0 {
		cancel()
	}
	b.mu.Unlock()
	began, call := time.Now(), b.l.loads.Begin(b.returnSlot, storeKeys...)
	defer b.l.loads.End(call)
	defer context.AfterFunc(ctx, func() {
		b.l.loads.Outlive(call, began.Add(b.l.cfg.LoadTimeout))
		for _, e := range entries {
			e.end(context.Cause(ctx))
		}
	})()
	var values map[string]V
	protect(func() loaded[V] {
		got, err := b.l.bulk(ctx, keys)
		values = got
		return loaded[V]{err: err}
	}, func(v loaded[V]) { b.handOut(entries, values, v) })
}

// handOut gives each entry its result. v says how the call ended.
func (b *batch[V]) handOut(entries []*batchEntry[V], values map[string]V, v loaded[V]) {
	failed, err := keyErrors(v)
	for _, e := range entries {
		value, there := values[e.key]
		switch {
		case err != nil:
			e.result = v
		case failed[e.key] != nil:
			e.result = loaded[V]{err: failed[e.key]}
		case there:
			e.result = loaded[V]{value: value}
		default:
			e.result = loaded[V]{err: fmt.Errorf("%w: %q", ErrNotFound, e.key)}
		}
		close(e.done)
	}
}

func (b *batch[V]) returnSlot() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.freeSlot()
}

// keyErrors returns the keys that have failed, with the error of each, if the bulk load function has returned a
// *KeyErrors. Otherwise keyErrors returns the error that fails all keys, or nil. A *KeyErrors without keys is no error
// if it is not wrapped. If it is wrapped, the error fails all keys, because the error around it may report another
// failure.
func keyErrors[V any](v loaded[V]) (failed map[string]error, all error) {
	if v.err == nil || v.panicked {
		return nil, v.err
	}
	if e, bare := any(v.err).(*KeyErrors); bare && (e == nil || len(e.Errs) == 0) {
		return nil, nil
	}
	var e *KeyErrors
	if errors.As(v.err, &e) && e != nil && len(e.Errs) > 0 {
		return e.Errs, nil
	}
	return nil, v.err
}

// If a key of a GetMany has left the batch of that GetMany, and must be loaded here after all, the key waits for
// regroupDelay, so that other such keys can enter the same new batch. If a node dies or the store goes away, many keys
// need such a batch at the same time.
const regroupDelay = 5 * time.Millisecond

// batcher holds the batch that refills of a bulk Loader enter if they are not in the batch of a GetMany.
type batcher[V any] struct {
	mu   sync.Mutex
	open *batch[V]
}

// enter returns an entry in the open batch, or in a new batch that stays open for window.
func (g *batcher[V]) enter(l *Loader[V], given string, window time.Duration) *batchEntry[V] {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open != nil {
		if e := g.open.enter(given); e != nil {
			return e
		}
	}
	b := newBatch(l)
	e := b.enter(given)
	if window == 0 {
		b.close()
		return e
	}
	g.open = b
	time.AfterFunc(window, func() {
		b.close()
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.open == b {
			g.open = nil
		}
	})
	return e
}

// batchSlot is loadSlot for a refill of a bulk Loader. Instead of a slot of its own, the refill gets an entry in a
// batch that has a load slot. The returned free makes the entry leave the batch.
func (r *refill[V]) batchSlot(
	inbox <-chan driver.Announcement, giveUp <-chan time.Time,
) (free func(), announced *driver.Announcement, err error) {
	if r.batched == nil || r.batched.hasLeft() {
		window := r.cfg.BulkWindow
		if r.many != nil {
			window = max(window, regroupDelay)
		}
		r.batched = r.batcher.enter(r.Loader, r.given, window)
	}
	e := r.batched
	if e.batch.acquireSlot(!r.flight.Unawaited()) {
		return e.leave, nil, nil
	}
	eased, urgent := r.flight.Eased(), r.flight.Urgent()
	for {
		if r.flight.Unawaited() {
			e.leave()
			return nil, nil, errNoSlot
		}
		select {
		case <-e.batch.ready:
			return e.leave, nil, nil
		case <-eased:
			continue
		case <-r.loads.Stuck():
			err = ErrOverloaded
		case <-urgent:
			urgent = nil
			e.batch.hurry()
			continue
		case a := <-inbox:
			announced = &a
		case <-giveUp:
			err = ErrOverloaded
		case <-r.flight.Context().Done():
			err = context.Cause(r.flight.Context())
		}
		e.leave()
		return nil, announced, err
	}
}

func (r *refill[V]) leaveBatch() {
	if r.batched != nil {
		r.batched.leave()
	}
}
