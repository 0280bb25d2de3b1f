package refill

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/breaker"
	"github.com/refill-go/refill/internal/coalesce"
	"github.com/refill-go/refill/internal/deadline"
	"github.com/refill-go/refill/internal/flight"
	"github.com/refill-go/refill/internal/l1"
	"github.com/refill-go/refill/internal/retry"
	"github.com/refill-go/refill/internal/running"
)

// This file holds the Loader, from New to Close. Get is in get.go.

// Loader is a cache for one kind of value. It answers a Get from memory, from the shared store, or by one load for the
// whole fleet. Make one Loader per kind of value at start-up, share the Loader between goroutines, and Close it at the
// end. Callers share the values that they get: treat values as read-only.
type Loader[V any] struct {
	name  string
	node  *node
	cfg   Config           // after withDefaults
	spans spans            // how long a value lives if its load sets nothing
	store *breaker.Breaker // Config.Shared behind a circuit breaker
	load  loadFunc[V]      // nil if there is no load function, or only a bulk load function
	bulk  func(ctx context.Context, keys []string) (map[string]V, error)
	codec Codec
	kind  string // names codec and type; part of every record of this Loader

	roundTrip roundTrip

	l1      *l1.Cache[content[V]]
	flights *flight.Group[answer[V], driver.Announcement]
	batcher batcher[V]

	loads      *running.Loads
	loadSlots  chan struct{}     // holds one element per running load; nil = no limit
	freeSlot   func()            // removes one element from loadSlots
	timeouts   *deadline.Timeout // of calls of the store, StoreTimeout each
	storeSlots storeSlot         // holds one element per store call of a flight
	endSlots   storeSlot         // holds one element per store call that ends a fill
	missRate   missRate          // the share of recent refills that found no record in the store
	lotSize    atomic.Int32      // how many keys a GetMany reads in one exchange with the store

	tagReads   *coalesce.Calls[string, tagStates]
	tagEnsures *coalesce.Calls[tagUse, struct{}]

	firstRenewals *deadline.Alarm[*lease] // starts the renewals of leases

	renewals   *coalesce.Calls[driver.Lease, map[string]bool]
	shared     context.Context // of the calls of tagReads, tagEnsures and renewals; ended by Close
	stopShared context.CancelFunc

	claims   claims                             // loads that have a claim and are not published yet
	failing  failing                            // loads that failed in a row
	backoffs backoffs                           // recent failed loads
	retries  *retry.Queue[target, invalidation] // invalidations that the store has not confirmed
	releases sync.WaitGroup                     // calls that give leases back, see refill.giveBack

	badRecordLine, gaveUpLine pacer // each limits one kind of log line to one per minute

	leaveName   func() // gives the name back; called by Close
	unsubscribe func()
	closing     sync.Once
	closeErr    error // written by closing.Do
}

type loadFunc[V any] func(ctx context.Context, key string) (V, error)

// New returns a Loader that gets its values from load. The name keeps the keys of this Loader apart from the keys of
// other Loaders in the same store. A name has at most 64 letters, digits, '.', '_' and '-'. Two Loaders with one name
// share their values, so they must have the same V and mean the same data. When the meaning of the data changes, change
// the name, for instance to "product.v2". Then the old and the new release can share one store. If two Loaders of one
// process have one name but different types, the second New returns an error. In different processes, each of the two
// Loaders reads the values of the other Loader as misses, and reports [EventBadRecord].
//
// load runs on a goroutine of its own. The ctx of load has the values of the first caller's ctx (tenant, trace, …).
// This ctx ends at Config.LoadTimeout. It ends earlier if the last caller leaves, unless the load refreshes a value in
// the background. The key must hold all that the result depends on. load must not change a value that it has returned,
// because the callers share it. If there is nothing under the key, load returns an error that wraps [ErrNotFound]. load
// may use [FillFrom]. load may be nil if each call brings a load function of its own, as GetWith does.
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
	follows := cfg.StaleIfError == 0
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Loader[V]{name: name, node: newNode(), cfg: cfg, load: load, bulk: bulk}
	l.spans = spans{ttl: cfg.TTL, staleFor: cfg.StaleFor, staleIfError: cfg.StaleIfError, follows: follows}
	l.store = breaker.New(cfg.Shared, cfg.StoreTimeout,
		func(err error) { l.emit(Event{Kind: EventBreakerOpen, Err: err}) },
		func() { l.emit(Event{Kind: EventBreakerClosed}) })
	l.tagReads, l.tagEnsures = coalesce.New(l.readTags), coalesce.New(l.ensureTags)
	l.renewals = coalesce.New(l.renew)
	l.shared, l.stopShared = context.WithCancel(context.Background())
	l.codec, l.kind = codecFor[V](cfg.Codec)
	l.roundTrip.lossy = lossyType(reflect.TypeFor[V](), l.codec)
	if l.leaveName, err = names.enter(cfg.Shared, name, l.kind, reflect.TypeFor[V]()); err != nil {
		return nil, err
	}
	l.l1 = l1.New[content[V]](l1.Config{
		Off: cfg.LocalTTL == 0, Entries: cfg.LocalEntries, Bytes: cfg.LocalBytes,
		Tick: tickOf(cfg.TTL), Now: cfg.Shared.Now, Store: cfg.Shared,
	})
	l.flights = flight.NewGroup[answer[V], driver.Announcement](cfg.MaxWaiters)
	if cfg.MaxLoads < maxSlots {
		l.loadSlots = make(chan struct{}, cfg.MaxLoads)
		l.freeSlot = func() { <-l.loadSlots }
	}
	l.loads = running.New(cfg.MaxLoads)
	l.lotSize.Store(firstLot)
	l.timeouts = deadline.New(cfg.StoreTimeout)
	l.firstRenewals = deadline.NewAlarm(renewEvery(cfg.LockTTL), (*lease).startRenewal)
	l.storeSlots = make(chan struct{}, storeSlotsPerCPU*runtime.GOMAXPROCS(0))
	l.endSlots = make(chan struct{}, storeSlotsPerCPU*runtime.GOMAXPROCS(0))
	l.retries = retry.New(l.retryInvalidate, l.retried, invalidation.merge)
	l.unsubscribe = l.store.Subscribe(name, l.onAnnouncement)
	for _, warning := range cfg.warnings() {
		l.emit(Event{Kind: EventConfigWarning, Err: warning})
	}
	return l, nil
}

