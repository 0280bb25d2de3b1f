package refill

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A flight is the one call per key per process that finds out what the key's value is: it reads the store, waits for
// another node, or loads. x/sync/singleflight cannot carry what is promised here: callers that leave on their own, a
// context that ends with the last of them, a flight that hands out a stale value and goes on, detaching by Invalidate, and
// panics that stay errors. Hence these lines.

var (
	errAbandoned = errors.New("refill: every caller has left")
	errClosing   = errors.New("refill: closing")
)

type loadFunc[V any] func(ctx context.Context, key string) (V, error)

// call is one flight. The goroutine that flies it owns all fields that are not said to be somebody else's: for the first leg
// that may be the one of the caller who started it.
type call[V any] struct {
	key    string // as spelled
	given  string
	load   loadFunc[V] // nil: a bulk load
	group  *group[V]   // of a GetMany, or nil
	ask    Ask         // how much to find out about a lease that somebody else has
	forced bool        // by Refresh: a value that is there already is no answer

	// ctx has the values of the first caller and nobody's cancellation. It ends when nobody waits any more; values never
	// ends.
	values context.Context
	ctx    context.Context
	cancel context.CancelCauseFunc

	once   sync.Once     // for the next two
	ready  chan struct{} // closed once answer may be read
	answer answer[V]     // written before ready is closed, by the flight or by its timer
	done   chan struct{} // closed when the flight has ended
	last   answer[V]     // what it found out in the end, if anything; to be read after done

	// Guarded by flights.mu.
	places  int // callers that wait, and one for the flight itself while it works behind their backs
	hurried bool

	// Made by listen, since most flights land on their first leg.
	notes chan Note     // what is announced about the key; wake-ups are hints, so a full box loses nothing
	hurry chan struct{} // closed when a load is among those who wait: it must not queue behind itself

	begun bool     // its first leg is done, see Loader.begin
	tried *attempt // to load, there
	err   error    // what stood in the way there
	turn  bool     // it has a turn for its first call of the store

	// What the flight knows.
	behind bool      // nobody waits: this is a background refresh
	seen   string    // token of the record in the store, as far as known
	old    *entry[V] // the best there is if the load fails
	lostTo string    // token of the fill that it waits for
	at     epoch     // noted before the read or load that will be the answer began
	mended bool      // the load before it had failed, and others may remember that

	seat    *seat[V] // in a bulk load, see bulk.go
	sighted bool     // has been told what its group has read

	soft *time.Timer // runs while a stale answer waits for SoftTimeout
}

// answer is what a flight found out.
type answer[V any] struct {
	entry *entry[V]
	how   EventKind
	err   error

	waited time.Duration // by this caller, for the event
}

// settled reports whether there is an answer already.
func (c *call[V]) settled() bool {
	select {
	case <-c.ready:
		return true
	default:
		return false
	}
}

// settle ends a flight's search.
func (c *call[V]) settle(a answer[V]) {
	c.last = a
	c.handOut(a)
}

// handOut gives those who wait an answer. Only the first one counts.
func (c *call[V]) handOut(a answer[V]) {
	c.once.Do(func() {
		c.answer = a
		close(c.ready)
	})
}

// handOutAfter hands out an answer that is second best, unless a better one comes within d.
func (c *call[V]) handOutAfter(d time.Duration, a answer[V]) {
	switch {
	case d == 0:
		c.handOut(a)
	case c.soft == nil:
		c.soft = time.AfterFunc(d, func() { c.handOut(a) })
	}
}

// flights holds the calls of one Loader.
type flights[V any] struct {
	closing atomic.Bool // no new calls; written under mu
	room    int         // how many callers may wait at once

	mu      sync.Mutex
	waiting int                          // callers that do
	calls   map[string]*call[V]          // the one that can be joined, per key
	boxes   map[string]map[*call[V]]bool // all that listen, detached ones too, per key
	running map[*call[V]]struct{}        // all that have not ended
	reading int                          // reads for many of them
	loading map[*call[V]]struct{}        // those whose load function has not returned
	landed  chan struct{}                // closed when closing and nothing runs any more
	quiet   chan struct{}                // and no load function either
	fly     func(*call[V])               // flies a call to its end
	voided  func() uint64                // see place.tags
}

