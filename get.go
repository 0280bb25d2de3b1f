package refill

import (
	"context"
	"errors"
	"time"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/flight"
)

// This file is what the caller of a Get does: steps 0 and 1 of doc.go. What a flight does is in refill.go.

// Get returns the value of key. A value that is fresh in memory is returned from there. If Config.StaleFor allows it,
// Get returns a stale value while the value is refreshed. Otherwise the value comes from the store, from a load on
// another node, or from a load here. A key is any string but the empty one. In the store, in events and in errors, a
// key stands as "#" and its SHA-256 if it is longer than 512 bytes, has control characters, or begins with '#'. The
// load function gets the key as given.
//
// Get returns the error of ctx if ctx ends first. While the store is being read, Get obeys a deadline at once, and a
// cancellation within Config.StoreTimeout. For an absence Get returns an error that wraps [ErrNotFound]. For a failed
// load Get returns a [*LoadError], unless a stale value may be served. Get also returns [ErrOverloaded], [ErrClosed]
// and [ErrInvalid], as the docs of these errors say. If the codec cannot encode a loaded value, Get returns the value
// together with an error that wraps ErrInvalid.
func (l *Loader[V]) Get(ctx context.Context, key string) (V, error) {
	if e := l.fresh(key); e != nil {
		return e.Data.value, e.Data.err
	}
	r, err := l.get(ctx, key, nil)
	return r.Value, err
}

// fresh is step 0 for a key that L1 can answer by itself.
func (l *Loader[V]) fresh(key string) *entry[V] {
	if !isPlain(key) {
		return nil
	}
	e := l.l1.Fresh(key)
	if e != nil && l.cfg.OnEvent != nil {
		l.emit(Event{Kind: EventGet, Outcome: OutcomeHit, Key: key, Err: e.Data.err})
	}
	return e
}

// GetWith is Get with a load function for this call. The function may run after GetWith has returned, for a refresh. It
// may also run for other callers, which get its result. This caller may get the result of another caller's function. So
// the function must depend on nothing but ctx and key, and the variables that it captures must never change: no
// request, no transaction.
func (l *Loader[V]) GetWith(
	ctx context.Context, key string, load func(ctx context.Context, key string) (V, error),
) (V, error) {
	if load == nil {
		var none V
		return none, invalid("load", "nil")
	}
	if e := l.fresh(key); e != nil {
		return e.Data.value, e.Data.err
	}
	r, err := l.get(ctx, key, load)
	return r.Value, err
}

// Result is a value, and how it was found.
type Result[V any] struct {
	Value   V
	Outcome Outcome
	// Age is the time since the load of the value began. Remaining is how much longer the value is fresh. Neither is
	// negative.
	Age, Remaining time.Duration
	// Node is the node that loaded the value.
	Node string
	// Validator and Tags are what the load of the value set.
	Validator string
	Tags      []string
}

// GetResult is Get, and also says how the value was found. With an error, the Result holds what is known nevertheless.
func (l *Loader[V]) GetResult(ctx context.Context, key string) (Result[V], error) {
	return l.get(ctx, key, nil)
}

// request is what a caller asks for: one key, and how to get its value.
type request[V any] struct {
	key     string // as storeKey has it
	given   string
	loadKey loadFunc[V] // nil: the bulk load function
	want    flight.Want
	mode    driver.Mode  // of Acquire
	many    *manyKeys[V] // the GetMany or Refresh that the request belongs to, or nil
}

// answer is the reply of a flight, or of L1, to a request.
type answer[V any] struct {
	entry   *entry[V] // nil with most errors
	outcome Outcome
	err     error
	waited  time.Duration // by this caller, for the event
}

// get is Get for a key that fresh could not answer: steps 0 and 1.
func (l *Loader[V]) get(ctx context.Context, given string, load loadFunc[V]) (Result[V], error) {
	q, err := l.request(ctx, given, load)
	if err != nil {
		return Result[V]{}, err
	}
	if a := l.fromL1(ctx, q, l.cfg.SoftTimeout); a != nil {
		return l.result(q.key, *a)
	}
	if l.flights.Admit(outerFill(ctx) != nil) != nil {
		return l.overloaded(ctx, q)
	}
	defer l.flights.Depart()
	for {
		m, err := l.join(ctx, q)
		if err != nil {
			return Result[V]{}, err
		}
		if m.role == flight.Leader {
			l.start(ctx, m.flight, q)
		}
		if a := l.wait(ctx, m); a != nil {
			return l.result(q.key, *a)
		}
		if a := l.fromL1(ctx, q, l.cfg.SoftTimeout); a != nil {
			return l.result(q.key, *a)
		}
	}
}

// request makes a request, and checks all that does not depend on the state of the key. A nil load stands for the
// Loader's own function.
func (l *Loader[V]) request(ctx context.Context, given string, load loadFunc[V]) (request[V], error) {
	if load == nil {
		load = l.load
	}
	key, err := l.storeKey(given)
	q := request[V]{key: key, given: given, loadKey: load, mode: driver.Wait}
	switch {
	case err != nil:
		return q, err
	case load == nil && l.bulk == nil:
		return q, invalid("load", "nil; a Loader made without a load function has GetWith only")
	case outerFill(ctx).loads(l, key):
		return q, invalid("key", "%q is being loaded by the same load that asks for it", key)
	}
	return q, ctx.Err()
}

