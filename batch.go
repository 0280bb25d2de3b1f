package refill

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file is one call of a bulk load function.

// batch is one call of a bulk load function, while refills enter and while the call runs. A refill enters the batch
// before it asks for its lease. Then the refill either leaves the batch, or asks the batch for its key. The batch runs
// when no further refill can enter, and each refill has done one of the two. So the batch loads exactly the keys whose
// leases were acquired.
type batch[V any] struct {
	l *Loader[V]

	acquire sync.Once     // takes a load slot, for all entries
	ready   chan struct{} // closed when the load slot is held, or not needed
	unused  chan struct{} // closed when all entries have left: the batch needs no slot
	urgent  chan struct{} // closed when an entry must not queue, see flight.Flight.Urgent

	mu       sync.Mutex // guards all fields below, and left of each entry
	open     bool       // refills can enter
	keys     map[string]bool
	pending  int // entries that have neither left nor asked
	asked    []*batchEntry[V]
	running  bool
	awaited  int // while the batch runs: asked entries whose flight still waits
	cancel   context.CancelFunc
	isUrgent bool
	slotHeld bool
}

// batchEntry is the place of one refill in a batch.
type batchEntry[V any] struct {
	batch *batch[V]
	key   string // as given
	left  bool   // the entry has left, or asked; guarded by batch.mu

	ctx    context.Context // of the refill's load; written before the entry is in batch.asked, as is fill
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

// enter returns an entry for a key. It returns nil if the batch is closed, or if the batch has the key already. Two
// refills with one key would share one Fill, so one refill would get the tags and times of the other refill.
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

// close ends the time in which refills can enter.
func (b *batch[V]) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open = false
	b.check()
}

// leave gives the entry up, unless the refill of the entry has already asked for its key.
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

// check runs the batch when no refill can enter and every entry has asked or left. If all entries have left, check ends
// the batch instead. The caller holds b.mu.
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
	if b.slotHeld {
		b.slotHeld = false
		<-b.l.loadSlots
	}
}

// acquireSlot takes a load slot for the batch, when the first entry of the batch needs the slot.
func (b *batch[V]) acquireSlot() {
	b.acquire.Do(func() {
		if b.l.loadSlots == nil {
			close(b.ready)
			return
		}
		go func() {
			defer close(b.ready)
			select {
			case b.l.loadSlots <- struct{}{}:
			case <-b.urgent:
				return
			case <-b.unused:
				return
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			b.slotHeld = true
			if b.running && len(b.asked) == 0 { // all entries have left before the slot was free
				b.freeSlot()
			}
		}()
	})
}

// hurry lets the batch go on without a load slot. It is called when a load that holds a slot waits for this batch.
func (b *batch[V]) hurry() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.isUrgent {
		b.isUrgent = true
		close(b.urgent)
	}
}

// load asks for the key of the entry, and returns when the batch has run. ctx is the ctx of the refill's load.
func (e *batchEntry[V]) load(ctx context.Context) loaded[V] {
	b := e.batch
	e.ctx, e.fill = ctx, outerFill(ctx)
	b.mu.Lock()
	if e.left { // the refill ended before this goroutine began
		b.mu.Unlock()
		return loaded[V]{err: context.Cause(ctx)}
	}
	e.left = true
	b.pending--
	b.asked = append(b.asked, e)
	b.check()
	b.mu.Unlock()
	stop := context.AfterFunc(ctx, e.giveUp)
	defer stop()
	<-e.done
	return e.result
}

// giveUp is called when no caller waits for the key any longer. When the last entry gives up, the running call is
// cancelled.
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
	keys := make([]string, len(entries))
	for i, e := range entries {
		keys[i] = e.key
		fill.parts[e.key] = e.fill
	}
	// The call is cancelled when the last flight that waits for it has gone.
	ctx := context.WithValue(context.WithoutCancel(first.ctx), fillKey{}, fill)
	ctx, cancel := context.WithTimeoutCause(ctx, b.l.cfg.LoadTimeout, errLoadTimeout)
	defer cancel()
	b.mu.Lock()
	b.cancel = cancel
	if b.awaited == 0 {
		cancel()
	}
	b.mu.Unlock()
	var values map[string]V
	protect(func() loaded[V] {
		got, err := b.l.bulk(ctx, keys)
		values = got
		return loaded[V]{err: err}
	}, func(v loaded[V]) { b.handOut(entries, values, v) })
}

// handOut ends the batch. v says how the call ended.
func (b *batch[V]) handOut(entries []*batchEntry[V], values map[string]V, v loaded[V]) {
	for _, e := range entries {
		value, there := values[e.key]
		switch {
		case v.err != nil:
			e.result = v
		case there:
			e.result = loaded[V]{value: value}
		default:
			e.result = loaded[V]{err: fmt.Errorf("%w: %q", ErrNotFound, e.key)}
		}
		close(e.done)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.freeSlot()
}

// regroupDelay is how long keys that missed the batch of their GetMany wait to form a new batch. Such keys usually miss
// the batch together, when a node dies or the store goes away.
const regroupDelay = 5 * time.Millisecond

// batcher holds the batch that single refills of a bulk Loader enter.
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

// batchSlot is loadSlot for a refill of a bulk Loader. The slot is an entry in a batch that has a load slot.
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
	e.batch.acquireSlot()
	urgent := r.flight.Urgent()
	for {
		select {
		case <-e.batch.ready:
			return e.leave, nil, nil
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
