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

// Cache holds entries of T. Until it is used, it has no goroutine and takes little memory.
type Cache[T any] struct {
	clock      *clock // a hit reads the fields down to subscription, which hardly ever change
	seed       maphash.Seed
	touchAfter uint32 // touchTicks in µs

	// tables is nil until the first Put makes it, under life, and then stays the same. It stays nil if the cache is off.
	tables       atomic.Pointer[tables[T]]
	stripes      atomic.Pointer[stripes] // nil until the first call of Epoch, and then stays the same
	subscription atomic.Uint32           // raised to invalidate all entries; odd = announcements can be received

	tagEpoch atomic.Uint64 // how many invalidations of tags there were
	tagMu    sync.Mutex    // held by InvalidateTag, so that one runs at a time
	life     sync.Mutex    // guards closed, and the making of tables
	closed   bool
	limits
}

// tables is where the entries are.
type tables[T any] struct {
	stripes *stripes // those of the Cache, so that a hit need not load Cache.stripes as well
	hot     hotTable[T]
	back    backTable[T]
}

// Entry is the value of one key. Only its atomic fields change after Put. A hit reads the fields down to tags, and
// Data. With a T of 40 bytes, an Entry has 112 bytes, and Go allocates no more for it. Any further field would cost
// each entry 16 bytes.
type Entry[T any] struct {
	Key          string
	ServeUntil   atomic.Int64  // the entry is a hit before this moment; 0 = another node has a newer value
	NotBefore    int64         // no hit while the clock is before this moment, because the clock was then set back
	touched      atomic.Uint32 // when ristretto last learned that the entry is in use; the lower half of the time
	epoch        uint32        // Epoch.Key
	subscription uint32        // Epoch.subscription
	cost         uint32        // what the entry counts toward the bound of a table: 1, or its bytes if Cache.byBytes
	tags         *tagged       // nil for none
	Data         T

	TrustUntil int64        // after this moment, this process may have missed a change by another node
	RefreshAt  atomic.Int64 // no background refresh before this moment
}

// tagged is what only an Entry with tags has.
type tagged struct {
	epoch   uint64   // Epoch.Tags
	stripes []uint16 // of its tags
}

// New returns an empty Cache. Close ends its goroutines.
func New[T any](cfg Config) *Cache[T] {
	c := &Cache[T]{seed: maphash.MakeSeed(), clock: clockOf(cfg)}
	c.touchAfter = uint32(min(touchTicks*cfg.Tick, time.Minute) / time.Microsecond)
	if !cfg.Off {
		c.limits = limitsOf(cfg, c.overhead())
	}
	return c
}

// limits say how large a Cache can become. They are zero if the cache is off.
type limits struct {
	byBytes    bool  // the cost of an entry is its size in bytes; if false, it is 1
	minCost    int64 // least cost of an entry; with it, the bound on the sum of costs also bounds the number of entries
	slots      int   // of the hot table
	hotRoom    int64 // largest sum of costs in the hot table
	hotMinCost int64 // minCost in the hot table
	room       int64 // the same in ristretto
	most       int64 // the same in ristretto and its queue
	entries    int64
}

// limitsOf returns the limits of a Cache whose entries take overhead bytes beside key and value.
func limitsOf(cfg Config, overhead int64) limits {
	byBytes := cfg.Bytes < math.MaxInt64
	if byBytes { // no more entries than fit into Bytes, and no more bytes than Entries of the largest cost
		cfg.Entries = int(min(int64(cfg.Entries), max(1, cfg.Bytes/overhead)))
		if all := int64(cfg.Entries); cfg.Bytes/maxCost >= all {
			cfg.Bytes = all * maxCost
		}
	}
	slots := 2 // most of them stay empty, so that few pairs have to serve more than two hot keys
	for slots < cfg.Entries && slots < maxHot {
		slots *= 2
	}
	m := limits{slots: slots, entries: int64(cfg.Entries), most: math.MaxInt64, minCost: 1, hotMinCost: 1}
	hot := max(1, min(m.entries/5, int64(slots))) // entries; hot table and ristretto share the bound
	m.hotRoom, m.room = hot, max(1, m.entries-hot)
	if byBytes {
		m.byBytes = true
		m.hotRoom = cfg.Bytes / 4
		m.hotMinCost = max(1, m.hotRoom/hot)
		m.most = cfg.Bytes - m.hotRoom
		bytes := max(1, m.most-cfg.Bytes/8) // an eighth of Bytes is for entries in the queue of ristretto
		m.minCost = max(1, bytes/m.room)
		m.room = bytes
	}
	return m
}

