//go:build linux

package realtest_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/realtest"
)

// The tests of this file set the wall clock of Redis, because a test cannot set the clock of a Go process. refill is
// affected only by the difference between the clock of Redis and the clock of a node. So these tests also cover nodes
// with a wrong clock.

// timeOf returns the time that a server reports.
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

// The wall clocks of Redis and of the nodes differ by an hour. Each node must report the right age of a value, there
// must be one load per expiry, and an Invalidate must reach all nodes.
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

// The clock of Redis is 30 s ahead of the nodes, or behind them. Node A has loaded 50 keys. Node B then asks for all 50
// keys at once, in its first Gets. B must not judge the age of a value by the clock of its own machine, so B must get
// every key as fresh.
func TestFirstGetsOfANodeWithAWrongClock(t *testing.T) {
	for _, off := range []time.Duration{30 * time.Second, -30 * time.Second} {
		t.Run(fmt.Sprint(off), func(t *testing.T) {
			server, _ := realtest.StartRedisWithClock(t, off)
			clockIs(t, server, off)
			f := newFarm(t, 2, overOne(server), refill.Config{TTL: 20 * time.Second, StaleFor: time.Minute})
			a, b, ctx := f.nodes[0], f.nodes[1], context.Background()
			var first, second sync.WaitGroup
			for _, n := range []struct {
				*farmNode
				wg *sync.WaitGroup
			}{{a, &first}, {b, &second}} {
				for i := range 50 {
					n.wg.Go(func() {
						r, err := n.GetResult(ctx, fmt.Sprint("k", i))
						if fresh := n.farmNode == a || r.Outcome == refill.OutcomeShared; err != nil || !fresh {
							t.Errorf("%s: %v, %v, want shared", n.name, r.Outcome, err)
						}
					})
				}
				n.wg.Wait()
			}
			f.close(server)
		})
	}
}

// Under traffic, the clock of Redis is set forward or back by an hour, as a first NTP reply may do. No Get may fail,
// hang, or return a value that is too old. Each node may make at most two extra loads until it knows the new time.
// After that there must be one load per expiry.
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

// The clock of Redis is set back by an hour after two values were loaded. Redis then keeps these values an hour longer.
// No node may serve them after their TTL: neither a node that has a value in L1, nor a node that reads a value from
// Redis for the first time. Before that, each of the two nodes loads another key, and so learns the new time from the
// reply of Redis.
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
		value, err := n.Get(ctx, key) // not GetResult, because the fast path of Get checks less
		if age := time.Since(f.readAt(value)); err != nil || age > ttl {
			t.Errorf("%s: %q was served at an age of %v, at a TTL of %v (%v)", n.name, key, age, ttl, err)
		}
	}
}

// The clock of Redis is set back by an hour just after the holder of a lease has died and just after a load has
// failed. Redis keeps the lease and the back-off an hour longer. A Get of either key must still load at once.
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
	failed := driver.FailRequest{
		Key: "farm:failed", Token: "other#2", Failure: `{"text":"boom"}`, TTL: errorTTL, HoldAll: true,
	}
	if err := n.store.Fail(ctx, failed); err != nil {
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
