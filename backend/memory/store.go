// Package memory is the reference backend of refill, within one process. A Loader without Config.Shared uses a
// [Store] of its own. In a test of several nodes, all Loaders share one Store. The package follows the rules of
// package driver word for word, so its code also shows what a store has to do.
package memory

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/refill-go/refill/driver"
)

// Store implements [driver.Store] and [driver.Locks] in the memory of this process. A Store has nothing to close.
type Store struct {
	base time.Time // the clock is base plus the monotonic time since base, so setting the wall clock does not move it

	mu        sync.Mutex // guards all below
	items     map[string]*item
	bytes     int64 // sum of the costs of all items
	tags      map[string]tagState
	lastTag   time.Time // when a tag was last invalidated or expired
	locks     map[string]*lock
	listeners map[*listener]struct{}
	fence     uint64 // the last fence given out; all keys share this counter, so the fences of each key rise

	maxItems, maxTags int // how many items and tag states are kept; above, random values or tag states are evicted
	maxBytes          int64
}

var (
	_ driver.Store = (*Store)(nil)
	_ driver.Locks = (*Store)(nil)
)

// item is what is stored under one key.
type item struct {
	value, lease, claim expiring
}

// expiring is data that ends at until. The zero value means that there is no data.
type expiring struct {
	data    string
	until   time.Time
	awaited bool      // of a lease: a caller waits for its holder
	began   time.Time // of a claim: when it was taken
}

// tagState is the state of a tag, kept until the moment until. The zero value is the state of an unknown tag.
type tagState struct {
	driver.TagState
	until time.Time
}

// New returns an empty Store that holds at most 100,000 values with 256 MiB in total. See [NewSized].
func New() *Store { return NewSized(0, 0) }

// NewSized returns an empty Store that holds at most the given number of values (default 100,000), which together cost
// at most the given number of bytes (default 256 MiB). A limit of 0 or less is the default. A value costs its record,
// its key and about 300 bytes. Above a limit, the Store drops random values. A value that alone costs more than the
// limit is not kept. The Store also holds at most 100,000 tag states. It never drops a lease, a claim, a back-off, a
// note or a lock before its end, so many of these together can exceed a limit. What has ended is dropped while other
// keys are added.
func NewSized(entries int, bytes int64) *Store {
	if entries <= 0 {
		entries = defaultEntries
	}
	if bytes <= 0 {
		bytes = defaultBytes
	}
	return &Store{
		base:      time.Now(),
		items:     make(map[string]*item),
		tags:      make(map[string]tagState),
		locks:     make(map[string]*lock),
		listeners: make(map[*listener]struct{}),
		maxItems:  entries,
		maxTags:   defaultEntries,
		maxBytes:  bytes,
	}
}

// Check implements driver.Store. It finds nothing wrong.
func (s *Store) Check() error { return nil }

// Now implements driver.Store. It returns the time by the clock of this process.
func (s *Store) Now() time.Time { return s.base.Add(time.Since(s.base)) }

// current drops the data if it has ended. It returns the data, or "" if there is none.
func (e *expiring) current(now time.Time) string {
	if !now.Before(e.until) {
		*e = expiring{}
	}
	return e.data
}

// update runs step on the item of key, under s.mu. It drops the item if step leaves the item empty.
func (s *Store) update(ctx context.Context, key string, step func(i *item, now time.Time)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.Now()
	i := s.items[key]
	if i == nil {
		i = new(item)
	}
	before := i.cost(key)
	i.drop(now)
	step(i, now)
	if s.put(key, i, before); i.cost(key) > before {
		s.evict(key, now)
	}
	return nil
}

// put stores an item that has changed, or drops it if it is empty. before is what the item cost before the change.
func (s *Store) put(key string, i *item, before int64) {
	s.bytes += i.cost(key) - before
	if *i == (item{}) {
		delete(s.items, key)
	} else {
		s.items[key] = i
	}
}

