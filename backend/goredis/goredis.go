package goredis

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/driver"
)

// Store keeps values, leases, claims and locks in Redis. It implements [driver.Store] and [driver.Locks]. One Store
// is enough for all Loaders and Lockers of a process. A Store has nothing to close: its subscription runs only while
// there is a subscriber or a Watch.
type Store struct {
	client   client
	prefix   string
	channel  any   // a string: the channel of all announcements under the prefix, as an argument of scripts
	calls    calls // makes the calls over the client given to New
	renewals calls // makes the calls over the Store's own client (see pubsub.onOwnClient), each on a goroutine
	known    knownScripts
	clock    clock
	pubsub   pubsub

	pipelines pipelines // carry the steps of a fill for one key; all other calls go alone
}

var (
	_ driver.Store = (*Store)(nil)
	_ driver.Locks = (*Store)(nil)
)

// client has the methods of redis.UniversalClient that the Store uses. A release of go-redis may add methods to
// UniversalClient, but not to client.
type client interface {
	Do(ctx context.Context, args ...any) *redis.Cmd
	Process(ctx context.Context, cmd redis.Cmder) error
	Pipeline() redis.Pipeliner
	Subscribe(ctx context.Context, channels ...string) *redis.PubSub
}

// Option changes how New makes a Store.
type Option func(*Store)

// Prefix sets the text with which all keys and the channel begin. Default "refill". A prefix consists of letters,
// digits, '.', '_' and '-'. Fleets that share a Redis server need different prefixes, or different names for all
// their Loaders.
func Prefix(prefix string) Option { return func(s *Store) { s.prefix = prefix } }

// New returns a Store over a client. The client still belongs to the caller, who closes it after the last Loader. New
// does not call the server and starts no goroutine. If an argument is wrong, [Store.Check] returns the error, and so
// do refill.New, refill.NewLocker and every call.
func New(c redis.UniversalClient, opts ...Option) *Store {
	s := &Store{client: c, prefix: "refill"}
	for _, o := range opts {
		o(s)
	}
	s.channel, s.clock.base = channel(s.prefix), time.Now()
	err := check(c, s.prefix)
	s.calls.refused, s.renewals.refused = err, err
	if err == nil {
		s.calls.deadlines = obeysDeadlines(c)
		if c, ok := c.(reloader); ok {
			s.calls.moved = c.ReloadState
		}
		s.pipelines.setUp(c, s)
	}
	s.pubsub.setUp(c, channel(s.prefix))
	return s
}

// Check returns what is wrong with the client or the prefix. It does not call the server. It refuses a nil client and
// a prefix that does not fit into keys. It also refuses a Cluster client that reads from replicas, because such a
// read may be older than an Invalidate that has returned.
//
// Check cannot recognise a Sentinel client with ReplicaOnly, a server older than 7.0 or the eviction policy
// volatile-ttl. Once the Store has a subscription, a driver.Warning reports each of them.
func (s *Store) Check() error { return s.calls.refused }

func check(c redis.UniversalClient, prefix string) error {
	if isNil(c) {
		return fmt.Errorf("goredis: client: nil %T", c)
	}
	if o, ok := c.(clusterClient); ok {
		o := o.Options()
		switch lag := "goredis: client: ClusterOptions.%s: reads from replicas, which lag behind"; {
		case o.RouteByLatency: // checked before ReadOnly, because go-redis sets ReadOnly as well
			return fmt.Errorf(lag, "RouteByLatency")
		case o.RouteRandomly:
			return fmt.Errorf(lag, "RouteRandomly")
		case o.ReadOnly:
			return fmt.Errorf(lag, "ReadOnly")
		}
	}
	const fine = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
	if prefix == "" || strings.Trim(prefix, fine) != "" {
		return fmt.Errorf("goredis: Prefix: %q, must be letters, digits, '.', '_' and '-'", prefix)
	}
	return nil
}

// isNil reports whether c is nil or holds a nil pointer.
func isNil(c redis.UniversalClient) bool {
	v := reflect.ValueOf(c)
	return c == nil || v.Kind() == reflect.Pointer && v.IsNil()
}

// Now returns the time of Redis' clock, as far as this process knows it. Before the first call, it returns the time of
// this machine.
func (s *Store) Now() time.Time { return s.clock.now() }

// Subscribe implements driver.Store. The first subscriber opens the one subscription of the Store. The stop of the last
// subscriber closes the subscription. If the subscription already works, handle is called with Subscribed before
// Subscribe returns.
//
// Announcements are delivered one at a time per Store, so a slow handle delays all of them. handle may call any method
// of the Store, including Subscribe and Watch. handle must not call its own stop, because stop waits until handle has
// returned.
func (s *Store) Subscribe(name string, handle func(driver.Announcement)) (stop func()) {
	if s.calls.refused != nil {
		return func() {}
	}
	return s.pubsub.subscribe(name, handle)
}

// millis converts a time to live for Redis: whole milliseconds, rounded up, because Redis refuses 0.
func millis(ttl time.Duration) int64 {
	return max(1, int64((ttl+time.Millisecond-1)/time.Millisecond))
}
