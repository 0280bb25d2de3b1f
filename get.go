package refill

import (
	"context"
	"errors"
	"time"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/flight"
)

// This file holds steps 0 and 1 of doc.go: how L1 answers a Get, and how a caller joins a flight and waits for it. The
// steps of a flight are in refill.go.

// Get returns the value of key. If this process has a fresh value in memory, Get returns that value. If the value is
// stale and Config.StaleFor allows it, Get returns the stale value while a refresh runs. Otherwise the value comes from
// the store, from a load on another node, or from a load here. A key is any string but the empty one. A key that is
// longer than 512 bytes, has control characters, or begins with '#' is replaced by "#" and its SHA-256 in the store, in
// events and in errors. The load function gets the key as given.
//
// If ctx ends before there is an answer, Get returns the error of ctx. If the deadline of ctx passes, Get returns at
// once. If ctx is cancelled during a read of the store, Get may return only after that read, within
// Config.StoreTimeout. For an absence Get returns an error that wraps [ErrNotFound]. For a failed load Get returns a
// [*LoadError], unless Config.StaleIfError allows an old value. Get also returns [ErrOverloaded], [ErrClosed] and
// [ErrInvalid], as the docs of these errors say. If the codec cannot encode a loaded value, Get returns the value
// together with an error that wraps ErrInvalid.
func (l *Loader[V]) Get(ctx context.Context, key string) (V, error) {
	if l.canLoad() {
		if e := l.fresh(key); e != nil {
			return e.Data.value, e.Data.err()
		}
	}
	r, err := l.get(ctx, key, GetOptions[V]{})
	return r.Value, err
}

// canLoad reports whether the Loader has a load function of its own. Without one, Get returns an error even if a value
// is cached. If Get returned the cached value, the missing load function would show only when that value has expired.
func (l *Loader[V]) canLoad() bool { return l.load != nil || l.bulk != nil }

// fresh returns the entry of key if L1 can serve the entry as fresh (step 0). Otherwise fresh returns nil.
func (l *Loader[V]) fresh(key string) *entry[V] {
	if !isPlain(key) {
		return nil
	}
	e := l.l1.Fresh(key)
	if e != nil && l.cfg.OnEvent != nil {
		l.emit(Event{Kind: EventGet, Outcome: OutcomeHit, Key: key, Err: e.Data.err()})
	}
	return e
}

// GetWith is Get with a load function for this call. The function may run as a refresh after GetWith has returned.
// Other callers of the key may get the result of this function. This caller may get the result of another caller's
// function. So the function must depend on ctx and key alone. It must not capture a variable that changes, a request or
// a transaction.
func (l *Loader[V]) GetWith(
	ctx context.Context, key string, load func(ctx context.Context, key string) (V, error),
) (V, error) {
	if load == nil {
		var none V
		return none, invalid("load", "nil")
	}
	if e := l.fresh(key); e != nil {
		return e.Data.value, e.Data.err()
	}
	r, err := l.get(ctx, key, GetOptions[V]{Load: load})
	return r.Value, err
}

// GetOptions says how a call of GetResultWith or GetManyWith differs from Get. The zero value is Get.
type GetOptions[V any] struct {
	// Load is the load function of this call, with the rules of GetWith. nil: the load function of the Loader.
	Load func(ctx context.Context, key string) (V, error)
	// Refresh loads the value now, whatever is cached, with the rules of Loader.Refresh.
	Refresh bool
	// NoStale refuses stale values: the call waits for the refill of a stale value. If the refill fails, the call
	// returns the error of the refill. Config.StaleFor, Config.StaleIfError and Config.SoftTimeout have no effect on
	// such a call.
	NoStale bool
}

// Result is a value, and says how the value was found.
type Result[V any] struct {
	Value   V
	Outcome Outcome
	// Age is the time since the load of the value began. Remaining is how much longer the value is fresh, and 0 for a
	// value that is not fresh. Neither Age nor Remaining is negative.
	Age, Remaining time.Duration
	// Node is the node that loaded the value.
	Node string
	// Absent says that this is a cached absence, see [ErrNotFound]. Value is then the zero value.
	Absent bool
	// Validator and Tags are what the load of the value set, see Fill. Tags also has Config.Tags.
	Validator string
	Tags      []string
}

