package peers

import (
	"context"

	"github.com/go-redis/cache/v9"
)

var goredisCache = Peer{
	Name: "gorediscache", Module: "github.com/go-redis/cache/v9",
	About:  "its TinyLFU in front, for another TTL; msgpack and s2, in both levels",
	Shared: true, Local: true,
	Open: openGoredisCache,
}

type goredisCached struct {
	remote
	cache *cache.Cache
}

func openGoredisCache(s Settings) (Cache, error) {
	r := dial(s)
	o := &cache.Options{Redis: r.Client}
	if !s.NoLocal {
		o.LocalCache = cache.NewTinyLFU(s.Entries, s.TTL)
	}
	return goredisCached{r, cache.New(o)}, nil
}

func (c goredisCached) Get(ctx context.Context, key string) (*Product, error) {
	p := new(Product)
	err := c.cache.Once(&cache.Item{
		Ctx: ctx, Key: key, Value: p, TTL: c.TTL,
		Do: func(*cache.Item) (any, error) { return c.Load(ctx, key) },
	})
	return p, err
}

// Invalidate deletes the key in Redis and in this process.
func (c goredisCached) Invalidate(ctx context.Context, key string) error {
	return c.cache.Delete(ctx, key)
}
