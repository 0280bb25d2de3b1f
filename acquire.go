package refill

import (
	"context"
	"errors"
	"time"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/flight"
)

// This file is step 3 of doc.go: a refill asks for the lease, or waits for the refill that has it.

// acquire waits for a load slot, and then asks the store for the refill lock and the claim. The claim is the right to
// store what will be loaded. The lock is for efficiency. Correctness comes from the claim.
func (r *refill[V]) acquire() next {
	if cause := context.Cause(r.flight.Context()); cause != nil {
		return failed(cause)
	}
	if err := r.heldBack(); err != nil {
		return r.waitForOthers(err)
	}
	if a := r.yield(); a != nil {
		return r.onAnnouncement(*a)
	}
	// The load slot comes first. If a refill took the lease and then waited for a slot, all nodes would wait for that
	// refill.
	free, announced, err := r.loadSlot(r.flight.Inbox(), nil)
	switch {
	case err != nil:
		return failed(err)
	case announced != nil:
		return r.onAnnouncement(*announced)
	}
	r.flight.DrainInbox() // drops old announcements: the coming reply of the store is newer
	return r.acquireWith(free)
}

// acquireWith is acquire for a refill that has a load slot. free gives the slot back.
func (r *refill[V]) acquireWith(free func()) next {
	a, err := r.callAcquire(r.mode, free)
	switch {
	case err != nil:
		r.giveBack(a.token) // the store may have granted the lease, although the reply was lost
		return r.storeFailed(err)
	case a.State == driver.Changed:
		return r.serve(snapshot{record: a.Record, epoch: r.epoch}, OutcomeShared)
	case a.State == driver.Held:
		return next{step: stepWait, acquisition: a}
	}
	r.noteEarlier(a.Failure)
	return next{step: stepLoad, acquisition: a}
}

// callAcquire calls Acquire. free gives the load slot back. If the store grants the lease, the acquisition owns free.
// Otherwise callAcquire calls free.
func (r *refill[V]) callAcquire(mode driver.Mode, free func()) (a *acquisition, err error) {
	r.manyRead = true // what the shared read of the GetMany has found is outdated from now on
	r.epoch = r.l1.Epoch(r.key)
	ctx, slot := r.storeCall()
	defer slot.free()
	a = &acquisition{token: r.node.token(), asked: time.Now(), free: free}
	a.AcquireResult, err = r.store.Acquire(ctx, driver.AcquireRequest{
		Key: r.full(r.key), Token: a.token, Seen: r.seen,
		LeaseTTL: r.cfg.LockTTL, ClaimTTL: r.cfg.BulkWindow + r.cfg.LoadTimeout + r.cfg.LockTTL, Mode: mode,
	})
	if err != nil || a.State != driver.Acquired {
		free()
	}
	return a, err
}

// wait is the step of a refill that did not get the lease. If the key has a back-off, the callers get the error of the
// failed load. If that back-off is longer than a node can have set, the refill overrides it (see tooLong). If another
// refill has the lease and no caller waits for this refill, this refill ends. Otherwise wait returns when the result is
// announced, when the lease ends, or when all callers have left. wait does not poll.
func (r *refill[V]) wait(a *acquisition) next {
	switch {
	case a.Holder == "" && tooLong(a.Left, saidBackOff(a.Failure), r.cfg.MaxErrorTTL):
		r.mode = driver.Force
		return next{step: stepAcquire}
	case a.Holder == "":
		return failed(r.loadErrorOf(r.key, a.Failure, a.Left))
	case r.flight.Unawaited():
		return r.skipRefresh(0)
	case r.mode == driver.Try: // a caller has joined: acquire again, so that the store notes a waiter
		r.mode = driver.Wait
		return next{step: stepAcquire}
	}
	r.awaited = a.Holder
	timer := time.NewTimer(waitFor(a.Left, r.cfg.LockTTL))
	defer timer.Stop()
	select {
	case announced := <-r.flight.Inbox():
		return r.onAnnouncement(announced)
	case <-timer.C:
		return next{step: stepAcquire}
	case <-r.flight.Context().Done():
		return failed(context.Cause(r.flight.Context()))
	}
}

// onAnnouncement returns the next step of a waiting refill. If the announcement carries the result of the load that
// this refill waits for, the refill uses that result. Otherwise the refill asks the store again.
func (r *refill[V]) onAnnouncement(a driver.Announcement) next {
	awaited := a.Token == r.awaited && r.awaited != ""
	switch {
	case awaited && a.Kind == driver.Filled && len(a.Record) > 0:
		return r.serve(snapshot{record: a.Record, epoch: r.epoch}, OutcomeLoadedElsewhere)
	case awaited && a.Kind == driver.Failed:
		return r.onFailure(r.loadErrorOf(r.key, a.Failure, 0))
	case a.Kind == driver.Filled:
		return next{step: stepLookUp}
	}
	return next{step: stepAcquire}
}

