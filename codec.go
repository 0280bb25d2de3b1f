package refill

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"time"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/l1"
)

// This file turns values into records and entries of L1, and turns records back into entries. The entries are in
// entry.go.

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
