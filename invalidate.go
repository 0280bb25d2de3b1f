package refill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/retry"
)

// This file holds Invalidate and Expire, and handles the announcements that this node receives.

// Invalidate removes the values and back-offs of keys everywhere. It also removes the claims of running loads, so these
// loads cannot be stored. After Invalidate has returned nil, no node serves a value from the store as fresh if the load
// of that value began before the call. No later Get on this node joins such a load. Other nodes drop the values from L1
// when the announcement arrives. Call Invalidate after the transaction that changed the data has committed.
//
// An error that wraps [ErrInvalid] (an empty key) means that nothing was done. Any other error means that the store may
// still hold old values. This node has dropped its own copies nevertheless, and repeats the Invalidate in the
// background until the store confirms it or the values have expired. Log such an error, and do not fail the request
// that changed the data: its write to the database is done. Invalidate waits for the store for at most one
// Config.StoreTimeout per 1,024 keys. While the circuit breaker is open, Invalidate does not wait for the store.
func (l *Loader[V]) Invalidate(ctx context.Context, keys ...string) error {
	return l.invalidate(ctx, keys, false)
}

// Expire is like Invalidate, but keeps the values and marks them as stale. For Config.StaleFor from now, Get returns
// such a value at once as stale, while a refresh runs.
func (l *Loader[V]) Expire(ctx context.Context, keys ...string) error {
	return l.invalidate(ctx, keys, true)
}

const (
	// invalidateAtOnce is how many keys one call of the store invalidates. Each call has a StoreTimeout.
	invalidateAtOnce = 256
	// invalidateCalls is how many calls of an Invalidate run at once.
	invalidateCalls = 4
)

// invalidate calls the store before it drops the entries of L1. In the opposite order: 1. L1 drops the entry. 2. A Get
// reads the old value from the store, and puts it into L1. 3. The store deletes the value. Then L1 would go on serving
// the old value.
func (l *Loader[V]) invalidate(ctx context.Context, keys []string, expire bool) error {
	var err error
	keys, full := slices.Clone(keys), make([]string, len(keys))
	for i, key := range keys {
		if keys[i], err = l.storeKey(key); err != nil {
			return err
		}
		full[i] = l.full(keys[i])
	}
	left, err := l.storeInvalidateAll(ctx, full, expire)
	if err != nil { // before drop, so that every read of this node after drop first repeats the invalidation
		l.retryLater(left, false, expire)
	}
	for _, key := range keys {
		l.drop(key)
	}
	if err != nil {
		return fmt.Errorf("refill: could not invalidate %d of %d keys in the store; retrying in the background: %w",
			len(left), len(keys), err)
	}
	return nil
}

// storeInvalidateAll returns the keys that the store may still hold, and the first error. If a call fails, calls that
// run already go on. But no further call begins, because the store probably does not answer. For the same reason, no
// call begins while the breaker is open.
func (l *Loader[V]) storeInvalidateAll(ctx context.Context, full []string, expire bool) (left []string, err error) {
	if err := l.store.Err(); err != nil {
		return full, err
	}
	var (
		calls  errgroup.Group
		failed atomic.Bool
		mu     sync.Mutex // guards left
	)
	calls.SetLimit(invalidateCalls)
	for some := range slices.Chunk(full, invalidateAtOnce) {
		calls.Go(func() (err error) {
			if !failed.Load() {
				if err = l.storeInvalidate(ctx, some, expire); err == nil {
					return nil
				}
				failed.Store(true)
			}
			mu.Lock()
			defer mu.Unlock()
			left = append(left, some...)
			return err
		})
	}
	err = calls.Wait()
	return left, err
}

func (l *Loader[V]) storeInvalidate(ctx context.Context, full []string, expire bool) error {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.StoreTimeout)
	defer cancel()
	if expire {
		return l.store.Expire(ctx, l.node.token(), full...)
	}
	return l.store.Invalidate(ctx, l.node.token(), full...)
}

// drop invalidates the entry of key in L1, and keeps later callers from joining the flight of key.
func (l *Loader[V]) drop(key string) {
	l.l1.Invalidate(key)
	l.flights.Forget(key)
}

// longestLife bounds how long a value can be served if its load begins now.
func (l *Loader[V]) longestLife() time.Duration {
	return l.cfg.TTL + max(l.cfg.StaleFor, l.cfg.StaleIfError) + l.cfg.LoadTimeout
}

// target is the key or the tag that an invalidation is about. A key and a tag can have the same text.
type target struct {
	full  string
	isTag bool
}

// invalidation is an invalidation that the store has not confirmed.
type invalidation struct {
	expire bool // true: Expire or ExpireTag; false: Invalidate or InvalidateTag
}

// merge combines two invalidations of one target. The result is an Expire only if both invalidations are, so that an
// Expire does not weaken an earlier Invalidate.
func (old invalidation) merge(new invalidation) invalidation {
	return invalidation{expire: old.expire && new.expire}
}

// retryLater repeats an invalidation in the background, until the store confirms it or the values have expired.
func (l *Loader[V]) retryLater(full []string, areTags, expire bool) {
	targets := make([]target, len(full))
	for i, f := range full {
		targets[i] = target{f, areTags}
	}
	l.retries.Add(targets, invalidation{expire}, time.Now().Add(l.longestLife()))
}

