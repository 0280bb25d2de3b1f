package refill

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/flight"
	"github.com/refill-go/refill/internal/l1"
)

// This file handles many keys at once. Each key still has its own flight, lease, claim and record. So all guarantees
// hold for each key, and a Get of one of the keys joins the flight of that key. The keys share the read of the store
// (manyKeys) and the load (batch.go). If another node has the lease of a key, the refill of the key leaves its batch
// before it waits for that node. Otherwise two nodes that load the same keys could wait for each other.

// NewBulk is New for a load function that takes many keys at once. GetMany and Refresh call the function once for all
// keys that this node has to load, at most 1,024 at a time. With [Config.BulkWindow], single Gets share calls as well.
// The keys of a call are distinct and in no order. A key that is absent from the returned map is not found. Keys of the
// map that were not asked for are dropped, because no claim was taken for them. What the function sets on the Fill of
// [FillFrom] holds for all keys of the call. What the function sets on the Fill of [Fill.For] holds for one key.
//
// An error fails all keys of the call. An error that wraps [ErrNotFound] says that none of these keys exists. If some
// keys have failed and the others have not, the function returns a [*KeyErrors], possibly wrapped, beside its map. Each
// key that the KeyErrors names fails with its own error, even if the map has the key too. The other keys are stored or
// not found, as without an error. A *KeyErrors that is not wrapped and names no key is no error.
func NewBulk[V any](
	name string, load func(ctx context.Context, keys []string) (map[string]V, error), cfg Config,
) (*Loader[V], error) {
	if load == nil {
		return nil, invalid("load", "nil")
	}
	return newLoader(name, nil, load, cfg)
}

// KeyErrors says which keys of a GetMany failed. A bulk load function can return a KeyErrors as well, see [NewBulk].
// errors.Is and errors.As look at the errors of all these keys.
type KeyErrors struct {
	Errs map[string]error // by key as given
}

// Error returns the number of keys that failed, and the error of one of these keys.
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
	if e == nil { // as an error, a nil *KeyErrors is not nil
		return nil
	}
	return slices.Sorted(maps.Keys(e.Errs))
}

// GetMany is Get for many keys. It reads the keys that L1 lacks from the store in few exchanges: at first 64 keys at a
// time, and up to 1,024 once the store has answered quickly. If values of one exchange have tags, a second exchange
// reads the states of these tags. GetMany then loads the keys that are still missing. With a bulk load function (see
// [NewBulk]), one call loads all these keys. Without a bulk load function, each key has its own load, and the loads run
// in parallel. If another caller or another node is loading a key already, GetMany waits for that load.
//
// The map holds the values that were found, under the keys as given. A key that is not found is absent from the map,
// and causes no error. If some keys fail in another way, the error is a [*KeyErrors], and the map holds the values of
// the other keys. A value that the codec cannot encode is in the map, and its key is in the KeyErrors. GetMany handles
// more than 1,024 keys in groups of 1,024, one group after the other. Each group has its own exchanges with the store,
// and its own call of the bulk load function.
func (l *Loader[V]) GetMany(ctx context.Context, keys []string) (map[string]V, error) {
	values := make(map[string]V, len(keys))
	failed := make(map[string]error)
	seen := make(map[string]bool)
	var missing []string
	for _, key := range keys {
		var e *entry[V]
		if l.canLoad() {
			e = l.fresh(key)
		}
		switch {
		case e != nil && e.Data.err() == nil:
			values[key] = e.Data.value
		case e == nil && !seen[key]:
			seen[key] = true
			missing = append(missing, key)
		}
	}
	l.each(ctx, missing, GetOptions[V]{}, func(key string, r Result[V], err error) {
		if errors.Is(err, ErrNotFound) {
			return
		}
		if err != nil {
			failed[key] = err
		}
		if err == nil || r.Node != "" { // a value beside an error is one that the codec cannot encode
			values[key] = r.Value
		}
	})
	if len(failed) == 0 {
		return values, nil
	}
	return values, &KeyErrors{failed}
}

