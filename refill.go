package refill

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"
)

// This file is what a flight does, in the steps that doc.go tells: look (2), take the lease (3), load (4), publish (5),
// fail (6), and what is left without the store (7).

// fly flies a call to its end.
func (l *Loader[V]) fly(c *call[V]) {
	l.flights.listen(c)
	defer func() {
		if c.seat != nil {
			c.seat.leave()
		}
	}()
	err := l.refill(c)
	if down := (*storeError)(nil); errors.As(err, &down) {
		l.emit(Event{Kind: EventStoreError, Key: c.key, Err: down.err})
		err = l.alone(c)
	} else if errors.Is(err, errMark) {
		err = l.pass(c)
	}
	if err != nil {
		l.fallBack(c, err)
	}
}

// begin flies the first leg of a flight on the goroutine of the caller who has started it, and launches the rest. Most
// flights need no more than one read of the store, and to hand that to another goroutine costs as much as the read. What it
// costs in turn: a caller whose ctx is cancelled meanwhile notices when the store has answered, within a StoreTimeout. A
// ctx with a deadline before that is obeyed to the moment: its flight is launched at once.
func (l *Loader[V]) begin(ctx context.Context, c *call[V]) {
	done := false
	defer func() { // also when OnEvent panics: others may have joined
		if c.turn {
			c.turn = false
			<-l.turns
		}
		if done {
			l.flights.end(c)
		} else {
			l.flights.launch(c)
		}
	}()
	if end, ok := ctx.Deadline(); ok && time.Until(end) < l.cfg.StoreTimeout {
		return
	}
	select {
	case l.turns <- struct{}{}:
	default: // it has to wait, and its caller may not want to
		return
	}
	c.begun, c.turn = true, true
	done, c.err = l.approach(c)
}

// approach is the first leg: what L1 knows, and a look at the store. Where most looks find nothing, it bids right away:
// that finds what a look would have found, and spares a trip otherwise.
func (l *Loader[V]) approach(c *call[V]) (done bool, err error) {
	look, done, err := l.recall(c)
	if !look || err != nil {
		return done, err
	}
	if free := l.slotAtOnce(c); free == nil {
		done, err = l.look(c)
	} else {
		l.flights.listen(c) // before somebody else can have the lease
		if c.tried, err = l.try(c, free); err == nil && c.tried.got.State == BeginOther {
			_, done, err = l.heed(c, c.tried)
			c.tried = nil
		}
	}
	l.misses.note(err == nil && c.seen == "")
	return done, err
}

// slotAtOnce is a place among the MaxLoads for whom it pays to bid without a look, and who need not wait for one; or nil.
// Whoever has seen the record has to look: it may be good still, and to bid says that it is not.
func (l *Loader[V]) slotAtOnce(c *call[V]) (free func()) {
	if c.seen != "" || c.ask != AskLeft || c.group != nil || c.load == nil || !l.misses.likely() {
		return nil
	}
	free, _, _ = l.slot(c, nil, passed)
	return free
}

// passed is a timer that is over.
var passed = func() <-chan time.Time {
	c := make(chan time.Time)
	close(c)
	return c
}()

// missShare is the share of first looks at the store that found nothing, of late.
type missShare struct{ average atomic.Int32 } // of 1<<20, over some 32 looks

func (m *missShare) note(miss bool) {
	now, was := int32(0), m.average.Load()
	if miss {
		now = 1 << 20
	}
	m.average.Store(was + (now-was)/32) // two at once may lose one: it is a guess anyway
}

// likely says that an attempt is cheaper than a look: a script that finds a value costs 1.6 GETs, a look in vain one.
func (m *missShare) likely() bool { return m.average.Load() > 1<<19 }

