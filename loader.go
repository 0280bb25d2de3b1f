package refill

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"time"
)

// Loader answers Gets of one kind of value from memory, from the shared store, or by one load for the whole fleet. Make
// one per kind at start-up, share it between goroutines, Close it at the end. Values are shared between callers: treat
// them as read-only.
type Loader[V any] struct {
	name  string
	node  *node
	cfg   Config // with defaults
	store *breaker
	load  loadFunc[V] // nil if there is none, or a bulk one
	bulk  func(ctx context.Context, keys []string) (map[string]V, error)
	codec Codec
	kind  string // what its records say of themselves

	clock    *coarseClock
	local    *local[V]
	flights  *flights[V]
	gather   gather[V]
	slots    chan struct{} // one per running load; nil = no limit
	turns    chan struct{} // one per call of the store by a flight
	misses   missShare
	marks    together[marks] // reads of them, for all flights
	holds    together[struct{}]
	held     held
	failures failures       // loads that failed a moment ago
	voids    *voids         // invalidations that the store did not take yet
	later    sync.WaitGroup // what flights left behind: a lease to give back

	leaveName     func()
	stopListening func()
	closing       sync.Once
	closeErr      error // written within closing
}

// New returns a Loader that gets its values from load. The name keeps its keys apart from those of other Loaders in the
// same store: letters, digits, '.', '_' and '-'. Two Loaders of one name must have the same V and mean the same data;
// when its meaning changes, change the name, "product.v2": so two releases can share one store. In one process a name
// with two types is an error, between processes an [EventBadRecord].
//
// load runs on a goroutine of its own, with a ctx that keeps the values of the first caller's ctx (tenant, trace, …), is
// not cancelled by any single caller, and ends when nobody waits any more or at Config.LoadTimeout. The key has to hold
// all that the result depends on. It wraps [ErrNotFound] to say that there is nothing, and may use [FillFrom]. load
// may be nil if only GetWith is used.
//
// New makes no call to the store, so it works while the store is down. An error wraps [ErrInvalid] and names the argument
// or setting.
func New[V any](name string, load func(ctx context.Context, key string) (V, error), cfg Config) (*Loader[V], error) {
	return newLoader(name, load, nil, cfg)
}

func newLoader[V any](
	name string, load loadFunc[V], bulk func(context.Context, []string) (map[string]V, error), cfg Config,
) (*Loader[V], error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Loader[V]{name: name, node: newNode(), cfg: cfg, load: load, bulk: bulk}
	l.store = newBreaker(cfg.Shared, cfg.StoreTimeout, func(k EventKind, err error) { l.emit(Event{Kind: k, Err: err}) })
	l.marks.call, l.holds.call = l.readMarks, l.holdTags
	l.failures.byKey = make(map[string]pastFailure)
	l.codec, l.kind = codecFor[V](cfg.Codec)
	if l.leaveName, err = names.enter(cfg.Shared, name, l.kind); err != nil {
		return nil, err
	}
	l.clock = newCoarseClock(tickOf(cfg.TTL), l.store.Now)
	if l.local, err = newLocal[V](&cfg, l.clock); err != nil {
		l.clock.close()
		l.leaveName()
		return nil, invalid("LocalEntries", "%v", err)
	}
	l.flights = newFlights(l.fly, l.local.voided.Load, cfg.MaxWaiters)
	if cfg.MaxLoads < maxSlots {
		l.slots = make(chan struct{}, cfg.MaxLoads)
	}
	l.turns = make(chan struct{}, turns*runtime.GOMAXPROCS(0))
	l.voids = newVoids(l.voidAgain, l.voided)
	l.stopListening = l.store.Listen(name, l.hear)
	for _, doubt := range cfg.advice() {
		l.emit(Event{Kind: EventConfigDoubt, Err: doubt})
	}
	return l, nil
}

// turns is how many calls of the store by flights may run at once, per processor. go-redis has 10 connections per processor
// by default; who has set more can use them, and two who queue for each get it well within their StoreTimeout.
const turns = 30

// maxSlots is the number of loads from which on counting them bounds nothing.
const maxSlots = 1 << 20

