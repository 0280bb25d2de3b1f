package refill

import (
	"context"
	"log/slog"
	"runtime"
	"sync/atomic"
	"time"
)

// This file defines what a Loader reports: the outcome of each Get, events for metrics, and the lines of Config.Logger.

// Outcome says how a Get got its answer. String returns a lower-case name, fit for the label of a metric.
type Outcome uint8

// The outcomes of a Get.
const (
	OutcomeHit             Outcome = iota + 1 // "hit": a fresh value of this process (L1)
	OutcomeStale                              // "stale": a stale value
	OutcomeShared                             // "shared": a fresh value of the shared store
	OutcomeLoaded                             // "loaded": the value of a load that this call started
	OutcomeCoalesced                          // "coalesced": the answer of a flight that another caller here had started
	OutcomeLoadedElsewhere                    // "loaded-elsewhere": a load on another node, which this call waited for
	OutcomeStaleOnError                       // "stale-on-error": an old value, because the load failed
	OutcomeFailed                             // "failed": an error
)

var outcomeNames = [...]string{
	"", "hit", "stale", "shared", "loaded", "coalesced", "loaded-elsewhere", "stale-on-error", "failed",
}

// String returns the lower-case name. The name will not change.
func (o Outcome) String() string { return nameOf(int(o), outcomeNames[:]) }

// Event is one thing that happened in a Loader. The Loader passes it to Config.OnEvent.
type Event struct {
	Kind    EventKind
	Outcome Outcome // EventGet: how the Get got its answer; otherwise 0
	Name    string  // of the Loader
	Key     string  // empty if the event concerns no single key
	Node    string  // of this Loader, as in Result.Node and LoadError.Node

	// Took is how long a load ran (EventLoaded, EventNotFound, EventLoadFailed, EventLoadAbandoned), how long a Get
	// waited for a flight (EventGet), or the age of the value (EventPublishedLate).
	Took time.Duration
	// Err is the cause, if there is one.
	Err error
}

// EventKind is the kind of an [Event]. String returns a lower-case name, fit for the label of a metric.
type EventKind uint8

// The kinds of events. EventGet comes once per Get and key. The events from EventLoaded to EventRefreshSkipped are
// about loads and refreshes. The events from EventBadRecord on are for the operator.
const (
	EventGet EventKind = iota + 1 // "get": a Get was answered, see Event.Outcome

	EventLoaded          // "loaded": a load function returned a value
	EventNotFound        // "not-found": a load function returned an error that wraps ErrNotFound
	EventLoadFailed      // "load-failed": a load function failed, panicked or timed out
	EventLoadAbandoned   // "load-abandoned": the last caller left before the load ended
	EventPublished       // "published": the value was stored
	EventPublishRejected // "publish-rejected": an Invalidate or a newer load came first: nothing was stored
	EventRefreshSkipped  // "refresh-skipped": another node refreshes the key already, or no load slot was free

	EventBadRecord         // "bad-record": the store held bytes that are no record of this Loader: a miss
	EventStoreError        // "store-error": the store did not answer, or answered with an error
	EventStoreDown         // "store-down": no announcements can be received, so Gets ask the store before L1
	EventStoreUp           // "store-up": announcements can be received (again)
	EventStoreWarning      // "store-warning": the store works, but a setting of it is doubtful
	EventConfigWarning     // "config-warning": a setting of Config is doubtful, Err says why; sent during New
	EventBreakerOpen       // "breaker-open": the store was too slow too often, so Gets do without the store
	EventBreakerClosed     // "breaker-closed": the store answers again
	EventLeaseLost         // "lease-lost": a lease ended before its load did; the claim decides what is stored
	EventInvalidateRetried // "invalidate-retried": a failed Invalidate or Expire was repeated, or given up (Err is set)
	// "published-late": a value was stored after the end of its TTL, because its load took longer than TTL. So the next
	// Get finds the value stale or expired, and starts another load. Set a TTL that is longer than a load takes.
	// Event.Took is the time from the start of the load.
	EventPublishedLate
)

var eventNames = [...]string{
	"", "get",
	"loaded", "not-found", "load-failed", "load-abandoned", "published", "publish-rejected", "refresh-skipped",
	"bad-record", "store-error", "store-down", "store-up", "store-warning", "config-warning", "breaker-open",
	"breaker-closed", "lease-lost", "invalidate-retried", "published-late",
}