// GetResult is Get, and also says how the value was found. If the error wraps [ErrNotFound], the Result describes the
// absence. If the codec cannot encode the loaded value, the Result has the value. With any other error, the Result has
// the Outcome at most.
func (l *Loader[V]) GetResult(ctx context.Context, key string) (Result[V], error) {
	return l.get(ctx, key, GetOptions[V]{})
}

// GetResultWith is GetResult with options for this call.
func (l *Loader[V]) GetResultWith(ctx context.Context, key string, o GetOptions[V]) (Result[V], error) {
	return l.get(ctx, key, o)
}

// request is what a caller asks for: one key, and how to load the value of that key.
type request[V any] struct {
	key     string       // as storeKey returns it
	given   string       // as the caller gave it
	loadKey loadFunc[V]  // nil: the bulk load function
	want    flight.Want  // what the caller expects of the flight
	urgent  bool         // the caller must not queue, see nesting
	mode    driver.Mode  // of Acquire; the refill may change the mode in its own copy
	many    *manyKeys[V] // the GetMany or Refresh that the request belongs to, or nil
}

// answer is the reply of a flight, or of L1, to a request.
type answer[V any] struct {
	entry   *entry[V] // nil for most errors
	outcome Outcome
	err     error
	failure error         // why the refill failed; set with OutcomeStaleOnError only
	waited  time.Duration // how long this caller waited, for Event.Took

	withoutStore bool // the store did not answer, so the entry could not be compared with the store
	rejected     bool // the store refused the loaded value: an invalidation or a newer load came first
}

// get is the part of Get that follows after fresh has found nothing. get asks L1 again, for a stale entry as well (step
// 0). If L1 has no answer, get joins a flight (step 1).
func (l *Loader[V]) get(ctx context.Context, given string, o GetOptions[V]) (Result[V], error) {
	q, err := l.request(ctx, given, o)
	if err != nil {
		return Result[V]{}, err
	}
	if a := l.fromL1(ctx, q, l.cfg.SoftTimeout); a != nil {
		return l.result(q.key, *a)
	}
	if l.flights.Admit(q.urgent) != nil {
		return l.overloaded(ctx, q)
	}
	defer l.flights.Depart()
	for again := false; ; again = true {
		m, err := l.join(ctx, q)
		if err != nil {
			return Result[V]{}, err
		}
		switch m.again = again; m.role {
		case flight.Leader:
			l.start(ctx, m.flight, q)
		case flight.Observer:
			if err := l.watch(ctx, m); err != nil {
				return Result[V]{}, err
			}
			continue
		}
		if a := l.wait(ctx, m); a != nil {
			return l.result(q.key, *a)
		}
		if a := l.fromL1(ctx, q, l.cfg.SoftTimeout); a != nil {
			return l.result(q.key, *a)
		}
	}
}

// request makes a request. It returns an error if the request must fail whatever is cached: for an empty key, for
// instance.
func (l *Loader[V]) request(ctx context.Context, given string, o GetOptions[V]) (request[V], error) {
	key, err := l.storeKey(given)
	q := request[V]{key: key, given: given, loadKey: o.Load, mode: driver.Wait}
	switch {
	case o.Refresh:
		q.want, q.mode = flight.Refresh, driver.Force
	case o.NoStale:
		q.want = flight.Final
	}
	if q.loadKey == nil {
		q.loadKey = l.load
	}
	outer := outerFill(ctx)
	switch {
	case err != nil:
		return q, err
	case o.Load == nil && !l.canLoad():
		return q, invalid("load", "nil; a Loader made without a load function has GetWith only")
	case outer.loads(l, key):
		return q, invalid("key", "%q is being loaded by the same load that asks for it", key)
	}
	q.urgent = outer != nil && nested.enter(outer, l)
	return q, ctx.Err()
}

