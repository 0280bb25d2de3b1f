package goredis

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// sampleEvery is how often Get and GetMany ask for the time, when no claim did meanwhile.
	sampleEvery = 30 * time.Second
	// drift bounds how fast two clocks run apart: 1/drift, 100 ppm, a bad quartz.
	drift = 10_000
)

// A sample is one reading of the store's clock. Moments of this process are spans since a base that only its own
// monotonic clock has moved since.
type sample struct {
	sent, got time.Duration // by this process: the server read its clock in between
	server    time.Time
}

// An estimate is what one sample says of the store's clock.
type estimate struct {
	zero time.Time     // the store's clock at the base
	err  time.Duration // it is off by this at most, when the sample was taken
	at   time.Duration // when it was taken
}

// of is the estimate by a single sample: right in the middle of the round trip, and off by half of it at most.
func (s sample) estimate() estimate {
	half := (s.got - s.sent) / 2
	return estimate{zero: s.server.Add(-(s.sent + half)), err: half + time.Microsecond, at: s.got}
}

// errAt is by how much the estimate may be off at a later moment.
func (e estimate) errAt(now time.Duration) time.Duration {
	return e.err + max(0, now-e.at)/drift
}

// or returns the better of the estimate and a newer one: the one of the smaller error by now; or the newer one if not both
// can be right, since then the store's clock was set, or another server answers.
func (e estimate) or(newer estimate) estimate {
	old := e.errAt(newer.at)
	apart := newer.zero.Sub(e.zero).Abs()
	if newer.err <= old || apart > newer.err+old {
		return newer
	}
	return e
}

// clock is the store's clock as this process knows it.
type clock struct {
	base  time.Time
	asked atomic.Int64 // when somebody last asked for a sample or got one, since base; 0 = never

	mu   sync.Mutex // guards the change of best
	best atomic.Pointer[estimate]
}

// elapsed is the monotonic clock of this process.
func (c *clock) elapsed() time.Duration { return time.Since(c.base) }

// now is the store's clock, and this machine's before the first sample.
func (c *clock) now() time.Time {
	if e := c.best.Load(); e != nil {
		return e.zero.Add(c.elapsed())
	}
	return c.base.Add(c.elapsed())
}

// due reports, to one caller at a time, that a sample is wanted.
func (c *clock) due() bool {
	now, asked := c.elapsed(), c.asked.Load()
	if asked != 0 && now-time.Duration(asked) < sampleEvery {
		return false
	}
	return c.asked.CompareAndSwap(asked, max(1, int64(now)))
}

// read takes a sample from an answer to TIME that has just come.
func (c *clock) read(answer *redis.TimeCmd, sent time.Duration) {
	got, server := c.elapsed(), answer.Val()
	if answer.Err() != nil || server.IsZero() {
		c.missed()
		return
	}
	c.learn(sample{sent: sent, got: got, server: server})
}

// missed makes a sample due again: the one that was asked for did not come.
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
