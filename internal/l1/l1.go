// Package l1 is the memory of one process: decoded values by key. A small lock-free table stands in front of ristretto.
// The table holds what was just loaded, because ristretto shows a new key late and may reject it. The table also holds
// the hottest keys, because the shard locks of ristretto cost more than all other work of a hit.
//
// An entry carries the [Epoch] of its key, noted before the read of the entry's value began. Every invalidation raises
// epochs. A Get compares the epoch of the entry with the current one. So no decision here depends on the order of
// calls.
package l1

import (
	"hash/maphash"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/ristretto/v2"
)

// Config bounds a Cache. All times in this package are microseconds by the clock that Now reads.
type Config struct {
	Off     bool  // keep nothing
	Entries int   // the number of entries, at least 1
	Bytes   int64 // the sum of their sizes; 0 = not bounded

	Tick time.Duration    // how often the coarse clock is read
	Now  func() time.Time // the clock
}

// Cache holds entries of T.
type Cache[T any] struct {
	clock clock
	seed  maphash.Seed

	hot     hotTable[T]
	back    *ristretto.Cache[uint64, *Entry[T]] // nil if the cache is off
	byBytes bool                                // costs count bytes, not entries
	minCost int64                               // least cost of an entry, so that Bytes also bounds the number of entries

	stripes      [keyStripes]atomic.Uint32 // raised to invalidate a key, and the keys that share its stripe
	tagStripes   [tagStripes]atomic.Uint64 // tagEpoch at the last invalidation of a tag of the stripe
	tagEpoch     atomic.Uint64             // how many invalidations of tags there were
	tagMu        sync.Mutex                // one invalidation of a tag at a time
	subscription atomic.Uint32             // raised to invalidate all entries; odd = announcements can be received
}

// Entry is one value. Only its atomic fields change after Put. The fields that a hit reads fit into the first cache
// line.
type Entry[T any] struct {
	Key        string
	Epoch      Epoch
	ServeUntil atomic.Int64 // a hit before this moment; 0 = superseded by a newer value elsewhere
	NotBefore  int64        // no hit while the clock is before this moment, because the clock was then set back
	touched    atomic.Int64 // when ristretto last learned that the entry is in use
	tags       *[]uint16    // stripes of its tags; nil for none
	Data       T

	TrustUntil int64        // a change elsewhere may have been missed after this moment
	RefreshAt  atomic.Int64 // no background refresh before this moment
	cost       int64
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
	c.clock.start(cfg.Tick, cfg.Now)
	return c, nil
}

func (c *Cache[T]) setUp(cfg Config) (err error) {
	slots := 1 // a quarter of the entries at most, so that both levels together keep the bound
	for slots*8 <= cfg.Entries && slots < maxHot {
		slots *= 2
	}
	room, hotRoom := max(1, int64(cfg.Entries-slots)), int64(slots)
	c.minCost = 1
	if cfg.Bytes > 0 {
		c.byBytes = true
		c.minCost = max(1, cfg.Bytes/room)
		hotRoom = cfg.Bytes / 4
		room = max(1, cfg.Bytes-hotRoom)
	}
	c.hot.setUp(slots, hotRoom)
	c.back, err = ristretto.NewCache(&ristretto.Config[uint64, *Entry[T]]{
		NumCounters:        10 * int64(cfg.Entries),
		MaxCost:            room,
		BufferItems:        64,
		IgnoreInternalCost: true,
	})
	return err
}

// Fresh returns the entry of key if it can be served as it is; otherwise nil. This is the whole path of a hit: it uses
// no lock, timer, allocation or system clock.
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
		return nil
	}
	return e
}

// Get returns the entry of key, or nil. The caller decides whether it can be served.
func (c *Cache[T]) Get(key string) *Entry[T] {
	h := c.Hash(key)
	e := c.hot.slot(h).Load()
	if e == nil || e.Key != key {
		return c.getBack(h, key)
	}
	if now := c.clock.now.Load(); e.touched.Load() != now {
		c.touch(h, e, now)
	}
	return e
}

// touch tells ristretto once a tick that an entry of the hot table is in use. Otherwise ristretto's policy would take
// the hottest keys for the coldest.
func (c *Cache[T]) touch(h uint64, e *Entry[T], now int64) {
	e.touched.Store(now)
	c.back.Get(h)
}

// getBack returns the entry of key from ristretto, or nil.
func (c *Cache[T]) getBack(h uint64, key string) *Entry[T] {
	if c.back == nil {
		return nil
	}
	e, ok := c.back.Get(h)
	if !ok || e.Key != key {
		return nil
	}
	if rand.Uint32()%32 == 0 {
		c.promote(h, e)
	}
	return e
}

// promote puts an entry of ristretto into the hot table. It is called for one hit in 32, so keys that share a slot
// occupy it in proportion to their traffic. If the entry in the slot is in use, promote replaces it only if ristretto
// holds it as well. Otherwise ristretto has rejected or evicted it, and it would be lost.
func (c *Cache[T]) promote(h uint64, e *Entry[T]) {
	old := c.hot.slot(h).Load()
	if old != nil && old.touched.Load() == c.clock.now.Load() {
		if _, there := c.back.Get(c.Hash(old.Key)); !there {
			return
		}
	}
	c.hot.promote(h, old, e)
}

// NewEntry makes an entry for Put. epoch was noted before the read of data began.
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

// Put adds e, or replaces the entry of the same key. size counts against Config.Bytes.
func (c *Cache[T]) Put(e *Entry[T], size int) {
	if c.back == nil {
		return
	}
	e.cost = 1
	if c.byBytes {
		e.cost = max(int64(size), c.minCost)
	}
	h := c.Hash(e.Key)
	e.touched.Store(c.clock.now.Load())
	c.hot.put(h, e)
	c.back.Set(h, e, e.cost)
}

// Hash is a hash of s that differs between processes.
func (c *Cache[T]) Hash(s string) uint64 { return maphash.String(c.seed, s) }

// Close frees the memory and ends the goroutines. No Get may run during Close or after it.
func (c *Cache[T]) Close() {
	c.clock.close()
	if c.back != nil {
		c.back.Close()
	}
}
