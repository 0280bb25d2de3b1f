package sqlxrefill

import (
	"database/sql/driver"
	"encoding/binary"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	_ "time/tzdata" // these tests need Europe/Berlin on every machine
)

func everyValue() []any {
	berlin, _ := time.LoadLocation("Europe/Berlin")
	at := time.Date(2024, 7, 1, 12, 30, 0, 123456789, time.UTC)
	return []any{
		nil, true, false, int64(math.MinInt64), int64(math.MaxInt64), int64(0), 1.5, math.Inf(-1), math.Copysign(0, -1),
		"", "text\x00ü", "\xff", []byte(nil), []byte{}, []byte("bytes"),
		at, time.Time{}, time.Unix(math.MaxInt64/2, 999999999).UTC(), time.Unix(-1<<40, 1).UTC(),
		at.In(time.Local), at.In(berlin), at.AddDate(0, 6, 0).In(berlin), at.In(time.FixedZone("", 7200)),
		at.In(time.FixedZone("CET", 3600)),
		at.In(time.FixedZone("Etc/Unknown", -1)), at.In(time.FixedZone("UTC", 3600)),
		int(-1), int8(-128), int16(-32768), int32(math.MinInt32),
		uint(1), uint8(255), uint16(65535), uint32(math.MaxUint32), uint64(math.MaxUint64), float32(1.1),
	}
}

// encoded returns a result with these values, row by row.
func encoded(t testing.TB, columns []string, values []any) *result {
	t.Helper()
	r := newResult(columns)
	for row := range slices.Chunk(values, len(columns)) {
		if err := r.add(row); err != nil {
			t.Fatal(err)
		}
	}
	return r.complete()
}

// decoded returns the values of a result, as a scan gets them.
func decoded(t testing.TB, r *result) (values []any) {
	t.Helper()
	found := &rows{columns: r.columns, values: r.values(), left: r.rows}
	row := make([]driver.Value, len(r.columns))
	for {
		switch err := found.Next(row); err {
		case nil:
			for _, v := range row {
				values = append(values, v)
			}
		case io.EOF:
			return values
		default:
			t.Fatal(err)
		}
	}
}

func TestEncodingKeepsAll(t *testing.T) {
	values := everyValue()
	for _, c := range []struct {
		columns []string
		values  []any
	}{
		{[]string{"a"}, values},
		{[]string{"a", "", "a", "ü"}, values[:len(values)/4*4]},
		{[]string{"empty"}, nil},
	} {
		r := encoded(t, c.columns, c.values)
		b, err := codec{}.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var got *result
		if err := (codec{}).Unmarshal(b, &got); err != nil || !slices.Equal(got.columns, c.columns) {
			t.Fatalf("got %v, %v", got, err)
		}
		for _, r := range []*result{r, got} {
			back := decoded(t, r)
			if len(back) != len(c.values) {
				t.Fatalf("%d values", len(back))
			}
			for i, v := range c.values {
				if !same(back[i], v) {
					t.Errorf("%T %v came back as %T %v", v, v, back[i], back[i])
				}
			}
		}
	}
}

// A scan must not be able to change the result, and a value must not keep the result in memory.
func TestValuesShareNoMemory(t *testing.T) {
	values := everyValue()
	r := encoded(t, []string{"a"}, values)
	back := decoded(t, r)
	clear(r.encoded)
	for i, v := range values {
		if !same(back[i], v) {
			t.Errorf("%T %v shares memory with its encoding", v, v)
		}
	}
}

// A result takes little more than its encoded bytes, so that LocalBytes bounds the memory of L1.
func TestResultIsAsLargeAsItsBytes(t *testing.T) {
	values := make([]any, 100_000)
	for i := range values {
		values[i] = int64(i % 2)
	}
	r := encoded(t, []string{"a"}, values)
	if n := len(r.encoded); n > 2*len(values)+100 || cap(r.encoded) > n+n/32 {
		t.Errorf("%d values take %d bytes, with room for %d", len(values), n, cap(r.encoded))
	}
	again, err := decodeResult(r.encoded)
	if err != nil || &again.encoded[0] != &r.encoded[0] {
		t.Errorf("a decoded result has copied its bytes: %v", err)
	}
	if allocs := testing.AllocsPerRun(10, func() { _, _ = decodeResult(r.encoded) }); allocs > 5 {
		t.Errorf("decoding allocates %v times", allocs)
	}
}

func same(a, b any) bool {
	t, ok1 := a.(time.Time)
	u, ok2 := b.(time.Time)
	if ok1 && ok2 {
		_, o1 := t.Zone()
		_, o2 := u.Zone()
		return t.Equal(u) && o1 == o2 && t.String() == u.String() && t.Location().String() == u.Location().String() &&
			t.AddDate(0, 6, 0).Equal(u.AddDate(0, 6, 0))
	}
	return reflect.DeepEqual(a, b)
}

