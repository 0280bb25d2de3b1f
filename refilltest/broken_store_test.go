package refilltest

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill/driver"
)

// place is the state behind a second implementation of Store and Locks, which can be broken on purpose. If flaw is
// the name of a mutant, the place breaks the rule of this mutant. Without a flaw it passes the suites, including the
// cases that need hooks. storeMutants and lockMutants list the flaws.
type place struct {
	flaw string
	base time.Time

	mu        sync.Mutex
	cells     map[string]*brokenCell
	locks     map[string]*brokenLock
	tags      map[string]*brokenTag
	listeners []*brokenListener
	full      bool
	lastNote  string // the last note, for the flaws note-stays and note-keeps-first

	silent atomic.Bool
}

// node is one of the two nodes over a place.
type node struct {
	*place
	id string
}

type brokenCell struct{ value, lease, claim *slot }

// slot holds a value, a lease, a claim, or nothing. The content may lack an end, or be of a foreign type.
type slot struct {
	data    string
	until   time.Time
	endless bool
	garbled bool
	awaited bool      // of a lease: a caller waits for its holder
	began   time.Time // of a claim
	shared  []byte    // for the flaw get-shares
}

var errGarbled = errors.New("WRONGTYPE")

func newPlace(flaw string) *place {
	return &place{
		flaw: flaw, base: time.Now(),
		cells: map[string]*brokenCell{}, locks: map[string]*brokenLock{}, tags: map[string]*brokenTag{},
	}
}

func (p *place) storeWorld(testing.TB) StoreWorld {
	part := func(key string, part Part) *slot {
		c := p.cell(key)
		return []*slot{PartValue: c.value, PartLease: c.lease, PartClaim: c.claim}[part]
	}
	return StoreWorld{
		A: &node{p, "a"}, B: &node{p, "b"},
		Plant: func(key string, of Part, data string) {
			if of == PartTag {
				p.plantTag(key)
				return
			}
			*part(key, of) = slot{data: data, endless: true}
		},
		Garble: func(key string, of Part) {
			if of == PartTag {
				p.plantTag(key)
				return
			}
			*part(key, of) = slot{data: "\x00garbled", endless: true, garbled: true}
		},
		Full:    func(full bool) { p.full = full },
		Silence: p.silent.Store,
		Break:   p.breakAll,
	}
}

// breakAll breaks every subscription and makes every subscription again.
func (p *place) breakAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.listeners {
		if !p.is("break-unreported") {
			l.add(driver.Announcement{Kind: driver.Disconnected, Err: errGarbled})
		}
		if !p.is("break-no-subscribed") {
			l.add(driver.Announcement{Kind: driver.Subscribed})
		}
	}
	if p.is("break-ends-subscription") {
		p.listeners = nil
	}
	for _, k := range p.locks {
		for _, w := range k.watches {
			if p.is("watch-break-silent") {
				k.watches = nil
			} else {
				w.wake()
			}
		}
	}
}

// answer returns when the server answers or the ctx of the caller ends.
func (p *place) answer(ctx context.Context) error {
	if p.silent.Load() {
		<-ctx.Done()
		if p.is("silent-hangs") {
			time.Sleep(10 * time.Second)
		}
		if p.is("silent-fine") {
			return nil
		}
	}
	if p.is("ctx-ignored") {
		return nil
	}
	return ctx.Err()
}

// is reports whether the place has one of these flaws.
func (p *place) is(flaws ...string) bool { return slices.Contains(flaws, p.flaw) }

// gap lets other steps run in the middle of a step, if the place has this flaw. The step is then not atomic.
func (p *place) gap(flaw string) {
	if !p.is(flaw) {
		return
	}
	p.mu.Unlock()
	for range 10 {
		runtime.Gosched()
	}
	p.mu.Lock()
}

