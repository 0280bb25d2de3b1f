package refill

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file is about tags. A load tags its value with Fill.Tag. The store keeps one state per tag: when the tag was
// invalidated last. A value is invalid if its load began no later than the invalidation of one of its tags. So
// invalidating a tag costs the same for ten values and for ten million, and the invalidation includes the loads that
// are in progress.
//
// A value can come from another node, from the store or in an announcement. Such a value is judged by the tag states in
// the store. L1 does not ask the store. Instead, an entry of L1 carries the number of tag invalidations that this
// process knew before the read of the entry began (l1.Epoch). The entry is invalid if one of its tags is among the
// later invalidations.

// InvalidateTag is Invalidate for all values that carry one of the tags, see [Fill.Tag] and Config.Tags. Its cost does
// not depend on the number of values. A load that is in progress goes on. Callers that ask for the key of that load
// wait for it, and load again if its value has the tag. Back-offs stay.
//
// Values and tags are compared by the store's clock. If the store is several servers (Cluster, Ring), the comparison is
// only as exact as the clocks of these servers agree.
func (l *Loader[V]) InvalidateTag(ctx context.Context, tags ...string) error {
	return l.invalidateTags(ctx, tags, false)
}

// ExpireTag is Expire for all values that carry one of the tags.
func (l *Loader[V]) ExpireTag(ctx context.Context, tags ...string) error {
	return l.invalidateTags(ctx, tags, true)
}

// invalidateTags invalidates or expires tags. Like invalidate, it calls the store before it changes L1.
func (l *Loader[V]) invalidateTags(ctx context.Context, tags []string, expire bool) error {
	if l.flights.Closed() {
		return ErrClosed
	}
	if err := validateTags("tag", tags); err != nil || len(tags) == 0 {
		return err
	}
	full := l.fullTags(tags)
	err := l.storeInvalidateTags(ctx, full, expire)
	for _, tag := range full {
		l.l1.InvalidateTag(l.short(tag))
	}
	if err != nil {
		l.retryLater(full, true, expire)
		return fmt.Errorf("refill: could not invalidate %d tags in the store; retrying in the background: %w", len(full), err)
	}
	return nil
}

func (l *Loader[V]) storeInvalidateTags(ctx context.Context, full []string, expire bool) error {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.StoreTimeout)
	defer cancel()
	if expire {
		return l.store.ExpireTags(ctx, l.node.token(), l.tagLife(), full...)
	}
	return l.store.InvalidateTags(ctx, l.node.token(), l.tagLife(), full...)
}

// tagLife is how long the store keeps the state of a tag. The end of a state is harmless, because a value with an
// unknown tag is invalid.
func (l *Loader[V]) tagLife() time.Duration { return max(24*time.Hour, l.longestLife()) }

// fullTags returns tags as the store knows them.
func (l *Loader[V]) fullTags(tags []string) []string {
	full := make([]string, len(tags))
	for i, tag := range tags {
		full[i] = l.full(storeKey(tag))
	}
	return full
}

const maxTags = 64

