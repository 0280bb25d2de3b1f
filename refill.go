package refill

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/flight"
	"github.com/refill-go/refill/internal/l1"
)

// This file holds the steps of a refill, and step 2 of doc.go (look up). Step 3 (acquire) is in acquire.go, step 4
// (load) is in load.go, steps 5 (publish) and 6 (fail) are in publish.go, and step 7 (without the store) is in
// outage.go.

// refill brings one key up to date, once, for the callers of a flight. One goroutine at a time owns the refill, so its
// fields need no lock. The first owner is the goroutine of the leader. When start launches the remaining steps, the
// goroutine of the flight becomes the owner.
type refill[V any] struct {
	*Loader[V]
	request[V]
	flight *flightOf[V]

	epoch    l1.Epoch       // of the key, noted before the latest read or load of this refill began
	seen     string         // token of the record that this refill has seen; empty for none
	fallback *entry[V]      // the old value or nil, for Previous; if the load fails, served while its life allows it
	awaited  string         // token of the fill that this refill waits for; empty before the first wait
	earlier  *LoadError     // the last failure of another node, or nil; that failure does not yet hold all nodes back
	yielded  bool           // this refill has waited in yield, and does not yield again
	manyRead bool           // the next read must not use the shared read of the GetMany, which was used or is outdated
	batched  *batchEntry[V] // the place of this refill in a bulk load, or nil
	launched bool           // run has begun, on the goroutine of the flight
	noStore  bool           // the store did not answer, so an answer from L1 is not compared with the store
	slotHeld bool           // start has taken a store slot, which the first call of the store will use
	loading  atomic.Int32   // state of the load, see loadCall: it decides which goroutine owns this refill
}

// next is the next step of a refill, with the data that the step needs.
type next struct {
	step
	acquisition *acquisition // for stepWait and stepLoad
	found       *snapshot    // for stepServe
	err         error        // for stepFail
}

// step is one step of a refill. The numbers in the comments below are the steps of doc.go.
type step uint8

const (
	stepBegin        step = iota
	stepLookUp            // 2
	stepServe             // 2: the record has tags, whose states must be read as well
	stepAcquire           // 3
	stepWait              // 3: another fill has the lease
	stepLoad              // 4, then 5 or 6
	stepUncacheable       // 4 without a lease: the value must not be stored
	stepWithoutStore      // 7
	stepFail              // 6: there is no value
	stepDone
	stepTakenOver // another goroutine takes the remaining steps, see loadCall
)

func failed(err error) next { return next{step: stepFail, err: err} }

// snapshot is what a read of the store has found.
type snapshot struct {
	record []byte
	epoch  l1.Epoch  // of the key, noted before the read
	tags   tagStates // states of the tags of the record; nil if they have not been read
}

// acquisition is the reply of Acquire, with what the refill needs to use the lease.
type acquisition struct {
	driver.AcquireResult
	token string
	asked time.Time // when Acquire was called: the lease lives at least until asked + LockTTL
	free  func()    // gives the load slot back; the acquisition owns free if State is Acquired
}

func (l *Loader[V]) newRefill(f *flightOf[V], q request[V]) *refill[V] {
	r := &refill[V]{Loader: l, request: q, flight: f}
	if q.many != nil {
		q.many.add(r)
	}
	return r
}

// start takes the first step of a refill on the goroutine of the leader, and launches the remaining steps on another
// goroutine. Most refills need only one read of the store, and handing that read to another goroutine would cost as
// much as the read itself. The drawback: if the ctx of the leader is cancelled during the read, the leader notices the
// cancellation only after the read, within StoreTimeout. So if the deadline of the leader is nearer than StoreTimeout,
// start launches the whole refill, and the leader can leave at its deadline.
func (l *Loader[V]) start(ctx context.Context, f *flightOf[V], q request[V]) {
	r, n := l.newRefill(f, q), next{step: stepBegin}
	defer func() { // deferred, because OnEvent may panic, and other callers may have joined the flight
		if r.slotHeld {
			r.slotHeld = false
			<-l.storeSlots
		}
		if n.step == stepDone {
			f.End()
		} else {
			go r.run(n)
		}
	}()
	if end, ok := ctx.Deadline(); ok && time.Until(end) < l.cfg.StoreTimeout {
		return
	}
	select {
	case l.storeSlots <- struct{}{}:
		r.slotHeld = true
		n = r.begin()
		if n.step == stepAcquire && l.noLoadSlot() && f.Unawaited() {
			n = r.skipRefresh(noSlotPause)
		}
	default: // no store slot is free: the launched refill waits for a slot, and its caller can leave
	}
}

