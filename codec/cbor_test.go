package codec_test

import (
	"encoding/json"
	"math"
	"math/big"
	"net/netip"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"testing/quick"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/codec"
)

// through encodes v and returns the decoded value.
func through[V any](t *testing.T, c refill.Codec, v V) V {
	t.Helper()
	var w V
	b, err := c.Marshal(v)
	if err != nil {
		t.Errorf("%s: encoding %T: %v", c.Name(), v, err)
	} else if err := c.Unmarshal(b, &w); err != nil {
		t.Errorf("%s: decoding %T: %v", c.Name(), v, err)
	}
	return w
}

func same[V any](t *testing.T, c refill.Codec, v V) {
	t.Helper()
	if w := through(t, c, v); !reflect.DeepEqual(v, w) {
		t.Errorf("%s: %#v became %#v", c.Name(), v, w)
	}
}

// drawn is the type of the random values of testing/quick.
type drawn struct {
	Maker
	I8     int8
	U64    uint64
	F32    float32
	Bytes  []byte
	Matrix [][]float64
	Array  [4]uint16
	ByInt  map[int]string
	Deep   *drawn
	Flags  map[string][]bool
	C      struct{ A, B *int }
}

func TestCBORKeepsValues(t *testing.T) {
	err := quick.Check(func(v drawn, sec int32, ns uint16) bool {
		at := time.Unix(int64(sec), int64(ns)).UTC()
		return reflect.DeepEqual(v, through(t, codec.CBOR, v)) && at == through(t, codec.CBOR, at)
	}, &quick.Config{MaxCount: 200})
	if err != nil {
		t.Error(err)
	}
	same(t, codec.CBOR, products(10))
}

type byText struct{ s string }

func (x byText) MarshalText() ([]byte, error)     { return []byte(x.s), nil }
func (x *byText) UnmarshalText(text []byte) error { x.s = string(text); return nil }

// byAll has the methods for binary, text and JSON. As with decimal types, each of the three encodings is different.
type byAll struct{ byText }

func (x byAll) MarshalBinary() ([]byte, error) { return []byte("b" + x.s), nil }
func (x *byAll) UnmarshalBinary(data []byte) error {
	x.s = strings.TrimPrefix(string(data), "b")
	return nil
}
func (x byAll) MarshalJSON() ([]byte, error)     { return json.Marshal("j" + x.s) }
func (x *byAll) UnmarshalJSON(data []byte) error { x.s = string(data); return nil }

func TestCBORFidelity(t *testing.T) {
	east := time.Date(2026, 1, 2, 3, 4, 5, 123456789, time.FixedZone("", 2*3600+1800))
	same(t, codec.CBOR, time.Date(2026, 1, 2, 3, 4, 5, 123456789, time.UTC))
	same(t, codec.CBOR, time.Time{})
	if got := through(t, codec.CBOR, east); got.Format(time.RFC3339Nano) != "2026-01-02T03:04:05.123456789+02:30" {
		t.Errorf("%v became %v", east, got)
	}
	same[any](t, codec.CBOR, time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC))
	now := time.Now()
	if got := through(t, codec.CBOR, now); !got.Equal(now) || strings.Contains(got.String(), "m=") {
		t.Errorf("%v became %v", now, got)
	}

	same(t, codec.CBOR, struct{ A, B []int }{nil, []int{}})
	same(t, codec.CBOR, struct{ A, B []byte }{nil, []byte{}})
	same(t, codec.CBOR, struct{ A, B map[string]int }{nil, map[string]int{}})
	same(t, codec.CBOR, (*drawn)(nil))
	same(t, codec.CBOR, struct{ A *int }{})
	same(t, codec.CBOR, struct {
		A int64
		B uint64
	}{math.MinInt64, math.MaxUint64})
	same[any](t, codec.CBOR, map[string]any{"a": int64(1<<53 + 1), "b": int64(-1), "c": []any{true, nil, 0.5, "x"}})
	same(t, codec.CBOR, []float64{math.Inf(1), math.Inf(-1), math.MaxFloat64, math.SmallestNonzeroFloat64})
	odd := through(t, codec.CBOR, []float64{math.NaN(), math.Copysign(0, -1)})
	if !math.IsNaN(odd[0]) || !math.Signbit(odd[1]) {
		t.Errorf("NaN and -0 became %v", odd)
	}
	same(t, codec.CBOR, "not UTF-8: \xff\x00")
	same(t, codec.CBOR, json.RawMessage(`{"a": 1}`))
	same(t, codec.CBOR, map[byText]byText{{"a"}: {"b"}})
	same(t, codec.CBOR, struct{ A, B *byAll }{A: &byAll{byText{"x"}}})
	same(t, codec.CBOR, []netip.Addr{netip.MustParseAddr("2001:db8::1"), {}})
	same(t, codec.CBOR, big.NewInt(math.MinInt64))
	same(t, codec.CBOR, &url.URL{Scheme: "https", User: url.User("me"), Host: "example.com", Path: "/"})
	same(t, codec.CBOR, make([]int, 200_000)) // above the library's own limit
	deep := any("x")
	for range 1000 {
		deep = []any{deep}
	}
	same(t, codec.CBOR, deep)
}

