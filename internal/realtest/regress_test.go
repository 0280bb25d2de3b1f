//go:build unix

package realtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/internal/realtest"
)

// Each test of this file describes bugs of other libraries, and then shows that refill does not have these bugs. All
// these bugs show only with a real server. The root module tests the bugs that show without a server. Tests in other
// files of this package cover further bugs:
//
//	go-redis' SetNX: repeated after a lost reply, it reports our own lock as another's    TestGoredisLostReply
//	Redisson#2575, #4064: subscriptions are left behind                                   TestGoredisLeavesNothing
//	FusionCache, nginx, Laravel: waiters poll                                             TestWaitersDoNotPoll
//	redis/docs, rockscache: the lock key of a process that is killed stays                TestKilledLoader

// regressNode makes a Loader named thing with its own client. Every problem with the store fails the test.
func regressNode(
	t *testing.T, o *redis.Options, load func(context.Context, string) (string, error), cfg refill.Config,
) *refill.Loader[string] {
	t.Helper()
	c := redis.NewClient(o)
	t.Cleanup(func() { c.Close() })
	return regressLoader(t, c, load, cfg)
}

func regressLoader(
	t *testing.T, c redis.UniversalClient, load func(context.Context, string) (string, error), cfg refill.Config,
) *refill.Loader[string] {
	t.Helper()
	cfg.Shared = goredis.New(c)
	cfg.OnEvent = func(e refill.Event) {
		switch e.Kind {
		case refill.EventStoreError, refill.EventBadRecord, refill.EventLeaseLost:
			t.Errorf("%v of %q: %v", e.Kind, e.Key, e.Err)
		}
	}
	l, err := refill.New("thing", load, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func regressGet(t *testing.T, l *refill.Loader[string], key string) string {
	t.Helper()
	v, err := l.Get(t.Context(), key)
	if err != nil {
		t.Errorf("%q: %v", key, err)
	}
	return v
}

// The lock of rockscache has no EXPIRE, so a crash leaves its key for ever. Rockscache also calls WAIT with
// nanoseconds instead of milliseconds. go-redis/cache turns a TTL below a second into an hour. Here every key that
// refill stores in Redis must have a TTL of the right length.
func TestRegressEveryKeyHasATTL(t *testing.T) {
	server := realtest.StartRedis(t)
	o := &redis.Options{Addr: server.Addr()}
	loading, goOn := make(chan struct{}), make(chan struct{})
	l := regressNode(t, o, func(ctx context.Context, key string) (string, error) {
		switch key {
		case "running":
			close(loading)
			<-goOn
		case "failed":
			return "", errors.New("boom")
		case "panicked":
			panic("ouch")
		case "absent":
			return "", refill.ErrNotFound
		case "short":
			refill.FillFrom(ctx).SetTTL(300 * time.Millisecond)
		}
		return key, nil
	}, refill.Config{
		TTL: 10 * time.Minute, NotFoundTTL: time.Minute, ErrorTTL: 20 * time.Second, LockTTL: 5 * time.Second,
		LoadTimeout: 40 * time.Second, Jitter: -1,
	})
	c := redis.NewClient(o)
	defer c.Close()
	jobs, err := refill.NewLocker("job", goredis.New(c), refill.LockConfig{TTL: 15 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	lock, err := jobs.Lock(t.Context(), "held")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { regressGet(t, l, "running") })
	<-loading
	for _, key := range []string{"stored", "failed", "panicked", "absent", "short"} {
		_, _ = l.Get(t.Context(), key)
	}
	p := goredisPrefix("refill")
	for key, want := range map[string]struct{ least, most time.Duration }{
		p.key("thing:stored", ""):         {9 * time.Minute, 10 * time.Minute},
		p.key("thing:absent", ""):         {30 * time.Second, time.Minute},
		p.key("thing:short", ""):          {-2, time.Second}, // -2 means that the key has expired
		p.key("thing:failed", "/lease"):   {time.Second, 20 * time.Second},
		p.key("thing:panicked", "/lease"): {time.Second, 20 * time.Second},
		p.key("thing:running", "/lease"):  {time.Millisecond, 5 * time.Second},
		p.key("thing:running", "/claim"):  {10 * time.Second, 45 * time.Second},
		p.key("job:held", "/lock"):        {time.Second, 15 * time.Second},
		p.key("job:held", "/fence"):       {time.Hour, 24 * time.Hour},
	} {
		if left := c.PTTL(t.Context(), key).Val(); left == -1 || left < want.least || left > want.most {
			t.Errorf("%s has a TTL of %v, want %v to %v", key, left, want.least, want.most)
		}
	}
	if n := c.DBSize(t.Context()).Val(); n > 9 {
		t.Errorf("%d keys, want only the nine above: %v", n, c.Keys(t.Context(), "*").Val())
	}
	close(goOn)
	wg.Wait()
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	ended := []string{p.key("thing:running", "/lease"), p.key("thing:running", "/claim"), p.key("job:held", "/lock")}
	for _, key := range ended {
		if n := c.Exists(t.Context(), key).Val(); n != 0 {
			t.Errorf("%s is left behind", key)
		}
	}
}

// rockscache computes the end of its lock by the clock of the client, rueidislock sends PXAT, and ShedLock (#231,
// #1439) compares the clocks of two machines. If the compared clocks differ, a lock ends at once or lasts for hours.
// Here the clock of Redis is an hour off, and every TTL must still be right.
func TestRegressClockOfTheClient(t *testing.T) {
	for _, off := range []time.Duration{-time.Hour, time.Hour} {
		t.Run(off.String(), func(t *testing.T) {
			server := miniredis.RunT(t)
			server.SetTime(time.Now().Add(off))
			loading, goOn := make(chan struct{}), make(chan struct{})
			var loads atomic.Int64
			load := func(context.Context, string) (string, error) {
				if loads.Add(1) == 1 {
					close(loading)
					<-goOn
				}
				return "v", nil
			}
			cfg := refill.Config{TTL: 10 * time.Minute, LoadTimeout: time.Minute, Jitter: -1}
			o := &redis.Options{Addr: server.Addr()}
			a, b := regressNode(t, o, load, cfg), regressNode(t, o, load, cfg)
			var wg sync.WaitGroup
			wg.Go(func() { regressGet(t, a, "k") })
			select {
			case <-loading:
			case <-time.After(10 * time.Second):
				t.Fatal("no load began: every lease ends at once")
			}
			wg.Go(func() { regressGet(t, b, "k") }) // b waits for a's load, or finds its value
			checkTTLs := func() {
				for _, key := range server.Keys() {
					if left := server.TTL(key); left <= 0 || left > 10*time.Minute {
						t.Errorf("%s has a TTL of %v", key, left)
					}
				}
			}
			checkTTLs()
			close(goOn)
			wg.Wait()
			checkTTLs()
			late := regressNode(t, o, load, cfg)
			for _, l := range []*refill.Loader[string]{a, b, late, late} {
				if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Age > time.Minute || r.Remaining < 9*time.Minute {
					t.Errorf("%+v, %v", r, err)
				}
			}
			if n := loads.Load(); n != 1 {
				t.Errorf("%d loads, want 1", n)
			}
		})
	}
}

// jetcache-go and go-zero ("*"), rueidisaside ("rueidisid:") and redcache ("__redcache:lock:") mistake some values
// of users for their own placeholders. Here values look like placeholders, records, announcements or protocol of
// refill and of these libraries. Every Get must return the value unchanged.
func TestRegressValueLikeAPlaceholderOnTheWire(t *testing.T) {
	server := realtest.StartRedis(t)
	o := &redis.Options{Addr: server.Addr()}
	values := []string{
		"", "*", "!", `!{"node":"x","text":"boom"}`, "host-000000000000#1", "RF1", "RN1 i 0 0 7 thing:0", "\x00",
		"\r\n$-1\r\n", "rueidisid:1", "__redcache:lock:1", strings.Repeat("RF1\x00", 2000),
	}
	var loads atomic.Int64
	load := func(_ context.Context, key string) (string, error) {
		loads.Add(1)
		var i int
		_, err := fmt.Sscan(key, &i)
		return values[i], err
	}
	cfg := refill.Config{TTL: time.Hour, StaleFor: time.Hour}
	a, b := regressNode(t, o, load, cfg), regressNode(t, o, load, cfg)
	for i, value := range values {
		key := fmt.Sprint(i)
		for _, l := range []*refill.Loader[string]{a, b, a} {
			if v := regressGet(t, l, key); v != value {
				t.Errorf("%.30q, want %.30q", v, value)
			}
		}
		if err := errors.Join(a.Expire(t.Context(), key), b.Refresh(t.Context(), key)); err != nil {
			t.Error(err)
		}
		if v := regressGet(t, regressNode(t, o, load, cfg), key); v != value {
			t.Errorf("%.30q after Expire and Refresh, want %.30q", v, value)
		}
	}
	if n := loads.Load(); n != int64(2*len(values)) {
		t.Errorf("%d loads, want two per key", n)
	}
}

// Any lock over SET NX or SETNX has this bug if its client retries commands, as go-redis does by default: 1. The server
// sets the lock, and the reply is lost. 2. The client sends the command again, and the reply says that the lock is
// held. 3. The caller does not know that it holds the lock itself, so all callers wait until the lock ends. Here the
// reply to Acquire is lost, and the node must recognize its own lease and load.
func TestRegressOwnLockTakenForAnothers(t *testing.T) {
	server := realtest.StartRedis(t)
	proxy := realtest.StartProxy(t, server.Addr())
	load := func(context.Context, string) (string, error) { return "v", nil }
	cfg := refill.Config{TTL: time.Hour, LockTTL: time.Minute, LoadTimeout: time.Minute}
	l := regressNode(t, &redis.Options{Addr: proxy.Addr()}, load, cfg)
	regressGet(t, l, "warm") // this Get loads the scripts
	lost := proxy.LoseReply("eval")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if r, err := l.GetResult(ctx, "k"); err != nil || r.Outcome != refill.OutcomeLoaded {
		t.Errorf("%+v, %v", r, err)
	}
	<-lost
	c := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer c.Close()
	p := goredisPrefix("refill")
	if n := c.Exists(ctx, p.key("thing:k", "")).Val(); n != 1 {
		t.Error("the value was not stored")
	}
	if holder := c.Get(ctx, p.key("thing:k", "/lease")).Val(); holder != "" {
		t.Errorf("%q still has the lease", holder)
	}
}

// In rueidis (#1010), a caller gives up before the server has read its command. The server executes the command
// later, so a lock is held although no caller knows of it. Here a TryLock times out on a frozen server. After the
// thaw the lock must be free long before its TTL ends.
func TestRegressLockAcquiredAfterItsCallerLeft(t *testing.T) {
	server := realtest.StartRedis(t)
	c := redis.NewClient(&redis.Options{Addr: server.Addr(), MaxRetries: -1})
	defer c.Close()
	store := goredis.New(c)
	jobs, err := refill.NewLocker("job", store, refill.LockConfig{TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	take := func(ctx context.Context) error {
		lock, err := jobs.TryLock(ctx, "k")
		if err != nil {
			return err
		}
		return lock.Release(context.Background())
	}
	if err := take(t.Context()); err != nil { // this call connects, and loads the scripts
		t.Fatal(err)
	}
	server.Freeze()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := take(ctx); err == nil || errors.Is(err, refill.ErrLocked) {
		t.Errorf("TryLock on a silent server: %v", err)
	}
	server.Thaw()
	// eventually waits 10 s, which is more than TTL/20 of the lock and less than TTL.
	eventually(t, "the lock is free again", func() bool { return take(context.Background()) == nil })
}

// replicate/go reads cache:fresh:k, cache:data:k and cache:negative:k in one command, and rockscache uses many keys
// in one script. A cluster answers such calls with CROSSSLOT. Other libraries fail if the user's key contains
// braces. Here every operation must work in a cluster, with unusual keys and with keys of many slots.
func TestRegressSlotsOfACluster(t *testing.T) {
	c := overCluster(t).open(t)
	var loads atomic.Int64
	load := func(_ context.Context, key string) (string, error) {
		loads.Add(1)
		return "of " + key, nil
	}
	cfg := refill.Config{TTL: time.Hour, StaleFor: time.Hour}
	a, b := regressLoader(t, c, load, cfg), regressLoader(t, c, load, cfg)
	keys := []string{
		"k", "{a}k", "}{", "{", "{}", "a{b}c{d}", "\x00", "a b", "a\r\nb", ":", "/lease:k", "/claim:k", "lease:k",
		strings.Repeat("x", 3000),
	}
	ctx := t.Context()
	for round := range 2 {
		for _, key := range keys {
			for _, l := range []*refill.Loader[string]{a, b} {
				if v := regressGet(t, l, key); v != "of "+key {
					t.Errorf("%.20q: %.20q", key, v)
				}
			}
		}
		if n := int(loads.Load()); n != (1+round)*len(keys) {
			t.Errorf("%d loads of %d keys", n, len(keys))
		}
		if err := a.Invalidate(ctx, keys...); err != nil { // these keys have many slots
			t.Error(err)
		}
		for _, key := range keys {
			eventually(t, "the other node has the announcement", func() bool { _, found := b.Peek(ctx, key); return !found })
		}
	}
	if err := errors.Join(a.Refresh(ctx, keys...), b.Expire(ctx, keys...)); err != nil {
		t.Error(err)
	}
	jobs, err := refill.NewLocker("thing", goredis.New(c), refill.LockConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		lock, err := jobs.TryLock(ctx, key)
		if err != nil {
			t.Errorf("%.20q: %v", key, err)
			continue
		}
		if err := lock.Release(ctx); err != nil {
			t.Errorf("%.20q: %v", key, err)
		}
	}
}

// gocache's Clear is FLUSHALL, which also deletes the keys of other programs. Other libraries use KEYS to find the
// keys to delete, which blocks the server. Here no operation may touch a key of another program, or a key with
// another prefix.
func TestRegressFlushAll(t *testing.T) {
	server := realtest.StartRedis(t)
	o := &redis.Options{Addr: server.Addr()}
	c := redis.NewClient(o)
	defer c.Close()
	ctx := t.Context()
	foreign := []string{"session:1", "thing:k", "refill", "refill:mine", "refill:{1}:other:k", "refill2:{1}:thing:k"}
	for _, key := range foreign {
		c.Set(ctx, key, "theirs", 0)
	}
	server.ResetStats(t)
	load := func(_ context.Context, key string) (string, error) { return key, nil }
	l := regressNode(t, o, load, refill.Config{TTL: time.Hour, StaleFor: time.Hour})
	regressGet(t, l, "k")
	if err := errors.Join(l.Refresh(ctx, "k"), l.Expire(ctx, "k"), l.Invalidate(ctx, "k"), l.Close()); err != nil {
		t.Error(err)
	}
	calls := server.Commandstats(t)
	for _, command := range []string{"flushall", "flushdb", "keys", "scan", "rename", "unlink"} {
		if calls[command] != 0 {
			t.Errorf("%d calls of %s", calls[command], command)
		}
	}
	for _, key := range foreign {
		if v := c.Get(ctx, key).Val(); v != "theirs" {
			t.Errorf("%s: %q", key, v)
		}
	}
	if n := c.DBSize(ctx).Val(); n != int64(len(foreign)) {
		t.Errorf("%d keys, want %d: %v", n, len(foreign), c.Keys(ctx, "*").Val())
	}
}

// In FusionCache (#608), every cache of a process opens its own connections, so a fleet runs out of connections.
// Here ten Loaders and a Locker over one Store must share one subscription.
func TestRegressSubscriptionPerCache(t *testing.T) {
	server := realtest.StartRedis(t)
	c := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer c.Close()
	store := goredis.New(c)
	for i := range 10 {
		up := make(chan struct{})
		cfg := refill.Config{TTL: time.Hour, Shared: store, OnEvent: func(e refill.Event) {
			if e.Kind == refill.EventStoreUp {
				close(up)
			}
		}}
		l, err := refill.New[string](fmt.Sprint("thing", i), nil, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		<-up
	}
	jobs, err := refill.NewLocker("job", store, refill.LockConfig{})
	if err != nil {
		t.Fatal(err)
	}
	held, err := jobs.TryLock(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := jobs.Lock(ctx, "k"); !errors.Is(err, refill.ErrLocked) { // waits over the subscription
		t.Error(err)
	}
	if n := c.PubSubNumSub(t.Context(), "refill:notes").Val()["refill:notes"]; n != 1 {
		t.Errorf("%d subscriptions, want 1", n)
	}
	if err := held.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
