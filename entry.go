package refill

import (
	"math"
	"unique"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/l1"
)

// This file is about the entries of L1: what they hold, how long L1 serves them, and how they get into L1.

// entry is one value in L1.
type entry[V any] = l1.Entry[content[V]]

// content is what the Loader keeps in an entry. L1 may hold many entries, so a content has only what each value needs.
// The rest is in more, which most contents do not have, and in common, which most contents share. The moment at which
// the load began is in NotBefore of the entry.
type content[V any] struct {
	value      V
	more       *more // nil for most values
	freshUntil int64
	count      uint64 // the second part of the token, see splitToken
	common     unique.Handle[common]
}

// common is what most entries of one node have in common.
type common struct {
	node              string // that made the record; the first part of the token
	staleFor, keepFor int64  // µs from the end of freshness to life.staleUntil, and to life.end
}

// more is what only some values have.
type more struct {
	err     error  // an *absence if the entry is an absence, otherwise nil
	noStore bool   // the entry has no value, because the value must not be stored, see Fill.NoStore
	extra   *extra // nil for most values
	token   string // "" if content has its two parts
	life    *life  // nil if content has it: all values that have the spans of Config, and no refreshAt of their own
}

// extra is a validator and tags.
type extra struct {
	validator string
	tags      []string
}

// add returns what only some values have, for a value that has some of it.
func (c *content[V]) add() *more {
	if c.more == nil {
		c.more = new(more)
	}
	return c.more
}

func (c *content[V]) err() error {
	if c.more == nil {
		return nil
	}
	return c.more.err
}

func (c *content[V]) noStore() bool { return c.more != nil && c.more.noStore }

func (c *content[V]) extra() *extra {
	if c.more == nil {
		return nil
	}
	return c.more.extra
}

func (c *content[V]) tags() []string {
	if x := c.extra(); x != nil {
		return x.tags
	}
	return nil
}

// token returns the token of the fill that made the record.
func (c *content[V]) token() string {
	if c.more != nil && c.more.token != "" {
		return c.more.token
	}
	return tokenOf(c.common.Value().node, c.count)
}

// node returns the node that made the record.
func (c *content[V]) node() string {
	if c.more != nil && c.more.token != "" {
		return nodeOf(c.more.token)
	}
	return c.common.Value().node
}

// lifeIn returns the life of the value of an entry.
func lifeIn[V any](e *entry[V]) life {
	c := &e.Data
	if c.more != nil && c.more.life != nil {
		return *c.more.life
	}
	common := c.common.Value()
	return life{
		began: e.NotBefore + maxFuture, refreshAt: c.freshUntil, freshUntil: c.freshUntil,
		staleUntil: c.freshUntil + common.staleFor, end: c.freshUntil + common.keepFor,
	}
}

// setTokenAndLife sets what token and lifeIn return for e. The caller has not put e into L1 yet.
func (l *Loader[V]) setTokenAndLife(e *entry[V], token string, life life) {
	c := &e.Data
	e.NotBefore, c.freshUntil = life.notBefore(), life.freshUntil
	shared := common{staleFor: life.staleUntil - life.freshUntil, keepFor: life.end - life.freshUntil}
	usual := common{staleFor: l.spans.staleFor.Microseconds()}
	usual.keepFor = max(usual.staleFor, l.spans.staleIfError.Microseconds())
	if life.refreshAt != life.freshUntil || shared != usual && shared != (common{}) {
		c.add().life, shared = &life, common{}
	}
	var ok bool
	if shared.node, c.count, ok = splitToken(token); !ok {
		c.add().token, shared.node = token, ""
	}
	c.common = unique.Make(shared)
}

// newEntry makes the entry of a record, but does not decode the value.
func (l *Loader[V]) newEntry(key string, r *driver.Record, epoch l1.Epoch) *entry[V] {
	tags := make([]string, len(r.Tags))
	for i, tag := range r.Tags {
		tags[i] = storeKey(tag)
	}
	e := l.l1.NewEntry(key, epoch, tags, content[V]{})
	if r.NoStore {
		e.Data.add().noStore = true
	}
	if r.Validator != "" || len(r.Tags) > 0 {
		e.Data.add().extra = &extra{validator: r.Validator, tags: r.Tags}
	}
	life := lifeOf(r)
	life.refreshAt = refreshFrom(life, r.LoadTook, l.cfg.EarlyRefresh, l.cfg.XFetch, uniform(l.l1.Hash(r.Token)))
	l.setTokenAndLife(e, r.Token, life)
	return e
}

// inL1 returns the freshness of an entry of L1, see life.inL1.
func inL1[V any](e *entry[V], now int64) freshness {
	return lifeIn(e).inL1(now, e.TrustUntil, e.ServeUntil.Load() == 0)
}

// putL1 puts the entry of a record into L1, unless the entry was invalidated after its read or load began. An entry
// that is no longer fresh is never a hit. putL1 puts such an entry too, because the entry replaces an older entry that
// could be a hit. LocalTTL counts from now, unless TrustUntil of the entry is set already.
func (l *Loader[V]) putL1(e *entry[V], record []byte) {
	if !l.l1.NotInvalidated(e) {
		return
	}
	if now, life := l.now(), lifeIn(e); life.at(now) <= refreshDue { // otherwise ServeUntil stays 0: never a hit
		if e.TrustUntil == 0 {
			e.TrustUntil = now + l.cfg.LocalTTL.Microseconds()
		}
		e.TrustUntil = min(e.TrustUntil, life.freshUntil)
		e.ServeUntil.Store(min(life.refreshAt, e.TrustUntil))
		if e.Data.noStore() {
			e.ServeUntil.Store(1) // never a hit; 0 would mean superseded
		}
	}
	l.l1.Put(e, l.sizeOf(e, record))
}

// keepInL1 is putL1 for a record that this refill has read or published. The danger: 1. The store executes the call of
// this refill. 2. Another fill publishes a newer record, and L1 learns of it: this node puts the newer record into L1,
// or handles its announcement (replace). 3. The reply of the store arrives, and the older record goes into L1. Then L1
// would serve the older record until LocalTTL is over. So a fresh entry of a later load stays in L1. If a fill of
// another record was announced during the call, the entry counts as superseded. This also works if the announcement is
// handled at the same moment: onAnnouncement first notes the announcement in the flight, and then looks into L1.
// keepInL1 first writes to L1, and then looks into the flight. So at least one of the two sees what the other has done.
func (r *refill[V]) keepInL1(e *entry[V], record []byte) {
	if own := r.l1.Get(r.key); own != nil && lifeIn(own).began > lifeIn(e).began && r.l1.Valid(own) &&
		inL1(own, r.now()) <= refreshDue {
		return
	}
	r.putL1(e, record)
	if otherFilled(r.flight, e) {
		supersede(e)
	}
}

// sizeOf returns how many bytes of memory e.Data refers to. e was decoded from record, so parts of e.Data may share the
// memory of record.
func (l *Loader[V]) sizeOf(e *entry[V], record []byte) int64 {
	if l.cfg.LocalBytes == math.MaxInt64 || l.cfg.LocalTTL == 0 {
		return 0 // L1 counts no bytes
	}
	more := l1.SizeOf(&e.Data.more, nil) // copied from the record
	if codec, ok := l.codec.(Sizer); ok {
		var size int64
		if err := safely(func() error { size = codec.Size(e.Data.value); return nil }); err == nil {
			return max(0, size) + more
		}
	}
	return l1.SizeOf(&e.Data.value, record) + more
}
