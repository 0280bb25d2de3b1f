package refill

import (
	"context"
	"strings"
	"sync"
	"time"
)

// Memory is a [Store] and a [LockDriver] within one process: what Config{Shared: nil} uses, and what a test of several
// nodes shares between its Loaders. It keeps the rules of the interfaces word for word, so it is also the place to read
// what a store has to do.
type Memory struct {
	base time.Time // the clock: monotonic, whatever happens to the wall clock

	mu        sync.Mutex
	cells     map[string]*cell
	marks     map[string]mark
	marked    time.Time // the moment of the last mark
	locks     map[string]*memoryLock
	listeners map[*memoryListener]struct{}
	fence     uint64 // of the last lock taken, of whatever key: so it rises for each
	limit     int    // of cells, and of marks; beyond it some go
}

// cell is all that stands under one key.
type cell struct {
	value, lease, claim timed
}

// timed is something with an end. The zero value is nothing.
type timed struct {
	data    string
	until   time.Time
	awaited bool      // of a lease: somebody waits for its holder
	began   time.Time // of a claim: when it was taken
}

// mark is what is known of a tag until then. The zero value is nothing.
type mark struct {
	TagState
	until time.Time
}

// NewMemory returns an empty Memory. It holds at most about 100,000 values, and as many tags.
func NewMemory() *Memory {
	return &Memory{
		base:      time.Now(),
		cells:     make(map[string]*cell),
		marks:     make(map[string]mark),
		locks:     make(map[string]*memoryLock),
		listeners: make(map[*memoryListener]struct{}),
		limit:     100_000,
	}
}

// Check finds nothing wrong.
func (m *Memory) Check() error { return nil }

// Now is the process's own clock.
func (m *Memory) Now() time.Time { return m.base.Add(time.Since(m.base)) }

// live drops what is over.
func (t *timed) live(now time.Time) string {
	if !now.Before(t.until) {
		*t = timed{}
	}
	return t.data
}

// act runs a step on the cell of key, under the lock, and drops what it leaves empty.
func (m *Memory) act(ctx context.Context, key string, step func(c *cell, now time.Time)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.Now()
	c := m.cells[key]
	if c == nil {
		c = new(cell)
	}
	c.value.live(now)
	c.lease.live(now)
	c.claim.live(now)
	step(c, now)
	if *c == (cell{}) {
		delete(m.cells, key)
		return nil
	}
	if m.cells[key] == nil {
		m.cells[key] = c
		m.makeRoom(now)
	}
	return nil
}

// makeRoom drops values over the limit: in the order of the map, which is none.
func (m *Memory) makeRoom(now time.Time) {
	if len(m.cells) <= m.limit {
		return
	}
	for key, c := range m.cells {
		if c.lease.live(now) == "" && c.claim.live(now) == "" {
			delete(m.cells, key)
		}
		if len(m.cells) <= m.limit {
			return
		}
	}
}

// Get implements Store.
func (m *Memory) Get(ctx context.Context, key string) (record []byte, err error) {
	err = m.act(ctx, key, func(c *cell, _ time.Time) {
		if c.value.data != "" {
			record = []byte(c.value.data)
		}
	})
	return record, err
}

// GetMany implements Store.
func (m *Memory) GetMany(ctx context.Context, keys ...string) (records [][]byte, err error) {
	records = make([][]byte, len(keys))
	for i, key := range keys {
		if records[i], err = m.Get(ctx, key); err != nil {
			return nil, err
		}
	}
	return records, nil
}

// Begin implements Store.
func (m *Memory) Begin(ctx context.Context, b Bid) (r Begun, err error) {
	err = m.act(ctx, b.Key, func(c *cell, now time.Time) {
		failure, failed := strings.CutPrefix(c.lease.data, "!")
		switch {
		case c.value.data != "" && RecordToken([]byte(c.value.data)) != b.Seen:
			r.State, r.Record = BeginOther, []byte(c.value.data)
			if c.lease.data == b.Token && b.Token != "" {
				c.lease = timed{}
				m.announce(Note{Kind: NoteReleased, Key: b.Key, Token: b.Token})
			}
		case c.lease.data == "", c.lease.data == b.Token, failed && b.Ask == AskForce:
			if c.lease.data != b.Token { // else it may be known that somebody waits
				c.lease = timed{data: b.Token, until: now.Add(b.LeaseTTL)}
			}
			if c.claim.data != b.Token {
				c.claim = timed{data: b.Token, until: now.Add(b.ClaimTTL), began: m.afterMarks(now)}
			}
			r.Now = c.claim.began
		default:
			if r.State = BeginHeld; failed {
				r.Failure = failure
			} else {
				r.Holder = c.lease.data
			}
			if b.Ask != AskOnce {
				r.Left = c.lease.until.Sub(now)
				c.lease.awaited = true
			}
		}
	})
	return r, err
}

