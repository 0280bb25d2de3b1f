package peers

import (
	"context"

	"github.com/mgtv-tech/jetcache-go"
	"github.com/mgtv-tech/jetcache-go/local"
	jetremote "github.com/mgtv-tech/jetcache-go/remote"
)

var jet = Peer{
	Name: "jetcache", Module: "github.com/mgtv-tech/jetcache-go",
	About: "its TinyLFU in front, for another TTL; msgpack, in both levels; StaleFor: a timer refreshes each key in use " +
		"once per TTL",
	Shared: true, Local: true, Stale: true,
	Open: openJet,
}

// jetRoom is the factor by which openJet enlarges L1. jetcache gives ristretto a bound in entries, but ristretto adds
// its overhead of 56 bytes to the cost of each entry. So each entry takes the room of 57 entries.
const jetRoom = 64

type jetCache struct {
	remote
	cache cache.Cache
}

func openJet(s Settings) (Cache, error) {
	r := dial(s)
	o := []cache.Option{
		cache.WithRemote(jetremote.NewGoRedisV9Adapter(r.Client)),
		cache.WithRemoteExpiry(s.TTL + s.StaleFor),
		cache.WithStatsDisabled(true), // by default jetcache logs statistics each minute
	}
	if !s.NoLocal {
		o = append(o, cache.WithLocal(local.NewTinyLFU(s.Entries*jetRoom, s.TTL+s.StaleFor)))
	}
	if s.StaleFor > 0 {
		o = append(o, cache.WithRefreshDuration(s.TTL)) // jetcache refreshes after 1 s at the earliest
	}
	return jetCache{r, cache.New(o...)}, nil
}

func (c jetCache) Get(ctx context.Context, key string) (*Product, error) {
	p := new(Product)
	load := func(ctx context.Context) (any, error) { return c.Load(ctx, key) }
	return p, c.cache.Once(ctx, key, cache.Value(p), cache.Do(load), cache.Refresh(c.StaleFor > 0))
}

// Invalidate deletes the key in Redis and in this process.
func (c jetCache) Invalidate(ctx context.Context, key string) error { return c.cache.Delete(ctx, key) }

func (c jetCache) Close() error {
	c.cache.Close()
	return c.remote.Close()
}
