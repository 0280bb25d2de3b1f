package l1

import "sync/atomic"

// This file decides whether an entry is valid. Invalidations raise counters. A reader compares these counters with
// their earlier values, which are noted in the entry.

const (
	keyStripes = 1 << 16
	tagStripes = 1 << 13

	notSubscribed = ^uint32(0)     // Epoch.subscription of a read that began while announcements could not be received
	shut          = ^uint32(0) - 1 // Cache.subscription after Shut
)

// stripes are the counters of keys and tags. They take 320 KiB, so a Cache that is not used has none. An idle process
// still gets the announcements of the others. An invalidation that finds no stripes raises nothing, so Epoch has to
// make them, before the read of the key begins. If Put made them, the first entry could be older than an invalidation:
//
//  1. A reader notes the epoch of k: there are no stripes, so it notes 0. It reads the old value from the store.
//  2. The value is invalidated in the store. Invalidate(k) finds no stripes.
//  3. The reader puts the old value, and the stripes are made. The counter of k is 0, so the entry is valid for ever.
//
// With stripes that Epoch makes, an invalidation that finds none comes before every read: Invalidate looks for stripes,
// then Epoch makes them, and then the first read begins. An invalidation concerns only reads that began before it.
type stripes struct {
	keys [keyStripes]atomic.Uint32 // raised to invalidate a key; the keys of a stripe share this counter
	tags [tagStripes]atomic.Uint64 // tagEpoch at the last invalidation of a tag of the stripe
}

// noted returns the stripes, and makes them if there are none yet.
func (c *Cache[T]) noted() *stripes {
	s := c.stripes.Load()
	if s == nil {
		c.stripes.CompareAndSwap(nil, new(stripes)) // or another goroutine has made them
		s = c.stripes.Load()
	}
	return s
}

// Epoch says when a read of a key began. It consists of counters of events, not of times.
type Epoch struct {
	Key          uint32 // counts the invalidations of the key and of all other keys of its stripe
	subscription uint32 // Cache.subscription when the read began, or notSubscribed
	Tags         uint64 // how many invalidations of tags there were
}

// Confirmed reports whether the entry was in the store while announcements could be received.
func (e Epoch) Confirmed() bool { return e.subscription != notSubscribed }

// Epoch returns the current epoch of key. A reader calls it before its read of the key begins.
func (c *Cache[T]) Epoch(key string) Epoch {
	e := Epoch{
		Key:          c.noted().keys[c.Hash(key)%keyStripes].Load(),
		subscription: c.subscription.Load(),
		Tags:         c.tagEpoch.Load(),
	}
	if e.subscription%2 == 0 {
		e.subscription = notSubscribed // this read may miss an announcement
	}
	return e
}

// Epoch returns the epoch of e. Epoch.Tags is 0 if e has no tags.
func (e *Entry[T]) Epoch() Epoch {
	noted := Epoch{Key: e.epoch, subscription: e.subscription}
	if e.tags != nil {
		noted.Tags = e.tags.epoch
	}
	return noted
}

// Unconfirm says, before Put, that e may be missing in the store. Such an entry is never [Cache.Valid], so it is served
// only while the store does not answer.
func (e *Entry[T]) Unconfirm() { e.subscription = notSubscribed }

// Valid reports whether e is still valid. An entry is valid if this process has been subscribed ever since the read
// of the entry began, and has received no invalidation of the entry since then.
func (c *Cache[T]) Valid(e *Entry[T]) bool { return c.valid(c.stripes.Load(), c.Hash(e.Key), e) }

// valid is Valid, with the stripes of the Cache and the hash of the key.
func (c *Cache[T]) valid(s *stripes, hash uint64, e *Entry[T]) bool {
	return e.subscription == c.subscription.Load() && s.notInvalidated(hash, e.epoch, e.tags)
}

// NotInvalidated reports whether this process has received no invalidation of e. It promises less than Valid, because
// this process may have missed an invalidation while it could not receive announcements.
func (c *Cache[T]) NotInvalidated(e *Entry[T]) bool {
	return c.stripes.Load().notInvalidated(c.Hash(e.Key), e.epoch, e.tags)
}

func (s *stripes) notInvalidated(hash uint64, epoch uint32, tags *tagged) bool {
	return s != nil && epoch == s.keys[hash%keyStripes].Load() && (tags == nil || !s.tagInvalidated(tags))
}

// Invalidate makes the entry of key invalid. If a read of key has already begun, the entry made from that read will
// also be invalid.
func (c *Cache[T]) Invalidate(key string) {
	h := c.Hash(key)
	if s := c.stripes.Load(); s != nil {
		s.keys[h%keyStripes].Add(1)
	}
	if t := c.tables.Load(); t != nil {
		t.drop(h, key)
	}
}

// tagStripe returns the index of a tag's counter. Tags that share a counter are invalidated together. This is safe,
// because values that were invalidated needlessly are merely read again.
func (c *Cache[T]) tagStripe(tag string) uint16 { return uint16(c.Hash(tag) % tagStripes) }

// InvalidateTag makes entries with the tag invalid. If a read has already begun, an entry with the tag made from that
// read will also be invalid.
func (c *Cache[T]) InvalidateTag(tag string) {
	c.tagMu.Lock()
	defer c.tagMu.Unlock()
	n := c.tagEpoch.Load() + 1
	if s := c.stripes.Load(); s != nil {
		s.tags[c.tagStripe(tag)].Store(n)
	}
	c.tagEpoch.Store(n) // last, so that a reader that notes n also sees the new stripe
}

// TagEpoch returns how many invalidations of tags there were.
func (c *Cache[T]) TagEpoch() uint64 { return c.tagEpoch.Load() }

// TagInvalidated reports whether a tag of e was invalidated after the read of e began.
func (c *Cache[T]) TagInvalidated(e *Entry[T]) bool {
	s := c.stripes.Load()
	return s != nil && e.tags != nil && s.tagInvalidated(e.tags)
}

// tagInvalidated reports whether one of the tags was invalidated since their epoch.
func (s *stripes) tagInvalidated(t *tagged) bool {
	for _, tag := range t.stripes {
		if s.tags[tag].Load() > t.epoch {
			return true
		}
	}
	return false
}

// SetSubscribed sets whether announcements can be received from now on. A change of this state invalidates every entry,
// because announcements may have been missed.
func (c *Cache[T]) SetSubscribed(yes bool) {
	for {
		s := c.subscription.Load()
		if s == shut || (s%2 == 1) == yes {
			return
		}
		if c.subscription.CompareAndSwap(s, s+1) {
			return
		}
	}
}

// Shut makes every entry invalid for ever.
func (c *Cache[T]) Shut() { c.subscription.Store(shut) }
