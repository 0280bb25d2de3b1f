package httprefill

import (
	"hash/maphash"
	"sync/atomic"
	"time"
)

// passFor is how long requests go straight to the handler after a response that was not to be shared. Each of these
// requests starts this time anew, except after a body above MaxBody (see verdict.once).
const passFor = 10 * time.Second

// passMarks remembers which responses were not to be shared (hit-for-miss). The table is bounded and needs no lock,
// because each hash has one slot and the last writer wins. A pass mark only decides which requests wait for other
// requests. So a lost mark does no harm, and a hash that two keys share does no harm.
type passMarks struct {
	seed  maphash.Seed
	slots [1 << 12]atomic.Pointer[passMark]
}

// passMark does not change after it is stored in the table.
type passMark struct {
	hash  uint64
	until time.Time
	once  bool // see verdict.once
}

func newPassMarks() *passMarks { return &passMarks{seed: maphash.MakeSeed()} }

// get returns the pass mark of a key for a class of requests, or nil if there is none. Each class has marks of its
// own, because a logged-in user's private page says nothing about the page of other clients.
func (m *passMarks) get(key string, c class) *passMark {
	hash := m.hash(key, c)
	mk := m.slot(hash).Load()
	if mk == nil || mk.hash != hash || !time.Now().Before(mk.until) {
		return nil
	}
	return mk
}

func (m *passMarks) set(key string, c class, once bool) {
	hash := m.hash(key, c)
	m.slot(hash).Store(&passMark{hash: hash, until: time.Now().Add(passFor), once: once})
}

func (m *passMarks) drop(key string, c class) {
	hash := m.hash(key, c)
	slot := m.slot(hash)
	if mk := slot.Load(); mk != nil && mk.hash == hash {
		slot.CompareAndSwap(mk, nil)
	}
}

func (m *passMarks) hash(key string, c class) uint64 {
	return maphash.String(m.seed, key) + uint64(c) // so each class has a slot of its own
}

func (m *passMarks) slot(hash uint64) *atomic.Pointer[passMark] {
	return &m.slots[hash%uint64(len(m.slots))]
}
