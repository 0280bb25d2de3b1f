package l1

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

func newTestCache(t *testing.T, cfg Config) *Cache[int] {
	t.Helper()
	cfg.Tick, cfg.Now = time.Hour, time.Now // no tick happens during a test
	if cfg.Entries == 0 {
		cfg.Entries = 10_000
	}
	if cfg.Bytes == 0 {
		cfg.Bytes = math.MaxInt64
	}
	c := New[int](cfg)
	t.Cleanup(c.Close)
	c.SetSubscribed(true)
	return c
}

// Four goroutines put, get and invalidate random keys. The cost that the hot table has counted must equal the sum
// over its slots and stay within its bound. The table must hold the entry that was put last, if that entry fits.
func TestHotTableKeepsItsBound(t *testing.T) {
	for name, cfg := range map[string]Config{
		"entries": {Entries: 1000}, "bytes": {Bytes: 1 << 16}, "one": {Entries: 1}, "few bytes": {Bytes: 100, Entries: 10},
	} {
		t.Run(name, func(t *testing.T) {
			c := newTestCache(t, cfg)
			var wg sync.WaitGroup
			for g := range 4 {
				wg.Go(func() {
					r := rand.New(rand.NewPCG(1, uint64(g)))
					for range 5000 {
						key := fmt.Sprint(r.IntN(3000))
						switch r.IntN(10) {
						case 0:
							c.Invalidate(key)
						case 1, 2, 3:
							c.Get(key)
						default:
							c.Put(c.NewEntry(key, c.Epoch(key), nil, 0), r.Int64N(2000))
						}
					}
				})
			}
			wg.Wait()
			var sum int64
			hot := &c.tables.Load().hot
			for i := range hot.slots {
				sum += hot.costOf(hot.slots[i].Load())
			}
			if used := hot.used.Load(); sum != used || used > hot.room {
				t.Errorf("%d in the slots, %d counted, room for %d", sum, used, hot.room)
			}
			e := c.NewEntry("last", c.Epoch("last"), nil, 0)
			c.Put(e, 20)
			if e.cost > 0 && c.Get("last") != e {
				t.Error("the hot table does not hold what was just put")
			}
		})
	}
}

func TestEpochs(t *testing.T) {
	c := newTestCache(t, Config{})
	fresh := func(key string) *Entry[int] {
		e := c.NewEntry(key, c.Epoch(key), nil, 0)
		c.Put(e, 1)
		return e
	}
	e := fresh("k")
	if !c.Valid(e) {
		t.Fatal("not valid")
	}
	c.Invalidate("k")
	if c.Valid(e) || c.NotInvalidated(e) {
		t.Error("Invalidate has no effect")
	}
	e = fresh("k")
	c.SetSubscribed(true) // no change, because the subscription works already
	if !c.Valid(e) {
		t.Error("a second SetSubscribed(true) invalidates")
	}
	c.SetSubscribed(false)
	if c.Valid(e) || !c.NotInvalidated(e) {
		t.Error("after a break of the subscription an entry is not valid, but not invalidated either")
	}
	whileDown := fresh("k2")
	if c.Valid(whileDown) {
		t.Error("read while announcements cannot be received, and valid")
	}
	c.SetSubscribed(true)
	if c.Valid(e) || c.Valid(whileDown) {
		t.Error("the return of the subscription makes older entries valid")
	}
	e = fresh("k")
	c.Shut()
	c.SetSubscribed(false)
	c.SetSubscribed(true)
	if c.Valid(e) || c.Valid(fresh("k3")) {
		t.Error("valid after Shut")
	}
}

// Three keys share a pair of slots of the hot table, and one of them is read 20 times as often as the others. That key
// must be in the table in most reads. An entry that ristretto does not have must stay in the table while it is in use,
// because it would otherwise be lost.
func TestHotTableHoldsTheHottest(t *testing.T) {
	c := newTestCache(t, Config{Entries: 100})
	keys := keysOfAPair(c, 3)
	tables := c.forPut()
	entries := map[string]*Entry[int]{}
	for _, key := range keys {
		entries[key] = c.NewEntry(key, c.Epoch(key), nil, 0)
		c.Put(entries[key], 1)
		tables.back.cache.Wait()
	}
	held := func(key string) bool { return tables.hot.get(c.Hash(key), key) != nil }
	hotReads := 0
	for i := range 20_000 {
		c.Get(keys[0])
		if i%20 == 0 {
			c.Get(keys[1])
			c.Get(keys[2])
		}
		if held(keys[0]) {
			hotReads++
		}
	}
	if hotReads < 15_000 {
		t.Errorf("a key that is asked for 20 times as often was in the hot table in %d of 20,000 reads", hotReads)
	}
	for _, key := range keys[1:] {
		tables.hot.drop(c.Hash(keys[0]), keys[0])
		tables.hot.put(c.Hash(key), entries[key])
		tables.back.drop(c.Hash(key))
		tables.back.cache.Wait()
	}
	for range 1000 {
		c.Get(keys[0])
	}
	if !held(keys[1]) || !held(keys[2]) {
		t.Error("an entry that ristretto does not have was replaced while it was in use")
	}
}

