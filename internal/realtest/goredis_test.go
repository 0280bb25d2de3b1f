//go:build unix

package realtest_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/realtest"
)

// The tests of this file check what goredis promises beyond driver.Store: its commands on the wire, its behaviour
// when the server fails, and that it leaves nothing behind.

const goredisTimeout = 250 * time.Millisecond // the default StoreTimeout

func goredisOn(t testing.TB, o *redis.Options) (*goredis.Store, *redis.Client) {
	t.Helper()
	c := redis.NewClient(o)
	t.Cleanup(func() { c.Close() })
	s := goredis.New(c)
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	return s, c
}

func goredisRecord(t testing.TB, token, payload string) []byte {
	t.Helper()
	now := time.Now()
	r := driver.Record{Token: token, LoadBegan: now, FreshUntil: now.Add(time.Minute), Payload: []byte(payload)}
	b, err := r.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// goredisStep is a call of one method of a Store.
type goredisStep struct {
	name string
	call func(ctx context.Context, s *goredis.Store) error
}

// goredisAcquire returns a step that calls Acquire for product:42.
func goredisAcquire(b driver.AcquireRequest) func(context.Context, *goredis.Store) error {
	b.Key, b.LeaseTTL, b.ClaimTTL = "product:42", time.Minute, time.Minute
	return func(ctx context.Context, s *goredis.Store) error {
		_, err := s.Acquire(ctx, b)
		return err
	}
}

// goredisMustAcquire acquires a lease, and fails the test if another token holds that lease.
func goredisMustAcquire(t testing.TB, s *goredis.Store, key, token string) {
	t.Helper()
	b := driver.AcquireRequest{Key: key, Token: token, LeaseTTL: time.Minute, ClaimTTL: time.Minute, Mode: driver.Wait}
	if r, err := s.Acquire(context.Background(), b); err != nil || r.State != driver.Acquired {
		t.Fatal(r, err)
	}
}

func goredisSteps(t testing.TB) []goredisStep {
	const key, token = "product:42", "a#1"
	record := goredisRecord(t, token, "x")
	return []goredisStep{
		{"Get", func(ctx context.Context, s *goredis.Store) error { _, err := s.Get(ctx, key); return err }},
		{"Acquire", goredisAcquire(driver.AcquireRequest{Token: token, Mode: driver.Try})},
		{"Acquire again", goredisAcquire(driver.AcquireRequest{Token: token, Mode: driver.Wait})},
		{"Acquire held, try", goredisAcquire(driver.AcquireRequest{Token: "b#1", Mode: driver.Try})},
		{"Acquire held, first wait", goredisAcquire(driver.AcquireRequest{Token: "b#1", Mode: driver.Wait})},
		{"Acquire held, waiter registered", goredisAcquire(driver.AcquireRequest{Token: "b#2", Mode: driver.Force})},
		{"Renew", func(ctx context.Context, s *goredis.Store) error {
			_, err := s.Renew(ctx, time.Minute, driver.Lease{Key: key, Token: token})
			return err
		}},
		{"Publish", func(ctx context.Context, s *goredis.Store) error {
			_, err := s.Publish(ctx, driver.PublishRequest{Key: key, Token: token, Record: record, Keep: time.Minute})
			return err
		}},
		{"Acquire, value changed", goredisAcquire(driver.AcquireRequest{Token: "b#3", Mode: driver.Wait})},
		{"Acquire, value seen", goredisAcquire(driver.AcquireRequest{Token: token, Seen: token, Mode: driver.Wait})},
		{"Fail", func(ctx context.Context, s *goredis.Store) error {
			return s.Fail(ctx, driver.FailRequest{Key: key, Token: token, Failure: "boom", TTL: time.Second, HoldAll: true})
		}},
		{"Release", func(ctx context.Context, s *goredis.Store) error { return s.Release(ctx, key, token) }},
		{"Invalidate", func(ctx context.Context, s *goredis.Store) error {
			return s.Invalidate(ctx, token, key, "product:43")
		}},
		{"Expire", func(ctx context.Context, s *goredis.Store) error { return s.Expire(ctx, token, key, "product:43") }},
		{"GetMany", func(ctx context.Context, s *goredis.Store) error {
			_, err := s.GetMany(ctx, key, "product:43", "product:44")
			return err
		}},
		{"EnsureTags", func(ctx context.Context, s *goredis.Store) error {
			return s.EnsureTags(ctx, time.Minute, time.Minute, "product:red")
		}},
		{"EnsureTags, longer", func(ctx context.Context, s *goredis.Store) error {
			return s.EnsureTags(ctx, time.Minute, time.Hour, "product:red")
		}},
		{"EnsureTags, nothing to do", func(ctx context.Context, s *goredis.Store) error {
			return s.EnsureTags(ctx, time.Minute, time.Minute, "product:red")
		}},
		{"Tags", func(ctx context.Context, s *goredis.Store) error {
			_, err := s.Tags(ctx, "product:red", "product:blue")
			return err
		}},
		{"InvalidateTags", func(ctx context.Context, s *goredis.Store) error {
			return s.InvalidateTags(ctx, token, time.Minute, "product:red", "product:blue")
		}},
		{"ExpireTags", func(ctx context.Context, s *goredis.Store) error {
			return s.ExpireTags(ctx, token, time.Minute, "product:red")
		}},
		{"TryLock", func(ctx context.Context, s *goredis.Store) error {
			_, err := s.TryLock(ctx, key, token, time.Minute)
			return err
		}},
		{"Extend", func(ctx context.Context, s *goredis.Store) error {
			_, err := s.Extend(ctx, key, token, time.Minute)
			return err
		}},
		{"Unlock", func(ctx context.Context, s *goredis.Store) error {
			_, err := s.Unlock(ctx, key, token)
			return err
		}},
	}
}

// Each step must cost exactly the commands in want.
func TestGoredisCommandsPerStep(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	steps := goredisSteps(t)
	for _, step := range steps { // the first calls also load the scripts and read the clock
		if err := step.call(ctx, s); err != nil {
			t.Fatal(step.name, err)
		}
	}
	c.FlushAll(ctx)
	want := map[string]map[string]int64{
		"Get":                             {"get": 1},
		"Acquire":                         {"set": 2, "evalsha": 1, "mget": 1, "time": 1},
		"Acquire again":                   {"evalsha": 1, "mget": 1}, // the token already has lease and claim
		"Acquire held, try":               {"set": 1},
		"Acquire held, first wait":        {"evalsha": 1, "mget": 1, "pttl": 1, "append": 1},
		"Acquire held, waiter registered": {"evalsha": 1, "mget": 1, "pttl": 1}, // the lease already has its +
		"Acquire, value seen":             {"set": 2, "evalsha": 1, "mget": 1, "time": 1},
		"Acquire, value changed":          {"evalsha": 1, "mget": 1},
		"Renew":                           {"evalsha": 1, "mget": 1, "pexpire": 1},
		"Publish":                         {"evalsha": 1, "mget": 1, "del": 1, "set": 1, "publish": 1},
		"Invalidate":                      {"evalsha": 2, "del": 2, "publish": 2},
		"GetMany":                         {"get": 3},
		"EnsureTags":                      {"evalsha": 1, "mget": 1, "time": 1, "set": 1},
		// If the tag has a state in Redis, the script reads the state and its TTL, and sets the TTL only if the TTL
		// must be longer.
		"EnsureTags, longer":        {"evalsha": 1, "mget": 1, "pttl": 1, "pexpire": 1},
		"EnsureTags, nothing to do": {"evalsha": 1, "mget": 1, "pttl": 1},
		"Tags":                      {"get": 2},
		"InvalidateTags":            {"evalsha": 2, "time": 2, "mget": 2, "pttl": 1, "del": 2, "set": 2, "publish": 2},
		"ExpireTags":                {"evalsha": 1, "time": 1, "mget": 1, "pttl": 1, "del": 1, "set": 1, "publish": 1},
		"TryLock":                   {"evalsha": 1, "mget": 2, "set": 2, "time": 1},
		"Extend":                    {"evalsha": 1, "mget": 1, "pexpire": 1},
		"Unlock":                    {"evalsha": 1, "mget": 1, "del": 1, "publish": 1},
	}
	for _, step := range steps {
		server.ResetStats(t)
		if err := step.call(ctx, s); err != nil {
			t.Fatal(step.name, err)
		}
		if got := server.Commandstats(t); want[step.name] != nil && !maps.Equal(got, want[step.name]) {
			t.Errorf("%s: %v, want %v", step.name, got, want[step.name])
		}
	}
}

// The test stores tag states that other nodes, other clocks or other tools may leave, and then changes each tag. The
// suite in refilltest cannot store such states.
func TestGoredisTagStates(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	const tag, life = "product:red", time.Minute
	stateKey := goredisPrefix("refill").key(tag, "/tag")
	now := func() int64 { return c.Time(ctx).Val().UnixMicro() }
	start, second := now(), time.Second.Microseconds()
	ensure := func() error { return s.EnsureTags(ctx, 10*time.Second, life, tag) }
	invalidate := func() error { return s.InvalidateTags(ctx, "a#1", life, tag) }
	expire := func() error { return s.ExpireTags(ctx, "a#1", life, tag) }
	const isNow, isReach = -1, -2
	for _, x := range []struct {
		name        string
		before      string
		ttl         time.Duration
		do          func() error
		invalidated int64 // µs since 1970, or isNow, or isReach
		expired     int64 // µs since 1970, or isNow
	}{
		{"ensured", "5 7", life / 2, ensure, 5, 7},
		{"ensured, clock set back", fmt.Sprint(start+3600*second, " 0"), life, ensure, start + 3600*second, 0},
		{"ensured, no TTL", "5 7", 0, ensure, isReach, 0},
		{"invalidated", "5 7", life / 2, invalidate, isNow, 7},
		{"invalidated, no TTL", "5 7", 0, invalidate, isNow, 0},
		{"expired", "5 7", life / 2, expire, 5, isNow},
		{"expired, no TTL", "5 7", 0, expire, isNow, isNow},
		{"invalidated, clock stepped back", fmt.Sprint(start+second*9/10, " 7"), life, invalidate, start + second*9/10, 7},
		{"expired, clock stepped back", fmt.Sprint("5 ", start+second*9/10), life, expire, 5, start + second*9/10},
		{"invalidated, clock set back", fmt.Sprint(start+60*second, " 7"), life, invalidate, isNow, 7},
		{"expired, clock set back", fmt.Sprint("5 ", start+60*second), life, expire, 5, isNow},
		{"three numbers", "5 7 9", life, ensure, isReach, 0},
		{"leading zero", "05 7", life, invalidate, isNow, 0},
		{"too large", "9000000000000000 0", life, ensure, isReach, 0},
		{"far too large", strings.Repeat("9", 400) + " 0", life, ensure, isReach, 0},
		{"fraction", "5.5 0", life, ensure, isReach, 0},
		{"empty", "", life, ensure, isReach, 0},
	} {
		if err := c.Set(ctx, stateKey, x.before, x.ttl).Err(); err != nil {
			t.Fatal(err)
		}
		begin := now()
		if err := x.do(); err != nil {
			t.Errorf("%s: %v", x.name, err)
		}
		end := now()
		got, left := c.Get(ctx, stateKey).Val(), c.PTTL(ctx, stateKey).Val()
		var invalidated, expired int64
		if n, err := fmt.Sscanf(got, "%d %d", &invalidated, &expired); n != 2 || err != nil {
			t.Fatalf("%s: the tag state is %q", x.name, got)
		}
		is := func(got, want int64) bool {
			switch want {
			case isNow:
				return got >= begin && got <= end
			case isReach:
				return got >= begin-10*second && got <= end-10*second
			}
			return got == want
		}
		if !is(invalidated, x.invalidated) || !is(expired, x.expired) || left <= life-10*time.Second || left > life {
			t.Errorf("%s: %q became %q with a TTL of %v; the clock was %d", x.name, x.before, got, left, end)
		}
		if state, err := s.Tags(ctx, tag); err != nil || !state[0].Known {
			t.Errorf("%s: %+v, %v", x.name, state, err)
		}
	}
}

// On a full Redis, InvalidateTags must work. Otherwise the old tag state would stay, and values that must be invalid
// would stay valid. EnsureTags with a longer TTL for a known tag must work as well.
func TestGoredisTagStatesOnAFullServer(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	if err := s.EnsureTags(ctx, time.Hour, time.Minute, "product:red", "product:blue"); err != nil {
		t.Fatal(err)
	}
	began := c.Time(ctx).Val()
	if err := c.ConfigSet(ctx, "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	if err := s.EnsureTags(ctx, time.Hour, time.Hour, "product:blue"); err != nil {
		t.Error("EnsureTags of a tag that is known:", err)
	}
	if err := s.EnsureTags(ctx, time.Hour, time.Hour, "product:green"); err == nil {
		t.Error("EnsureTags of a tag that is not known gives no error")
	}
	if err := s.InvalidateTags(ctx, "a#1", time.Minute, "product:red"); err != nil {
		t.Error("InvalidateTags:", err)
	}
	states, err := s.Tags(ctx, "product:red", "product:green")
	if err != nil || states[0].Known && states[0].Invalidated.Before(began) || states[1].Known {
		t.Errorf("%+v, %v", states, err)
	}
}

// GetMany must return an error, not a miss, if the client may not read one of the keys. A value of a foreign type, for
// instance a list, must be a miss and must not affect other keys.
func TestGoredisStoreGetMany(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	var all []string
	for i := range 1000 {
		all = append(all, fmt.Sprint("product:", i))
		c.Set(ctx, goredisPrefix("refill").key(all[i], ""), all[i], time.Minute)
	}
	foreign := goredisPrefix("refill").key("product:500", "")
	c.Del(ctx, foreign)
	c.RPush(ctx, foreign, "garbage")
	server.ResetStats(t)
	records, err := s.GetMany(ctx, all...)
	if err != nil || len(records) != len(all) {
		t.Fatal(len(records), err)
	}
	if got := server.Commandstats(t); got["time"] != 1 {
		t.Errorf("the first GetMany did not sample the clock: %v", got)
	}
	for i, r := range records {
		if want := all[i]; string(r) != want && (i != 500 || r != nil) {
			t.Errorf("record %d is %q, want %q", i, r, want)
		}
	}
	if err := c.Do(ctx, "acl", "setuser", "default", "resetkeys", "~*product*:1").Err(); err != nil {
		t.Fatal(err)
	}
	if records, err := s.GetMany(ctx, "product:1", "product:2", "product:10"); err == nil {
		t.Errorf("%q although one key may not be read", records)
	}
	err = s.InvalidateTags(ctx, "a#1", time.Minute, "product:2", "product:1", "product:3")
	if err == nil || !strings.Contains(err.Error(), "2 of 3 keys") {
		t.Error(err)
	}
	if states, err := s.Tags(ctx, "product:1"); err != nil || !states[0].Known {
		t.Errorf("one tag that failed kept another from being invalidated: %+v, %v", states, err)
	}
}

func TestGoredisScriptsAreSentAgain(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	many := make([]string, 300)
	for i := range many {
		many[i] = fmt.Sprint("product:", i)
		c.Set(ctx, goredisPrefix("refill").key(many[i], ""), goredisRecord(t, "a#1", "x"), time.Minute)
	}
	for _, step := range goredisSteps(t) {
		c.ScriptFlush(ctx)
		if err := step.call(ctx, s); err != nil {
			t.Error(step.name, err)
		}
	}
	for _, invalidate := range []func(context.Context, string, ...string) error{s.Expire, s.Invalidate} {
		c.ScriptFlush(ctx)
		if err := invalidate(ctx, "a#1", many...); err != nil {
			t.Error(err)
		}
	}
	for _, key := range many {
		if n := c.Exists(ctx, goredisPrefix("refill").key(key, "")).Val(); n != 0 {
			t.Fatal(key, "still exists")
		}
	}
}

// A new Store uses each script for the first time, on a server that does not know the script. In this first round, each
// call must need one round trip, so no call may get the error NOSCRIPT. In the second round, the Store must send only
// the hashes of scripts. Before the third round the server forgets all scripts (SCRIPT FLUSH). In the third round only
// one call may get NOSCRIPT.
func TestGoredisFirstUseOfAScript(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	many := make([]string, 300)
	for i := range many {
		many[i] = fmt.Sprint("product:", i)
	}
	refused := func() (n int) {
		_, count, _ := strings.Cut(c.Info(ctx, "errorstats").Val(), "errorstat_NOSCRIPT:count=")
		_, _ = fmt.Sscan(count, &n)
		return n
	}
	steps := append(goredisSteps(t), goredisStep{"Invalidate many", func(ctx context.Context, s *goredis.Store) error {
		return s.Invalidate(ctx, "a#1", many...)
	}})
	for round, want := range []int{0, 0, 1} {
		if round == 2 {
			c.ScriptFlush(ctx)
		}
		c.FlushAll(ctx)
		got := 0
		for _, step := range steps {
			server.ResetStats(t)
			if err := step.call(ctx, s); err != nil {
				t.Fatal(step.name, err)
			}
			if n := server.Commandstats(t)["eval"]; round == 1 && n > 0 {
				t.Errorf("%s sends the source of a known script %d times", step.name, n)
			}
			got += refused()
		}
		if got != want {
			t.Errorf("round %d: the server was asked %d times for a script that it does not know, want %d", round, got, want)
		}
	}
}

func TestGoredisInvalidateReportsHowManyFailed(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	if err := c.Do(ctx, "acl", "setuser", "default", "resetkeys", "~*product*:1", "~*product*:3").Err(); err != nil {
		t.Fatal(err)
	}
	err := s.Invalidate(ctx, "a#1", "product:1", "product:2", "product:3", "product:4")
	if err == nil || !strings.Contains(err.Error(), "2 of 4 keys") {
		t.Error(err)
	}
	if err := s.Invalidate(ctx, "a#1"); err != nil {
		t.Error("no keys:", err)
	}
}

// The server is frozen. Every call must return when its ctx ends, by a deadline or by cancel.
func TestGoredisSilentServer(t *testing.T) {
	for _, deadlines := range []bool{false, true} {
		for _, subscribed := range []bool{false, true} {
			t.Run(fmt.Sprintf("ContextTimeoutEnabled %v, subscribed %v", deadlines, subscribed), func(t *testing.T) {
				server := realtest.StartRedis(t)
				s, _ := goredisOn(t, &redis.Options{
					Addr: server.Addr(), ContextTimeoutEnabled: deadlines, ReadTimeout: time.Second, MaxRetries: -1,
				})
				steps := goredisSteps(t)
				for _, step := range steps {
					if err := step.call(context.Background(), s); err != nil {
						t.Fatal(step.name, err)
					}
				}
				before := runtime.NumGoroutine()
				if subscribed {
					e := goredisSubscribe(t, s, "product")
					e.next(driver.Subscribed)
				}
				server.Freeze()
				var wg sync.WaitGroup
				for _, step := range steps {
					wg.Go(func() {
						ctx, cancel := context.WithTimeout(context.Background(), goredisTimeout)
						defer cancel()
						goredisInTime(t, step, s, ctx, goredisTimeout+100*time.Millisecond, context.DeadlineExceeded)
						ctx, cancel = context.WithCancel(context.Background())
						time.AfterFunc(50*time.Millisecond, cancel)
						goredisInTime(t, step, s, ctx, 150*time.Millisecond, context.Canceled)
					})
				}
				wg.Wait()
				server.Thaw()
				eventually(t, "the goroutines left behind have ended", func() bool {
					return subscribed || runtime.NumGoroutine() <= before
				})
			})
		}
	}
}

func goredisInTime(
	t *testing.T, step goredisStep, s *goredis.Store, ctx context.Context, limit time.Duration, want error,
) {
	t.Helper()
	began := time.Now()
	err := step.call(ctx, s)
	if took := time.Since(began); took > limit || !errors.Is(err, want) {
		t.Errorf("%s: %v after %v, want %v within %v", step.name, err, took, want, limit)
	}
}

// The server executes Acquire, and the reply is lost. The client sends Acquire again. The second reply must say that
// the node has the lease.
func TestGoredisLostReply(t *testing.T) {
	server := realtest.StartRedis(t)
	proxy := realtest.StartProxy(t, server.Addr())
	s, _ := goredisOn(t, &redis.Options{Addr: proxy.Addr()})
	ctx := context.Background()
	if _, err := s.Get(ctx, "product:42"); err != nil {
		t.Fatal(err)
	}
	goredisMustAcquire(t, s, "product:warm", "a#1") // loads the script
	for i, mode := range []driver.Mode{driver.Try, driver.Wait, driver.Force} {
		key := fmt.Sprint("product:", i)
		b := driver.AcquireRequest{Key: key, Token: "a#1", LeaseTTL: time.Minute, ClaimTTL: time.Minute, Mode: mode}
		requests := []string{"evalsha"}
		if mode == driver.Try {
			requests = []string{"nx", "evalsha"}
		}
		for _, request := range requests {
			lost := proxy.LoseReply(request)
			if r, err := s.Acquire(ctx, b); err != nil || r.State != driver.Acquired {
				t.Errorf("Mode %d, reply to %s lost: %+v, %v, want Acquired", mode, request, r, err)
			}
			<-lost
			if err := s.Release(ctx, b.Key, b.Token); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// goredisSubscriber collects the announcements that a subscriber of a Store receives.
type goredisSubscriber struct {
	t        testing.TB
	received chan driver.Announcement
	stop     func()
}

func goredisSubscribe(t testing.TB, s driver.Store, name string) *goredisSubscriber {
	e := &goredisSubscriber{t: t, received: make(chan driver.Announcement, 1000)}
	e.stop = s.Subscribe(name, func(a driver.Announcement) { e.received <- a })
	t.Cleanup(e.stop)
	return e
}

// next returns the next announcement, and fails the test if this announcement has another kind.
func (e *goredisSubscriber) next(kind driver.AnnouncementKind) driver.Announcement {
	e.t.Helper()
	select {
	case a := <-e.received:
		if a.Kind != kind {
			e.t.Fatalf("received %+v, want kind %d", a, kind)
		}
		return a
	case <-time.After(10 * time.Second):
		e.t.Fatalf("received nothing, want kind %d", kind)
	}
	return driver.Announcement{}
}

func TestGoredisSubscriptionBreaks(t *testing.T) {
	breaks := map[string]func(t *testing.T, server *realtest.Redis, proxy *realtest.Proxy){
		"killed": func(t *testing.T, server *realtest.Redis, _ *realtest.Proxy) {
			c := redis.NewClient(&redis.Options{Addr: server.Addr()})
			defer c.Close()
			if n := c.ClientKillByFilter(context.Background(), "TYPE", "pubsub").Val(); n != 1 {
				t.Fatalf("%d subscriptions, want 1", n)
			}
		},
		"reset":      func(_ *testing.T, _ *realtest.Redis, proxy *realtest.Proxy) { proxy.Reset() },
		"restart":    func(_ *testing.T, server *realtest.Redis, _ *realtest.Proxy) { server.Restart() },
		"frozen":     func(_ *testing.T, server *realtest.Redis, _ *realtest.Proxy) { server.Freeze() },
		"black hole": func(_ *testing.T, _ *realtest.Redis, proxy *realtest.Proxy) { proxy.BlackHole() },
	}
	for name, harm := range breaks {
		t.Run(name, func(t *testing.T) {
			server := realtest.StartRedis(t)
			proxy := realtest.StartProxy(t, server.Addr())
			s, _ := goredisOn(t, &redis.Options{Addr: proxy.Addr()})
			e := goredisSubscribe(t, s, "product")
			e.next(driver.Subscribed)
			began := time.Now()
			harm(t, server, proxy)
			if a := e.next(driver.Disconnected); a.Err == nil {
				t.Error("Disconnected without an error")
			}
			if took := time.Since(began); took > 3*time.Second {
				t.Errorf("Disconnected only after %v", took)
			}
			server.Thaw()
			proxy.Heal()
			e.next(driver.Subscribed)
			if err := s.Invalidate(context.Background(), "a#1", "product:42"); err != nil {
				t.Fatal(err)
			}
			e.next(driver.Invalidated)
		})
	}
}

// Announcements must have exactly these bytes, because releases that are years apart may share a channel.
func TestGoredisAnnouncementsOnTheWire(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	raw := c.Subscribe(ctx, "refill:notes")
	defer raw.Close()
	if _, err := raw.Receive(ctx); err != nil {
		t.Fatal(err)
	}
	const key = "product:4 2"
	record := goredisRecord(t, "a#1", "x")
	acquire := func(token string) {
		t.Helper()
		goredisMustAcquire(t, s, key, token)
	}
	for _, step := range []struct {
		act  func() error
		want string
	}{
		{func() error {
			acquire("a#1")
			_, err := s.Publish(ctx, driver.PublishRequest{
				Key: key, Token: "a#1", Replaced: "b#22", Record: record, Keep: time.Minute,
			})
			return err
		}, "RN1 f 3 4 11 a#1b#22product:4 2" + string(record)},
		{func() error { return s.Expire(ctx, "a#2", key) }, "RN1 e 3 0 11 a#2product:4 2"},
		{func() error { return s.Invalidate(ctx, "", key) }, "RN1 i 0 0 11 product:4 2"},
		{func() error {
			acquire("a#3")
			return s.Fail(ctx, driver.FailRequest{Key: key, Token: "a#3", Failure: "boom"})
		}, "RN1 x 3 0 11 a#3product:4 2boom"},
		{func() error { acquire("a#4"); return s.Release(ctx, key, "a#4") }, "RN1 r 3 0 11 a#4product:4 2"},
		{func() error {
			if _, err := s.TryLock(ctx, key, "a#5", time.Minute); err != nil {
				return err
			}
			_, err := s.Unlock(ctx, key, "a#5")
			return err
		}, "RN1 u 3 0 11 a#5product:4 2"},
	} {
		if err := step.act(); err != nil {
			t.Fatal(err)
		}
		m, err := raw.ReceiveMessage(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if m.Payload != step.want {
			t.Errorf("got  %q\nwant %q", m.Payload, step.want)
		}
	}
}

// The subscriber takes 5 ms per announcement, and another node makes 900 announcements at once. So the announcement of
// this node's own Invalidate arrives some 4.5 s late. The subscription lags but works, so the Store must not report it
// as broken.
func TestGoredisSubscriptionThatLags(t *testing.T) {
	server := realtest.StartRedis(t)
	s, _ := goredisOn(t, &redis.Options{Addr: server.Addr()})
	other, _ := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx, events := t.Context(), make(chan driver.Announcement, 10)
	stop := s.Subscribe("product", func(a driver.Announcement) {
		if a.Key != "" {
			<-time.After(5 * time.Millisecond)
		}
		if a.Key == "" || a.Token == "own#1" {
			events <- a
		}
	})
	defer stop()
	if a := <-events; a.Kind != driver.Subscribed {
		t.Fatalf("received %+v, want Subscribed", a)
	}
	keys := make([]string, 900)
	for i := range keys {
		keys[i] = fmt.Sprint("product:", i)
	}
	if err := other.Invalidate(ctx, "b#1", keys...); err != nil {
		t.Fatal(err)
	}
	if err := s.Invalidate(ctx, "own#1", "product:42"); err != nil {
		t.Fatal(err)
	}
	if a := <-events; a.Kind != driver.Invalidated {
		t.Errorf("received %+v, want our own announcement", a)
	}
}

// The subscription is connected to another server than the other calls, as after a failover that the subscription has
// missed. Other nodes send announcements on that server all the time. The Store must report the subscription as broken
// nevertheless.
func TestGoredisSubscriptionAtTheWrongServer(t *testing.T) {
	right, wrong := realtest.StartRedis(t), realtest.StartRedis(t)
	var dials atomic.Int64
	s, _ := goredisOn(t, &redis.Options{
		Addr: right.Addr(), PoolSize: 1,
		Dialer: func(ctx context.Context, network, _ string) (net.Conn, error) {
			addr := right.Addr()
			if dials.Add(1) > 1 {
				addr = wrong.Addr()
			}
			return new(net.Dialer).DialContext(ctx, network, addr)
		},
	})
	ctx := t.Context()
	if _, err := s.Get(ctx, "product:42"); err != nil { // connects to the server of all other calls
		t.Fatal(err)
	}
	e := goredisSubscribe(t, s, "product")
	e.next(driver.Subscribed)
	if err := s.Invalidate(ctx, "own#1", "product:42"); err != nil {
		t.Fatal(err)
	}
	other, _ := goredisOn(t, &redis.Options{Addr: wrong.Addr()})
	eventually(t, "the subscription is called broken", func() bool {
		if err := other.Invalidate(ctx, "b#1", "product:43"); err != nil {
			t.Fatal(err)
		}
		for len(e.received) > 0 {
			if a := <-e.received; a.Kind == driver.Disconnected {
				return true
			}
		}
		return false
	})
}

func TestGoredisLateSubscriber(t *testing.T) {
	server := realtest.StartRedis(t)
	s, _ := goredisOn(t, &redis.Options{Addr: server.Addr()})
	goredisSubscribe(t, s, "product").next(driver.Subscribed)
	var received []driver.AnnouncementKind
	s.Subscribe("user", func(a driver.Announcement) { received = append(received, a.Kind) })()
	if !slices.Equal(received, []driver.AnnouncementKind{driver.Subscribed}) {
		t.Errorf("received %v before Subscribe returned, want Subscribed", received)
	}
}

// After the last subscriber has left, no goroutine and no connection may be left behind, even if the server is
// frozen.
func TestGoredisLeavesNothing(t *testing.T) {
	for _, name := range []string{"single", "deadlines", "cluster", "ring"} {
		for _, frozen := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, frozen %v", name, frozen), func(t *testing.T) {
				w := goredisWorlds[name](t)
				c := w.open(t)
				s, ctx := goredis.New(c), context.Background()
				if _, err := s.Get(ctx, "product:42"); err != nil {
					t.Fatal(err)
				}
				conns := func() (n int) {
					for _, server := range w.servers {
						n += server.connections(t)
					}
					return n
				}
				goroutines, connections := runtime.NumGoroutine(), conns()
				for range 3 {
					a, b := goredisSubscribe(t, s, "a"), goredisSubscribe(t, s, "b")
					a.next(driver.Subscribed)
					b.next(driver.Subscribed)
					s.Subscribe("c", func(driver.Announcement) {})()
					if _, err := s.Renew(ctx, time.Minute, driver.Lease{Key: "product:42", Token: "a#1"}); err != nil {
						t.Fatal(err)
					}
					_, stop := s.Watch("job:1")
					if frozen {
						for _, server := range w.servers {
							server.Freeze()
						}
					}
					began := time.Now()
					a.stop()
					stop()
					b.stop()
					b.stop()
					if took := time.Since(began); took > 200*time.Millisecond {
						t.Errorf("stop took %v", took)
					}
					for _, server := range w.servers {
						server.Thaw()
					}
				}
				began := time.Now()
				eventually(t, "the goroutines have ended", func() bool { return runtime.NumGoroutine() <= goroutines })
				if took := time.Since(began); took > 50*time.Millisecond {
					t.Errorf("goroutines lived %v longer than stop", took)
				}
				eventually(t, "the connections are closed", func() bool { return conns() <= connections })
			})
		}
	}
}

// The server is frozen, so the subscription is still connecting. The stop function of Subscribe must return at once.
func TestGoredisStopsWhileConnecting(t *testing.T) {
	server := realtest.StartRedis(t)
	s, _ := goredisOn(t, &redis.Options{Addr: server.Addr()})
	server.Freeze()
	before := runtime.NumGoroutine()
	for _, after := range []time.Duration{0, time.Millisecond, 20 * time.Millisecond, 300 * time.Millisecond} {
		stop := s.Subscribe("product", func(driver.Announcement) {})
		time.Sleep(after)
		began := time.Now()
		stop()
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("stop took %v, %v after Subscribe", took, after)
		}
	}
	eventually(t, "the goroutines have ended", func() bool { return runtime.NumGoroutine() <= before })
	server.Thaw()
}

// A command of the user occupies the only connection in the pool of the user's client. Renew and Extend must still
// work, over a connection of the Store.
func TestGoredisRenewsWhileThePoolIsFull(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr(), PoolSize: 1})
	goredisSubscribe(t, s, "product").next(driver.Subscribed)
	ctx, cancel := context.WithTimeout(context.Background(), goredisTimeout)
	defer cancel()
	go c.BLPop(context.Background(), 2*time.Second, "nothing")
	eventually(t, "the pool is used up", func() bool { s := c.PoolStats(); return s.TotalConns == 1 && s.IdleConns == 0 })
	if _, err := s.Get(ctx, "product:42"); err == nil {
		t.Error("Get found a connection")
	}
	ctx, cancel = context.WithTimeout(context.Background(), goredisTimeout)
	defer cancel()
	if _, err := s.Renew(ctx, time.Minute, driver.Lease{Key: "product:42", Token: "a#1"}); err != nil {
		t.Error(err)
	}
	if _, err := s.Extend(ctx, "job:1", "a#1", time.Minute); err != nil {
		t.Error(err)
	}
}

