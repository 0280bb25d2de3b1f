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

// This file has Invalidate and Expire, and handles the announcements that this node receives.

// Invalidate removes the keys everywhere: the values, the right of running loads to be stored, and the back-offs. After
// Invalidate has returned nil, no load that began before the call is served as fresh from the store, on any node, and
// no later Get on this node joins such a load. The memory of other nodes follows with the announcement. Call Invalidate
// after the transaction that changed the data has committed.
//
// An error means that the store may still hold the old values. This node has dropped its own copies nevertheless, and
// repeats the Invalidate in the background until the values have expired.
func (l *Loader[V]) Invalidate(ctx context.Context, keys ...string) error {
	return l.invalidate(ctx, keys, false)
}

// Expire is Invalidate, but the values stay and count as stale from now on. While Config.StaleFor lasts, these values
// are served as stale, and refreshed.
func (l *Loader[V]) Expire(ctx context.Context, keys ...string) error {
	return l.invalidate(ctx, keys, true)
}

const (
	// invalidateAtOnce is how many keys one call of the store invalidates, within one StoreTimeout.
	invalidateAtOnce = 256
	// invalidateCalls is how many of these calls run at once.
	invalidateCalls = 4
)

// invalidate calls the store before it drops the entries of L1. In the opposite order, a read that began between the
// two steps would bring the old value back into L1.
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
	for _, key := range keys {
		l.drop(key)
	}
	if err != nil {
		l.retryLater(left, false, expire)
		return fmt.Errorf("refill: could not invalidate %d of %d keys in the store; retrying in the background: %w",
			len(left), len(keys), err)
	}
	return nil
}

// storeInvalidateAll returns the keys that may be left in the store, and the first error. A call that fails cancels no
// other call. Calls that have not begun by then are not made, since the store does not answer.
func (l *Loader[V]) storeInvalidateAll(ctx context.Context, full []string, expire bool) (left []string, err error) {
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

// drop invalidates the entry of key in this process, and the flight that is reading or loading key.
func (l *Loader[V]) drop(key string) {
	l.l1.Invalidate(key)
	l.flights.Forget(key)
}

// longestLife bounds how long a value can be served if its load begins now.
func (l *Loader[V]) longestLife() time.Duration {
	return l.cfg.TTL + max(l.cfg.StaleFor, l.cfg.StaleIfError) + l.cfg.LoadTimeout
}

// target is what an invalidation is about: a key or a tag. A key and a tag can have the same text.
type target struct {
	full  string
	isTag bool
}

// invalidation is an invalidation that the store has not confirmed.
type invalidation struct {
	expire bool // Expire or ExpireTag
}

// merge combines two invalidations of one target, so that a later Expire does not weaken an Invalidate.
func (old invalidation) merge(new invalidation) invalidation {
	return invalidation{expire: old.expire && new.expire}
}

// retryLater repeats an invalidation until the store confirms it, or until the values have expired.
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

// retried ends a repeated invalidation. It drops the key here once more, for two reasons: a Get since the failure may
// have read the old value, and this node does not act on its own announcement.
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

// onAnnouncement handles the announcements of the store, one after the other. It does not block.
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
		if !l.node.made(a.Token) { // InvalidateTag carries out this node's own before it returns
			l.l1.InvalidateTag(key)
		}
		return
	case driver.Invalidated, driver.Expired:
		if !l.node.made(a.Token) {
			l.drop(key)
		}
	case driver.Filled:
		l.backoffs.forget(key)
		l.replace(key, a)
	case driver.Failed:
		l.onFailed(key, a)
	case driver.Released:
		l.reschedule(key, 0)
	}
	l.flights.Notify(key, a)
}

// onSubscribed makes up for announcements that this node may have missed.
func (l *Loader[V]) onSubscribed(a driver.Announcement) {
	l.l1.SetSubscribed(true)
	l.flights.ForgetAll()  // the values that flights load may have been invalidated
	l.flights.NotifyAll(a) // the results that flights wait for may have been announced
	l.store.Probe()
	l.retries.Wake()
	l.emit(Event{Kind: EventStoreUp})
}

// replace brings L1 up to date with a fill of another node. The announcement names the record that it replaces. Only
// the entry of that record is replaced, because any other entry may be newer. The new entry takes over the epoch of the
// old entry. So an invalidation of the old entry at this moment applies to the new entry as well.
func (l *Loader[V]) replace(key string, a driver.Announcement) {
	e := l.l1.Get(key)
	if e == nil || e.Data.token == a.Token || !l.l1.Valid(e) {
		return
	}
	if e.Data.token == a.Replaced && len(a.Record) > 0 {
		// A tagged value is not taken from the announcement: a read gets it again, with the states of its tags.
		if next := l.decode(key, a.Record, e.Epoch); next != nil && len(next.Data.tags()) == 0 {
			l.putL1(next, len(a.Record))
			return
		}
	}
	e.ServeUntil.Store(0) // superseded: the entry is served, and refreshed in the background
	e.RefreshAt.Store(0)
}

func (l *Loader[V]) onFailed(key string, a driver.Announcement) {
	err := l.loadErrorOf(key, a.Failure, 0)
	if err.Node != l.node.id { // this node remembers its own failures already, with their cause
		l.backoffs.remember(key, err, l.l1.Epoch(key).Key)
	}
	l.reschedule(key, err.RetryAfter)
}

// reschedule sets when a stale entry of L1 may be refreshed again. It is called when a refresh on another node has
// ended without a value.
func (l *Loader[V]) reschedule(key string, backOff time.Duration) {
	e := l.l1.Get(key)
	switch {
	case e == nil:
	case backOff > 0:
		e.RefreshAt.Store(l.now() + backOff.Microseconds())
	default:
		e.RefreshAt.Store(0)
	}
}
