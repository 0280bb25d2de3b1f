package peers

import (
	"context"

	"golang.org/x/sync/singleflight"
)

var bare = Peer{
	Name: "goredis", Module: "github.com/redis/go-redis/v9",
	About:  "by hand: GET, load, SET; JSON; each caller for itself",
	Shared: true,
	Open:   func(s Settings) (Cache, error) { return bareCache{dial(s)}, nil },
}

type bareCache struct{ remote }

func (c bareCache) Get(ctx context.Context, key string) (*Product, error) {
	if p, err := c.read(ctx, key); p != nil || err != nil {
		return p, err
	}
	return c.fill(ctx, key)
}

var single = Peer{
	Name: "sf", Module: "golang.org/x/sync",
	About:  "by hand: the same in a singleflight, so one load per key and process",
	Shared: true,
	Open:   func(s Settings) (Cache, error) { return &singleCache{bareCache: bareCache{dial(s)}}, nil },
}

type singleCache struct {
	bareCache
	flights singleflight.Group
}

func (c *singleCache) Get(ctx context.Context, key string) (*Product, error) {
	p, err, _ := c.flights.Do(key, func() (any, error) { return c.bareCache.Get(ctx, key) })
	if err != nil {
		return nil, err
	}
	return p.(*Product), nil
}
