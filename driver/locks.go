package driver

import (
	"context"
	"time"
)

// Locks is a lock service as a Locker sees it. The rules of [Store] for keys, tokens and ctx hold here as well.
type Locks interface {
	// TryLock takes the lock for ttl if the lock is free. TryLock also succeeds if the lock already belongs to the
	// token, because the reply to an earlier try may have been lost.
	TryLock(ctx context.Context, key, token string, ttl time.Duration) (LockResult, error)
	// Extend sets the remaining life of the lock to ttl if the lock belongs to the token. It never creates a lock.
	Extend(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error)
	// Unlock frees the lock if the lock belongs to the token. It then wakes every Watch of key.
	Unlock(ctx context.Context, key, token string) (mine bool, err error)
	// Watch returns a channel that receives a wake-up whenever the lock may have become free, until stop is called.
	// After a wake-up, the Locker tries to take the lock again. A lost wake-up costs only time, because the Locker never
	// sleeps longer than the lock lives.
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
