package peers

import (
	"context"
	"encoding/json"
	"errors"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/codec"
)

var refillJSON = Peer{
	Name: "refill", Module: "github.com/refill-go/refill",
	About:  "defaults, JSON",
	Shared: true, Local: true, Stale: true, Locks: true,
	Open: func(s Settings) (Cache, error) { return openRefill(s, nil) },
}

type refiller struct {
	*refill.Loader[*Product]
	client redis.UniversalClient // nil: no Redis
}

func openRefill(s Settings, codec refill.Codec) (Cache, error) {
	var r refiller
	if s.Redis != "" {
		r.client = redis.NewUniversalClient(&redis.UniversalOptions{
			Addrs: strings.Split(s.Redis, ","), ContextTimeoutEnabled: true,
		})
	}
	c := s.config(r.client)
	c.Codec = codec
	var err error
	r.Loader, err = refill.New("product", s.Load, c)
	return r, err
}

func (s Settings) config(client redis.UniversalClient) refill.Config {
	c := refill.Config{TTL: s.TTL, StaleFor: s.StaleFor, LocalEntries: s.Entries, LocalBytes: -1, Jitter: s.Jitter}
	if s.NoLocal {
		c.LocalTTL = -1
	}
	if client != nil {
		c.Shared = goredis.New(client)
	}
	return c
}

// Invalidate invalidates one key.
func (r refiller) Invalidate(ctx context.Context, key string) error {
	return r.Loader.Invalidate(ctx, key)
}

func (r refiller) Close() error {
	err := r.Loader.Close()
	if r.client != nil {
		err = errors.Join(err, r.client.Close())
	}
	return err
}

// Codecs returns refill with codecs other than JSON. The suite l2 measures these peers to show the cost of the codec.
func Codecs() []Peer {
	return []Peer{
		{
			Name: "refill-raw", Module: refillJSON.Module, About: "V is []byte, stored as it is and not decoded",
			Shared: true, Local: true, Stale: true, Locks: true, Limit: true,
			Open: openRaw,
		},
		{
			Name: "refill-cbor", Module: refillJSON.Module + "/codec", About: "Codec: codec.CBOR",
			Shared: true, Local: true, Stale: true, Locks: true,
			Open: func(s Settings) (Cache, error) { return openRefill(s, codec.CBOR) },
		},
	}
}

type rawRefiller struct {
	client *redis.Client
	loader *refill.Loader[[]byte]
}

func openRaw(s Settings) (Cache, error) {
	client := dial(s).Client
	loader, err := refill.New("product", func(ctx context.Context, key string) ([]byte, error) {
		p, err := s.Load(ctx, key)
		if err != nil {
			return nil, err
		}
		return json.Marshal(p)
	}, s.config(client))
	return rawRefiller{client, loader}, err
}

func (r rawRefiller) Get(ctx context.Context, key string) (*Product, error) {
	_, err := r.loader.Get(ctx, key)
	return undecoded, err
}

func (r rawRefiller) Close() error { return errors.Join(r.loader.Close(), r.client.Close()) }
