package l1

import "sync/atomic"

// maxHot is the largest number of slots in the hot table.
const maxHot = 1 << 16

// hotTable is the lock-free table in front of ristretto. The hash of a key determines the one slot that its entry can
// occupy.
type hotTable[T any] struct {
	slots []atomic.Pointer[Entry[T]] // a power of two
	room  int64                      // upper bound of used
	used  atomic.Int64               // sum of costs; above room only while entries are being evicted
	hand  atomic.Uint64              // modulo len(slots): the slot that was evicted last
}

func (t *hotTable[T]) setUp(slots int, room int64) {
	t.slots, t.room = make([]atomic.Pointer[Entry[T]], slots), room
}

func (t *hotTable[T]) slot(hash uint64) *atomic.Pointer[Entry[T]] {
	return &t.slots[hash&uint64(len(t.slots)-1)]
}

// put stores e in its slot, even if the slot holds another key, because the next Get of e.Key must find e in this
// table. The cost of e is at most room. If the table is then above its room, put evicts the entries of other slots.
func (t *hotTable[T]) put(hash uint64, e *Entry[T]) {
	slot := t.slot(hash)
	t.account(slot.Swap(e), e)
	for i := 0; t.used.Load() > t.room && i < len(t.slots); i++ {
		if victim := &t.slots[t.hand.Add(1)%uint64(len(t.slots))]; victim != slot {
			t.account(victim.Swap(nil), nil)
		}
	}
}

// promote replaces old by e if old is still in the slot and the table has room for e.
func (t *hotTable[T]) promote(hash uint64, old, e *Entry[T]) {
	if t.used.Load()+costOf(e) <= t.room+costOf(old) && t.slot(hash).CompareAndSwap(old, e) {
		t.account(old, e)
	}
}

func (t *hotTable[T]) drop(hash uint64, key string) {
	slot := t.slot(hash)
	if e := slot.Load(); e != nil && e.Key == key && slot.CompareAndSwap(e, nil) {
		t.account(e, nil)
	}
}

func (t *hotTable[T]) account(out, in *Entry[T]) { t.used.Add(costOf(in) - costOf(out)) }

func costOf[T any](e *Entry[T]) int64 {
	if e == nil {
		return 0
	}
	return int64(e.cost)
}
