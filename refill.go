package refill

import (
	"context"
	"time"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/flight"
	"github.com/refill-go/refill/internal/l1"
)

// This file is one refill, from its start to the lease: steps 2 and 3 of doc.go. Step 4 (load) is in load.go, steps 5
// (publish) and 6 (fail) are in publish.go, and step 7 (without the store) is in outage.go.

// refill brings one key up to date, once, for the callers of a flight. One goroutine at a time owns the refill, so its
// fields need no lock. The first owner is the goroutine of the leader, until start launches the remaining steps. Then
// the goroutine of the flight owns the refill.
type refill[V any] struct {
	*Loader[V]
	request[V]
	flight *flightOf[V]

	epoch    l1.Epoch       // noted before the start of the read or load that gave the answer
	seen     string         // token of the record in the store, as far as known
	fallback *entry[V]      // the best answer if the load fails
	awaited  string         // token of the fill that this refill waits for
	manyRead bool           // the read of its GetMany was used, or is outdated
	batched  *batchEntry[V] // its place in a bulk load, or nil
	slotHeld bool           // this refill has a store slot for its first call of the store
}

// next is the next step of a refill, and what that step needs.
type next struct {
	step
	acquisition *acquisition // stepWait, stepLoad
	err         error        // stepFail
}

type step uint8

const (
	stepBegin        step = iota
	stepLookUp            // 2
	stepAcquire           // 3
	stepWait              // 3: another fill has the lease
	stepLoad              // 4, then 5 or 6
	stepUncacheable       // 4 without a lease: the value must not be stored
	stepWithoutStore      // 7
	stepFail              // 6: there is no value
	stepDone
)

func failed(err error) next { return next{step: stepFail, err: err} }

// snapshot is what a read of the store has found.
type snapshot struct {
	record []byte
	epoch  l1.Epoch  // noted before the read
	tags   tagStates // of the tags of the record, if they have been read
}

// acquisition is the reply to a request for the lease.
type acquisition struct {
	driver.AcquireResult
	token string
	asked time.Time // before the request: the lease lives at least LockTTL from then
	free  func()    // the load slot, if State is Acquired
}

func (l *Loader[V]) newRefill(f *flightOf[V], q request[V]) *refill[V] {
	r := &refill[V]{Loader: l, request: q, flight: f}
	if q.many != nil {
		q.many.add(r)
	}
	return r
}

// start takes the first step of a refill on the goroutine of the caller that leads its flight, and launches the
// remaining steps on another goroutine. Most refills need only one read of the store, and handing that read to another
// goroutine costs as much as the read itself. The price falls on a caller whose ctx is cancelled during the read: it
// notices the cancellation only when the store has answered, within StoreTimeout. If the caller's deadline is nearer
// than StoreTimeout, start launches the whole refill, so the caller obeys its deadline at once.
func (l *Loader[V]) start(ctx context.Context, f *flightOf[V], q request[V]) {
	r, n := l.newRefill(f, q), next{step: stepBegin}
	defer func() { // also if OnEvent panics: other callers may have joined the flight
		if r.slotHeld {
			r.slotHeld = false
			<-l.storeSlots
		}
		if n.step == stepDone {
			f.End()
		} else {
			f.Launch(func() { r.run(n) })
		}
	}()
	if end, ok := ctx.Deadline(); ok && time.Until(end) < l.cfg.StoreTimeout {
		return
	}
	select {
	case l.storeSlots <- struct{}{}:
		r.slotHeld = true
		n = r.begin()
	default: // the refill has to wait for a store slot, and its caller may not want to wait
	}
}

// launch runs a whole refill on a goroutine of its own.
func (l *Loader[V]) launch(f *flightOf[V], q request[V]) {
	r := l.newRefill(f, q)
	f.Launch(func() { r.run(next{step: stepBegin}) })
}

// run takes a refill to its end.
func (r *refill[V]) run(n next) {
	r.flight.Listen()
	defer r.leaveBatch()
	for n.step != stepDone {
		switch n.step {
		case stepBegin:
			n = r.begin()
		case stepLookUp:
			n = r.lookUp()
		case stepAcquire:
			n = r.acquire()
		case stepWait:
			n = r.wait(n.acquisition)
		case stepLoad:
			n = r.loadAndPublish(n.acquisition)
		case stepUncacheable:
			n = r.loadUncacheable()
		case stepWithoutStore:
			n = r.withoutStore()
		case stepFail:
			n = r.serveStaleOnError(n.err)
		}
	}
}

