package refill

import (
	"context"
	"sync"
	"time"
)

// Fill is the load in progress, as its load function sees it: what it says here holds for the value that it returns.
// Get it with [FillFrom]. Its methods may be called from any goroutine; after the load function has returned they do
// nothing.
type Fill struct {
	loader any    // the *Loader, to recognise a load that asks for its own key
	key    string // as given to Get
	outer  *Fill  // the load that this one runs inside of, or nil

	mu     sync.Mutex
	sealed bool
	terms  terms
}

// terms are what one value gets instead of what the Config says.
type terms struct {
	ttl, staleFor time.Duration
	ownTTL        bool
	ownStale      bool
	noStore       bool
}

type fillKey struct{}

// FillFrom returns the load in progress that ctx belongs to. Outside of one it returns a Fill that nobody looks at, never
// nil: a load function can be called on its own, in a test for instance.
func FillFrom(ctx context.Context) *Fill {
	if f := outerFill(ctx); f != nil {
		return f
	}
	return new(Fill)
}

func outerFill(ctx context.Context) *Fill {
	f, _ := ctx.Value(fillKey{}).(*Fill)
	return f
}

// SetTTL gives this value a TTL of its own, counted from the start of the load, in place of Config.TTL. Jitter applies to
// it, too. At or below zero the value goes to those who wait for it and is not fresh for anybody else.
func (f *Fill) SetTTL(d time.Duration) {
	f.set(func(t *terms) { t.ttl, t.ownTTL = min(max(d, 0), maxSpan), true })
}

// SetStaleFor gives this value a StaleFor of its own, in place of Config.StaleFor. Below zero is zero.
func (f *Fill) SetStaleFor(d time.Duration) {
	f.set(func(t *terms) { t.staleFor, t.ownStale = min(max(d, 0), maxSpan), true })
}

// NoStore keeps this value out of the store and of L1. Those who wait for it in this process get it; on other nodes one
// who waits loads next.
func (f *Fill) NoStore() { f.set(func(t *terms) { t.noStore = true }) }

func (f *Fill) set(change func(*terms)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.sealed {
		change(&f.terms)
	}
}

// seal ends the load: what it said is returned, and what it says from now on is ignored.
func (f *Fill) seal() terms {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sealed = true
	return f.terms
}

// loads reports whether ctx belongs to a load of this key by this loader, however deep inside.
func (f *Fill) loads(loader any, key string) bool {
	for ; f != nil; f = f.outer {
		if f.loader == loader && f.key == key {
			return true
		}
	}
	return false
}