// Get implements driver.Store.
func (s *Store) Get(ctx context.Context, key string) (record []byte, err error) {
	err = s.update(ctx, key, func(i *item, _ time.Time) {
		if i.value.data != "" {
			record = []byte(i.value.data)
		}
	})
	return record, err
}

// GetMany implements driver.Store.
func (s *Store) GetMany(ctx context.Context, keys ...string) (records [][]byte, err error) {
	records = make([][]byte, len(keys))
	for i, key := range keys {
		if records[i], err = s.Get(ctx, key); err != nil {
			return nil, err
		}
	}
	return records, nil
}

// Acquire implements driver.Store.
func (s *Store) Acquire(ctx context.Context, r driver.AcquireRequest) (a driver.AcquireResult, err error) {
	err = s.update(ctx, r.Key, func(i *item, now time.Time) {
		failure, failed := strings.CutPrefix(i.lease.data, "!")
		mine := i.lease.data == r.Token && r.Token != "" && r.Mode != driver.Look
		free := i.unleased() || failed && r.Mode == driver.Force
		switch {
		case i.value.data != "" && driver.RecordToken([]byte(i.value.data)) != r.Seen:
			a.State, a.Record = driver.Changed, []byte(i.value.data)
			if mine {
				i.lease = expiring{}
				s.announce(driver.Announcement{Kind: driver.Released, Key: r.Key, Token: r.Token})
			}
		case free && r.Mode == driver.Look:
			a.State, a.Failure = driver.Free, i.note()
		case free, mine:
			a.Failure = i.note()
			if !mine { // a lease that is mine stays as it is, with its end and its awaited field
				i.lease = expiring{data: r.Token, until: now.Add(r.LeaseTTL)}
			}
			if i.claim.data != r.Token {
				i.claim = expiring{data: r.Token, until: now.Add(r.ClaimTTL), began: s.afterTags(now)}
			}
			a.Now = i.claim.began
		default:
			if a.State = driver.Held; failed {
				a.Failure = failure
			} else {
				a.Holder = i.lease.data
			}
			if r.Mode != driver.Try {
				a.Left = i.lease.until.Sub(now)
				i.lease.awaited = true
			}
		}
	})
	return a, err
}

// unleased reports whether no fill has the lease and no back-off is in its place. There may be a note.
func (i *item) unleased() bool { return i.lease.data == "" || i.lease.data[0] == '?' }

// note returns the text of the failure that is noted in the place of the lease, or "".
func (i *item) note() string {
	if text, noted := strings.CutPrefix(i.lease.data, "?"); noted {
		return text
	}
	return ""
}

// Renew implements driver.Store.
func (s *Store) Renew(ctx context.Context, ttl time.Duration, leases ...driver.Lease) (mine []bool, err error) {
	mine = make([]bool, len(leases))
	for n, l := range leases {
		err := s.update(ctx, l.Key, func(i *item, now time.Time) {
			if mine[n] = l.Token != "" && i.lease.data == l.Token && i.claim.data == l.Token; mine[n] {
				i.lease.until = now.Add(ttl)
			}
		})
		if err != nil {
			return mine, err
		}
	}
	return mine, nil
}

// Publish implements driver.Store.
func (s *Store) Publish(ctx context.Context, r driver.PublishRequest) (result driver.PublishResult, err error) {
	err = s.update(ctx, r.Key, func(i *item, now time.Time) {
		if i.claim.data != r.Token || r.Token == "" || !r.Began.IsZero() && !r.Began.Equal(i.claim.began) {
			if result = driver.Rejected; r.Token != "" && driver.RecordToken([]byte(i.value.data)) == r.Token {
				result = driver.Stored // an earlier try has stored the record, and its reply was lost
			}
			s.release(i, r.Key, r.Token)
			return
		}
		silent := r.AnnounceIfAwaited && i.lease.data == r.Token && !i.lease.awaited
		*i = item{value: expiring{data: string(r.Record), until: now.Add(r.Keep)}}
		if silent {
			return
		}
		a := driver.Announcement{Kind: driver.Filled, Key: r.Key, Token: r.Token, Replaced: r.Replaced}
		if len(r.Record) <= driver.MaxAnnouncedRecord {
			a.Record = []byte(i.value.data)
		}
		s.announce(a)
	})
	return result, err
}

