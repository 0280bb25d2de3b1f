package goredis

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// If the last sample is older than sampleEvery, the next Get or GetMany asks for the time again.
	sampleEvery = 30 * time.Second
	// The clocks of two machines are assumed to drift apart by at most 1/drift of the time that passes. That is 100 ppm,
	// the drift of a bad quartz.
	drift = 10_000
)

// A sample is one reading of the store's clock. This process sent the request at sent and got the reply at got. Both
// moments are spans since clock.base, by the monotonic clock of the process.
type sample struct {
	sent, got time.Duration
	server    time.Time // what the server's clock said, at a moment between sent and got
}

// An estimate is the time of the store's clock as computed from one sample.
type estimate struct {
	zero time.Time     // the time of the store's clock at clock.base
	err  time.Duration // largest error of zero when the sample was taken
	at   time.Duration // when the sample was taken, since clock.base
}

// estimate returns the estimate of a single sample. It assumes that the server read its clock in the middle of the
// round trip. So the largest error is half the round trip.
func (s sample) estimate() estimate {
	half := (s.got - s.sent) / 2
	return estimate{zero: s.server.Add(-(s.sent + half)), err: half + time.Microsecond, at: s.got}
}

// errAt returns the largest error of the estimate at the moment now, which is a span since clock.base.
func (e estimate) errAt(now time.Duration) time.Duration {
	return e.err + max(0, now-e.at)/drift
}

// or returns e or newer: the estimate whose largest error is smaller at newer.at. If the two estimates contradict
// each other, the store's clock was set or another server replied. In that case or returns newer.
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
	asked atomic.Int64 // when a sample was last requested or taken, since base; 0 = never, or the last request failed

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

// due reports whether the caller must take a sample. Before the first sample, due returns true for every caller,
// because each caller would otherwise judge records by the clock of this machine. Later, a sample is due each
// sampleEvery. If several callers then ask at the same time, only one of them gets true.
func (c *clock) due() bool {
	if c.best.Load() == nil {
		return true
	}
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

// missed is called when a requested sample did not arrive. It makes a sample due again.
func (c *clock) missed() { c.asked.Store(0) }

// learn bases the clock on s, if s is more exact than the present estimate or contradicts it (see estimate.or).
func (c *clock) learn(s sample) {
	c.asked.Store(max(1, int64(s.got)))
	c.mu.Lock()
	defer c.mu.Unlock()
	newer, e := s.estimate(), c.best.Load()
	if e != nil && e.or(newer) == *e {
		return
	}
	best := newer // a variable of its own, so that a sample that is less exact, as most are, needs no allocation
	c.best.Store(&best)
}
