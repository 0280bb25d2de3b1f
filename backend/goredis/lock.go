package goredis

import (
	"context"
	"strconv"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file implements users' locks. A lock is for efficiency. Correctness comes from the fencing token, if the
// resource checks the token.

// keepFence is how long the counter of fencing tokens lives after its lock was last taken. A longer life is not
// needed, because a fencing token is never below the time of Redis' clock in microseconds. So a new counter starts
// above all tokens of the old counter, unless Redis' clock was meanwhile set back by more than keepFence.
const keepFence = 24 * time.Hour

// TryLock implements driver.Locks.
func (s *Store) TryLock(ctx context.Context, key, token string, ttl time.Duration) (driver.LockResult, error) {
	k := s.keys(key)
	return call(ctx, &s.calls, "lock", func(ctx context.Context) (driver.LockResult, error) {
		reply, err := lockScript.run(ctx, &s.known, s.client, []string{k.lock(), k.fence()},
			token, millis(ttl), millis(keepFence)).Slice()
		if err != nil {
			return driver.LockResult{}, err
		}
		if len(reply) != 2 {
			return driver.LockResult{}, errReply
		}
		if left, held := reply[1].(int64); held {
			return driver.LockResult{Left: life(left)}, nil
		}
		text, _ := reply[1].(string)
		fence, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return driver.LockResult{}, errReply
		}
		return driver.LockResult{Won: true, Fence: fence}, nil
	})
}

// Extend implements driver.Locks.
func (s *Store) Extend(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error) {
	k := s.keys(key)
	return call(ctx, &s.renewals, "extend", func(ctx context.Context) (bool, error) {
		return s.pubsub.onOwnClient(ctx, k, func(c client) (bool, error) {
			return extendScript.run(ctx, &s.known, c, []string{k.lock()}, token, millis(ttl)).Bool()
		})
	})
}

// Unlock implements driver.Locks. If go-redis repeats the call because the reply was lost, the second reply says that
// the lock did not belong to the token.
func (s *Store) Unlock(ctx context.Context, key, token string) (mine bool, err error) {
	k := s.keys(key)
	return call(ctx, &s.calls, "unlock", func(ctx context.Context) (bool, error) {
		return unlockScript.run(ctx, &s.known, s.client, []string{k.lock()}, token, s.channel, key).Bool()
	})
}

// Watch implements driver.Locks. It uses the subscription of the Store, and opens one if none runs. Once a new
// subscription works, the Store wakes every Watch once, because an Unlock may have been missed before.
func (s *Store) Watch(key string) (wake <-chan struct{}, stop func()) {
	if s.calls.refused != nil {
		return nil, func() {}
	}
	return s.pubsub.watch(key)
}
