package refill

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// This file is about many keys at once. Each key still has its own flight, lease, claim and record, so all promises hold
// per key, and a Get of one of them joins in; what is shared is the read of the store (group) and the load (batch).
// Leases are tried and never waited for while a batch is held up, so two nodes with the same keys cannot block each other.

// NewBulk is New for a load function that takes many keys at once: GetMany and Refresh call it once for all keys that this
// node has to load; with [Config.BulkWindow], single Gets share calls, too. A key that is absent from the map is not found.
// keys are distinct and in no order. An error fails all of them; one that wraps [ErrNotFound] says that none is there.
// What is said to [FillFrom] holds for all keys, what is said to its [Fill.For] for one.
func NewBulk[V any](
	name string, load func(ctx context.Context, keys []string) (map[string]V, error), cfg Config,
) (*Loader[V], error) {
	if load == nil {
		return nil, invalid("load", "nil")
	}
	return newLoader(name, nil, load, cfg)
}

// KeyErrors says which keys of a GetMany have no value because of an error. errors.Is and errors.As look at all of them.
type KeyErrors struct {
	Errs map[string]error // by key as given
}

// Error counts the keys and shows one.
func (e *KeyErrors) Error() string {
	keys := e.keys()
	if len(keys) == 0 {
		return "refill: no key failed"
	}
	return fmt.Sprintf("refill: %d keys failed, %q: %v", len(keys), keys[0], e.Errs[keys[0]])
}

// Unwrap returns the errors in the order of their keys.
func (e *KeyErrors) Unwrap() []error {
	var errs []error
	for _, key := range e.keys() {
		errs = append(errs, e.Errs[key])
	}
	return errs
}

func (e *KeyErrors) keys() []string {
	return slices.Sorted(maps.Keys(e.Errs))
}

// GetMany is Get for many keys: what L1 does not have is read in one exchange with the store, and what has to be loaded is
// loaded by one call of a bulk load function (see [NewBulk]), or by single loads side by side. Keys that others load are
// waited for.
//
// The map holds the values that there are, under the keys as given. A key that is not found is absent and no error. If
// other keys failed, the error is a [*KeyErrors] and the map holds the rest. More than 1,024 keys are handled one lot after
// the other, with a call of the bulk load function each.
func (l *Loader[V]) GetMany(ctx context.Context, keys []string) (map[string]V, error) {
	values := make(map[string]V, len(keys))
	failed := make(map[string]error)
	seen := make(map[string]bool)
	var todo []string
	for _, key := range keys {
		switch e := l.hit(key); {
		case e != nil && e.err == nil:
			values[key] = e.value
		case e == nil && !seen[key]:
			seen[key] = true
			todo = append(todo, key)
		}
	}
	l.each(ctx, todo, false, func(key string, r Result[V], err error) {
		switch {
		case err == nil:
			values[key] = r.Value
		case !errors.Is(err, ErrNotFound):
			failed[key] = err
		}
	})
	if len(failed) == 0 {
		return values, nil
	}
	return values, &KeyErrors{failed}
}

// atOnce is how many keys GetMany and Refresh have in hand: each that has to be loaded is a lease to renew.
const atOnce = 1024

// each finds out about many keys and tells. forced loads them, whatever is there.
func (l *Loader[V]) each(ctx context.Context, keys []string, forced bool, tell func(string, Result[V], error)) {
	for some := range slices.Chunk(keys, atOnce) {
		for len(some) > 0 {
			some = l.round(ctx, some, forced, tell)
		}
	}
}

