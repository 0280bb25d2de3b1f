//go:build linux

package realtest_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/internal/realtest"
)

// This file sets the wall clock of Redis. A process written in Go cannot be given a wrong clock from outside, but nodes
// whose clocks are an hour off are the same thing seen from the other side: what counts is how far the two differ.

// timeOf is what a server takes for the time.
func timeOf(t *testing.T, r *realtest.Redis) time.Time {
	t.Helper()
	c := redis.NewClient(&redis.Options{Addr: r.Addr()})
	defer c.Close()
	now, err := c.Time(context.Background()).Result()
	if err != nil {
		t.Fatal(err)
	}
	return now
}

func clockIs(t *testing.T, r *realtest.Redis, off time.Duration) {
	t.Helper()
	if wrong := time.Until(timeOf(t, r)) - off; wrong.Abs() > 10*time.Second {
		t.Fatalf("the server's clock is %v off what it was set to", wrong)
	}
}

// Nodes whose wall clocks are an hour off: ages and freshness are right on each, and there is one load per expiry.
func TestNodesAnHourOff(t *testing.T) {
	for _, off := range []time.Duration{time.Hour, -time.Hour} {
		t.Run(fmt.Sprint(off), func(t *testing.T) {
			const ttl = 300 * time.Millisecond
			server, _ := realtest.StartRedisWithClock(t, off)
			clockIs(t, server, off)
			f := newFarm(t, 3, overOne(server), refill.Config{TTL: ttl, LocalTTL: longTTL})
			tr := f.startTraffic("hot", "long")
			f.oneLoadPerExpiry("hot", ttl, f.base, 5)
			for _, n := range f.nodes {
				r, err := n.GetResult(context.Background(), "long")
				if truth := time.Since(f.bornOf(r.Value)); err != nil || (r.Age-truth).Abs() > 250*time.Millisecond {
					t.Errorf("%s: age %v, in truth %v, %v", n.name, r.Age, truth, err)
				}
			}
			f.invalidateReachesAll("long")
			tr.end()
			f.close(server)
		})
	}
}

// The clock is set by an hour under traffic, as by a first NTP answer. Nothing is served past its bound, no Get fails or
// hangs; each node may load once more until it knows, then all is as before.
func TestClockIsSetUnderTraffic(t *testing.T) {
	for _, by := range []time.Duration{time.Hour, -time.Hour} {
		t.Run(fmt.Sprint(by), func(t *testing.T) {
			const ttl = 300 * time.Millisecond
			server, clock := realtest.StartRedisWithClock(t, 0)
			f := newFarm(t, 3, overOne(server), refill.Config{TTL: ttl, StaleFor: ttl, LocalTTL: longTTL})
			tr := f.startTraffic("hot", "other")
			f.oneLoadPerExpiry("hot", ttl, f.base, 3)
			set := time.Now()
			clock.Set(by)
			clockIs(t, server, by)
			settled := set.Add(4 * ttl)
			f.oneLoadPerExpiry("hot", ttl, settled, 4)
			f.oneLoadPerExpiry("other", ttl, settled, 4)
			n := len(f.loadsOf("hot", set)) - len(f.loadsOf("hot", settled))
			t.Logf("result: %d loads in the %v after the clock was set", n, settled.Sub(set))
			if n > 4+2*len(f.nodes) {
				t.Errorf("%d loads: more than two extra ones per node", n)
			}
			tr.end()
			f.close(server)
		})
	}
}

// What was loaded before the clock is set back must not live an hour longer: neither in the L1 of a node that learns the
// new time from the load of another key, nor in Redis, which keeps it an hour longer, for a node that never read it.
func TestClockSetBackEndsValues(t *testing.T) {
	server, clock := realtest.StartRedisWithClock(t, 0)
	const ttl = time.Second
	f := newFarm(t, 2, overOne(server), refill.Config{TTL: ttl})
	a, b, ctx := f.nodes[0], f.nodes[1], context.Background()
	for _, key := range []string{"local", "shared"} {
		if _, err := a.Get(ctx, key); err != nil {
			t.Fatal(err)
		}
	}
	clock.Set(-time.Hour)
	for _, n := range f.nodes {
		if _, err := n.Get(ctx, "teacher-of-"+n.name); err != nil { // its claim tells the time
			t.Fatal(err)
		}
		if off := time.Until(n.store.Now()) + time.Hour; off.Abs() > 10*time.Second {
			t.Fatalf("%s's idea of the time is %v off", n.name, off)
		}
	}
	dead := f.loadsOf("shared", f.base)[0].began.Add(ttl + ageSlack)
	eventually(t, "the values are past their time", func() bool { return time.Now().After(dead) })
	if left := (&goredisServer{server}).do(t, "pttl", stored("shared")).(int64); left < time.Minute.Milliseconds() {
		t.Fatalf("Redis keeps the old value for %d ms more: this test shows nothing", left)
	}
	for key, n := range map[string]*farmNode{"local": a, "shared": b} {
		value, err := n.Get(ctx, key) // the shortest way: GetResult looks closer
		if age := time.Since(f.bornOf(value)); err != nil || age > ttl {
			t.Errorf("%s: %q was served at an age of %v, at a TTL of %v (%v)", n.name, key, age, ttl, err)
		}
	}
}

// A holder that died, and a back-off, just before the clock is set back: Redis keeps both an hour longer. Neither may keep a
// key from being loaded.
func TestClockSetBackFreesLeases(t *testing.T) {
	server, clock := realtest.StartRedisWithClock(t, 0)
	f := newFarm(t, 1, overOne(server), refill.Config{TTL: time.Minute})
	n := f.nodes[0]
	const lockTTL, errorTTL = time.Second, time.Second // the defaults
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Second)
	defer cancel()
	for key, token := range map[string]string{"farm:dead": "dead#1", "farm:failed": "dead#2"} {
		b := refill.Bid{Key: key, Token: token, LeaseTTL: lockTTL, ClaimTTL: time.Minute, Ask: refill.AskLeft}
		if r, err := n.store.Begin(ctx, b); err != nil || r.State != refill.BeginTaken {
			t.Fatal(r, err)
		}
	}
	if err := n.store.Fail(ctx, "farm:failed", "dead#2", `{"text":"boom"}`, errorTTL); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	clock.Set(-time.Hour)
	if _, err := n.Get(ctx, "dead"); err != nil {
		t.Errorf("%v after the death of the holder: %v", time.Since(began), err)
	}
	eventually(t, "the back-off is over", func() bool { return time.Since(began) > errorTTL })
	if _, err := n.Get(context.Background(), "failed"); err != nil {
		t.Errorf("%v after the failure: %v", time.Since(began), err)
	}
}
