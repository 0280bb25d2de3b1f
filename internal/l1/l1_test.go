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
				sum += costOf(hot.slots[i].Load())
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

// Two keys share a slot of the hot table, and one of them is read 20 times as often. That key must occupy the slot in
// most reads. An entry that ristretto does not have must keep the slot while it is in use, because it would otherwise
// be lost.
func TestHotTableHoldsTheHottest(t *testing.T) {
	c := newTestCache(t, Config{Entries: 100})
	tables := c.forPut()
	enter := func(key string) *Entry[int] {
		e := c.NewEntry(key, c.Epoch(key), nil, 0)
		c.Put(e, 1)
		tables.back.cache.Wait()
		return e
	}
	hot := enter("hot")
	var cold *Entry[int]
	for i := 0; cold == nil || tables.hot.slot(c.Hash(cold.Key)) != tables.hot.slot(c.Hash(hot.Key)); i++ {
		if key := fmt.Sprint(i); tables.hot.slot(c.Hash(key)) == tables.hot.slot(c.Hash(hot.Key)) {
			cold = enter(key)
		}
	}
	inSlot := func() string { return tables.hot.slot(c.Hash(hot.Key)).Load().Key }
	hotReads := 0
	for i := range 20_000 {
		c.Get("hot")
		if i%20 == 0 {
			c.Get(cold.Key)
		}
		if inSlot() == "hot" {
			hotReads++
		}
	}
	if hotReads < 15_000 {
		t.Errorf("a key that is asked for 20 times as often was in the hot table in %d of 20,000 reads", hotReads)
	}
	tables.hot.put(c.Hash(cold.Key), cold)
	tables.back.drop(c.Hash(cold.Key))
	tables.back.cache.Wait()
	for range 1000 {
		c.Get("hot")
	}
	if inSlot() != cold.Key {
		t.Error("an entry that ristretto does not have was replaced while it was in use")
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
	newer.touched.Store(0) // not used in this tick, so promote may replace the entry
	c.promote(c.tables.Load(), c.Hash("k"), older)
	if got := c.Get("k"); got != newer {
		t.Errorf("got value %d after promote, want 2", got.Data)
	}
}