// GetManyWith is GetMany with options for this call. The map says for each key how the value was found. An absence is
// in the map as well, with Result.Absent set. With GetOptions.Load, each key has its own load, even if the Loader has a
// bulk load function.
func (l *Loader[V]) GetManyWith(
	ctx context.Context, keys []string, o GetOptions[V],
) (map[string]Result[V], error) {
	results := make(map[string]Result[V], len(keys))
	failed := make(map[string]error)
	distinct := slices.Compact(slices.Sorted(slices.Values(keys)))
	l.each(ctx, distinct, o, func(key string, r Result[V], err error) {
		if err != nil && !errors.Is(err, ErrNotFound) {
			failed[key] = err
		}
		if r.Node != "" { // otherwise there is neither a value nor an absence
			results[key] = r
		}
	})
	if len(failed) == 0 {
		return results, nil
	}
	return results, &KeyErrors{failed}
}

// atOnce is how many keys GetMany and Refresh handle at once. The number is bounded because this node renews one lease
// per key that it loads.
const atOnce = 1024

// report is called with the result of one of many keys.
type report[V any] func(key string, r Result[V], err error)

// each gets the results of many keys, in groups of atOnce, and calls report for each key.
func (l *Loader[V]) each(ctx context.Context, keys []string, o GetOptions[V], report report[V]) {
	for some := range slices.Chunk(keys, atOnce) {
		for again := false; len(some) > 0; again = true {
			some = l.getAtOnce(ctx, some, o, again, report)
		}
	}
}

// getAtOnce joins or starts a flight for each key, and waits for all these flights. It returns the keys whose flight
// gave no answer. The caller has to ask for these keys again, with again set.
func (l *Loader[V]) getAtOnce(
	ctx context.Context, keys []string, o GetOptions[V], again bool, report report[V],
) (left []string) {
	m := newManyKeys(l, ctx)
	joined := make([]membership[V], 0, len(keys))
	waited := 0
	defer func() { // deferred, because OnEvent may panic
		m.complete()
		for _, j := range joined[waited:] {
			if j.role != flight.None && j.role != flight.Observer {
				j.flight.Leave(j.want)
			}
		}
		if m.admitted {
			l.flights.Depart()
		}
	}()
	for _, key := range keys {
		joined = append(joined, l.joinOne(ctx, m, key, o, report))
	}
	m.complete()
	for i, j := range joined {
		waited = i + 1
		switch j.role {
		case flight.None:
		case flight.Observer:
			if err := l.watch(ctx, j); err != nil {
				report(keys[i], Result[V]{}, err)
			} else {
				left = append(left, keys[i])
			}
		default:
			j.again = again
			if a := l.wait(ctx, j); a != nil {
				r, err := l.result(j.key, *a)
				report(keys[i], r, err)
			} else {
				left = append(left, keys[i])
			}
		}
	}
	return left
}

