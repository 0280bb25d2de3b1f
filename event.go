package refill

import "time"

// This file is what a Loader reports: the outcome of each Get, and events for metrics and logs.

// Outcome is how a Get got its answer. String returns a lower-case name, fit for the label of a metric.
type Outcome uint8

// The outcomes of a Get.
const (
	OutcomeHit             Outcome = iota + 1 // "hit": a fresh value of this process (L1)
	OutcomeStale                              // "stale": a stale value, which is being refreshed
	OutcomeShared                             // "shared": a fresh value of the shared store
	OutcomeLoaded                             // "loaded": the load that this call started
	OutcomeCoalesced                          // "coalesced": the answer of a flight of this process that ran already
	OutcomeLoadedElsewhere                    // "loaded-elsewhere": a load on another node, which this call waited for
	OutcomeStaleOnError                       // "stale-on-error": a stale value, because the load failed
	OutcomeFailed                             // "failed": an error
)

var outcomeNames = [...]string{
	"", "hit", "stale", "shared", "loaded", "coalesced", "loaded-elsewhere", "stale-on-error", "failed",
}

// String returns the lower-case name. The name will not change.
func (o Outcome) String() string { return nameOf(int(o), outcomeNames[:]) }

// Event is one thing that happened, as Config.OnEvent sees it.
type Event struct {
	Kind    EventKind
	Outcome Outcome // EventGet: how the Get got its answer; otherwise 0
	Name    string  // of the Loader
	Key     string  // empty if the event concerns no single key
	Node    string  // of this Loader, as in Result.Node and LoadError.Node

	// Took is how long a load ran (EventLoaded, EventNotFound, EventLoadFailed, EventLoadAbandoned) or a Get waited for a
	// flight (EventGet).
	Took time.Duration
	// Err is the cause, if there is one.
	Err error
}

// EventKind is the kind of an [Event]. String returns a lower-case name, fit for the label of a metric.
type EventKind uint8

// The kinds of events. EventGet comes once per Get and key. The events from EventLoaded to EventRefreshSkipped come
// from loads. The events from EventBadRecord on are for the operator.
const (
	EventGet EventKind = iota + 1 // "get": a Get was answered, see Event.Outcome

	EventLoaded          // "loaded": a load function returned a value
	EventNotFound        // "not-found": a load function returned ErrNotFound
	EventLoadFailed      // "load-failed": a load function failed, panicked or timed out
	EventLoadAbandoned   // "load-abandoned": the last caller left before the load ended
	EventPublished       // "published": the value was stored
	EventPublishRejected // "publish-rejected": the value was not stored: invalidated, or overtaken by a newer load
	EventRefreshSkipped  // "refresh-skipped": another node refreshes the key already

	EventBadRecord         // "bad-record": the store held bytes that are no record of this Loader, which is a miss
	EventStoreError        // "store-error": the store did not answer, or answered with an error
	EventStoreDown         // "store-down": no announcements can be received, so Gets ask the store before L1
	EventStoreUp           // "store-up": announcements can be received (again)
	EventStoreWarning      // "store-warning": the store works, but a setting of it is doubtful
	EventConfigWarning     // "config-warning": a setting of Config is doubtful: Err says why; sent while New runs
	EventBreakerOpen       // "breaker-open": the store was too slow too often, so Gets do without the store
	EventBreakerClosed     // "breaker-closed": the store answers again
	EventLeaseLost         // "lease-lost": a lease ended before its load; the claim decides whether the value is stored
	EventInvalidateRetried // "invalidate-retried": a failed Invalidate or Expire was repeated, or given up (Err is set)
)

var eventNames = [...]string{
	"", "get",
	"loaded", "not-found", "load-failed", "load-abandoned", "published", "publish-rejected", "refresh-skipped",
	"bad-record", "store-error", "store-down", "store-up", "store-warning", "config-warning", "breaker-open",
	"breaker-closed", "lease-lost", "invalidate-retried",
}

// String returns the lower-case name. The name will not change. Later releases may add kinds.
func (k EventKind) String() string { return nameOf(int(k), eventNames[:]) }

func nameOf(i int, names []string) string {
	if i < len(names) {
		return names[i]
	}
	return "unknown"
}

// emit passes an event to Config.OnEvent, with the fields that every event of this Loader has.
func (l *Loader[V]) emit(e Event) {
	if l.cfg.OnEvent != nil {
		e.Name, e.Node = l.name, l.node.id
		l.cfg.OnEvent(e)
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
