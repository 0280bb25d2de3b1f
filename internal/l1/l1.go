// Package l1 is the memory of one process: decoded values by key. A small lock-free table stands in front of ristretto.
// It holds what was just loaded, because ristretto shows a new key late and may reject it. It also holds the hottest
// keys, because the shard locks of ristretto cost more than the rest of a hit.
//
// No decision here depends on the order of calls. Whether an entry is valid is decided when it is read: the entry
// carries the [Epoch] of its key, noted before its read began, and whatever invalidates entries raises epochs.
package l1

import (
	"hash/maphash"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/ristretto/v2"
)

// Config bounds a Cache. All times are microseconds by the clock that Now reads.
type Config struct {
	Off     bool  // keep nothing
	Entries int   // the number of entries, at least 1
	Bytes   int64 // the sum of their sizes; 0 = not bounded

	Tick time.Duration    // how often the coarse clock is read
	Now  func() time.Time // the clock
}

// Cache holds entries of T.
type Cache[T any] struct {
	clock *clock
	seed  maphash.Seed

	hot     hotTable[T]
	back    *ristretto.Cache[uint64, *Entry[T]] // nil if the cache is off
	byBytes bool                                // costs count bytes, not entries
	minCost int64                               // of an entry, so that Bytes bounds the number of entries as well

	stripes      [keyStripes]atomic.Uint32 // raised to invalidate a key, and the keys that share its stripe
	tagStripes   [tagStripes]atomic.Uint64 // the last invalidation of a tag, as a number in tagEpoch
	tagEpoch     atomic.Uint64             // how many invalidations of tags there were
	tagMu        sync.Mutex                // one invalidation of a tag at a time
	subscription atomic.Uint64             // raised to invalidate all entries; odd = announcements can be received
}

// Entry is one value. Its fields are written before Put, except for the atomic ones.
type Entry[T any] struct {
	Key        string
	Data       T
	Epoch      Epoch
	NotBefore  int64 // not a hit while the clock is before this moment: the clock was set back
	TrustUntil int64 // a change elsewhere may have been missed after this moment

	ServeUntil atomic.Int64 // a hit before this moment; 0 = superseded by a newer value elsewhere
	RefreshAt  atomic.Int64 // no background refresh before this moment

	hash    uint64
	cost    int64
	tags    []uint16     // stripes of its tags
	touched atomic.Int64 // when ristretto last learned that the entry is in use
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
	c.clock = newClock(cfg.Tick, cfg.Now)
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

// Fresh returns the entry of key if it can be served as it is; otherwise nil. This is the whole hit path: no lock,
// timer, allocation or system clock.
func (c *Cache[T]) Fresh(key string) *Entry[T] {
	e, now := c.Get(key), c.clock.now.Load()
	if e == nil || now >= e.ServeUntil.Load() || now < e.NotBefore || !c.Valid(e) {
		return nil
	}
	return e
}

// Get returns the entry of key, or nil. The caller decides whether it can be served.
func (c *Cache[T]) Get(key string) *Entry[T] {
	h := c.Hash(key)
	if e := c.hot.slot(h).Load(); e != nil && e.Key == key {
		if now := c.clock.now.Load(); e.touched.Load() != now {
			// Once a tick, so that the policy of ristretto does not take the hottest keys for the coldest.
			e.touched.Store(now)
			c.back.Get(h)
		}
		return e
	}
	if c.back == nil {
		return nil
	}
	e, ok := c.back.Get(h)
	if !ok || e.Key != key {
		return nil
	}
	if rand.Uint32()%32 == 0 {
		c.promote(e)
	}
	return e
}

// promote moves an entry to the hot table. One hit in 32 promotes, so keys that share a slot occupy it in proportion to
// their traffic. An entry in use is replaced only if ristretto holds it as well: ristretto may have rejected it.
func (c *Cache[T]) promote(e *Entry[T]) {
	old := c.hot.slot(e.hash).Load()
	if old != nil && old.touched.Load() == c.clock.now.Load() {
		if _, there := c.back.Get(old.hash); !there {
			return
		}
	}
	c.hot.promote(old, e)
}

// NewEntry makes an entry for Put. epoch was noted before the read began that data comes from.
func (c *Cache[T]) NewEntry(key string, epoch Epoch, tags []string, data T) *Entry[T] {
	e := &Entry[T]{Key: key, Data: data, Epoch: epoch, hash: c.Hash(key)}
	for _, tag := range tags {
		e.tags = append(e.tags, c.tagStripe(tag))
	}
	return e
}

// Put adds the entry, or replaces the one of its key. size counts against Config.Bytes.
func (c *Cache[T]) Put(e *Entry[T], size int) {
	if c.back == nil {
		return
	}
	e.cost = 1
	if c.byBytes {
		e.cost = max(int64(size), c.minCost)
	}
	e.touched.Store(c.clock.now.Load())
	c.hot.put(e)
	c.back.Set(e.hash, e, e.cost)
}

// Hash is a hash of s that differs between processes.
func (c *Cache[T]) Hash(s string) uint64 { return maphash.String(c.seed, s) }

// Close frees the memory and ends the goroutines. No Get may run or follow.
func (c *Cache[T]) Close() {
	c.clock.close()
	if c.back != nil {
		c.back.Close()
	}
}
