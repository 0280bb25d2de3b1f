package refill

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"time"
	"unique"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/l1"
)

// This file turns values into records and entries of L1, and turns records back into entries.

// Codec encodes and decodes values. Its methods are called from many goroutines at once.
type Codec interface {
	// Name is part of every record. A record that was written with another name is a miss. So if the encoding changes,
	// change the name.
	Name() string
	Marshal(v any) ([]byte, error)
	Unmarshal(data []byte, pointer any) error
}

type jsonCodec struct{}

func (jsonCodec) Name() string                       { return "json" }
func (jsonCodec) Marshal(v any) ([]byte, error)      { return json.Marshal(v) }
func (jsonCodec) Unmarshal(data []byte, p any) error { return json.Unmarshal(data, p) }

// rawCodec stores a []byte or string unchanged. A decoded []byte shares the memory of the record, which belongs to the
// Loader.
type rawCodec struct{}

func (rawCodec) Name() string { return "raw" }

func (rawCodec) Marshal(v any) ([]byte, error) {
	if s, ok := v.(string); ok {
		return []byte(s), nil
	}
	return v.([]byte), nil
}

func (rawCodec) Unmarshal(data []byte, p any) error {
	switch p := p.(type) {
	case *string:
		*p = string(data)
	case *[]byte:
		*p = data[:len(data):len(data)]
	}
	return nil
}

// codecFor returns the codec of a value type, and the kind of its records: the names of codec and type.
func codecFor[V any](c Codec) (Codec, string) {
	if c == nil {
		c = jsonCodec{}
		switch any((*V)(nil)).(type) {
		case *string, *[]byte:
			c = rawCodec{}
		}
	}
	return c, c.Name() + " " + reflect.TypeFor[V]().String()
}

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