// refill finds the value of a key that L1 could not answer, and settles c with it. It returns nil when that is done, or
// when a background refresh has nothing to do; a *storeError when the store did not answer; errMark when the value must not
// be stored; else why there is no value.
func (l *Loader[V]) refill(c *call[V]) error {
	look, done, err := false, false, c.err
	if !c.begun {
		done, err = l.approach(c)
	}
	if c.tried != nil && err == nil {
		look, done, err = l.heed(c, c.tried)
	}
	for !done && err == nil {
		if look {
			done, err = l.look(c)
		}
		if !done && err == nil {
			look, done, err = l.compete(c)
		}
	}
	return err
}

// compete tries to become the one who loads, and loads; or waits for the one who does. look says that the store has to be
// asked before the next try.
func (l *Loader[V]) compete(c *call[V]) (look, done bool, err error) {
	if err := context.Cause(c.ctx); err != nil {
		return false, false, err
	}
	// The slot comes before the lease: whoever queues for a slot with the lease in hand keeps everybody waiting.
	free, note, err := l.slot(c, c.notes, nil)
	if err != nil {
		return false, false, err
	}
	if note != nil {
		return l.react(c, *note)
	}
	c.drain()
	t, err := l.try(c, free)
	if err != nil {
		return false, false, err
	}
	return l.heed(c, t)
}

// attempt is a try to become the one who loads.
type attempt struct {
	token string
	asked time.Time
	free  func() // the slot to load in
	got   Begun
}

// try asks the store for the refill lock, and for the right to store what will be loaded. The lock is for efficiency;
// correctness comes from the claim. An attempt that succeeds owns free.
func (l *Loader[V]) try(c *call[V], free func()) (t *attempt, err error) {
	taken := false
	defer func() { // also when OnEvent panics
		if !taken {
			free()
		}
	}()
	c.sighted = true // what its group has read is from before
	c.at = l.local.note(c.key)
	ctx, cancel := l.storeCtx(c)
	defer cancel()
	t = &attempt{token: l.node.token(), asked: time.Now(), free: free} // after it had its turn
	t.got, err = l.store.Begin(ctx, Bid{
		Key: l.full(c.key), Token: t.token, Seen: c.seen,
		LeaseTTL: l.cfg.LockTTL, ClaimTTL: l.cfg.LoadTimeout + l.cfg.LockTTL, Ask: c.ask,
	})
	if err != nil {
		l.giveBack(c, t.token) // the store may have taken it all the same
		return t, &storeError{err}
	}
	taken = t.got.State == BeginTaken
	return t, nil
}

// heed does what an attempt has shown is to be done: load, take the value that is there, or wait.
func (l *Loader[V]) heed(c *call[V], t *attempt) (look, done bool, err error) {
	switch t.got.State {
	case BeginOther:
		done, err := l.take(c, sighting{record: t.got.Record, at: c.at}, EventShared)
		return false, done, err
	case BeginHeld:
		return l.follow(c, t.got)
	}
	if cause := context.Cause(c.ctx); cause != nil { // everybody left meanwhile
		t.free()
		l.release(c, t.token)
		return false, false, cause
	}
	return false, true, l.fill(c, t)
}

// recall begins with what L1 knows. look says that the store has to be asked: it need not be by a node that knows that its
// entry is past its time, since the bid looks at the value anyway.
func (l *Loader[V]) recall(c *call[V]) (look, done bool, err error) {
	e := l.local.get(c.key)
	if e == nil || !l.local.current(e) {
		return true, false, nil
	}
	c.seen = e.token
	now := l.now()
	f := e.inL1(now)
	if e.pass {
		return true, false, c.heeds(f)
	}
	if l.offer(c, e, f, EventHit) { // a flight that ended a moment ago has put it there
		return false, true, nil
	}
	return f != Early && e.life.at(now) <= Early && !c.forced, false, nil
}

// errMark says that there is a mark in the place of a value that must not be stored: the flight has nothing to wait for.
var errMark = errors.New("refill: not to be stored")

// heeds is errMark if a mark of this freshness counts for the flight.
func (c *call[V]) heeds(f Freshness) error {
	if f <= Early && !c.forced {
		return errMark
	}
	return nil
}

