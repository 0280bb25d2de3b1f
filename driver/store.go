// Package driver is the contract between refill and its backends: what a shared store ([Store]) and a lock service
// ([Locks]) implement, and the format of the values that they keep ([Record]). Users of refill do not need it.
//
// Package refilltest holds the suites that an implementation must pass. backend/memory is the reference implementation:
// it follows the rules of this page word for word, in one process. backend/goredis implements them over Redis.
package driver

import (
	"context"
	"time"
)

// Store is a shared store as a Loader sees it. Each method is one whole step of a refill, and each step is atomic.
//
// A key is "name:key": the name of the Loader, a colon, and the key of the value. A name contains no colon, so the
// first colon separates the two. A token identifies one fill: "node#counter". Tokens are compared for equality only.
//
// Three things are stored under one key. Every step below touches them in one atomic act:
//
//   - the value is a [Record] as the Loader encoded it. A Store uses only what [RecordToken] reads and what
//     [ExpireRecord] changes.
//   - the lease, or refill lock, says which fill may load now. The lease is for efficiency, and it expires by itself.
//   - the claim says whose load may be stored. Correctness comes from the claim. The claim is taken with the lease,
//     before the load begins, and lives longer than the lease. Invalidate, Expire and the claim of another fill remove
//     it.
//
// Values can carry tags, so that a group of values can be invalidated without knowing its keys. A tag is "name:tag".
// The store keeps a [TagState] for each tag: the moments at which the tag was invalidated and expired. The store does
// not know which values carry a tag. The Loader compares the tag state with the moment at which the load of a value
// began. If the state of a tag is lost, every value with that tag is treated as invalid, never as valid. A tag is not a
// key: the same text can be both, and neither affects the other.
//
// A step that frees a lease announces this in the same act, so waiters never poll. Only
// [PublishRequest.AnnounceIfAwaited] allows a step to skip the announcement. Announcements are hints: a lost
// announcement costs time, never correctness.
//
// Every call returns when its ctx ends, even if the server does not answer. An error means that the outcome is unknown.
// All methods may be called from any goroutine.
type Store interface {
	// Get returns the record under key, or nil if there is none. Foreign bytes are returned unchanged: the Loader
	// decides what they are.
	Get(ctx context.Context, key string) (record []byte, err error)

	// GetMany is Get for many keys in one exchange: records[i] is the record under keys[i], or nil. A key may be listed
	// twice. If one key cannot be read, the whole call fails.
	GetMany(ctx context.Context, keys ...string) (records [][]byte, err error)

	// Acquire begins a fill. It takes lease and claim in one act, unless the stored record is not the one that the caller
	// has seen (Changed), or another fill has the lease (Held). See [AcquireRequest] and [AcquireResult].
	Acquire(ctx context.Context, r AcquireRequest) (AcquireResult, error)

	// Renew sets the remaining life of the lease to ttl, if lease and claim both belong to the token. It never creates a
	// lease.
	Renew(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error)

	// Publish ends a fill. If the claim is the one that the token took at Began, Publish frees lease and claim, stores the
	// record for Keep, and announces filled. Otherwise Publish stores nothing, frees the token's own lease and announces
	// released. Publish frees before it stores, so that a full store still lets the waiters go. If the record of the token
	// is already stored, the reply to an earlier try was lost, and the result is Stored.
	Publish(ctx context.Context, r PublishRequest) (PublishResult, error)

	// Fail ends a fill without a value. It frees lease and claim, each if it belongs to the token. Unless another fill has
	// the lease, Fail then leaves a back-off in the place of the lease for ttl: the failure, without a holder. A ttl of 0
	// leaves no back-off. Fail announces failed if lease or claim belonged to the token.
	Fail(ctx context.Context, key, token, failure string, ttl time.Duration) error

	// Release frees lease and claim, each if it belongs to the token, and announces released if it freed at least one of
	// the two.
	Release(ctx context.Context, key, token string) error

	// Invalidate deletes value, lease, claim and back-off of every key, and announces invalidated. by is the token in
	// the announcement.
	Invalidate(ctx context.Context, by string, keys ...string) error

	// Expire marks the value of every key as expired now (see [ExpireRecord]), deletes lease, claim and back-off, and
	// announces expired. by is the token in the announcement.
	Expire(ctx context.Context, by string, keys ...string) error

	// Tags returns the state of each tag: states[i] is the state of tags[i]. Foreign bytes in the place of a state count
	// as an unknown tag.
	Tags(ctx context.Context, tags ...string) (states []TagState, err error)

	// EnsureTags makes sure that each tag is known, and stays known for keep at least. It never changes a state or
	// shortens its life. An unknown tag (never used, expired, evicted) becomes known as invalidated `reach` ago.
	//
	// EnsureTags is called before a tagged record is published. For an unknown tag, the store cannot tell whether the tag
	// was invalidated after a value was loaded. So values whose load began longer than reach ago become invalid. reach
	// covers every load that is still in progress, so the values of these loads stay valid. A state without an end is
	// replaced, and so are foreign bytes.
	EnsureTags(ctx context.Context, reach, keep time.Duration, tags ...string) error

	// InvalidateTags sets Invalidated of each tag to now, keeps the state for keep at least, and announces
	// tag-invalidated. Expired is unchanged. A state that lives longer than keep keeps its life. Invalidated never moves
	// back if the clock steps back by less than a second. If the stored moment is further in the future, it was written
	// before the clock was set back, and it is replaced. by is the token in the announcement. If one tag fails, the
	// remaining tags are still invalidated.
	InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error

	// ExpireTags sets Expired of each tag to now, by the rules of InvalidateTags, and announces tag-expired. Invalidated
	// is unchanged. An unknown tag becomes known as invalidated now.
	ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error

	// Subscribe calls handle for every announcement about keys of this name, one call after the other. It also calls
	// handle for the state of the subscription itself: with Subscribed once no announcement can be missed, and with
	// Disconnected as soon as an announcement may have been missed. handle does not block. stop ends the subscription and
	// returns when handle no longer runs. stop must not be called from handle. No mutex is held while handle runs, because
	// it may call code of the user.
	Subscribe(name string, handle func(Announcement)) (stop func())

	// Now returns the time of the store's clock, which Acquire also reads. Now makes no call, so it returns what this
	// process knows of that clock. The result follows the monotonic clock of the process.
	Now() time.Time

	// Check returns what is wrong with the configuration of the store. It does not call the store. refill.New returns the
	// error.
	Check() error
}

