package refill

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/breaker"
	"github.com/refill-go/refill/internal/flight"
	"github.com/refill-go/refill/internal/l1"
	"github.com/refill-go/refill/internal/retry"
)

// This file is the Loader, from New to Close. Get is in get.go.

// Loader answers Gets of one kind of value: from memory, from the shared store, or by one load for the whole fleet.
// Make one per kind of value at start-up, share it between goroutines, and Close it at the end. Values are shared
// between callers: treat them as read-only.
type Loader[V any] struct {
	name  string
	node  *node
	cfg   Config // with defaults
	store *breaker.Breaker
	load  loadFunc[V] // nil if there is no load function, or only a bulk load function
	bulk  func(ctx context.Context, keys []string) (map[string]V, error)
	codec Codec
	kind  string // codec and type, as the records of this Loader say

	l1      *l1.Cache[content[V]]
	flights *flight.Group[answer[V], driver.Announcement]
	batcher batcher[V]

	loads      runningLoads
	loadSlots  chan struct{} // one per running load; nil = no limit
	storeSlots chan struct{} // one per call of the store by a flight
	missRate   missRate

	tagReads   coalescer[tagStates]
	tagEnsures coalescer[struct{}]
	ensured    ensuredTags

	backoffs backoffs                           // loads that failed a moment ago
	retries  *retry.Queue[target, invalidation] // invalidations that the store has not confirmed
	releases sync.WaitGroup                     // leases that flights give back after they have ended

	leaveName   func()
	unsubscribe func()
	closing     sync.Once
	closeErr    error // written within closing
}

type loadFunc[V any] func(ctx context.Context, key string) (V, error)

// New returns a Loader that gets its values from load. The name keeps the keys of this Loader apart from those of other
// Loaders in the same store. A name has letters, digits, '.', '_' and '-'. Two Loaders with one name must have the same
// V and mean the same data. When the meaning of the data changes, change the name, for instance to "product.v2". Then
// two releases can share one store. Within one process, one name with two types is an error. Between processes, one
// name with two types is an [EventBadRecord].
//
// load runs on a goroutine of its own. Its ctx has the values of the first caller's ctx (tenant, trace, …). No single
// caller cancels that ctx: it ends when the last caller has left or at Config.LoadTimeout. The key must hold all that
// the result depends on. If there is nothing under the key, load returns an error that wraps [ErrNotFound]. load may
// use [FillFrom]. load may be nil if only GetWith is used.
//
// New makes no call to the store, so New works while the store is down. An error of New wraps [ErrInvalid] and names
// the argument or setting.
func New[V any](name string, load func(ctx context.Context, key string) (V, error), cfg Config) (*Loader[V], error) {
	return newLoader(name, load, nil, cfg)
}

func newLoader[V any](
	name string, load loadFunc[V], bulk func(context.Context, []string) (map[string]V, error), cfg Config,
) (*Loader[V], error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Loader[V]{name: name, node: newNode(), cfg: cfg, load: load, bulk: bulk}
	l.store = breaker.New(cfg.Shared, cfg.StoreTimeout,
		func(err error) { l.emit(Event{Kind: EventBreakerOpen, Err: err}) },
		func() { l.emit(Event{Kind: EventBreakerClosed}) })
	l.tagReads.call, l.tagEnsures.call = l.readTags, l.ensureTags
	l.codec, l.kind = codecFor[V](cfg.Codec)
	if l.leaveName, err = names.enter(cfg.Shared, name, l.kind); err != nil {
		return nil, err
	}
	l.l1, err = l1.New[content[V]](l1.Config{
		Off: cfg.LocalTTL == 0, Entries: cfg.LocalEntries, Bytes: cfg.LocalBytes, Tick: tickOf(cfg.TTL), Now: l.store.Now,
	})
	if err != nil {
		l.leaveName()
		return nil, invalid("LocalEntries", "%v", err)
	}
	l.flights = flight.NewGroup[answer[V], driver.Announcement](cfg.MaxWaiters)
	if cfg.MaxLoads < maxSlots {
		l.loadSlots = make(chan struct{}, cfg.MaxLoads)
	}
	l.storeSlots = make(chan struct{}, storeSlotsPerCPU*runtime.GOMAXPROCS(0))
	l.retries = retry.New(l.retryInvalidate, l.retried, invalidation.merge)
	l.unsubscribe = l.store.Subscribe(name, l.onAnnouncement)
	for _, warning := range cfg.warnings() {
		l.emit(Event{Kind: EventConfigWarning, Err: warning})
	}
	return l, nil
}