// offer does with an entry what its freshness allows: a fresh one is the answer; one that is to be refreshed is handed out,
// a stale one when SoftTimeout is over, and from then on c is a refresh, if anybody is there to want one. For a Refresh it
// is neither. It reports whether c is done.
func (l *Loader[V]) offer(c *call[V], e *entry[V], f Freshness, how EventKind) (done bool) {
	if e.life.at(l.now()) <= Spare {
		c.old = e
	}
	if c.forced && how != EventWaited {
		return false
	}
	a := answer[V]{entry: e, how: how, err: e.err}
	switch f {
	case Fresh:
		c.settle(a)
		return true
	case Early:
		goOn := c.behind || l.flights.stay(c)
		c.handOut(a)
		return !goOn
	case Stale:
		a.how = EventStale
		if c.behind || l.flights.stay(c) {
			c.handOutAfter(l.cfg.SoftTimeout, a)
		}
	}
	return false
}

// look asks the store.
func (l *Loader[V]) look(c *call[V]) (done bool, err error) {
	s, err := l.sight(c)
	if err != nil {
		return false, &storeError{err}
	}
	return l.take(c, s, EventShared)
}

// sight reads the store, or takes what the group of c has read.
func (l *Loader[V]) sight(c *call[V]) (s sighting, err error) {
	if g := c.group; g != nil && !c.sighted {
		c.sighted = true
		if s, err, ok := g.sight(c); ok {
			return s, err
		}
	}
	ctx, cancel := l.storeCtx(c)
	defer cancel()
	s.at = l.local.note(c.key)
	s.record, err = l.store.Get(ctx, l.full(c.key))
	return s, err
}

// take looks at a record that the store gave. Fresh, or made by the very load that c waits for, it is the answer: the
// latter whatever its age, or a load longer than TTL would let one node after the other load again. A stale one is
// handed out at once, and c goes on as a refresh.
func (l *Loader[V]) take(c *call[V], s sighting, how EventKind) (done bool, err error) {
	c.at = s.at
	e := l.decode(c.key, s.record, c.at)
	if e == nil {
		c.seen = RecordToken(s.record) // also that of a record that cannot be read: the claim compares nothing else
		return false, nil
	}
	c.seen = e.token
	if fine, err := l.judge(c, e, s.marks); err != nil || !fine {
		return false, err
	}
	f := e.life.at(l.now())
	if e.pass {
		l.keep(e, len(s.record))
		return false, c.heeds(f)
	}
	if e.token == c.lostTo {
		f, how = Fresh, EventWaited
	}
	if f <= Stale && (!c.forced || how == EventWaited) {
		if f >= Early {
			e.retry.Store(l.now() + l.cfg.LockTTL.Microseconds()) // this flight is the refresh
		}
		l.keep(e, len(s.record))
	}
	return l.offer(c, e, f, how), nil
}

// judge asks for the marks of an entry, unless a group has read them, and applies them.
func (l *Loader[V]) judge(c *call[V], e *entry[V], m marks) (fine bool, err error) {
	if m == nil && len(e.tags()) > 0 {
		ctx, cancel := l.storeCtx(c)
		defer cancel()
		if m, err = l.marks.ask(ctx, e.tags(), 0); err != nil {
			return false, &storeError{err}
		}
	}
	return l.stands(e, m), nil
}

// slot waits for one of the MaxLoads, until impatient is ready or there is a note: somebody else's load may make ours
// needless. A load that waits for this flight must not let it queue: it may hold the last slot itself.
func (l *Loader[V]) slot(c *call[V], notes <-chan Note, impatient <-chan time.Time) (free func(), note *Note, err error) {
	if c.load == nil {
		return l.bulkSlot(c, notes, impatient)
	}
	if l.slots == nil {
		return func() {}, nil, nil
	}
	select {
	case l.slots <- struct{}{}:
		return func() { <-l.slots }, nil, nil
	default:
	}
	select {
	case l.slots <- struct{}{}:
		return func() { <-l.slots }, nil, nil
	case <-c.hurry:
		return func() {}, nil, nil
	case n := <-notes:
		return nil, &n, nil
	case <-impatient:
		return nil, nil, ErrOverloaded
	case <-c.ctx.Done():
		return nil, nil, context.Cause(c.ctx)
	}
}

