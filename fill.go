package refill

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Fill is the load in progress, as its load function sees it: what it says here holds for the value that it returns.
// Get it with [FillFrom]. Its methods may be called from any goroutine; after the load function has returned they do
// nothing.
type Fill struct {
	loader any    // the *Loader, to recognise a load that asks for its own key
	key    string // as spelled
	given  string // as given
	outer  *Fill  // the load that this one runs inside of, or nil

	parts map[string]*Fill // of a bulk load: those of its keys; written before it begins

	previous any // the value that this load is to replace, nil for none
	old      *more

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
	validator     string
	tags          []string
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

// Tag puts the value into groups that InvalidateTag and ExpireTag void at once: the shop whose prices it shows, the tables
// that it was read from. At most 64, in any spelling but the empty one. A tagged value costs one more command when it
// comes from another node, none when it comes from L1.
func (f *Fill) Tag(tags ...string) {
	f.set(func(t *terms) {
		for _, tag := range tags {
			if !slices.Contains(t.tags, tag) {
				t.tags = append(t.tags, tag)
			}
		}
	})
}

// NoStore keeps this value out of the store and of L1: it goes to those in this process who wait for it, and to nobody else.
// That is remembered, for 10 s or what SetTTL says (0: not at all): until then a load of the key waits for none on another
// node, since none can help it (Varnish calls it hit-for-miss), and what it returns is not stored, either. Refresh,
// Invalidate and Expire end it.
func (f *Fill) NoStore() { f.set(func(t *terms) { t.noStore = true }) }

// noStoreFor is how long a NoStore is remembered.
const noStoreFor = 10 * time.Second

// SetValidator keeps a text beside the value (an ETag, a version, a time of change) by which a later load can ask whether
// the value is still good, see [Previous]. At most 32 KiB.
func (f *Fill) SetValidator(validator string) {
	f.set(func(t *terms) { t.validator = validator })
}

// Previous returns the value that the load with this ctx is to replace, and its validator, if there is one of type V: a
// stale one, or a fresh one that is refreshed early; in a bulk load none. It may be older than an Invalidate that has just
// been made elsewhere, so it is something to ask with, not to build on.
func Previous[V any](ctx context.Context) (value V, validator string, ok bool) {
	f := FillFrom(ctx)
	value, ok = f.previous.(V)
	if f.old != nil {
		validator = f.old.validator
	}
	return value, validator, ok
}

// NotModified is what a load function returns when the database says that the previous value is still good: the value with
// its validator and its tags, for another life. Without a previous value it returns an error that wraps ErrInvalid.
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
	if f.old != nil {
		f.Tag(f.old.tags...)
	}
	return value, nil
}

// For returns the fill of one key of a bulk load, as given to it; for a key that is not being loaded one that nobody looks
// at. In a load of a single key it returns f for that key.
//
// A bulk load may Get other keys; but two bulk loads of one Loader that ask for each other's keys wait until LoadTimeout.
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
		for _, part := range f.parts {
			if part.loads(loader, key) {
				return true
			}
		}
	}
	return false
}
