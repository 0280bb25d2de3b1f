package peers

import (
	"context"

	"github.com/viccon/sturdyc"
)

var (
	sturdy = Peer{
		Name: "sturdyc", Module: "github.com/viccon/sturdyc",
		About: "StaleFor: early refreshes from 90 % of TTL on",
		Local: true, Stale: true,
		Open: func(s Settings) (Cache, error) { return sturdyCache{Settings: s, client: openSturdy(s)}, nil },
	}
	sturdyRedis = Peer{
		Name: "sturdyc-redis", Module: "github.com/viccon/sturdyc",
		About:  "the same over a distributed storage in Redis; its JSON there",
		Shared: true, Local: true, Stale: true,
		Open: openSturdyRedis,
	}
)

type sturdyCache struct {
	Settings
	client *sturdyc.Client[*Product]
	redis  *remote // nil: no Redis
}

// openSturdy splits L1 into 10 shards, each of which drops 10 % of its entries when it is full, as in the README of
// sturdyc.
func openSturdy(s Settings, o ...sturdyc.Option) *sturdyc.Client[*Product] {
	if s.StaleFor > 0 {
		// If a refresh has not ended after the time of the last argument, sturdyc starts the refresh again. The README
		// of sturdyc has 10 ms there, which is shorter than a load of 100 ms.
		o = append(o, sturdyc.WithEarlyRefreshes(s.TTL*9/10, s.TTL, s.TTL+s.StaleFor, s.TTL))
	}
	return sturdyc.New[*Product](s.Entries, 10, s.TTL+s.StaleFor, 10, o...)
}

func openSturdyRedis(s Settings) (Cache, error) {
	r := dial(s)
	store := sturdyStore{r}
	o := sturdyc.WithDistributedStorage(store)
	if s.StaleFor > 0 {
		o = sturdyc.WithDistributedStorageEarlyRefreshes(store, s.TTL*9/10)
	}
	return sturdyCache{s, openSturdy(s, o), &r}, nil
}

func (c sturdyCache) Get(ctx context.Context, key string) (*Product, error) {
	if c.NoLocal {
		c.client.Delete(key)
	}
	return c.client.GetOrFetch(ctx, key, func(ctx context.Context) (*Product, error) { return c.Load(ctx, key) })
}

// Invalidate deletes the key in this process, and in Redis if the peer uses Redis.
func (c sturdyCache) Invalidate(ctx context.Context, key string) error {
	c.client.Delete(key)
	if c.redis == nil {
		return nil
	}
	return c.redis.Invalidate(ctx, key)
}

func (c sturdyCache) Close() error {
	if c.redis == nil {
		return nil
	}
	return c.redis.Close()
}

// sturdyStore has the methods that sturdyc needs of a store. These methods return no errors.
type sturdyStore struct{ remote }

func (s sturdyStore) Get(ctx context.Context, key string) ([]byte, bool) {
	text, err := s.Client.Get(ctx, key).Bytes()
	return text, err == nil
}

func (s sturdyStore) Set(ctx context.Context, key string, text []byte) {
	s.Client.Set(ctx, key, text, s.TTL+s.StaleFor)
}

func (s sturdyStore) Delete(ctx context.Context, key string) { s.Del(ctx, key) }

func (sturdyStore) GetBatch(context.Context, []string) map[string][]byte { return nil }
func (sturdyStore) SetBatch(context.Context, map[string][]byte)          {}
func (sturdyStore) DeleteBatch(context.Context, []string)                {}