// joinOne joins or starts the flight of one of many keys. If the key needs no flight, joinOne reports the result of the
// key, and returns role None.
func (l *Loader[V]) joinOne(
	ctx context.Context, m *manyKeys[V], given string, o GetOptions[V], report report[V],
) (none membership[V]) {
	q, err := l.request(ctx, given, o)
	if err != nil {
		report(given, Result[V]{}, err)
		return none
	}
	q.many = m
	if a := l.fromL1(ctx, q, l.cfg.SoftTimeout); a != nil {
		r, err := l.result(q.key, *a)
		report(given, r, err)
		return none
	}
	if !m.admitted {
		if l.flights.Admit(q.urgent) != nil {
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

// manyKeys is what the keys of one group of a GetMany or Refresh share.
type manyKeys[V any] struct {
	l     *Loader[V]
	ctx   context.Context
	batch *batch[V] // the bulk load that the keys share, if there is a bulk load function

	// Only the goroutine of the GetMany writes the next three fields. Others read refills only after closed is closed.
	refills  []*refill[V] // the refills that will use the shared read
	admitted bool         // the GetMany has been counted among MaxWaiters, as one caller
	isClosed bool         // complete was called

	closed  chan struct{}            // closed when no further refill is added
	reading atomic.Bool              // a refill has begun the shared read
	done    chan struct{}            // closed when found and err can be read
	found   map[*refill[V]]*snapshot // what the shared read has found
	err     error                    // of a lot (see read) that failed before its time-out; for all refills not in found
}

func newManyKeys[V any](l *Loader[V], ctx context.Context) *manyKeys[V] {
	return &manyKeys[V]{
		l: l, ctx: ctx, batch: newBatch(l), closed: make(chan struct{}), done: make(chan struct{}),
	}
}

// add is called for each refill before the refill runs. If the refill will read the store, add notes the refill for the
// shared read. If the refill has no load function of its own, add gives the refill a place in the bulk load.
func (m *manyKeys[V]) add(r *refill[V]) {
	if r.want == flight.Answer || r.want == flight.Final {
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

// snapshot returns what the shared read has found for a refill, or the error of the shared read. If both results are
// nil, the refill has to read the store itself. The first refill that calls snapshot does the shared read, and the
// other refills wait for that read.
func (m *manyKeys[V]) snapshot(r *refill[V]) (*snapshot, error) {
	<-m.closed
	if m.reading.CompareAndSwap(false, true) {
		m.read()
		close(m.done)
	}
	<-m.done
	if s := m.found[r]; s != nil {
		return s, nil
	}
	return nil, m.err
}

// read reads the records of all refills, in lots. The keys of one lot are read in one exchange. If a lot times out,
// read reads its keys again in smaller lots, because the values of the lot may be too large for one StoreTimeout. If
// two lots in a row time out, each remaining refill reads the store itself, and the breaker finds out whether the store
// answers at all. If a lot fails sooner, all remaining refills get its error.
func (m *manyKeys[V]) read() {
	m.found = make(map[*refill[V]]*snapshot, len(m.refills))
	timeout, failed := m.l.cfg.StoreTimeout, 0
	for rest := m.refills; len(rest) > 0 && failed < 2 && m.ctx.Err() == nil; {
		size := m.l.lotSize.Load()
		lot := rest[:min(len(rest), int(size))]
		began := time.Now()
		err := m.readLot(lot)
		took := time.Since(began)
		m.l.lotSize.CompareAndSwap(size, nextLot(size, len(lot), took, timeout, err))
		switch {
		case err == nil:
			rest, failed = rest[len(lot):], 0
		case took < timeout/2:
			m.err = err
			return
		default:
			failed++
		}
	}
}

const (
	firstLot = 64 // the size of the first lot of a Loader, in keys
	leastLot = 8  // lotSize never falls below this number of keys
)

// nextLot is the size of the next lot. The size adapts to the size of the values: a lot should take a small part of
// StoreTimeout. keys is how many keys the last lot had, at most size. took and err are the duration and the result of
// its exchange.
func nextLot(size int32, keys int, took, timeout time.Duration, err error) int32 {
	switch {
	case err != nil:
		return max(leastLot, min(size, int32(keys))/4)
	case took > timeout/2:
		return max(leastLot, size/2)
	case took < timeout/16 && keys == int(size):
		return min(atOnce, size*4)
	}
	return size
}

// readLot reads the records of some refills in one exchange with the store. If the records have tags, a second exchange
// reads the tag states.
func (m *manyKeys[V]) readLot(lot []*refill[V]) error {
	l := m.l
	ctx := l.timeouts.Context(context.WithoutCancel(m.ctx))
	keys, epochs := make([]string, len(lot)), make([]l1.Epoch, len(lot))
	for i, r := range lot {
		keys[i], epochs[i] = l.full(r.key), l.l1.Epoch(r.key)
	}
	records, err := l.store.GetMany(ctx, keys...)
	if err != nil {
		return err
	}
	tags := make(map[string]bool)
	for _, record := range records {
		for _, tag := range driver.RecordTags(record) {
			tags[tag] = true
		}
	}
	states, err := l.readTags(slices.Collect(maps.Keys(tags))) // with a StoreTimeout of its own
	if err != nil {
		return err
	}
	for i, r := range lot {
		m.found[r] = &snapshot{record: records[i], epoch: epochs[i], tags: states}
	}
	return nil
}