// follow is what a flight does that did not get the lease: somebody has it, or a failed load has left a back-off there.
func (l *Loader[V]) follow(c *call[V], held Begun) (look, done bool, err error) {
	switch {
	case held.Holder == "" && tooLong(held.Left, l.cfg.MaxErrorTTL):
		c.ask = AskForce
		return false, false, nil
	case held.Holder == "":
		return false, false, l.loadErrorOf(c.key, held.Failure, held.Left)
	case c.behind && !l.flights.wanted(c):
		l.emit(Event{Kind: EventBusy, Key: c.key})
		return false, true, nil
	case c.ask == AskOnce: // somebody has joined who waits: that has to be known where the lease is
		c.ask = AskLeft
		return false, false, nil
	}
	c.lostTo = held.Holder
	return l.await(c, held.Left)
}

// await waits until the holder's result is announced, its lease is over, or nobody waits any more; no polling.
func (l *Loader[V]) await(c *call[V], left time.Duration) (look, done bool, err error) {
	timer := time.NewTimer(lookAgain(left, l.cfg.LockTTL))
	defer timer.Stop()
	select {
	case n := <-c.notes:
		return l.react(c, n)
	case <-timer.C:
		return false, false, nil
	case <-c.ctx.Done():
		return false, false, context.Cause(c.ctx)
	}
}

// react takes a note for what it is: the result of the load that c waits for, or a hint to try again.
func (l *Loader[V]) react(c *call[V], n Note) (look, done bool, err error) {
	if awaited := n.Token == c.lostTo && c.lostTo != ""; awaited {
		switch {
		case n.Kind == NoteFilled && len(n.Record) > 0:
			done, err := l.take(c, sighting{record: n.Record, at: c.at}, EventWaited)
			return false, done, err
		case n.Kind == NoteFailed:
			return false, false, l.loadErrorOf(c.key, n.Failure, 0)
		}
	}
	return n.Kind == NoteFilled, false, nil
}

// fill loads under the lease and publishes.
func (l *Loader[V]) fill(c *call[V], t *attempt) error {
	full, token, began := l.full(c.key), t.token, t.got.Now
	lease := hold(t.asked, l.cfg.LockTTL, l.cfg.StoreTimeout, func(ctx context.Context) (bool, error) {
		return l.store.Renew(ctx, full, token, l.cfg.LockTTL)
	})
	r := l.run(c, t.free, lease)
	lease.end()
	select {
	case <-lease.lost:
		l.emit(Event{Kind: EventLeaseLost, Key: c.key})
	default:
	}
	if r.failed() {
		return l.fail(c, token, r)
	}
	c.mended = l.failures.forget(c.key)
	e, record, err := l.encode(c, token, began, r)
	switch {
	case err != nil:
		// The value is good, but nobody else can have it.
		l.leaveFailure(c, token, l.loadError(c, err, false))
		c.settle(answer[V]{entry: e, how: EventError, err: err})
	case r.terms.noStore:
		l.publishMark(c, token, began, r.terms)
		c.settle(answer[V]{entry: e, how: EventLed, err: e.err})
	default:
		l.publish(c, token, began, e, record)
		c.settle(answer[V]{entry: e, how: EventLed, err: e.err})
	}
	return nil
}

