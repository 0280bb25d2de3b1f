package peers

import (
	"context"
	"hash/maphash"
	"sync"
	"sync/atomic"
)

// bareTable is the yardstick of a hit in L1: an array of atomic pointers, with the checks that a hit of refill needs. A
// Get hashes the key, loads a pointer, and compares the key. If the slot holds another key, the Get looks into the next
// slot. Then it compares the end of the value with a coarse clock, and two epochs: the epoch of the key, which an
// invalidation of the key would raise, and the epoch of the subscription. That is the least that a table for lock-free
// readers can do whose values expire and can be invalidated. A bareTable does no more: it has no bound and no policy,
// evicts nothing, and does not note which keys are read. Its clock stands still, its values are never invalidated, and
// it cannot grow: with more keys than slots, put never returns.
type bareTable struct {
	Settings
	seed         maphash.Seed
	slots        []atomic.Pointer[bareEntry] // a power of two
	now          atomic.Int64
	epochs       []atomic.Uint32 // as many as slots
	subscription atomic.Uint32
	mu           sync.Mutex // held by put
}

type bareEntry struct {
	key                 string
	until               atomic.Int64
	epoch, subscription uint32
	value               *Product
}

// bareSlots is the least number of slots: some six times the keys of the suite l1, so that most keys are in their first
// slot.
const bareSlots = 1 << 16

func openBareTable(s Settings) (Cache, error) {
	slots := bareSlots
	for slots < s.Entries+s.Entries/4 {
		slots *= 2
	}
	return &bareTable{
		Settings: s, seed: maphash.MakeSeed(), slots: make([]atomic.Pointer[bareEntry], slots),
		epochs: make([]atomic.Uint32, slots),
	}, nil
}

func (c *bareTable) Get(ctx context.Context, key string) (*Product, error) {
	h := maphash.String(c.seed, key)
	for i := h; ; i++ {
		e := c.slots[i&uint64(len(c.slots)-1)].Load()
		if e == nil {
			return c.keep(ctx, key, c.put)
		}
		if e.key != key {
			continue
		}
		if c.now.Load() >= e.until.Load() || e.epoch != c.epochs[h&uint64(len(c.epochs)-1)].Load() ||
			e.subscription != c.subscription.Load() {
			return c.keep(ctx, key, c.put)
		}
		return e.value, nil
	}
}

func (c *bareTable) put(key string, p *Product) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := maphash.String(c.seed, key); ; i++ {
		slot := &c.slots[i&uint64(len(c.slots)-1)]
		if e := slot.Load(); e == nil || e.key == key {
			next := &bareEntry{key: key, value: p}
			next.until.Store(1) // the clock stands at 0
			slot.Store(next)
			return
		}
	}
}

func (*bareTable) Close() error { return nil }