// Fail implements driver.Store.
func (s *Store) Fail(ctx context.Context, r driver.FailRequest) error {
	return s.update(ctx, r.Key, func(i *item, now time.Time) {
		if !i.free(r.Token) {
			return
		}
		if r.DropValue {
			i.value = expiring{}
			s.announce(driver.Announcement{Kind: driver.Invalidated, Key: r.Key, Token: r.Token})
		}
		mark := "?"
		if r.HoldAll {
			mark = "!"
		}
		if r.TTL > 0 && i.unleased() { // if another fill has the lease, that lease stays
			i.lease = expiring{data: mark + r.Failure, until: now.Add(r.TTL)}
		}
		s.announce(driver.Announcement{Kind: driver.Failed, Key: r.Key, Token: r.Token, Failure: r.Failure})
	})
}

// Release implements driver.Store.
func (s *Store) Release(ctx context.Context, key, token string) error {
	return s.update(ctx, key, func(i *item, _ time.Time) { s.release(i, key, token) })
}

func (s *Store) release(i *item, key, token string) {
	if i.free(token) {
		s.announce(driver.Announcement{Kind: driver.Released, Key: key, Token: token})
	}
}

// free clears lease and claim, each if it belongs to the token, and reports whether it cleared at least one.
func (i *item) free(token string) (had bool) {
	for _, e := range [...]*expiring{&i.lease, &i.claim} {
		if token != "" && e.data == token {
			*e, had = expiring{}, true
		}
	}
	return had
}

// Invalidate implements driver.Store.
func (s *Store) Invalidate(ctx context.Context, by string, keys ...string) error {
	return s.updateAll(ctx, keys, func(key string, i *item, _ time.Time) {
		*i = item{}
		s.announce(driver.Announcement{Kind: driver.Invalidated, Key: key, Token: by})
	})
}

// Expire implements driver.Store.
func (s *Store) Expire(ctx context.Context, by string, keys ...string) error {
	return s.updateAll(ctx, keys, func(key string, i *item, now time.Time) {
		i.lease, i.claim = expiring{}, expiring{}
		if b := []byte(i.value.data); driver.ExpireRecord(b, now) {
			i.value.data = string(b)
		} else {
			i.value = expiring{}
		}
		s.announce(driver.Announcement{Kind: driver.Expired, Key: key, Token: by})
	})
}

func (s *Store) updateAll(ctx context.Context, keys []string, step func(string, *item, time.Time)) error {
	for _, key := range keys {
		if err := s.update(ctx, key, func(i *item, now time.Time) { step(key, i, now) }); err != nil {
			return err
		}
	}
	return nil
}

// Tags implements driver.Store.
func (s *Store) Tags(ctx context.Context, tags ...string) (states []driver.TagState, err error) {
	err = s.updateTags(ctx, tags, func(_ string, t *tagState, _ time.Time) {
		states = append(states, t.TagState)
	})
	return states, err
}

// EnsureTags implements driver.Store.
func (s *Store) EnsureTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	return s.updateTags(ctx, tags, func(_ string, t *tagState, now time.Time) {
		if !t.Known {
			t.TagState = driver.TagState{Known: true, Invalidated: now.Add(-reach)}
		}
		t.keep(now.Add(keep))
	})
}

// InvalidateTags implements driver.Store.
func (s *Store) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return s.updateTags(ctx, tags, func(tag string, t *tagState, now time.Time) {
		s.lastTag = s.afterTags(now)
		t.Known, t.Invalidated = true, s.lastTag
		t.keep(now.Add(keep))
		s.announce(driver.Announcement{Kind: driver.TagInvalidated, Key: tag, Token: by, At: s.lastTag})
	})
}