// publish stores the record if the claim is still this fill's. The callers of this flight get their value either way.
func (l *Loader[V]) publish(c *call[V], token string, began time.Time, e *entry[V], record []byte) {
	l.hold(c, e)
	ctx, cancel := l.storeCtx(c)
	defer cancel()
	state, err := l.store.Publish(ctx, Publication{
		Key: l.full(c.key), Token: token, Began: began, Replaced: c.seen, Record: record, Keep: e.life.keep(l.now()),
		Quiet: c.seen == "" && !c.mended,
	})
	kind := EventPublished
	switch {
	case err != nil:
		kind = EventStoreError
		l.giveBack(c, token)
	case state == PublishRefused:
		l.emit(Event{Kind: EventRefused, Key: c.key})
		return // voided: not for L1 either
	case state == PublishNoRoom:
		kind, err = EventStoreError, errNoRoom
	}
	l.emit(Event{Kind: kind, Key: c.key, Err: err})
	l.keep(e, len(record))
}

// hold sees to it that the tags of an entry have marks before its record is stored.
func (l *Loader[V]) hold(c *call[V], e *entry[V]) {
	if len(l.held.missing(e.tags(), time.Now())) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(c.values, 2*l.cfg.StoreTimeout) // a call that runs already, and ours
	defer cancel()
	if _, err := l.holds.ask(ctx, e.tags(), e.life.age(l.now())); err != nil { // it is void until somebody holds its tags
		l.emit(Event{Kind: EventStoreError, Key: c.key, Err: err})
	}
}

var errNoRoom = errors.New("refill: the store is full")

// fail ends a fill that has no value.
func (l *Loader[V]) fail(c *call[V], token string, r loaded[V]) error {
	if cause := context.Cause(c.ctx); cause != nil {
		l.emit(Event{Kind: EventAbandoned, Key: c.key, Took: r.took, Err: r.err})
		l.release(c, token) // no back-off: the key works at once
		return cause
	}
	err := l.loadError(c, r.err, r.panicked)
	l.failures.remember(c.key, err, c.at.stripe)
	l.leaveFailure(c, token, err)
	return err
}

func (l *Loader[V]) leaveFailure(c *call[V], token string, e *LoadError) {
	ctx, cancel := l.storeCtx(c)
	defer cancel()
	if err := l.store.Fail(ctx, l.full(c.key), token, e.wire(), e.RetryAfter); err != nil {
		l.emit(Event{Kind: EventStoreError, Key: c.key, Err: err})
	}
}

// release frees lease and claim now, giveBack in the background: after an error, when nobody shall wait for a store that
// does not answer.
func (l *Loader[V]) release(c *call[V], token string) {
	ctx, cancel := l.storeCtx(c)
	defer cancel()
	l.letGo(ctx, c.key, token)
}

func (l *Loader[V]) giveBack(c *call[V], token string) {
	l.later.Go(func() {
		ctx, cancel := context.WithTimeout(c.values, l.cfg.StoreTimeout)
		defer cancel()
		l.letGo(ctx, c.key, token)
	})
}

func (l *Loader[V]) letGo(ctx context.Context, key, token string) {
	if err := l.store.Release(ctx, l.full(key), token); err != nil {
		l.emit(Event{Kind: EventStoreError, Key: key, Err: err})
	}
}

// alone is what a flight does without the store: serve what L1 still has, else load for this process, within MaxLoads and,
// after a failure, not before ErrorTTL is over.
func (l *Loader[V]) alone(c *call[V]) error {
	c.at = l.local.note(c.key)
	if l.serveUnheard(c) {
		return nil
	}
	if err := l.failure(c.key); err != nil && !c.forced {
		return err
	}
	patience := time.NewTimer(l.cfg.StoreTimeout)
	defer patience.Stop()
	free, _, err := l.slot(c, nil, patience.C)
	if err != nil {
		return err
	}
	return l.loadAlone(c, free, true)
}

// pass answers with a load of this process's own, since the value must not be stored.
func (l *Loader[V]) pass(c *call[V]) error {
	if c.behind && !l.flights.wanted(c) {
		return nil
	}
	c.at = l.local.note(c.key)
	if err := l.failure(c.key); err != nil {
		return err
	}
	free, _, err := l.slot(c, nil, nil)
	if err != nil {
		return err
	}
	return l.loadAlone(c, free, false)
}

