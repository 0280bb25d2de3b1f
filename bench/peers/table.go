package peers

import (
	"context"
	"hash/maphash"
	"sync"
	"sync/atomic"
)

// bareTable is the yardstick of a hit in L1: an array of atomic pointers. A Get hashes the key, loads a pointer, and
// compares the key. If the slot holds another key, the Get looks into the next slot. That is the least that a table for
// lock-free readers with string keys can do, and a cache has to do more. A bareTable has no bound and no policy: it
// evicts nothing, and does not note which keys are read. Its values never expire and cannot be invalidated, so a Get
// reads no clock and checks nothing but the key. It cannot grow either: with more keys than slots, put never returns.
type bareTable struct {
	Settings
	seed  maphash.Seed
	slots []atomic.Pointer[bareEntry] // a power of two
	mu    sync.Mutex                  // held by put
}

type bareEntry struct {
	key   string
	value *Product
}

// bareSlots is the least number of slots: some six times the keys of the suite l1, so that most keys are in their first
// slot.
const bareSlots = 1 << 16

func openBareTable(s Settings) (Cache, error) {
	slots := bareSlots
	for slots < s.Entries+s.Entries/4 {
		slots *= 2
	}
	return &bareTable{Settings: s, seed: maphash.MakeSeed(), slots: make([]atomic.Pointer[bareEntry], slots)}, nil
}

func (c *bareTable) Get(ctx context.Context, key string) (*Product, error) {
	for i := maphash.String(c.seed, key); ; i++ {
		e := c.slots[i&uint64(len(c.slots)-1)].Load()
		if e == nil {
			return c.keep(ctx, key, c.put)
		}
		if e.key == key {
			return e.value, nil
		}
	}
}

func (c *bareTable) put(key string, p *Product) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := maphash.String(c.seed, key); ; i++ {
		slot := &c.slots[i&uint64(len(c.slots)-1)]
		if e := slot.Load(); e == nil || e.key == key {
			slot.Store(&bareEntry{key, p})
			return
		}
	}
}

func (*bareTable) Close() error { return nil }
