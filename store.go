package refill

import (
	"context"
	"time"
)

// Store is a shared store as the [Loader] sees it: whole steps of a refill, each of them atomic.
// backend/goredis implements it over Redis, [NewMemory] inside one process; package refilltest holds the
// suite that an implementation has to pass.
//
// A key is "name:key", with the name of the Loader in front; a name has no colon, so that the first one
// divides them. A token names one fill: "node#counter". Tokens are compared for equality, never ordered.
//
// Three things stand under one key, and every step below touches them in one atomic act:
//
//   - the value: a record as the Loader encoded it. A Store reads two things of it, see [RecordToken] and
//     [ExpireRecord], and nothing else.
//   - the lease (the refill lock): who loads. It is for efficiency; it ends by itself.
//   - the claim: whose load may be stored. Correctness comes from the claim. It is taken with the lease, before the load
//     begins; it outlives the lease; and whatever voids a load (Invalidate, Expire, another's claim) takes it away.
//
// Values may carry tags, so that a group of them can be voided without knowing its keys. A tag is "name:tag", and what the
// store knows of it, its mark, is two moments by the store's clock: see [TagState]. A tag is not a key: the same text may be
// both, and neither touches the other. The store does not know which values carry a tag: the Loader compares the mark
// with the moment at which a value's load began. So losing a mark must void, never revive: a tag that is not known voids all
// that carries it.
//
// Whoever frees a lease announces it in the same act, so that nobody who waits has to poll; but see Publication.Quiet.
// Announcements are hints: a lost one costs time, never truth.
//
// Every call returns when its ctx ends, also when the server does not answer. An error means that the outcome is
// unknown. All methods may be called from any goroutine.
type Store interface {
	// Get returns the record under key, nil when there is none. Foreign bytes are returned as they are: the
	// Loader judges them.
	Get(ctx context.Context, key string) (record []byte, err error)

	// GetMany is Get for many keys in one exchange: records[i] is that of keys[i], nil where there is none. A key may be
	// there twice. If any of them cannot be read, the whole call is an error.
	GetMany(ctx context.Context, keys ...string) (records [][]byte, err error)

	// Begin begins a fill: it takes lease and claim in one act, unless there is another record than the one that was seen
	// (BeginOther), or somebody else has the lease (BeginHeld); see [Bid] and [Begun].
	Begin(ctx context.Context, b Bid) (Begun, error)

	// Renew lets the lease live for ttl from now, if lease and claim are both the token's. It never creates one.
	Renew(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error)

	// Publish ends a fill: if the claim is the one that the token took at Began, it frees lease and claim, stores the record for keep and
	// announces filled (see Publication.Quiet); otherwise it stores nothing, frees the token's own lease and announces released. It frees
	// before it stores, so that a full store still lets the waiters go. If the token's record is there already, it
	// is PublishStored: the reply to an earlier try was lost.
	Publish(ctx context.Context, p Publication) (Published, error)

	// Fail ends a fill that has no result: it frees lease and claim, each if it is the token's, and leaves failure in
	// the place of the lease for ttl (0 = leaves nothing), unless another has it: a back-off is a lease that nobody
	// holds. It announces failed, if one was the token's.
	Fail(ctx context.Context, key, token, failure string, ttl time.Duration) error

	// Release frees lease and claim, each if it is the token's, and announces released if one was.
	Release(ctx context.Context, key, token string) error

	// Invalidate deletes value, lease, claim and back-off of every key and announces invalidated. by is the token
	// that the announcement carries.
	Invalidate(ctx context.Context, by string, keys ...string) error

	// Expire marks the value of every key as expired now (see [ExpireRecord]), deletes lease, claim and back-off
	// and announces expired.
	Expire(ctx context.Context, by string, keys ...string) error

	// Tags says of each tag what the store knows of it: states[i] is that of tags[i]. A mark of foreign bytes or of a
	// foreign type counts as not known.
	Tags(ctx context.Context, tags ...string) (states []TagState, err error)

	// HoldTags sees to it that each tag is known, and stays known for keep at least. It never changes or shortens what
	// there is. A tag that is not known (never used, run out, evicted) becomes known as invalidated `reach` before now. It
	// is called before a tagged record is published, with a reach that no load which can still be published began before:
	// then whatever was stored before the mark was lost is void, since nobody can say any more whether it was invalidated,
	// and what is being loaded is not. A mark without an end, or a foreign one, is replaced.
	HoldTags(ctx context.Context, reach, keep time.Duration, tags ...string) error

	// InvalidateTags marks each tag as invalidated now, for keep at least, and announces tag-invalidated. Expired stays as
	// it is, and so does a longer life of the mark. A moment never goes back when the clock steps back by less than a
	// second; one that lies further ahead is from before the clock was set back, and is replaced. by is the token that the
	// announcement carries. One tag that fails does not keep the others from being marked.
	InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error

	// ExpireTags marks each tag as expired now, by the same rules, and announces tag-expired. Invalidated stays as it is;
	// a tag that was not known becomes known as invalidated now, too.
	ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error

	// Listen calls hear for every announcement about keys of this name, one after the other, and for the state of
	// the subscription itself: NoteUp once nothing can be missed any more, NoteDown as soon as something may have
	// been. hear must not block. stop ends it and returns when hear runs no more; it must not be called from hear.
	Listen(name string, hear func(Note)) (stop func())

	// Now is the store's clock, the one that Begin reads, as well as this process knows it without asking. It
	// follows the monotonic clock of the process.
	Now() time.Time

	// Check says what is wrong with the store as it was set up, without calling it: New reports it.
	Check() error
}

