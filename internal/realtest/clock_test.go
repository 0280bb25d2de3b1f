//go:build linux

package realtest_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/realtest"
)

// This file sets the wall clock of Redis. The clock of a Go process cannot be changed from outside. But only the
// difference between the clocks of Redis and of the node counts, so this also covers nodes with a wrong clock.

// timeOf is the time of a server.
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
		t.Fatalf("the server's clock differs by %v from what it was set to", wrong)
	}
}

// The wall clocks of the nodes are an hour off. Ages and freshness are right on each, and there is one load per expiry.
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
				if age := time.Since(f.readAt(r.Value)); err != nil || (r.Age-age).Abs() > 250*time.Millisecond {
					t.Errorf("%s: age %v, want %v (%v)", n.name, r.Age, age, err)
				}
			}
			f.invalidateReachesAll("long")
			tr.end()
			f.close(server)
		})
	}
}

// The clock is set by an hour under traffic, as by a first NTP reply. No value is served past its bound, and no Get
// fails or hangs. Each node may load once more until it knows the new time. Then everything is as before.
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
				t.Errorf("%d loads, want at most two extra loads per node", n)
			}
			tr.end()
			f.close(server)
		})
	}
}

// A value that was loaded before the clock is set back must not live an hour longer. That holds for the L1 of a node
// that learns the new time from the load of another key. It also holds for a node that never read the value, although
// Redis keeps it an hour longer.
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
		if _, err := n.Get(ctx, "new-time-of-"+n.name); err != nil { // the reply to Acquire has the new time
			t.Fatal(err)
		}
		if off := time.Until(n.store.Now()) + time.Hour; off.Abs() > 10*time.Second {
			t.Fatalf("%s: the time of Redis is estimated wrong by %v", n.name, off)
		}
	}
	end := f.loadsOf("shared", f.base)[0].began.Add(ttl + ageSlack)
	eventually(t, "the values have expired", func() bool { return time.Now().After(end) })
	if left := (&goredisServer{server}).do(t, "pttl", redisKey("shared")).(int64); left < time.Minute.Milliseconds() {
		t.Fatalf("Redis keeps the old value for only %d ms: this test proves nothing", left)
	}
	for key, n := range map[string]*farmNode{"local": a, "shared": b} {
		value, err := n.Get(ctx, key) // the shortest path: GetResult checks more
		if age := time.Since(f.readAt(value)); err != nil || age > ttl {
			t.Errorf("%s: %q was served at an age of %v, at a TTL of %v (%v)", n.name, key, age, ttl, err)
		}
	}
}

// A holder dies, and a back-off begins, just before the clock is set back. Redis keeps both an hour longer. Neither may
// prevent a load of the key.
func TestClockSetBackFreesLeases(t *testing.T) {
	server, clock := realtest.StartRedisWithClock(t, 0)
	f := newFarm(t, 1, overOne(server), refill.Config{TTL: time.Minute})
	n := f.nodes[0]
	const lockTTL, errorTTL = time.Second, time.Second // the defaults
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Second)
	defer cancel()
	for key, token := range map[string]string{"farm:left": "other#1", "farm:failed": "other#2"} {
		b := driver.AcquireRequest{Key: key, Token: token, LeaseTTL: lockTTL, ClaimTTL: time.Minute, Mode: driver.Wait}
		if r, err := n.store.Acquire(ctx, b); err != nil || r.State != driver.Acquired {
			t.Fatal(r, err)
		}
	}
	if err := n.store.Fail(ctx, "farm:failed", "other#2", `{"text":"boom"}`, errorTTL); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	clock.Set(-time.Hour)
	if _, err := n.Get(ctx, "left"); err != nil {
		t.Errorf("%v after the death of the holder: %v", time.Since(began), err)
	}
	eventually(t, "the back-off has ended", func() bool { return time.Since(began) > errorTTL })
	if _, err := n.Get(context.Background(), "failed"); err != nil {
		t.Errorf("%v after the failure: %v", time.Since(began), err)
	}
}