// begin asks L1 once more, and then the store. Usually it reads the store, and acquires the lease only if the read
// found no fresh value. If more than half of the recent reads found nothing, it acquires the lease at once: that saves
// the trip of the read. Acquire returns a value that is there, but its script costs more than a read.
func (r *refill[V]) begin() next {
	n := r.askL1()
	if n.step != stepLookUp {
		return n
	}
	if free := r.slotToAcquireAtOnce(); free != nil {
		r.flight.Listen() // before another node can have the lease
		n = r.acquireWith(free)
	} else {
		n = r.lookUp()
	}
	r.missRate.note(r.seen == "" && n.step != stepWithoutStore)
	return n
}

// askL1 takes the first step from what L1 knows. If this node knows that its entry is past its time, the refill need
// not read the store, because Acquire compares the record with that entry anyway.
func (r *refill[V]) askL1() next {
	e := r.l1.Get(r.key)
	if e == nil || !r.l1.Valid(e) {
		return next{step: stepLookUp}
	}
	r.seen = e.Data.token
	now := r.now()
	f := inL1(e, now)
	switch {
	case e.Data.noStore && r.uncacheable(f):
		return next{step: stepUncacheable}
	case e.Data.noStore:
		return next{step: stepLookUp}
	case r.offer(e, f, OutcomeHit): // the entry comes from a flight that ended a moment ago
		return next{step: stepDone}
	case f != refreshDue && e.Data.life.at(now) <= refreshDue && r.want != flight.Refresh:
		return next{step: stepLookUp}
	}
	return next{step: stepAcquire}
}

// slotToAcquireAtOnce returns a load slot if this refill should skip the read and acquire. Otherwise it returns nil. A
// refill that has seen a record must not skip the read, because Acquire treats the record that was seen as outdated.
func (r *refill[V]) slotToAcquireAtOnce() (free func()) {
	if r.seen != "" || r.mode != driver.Wait || r.many != nil || r.loadKey == nil || !r.missRate.high() {
		return nil
	}
	return r.tryLoadSlot()
}

// lookUp reads the store.
func (r *refill[V]) lookUp() next {
	s, err := r.read()
	if err != nil {
		return r.storeFailed(err)
	}
	return r.serve(s, OutcomeShared)
}

// read returns what the GetMany of this refill has read, but only once. Otherwise it reads the store.
func (r *refill[V]) read() (s snapshot, err error) {
	if r.many != nil && !r.manyRead {
		r.manyRead = true
		if s, err := r.many.snapshot(r); err != nil {
			return snapshot{}, err
		} else if s != nil {
			return *s, nil
		}
	}
	ctx, done := r.storeCall()
	defer done()
	s.epoch = r.l1.Epoch(r.key)
	s.record, err = r.store.Get(ctx, r.full(r.key))
	return s, err
}

// serve judges a record of the store. A fresh record is the answer. The record of the very load that this refill has
// waited for is the answer as well, whatever its age. Otherwise a load longer than TTL would make one node after the
// other load again. A stale record is delivered at once, and the flight goes on as a refresh.
func (r *refill[V]) serve(s snapshot, o Outcome) next {
	r.epoch = s.epoch
	e := r.decode(r.key, s.record, s.epoch)
	if e == nil {
		r.seen = driver.RecordToken(s.record) // even if the record cannot be decoded: Acquire compares only the token
		return next{step: stepAcquire}
	}
	r.seen = e.Data.token
	if valid, err := r.checkTags(e, s.tags); err != nil {
		return r.storeFailed(err)
	} else if !valid {
		return next{step: stepAcquire}
	}
	f := e.Data.life.at(r.now())
	if e.Data.noStore {
		r.putL1(e, len(s.record))
		if r.uncacheable(f) {
			return next{step: stepUncacheable}
		}
		return next{step: stepAcquire}
	}
	if e.Data.token == r.awaited {
		f, o = fresh, OutcomeLoadedElsewhere
	}
	if f <= stale && (r.want != flight.Refresh || o == OutcomeLoadedElsewhere) {
		if f >= refreshDue {
			e.RefreshAt.Store(r.now() + r.cfg.LockTTL.Microseconds()) // this flight is the refresh
		}
		r.putL1(e, len(s.record))
	}
	if r.offer(e, f, o) {
		return next{step: stepDone}
	}
	return next{step: stepAcquire}
}

// uncacheable reports whether this refill loads without a lease, given the freshness of an entry that says no-store.
func (r *refill[V]) uncacheable(f freshness) bool { return f <= refreshDue && r.want != flight.Refresh }

