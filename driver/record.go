package driver

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"
	"slices"
	"time"
)

// Record is the value that is stored under one key. The Loader writes and reads it. A [Store] keeps its bytes
// unchanged, except that Expire calls [ExpireRecord].
//
// The first two columns are offset and length of a field, in bytes. Integers are big-endian. Times (expiredAt,
// loadBegan, freshUntil) are microseconds since 1970 by the store's clock. The other three fields of 8 bytes are
// spans in microseconds.
//
//	 0  3  "RF1": magic and version
//	 3  8  expiredAt: 0, or when Expire ended the freshness; the only bytes that ever change
//	11  4  CRC-32C of the bytes that follow
//	15  1  n, length of the token (1 … 255)
//	16  n  token of the fill that made the record
//	 …  1  flags: 1 = not found, 2 = no-store; every other bit is 0
//	 …  8  loadBegan
//	 …  8  freshUntil
//	 …  8  staleFor
//	 …  8  staleIfError
//	 …  8  loadTook
//	 … 2+m kind: codec and type of the value; a mismatch is a miss
//	 … 2+x extra: fields, each a letter, a length (2 bytes) and a text; v: validator, t: tag, others are skipped
//	 …     payload, to the end
//
// Bytes that do not follow this layout are a miss, for example bytes with another magic, an unknown flag or a wrong
// sum. A later release may add fields to extra, because an older release skips unknown fields. A change that an older
// release would misread must get another version.
type Record struct {
	Token        string
	NotFound     bool          // the payload is the text of the error
	NoStore      bool          // no payload: the value must not be stored, and each caller loads for itself
	LoadBegan    time.Time     // when the load of the value began
	FreshUntil   time.Time     // served as fresh until this moment
	StaleFor     time.Duration // how long after the end of freshness the value is served stale, while it is refreshed
	StaleIfError time.Duration // how long after the end of freshness the value is served if its refill fails
	LoadTook     time.Duration
	Kind         string   // codec and type of the value; a Loader with another Kind treats the record as a miss
	Validator    string   // lets the load function ask the database whether the value is still valid
	Tags         []string // the groups that the value belongs to
	Payload      []byte
	ExpiredAt    time.Time // when Expire ended its freshness; zero = never
}

const (
	recordMagic   = "RF1"
	offExpired    = 3
	offSum        = 11
	offToken      = 15
	minRecord     = offToken + 1 + 1 + 1 + 5*8 + 2 + 2
	flagNotFound  = 1
	flagNoStore   = 2
	maxTokenBytes = 255
)

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	errRecord  = errors.New("refill: not a record of this version")
)

// Append appends the bytes of the record to b. It fails if a field does not fit the layout: a token that is empty or
// longer than 255 bytes, a kind longer than 65,535 bytes, validator and tags together longer than 65,535 bytes, a
// negative span, or a time before 1970. The error wraps [ErrInvalid].
func (r *Record) Append(b []byte) ([]byte, error) {
	if r.Token == "" || len(r.Token) > maxTokenBytes {
		return b, Invalid("Token", "%d bytes, must be 1 to %d", len(r.Token), maxTokenBytes)
	}
	if len(r.Kind) > math.MaxUint16 {
		return b, Invalid("Kind", "%d bytes, at most %d", len(r.Kind), math.MaxUint16)
	}
	extra := r.extra()
	if len(extra) > math.MaxUint16 {
		return b, Invalid("Record", "%d bytes of validator and tags, at most %d", len(extra), math.MaxUint16)
	}
	times := [...]int64{
		micros(r.LoadBegan), micros(r.FreshUntil),
		r.StaleFor.Microseconds(), r.StaleIfError.Microseconds(), r.LoadTook.Microseconds(),
	}
	if expired := micros(r.ExpiredAt); min(slices.Min(times[:]), expired) < 0 {
		return b, Invalid("Record", "a time before 1970 or a negative span")
	}
	start := len(b)
	b = slices.Grow(b, minRecord+len(r.Token)+len(r.Kind)+len(extra)+len(r.Payload))
	b = append(b, recordMagic...)
	b = binary.BigEndian.AppendUint64(b, uint64(micros(r.ExpiredAt)))
	b = append(b, 0, 0, 0, 0) // the sum
	b = append(b, byte(len(r.Token)))
	b = append(b, r.Token...)
	b = append(b, r.flags())
	for _, n := range times {
		b = binary.BigEndian.AppendUint64(b, uint64(n))
	}
	b = binary.BigEndian.AppendUint16(b, uint16(len(r.Kind)))
	b = append(b, r.Kind...)
	b = binary.BigEndian.AppendUint16(b, uint16(len(extra)))
	b = append(b, extra...)
	b = append(b, r.Payload...)
	binary.BigEndian.PutUint32(b[start+offSum:], crc32.Checksum(b[start+offToken:], castagnoli))
	return b, nil
}

func (r *Record) flags() (f byte) {
	if r.NotFound {
		f |= flagNotFound
	}
	if r.NoStore {
		f |= flagNoStore
	}
	return f
}