// Renew implements Store.
func (m *Memory) Renew(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error) {
	err = m.act(ctx, key, func(c *cell, now time.Time) {
		if mine = c.lease.data == token && c.claim.data == token; mine {
			c.lease.until = now.Add(ttl)
		}
	})
	return mine, err
}

// Publish implements Store.
func (m *Memory) Publish(ctx context.Context, p Publication) (state Published, err error) {
	err = m.act(ctx, p.Key, func(c *cell, now time.Time) {
		if c.claim.data != p.Token || p.Token == "" || !p.Began.IsZero() && !p.Began.Equal(c.claim.began) {
			if state = PublishRefused; p.Token != "" && RecordToken([]byte(c.value.data)) == p.Token {
				state = PublishStored // before: the answer was lost
			}
			m.release(c, p.Key, p.Token)
			return
		}
		quiet := p.Quiet && c.lease.data == p.Token && !c.lease.awaited
		*c = cell{value: timed{data: string(p.Record), until: now.Add(p.Keep)}}
		if quiet {
			return
		}
		n := Note{Kind: NoteFilled, Key: p.Key, Token: p.Token, Replaced: p.Replaced}
		if len(p.Record) <= MaxNoteRecord {
			n.Record = []byte(c.value.data)
		}
		m.announce(n)
	})
	return state, err
}

// Fail implements Store.
func (m *Memory) Fail(ctx context.Context, key, token, failure string, ttl time.Duration) error {
	return m.act(ctx, key, func(c *cell, now time.Time) {
		if !c.free(token) {
			return
		}
		if ttl > 0 && c.lease.data == "" { // another's lease stands: whoever took over tries for himself
			c.lease = timed{data: "!" + failure, until: now.Add(ttl)}
		}
		m.announce(Note{Kind: NoteFailed, Key: key, Token: token, Failure: failure})
	})
}

// Release implements Store.
func (m *Memory) Release(ctx context.Context, key, token string) error {
	return m.act(ctx, key, func(c *cell, _ time.Time) { m.release(c, key, token) })
}

func (m *Memory) release(c *cell, key, token string) {
	if c.free(token) {
		m.announce(Note{Kind: NoteReleased, Key: key, Token: token})
	}
}

// free clears lease and claim, each if it is the token's, and reports whether one was.
func (c *cell) free(token string) (had bool) {
	for _, t := range [...]*timed{&c.lease, &c.claim} {
		if token != "" && t.data == token {
			*t, had = timed{}, true
		}
	}
	return had
}

// Invalidate implements Store.
func (m *Memory) Invalidate(ctx context.Context, by string, keys ...string) error {
	return m.each(ctx, keys, func(key string, c *cell, _ time.Time) {
		*c = cell{}
		m.announce(Note{Kind: NoteInvalidated, Key: key, Token: by})
	})
}

// Expire implements Store.
func (m *Memory) Expire(ctx context.Context, by string, keys ...string) error {
	return m.each(ctx, keys, func(key string, c *cell, now time.Time) {
		c.lease, c.claim = timed{}, timed{}
		if b := []byte(c.value.data); ExpireRecord(b, now) {
			c.value.data = string(b)
		} else {
			c.value = timed{}
		}
		m.announce(Note{Kind: NoteExpired, Key: key, Token: by})
	})
}

func (m *Memory) each(ctx context.Context, keys []string, step func(string, *cell, time.Time)) error {
	for _, key := range keys {
		if err := m.act(ctx, key, func(c *cell, now time.Time) { step(key, c, now) }); err != nil {
			return err
		}
	}
	return nil
}

// Tags implements Store.
func (m *Memory) Tags(ctx context.Context, tags ...string) (states []TagState, err error) {
	err = m.actOnMarks(ctx, tags, func(_ string, k *mark, _ time.Time) {
		states = append(states, k.TagState)
	})
	return states, err
}

// HoldTags implements Store.
func (m *Memory) HoldTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	return m.actOnMarks(ctx, tags, func(_ string, k *mark, now time.Time) {
		if !k.Known {
			k.TagState = TagState{Known: true, Invalidated: now.Add(-reach)}
		}
		k.hold(now.Add(keep))
	})
}

// InvalidateTags implements Store.
func (m *Memory) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return m.actOnMarks(ctx, tags, func(tag string, k *mark, now time.Time) {
		m.marked = m.afterMarks(now)
		k.Known, k.Invalidated = true, m.marked
		k.hold(now.Add(keep))
		m.announce(Note{Kind: NoteTagInvalidated, Key: tag, Token: by, At: m.marked})
	})
}

// ExpireTags implements Store.
func (m *Memory) ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return m.actOnMarks(ctx, tags, func(tag string, k *mark, now time.Time) {
		m.marked = m.afterMarks(now)
		if !k.Known {
			k.Known, k.Invalidated = true, m.marked
		}
		k.Expired = m.marked
		k.hold(now.Add(keep))
		m.announce(Note{Kind: NoteTagExpired, Key: tag, Token: by, At: m.marked})
	})
}

