package refill

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// hear takes what the store announces. It must not block: it runs for one announcement after the other.
func (l *Loader[V]) hear(n Note) {
	switch n.Kind {
	case NoteUp:
		l.local.heard(true)
		l.flights.detachAll() // what they load may have been invalidated meanwhile
		l.flights.tell("", n) // whoever waits may have missed what it waits for
		l.store.wake()
		l.voids.wake()
		l.emit(Event{Kind: EventStoreUp})
		return
	case NoteDown:
		l.local.heard(false)
		l.emit(Event{Kind: EventStoreDown, Err: n.Err})
		return
	case NoteWarning:
		l.emit(Event{Kind: EventStoreDoubt, Err: n.Err})
		return
	case NoteTagInvalidated, NoteTagExpired:
		if !l.node.made(n.Token) {
			l.dropTag(n.Key)
		}
		return
	}
	key := strings.TrimPrefix(n.Key, l.name+":")
	switch n.Kind {
	case NoteInvalidated, NoteExpired:
		if !l.node.made(n.Token) { // our own has been carried out here before it returned
			l.drop(key)
		}
	case NoteFilled:
		l.failures.forget(key)
		l.replace(key, n)
	case NoteFailed:
		err := l.loadErrorOf(key, n.Failure, 0)
		if err.Node != l.node.id { // our own has been remembered, with its cause
			l.failures.remember(key, err, l.local.note(key).stripe)
		}
		l.reschedule(key, err.RetryAfter)
	case NoteReleased:
		l.reschedule(key, 0)
	}
	l.flights.tell(key, n)
}

// replace brings L1 up to date with a fill of another node. L1 takes the announced record only if it holds exactly the one
// that was replaced: anything else may be newer than the announcement. It takes the epoch of the one it replaces, so what
// voids that one in this very moment voids it, too.
func (l *Loader[V]) replace(key string, n Note) {
	e := l.local.get(key)
	if e == nil || e.token == n.Token || !l.local.current(e) {
		return
	}
	if e.token == n.Replaced && len(n.Record) > 0 {
		// One with tags is read again, with their marks.
		if next := l.decode(key, n.Record, e.at); next != nil && len(next.tags()) == 0 {
			l.keep(next, len(n.Record))
			return
		}
	}
	e.hit.Store(0) // superseded: served on, and read again behind the callers' backs
	e.retry.Store(0)
}

// reschedule says when a stale entry of L1 may be refreshed again: a refresh elsewhere has ended without a value.
func (l *Loader[V]) reschedule(key string, backOff time.Duration) {
	e := l.local.get(key)
	switch {
	case e == nil:
	case backOff > 0:
		e.retry.Store(l.now() + backOff.Microseconds())
	default:
		e.retry.Store(0)
	}
}

// drop voids what this process holds of key, and what is on its way.
func (l *Loader[V]) drop(key string) {
	l.local.void(key)
	l.flights.detach(key)
}

// voidBatch is how many keys one call of the store voids: StoreTimeout has to do for them.
const voidBatch = 256

// voidAll is Invalidate, or Expire when soft. The store comes first: a read that begins between our own drop and the
// store's would bring the old value back.
func (l *Loader[V]) voidAll(ctx context.Context, keys []string, soft bool) error {
	var err error
	keys, full := slices.Clone(keys), make([]string, len(keys))
	for i, key := range keys {
		if keys[i], err = l.spell(key); err != nil {
			return err
		}
		full[i] = l.full(keys[i])
	}
	for len(full) > 0 && err == nil {
		batch := full[:min(len(full), voidBatch)]
		if err = l.void(ctx, batch, soft); err == nil {
			full = full[len(batch):]
		}
	}
	for _, key := range keys {
		l.drop(key)
	}
	if err != nil {
		l.voids.add(full, voiding{soft: soft, until: time.Now().Add(l.longestLife())})
		return fmt.Errorf("refill: %d of %d keys may still be in the store, trying on: %w", len(full), len(keys), err)
	}
	return nil
}

