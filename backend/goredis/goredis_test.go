package goredis

import (
	"context"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/driver"
)

// embedded is a user's own type around a client.
type embedded struct{ *redis.ClusterClient }

func TestCheck(t *testing.T) {
	const addr = "127.0.0.1:1"
	single := redis.NewClient(&redis.Options{Addr: addr})
	cluster := func(o redis.ClusterOptions) *redis.ClusterClient {
		o.Addrs = []string{addr}
		return redis.NewClusterClient(&o)
	}
	for _, c := range []struct {
		name   string
		client redis.UniversalClient
		opts   []Option
		want   string // "" = fine
	}{
		{"nil", nil, nil, "client: nil"},
		{"typed nil", (*redis.Client)(nil), nil, "client: nil *redis.Client"},
		{"typed nil cluster", (*redis.ClusterClient)(nil), nil, "client: nil *redis.ClusterClient"},
		{"single", single, nil, ""},
		{"cluster", cluster(redis.ClusterOptions{}), nil, ""},
		{"ring", redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": addr}}), nil, ""},
		{"sentinel", redis.NewFailoverClient(&redis.FailoverOptions{
			MasterName: "m", SentinelAddrs: []string{addr},
		}), nil, ""},
		{"ReadOnly", cluster(redis.ClusterOptions{ReadOnly: true}), nil, "ClusterOptions.ReadOnly"},
		{"RouteByLatency", cluster(redis.ClusterOptions{RouteByLatency: true}), nil, "ClusterOptions.RouteByLatency"},
		{"RouteRandomly", cluster(redis.ClusterOptions{RouteRandomly: true}), nil, "ClusterOptions.RouteRandomly"},
		{"embedded", embedded{cluster(redis.ClusterOptions{ReadOnly: true})}, nil, "ClusterOptions.ReadOnly"},
		{"prefix", single, []Option{Prefix("a.B_9-")}, ""},
		{"empty prefix", single, []Option{Prefix("")}, `Prefix: ""`},
		{"prefix with a brace", single, []Option{Prefix("a{b}")}, `Prefix: "a{b}"`},
		{"prefix with a colon", single, []Option{Prefix("a:b")}, `Prefix: "a:b"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.client != nil && !strings.Contains(c.name, "typed nil") {
				defer c.client.Close()
			}
			s := New(c.client, c.opts...)
			err := s.Check()
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
			if err != nil {
				testRefused(t, s, err)
			}
		})
	}
}

// testRefused tests a Store whose Check returns the error want. Every call must return want, and no call may panic.
func testRefused(t *testing.T, s *Store, want error) {
	t.Helper()
	ctx := context.Background()
	if _, err := s.Get(ctx, "product:42"); err != want {
		t.Errorf("Get: %v", err)
	}
	if _, err := s.Renew(ctx, time.Second, driver.Lease{Key: "product:42", Token: "a#1"}); err != want {
		t.Errorf("Renew: %v", err)
	}
	if err := s.Invalidate(ctx, "a#1", "product:42"); err != want {
		t.Errorf("Invalidate: %v", err)
	}
	if _, err := s.GetMany(ctx, "product:42"); err != want {
		t.Errorf("GetMany: %v", err)
	}
	if _, err := s.Tags(ctx, "product:red"); err != want {
		t.Errorf("Tags: %v", err)
	}
	if err := s.EnsureTags(ctx, time.Second, time.Second, "product:red"); err != want {
		t.Errorf("EnsureTags: %v", err)
	}
	if err := s.ExpireTags(ctx, "a#1", time.Second, "product:red"); err != want {
		t.Errorf("ExpireTags: %v", err)
	}
	s.Subscribe("product", func(a driver.Announcement) { t.Errorf("received %+v", a) })()
	_, stop := s.Watch("product:42")
	stop()
	s.Now()
}

func TestMillisRoundsUp(t *testing.T) {
	for d, want := range map[time.Duration]int64{
		-time.Second: 1, 0: 1, 1: 1, time.Millisecond: 1, time.Millisecond + 1: 2, time.Second: 1000,
	} {
		if got := millis(d); got != want {
			t.Errorf("%v: %d, want %d", d, got, want)
		}
	}
}

func TestParseInfo(t *testing.T) {
	for info, want := range map[string]string{
		"# Server\r\nredis_version:7.0.15\r\nrole:master\r\nmaxmemory_policy:allkeys-lru\r\n": "",
		"redis_version:8.2.0\r\n":            "",
		"redis_version:6.2.14\r\n":           "Redis 6.2.14",
		"redis_version:unstable\r\n":         "",
		"redis_version:255.255.255\r\n":      "",
		"role:slave\r\n":                     "replica",
		"maxmemory_policy:volatile-ttl\r\n":  "volatile-ttl",
		"maxmemory_policy:volatile-lru\r\n":  "",
		"":                                   "",
		"redis_version\r\nrole\r\n:\r\nx:y:": "",
	} {
		warnings := parseInfo(info)
		fine := len(warnings) == 0
		if want != "" {
			fine = len(warnings) == 1 && strings.Contains(warnings[0].Error(), want)
		}
		if !fine {
			t.Errorf("%q: warnings %v, want %q", info, warnings, want)
		}
	}
}

func TestParseAcquireReply(t *testing.T) {
	for _, reply := range [][]any{
		nil, {}, {int64(0)}, {int64(0), "1"}, {"0", "1", "2"}, {int64(0), int64(1), "2"}, {int64(0), "1", int64(2)},
		{int64(0), "x", "2"}, {int64(1)}, {int64(1), int64(2)}, {int64(2), "a#1"}, {int64(2), "a#1", "7"},
		{int64(2), int64(7), int64(7)}, {int64(3), "1", "2"}, {int64(-1), "1", "2"}, {int64(256), "1", "2"},
	} {
		if r, err := parseAcquireReply(reply); err == nil {
			t.Errorf("%v was read as %+v", reply, r)
		}
	}
	for _, c := range []struct {
		reply []any
		want  driver.AcquireResult
	}{
		{[]any{int64(0), "1700000000", "000042"}, driver.AcquireResult{Now: time.UnixMicro(1700000000000042)}},
		{[]any{int64(1), "record"}, driver.AcquireResult{State: driver.Changed, Record: []byte("record")}},
		{
			[]any{int64(2), "a#1", int64(7)},
			driver.AcquireResult{State: driver.Held, Holder: "a#1", Left: 7 * time.Millisecond},
		},
		{
			[]any{int64(2), "!no+", int64(0)},
			driver.AcquireResult{State: driver.Held, Failure: "no+", Left: time.Millisecond},
		},
	} {
		if r, err := parseAcquireReply(c.reply); err != nil || !reflect.DeepEqual(r, c.want) {
			t.Errorf("%v: %+v, %v", c.reply, r, err)
		}
	}
}

// ownClient recognises a Sentinel client by the address text that go-redis gives to such a client. Renewals must use
// the given client if it is a Sentinel client, and the small client otherwise. The subscription must always use the
// small client.
func TestSentinelClientIsRecognised(t *testing.T) {
	o := redis.FailoverOptions{MasterName: "m", SentinelAddrs: []string{"127.0.0.1:1"}}
	sentinel := redis.NewFailoverClient(&o)
	defer sentinel.Close()
	overSentinel := redis.NewFailoverClusterClient(&o)
	defer overSentinel.Close()
	single := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer single.Close()
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	defer cluster.Close()
	for _, c := range []struct {
		name string
		user redis.UniversalClient
		want bool // renewals use the given client
	}{
		{"sentinel", sentinel, true}, {"cluster over sentinel", overSentinel, true},
		{"single", single, false}, {"cluster", cluster, false},
	} {
		own := newOwnClient(t.Context(), c.user)
		if got := own.forKey("k") == nil; got != c.want {
			t.Errorf("%s: renewals use the given client: %v, want %v", c.name, got, c.want)
		}
		if own.servers()[0] == client(c.user) {
			t.Errorf("%s: the subscription uses the given client", c.name)
		}
		own.close()
	}
}
