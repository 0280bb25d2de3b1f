package sqlxrefill

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"
)

// These type tags (not tags of refill) say which Go type an encoded value has. A Scanner, or a scan into an any, sees
// the type that the driver returned. The tags before the blank line are for the types that database/sql/driver allows.
// The tags after the blank line are for further types that some drivers return.
const (
	tagNil byte = iota
	tagFalse
	tagTrue
	tagInt64
	tagFloat64
	tagString
	tagBytes
	tagNilBytes
	tagUTC
	tagTime

	tagInt
	tagInt8
	tagInt16
	tagInt32
	tagUint
	tagUint8
	tagUint16
	tagUint32
	tagUint64
	tagFloat32
)

// appendValue appends a driver value. Keys are also made of encoded values. So the encoding is one to one, and no
// encoded value is a prefix of another encoded value.
func appendValue(b []byte, v any) ([]byte, error) {
	switch v := v.(type) {
	case nil:
		return append(b, tagNil), nil
	case bool:
		if v {
			return append(b, tagTrue), nil
		}
		return append(b, tagFalse), nil
	case float64:
		return binary.BigEndian.AppendUint64(append(b, tagFloat64), math.Float64bits(v)), nil
	case float32:
		return binary.BigEndian.AppendUint32(append(b, tagFloat32), math.Float32bits(v)), nil
	case string:
		return appendString(append(b, tagString), v), nil
	case []byte:
		if v == nil {
			return append(b, tagNilBytes), nil
		}
		return append(appendUint(append(b, tagBytes), len(v)), v...), nil
	case time.Time:
		return appendTime(b, v), nil
	}
	return appendInteger(b, v)
}

func appendInteger(b []byte, v any) ([]byte, error) {
	switch v := v.(type) {
	case int64:
		return binary.AppendVarint(append(b, tagInt64), v), nil
	case int:
		return binary.AppendVarint(append(b, tagInt), int64(v)), nil
	case int8:
		return binary.AppendVarint(append(b, tagInt8), int64(v)), nil
	case int16:
		return binary.AppendVarint(append(b, tagInt16), int64(v)), nil
	case int32:
		return binary.AppendVarint(append(b, tagInt32), int64(v)), nil
	case uint:
		return binary.AppendUvarint(append(b, tagUint), uint64(v)), nil
	case uint8:
		return binary.AppendUvarint(append(b, tagUint8), uint64(v)), nil
	case uint16:
		return binary.AppendUvarint(append(b, tagUint16), uint64(v)), nil
	case uint32:
		return binary.AppendUvarint(append(b, tagUint32), uint64(v)), nil
	case uint64:
		return binary.AppendUvarint(append(b, tagUint64), v), nil
	}
	return b, fmt.Errorf("a %T cannot be cached", v)
}

const nameOfLocal = "Local"

// appendTime appends a time with its zone. A caller that adds a day to the time, or formats it, must see no difference.
func appendTime(b []byte, t time.Time) []byte {
	tag := tagTime
	if t.Location() == time.UTC {
		tag = tagUTC
	}
	b = binary.AppendVarint(append(b, tag), t.Unix())
	b = binary.AppendUvarint(b, uint64(t.Nanosecond()))
	if tag == tagUTC {
		return b
	}
	name := t.Location().String()
	if t.Location() == time.Local {
		name = nameOfLocal // if TZ is set, String returns the name in TZ
	}
	zone, offset := t.Zone()
	b = appendString(appendString(b, name), zone)
	return binary.AppendVarint(b, int64(offset))
}

func appendString(b []byte, s string) []byte { return append(appendUint(b, len(s)), s...) }
func appendUint(b []byte, n int) []byte      { return binary.AppendUvarint(b, uint64(n)) }

var errNotResult = errors.New("sqlxrefill: not an encoded result")

// cursor reads values from the front of b. At the end of b, or at an unknown tag, the cursor becomes bad. A bad cursor
// reads only zeros.
type cursor struct {
	b   []byte
	bad bool

	zone *zone // the zone of the time.Time read last, or nil; the times of one result often share a zone
}

// zone is the zone of an encoded time. known and fixed are the locations in which this node can show the time.
type zone struct {
	name, abbreviation string
	offset             int64

	known *time.Location // the location with this name; nil = unknown on this node
	fixed *time.Location // a location with the encoded abbreviation and offset only; nil = not needed yet
}

func (c *cursor) fail() {
	c.bad, c.b = true, nil
}

func (c *cursor) take(n int) []byte {
	if n > len(c.b) {
		c.fail()
		return nil
	}
	f := c.b[:n:n]
	c.b = c.b[n:]
	return f
}

func (c *cursor) uint() uint64 {
	v, n := binary.Uvarint(c.b)
	if n <= 0 {
		c.fail()
		return 0
	}
	c.b = c.b[n:]
	return v
}

func (c *cursor) int() int64 {
	v, n := binary.Varint(c.b)
	if n <= 0 {
		c.fail()
		return 0
	}
	c.b = c.b[n:]
	return v
}

// count reads how many items of at least size bytes follow. If b is too short for that many items, the cursor
// becomes bad. So a false number never makes the decoder allocate memory.
func (c *cursor) count(size int) int {
	n := c.uint()
	if n > uint64(len(c.b)/size) {
		c.fail()
		return 0
	}
	return int(n)
}

func (c *cursor) string() string { return string(c.take(c.count(1))) }