// fromL1 answers from L1, if L1 can answer at once. If the entry is due for a refresh, fromL1 starts that refresh. If
// L1 cannot answer, fromL1 returns nil. With a patience above 0, the caller of a stale entry waits for the refill
// instead (Config.SoftTimeout).
func (l *Loader[V]) fromL1(ctx context.Context, q request[V], patience time.Duration) *answer[V] {
	e := l.l1.Get(q.key)
	if e == nil || e.Data.noStore || !l.l1.Valid(e) {
		return nil
	}
	a, now := answer[V]{entry: e, outcome: OutcomeHit, err: e.Data.err}, l.now()
	switch inL1(e, now) {
	case fresh:
	case refreshDue:
		l.refreshInBackground(ctx, e, q, now)
	case stale:
		a.outcome = OutcomeStale
		l.refreshInBackground(ctx, e, q, now)
		if patience > 0 && l.flights.Has(q.key) {
			return nil // the flight knows the entry, and delivers it after SoftTimeout
		}
	default:
		return nil
	}
	return &a
}

// refreshInBackground starts a refresh of an entry that is due, unless a refresh was started within the last LockTTL.
// After LockTTL, a node that died during its refresh has been replaced, or this node knows what the last try found.
func (l *Loader[V]) refreshInBackground(ctx context.Context, e *entry[V], q request[V], now int64) {
	serveUntil, refreshAt := e.ServeUntil.Load(), e.RefreshAt.Load()
	if next := now + l.cfg.LockTTL.Microseconds(); now >= refreshAt && e.RefreshAt.CompareAndSwap(refreshAt, next) {
		q.want = flight.Background
		if refreshAt == 0 && l.cfg.SoftTimeout == 0 {
			q.mode = driver.Try // no caller waits; a second try finds out whether the other node's lease has an end
		}
		// The only error of join is ErrClosed. A closed Loader has no caller to refresh for.
		if m, _ := l.join(ctx, q); m.role == flight.Leader {
			l.launch(m.flight, q)
		}
		refreshAt = next
	}
	if serveUntil != 0 { // an entry that is still fresh is a hit until the next try
		e.ServeUntil.CompareAndSwap(serveUntil, min(e.TrustUntil, refreshAt))
	}
}

// overloaded answers a caller that may not wait. The answer is a stale value, if the caller would only have waited for
// a newer value. Otherwise the answer is ErrOverloaded.
func (l *Loader[V]) overloaded(ctx context.Context, q request[V]) (Result[V], error) {
	if q.want != flight.Refresh {
		if a := l.fromL1(ctx, q, 0); a != nil {
			return l.result(q.key, *a)
		}
	}
	return Result[V]{}, ErrOverloaded
}

// flightOf is a flight of a Loader: it has the Loader's answers, and the announcements about its key.
type flightOf[V any] = flight.Flight[answer[V], driver.Announcement]

// membership is a caller's part in a flight.
type membership[V any] struct {
	key      string
	flight   *flightOf[V]
	role     flight.Role
	tagEpoch uint64 // how many invalidations of tags this process knew when the caller joined
}

func (l *Loader[V]) join(ctx context.Context, q request[V]) (m membership[V], err error) {
	m.key, m.tagEpoch = q.key, l.l1.TagEpoch()
	if m.flight, m.role, err = l.flights.Join(ctx, q.key, q.want, outerFill(ctx) != nil); err != nil {
		return m, ErrClosed
	}
	return m, nil
}

// wait returns the answer of a flight, and leaves the flight. It returns nil if the flight ended without an answer, or
// with an answer that no longer holds. After a nil the caller begins again.
func (l *Loader[V]) wait(ctx context.Context, m membership[V]) *answer[V] {
	defer m.flight.Leave()
	began := l.startTimer()
	a, err := m.flight.Wait(ctx)
	if err == nil && a.stored() { // delivered before the refresh, perhaps long ago
		switch f := a.entry.Data.life.at(l.now()); {
		case f == stale:
			a.outcome = OutcomeStale
		case f > stale:
			a, err = m.flight.WaitEnd(ctx)
		}
	}
	switch {
	case errors.Is(err, flight.ErrNoAnswer):
		return nil
	case err != nil:
		return &answer[V]{err: err}
	}
	if e := a.entry; e != nil && m.tagEpoch > e.Epoch.Tags && l.l1.TagInvalidated(e) {
		m.flight.Forget() // a tag of the answer was invalidated after its load began, and maybe before this caller joined
		return nil
	}
	if m.role == flight.Waiter && (a.outcome == OutcomeLoaded || a.outcome == OutcomeShared ||
		a.outcome == OutcomeLoadedElsewhere) {
		a.outcome = OutcomeCoalesced
	}
	a.waited = l.took(began)
	return &a
}

// stored reports whether a flight found its answer in L1 or in the store, and may have gone on as a refresh.
func (a *answer[V]) stored() bool {
	return a.outcome == OutcomeHit || a.outcome == OutcomeShared || a.outcome == OutcomeStale
}

// result makes the Result of an answer and emits the event of the Get.
func (l *Loader[V]) result(key string, a answer[V]) (Result[V], error) {
	if a.err != nil && a.entry == nil {
		a.outcome = OutcomeFailed
	}
	if l.cfg.OnEvent != nil {
		l.emit(Event{Kind: EventGet, Outcome: a.outcome, Key: key, Took: a.waited, Err: a.err})
	}
	if a.entry == nil {
		return Result[V]{Outcome: a.outcome}, a.err
	}
	return resultOf(a.entry, a.outcome, l.now()), a.err
}

func resultOf[V any](e *entry[V], o Outcome, now int64) Result[V] {
	c := &e.Data
	r := Result[V]{
		Value: c.value, Outcome: o, Age: c.life.age(now), Remaining: c.life.remaining(now), Node: nodeOf(c.token),
	}
	if c.extra != nil {
		r.Validator, r.Tags = c.extra.validator, c.extra.tags
	}
	return r
}
