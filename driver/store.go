// Package driver is the contract between refill and its backends. A shared store implements [Store], and a lock
// service implements [Locks]. [Record] is the format of the values that a store keeps. Users of refill do not need
// this package.
//
// Package refilltest holds the suites that an implementation must pass. Package backend/memory is the reference
// implementation. It follows the rules of this page word for word, in one process. Package backend/goredis implements
// both interfaces over Redis.
package driver

import (
	"context"
	"time"
)

// Store is a shared store as a Loader sees it. Each method is one whole step of a refill. Each step is atomic for
// each key or tag, with one exception that [Try] describes.
//
// A key is "name:key": the name of the Loader, a colon, and the key of the value. A name contains no colon, so the
// first colon ends the name. A fill is one attempt to store a value. It begins with Acquire and ends with Publish,
// Fail or Release. A token, "node#counter", identifies one fill. Tokens are compared for equality only. No token begins
// with '!' or '?'.
//
// Three things are stored under one key:
//
//   - the value is a [Record] as the Loader encoded it. A Store uses only the bytes that [RecordToken] reads and the
//     bytes that [ExpireRecord] changes.
//   - the lease, or refill lock, says which fill may load now. The lease is for efficiency, and it expires by itself.
//     After a load that failed, the store may keep the failure in the place of the lease, as a back-off or as a note,
//     see [FailRequest].
//   - the claim says whose load may be stored. Correctness comes from the claim. The claim is taken with the lease,
//     before the load begins, and lives longer than the lease. Invalidate, Expire and the claim of another fill remove
//     it.
//
// A value can carry tags. A caller can invalidate all values with a tag without knowing their keys. The full form of
// a tag is "name:tag". The store keeps a [TagState] for each tag: the moments at which the tag was invalidated and
// expired. The store does not know which values carry a tag. The Loader compares the tag state with the moment at
// which the load of a value began. If the state of a tag is lost, every value with that tag is treated as invalid,
// never as valid. A tag is not a key. If a tag and a key have the same text, neither affects the other.
//
// A step that frees a lease also makes an announcement, in the same atomic act, so waiters never poll. Only a Publish
// with [PublishRequest.AnnounceIfAwaited] may skip the announcement. Announcements are hints: a lost announcement
// costs time, never correctness.
//
// Every call returns when its ctx ends, even if the server does not answer. An error means that the outcome of the
// step is unknown. All methods may be called from any goroutine.
type Store interface {
	// Get returns the record under key, or nil if there is none. Get returns bytes that are not a Record unchanged,
	// because the Loader decides what such bytes mean.
	Get(ctx context.Context, key string) (record []byte, err error)

	// GetMany is Get for many keys in one exchange: records[i] is the record under keys[i], or nil. A key may be listed
	// twice. If one key cannot be read, the whole call fails.
	GetMany(ctx context.Context, keys ...string) (records [][]byte, err error)

	// Acquire begins a fill. It takes lease and claim in one act. It takes neither if the stored record is not the one
	// that the fill has seen (Changed), or if another fill has the lease (Held). In mode Look it takes neither in any
	// case. See [AcquireRequest] and [AcquireResult].
	Acquire(ctx context.Context, r AcquireRequest) (AcquireResult, error)

	// Renew sets the remaining life of each lease to ttl, if lease and claim both belong to the token. It never creates
	// a lease. Renew sends all leases in one exchange: mine[i] reports whether leases[i] was renewed. A lease may be
	// listed twice. If Renew returns an error, mine may be nil. If mine is then not nil, a true mine[i] means that
	// leases[i] was renewed, and a false mine[i] means that the outcome is unknown. So if one shard does not answer,
	// the leases on other shards are not lost.
	Renew(ctx context.Context, ttl time.Duration, leases ...Lease) (mine []bool, err error)

	// Publish ends a fill. If the claim is the one that the token took at Began, Publish frees lease and claim, stores
	// the record for Keep, and announces filled. Publish frees lease and claim before it stores, so that the waiters go
	// on even if the store is full. If the claim is not that claim, Publish stores nothing and does what Release does.
	// The result is then Rejected, with one exception: if the record of the token is already stored, the result is
	// Stored, because an earlier try of this Publish succeeded and only its reply was lost.
	Publish(ctx context.Context, r PublishRequest) (PublishResult, error)

	// Fail ends a fill without a value. It frees the lease if the token has the lease, and the claim if the token has
	// the claim. If the token has neither, Fail does nothing. Otherwise Fail announces failed, and leaves the failure
	// in the place of the lease, as a back-off or as a note. If another fill has the lease, that lease stays, and the
	// failure is only announced. See [FailRequest].
	Fail(ctx context.Context, r FailRequest) error

	// Release frees the lease if the token has the lease, and the claim if the token has the claim. If Release freed at
	// least one of the two, it announces released.
	Release(ctx context.Context, key, token string) error

	// Invalidate deletes value, lease, claim, back-off and note of every key, and announces invalidated for each key. by
	// is the token in the announcements.
	Invalidate(ctx context.Context, by string, keys ...string) error

	// Expire marks the value of every key as expired now (see [ExpireRecord]), deletes lease, claim, back-off and note,
	// and announces expired for each key. by is the token in the announcements.
	Expire(ctx context.Context, by string, keys ...string) error

	// Tags returns the state of each tag: states[i] is the state of tags[i]. Foreign bytes in the place of a state count
	// as an unknown tag.
	Tags(ctx context.Context, tags ...string) (states []TagState, err error)

	// EnsureTags makes sure that each tag is known, and stays known for keep at least. It never changes the moments of
	// a known tag, and never shortens the life of its state. A tag is unknown if it was never used, or if its state has
	// ended or was evicted. If a tag is unknown, EnsureTags stores a state for it. In that state, Invalidated is the
	// present moment minus reach.
	//
	// The Loader calls EnsureTags before it publishes a record with tags. For an unknown tag, the store cannot tell
	// whether the tag was invalidated after a value was loaded. So values whose load began longer than reach ago become
	// invalid. reach covers every load that is still in progress, so the values of these loads stay valid. A tag whose
	// state has no end, or is foreign bytes, counts as unknown here.
	EnsureTags(ctx context.Context, reach, keep time.Duration, tags ...string) error

	// InvalidateTags sets Invalidated of each tag to now, keeps the state for keep at least, and announces
	// tag-invalidated. It does not change Expired, and never shortens the life of a state. If the stored Invalidated is
	// less than a second in the future, the clock has made a small step back, and Invalidated stays. If Invalidated is
	// further in the future, the clock was set back, and Invalidated becomes now. by is the token in the announcements.
	// If the call fails for one tag, the other tags are still invalidated.
	InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error

	// ExpireTags sets Expired of each tag to now and announces tag-expired. Everything that InvalidateTags says about
	// Invalidated, keep, by and failures holds for Expired here. ExpireTags does not change Invalidated of a known tag.
	// An unknown tag becomes known as invalidated now.
	ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error

	// Subscribe calls handle for every announcement about keys and tags of this name, one call after the other. It also
	// reports the state of the subscription to handle: Subscribed when no announcement can be missed from now on, and
	// Disconnected as soon as an announcement may have been missed. handle must not block. stop ends the subscription
	// and returns when handle no longer runs. handle must not call stop. The Store holds no mutex while handle runs,
	// because handle may call code of the user.
	Subscribe(name string, handle func(Announcement)) (stop func())

	// Now returns the time of the store's clock. AcquireResult.Now is a time of the same clock. Now does not call the
	// store. It returns what this process knows of that clock, and advances with the monotonic clock of the process.
	Now() time.Time

	// Check returns what is wrong with the configuration of the store. It does not call the store. refill.New returns
	// this error.
	Check() error
}

