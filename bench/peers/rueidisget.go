package peers

import (
	"context"
	"encoding/json"

	"github.com/redis/rueidis"
)

var rueidisGet = Peer{
	Name: "rueidis-get", Module: "github.com/redis/rueidis",
	About:  "GET alone over rueidis, without its client-side cache; it gathers the GETs of concurrent callers",
	Shared: true, Limit: true,
	Open: openRueidisGet,
}

type rueidisGetCache struct {
	Settings
	client rueidis.Client
}

func openRueidisGet(s Settings) (Cache, error) {
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.Redis}, DisableCache: true})
	return rueidisGetCache{s, client}, err
}

func (c rueidisGetCache) Get(ctx context.Context, key string) (*Product, error) {
	_, err := c.client.Do(ctx, c.client.B().Get().Key(key).Build()).AsBytes()
	if !rueidis.IsRedisNil(err) {
		return undecoded, err
	}
	p, err := c.Load(ctx, key)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	set := c.client.B().Set().Key(key).Value(rueidis.BinaryString(text)).Px(c.TTL)
	return p, c.client.Do(ctx, set.Build()).Error()
}

func (c rueidisGetCache) Close() error {
	c.client.Close()
	return nil
}