// round flies for keys, and returns those whose flight ended without an answer.
func (l *Loader[V]) round(
	ctx context.Context, keys []string, forced bool, tell func(string, Result[V], error),
) (again []string) {
	g := newGroup(l, ctx)
	flown := make([]place[V], 0, len(keys))
	waited := 0
	defer func() { // also when OnEvent panics
		g.complete()
		for _, p := range flown[waited:] {
			if p.taken {
				l.flights.leave(p)
			}
		}
		if g.admitted {
			l.flights.depart()
		}
	}()
	for _, key := range keys {
		flown = append(flown, l.board(ctx, g, key, forced, tell))
	}
	g.complete()
	for i, p := range flown {
		waited = i + 1
		switch {
		case p.call == nil:
		case !p.taken: // an ordinary flight is on its way, and may end without a load
			select {
			case <-p.call.done:
				again = append(again, keys[i])
			case <-ctx.Done():
				tell(keys[i], Result[V]{}, ctx.Err())
			}
		default:
			if a, ok := l.wait(ctx, p); ok {
				r, err := l.answered(p.call.key, a)
				tell(keys[i], r, err)
			} else {
				again = append(again, keys[i])
			}
		}
	}
	return again
}

// board finds a flight for one of many keys. It tells what needs none, and returns no place then.
func (l *Loader[V]) board(
	ctx context.Context, g *group[V], given string, forced bool, tell func(string, Result[V], error),
) (p place[V]) {
	key, load, err := l.mayLoad(ctx, given, nil)
	if err != nil {
		tell(given, Result[V]{}, err)
		return p
	}
	t := ticket[V]{key: key, given: given, load: load, ask: AskLeft, group: g}
	if forced {
		t.ask, t.forced = AskForce, true
	} else if r, err, ok := l.remembered(ctx, t, true); ok {
		tell(given, r, err)
		return p
	}
	if !g.admitted {
		if err := l.flights.admit(ctx); err != nil {
			r, err := l.refused(ctx, t, err)
			tell(given, r, err)
			return p
		}
		g.admitted = true
	}
	if p, err = l.flights.join(ctx, t); err != nil {
		tell(given, Result[V]{}, err)
	}
	if p.led {
		l.flights.launch(p.call)
	}
	return p
}

// group is the flights that one GetMany has started.
type group[V any] struct {
	l     *Loader[V]
	ctx   context.Context
	calls []*call[V] // those that have to look at the store; until complete, the goroutine of the GetMany owns it
	batch *batch[V]  // that they load with, if there is a bulk load function

	completed bool // by the goroutine of the GetMany, as the next one
	admitted  bool // it is counted among those who wait: once, whatever the number of its keys

	read  chan struct{}         // closed when the next two may be read
	found map[*call[V]]sighting // by those who look for the first time
	err   error
}

// sighting is what a look at the store has shown.
type sighting struct {
	record []byte
	at     epoch // noted before
	marks  marks // of its tags, if they have been read, too
}

func newGroup[V any](l *Loader[V], ctx context.Context) *group[V] {
	return &group[V]{l: l, ctx: ctx, read: make(chan struct{}), batch: newBatch(l)}
}

// add is called for each flight of the group before it starts.
func (g *group[V]) add(c *call[V]) {
	c.group = g
	if !c.behind && !c.forced {
		g.calls = append(g.calls, c)
	}
	if c.load == nil {
		c.seat = g.batch.enter(c)
	}
}

// complete is called when no flight will be added any more.
func (g *group[V]) complete() {
	if g.completed {
		return
	}
	g.completed = true
	g.batch.close()
	if len(g.calls) == 0 || !g.l.flights.read(g.look) {
		close(g.read)
	}
}

// look reads the store for all: one exchange, and one more where values have tags.
func (g *group[V]) look() {
	defer close(g.read)
	l := g.l
	ctx, cancel := context.WithTimeout(context.WithoutCancel(g.ctx), l.cfg.StoreTimeout)
	defer cancel()
	keys, at := make([]string, len(g.calls)), make([]epoch, len(g.calls))
	for i, c := range g.calls {
		keys[i], at[i] = l.full(c.key), l.local.note(c.key)
	}
	records, err := l.store.GetMany(ctx, keys...)
	if err != nil {
		g.err = err
		return
	}
	tags := make(map[string]bool)
	for _, record := range records {
		for _, tag := range recordTags(record) {
			tags[tag] = true
		}
	}
	marks, err := l.marksOf(ctx, l.store, slices.Collect(maps.Keys(tags)))
	if err != nil {
		g.err = err
		return
	}
	g.found = make(map[*call[V]]sighting, len(g.calls))
	for i, c := range g.calls {
		g.found[c] = sighting{record: records[i], at: at[i], marks: marks}
	}
}