// AcquireRequest is what a fill tells [Store.Acquire].
type AcquireRequest struct {
	Key   string
	Token string // of the fill
	Seen  string // token of the record that the fill has seen; empty if it saw none or could not read it

	LeaseTTL, ClaimTTL time.Duration

	Mode Mode
}

// Mode says what [Store.Acquire] does if another fill has the lease.
type Mode uint8

// The modes of Acquire.
const (
	// Try is for a background refresh, which gives up if another fill has the lease. The reply names only the holder. The
	// store may take the lease a moment before it compares the record, if that makes it cheaper to find the lease taken,
	// as most background refreshes do.
	Try Mode = iota
	// Wait is for a caller that will wait for the holder. Before it replies, the store notes on the lease that a caller
	// waits (see [PublishRequest.AnnounceIfAwaited]). The reply says how long the lease still lives. A lease without an
	// end or of a foreign type counts as free. A lease may also count as free if its remaining life is far longer than any
	// LeaseTTL.
	Wait
	// Force is for Loader.Refresh. It is like Wait, but a back-off also counts as free.
	Force
)

// AcquireResult is the reply of [Store.Acquire].
type AcquireResult struct {
	State AcquireState

	Now time.Time // Acquired: the moment of the claim by the store's clock; the load begins now

	Record []byte // Changed: the record that is stored

	Holder  string        // Held: token of the fill that has the lease; empty if it is a back-off
	Failure string        // Held: what Fail left, if it is a back-off
	Left    time.Duration // Held: remaining life of the lease or back-off; 0 after Try
}