func (l *Loader[V]) retryInvalidate(ctx context.Context, t target, i invalidation) error {
	if t.isTag {
		return l.storeInvalidateTags(ctx, []string{t.full}, i.expire)
	}
	return l.storeInvalidate(ctx, []string{t.full}, i.expire)
}

// retried is called when a repeated invalidation has succeeded or was given up. It drops the key or tag from L1 once
// more. The reason: a Get on this node may have read the old value since the first try, and this node ignores the
// announcements of its own invalidations.
func (l *Loader[V]) retried(t target, _ invalidation, err error) {
	key := l.short(t.full)
	if t.isTag {
		l.l1.InvalidateTag(key)
	} else {
		l.drop(key)
	}
	if errors.Is(err, retry.ErrFull) {
		err = fmt.Errorf("%w: too many invalidations wait for the store", ErrOverloaded)
	}
	l.emit(Event{Kind: EventInvalidateRetried, Key: key, Err: err})
}

// onAnnouncement handles an announcement of the store. The store calls onAnnouncement for one announcement after the
// other. onAnnouncement does not block.
func (l *Loader[V]) onAnnouncement(a driver.Announcement) {
	key := l.short(a.Key)
	switch a.Kind {
	case driver.Subscribed:
		l.onSubscribed(a)
		return
	case driver.Disconnected:
		l.l1.SetSubscribed(false)
		l.emit(Event{Kind: EventStoreDown, Err: a.Err})
		return
	case driver.Warning:
		l.emit(Event{Kind: EventStoreWarning, Err: a.Err})
		return
	case driver.TagInvalidated, driver.TagExpired:
		if !l.node.made(a.Token) { // otherwise InvalidateTag or ExpireTag of this node has told L1 already
			l.l1.InvalidateTag(key)
		}
		return
	case driver.Invalidated, driver.Expired:
		if !l.node.made(a.Token) {
			l.drop(key)
		}
	case driver.Filled:
		l.backoffs.forget(key)
		l.flights.Notify(key, a) // before replace, see keepInL1
		l.replace(key, a)
		return
	case driver.Failed:
		l.onFailed(key, a)
	case driver.Released:
		l.reschedule(key, 0)
	}
	l.flights.Notify(key, a)
}

// onSubscribed is called when the subscription works again. It makes up for announcements that this node may have
// missed.
func (l *Loader[V]) onSubscribed(a driver.Announcement) {
	l.l1.SetSubscribed(true)
	l.flights.ForgetAll()  // the value that a flight reads or loads may have been invalidated
	l.flights.NotifyAll(a) // the result that a flight waits for may have been announced already
	l.store.Probe()
	l.retries.Wake()
	l.emit(Event{Kind: EventStoreUp})
}

// replace brings L1 up to date with a fill of another node. The announcement names the record that the fill has
// replaced. If L1 has the entry of that replaced record, replace puts an entry of the new record in its place. The new
// entry takes over the epoch of the old entry. So an invalidation of the old entry at this moment applies to the new
// entry as well. If L1 has any other entry, that entry may be newer than the announced record. Then replace only marks
// the entry as superseded.
func (l *Loader[V]) replace(key string, a driver.Announcement) {
	e := l.l1.Look(key)
	if e == nil || e.Data.token() == a.Token || !l.l1.Valid(e) {
		return
	}
	if e.Data.token() == a.Replaced && len(a.Record) > 0 {
		// A record with tags is not taken from the announcement. The next Get reads it from the store, with its tag states.
		if next, _ := l.decode(key, a.Record, e.Epoch()); next != nil && len(next.Data.tags()) == 0 {
			l.putL1(next, a.Record)
			return
		}
	}
	supersede(e)
}

// supersede marks an entry of L1 as older than the record of the store. The next Get serves the entry, and refreshes it
// in the background.
func supersede[V any](e *entry[V]) {
	e.ServeUntil.Store(0)
	e.RefreshAt.Store(0)
}

// otherFilled reports whether the last message to the flight announced a fill of another record than that of e.
func otherFilled[V any](f *flightOf[V], e *entry[V]) bool {
	a := f.Latest()
	return a != nil && a.Kind == driver.Filled && a.Token != e.Data.token()
}

// onFailed handles the announcement of a failed load. A failure of another node holds this node back only if it is the
// second failure in a row in the fleet (LoadError.fleet).
func (l *Loader[V]) onFailed(key string, a driver.Announcement) {
	err := l.loadErrorOf(key, a.Failure, 0)
	switch {
	case err.Node == l.node.id: // this node remembers its own failures already, with their cause
		l.reschedule(key, err.RetryAfter)
	case err.fleet:
		l.backoffs.remember(key, err, l.l1.Epoch(key).Key)
		l.reschedule(key, err.RetryAfter)
	default:
		l.reschedule(key, 0)
	}
}

// reschedule sets when the entry of key in L1 may be refreshed again: after backOff, or at once if backOff is 0. It is
// called when an announcement says that a load has ended without a value.
func (l *Loader[V]) reschedule(key string, backOff time.Duration) {
	e := l.l1.Look(key)
	switch {
	case e == nil:
	case backOff > 0:
		e.RefreshAt.Store(l.now() + backOff.Microseconds())
	default:
		e.RefreshAt.Store(0)
	}
}
