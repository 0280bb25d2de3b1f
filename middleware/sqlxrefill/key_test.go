package sqlxrefill

import (
	"database/sql"
	"database/sql/driver"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"
)

type userID int64

type level string

type valuer struct{ v driver.Value }

func (v valuer) Value() (driver.Value, error) { return v.v, nil }

func keyOf(t testing.TB, query string, args ...any) string {
	t.Helper()
	q, err := newRequest(query, args)
	if err != nil {
		t.Fatal(err)
	}
	return q.key(allRows)
}

// All calls in one element of lines must have the same key, whatever Go types their arguments have. Two elements of
// lines must not share a key.
func TestKeys(t *testing.T) {
	five, text := 5, "5"
	nowhere := (*int)(nil)
	at := time.Date(2024, 7, 1, 12, 0, 0, 1, time.UTC)
	type call struct {
		query string
		args  []any
	}
	q := func(args ...any) call { return call{"q", args} }
	lines := [][]call{
		{q()}, {{"q ", nil}}, {{"Q", nil}},
		{q(5), q(int8(5)), q(int64(5)), q(uint64(5)), q(userID(5)), q(&five),
			q(valuer{int64(5)}), q(sql.NullInt64{Int64: 5, Valid: true})},
		{q(text), q(level("5")), q(&text), q(valuer{"5"})}, {q([]byte("5"))}, {q(5.0), q(float32(5))},
		{q(nil), q(nowhere), q((*valuer)(nil)), q(sql.NullInt64{}), q(valuer{nil})}, {q([]byte(nil))}, {q([]byte{})}, {q("")},
		{q(true), q(valuer{true})}, {q(false)}, {q(1)}, {q(0)}, {q(math.Copysign(0, -1))},
		{q(uint64(math.MaxUint64))}, {q(-1)},
		{q("a", "b")}, {q("ab")}, {q("a", "", "b")}, {q("ab", "")}, {q("", "ab")}, {q("b", "a")}, {{"qa", []any{"b"}}},
		{q(sql.Named("n", 5)), q(sql.Named("n", &five))}, {q(sql.Named("m", 5))}, {q(sql.Named("n", "5"))}, {q("n", 5)},
		{q(at), q(&at), q(at.Add(0)), q(at.In(time.FixedZone("UTC", 0)))}, {q(at.Add(1))},
		{q(at.In(time.FixedZone("", 3600)))}, {q(at.UnixNano())},
		{q(time.Time{})}, {q(time.Unix(1<<40, 0))}, {q(time.Unix(0, 0).UTC())}, {q(at.String())},
	}
	seen := map[string]int{}
	for i, line := range lines {
		want := keyOf(t, line[0].query, line[0].args...)
		for _, c := range line {
			if got := keyOf(t, c.query, c.args...); got != want {
				t.Errorf("%q %#v has another key than %#v", c.query, c.args, line[0].args)
			}
		}
		if j, ok := seen[want]; ok {
			t.Errorf("%q %#v and %q %#v share a key", lines[j][0].query, lines[j][0].args, line[0].query, line[0].args)
		}
		seen[want] = i
	}
}

// A time from time.Now has a monotonic reading. The reading must be neither in the key nor in the value for the
// driver.
func TestMonotonicReadingIsDropped(t *testing.T) {
	now := time.Now()
	q, err := newRequest("q", []any{now})
	if err != nil || strings.Contains(q.args[0].(time.Time).String(), "m=") ||
		keyOf(t, "q", now) != keyOf(t, "q", now.Round(0)) {
		t.Errorf("sent %v, %v", q.args, err)
	}
}

func TestKeyIsLegibleAndBounded(t *testing.T) {
	query := "  SELECT *\n\tFROM users u WHERE u.name = 'Bob ü' AND " + strings.Repeat("x", 1<<16)
	q, err := newRequest(query, []any{"secret"})
	if err != nil {
		t.Fatal(err)
	}
	get, all := q.key(firstRow), q.key(allRows)
	const front = "get:SELECT-*-FROM-users-u-WHERE-u.name-Bob-A:"
	if !strings.HasPrefix(get, front) || len(get) != len(front)+32 {
		t.Errorf("got %q", get)
	}
	if get[len(front):] == all[len(all)-32:] {
		t.Error("Get and Select share a hash")
	}
}

func FuzzKeys(f *testing.F) {
	f.Add("q", "a", "b", "q", "ab", "")
	f.Add("q\x00", "a", "", "q", "\x00a", "")
	f.Fuzz(func(t *testing.T, query1, a1, b1, query2, a2, b2 string) {
		for _, as := range []func(string) any{func(s string) any { return s }, func(s string) any { return []byte(s) }} {
			one, err1 := newRequest(query1, []any{as(a1), as(b1)})
			two, err2 := newRequest(query2, []any{as(a2), as(b2)})
			if err1 != nil || err2 != nil {
				continue
			}
			same := query1 == query2 && reflect.DeepEqual(one.args, two.args)
			if (one.key(allRows) == two.key(allRows)) != same {
				t.Errorf("%q and %q", one.args, two.args)
			}
			if single, err := newRequest(query1, []any{as(a1 + b1)}); err != nil || single.key(allRows) == one.key(allRows) {
				t.Error("one argument and two share a key")
			}
		}
	})
}