// Subscriptions begin and end while other goroutines renew a lock. No renewal may fail.
func TestGoredisRenewsWhileASubscriptionEnds(t *testing.T) {
	server := realtest.StartRedis(t)
	s, _ := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				if _, err := s.Extend(context.Background(), "job:1", "a#1", time.Minute); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 30 {
		e := goredisSubscribe(t, s, "product")
		e.next(driver.Subscribed)
		e.stop()
	}
	cancel()
	wg.Wait()
}

func TestGoredisUncontendedLockOpensNoSubscription(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	locker, err := refill.NewLocker("job", s, refill.LockConfig{})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	take := func() {
		lock, err := locker.Lock(ctx, "1")
		if err != nil {
			t.Fatal(err)
		}
		if err := lock.Release(ctx); err != nil {
			t.Fatal(err)
		}
	}
	take()
	received := func() string {
		_, after, _ := strings.Cut(c.Info(ctx, "stats").Val(), "total_connections_received:")
		n, _, _ := strings.Cut(after, "\r\n")
		return n
	}
	before := received()
	for range 100 {
		take()
	}
	if after := received(); after != before {
		t.Errorf("%s connections before, %s after", before, after)
	}
}

func TestGoredisWarns(t *testing.T) {
	master := realtest.StartRedis(t)
	host, port, _ := strings.Cut(master.Addr(), ":")
	server := realtest.StartRedis(t, "--maxmemory-policy", "volatile-ttl", "--replicaof", host, port)
	s, _ := goredisOn(t, &redis.Options{Addr: server.Addr()})
	for range 2 { // each subscription must report the warnings
		early := goredisSubscribe(t, s, "product")
		early.next(driver.Subscribed)
		texts := early.next(driver.Warning).Err.Error() + early.next(driver.Warning).Err.Error()
		late := goredisSubscribe(t, s, "user")
		late.next(driver.Subscribed)
		late.next(driver.Warning)
		late.next(driver.Warning)
		for _, word := range []string{"volatile-ttl", "replica"} {
			if !strings.Contains(texts, word) {
				t.Errorf("the warnings %q do not contain %s", texts, word)
			}
		}
		early.stop()
		late.stop()
	}
}