// launch runs a whole refill on a goroutine of its own.
func (l *Loader[V]) launch(f *flightOf[V], q request[V]) {
	r := l.newRefill(f, q)
	go r.run(next{step: stepBegin})
}

// run takes all steps of a refill, from n to the end, unless another goroutine takes the refill over.
func (r *refill[V]) run(n next) {
	r.launched = true
	r.flight.Listen()
	defer func() { // also after a Goexit of the load function
		if r.loading.Load() != loadTaken {
			r.end()
		}
	}()
	r.steps(n)
}

// end is called once, when the refill has no further steps.
func (r *refill[V]) end() {
	r.leaveBatch()
	r.flight.End()
}

func (r *refill[V]) steps(n next) {
	for n.step != stepDone && n.step != stepTakenOver {
		switch n.step {
		case stepBegin:
			n = r.begin()
		case stepLookUp:
			n = r.lookUp()
		case stepServe:
			n = r.serve(*n.found, OutcomeShared)
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

// begin asks L1 once more, and then the store. Usually begin reads the store first, and the refill acquires the lease
// only if the read found no fresh value. If more than half of the recent refills found no record in the store, begin
// acquires the lease at once, which saves the round trip of the read. Acquire also returns a record that the store
// holds, but the script of Acquire costs more than a read.
//
// If this node could not complete an invalidation of the key, the store may still hold the old value. So begin first
// repeats the invalidation, on a launched goroutine, because the leader must not wait for that.
func (r *refill[V]) begin() next {
	if !r.retries.Empty() {
		if !r.launched {
			return next{step: stepBegin}
		}
		if err := r.retries.TryNow(target{r.full(r.key), false}); err != nil {
			return r.storeFailed(err)
		}
		r.manyRead = true // the shared read may have come before the invalidation
	}
	e := r.l1.Get(r.key)
	n := r.askL1(e)
	if n.step != stepLookUp {
		return n
	}
	standIn := r.standIn(e)
	if free := r.slotToAcquireAtOnce(standIn); free != nil {
		r.flight.Listen() // before Acquire, so that no announcement of the holder is missed
		n = r.acquireWith(free)
	} else {
		n = r.lookUpBeside(standIn)
	}
	r.missRate.note(r.seen == "" && n.step != stepWithoutStore)
	return n
}

// askL1 chooses the first step by the entry of L1, which may be nil. If the value of the entry is due for a refresh or
// older, the refill need not read the store, because Acquire compares the stored record with the entry anyway. If the
// value is fresh, but the entry may be outdated (LocalTTL is over, or a newer value was announced), the refill reads
// the store, which probably has a fresh value.
func (r *refill[V]) askL1(e *entry[V]) next {
	if e == nil || !r.l1.Valid(e) {
		return next{step: stepLookUp}
	}
	r.seen = e.Data.token()
	now := r.now()
	f := inL1(e, now)
	switch {
	case e.Data.noStore() && r.uncacheable(f):
		return next{step: stepUncacheable}
	case e.Data.noStore():
		return next{step: stepLookUp}
	case r.offer(e, f, OutcomeHit): // the entry comes from a flight that ended a moment ago
		return next{step: stepDone}
	case f != refreshDue && lifeIn(e).at(now) <= refreshDue && r.want != flight.Refresh:
		return next{step: stepLookUp}
	}
	return next{step: stepAcquire}
}

// lookUp reads the store, and serves the record that the read has found.
func (r *refill[V]) lookUp() next { return r.lookUpBeside(r.standIn(r.l1.Get(r.key))) }

// lookUpBeside is lookUp with the stand-in of the key, or nil. A stand-in is an entry of L1 that can answer in place of
// the store.
func (r *refill[V]) lookUpBeside(standIn *entry[V]) next {
	if standIn != nil {
		return r.lookUpUnlessSuspect(standIn)
	}
	s, err := r.read()
	if err != nil {
		return r.storeFailed(err)
	}
	return r.serve(s, OutcomeShared)
}

// read reads the store. If this refill belongs to a GetMany, its first read returns what the shared read of the GetMany
// has found. If the shared read has nothing for this refill, read asks the store.
func (r *refill[V]) read() (s snapshot, err error) {
	if r.many != nil && !r.manyRead {
		r.manyRead = true
		if s, err := r.many.snapshot(r); err != nil {
			return snapshot{}, err
		} else if s != nil {
			return *s, nil
		}
	}
	ctx, slot := r.storeCall()
	defer slot.free()
	s.epoch = r.l1.Epoch(r.key)
	s.record, err = r.store.Get(ctx, r.full(r.key))
	return s, err
}

// serve judges a record of the store. If the record is fresh, it is the answer. If the record comes from the load that
// this refill has waited for, the record is the answer whatever its age. Without this rule, each waiting node in turn
// would load again after a load that took longer than TTL. If any other record is stale, it is delivered at once or
// after SoftTimeout, and the flight goes on as a refresh.
//
// For a record with tags, serve also reads the states of the tags. The goroutine of the leader must not wait for this
// second read. So on that goroutine, serve leaves the record to the goroutine of the flight (stepServe).
//
// If an invalidation of the key has failed on this node since this refill began, the record may be older than the
// invalidation. The refill then begins again, so that it first repeats the invalidation.
func (r *refill[V]) serve(s snapshot, o Outcome) next {
	if !r.retries.Empty() && r.retries.Has(target{r.full(r.key), false}) {
		return next{step: stepBegin}
	}
	r.epoch = s.epoch
	if !r.launched && len(driver.RecordTags(s.record)) > 0 {
		r.seen = driver.RecordToken(s.record)
		return next{step: stepServe, found: &s}
	}
	e, storedAt := r.decode(r.key, s.record, s.epoch)
	if e == nil {
		return r.onMiss(driver.RecordToken(s.record), storedAt)
	}
	r.seen = e.Data.token()
	states, err := r.statesOf(e, s.tags)
	switch {
	case err != nil:
		return r.storeFailed(err)
	case !r.tagsValid(e, states):
		return next{step: stepAcquire}
	}
	f := lifeIn(e).at(r.now())
	if e.Data.noStore() {
		r.keepInL1(e, s.record)
		if r.uncacheable(f) {
			return next{step: stepUncacheable}
		}
		return next{step: stepAcquire}
	}
	if own := r.unconfirmedAfter(e); own != nil {
		if r.offer(own, lifeIn(own).at(r.now()), OutcomeHit) {
			return next{step: stepDone}
		}
		return next{step: stepAcquire}
	}
	if e.Data.token() == r.awaited && !states.expired(e.Data.tags(), lifeIn(e).began) {
		f, o = fresh, OutcomeLoadedElsewhere
	}
	if f <= stale && (r.want != flight.Refresh || o == OutcomeLoadedElsewhere) {
		if f >= refreshDue {
			// This flight goes on as the refresh, so no Get needs to start another refresh for LockTTL.
			e.RefreshAt.Store(r.now() + r.cfg.LockTTL.Microseconds())
		}
		r.keepInL1(e, s.record)
	}
	if r.offer(e, f, o) {
		return next{step: stepDone}
	}
	return next{step: stepAcquire}
}

// onMiss is the step after a read that found no record, or a record that this node cannot decode. Acquire compares
// tokens only, so the load may replace a bad record. But two nodes whose codecs do not understand each other would
// replace each other's records at every Get, with a load each time. So if the codec cannot decode a record that is
// younger than ErrorTTL, this node does without the store: it loads for itself, and leaves the record to the nodes that
// can decode it.
func (r *refill[V]) onMiss(token string, storedAt time.Time) next {
	r.seen = token
	if !storedAt.IsZero() && r.store.Now().Before(storedAt.Add(r.cfg.ErrorTTL)) && r.want != flight.Refresh {
		return next{step: stepWithoutStore}
	}
	return next{step: stepAcquire}
}

// uncacheable reports whether this refill loads without a lease, because the key has a no-store entry. f is the
// freshness of that entry.
func (r *refill[V]) uncacheable(f freshness) bool { return f <= refreshDue && r.want != flight.Refresh }

// offer answers the callers with an entry, if the freshness f of the entry allows it. A fresh entry ends the refill. An
// entry that is due for a refresh is delivered at once, and a stale entry after SoftTimeout. In these two cases the
// flight goes on as a refresh in the background. A refill for Loader.Refresh accepts only the result of a load that the
// refill has waited for. offer reports whether the refill is done.
func (r *refill[V]) offer(e *entry[V], f freshness, o Outcome) (done bool) {
	r.fallback = e
	if r.want == flight.Refresh && o != OutcomeLoadedElsewhere {
		return false
	}
	a := answer[V]{entry: e, outcome: o, err: e.Data.err(), withoutStore: r.noStore}
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