// storeSlotsPerCPU bounds the calls of the store that flights make at once. go-redis has 10 connections per CPU by
// default. Here the bound is 30 calls per CPU. A user who sets more connections can use them. If three calls share one
// connection, each call still gets it well within StoreTimeout.
const storeSlotsPerCPU = 30

// maxSlots is so many loads that counting them would bound nothing. A MaxLoads of maxSlots or more means no limit.
const maxSlots = 1 << 20

// Refresh loads the keys now, whatever is cached, and returns when all loads are done. It returns the errors of the
// keys that failed, joined. It ends a back-off. If another node is loading a key already, Refresh waits for that load
// instead. To see a write that was just made, use Expire or Invalidate. Refresh handles 1,024 keys at a time, with one
// call of a bulk load function for them. Each key is an event.
func (l *Loader[V]) Refresh(ctx context.Context, keys ...string) error {
	var errs []error
	l.each(ctx, keys, flight.Refresh, func(_ string, _ Result[V], err error) {
		if err != nil && !errors.Is(err, ErrNotFound) {
			errs = append(errs, err)
		}
	})
	return errors.Join(errs...)
}

// Peek returns the value that is cached, fresh or stale, without loading it or changing anything. It returns false if
// there is no value, for a cached absence, and if the store does not answer.
func (l *Loader[V]) Peek(ctx context.Context, key string) (Result[V], bool) {
	key, err := l.storeKey(key)
	if err != nil {
		return Result[V]{}, false
	}
	e, o := l.l1.Get(key), OutcomeHit
	if e == nil || !l.l1.Valid(e) || inL1(e, l.now()) > stale {
		e, o = l.peekStore(ctx, key), OutcomeShared
	}
	if e == nil || e.Data.noStore || e.Data.err != nil {
		return Result[V]{}, false
	}
	now := l.now()
	switch e.Data.life.at(now) {
	case fresh, refreshDue:
	case stale:
		o = OutcomeStale
	default:
		return Result[V]{}, false
	}
	return resultOf(e, o, now), true
}

// peekStore reads the store. The breaker does not count this read, because the deadline of the read may be the
// caller's.
func (l *Loader[V]) peekStore(ctx context.Context, key string) *entry[V] {
	if l.store.Open() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.StoreTimeout)
	defer cancel()
	record, err := l.cfg.Shared.Get(ctx, l.full(key))
	if err != nil {
		return nil
	}
	e := l.decode(key, record, l1.Epoch{})
	if e == nil {
		return nil
	}
	states, err := l.tagStates(ctx, l.cfg.Shared, e.Data.tags())
	if err != nil || !l.tagsValid(e, states) {
		return nil
	}
	return e
}

// Close ends the Loader: every later call returns ErrClosed. Close cancels background refreshes. It lets loads finish
// that callers wait for, for Config.LoadTimeout at most. Then it cancels those loads, and its error names the keys
// whose load function still runs. Close leaves the shared store open. Further calls of Close return the same error.
func (l *Loader[V]) Close() error {
	l.closing.Do(func() {
		l.flights.Close()
		l.l1.Shut()
		timer := time.NewTimer(l.cfg.LoadTimeout)
		defer timer.Stop()
		if !l.loads.wait(l.flights.Done(), timer.C) {
			keys := l.loads.keys()
			l.flights.Abort()
			<-l.flights.Done() // a flight has a StoreTimeout left to give its lease back
			if len(keys) > 0 {
				l.closeErr = fmt.Errorf("refill: Close: %s: still loading after %v: %s",
					l.name, l.cfg.LoadTimeout, strings.Join(keys, ", "))
			}
		}
		l.releases.Wait()
		l.store.Close()
		l.retries.Close()
		l.unsubscribe()
		l.leaveName()
		l.l1.Close()
	})
	return l.closeErr
}

func (l *Loader[V]) now() int64 { return l.store.Now().UnixMicro() }