// fromL1 returns the answer of L1, or nil if L1 cannot answer at once. If the entry is due for a refresh, fromL1 starts
// the refresh. patience is Config.SoftTimeout, or 0 for a caller that may not wait. If patience is above 0, a stale
// entry is no answer while its refresh is due or runs: fromL1 returns nil, so that the caller joins the flight of the
// refresh and waits.
func (l *Loader[V]) fromL1(ctx context.Context, q request[V], patience time.Duration) *answer[V] {
	e := l.l1.Get(q.key)
	if e == nil || e.Data.noStore() || q.want == flight.Refresh || !l.l1.Valid(e) {
		return nil
	}
	a, now := answer[V]{entry: e, outcome: OutcomeHit, err: e.Data.err()}, l.now()
	switch inL1(e, now) {
	case fresh:
	case refreshDue:
		l.refreshInBackground(ctx, e, q, now)
	case stale:
		if q.want == flight.Final {
			return nil
		}
		a.outcome = OutcomeStale
		if patience == 0 {
			l.refreshInBackground(ctx, e, q, now)
		} else if l.claimRefresh(e, now) || l.flights.Has(q.key) {
			return nil // the flight delivers the stale entry after SoftTimeout
		}
	default:
		return nil
	}
	return &a
}

// claimRefresh reports whether a refresh of an entry is due. If so, the caller must start the refresh, and no further
// refresh of the entry is due for LockTTL. The pause is LockTTL because another node may have died during its refresh.
// After LockTTL the lease of that node has ended, so the next refresh can get the lease.
func (l *Loader[V]) claimRefresh(e *entry[V], now int64) bool {
	refreshAt := e.RefreshAt.Load()
	return now >= refreshAt && e.RefreshAt.CompareAndSwap(refreshAt, now+l.cfg.LockTTL.Microseconds())
}

// refreshInBackground starts a refresh of an entry, if a refresh is due. The caller may run inside of a load. That load
// does not wait for the refresh, so withoutFill hides the load from the refresh.
func (l *Loader[V]) refreshInBackground(ctx context.Context, e *entry[V], q request[V], now int64) {
	serveUntil, first := e.ServeUntil.Load(), e.RefreshAt.Load() == 0
	switch {
	case !l.claimRefresh(e, now):
	case l.noLoadSlot():
		l.refreshSkipped(e, q.key, noSlotPause)
	default:
		q.want, q.urgent = flight.Background, false
		if first && l.cfg.SoftTimeout == 0 {
			// No caller waits, so the cheaper mode Try is enough. A later refresh uses Wait, because Wait also takes
			// over a lease that has no end.
			q.mode = driver.Try
		}
		// The only error of join is ErrClosed, and a closed Loader need not refresh.
		if m, _ := l.join(withoutFill(ctx), q); m.role == flight.Leader {
			l.launch(m.flight, q)
		}
	}
	if serveUntil != 0 { // 0 = superseded; any other entry is a hit until its next refresh is due, or until TrustUntil
		e.ServeUntil.CompareAndSwap(serveUntil, min(e.TrustUntil, e.RefreshAt.Load()))
	}
}

// overloaded answers a caller that may not wait, because MaxWaiters callers are waiting already. The answer is the
// stale value of L1, if there is one and the caller has not asked for a Refresh. Otherwise the answer is ErrOverloaded.
func (l *Loader[V]) overloaded(ctx context.Context, q request[V]) (Result[V], error) {
	if a := l.fromL1(ctx, q, 0); a != nil {
		return l.result(q.key, *a)
	}
	return Result[V]{}, ErrOverloaded
}

// flightOf is a flight of a Loader. It delivers an answer[V], and receives the announcements about its key.
type flightOf[V any] = flight.Flight[answer[V], driver.Announcement]

// membership is what a caller knows about the flight that it has joined.
type membership[V any] struct {
	key      string
	flight   *flightOf[V]
	role     flight.Role
	want     flight.Want
	again    bool   // this Get has waited for an earlier flight in vain, so this flight began after the Get began
	tagEpoch uint64 // how many invalidations of tags this process knew when the caller joined
}

