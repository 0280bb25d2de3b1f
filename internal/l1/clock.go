package l1

import (
	"sync/atomic"
	"time"
)

// This file is the coarse clock.

// clock holds the time that Config.Now returned at the last tick, so that a hit need not read a clock.
type clock struct {
	now  atomic.Int64 // µs; written by the ticking goroutine
	quit chan struct{}
	done chan struct{}
}

func (c *clock) start(tick time.Duration, read func() time.Time) {
	c.quit, c.done = make(chan struct{}), make(chan struct{})
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
}

func (c *clock) close() {
	close(c.quit)
	<-c.done
}
