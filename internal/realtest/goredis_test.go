//go:build unix

package realtest_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/internal/realtest"
)

// This file is what goredis promises beyond refill.Store: on the wire, when the server misbehaves, and at the end.

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
	r := refill.Record{Token: token, LoadBegan: now, FreshUntil: now.Add(time.Minute), Payload: []byte(payload)}
	b, err := r.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// goredisStep is one call of every method of a Store.
type goredisStep struct {
	name string
	call func(ctx context.Context, s *goredis.Store) error
}

// goredisBid is a call of Begin for product:42.
func goredisBid(b refill.Bid) func(context.Context, *goredis.Store) error {
	b.Key, b.LeaseTTL, b.ClaimTTL = "product:42", time.Minute, time.Minute
	return func(ctx context.Context, s *goredis.Store) error {
		_, err := s.Begin(ctx, b)
		return err
	}
}

// goredisBegin begins a fill, which nothing may be in the way of.
func goredisBegin(t testing.TB, s *goredis.Store, key, token string) {
	t.Helper()
	b := refill.Bid{Key: key, Token: token, LeaseTTL: time.Minute, ClaimTTL: time.Minute, Ask: refill.AskLeft}
	if r, err := s.Begin(context.Background(), b); err != nil || r.State != refill.BeginTaken {
		t.Fatal(r, err)
	}
}