// loadAlone loads without a lease, for this process, and keeps the value in L1 if it may. It owns free.
func (l *Loader[V]) loadAlone(c *call[V], free func(), keep bool) error {
	began := l.store.Now()
	r := l.run(c, free, nil)
	if r.failed() {
		if cause := context.Cause(c.ctx); cause != nil {
			return cause
		}
		err := l.loadError(c, r.err, r.panicked)
		l.failures.remember(c.key, err, c.at.stripe)
		return err
	}
	l.failures.forget(c.key)
	e, record, err := l.encode(c, l.node.token(), began, r)
	how := EventLed
	if err != nil {
		how = EventError
	} else {
		err = e.err
		if keep && !r.terms.noStore {
			l.keep(e, len(record))
		}
	}
	c.settle(answer[V]{entry: e, how: how, err: err})
	return nil
}

// serveUnheard serves an entry of L1 that would be asked about if there were anybody to ask. It reports whether c is done.
func (l *Loader[V]) serveUnheard(c *call[V]) bool {
	e := l.local.get(c.key)
	if e == nil || e.pass || c.forced || !l.local.unvoided(e) {
		return false
	}
	return l.offer(c, e, e.life.at(l.now()), EventHit)
}

// fallBack ends a flight that found no value: with what is old but better than an error, or with the error.
func (l *Loader[V]) fallBack(c *call[V], err error) {
	if errors.Is(err, errClosing) {
		err = ErrClosed
	}
	e := c.old
	if e != nil {
		var failed *LoadError
		if errors.As(err, &failed) {
			e.retry.Store(l.now() + failed.RetryAfter.Microseconds())
		}
		if e.life.at(l.now()) <= Spare && l.local.unvoided(e) && !c.forced {
			c.settle(answer[V]{entry: e, how: EventStaleOnError, err: e.err})
			return
		}
	}
	c.settle(answer[V]{err: err})
}

// keep puts an entry into L1. One that is dead already is never served from there, but takes the place of an older one that
// would be; one that was voided on its way would only be in the way.
func (l *Loader[V]) keep(e *entry[V], size int) {
	if !l.local.unvoided(e) {
		return
	}
	if now := l.now(); e.life.at(now) <= Early { // else not even for the tick that the coarse clock lags behind
		l.local.admit(e, now)
	}
	l.local.put(e, size)
}

// loaded is what a load function returned, or what became of it.
type loaded[V any] struct {
	value    V
	err      error
	panicked bool
	terms    terms
	took     time.Duration
}

func (r *loaded[V]) failed() bool { return r.err != nil && !errors.Is(r.err, ErrNotFound) }

// run calls the load function on a goroutine of its own, so that neither a panic nor a function that does not heed its ctx
// harms more than this flight. It owns free: the slot is free when the function has returned. lease is nil for a load
// without one.
func (l *Loader[V]) run(c *call[V], free func(), lease *lease) loaded[V] {
	fill := &Fill{loader: l, key: c.key, given: c.given, outer: outerFill(c.ctx)}
	if old := c.old; old != nil && old.err == nil {
		fill.previous = old.value
		fill.old = old.more
	}
	ctx, cancel := context.WithTimeoutCause(context.WithValue(c.ctx, fillKey{}, fill), l.cfg.LoadTimeout, errLoadTimeout)
	defer cancel()
	done := make(chan loaded[V], 1)
	began := time.Now()
	l.flights.loads(c, true)
	go func() {
		defer l.flights.loads(c, false)
		defer free()
		protect(ctx, c, done)
	}()
	r := ended(ctx, done, lease)
	if r.failed() && errors.Is(context.Cause(ctx), errLoadTimeout) {
		r.err = errLoadTimeout
	}
	r.terms, r.took = fill.seal(), time.Since(began)
	kind := EventLoaded
	switch {
	case r.failed():
		kind = EventLoadFailed
	case r.err != nil:
		kind = EventNotFound
	}
	l.emit(Event{Kind: kind, Key: c.key, Took: r.took, Err: r.err})
	return r
}