// skipRefresh ends a refresh that no caller waits for. If pause is not 0, a later Get may try again after the pause.
func (r *refill[V]) skipRefresh(pause time.Duration) next {
	r.refreshSkipped(r.l1.Get(r.key), r.key, pause)
	return next{step: stepDone}
}

// refreshSkipped reports that a refresh of key has ended without a load, or has not begun. e is the entry of key in L1,
// or nil. If pause is not 0, the next refresh of e is due after the pause.
func (l *Loader[V]) refreshSkipped(e *entry[V], key string, pause time.Duration) {
	if e != nil && pause > 0 {
		e.RefreshAt.Store(l.now() + pause.Microseconds())
	}
	l.emit(Event{Kind: EventRefreshSkipped, Key: key})
}

// slotToAcquireAtOnce returns a load slot if this refill should acquire without a read: the recent reads of this Loader
// mostly found no record, and a slot is free. Otherwise it returns nil. A refill that has seen a record must read the
// store first. The reason: Acquire grants the lease if the store still holds the record that was seen, even if that
// record is fresh. A refill whose key has a stand-in (an entry of L1 that can answer in place of the store) reads first
// as well, because such a read does not wait for a suspect store. The remaining conditions exclude refreshes, GetMany,
// bulk loads, and nodes that must not load at once.
func (r *refill[V]) slotToAcquireAtOnce(standIn *entry[V]) (free func()) {
	if r.seen != "" || r.mode != driver.Wait || r.many != nil || r.loadKey == nil || !r.missRate.high() ||
		standIn != nil || r.failing.sick() || r.heldBack() != nil {
		return nil
	}
	return r.tryLoadSlot()
}

// heldBack returns why this node must not load the key now, or nil. There are two reasons: a load of the key has
// outlived LoadTimeout and still runs, or the key has a back-off. For a Refresh, only the first reason counts.
func (r *refill[V]) heldBack() *LoadError {
	if r.loads.HasOutlived(r.key) {
		return &LoadError{Key: r.key, Node: r.node.id, Timeout: true, Err: errOutlived}
	}
	if r.want == flight.Refresh {
		return nil
	}
	return r.backOffOf(r.key)
}

// waitForOthers is acquire for a node that is held back. This node does not load, but waits if another node loads.
// err says why this node is held back.
func (r *refill[V]) waitForOthers(err *LoadError) next {
	if r.flight.Unawaited() {
		return failed(err)
	}
	r.flight.DrainInbox()
	switch a, callErr := r.callAcquire(driver.Look, func() {}); {
	case callErr != nil:
		return r.storeFailed(callErr)
	case a.State == driver.Changed:
		return r.serve(snapshot{record: a.Record, epoch: r.epoch}, OutcomeShared)
	case a.State == driver.Held:
		return next{step: stepWait, acquisition: a}
	case (a.Failure == "" || err.fleet) && !errors.Is(err, errOutlived):
		// The reply is Free, so the store holds no back-off of the fleet, and at most the note of a first failure
		// (a.Failure). If a back-off of the fleet holds this node back, or if there is no note, then that back-off has
		// ended, for instance by an Invalidate or another fill. So this node forgets the back-off, and may load.
		r.backoffs.forget(r.key)
		return next{step: stepAcquire}
	}
	return failed(err)
}

// onFailure is the next step after a load failed on another node. The cause of a failure may be the node itself, so one
// of the waiting nodes loads again at once. If that load fails as well, this second failure is the answer.
func (r *refill[V]) onFailure(err *LoadError) next {
	if err.fleet || r.earlier != nil && r.earlier.Node != err.Node {
		return failed(err)
	}
	if err.Node != r.node.id { // otherwise another flight of this node has failed, which says nothing about other nodes
		r.earlier = err
	}
	return next{step: stepAcquire}
}

// noteEarlier sets r.earlier to the failure that another node has left in the store. failure is empty if there is none.
func (r *refill[V]) noteEarlier(failure string) {
	if failure == "" {
		return
	}
	if err := r.loadErrorOf(r.key, failure, 0); err.Node != r.node.id {
		r.earlier = err
	}
}

// yield makes a node whose last loads failed wait once, before it asks for a lease. If other nodes need the key as
// well, one of them takes the lease meanwhile, and this node then waits for that node's load. yield waits as long as
// the last failed load of this node took, at most LockTTL, because a further failed load would keep the lease from the
// other nodes for as long. If an announcement about the key comes meanwhile, yield returns it.
func (r *refill[V]) yield() *driver.Announcement {
	if r.yielded || !r.failing.sick() {
		return nil
	}
	r.yielded = true
	timer := time.NewTimer(yieldFor(r.failing.took(), r.cfg.LockTTL))
	defer timer.Stop()
	select {
	case a := <-r.flight.Inbox():
		return &a
	case <-timer.C:
	case <-r.flight.Context().Done():
	}
	return nil
}
