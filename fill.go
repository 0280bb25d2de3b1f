package refill

import (
	"context"
	"slices"
	"sync"
	"time"
)

// This file is a load as the load function sees it: what the function can set for its value, and what it can ask.

// Fill is the load in progress, as its load function sees it. Get a Fill with [FillFrom]. What is set on a Fill holds
// for the value that the load function returns. The methods of a Fill may be called from any goroutine. After the load
// function has returned, these methods have no effect.
type Fill struct {
	loader any    // the *Loader, to recognise a load that asks for its own key
	key    string // as storeKey has it
	given  string // as given
	outer  *Fill  // the load that this load runs inside of, or nil

	parts map[string]*Fill // of a bulk load: the Fills of its keys; written before the load begins

	previous      any // the value that this load is to replace; nil for none
	previousExtra *extra

	mu     sync.Mutex // guards the next two
	sealed bool
	terms  terms
}

// terms are what a load has set for its value, in place of the Config.
type terms struct {
	ttl, staleFor time.Duration
	ownTTL        bool
	ownStale      bool
	noStore       bool
	validator     string
	tags          []string
}

type fillKey struct{}

// FillFrom returns the load in progress that ctx belongs to. Outside of a load it returns a Fill without effect, never
// nil. So a load function can be called on its own, in a test for instance.
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

// SetTTL gives this value a TTL of its own, counted from the start of the load, in place of Config.TTL. Jitter applies
// to this TTL as well. With d at or below zero, only the callers that wait for the value get it as fresh.
func (f *Fill) SetTTL(d time.Duration) {
	f.set(func(t *terms) { t.ttl, t.ownTTL = min(max(d, 0), maxSpan), true })
}

// SetStaleFor gives this value a StaleFor of its own, in place of Config.StaleFor. A negative d counts as zero.
func (f *Fill) SetStaleFor(d time.Duration) {
	f.set(func(t *terms) { t.staleFor, t.ownStale = min(max(d, 0), maxSpan), true })
}

// Tag puts the value into groups. InvalidateTag and ExpireTag act on all values of a group. A group can be the shop
// whose prices the value shows, or a table that the value was read from. A value has at most 64 tags. A tag is any
// string but the empty one. A tagged value costs one more command when it comes from another node, and no command when
// it comes from L1.
func (f *Fill) Tag(tags ...string) {
	f.set(func(t *terms) {
		for _, tag := range tags {
			if !slices.Contains(t.tags, tag) {
				t.tags = append(t.tags, tag)
			}
		}
	})
}

// NoStore keeps this value out of the store and of L1. Only the callers of this process that wait for the value get it.
// The decision is remembered for 10 s, or as long as SetTTL says (0: not at all). Until then, callers of the key load
// in parallel, and what they load is not stored. They do not wait for a load on another node, because that load could
// not help them (Varnish calls this hit-for-miss). Refresh, Invalidate and Expire end the decision.
func (f *Fill) NoStore() { f.set(func(t *terms) { t.noStore = true }) }

// noStoreFor is how long a NoStore is remembered.
const noStoreFor = 10 * time.Second

// SetValidator stores a text with the value: an ETag, a version, a time of change. The text is at most 32 KiB. A later
// load can use it to ask whether the value is still valid, see [Previous].
func (f *Fill) SetValidator(validator string) {
	f.set(func(t *terms) { t.validator = validator })
}

// Previous returns the value that the load with this ctx is to replace, and the validator of that value. The value is
// stale, or it is fresh and is being refreshed early. ok is false if there is no such value of type V. In a bulk load
// there is none. The value may be older than an Invalidate on another node, so use it to ask the database, not to
// compute the next value.
func Previous[V any](ctx context.Context) (value V, validator string, ok bool) {
	f := FillFrom(ctx)
	value, ok = f.previous.(V)
	if f.previousExtra != nil {
		validator = f.previousExtra.validator
	}
	return value, validator, ok
}

// NotModified is for a load function whose database says that the previous value is still valid. It returns that value,
// with the validator and tags of that value, for another TTL. Without a previous value, NotModified returns an error
// that wraps [ErrInvalid].
//
//	_, version, ok := refill.Previous[Product](ctx)
//	if ok && version == current {
//		return refill.NotModified[Product](ctx)
//	}
func NotModified[V any](ctx context.Context) (V, error) {
	value, validator, ok := Previous[V](ctx)
	if !ok {
		return value, invalid("NotModified", "there is no previous value of type %T", value)
	}
	f := FillFrom(ctx)
	f.SetValidator(validator)
	if f.previousExtra != nil {
		f.Tag(f.previousExtra.tags...)
	}
	return value, nil
}

// For returns the Fill of one key of a bulk load. The key is as given to the load function. For a key that is not being
// loaded, For returns a Fill without effect. In a load of a single key, For returns f for that key.
//
// A bulk load may Get other keys. But if two bulk loads of one Loader ask for each other's keys, both loads wait until
// LoadTimeout.
func (f *Fill) For(key string) *Fill {
	switch part := f.parts[key]; {
	case part != nil:
		return part
	case f.parts == nil && f.given == key && key != "":
		return f
	}
	return new(Fill)
}

func (f *Fill) set(change func(*terms)) {
	for _, part := range f.parts {
		part.set(change)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.sealed {
		change(&f.terms)
	}
}

// seal ends the load. It returns what was set. Settings from now on are ignored.
func (f *Fill) seal() terms {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sealed = true
	return f.terms
}

// loads reports whether f loads this key for this loader. The loads that f runs inside of count as well.
func (f *Fill) loads(loader any, key string) bool {
	for ; f != nil; f = f.outer {
		if f.loader == loader && f.key == key {
			return true
		}
		for _, part := range f.parts {
			if part.loads(loader, key) {
				return true
			}
		}
	}
	return false
}
