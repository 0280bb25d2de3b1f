package peers

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/dtm-labs/rockscache"
)

var (
	rocksWeak = Peer{
		Name: "rocks-weak", Module: "github.com/dtm-labs/rockscache",
		About:  "defaults, no jitter; JSON",
		Shared: true, Locks: true,
		Open: func(s Settings) (Cache, error) { return openRocks(s, false) },
	}
	rocksStrong = Peer{
		Name: "rocks-strong", Module: "github.com/dtm-labs/rockscache",
		About:  "StrongConsistency, no jitter; JSON",
		Shared: true, Locks: true,
		Open: func(s Settings) (Cache, error) { return openRocks(s, true) },
	}
)

type rocks struct {
	remote
	cache *rockscache.Client
}

func openRocks(s Settings, strong bool) (Cache, error) {
	o := rockscache.NewDefaultOptions()
	o.StrongConsistency = strong
	o.RandomExpireAdjustment = 0 // no jitter: rockscache rounds TTL minus jitter down to seconds, so 1 s would become 0
	r := dial(s)
	return rocks{r, rockscache.NewClient(r.Client, o)}, nil
}

func (c rocks) Get(ctx context.Context, key string) (*Product, error) {
	ttl := c.TTL + c.cache.Options.Delay // plus Delay, because Fetch subtracts Delay
	text, err := c.cache.Fetch2(ctx, key, ttl, func() (string, error) {
		p, err := c.Load(ctx, key) // in weak mode, this may run after Get has returned
		if err != nil {
			return "", err
		}
		text, err := json.Marshal(p)
		return string(text), err
	})
	if err != nil {
		return nil, err
	}
	if text == "" {
		return nil, errors.New("rockscache: empty")
	}
	p := new(Product)
	return p, json.Unmarshal([]byte(text), p)
}

// Invalidate marks the key as deleted. In weak mode, readers get the old value until the new value is stored.
func (c rocks) Invalidate(ctx context.Context, key string) error {
	return c.cache.TagAsDeleted2(ctx, key)
}
