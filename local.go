package refill

import (
	"hash/maphash"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/ristretto/v2"
)

// local is L1: the decoded values of this process. A small lock-free table stands in front of ristretto. It carries what
// was just loaded, since ristretto shows a new key late and may refuse it, and the hottest keys, since ristretto's shard
// locks cost more than all the rest of a hit.
//
// Nothing here decides by order. Whether an entry still counts is judged when it is read: it carries the epoch of its
// key noted before its read began, and whatever makes entries invalid raises epochs. So it does not matter who puts
// what when.
type local[V any] struct {
	clock *coarseClock
	seed  maphash.Seed
	ttl   int64 // Config.LocalTTL in µs

	front     front[V]
	back      *ristretto.Cache[uint64, *entry[V]] // nil = L1 is off
	bytes     bool                                // cost counts bytes, not entries
	leastCost int64                               // of an entry, so that bytes bound the number, too

	stripes [epochStripes]atomic.Uint32 // raised for a key: voids it, and those that share its stripe
	tags    [tagStripes]atomic.Uint64   // which voiding of a tag was the last
	voided  atomic.Uint64               // how many voidings of tags there were
	tagMu   sync.Mutex                  // one voiding at a time
	session atomic.Uint64               // raised for all; odd = the subscription stands
}

const (
	epochStripes = 1 << 16
	tagStripes   = 1 << 13
	maxFront     = 1 << 16
	noSession    = ^uint64(0)     // of entries that were read while the subscription was down
	closedFor    = ^uint64(0) - 1 // session after close
)

// entry is one value in L1. Its fields are written before it is put and only read after, but for the atomic ones.
type entry[V any] struct {
	key   string
	hash  uint64
	value V
	err   error // an absence
	token string
	life  life
	at    epoch
	cost  int64
	pass  bool  // no value: a mark that it must not be stored, see Fill.NoStore
	more  *more // what most values do not have

	// trusted is when LocalTTL is over, at the latest the end of freshness, µs.
	trusted int64

	hit     atomic.Int64 // served without a thought before then, µs; 0 once it is superseded
	retry   atomic.Int64 // no background refresh before then
	touched atomic.Int64 // when ristretto last heard that it is in use
}

// more is what a value may have beside itself.
type more struct {
	validator string
	tags      []string
	stripes   []uint16 // of the tags, see local.tags
}

// epoch is when an entry's read began, in events instead of time.
type epoch struct {
	stripe  uint32
	session uint64
	tags    uint64
}

func newLocal[V any](cfg *Config, clock *coarseClock) (*local[V], error) {
	l := &local[V]{
		clock: clock,
		seed:  maphash.MakeSeed(),
		ttl:   cfg.LocalTTL.Microseconds(),
	}
	l.front.setUp(1, 0)
	if cfg.LocalTTL == 0 {
		return l, nil
	}
	slots := 1 // a quarter of the entries at most, so that front and back together keep the bound
	for slots*8 <= cfg.LocalEntries && slots < maxFront {
		slots *= 2
	}
	room, quarter := max(1, int64(cfg.LocalEntries-slots)), int64(slots)
	l.leastCost = 1
	if cfg.LocalBytes > 0 {
		l.bytes = true
		l.leastCost = max(1, cfg.LocalBytes/room)
		quarter = cfg.LocalBytes / 4
		room = max(1, cfg.LocalBytes-quarter)
	}
	l.front.setUp(slots, quarter)
	var err error
	l.back, err = ristretto.NewCache(&ristretto.Config[uint64, *entry[V]]{
		NumCounters:        10 * int64(cfg.LocalEntries),
		MaxCost:            room,
		BufferItems:        64,
		IgnoreInternalCost: true,
	})
	return l, err
}

// note is the epoch of key now. Note it before a read begins.
func (l *local[V]) note(key string) epoch {
	e := epoch{l.stripes[l.hash(key)%epochStripes].Load(), l.session.Load(), l.voided.Load()}
	if e.session%2 == 0 {
		e.session = noSession // what is read now may miss an announcement
	}
	return e
}

func (l *local[V]) hash(key string) uint64 { return maphash.String(l.seed, key) }

// drawn is a random number in (0, 1] that belongs to a token: the same each time that this process asks, another in other
// processes. So a hit draws none, and reading a record again does not draw again.
func (l *local[V]) drawn(token string) float64 {
	return float64(maphash.String(l.seed, token)>>11+1) / (1 << 53)
}

// current reports whether nothing has made e invalid since its read began, as far as this process can know.
func (l *local[V]) current(e *entry[V]) bool {
	return e.at.session == l.session.Load() && l.unvoided(e)
}

// unvoided is the weaker promise that is left while announcements cannot be heard: none was heard about e.
func (l *local[V]) unvoided(e *entry[V]) bool {
	return e.at.stripe == l.stripes[e.hash%epochStripes].Load() && (e.more == nil || l.tagVoided(e) <= e.at.tags)
}

// get returns the entry of key, if there is one; the caller judges it.
func (l *local[V]) get(key string) *entry[V] {
	h := l.hash(key)
	if e := l.front.slot(h).Load(); e != nil && e.key == key {
		if now := l.clock.now.Load(); e.touched.Load() != now {
			// Once a tick, so that ristretto's policy does not take the hottest keys for the coldest.
			e.touched.Store(now)
			l.back.Get(h)
		}
		return e
	}
	if l.back == nil {
		return nil
	}
	e, ok := l.back.Get(h)
	if !ok || e.key != key {
		return nil
	}
	if rand.Uint32()%32 == 0 {
		l.promote(e)
	}
	return e
}