func TestGoredisClock(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	if off := time.Since(s.Now()).Abs(); off > time.Second {
		t.Errorf("off by %v before the first call", off)
	}
	server.ResetStats(t)
	for range 10 {
		if _, err := s.Get(ctx, "product:42"); err != nil {
			t.Fatal(err)
		}
	}
	if got := server.Commandstats(t); got["get"] != 10 || got["time"] != 1 {
		t.Errorf("%v, want 10 GET and one TIME", got)
	}
	for range 100 {
		before := s.Now()
		now := c.Time(ctx).Val()
		if after := s.Now(); now.Before(before.Add(-20*time.Millisecond)) || now.After(after.Add(20*time.Millisecond)) {
			t.Fatalf("Redis says %v between %v and %v", now, before, after)
		}
	}
}

// The server is full by maxmemory. A node must still be able to acquire lease and claim, in every mode of Acquire. If
// the node has both, the store must accept its value.
func TestGoredisFullServer(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	e := goredisSubscribe(t, s, "product")
	e.next(driver.Subscribed)
	goredisMustAcquire(t, s, "product:42", "a#1")
	c.ConfigSet(ctx, "maxmemory", "1")
	for _, mode := range []driver.Mode{driver.Try, driver.Wait, driver.Force} {
		for _, token := range []string{"a#1", "a#1", "b#1"} { // acquire, acquire again, acquire by another node
			b := driver.AcquireRequest{Key: "product:43", Token: token, LeaseTTL: time.Minute, ClaimTTL: time.Minute, Mode: mode}
			want := driver.Acquired
			if token != "a#1" {
				want = driver.Held
			}
			if r, err := s.Acquire(ctx, b); err != nil || r.State != want {
				t.Errorf("mode %d, %s on a full server: %+v, %v, want state %d", mode, token, r, err, want)
			}
		}
		if err := s.Release(ctx, "product:43", "a#1"); err != nil {
			t.Error(err)
		}
		e.next(driver.Released)
	}
	p := driver.PublishRequest{Key: "product:42", Token: "a#1", Record: goredisRecord(t, "a#1", "x"), Keep: time.Minute}
	if state, err := s.Publish(ctx, p); err != nil || state == driver.Rejected {
		t.Error(state, err)
	}
	e.next(driver.Filled)
	for _, key := range []string{"product:42", "product:44"} {
		if err := s.Invalidate(ctx, "a#2", key); err != nil {
			t.Error(err)
		}
		e.next(driver.Invalidated)
	}
	if n := c.DBSize(ctx).Val(); n != 0 {
		t.Errorf("%d keys are left behind", n)
	}
}

