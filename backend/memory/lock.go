package memory

import (
	"context"
	"time"

	"github.com/refill-go/refill/driver"
)

// lock is one lock with its watchers.
type lock struct {
	holder   expiring
	fence    uint64 // of the present holder, or of the last one
	watchers map[chan struct{}]struct{}
}

// updateLock runs step on the lock of key, under s.mu. It drops the lock if step leaves neither a holder nor a
// watcher.
func (s *Store) updateLock(key string, step func(l *lock, now time.Time)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, now := s.locks[key], s.Now()
	if l == nil {
		s.sweepLocks(now)
		l = &lock{watchers: make(map[chan struct{}]struct{})}
		s.locks[key] = l
	}
	l.holder.current(now)
	step(l, now)
	if l.holder.data == "" && len(l.watchers) == 0 {
		delete(s.locks, key)
	}
}

// sweepLocks drops a few random locks that have ended and have no watcher.
func (s *Store) sweepLocks(now time.Time) {
	looked := 0
	for key, l := range s.locks {
		if looked++; looked > lookedAt {
			return
		}
		if l.holder.current(now) == "" && len(l.watchers) == 0 {
			delete(s.locks, key)
		}
	}
}

// TryLock implements driver.Locks.
func (s *Store) TryLock(ctx context.Context, key, token string, ttl time.Duration) (r driver.LockResult, err error) {
	if err := ctx.Err(); err != nil {
		return r, err
	}
	s.updateLock(key, func(l *lock, now time.Time) {
		switch l.holder.data {
		case "":
			s.fence++
			l.fence = s.fence
			fallthrough
		case token:
			l.holder = expiring{data: token, until: now.Add(ttl)}
			r.Won, r.Fence = true, l.fence
		default:
			r.Left = l.holder.until.Sub(now)
		}
	})
	return r, nil
}

// Extend implements driver.Locks.
func (s *Store) Extend(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	s.updateLock(key, func(l *lock, now time.Time) {
		if mine = l.holder.data == token; mine {
			l.holder.until = now.Add(ttl)
		}
	})
	return mine, nil
}

// Unlock implements driver.Locks.
func (s *Store) Unlock(ctx context.Context, key, token string) (mine bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	s.updateLock(key, func(l *lock, _ time.Time) {
		if mine = l.holder.data == token; !mine {
			return
		}
		l.holder = expiring{}
		for wake := range l.watchers {
			signal(wake)
		}
	})
	return mine, nil
}

// Watch implements driver.Locks.
func (s *Store) Watch(key string) (wake <-chan struct{}, stop func()) {
	c := make(chan struct{}, 1)
	s.updateLock(key, func(l *lock, _ time.Time) { l.watchers[c] = struct{}{} })
	return c, func() {
		s.updateLock(key, func(l *lock, _ time.Time) { delete(l.watchers, c) })
	}
}
