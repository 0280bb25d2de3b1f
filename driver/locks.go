package driver

import (
	"context"
	"time"
)

// Locks is a lock service as a Locker sees it. The rules of [Store] for keys, tokens and ctx hold here as well.
type Locks interface {
	// TryLock takes the lock for ttl if it is free. A lock that belongs to the token already counts as taken: the reply to
	// an earlier try was lost.
	TryLock(ctx context.Context, key, token string, ttl time.Duration) (LockResult, error)
	// Extend sets the remaining life of the lock to ttl if the lock belongs to the token. It never creates a lock.
	Extend(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error)
	// Unlock frees the lock if it belongs to the token, and wakes those who watch it.
	Unlock(ctx context.Context, key, token string) (mine bool, err error)
	// Watch makes wake ready whenever the lock may have become free, from its return until stop is called. A wake-up is a
	// hint: the Locker tries again, and it never sleeps longer than the lock lives.
	Watch(key string) (wake <-chan struct{}, stop func())
	// Check returns what is wrong with the configuration of the service, without calling it.
	Check() error
}

// LockResult is the reply of [Locks.TryLock].
type LockResult struct {
	Won   bool
	Fence uint64        // if won: larger than the fence of every earlier holder of this key; 0 = the service has none
	Left  time.Duration // if not won: remaining life of the holder's lock
}
