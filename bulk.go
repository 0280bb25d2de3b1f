package refill

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/flight"
	"github.com/refill-go/refill/internal/l1"
)

// This file is about many keys at once. Each key still has its own flight, lease, claim and record, so all guarantees
// hold for each key, and a Get of one of them joins its flight. The keys share the read of the store (manyKeys) and the
// load (batch.go). No refill waits for a lease while it holds up a batch, so two nodes that load the same keys cannot
// block each other.

// NewBulk is New for a load function that takes many keys at once. GetMany and Refresh call it once for all keys that
// this node has to load; with [Config.BulkWindow], single Gets share calls as well. A key that is absent from the map
// is not found. keys are distinct and in no order. An error fails all of them; an error that wraps [ErrNotFound] says
// that none exists. What is set on [FillFrom] holds for all keys, what is set on its [Fill.For] for one.
func NewBulk[V any](
	name string, load func(ctx context.Context, keys []string) (map[string]V, error), cfg Config,
) (*Loader[V], error) {
	if load == nil {
		return nil, invalid("load", "nil")
	}
	return newLoader(name, nil, load, cfg)
}

// KeyErrors says which keys of a GetMany failed. errors.Is and errors.As look at all of the errors.
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

// GetMany is Get for many keys. What L1 does not have is read in one exchange with the store. What has to be loaded is
// loaded by one call of a bulk load function (see [NewBulk]), or by single loads in parallel. For keys that others
// load, GetMany waits.
//
// The map holds the values that were found, under the keys as given. A key that is not found is absent, and is no
// error. If other keys failed, the error is a [*KeyErrors] and the map holds the rest. More than 1,024 keys are handled
// in groups of 1,024, one after the other, with one call of the bulk load function each.
func (l *Loader[V]) GetMany(ctx context.Context, keys []string) (map[string]V, error) {
	values := make(map[string]V, len(keys))
	failed := make(map[string]error)
	seen := make(map[string]bool)
	var missing []string
	for _, key := range keys {
		switch e := l.fresh(key); {
		case e != nil && e.Data.err == nil:
			values[key] = e.Data.value
		case e == nil && !seen[key]:
			seen[key] = true
			missing = append(missing, key)
		}
	}
	l.each(ctx, missing, flight.Answer, func(key string, r Result[V], err error) {
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

// atOnce is how many keys GetMany and Refresh handle at once: each that has to be loaded is a lease to renew.
const atOnce = 1024

// report gets the result of one of many keys.
type report[V any] func(key string, r Result[V], err error)

// each finds out about many keys, and reports each of them.
func (l *Loader[V]) each(ctx context.Context, keys []string, want flight.Want, report report[V]) {
	for some := range slices.Chunk(keys, atOnce) {
		for len(some) > 0 {
			some = l.getAtOnce(ctx, some, want, report)
		}
	}
}

// getAtOnce joins or starts a flight for each key, and waits for all of them. It returns the keys whose flight ended
// without an answer.
func (l *Loader[V]) getAtOnce(
	ctx context.Context, keys []string, want flight.Want, report report[V],
) (again []string) {
	m := newManyKeys(l, ctx)
	joined := make([]membership[V], 0, len(keys))
	waited := 0
	defer func() { // also if OnEvent panics
		m.complete()
		for _, j := range joined[waited:] {
			if j.role == flight.Leader || j.role == flight.Waiter {
				j.flight.Leave()
			}
		}
		if m.admitted {
			l.flights.Depart()
		}
	}()
	for _, key := range keys {
		joined = append(joined, l.joinOne(ctx, m, key, want, report))
	}
	m.complete()
	for i, j := range joined {
		waited = i + 1
		switch j.role {
		case flight.None:
		case flight.Observer: // an ordinary flight is on its way, and may end without a load
			if _, err := j.flight.WaitEnd(ctx); err != nil && !errors.Is(err, flight.ErrNoAnswer) {
				report(keys[i], Result[V]{}, err)
			} else {
				again = append(again, keys[i])
			}
		default:
			if a := l.wait(ctx, j); a != nil {
				r, err := l.result(j.key, *a)
				report(keys[i], r, err)
			} else {
				again = append(again, keys[i])
			}
		}
	}
	return again
}

// joinOne joins or starts the flight of one of many keys. It reports a key that needs none, and returns no role for it.
func (l *Loader[V]) joinOne(
	ctx context.Context, m *manyKeys[V], given string, want flight.Want, report report[V],
) (none membership[V]) {
	q, err := l.request(ctx, given, nil)
	if err != nil {
		report(given, Result[V]{}, err)
		return none
	}
	q.many, q.want = m, want
	if want == flight.Refresh {
		q.mode = driver.Force
	} else if a := l.fromL1(ctx, q, l.cfg.SoftTimeout); a != nil {
		r, err := l.result(q.key, *a)
		report(given, r, err)
		return none
	}
	if !m.admitted {
		if l.flights.Admit(outerFill(ctx) != nil) != nil {
			r, err := l.overloaded(ctx, q)
			report(given, r, err)
			return none
		}
		m.admitted = true
	}
	j, err := l.join(ctx, q)
	if err != nil {
		report(given, Result[V]{}, err)
		return none
	}
	if j.role == flight.Leader {
		l.launch(j.flight, q)
	}
	return j
}

// manyKeys is what the keys of a GetMany or Refresh share.
type manyKeys[V any] struct {
	l     *Loader[V]
	ctx   context.Context
	batch *batch[V] // that they load with, if there is a bulk load function

	// Owned by the goroutine of the GetMany until complete.
	refills  []*refill[V] // those that need the read
	admitted bool         // counted among the callers that wait: once, whatever the number of keys
	isClosed bool

	closed  chan struct{} // closed when no refill is added any more
	reading atomic.Bool   // a refill has begun the read
	done    chan struct{} // closed when the next two can be read
	found   map[*refill[V]]*snapshot
	err     error
}

func newManyKeys[V any](l *Loader[V], ctx context.Context) *manyKeys[V] {
	return &manyKeys[V]{
		l: l, ctx: ctx, batch: newBatch(l), closed: make(chan struct{}), done: make(chan struct{}),
	}
}

// add is called for each refill before it runs.
func (m *manyKeys[V]) add(r *refill[V]) {
	if r.want == flight.Answer {
		m.refills = append(m.refills, r)
	}
	if r.loadKey == nil {
		r.batched = m.batch.enter(r.given)
	}
}

// complete is called when no refill will be added any more.
func (m *manyKeys[V]) complete() {
	if !m.isClosed {
		m.isClosed = true
		m.batch.close()
		close(m.closed)
	}
}

// snapshot is what the shared read has found for a refill; nil if it was not read for. The first refill that asks does
// the read. The others wait for it, within two StoreTimeouts.
func (m *manyKeys[V]) snapshot(r *refill[V]) (*snapshot, error) {
	<-m.closed
	if m.reading.CompareAndSwap(false, true) {
		m.found, m.err = m.read()
		close(m.done)
	}
	<-m.done
	return m.found[r], m.err
}

// read reads the store for all: one exchange, and one more if values have tags.
func (m *manyKeys[V]) read() (map[*refill[V]]*snapshot, error) {
	l := m.l
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.ctx), l.cfg.StoreTimeout)
	defer cancel()
	keys, epochs := make([]string, len(m.refills)), make([]l1.Epoch, len(m.refills))
	for i, r := range m.refills {
		keys[i], epochs[i] = l.full(r.key), l.l1.Epoch(r.key)
	}
	records, err := l.store.GetMany(ctx, keys...)
	if err != nil {
		return nil, err
	}
	tags := make(map[string]bool)
	for _, record := range records {
		for _, tag := range driver.RecordTags(record) {
			tags[tag] = true
		}
	}
	states, err := l.tagStates(ctx, l.store, slices.Collect(maps.Keys(tags)))
	if err != nil {
		return nil, err
	}
	found := make(map[*refill[V]]*snapshot, len(m.refills))
	for i, r := range m.refills {
		found[r] = &snapshot{record: records[i], epoch: epochs[i], tags: states}
	}
	return found, nil
}