// Bid is what a fill says of itself to [Store.Begin].
type Bid struct {
	Key   string
	Token string // of the fill
	Seen  string // token of the record that the fill found, empty for none and for one that cannot be read

	LeaseTTL, ClaimTTL time.Duration

	Ask Ask
}

// Ask says what [Store.Begin] does about a lease that somebody else has.
type Ask uint8

// How to ask for a lease.
const (
	// AskOnce is for a refresh, which leaves if somebody else has the lease. All that it is told is who. The lease may be
	// taken a moment before the rest is looked at, if that is cheaper for the many who lose.
	AskOnce Ask = iota
	// AskLeft is for a caller that will wait. The store notes so before it answers, for as long as that lease lives (see
	// Publication.Quiet), and says how long that is. A lease without an end or of a foreign type counts as free; so may one
	// that lives far longer than any is given.
	AskLeft
	// AskForce is AskLeft for Refresh: a back-off counts as free, too.
	AskForce
)

// Begun is the answer of [Store.Begin].
type Begun struct {
	State BeginState

	Now time.Time // BeginTaken: the store's clock, when the load begins

	Record []byte // BeginOther: the record that is there

	Holder  string        // BeginHeld: token of the fill that has the lease, empty after a failure
	Failure string        // BeginHeld: what Fail left there, when the lease is a back-off
	Left    time.Duration // BeginHeld: life left of the lease or back-off; 0 = not asked for
}

// BeginState says what became of a [Bid].
type BeginState uint8

// What becomes of a Bid.
const (
	// BeginTaken: lease and claim are the token's, load now. An own token found in the lease counts as free: the reply to
	// an earlier try was lost. A claim that is the token's already stays, and Now is when it was taken; a new one has a
	// moment of its own, so that a copy of the request which the network has kept until after an Invalidate does not make
	// valid again what was loaded before.
	BeginTaken BeginState = iota
	// BeginOther: the value is another record than the one seen, and was looked at before the lease. A lease that the token
	// has all the same was freed, which was announced as released.
	BeginOther
	// BeginHeld: somebody else has the lease.
	BeginHeld
)

// Publication is what [Store.Publish] stores and announces.
type Publication struct {
	Key      string
	Token    string        // of the fill
	Began    time.Time     // Begun.Now of the fill; zero = the token alone says whose claim it is
	Replaced string        // token of the record that the fill saw, empty for none
	Record   []byte        // not kept or changed after the call
	Keep     time.Duration // how long the store keeps it, at least 1 s

	// Quiet says that nobody has to hear of it unless somebody waits: the store may leave the announcement out if the
	// token's lease is still there and no Begin has noted that somebody waits for it. Else every load of a rare key would be
	// told to the whole fleet.
	Quiet bool
}

// Published says what became of a publication.
type Published uint8

// What becomes of a publication.
const (
	PublishStored  Published = iota
	PublishRefused           // the claim was another's: an invalidation or a newer fill came between
	PublishNoRoom            // the claim was good, the store would not take the record (it is full)
)

// TagState is what a store knows of a tag.
type TagState struct {
	Known       bool      // false: whatever carries the tag is void
	Invalidated time.Time // values whose load began at or before this moment are void; zero = never
	Expired     time.Time // values whose load began at or before this moment count as expired then; zero = never
}

// Note is an announcement, or the state of the subscription.
type Note struct {
	Kind     NoteKind
	Key      string    // "name:tag" with NoteTagInvalidated and NoteTagExpired
	Token    string    // of the fill, or of who invalidated
	Replaced string    // NoteFilled: token of the record that was replaced
	Record   []byte    // NoteFilled: the record itself, where it is small
	Failure  string    // NoteFailed
	At       time.Time // NoteTagInvalidated, NoteTagExpired: the moment, by the store's clock
	Err      error     // NoteDown, NoteWarning
}

// NoteKind is the kind of a [Note].
type NoteKind uint8

// The kinds of notes.
const (
	NoteUp             NoteKind = iota + 1 // the subscription stands
	NoteDown                               // it broke: announcements may be missed
	NoteWarning                            // something about the store is doubtful
	NoteFilled                             // a fill was stored
	NoteFailed                             // a fill failed
	NoteInvalidated                        // value, lease and claim are gone
	NoteExpired                            // the value is marked stale, lease and claim are gone
	NoteReleased                           // a lease was freed without a result
	NoteTagInvalidated                     // what carries the tag, and was loaded before, is void
	NoteTagExpired                         // what carries the tag, and was loaded before, is stale
)

// MaxNoteRecord is the largest record, in bytes, that travels with its announcement. A larger one is fetched by
// those who need it.
const MaxNoteRecord = 4 << 10
