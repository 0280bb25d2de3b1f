package sqlxrefill_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/jmoiron/sqlx/reflectx"

	"github.com/refill-go/refill/middleware/sqlxrefill"
)

// seen is a Scanner that remembers the value that it got, with the value's type.
type seen struct{ Got string }

func (s *seen) Scan(src any) error {
	s.Got = fmt.Sprintf("%T %v", src, src)
	return nil
}

// refusing is a Scanner that refuses every value.
type refusing struct{}

func (*refusing) Scan(src any) error { return fmt.Errorf("refused a %T", src) }

type base struct {
	A int
	B string
}

type row struct {
	A int64
	B string
}

type nullRow struct {
	A sql.NullInt64
	B *string
}

type taggedRow struct {
	First  any  `db:"a"`
	Second seen `db:"b"`
}

type embeddingRow struct {
	base
	C bool
}

type pointingRow struct {
	*base
	C any
}

type Outer struct {
	A     any
	B     any
	Inner struct{ C any } `db:"inner"`
}

// tables returns answers of the database, at least one for every shape and type that drivers return.
func tables() map[string]*table {
	berlin, _ := time.LoadLocation("Europe/Berlin")
	at := time.Date(2024, 7, 1, 12, 30, 0, 123456789, time.UTC)
	single := func(vs ...driver.Value) *table {
		t := &table{columns: []string{"a"}}
		for _, v := range vs {
			t.rows = append(t.rows, []driver.Value{v})
		}
		return t
	}
	two := func(rows ...[]driver.Value) *table { return &table{columns: []string{"a", "b"}, rows: rows} }
	three := func(third string, rows ...[]driver.Value) *table {
		return &table{columns: []string{"a", "b", third}, rows: rows}
	}
	type vs = []driver.Value
	return map[string]*table{
		"int64":       single(int64(7), int64(-1<<63), int64(1<<63-1)),
		"zero":        single(int64(0)),
		"large":       single(int64(300), int64(70000)),
		"float64":     single(1.5, -0.25),
		"bool":        single(true, false),
		"text":        single("x", "", "ü\x00"),
		"digits":      single("12", "13"),
		"true":        single("true"),
		"bytes":       single([]byte("abc"), []byte{}, []byte(nil), []byte{0, 255}),
		"digit bytes": single([]byte("12"), []byte("13")),
		"null":        single(nil),
		"nulls":       single(int64(1), nil),
		"mixed":       single(int64(1), "two", 3.0, nil, []byte("five"), true, at),
		"utc":         single(at, time.Time{}),
		"local":       single(at.In(time.Local)),
		"berlin":      single(at.In(berlin)),
		"fixed":       single(at.In(time.FixedZone("", 7200)), at.In(time.FixedZone("CEST", 7200))),
		"uint64":      single(uint64(1<<63), uint64(1)),
		"float32":     single(float32(1.1)),
		"ints":        single(int8(-1), int16(-2), int32(-3), int(-4)),
		"uints":       single(uint8(1), uint16(2), uint32(3), uint(4)),
		"no name":     {columns: []string{""}, rows: [][]driver.Value{{int64(1)}}},

		"two":       two(vs{int64(1), "one"}, vs{int64(2), "two"}),
		"two null":  two(vs{int64(1), nil}, vs{nil, "two"}),
		"two bytes": two(vs{[]byte("1"), []byte("one")}),
		"two wrong": two(vs{int64(1), "one"}, vs{"not a number", "two"}),
		"same name": {columns: []string{"a", "a"}, rows: [][]driver.Value{{int64(1), int64(2)}}},
		"upper":     {columns: []string{"A", "B"}, rows: [][]driver.Value{{int64(1), "one"}}},

		"three":   three("c", vs{int64(1), "one", true}, vs{int64(2), "two", false}),
		"inner":   three("inner.c", vs{int64(1), "x", 2.5}),
		"unknown": three("extra", vs{int64(1), "one", true}),
	}
}

// dests returns destinations of scans: pointers for Get, and pointers to slices for Select. Some destinations hold
// values before the scan.
func dests() map[string]func() any {
	text := "was"
	return map[string]func() any{
		"int": to[int], "int8": to[int8], "int64": to[int64], "uint": to[uint],
		"float32": to[float32], "float64": to[float64],
		"string": to[string], "bool": to[bool], "bytes": to[[]byte], "raw": to[sql.RawBytes], "any": to[any],
		"time": to[time.Time], "named": to[time.Duration], "*int": to[*int], "*string": to[*string], "**string": to[**string],
		"NullString": to[sql.NullString], "NullInt64": to[sql.NullInt64], "NullTime": to[sql.NullTime],
		"Null bytes": to[sql.Null[[]byte]], "seen": to[seen], "refusing": to[refusing],
		"map": to[map[string]any], "chan": to[chan int], "array": to[[2]int],
		"row": to[row], "nullRow": to[nullRow], "taggedRow": to[taggedRow], "embedding": to[embeddingRow],
		"pointing": to[pointingRow], "Outer": to[Outer],

		"[]int": to[[]int], "[]*int": to[[]*int], "[]**int": to[[]**int], "*[]int": to[*[]int], "[]string": to[[]string],
		"[]any": to[[]any], "[]seen": to[[]seen], "[]time": to[[]time.Time], "[]NullInt64": to[[]sql.NullInt64],
		"[][]byte": to[[][]byte], "[]RawBytes": to[[]sql.RawBytes], "[]map": to[[]map[string]any],
		"[]row": to[[]row], "[]*row": to[[]*row], "[]nullRow": to[[]nullRow], "[]*taggedRow": to[[]*taggedRow],
		"[]embedding": to[[]embeddingRow], "[]*pointing": to[[]*pointingRow], "[]Outer": to[[]Outer],

		"nil":               func() any { return nil },
		"nil pointer":       func() any { return (*int)(nil) },
		"nil slice pointer": func() any { return (*[]int)(nil) },
		"not a pointer":     func() any { return 5 },
		"slice itself":      func() any { return []int{1} },
		"filled":            func() any { return &row{A: 9, B: "was"} },
		"filled pointer":    func() any { return &nullRow{B: &text} },
		"filled slice":      func() any { s := append(make([]row, 0, 8), row{A: 9}, row{A: 8}); return &s },
	}
}

