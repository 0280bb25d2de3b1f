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

// Store keeps values, leases and claims in Redis. It implements [driver.Store] and [driver.Locks]; one is enough for
// all Loaders and Lockers of a process. It needs no closing: it runs goroutines only while there is a subscriber or a
// Watch.
type Store struct {
	client   client
	prefix   string
	calls    calls // of the client given to New
	renewals calls // of the Store's own client, see pubsub.onOwnClient; always cut short at once
	clock    clock
	pubsub   pubsub
}

var (
	_ driver.Store = (*Store)(nil)
	_ driver.Locks = (*Store)(nil)
)

// client is the part of redis.UniversalClient that the Store uses. UniversalClient grows with each release; this does
// not.
type client interface {
	Do(ctx context.Context, args ...any) *redis.Cmd
	Get(ctx context.Context, key string) *redis.StringCmd
	EvalSha(ctx context.Context, hash string, keys []string, args ...any) *redis.Cmd
	Eval(ctx context.Context, source string, keys []string, args ...any) *redis.Cmd
	Pipeline() redis.Pipeliner
	Subscribe(ctx context.Context, channels ...string) *redis.PubSub
}

// Option changes how New makes a Store.
type Option func(*Store)

// Prefix sets what all keys and the channel begin with. Default "refill". It consists of letters, digits, '.', '_' and
// '-'. Fleets that share a Redis server need different prefixes, or different names for all their Loaders.
func Prefix(prefix string) Option { return func(s *Store) { s.prefix = prefix } }

// New returns a Store over a client. The client stays the caller's: close it after the last Loader. New calls nothing
// and starts nothing. If an argument is wrong, [Store.Check] returns the error, and so do refill.New, refill.NewLocker
// and every call.
func New(c redis.UniversalClient, opts ...Option) *Store {
	s := &Store{client: c, prefix: "refill"}
	for _, o := range opts {
		o(s)
	}
	s.clock.base = time.Now()
	err := check(c, s.prefix)
	s.calls.refused, s.renewals.refused = err, err
	if err == nil {
		s.calls.deadlines = obeysDeadlines(c)
		if c, ok := c.(reloader); ok {
			s.calls.moved = c.ReloadState
		}
	}
	s.pubsub.setUp(c, s.channel())
	return s
}

// Check returns what is wrong with the client or the prefix, without calling the server: a nil client, a Cluster client
// that reads from replicas (a read may be older than an Invalidate that has returned), or a prefix that does not fit
// into keys.
//
// Check cannot recognise a Sentinel client with ReplicaOnly. A driver.Warning reports it once the Store has a
// subscription, and also a server older than 7.0 and the eviction policy volatile-ttl.
func (s *Store) Check() error { return s.calls.refused }

func check(c redis.UniversalClient, prefix string) error {
	if isNil(c) {
		return fmt.Errorf("goredis: client: nil %T", c)
	}
	if o, ok := c.(clusterClient); ok {
		o := o.Options()
		switch lag := "goredis: client: ClusterOptions.%s: reads from replicas, which lag behind"; {
		case o.RouteByLatency: // go-redis sets ReadOnly as well for this one and the next
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

// isNil also recognises an interface that holds a nil pointer.
func isNil(c redis.UniversalClient) bool {
	v := reflect.ValueOf(c)
	return c == nil || v.Kind() == reflect.Pointer && v.IsNil()
}

// Now returns the clock of Redis as far as this process knows it, or the clock of this machine before the first call.
func (s *Store) Now() time.Time { return s.clock.now() }

// Subscribe implements driver.Store. The first subscriber opens the one subscription of the Store. stop of the last one
// closes it. If the subscription works already, handle is called with Subscribed before Subscribe returns.
//
// Announcements are delivered one at a time per Store, so a slow handle delays all of them. handle may call the Store,
// Subscribe and Watch included. It must not call its own stop, which would wait for itself.
func (s *Store) Subscribe(name string, handle func(driver.Announcement)) (stop func()) {
	if s.calls.refused != nil {
		return func() {}
	}
	return s.pubsub.subscribe(name, handle)
}

// millis converts a time to live for Redis: whole milliseconds, rounded up, because 0 would be an error.
func millis(ttl time.Duration) int64 {
	return max(1, int64((ttl+time.Millisecond-1)/time.Millisecond))
}