// A time was encoded on another node, and this node has other rules for its zone or lacks the zone. The decoded time
// must show the encoded abbreviation and offset.
func TestZoneOfAnotherNode(t *testing.T) {
	at := time.Date(2024, 7, 1, 12, 0, 0, 0, time.UTC)
	for _, z := range []*zone{
		newZone("Local", "XYZ", 5*3600), newZone("Europe/Berlin", "CEST", 1*3600), newZone("Europe/Berlin", "ZZZ", 2*3600),
		newZone("Mars/Olympus", "MO", -60), newZone("../etc/passwd", "P", 60),
	} {
		got := z.show(at)
		if abbreviation, offset := got.Zone(); abbreviation != z.abbreviation || int64(offset) != z.offset || !got.Equal(at) {
			t.Errorf("%v: got %v", z, got)
		}
	}
	// The encoding node has CST all year for this zone. This node has CST only in winter. The test decodes times of
	// both seasons.
	regina := newZone("America/Chicago", "CST", -6*3600)
	for _, at := range []time.Time{at, at.AddDate(0, 6, 0), at} {
		if abbreviation, offset := regina.show(at).Zone(); abbreviation != "CST" || offset != -6*3600 {
			t.Errorf("got %v", regina.show(at))
		}
	}
}

func TestCorruptBytesAreAnError(t *testing.T) {
	good := encoded(t, []string{"a", "b"}, everyValue()[:10]).encoded
	huge := binary.AppendUvarint(nil, math.MaxUint64)
	rows := func(n uint64, rest ...byte) []byte { return append(binary.BigEndian.AppendUint64(nil, n), rest...) }
	one := func(value ...byte) []byte { return append(rows(1, 1, 1, 'a'), value...) }
	bad := map[string][]byte{
		"nothing": nil, "no columns": rows(0, 0), "trailing byte": append(good[:len(good):len(good)], 0),
		"many columns":  append(rows(0, huge...), 'a'),
		"many rows":     rows(math.MaxUint64, 1, 1, 'a', tagNil),
		"more rows":     rows(2, 1, 1, 'a', tagNil),
		"fewer rows":    rows(0, 1, 1, 'a', tagNil),
		"unknown tag":   one(255),
		"narrow int":    one(binary.AppendVarint([]byte{tagInt8}, 128)...),
		"narrow uint":   one(binary.AppendUvarint([]byte{tagUint8}, 256)...),
		"nanoseconds":   one(binary.AppendUvarint([]byte{tagUTC, 0}, 1e9)...),
		"endless bytes": append(one(tagBytes), huge...),
		"endless text":  append(one(tagString), huge...),
		"half a float":  one(tagFloat64, 1, 2, 3),
	}
	for name, b := range bad {
		if r, err := decodeResult(b); err == nil {
			t.Errorf("%s: decoded to %v", name, r)
		}
	}
	for i := range good {
		if r, err := decodeResult(good[:i]); err == nil {
			t.Errorf("the first %d bytes: decoded to %v", i, r)
		}
	}
}

func TestCodecRefusesOtherTypes(t *testing.T) {
	for _, v := range []any{
		nil, 5, (*result)(nil),
	} {
		if _, err := (codec{}).Marshal(v); err == nil {
			t.Errorf("%#v was encoded", v)
		}
	}
	good := encoded(t, []string{"a"}, []any{nil}).encoded
	if err := (codec{}).Unmarshal(good, new(int)); err == nil || !strings.Contains(err.Error(), "*int") {
		t.Errorf("got %v", err)
	}
}

// What the decoder accepts must scan without an error, and the values must survive another encoding.
func FuzzDecode(f *testing.F) {
	f.Add(encoded(f, []string{"a"}, everyValue()).encoded)
	f.Add(encoded(f, []string{"a", "b"}, nil).encoded)
	f.Add(append(encoded(f, []string{"a"}, nil).encoded[:countSize], 1, 1, 'a', tagTime, 0, 0, 1, '/', 0, 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decodeResult(data)
		if err != nil {
			return
		}
		values := decoded(t, r)
		again, err := decodeResult(encoded(t, r.columns, values).encoded)
		if err != nil || r.rows*len(r.columns) != len(values) {
			t.Fatalf("%v does not survive: %v", values, err)
		}
		second := decoded(t, again)
		for i, v := range values {
			if f, ok := v.(float64); ok && math.IsNaN(f) {
				continue
			}
			if f, ok := v.(float32); ok && f != f {
				continue
			}
			if !same(v, second[i]) {
				t.Fatalf("%#v became %#v", v, second[i])
			}
		}
	})
}