// Get returns the value of key: from memory if it is fresh there; a stale one if Config.StaleFor allows, while it is
// refreshed; else what the store, another node's load, or this node's load gives. A key is any string but the empty one.
// One above 512 bytes, with control characters, or that begins with '#', stands as "#" and its SHA-256 in the store, in
// events and in errors; the load function gets it as it is.
//
// It returns ctx's error when ctx ends first (while the store is being read, a deadline is obeyed to the moment, a
// cancellation within Config.StoreTimeout); an error that wraps [ErrNotFound] for an absence; a [*LoadError] when the load
// failed and nothing stale may be served in its place; [ErrOverloaded], [ErrClosed], [ErrInvalid] as they say. If the
// codec cannot encode a value that was loaded, the value is returned together with an error that wraps ErrInvalid.
func (l *Loader[V]) Get(ctx context.Context, key string) (V, error) {
	if e := l.hit(key); e != nil {
		return e.value, e.err
	}
	r, err := l.get(ctx, key, nil)
	return r.Value, err
}

// hit is the shortest way to an answer: no lock, timer, allocation or system clock.
func (l *Loader[V]) hit(key string) *entry[V] {
	if !asGiven(key) {
		return nil
	}
	e, now := l.local.get(key), l.clock.now.Load()
	// An entry from the future was read before the store's clock was set back: hit says nothing any more.
	if e == nil || now >= e.hit.Load() || e.life.began > now+maxFuture || !l.local.current(e) {
		return nil
	}
	if l.cfg.OnEvent != nil {
		l.emit(Event{Kind: EventHit, Key: key, Err: e.err})
	}
	return e
}

// GetWith is Get with a load function for this call. The function may run after this call has returned, for a refresh,
// and for other callers, who get its result; and this caller may get the result of somebody else's function. So it
// must depend on nothing but ctx and key, and what it captures must never change: no request, no transaction.
func (l *Loader[V]) GetWith(ctx context.Context, key string, load func(ctx context.Context, key string) (V, error)) (V, error) {
	if load == nil {
		var none V
		return none, invalid("load", "nil")
	}
	if e := l.hit(key); e != nil {
		return e.value, e.err
	}
	r, err := l.get(ctx, key, load)
	return r.Value, err
}

// Result is a value, and how it came.
type Result[V any] struct {
	Value V
	// Outcome is one of the kinds from EventHit to EventStaleOnError.
	Outcome EventKind
	// Age is the time since the value's load began, Remaining how much longer it is fresh; neither is negative.
	Age, Remaining time.Duration
	// Node is the node that loaded it.
	Node string
	// Validator and Tags are those that its load set.
	Validator string
	Tags      []string
}

// GetResult is Get, and says how the value came. With an error, the Result holds what is known beside it.
func (l *Loader[V]) GetResult(ctx context.Context, key string) (Result[V], error) {
	return l.get(ctx, key, nil)
}

// get is Get without the shortcut: steps 0 and 1. load is nil for the Loader's own.
func (l *Loader[V]) get(ctx context.Context, given string, load loadFunc[V]) (Result[V], error) {
	key, load, err := l.mayLoad(ctx, given, load)
	if err != nil {
		return Result[V]{}, err
	}
	t := ticket[V]{key: key, given: given, load: load, ask: AskLeft}
	if r, err, ok := l.remembered(ctx, t, true); ok {
		return r, err
	}
	if err := l.flights.admit(ctx); err != nil {
		return l.refused(ctx, t, err)
	}
	defer l.flights.depart()
	for {
		p, err := l.flights.join(ctx, t)
		if err != nil {
			return Result[V]{}, err
		}
		if p.led {
			l.begin(ctx, p.call)
		}
		if a, ok := l.wait(ctx, p); ok {
			return l.answered(key, a)
		}
		if r, err, ok := l.remembered(ctx, t, true); ok {
			return r, err
		}
	}
}

// refused answers who may not wait: with a stale value that it would have waited to improve, or with the reason.
func (l *Loader[V]) refused(ctx context.Context, t ticket[V], why error) (Result[V], error) {
	if !t.forced {
		if r, err, ok := l.remembered(ctx, t, false); ok {
			return r, err
		}
	}
	return Result[V]{}, why
}

// remembered answers from L1, if that may be done at once, and lets an entry be refreshed that is due. patient says that
// a stale one may wait for its refill, see Config.SoftTimeout.
func (l *Loader[V]) remembered(ctx context.Context, t ticket[V], patient bool) (r Result[V], err error, ok bool) {
	e := l.local.get(t.key)
	if e == nil || e.pass || !l.local.current(e) {
		return r, nil, false
	}
	how, now := EventHit, l.now()
	switch e.inL1(now) {
	case Fresh:
	case Early:
		l.refreshBehind(ctx, e, t, now)
	case Stale:
		how = EventStale
		l.refreshBehind(ctx, e, t, now)
		if patient && l.cfg.SoftTimeout > 0 && l.flights.flying(t.key) {
			return r, nil, false // it knows the entry, and will hand it out in time
		}
	default:
		return r, nil, false
	}
	r, err = l.answered(t.key, answer[V]{entry: e, how: how, err: e.err})
	return r, err, true
}

