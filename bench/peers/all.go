package peers

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

// All are the peers: refill first, then caches written by hand, those with a lock in Redis, those with two levels,
// those with one, and the limits.
func All() []Peer {
	return append([]Peer{
		refillJSON, bare, single, polling, rocksWeak, rocksStrong, aside, goredisCache, jet, chained, sturdyRedis,
		sturdy, otterLoading, hotLoading, stamped,
	}, limits...)
}

// remote is a go-redis client with what most peers do with it: Products as JSON.
type remote struct {
	*redis.Client
	Settings
}

// dial makes the client, the same for every peer on go-redis: the defaults, but it obeys deadlines, as callers expect.
func dial(s Settings) remote {
	return remote{redis.NewClient(&redis.Options{Addr: s.Redis, ContextTimeoutEnabled: true}), s}
}

// read returns nil if there is no value.
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

// fill loads and writes.
func (r remote) fill(ctx context.Context, key string) (*Product, error) {
	p, err := r.Load(ctx, key)
	if err != nil {
		return nil, err
	}
	return p, r.write(ctx, key, p, r.TTL)
}

// Invalidate deletes.
func (r remote) Invalidate(ctx context.Context, key string) error { return r.Del(ctx, key).Err() }
