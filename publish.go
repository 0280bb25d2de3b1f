package refill

import (
	"context"
	"errors"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file holds the end of a refill that has the lease: steps 5 (publish) and 6 (fail) of doc.go.

var errStoreFull = errors.New("refill: the store is full")

// loadAndPublish runs the load function while this refill has the lease, and then publishes the value or the failure.
func (r *refill[V]) loadAndPublish(a *acquisition) next {
	if cause := context.Cause(r.flight.Context()); cause != nil { // all callers have left since the lease was acquired
		a.free()
		r.release(a.token)
		return failed(cause)
	}
	r.claims.add(a.token, a.Now)
	lease := newLease(a.asked, r.cfg.LockTTL, r.cfg.LockTTL, func(ctx context.Context) (bool, error) {
		renewed, err := r.renewals.Do(ctx, driver.Lease{Key: r.full(r.key), Token: a.token})
		if renewed[a.token] {
			return true, nil // err, if any, is then about another lease of the shared call
		}
		return false, err
	})
	due := r.firstRenewals.Add(lease)
	return r.runLoad(a.free, func(v loaded[V]) next {
		defer r.claims.remove(a.token)
		defer lease.end() // the lease is kept until the store has answered
		defer due.Remove(lease)
		return r.afterLoad(a, lease, v)
	})
}

// afterLoad publishes what was loaded under a lease, or the failure.
func (r *refill[V]) afterLoad(a *acquisition, lease *lease, v loaded[V]) next {
	if lease.isLost() {
		r.emit(Event{Kind: EventLeaseLost, Key: r.key})
	}
	if len(r.endSlots) == cap(r.endSlots) {
		lease.keepFor(maxSpan) // starts the renewals now: the publication may have to wait for a free end slot
	} else {
		lease.keepFor(publishCalls * r.cfg.StoreTimeout)
	}
	if v.failed() {
		return r.fail(a.token, v)
	}
	r.publish(a, v)
	return next{step: stepDone}
}

// publishCalls is how many StoreTimeouts a publication may take: one or two for its tags, and one for Publish. Refills
// share their calls of EnsureTags. So a publication may wait for such a call in progress, and then for its own.
const publishCalls = 3

// renew renews leases in one call of the store. renewed[token] is true if the lease of that token was certainly
// renewed, even if renew returns an error.
func (l *Loader[V]) renew(leases []driver.Lease) (renewed map[string]bool, err error) {
	ctx, cancel := context.WithTimeout(l.shared, l.cfg.StoreTimeout)
	defer cancel()
	mine, err := l.store.Renew(ctx, l.cfg.LockTTL, leases...)
	renewed = make(map[string]bool, len(mine))
	for i, yes := range mine {
		renewed[leases[i].Token] = yes
	}
	return renewed, err
}

// publish stores what was loaded, and answers the callers. The callers get the value even if the store does not keep
// it.
func (r *refill[V]) publish(a *acquisition, v loaded[V]) {
	e, record, err := r.encode(a.token, a.Now, v)
	answer := answer[V]{entry: e, outcome: OutcomeLoaded, err: e.Data.err()}
	switch {
	case err != nil:
		r.leaveFailure(a.token, r.loadError(err, false, v.terms), false)
		answer.outcome, answer.err = OutcomeFailed, err
	case v.terms.noStore:
		answer.rejected = r.publishNoStore(a, v.terms, r.afterFailure())
	default:
		answer.rejected = r.publishRecord(a, e, record, v.keep(), r.afterFailure())
	}
	r.flight.Finish(answer)
}

// afterFailure reports whether this node or another node may remember a failure of the key. afterFailure also makes
// this node forget that failure.
func (r *refill[V]) afterFailure() bool { return r.backoffs.forget(r.key) || r.earlier != nil }

// publishRecord stores a record if the claim still belongs to this fill. A fill that replaces no record is announced in
// two cases only: a waiter is noted on the lease, or other nodes may still remember a failure of the key. publishRecord
// reports whether the store has rejected the record.
func (r *refill[V]) publishRecord(
	a *acquisition, e *entry[V], record []byte, keep time.Duration, afterFailure bool,
) (rejected bool) {
	r.ensureTagsOf(e)
	ctx, slot := r.endCall()
	defer slot.free()
	result, err := r.store.Publish(ctx, driver.PublishRequest{
		Key: r.full(r.key), Token: a.token, Began: a.Now, Replaced: r.seen, Record: record,
		Keep: lifeIn(e).keep(r.now()) + keep, AnnounceIfAwaited: r.seen == "" && !afterFailure,
	})
	kind := EventPublished
	switch {
	case err != nil:
		kind = EventStoreError
		e.Unconfirm()
		r.giveBack(a.token)
	case result == driver.Rejected:
		r.emit(Event{Kind: EventPublishRejected, Key: r.key})
		return true // the value was invalidated or overtaken, so it must not go into L1 either
	case result == driver.StoreFull:
		kind, err = EventStoreError, errStoreFull
	}
	if len(e.Data.tags()) > 0 { // Publish does not judge tags, which may have been invalidated since the load began
		e.TrustUntil = lifeIn(e).began + r.cfg.LocalTTL.Microseconds()
	}
	r.keepInL1(e, record)
	r.emit(Event{Kind: kind, Key: r.key, Err: err})
	if now := r.now(); err == nil && lifeIn(e).publishedLate(now) {
		r.emit(Event{Kind: EventPublishedLate, Key: r.key, Took: lifeIn(e).age(now)})
	}
	return false
}

// publishNoStore stores a record without a value, in place of a value that must not be stored. The record tells later
// callers to load in parallel, without a lease. The life of the record counts from now, not from the start of the load.
// Counted from the start, the record of a slow load would end too early, although slow loads need the record most.
func (r *refill[V]) publishNoStore(a *acquisition, t terms, afterFailure bool) (rejected bool) {
	remember := t.ttl.or(noStoreFor)
	rec := driver.Record{
		Token: a.token, NoStore: true, Kind: r.kind, LoadBegan: a.Now, FreshUntil: r.store.Now().Add(remember),
	}
	record, err := rec.Append(nil)
	if err != nil || remember == 0 {
		r.release(a.token)
		return false
	}
	return r.publishRecord(a, r.newEntry(r.key, &rec, r.epoch), record, 0, afterFailure)
}

// fail ends a fill whose load has failed, or whose callers have all left.
func (r *refill[V]) fail(token string, v loaded[V]) next {
	if cause := context.Cause(r.flight.Context()); cause != nil {
		r.emit(Event{Kind: EventLoadAbandoned, Key: r.key, Took: v.took, Err: v.err})
		r.release(token) // no back-off: the next Get loads at once
		return failed(cause)
	}
	e, forbidden := r.loadError(v.err, v.panicked, v.terms), r.forbidsOld(v.terms)
	dropped := r.leaveFailure(token, e, forbidden)
	if forbidden {
		r.dropOld(e, dropped)
	}
	return failed(e)
}

// leaveFailure remembers a failure on this node, frees the lease, and leaves the failure in the store in place of the
// lease. The first failure of a key holds only this node back. If another node has failed just before, the failure
// holds all nodes back. If dropValue is set, leaveFailure also removes the value from the store. leaveFailure reports
// whether the store has answered without an error.
func (r *refill[V]) leaveFailure(token string, e *LoadError, dropValue bool) (ok bool) {
	r.backoffs.remember(r.key, e, r.epoch.Key)
	ctx, slot := r.endCall()
	defer slot.free()
	err := r.store.Fail(ctx, driver.FailRequest{
		Key: r.full(r.key), Token: token, Failure: e.wire(), TTL: e.RetryAfter, HoldAll: e.fleet, DropValue: dropValue,
	})
	if err != nil {
		r.emit(Event{Kind: EventStoreError, Key: r.key, Err: err})
	}
	return err == nil
}

// forbidsOld reports whether a failed load forbids to serve the old value of the key. t is what that load has set on
// its Fill.
func (r *refill[V]) forbidsOld(t terms) bool {
	return r.fallback != nil && r.spans.forbids(t, lifeIn(r.fallback), r.now())
}

// dropOld removes the old value that a failed load forbids from L1. err is the error of that load. dropped says that
// the store has removed the value already. If not, dropOld repeats the removal in the background. l1.Invalidate raises
// the epoch of the key, and a back-off that was noted with another epoch does not count. So dropOld remembers the
// failure again.
func (r *refill[V]) dropOld(err *LoadError, dropped bool) {
	if !dropped {
		r.retryLater([]string{r.full(r.key)}, false, false)
	}
	r.l1.Invalidate(r.key)
	r.backoffs.remember(r.key, err, r.epoch.Key+1)
}

// release frees the lease and the claim of token.
func (r *refill[V]) release(token string) {
	ctx, slot := r.endCall()
	defer slot.free()
	r.releaseNow(ctx, token)
}

// giveBack is release in the background. A refill uses giveBack after an error of the store, so that no caller waits
// for a store that does not answer.
func (r *refill[V]) giveBack(token string) {
	r.releases.Go(func() {
		ctx, slot := r.endCall()
		defer slot.free()
		r.releaseNow(ctx, token)
	})
}

func (r *refill[V]) releaseNow(ctx context.Context, token string) {
	if err := r.store.Release(ctx, r.full(r.key), token); err != nil {
		r.emit(Event{Kind: EventStoreError, Key: r.key, Err: err})
	}
}

// endCall returns a ctx for the call that ends a fill, bounded by StoreTimeout. After the call, the caller frees the
// returned slot. These calls have slots of their own (endSlots), so they do not queue behind reads. A bulk load ends
// with hundreds of such calls at once. Without slots, these calls would spend their StoreTimeout in a queue for a
// connection.
func (r *refill[V]) endCall() (context.Context, storeSlot) {
	r.endSlots <- struct{}{}
	return r.timeouts.Context(r.flight.Values()), r.endSlots
}

// storeCall returns a ctx for one call of the store, bounded by StoreTimeout. After the call, the caller frees the
// returned slot, which may be nil. The ctx does not end with the flight. The reason: if the store grants a lease while
// the last caller leaves, the refill must still get the reply, so that it can give the lease back.
//
// Refills share a limited number of store slots, and storeCall waits for a slot before StoreTimeout begins. Otherwise a
// refill could spend its StoreTimeout in a queue for a connection, and the store would seem not to answer. A refill
// whose flight was cancelled does not wait for a slot, because no caller needs its result.
func (r *refill[V]) storeCall() (context.Context, storeSlot) { return r.storeCallUnless(nil) }

// storeCallUnless is storeCall, but stops waiting for a slot when suspect is closed.
func (r *refill[V]) storeCallUnless(suspect <-chan struct{}) (context.Context, storeSlot) {
	slot := r.storeSlots
	if !r.slotHeld {
		select {
		case r.storeSlots <- struct{}{}:
		case <-suspect:
			slot = nil
		case <-r.flight.Context().Done():
			slot = nil
		}
	}
	r.slotHeld = false
	return r.timeouts.Context(r.flight.Values()), slot
}

// storeSlot is a channel that holds one element per running call of the store, and so limits their number. A call
// without a place has a nil storeSlot: its flight was cancelled, or the store became suspect.
type storeSlot chan struct{}

func (s storeSlot) free() {
	if s != nil {
		<-s
	}
}
