package l1

import (
	"sync"
	"sync/atomic"
)

// maxHot is the largest number of slots in the hot table.
const maxHot = 1 << 16

// hotTable is the table in front of ristretto. Its readers need no lock. The hash of a key determines the pair of slots
// that can hold its entry. With one slot for a key, hot keys that share it would displace each other. Both slots of a
// pair are in one cache line, so a look into the second slot costs little.
type hotTable[T any] struct {
	slots   []atomic.Pointer[Entry[T]] // a power of two, at least 2; written under the lock of their pair
	room    int64                      // upper bound of used
	minCost int64                      // what an entry of a lower cost counts, so that room bounds the number of entries
	used    atomic.Int64               // sum of costs; above room only while entries are being evicted
	hand    atomic.Uint64              // modulo len(slots): the slot that was looked at last, to evict its entry
	locks   [64]sync.Mutex             // of the pairs, see lock; they keep a key from being in both slots of its pair
}

func (t *hotTable[T]) setUp(m limits) {
	t.slots, t.room, t.minCost = make([]atomic.Pointer[Entry[T]], m.slots), m.hotRoom, m.hotMinCost
}

// first returns the slot in which a reader looks first. The other slot of the pair is at first^1.
func (t *hotTable[T]) first(hash uint64) uint64 { return hash & uint64(len(t.slots)-1) }

// lock locks the pair to which a slot belongs.
func (t *hotTable[T]) lock(slot uint64) *sync.Mutex {
	mu := &t.locks[slot/2%uint64(len(t.locks))]
	mu.Lock()
	return mu
}

// get returns the entry of key, or nil.
func (t *hotTable[T]) get(hash uint64, key string) *Entry[T] {
	if _, e := t.choose(hash, key); e != nil && e.Key == key {
		return e
	}
	return nil
}

// choose returns the slot for an entry of key, and what the slot holds: the present entry of key, or nothing, or the
// one of two entries that was touched longer ago.
func (t *hotTable[T]) choose(hash uint64, key string) (*atomic.Pointer[Entry[T]], *Entry[T]) {
	at := t.first(hash)
	one, two := &t.slots[at], &t.slots[at^1]
	a, b := one.Load(), two.Load()
	switch {
	case a != nil && a.Key == key:
		return one, a
	case b != nil && b.Key == key:
		return two, b
	case a == nil, b != nil && int32(a.touched.Load()-b.touched.Load()) < 0:
		return one, a
	}
	return two, b
}

// put stores e, even if its slot holds another key, because the next Get of e.Key must find e in this table. The cost
// of e is at most room. If the table is then above its room, put evicts other entries.
func (t *hotTable[T]) put(hash uint64, e *Entry[T]) {
	mu := t.lock(t.first(hash))
	slot, old := t.choose(hash, e.Key)
	slot.Store(e)
	t.account(old, e)
	mu.Unlock()
	for i := 0; t.used.Load() > t.room && i < len(t.slots); i++ {
		at := t.first(t.hand.Add(1))
		if victim := t.slots[at].Load(); victim != nil && victim != e {
			t.evict(at, victim)
		}
	}
}

// next returns the next slot with an entry, and that entry. It returns nil if there is none in the next 64 slots.
func (t *hotTable[T]) next() (slot uint64, e *Entry[T]) {
	for range 64 {
		slot = t.first(t.hand.Add(1))
		if e = t.slots[slot].Load(); e != nil {
			return slot, e
		}
	}
	return 0, nil
}

// evict removes e if it is still in the slot.
func (t *hotTable[T]) evict(slot uint64, e *Entry[T]) {
	defer t.lock(slot).Unlock()
	if t.slots[slot].Load() == e {
		t.slots[slot].Store(nil)
		t.account(e, nil)
	}
}

// fits reports whether the table has room for e in place of old.
func (t *hotTable[T]) fits(old, e *Entry[T]) bool {
	return t.used.Load()+t.costOf(e) <= t.room+t.costOf(old)
}

// replace stores e if its slot still holds old, or is still empty if old is nil.
func (t *hotTable[T]) replace(hash uint64, old, e *Entry[T]) {
	defer t.lock(t.first(hash)).Unlock()
	if slot, there := t.choose(hash, e.Key); there == old {
		slot.Store(e)
		t.account(old, e)
	}
}

func (t *hotTable[T]) drop(hash uint64, key string) {
	defer t.lock(t.first(hash)).Unlock()
	if slot, e := t.choose(hash, key); e != nil && e.Key == key {
		slot.Store(nil)
		t.account(e, nil)
	}
}

func (t *hotTable[T]) account(out, in *Entry[T]) { t.used.Add(t.costOf(in) - t.costOf(out)) }

func (t *hotTable[T]) costOf(e *Entry[T]) int64 {
	if e == nil {
		return 0
	}
	return max(t.minCost, costOf(e))
}

func costOf[T any](e *Entry[T]) int64 {
	if e == nil {
		return 0
	}
	return int64(e.cost)
}