func goredisSteps(t testing.TB) []goredisStep {
	const key, token = "product:42", "a#1"
	record := goredisRecord(t, token, "x")
	return []goredisStep{
		{"Get", func(ctx context.Context, s *goredis.Store) error { _, err := s.Get(ctx, key); return err }},
		{"Begin once", goredisBid(refill.Bid{Token: token, Ask: refill.AskOnce})},
		{"Begin again", goredisBid(refill.Bid{Token: token, Ask: refill.AskLeft})},
		{"Begin lost once", goredisBid(refill.Bid{Token: "b#1", Ask: refill.AskOnce})},
		{"Begin lost first", goredisBid(refill.Bid{Token: "b#1", Ask: refill.AskLeft})},
		{"Begin lost", goredisBid(refill.Bid{Token: "b#2", Ask: refill.AskForce})},
		{"Renew", func(ctx context.Context, s *goredis.Store) error {
			_, err := s.Renew(ctx, key, token, time.Minute)
			return err
		}},
		{"Publish", func(ctx context.Context, s *goredis.Store) error {
			_, err := s.Publish(ctx, refill.Publication{Key: key, Token: token, Record: record, Keep: time.Minute})
			return err
		}},
		{"Begin other", goredisBid(refill.Bid{Token: "b#3", Ask: refill.AskLeft})},
		{"Begin left", goredisBid(refill.Bid{Token: token, Seen: token, Ask: refill.AskLeft})},
		{"Fail", func(ctx context.Context, s *goredis.Store) error { return s.Fail(ctx, key, token, "boom", time.Second) }},
		{"Release", func(ctx context.Context, s *goredis.Store) error { return s.Release(ctx, key, token) }},
		{"Invalidate", func(ctx context.Context, s *goredis.Store) error { return s.Invalidate(ctx, token, key, "product:43") }},
		{"Expire", func(ctx context.Context, s *goredis.Store) error { return s.Expire(ctx, token, key, "product:43") }},
		{"GetMany", func(ctx context.Context, s *goredis.Store) error {
			_, err := s.GetMany(ctx, key, "product:43", "product:44")
			return err
		}},
		{"HoldTags", func(ctx context.Context, s *goredis.Store) error {
			return s.HoldTags(ctx, time.Minute, time.Minute, "product:red")
		}},
		{"HoldTags again", func(ctx context.Context, s *goredis.Store) error {
			return s.HoldTags(ctx, time.Minute, time.Hour, "product:red")
		}},
		{"HoldTags in vain", func(ctx context.Context, s *goredis.Store) error {
			return s.HoldTags(ctx, time.Minute, time.Minute, "product:red")
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

// The numbers of design-review section 3, last row, or fewer.
func TestGoredisCommandsPerStep(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	steps := goredisSteps(t)
	for _, step := range steps { // scripts are loaded, a sample of the clock is there
		if err := step.call(ctx, s); err != nil {
			t.Fatal(step.name, err)
		}
	}
	c.FlushAll(ctx)
	want := map[string]map[string]int64{
		"Get":              {"get": 1},
		"Begin once":       {"set": 2, "evalsha": 1, "mget": 1, "time": 1},
		"Begin again":      {"evalsha": 1, "mget": 1}, // all is ours already
		"Begin lost once":  {"set": 1},
		"Begin lost first": {"evalsha": 1, "mget": 1, "pttl": 1, "append": 1},
		"Begin lost":       {"evalsha": 1, "mget": 1, "pttl": 1}, // the holder knows that somebody waits
		"Begin left":       {"set": 2, "evalsha": 1, "mget": 1, "time": 1},
		"Begin other":      {"evalsha": 1, "mget": 1},
		"Renew":            {"evalsha": 1, "mget": 1, "pexpire": 1},
		"Publish":          {"evalsha": 1, "mget": 1, "del": 1, "set": 1, "publish": 1},
		"Invalidate":       {"evalsha": 2, "del": 2, "publish": 2},
		"GetMany":          {"get": 3},
		"HoldTags":         {"evalsha": 1, "mget": 1, "time": 1, "set": 1},
		// Those who find a mark read it and its life, and write nothing that is not needed.
		"HoldTags again":   {"evalsha": 1, "mget": 1, "pttl": 1, "pexpire": 1},
		"HoldTags in vain": {"evalsha": 1, "mget": 1, "pttl": 1},
		"Tags":             {"get": 2},
		"InvalidateTags":   {"evalsha": 2, "time": 2, "mget": 2, "pttl": 1, "del": 2, "set": 2, "publish": 2},
		"ExpireTags":       {"evalsha": 1, "time": 1, "mget": 1, "pttl": 1, "del": 1, "set": 1, "publish": 1},
		"TryLock":          {"evalsha": 1, "mget": 2, "set": 2, "time": 1},
		"Extend":           {"evalsha": 1, "mget": 1, "pexpire": 1},
		"Unlock":           {"evalsha": 1, "mget": 1, "del": 1, "publish": 1},
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

// What the suite cannot plant: marks as other nodes, other clocks and other tools leave them.
func TestGoredisStoreMarks(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	const tag, life = "product:red", time.Minute
	mark := goredisPrefix("refill").key(tag, "/tag")
	now := func() int64 { return c.Time(ctx).Val().UnixMicro() }
	start, second := now(), time.Second.Microseconds()
	hold := func() error { return s.HoldTags(ctx, 10*time.Second, life, tag) }
	invalidate := func() error { return s.InvalidateTags(ctx, "a#1", life, tag) }
	expire := func() error { return s.ExpireTags(ctx, "a#1", life, tag) }
	const isNow, isReach = -1, -2
	for _, x := range []struct {
		name        string
		there       string
		ttl         time.Duration
		do          func() error
		invalidated int64 // or isNow, isReach
		expired     int64 // or isNow
	}{
		{"held", "5 7", life / 2, hold, 5, 7},
		{"held, from a clock that was set back", fmt.Sprint(start+3600*second, " 0"), life, hold, start + 3600*second, 0},
		{"held, no end", "5 7", 0, hold, isReach, 0},
		{"invalidated", "5 7", life / 2, invalidate, isNow, 7},
		{"invalidated, no end", "5 7", 0, invalidate, isNow, 0},
		{"expired", "5 7", life / 2, expire, 5, isNow},
		{"expired, no end", "5 7", 0, expire, isNow, isNow},
		{"invalidated, clock stepped back", fmt.Sprint(start+second*9/10, " 7"), life, invalidate, start + second*9/10, 7},
		{"expired, clock stepped back", fmt.Sprint("5 ", start+second*9/10), life, expire, 5, start + second*9/10},
		{"invalidated, clock set back", fmt.Sprint(start+60*second, " 7"), life, invalidate, isNow, 7},
		{"expired, clock set back", fmt.Sprint("5 ", start+60*second), life, expire, 5, isNow},
		{"more than one", "5 7 9", life, hold, isReach, 0},
		{"leading zero", "05 7", life, invalidate, isNow, 0},
		{"too large", "9000000000000000 0", life, hold, isReach, 0},
		{"far too large", strings.Repeat("9", 400) + " 0", life, hold, isReach, 0},
		{"fraction", "5.5 0", life, hold, isReach, 0},
		{"empty", "", life, hold, isReach, 0},
	} {
		if err := c.Set(ctx, mark, x.there, x.ttl).Err(); err != nil {
			t.Fatal(err)
		}
		before := now()
		if err := x.do(); err != nil {
			t.Errorf("%s: %v", x.name, err)
		}
		after := now()
		got, left := c.Get(ctx, mark).Val(), c.PTTL(ctx, mark).Val()
		var invalidated, expired int64
		if n, err := fmt.Sscanf(got, "%d %d", &invalidated, &expired); n != 2 || err != nil {
			t.Fatalf("%s: the mark is %q", x.name, got)
		}
		is := func(got, want int64) bool {
			switch want {
			case isNow:
				return got >= before && got <= after
			case isReach:
				return got >= before-10*second && got <= after-10*second
			}
			return got == want
		}
		if !is(invalidated, x.invalidated) || !is(expired, x.expired) || left <= life-10*time.Second || left > life {
			t.Errorf("%s: %q became %q with %v left, by a clock of %d", x.name, x.there, got, left, after)
		}
		if state, err := s.Tags(ctx, tag); err != nil || !state[0].Known {
			t.Errorf("%s: %+v, %v", x.name, state, err)
		}
	}
}

// A full Redis takes a void of a tag, since a mark that stays would revive what it should void, and a longer life.
func TestGoredisStoreMarksWithoutRoom(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	if err := s.HoldTags(ctx, time.Hour, time.Minute, "product:red", "product:blue"); err != nil {
		t.Fatal(err)
	}
	began := c.Time(ctx).Val()
	if err := c.ConfigSet(ctx, "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	if err := s.HoldTags(ctx, time.Hour, time.Hour, "product:blue"); err != nil {
		t.Error("HoldTags of a tag that is known:", err)
	}
	if err := s.HoldTags(ctx, time.Hour, time.Hour, "product:green"); err == nil {
		t.Error("HoldTags of a tag that is not known gives no error")
	}
	if err := s.InvalidateTags(ctx, "a#1", time.Minute, "product:red"); err != nil {
		t.Error("InvalidateTags:", err)
	}
	states, err := s.Tags(ctx, "product:red", "product:green")
	if err != nil || states[0].Known && states[0].Invalidated.Before(began) || states[1].Known {
		t.Errorf("%+v, %v", states, err)
	}
}

// One key that cannot be read is an error, not a miss; a value of a foreign type is a miss, in the midst of others.
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
		t.Errorf("the first GetMany took no sample of the clock: %v", got)
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
		t.Errorf("%q although one of them must not be read", records)
	}
	err = s.InvalidateTags(ctx, "a#1", time.Minute, "product:2", "product:1", "product:3")
	if err == nil || !strings.Contains(err.Error(), "2 of 3 keys") {
		t.Error(err)
	}
	if states, err := s.Tags(ctx, "product:1"); err != nil || !states[0].Known {
		t.Errorf("one that fails kept another from being marked: %+v, %v", states, err)
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
	for _, void := range []func(context.Context, string, ...string) error{s.Expire, s.Invalidate} {
		c.ScriptFlush(ctx)
		if err := void(ctx, "a#1", many...); err != nil {
			t.Error(err)
		}
	}
	for _, key := range many {
		if n := c.Exists(ctx, goredisPrefix("refill").key(key, "")).Val(); n != 0 {
			t.Fatal(key, "is still there")
		}
	}
}

func TestGoredisVoidSaysHowManyFailed(t *testing.T) {
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

// Every call returns when its ctx ends, however it ends.
func TestGoredisSilentServer(t *testing.T) {
	for _, deadlines := range []bool{false, true} {
		for _, listening := range []bool{false, true} {
			t.Run(fmt.Sprintf("ContextTimeoutEnabled %v, listening %v", deadlines, listening), func(t *testing.T) {
				server := realtest.StartRedis(t)
				s, _ := goredisOn(t, &redis.Options{Addr: server.Addr(), ContextTimeoutEnabled: deadlines, ReadTimeout: time.Second, MaxRetries: -1})
				steps := goredisSteps(t)
				for _, step := range steps {
					if err := step.call(context.Background(), s); err != nil {
						t.Fatal(step.name, err)
					}
				}
				before := runtime.NumGoroutine()
				if listening {
					e := goredisListen(t, s, "product")
					e.next(refill.NoteUp)
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
					return listening || runtime.NumGoroutine() <= before
				})
			})
		}
	}
}

func goredisInTime(t *testing.T, step goredisStep, s *goredis.Store, ctx context.Context, limit time.Duration, want error) {
	t.Helper()
	began := time.Now()
	err := step.call(ctx, s)
	if took := time.Since(began); took > limit || !errors.Is(err, want) {
		t.Errorf("%s: %v after %v, want %v within %v", step.name, err, took, want, limit)
	}
}

// A reply that is lost does not hide a lease that was won.
func TestGoredisLostReply(t *testing.T) {
	server := realtest.StartRedis(t)
	proxy := realtest.StartProxy(t, server.Addr())
	s, _ := goredisOn(t, &redis.Options{Addr: proxy.Addr()})
	ctx := context.Background()
	if _, err := s.Get(ctx, "product:42"); err != nil {
		t.Fatal(err)
	}
	goredisBegin(t, s, "product:warm", "a#1") // the script is loaded
	for i, how := range []refill.Ask{refill.AskOnce, refill.AskLeft, refill.AskForce} {
		b := refill.Bid{Key: fmt.Sprint("product:", i), Token: "a#1", LeaseTTL: time.Minute, ClaimTTL: time.Minute, Ask: how}
		requests := []string{"evalsha"}
		if how == refill.AskOnce {
			requests = []string{"nx", "evalsha"}
		}
		for _, request := range requests {
			lost := proxy.LoseReply(request)
			if r, err := s.Begin(ctx, b); err != nil || r.State != refill.BeginTaken {
				t.Errorf("Ask %d, reply to %s lost: %+v, %v, want it taken", how, request, r, err)
			}
			<-lost
			if err := s.Release(ctx, b.Key, b.Token); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// goredisEar hears what a listener of a Store hears.
type goredisEar struct {
	t     testing.TB
	notes chan refill.Note
	stop  func()
}

func goredisListen(t testing.TB, s refill.Store, name string) *goredisEar {
	e := &goredisEar{t: t, notes: make(chan refill.Note, 1000)}
	e.stop = s.Listen(name, func(n refill.Note) { e.notes <- n })
	t.Cleanup(e.stop)
	return e
}

// next waits for a note, which has to be of this kind.
func (e *goredisEar) next(kind refill.NoteKind) refill.Note {
	e.t.Helper()
	select {
	case n := <-e.notes:
		if n.Kind != kind {
			e.t.Fatalf("heard %+v, want kind %d", n, kind)
		}
		return n
	case <-time.After(10 * time.Second):
		e.t.Fatalf("heard nothing, want kind %d", kind)
	}
	return refill.Note{}
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
			e := goredisListen(t, s, "product")
			e.next(refill.NoteUp)
			began := time.Now()
			harm(t, server, proxy)
			if n := e.next(refill.NoteDown); n.Err == nil {
				t.Error("NoteDown without an error")
			}
			if took := time.Since(began); took > 3*time.Second {
				t.Errorf("NoteDown after %v", took)
			}
			server.Thaw()
			proxy.Heal()
			e.next(refill.NoteUp)
			if err := s.Invalidate(context.Background(), "a#1", "product:42"); err != nil {
				t.Fatal(err)
			}
			e.next(refill.NoteInvalidated)
		})
	}
}

// The format of announcements is final: releases of years apart may share a channel.
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
	begin := func(token string) {
		t.Helper()
		goredisBegin(t, s, key, token)
	}
	for _, step := range []struct {
		act  func() error
		want string
	}{
		{func() error {
			begin("a#1")
			_, err := s.Publish(ctx, refill.Publication{Key: key, Token: "a#1", Replaced: "b#22", Record: record, Keep: time.Minute})
			return err
		}, "RN1 f 3 4 11 a#1b#22product:4 2" + string(record)},
		{func() error { return s.Expire(ctx, "a#2", key) }, "RN1 e 3 0 11 a#2product:4 2"},
		{func() error { return s.Invalidate(ctx, "", key) }, "RN1 i 0 0 11 product:4 2"},
		{func() error { begin("a#3"); return s.Fail(ctx, key, "a#3", "boom", 0) }, "RN1 x 3 0 11 a#3product:4 2boom"},
		{func() error { begin("a#4"); return s.Release(ctx, key, "a#4") }, "RN1 r 3 0 11 a#4product:4 2"},
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

func TestGoredisLateListener(t *testing.T) {
	server := realtest.StartRedis(t)
	s, _ := goredisOn(t, &redis.Options{Addr: server.Addr()})
	goredisListen(t, s, "product").next(refill.NoteUp)
	var heard []refill.NoteKind
	s.Listen("user", func(n refill.Note) { heard = append(heard, n.Kind) })()
	if !slices.Equal(heard, []refill.NoteKind{refill.NoteUp}) {
		t.Errorf("heard %v before Listen returned, want NoteUp", heard)
	}
}

// Nothing is left when nobody listens any more: no goroutine, no connection, also when the server is silent.
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
					a, b := goredisListen(t, s, "a"), goredisListen(t, s, "b")
					a.next(refill.NoteUp)
					b.next(refill.NoteUp)
					s.Listen("c", func(refill.Note) {})()
					if _, err := s.Renew(ctx, "product:42", "a#1", time.Minute); err != nil {
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
				eventually(t, "the goroutines are gone", func() bool { return runtime.NumGoroutine() <= goroutines })
				if took := time.Since(began); took > 50*time.Millisecond {
					t.Errorf("goroutines lived %v longer than stop", took)
				}
				eventually(t, "the connections are gone", func() bool { return conns() <= connections })
			})
		}
	}
}

// stop is prompt also while the session is about to connect.
func TestGoredisStopsWhileConnecting(t *testing.T) {
	server := realtest.StartRedis(t)
	s, _ := goredisOn(t, &redis.Options{Addr: server.Addr()})
	server.Freeze()
	before := runtime.NumGoroutine()
	for _, after := range []time.Duration{0, time.Millisecond, 20 * time.Millisecond, 300 * time.Millisecond} {
		stop := s.Listen("product", func(refill.Note) {})
		time.Sleep(after)
		began := time.Now()
		stop()
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("stop took %v, %v after Listen", took, after)
		}
	}
	eventually(t, "the goroutines are gone", func() bool { return runtime.NumGoroutine() <= before })
	server.Thaw()
}

// A renewal does not queue behind the user's own commands.
func TestGoredisRenewsBesideAFullPool(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr(), PoolSize: 1})
	goredisListen(t, s, "product").next(refill.NoteUp)
	ctx, cancel := context.WithTimeout(context.Background(), goredisTimeout)
	defer cancel()
	go c.BLPop(context.Background(), 2*time.Second, "nothing")
	eventually(t, "the pool is used up", func() bool { s := c.PoolStats(); return s.TotalConns == 1 && s.IdleConns == 0 })
	if _, err := s.Get(ctx, "product:42"); err == nil {
		t.Error("Get found a connection")
	}
	ctx, cancel = context.WithTimeout(context.Background(), goredisTimeout)
	defer cancel()
	if _, err := s.Renew(ctx, "product:42", "a#1", time.Minute); err != nil {
		t.Error(err)
	}
	if _, err := s.Extend(ctx, "job:1", "a#1", time.Minute); err != nil {
		t.Error(err)
	}
}