// promote moves an entry to the front. As one hit in 32 does so, a slot belongs to each of its keys for as large a share of
// the time as it is asked for. But one that is in use is not sent away before ristretto has it: it may never have it.
func (l *local[V]) promote(e *entry[V]) {
	old := l.front.slot(e.hash).Load()
	if old != nil && old.touched.Load() == l.clock.now.Load() {
		if _, there := l.back.Get(old.hash); !there {
			return
		}
	}
	l.front.promote(old, e)
}

// put adds or replaces the entry of e.key. size is that of the encoded value.
func (l *local[V]) put(e *entry[V], size int) {
	if l.back == nil {
		return
	}
	e.cost = 1
	if l.bytes {
		e.cost = max(int64(size), l.leastCost)
	}
	e.touched.Store(l.clock.now.Load())
	l.front.put(e)
	l.back.Set(e.hash, e, e.cost)
}

// void makes what is known of key invalid, and every read of it that has begun.
func (l *local[V]) void(key string) {
	h := l.hash(key)
	l.stripes[h%epochStripes].Add(1)
	if l.back != nil {
		l.front.drop(h, key)
		l.back.Del(h)
	}
}

// front is the table before ristretto: direct-mapped by hash, without a lock.
type front[V any] struct {
	slots []atomic.Pointer[entry[V]] // a power of two
	room  int64                      // for costs
	used  atomic.Int64               // sum of costs; what stands above room for a moment is being evicted
	hand  atomic.Uint64              // the slot that was evicted last
}

func (f *front[V]) setUp(slots int, room int64) {
	f.slots, f.room = make([]atomic.Pointer[entry[V]], slots), room
}

func (f *front[V]) slot(hash uint64) *atomic.Pointer[entry[V]] {
	return &f.slots[hash&uint64(len(f.slots)-1)]
}

// put replaces whatever stands in the slot of e: the next Get of e.key has to find it here.
func (f *front[V]) put(e *entry[V]) {
	slot := f.slot(e.hash)
	if e.cost > f.room {
		f.drop(e.hash, e.key)
		return
	}
	f.account(slot.Swap(e), e)
	for i := 0; f.used.Load() > f.room && i < len(f.slots); i++ {
		if victim := &f.slots[f.hand.Add(1)%uint64(len(f.slots))]; victim != slot {
			f.account(victim.Swap(nil), nil)
		}
	}
}

// promote puts an entry in the place of another, if that still stands there and there is room.
func (f *front[V]) promote(old, e *entry[V]) {
	if f.used.Load()+e.cost <= f.room+costOf(old) && f.slot(e.hash).CompareAndSwap(old, e) {
		f.account(old, e)
	}
}

func (f *front[V]) drop(hash uint64, key string) {
	slot := f.slot(hash)
	if e := slot.Load(); e != nil && e.key == key && slot.CompareAndSwap(e, nil) {
		f.account(e, nil)
	}
}

func (f *front[V]) account(out, in *entry[V]) { f.used.Add(costOf(in) - costOf(out)) }

func costOf[V any](e *entry[V]) int64 {
	if e == nil {
		return 0
	}
	return e.cost
}

// heard raises the session: up says whether the subscription stands now.
func (l *local[V]) heard(up bool) {
	for {
		s := l.session.Load()
		if s == closedFor || (s%2 == 1) == up {
			return
		}
		if l.session.CompareAndSwap(s, s+1) {
			return
		}
	}
}

// shut makes every entry invalid for ever.
func (l *local[V]) shut() { l.session.Store(closedFor) }

// close frees the memory and ends ristretto's goroutines.
func (l *local[V]) close() {
	if l.back != nil {
		l.back.Close()
	}
}

// admit sets how long an entry that enters L1 now is served without a thought.
func (l *local[V]) admit(e *entry[V], now int64) {
	e.trusted = min(e.life.fresh, now+l.ttl)
	if e.pass {
		e.hit.Store(1) // never
		return
	}
	e.hit.Store(min(e.life.early, e.trusted))
}

// inL1 judges an entry that stands in L1.
func (e *entry[V]) inL1(now int64) Freshness { return e.life.inL1(now, e.trusted, e.hit.Load() == 0) }

// coarseClock is the store's clock, read once a tick: a hit must not pay for a clock.
type coarseClock struct {
	now  atomic.Int64 // µs; written by the ticking goroutine
	quit chan struct{}
	done chan struct{}
}

func newCoarseClock(tick time.Duration, read func() time.Time) *coarseClock {
	c := &coarseClock{quit: make(chan struct{}), done: make(chan struct{})}
	c.now.Store(read().UnixMicro())
	go func() {
		defer close(c.done)
		ticker := time.NewTicker(tick)
		defer ticker.Stop()
		for {
			select {
			case <-c.quit:
				return
			case <-ticker.C:
				c.now.Store(read().UnixMicro())
			}
		}
	}()
	return c
}

func (c *coarseClock) close() {
	close(c.quit)
	<-c.done
}