// afterMarks is now, or a little later where the clock stands still: in a bubble of testing/synctest a load that begins
// after a mark would have begun at the mark's own moment, and be void.
func (m *Memory) afterMarks(now time.Time) time.Time {
	if after := m.marked.Add(time.Microsecond); now.Before(after) {
		return after
	}
	return now
}

// hold lets a mark live until then at least.
func (k *mark) hold(until time.Time) {
	if k.until.Before(until) {
		k.until = until
	}
}

// actOnMarks runs a step on the mark of each tag, under the lock, and drops what is over.
func (m *Memory) actOnMarks(ctx context.Context, tags []string, step func(tag string, k *mark, now time.Time)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.Now()
	for _, tag := range tags {
		k := m.marks[tag]
		if !now.Before(k.until) {
			delete(m.marks, tag)
			k = mark{}
		}
		step(tag, &k, now)
		if k.Known {
			m.marks[tag] = k
			m.dropMarks(tag)
		}
	}
	return nil
}

// dropMarks drops marks over the limit, in no order, but for one: what carries their tags is void then.
func (m *Memory) dropMarks(but string) {
	for tag := range m.marks {
		if len(m.marks) <= m.limit {
			return
		}
		if tag != but {
			delete(m.marks, tag)
		}
	}
}

// memoryListener hands notes to one listener, in order, on a goroutine of its own: a listener may call the Memory.
type memoryListener struct {
	prefix string
	notes  []Note        // guarded by Memory.mu
	more   chan struct{} // holds one wake-up
	quit   chan struct{}
}

// announce queues a note for those who listen. The caller holds m.mu.
func (m *Memory) announce(n Note) {
	for l := range m.listeners {
		if strings.HasPrefix(n.Key, l.prefix) {
			l.notes = append(l.notes, n)
			ring(l.more)
		}
	}
}

// Listen implements Store.
func (m *Memory) Listen(name string, hear func(Note)) (stop func()) {
	l := &memoryListener{prefix: name + ":", more: make(chan struct{}, 1), quit: make(chan struct{})}
	m.mu.Lock()
	m.listeners[l] = struct{}{}
	m.mu.Unlock()
	hear(Note{Kind: NoteUp})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-l.quit:
				return
			case <-l.more:
			}
			m.mu.Lock()
			notes := l.notes
			l.notes = nil
			m.mu.Unlock()
			for _, n := range notes {
				hear(n)
			}
		}
	}()
	return sync.OnceFunc(func() {
		m.mu.Lock()
		delete(m.listeners, l)
		m.mu.Unlock()
		close(l.quit)
		<-done
	})
}

// ring leaves a wake-up in a channel of one place, if there is none yet.
func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

type memoryLock struct {
	holder   timed
	fence    uint64
	watchers map[chan struct{}]struct{}
}

// lock runs a step on the lock of key, and drops it when there is nothing left of it.
func (m *Memory) lock(key string, step func(k *memoryLock, now time.Time)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.locks[key]
	if k == nil {
		k = &memoryLock{watchers: make(map[chan struct{}]struct{})}
		m.locks[key] = k
	}
	now := m.Now()
	k.holder.live(now)
	step(k, now)
	if k.holder.data == "" && len(k.watchers) == 0 {
		delete(m.locks, key)
	}
}

// TryLock implements LockDriver.
func (m *Memory) TryLock(ctx context.Context, key, token string, ttl time.Duration) (s LockState, err error) {
	if err := ctx.Err(); err != nil {
		return s, err
	}
	m.lock(key, func(k *memoryLock, now time.Time) {
		switch k.holder.data {
		case "":
			m.fence++
			k.fence = m.fence
			fallthrough
		case token:
			k.holder = timed{data: token, until: now.Add(ttl)}
			s.Won, s.Fence = true, k.fence
		default:
			s.Left = k.holder.until.Sub(now)
		}
	})
	return s, nil
}

// Extend implements LockDriver.
func (m *Memory) Extend(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	m.lock(key, func(k *memoryLock, now time.Time) {
		if mine = k.holder.data == token; mine {
			k.holder.until = now.Add(ttl)
		}
	})
	return mine, nil
}

// Unlock implements LockDriver.
func (m *Memory) Unlock(ctx context.Context, key, token string) (mine bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	m.lock(key, func(k *memoryLock, _ time.Time) {
		if mine = k.holder.data == token; !mine {
			return
		}
		k.holder = timed{}
		for bell := range k.watchers {
			ring(bell)
		}
	})
	return mine, nil
}

// Watch implements LockDriver.
func (m *Memory) Watch(key string) (wake <-chan struct{}, stop func()) {
	bell := make(chan struct{}, 1)
	m.lock(key, func(k *memoryLock, _ time.Time) { k.watchers[bell] = struct{}{} })
	return bell, func() {
		m.lock(key, func(k *memoryLock, _ time.Time) { delete(k.watchers, bell) })
	}
}
