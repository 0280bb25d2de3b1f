package l1

import (
	"sync/atomic"
	"time"
)

// clock is read once a tick: a hit must not pay for a clock.
type clock struct {
	now  atomic.Int64 // µs; written by the ticking goroutine
	quit chan struct{}
	done chan struct{}
}

func newClock(tick time.Duration, read func() time.Time) *clock {
	c := &clock{quit: make(chan struct{}), done: make(chan struct{})}
	c.now.Store(read().UnixMicro())
	go func() {
		defer close(c.done)
		ticker := time.NewTicker(tick)
		defer ticker.Stop()
		for {
			select {
			case <-c.quit:
				return
			case <-ticker.C:
				c.now.Store(read().UnixMicro())
			}
		}
	}()
	return c
}

func (c *clock) close() {
	close(c.quit)
	<-c.done
}
