package peers

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/eko/gocache/lib/v4/cache"
	"github.com/eko/gocache/lib/v4/store"
	localstore "github.com/eko/gocache/store/go_cache/v4"
	redisstore "github.com/eko/gocache/store/redis/v4"
	gocache "github.com/patrickmn/go-cache"
)

var chained = Peer{
	Name: "gocache", Module: "github.com/eko/gocache/lib/v4",
	About: "Loadable over a Chain of go-cache, which has no bound, and Redis; JSON only in Redis, by a store around " +
		"its own",
	Shared: true, Local: true,
	Open: openChained,
}

type chainedCache struct {
	*cache.LoadableCache[*Product]
	chain *cache.ChainCache[*Product]
	remote
}

func openChained(s Settings) (Cache, error) {
	c := chainedCache{remote: dial(s)}
	levels := []cache.SetterCacheInterface[*Product]{cache.New[*Product](jsonStore{redisstore.NewRedis(c.Client)})}
	if !s.NoLocal {
		l1 := cache.New[*Product](localstore.NewGoCache(gocache.New(s.TTL, 10*time.Minute)))
		levels = append([]cache.SetterCacheInterface[*Product]{l1}, levels...)
	}
	c.chain = cache.NewChain(levels...)
	c.LoadableCache = cache.NewLoadable(func(ctx context.Context, key any) (*Product, []store.Option, error) {
		p, err := s.Load(ctx, key.(string))
		return p, []store.Option{store.WithExpiration(s.TTL)}, err
	}, c.chain)
	return c, nil
}

func (c chainedCache) Get(ctx context.Context, key string) (*Product, error) {
	return c.LoadableCache.Get(ctx, key)
}

// Invalidate deletes the key in Redis and in this process.
func (c chainedCache) Invalidate(ctx context.Context, key string) error {
	return c.Delete(ctx, key)
}

func (c chainedCache) Close() error {
	return errors.Join(c.LoadableCache.Close(), c.chain.Close(), c.remote.Close())
}

// jsonStore encodes values as JSON for Redis, but not for L1. With the Marshaler of the library, L1 would hold encoded
// values as well, and each hit in L1 would decode a value.
type jsonStore struct{ *redisstore.RedisStore }

func (s jsonStore) GetWithTTL(ctx context.Context, key any) (any, time.Duration, error) {
	text, ttl, err := s.RedisStore.GetWithTTL(ctx, key)
	if err != nil {
		return nil, 0, err
	}
	p := new(Product)
	return p, ttl, json.Unmarshal([]byte(text.(string)), p)
}

func (s jsonStore) Set(ctx context.Context, key, value any, o ...store.Option) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return s.RedisStore.Set(ctx, key, text, o...)
}