// String returns the lower-case name. The name will not change. Later releases may add kinds.
func (k EventKind) String() string { return nameOf(int(k), eventNames[:]) }

func nameOf(i int, names []string) string {
	if i < len(names) {
		return names[i]
	}
	return "unknown"
}

// emit passes an event to Config.Logger and to Config.OnEvent, with the fields that every event of this Loader has.
func (l *Loader[V]) emit(e Event) {
	if e.Kind >= EventBadRecord {
		l.log(e)
	}
	if l.cfg.OnEvent != nil {
		e.Name, e.Node = l.name, l.node.id
		l.cfg.OnEvent(e)
	}
}

// log writes the line of an event for the operator, if the event has a line.
//
// Four kinds of events have no line. An outage causes hundreds of store-error and lease-lost events, and already has
// the line of store-down or breaker-open. invalidate-retried has no line if the invalidation has succeeded.
// published-late has no line in any case.
func (l *Loader[V]) log(e Event) {
	level, text := slog.LevelWarn, ""
	switch e.Kind {
	case EventStoreDown:
		if l.store.Once(l.topic("down")) {
			text = "refill: store down: no announcements can be received"
		}
	case EventStoreUp:
		if l.store.Reset(l.topic("down")) { // false at the first Subscribed: no outage was logged before
			level, text = slog.LevelInfo, "refill: store up: announcements can be received again"
		}
	case EventBreakerOpen:
		if l.store.Once(l.topic("open")) {
			text = "refill: circuit breaker open: Gets do without the store, which did not answer in time"
		}
	case EventBreakerClosed:
		if l.store.Reset(l.topic("open")) {
			level, text = slog.LevelInfo, "refill: circuit breaker closed: the store answers again"
		}
	case EventStoreWarning:
		if l.store.Once(l.topic(e.Err.Error())) {
			text = "refill: doubtful setting of the store"
		}
	case EventConfigWarning:
		text = "refill: doubtful setting of Config"
	case EventBadRecord:
		if l.badRecordLine.due(time.Now()) {
			text = "refill: bad record: the store held bytes that are no value of this Loader"
		}
	case EventInvalidateRetried:
		if e.Err != nil && l.gaveUpLine.due(time.Now()) {
			text = "refill: invalidation given up: the store may hold an old value"
		}
	}
	if text != "" {
		l.write(level, text, e)
	}
}

// topic returns the argument for Once and Reset of the breaker: the Logger, and what the line is about. So each Logger
// gets a line of its own.
func (l *Loader[V]) topic(what string) any {
	return struct {
		logger *slog.Logger
		what   string
	}{l.cfg.Logger, what}
}

func (l *Loader[V]) write(level slog.Level, text string, e Event) {
	logger := l.cfg.Logger
	if logger == nil {
		logger = slog.Default()
	}
	attrs := []slog.Attr{slog.String("loader", l.name), slog.String("node", l.node.id)}
	if e.Key != "" {
		attrs = append(attrs, slog.String("key", e.Key))
	}
	if e.Err != nil {
		attrs = append(attrs, slog.Any("error", e.Err))
	}
	logger.LogAttrs(context.Background(), level, text, attrs...)
}

// pacer limits one kind of log line to one per minute, see lineDue.
type pacer struct{ last atomic.Int64 } // when the last line passed, in Unix microseconds; 0 = never

func (p *pacer) due(now time.Time) bool {
	last := p.last.Load()
	return lineDue(last, now.UnixMicro()) && p.last.CompareAndSwap(last, now.UnixMicro())
}

// inOnEvent reports whether its caller runs inside of emit, and so was called by OnEvent or the Logger. Close waits for
// the goroutines that emit events. So a Close that OnEvent calls would wait for its own goroutine. Go has no identity
// of a goroutine to compare, but the stack of the caller shows emit.
func inOnEvent() bool {
	pcs := make([]uintptr, 512)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for {
		f, more := frames.Next()
		if f.Function == "github.com/refill-go/refill.(*Loader[...]).emit" {
			return true
		}
		if !more {
			return false
		}
	}
}

// startTimer and took measure durations for events. Without Config.OnEvent neither function reads the clock.
func (l *Loader[V]) startTimer() time.Time {
	if l.cfg.OnEvent == nil {
		return time.Time{}
	}
	return time.Now()
}

func (l *Loader[V]) took(since time.Time) time.Duration {
	if since.IsZero() {
		return 0
	}
	return time.Since(since)
}
