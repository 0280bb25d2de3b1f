package goredis

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// sampleEvery is how often Get and GetMany ask for the time if no Acquire has read it meanwhile.
	sampleEvery = 30 * time.Second
	// Two clocks drift apart by at most 1/drift of the time that passes: 100 ppm, as with a bad quartz.
	drift = 10_000
)

// A sample is one reading of the store's clock. sent and got are moments of this process: spans since clock.base, by
// the monotonic clock of the process.
type sample struct {
	sent, got time.Duration // by this process: the server read its clock in between
	server    time.Time
}

// An estimate is what one sample says about the store's clock.
type estimate struct {
	zero time.Time     // the store's clock at the base
	err  time.Duration // largest error of zero when the sample was taken
	at   time.Duration // when the sample was taken
}

// estimate returns the estimate of a single sample. It assumes that the server read its clock in the middle of the
// round trip. So the largest error is half the round trip.
func (s sample) estimate() estimate {
	half := (s.got - s.sent) / 2
	return estimate{zero: s.server.Add(-(s.sent + half)), err: half + time.Microsecond, at: s.got}
}

// errAt returns the largest error of the estimate at a later moment.
func (e estimate) errAt(now time.Duration) time.Duration {
	return e.err + max(0, now-e.at)/drift
}

// or returns e or a newer estimate, whichever has the smaller error by now. If the two estimates contradict each other,
// the store's clock was set or another server replied. Then or returns the newer estimate.
func (e estimate) or(newer estimate) estimate {
	old := e.errAt(newer.at)
	apart := newer.zero.Sub(e.zero).Abs()
	if newer.err <= old || apart > newer.err+old {
		return newer
	}
	return e
}

// clock is the store's clock as far as this process knows it.
type clock struct {
	base  time.Time
	asked atomic.Int64 // when a sample was last requested or taken, since base; 0 = never

	mu   sync.Mutex // serialises changes of best
	best atomic.Pointer[estimate]
}

// elapsed is the monotonic clock of this process.
func (c *clock) elapsed() time.Duration { return time.Since(c.base) }

// now returns the time of the store's clock. Before the first sample, it returns the time of this machine.
func (c *clock) now() time.Time {
	if e := c.best.Load(); e != nil {
		return e.zero.Add(c.elapsed())
	}
	return c.base.Add(c.elapsed())
}

// due reports whether a sample is needed. Only one caller at a time gets true.
func (c *clock) due() bool {
	now, asked := c.elapsed(), c.asked.Load()
	if asked != 0 && now-time.Duration(asked) < sampleEvery {
		return false
	}
	return c.asked.CompareAndSwap(asked, max(1, int64(now)))
}

// read takes a sample from a reply to TIME that has just arrived.
func (c *clock) read(reply *redis.TimeCmd, sent time.Duration) {
	got, server := c.elapsed(), reply.Val()
	if reply.Err() != nil || server.IsZero() {
		c.missed()
		return
	}
	c.learn(sample{sent: sent, got: got, server: server})
}

// missed makes a sample due again, because the requested one did not arrive.
func (c *clock) missed() { c.asked.Store(0) }

// learn takes a sample.
func (c *clock) learn(s sample) {
	c.asked.Store(max(1, int64(s.got)))
	newer := s.estimate()
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.best.Load(); e != nil {
		newer = e.or(newer)
	}
	c.best.Store(&newer)
}
