package peers

import (
	"context"
	"time"
)

const (
	pollLockTTL  = 5 * time.Second
	pollInterval = 50 * time.Millisecond
)

var polling = Peer{
	Name: "polllock", Module: "github.com/redis/go-redis/v9",
	About:  "by hand: GET, a lock by SET NX PX 5 s, a second GET under it, losers poll each 50 ms; JSON",
	Shared: true, Locks: true,
	Open: func(s Settings) (Cache, error) { return pollCache{dial(s)}, nil },
}

type pollCache struct{ remote }

func (c pollCache) Get(ctx context.Context, key string) (*Product, error) {
	lock := key + ":lock"
	for {
		if p, err := c.read(ctx, key); p != nil || err != nil {
			return p, err
		}
		won, err := c.SetNX(ctx, lock, 1, pollLockTTL).Result()
		if err != nil {
			return nil, err
		}
		if won {
			return c.locked(ctx, key, lock)
		}
		select {
		case <-time.After(pollInterval):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// locked reads again before it loads, because another caller may have filled the key just before this caller got the
// lock.
func (c pollCache) locked(ctx context.Context, key, lock string) (*Product, error) {
	defer c.Del(context.WithoutCancel(ctx), lock)
	if p, err := c.read(ctx, key); p != nil || err != nil {
		return p, err
	}
	return c.fill(ctx, key)
}