func (r *Record) extra() (b []byte) {
	add := func(letter byte, text string) {
		b = append(b, letter)
		b = binary.BigEndian.AppendUint16(b, uint16(len(text)))
		b = append(b, text...)
	}
	if r.Validator != "" {
		add('v', r.Validator)
	}
	for _, tag := range r.Tags {
		add('t', tag)
	}
	return b
}

// readExtra reads the fields of extra from b. It returns false if the last field is cut off.
func (r *Record) readExtra(b []byte) bool {
	c := cursor{b: b}
	for len(c.b) > 0 {
		letter, text := c.byte(), c.take(int(c.uint16()))
		switch letter {
		case 'v':
			r.Validator = string(text)
		case 't':
			r.Tags = append(r.Tags, string(text))
		}
	}
	return !c.bad
}

// RecordTags returns the tags of the record in b without decoding its other fields. It returns nil if the record has no
// tags, or if b is not a record.
func RecordTags(b []byte) []string {
	if len(b) < minRecord || string(b[:offExpired]) != recordMagic {
		return nil
	}
	var r Record
	c := cursor{b: b[offToken:]}
	c.take(int(c.byte()))
	c.take(1 + 5*8)
	c.take(int(c.uint16()))
	if !r.readExtra(c.take(int(c.uint16()))) || c.bad {
		return nil
	}
	return r.Tags
}

// DecodeRecord reads a record. The Payload of the result shares the memory of b. The error says only that b is not a
// record of this version.
func DecodeRecord(b []byte) (Record, error) {
	if len(b) < minRecord || string(b[:offExpired]) != recordMagic ||
		binary.BigEndian.Uint32(b[offSum:]) != crc32.Checksum(b[offToken:], castagnoli) {
		return Record{}, errRecord
	}
	c := cursor{b: b[offToken:]}
	r := Record{Token: string(c.take(int(c.byte())))}
	flags := c.byte()
	r.NotFound, r.NoStore = flags&flagNotFound != 0, flags&flagNoStore != 0
	r.LoadBegan, r.FreshUntil = c.time(), c.time()
	r.StaleFor, r.StaleIfError, r.LoadTook = c.span(), c.span(), c.span()
	r.Kind = string(c.take(int(c.uint16())))
	fine := r.readExtra(c.take(int(c.uint16())))
	r.Payload = c.b
	expired := int64(binary.BigEndian.Uint64(b[offExpired:]))
	if expired != 0 {
		r.ExpiredAt = time.UnixMicro(expired)
	}
	if c.bad || !fine || r.Token == "" || flags&^(flagNotFound|flagNoStore) != 0 || expired < 0 {
		return Record{}, errRecord
	}
	return r, nil
}

// RecordToken returns the token of the record in b, or "" if b is not a record. It reads only the first bytes, as the
// scripts of a store do, and does not check the sum.
func RecordToken(b []byte) string {
	if len(b) <= offToken || string(b[:offExpired]) != recordMagic {
		return ""
	}
	n := int(b[offToken])
	if len(b) < offToken+1+n {
		return ""
	}
	return string(b[offToken+1 : offToken+1+n])
}

// ExpireRecord marks the record in b, in place, as expired at now. A record that is already marked stays unchanged.
// ExpireRecord returns false if b is not a record of this version. The store then deletes b, because b cannot be
// marked.
func ExpireRecord(b []byte, now time.Time) bool {
	if len(b) < minRecord || string(b[:offExpired]) != recordMagic {
		return false
	}
	if binary.BigEndian.Uint64(b[offExpired:]) == 0 {
		binary.BigEndian.PutUint64(b[offExpired:], uint64(micros(now)))
	}
	return true
}

// cursor reads fields from the front of b. A read past the end sets bad; it does not panic.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) take(n int) []byte {
	if n > len(c.b) {
		c.bad, c.b = true, nil
		return nil
	}
	f := c.b[:n]
	c.b = c.b[n:]
	return f
}

func (c *cursor) byte() byte {
	if f := c.take(1); f != nil {
		return f[0]
	}
	return 0
}

func (c *cursor) uint16() uint16 {
	if f := c.take(2); f != nil {
		return binary.BigEndian.Uint16(f)
	}
	return 0
}

// int64 reads a time or a span. It rejects a negative number, and a number so large that a sum of times and spans could
// overflow.
func (c *cursor) int64() int64 {
	f := c.take(8)
	if f == nil {
		return 0
	}
	n := binary.BigEndian.Uint64(f)
	if n > maxMicros {
		c.bad = true
		return 0
	}
	return int64(n)
}

func (c *cursor) time() time.Time     { return time.UnixMicro(c.int64()) }
func (c *cursor) span() time.Duration { return time.Duration(c.int64()) * time.Microsecond }

// maxMicros is the longest span, in microseconds, that fits into a time.Duration. As a time, it is some 290 years
// after 1970.
const maxMicros = math.MaxInt64 / 1000

// micros returns the microseconds from 1970 to t, and 0 for the zero time.
func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}
