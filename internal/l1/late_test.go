package l1

import (
	"math"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// This file tests a cache before its first Put, and what the first use makes.

// A cache that was never used has no goroutine and takes little memory, although announcements arrive.
func TestAnIdleCacheTakesLittle(t *testing.T) {
	const n, most = 100, 4 << 10
	var before, after runtime.MemStats
	goroutines := runtime.NumGoroutine()
	runtime.ReadMemStats(&before)
	for i := range n {
		c := New[int](Config{Entries: 10_000, Bytes: 64 << 20, Tick: testTick, Now: time.Now, Store: strconv.Itoa(i % 2)})
		defer c.Close()
		c.SetSubscribed(true)
		c.Invalidate("k")
		c.InvalidateTag("t")
		if c.Get("k") != nil || c.Fresh("k") != nil || c.Look("k") != nil {
			t.Error("an empty cache returns an entry")
		}
	}
	runtime.ReadMemStats(&after)
	if n := runtime.NumGoroutine(); n > goroutines {
		t.Errorf("the idle caches have %d goroutines", n-goroutines)
	}
	if each := (after.TotalAlloc - before.TotalAlloc) / n; each > most {
		t.Errorf("an idle cache takes %d bytes, want %d at most", each, most)
	}
}

// The first reader of a cache notes its epoch. Then the key, or a tag of its value, is invalidated, before the first
// Put. The entry must not be valid.
func TestAnInvalidationBeforeTheFirstPut(t *testing.T) {
	for name, invalidate := range map[string]func(*Cache[int]){
		"key": func(c *Cache[int]) { c.Invalidate("k") },
		"tag": func(c *Cache[int]) { c.InvalidateTag("t") },
	} {
		t.Run(name, func(t *testing.T) {
			c := newTestCache(t, Config{})
			invalidate(c) // before the read, so this must have no effect
			epoch := c.Epoch("k")
			e := c.NewEntry("k", epoch, []string{"t"}, 1)
			if !c.Valid(e) {
				t.Error("an invalidation before the read makes the entry invalid")
			}
			invalidate(c)
			e = c.NewEntry("k", epoch, []string{"t"}, 1)
			c.Put(e, 1)
			if c.Valid(e) || c.NotInvalidated(e) {
				t.Error("the entry is valid, although it was invalidated after its read began")
			}
		})
	}
}

// In each round, readers and writers use a new cache for the first time. A writer changes the value in a database, and
// then invalidates the key. A reader notes the epoch, reads the database, and puts what it has read. After each
// Invalidate, no valid entry may be older than the change.
func TestFirstReadersBesideInvalidations(t *testing.T) {
	for range 500 {
		c := newTestCache(t, Config{Entries: 100})
		var (
			wg      sync.WaitGroup
			db      [4]atomic.Int64
			changed [4]atomic.Int64 // the version of the last Invalidate that has returned
			begin   = make(chan struct{})
		)
		for g := range 8 {
			key, at := strconv.Itoa(g%4), g%4
			wg.Go(func() {
				<-begin
				for range 5 {
					epoch := c.Epoch(key)
					c.Put(c.NewEntry(key, epoch, nil, int(db[at].Load())), 1)
				}
			})
			wg.Go(func() {
				<-begin
				v := db[at].Add(1)
				c.Invalidate(key)
				for was := changed[at].Load(); v > was && !changed[at].CompareAndSwap(was, v); was = changed[at].Load() {
				}
			})
			wg.Go(func() {
				<-begin
				for range 5 {
					least := changed[at].Load()
					if e := c.Get(key); e != nil && c.Valid(e) && int64(e.Data) < least {
						t.Errorf("version %d is valid after the Invalidate of version %d", e.Data, least)
					}
				}
			})
		}
		close(begin)
		wg.Wait()
		for at := range db {
			if e := c.Get(strconv.Itoa(at)); e != nil && c.Valid(e) && int64(e.Data) != db[at].Load() {
				t.Fatalf("version %d is valid at the end, want %d", e.Data, db[at].Load())
			}
		}
	}
}

// Several goroutines note the first epochs. All must get the same stripes, because an invalidation raises only one.
func TestFirstEpochs(t *testing.T) {
	for range 1000 {
		c := newTestCache(t, Config{})
		var wg sync.WaitGroup
		begin, got := make(chan struct{}), make([]*stripes, 4)
		for g := range got {
			wg.Go(func() {
				<-begin
				got[g] = c.noted()
			})
		}
		close(begin)
		wg.Wait()
		for _, s := range got {
			if s != c.stripes.Load() {
				t.Fatal("a reader has noted the epoch of other stripes")
			}
		}
	}
}

// Several goroutines make the first Put. Each must find its entry afterwards, so all of them have used the same tables.
func TestFirstPuts(t *testing.T) {
	for range 200 {
		c := newTestCache(t, Config{Entries: 1000})
		var wg sync.WaitGroup
		begin := make(chan struct{})
		for g := range 4 {
			wg.Go(func() {
				key := strconv.Itoa(g)
				<-begin
				c.Put(c.NewEntry(key, c.Epoch(key), nil, g), 1)
			})
		}
		close(begin)
		wg.Wait()
		c.tables.Load().back.cache.Wait()
		for g := range 4 {
			if c.Get(strconv.Itoa(g)) == nil {
				t.Errorf("the entry %d was put, and is not there", g)
			}
		}
	}
}

// A cache is closed beside its first Put, or before it. No goroutine may be left; otherwise the bubble fails.
func TestCloseBesideTheFirstPut(t *testing.T) {
	for i := range 300 {
		synctest.Test(t, func(t *testing.T) {
			c := New[int](Config{Entries: 100, Bytes: math.MaxInt64, Tick: testTick, Now: time.Now})
			put := func() { c.Put(c.NewEntry("k", c.Epoch("k"), nil, 0), 1) }
			if i == 0 {
				c.Close()
				put()
				return
			}
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(put)
			}
			wg.Go(c.Close)
			wg.Wait()
		})
	}
}