func (p *place) cell(key string) *brokenCell {
	switch {
	case p.is("keys-fold"):
		key = strings.ToLower(key)
	case p.is("keys-trim"):
		key = strings.TrimSpace(key)
	case p.is("keys-suffix") && strings.HasSuffix(key, ":lease"):
		return &brokenCell{p.cell(strings.TrimSuffix(key, ":lease")).lease, new(slot), new(slot)}
	}
	c := p.cells[key]
	if c == nil {
		c = &brokenCell{new(slot), new(slot), new(slot)}
		p.cells[key] = c
	}
	return c
}

// act runs one atomic step on a key.
func (p *place) act(ctx context.Context, key string, step func(c *brokenCell, now time.Time)) error {
	if err := p.answer(ctx); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	c, now := p.cell(key), time.Now()
	for _, s := range []*slot{c.value, c.lease, c.claim} {
		forever := s.endless || p.is("lease-endless") && s == c.lease || p.is("claim-endless") && s == c.claim ||
			p.is("keep-endless") && s == c.value || p.is("fail-endless") && strings.HasPrefix(s.data, "!") ||
			p.is("note-endless") && strings.HasPrefix(s.data, "?")
		if !forever && !now.Before(s.until) {
			*s = slot{}
		}
	}
	step(c, now)
	return nil
}

func (n *node) Check() error {
	if n.is("check") {
		return errGarbled
	}
	return nil
}

func (n *node) Now() time.Time {
	if n.is("clock-other") {
		return time.Now().Add(time.Hour)
	}
	return time.Now()
}

func (n *node) Get(ctx context.Context, key string) (record []byte, err error) {
	actErr := n.act(ctx, key, func(c *brokenCell, _ time.Time) {
		switch {
		case c.value.garbled && n.is("garbled-value-error"):
			err = errGarbled
		case n.is("get-lease") && c.value.data == "" && c.lease.data != "":
			record = []byte(c.lease.data)
		case c.value.data != "" && !c.value.garbled && !(n.is("get-own-node") && n.id == "b"):
			record = []byte(c.value.data)
		case n.is("get-empty"):
			record = []byte{}
		}
		if record != nil && n.is("get-text") {
			record = []byte(strings.TrimRight(string(record), "\x00\r\n"))
		}
		if record != nil && n.is("get-shares") {
			record = c.value.shared
		}
	})
	return record, errors.Join(err, actErr)
}

func (n *node) Renew(ctx context.Context, ttl time.Duration, leases ...driver.Lease) (mine []bool, err error) {
	if n.is("renew-none-error") && len(leases) == 0 {
		return nil, errGarbled
	}
	for i, l := range leases {
		if n.is("renew-only-first") && i > 0 {
			mine = append(mine, true)
			continue
		}
		ok, err := n.renew(ctx, l.Key, l.Token, ttl)
		if err != nil {
			return nil, err
		}
		mine = append(mine, ok)
	}
	switch {
	case n.is("renew-all-or-none") && slices.Contains(mine, false):
		clear(mine)
	case n.is("renew-reversed"):
		slices.Reverse(mine)
	}
	return mine, nil
}

func (n *node) renew(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error) {
	actErr := n.act(ctx, key, func(c *brokenCell, now time.Time) {
		lease, claim := n.has(c.lease, token, "awaited-blocks-renew"), c.claim.data == token
		mine = lease && claim
		if c.claim.garbled && n.is("renew-garbled-error") {
			err = errGarbled
		}
		switch {
		case n.is("renew-without-claim"):
			mine = lease
		case n.is("renew-without-lease"):
			mine = claim
		case n.is("renew-creates") && c.lease.data == "":
			*c.lease = slot{data: token, until: now.Add(ttl)}
		case n.is("renew-any"):
			c.lease.until = now.Add(ttl)
		}
		if mine && !n.is("renew-idle") {
			c.lease.until = now.Add(ttl)
			c.lease.awaited = c.lease.awaited && !n.is("waiter-lost-by-renewal")
		}
	})
	return mine, errors.Join(err, actErr)
}

