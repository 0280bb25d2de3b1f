package refill

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file is about tags. A load tags its value with Fill.Tag. The store keeps one state per tag: the moments when the
// tag was last invalidated and last expired. A value is invalid if one of its tags was invalidated after the load of
// the value began, or at that very moment. So an invalidation of a tag costs the same for ten values and for ten
// million, and covers loads that are in progress.
//
// A value that comes from another node, in the store or in an announcement, is judged by the tag states in the store.
// L1 does not ask the store. Instead, an entry of L1 carries the number of tag invalidations that this process knew
// before the read of the entry began (l1.Epoch). If one of the tags of the entry was invalidated after that, the entry
// is invalid.

// InvalidateTag is Invalidate for all values that carry one of the tags, see [Fill.Tag] and Config.Tags. Its cost does
// not depend on the number of values. The number of tags is not limited, and the tags share one call of the store. A
// load that is in progress goes on, because its tags are known only at its end. Callers that ask for the key meanwhile
// wait for that load, and load again if its value has the tag. InvalidateTag does not end back-offs.
//
// If Redis evicts the state of a tag, the values with the tag are loaded again. The guarantee is weaker in one case: 1.
// A load begins. 2. A tag of its value is invalidated. 3. Redis loses the state of the tag. 4. The load ends. Then the
// value is valid until it expires, although its load began before the invalidation. Redis loses such a young state only
// in a failover, or if its eviction policy removes young keys.
//
// The start of a load is compared with the invalidation of a tag by the store's clock. If the store is several servers
// (Cluster, Ring), a difference between their clocks makes the comparison inexact by that difference.
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
	if err := validateNames("tag", tags); err != nil || len(tags) == 0 {
		return err
	}
	full := l.fullTags(tags)
	err := l.store.Err() // not nil while the breaker is open
	if err == nil {
		err = l.storeInvalidateTags(ctx, full, expire)
	}
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

// tagLife is how long the store keeps the state of a tag. When the store drops a state after that time, the tag is
// unknown. That is safe, because a value with an unknown tag counts as invalid.
func (l *Loader[V]) tagLife() time.Duration { return max(24*time.Hour, l.longestLife()) }

// fullTags returns tags as driver.Store wants them: with the name of the Loader in front.
func (l *Loader[V]) fullTags(tags []string) []string {
	full := make([]string, len(tags))
	for i, tag := range tags {
		full[i] = l.full(storeKey(tag))
	}
	return full
}

const maxTags = 64

// validateTags returns what is wrong with the tags of a value. field names the setting or argument that holds them.
func validateTags(field string, tags []string) error {
	if len(tags) > maxTags {
		return invalid(field, "%d tags, at most %d", len(tags), maxTags)
	}
	return validateNames(field, tags)
}

func validateNames(field string, tags []string) error {
	for _, tag := range tags {
		if tag == "" {
			return invalid(field, "empty")
		}
	}
	return nil
}

// tagStates holds the state of each tag, by the tag as the load has set it.
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

// statesOf returns the states of the tags of an entry. If states is nil, statesOf reads them.
func (r *refill[V]) statesOf(e *entry[V], states tagStates) (tagStates, error) {
	if tags := e.Data.tags(); states == nil && len(tags) > 0 {
		return r.tagReads.Do(r.flight.Values(), tags...)
	}
	return states, nil
}

// expired reports whether one of tags was expired after a load began.
func (states tagStates) expired(tags []string, began int64) bool {
	return slices.ContainsFunc(tags, func(tag string) bool { return began <= micros(states[tag].Expired) })
}

// tagsValid reports whether an entry is valid, given the states of its tags. If a tag was expired after the load of the
// entry began, tagsValid also marks the entry as stale from the moment of the expiry.
func (l *Loader[V]) tagsValid(e *entry[V], states tagStates) bool {
	for _, tag := range e.Data.tags() {
		s := states[tag]
		// An invalidation in the future says that the store's clock was set back. Repeat the invalidation, by the
		// present clock.
		if micros(s.Invalidated) > l.now()+maxFuture {
			l.retryLater(l.fullTags([]string{tag}), true, false)
		}
		if !s.Known || lifeIn(e).began <= micros(s.Invalidated) {
			return false
		}
		if lifeIn(e).began <= micros(s.Expired) {
			life := lifeIn(e).expiredAt(micros(s.Expired))
			e.Data.add().life = &life
		}
	}
	return true
}

// readTags reads tag states in one call of the store, for all refills that ask for tag states at the same time. If this
// node could not complete an invalidation of one of the tags, the store may still hold the old state of that tag. Then
// the invalidation comes first.
func (l *Loader[V]) readTags(tags []string) (tagStates, error) {
	if !l.retries.Empty() {
		for _, full := range l.fullTags(tags) {
			if err := l.retries.TryNow(target{full, true}); err != nil {
				return nil, err
			}
		}
	}
	ctx, cancel := context.WithTimeout(l.shared, l.cfg.StoreTimeout)
	defer cancel()
	return l.tagStates(ctx, l.store, tags)
}

// ensureTagsOf makes sure that the store knows the tags of an entry before the record of the entry is stored. This
// process does not remember which tags the store knows, because Redis may restart or evict a tag state at any moment.
func (r *refill[V]) ensureTagsOf(e *entry[V]) {
	tags := e.Data.tags()
	if len(tags) == 0 {
		return
	}
	age := lifeIn(e).age(r.now())
	uses := make([]tagUse, len(tags))
	for i, tag := range tags {
		uses[i] = tagUse{tag, age}
	}
	// After an error, the store may not know the tags. The record then counts as invalid until another fill makes the
	// tags known.
	if _, err := r.tagEnsures.Do(r.flight.Values(), uses...); err != nil {
		r.emit(Event{Kind: EventStoreError, Key: r.key, Err: err})
	}
}

// tagUse is a tag of a value that is about to be published, and how long ago the load of the value began.
type tagUse struct {
	tag string
	age time.Duration
}

// ensureTags makes tags known to the store, in one call for all refills that are about to publish tagged values. If the
// store has lost the state of a tag, the store may have lost an invalidation of the tag. So EnsureTags makes all values
// with the tag invalid whose load began longer than reach ago. reach goes back to the earliest load that this process
// has not yet published, so the values of these loads stay valid. A value that another node is still loading may become
// invalid, and is then loaded again.
func (l *Loader[V]) ensureTags(uses []tagUse) (none struct{}, err error) {
	var tags []string
	reach := l.claims.oldest(l.store.Now()) + span(maxFuture)
	for _, use := range uses {
		tags = append(tags, use.tag)
		reach = max(reach, use.age+span(maxFuture))
	}
	slices.Sort(tags)
	ctx, cancel := context.WithTimeout(l.shared, l.cfg.StoreTimeout)
	defer cancel()
	return none, l.store.EnsureTags(ctx, reach, l.tagLife(), l.fullTags(slices.Compact(tags))...)
}

// claims holds the loads of a Loader that have a claim and are not yet published, with the start of each load.
type claims struct {
	mu    sync.Mutex
	began map[string]time.Time // by token
}

// add notes a load. When the fill of the load has ended, remove forgets the load.
func (c *claims) add(token string, began time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.began == nil {
		c.began = make(map[string]time.Time)
	}
	c.began[token] = began
}

func (c *claims) remove(token string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.began, token)
}

// oldest returns how long ago the earliest of the loads began, and 0 if there is none.
func (c *claims) oldest(now time.Time) (age time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, began := range c.began {
		age = max(age, now.Sub(began))
	}
	return age
}