// sight is what the group has read for a call, once. It reports false for a call that was not to be read for.
func (g *group[V]) sight(c *call[V]) (s sighting, err error, ok bool) {
	<-g.read // within a StoreTimeout
	s, ok = g.found[c]
	return s, g.err, ok || g.err != nil
}

// A batch is one call of the bulk load function, while it is being gathered and while it runs. A flight enters it before
// it tries its lease, and then either leaves or asks for its key. When nobody may enter any more and everybody in it has
// done one of the two, it runs. So exactly the keys are loaded whose leases were won.
type batch[V any] struct {
	l *Loader[V]

	start sync.Once     // acquires one of the MaxLoads, for all
	ready chan struct{} // closed when that is done
	empty chan struct{} // closed when all have left: there is nothing to acquire it for
	hurry chan struct{} // closed when one of them must not queue, see call.hurry

	mu      sync.Mutex
	open    bool // more may enter
	keys    map[string]bool
	inside  int // flights that have neither left nor asked
	asked   []*seat[V]
	running bool
	wanted  int // of asked, while it runs: those whose flight still waits
	cancel  context.CancelFunc
	hurried bool
	slot    bool // it has one of the MaxLoads
}

// seat is one flight's place in a batch.
type seat[V any] struct {
	b     *batch[V]
	key   string // as given
	left  bool   // guarded by b.mu: left, or asked
	ctx   context.Context
	fill  *Fill
	done  chan struct{} // closed when value may be read
	value loaded[V]
}

func newBatch[V any](l *Loader[V]) *batch[V] {
	return &batch[V]{
		l: l, open: true, keys: make(map[string]bool),
		ready: make(chan struct{}), empty: make(chan struct{}), hurry: make(chan struct{}),
	}
}

// enter gives a flight a seat, or nil when the batch is closed or has another flight of the key already: one of them would
// get the other one's tags and terms.
func (b *batch[V]) enter(c *call[V]) *seat[V] {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.open || b.keys[c.given] {
		return nil
	}
	b.keys[c.given] = true
	b.inside++
	return &seat[V]{b: b, key: c.given, done: make(chan struct{})}
}

// close lets nobody enter any more.
func (b *batch[V]) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open = false
	b.check()
}

// leave gives the seat up, if the flight has not asked for its key.
func (s *seat[V]) leave() {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if !s.left {
		s.left = true
		s.b.inside--
		s.b.check()
	}
}

func (s *seat[V]) gone() bool {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return s.left
}

// check runs the batch, or ends it, when nothing is to be waited for any more. The caller holds b.mu.
func (b *batch[V]) check() {
	switch {
	case b.open || b.inside > 0 || b.running:
	case len(b.asked) > 0:
		b.running, b.wanted = true, len(b.asked)
		go b.run(b.asked)
	default:
		b.running = true
		close(b.empty)
		b.free()
	}
}

// free gives the place among MaxLoads back. The caller holds b.mu.
func (b *batch[V]) free() {
	if b.slot {
		b.slot = false
		<-b.l.slots
	}
}

// acquire takes one of the MaxLoads for the batch, when the first of its flights needs it.
func (b *batch[V]) acquire() {
	b.start.Do(func() {
		if b.l.slots == nil {
			close(b.ready)
			return
		}
		go func() {
			defer close(b.ready)
			select {
			case b.l.slots <- struct{}{}:
			case <-b.hurry:
				return
			case <-b.empty:
				return
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			b.slot = true
			if b.running && len(b.asked) == 0 { // all have left meanwhile
				b.free()
			}
		}()
	})
}

// hasten makes the batch go on without one of the MaxLoads: a load that has one waits for it.
func (b *batch[V]) hasten() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.hurried {
		b.hurried = true
		close(b.hurry)
	}
}