func (n *node) Publish(ctx context.Context, p driver.PublishRequest) (state driver.PublishResult, err error) {
	err = n.act(ctx, p.Key, func(c *brokenCell, now time.Time) {
		mine := c.claim.data == p.Token &&
			(p.Began.IsZero() || p.Began.Equal(c.claim.began) || n.is("acquire-replay-revives"))
		n.gap("race-publish")
		switch {
		case n.is("publish-without-claim"):
			mine = true
		case n.is("publish-needs-lease"):
			mine = mine && c.lease.data == p.Token
		}
		if !mine {
			state = n.reject(c, p)
			return
		}
		if n.full {
			state = driver.StoreFull
			if n.is("full-keeps-lease") {
				return
			}
		}
		n.store(c, p, now)
	})
	return state, err
}

func (n *node) reject(c *brokenCell, p driver.PublishRequest) driver.PublishResult {
	switch {
	case driver.RecordToken([]byte(c.value.data)) == p.Token && !n.is("publish-repeated-rejected"):
		return driver.Stored
	case n.is("rejected-keeps-lease"):
	case n.is("rejected-silent"):
		if c.lease.data == p.Token {
			*c.lease = slot{}
		}
	case n.is("rejected-frees-all"):
		*c.lease, *c.claim = slot{}, slot{}
	case n.is("rejected-announces-always"):
		n.announce(driver.Announcement{Kind: driver.Released, Key: p.Key, Token: p.Token})
	default:
		if n.has(c.lease, p.Token, "awaited-blocks-rejection") {
			n.free(c, p.Key, p.Token)
		}
	}
	return driver.Rejected
}

func (n *node) store(c *brokenCell, p driver.PublishRequest, now time.Time) {
	silent := p.AnnounceIfAwaited && !c.lease.awaited && (c.lease.data == p.Token || n.is("silent-after-lease-end"))
	switch {
	case n.is("publish-keeps-lease"), n.is("awaited-blocks-publish") && c.lease.awaited:
	case n.is("publish-frees-own-lease") && c.lease.data != p.Token:
	default:
		*c.lease = slot{}
	}
	if !n.is("publish-keeps-claim") {
		*c.claim = slot{}
	}
	keep := p.Keep
	if n.is("keep-short") {
		keep /= 10
	}
	rec := p.Record
	if n.is("publish-cuts") && len(rec) > 64<<10 {
		rec = rec[:64<<10]
	}
	if n.is("publish-eats") {
		defer clear(p.Record)
	}
	if !n.full {
		*c.value = slot{data: string(rec), until: now.Add(keep), shared: p.Record}
	}
	a := driver.Announcement{Kind: driver.Filled, Key: p.Key, Token: p.Token, Replaced: p.Replaced}
	limit := driver.MaxAnnouncedRecord
	switch {
	case n.is("announce-record-limit"):
		limit--
	case n.is("announce-record-always"):
		limit = 1 << 30
	}
	if len(rec) <= limit {
		a.Record = []byte(string(rec))
	}
	if n.is("announce-no-replaced") {
		a.Replaced = ""
	}
	if !silent {
		n.announce(a)
	}
}

