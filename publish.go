package refill

import (
	"context"
	"errors"

	"github.com/refill-go/refill/driver"
)

// This file is the end of a refill that has the lease: steps 5 (publish) and 6 (fail) of doc.go.

var errStoreFull = errors.New("refill: the store is full")

// loadAndPublish runs the load function under the lease.
func (r *refill[V]) loadAndPublish(a *acquisition) next {
	if cause := context.Cause(r.flight.Context()); cause != nil { // all callers have left since the lease was acquired
		a.free()
		r.release(a.token)
		return failed(cause)
	}
	lease := newLease(a.asked, r.cfg.LockTTL, r.cfg.StoreTimeout, func(ctx context.Context) (bool, error) {
		return r.store.Renew(ctx, r.full(r.key), a.token, r.cfg.LockTTL)
	})
	v := r.runLoad(a.free, lease)
	lease.end()
	if lease.isLost() {
		r.emit(Event{Kind: EventLeaseLost, Key: r.key})
	}
	if v.failed() {
		return r.fail(a.token, v)
	}
	r.publish(a, v)
	return next{step: stepDone}
}

// publish stores what was loaded, and answers the callers. The callers get the value even if it cannot be stored.
func (r *refill[V]) publish(a *acquisition, v loaded[V]) {
	afterFailure := r.backoffs.forget(r.key)
	e, record, err := r.encode(a.token, a.Now, v)
	answer := answer[V]{entry: e, outcome: OutcomeLoaded, err: e.Data.err}
	switch {
	case err != nil:
		r.leaveFailure(a.token, r.loadError(err, false))
		answer.outcome, answer.err = OutcomeFailed, err
	case v.terms.noStore:
		r.publishNoStore(a, v.terms, afterFailure)
	default:
		r.publishRecord(a, e, record, afterFailure)
	}
	r.flight.Finish(answer)
}

// publishRecord stores a record if the claim still belongs to this fill. If the fill replaces no record, the store
// announces the fill only if a waiter is registered on the lease, or if other nodes may still remember a failure.
func (r *refill[V]) publishRecord(a *acquisition, e *entry[V], record []byte, afterFailure bool) {
	r.ensureTagsOf(e)
	ctx, done := r.storeCall()
	defer done()
	result, err := r.store.Publish(ctx, driver.PublishRequest{
		Key: r.full(r.key), Token: a.token, Began: a.Now, Replaced: r.seen, Record: record,
		Keep: e.Data.life.keep(r.now()), AnnounceIfAwaited: r.seen == "" && !afterFailure,
	})
	kind := EventPublished
	switch {
	case err != nil:
		kind = EventStoreError
		r.giveBack(a.token)
	case result == driver.Rejected:
		r.emit(Event{Kind: EventPublishRejected, Key: r.key})
		return // the value was invalidated or overtaken, so L1 does not get it either
	case result == driver.StoreFull:
		kind, err = EventStoreError, errStoreFull
	}
	r.emit(Event{Kind: kind, Key: r.key, Err: err})
	r.putL1(e, len(record))
}

// publishNoStore handles a value that must not be stored: it stores a record without a value instead. The time of this
// record counts from now, not from the start of the load. The record says nothing about the loaded value, and a slow
// load needs the record more than a fast load does.
func (r *refill[V]) publishNoStore(a *acquisition, t terms, afterFailure bool) {
	remember := noStoreFor
	if t.ownTTL {
		remember = t.ttl
	}
	rec := driver.Record{
		Token: a.token, NoStore: true, Kind: r.kind, LoadBegan: a.Now, FreshUntil: r.store.Now().Add(remember),
	}
	record, err := rec.Append(nil)
	if err != nil || remember == 0 {
		r.release(a.token)
		return
	}
	r.publishRecord(a, r.newEntry(r.key, &rec, r.epoch), record, afterFailure)
}

// fail ends a fill without a value.
func (r *refill[V]) fail(token string, v loaded[V]) next {
	if cause := context.Cause(r.flight.Context()); cause != nil {
		r.emit(Event{Kind: EventLoadAbandoned, Key: r.key, Took: v.took, Err: v.err})
		r.release(token) // no back-off: the next Get loads at once
		return failed(cause)
	}
	err := r.loadError(v.err, v.panicked)
	r.backoffs.remember(r.key, err, r.epoch.Key)
	r.leaveFailure(token, err)
	return failed(err)
}

// leaveFailure puts a back-off in the place of the lease.
func (r *refill[V]) leaveFailure(token string, e *LoadError) {
	ctx, done := r.storeCall()
	defer done()
	if err := r.store.Fail(ctx, r.full(r.key), token, e.wire(), e.RetryAfter); err != nil {
		r.emit(Event{Kind: EventStoreError, Key: r.key, Err: err})
	}
}

// release frees the lease and the claim.
func (r *refill[V]) release(token string) {
	ctx, done := r.storeCall()
	defer done()
	r.releaseNow(ctx, token)
}

// giveBack is release in the background, for use after an error: no caller should wait for a store that does not
// answer.
func (r *refill[V]) giveBack(token string) {
	r.releases.Go(func() {
		ctx, cancel := context.WithTimeout(r.flight.Values(), r.cfg.StoreTimeout)
		defer cancel()
		r.releaseNow(ctx, token)
	})
}

func (r *refill[V]) releaseNow(ctx context.Context, token string) {
	if err := r.store.Release(ctx, r.full(r.key), token); err != nil {
		r.emit(Event{Kind: EventStoreError, Key: r.key, Err: err})
	}
}

// storeCall bounds one call of the store by a refill. The call does not end with the flight: if a lease is acquired
// while the last caller leaves, the refill must know of that lease, to give it back.
//
// Refills share a limited number of store slots. So no refill spends its StoreTimeout in a queue for a connection,
// which would look as if the store did not answer. A refill without callers does not wait for a slot, because it only
// gives its lease back.
func (r *refill[V]) storeCall() (ctx context.Context, done func()) {
	held := r.slotHeld
	r.slotHeld = false
	if !held {
		select {
		case r.storeSlots <- struct{}{}:
			held = true
		case <-r.flight.Context().Done():
		}
	}
	ctx, cancel := context.WithTimeout(r.flight.Values(), r.cfg.StoreTimeout)
	return ctx, func() {
		cancel()
		if held {
			<-r.storeSlots
		}
	}
}