// ended waits for the end of a load, or of its ctx, and has the lease renewed meanwhile.
func ended[V any](ctx context.Context, done <-chan loaded[V], lease *lease) loaded[V] {
	for {
		select {
		case r := <-done:
			return r
		case <-lease.renewal():
			lease.renewed = true
			go lease.keep()
		case <-ctx.Done():
			select {
			case r := <-done: // both at once: a value is worth more than an error
				return r
			default:
				return loaded[V]{err: context.Cause(ctx)}
			}
		}
	}
}

var errGoexit = errors.New("refill: the load function ended its goroutine")

var errLoadTimeout = errors.New("refill: longer than LoadTimeout")

// protect sends what the load function returns.
func protect[V any](ctx context.Context, c *call[V], done chan<- loaded[V]) {
	caught(func() loaded[V] {
		if c.load == nil {
			return c.seat.load(ctx)
		}
		value, err := c.load(ctx, c.given)
		return loaded[V]{value: value, err: err}
	}, func(r loaded[V]) { done <- r })
}

// caught tells what f returns; a panic or a runtime.Goexit in it becomes an error. After a Goexit nothing but tell runs.
func caught[V any](f func() loaded[V], tell func(loaded[V])) {
	r := loaded[V]{err: errGoexit, panicked: true}
	defer func() {
		if p := recover(); p != nil {
			r.err = &panicError{p, debug.Stack()}
		}
		tell(r)
	}()
	r = f()
}

// panicError is a panic of a load function.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v\n\n%s", e.value, e.stack) }

func (e *panicError) Unwrap() error {
	err, _ := e.value.(error)
	return err
}

// storeError says that the store did not answer.
type storeError struct{ err error }

func (e *storeError) Error() string { return "refill: store: " + e.err.Error() }

// storeCtx bounds one call of the store. It is not cancelled with the flight: a lease that is taken while the last caller
// leaves has to be known, to be given back.
//
// Flights take turns, so few that none spends its StoreTimeout in a queue for a connection, which would look as if the store
// did not answer. One whose callers have left gives its lease back at once.
func (l *Loader[V]) storeCtx(c *call[V]) (context.Context, context.CancelFunc) {
	turn := c.turn
	c.turn = false
	if !turn {
		select {
		case l.turns <- struct{}{}:
			turn = true
		case <-c.ctx.Done():
		}
	}
	ctx, cancel := context.WithTimeout(c.values, l.cfg.StoreTimeout)
	return ctx, func() {
		cancel()
		if turn {
			<-l.turns
		}
	}
}

// encode makes the record of what was loaded, and the entry that a reader of that record gets: so all nodes see the same,
// also where the codec leaves something out. On an error the entry has the value as it was loaded.
func (l *Loader[V]) encode(c *call[V], token string, began time.Time, r loaded[V]) (*entry[V], []byte, error) {
	rec := Record{
		Token: token, LoadBegan: began, LoadTook: r.took, Kind: l.kind, Validator: r.terms.validator, Tags: l.tagsOf(r.terms),
	}
	l.plan(&rec, r)
	asLoaded := l.entry(c.key, &rec, c.at)
	asLoaded.value = r.value
	if rec.NotFound {
		rec.Payload = []byte(r.err.Error())
		asLoaded.err = &absence{r.err.Error()}
	}
	if r.terms.noStore {
		return asLoaded, nil, nil
	}
	var record []byte
	err := safely(func() (err error) {
		if err = checkTags("tag", rec.Tags); err != nil {
			return err
		}
		if !rec.NotFound {
			if rec.Payload, err = l.codec.Marshal(r.value); err != nil {
				return err
			}
		}
		record, err = rec.Append(nil)
		return err
	})
	if err != nil {
		return asLoaded, nil, invalid("value", "of %q: encoding it as %s: %v", c.key, l.codec.Name(), err)
	}
	e, err := l.read(c.key, record, c.at)
	if err != nil {
		return asLoaded, nil, invalid("value", "of %q: decoding it again as %s: %v", c.key, l.codec.Name(), err)
	}
	return e, record, nil
}