func (n *node) Fail(ctx context.Context, r driver.FailRequest) error {
	key, token, failure, ttl := r.Key, r.Token, r.Failure, r.TTL
	return n.act(ctx, key, func(c *brokenCell, now time.Time) {
		lease, claim := n.has(c.lease, token, "awaited-blocks-fail"), c.claim.data == token
		mine := lease || claim
		switch {
		case n.is("fail-any"), n.is("drop-any") && r.DropValue, n.is("note-any") && !r.HoldAll:
			lease, mine = true, true
		case n.is("fail-needs-both"):
			mine = lease && claim
		case n.is("fail-needs-claim"):
			mine = claim
		}
		if !mine {
			return
		}
		if !n.is("fail-keeps-claim") {
			*c.claim = slot{}
		}
		dropped := r.DropValue && !n.is("drop-silent")
		if n.is("fail-drops-value") || r.DropValue && !n.is("drop-keeps-value") {
			*c.value = slot{}
		}
		if n.is("fail-text") || n.is("note-text") && !r.HoldAll {
			failure = strings.ToValidUTF8(failure, "?")
		}
		if dropped && !n.is("drop-late") {
			n.announce(driver.Announcement{Kind: driver.Invalidated, Key: key, Token: token})
		}
		mark := "?"
		if r.HoldAll {
			mark = "!"
		}
		if n.is("note-keeps-first") && n.lastNote != "" {
			mark, failure = "?", n.lastNote
		}
		if ttl == 0 && n.is("note-zero") && !r.HoldAll {
			ttl = time.Hour
		}
		switch {
		case !lease && c.lease.data != "" && !c.lease.garbled && !n.is("fail-takes-lease") &&
			!(n.is("note-takes-lease") && !r.HoldAll):
		case ttl > 0 && !(n.is("fail-no-back-off") && r.HoldAll):
			*c.lease = slot{data: mark + failure, until: now.Add(ttl)}
		case !n.is("fail-zero-keeps-lease"):
			*c.lease = slot{}
		}
		if !n.is("fail-silent") {
			n.announce(driver.Announcement{Kind: driver.Failed, Key: key, Token: token, Failure: failure})
		}
		if dropped && n.is("drop-late") {
			n.announce(driver.Announcement{Kind: driver.Invalidated, Key: key, Token: token})
		}
	})
}

func (n *node) Release(ctx context.Context, key, token string) error {
	return n.act(ctx, key, func(c *brokenCell, _ time.Time) { n.free(c, key, token) })
}

func (n *node) free(c *brokenCell, key, token string) {
	lease, claim := n.has(c.lease, token, "awaited-blocks-release"), c.claim.data == token
	switch {
	case n.is("release-any"):
		lease, claim = true, true
	case n.is("release-by-claim") && claim:
		lease = true
	case n.is("release-needs-lease") && !lease:
		claim = false
	case n.is("release-needs-claim") && !claim:
		lease = false
	}
	if lease {
		*c.lease = slot{}
	}
	if claim && !n.is("release-keeps-claim") {
		*c.claim = slot{}
	}
	if (lease || claim || n.is("release-announces-always")) && !n.is("release-silent") {
		n.announce(driver.Announcement{Kind: driver.Released, Key: key, Token: token})
	}
}

func (n *node) Invalidate(ctx context.Context, by string, keys ...string) error {
	return n.remove(ctx, "invalidate", keys, func(c *brokenCell, key string, _ time.Time) {
		if !n.is("invalidate-keeps-value") {
			*c.value = slot{}
		}
		if n.is("invalidate-drops-tag") {
			delete(n.tags, key)
		}
		if !n.is("invalidate-silent") {
			n.announce(driver.Announcement{Kind: driver.Invalidated, Key: key, Token: by})
		}
	})
}

func (n *node) Expire(ctx context.Context, by string, keys ...string) error {
	var garbled error
	err := n.remove(ctx, "expire", keys, func(c *brokenCell, key string, now time.Time) {
		b := []byte(c.value.data)
		if c.value.garbled && n.is("garbled-expire-error") {
			garbled = errGarbled
		}
		if n.is("expire-clock") {
			now = now.Add(time.Hour)
		}
		switch r, err := driver.DecodeRecord(b); {
		case n.is("expire-deletes"), c.value.garbled:
			*c.value = slot{}
		case n.is("expire-moves") && err == nil:
			r.ExpiredAt = now
			b, _ = r.Append(nil)
			c.value.data = string(b)
		case n.is("expire-rewrites") && err == nil && r.ExpiredAt.IsZero():
			r.ExpiredAt, r.FreshUntil = now, now
			b, _ = r.Append(nil)
			c.value.data = string(b)
		case n.is("expire-strict") && err != nil:
			*c.value = slot{}
		case driver.ExpireRecord(b, now):
			c.value.data = string(b)
			c.value.endless = n.is("expire-drops-end")
		case !n.is("expire-keeps-foreign"):
			*c.value = slot{}
		}
		n.announce(driver.Announcement{Kind: driver.Expired, Key: key, Token: by})
	})
	return errors.Join(err, garbled)
}