// mayLoad checks what does not depend on the state of the key, and spells it. load is nil for the Loader's own; what is
// returned is nil for a bulk load.
func (l *Loader[V]) mayLoad(ctx context.Context, key string, load loadFunc[V]) (string, loadFunc[V], error) {
	if load == nil {
		load = l.load
	}
	key, err := l.spell(key)
	switch {
	case err != nil:
		return key, load, err
	case load == nil && l.bulk == nil:
		return key, load, invalid("load", "nil; a Loader made without a load function has GetWith only")
	case outerFill(ctx).loads(l, key):
		return key, load, invalid("key", "%q is being loaded by the very load that asks for it", key)
	}
	return key, load, ctx.Err()
}

// refreshBehind starts a background refresh of an entry that is due, unless one was tried a moment ago. The moment is a
// LockTTL, by then a node that died at it has been replaced, or what the last try found out.
func (l *Loader[V]) refreshBehind(ctx context.Context, e *entry[V], t ticket[V], now int64) {
	hit, retry := e.hit.Load(), e.retry.Load()
	if next := now + l.cfg.LockTTL.Microseconds(); now >= retry && e.retry.CompareAndSwap(retry, next) {
		t.behind = true
		if retry == 0 && l.cfg.SoftTimeout == 0 {
			t.ask = AskOnce // nobody waits; a second try sees that what is in the way has an end
		}
		// The only error is ErrClosed: then there is nobody to refresh for.
		if p, _ := l.flights.join(ctx, t); p.led {
			l.flights.launch(p.call)
		}
		retry = next
	}
	if hit != 0 { // what is fresh still is served without a thought until the next try
		e.hit.CompareAndSwap(hit, min(e.trusted, retry))
	}
}

// wait returns the answer of a flight. It reports false when the flight ended without one, or with a value that has become
// too old since: then the caller looks again.
func (l *Loader[V]) wait(ctx context.Context, p place[V]) (answer[V], bool) {
	c := p.call
	defer l.flights.leave(p)
	began := l.timed()
	select {
	case <-c.ready:
	case <-c.done:
		if !c.settled() {
			return answer[V]{}, false
		}
	case <-ctx.Done():
		return answer[V]{err: ctx.Err()}, true
	}
	a := c.answer
	if a.how == EventHit || a.how == EventShared || a.how == EventStale { // handed out before the refresh, perhaps long ago
		switch f := a.entry.life.at(l.now()); {
		case f == Stale:
			a.how = EventStale
		case f > Stale:
			select {
			case <-c.done:
			case <-ctx.Done():
				return answer[V]{err: ctx.Err()}, true
			}
			if a = c.last; a.entry == nil && a.err == nil {
				return answer[V]{}, false
			}
		}
	}
	if e := a.entry; e != nil && p.tags > e.at.tags && l.local.tagVoided(e) > e.at.tags {
		// A group of the answer was voided since its load began, and perhaps before this caller came.
		l.flights.retire(c)
		return answer[V]{}, false
	}
	if !p.led && (a.how == EventLed || a.how == EventShared || a.how == EventWaited) {
		a.how = EventJoined
	}
	a.waited = l.took(began)
	return a, true
}

// Refresh loads the keys now, whatever is cached, and returns when that is done: with nil, or the errors of the keys that
// failed. It ends a back-off. Where another node is loading a key already, it waits for that load instead: to see a
// write that was just made, use Expire or Invalidate. It takes 1,024 keys at a time, with one call of a bulk load
// function for them; each key is an event.
func (l *Loader[V]) Refresh(ctx context.Context, keys ...string) error {
	var errs []error
	l.each(ctx, keys, true, func(_ string, _ Result[V], err error) {
		if err != nil && !errors.Is(err, ErrNotFound) {
			errs = append(errs, err)
		}
	})
	return errors.Join(errs...)
}

