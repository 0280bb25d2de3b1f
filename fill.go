package refill

import (
	"context"
	"slices"
	"sync"
	"time"
)

// This file is what a load function can use: Fill to set the TTL, the tags and more of its value, and Previous to get
// the value that is to be replaced.

// Fill is the load in progress, as its load function sees it. Get a Fill with [FillFrom]. What is set on a Fill holds
// for the value that the load function returns, and some settings hold for its absence or its failure. The page
// docs/what-a-load-may-say.md has a table. The methods of a Fill may be called from any goroutine. After the load
// function has returned, these methods have no effect.
type Fill struct {
	loader any    // the *Loader, to recognise a load that asks for its own key
	key    string // as storeKey returns it
	given  string // as the caller gave it; empty for the Fill of a whole bulk load
	outer  *Fill  // the load that this load runs inside of, or nil

	parts map[string]*Fill // of a bulk load: the Fills of its keys; written before the load begins

	previous      any    // the value that this load is to replace; nil for none
	previousExtra *extra // validator and tags of previous

	mu     sync.Mutex // guards the next two
	sealed bool
	terms  terms
}

// terms are what a load has set for its value. They replace the settings of Config, except that the value has
// Config.Tags as well.
type terms struct {
	ttl, staleFor, staleIfError ownSpan
	errorTTL                    ownSpan
	keep                        time.Duration
	noStore                     bool
	validator                   string
	tags                        []string
}

// ownSpan is a duration that a load may have set.
type ownSpan struct {
	d   time.Duration // from 0 to maxSpan
	set bool
}

func own(d time.Duration) ownSpan { return ownSpan{min(max(d, 0), maxSpan), true} }

// or returns the duration that the load has set, or else byDefault.
func (o ownSpan) or(byDefault time.Duration) time.Duration {
	if o.set {
		return o.d
	}
	return byDefault
}

type fillKey struct{}

// FillFrom returns the Fill of the load that ctx belongs to. If ctx belongs to no load, FillFrom returns a Fill without
// effect, not nil. So a load function also works if a test calls it directly.
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

// withoutFill returns ctx without its Fill, for work that the load of this Fill does not wait for.
func withoutFill(ctx context.Context) context.Context {
	if outerFill(ctx) == nil {
		return ctx
	}
	return context.WithValue(ctx, fillKey{}, (*Fill)(nil))
}

// SetTTL gives this value a TTL of its own, counted from the start of the load, in place of Config.TTL. For an absence
// ([ErrNotFound]), d replaces Config.NotFoundTTL. Jitter applies to this TTL as well. If d is zero or negative, the
// value is not kept: only the callers that wait for this load get the value, on this node and on other nodes. Such a
// value is not served as stale either, unless the load sets StaleFor or StaleIfError itself.
//
// Every duration that a load sets is cut to 20 years.
func (f *Fill) SetTTL(d time.Duration) { f.set(func(t *terms) { t.ttl = own(d) }) }

// SetStaleFor gives this value a StaleFor of its own, in place of Config.StaleFor. If neither Config nor the load sets
// StaleIfError, d is the StaleIfError of the value as well. A negative d counts as zero. For an absence, SetStaleFor
// has no effect, because an absence is never stale.
func (f *Fill) SetStaleFor(d time.Duration) { f.set(func(t *terms) { t.staleFor = own(d) }) }

// SetStaleIfError gives this value a StaleIfError of its own, in place of Config.StaleIfError. A negative d counts as
// zero. A StaleIfError below StaleFor has no effect. For an absence, SetStaleIfError has no effect.
//
// If the load fails, d limits how long the old value may be served in place of the error. The limit counts from the end
// of the TTL of the old value. While the limit lasts, the old value is served, and the next failing load sets a limit
// of its own. When the limit is over, the old value is removed on all nodes, and callers get the error. So a load that
// calls SetStaleIfError(0) and fails forbids the old value, for instance because the access of a user was revoked. If a
// failing load sets only StaleFor, that StaleFor is the limit, or Config.StaleIfError if that was set and is longer. A
// limit never removes a value that is still fresh, and never lengthens the life of a value. If Expire has marked the
// old value as stale, the limit counts from the start of the load of that value.
func (f *Fill) SetStaleIfError(d time.Duration) { f.set(func(t *terms) { t.staleIfError = own(d) }) }

// SetErrorTTL sets the back-off after this load if the load fails, in place of Config.ErrorTTL. This back-off does not
// grow with the failures in a row. The back-off holds on this node. If another node has failed just before, the
// back-off holds on all nodes. If d is zero or negative, there is no back-off. Use SetErrorTTL, for instance, if the
// database says how long its callers should wait. SetErrorTTL has an effect only if the load fails, or if the codec
// cannot encode the value.
func (f *Fill) SetErrorTTL(d time.Duration) { f.set(func(t *terms) { t.errorTTL = own(d) }) }

