package peers

import (
	"context"
	"io"
	"log/slog"
	"time"

	"github.com/go-chi/stampede"
	"github.com/goware/cachestore2"
	"github.com/hashicorp/golang-lru/v2/expirable"
	"github.com/maypok86/otter/v2"
	"github.com/samber/hot"
)

var otterLoading = Peer{
	Name: "otter", Module: "github.com/maypok86/otter/v2",
	About: "loading Get; StaleFor: refreshed from TTL on",
	Local: true, Stale: true,
	Open: func(s Settings) (Cache, error) {
		o := &otter.Options[string, *Product]{
			MaximumSize:      s.Entries,
			ExpiryCalculator: otter.ExpiryWriting[string, *Product](s.TTL + s.StaleFor),
		}
		if s.StaleFor > 0 {
			o.RefreshCalculator = otter.RefreshWriting[string, *Product](s.TTL)
		}
		c, err := otter.New(o)
		return otterCache{c, otter.LoaderFunc[string, *Product](s.Load)}, err
	},
}

type otterCache struct {
	*otter.Cache[string, *Product]
	load otter.Loader[string, *Product]
}

func (c otterCache) Get(ctx context.Context, key string) (*Product, error) {
	return c.Cache.Get(ctx, key, c.load)
}

// Invalidate also prevents otter from storing the value of a running load.
func (c otterCache) Invalidate(_ context.Context, key string) error {
	c.Cache.Invalidate(key)
	return nil
}

func (c otterCache) Close() error {
	c.StopAllGoroutines()
	return nil
}

var hotLoading = Peer{
	Name: "hot", Module: "github.com/samber/hot",
	About: "LRU, no shards (in v0.13.0 they have no lock); StaleFor: revalidated after the next Get",
	Local: true, Stale: true,
	Open: func(s Settings) (Cache, error) {
		load := func(keys []string) (map[string]*Product, error) {
			found := make(map[string]*Product, len(keys))
			for _, key := range keys {
				p, err := s.Load(context.Background(), key) // hot passes no ctx to its loader
				if err != nil {
					return nil, err
				}
				found[key] = p
			}
			return found, nil
		}
		c := hot.NewHotCache[string, *Product](hot.LRU, s.Entries).WithTTL(s.TTL).WithLoaders(load)
		if s.StaleFor > 0 {
			c = c.WithRevalidation(s.StaleFor)
		}
		return hotCache{c.Build()}, nil
	},
}

type hotCache struct {
	*hot.HotCache[string, *Product]
}

func (c hotCache) Get(_ context.Context, key string) (*Product, error) {
	p, _, err := c.HotCache.Get(key)
	return p, err
}

// Invalidate deletes the key in this process.
func (c hotCache) Invalidate(_ context.Context, key string) error {
	c.Delete(key)
	return nil
}

func (hotCache) Close() error { return nil }

var stamped = Peer{
	Name: "stampede", Module: "github.com/go-chi/stampede",
	About: "over golang-lru with expiry, by a store around it",
	Local: true,
	Open: func(s Settings) (Cache, error) {
		store := lruStore{lru: expirable.NewLRU[string, *Product](s.Entries, nil, s.TTL)}
		log := slog.New(slog.NewTextHandler(io.Discard, nil))
		c := stampede.NewStampede(log, cachestore.Store[*Product](store), stampede.WithTTL(s.TTL))
		return stampedeCache{Settings: s, do: c.Do}, nil
	},
}

type stampedeCache struct {
	Settings
	do func(context.Context, string, func() (*Product, *time.Duration, error), ...stampede.Option) (*Product, error)
}

func (c stampedeCache) Get(ctx context.Context, key string) (*Product, error) {
	return c.do(ctx, key, func() (*Product, *time.Duration, error) {
		p, err := c.Load(ctx, key)
		return p, nil, err
	})
}

func (stampedeCache) Close() error { return nil }

// lruStore has the two methods of a store that stampede calls.
type lruStore struct {
	cachestore.Store[*Product]
	lru *expirable.LRU[string, *Product]
}

func (s lruStore) Get(_ context.Context, key string) (*Product, bool, error) {
	p, ok := s.lru.Get(key)
	return p, ok, nil
}

func (s lruStore) SetEx(_ context.Context, key string, p *Product, _ time.Duration) error {
	s.lru.Add(key, p)
	return nil
}
