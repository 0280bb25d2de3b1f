package goredis

import (
	"testing"
	"time"
)

const ms = time.Millisecond

// reading returns a sample of a server whose clock is ahead of this process by ahead. The server reads its clock
// after the given share of the round trip, from 0 to 1.
func reading(sent, trip, ahead time.Duration, share float64) sample {
	at := sent + time.Duration(float64(trip)*share)
	return sample{sent: sent, got: sent + trip, server: time.Unix(1_700_000_000, 0).Add(at + ahead)}
}

func TestEstimateIsOffByHalfTheRoundTripAtMost(t *testing.T) {
	for _, share := range []float64{0, 0.25, 0.5, 1} {
		e := reading(time.Second, 10*ms, 0, share).estimate()
		if off := e.zero.Sub(time.Unix(1_700_000_000, 0)).Abs(); off > e.err || e.err > 5*ms+time.Microsecond {
			t.Errorf("read after %v of the trip: off by %v, estimated at most %v", share, off, e.err)
		}
	}
}

func TestEstimateOr(t *testing.T) {
	const late = 20 * time.Second // after 20 s, drift adds 2 ms to the error of the old sample
	for _, c := range []struct {
		name     string
		old, new sample
		replaced bool
	}{
		{"smaller round trip", reading(0, 10*ms, 0, 0.5), reading(time.Second, ms, 0, 0.5), true},
		{"equal round trip", reading(0, 10*ms, 0, 0.5), reading(time.Second, 10*ms, 0, 0.5), true},
		{"larger round trip", reading(0, ms, 0, 0.5), reading(time.Second, 10*ms, 0, 0.5), false},
		{"above 50 ms, the first was better", reading(0, 10*ms, 0, 0.5), reading(late, 60*ms, 0, 0.5), false},
		{"above 50 ms, the first was worse", reading(0, 80*ms, 0, 0.5), reading(time.Second, 60*ms, 0, 0.5), true},
		{"the old one has aged", reading(0, ms, 0, 0.5), reading(late, 4*ms, 0, 0.5), true},
		{"it has not aged enough", reading(0, ms, 0, 0.5), reading(late, 7*ms, 0, 0.5), false},
		{"differ within both errors", reading(0, ms, 0, 0), reading(time.Second, 10*ms, 0, 1), false},
		{"clock set forward", reading(0, ms, 0, 0.5), reading(time.Second, 10*ms, 20*ms, 0.5), true},
		{"clock set back", reading(0, ms, 0, 0.5), reading(time.Second, 10*ms, -time.Hour, 0.5), true},
		{"drift within the allowance", reading(0, ms, 0, 0.5), reading(late, 20*ms, 2*ms, 0.5), false},
		{
			"a round trip that includes a freeze",
			reading(0, ms, 0, 0.5), reading(time.Second, 5*time.Second, time.Second, 0.5), false,
		},
	} {
		old, newer := c.old.estimate(), c.new.estimate()
		if got := old.or(newer); (got == newer) != c.replaced || got != newer && got != old {
			t.Errorf("%s: replaced %v, want %v", c.name, got == newer, c.replaced)
		}
	}
}

func TestClock(t *testing.T) {
	c := clock{base: time.Now()}
	if off := time.Since(c.now()).Abs(); off > time.Second {
		t.Errorf("before the first sample off by %v", off)
	}
	for range 3 {
		if !c.due() {
			t.Error("the first sample is not due for every caller")
		}
	}
	now := c.elapsed()
	c.learn(sample{sent: now, got: now, server: time.Now().Add(time.Hour)})
	if off := (time.Until(c.now()) - time.Hour).Abs(); off > time.Second {
		t.Errorf("off by %v", off)
	}
	if c.due() {
		t.Error("a sample is due right after another")
	}
	if c.missed(); !c.due() || c.due() {
		t.Error("after a missed sample, the next one is not due exactly once")
	}
	c.asked.Store(int64(now - sampleEvery))
	if now > sampleEvery && !c.due() {
		t.Errorf("no sample is due %v after the last one", sampleEvery)
	}
	if a, b := c.now(), c.now(); b.Before(a) {
		t.Error("the clock runs backwards")
	}
}