func newFlights[V any](fly func(*call[V]), voided func() uint64, room int) *flights[V] {
	return &flights[V]{
		voided:  voided,
		room:    room,
		calls:   make(map[string]*call[V]),
		boxes:   make(map[string]map[*call[V]]bool),
		running: make(map[*call[V]]struct{}),
		loading: make(map[*call[V]]struct{}),
		landed:  make(chan struct{}),
		quiet:   make(chan struct{}),
		fly:     fly,
	}
}

// ticket is what somebody wants of a key.
type ticket[V any] struct {
	key    string // as spelled
	given  string
	load   loadFunc[V]
	group  *group[V] // what else its caller wants, or nil
	ask    Ask
	forced bool // a load, whatever is there
	behind bool // a background refresh: nobody waits
}

// place is what a caller has in a flight.
type place[V any] struct {
	call  *call[V] // nil: none
	led   bool     // it has started the flight, and has to launch it
	taken bool     // false: the caller may only wait for the flight's end
	tags  uint64   // how many voidings of tags this process had heard of before
}

// admit counts a caller who waits: one per Get, one per GetMany. depart is called when it waits no more.
func (f *flights[V]) admit(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.waiting >= f.room && outerFill(ctx) == nil {
		return ErrOverloaded
	}
	f.waiting++
	return nil
}

func (f *flights[V]) depart() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.waiting--
}

// join gives the caller a place in the flight of the key, and starts one if there is none. Two cases give no place: a
// background refresh finds a flight there (nil), a forced one finds a flight that is not (then taken is false, and the
// caller waits for its end). A Get that finds a forced flight starts one of its own: that one is no good for what is there.
//
// A flight whose context is dead is never joined, since leave takes it out of sight in the same act that cancels it.
// Otherwise: A leaves, the flight is cancelled; B joins, with time to spare, and gets A's cancellation (tailscale#18919).
func (f *flights[V]) join(ctx context.Context, t ticket[V]) (p place[V], err error) {
	nested := outerFill(ctx) != nil
	p = place[V]{taken: true, tags: f.voided()}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closing.Load() {
		return place[V]{}, ErrClosed
	}
	p.call = f.calls[t.key]
	switch c := p.call; {
	case c == nil || c.forced && !t.forced && !t.behind:
		p.call, p.led = f.start(ctx, t, nested), true
	case t.behind:
		return place[V]{}, nil
	case t.forced && !c.forced:
		p.taken = false
	default:
		c.places++
		if nested && !c.hurried {
			c.hurried = true
			if c.hurry != nil {
				close(c.hurry)
			}
		}
	}
	return p, nil
}

// retire lets nobody join a flight any more; it flies on for those who have.
func (f *flights[V]) retire(c *call[V]) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unlist(c)
}

// start makes a flight. The caller holds f.mu.
func (f *flights[V]) start(ctx context.Context, t ticket[V], nested bool) *call[V] {
	c := &call[V]{
		key: t.key, given: t.given, load: t.load, ask: t.ask, forced: t.forced, behind: t.behind, places: 1, hurried: nested,
		ready: make(chan struct{}), done: make(chan struct{}),
	}
	c.values = context.WithoutCancel(ctx)
	c.ctx, c.cancel = context.WithCancelCause(c.values)
	if t.group != nil {
		t.group.add(c)
	}
	f.add(c)
	return c
}

// launch flies a flight that was started to its end, on a goroutine of its own.
func (f *flights[V]) launch(c *call[V]) {
	go func() {
		defer f.end(c)
		roomy(0)
		f.fly(c)
	}()
}

// roomy grows the stack of a new goroutine at once to what a codec and a client need. Growing it by and by, deep down where
// there is much to move, costs a load as much as half a trip to the store.
//
//go:noinline
func roomy(i int) byte {
	var room [8 << 10]byte
	return room[i]
}

// add registers a call. The caller holds f.mu.
func (f *flights[V]) add(c *call[V]) {
	f.calls[c.key] = c
	f.running[c] = struct{}{}
}

// listen lets a flight hear what is announced about its key, and of a caller who is in a hurry. Once is enough.
func (f *flights[V]) listen(c *call[V]) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.notes != nil {
		return
	}
	c.notes, c.hurry = make(chan Note, 4), make(chan struct{})
	if c.hurried {
		close(c.hurry)
	}
	if f.boxes[c.key] == nil {
		f.boxes[c.key] = make(map[*call[V]]bool)
	}
	f.boxes[c.key][c] = true
}

