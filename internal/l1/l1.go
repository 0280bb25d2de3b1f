// Package l1 is the memory of one process: decoded values by key. A small lock-free table stands in front of the cache
// library ristretto. The table holds what was just loaded, because ristretto returns a new key only after a while, and
// may reject the key. The table also holds the hottest keys, because the shard locks of ristretto cost more than all
// other work of a hit.
//
// An entry carries the [Epoch] of its key, noted before the read of the entry's value began. Every invalidation
// raises the current epoch. A reader compares the epoch of the entry with the current epoch. So it does not matter
// whether Put runs before or after an invalidation.
package l1

import (
	"hash/maphash"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/dgraph-io/ristretto/v2"
)

// Config bounds a Cache. All times in this package are microseconds by the clock that Now reads.
type Config struct {
	Off     bool  // keep nothing
	Entries int   // largest number of entries, at least 1
	Bytes   int64 // largest sum of the sizes of all entries, at least 1; math.MaxInt64 = not bounded

	Tick  time.Duration    // how often the coarse clock reads Now while the Cache is used
	Now   func() time.Time // the clock
	Store any              // Caches with the same Store and Tick share a coarse clock, and have the same Now
}

// Cache holds entries of T.
type Cache[T any] struct {
	clock *clock
	seed  maphash.Seed

	hot     hotTable[T]
	back    backTable[T]
	byBytes bool  // the cost of an entry is its size in bytes; if false, it is 1
	minCost int64 // least cost of an entry; with it, the bound on the sum of costs also bounds the number of entries

	stripes      [keyStripes]atomic.Uint32 // raised to invalidate a key; the keys of its stripe share this counter
	tagStripes   [tagStripes]atomic.Uint64 // tagEpoch at the last invalidation of a tag of the stripe
	tagEpoch     atomic.Uint64             // how many invalidations of tags there were
	tagMu        sync.Mutex                // held by InvalidateTag, so that one runs at a time
	subscription atomic.Uint32             // raised to invalidate all entries; odd = announcements can be received
}

// Entry is the value of one key. Only its atomic fields change after Put. The fields that a hit reads fit into the
// first cache line.
type Entry[T any] struct {
	Key        string
	Epoch      Epoch
	ServeUntil atomic.Int64 // the entry is a hit before this moment; 0 = another node has a newer value
	NotBefore  int64        // no hit while the clock is before this moment, because the clock was then set back
	touched    atomic.Int64 // tick at which ristretto last learned that the entry is in use
	tags       *[]uint16    // stripes of its tags; nil for none
	Data       T

	TrustUntil int64        // after this moment, this process may have missed a change by another node
	RefreshAt  atomic.Int64 // no background refresh before this moment
	cost       int64        // what the entry counts toward the bound of a table: 1, or its bytes if Cache.byBytes
}

// New returns an empty Cache. Close ends its goroutines.
func New[T any](cfg Config) (*Cache[T], error) {
	c := &Cache[T]{seed: maphash.MakeSeed()}
	c.hot.setUp(1, 0)
	if !cfg.Off {
		if err := c.setUp(cfg); err != nil {
			return nil, err
		}
	}
	c.clock = clockOf(cfg)
	return c, nil
}

func (c *Cache[T]) setUp(cfg Config) error {
	byBytes := cfg.Bytes < math.MaxInt64
	if byBytes { // no more entries than fit into Bytes
		cfg.Entries = int(min(int64(cfg.Entries), max(1, cfg.Bytes/c.overhead())))
	}
	slots := 1 // at most a quarter of Entries, because hot table and ristretto share the bound
	for slots*8 <= cfg.Entries && slots < maxHot {
		slots *= 2
	}
	room, hotRoom := max(1, int64(cfg.Entries-slots)), int64(slots)
	c.minCost, c.back.most = 1, math.MaxInt64
	if byBytes {
		c.byBytes = true
		hotRoom = cfg.Bytes / 4
		c.back.most = cfg.Bytes - hotRoom
		bytes := max(1, c.back.most-cfg.Bytes/8) // an eighth of Bytes is for entries in the queue of ristretto
		c.minCost = max(1, bytes/room)
		room = bytes
	}
	c.hot.setUp(slots, hotRoom)
	return c.back.setUp(&ristretto.Config[uint64, *Entry[T]]{
		NumCounters:        min(10*int64(cfg.Entries), maxCounters),
		MaxCost:            room,
		BufferItems:        64,
		IgnoreInternalCost: true,
	})
}

// maxCounters bounds the memory for the counters of ristretto, which take about 4 bytes each. An entry needs ten
// counters. With more than maxCounters/10 entries, ristretto chooses less exactly which entries to keep.
const maxCounters = 1 << 24

// overhead returns how many bytes an entry takes at least: the Entry, and its places in ristretto and in the hot table.
func (c *Cache[T]) overhead() int64 { return allocated(int(unsafe.Sizeof(Entry[T]{}))) + perItem }

