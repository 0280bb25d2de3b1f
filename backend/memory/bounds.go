package memory

import "time"

// This file bounds the memory of a Store.

// The limits of New.
const (
	defaultEntries = 100_000
	defaultBytes   = 256 << 20
)

// drop removes the value, the lease and the claim of the item, each if it has ended.
func (i *item) drop(now time.Time) {
	i.value.current(now)
	i.lease.current(now)
	i.claim.current(now)
}

// itemBytes is about how many bytes an item needs beyond its texts: for the item itself and its place in the map.
const itemBytes = 300

// cost returns how many bytes of memory the item needs. An empty item needs none, because it is not stored.
func (i *item) cost(key string) int64 {
	if *i == (item{}) {
		return 0
	}
	return int64(itemBytes + len(key) + len(i.value.data) + len(i.lease.data) + len(i.claim.data))
}

const (
	// lookedAt is how many random items each insertion looks at, to drop what has ended. With 4 looks per insertion, at
	// most about a quarter of the items in the store are items that have ended.
	lookedAt = 4
	// evict gives up after maxKept items of which it could drop nothing. Such items have no value, only a lease, a
	// claim, a back-off or a note.
	maxKept = 64
)

// evict is called after the item of a key has grown. It drops what has ended from a few random items. Then it drops
// random values while the store is above a limit. It drops the value of key only if that value alone is above the
// limit.
func (s *Store) evict(key string, now time.Time) {
	if i := s.items[key]; i != nil && i.cost(key) > s.maxBytes {
		before := i.cost(key)
		i.value = expiring{}
		s.put(key, i, before)
	}
	looked, kept := 0, 0
	for k, i := range s.items {
		full := len(s.items) > s.maxItems || s.bytes > s.maxBytes
		if looked++; looked > lookedAt && !full || kept > maxKept {
			return
		}
		before := i.cost(k)
		if i.drop(now); full && k != key {
			i.value = expiring{}
		}
		if i.cost(k) == before { // nothing was dropped
			kept++
		} else {
			s.put(k, i, before)
		}
	}
}

// evictTags drops what has ended from a few random tag states. Then it drops tag states above the limit, in random
// order, but never the state of except. Values with a dropped tag become invalid.
func (s *Store) evictTags(except string, now time.Time) {
	looked := 0
	for tag, t := range s.tags {
		full := len(s.tags) > s.maxTags
		if looked++; looked > lookedAt && !full {
			return
		}
		if tag != except && (full || !now.Before(t.until)) {
			delete(s.tags, tag)
		}
	}
}