// forPut returns the tables, and makes them if there are none yet. It returns nil if the cache is off, or was closed
// before its first Put.
func (c *Cache[T]) forPut() *tables[T] {
	if t := c.tables.Load(); t != nil || c.slots == 0 {
		return t
	}
	c.life.Lock()
	defer c.life.Unlock()
	if t := c.tables.Load(); t != nil || c.closed {
		return t
	}
	t := &tables[T]{stripes: c.noted()}
	t.hot.setUp(c.limits)
	t.back.setUp(c.most, &ristretto.Config[uint64, *Entry[T]]{
		NumCounters:        min(10*c.entries, maxCounters),
		MaxCost:            c.room,
		BufferItems:        64,
		IgnoreInternalCost: true,
	})
	c.tables.Store(t)
	return t
}

// maxCost is the largest cost of an entry, so that Entry.cost needs four bytes.
const maxCost = math.MaxUint32

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
// ristretto once in touchTicks. If the coarse clock sleeps, Fresh wakes it.
func (c *Cache[T]) Fresh(key string) *Entry[T] {
	h, now, t := c.Hash(key), c.clock.now.Load(), c.tables.Load()
	if t == nil {
		return nil
	}
	e := t.hot.slots[t.hot.first(h)].Load()
	if e == nil || e.Key != key {
		if e = c.find(t, h, key, now); e == nil {
			return nil
		}
	} else if !c.usedLately(e, now) {
		c.touch(t, h, e, now)
	}
	if now >= e.ServeUntil.Load() || now < e.NotBefore || !c.valid(t.stripes, h, e) {
		if now == asleep && c.clock.use() != asleep {
			return c.Fresh(key) // by the time that use has just read
		}
		return nil
	}
	return e
}

// Get returns the entry of key, or nil. The caller decides whether the entry can be served.
func (c *Cache[T]) Get(key string) *Entry[T] {
	t := c.tables.Load()
	if t == nil {
		return nil
	}
	return c.find(t, c.Hash(key), key, c.clock.use())
}

// Look is Get for announcements. It is no use of the Cache, so it does not wake the coarse clock.
func (c *Cache[T]) Look(key string) *Entry[T] {
	t := c.tables.Load()
	if t == nil {
		return nil
	}
	h := c.Hash(key)
	if e := t.hot.get(h, key); e != nil {
		return e
	}
	if e, _ := t.back.get(h); e != nil && e.Key == key {
		return e
	}
	return nil
}

// find returns the entry of key from the hot table or from ristretto, or nil.
func (c *Cache[T]) find(t *tables[T], h uint64, key string, now int64) *Entry[T] {
	e := t.hot.get(h, key)
	if e == nil {
		return c.getBack(t, h, key)
	}
	if !c.usedLately(e, now) {
		c.touch(t, h, e, now)
	}
	return e
}

// usedLately reports whether e was touched less than touchTicks ago.
func (c *Cache[T]) usedLately(e *Entry[T], now int64) bool {
	return uint32(now)-e.touched.Load() < c.touchAfter
}

// touch tells ristretto and the clock, once in touchTicks, that an entry of the hot table is in use. Otherwise
// ristretto would see no reads of the hottest keys, and would evict them first, and the clock would fall asleep.
func (c *Cache[T]) touch(t *tables[T], h uint64, e *Entry[T], now int64) {
	e.touched.Store(uint32(now))
	c.clock.use()
	t.back.get(h)
}

