package refill

import (
	"context"
	"errors"
	"time"

	"github.com/refill-go/refill/internal/breaker"
	"github.com/refill-go/refill/internal/flight"
)

// This file holds the steps of a refill that has no lease, for three cases: the store does not answer (step 7 of
// doc.go), the value must not be stored, or there is no value (the end of step 6).

// storeFailed reports the error of the store, and goes on without the store.
func (r *refill[V]) storeFailed(err error) next {
	r.emit(Event{Kind: EventStoreError, Key: r.key, Err: err})
	return next{step: stepWithoutStore}
}

// withoutStore serves the entry of L1 if the entry may still be served. Otherwise withoutStore loads for this process,
// within MaxLoads. While a back-off of the key lasts on this node, the callers get the error of the failed load.
func (r *refill[V]) withoutStore() next {
	r.epoch, r.noStore = r.l1.Epoch(r.key), true
	if r.serveUnsubscribed() {
		return next{step: stepDone}
	}
	if err := r.heldBack(); err != nil {
		return failed(err)
	}
	patience := time.NewTimer(r.cfg.StoreTimeout)
	defer patience.Stop()
	free, _, err := r.loadSlot(nil, patience.C)
	if err != nil {
		return failed(err)
	}
	return r.loadLocally(free, true)
}

// mayServe reports whether e may answer the callers of this refill without the store. e is the entry of the key in L1,
// or nil. The caller of mayServe must also check the life of e.
func (r *refill[V]) mayServe(e *entry[V]) bool {
	return e != nil && !e.Data.noStore() && r.want != flight.Refresh && r.l1.NotInvalidated(e)
}

// standIn returns e, the entry of L1, if e can answer the callers at once in place of the store. Otherwise standIn
// returns nil.
func (r *refill[V]) standIn(e *entry[V]) *entry[V] {
	if !r.mayServe(e) || lifeIn(e).at(r.now()) > stale {
		return nil
	}
	return e
}

// lookUpUnlessSuspect is lookUp for a key that has a stand-in in L1. A call that the store does not answer in time
// makes the store suspect, and the next answer of the store ends the suspicion. While the store is suspect, the callers
// of the key get the stand-in at once. So when a store dies, the callers of such keys wait for one StoreTimeout, not
// for one each. If the stand-in is stale, the refill then goes on as a refresh in the background.
func (r *refill[V]) lookUpUnlessSuspect(standIn *entry[V]) next {
	s, err := r.readUnlessSuspect(!r.l1.Valid(standIn))
	switch {
	case err == nil:
		return r.serve(s, OutcomeShared)
	case !errors.Is(err, breaker.ErrSuspect):
		return r.storeFailed(err)
	}
	r.emit(Event{Kind: EventStoreError, Key: r.key, Err: err})
	r.epoch, r.seen, r.noStore = r.l1.Epoch(r.key), standIn.Data.token(), true
	if r.serveUnsubscribed() {
		return next{step: stepDone}
	}
	return next{step: stepAcquire}
}

