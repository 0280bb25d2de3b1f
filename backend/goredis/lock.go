package goredis

import (
	"context"
	"strconv"
	"time"

	"github.com/refill-go/refill"
)

// This file is users' locks. The lock is for efficiency; correctness comes from the fencing token, where the resource checks
// it.

// keepFence is how long the counter of fencing tokens outlives the last taking of its lock. It need not live longer: a
// token is never below the microseconds of Redis' clock, so that a new counter begins above all that the old one gave out,
// unless that clock was meanwhile set back by more than this.
const keepFence = 24 * time.Hour

// TryLock implements refill.LockDriver.
func (s *Store) TryLock(ctx context.Context, key, token string, ttl time.Duration) (refill.LockState, error) {
	k := s.keys(key)
	return call(ctx, &s.calls, "lock", func(ctx context.Context) (state refill.LockState, err error) {
		reply, err := lockScript.run(ctx, s.client, []string{k.lock(), k.fence()}, token, millis(ttl), millis(keepFence)).Slice()
		if err != nil {
			return state, err
		}
		if len(reply) != 2 {
			return state, errReply
		}
		if left, held := reply[1].(int64); held {
			return refill.LockState{Left: life(left)}, nil
		}
		fence, _ := reply[1].(string)
		state.Won = true
		if state.Fence, err = strconv.ParseUint(fence, 10, 64); err != nil {
			return refill.LockState{}, errReply
		}
		return state, nil
	})
}

// Extend implements refill.LockDriver.
func (s *Store) Extend(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error) {
	k := s.keys(key)
	return call(ctx, &s.spare, "extend", func(ctx context.Context) (bool, error) {
		return s.hub.steady(ctx, k, func(c client) (bool, error) {
			return extendScript.run(ctx, c, []string{k.lock()}, token, millis(ttl)).Bool()
		})
	})
}

// Unlock implements refill.LockDriver. A client that repeats it because the answer was lost is told that the lock was not
// the token's.
func (s *Store) Unlock(ctx context.Context, key, token string) (mine bool, err error) {
	k := s.keys(key)
	return call(ctx, &s.calls, "unlock", func(ctx context.Context) (bool, error) {
		return unlockScript.run(ctx, s.client, []string{k.lock()}, token, s.channel(), key).Bool()
	})
}

// Watch implements refill.LockDriver. It uses the subscription that Listen uses, and opens it if nobody listens; when
// that stands, every Watch is woken once, since something may have been missed before.
func (s *Store) Watch(key string) (wake <-chan struct{}, stop func()) {
	if s.calls.refused != nil {
		return nil, func() {}
	}
	return s.hub.watch(key)
}