// setTokenAndLife is called before the entry is put into L1.
func (l *Loader[V]) setTokenAndLife(e *entry[V], token string, was life) {
	c := &e.Data
	e.NotBefore, c.freshUntil = was.notBefore(), was.freshUntil
	of := common{staleFor: was.staleUntil - was.freshUntil, keepFor: was.end - was.freshUntil}
	usual := common{staleFor: l.spans.staleFor.Microseconds()}
	usual.keepFor = max(usual.staleFor, l.spans.staleIfError.Microseconds())
	if was.refreshAt != was.freshUntil || of != usual && of != (common{}) {
		c.add().life, of = &was, common{}
	}
	var ok bool
	if of.node, c.count, ok = splitToken(token); !ok {
		c.add().token, of.node = token, ""
	}
	c.common = unique.Make(of)
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

// encode returns the record of a loaded value, and the entry for L1. Normally the entry has the value as it was loaded.
// But if the codec may leave out a part of the value, the entry has the value that other nodes decode from the record.
// If the value must not be stored, or if encode returns an error, there is no record, and the entry has the value as it
// was loaded.
func (r *refill[V]) encode(token string, began time.Time, v loaded[V]) (*entry[V], []byte, error) {
	rec := driver.Record{
		Token: token, LoadBegan: began, LoadTook: v.took, Kind: r.kind, Validator: v.terms.validator,
		Tags: r.tagsOf(v.terms),
	}
	r.setTimes(&rec, v)
	asLoaded := r.newEntry(r.key, &rec, r.epoch)
	asLoaded.Data.value = v.value
	if rec.NotFound {
		rec.Payload = []byte(v.err.Error())
		asLoaded.Data.add().err = &absence{v.err.Error()}
	}
	if v.terms.noStore {
		return asLoaded, nil, nil
	}
	var record []byte
	err := safely(func() (err error) {
		if err = validateTags("tag", rec.Tags); err != nil {
			return err
		}
		if !rec.NotFound {
			if rec.Payload, err = r.codec.Marshal(v.value); err != nil {
				return err
			}
		}
		record, err = rec.Append(nil)
		return err
	})
	if err != nil {
		return asLoaded, nil, invalid("value", "of %q: encoding it as %s: %v", r.key, r.codec.Name(), err)
	}
	if !rec.NotFound && r.roundTrip.due() {
		decoded, err := r.decodeRecord(r.key, record, r.epoch)
		switch {
		case err != nil:
			return asLoaded, nil, invalid("value", "of %q: decoding it again as %s: %v", r.key, r.codec.Name(), err)
		case r.roundTrip.lossy:
			return decoded, record, nil
		}
	}
	asLoaded.Data.value = copied(v.value)
	return asLoaded, record, nil
}

// setTimes sets how long a record lives. What the load has set comes before Config.
func (l *Loader[V]) setTimes(rec *driver.Record, v loaded[V]) {
	s := l.spans.of(v.terms)
	if rec.NotFound = v.err != nil; rec.NotFound { // an absence is never stale
		s = spans{ttl: v.terms.ttl.or(l.cfg.NotFoundTTL)}
	}
	if v.terms.noStore {
		s = spans{}
	}
	rec.StaleFor, rec.StaleIfError = s.staleFor, s.staleIfError
	rec.FreshUntil = rec.LoadBegan.Add(jittered(s.ttl, l.cfg.Jitter, rand.Float64()))
}

// tagsOf returns the tags of a value: Config.Tags, and the tags that its load has set.
func (l *Loader[V]) tagsOf(t terms) []string {
	tags := slices.Clone(l.cfg.Tags)
	for _, tag := range t.tags {
		if !slices.Contains(tags, tag) {
			tags = append(tags, tag)
		}
	}
	return tags
}

// decode returns the entry of a record of the store. It returns nil if there is no record, if the record does not
// belong to this Loader, or if its value cannot be decoded. All these cases are a miss. In the last case, storedAt says
// when the record was stored, by the store's clock.
func (l *Loader[V]) decode(key string, record []byte, epoch l1.Epoch) (e *entry[V], storedAt time.Time) {
	if record == nil {
		return nil, time.Time{}
	}
	e, err := l.decodeRecord(key, record, epoch)
	if err == nil {
		return e, time.Time{}
	}
	l.emit(Event{Kind: EventBadRecord, Key: key, Err: err})
	if bad := (*undecodable)(nil); errors.As(err, &bad) {
		storedAt = bad.storedAt
	}
	return nil, storedAt
}

// undecodable is the error of a record of this Loader whose value the codec cannot decode.
type undecodable struct {
	cause    error
	storedAt time.Time // about when the record was stored: the end of the load
}

func (u *undecodable) Error() string { return "decoding the value: " + u.cause.Error() }
func (u *undecodable) Unwrap() error { return u.cause }

func (l *Loader[V]) decodeRecord(key string, record []byte, epoch l1.Epoch) (*entry[V], error) {
	r, err := driver.DecodeRecord(record)
	if err != nil {
		return nil, err
	}
	if r.Kind != l.kind {
		return nil, fmt.Errorf("refill: record holds %q, not %q", r.Kind, l.kind)
	}
	e := l.newEntry(key, &r, epoch)
	switch {
	case r.NoStore:
		return e, nil
	case r.NotFound:
		e.Data.add().err = &absence{string(r.Payload)}
		return e, nil
	}
	if err := safely(func() error { return l.codec.Unmarshal(r.Payload, &e.Data.value) }); err != nil {
		l.roundTrip.failed.Store(true)
		return nil, &undecodable{err, r.LoadBegan.Add(r.LoadTook)}
	}
	return e, nil
}

// safely turns a panic of a codec into an error. The panic would otherwise end the process.
func safely(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return f()
}

// Sizer can be implemented by a [Codec]. Size returns how many bytes of memory the decoded value v takes, all that v
// refers to included. Config.LocalBytes counts these bytes. Size must be fast, because each value that L1 gets is
// measured. Without Size, refill estimates the bytes: it follows the pointers in v, and looks at a sample of the
// elements of long slices and maps. A negative result counts as 0.
type Sizer interface {
	Size(v any) int64
}

// sizeOf returns how many bytes of memory e.Data refers to. e was decoded from record, so parts of e.Data may share the
// memory of record.
func (l *Loader[V]) sizeOf(e *entry[V], record []byte) int64 {
	if l.cfg.LocalBytes == math.MaxInt64 || l.cfg.LocalTTL == 0 {
		return 0 // L1 counts no bytes
	}
	more := l1.SizeOf(&e.Data.more, nil) // copied from the record
	codec, ok := l.codec.(Sizer)
	if !ok {
		return l1.SizeOf(&e.Data.value, record) + more
	}
	var size int64
	err := safely(func() error { size = codec.Size(e.Data.value); return nil })
	if err != nil {
		return l1.SizeOf(&e.Data.value, record) + more
	}
	return max(0, size) + more
}