// end forgets a call that has been flown.
func (f *flights[V]) end(c *call[V]) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unlist(c)
	delete(f.running, c)
	delete(f.boxes[c.key], c)
	if len(f.boxes[c.key]) == 0 {
		delete(f.boxes, c.key)
	}
	if c.soft != nil {
		c.soft.Stop()
	}
	close(c.done)
	c.cancel(nil)
	f.checkLanded()
}

// unlist takes a call out of sight of later callers. The caller holds f.mu.
func (f *flights[V]) unlist(c *call[V]) {
	if f.calls[c.key] == c {
		delete(f.calls, c.key)
	}
}

// leave gives a caller's place back. When it was the last one, nobody wants the result any more.
func (f *flights[V]) leave(p place[V]) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := p.call
	switch c.places--; {
	case c.places == 0:
		f.unlist(c)
		c.cancel(errAbandoned)
	case f.closing.Load() && f.needless(c):
		c.cancel(errClosing)
	}
}

// needless reports whether a call only refreshes behind everybody's back. The caller holds f.mu.
func (f *flights[V]) needless(c *call[V]) bool { return c.behind && c.places <= 1 }

// stay gives the flight a place of its own: it has handed out a stale value and works on behind its callers' backs. It
// returns false when it must not: everybody has left already, or the Loader closes.
func (f *flights[V]) stay(c *call[V]) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closing.Load() || c.ctx.Err() != nil {
		return false
	}
	c.places++
	c.behind = true
	return true
}

// wanted reports whether callers wait for a background refresh.
func (f *flights[V]) wanted(c *call[V]) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return c.places > 1 && !c.settled()
}

// flying reports whether there is a flight of key to join.
func (f *flights[V]) flying(key string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[key] != nil
}

// detach lets nobody join the flight of key any more; it flies on for those who have.
func (f *flights[V]) detach(key string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.calls, key)
}

// detachAll does so for all keys: announcements may have been missed.
func (f *flights[V]) detachAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.calls)
}

// tell hands a note to every flight of its key, or of all keys when the note has none.
func (f *flights[V]) tell(key string, n Note) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if key == "" {
		for c := range f.running {
			c.hear(n)
		}
		return
	}
	for c := range f.boxes[key] {
		c.hear(n)
	}
}

// hear never blocks, whether c listens or not. A note that finds the box full may be dropped: whoever empties it looks at
// the store after each note, the last of them later than this one.
func (c *call[V]) hear(n Note) {
	select {
	case c.notes <- n:
	default:
	}
}

// drain forgets what was heard: the store is about to be asked.
func (c *call[V]) drain() {
	for {
		select {
		case <-c.notes:
		default:
			return
		}
	}
}

// loads notes that the load function of c runs, or has returned.
func (f *flights[V]) loads(c *call[V], running bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if running {
		f.loading[c] = struct{}{}
		return
	}
	delete(f.loading, c)
	f.checkQuiet()
}

// read runs what flights wait for on a goroutine, unless none is left that could.
func (f *flights[V]) read(look func()) (begun bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.running) == 0 {
		return false
	}
	f.reading++
	go func() {
		look()
		f.mu.Lock()
		defer f.mu.Unlock()
		f.reading--
		f.checkLanded()
	}()
	return true
}

// checkLanded is called when running or reading has shrunk. Both are empty once after closing.
func (f *flights[V]) checkLanded() {
	if f.closing.Load() && len(f.running) == 0 && f.reading == 0 {
		close(f.landed)
	}
	f.checkQuiet()
}

func (f *flights[V]) checkQuiet() {
	if f.closing.Load() && len(f.running) == 0 && f.reading == 0 && len(f.loading) == 0 {
		close(f.quiet)
	}
}

// close lets no call start any more and ends those that nobody waits for. quiet is closed when all is over.
func (f *flights[V]) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closing.Store(true)
	for c := range f.running {
		if f.needless(c) {
			c.cancel(errClosing)
		}
	}
	f.checkLanded()
}

// abort ends every call and returns the keys whose load function still runs.
func (f *flights[V]) abort() (keys []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.running {
		c.cancel(errClosing)
	}
	for c := range f.loading {
		keys = append(keys, c.key)
	}
	slices.Sort(keys)
	return keys
}