// readUnlessSuspect is read, but returns breaker.ErrSuspect if the store is suspect. If mayLeave is set,
// readUnlessSuspect also returns ErrSuspect as soon as the store becomes suspect during the read. For that, the read
// runs on another goroutine, which can be left behind. The goroutine costs as much as the read itself. So a refill sets
// mayLeave only if the stand-in is not valid in L1. That is so above all while the subscription is down: each Get of
// the key then reads the store, so all callers would wait for a dead store. While the subscription works, such reads
// are rare, because L1 answers without a read until LocalTTL is over.
func (r *refill[V]) readUnlessSuspect(mayLeave bool) (s snapshot, err error) {
	suspect := r.store.Suspect()
	switch {
	case isClosed(suspect):
		return s, breaker.ErrSuspect
	case !mayLeave:
		return r.read()
	case r.many != nil && !r.manyRead:
		r.manyRead = true
		found, err := breaker.UnlessSuspect(r.store, suspect, func() (*snapshot, error) { return r.many.snapshot(r) })
		if err != nil {
			return s, err
		} else if found != nil {
			return *found, nil
		}
	}
	ctx, slot := r.storeCallUnless(suspect)
	if isClosed(suspect) {
		slot.free()
		return s, breaker.ErrSuspect
	}
	s.epoch = r.l1.Epoch(r.key)
	s.record, err = breaker.UnlessSuspect(r.store, suspect, func() ([]byte, error) {
		defer slot.free()
		return r.store.Get(ctx, r.full(r.key))
	})
	return s, err
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// serveUnsubscribed serves an entry of L1 even if this process cannot receive announcements. It reports whether the
// refill is done.
func (r *refill[V]) serveUnsubscribed() (done bool) {
	e := r.l1.Get(r.key)
	return r.mayServe(e) && r.offer(e, lifeIn(e).at(r.now()), OutcomeHit)
}

// unconfirmedAfter returns the entry of L1 if that entry is to be served instead of e, the entry that the store holds.
// The entry of L1 must meet two conditions. Its load began after the load of e. The store has not confirmed it: it was
// loaded without the store, or its publication had no answer.
func (r *refill[V]) unconfirmedAfter(e *entry[V]) *entry[V] {
	own := r.l1.Get(r.key)
	if own == nil || own.Epoch().Confirmed() || own.Data.noStore() || lifeIn(own).began <= lifeIn(e).began ||
		!r.l1.NotInvalidated(own) || lifeIn(e).wasExpired() { // the Expire of e may have come after the load of own
		return nil
	}
	return own
}

// loadUncacheable loads for the callers of this flight alone, because the value must not be stored.
func (r *refill[V]) loadUncacheable() next {
	if r.flight.Unawaited() {
		return next{step: stepDone}
	}
	r.epoch = r.l1.Epoch(r.key)
	if err := r.heldBack(); err != nil {
		return failed(err)
	}
	free, _, err := r.loadSlot(nil, nil)
	if err != nil {
		return failed(err)
	}
	return r.loadLocally(free, false)
}

// loadLocally loads without a lease. If keep is set, loadLocally puts the value into L1. loadLocally owns free, which
// gives the load slot back.
func (r *refill[V]) loadLocally(free func(), keep bool) next {
	began := r.store.Now()
	return r.runLoad(free, func(v loaded[V]) next { return r.afterLocalLoad(began, keep, v) })
}

// afterLocalLoad answers the callers with what was loaded without a lease, or with the failure.
func (r *refill[V]) afterLocalLoad(began time.Time, keep bool, v loaded[V]) next {
	if v.failed() {
		if cause := context.Cause(r.flight.Context()); cause != nil {
			return failed(cause)
		}
		err := r.loadError(v.err, v.panicked, v.terms)
		r.backoffs.remember(r.key, err, r.epoch.Key)
		if r.forbidsOld(v.terms) {
			r.dropOld(err, false)
		}
		return failed(err)
	}
	e, record, err := r.encode(r.node.token(), began, v)
	a := answer[V]{entry: e, outcome: OutcomeLoaded, err: e.Data.err()}
	if err == nil {
		r.backoffs.forget(r.key)
	}
	switch {
	case err != nil:
		r.backoffs.remember(r.key, r.loadError(err, false, v.terms), r.epoch.Key)
		a.outcome, a.err = OutcomeFailed, err
	case keep && !v.terms.noStore:
		e.Unconfirm()
		r.putL1(e, record)
	}
	r.flight.Finish(a)
	return next{step: stepDone}
}

// serveStaleOnError ends a refill that has got no value. The answer is the old value, if the old value may be served in
// place of an error. Otherwise the answer is the error.
func (r *refill[V]) serveStaleOnError(err error) next {
	switch {
	case errors.Is(err, flight.ErrClosed):
		err = ErrClosed
	case errors.Is(err, errNoSlot):
		return r.skipRefresh(noSlotPause)
	}
	a := answer[V]{err: err}
	if e := r.fallback; e != nil {
		if failure := (*LoadError)(nil); errors.As(err, &failure) {
			e.RefreshAt.Store(r.now() + failure.RetryAfter.Microseconds())
		}
		if lifeIn(e).at(r.now()) <= errorOnly && r.l1.NotInvalidated(e) && r.want != flight.Refresh {
			a = answer[V]{entry: e, outcome: OutcomeStaleOnError, err: e.Data.err(), failure: err}
		}
	}
	r.flight.Finish(a)
	return next{step: stepDone}
}