// Old and new releases of a service share a store. If a record has a field that the type lacks, decoding must skip
// the field. If the type has a field that the record lacks, the field must stay zero.
func TestCBORFieldsComeAndGo(t *testing.T) {
	type v1 struct {
		A int    `json:"alpha"`
		B string `json:"b,omitempty"`
		C int    `json:"-"`
		d int
	}
	type v2 struct {
		A int `json:"alpha"`
		E []int
	}
	b, err := codec.CBOR.Marshal(v1{A: 1, B: "x", C: 2, d: 3})
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]any
	want := map[string]any{"alpha": int64(1), "b": "x"}
	if err := codec.CBOR.Unmarshal(b, &all); err != nil || !reflect.DeepEqual(all, want) {
		t.Errorf("fields %v, %v: not those of JSON", all, err)
	}
	var newer v2
	if err := codec.CBOR.Unmarshal(b, &newer); err != nil || newer.A != 1 || newer.E != nil {
		t.Errorf("v1 read as v2: %+v, %v", newer, err)
	}
	if b, err = codec.CBOR.Marshal(v2{A: 5, E: []int{1}}); err != nil {
		t.Fatal(err)
	}
	var older v1
	if err := codec.CBOR.Unmarshal(b, &older); err != nil || older != (v1{A: 5}) {
		t.Errorf("v2 read as v1: %+v, %v", older, err)
	}
}

type byJSON struct{ s string }

func (x byJSON) MarshalJSON() ([]byte, error) { return json.Marshal(x.s) }

// CBOR must refuse a type that only MarshalJSON could encode, wherever this type occurs in the type of the value. The
// error must name the type.
func TestCBORRefusesWhatItWouldLose(t *testing.T) {
	type tree struct {
		Sub  []*tree
		Leaf map[string][2]byJSON
	}
	for _, v := range []any{byJSON{"x"}, &byJSON{"x"}, []byJSON{}, map[byJSON]int{}, tree{}, struct{ byJSON }{}} {
		if _, err := codec.CBOR.Marshal(v); err == nil || !strings.Contains(err.Error(), "byJSON has MarshalJSON") &&
			!strings.Contains(err.Error(), "struct { codec_test.byJSON } has MarshalJSON") {
			t.Errorf("%T: %v, want an error that names the type", v, err)
		}
	}
	type fine struct {
		A byText
		B byAll
		C time.Time
		D *big.Int
		E struct{}
		F byJSON               `json:"-"`
		G struct{ hidden int } // JSON loses this field as well
	}
	if _, err := codec.CBOR.Marshal(fine{D: new(big.Int)}); err != nil {
		t.Error(err)
	}
}

type ring struct {
	Next, Prev *ring
	Any        any
	Map        map[string]any
}

type list struct{ Rest *list }

type nest []nest

// A value that contains itself must be an error, as with JSON. A value that occurs twice, but does not contain
// itself, must be encoded.
func TestCBORCycles(t *testing.T) {
	a, b, c := new(ring), new(ring), new(ring)
	a.Next, a.Prev, b.Next, b.Prev = b, b, a, a
	c.Any = &c
	m := map[string]any{}
	m["m"] = []any{1, m}
	s := make([]any, 1)
	s[0] = s
	l, n := new(list), make(nest, 1)
	l.Rest, n[0] = l, n
	for _, v := range []any{l, n, a, *a, c, m, s, ring{Map: m}, []*ring{nil, a}, [1]any{s}} {
		if _, err := codec.CBOR.Marshal(v); err == nil || !strings.Contains(err.Error(), "contains itself") {
			t.Errorf("%T: %v", v, err)
		}
	}
	leaf := &ring{Any: "x"}
	same(t, codec.CBOR, &ring{Next: leaf, Prev: leaf, Map: map[string]any{"a": []any{int64(1)}, "b": nil}})
	if _, err := codec.CBOR.Marshal([]any{leaf, leaf, m["nothing"], s[:0], time.Now(), big.NewInt(1)}); err != nil {
		t.Error(err)
	}
}
