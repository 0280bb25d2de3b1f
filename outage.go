package refill

import (
	"context"
	"errors"
	"time"

	"github.com/refill-go/refill/internal/flight"
)

// This file is what a refill does without a lease, in three cases: the store does not answer (step 7 of doc.go), the
// value must not be stored, or there is no value (the end of step 6).

// storeFailed goes on without the store.
func (r *refill[V]) storeFailed(err error) next {
	r.emit(Event{Kind: EventStoreError, Key: r.key, Err: err})
	return next{step: stepWithoutStore}
}

// withoutStore serves the entry of L1, if L1 still has one. Otherwise it loads for this process, within MaxLoads. After
// a failed load it loads no earlier than ErrorTTL allows.
func (r *refill[V]) withoutStore() next {
	r.epoch = r.l1.Epoch(r.key)
	if r.serveUnsubscribed() {
		return next{step: stepDone}
	}
	if err := r.backOffOf(r.key); err != nil && r.want != flight.Refresh {
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

// serveUnsubscribed serves an entry of L1 although this process cannot receive announcements. It reports whether the
// refill is done.
func (r *refill[V]) serveUnsubscribed() (done bool) {
	e := r.l1.Get(r.key)
	if e == nil || e.Data.noStore || r.want == flight.Refresh || !r.l1.NotInvalidated(e) {
		return false
	}
	return r.offer(e, e.Data.life.at(r.now()), OutcomeHit)
}

// loadUncacheable loads for the callers of this flight alone, because the value must not be stored.
func (r *refill[V]) loadUncacheable() next {
	if r.flight.Unawaited() {
		return next{step: stepDone}
	}
	r.epoch = r.l1.Epoch(r.key)
	if err := r.backOffOf(r.key); err != nil {
		return failed(err)
	}
	free, _, err := r.loadSlot(nil, nil)
	if err != nil {
		return failed(err)
	}
	return r.loadLocally(free, false)
}

// loadLocally loads without a lease. If keep is set, it keeps the value in L1. It owns free.
func (r *refill[V]) loadLocally(free func(), keep bool) next {
	began := r.store.Now()
	v := r.runLoad(free, nil)
	if v.failed() {
		if cause := context.Cause(r.flight.Context()); cause != nil {
			return failed(cause)
		}
		err := r.loadError(v.err, v.panicked)
		r.backoffs.remember(r.key, err, r.epoch.Key)
		return failed(err)
	}
	r.backoffs.forget(r.key)
	e, record, err := r.encode(r.node.token(), began, v)
	a := answer[V]{entry: e, outcome: OutcomeLoaded, err: e.Data.err}
	switch {
	case err != nil:
		a.outcome, a.err = OutcomeFailed, err
	case keep && !v.terms.noStore:
		r.putL1(e, len(record))
	}
	r.flight.Finish(a)
	return next{step: stepDone}
}

// serveStaleOnError ends a refill that has found no value. The answer is an old value, if one may be served in place of
// an error. Otherwise the answer is the error.
func (r *refill[V]) serveStaleOnError(err error) next {
	if errors.Is(err, flight.ErrClosed) {
		err = ErrClosed
	}
	a := answer[V]{err: err}
	if e := r.fallback; e != nil {
		if failure := (*LoadError)(nil); errors.As(err, &failure) {
			e.RefreshAt.Store(r.now() + failure.RetryAfter.Microseconds())
		}
		if e.Data.life.at(r.now()) <= errorOnly && r.l1.NotInvalidated(e) && r.want != flight.Refresh {
			a = answer[V]{entry: e, outcome: OutcomeStaleOnError, err: e.Data.err}
		}
	}
	r.flight.Finish(a)
	return next{step: stepDone}
}
