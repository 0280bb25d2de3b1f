package peers

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

// All returns the peers: refill first, then caches written by hand, libraries with a lock in Redis, libraries with two
// levels, libraries with one level, and the raw operations (limits).
func All() []Peer {
	return append([]Peer{
		refillJSON, bare, single, polling, rocksWeak, rocksStrong, aside, goredisCache, jet, chained, sturdyRedis,
		sturdy, otterLoading, hotLoading, stamped,
	}, limits...)
}

// remote is a go-redis client that reads and writes Products as JSON. Most peers use a remote.
type remote struct {
	*redis.Client
	Settings
}

// dial returns the client that all peers on go-redis use. The client has the defaults of go-redis, except that its
// calls obey the deadline of their ctx.
func dial(s Settings) remote {
	return remote{redis.NewClient(&redis.Options{Addr: s.Redis, ContextTimeoutEnabled: true}), s}
}

// read returns the value that Redis holds under key, or nil if Redis holds no value.
func (r remote) read(ctx context.Context, key string) (*Product, error) {
	text, err := r.Client.Get(ctx, key).Bytes()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	p := new(Product)
	return p, json.Unmarshal(text, p)
}

func (r remote) write(ctx context.Context, key string, p *Product, ttl time.Duration) error {
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return r.Client.Set(ctx, key, text, ttl).Err()
}

// fill loads a value and writes it to Redis.
func (r remote) fill(ctx context.Context, key string) (*Product, error) {
	p, err := r.Load(ctx, key)
	if err != nil {
		return nil, err
	}
	return p, r.write(ctx, key, p, r.TTL)
}

// Invalidate deletes the key in Redis.
func (r remote) Invalidate(ctx context.Context, key string) error { return r.Del(ctx, key).Err() }