// getBack returns the entry of key from ristretto, or nil.
func (c *Cache[T]) getBack(t *tables[T], h uint64, key string) *Entry[T] {
	e, n := t.back.get(h)
	if e == nil || e.Key != key {
		return nil
	}
	c.clock.use()
	if n%32 == 0 {
		c.promote(t, h, e)
	}
	return e
}

// promote puts an entry of ristretto into the hot table. getBack calls promote for one hit in 32. If the entry has to
// displace others, because both slots of its pair are taken or the table is full, the hand of the table chooses among
// those. So keys are in the table for a share of the time that grows with their traffic.
func (c *Cache[T]) promote(t *tables[T], h uint64, e *Entry[T]) {
	_, old := t.hot.choose(h, e.Key)
	if old != nil && (old.Key == e.Key || !c.mayDisplace(t, old)) { // old of the same key was put after e was read
		return
	}
	for range maxVictims {
		if t.hot.fits(old, e) {
			t.hot.replace(h, old, e)
			return
		}
		slot, victim := t.hot.next()
		if victim == nil || !c.mayDisplace(t, victim) {
			return
		}
		t.hot.evict(slot, victim)
	}
}

// maxVictims is how many entries promote evicts at most. More than one is needed only if their values are smaller.
const maxVictims = 4

// mayDisplace reports whether promote may remove e from the hot table. If e was used lately, ristretto has to hold e as
// well, because an entry that ristretto has rejected or evicted would be lost.
func (c *Cache[T]) mayDisplace(t *tables[T], e *Entry[T]) bool {
	if !c.usedLately(e, c.clock.now.Load()) {
		return true
	}
	there, _ := t.back.get(c.Hash(e.Key))
	return there != nil
}

// NewEntry makes an entry for Put. epoch is the epoch of key, which the caller noted before its read of data began.
func (c *Cache[T]) NewEntry(key string, epoch Epoch, tags []string, data T) *Entry[T] {
	e := &Entry[T]{Key: key, Data: data, epoch: epoch.Key, subscription: epoch.subscription}
	if len(tags) > 0 {
		e.tags = &tagged{epoch: epoch.Tags, stripes: make([]uint16, len(tags))}
		for i, tag := range tags {
			e.tags.stripes[i] = c.tagStripe(tag)
		}
	}
	return e
}

// Put adds e, or replaces the entry of the same key. size is how many bytes e.Data refers to, see [SizeOf]. Put keeps
// no entry that takes more than a quarter of Config.Bytes, or more than 4 GiB.
func (c *Cache[T]) Put(e *Entry[T], size int64) {
	t := c.forPut()
	if t == nil {
		return
	}
	cost := int64(1)
	if c.byBytes {
		cost = max(size+c.overhead()+allocated(len(e.Key)), c.minCost)
		if e.tags != nil {
			cost += allocated(int(unsafe.Sizeof(*e.tags))) + allocated(2*len(e.tags.stripes))
		}
	}
	h := c.Hash(e.Key)
	if cost > min(c.hotRoom, maxCost) {
		t.drop(h, e.Key)
		return
	}
	e.cost = uint32(cost)
	e.touched.Store(uint32(c.clock.now.Load()))
	t.hot.put(h, e)
	t.back.put(h, e)
}

func (t *tables[T]) drop(hash uint64, key string) {
	t.hot.drop(hash, key)
	t.back.drop(hash)
}

// Hash returns a hash of s. Another Cache returns another hash of s.
func (c *Cache[T]) Hash(s string) uint64 { return maphash.String(c.seed, s) }

// Close ends the goroutines. Other methods may run during Close and after it. After Close, Put and Get use only the hot
// table, if there is one.
func (c *Cache[T]) Close() {
	c.clock.leave()
	c.life.Lock()
	c.closed = true
	c.life.Unlock()
	if t := c.tables.Load(); t != nil {
		t.back.close()
	}
}