// A shard of a Ring is killed and then restarted. After the kill and after the restart, the Store must subscribe anew.
// At last the Store must receive the announcements of every shard.
func TestGoredisRingShardReturns(t *testing.T) {
	first, second := realtest.StartRedis(t), realtest.StartRedis(t)
	ring := redis.NewRing(&redis.RingOptions{
		Addrs:              map[string]string{"first": first.Addr(), "second": second.Addr()},
		HeartbeatFrequency: 50 * time.Millisecond,
	})
	t.Cleanup(func() { ring.Close() })
	s, ctx := goredis.New(ring), context.Background()
	e := goredisSubscribe(t, s, "product")
	e.next(driver.Subscribed)
	second.Kill()
	e.next(driver.Disconnected)
	e.next(driver.Subscribed) // to the shard that still runs
	second.Restart()
	e.next(driver.Disconnected)
	e.next(driver.Subscribed)
	for i := range 20 {
		if err := s.Invalidate(ctx, "a#1", fmt.Sprint("product:", i)); err != nil {
			t.Fatal(err)
		}
		e.next(driver.Invalidated)
	}
}

// The Store uses a Sentinel client, and the sentinels replace the master. The subscription must move to the new
// master, and renewals must work there.
func TestGoredisSentinelFailover(t *testing.T) {
	t.Parallel()
	sentinel, ctx := realtest.StartSentinel(t), context.Background()
	rdb := redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: sentinel.MasterName(), SentinelAddrs: sentinel.Addrs(),
	})
	t.Cleanup(func() { rdb.Close() })
	s := goredis.New(rdb)
	e := goredisSubscribe(t, s, "product")
	e.next(driver.Subscribed)
	next := redis.NewClient(&redis.Options{Addr: sentinel.Failover().Addr()})
	defer next.Close()
	eventually(t, "the client uses the new master", func() bool { return s.Invalidate(ctx, "a#1", "product:42") == nil })
	// The old master still acts as a master for some seconds, and answers PING. The Store publishes announcements to
	// itself to check its subscription. By this self-check it must notice that announcements do not arrive.
	began, received := time.Now(), []driver.AnnouncementKind{}
	eventually(t, "announcements of the new master arrive", func() bool {
		_ = s.Invalidate(ctx, "a#1", "product:42") // the loop repeats this call until its announcement arrives
		for len(e.received) > 0 {
			received = append(received, (<-e.received).Kind)
		}
		return slices.Contains(received, driver.Invalidated) &&
			next.PubSubNumSub(ctx, "refill:notes").Val()["refill:notes"] == 1
	})
	if took := time.Since(began); took > 6*time.Second || !slices.Contains(received, driver.Disconnected) {
		t.Errorf("after %v, received %v; want Disconnected, within 6 s", took, received)
	}
	goredisMustAcquire(t, s, "product:42", "a#1")
	lease := driver.Lease{Key: "product:42", Token: "a#1"}
	if mine, err := s.Renew(ctx, time.Minute, lease); err != nil || !mine[0] {
		t.Errorf("renewal at the new master: %v, %v", mine, err)
	}
}