// load asks for the key and returns when the batch has run. ctx is that of the flight's load.
func (s *seat[V]) load(ctx context.Context) loaded[V] {
	b := s.b
	s.ctx, s.fill = ctx, outerFill(ctx)
	b.mu.Lock()
	if s.left { // the flight has ended before this goroutine began
		b.mu.Unlock()
		return loaded[V]{err: context.Cause(ctx)}
	}
	s.left = true
	b.inside--
	b.asked = append(b.asked, s)
	b.check()
	b.mu.Unlock()
	stop := context.AfterFunc(ctx, s.giveUp)
	defer stop()
	<-s.done
	return s.value
}

// giveUp is called when nobody waits for the seat's key any more. The last one ends the call.
func (s *seat[V]) giveUp() {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running {
		if b.wanted--; b.wanted == 0 && b.cancel != nil {
			b.cancel()
		}
		return
	}
	if i := slices.Index(b.asked, s); i >= 0 {
		b.asked = slices.Delete(b.asked, i, i+1)
		s.value.err = context.Cause(s.ctx)
		close(s.done)
		b.check()
	}
}

// run calls the load function for all seats and hands out what it returns. It has a goroutine of its own.
func (b *batch[V]) run(seats []*seat[V]) {
	first := seats[0]
	fill := &Fill{loader: b.l, outer: first.fill.outer, parts: make(map[string]*Fill, len(seats))}
	keys := make([]string, len(seats))
	for i, s := range seats {
		keys[i] = s.key
		fill.parts[s.key] = s.fill
	}
	// It ends with the last flight that waits for it.
	ctx := context.WithValue(context.WithoutCancel(first.ctx), fillKey{}, fill)
	ctx, cancel := context.WithTimeoutCause(ctx, b.l.cfg.LoadTimeout, errLoadTimeout)
	defer cancel()
	b.mu.Lock()
	b.cancel = cancel
	if b.wanted == 0 {
		cancel()
	}
	b.mu.Unlock()
	var values map[string]V
	caught(func() loaded[V] {
		got, err := b.l.bulk(ctx, keys)
		values = got
		return loaded[V]{err: err}
	}, func(r loaded[V]) { b.handOut(seats, values, r) })
}

// handOut ends the batch: r is what became of the call.
func (b *batch[V]) handOut(seats []*seat[V], values map[string]V, r loaded[V]) {
	for _, s := range seats {
		value, there := values[s.key]
		switch {
		case r.err != nil:
			s.value = r
		case there:
			s.value = loaded[V]{value: value}
		default:
			s.value = loaded[V]{err: fmt.Errorf("%w: %q", ErrNotFound, s.key)}
		}
		close(s.done)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.free()
}

// regroup is how long flights of a group wait for each other that could not load with it: what kept them away, a node that
// died or a store that is gone, kept most of them.
const regroup = 5 * time.Millisecond

// gather is the batch that single flights of a bulk Loader enter.
type gather[V any] struct {
	mu   sync.Mutex
	open *batch[V]
}

// enter gives a flight a seat in the open batch, or in a new one that stays open for a while.
func (g *gather[V]) enter(l *Loader[V], c *call[V]) *seat[V] {
	window := l.cfg.BulkWindow
	if c.group != nil {
		window = max(window, regroup)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open != nil {
		if s := g.open.enter(c); s != nil {
			return s
		}
	}
	b := newBatch(l)
	s := b.enter(c)
	if window == 0 {
		b.close()
		return s
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
	return s
}

// bulkSlot is slot for a flight of a bulk Loader: a place in a batch, which has one of the MaxLoads.
func (l *Loader[V]) bulkSlot(c *call[V], notes <-chan Note, impatient <-chan time.Time) (free func(), note *Note, err error) {
	if c.seat == nil || c.seat.gone() {
		c.seat = l.gather.enter(l, c)
	}
	s := c.seat
	s.b.acquire()
	hurry := c.hurry
	for {
		select {
		case <-s.b.ready:
			return s.leave, nil, nil
		case <-hurry:
			hurry = nil
			s.b.hasten()
			continue
		case n := <-notes:
			note = &n
		case <-impatient:
			err = ErrOverloaded
		case <-c.ctx.Done():
			err = context.Cause(c.ctx)
		}
		s.leave()
		return nil, note, err
	}
}