func (l *Loader[V]) join(ctx context.Context, q request[V]) (m membership[V], err error) {
	m.key, m.want, m.tagEpoch = q.key, q.want, l.l1.TagEpoch()
	if m.flight, m.role, err = l.flights.Join(ctx, q.key, q.want, q.urgent); err != nil {
		return m, ErrClosed
	}
	return m, nil
}

// watch waits for the end of a flight that a Refresh cannot join, because that flight may end without a load. After the
// end, the Refresh joins or starts another flight.
func (l *Loader[V]) watch(ctx context.Context, m membership[V]) error {
	if _, err := m.flight.WaitEnd(ctx); err != nil && !errors.Is(err, flight.ErrNoAnswer) {
		return err
	}
	return nil
}

// wait waits for the answer of a flight, and leaves the flight. It returns nil if the flight ended without an answer,
// or with an answer that is too old for this caller. After a nil the caller has to ask again.
func (l *Loader[V]) wait(ctx context.Context, m membership[V]) *answer[V] {
	defer m.flight.Leave(m.want)
	began := l.startTimer()
	a, err := m.flight.Wait(ctx)
	outdated := err == nil && l.outdated(m, &a)
	if err == nil && !outdated && a.stored() { // judge its age now, because it may have been delivered some time ago
		switch f := lifeIn(a.entry).at(l.now()); {
		case f > stale, m.want == flight.Final && (f == stale || a.outcome == OutcomeStale):
			a, err = m.flight.WaitEnd(ctx)
			outdated = err == nil && l.outdated(m, &a)
		case f == stale:
			a.outcome = OutcomeStale
		}
	}
	if outdated {
		m.flight.Forget()
		return nil
	}
	switch {
	case errors.Is(err, flight.ErrNoAnswer):
		return nil
	case err != nil:
		return &answer[V]{err: err}
	case a.outcome == OutcomeStaleOnError && m.want == flight.Final:
		return &answer[V]{err: a.failure}
	}
	if m.role != flight.Leader && (a.outcome == OutcomeLoaded || a.outcome == OutcomeShared ||
		a.outcome == OutcomeLoadedElsewhere) {
		a.outcome = OutcomeCoalesced
	}
	a.waited = l.took(began)
	return &a
}

// outdated reports whether the answer of a flight is too old for this caller. The danger: 1. The flight reads the store
// or begins its load. 2. An invalidation returns. 3. A caller joins the flight as a Latecomer. A Latecomer is a caller
// that joins after the flight has answered or has begun its load. So a Latecomer takes a stored answer only if L1 would
// serve that answer as fresh now. A Latecomer takes no value that the store has refused (rejected), because an
// invalidation may have come during its load. A caller that asks again takes both kinds of answers, because its flight
// began after its Get began.
func (l *Loader[V]) outdated(m membership[V], a *answer[V]) bool {
	e := a.entry
	switch {
	case e == nil:
		return false
	case m.tagEpoch > e.Epoch().Tags && l.l1.TagInvalidated(e): // a tag was invalidated, perhaps before the join
		return true
	case m.role != flight.Latecomer || m.again:
		return false
	case a.rejected:
		return true
	case !a.stored():
		return false
	case a.withoutStore:
		return !l.l1.NotInvalidated(e)
	case otherFilled(m.flight, e): // e had left L1 before the announcement, so replace did not find e
		return true
	}
	now := l.now()
	return !l.l1.Valid(e) || lifeIn(e).at(now) <= refreshDue && inL1(e, now) > refreshDue
}

// stored reports whether the answer came from L1 or from the store, not from a load. After such an answer the flight
// may have gone on as a refresh.
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
	c, life := &e.Data, lifeIn(e)
	r := Result[V]{
		Value: c.value, Outcome: o, Age: life.age(now), Remaining: life.remaining(now), Node: c.node(),
		Absent: c.err() != nil,
	}
	if x := c.extra(); x != nil {
		r.Validator, r.Tags = x.validator, x.tags
	}
	return r
}
