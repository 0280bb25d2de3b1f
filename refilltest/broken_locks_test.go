package refilltest

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/refill-go/refill/driver"
)

// brokenLock is a lock of a place.
type brokenLock struct {
	holder  slot
	fence   uint64
	watches []*brokenWatch
}

type brokenWatch struct {
	signal chan struct{}
	node   string
}

func (w *brokenWatch) wake() {
	select {
	case w.signal <- struct{}{}:
	default:
	}
}

func (p *place) lockWorld(testing.TB) LockWorld {
	return LockWorld{
		A: &node{p, "a"}, B: &node{p, "b"},
		Delete: func(key string) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.locks[key].holder = slot{}
		},
		Silence: p.silent.Store,
		Break:   p.breakAll,
	}
}

func (n *node) lock(ctx context.Context, key string, step func(k *brokenLock, now time.Time)) error {
	if err := n.answer(ctx); err != nil {
		return err
	}
	if n.is("keys-fold") {
		key = strings.ToLower(key)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	k := n.locks[key]
	if k == nil {
		k = new(brokenLock)
		n.locks[key] = k
	}
	if n.is("locks-are-leases") {
		k.holder = *n.cell(key).lease
	}
	now := time.Now()
	if !now.Before(k.holder.until) && !n.is("lock-endless") {
		if k.holder.data != "" && n.is("fence-restarts-at-end") {
			k.fence = 0
		}
		k.holder = slot{}
	}
	step(k, now)
	if n.is("locks-are-leases") {
		*n.cell(key).lease = k.holder
	}
	return nil
}

func (n *node) TryLock(ctx context.Context, key, token string, ttl time.Duration) (s driver.LockResult, err error) {
	err = n.lock(ctx, key, func(k *brokenLock, now time.Time) {
		was := k.holder
		n.gap("lock-race")
		switch {
		case was.data == "", n.is("lock-shared"):
			if !n.is("fence-constant") || k.fence == 0 {
				k.fence++
			}
			k.holder = slot{data: token, until: now.Add(ttl)}
			s.Won, s.Fence = true, k.fence
		case was.data == token && !n.is("own-token-lost"):
			if n.is("own-token-new-fence") {
				k.fence++
			}
			k.holder.until = now.Add(ttl)
			s.Won, s.Fence = true, k.fence
		case n.is("lock-left-missing"):
		case n.is("lock-left-long"):
			s.Left = 24 * time.Hour
		default:
			s.Left = was.until.Sub(now)
		}
		if n.is("fence-missing") {
			s.Fence = 0
		}
	})
	return s, err
}

func (n *node) Extend(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error) {
	err = n.lock(ctx, key, func(k *brokenLock, now time.Time) {
		mine = k.holder.data == token
		switch {
		case n.is("extend-any"):
			k.holder.until = now.Add(ttl)
		case n.is("extend-creates") && k.holder.data == "":
			k.holder = slot{data: token, until: now.Add(ttl)}
		case n.is("extend-only-more"):
			if mine && now.Add(ttl).After(k.holder.until) {
				k.holder.until = now.Add(ttl)
			}
		case n.is("extend-blind"):
			mine = true
			if k.holder.data == token {
				k.holder.until = now.Add(ttl)
			}
		case mine && !n.is("extend-idle"):
			k.holder.until = now.Add(ttl)
		}
	})
	return mine, err
}

func (n *node) Unlock(ctx context.Context, key, token string) (mine bool, err error) {
	err = n.lock(ctx, key, func(k *brokenLock, _ time.Time) {
		mine = k.holder.data == token
		if !mine && !n.is("unlock-any") {
			mine = n.is("unlock-says-yes")
			return
		}
		if !n.is("unlock-idle") {
			k.holder = slot{}
		}
		if n.is("fence-restarts") {
			k.fence = 0
		}
		for i, w := range k.watches {
			if n.is("wake-none") || n.is("wake-one") && i > 0 || n.is("wake-own-node") && w.node != n.id {
				continue
			}
			w.wake()
		}
		if n.is("wake-once") {
			k.watches = nil
		}
	})
	return mine, err
}

func (n *node) Watch(key string) (wake <-chan struct{}, stop func()) {
	w := &brokenWatch{make(chan struct{}, 1), n.id}
	_ = n.lock(context.Background(), key, func(k *brokenLock, _ time.Time) { k.watches = append(k.watches, w) })
	return w.signal, func() {
		_ = n.lock(context.Background(), key, func(k *brokenLock, _ time.Time) {
			k.watches = slices.DeleteFunc(k.watches, func(x *brokenWatch) bool {
				return x == w && !n.is("watch-stays") || n.is("watch-stops-all")
			})
		})
	}
}