// Peek returns what is there, fresh or stale, without loading it or changing anything. It reports false for nothing, for a
// cached absence, and where the store does not answer.
func (l *Loader[V]) Peek(ctx context.Context, key string) (Result[V], bool) {
	key, err := l.spell(key)
	if err != nil {
		return Result[V]{}, false
	}
	e, how := l.local.get(key), EventHit
	if e == nil || !l.local.current(e) || e.inL1(l.now()) > Stale {
		if l.store.open.Load() {
			return Result[V]{}, false
		}
		ctx, cancel := context.WithTimeout(ctx, l.cfg.StoreTimeout)
		defer cancel()
		record, err := l.cfg.Shared.Get(ctx, l.full(key)) // past the breaker: ctx is the caller's
		if err != nil {
			return Result[V]{}, false
		}
		e, how = l.decode(key, record, epoch{}), EventShared
		if e != nil {
			if m, err := l.marksOf(ctx, l.cfg.Shared, e.tags()); err != nil || !l.stands(e, m) {
				return Result[V]{}, false
			}
		}
	}
	if e == nil || e.pass || e.err != nil {
		return Result[V]{}, false
	}
	now := l.now()
	switch e.life.at(now) {
	case Fresh, Early:
	case Stale:
		how = EventStale
	default:
		return Result[V]{}, false
	}
	return e.result(how, now), true
}

// Invalidate removes the keys everywhere: values, running loads' right to be stored, back-offs. When it has returned nil,
// no load that began before is served as fresh from the store, on any node, and no later Get on this node joins one; the
// memory of other nodes follows within the push. Call it after the transaction that changed the data has committed.
//
// An error means that the store may still hold the old values. What this node holds is gone all the same, and
// Invalidate is tried again in the background until the values have died of age.
func (l *Loader[V]) Invalidate(ctx context.Context, keys ...string) error {
	return l.voidAll(ctx, keys, false)
}

// Expire is Invalidate, but the values stay and count as stale from now on: while Config.StaleFor lasts they are served
// as stale ones, and refreshed.
func (l *Loader[V]) Expire(ctx context.Context, keys ...string) error {
	return l.voidAll(ctx, keys, true)
}

// Close ends the Loader: every later call returns ErrClosed. It cancels background refreshes and lets loads that callers
// wait for finish, for Config.LoadTimeout at most; then it cancels them, and its error names the keys whose load function
// still runs. It leaves the shared store open. Further calls return the same.
func (l *Loader[V]) Close() error {
	l.closing.Do(func() {
		l.flights.close()
		l.local.shut()
		timer := time.NewTimer(l.cfg.LoadTimeout)
		defer timer.Stop()
		select {
		case <-l.flights.quiet:
		case <-timer.C:
			keys := l.flights.abort()
			<-l.flights.landed // they have a StoreTimeout left to give their leases back, no more
			if len(keys) > 0 {
				l.closeErr = fmt.Errorf("refill: Close: %s: still loading after %v: %s",
					l.name, l.cfg.LoadTimeout, strings.Join(keys, ", "))
			}
		}
		l.later.Wait()
		l.store.close()
		l.voids.close()
		l.stopListening()
		l.leaveName()
		l.clock.close()
		l.local.close()
	})
	return l.closeErr
}

// answered makes the Result of an answer and tells OnEvent.
func (l *Loader[V]) answered(key string, a answer[V]) (Result[V], error) {
	if a.err != nil && a.entry == nil {
		a.how = EventError
	}
	if l.cfg.OnEvent != nil {
		l.emit(Event{Kind: a.how, Key: key, Took: a.waited, Err: a.err})
	}
	if a.entry == nil {
		return Result[V]{Outcome: a.how}, a.err
	}
	return a.entry.result(a.how, l.now()), a.err
}

func (e *entry[V]) result(how EventKind, now int64) Result[V] {
	r := Result[V]{
		Value: e.value, Outcome: how,
		Age: e.life.age(now), Remaining: e.life.remaining(now), Node: nodeOf(e.token),
	}
	if e.more != nil {
		r.Validator, r.Tags = e.more.validator, e.more.tags
	}
	return r
}

// emit fills in what every event of this Loader has.
func (l *Loader[V]) emit(e Event) {
	if l.cfg.OnEvent != nil {
		e.Name, e.Node = l.name, l.node.id
		l.cfg.OnEvent(e)
	}
}

// timed and took measure for events, and cost nothing when nobody looks.
func (l *Loader[V]) timed() time.Time {
	if l.cfg.OnEvent == nil {
		return time.Time{}
	}
	return time.Now()
}

func (l *Loader[V]) took(since time.Time) time.Duration {
	if since.IsZero() {
		return 0
	}
	return time.Since(since)
}

func (l *Loader[V]) full(key string) string { return l.name + ":" + key }
func (l *Loader[V]) now() int64             { return l.store.Now().UnixMicro() }