// AcquireRequest is the argument of [Store.Acquire].
type AcquireRequest struct {
	Key   string
	Token string // of the fill
	Seen  string // token of the record that the fill has read under Key; empty if there was none, or if the read failed

	LeaseTTL, ClaimTTL time.Duration // how long the lease and the claim live if Acquire takes them

	Mode Mode // what Acquire does if another fill has the lease
}

// Lease names one lease for [Store.Renew].
type Lease struct{ Key, Token string }

// Mode says what [Store.Acquire] does if another fill has the lease.
type Mode uint8

// The modes of Acquire.
const (
	// Try is for a background refresh, which gives up if another fill has the lease. The reply then names the holder, but
	// not how long the lease still lives. In this mode the store may take the lease a moment before it compares the
	// record. Most background refreshes find the lease taken, and this order saves them the comparison.
	Try Mode = iota
	// Wait is for a caller that will wait for the holder. The store notes on the lease that a caller waits (see
	// [PublishRequest.AnnounceIfAwaited]), and then replies. The reply says how long the lease still lives. A lease
	// without an end counts as free, and so does a lease of a foreign type. A store may also count a lease as free if
	// its remaining life is far longer than any LeaseTTL.
	Wait
	// Force is for Loader.Refresh. It is like Wait, but a back-off also counts as free.
	Force
	// Look is for a caller that must not load now. It is like Wait, but it takes nothing: the reply is Free where Wait
	// would take the lease. In this mode the store ignores Token, so the caller's own lease counts as the lease of
	// another fill.
	Look
)

