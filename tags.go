package refill

import (
	"context"
	"fmt"
	"hash/maphash"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// This file is about groups of values. A load puts its value into groups with Fill.Tag. The store keeps one mark per tag:
// when it was voided last. A value is void if its load began no later than the mark of one of its tags; so voiding a group
// costs the same for ten values and for ten million, and a load that is under way is voided with the rest. Marks are
// compared where a value is read: with the store's marks when it comes from there, with the announced ones in L1.

// InvalidateTag is Invalidate for all values that carry one of the tags, see [Fill.Tag], at a cost that does not depend on
// their number. Values and marks are compared by the store's clock; where one has several servers (Cluster, Ring), an
// invalidation reaches back as exactly as their clocks agree.
func (l *Loader[V]) InvalidateTag(ctx context.Context, tags ...string) error {
	return l.voidTags(ctx, tags, false)
}

// ExpireTag is Expire for all values that carry one of the tags.
func (l *Loader[V]) ExpireTag(ctx context.Context, tags ...string) error {
	return l.voidTags(ctx, tags, true)
}

// InvalidateAll is Invalidate for every key of this Loader, at a cost that does not depend on their number. Other nodes
// follow within the push, or a second later where it is lost.
func (l *Loader[V]) InvalidateAll(ctx context.Context) error {
	return l.markAll(ctx, []string{l.full(everything)}, false)
}

// ExpireAll is Expire for every key of this Loader, as InvalidateAll is Invalidate.
func (l *Loader[V]) ExpireAll(ctx context.Context) error {
	return l.markAll(ctx, []string{l.full(everything)}, true)
}

// everything is the tag that each value carries without saying so. No other tag is empty.
const everything = ""

func (l *Loader[V]) voidTags(ctx context.Context, tags []string, soft bool) error {
	full := make([]string, len(tags))
	for i, tag := range tags {
		switch {
		case l.flights.closing.Load():
			return ErrClosed
		case tag == "":
			return invalid("tag", "empty")
		}
		full[i] = l.full(spelled(tag))
	}
	return l.markAll(ctx, full, soft)
}

// markAll voids tags: in the store first, as voidAll does.
func (l *Loader[V]) markAll(ctx context.Context, full []string, soft bool) error {
	if l.flights.closing.Load() {
		return ErrClosed
	}
	if len(full) == 0 {
		return nil
	}
	err := l.mark(ctx, full, soft)
	for _, tag := range full {
		l.dropTag(tag, l.now(), soft)
	}
	if err != nil {
		l.voids.add(full, voiding{soft: soft, tag: true, until: time.Now().Add(l.longestLife())})
		return fmt.Errorf("refill: values with one of %d tags may still be served from the store, trying on: %w", len(full), err)
	}
	return nil
}

func (l *Loader[V]) mark(ctx context.Context, full []string, soft bool) error {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.StoreTimeout)
	defer cancel()
	if soft {
		return l.store.ExpireTags(ctx, l.node.token(), l.markLife(), full...)
	}
	return l.store.InvalidateTags(ctx, l.node.token(), l.markLife(), full...)
}

// markLife is how long a mark stands. It ends without harm: a value whose tag has no mark is void.
func (l *Loader[V]) markLife() time.Duration { return max(24*time.Hour, l.longestLife()) }

// dropTag voids what this process holds of a group: what L1 has, and flights that might bring it back.
func (l *Loader[V]) dropTag(full string, at int64, soft bool) {
	if tag := strings.TrimPrefix(full, l.name+":"); tag == everything {
		l.all.learn(at, soft)
		l.local.voidAll()
	} else {
		l.local.voidTag(tag, at)
	}
	l.flights.detachAll()
}

// hold sees to it that the tags of a value that is about to be stored have marks. A load that can still be stored began
// within its claim's life; what was stored before a mark was lost is older, and void, since nobody knows what it missed.
func (l *Loader[V]) hold(c *call[V], tags []string) {
	if tags = l.held.missing(tags, time.Now()); len(tags) == 0 {
		return
	}
	ctx, cancel := l.storeCtx(c)
	defer cancel()
	select { // one after the other: a bulk load ends with hundreds of values of the same tags
	case l.held.calling <- struct{}{}:
		defer func() { <-l.held.calling }()
	case <-ctx.Done():
		return // the record is void until somebody holds its tags
	}
	if tags = l.held.missing(tags, time.Now()); len(tags) == 0 {
		return
	}
	if err := l.store.HoldTags(ctx, l.cfg.LoadTimeout+l.cfg.LockTTL, l.markLife(), l.fullTags(tags)...); err != nil {
		l.emit(Event{Kind: EventStoreError, Key: c.key, Err: err})
		return
	}
	l.held.add(tags, time.Now())
}

func (l *Loader[V]) fullTags(tags []string) []string {
	full := make([]string, len(tags))
	for i, tag := range tags {
		full[i] = l.full(spelled(tag))
	}
	return full
}

// marks are what the store says of tags.
type marks struct {
	asked int64 // when it was asked, µs
	state map[string]TagState
}

