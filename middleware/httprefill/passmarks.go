package httprefill

import (
	"hash/maphash"
	"sync/atomic"
	"time"
)

// passFor is how long a pass mark stands after it was set, and after the last pass.
const passFor = 10 * time.Second

// passMarks remembers which URLs have a response that cannot be shared, or that comes too late (hit-for-miss). While a
// mark stands, requests for the URL go straight to the handler, in parallel. This is a pass. The table is bounded and
// needs no lock, because each hash has one slot and the last writer wins. A pass mark only decides which requests wait
// for other requests. So a lost mark does no harm, and a hash that two keys share does no harm.
type passMarks struct {
	seed  maphash.Seed
	slots [1 << 12]atomic.Pointer[passMark]
}

// passMark is the mark of one key and one class of requests. While passes run, the mark stands. So the mark of a long
// poll cannot end during the poll.
//
// A page that was private may become public. So one request at a time is still collected while the mark stands. If its
// response may be shared, the mark ends.
//
// If the store has a response for requests with other credentials (foreign), no request is collected, and the mark ends
// passFor after it was set. A request that is collected would otherwise take the refresh of that response from the
// requests that the response is for, and its own response could not replace it.
type passMark struct {
	hash       uint64       // does not change
	until      atomic.Int64 // in ns since 1970; the mark stands until then, and while passes run
	passes     atomic.Int64 // passes that run now
	took       atomic.Int64 // how long the run that set the mark took until it was known to be a pass, in ns
	collecting atomic.Bool  // a request that is collected has not been decided yet
	foreign    atomic.Bool  // the store has a response for requests with other credentials
}

func newPassMarks() *passMarks { return &passMarks{seed: maphash.MakeSeed()} }

// get returns the pass mark of a key for a class of requests, or nil if no such mark stands. Each class has marks of
// its own, because a logged-in user's private page says nothing about the page of other clients.
func (m *passMarks) get(key string, c class) *passMark {
	hash := m.hash(key, c)
	mk := m.slot(hash).Load()
	if mk == nil || mk.hash != hash || !mk.stands() {
		return nil
	}
	return mk
}

// set makes a mark, or lets the mark that is there stand for longer, with the passes that it counts. A mark that is
// foreign and stands does not change.
func (m *passMarks) set(key string, c class, took time.Duration) *passMark {
	mk := m.at(key, c)
	if mk.foreign.Load() && mk.stands() {
		return mk
	}
	mk.foreign.Store(false)
	mk.took.Store(int64(took))
	mk.until.Store(time.Now().Add(passFor).UnixNano())
	return mk
}

// setForeign makes a mark that is foreign.
func (m *passMarks) setForeign(key string, c class) *passMark {
	mk := m.at(key, c)
	mk.foreign.Store(true)
	mk.until.Store(time.Now().Add(passFor).UnixNano())
	return mk
}

// at returns the mark in the slot of a key and a class, whether the mark stands or not.
func (m *passMarks) at(key string, c class) *passMark {
	hash := m.hash(key, c)
	slot := m.slot(hash)
	mk := slot.Load()
	if mk == nil || mk.hash != hash {
		mk = &passMark{hash: hash}
		slot.Store(mk)
	}
	return mk
}

// drop ends the mark. Passes that run go on.
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

func (mk *passMark) stands() bool {
	return time.Now().UnixNano() < mk.until.Load() || mk.passes.Load() > 0 && !mk.foreign.Load()
}

// collect makes the caller the request that is collected. It returns false if another request is collected already, or
// if no request is to be collected.
func (mk *passMark) collect() bool {
	return !mk.foreign.Load() && mk.collecting.CompareAndSwap(false, true)
}

// pass counts a pass while call runs, also if call panics. If mk is nil, pass only runs call.
func (mk *passMark) pass(call func()) {
	if mk == nil {
		call()
		return
	}
	mk.passes.Add(1)
	defer func() {
		if !mk.foreign.Load() { // before the count falls, so that the mark stands in between
			mk.until.Store(time.Now().Add(passFor).UnixNano())
		}
		mk.passes.Add(-1)
	}()
	call()
}

// The bounds of patience.
const (
	minPatience = 20 * time.Millisecond // the store answers in this time, unless another node runs the handler
	maxPatience = 500 * time.Millisecond
)

// patience is how long the request that is collected waits for its run to begin. The run has to wait while another node
// collects its own request for the same URL. If the wait is longer than patience, the request passes. So a request for
// a page that cannot be shared takes two runs of the handler at most.
func (mk *passMark) patience() time.Duration {
	return min(max(time.Duration(mk.took.Load()), minPatience), maxPatience)
}