func to[T any]() any { return new(T) }

// Every result is scanned into every dest, once by sqlx alone and twice through the cache. Values, errors and panics
// must be the same.
func TestSameAsSqlx(t *testing.T) {
	for _, db := range []struct {
		name string
		set  func(*sqlx.DB) *sqlx.DB
	}{
		{"plain", func(db *sqlx.DB) *sqlx.DB { return db }},
		{"unsafe", (*sqlx.DB).Unsafe},
		{"mapper", func(db *sqlx.DB) *sqlx.DB {
			db.Mapper = reflectx.NewMapperFunc("db", strings.ToUpper)
			return db
		}},
	} {
		for name, tab := range tables() {
			t.Run(db.name+"/"+name, func(t *testing.T) {
				s := always(tab)
				plain := db.set(s.open(t))
				ours := cachedOver(t, plain, sqlxrefill.Config{})
				misfits := 0
				for dest, fresh := range dests() {
					misfits += compare(t, "Get "+dest, fresh, plain.GetContext, ours.GetContext)
					misfits += compare(t, "Select "+dest, fresh, plain.SelectContext, ours.SelectContext)
				}
				// sqlx queries once per dest and method. The cache queries once per method, and once more for a dest that
				// does not fit.
				least := 2*len(dests()) + 2
				if n := s.count(); n < least || n > least+misfits {
					t.Errorf("%d queries, want %d to %d", n, least, least+misfits)
				}
			})
		}
	}
}

// read is GetContext or SelectContext, of sqlx or of this package.
type read func(ctx context.Context, dest any, query string, args ...any) error

// compare calls plain (the method of sqlx) once and ours (the method of this package) twice, each with a dest of its
// own. The values, errors and panics must be the same. compare returns 1 if sqlx has returned an error.
func compare(t *testing.T, what string, fresh func() any, plain, ours read) (misfits int) {
	t.Helper()
	want := fresh()
	wantPanic, wantErr := caught(plain, want)
	for _, try := range []string{"first", "again"} {
		got := fresh()
		panicked, err := caught(ours, got)
		if fmt.Sprint(err) != fmt.Sprint(wantErr) || fmt.Sprint(panicked) != fmt.Sprint(wantPanic) {
			t.Errorf("%s, %s: error %v (panic %v), sqlx has %v (panic %v)", what, try, err, panicked, wantErr, wantPanic)
		}
		if errors.Is(wantErr, sql.ErrNoRows) && any(err) != any(sql.ErrNoRows) { // many programs compare with ==
			t.Errorf("%s, %s: %v is not sql.ErrNoRows itself", what, try, err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s, %s: got %s, sqlx has %s", what, try, show(got), show(want))
		}
	}
	if wantErr != nil {
		return 1
	}
	return 0
}

// caught runs r and returns its panic, if any. sqlx panics at a few dests, and then the cache must panic too.
func caught(r read, dest any) (panicked any, err error) {
	defer func() { panicked = recover() }()
	return nil, r(context.Background(), dest, "SELECT q")
}

func show(v any) string {
	if r := reflect.ValueOf(v); r.Kind() == reflect.Pointer && !r.IsNil() {
		return fmt.Sprintf("%#v", r.Elem().Interface())
	}
	return fmt.Sprintf("%#v", v)
}

// The query returns no row. SelectContext must return an empty list and GetContext sql.ErrNoRows, as in sqlx.
func TestNoRowsAsSqlx(t *testing.T) {
	s := always(&table{columns: []string{"a", "b"}})
	plain := s.open(t)
	ours := cachedOver(t, plain, sqlxrefill.Config{})
	ctx := context.Background()
	for _, dest := range []string{"row", "taggedRow", "filled"} {
		compare(t, "Get "+dest, dests()[dest], plain.GetContext, ours.GetContext)
	}
	for _, dest := range []string{"[]row", "[]*row", "[]nullRow", "filled slice", "[]int"} {
		compare(t, "Select "+dest, dests()[dest], plain.SelectContext, ours.SelectContext)
	}
	// Here sqlx would complain about dest. A cached absence has no columns to compare with dest, as GetContext
	// documents.
	var wrong struct{ X int }
	if err := ours.GetContext(ctx, &wrong, "SELECT q"); !errors.Is(err, sql.ErrNoRows) {
		t.Errorf("Get of no row into a dest that does not fit: %v", err)
	}
}