func (l *Loader[V]) marksOf(ctx context.Context, tags []string) (*marks, error) {
	m := &marks{asked: l.now(), state: make(map[string]TagState, len(tags))}
	if len(tags) == 0 {
		return m, nil
	}
	states, err := l.store.Tags(ctx, l.fullTags(tags)...)
	if err != nil {
		return nil, err
	}
	for i, tag := range tags {
		m.state[tag] = states[i]
	}
	return m, nil
}

// tags are the groups of an entry.
func (e *entry[V]) tags() []string {
	if e.more == nil {
		return nil
	}
	return e.more.tags
}

// stands judges an entry that came from the store by the marks of its groups. It reports false for one that is void, and
// ages one that was expired.
func (l *Loader[V]) stands(e *entry[V], m *marks) bool {
	if !l.all.counts(&e.life) {
		return false
	}
	for _, tag := range e.tags() {
		s := m.state[tag]
		if micros(s.Invalidated) > l.now()+maxFuture { // from before the store's clock was set back: mark it again
			l.voids.add([]string{l.full(spelled(tag))}, voiding{tag: true, until: time.Now().Add(l.longestLife())})
		}
		if !s.Known || e.life.began <= micros(s.Invalidated) {
			return false
		}
		if e.life.began <= micros(s.Expired) {
			e.life = e.life.expiredAt(micros(s.Expired))
		}
	}
	if len(e.tags()) > 0 {
		e.more.checked = max(e.more.checked, m.asked-maxFuture) // this process's idea of the store's clock may be off
	}
	return true
}

// wholly is what this process knows of the mark of everything: from announcements, and from the store each LocalTTL, since
// one may get lost. A read of the store that is not due for that costs nothing more.
type wholly struct {
	invalidated, expired atomic.Int64 // µs

	next   atomic.Int64  // when to ask again, µs; 0 = before anything is read
	asking chan struct{} // holds one
}

func (w *wholly) learn(at int64, soft bool) {
	if soft {
		raise(&w.expired, at)
	} else {
		raise(&w.invalidated, at)
	}
}

// askAll asks the store for the mark of everything, if that is due, before a value is read within ctx. Only while nothing is
// known do others wait for it. A store that does not answer, or the one server of many that has this mark, must not keep
// everybody from reading values: then it is asked again soon.
func (l *Loader[V]) askAll(ctx context.Context) {
	w := &l.all
	if next := w.next.Load(); next != 0 {
		if l.now() < next || !w.next.CompareAndSwap(next, l.now()+probeEvery.Microseconds()) {
			return // not due, or somebody else asks
		}
	} else {
		select {
		case w.asking <- struct{}{}:
			defer func() { <-w.asking }()
		case <-ctx.Done():
			return
		}
		if w.next.Load() != 0 {
			return
		}
	}
	w.next.Store(l.now() + probeEvery.Microseconds())
	if l.store.open.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.StoreTimeout/2) // the other half is for the value
	defer cancel()
	states, err := l.cfg.Shared.Tags(ctx, l.full(everything)) // past the breaker: it counts reads of values
	if err != nil {
		return
	}
	w.learn(micros(states[0].Invalidated), false)
	w.learn(micros(states[0].Expired), true)
	w.next.Store(l.now() + max(l.cfg.LocalTTL, time.Second).Microseconds())
}

// counts does what stands does, for the mark of everything.
func (w *wholly) counts(life *life) bool {
	if life.began <= w.invalidated.Load() {
		return false
	}
	if expired := w.expired.Load(); life.began <= expired {
		*life = life.expiredAt(expired)
	}
	return true
}

// heldFor is how long a tag counts as held that this process has held: if its mark is lost meanwhile, values are void that
// need not be, no more.
const heldFor = 10 * time.Second

// maxHeld bounds the memory.
const maxHeld = 4096

// held are the tags whose marks this process has just seen to.
type held struct {
	calling chan struct{} // holds one
	mu      sync.Mutex
	until   map[string]time.Time
}

func (h *held) missing(tags []string, now time.Time) (missing []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, tag := range tags {
		if !now.Before(h.until[tag]) {
			missing = append(missing, tag)
		}
	}
	return missing
}

func (h *held) add(tags []string, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.until == nil || len(h.until) > maxHeld {
		h.until = make(map[string]time.Time)
	}
	for _, tag := range tags {
		h.until[tag] = now.Add(heldFor)
	}
}

// raise sets n to at if that is more.
func raise(n *atomic.Int64, at int64) {
	for {
		old := n.Load()
		if at <= old || n.CompareAndSwap(old, at) {
			return
		}
	}
}

// tagStripe is where L1 keeps when a tag was voided last. Tags that share one are voided together, which costs reading
// their values again.
func (l *local[V]) tagStripe(tag string) uint16 {
	return uint16(maphash.String(l.seed, tag) % tagStripes)
}

// voidTag makes entries void that carry the tag and were known to be valid no later than at.
func (l *local[V]) voidTag(tag string, at int64) { raise(&l.tags[l.tagStripe(tag)], at) }

// grouped reports whether none of the groups of e has been voided since it was last known to be valid.
func (l *local[V]) grouped(e *entry[V]) bool {
	for _, stripe := range e.more.stripes {
		if l.tags[stripe].Load() >= e.more.checked {
			return false
		}
	}
	return true
}