// One shard of a Ring is frozen, and the test calls Renew for leases on all shards. Renew must return an error, and
// must report the leases on the other shards as renewed.
func TestGoredisRenewWithADeadShard(t *testing.T) {
	w := goredisWorlds["ring"](t)
	ring := w.open(t).(*redis.Ring)
	s := goredis.New(ring)
	goredisSubscribe(t, s, "product").next(driver.Subscribed) // renewals now use the Store's own clients
	var leases []driver.Lease
	frozen := map[string]bool{}
	for i := range 30 {
		l := driver.Lease{Key: fmt.Sprint("product:", i), Token: "a#1"}
		goredisMustAcquire(t, s, l.Key, l.Token)
		shard, err := ring.GetShardClientForKey(goredisPrefix("refill").key(l.Key, ""))
		if err != nil {
			t.Fatal(err)
		}
		frozen[l.Key] = shard.Options().Addr == w.servers[0].Addr()
		leases = append(leases, l)
	}
	w.servers[0].Freeze()
	defer w.servers[0].Thaw()
	ctx, cancel := context.WithTimeout(t.Context(), goredisTimeout)
	defer cancel()
	mine, err := s.Renew(ctx, time.Minute, leases...)
	if err == nil || len(mine) != len(leases) {
		t.Fatalf("%d results, %v, want an error and 30 results", len(mine), err)
	}
	for i, l := range leases {
		if mine[i] == frozen[l.Key] {
			t.Errorf("%s on a shard that is frozen (%v): renewed %v", l.Key, frozen[l.Key], mine[i])
		}
	}
}