// ExpireTags implements driver.Store.
func (s *Store) ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return s.updateTags(ctx, tags, func(tag string, t *tagState, now time.Time) {
		s.lastTag = s.afterTags(now)
		if !t.Known {
			t.Known, t.Invalidated = true, s.lastTag
		}
		t.Expired = s.lastTag
		t.keep(now.Add(keep))
		s.announce(driver.Announcement{Kind: driver.TagExpired, Key: tag, Token: by, At: s.lastTag})
	})
}

// afterTags returns now, or a moment just after the last change of a tag if the clock has not moved since that change.
// In a bubble of testing/synctest the clock stands still. There, without afterTags, a load that begins after
// InvalidateTags would begin at the same moment, and its value would be invalid.
func (s *Store) afterTags(now time.Time) time.Time {
	if after := s.lastTag.Add(time.Microsecond); now.Before(after) {
		return after
	}
	return now
}

// keep makes a state live at least until the given moment.
func (t *tagState) keep(until time.Time) {
	if t.until.Before(until) {
		t.until = until
	}
}

// updateTags runs step on the state of each tag, under s.mu. It first drops a state that has ended.
func (s *Store) updateTags(
	ctx context.Context, tags []string, step func(tag string, t *tagState, now time.Time),
) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.Now()
	for _, tag := range tags {
		t := s.tags[tag]
		if !now.Before(t.until) {
			delete(s.tags, tag)
			t = tagState{}
		}
		step(tag, &t, now)
		if t.Known {
			s.tags[tag] = t
			s.evictTags(tag, now)
		}
	}
	return nil
}

// listener passes announcements to one subscriber, in order. deliver runs on a goroutine of its own, because the
// subscriber may call the Store, and only while there are announcements. All fields but runs are guarded by Store.mu.
type listener struct {
	prefix  string
	handle  func(driver.Announcement)
	queue   []driver.Announcement // announcements that handle has not got yet
	busy    bool                  // deliver or Subscribe may be calling handle, so no other goroutine may call it
	stopped bool
	runs    sync.WaitGroup // calls of deliver; none begins once stopped is set
}

// announce queues an announcement for the subscribers of its name. The caller holds s.mu.
func (s *Store) announce(a driver.Announcement) {
	for l := range s.listeners {
		if strings.HasPrefix(a.Key, l.prefix) {
			l.queue = append(l.queue, a)
			s.wake(l)
		}
	}
}

// wake starts deliver if there is something to deliver. The caller holds s.mu.
func (s *Store) wake(l *listener) {
	if len(l.queue) > 0 && !l.busy && !l.stopped {
		l.busy = true
		l.runs.Go(func() { s.deliver(l) })
	}
}

// deliver calls handle until the queue is empty.
func (s *Store) deliver(l *listener) {
	for {
		s.mu.Lock()
		queue := l.queue
		l.queue = nil
		l.busy = len(queue) > 0
		s.mu.Unlock()
		if len(queue) == 0 {
			return
		}
		for _, a := range queue {
			l.handle(a)
		}
	}
}

// Subscribe implements driver.Store.
func (s *Store) Subscribe(name string, handle func(driver.Announcement)) (stop func()) {
	l := &listener{prefix: name + ":", handle: handle, busy: true}
	s.mu.Lock()
	s.listeners[l] = struct{}{}
	s.mu.Unlock()
	handle(driver.Announcement{Kind: driver.Subscribed})
	s.mu.Lock()
	l.busy = false
	s.wake(l)
	s.mu.Unlock()
	return sync.OnceFunc(func() {
		s.mu.Lock()
		delete(s.listeners, l)
		l.stopped = true
		s.mu.Unlock()
		l.runs.Wait()
	})
}

// signal puts a wake-up into c, unless c already holds a wake-up.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