// keysOfAPair returns n keys whose entries can occupy only the same two slots of the hot table.
func keysOfAPair(c *Cache[int], n int) (keys []string) {
	hot := &c.forPut().hot
	for i := 0; len(keys) < n; i++ {
		key := fmt.Sprint(i)
		if len(keys) == 0 || hot.first(c.Hash(key))/2 == hot.first(c.Hash(keys[0]))/2 {
			keys = append(keys, key)
		}
	}
	return keys
}

// The hot table is full, and one key is read all the time, which only ristretto has. The key must get into the table
// soon, because each hit in ristretto costs several times as much.
func TestAHotKeyGetsIntoAFullTable(t *testing.T) {
	c := newTestCache(t, Config{Entries: 1000})
	put := func(key string) {
		c.Put(c.NewEntry(key, c.Epoch(key), nil, 0), 1)
		c.tables.Load().back.cache.Wait()
	}
	put("hot")
	hot := &c.tables.Load().hot
	hot.drop(c.Hash("hot"), "hot")
	for i := 0; hot.used.Load() < hot.room; i++ {
		put(fmt.Sprint(i))
	}
	for range 10_000 {
		if c.Get("hot") == nil {
			t.Fatal("not there after Put")
		}
	}
	if hot.get(c.Hash("hot"), "hot") == nil || hot.used.Load() > hot.room {
		t.Errorf("not in the hot table after 10,000 reads; its costs are %d of %d", hot.used.Load(), hot.room)
	}
}

// Many goroutines put, read and promote the entries of one pair of slots. A key must never be in both slots, because a
// reader could then get its older entry after the newer one was evicted.
func TestAKeyHasOneSlot(t *testing.T) {
	c := newTestCache(t, Config{Entries: 100})
	keys := keysOfAPair(c, 3)
	tables := c.tables.Load()
	at := tables.hot.first(c.Hash(keys[0]))
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(g)))
			for range 20_000 {
				key := keys[r.IntN(len(keys))]
				e := c.NewEntry(key, c.Epoch(key), nil, 0)
				switch r.IntN(4) {
				case 0:
					c.Put(e, 1)
				case 1:
					e.cost = 1
					c.promote(tables, c.Hash(key), e)
				case 2:
					tables.hot.drop(c.Hash(key), key)
				case 3:
					mu := tables.hot.lock(at)
					a, b := tables.hot.slots[at].Load(), tables.hot.slots[at^1].Load()
					mu.Unlock()
					if a != nil && b != nil && a.Key == b.Key {
						t.Errorf("%q is in both slots", a.Key)
						return
					}
				}
			}
		})
	}
	wg.Wait()
}

// The hot table and ristretto together may hold no more entries than Config.Entries, whatever the entries cost.
func TestEntriesBoundsBothTables(t *testing.T) {
	for _, bytes := range []int64{math.MaxInt64, 1 << 20, 64 << 20, 1 << 50} {
		for _, entries := range []int{10, 1000} {
			c := newTestCache(t, Config{Entries: entries, Bytes: bytes})
			for i := range 20 * entries {
				key := fmt.Sprint(i)
				c.Put(c.NewEntry(key, c.Epoch(key), nil, 0), 1)
				if i%entries == 0 {
					c.tables.Load().back.cache.Wait()
				}
			}
			tables := c.tables.Load()
			tables.back.cache.Wait()
			n := 0
			tables.back.cache.IterValues(func(*Entry[int]) bool { n++; return false })
			for i := range tables.hot.slots {
				if tables.hot.slots[i].Load() != nil {
					n++
				}
			}
			if n > entries || n < entries/2 {
				t.Errorf("Bytes %d: %d entries, want %d at most, and at least half of that", bytes, n, entries)
			}
		}
	}
}

// A reader has got an entry from ristretto, and is about to promote the entry. Then a newer entry of the same key is
// put. The hot table must keep the newer entry.
func TestPromoteKeepsANewerEntryOfTheSameKey(t *testing.T) {
	c := newTestCache(t, Config{})
	older := c.NewEntry("k", c.Epoch("k"), nil, 1)
	c.Put(older, 1)
	newer := c.NewEntry("k", c.Epoch("k"), nil, 2)
	c.Put(newer, 1)
	newer.touched.Store(0) // not used lately, so promote may replace the entry
	c.promote(c.tables.Load(), c.Hash("k"), older)
	if got := c.Get("k"); got != newer {
		t.Errorf("got value %d after promote, want 2", got.Data)
	}
}