// AcquireResult is the reply of [Store.Acquire].
type AcquireResult struct {
	State AcquireState

	Now time.Time // Acquired: when the claim was taken, by the store's clock; counts as the start of the load

	Record []byte // Changed: the record that is stored

	Holder  string        // Held: token of the fill that has the lease; empty during a back-off
	Failure string        // the text that Fail was given: Held = of a back-off, Acquired or Free = of a note
	Left    time.Duration // Held: remaining life of the lease or back-off; 0 in mode Try
}

// AcquireState is the outcome of [Store.Acquire].
type AcquireState uint8

// The outcomes of Acquire.
const (
	// Acquired: lease and claim belong to the token, so the caller loads now. The request may be a repetition: the reply
	// to an earlier try was lost, or the network delivered a copy. If the claim still belongs to the token, that claim
	// stays, and Now is the moment at which that claim was taken. If an Invalidate has removed the claim meanwhile,
	// Acquire takes a new claim at a new moment. The load that began under the old claim stays invalid, because Publish
	// compares the moment of the claim with Began.
	//
	// If an earlier fill left a note instead of a back-off (see [FailRequest]), Failure is its text. The lease replaces
	// the note, so the reply to a repeated request has no Failure. Failure is empty after a back-off that mode Force
	// has ignored.
	Acquired AcquireState = iota
	// Changed: the stored record is not the one that the fill has seen. In modes Wait and Force, the store compares the
	// record before it looks at the lease. If the lease belonged to the token, the store has freed the lease and
	// announced released.
	Changed
	// Held: another fill has the lease, or a failed fill has left a back-off.
	Held
	// Free: in mode Look, no fill has the lease and there is no back-off. Failure is the text of a note if there is one.
	// The note stays.
	Free
)

// PublishRequest is the argument of [Store.Publish].
type PublishRequest struct {
	Key      string
	Token    string        // of the fill
	Began    time.Time     // AcquireResult.Now of the fill; zero = compare the claim by its token alone
	Replaced string        // token of the record that the fill has seen; empty for none
	Record   []byte        // the Store does not change it, and does not keep it after the call
	Keep     time.Duration // how long the store keeps the record, at least 1 s

	// AnnounceIfAwaited lets the store skip the announcement if the lease still belongs to the token and no Acquire has
	// noted a waiter on that lease. Without AnnounceIfAwaited, the store would announce every load of a rarely used key
	// to the whole fleet.
	AnnounceIfAwaited bool
}

// PublishResult is the outcome of [Store.Publish].
type PublishResult uint8

// The outcomes of Publish.
const (
	Stored    PublishResult = iota // the record was stored
	Rejected                       // the claim was removed, was taken by another fill, or had ended
	StoreFull                      // the claim was valid, but the store has no room for the record
)

// FailRequest is the argument of [Store.Fail].
type FailRequest struct {
	Key     string
	Token   string // of the fill
	Failure string // kept and announced byte for byte

	// TTL is how long the failure stays in the place of the lease. 0 leaves nothing.
	TTL time.Duration

	// HoldAll makes the failure a back-off: until TTL is over, no fill gets the lease, except in mode Force. Without
	// HoldAll the failure is only a note: any fill gets the lease as if nothing were there, and learns of the failure from
	// AcquireResult.Failure. So a second node learns that another node has failed before it.
	HoldAll bool

	// DropValue makes Fail delete the value as well. Fail then announces invalidated, with Token as its token, before it
	// announces failed.
	DropValue bool
}

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
	Token    string    // of the fill; or the argument by of Invalidate, Expire, InvalidateTags or ExpireTags
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
	Disconnected                               // the subscription broke, so announcements may be missed
	Warning                                    // the store works, but a setting of it is doubtful
	Filled                                     // the record of a fill was stored
	Failed                                     // a fill failed
	Invalidated                                // value, lease and claim were deleted
	Expired                                    // the value was marked stale, lease and claim were deleted
	Released                                   // a lease was freed without a result
	TagInvalidated                             // values with the tag are invalid if their load began no later than At
	TagExpired                                 // values with the tag are stale if their load began no later than At
)

// MaxAnnouncedRecord is the largest record, in bytes, that travels with its announcement. Nodes fetch a larger record
// from the store when they need it.
const MaxAnnouncedRecord = 4 << 10