// perItem is how many bytes ristretto and the hot table need for an entry. An entry takes 56 bytes in the table of
// ristretto and 16 in its policy. Both are maps that are about half full, so these bytes count twice. The rest is for
// the counters and the slot.
const perItem = 200

// Fresh returns the entry of key if the entry can be served as fresh, and nil otherwise. Fresh is the whole path of a
// hit. For an entry in the hot table it needs no lock, timer, allocation or system clock, except that touch calls
// ristretto once per tick. If the coarse clock sleeps, Fresh wakes it.
func (c *Cache[T]) Fresh(key string) *Entry[T] {
	h, now := c.Hash(key), c.clock.now.Load()
	e := c.hot.slot(h).Load()
	if e == nil || e.Key != key {
		if e = c.getBack(h, key); e == nil {
			return nil
		}
	} else if e.touched.Load() != now {
		c.touch(h, e, now)
	}
	if now >= e.ServeUntil.Load() || now < e.NotBefore || !c.valid(h, e) {
		if now == asleep && c.clock.use() != asleep {
			return c.Fresh(key) // by the time that use has just read
		}
		return nil
	}
	return e
}

// Get returns the entry of key, or nil. The caller decides whether the entry can be served.
func (c *Cache[T]) Get(key string) *Entry[T] {
	h, now := c.Hash(key), c.clock.use()
	e := c.hot.slot(h).Load()
	if e == nil || e.Key != key {
		return c.getBack(h, key)
	}
	if e.touched.Load() != now {
		c.touch(h, e, now)
	}
	return e
}

// Look is Get for announcements. It is no use of the Cache, so it does not wake the coarse clock.
func (c *Cache[T]) Look(key string) *Entry[T] {
	h := c.Hash(key)
	e := c.hot.slot(h).Load()
	if e == nil || e.Key != key {
		e, _ = c.back.get(h)
	}
	if e == nil || e.Key != key {
		return nil
	}
	return e
}

// touch tells ristretto and the clock once per tick that an entry of the hot table is in use. Otherwise ristretto would
// see no reads of the hottest keys, and would evict them first, and the clock would fall asleep.
func (c *Cache[T]) touch(h uint64, e *Entry[T], now int64) {
	e.touched.Store(now)
	c.clock.use()
	c.back.get(h)
}

// getBack returns the entry of key from ristretto, or nil.
func (c *Cache[T]) getBack(h uint64, key string) *Entry[T] {
	e, n := c.back.get(h)
	if e == nil || e.Key != key {
		return nil
	}
	c.clock.use()
	if n%32 == 0 {
		c.promote(h, e)
	}
	return e
}

// promote puts an entry of ristretto into the hot table. getBack calls promote for one hit in 32, so keys that share
// a slot occupy the slot in proportion to their traffic. If the old entry in the slot was used in this tick, promote
// replaces it only if ristretto holds it as well. An old entry that ristretto has rejected or evicted would be lost.
func (c *Cache[T]) promote(h uint64, e *Entry[T]) {
	old := c.hot.slot(h).Load()
	if old != nil && old.Key == e.Key {
		return // old was put after e was read from ristretto
	}
	if old != nil && old.touched.Load() == c.clock.now.Load() {
		if there, _ := c.back.get(c.Hash(old.Key)); there == nil {
			return
		}
	}
	c.hot.promote(h, old, e)
}

// NewEntry makes an entry for Put. epoch is the epoch of key, which the caller noted before its read of data began.
func (c *Cache[T]) NewEntry(key string, epoch Epoch, tags []string, data T) *Entry[T] {
	e := &Entry[T]{Key: key, Data: data, Epoch: epoch}
	if len(tags) > 0 {
		stripes := make([]uint16, len(tags))
		for i, tag := range tags {
			stripes[i] = c.tagStripe(tag)
		}
		e.tags = &stripes
	}
	return e
}

// Put adds e, or replaces the entry of the same key. size is how many bytes e.Data refers to, see [SizeOf]. Put keeps
// no entry that takes more than a quarter of Config.Bytes.
func (c *Cache[T]) Put(e *Entry[T], size int64) {
	if c.back.cache == nil {
		return
	}
	e.cost = 1
	if c.byBytes {
		e.cost = max(size+c.overhead()+allocated(len(e.Key)), c.minCost)
		if e.tags != nil {
			e.cost += allocated(24) + allocated(2*len(*e.tags))
		}
	}
	h := c.Hash(e.Key)
	if e.cost > c.hot.room {
		c.hot.drop(h, e.Key)
		c.back.drop(h)
		return
	}
	e.touched.Store(c.clock.now.Load())
	c.hot.put(h, e)
	c.back.put(h, e)
}

// Hash returns a hash of s. Another Cache returns another hash of s.
func (c *Cache[T]) Hash(s string) uint64 { return maphash.String(c.seed, s) }

// Close ends the goroutines. Other methods may run during Close and after it. After Close, Put and Get use only the hot
// table.
func (c *Cache[T]) Close() {
	c.clock.leave()
	c.back.close()
}