// publishMark stores what stands in the place of a value that must not be stored.
func (l *Loader[V]) publishMark(c *call[V], token string, began time.Time, t terms) {
	life := noStoreFor
	if t.ownTTL {
		life = t.ttl
	}
	// From now on: it says nothing about what was loaded, and the slower the load, the more it is needed.
	rec := Record{Token: token, NoStore: true, Kind: l.kind, LoadBegan: began, FreshUntil: l.store.Now().Add(life)}
	record, err := rec.Append(nil)
	if err != nil || life == 0 {
		l.release(c, token)
		return
	}
	l.publish(c, token, began, l.entry(c.key, &rec, c.at), record)
}

// tagsOf are the tags of a value: those of all, and its own.
func (l *Loader[V]) tagsOf(t terms) []string {
	tags := slices.Clone(l.cfg.Tags)
	for _, tag := range t.tags {
		if !slices.Contains(tags, tag) {
			tags = append(tags, tag)
		}
	}
	return tags
}

// plan sets the times of a record.
func (l *Loader[V]) plan(rec *Record, r loaded[V]) {
	ttl := l.cfg.TTL
	rec.StaleFor, rec.StaleIfError = l.cfg.StaleFor, l.cfg.StaleIfError
	if r.terms.ownTTL {
		ttl = r.terms.ttl
	}
	if r.terms.ownStale {
		rec.StaleFor = r.terms.staleFor
	}
	if r.err != nil { // an absence is an answer for a while, never a stale one
		rec.NotFound, ttl, rec.StaleFor, rec.StaleIfError = true, l.cfg.NotFoundTTL, 0, 0
	}
	if r.terms.noStore {
		ttl, rec.StaleFor, rec.StaleIfError = 0, 0, 0
	}
	rec.FreshUntil = rec.LoadBegan.Add(jittered(ttl, l.cfg.Jitter, rand.Float64()))
}

// decode reads what stands in the store. Anything but a record of this Loader is a miss.
func (l *Loader[V]) decode(key string, record []byte, at epoch) *entry[V] {
	if record == nil {
		return nil
	}
	e, err := l.read(key, record, at)
	if err != nil {
		l.emit(Event{Kind: EventBadRecord, Key: key, Err: err})
		return nil
	}
	return e
}

// entry makes the entry of a record, without its value.
func (l *Loader[V]) entry(key string, r *Record, at epoch) *entry[V] {
	e := &entry[V]{key: key, hash: l.local.hash(key), token: r.Token, life: lifeOf(r), at: at, pass: r.NoStore}
	if r.Validator != "" || len(r.Tags) > 0 {
		e.more = &more{validator: r.Validator, tags: r.Tags}
		for _, tag := range r.Tags {
			e.more.stripes = append(e.more.stripes, l.local.tagStripe(spelled(tag)))
		}
	}
	e.life.early = refreshFrom(e.life, r.LoadTook, l.cfg.EarlyRefresh, l.cfg.XFetch, l.local.drawn(r.Token))
	return e
}

func (l *Loader[V]) read(key string, record []byte, at epoch) (*entry[V], error) {
	r, err := DecodeRecord(record)
	if err != nil {
		return nil, err
	}
	if r.Kind != l.kind {
		return nil, fmt.Errorf("refill: record holds %q, not %q", r.Kind, l.kind)
	}
	e := l.entry(key, &r, at)
	switch {
	case r.NoStore:
		return e, nil
	case r.NotFound:
		e.err = &absence{string(r.Payload)}
		return e, nil
	}
	return e, safely(func() error { return l.codec.Unmarshal(r.Payload, &e.value) })
}

// safely makes an error of a codec's panic: it must not end the process.
func safely(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return f()
}