// remove does what Invalidate and Expire have in common. what is "invalidate" or "expire".
func (n *node) remove(
	ctx context.Context, what string, keys []string, step func(*brokenCell, string, time.Time),
) error {
	if n.is("only-first-key") && len(keys) > 1 {
		keys = keys[:1]
	}
	if n.is("no-keys-error") && len(keys) == 0 {
		return errGarbled
	}
	for i, key := range keys {
		err := n.act(ctx, key, func(c *brokenCell, now time.Time) {
			backsOff := strings.HasPrefix(c.lease.data, "!")
			noted := strings.HasPrefix(c.lease.data, "?")
			if n.is("race-" + what) { // not atomic: first the value, and later lease and claim
				step(c, key, now)
				n.gap("race-" + what)
			}
			if !n.is(what+"-keeps-lease") && !(backsOff && n.is(what+"-keeps-back-off")) &&
				!(noted && n.is(what+"-keeps-note")) {
				*c.lease = slot{}
			}
			if !n.is(what + "-keeps-claim") {
				*c.claim = slot{}
			}
			if !n.is("race-"+what) && (i == 0 || !n.is("one-announcement")) {
				step(c, key, now)
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// brokenListener is one subscription. A goroutine of its own calls handle.
type brokenListener struct {
	name, node string
	reverse    bool
	mu         sync.Mutex
	queue      []driver.Announcement // guarded by mu
	more       chan struct{}
	quit       chan struct{}
	handled    chan struct{} // closed when the current call of handle has returned; guarded by mu
}

func (n *node) announce(a driver.Announcement) {
	for _, l := range n.listeners {
		matches := strings.HasPrefix(a.Key, l.name+":")
		switch {
		case n.is("announce-prefix"):
			matches = strings.HasPrefix(a.Key, l.name)
		case n.is("announce-own-node"):
			matches = matches && l.node == n.id
		case n.is("announce-first-listener"):
			matches = matches && l == n.listeners[0]
		}
		if !matches {
			continue
		}
		if n.is("announce-utf8") {
			a.Key = strings.ToValidUTF8(a.Key, "\uFFFD")
		}
		if n.is("announce-drops") && l.waiting() {
			continue
		}
		l.add(a)
	}
}

func (l *brokenListener) add(a driver.Announcement) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(l.queue, a)
	if l.reverse && len(l.queue) > 1 {
		slices.Reverse(l.queue)
	}
	select {
	case l.more <- struct{}{}:
	default:
	}
}

func (l *brokenListener) waiting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queue) > 0
}

func (n *node) Subscribe(name string, handle func(driver.Announcement)) (stop func()) {
	l := &brokenListener{
		name: name, node: n.id, reverse: n.is("announce-reverse"), more: make(chan struct{}, 1), quit: make(chan struct{}),
	}
	n.mu.Lock()
	n.listeners = append(n.listeners, l)
	n.mu.Unlock()
	if !n.is("no-subscribed") {
		handle(driver.Announcement{Kind: driver.Subscribed})
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-l.quit:
				return
			case <-l.more:
			}
			l.mu.Lock()
			queue := l.queue
			l.queue = nil
			l.mu.Unlock()
			for _, a := range queue {
				handled := make(chan struct{})
				l.mu.Lock()
				l.handled = handled
				l.mu.Unlock()
				handle(a)
				close(handled)
			}
		}
	}()
	return func() {
		n.mu.Lock()
		n.listeners = slices.DeleteFunc(n.listeners, func(x *brokenListener) bool {
			return x == l || n.is("stop-all")
		})
		n.mu.Unlock()
		close(l.quit)
		switch {
		case n.is("stop-at-once"):
		case n.is("stop-leaves-queue"):
			l.mu.Lock()
			handled := l.handled
			l.mu.Unlock()
			<-handled
		default:
			<-done
		}
	}
}
