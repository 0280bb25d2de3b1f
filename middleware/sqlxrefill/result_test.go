package sqlxrefill

import (
	"encoding/binary"
	"math"
	"reflect"
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

func TestEncodingKeepsAll(t *testing.T) {
	values := everyValue()
	for _, r := range []*result{
		{columns: []string{"a"}, values: values},
		{columns: []string{"a", "", "a", "ü"}, values: values[:len(values)/4*4]},
		{columns: []string{"empty"}, values: []any{}},
	} {
		b, err := codec{}.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var got *result
		if err := (codec{}).Unmarshal(b, &got); err != nil || !reflect.DeepEqual(got.columns, r.columns) ||
			len(got.values) != len(r.values) {
			t.Fatalf("got %v, %v", got, err)
		}
		for i, v := range r.values {
			if !same(got.values[i], v) {
				t.Errorf("%T %v came back as %T %v", v, v, got.values[i], got.values[i])
			}
		}
		clear(b)
		for i, v := range r.values {
			if !same(got.values[i], v) {
				t.Fatalf("%T %v shares memory with its encoding", v, v)
			}
		}
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
	for _, z := range []zone{
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
	r := &result{columns: []string{"a", "b"}, values: everyValue()}
	good, err := r.encode()
	if err != nil {
		t.Fatal(err)
	}
	huge := binary.AppendUvarint(nil, math.MaxUint64)
	bad := map[string][]byte{
		"nothing": nil, "no columns": {0}, "trailing byte": append(good[:len(good):len(good)], 0),
		"many columns":  append(huge[:len(huge):len(huge)], 'a'),
		"many rows":     append([]byte{1, 1, 'a'}, huge...),
		"unknown tag":   {1, 1, 'a', 1, 255},
		"narrow int":    binary.AppendVarint([]byte{1, 1, 'a', 1, tagInt8}, 128),
		"narrow uint":   binary.AppendUvarint([]byte{1, 1, 'a', 1, tagUint8}, 256),
		"nanoseconds":   binary.AppendUvarint([]byte{1, 1, 'a', 1, tagUTC, 0}, 1e9),
		"endless bytes": append([]byte{1, 1, 'a', 1, tagBytes}, huge...),
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
		nil, 5, (*result)(nil), &result{}, &result{columns: []string{"a"}, values: []any{make(chan int)}},
	} {
		if _, err := (codec{}).Marshal(v); err == nil {
			t.Errorf("%#v was encoded", v)
		}
	}
	if err := (codec{}).Unmarshal([]byte{1, 1, 'a', 0}, new(int)); err == nil || !strings.Contains(err.Error(), "*int") {
		t.Errorf("got %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, r := range []*result{{columns: []string{"a"}, values: everyValue()}, {columns: []string{"a", "b"}}} {
		b, err := r.encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte{1, 1, 'a', 1, tagTime, 0, 0, 1, '/', 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decodeResult(data)
		if err != nil {
			return
		}
		again, err := r.encode()
		if err != nil {
			t.Fatal(err)
		}
		second, err := decodeResult(again)
		if err != nil || len(second.values) != len(r.values) {
			t.Fatalf("%v does not survive: %v", r, err)
		}
		for i, v := range r.values {
			if f, ok := v.(float64); ok && math.IsNaN(f) {
				continue
			}
			if f, ok := v.(float32); ok && f != f {
				continue
			}
			if !same(v, second.values[i]) {
				t.Fatalf("%#v became %#v", v, second.values[i])
			}
		}
	})
}