// validateTags returns what is wrong with tags. field names the setting or argument that holds them.
func validateTags(field string, tags []string) error {
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

// tagStates are the states of tags, under the tags as given.
type tagStates map[string]driver.TagState

func (l *Loader[V]) tagStates(ctx context.Context, from driver.Store, tags []string) (tagStates, error) {
	m := make(tagStates, len(tags))
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

// checkTags reports whether the tags of an entry leave the entry valid. It reads the states of the tags, unless a
// GetMany has read them.
func (r *refill[V]) checkTags(e *entry[V], states tagStates) (valid bool, err error) {
	if tags := e.Data.tags(); states == nil && len(tags) > 0 {
		ctx, done := r.storeCall()
		defer done()
		if states, err = r.tagReads.do(ctx, tags, 0); err != nil {
			return false, err
		}
	}
	return r.tagsValid(e, states), nil
}

// tagsValid judges an entry by the states of its tags. Another node may have loaded the entry. tagsValid returns false
// if the entry is invalid. If a tag of the entry was expired, tagsValid ages the entry.
func (l *Loader[V]) tagsValid(e *entry[V], states tagStates) bool {
	for _, tag := range e.Data.tags() {
		s := states[tag]
		// A state from the future was written before the store's clock was set back: write the state again.
		if micros(s.Invalidated) > l.now()+maxFuture {
			l.retryLater(l.fullTags([]string{tag}), true, false)
		}
		if !s.Known || e.Data.life.began <= micros(s.Invalidated) {
			return false
		}
		if e.Data.life.began <= micros(s.Expired) {
			e.Data.life = e.Data.life.expiredAt(micros(s.Expired))
		}
	}
	return true
}

// readTags is one read of tag states, for all refills that need them.
func (l *Loader[V]) readTags(tags []string, _ time.Duration) (tagStates, error) {
	ctx, cancel := context.WithTimeout(context.Background(), l.cfg.StoreTimeout)
	defer cancel()
	return l.tagStates(ctx, l.store, tags)
}

// ensureTagsOf makes sure that the store knows the tags of an entry before its record is stored.
func (r *refill[V]) ensureTagsOf(e *entry[V]) {
	if len(r.ensured.missing(e.Data.tags(), time.Now())) == 0 {
		return
	}
	// Two StoreTimeouts: one for a call in progress, and one for the call of this refill.
	ctx, cancel := context.WithTimeout(r.flight.Values(), 2*r.cfg.StoreTimeout)
	defer cancel()
	// After an error the record is invalid until another fill makes its tags known.
	if _, err := r.tagEnsures.do(ctx, e.Data.tags(), e.Data.life.age(r.now())); err != nil {
		r.emit(Event{Kind: EventStoreError, Key: r.key, Err: err})
	}
}

// ensureTags is one call of the store, for all refills that are about to publish tagged values. reach is how long ago
// the first of their loads began. If the state of a tag was lost, it is no longer known whether the tag was invalidated
// since. So values that were stored before the loss become invalid. The values of these loads stay valid.
func (l *Loader[V]) ensureTags(tags []string, reach time.Duration) (none struct{}, err error) {
	if tags = l.ensured.missing(tags, time.Now()); len(tags) == 0 {
		return none, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), l.cfg.StoreTimeout)
	defer cancel()
	if err = l.store.EnsureTags(ctx, reach+span(maxFuture), l.tagLife(), l.fullTags(tags)...); err == nil {
		l.ensured.add(tags, time.Now())
	}
	return none, err
}

// ensuredFor is how long this process assumes that the store still knows a tag after this process has ensured the tag.
// If the store evicts the state of the tag earlier, some valid values are loaded again.
const ensuredFor = 10 * time.Second

// maxEnsured bounds the memory of ensuredTags.
const maxEnsured = 4096

// ensuredTags are the tags that this process has just ensured.
type ensuredTags struct {
	mu    sync.Mutex
	until map[string]time.Time
}

func (t *ensuredTags) missing(tags []string, now time.Time) (missing []string) {
	if len(tags) == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, tag := range tags {
		if !now.Before(t.until[tag]) {
			missing = append(missing, tag)
		}
	}
	return missing
}

func (t *ensuredTags) add(tags []string, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.until == nil || len(t.until) > maxEnsured {
		t.until = make(map[string]time.Time)
	}
	for _, tag := range tags {
		t.until[tag] = now.Add(ensuredFor)
	}
}

// coalescer makes calls about tags, one call at a time. All callers that come while a call runs share the next call.
// The reason is a bulk load: it ends with hundreds of values that have the same tags, here and on every node that waits
// for these values.
type coalescer[R any] struct {
	call func(tags []string, reach time.Duration) (R, error)

	mu      sync.Mutex
	running bool
	next    *tagCall[R] // the call after the running one; nil if no caller has come
}

// tagCall is one call of a coalescer, while it collects callers and while it runs.
type tagCall[R any] struct {
	tags   map[string]bool
	reach  time.Duration // the longest reach of its callers
	done   chan struct{} // closed when result and err can be read
	result R
	err    error
}

func (c *coalescer[R]) do(ctx context.Context, tags []string, reach time.Duration) (r R, err error) {
	c.mu.Lock()
	if c.next == nil {
		c.next = &tagCall[R]{tags: make(map[string]bool), done: make(chan struct{})}
	}
	mine := c.next
	for _, tag := range tags {
		mine.tags[tag] = true
	}
	mine.reach = max(mine.reach, reach)
	first := !c.running
	c.running = true
	c.mu.Unlock()
	if first {
		c.run()
	}
	select {
	case <-mine.done:
		return mine.result, mine.err
	case <-ctx.Done():
		return r, ctx.Err()
	}
}

// run makes the next call. It leaves the call after that one to a new goroutine, so that no caller works for other
// callers.
func (c *coalescer[R]) run() {
	c.mu.Lock()
	this := c.next
	c.next = nil
	c.mu.Unlock()
	this.result, this.err = c.call(slices.Collect(maps.Keys(this.tags)), this.reach)
	close(this.done)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running = c.next != nil; c.running {
		go c.run()
	}
}