// storeSlotsPerCPU bounds the store calls that the flights of a Loader make at once, per CPU. go-redis has 10
// connections per CPU by default. The bound is 30, so that a user who configures up to 30 connections can use them all.
// With 10 connections, three calls share one connection, and each call still gets its turn well within StoreTimeout.
const storeSlotsPerCPU = 30

// maxSlots is the smallest MaxLoads that means no limit. No process runs that many loads at once.
const maxSlots = 1 << 20

// Refresh loads the keys now, even if fresh values are cached, and returns when all loads are done. The error joins the
// errors of all keys that failed. An absence is no error. Refresh loads a key even during its back-off. If another node
// is loading a key already, Refresh waits for that load instead. That load may have begun before a recent write, so use
// Expire or Invalidate to make a write visible. Refresh handles 1,024 keys at a time, with one call of the bulk load
// function if there is one. Each key is reported as one EventGet.
func (l *Loader[V]) Refresh(ctx context.Context, keys ...string) error {
	var errs []error
	l.each(ctx, keys, GetOptions[V]{Refresh: true}, func(_ string, _ Result[V], err error) {
		if err != nil && !errors.Is(err, ErrNotFound) {
			errs = append(errs, err)
		}
	})
	return errors.Join(errs...)
}

// Peek returns the cached value, fresh or stale. Peek does not load and changes nothing. It returns false if no such
// value is cached, if an absence is cached, or if L1 has no such value and the store does not answer. If an absence is
// cached, Result.Absent is true.
func (l *Loader[V]) Peek(ctx context.Context, key string) (Result[V], bool) {
	key, err := l.storeKey(key)
	if err != nil {
		return Result[V]{}, false
	}
	e, o := l.l1.Get(key), OutcomeHit
	if e == nil || !l.l1.Valid(e) || inL1(e, l.now()) > stale {
		e, o = l.peekStore(ctx, key), OutcomeShared
	}
	if e == nil || e.Data.noStore() {
		return Result[V]{}, false
	}
	now := l.now()
	switch lifeIn(e).at(now) {
	case fresh, refreshDue:
	case stale:
		o = OutcomeStale
	default:
		return Result[V]{}, false
	}
	return resultOf(e, o, now), e.Data.err() == nil
}

// peekStore reads the store directly, and returns nil while the circuit breaker is open. The read bypasses the breaker.
// The breaker must not count a failure of this read, because the cause may be a short deadline of the caller.
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
	e, _ := l.decode(key, record, l1.Epoch{})
	if e == nil {
		return nil
	}
	states, err := l.tagStates(ctx, l.cfg.Shared, e.Data.tags())
	if err != nil || !l.tagsValid(e, states) {
		return nil
	}
	return e
}

// Close ends the Loader. Every later call returns ErrClosed. Close cancels background refreshes. Loads that callers
// wait for may go on for Config.LoadTimeout at most. Then Close cancels these loads, and the error of Close names the
// keys whose load function still runs. Close leaves the shared store open. Further calls of Close return the same
// error. Close waits until Config.OnEvent and Config.Logger have returned. So a Close that one of them calls does
// nothing, and returns an error that wraps [ErrInvalid].
func (l *Loader[V]) Close() error {
	if inOnEvent() {
		return invalid("Close", "called from OnEvent, for which Close waits; call Close on another goroutine")
	}
	l.closing.Do(func() {
		l.flights.Close()
		l.l1.Shut()
		timer := time.NewTimer(l.cfg.LoadTimeout)
		defer timer.Stop()
		if !l.loads.Wait(l.flights.Done(), timer.C) {
			keys := l.loads.Keys()
			l.flights.Abort()
			<-l.flights.Done() // a cancelled flight still gives its lease back, within StoreTimeout
			if len(keys) > 0 {
				l.closeErr = fmt.Errorf("refill: Close: %s: still loading after %v: %s",
					l.name, l.cfg.LoadTimeout, strings.Join(keys, ", "))
			}
		}
		l.releases.Wait()
		l.stopShared()
		l.tagReads.Wait()
		l.tagEnsures.Wait()
		l.renewals.Wait()
		l.store.Close()
		if l.store.Open() { // so that another Loader can log again that its breaker is open
			l.store.Reset(l.topic("open"))
		}
		l.retries.Close()
		l.unsubscribe()
		l.leaveName()
		nested.leave(l)
		l.l1.Close()
	})
	return l.closeErr
}

func (l *Loader[V]) now() int64 { return l.store.Now().UnixMicro() }
