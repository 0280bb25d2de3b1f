package peers

import (
	"context"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/ristretto/v2"
	"github.com/maypok86/otter/v2"
	"github.com/puzpuzpuz/xsync/v4"
	"github.com/redis/go-redis/v9"
)

// A Putter is a cache that can take all values at once. A copy-on-write map needs that, because otherwise the map would
// be copied for each key.
type Putter interface {
	Put(all map[string]*Product)
}

// limit returns a peer that is a raw operation in the memory of the process.
func limit(name, module, about string, open func(Settings) (Cache, error)) Peer {
	return Peer{Name: name, Module: module, About: about, Local: true, Limit: true, Open: open}
}

// keep loads a value and gives it to put. Only misses call keep. The Get methods below look up hits in their tables
// without a helper like keep, because a call through a function value would add to the measured time.
func (s Settings) keep(ctx context.Context, key string, put func(string, *Product)) (*Product, error) {
	p, err := s.Load(ctx, key)
	if err == nil {
		put(key, p)
	}
	return p, err
}

type ristrettoCache struct {
	Settings
	*ristretto.Cache[string, *Product]
	ttl time.Duration
}

func openRistretto(s Settings, ttl time.Duration) (Cache, error) {
	c, err := ristretto.NewCache(&ristretto.Config[string, *Product]{
		NumCounters: int64(s.Entries) * 10, MaxCost: int64(s.Entries), BufferItems: 64, IgnoreInternalCost: true,
	})
	return ristrettoCache{s, c, ttl}, err
}

func (c ristrettoCache) Get(ctx context.Context, key string) (*Product, error) {
	if p, ok := c.Cache.Get(key); ok {
		return p, nil
	}
	return c.keep(ctx, key, func(key string, p *Product) {
		c.SetWithTTL(key, p, 1, c.ttl)
		c.Wait()
	})
}

func (c ristrettoCache) Close() error {
	c.Cache.Close()
	return nil
}

type otterGet struct {
	Settings
	*otter.Cache[string, *Product]
}

func openOtterGet(s Settings) (Cache, error) {
	c, err := otter.New(&otter.Options[string, *Product]{MaximumSize: s.Entries})
	return otterGet{s, c}, err
}

func (c otterGet) Get(ctx context.Context, key string) (*Product, error) {
	if p, ok := c.GetIfPresent(key); ok {
		return p, nil
	}
	return c.keep(ctx, key, func(key string, p *Product) { c.Set(key, p) })
}

func (c otterGet) Close() error {
	c.StopAllGoroutines()
	return nil
}

type xsyncMap struct {
	Settings
	*xsync.Map[string, *Product]
}

func (c xsyncMap) Get(ctx context.Context, key string) (*Product, error) {
	if p, ok := c.Map.Load(key); ok {
		return p, nil
	}
	return c.keep(ctx, key, c.Store)
}

func (xsyncMap) Close() error { return nil }

type cowMap struct {
	Settings
	table atomic.Pointer[map[string]*Product]
	mu    sync.Mutex // held by a writer; readers need no lock
}

func (c *cowMap) Get(ctx context.Context, key string) (*Product, error) {
	if p, ok := (*c.table.Load())[key]; ok {
		return p, nil
	}
	return c.keep(ctx, key, func(key string, p *Product) { c.Put(map[string]*Product{key: p}) })
}

// Put copies the table once for all values.
func (c *cowMap) Put(all map[string]*Product) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := maps.Clone(*c.table.Load())
	maps.Copy(next, all)
	c.table.Store(&next)
}

func (*cowMap) Close() error { return nil }

type lockedMap struct {
	Settings
	mu    sync.RWMutex
	table map[string]*Product
}

func (c *lockedMap) Get(ctx context.Context, key string) (*Product, error) {
	c.mu.RLock()
	p, ok := c.table[key]
	c.mu.RUnlock()
	if ok {
		return p, nil
	}
	return c.keep(ctx, key, func(key string, p *Product) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.table[key] = p
	})
}

func (*lockedMap) Close() error { return nil }

var rawGet = Peer{
	Name: "goredis-get", Module: "github.com/redis/go-redis/v9",
	About: "GET alone, nothing is decoded", Shared: true, Limit: true,
	Open: func(s Settings) (Cache, error) { return rawGetCache{dial(s)}, nil },
}

type rawGetCache struct{ remote }

func (c rawGetCache) Get(ctx context.Context, key string) (*Product, error) {
	_, err := c.Client.Get(ctx, key).Bytes()
	if errors.Is(err, redis.Nil) {
		return c.fill(ctx, key)
	}
	return undecoded, err
}

// undecoded is the result of a Get that does not decode the value.
var undecoded = new(Product)

var limits = []Peer{
	limit("ristretto", "github.com/dgraph-io/ristretto/v2", "Get, no TTL: the yardstick of L1",
		func(s Settings) (Cache, error) { return openRistretto(s, 0) }),
	limit("ristretto-ttl", "github.com/dgraph-io/ristretto/v2", "Get, with TTL",
		func(s Settings) (Cache, error) { return openRistretto(s, s.TTL) }),
	limit("otter-get", "github.com/maypok86/otter/v2", "GetIfPresent, no expiry", openOtterGet),
	limit("table", "", "a bare array of atomic pointers, with the checks of a hit: no bound, no policy", openBareTable),
	limit("xsync", "github.com/puzpuzpuz/xsync/v4", "Map.Load",
		func(s Settings) (Cache, error) { return xsyncMap{s, xsync.NewMap[string, *Product]()}, nil }),
	limit("cowmap", "", "an atomic pointer to a map that writers copy", func(s Settings) (Cache, error) {
		c := &cowMap{Settings: s}
		c.table.Store(&map[string]*Product{})
		return c, nil
	}),
	limit("rwmutex-map", "", "a map behind a sync.RWMutex",
		func(s Settings) (Cache, error) { return &lockedMap{Settings: s, table: map[string]*Product{}}, nil }),
	rawGet,
	rueidisGet,
	pushed,
}