// A session that ends under a renewal does not fail it.
func TestGoredisRenewsOverTheEndOfASession(t *testing.T) {
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
		e := goredisListen(t, s, "product")
		e.next(refill.NoteUp)
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
	for range 2 { // in each session
		early := goredisListen(t, s, "product")
		early.next(refill.NoteUp)
		texts := early.next(refill.NoteWarning).Err.Error() + early.next(refill.NoteWarning).Err.Error()
		late := goredisListen(t, s, "user")
		late.next(refill.NoteUp)
		late.next(refill.NoteWarning)
		late.next(refill.NoteWarning)
		for _, word := range []string{"volatile-ttl", "replica"} {
			if !strings.Contains(texts, word) {
				t.Errorf("%q says nothing of %s", texts, word)
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

// A server that is really full: leases and claims cannot be taken, but a fill that has both is published.
func TestGoredisFullServer(t *testing.T) {
	server := realtest.StartRedis(t)
	s, c := goredisOn(t, &redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	e := goredisListen(t, s, "product")
	e.next(refill.NoteUp)
	goredisBegin(t, s, "product:42", "a#1")
	c.ConfigSet(ctx, "maxmemory", "1")
	for _, how := range []refill.Ask{refill.AskOnce, refill.AskLeft} {
		b := refill.Bid{Key: "product:43", Token: "a#1", LeaseTTL: time.Minute, ClaimTTL: time.Minute, Ask: how}
		if _, err := s.Begin(ctx, b); err == nil {
			t.Error("a lease was taken from a full server")
		}
	}
	p := refill.Publication{Key: "product:42", Token: "a#1", Record: goredisRecord(t, "a#1", "x"), Keep: time.Minute}
	if state, err := s.Publish(ctx, p); err != nil || state == refill.PublishRefused {
		t.Error(state, err)
	}
	e.next(refill.NoteFilled)
	for _, key := range []string{"product:42", "product:44"} {
		if err := s.Invalidate(ctx, "a#2", key); err != nil {
			t.Error(err)
		}
		e.next(refill.NoteInvalidated)
	}
	if n := c.DBSize(ctx).Val(); n != 0 {
		t.Errorf("%d keys are left", n)
	}
}

// A Ring whose shard goes away and comes back: both are doubts, and in the end every shard is heard.
func TestGoredisRingShardReturns(t *testing.T) {
	first, second := realtest.StartRedis(t), realtest.StartRedis(t)
	ring := redis.NewRing(&redis.RingOptions{
		Addrs:              map[string]string{"first": first.Addr(), "second": second.Addr()},
		HeartbeatFrequency: 50 * time.Millisecond,
	})
	t.Cleanup(func() { ring.Close() })
	s, ctx := goredis.New(ring), context.Background()
	e := goredisListen(t, s, "product")
	e.next(refill.NoteUp)
	second.Kill()
	e.next(refill.NoteDown)
	e.next(refill.NoteUp) // on the shard that is left
	second.Restart()
	e.next(refill.NoteDown)
	e.next(refill.NoteUp)
	for i := range 20 {
		if err := s.Invalidate(ctx, "a#1", fmt.Sprint("product:", i)); err != nil {
			t.Fatal(err)
		}
		e.next(refill.NoteInvalidated)
	}
}

// A Sentinel client is cloned with its dialer: after a failover the session is at the new master.
func TestGoredisSentinelFailover(t *testing.T) {
	t.Parallel()
	sentinel, ctx := realtest.StartSentinel(t), context.Background()
	rdb := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: sentinel.MasterName(), SentinelAddrs: sentinel.Addrs()})
	t.Cleanup(func() { rdb.Close() })
	s := goredis.New(rdb)
	e := goredisListen(t, s, "product")
	e.next(refill.NoteUp)
	next := redis.NewClient(&redis.Options{Addr: sentinel.Failover().Addr()})
	defer next.Close()
	eventually(t, "the client is at the new master", func() bool { return s.Invalidate(ctx, "a#1", "product:42") == nil })
	// The old master stays one for some seconds, and answers PING; that announcements do not come back is noticed.
	began, heard := time.Now(), []refill.NoteKind{}
	eventually(t, "announcements of the new master are heard", func() bool {
		_ = s.Invalidate(ctx, "a#1", "product:42") // it is repeated
		for len(e.notes) > 0 {
			heard = append(heard, (<-e.notes).Kind)
		}
		return slices.Contains(heard, refill.NoteInvalidated) && next.PubSubNumSub(ctx, "refill:notes").Val()["refill:notes"] == 1
	})
	if took := time.Since(began); took > 6*time.Second || !slices.Contains(heard, refill.NoteDown) {
		t.Errorf("after %v, having heard %v", took, heard)
	}
	goredisBegin(t, s, "product:42", "a#1")
	if mine, err := s.Renew(ctx, "product:42", "a#1", time.Minute); err != nil || !mine {
		t.Errorf("renewal at the new master: %v, %v", mine, err)
	}
}
