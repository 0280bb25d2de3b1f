package l1

import (
	"math"
	"reflect"
	"sync"
	"sync/atomic"
	"time"
)

// This file is the coarse clock.

// clock holds the time that Config.Now returned at the last tick, so that a hit need not read a clock. A clock ticks
// only while a Cache is used. After idleTicks ticks without a use, it sleeps: it has no goroutine, and its time is
// asleep, which is later than any ServeUntil. So no entry is a hit by the time of a sleeping clock. The next
// [Cache.Fresh] notices that, wakes the clock, and judges the entry by the time that wake has read.
type clock struct {
	// now is µs at the last tick, or asleep. While run runs, only run writes now. wake changes now from asleep to the
	// time. The one wake that has done so starts run.
	now  atomic.Int64
	used atomic.Bool // a Cache was used since the last tick; set by use, cleared by run

	key  clockKey
	read func() time.Time

	users int // Caches that are open; guarded by clocks.mu

	mu     sync.Mutex // guards closed, and the start of run
	closed bool
	quit   chan struct{} // closed by leave
	runs   sync.WaitGroup
}

const (
	asleep    = math.MaxInt64
	idleTicks = 10 // with fewer, a Cache that is used at each second or third tick would wake its clock each time

	// touchTicks is how often an entry that is hit all the time is touched. It is below idleTicks, because a touch keeps
	// the clock awake. A touch costs as much as a hit in ristretto, so 10,000 hot keys would notice a touch per tick.
	touchTicks = 4
)

// clockKey says which Caches share a clock.
type clockKey struct {
	store any
	tick  time.Duration
}

// clocks holds the clock of every Cache of this process that is open.
var clocks = struct {
	mu sync.Mutex
	of map[clockKey]*clock
}{of: make(map[clockKey]*clock)}

// clockOf returns the clock of a Cache, and counts one more user. The caller calls leave once.
func clockOf(cfg Config) *clock {
	key := clockKey{cfg.Store, cfg.Tick}
	if cfg.Store == nil || !reflect.ValueOf(cfg.Store).Comparable() {
		key.store = new(byte) // equal to no other key, so this Cache has a clock of its own
	}
	clocks.mu.Lock()
	defer clocks.mu.Unlock()
	c := clocks.of[key]
	if c == nil {
		c = &clock{key: key, read: cfg.Now, quit: make(chan struct{})}
		c.now.Store(asleep)
		clocks.of[key] = c
	}
	c.users++
	return c
}

// leave is called by a Cache that closes. After the last Cache of the clock has left, leave ends run and waits for it.
func (c *clock) leave() {
	clocks.mu.Lock()
	c.users--
	last := c.users == 0
	if last {
		delete(clocks.of, c.key)
	}
	clocks.mu.Unlock()
	if !last {
		return
	}
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	close(c.quit)
	c.runs.Wait()
}

// use keeps the clock awake for idleTicks more ticks, or wakes it. It returns the coarse time. A clock that falls
// asleep during use may stay asleep. Then the next use wakes it.
func (c *clock) use() (now int64) {
	if now = c.now.Load(); now == asleep {
		return c.wake()
	}
	if !c.used.Load() { // reading a shared cache line is cheaper than writing it
		c.used.Store(true)
	}
	return now
}

// wake starts run, unless another wake has done so or the clock is closed.
func (c *clock) wake() (now int64) {
	now = c.read().UnixMicro() // before the mutex, because the clock is code of a backend
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return asleep
	}
	if c.now.CompareAndSwap(asleep, now) {
		c.runs.Go(c.run)
	}
	return c.now.Load()
}

// run ticks until no Cache has been used for idleTicks ticks, or until leave. The last thing that it writes is asleep:
// after that, a wake may start the next run.
func (c *clock) run() {
	ticker := time.NewTicker(c.key.tick)
	defer ticker.Stop()
	defer c.now.Store(asleep)
	for idle := 0; idle < idleTicks; idle++ {
		select {
		case <-c.quit:
			return
		case <-ticker.C:
		}
		if c.used.Swap(false) {
			idle = 0
		}
		c.now.Store(c.read().UnixMicro())
	}
}
