package goredis

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
)

// Store keeps values, leases and claims in Redis. It implements [refill.Store] and [refill.LockDriver]; one is enough for
// all Loaders and Lockers of a process. It needs no closing: it runs something only while somebody listens.
type Store struct {
	client client
	prefix string
	calls  calls // of the client given to New
	spare  calls // of the session's own client, see hub.steady; a renewal has to be cut short at once
	clock  clock
	hub    hub
}

var (
	_ refill.Store      = (*Store)(nil)
	_ refill.LockDriver = (*Store)(nil)
)

// client is what the Store uses of a redis.UniversalClient. That one grows methods with each release, this does not.
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

// Prefix is what all keys, and the channel, begin with. Default "refill". It is made of letters, digits, '.', '_' and '-'.
// Fleets that share a Redis server need different prefixes, or different names for all their Loaders.
func Prefix(prefix string) Option { return func(s *Store) { s.prefix = prefix } }

// New returns a Store over a client, which stays the caller's: close it after the last Loader. New calls nothing and
// starts nothing. If something is wrong with its arguments, [Store.Check] says what, and so do refill.New,
// refill.NewLocker and every call.
func New(c redis.UniversalClient, opts ...Option) *Store {
	s := &Store{client: c, prefix: "refill"}
	for _, o := range opts {
		o(s)
	}
	s.clock.base = time.Now()
	err := check(c, s.prefix)
	s.calls.refused, s.spare.refused = err, err
	if err == nil {
		s.calls.deadlines = obeysDeadlines(c)
		if c, ok := c.(reloader); ok {
			s.calls.moved = c.ReloadState
		}
	}
	s.hub.setUp(c, s.channel())
	return s
}

// Check says what is wrong with the client or the prefix, without calling the server: a nil client, a Cluster client that
// reads from replicas (what it reads may be older than an Invalidate that has returned), a prefix that does not fit into
// keys. A Sentinel client with ReplicaOnly looks like any other from here: it is reported by a NoteWarning once the Store
// listens, as are a server older than 7.0 and the eviction policy volatile-ttl.
func (s *Store) Check() error { return s.calls.refused }

func check(c redis.UniversalClient, prefix string) error {
	if isNil(c) {
		return fmt.Errorf("goredis: client: nil %T", c)
	}
	if o, ok := c.(clusterClient); ok {
		o := o.Options()
		switch lag := "goredis: client: ClusterOptions.%s: reads from replicas, which lag behind"; {
		case o.RouteByLatency: // these two set ReadOnly, too
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

// isNil sees through an interface that holds a nil pointer.
func isNil(c redis.UniversalClient) bool {
	v := reflect.ValueOf(c)
	return c == nil || v.Kind() == reflect.Pointer && v.IsNil()
}

// Now is the clock of Redis as far as this process knows it, and this machine's before the first call.
func (s *Store) Now() time.Time { return s.clock.now() }

// Listen implements refill.Store. The first listener opens the one subscription of the Store, stopping the last one
// closes it.
func (s *Store) Listen(name string, hear func(refill.Note)) (stop func()) {
	if s.calls.refused != nil {
		return func() {}
	}
	return s.hub.listen(name, hear)
}

// millis is a time to live as Redis takes it: whole milliseconds, rounded up, since 0 would be an error.
func millis(ttl time.Duration) int64 {
	return max(1, int64((ttl+time.Millisecond-1)/time.Millisecond))
}
