package refill

import (
	"context"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// This file is about groups of values. A load puts its value into groups with Fill.Tag. The store keeps one mark per tag:
// when it was voided last. A value is void if its load began no later than the mark of one of its tags; so voiding a group
// costs the same for ten values and for ten million, and a load that is under way is voided with the rest.
//
// A value that comes from another node, from the store or in an announcement, is judged by the store's marks. L1 asks
// nobody: an entry notes how many voidings of tags this process had heard of before its read or load began (epoch.tags),
// and is void if one of its tags was among the later ones.

// InvalidateTag is Invalidate for all values that carry one of the tags, see [Fill.Tag] and Config.Tags, at a cost that does
// not depend on their number. A load that is under way goes on; who asks for its key meanwhile waits for it, and loads
// again if its value has the tag. Back-offs stay.
//
// Values and marks are compared by the store's clock; where the store is several servers (Cluster, Ring), as exactly as
// their clocks agree.
func (l *Loader[V]) InvalidateTag(ctx context.Context, tags ...string) error {
	return l.voidTags(ctx, tags, false)
}

// ExpireTag is Expire for all values that carry one of the tags, as InvalidateTag is Invalidate.
func (l *Loader[V]) ExpireTag(ctx context.Context, tags ...string) error {
	return l.voidTags(ctx, tags, true)
}

// voidTags voids tags: in the store first, as voidAll does.
func (l *Loader[V]) voidTags(ctx context.Context, tags []string, soft bool) error {
	if l.flights.closing.Load() {
		return ErrClosed
	}
	if err := checkTags("tag", tags); err != nil || len(tags) == 0 {
		return err
	}
	full := l.fullTags(tags)
	err := l.mark(ctx, full, soft)
	for _, tag := range full {
		l.dropTag(tag)
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

// dropTag voids what this process holds of a group, and what is on its way to L1.
func (l *Loader[V]) dropTag(full string) { l.local.voidTag(strings.TrimPrefix(full, l.name+":")) }

// fullTags are tags as the store knows them.
func (l *Loader[V]) fullTags(tags []string) []string {
	full := make([]string, len(tags))
	for i, tag := range tags {
		full[i] = l.full(spelled(tag))
	}
	return full
}

const maxTags = 64

// checkTags says what is wrong with tags; field is where they stand.
func checkTags(field string, tags []string) error {
	if len(tags) > maxTags {
		return invalid(field, "%d tags, at most %d", len(tags), maxTags)
	}
	for _, tag := range tags {
		if tag == "" {
			return invalid(field, "empty")
		}
	}
	return nil
}

// tags are the groups of an entry.
func (e *entry[V]) tags() []string {
	if e.more == nil {
		return nil
	}
	return e.more.tags
}

// marks are what the store says of tags.
type marks map[string]TagState

func (l *Loader[V]) marksOf(ctx context.Context, from Store, tags []string) (marks, error) {
	m := make(marks, len(tags))
	if len(tags) == 0 {
		return m, nil
	}
	states, err := from.Tags(ctx, l.fullTags(tags)...)
	if err != nil {
		return nil, err
	}
	for i, tag := range tags {
		m[tag] = states[i]
	}
	return m, nil
}

// readMarks is one call of the store for all flights that need marks.
func (l *Loader[V]) readMarks(tags []string, _ time.Duration) (marks, error) {
	ctx, cancel := context.WithTimeout(context.Background(), l.cfg.StoreTimeout)
	defer cancel()
	return l.marksOf(ctx, l.store, tags)
}

// stands judges an entry that another node may have loaded by the marks of its groups. It reports false for one that is
// void, and ages one that was expired.
func (l *Loader[V]) stands(e *entry[V], m marks) bool {
	for _, tag := range e.tags() {
		s := m[tag]
		if micros(s.Invalidated) > l.now()+maxFuture { // from before the store's clock was set back: mark it again
			l.voids.add(l.fullTags([]string{tag}), voiding{tag: true, until: time.Now().Add(l.longestLife())})
		}
		if !s.Known || e.life.began <= micros(s.Invalidated) {
			return false
		}
		if e.life.began <= micros(s.Expired) {
			e.life = e.life.expiredAt(micros(s.Expired))
		}
	}
	return true
}

// holdTags is one call of the store, which sees to it that the tags of values that are about to be stored have marks. What
// was stored before a mark was lost is void, since nobody knows what it has missed; what began with the loads that are
// about to be stored is not: reach is how long ago the first of them began.
func (l *Loader[V]) holdTags(tags []string, reach time.Duration) (none struct{}, err error) {
	if tags = l.held.missing(tags, time.Now()); len(tags) == 0 {
		return none, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), l.cfg.StoreTimeout)
	defer cancel()
	if err = l.store.HoldTags(ctx, reach+span(maxFuture), l.markLife(), l.fullTags(tags)...); err == nil {
		l.held.add(tags, time.Now())
	}
	return none, err
}

// heldFor is how long a tag counts as held that this process has held: if its mark is lost meanwhile, values are void that
// need not be, no more.
const heldFor = 10 * time.Second

// maxHeld bounds the memory.
const maxHeld = 4096

// held are the tags whose marks this process has just seen to.
type held struct {
	mu    sync.Mutex
	until map[string]time.Time
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

// together makes calls about tags one at a time; all who come while one runs share the next: a bulk load ends with hundreds
// of values that have the same tags, here and on every node that waits for them.
type together[R any] struct {
	call func(tags []string, reach time.Duration) (R, error)

	mu   sync.Mutex
	busy bool       // a call runs
	next *shared[R] // the one after it, nil if nobody has come
}

// shared is one call, while it is gathered and while it runs.
type shared[R any] struct {
	tags   map[string]bool
	reach  time.Duration // the longest
	done   chan struct{} // closed when the next two may be read
	result R
	err    error
}

func (t *together[R]) ask(ctx context.Context, tags []string, reach time.Duration) (r R, err error) {
	t.mu.Lock()
	if t.next == nil {
		t.next = &shared[R]{tags: make(map[string]bool), done: make(chan struct{})}
	}
	mine := t.next
	for _, tag := range tags {
		mine.tags[tag] = true
	}
	mine.reach = max(mine.reach, reach)
	first := !t.busy
	t.busy = true
	t.mu.Unlock()
	if first {
		t.run()
	}
	select {
	case <-mine.done:
		return mine.result, mine.err
	case <-ctx.Done():
		return r, ctx.Err()
	}
}

// run makes the next call, and leaves the one after it to a goroutine: who called must not work for others.
func (t *together[R]) run() {
	t.mu.Lock()
	this := t.next
	t.next = nil
	t.mu.Unlock()
	this.result, this.err = t.call(slices.Collect(maps.Keys(this.tags)), this.reach)
	close(this.done)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.busy = t.next != nil; t.busy {
		go t.run()
	}
}

// tagStripe is where L1 keeps which voiding of a tag was the last. Tags that share one are voided together, which costs
// reading their values again.
func (l *local[V]) tagStripe(tag string) uint16 {
	return uint16(maphash.String(l.seed, tag) % tagStripes)
}

// voidTag makes entries void that carry the tag, as spelled, and every read of one that has begun.
func (l *local[V]) voidTag(tag string) {
	l.tagMu.Lock()
	defer l.tagMu.Unlock()
	n := l.voided.Load() + 1
	l.tags[l.tagStripe(tag)].Store(n)
	l.voided.Store(n) // last: who notes it sees the stripe
}

// tagVoided is the last voiding of one of e's groups.
func (l *local[V]) tagVoided(e *entry[V]) (last uint64) {
	if e.more != nil {
		for _, stripe := range e.more.stripes {
			last = max(last, l.tags[stripe].Load())
		}
	}
	return last
}
