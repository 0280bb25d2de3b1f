package driver

import (
	"context"
	"time"
)

// Locks is a lock service as a Locker sees it. The rules of [Store] for keys, tokens and ctx hold here as well.
type Locks interface {
	// TryLock takes the lock for ttl if it is free. If the lock already belongs to the token, TryLock also succeeds: the
	// reply to an earlier try was lost.
	TryLock(ctx context.Context, key, token string, ttl time.Duration) (LockResult, error)
	// Extend sets the remaining life of the lock to ttl if the lock belongs to the token. It never creates a lock.
	Extend(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error)
	// Unlock frees the lock if it belongs to the token, and wakes its watchers.
	Unlock(ctx context.Context, key, token string) (mine bool, err error)
	// Watch makes wake ready whenever the lock may have become free, from the return of Watch until stop is called. A
	// wake-up is a hint: the Locker then tries again. The Locker never sleeps longer than the lock lives.
	Watch(key string) (wake <-chan struct{}, stop func())
	// Check returns what is wrong with the configuration of the service. It does not call the service.
	Check() error
}

// LockResult is the reply of [Locks.TryLock].
type LockResult struct {
	Won   bool
	Fence uint64        // if won: larger than the fence of every earlier holder of this key; 0 = the service has none
	Left  time.Duration // if not won: remaining life of the holder's lock
}
