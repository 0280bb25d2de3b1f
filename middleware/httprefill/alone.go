package httprefill

import (
	"context"
	"sync"
)

// aloneRuns bounds the runs alone: how often the handler runs at once, per URL, for requests that no longer wait for a
// shared response. Requests for a page that cannot be shared are not counted. They have a pass mark, and no run could
// answer two of them.
type aloneRuns struct {
	most int // per key; negative = no limit

	mu    sync.Mutex
	byKey map[string]*aloneKey // guarded by mu; has the keys with users
}

type aloneKey struct {
	slots chan struct{} // holds one element per run
	users int           // runs and requests that wait for a slot; guarded by aloneRuns.mu
}

func newAloneRuns(most int) *aloneRuns {
	return &aloneRuns{most: most, byKey: make(map[string]*aloneKey)}
}

// try returns a function that gives a slot back, or nil if no slot is free.
func (a *aloneRuns) try(key string) (free func()) {
	k := a.enter(key)
	if k == nil {
		return func() {}
	}
	select {
	case k.slots <- struct{}{}:
		return func() { a.end(key, k) }
	default:
		a.leave(key, k)
		return nil
	}
}

// wait waits for a slot, and returns a function that gives the slot back. It returns nil if ctx ends first.
func (a *aloneRuns) wait(ctx context.Context, key string) (free func()) {
	k := a.enter(key)
	if k == nil {
		return func() {}
	}
	select {
	case k.slots <- struct{}{}:
		return func() { a.end(key, k) }
	case <-ctx.Done():
		a.leave(key, k)
		return nil
	}
}

func (a *aloneRuns) enter(key string) *aloneKey {
	if a.most < 0 {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	k := a.byKey[key]
	if k == nil {
		k = &aloneKey{slots: make(chan struct{}, a.most)}
		a.byKey[key] = k
	}
	k.users++
	return k
}

func (a *aloneRuns) end(key string, k *aloneKey) {
	<-k.slots
	a.leave(key, k)
}

func (a *aloneRuns) leave(key string, k *aloneKey) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if k.users--; k.users == 0 {
		delete(a.byKey, key)
	}
}
