package peers

import (
	"context"
	"encoding/json"

	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidisaside"
)

var aside = Peer{
	Name: "aside", Module: "github.com/redis/rueidis/rueidisaside",
	About:  "defaults, typed client, JSON; its L1 is rueidis' client-side cache, which cannot be turned off",
	Shared: true, Local: true, Locks: true,
	Open: openAside,
}

type asideCache struct {
	Settings
	client rueidisaside.CacheAsideClient
	typed  rueidisaside.TypedCacheAsideClient[Product]
}

func openAside(s Settings) (Cache, error) {
	client, err := rueidisaside.NewClient(rueidisaside.ClientOption{
		// The client-side cache has its default of 128 MiB, which holds 100,000 Products.
		ClientOption: rueidis.ClientOption{InitAddress: []string{s.Redis}},
	})
	if err != nil {
		return nil, err
	}
	encode := func(p *Product) (string, error) {
		text, err := json.Marshal(p)
		return string(text), err
	}
	decode := func(text string) (*Product, error) {
		p := new(Product)
		return p, json.Unmarshal([]byte(text), p)
	}
	return asideCache{s, client, rueidisaside.NewTypedCacheAsideClient(client, encode, decode)}, nil
}

func (c asideCache) Get(ctx context.Context, key string) (*Product, error) {
	return c.typed.Get(ctx, c.TTL, key, c.Load)
}

// Invalidate deletes the key in Redis. Redis announces the deletion to all nodes.
func (c asideCache) Invalidate(ctx context.Context, key string) error { return c.typed.Del(ctx, key) }

func (c asideCache) Close() error {
	c.client.Close()
	return nil
}
