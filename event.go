package refill

import "time"

// Event is one thing that happened, as Config.OnEvent sees it.
type Event struct {
	Kind EventKind
	Name string // of the Loader
	Key  string // empty for what concerns no single key
	Node string // this Loader's node, as in Result.Node and LoadError.Node

	// Took is how long a load ran (EventLoaded, EventLoadFailed) or a caller waited (EventJoined, EventWaited).
	Took time.Duration
	// Err is the cause, where there is one.
	Err error
}

// EventKind is the kind of an [Event].
type EventKind uint8

// What can happen. The first group is one event per Get, the second one per flight or fill, the third what an
// operator wants to know.
const (
	EventHit          EventKind = iota + 1 // answered by a fresh entry of this process
	EventStale                             // answered by a stale value, while it is refreshed
	EventShared                            // answered by a fresh record of the shared store
	EventLed                               // this call's load ran for it
	EventJoined                            // got the result of a flight that ran already in this process
	EventWaited                            // got the result of a load on another node
	EventStaleOnError                      // answered by a stale value because the load failed
	EventError                             // answered by an error

	EventLoaded     // a load function returned a value
	EventNotFound   // a load function returned ErrNotFound
	EventLoadFailed // a load function failed, panicked or timed out
	EventPublished  // the value was stored
	EventRefused    // it was not: invalidated or overtaken meanwhile
	EventBusy       // a refresh found that another node is at it
	EventAbandoned  // the last caller left before the load was done

	EventBadRecord     // the store held bytes that are not a record of this Loader: treated as a miss
	EventStoreError    // the store did not answer, or with an error
	EventStoreDown     // announcements cannot be heard: the store is asked before L1 is believed
	EventStoreUp       // they can be heard (again)
	EventStoreDoubt    // the store works, but a setting of it is doubtful
	EventConfigDoubt   // a setting of Config is doubtful: Err says which and why; while New runs
	EventBreakerOpen   // the store was too slow too often: Gets do without it, and it is probed
	EventBreakerClosed // it answers again
	EventLeaseLost     // a lease ended while its load was running; the claim decides whether the load counts
	EventVoidRetried   // an Invalidate or Expire that had failed was carried out, or given up (then Err is set)
)

var eventNames = [...]string{
	"", "hit", "stale", "shared", "led", "joined", "waited", "stale-on-error", "error",
	"loaded", "not-found", "load-failed", "published", "refused", "busy", "abandoned",
	"bad-record", "store-error", "store-down", "store-up", "store-doubt", "config-doubt", "breaker-open", "breaker-closed",
	"lease-lost", "void-retried",
}

// String returns a short lower-case name, fit for a metric's label.
func (k EventKind) String() string {
	if int(k) < len(eventNames) {
		return eventNames[k]
	}
	return "unknown"
}
