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

// batch is that call, while it is being filled and while it runs. A refill enters it before it asks for its lease; then
// it either leaves, or asks for its key. The batch runs when no refill can enter any more and each has done one of the
// two. So it loads exactly the keys whose leases were acquired.
type batch[V any] struct {
	l *Loader[V]

	acquire sync.Once     // takes a load slot, for all entries
	ready   chan struct{} // closed when that is done
	unused  chan struct{} // closed when all entries have left: no slot is needed
	urgent  chan struct{} // closed when an entry must not queue, see flight.Flight.Urgent

	mu       sync.Mutex // guards all below, and left of each entry
	open     bool       // refills can enter
	keys     map[string]bool
	pending  int // entries that have neither left nor asked
	asked    []*batchEntry[V]
	running  bool
	awaited  int // while it runs: asked entries whose flight still waits
	cancel   context.CancelFunc
	isUrgent bool
	slotHeld bool
}

// batchEntry is the place of one refill in a batch.
type batchEntry[V any] struct {
	batch *batch[V]
	key   string // as given
	left  bool   // left, or asked; guarded by batch.mu

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

// enter returns an entry for a key. It returns nil if the batch is closed or has the key already: one of the two
// refills would get the tags and times of the other.
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

// close lets no refill enter any more.
func (b *batch[V]) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open = false
	b.check()
}

// leave gives the entry up, unless its refill has asked for its key.
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

// check runs the batch, or ends it, when there is nothing left to wait for. The caller holds b.mu.
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

// acquireSlot takes a load slot for the batch, when the first of its entries needs it.
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
			if b.running && len(b.asked) == 0 { // all have left meanwhile
				b.freeSlot()
			}
		}()
	})
}

// hurry lets the batch go on without a load slot: a load that has one waits for it.
func (b *batch[V]) hurry() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.isUrgent {
		b.isUrgent = true
		close(b.urgent)
	}
}

// load asks for the key, and returns when the batch has run. ctx is that of the refill's load.
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

// giveUp is called when no caller waits for the key any more. The last one ends the call.
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

// run calls the load function for all entries, and hands out what it returns. It has a goroutine of its own.
func (b *batch[V]) run(entries []*batchEntry[V]) {
	first := entries[0]
	fill := &Fill{loader: b.l, outer: first.fill.outer, parts: make(map[string]*Fill, len(entries))}
	keys := make([]string, len(entries))
	for i, e := range entries {
		keys[i] = e.key
		fill.parts[e.key] = e.fill
	}
	// The call ends with the last flight that waits for it.
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

// handOut ends the batch. v is how the call ended.
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

// regroupDelay is how long keys that missed the batch of their GetMany wait to form a new one. They usually miss it
// together, when a node dies or the store goes away.
const regroupDelay = 5 * time.Millisecond

// batcher holds the batch that single refills of a bulk Loader enter.
type batcher[V any] struct {
	mu   sync.Mutex
	open *batch[V]
}

// enter returns an entry in the open batch, or in a new one that stays open for window.
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

// batchSlot is loadSlot for a refill of a bulk Loader: an entry in a batch that has a load slot.
func (r *refill[V]) batchSlot(
	inbox <-chan driver.Announcement, giveUp <-chan time.Time,
) (free func(), news *driver.Announcement, err error) {
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
			news = &a
		case <-giveUp:
			err = ErrOverloaded
		case <-r.flight.Context().Done():
			err = context.Cause(r.flight.Context())
		}
		e.leave()
		return nil, news, err
	}
}

func (r *refill[V]) leaveBatch() {
	if r.batched != nil {
		r.batched.leave()
	}
}