func (c *cursor) value() any {
	tag := c.take(1)
	if tag == nil {
		return nil
	}
	switch tag[0] {
	case tagNil:
		return nil
	case tagFalse:
		return false
	case tagTrue:
		return true
	case tagFloat64:
		if f := c.take(8); f != nil {
			return math.Float64frombits(binary.BigEndian.Uint64(f))
		}
		return nil
	case tagFloat32:
		if f := c.take(4); f != nil {
			return math.Float32frombits(binary.BigEndian.Uint32(f))
		}
		return nil
	case tagString:
		return c.string()
	case tagBytes:
		return append([]byte{}, c.take(c.count(1))...)
	case tagNilBytes:
		return []byte(nil)
	case tagUTC:
		return c.instant().UTC()
	case tagTime:
		return c.time()
	}
	return c.integer(tag[0])
}

// skip moves the cursor behind a value. It accepts what value accepts, but allocates nothing.
func (c *cursor) skip() {
	tag := c.take(1)
	if tag == nil {
		return
	}
	switch tag[0] {
	case tagNil, tagFalse, tagTrue, tagNilBytes:
	case tagFloat64:
		c.take(8)
	case tagFloat32:
		c.take(4)
	case tagString, tagBytes:
		c.take(c.count(1))
	case tagUTC:
		c.instant()
	case tagTime:
		c.instant()
		c.take(c.count(1))
		c.take(c.count(1))
		c.int()
	case tagInt64, tagInt, tagInt8, tagInt16, tagInt32:
		unused := 64 - bits[tag[0]]
		if n := c.int(); n<<unused>>unused != n {
			c.fail()
		}
	case tagUint64, tagUint, tagUint8, tagUint16, tagUint32:
		unused := 64 - bits[tag[0]]
		if n := c.uint(); n<<unused>>unused != n {
			c.fail()
		}
	default:
		c.fail()
	}
}

// bits is the size of each integer type on this node.
var bits = [...]int{
	tagInt64: 64, tagInt: strconv.IntSize, tagInt8: 8, tagInt16: 16, tagInt32: 32,
	tagUint64: 64, tagUint: strconv.IntSize, tagUint8: 8, tagUint16: 16, tagUint32: 32,
}

func (c *cursor) integer(tag byte) any {
	switch tag {
	case tagInt64:
		return c.int()
	case tagInt:
		return narrow[int](c, c.int())
	case tagInt8:
		return narrow[int8](c, c.int())
	case tagInt16:
		return narrow[int16](c, c.int())
	case tagInt32:
		return narrow[int32](c, c.int())
	case tagUint:
		return narrow[uint](c, c.uint())
	case tagUint8:
		return narrow[uint8](c, c.uint())
	case tagUint16:
		return narrow[uint16](c, c.uint())
	case tagUint32:
		return narrow[uint32](c, c.uint())
	case tagUint64:
		return c.uint()
	}
	c.fail()
	return nil
}

// narrow returns n as a T. An n that does not fit into T makes c bad. That happens if another node has a wider int
// than this node.
func narrow[T int | int8 | int16 | int32 | uint | uint8 | uint16 | uint32, N int64 | uint64](c *cursor, n N) T {
	if N(T(n)) != n {
		c.fail()
	}
	return T(n)
}

func (c *cursor) instant() time.Time {
	seconds, nanos := c.int(), c.uint()
	if nanos >= 1e9 {
		c.fail()
		return time.Time{}
	}
	return time.Unix(seconds, int64(nanos))
}

func (c *cursor) time() time.Time {
	t := c.instant()
	name, abbreviation, offset := c.take(c.count(1)), c.take(c.count(1)), c.int()
	if c.bad {
		return t
	}
	if z := c.zone; z == nil || z.name != string(name) || z.abbreviation != string(abbreviation) || z.offset != offset {
		c.zone = newZone(string(name), string(abbreviation), offset)
	}
	return c.zone.show(t)
}

func newZone(name, abbreviation string, offset int64) *zone {
	return &zone{name: name, abbreviation: abbreviation, offset: offset, known: knownZone(name)}
}

// show returns t in the zone that t had when it was encoded. This node may lack that zone, may have another Local,
// or may have other rules for that zone. Then show uses the encoded abbreviation and offset.
func (z *zone) show(t time.Time) time.Time {
	if z.known != nil {
		in := t.In(z.known)
		if abbreviation, offset := in.Zone(); abbreviation == z.abbreviation && int64(offset) == z.offset {
			return in
		}
	}
	if z.fixed == nil {
		z.fixed = time.FixedZone(z.abbreviation, int(z.offset))
	}
	return t.In(z.fixed)
}

// zones holds the locations that were loaded from disk, by name. The map cannot grow larger than the tz database.
var zones sync.Map

// knownZone returns the location with this name, or nil if this node has no such location. It also returns nil for
// names without a slash ("", "CET"), because drivers give such names to fixed offsets. The tz database has some of
// these names too, but with summer time.
func knownZone(name string) *time.Location {
	if name == nameOfLocal {
		return time.Local
	}
	if !strings.Contains(name, "/") {
		return nil
	}
	if known, ok := zones.Load(name); ok {
		return known.(*time.Location)
	}
	loaded, err := time.LoadLocation(name)
	if err != nil {
		return nil
	}
	known, _ := zones.LoadOrStore(name, loaded)
	return known.(*time.Location)
}
