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

// This file is about many keys at once. Each key still has its own flight, lease, claim and record. So all guarantees
// hold for each key, and a Get of a single key joins the flight of that key. The keys share the read of the store
// (manyKeys) and the load (batch.go). No refill waits for a lease while a batch waits for that refill. So two nodes
// that load the same keys cannot block each other.

// NewBulk is New for a load function that takes many keys at once. GetMany and Refresh call the function once for all
// keys that this node has to load. With [Config.BulkWindow], single Gets share calls as well. The keys of a call are
// distinct and in no order. A key that is absent from the map is not found. An error fails all keys of the call. An
// error that wraps [ErrNotFound] says that none of these keys exists. What is set on [FillFrom] holds for all keys.
// What is set on [Fill.For] holds for one key.
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

// GetMany is Get for many keys. It reads the keys that L1 lacks in one exchange with the store, and in one more if
// their values have tags. It loads what is then still missing: with one call of a bulk load function (see [NewBulk]),
// or, if the Loader has none, with one load per key, in parallel. If another caller or another node is loading a key
// already, GetMany waits for that load.
//
// The map holds the values that were found, under the keys as given. A key that is not found is absent from the map,
// and is no error. If some keys fail in another way, the error is a [*KeyErrors], and the map holds the values of the
// other keys. GetMany handles more than 1,024 keys in groups of 1,024, one group after the other. Each group has its
// own exchange, and its own call of the bulk load function.
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

// atOnce is how many keys GetMany and Refresh handle at once. The bound is needed because each key that has to be
// loaded has a lease to renew.
const atOnce = 1024

// report gets the result of one of many keys.
type report[V any] func(key string, r Result[V], err error)

// each gets the results of many keys, and reports the result of each key.
func (l *Loader[V]) each(ctx context.Context, keys []string, want flight.Want, report report[V]) {
	for some := range slices.Chunk(keys, atOnce) {
		for len(some) > 0 {
			some = l.getAtOnce(ctx, some, want, report)
		}
	}
}

// getAtOnce joins or starts a flight for each key, and waits for all these flights. It returns the keys whose flight
// ended without an answer.
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
		case flight.Observer: // the key has a flight that was not started for a Refresh, and that may end without a load
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

// joinOne joins or starts the flight of one of many keys. If the key needs no flight, joinOne reports the result of the
// key, and returns role None.
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
	batch *batch[V] // the bulk load that the keys share, if there is a bulk load function

	// Owned by the goroutine of the GetMany until complete.
	refills  []*refill[V] // the refills that need the read
	admitted bool         // the call counts among the callers that wait: once, whatever the number of keys
	isClosed bool

	closed  chan struct{} // closed when no further refill is added
	reading atomic.Bool   // a refill has begun the read
	done    chan struct{} // closed when found and err can be read
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

// complete is called when no further refill will be added.
func (m *manyKeys[V]) complete() {
	if !m.isClosed {
		m.isClosed = true
		m.batch.close()
		close(m.closed)
	}
}

// snapshot returns what the shared read has found for a refill, or nil if the read did not include this refill. The
// first refill that calls snapshot does the read. The other refills wait for that read, within two StoreTimeouts.
func (m *manyKeys[V]) snapshot(r *refill[V]) (*snapshot, error) {
	<-m.closed
	if m.reading.CompareAndSwap(false, true) {
		m.found, m.err = m.read()
		close(m.done)
	}
	<-m.done
	return m.found[r], m.err
}

// read reads the store for all refills: in one exchange, and in one more if values have tags.
func (m *manyKeys[V]) read() (map[*refill[V]]*snapshot, error) {
	if len(m.refills) == 0 { // all of them refresh: an empty read would count as an answer of the store
		return nil, nil
	}
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
