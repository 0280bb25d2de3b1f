package httprefill

import (
	"hash/maphash"
	"sync/atomic"
	"time"
)

// passFor is how long requests go straight to the handler after a response that was not to be shared. Each of them extends
// it, so a busy URL of this kind never makes anybody wait.
const passFor = 10 * time.Second

// marks remembers what was not to be shared. It is bounded and needs no lock: one slot per hash, the last one wins.
// Nothing depends on a mark but who waits for whom, so it does no harm that one is lost, or that two keys of one hash
// take each other's.
type marks struct {
	seed  maphash.Seed
	slots [1 << 12]atomic.Pointer[mark]
}

// mark is written before it is put and only read after.
type mark struct {
	hash  uint64
	until time.Time
	once  bool // see verdict
}

func newMarks() *marks { return &marks{seed: maphash.MakeSeed()} }

// get returns the mark of a key for a class of requests, nil if there is none. Classes are apart: that a logged-in user's
// page is private says nothing about everybody else's.
func (m *marks) get(key string, c class) *mark {
	hash := m.hash(key, c)
	mk := m.slot(hash).Load()
	if mk == nil || mk.hash != hash || !time.Now().Before(mk.until) {
		return nil
	}
	return mk
}

func (m *marks) set(key string, c class, once bool) {
	hash := m.hash(key, c)
	m.slot(hash).Store(&mark{hash: hash, until: time.Now().Add(passFor), once: once})
}

func (m *marks) drop(key string, c class) {
	hash := m.hash(key, c)
	slot := m.slot(hash)
	if mk := slot.Load(); mk != nil && mk.hash == hash {
		slot.CompareAndSwap(mk, nil)
	}
}

func (m *marks) hash(key string, c class) uint64 {
	return maphash.String(m.seed, key) + uint64(c) // differs by class; which slot it is does not matter
}

func (m *marks) slot(hash uint64) *atomic.Pointer[mark] { return &m.slots[hash%uint64(len(m.slots))] }
