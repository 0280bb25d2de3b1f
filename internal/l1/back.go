package l1

import (
	"runtime"
	"sync/atomic"

	"github.com/dgraph-io/ristretto/v2"
)

// backTable is ristretto, behind gates. Close of ristretto closes channels that its other methods use, so a call
// during Close can panic. Each call goes through a gate, and close shuts all gates before it closes ristretto.
type backTable[T any] struct {
	cache *ristretto.Cache[uint64, *Entry[T]]
	gates [gates]gate
	held  atomic.Int64 // sum of the costs of all entries that ristretto holds, in its table or in its queue
	most  int64        // put adds no entry while held is above this bound
}

// gates is the number of gates. Calls of different keys mostly go through different gates, so they rarely write to the
// same cache line.
const gates = 64

// gate counts the calls of ristretto that have begun and ended. Two counters cost half as much as a sync.RWMutex.
type gate struct {
	entered atomic.Uint64 // calls that have begun; above shutGate once the gate is shut
	left    atomic.Uint64 // calls that have ended
	_       [128 - 16]byte
}

const shutGate = 1 << 63

// close shuts the gate, and waits for the calls that run. These calls are short, and none of them waits for another.
func (g *gate) close() {
	for n := g.entered.Or(shutGate); n < shutGate && g.left.Load() != n; {
		runtime.Gosched()
	}
}

func (t *backTable[T]) setUp(most int64, cfg *ristretto.Config[uint64, *Entry[T]]) {
	t.most = most
	cfg.OnExit = func(e *Entry[T]) { t.held.Add(-costOf(e)) } // e is nil if there was nothing to remove
	cache, err := ristretto.NewCache(cfg)
	if err != nil { // a limit below 1, which limitsOf does not return
		panic(err)
	}
	t.cache = cache
}

// enter counts a call at the gate of a key. After the call of ristretto, the caller of enter calls g.left.Add(1). enter
// returns nil if the cache is closed. n is the number of calls that have passed the gate, this call included.
func (t *backTable[T]) enter(hash uint64) (g *gate, n uint64) {
	g = &t.gates[hash>>32%gates]
	if n = g.entered.Add(1); n > shutGate {
		return nil, 0
	}
	return g, n
}

// get returns the entry of a key, or nil, and the number of calls that have passed the gate of the key.
func (t *backTable[T]) get(hash uint64) (e *Entry[T], n uint64) {
	g, n := t.enter(hash)
	if g == nil {
		return nil, 0
	}
	e, _ = t.cache.Get(hash)
	g.left.Add(1)
	return e, n
}

// put stores e. If e replaces a smaller entry, put first deletes that entry, because ristretto makes room only for
// new entries. While held is above most, put deletes the old entry and does not store e.
func (t *backTable[T]) put(hash uint64, e *Entry[T]) {
	g, _ := t.enter(hash)
	if g == nil {
		return
	}
	defer g.left.Add(1)
	full := t.held.Load() > t.most
	if old, ok := t.cache.Get(hash); ok && (full || costOf(old) < costOf(e)) {
		t.cache.Del(hash)
	}
	if full {
		return
	}
	cost := costOf(e)
	t.held.Add(cost)
	if !t.cache.Set(hash, e, cost) {
		t.held.Add(-cost)
	}
}

func (t *backTable[T]) drop(hash uint64) {
	if g, _ := t.enter(hash); g != nil {
		t.cache.Del(hash)
		g.left.Add(1)
	}
}

// close waits for the calls that run, and ends the goroutines of ristretto. Later calls do nothing.
func (t *backTable[T]) close() {
	for i := range t.gates {
		t.gates[i].close()
	}
	t.cache.Close()
}