func (l *Loader[V]) void(ctx context.Context, full []string, soft bool) error {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.StoreTimeout)
	defer cancel()
	if soft {
		return l.store.Expire(ctx, l.node.token(), full...)
	}
	return l.store.Invalidate(ctx, l.node.token(), full...)
}

// longestLife is how long a value can be served whose load begins now.
func (l *Loader[V]) longestLife() time.Duration {
	return l.cfg.TTL + max(l.cfg.StaleFor, l.cfg.StaleIfError) + l.cfg.LoadTimeout
}

// voidAgain tries what had failed.
func (l *Loader[V]) voidAgain(ctx context.Context, full string, v voiding) error {
	if v.tag {
		return l.mark(ctx, []string{full}, v.soft)
	}
	return l.void(ctx, []string{full}, v.soft)
}

// voided reports what became of something whose voiding had failed.
func (l *Loader[V]) voided(full string, v voiding, err error) {
	key := strings.TrimPrefix(full, l.name+":")
	if v.tag {
		l.dropTag(full)
	} else {
		l.drop(key) // a Get since the failure may have read the old value, and our own announcement is not heard here
	}
	l.emit(Event{Kind: EventVoidRetried, Key: key, Err: err})
}

// voids are the Invalidates and Expires that the store did not take, tried again until it does or the values have died of
// age. A goroutine runs while there are any.
type voids struct {
	try   func(ctx context.Context, full string, v voiding) error
	tell  func(full string, v voiding, err error)
	bell  chan struct{} // rung when the store is back
	ctx   context.Context
	stop  context.CancelFunc
	group sync.WaitGroup

	mu      sync.Mutex
	pending map[pendingVoid]voiding
	running bool
}

// pendingVoid is a key or a tag: the same text may be both.
type pendingVoid struct {
	full string
	tag  bool
}

type voiding struct {
	soft, tag bool
	until     time.Time
}

const (
	maxVoids  = 10_000
	voidPause = 500 * time.Millisecond
)

func newVoids(
	try func(context.Context, string, voiding) error, tell func(string, voiding, error),
) *voids {
	v := &voids{try: try, tell: tell, bell: make(chan struct{}, 1), pending: make(map[pendingVoid]voiding)}
	v.ctx, v.stop = context.WithCancel(context.Background())
	return v
}

// add queues keys or tags. A hard one is not softened by a later soft one.
func (v *voids) add(full []string, what voiding) {
	for _, key := range v.queue(full, what) {
		v.tell(key, what, fmt.Errorf("%w: %d invalidations wait for the store", ErrOverloaded, maxVoids))
	}
}

// queue returns those that there is no room for.
func (v *voids) queue(full []string, what voiding) (tooMany []string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, key := range full {
		p := pendingVoid{key, what.tag}
		old, there := v.pending[p]
		if !there && len(v.pending) >= maxVoids {
			tooMany = append(tooMany, key)
			continue
		}
		what := what
		what.soft = what.soft && (old.soft || !there)
		v.pending[p] = what
	}
	if !v.running && v.ctx.Err() == nil {
		v.running = true
		v.group.Go(v.run)
	}
	return tooMany
}

func (v *voids) wake() { ring(v.bell) }

func (v *voids) run() {
	timer := time.NewTimer(voidPause)
	defer timer.Stop()
	for {
		select {
		case <-v.ctx.Done():
			return
		case <-v.bell:
		case <-timer.C:
		}
		if !v.round() {
			return
		}
		timer.Reset(voidPause)
	}
}

// round tries what is pending, and reports whether something still is.
func (v *voids) round() bool {
	v.mu.Lock()
	tries := maps.Clone(v.pending)
	v.mu.Unlock()
	for p, what := range tries {
		err := v.try(v.ctx, p.full, what)
		tooLate := time.Now().After(what.until)
		if err != nil && !tooLate {
			break // the store is still not there: nor for the others
		}
		v.done(p, what)
		v.tell(p.full, what, err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.running = len(v.pending) > 0
	return v.running
}

// done forgets what was pending, unless it was added again meanwhile.
func (v *voids) done(p pendingVoid, what voiding) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.pending[p] == what {
		delete(v.pending, p)
	}
}

func (v *voids) close() {
	v.stop()
	v.group.Wait()
}