// AcquireState is the outcome of [Store.Acquire].
type AcquireState uint8

// The outcomes of Acquire.
const (
	// Acquired: lease and claim belong to the token, so the caller loads now. If the lease already belonged to the token,
	// the reply to an earlier try was lost. If the claim still belongs to the token, the claim stays, and Now is the
	// moment at which it was taken. Otherwise Acquire takes a new claim at a moment of its own. So if the network delivers
	// a copy of the request after an Invalidate, the new claim does not make the older load valid again.
	Acquired AcquireState = iota
	// Changed: the stored record is not the one that the fill has seen. The store compares the record before the lease. If
	// the lease belongs to the token nevertheless, the store has freed it and announced released.
	Changed
	// Held: another fill has the lease, or a failed fill has left a back-off.
	Held
)

// PublishRequest is what [Store.Publish] stores and announces.
type PublishRequest struct {
	Key      string
	Token    string        // of the fill
	Began    time.Time     // AcquireResult.Now of the fill; zero = compare the claim by its token alone
	Replaced string        // token of the record that the fill has seen; empty for none
	Record   []byte        // not kept or changed after the call
	Keep     time.Duration // how long the store keeps the record, at least 1 s

	// AnnounceIfAwaited lets the store skip the announcement if the lease of the token is still there and no Acquire has
	// noted a waiter on it. Without AnnounceIfAwaited, every load of a rarely used key would be broadcast to the fleet.
	AnnounceIfAwaited bool
}

// PublishResult is the outcome of [Store.Publish].
type PublishResult uint8

// The outcomes of Publish.
const (
	Stored    PublishResult = iota // the record is stored
	Rejected                       // the claim was removed or taken: an invalidation or a newer fill came first
	StoreFull                      // the claim was valid, but the store has no room for the record
)

// TagState is what a store knows about a tag.
type TagState struct {
	Known       bool      // false: every value with the tag is invalid
	Invalidated time.Time // values whose load began at or before this moment are invalid; zero = never
	Expired     time.Time // values whose load began at or before this moment count as expired at this moment; zero = never
}

// Announcement is a message about a key or a tag, or about the subscription itself.
type Announcement struct {
	Kind     AnnouncementKind
	Key      string    // "name:key"; "name:tag" for TagInvalidated and TagExpired; empty for the subscription
	Token    string    // of the fill, or of the caller that invalidated
	Replaced string    // Filled: token of the record that was replaced
	Record   []byte    // Filled: the record, if it is no larger than MaxAnnouncedRecord
	Failure  string    // Failed: as given to Fail
	At       time.Time // TagInvalidated, TagExpired: the moment, by the store's clock
	Err      error     // Disconnected, Warning: the cause
}

// AnnouncementKind is the kind of an [Announcement].
type AnnouncementKind uint8

// The kinds of announcements. The first three are about the subscription itself.
const (
	Subscribed     AnnouncementKind = iota + 1 // the subscription works
	Disconnected                               // the subscription broke: announcements may be missed
	Warning                                    // the store works, but a setting of it is doubtful
	Filled                                     // a fill was stored
	Failed                                     // a fill failed
	Invalidated                                // value, lease and claim were deleted
	Expired                                    // the value was marked stale, lease and claim were deleted
	Released                                   // a lease was freed without a result
	TagInvalidated                             // values with the tag are invalid if their load began before
	TagExpired                                 // values with the tag are stale if their load began before
)

// MaxAnnouncedRecord is the largest record, in bytes, that travels with its announcement. Nodes fetch a larger record
// from the store when they need it.
const MaxAnnouncedRecord = 4 << 10
