package l1

import (
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const testTick = 50 * time.Millisecond

// clockCache makes a cache with a real clock. Caches with the same store share that clock.
func clockCache(t *testing.T, store any) *Cache[int] {
	t.Helper()
	c := New[int](Config{Entries: 100, Bytes: math.MaxInt64, Tick: testTick, Now: time.Now, Store: store})
	c.SetSubscribed(true)
	return c
}

// putFor puts an entry that is fresh for a time.
func putFor(c *Cache[int], key string, life time.Duration) {
	e := c.NewEntry(key, c.Epoch(key), nil, 0)
	e.ServeUntil.Store(time.Now().Add(life).UnixMicro())
	c.Put(e, 1)
}

// The clock sleeps after a pause without Gets. An entry that expires during that sleep must not be served as fresh, and
// an entry that does not expire must be served.
func TestAnEntryThatExpiresWhileTheClockSleeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clockCache(t, nil)
		defer c.Close()
		putFor(c, "short", time.Minute)
		putFor(c, "long", time.Hour)
		c.tables.Load().back.cache.Wait() // the two keys may share a slot of the hot table
		for _, key := range []string{"short", "long"} {
			if c.Fresh(key) == nil {
				t.Fatalf("%s: not fresh after Put", key)
			}
		}
		time.Sleep(20 * idleTicks * testTick)
		if c.clock.now.Load() != asleep {
			t.Fatal("the clock does not sleep")
		}
		if c.Fresh("short") == nil || c.clock.now.Load() == asleep {
			t.Error("the first Get after the sleep is no hit, or has not woken the clock")
		}
		time.Sleep(time.Minute)
		if c.Fresh("short") != nil {
			t.Error("an entry that expired during the sleep is served as fresh")
		}
		if c.Fresh("long") == nil {
			t.Error("the other entry is not served")
		}
	})
}

// One key is read all the time, from the hot table or from ristretto. The clock must not sleep, because a wake costs
// more than a hit, and must not lag behind by more than a tick.
func TestTheClockOfAUsedCacheTicks(t *testing.T) {
	for _, back := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c := clockCache(t, nil)
			defer c.Close()
			putFor(c, "k", time.Hour)
			c.tables.Load().back.cache.Wait()
			if c.Get("k") == nil { // wakes the clock
				t.Fatal("not there after Put")
			}
			for range 5 * idleTicks {
				time.Sleep(testTick)
				if back { // the next Get must ask ristretto
					c.tables.Load().hot.drop(c.Hash("k"), "k")
				}
				now := c.clock.now.Load()
				if late := time.Now().UnixMicro() - now; now == asleep || late > testTick.Microseconds() {
					t.Fatalf("the clock is %v µs late or asleep, although the cache is used (back: %v)", late, back)
				}
				if c.Fresh("k") == nil {
					t.Fatalf("no hit (back: %v)", back)
				}
			}
		})
	}
}

// Announcements must not wake the clock of a process without calls.
func TestLookDoesNotWakeTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clockCache(t, nil)
		defer c.Close()
		putFor(c, "k", time.Hour)
		if c.Look("k") == nil || c.Look("absent") != nil {
			t.Error("Look does not return what was put")
		}
		if c.clock.now.Load() != asleep {
			t.Error("Look has woken the clock")
		}
	})
}

// The caches of one store share a clock. Its goroutine must go on when one of them closes, and must end when the last
// one has closed; a goroutine that is left fails the bubble. A cache that is used after its Close must not start it
// again.
func TestCachesOfAStoreShareAClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := new(int)
		a, b, other := clockCache(t, store), clockCache(t, store), clockCache(t, new(int))
		if a.clock != b.clock || a.clock == other.clock {
			t.Error("a clock is not shared by the caches of a store, or by the caches of two stores")
		}
		if c, d := clockCache(t, []int{}), clockCache(t, []int{}); c.clock == d.clock {
			t.Error("caches whose stores cannot be compared share a clock")
		} else {
			c.Close()
			d.Close()
		}
		other.Close()
		putFor(a, "k", time.Hour)
		putFor(b, "k", time.Hour)
		a.Get("k")
		a.Close()
		time.Sleep(2 * testTick)
		if late := time.Now().UnixMicro() - b.clock.now.Load(); late > testTick.Microseconds() {
			t.Errorf("the clock is %d µs late after one of its caches has closed", late)
		}
		b.Close()
		if b.clock.now.Load() != asleep {
			t.Error("the clock does not sleep after Close of its last cache")
		}
		if b.Get("k"); b.clock.now.Load() != asleep {
			t.Error("a use after Close has started the clock")
		}
		if len(clocks.of) != 0 {
			t.Errorf("%d clocks are left", len(clocks.of))
		}
	})
}

// 1. run has looked at used for the last time. 2. A use sees a clock that ticks, and sets used. 3. run ends, and the
// clock is asleep. The next use must wake the clock, although used is set.
func TestAUseBesideAClockThatFallsAsleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clockCache(t, nil)
		defer c.Close()
		putFor(c, "k", time.Hour)
		c.clock.used.Store(true)
		if c.Get("k"); c.clock.now.Load() == asleep {
			t.Error("the clock sleeps for ever")
		}
	})
}

// Many goroutines use a cache when its clock falls asleep, and close it. The race detector must find nothing.
func TestManyUsesBesideSleepAndClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clockCache(t, nil)
		putFor(c, "k", 10*time.Hour)
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Go(func() {
				for i := range 200 {
					time.Sleep(testTick*idleTicks + time.Duration((i+g)%3)*testTick)
					if c.Fresh("k") == nil {
						t.Error("no hit")
						return
					}
				}
			})
			wg.Go(func() {
				time.Sleep(time.Hour)
				for range 1000 {
					c.Fresh("k")
				}
			})
		}
		time.Sleep(time.Hour)
		c.Close()
		wg.Wait()
	})
}