// SetKeep keeps this value in the store for d after the end of its life, for [Previous] only. In that time no Get
// serves the value. But a later load, on any node, gets the value and its validator, and can ask the database whether
// the value is still valid. So a validator can outlive TTL, StaleFor and StaleIfError. Invalidate still removes the
// value. After InvalidateTag of one of its tags, Previous does not return the value. Default 0. A negative d counts as
// zero. SetKeep has no effect on an absence, on a load that fails, or on a load that calls NoStore.
func (f *Fill) SetKeep(d time.Duration) { f.set(func(t *terms) { t.keep = own(d).d }) }

// Tag adds tags to the value. InvalidateTag and ExpireTag act on all values that have a tag. A tag can name, for
// instance, the shop whose prices the value shows, or a table that the value was read from. A tag is any string but the
// empty one. A value has at most 64 tags, including Config.Tags. When a tagged value comes from the store or from
// another node, reading its tag states costs one more command. A hit in L1 costs no command.
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
// The decision is remembered for 10 s, or as long as SetTTL says (0: not at all). Until the decision is forgotten, each
// process loads the key for its own callers, without a lock, and does not store the value. No caller waits for a load
// on another node, because the other node would not store its value (Varnish calls this hit-for-miss). Refresh,
// Invalidate and Expire end the decision.
func (f *Fill) NoStore() { f.set(func(t *terms) { t.noStore = true }) }

// noStoreFor is how long a NoStore is remembered without SetTTL.
const noStoreFor = 10 * time.Second

// SetValidator stores a text with the value: an ETag, a version, a time of change. Keep the text below 32 KiB: the text
// and the tags of a value must fit into 64 KiB. A later load gets the text from [Previous], and can ask the database
// whether the value is still valid.
func (f *Fill) SetValidator(validator string) {
	f.set(func(t *terms) { t.validator = validator })
}

// Previous returns the value that the load with this ctx is to replace, and the validator of that value. That value may
// be fresh, stale, error-only, or expired, see [Fill.SetKeep]. Without SetKeep, an expired value is rarely there. ok is
// false if there is no such value of type V. In a bulk load ok is always false. The value may be older than an
// Invalidate on another node. So use the value to ask the database whether the data has changed, not to compute the
// next value.
func Previous[V any](ctx context.Context) (value V, validator string, ok bool) {
	f := FillFrom(ctx)
	value, ok = f.previous.(V)
	if f.previousExtra != nil {
		validator = f.previousExtra.validator
	}
	return value, validator, ok
}

// NotModified is for a load function whose database says that the previous value is still valid. It returns the
// previous value for another TTL, with the same validator and tags. Without a previous value, NotModified returns an
// error that wraps [ErrInvalid].
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
// loaded, For returns a Fill without effect. If f is the Fill of a load of a single key, For returns f itself for that
// key.
//
// A bulk load may Get other keys. If two bulk loads of one Loader ask for each other's keys, both loads wait until
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

// seal returns what the load has set. Later calls of set have no effect.
func (f *Fill) seal() terms {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sealed = true
	return f.terms
}

// loads reports whether f is a load of key by loader, or runs inside of such a load.
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

// nesting notes that a load of one Loader has called Get of another Loader, and decides which of these Gets are urgent.
// An urgent Get must not queue.
//
// For instance, loads of pages Get rows of another Loader. Such a Get obeys MaxLoads and MaxWaiters like any other Get.
// But if loads of rows also Get pages, queues could block both Loaders for ever: 1. Loads of pages hold all load slots
// of the pages, and wait for rows. 2. Loads of rows hold all load slots of the rows, and wait for pages. In this case
// the Gets inside of the loads are urgent.
type nesting struct {
	mu   sync.Mutex
	asks map[any]map[any]bool // asks[a][b]: a load of the Loader a has asked the Loader b
}

var nested nesting

// enter notes that a load calls Get of loader. outer is that load, and outer.outer is the load that it runs inside of.
// enter reports whether the Get is urgent. The Get is urgent if loads of loader may, directly or through other Loaders,
// Get keys of the Loader of one of these outer loads. The outer load may then hold the slot that the queue waits for.
func (n *nesting) enter(outer *Fill, loader any) (urgent bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for f := outer; f != nil; f = f.outer {
		if f.loader != loader && !n.asks[f.loader][loader] {
			if n.asks == nil {
				n.asks = make(map[any]map[any]bool)
			}
			if n.asks[f.loader] == nil {
				n.asks[f.loader] = make(map[any]bool)
			}
			n.asks[f.loader][loader] = true
		}
		urgent = urgent || n.reaches(loader, f.loader, make(map[any]bool))
	}
	return urgent
}

// reaches reports whether loads of the Loader from may wait for loads of the Loader to. The caller holds n.mu.
func (n *nesting) reaches(from, to any, seen map[any]bool) bool {
	if from == to {
		return true
	}
	seen[from] = true
	for next := range n.asks[from] {
		if !seen[next] && n.reaches(next, to, seen) {
			return true
		}
	}
	return false
}

// leave forgets a Loader that was closed.
func (n *nesting) leave(loader any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.asks, loader)
	for _, asked := range n.asks {
		delete(asked, loader)
	}
}