// offer does with an entry what its freshness allows. A fresh entry is the answer. An entry that is due for a refresh
// is delivered at once, and a stale entry after SoftTimeout. From the delivery on, the flight is a refresh in the
// background. A Refresh takes none of these entries. offer reports whether the refill is done.
func (r *refill[V]) offer(e *entry[V], f freshness, o Outcome) (done bool) {
	if e.Data.life.at(r.now()) <= errorOnly {
		r.fallback = e
	}
	if r.want == flight.Refresh && o != OutcomeLoadedElsewhere {
		return false
	}
	a := answer[V]{entry: e, outcome: o, err: e.Data.err}
	switch f {
	case fresh:
		r.flight.Finish(a)
		return true
	case refreshDue:
		goOn := r.flight.ContinueInBackground()
		r.flight.Deliver(a)
		return !goOn
	case stale:
		a.outcome = OutcomeStale
		if r.flight.ContinueInBackground() {
			r.flight.DeliverAfter(r.cfg.SoftTimeout, a)
		}
	}
	return false
}

// acquire asks for the refill lock and for the claim, which is the right to store what will be loaded. The lock is for
// efficiency. Correctness comes from the claim.
func (r *refill[V]) acquire() next {
	if cause := context.Cause(r.flight.Context()); cause != nil {
		return failed(cause)
	}
	// The load slot comes first: a refill that had the lease and queued for a slot would keep all nodes waiting.
	free, announced, err := r.loadSlot(r.flight.Inbox(), nil)
	switch {
	case err != nil:
		return failed(err)
	case announced != nil:
		return r.onAnnouncement(*announced)
	}
	r.flight.DrainInbox() // the store's reply will be newer than these announcements
	return r.acquireWith(free)
}

func (r *refill[V]) acquireWith(free func()) next {
	a, err := r.callAcquire(free)
	switch {
	case err != nil:
		r.giveBack(a.token) // the store may have taken the lease nevertheless
		return r.storeFailed(err)
	case a.State == driver.Changed:
		return r.serve(snapshot{record: a.Record, epoch: r.epoch}, OutcomeShared)
	case a.State == driver.Held:
		return next{step: stepWait, acquisition: a}
	}
	return next{step: stepLoad, acquisition: a}
}

// callAcquire calls the store. If the store grants the lease, the acquisition owns free.
func (r *refill[V]) callAcquire(free func()) (a *acquisition, err error) {
	r.manyRead = true // what the GetMany has read is outdated from now on
	r.epoch = r.l1.Epoch(r.key)
	ctx, done := r.storeCall()
	defer done()
	a = &acquisition{token: r.node.token(), asked: time.Now(), free: free}
	a.AcquireResult, err = r.store.Acquire(ctx, driver.AcquireRequest{
		Key: r.full(r.key), Token: a.token, Seen: r.seen,
		LeaseTTL: r.cfg.LockTTL, ClaimTTL: r.cfg.LoadTimeout + r.cfg.LockTTL, Mode: r.mode,
	})
	if err != nil || a.State != driver.Acquired {
		free()
	}
	return a, err
}

// wait is the step of a refill that did not get the lease. If the key has a back-off, the error of the back-off is the
// answer. If another node loads, a refill without waiting callers ends. Any other refill waits until the result is
// announced, the lease ends, or all callers have left. There is no polling.
func (r *refill[V]) wait(a *acquisition) next {
	switch {
	case a.Holder == "" && tooLong(a.Left, r.cfg.MaxErrorTTL):
		r.mode = driver.Force
		return next{step: stepAcquire}
	case a.Holder == "":
		return failed(r.loadErrorOf(r.key, a.Failure, a.Left))
	case r.flight.Unawaited():
		r.emit(Event{Kind: EventRefreshSkipped, Key: r.key})
		return next{step: stepDone}
	case r.mode == driver.Try: // a caller has joined: the store must note that the lease is awaited
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

// onAnnouncement decides what an announcement means for a waiting refill. It is the result of the load that this refill
// waits for, or only a reason to ask the store again.
func (r *refill[V]) onAnnouncement(a driver.Announcement) next {
	awaited := a.Token == r.awaited && r.awaited != ""
	switch {
	case awaited && a.Kind == driver.Filled && len(a.Record) > 0:
		return r.serve(snapshot{record: a.Record, epoch: r.epoch}, OutcomeLoadedElsewhere)
	case awaited && a.Kind == driver.Failed:
		return failed(r.loadErrorOf(r.key, a.Failure, 0))
	case a.Kind == driver.Filled:
		return next{step: stepLookUp}
	}
	return next{step: stepAcquire}
}
