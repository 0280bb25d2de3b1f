package sqlxrefill

import (
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"math"
	"math/big"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"
	"unique"

	"github.com/refill-go/refill"
)

type userID int64

type level string

type valuer struct{ v driver.Value }

func (v valuer) Value() (driver.Value, error) { return v.v, nil }

func keyOf(t testing.TB, query string, args ...any) string {
	t.Helper()
	q, err := newRequest(&none, query, args)
	if err != nil {
		t.Fatal(err)
	}
	return q.key(allRows)
}

// All calls in one element of lines must have the same key. Two elements of lines must not share a key, because a
// driver may tell their arguments apart.
func TestKeys(t *testing.T) {
	five, text, yes, half := 5, "5", true, 0.5
	five64 := int64(5)
	nowhere := (*int)(nil)
	at := time.Date(2024, 7, 1, 12, 0, 0, 1, time.UTC)
	type local struct{ A, B string }
	type call struct {
		query string
		args  []any
	}
	q := func(args ...any) call { return call{"q", args} }
	lines := [][]call{
		{q()}, {{"q ", nil}}, {{"Q", nil}},
		{q(5), q(int64(5)), q(&five), q(&five64)}, {q(int8(5))}, {q(int16(5))}, {q(int32(5))}, {q(uint(5))}, {q(uint8(5))},
		{q(uint64(5))}, {q(userID(5))}, {q(valuer{int64(5)})}, {q(valuer{5})}, {q(sql.NullInt64{Int64: 5, Valid: true})},
		{q(sql.NullInt64{Int64: 5})}, {q(sql.NullInt32{Int32: 5, Valid: true})}, {q(new(userID))}, {q(userID(0))},
		{q(text), q(&text)}, {q(level("5"))}, {q(valuer{"5"})}, {q([]byte("5"))}, {q(json.RawMessage("5"))}, {q(5.0)},
		{q(float32(5))}, {q(0.5), q(&half)}, {q(json.Number("5"))}, {q([1]byte{'5'})}, {q(time.Duration(5))},
		{q(nil)}, {q(nowhere)}, {q((*valuer)(nil))}, {q((*string)(nil))}, {q(sql.NullInt64{})}, {q(valuer{nil})},
		{q([]byte(nil))}, {q([]byte{})}, {q("")}, {q([]string(nil))}, {q([]string{})}, {q([]any{})},
		{q(json.RawMessage(nil))},
		{q(true), q(&yes)}, {q(valuer{true})}, {q(false)}, {q(1)}, {q(0)}, {q(math.Copysign(0, -1))}, {q(0.0)},
		{q(uint64(math.MaxUint64))}, {q(-1)}, {q(big.NewInt(5))}, {q(big.NewInt(-5))}, {q(*big.NewInt(5))},
		{q("a", "b")}, {q("ab")}, {q("a", "", "b")}, {q("ab", "")}, {q("", "ab")}, {q("b", "a")}, {{"qa", []any{"b"}}},
		{q([]string{"a", "b"})}, {q([]string{"ab"})}, {q([]string{"a"}, "b")}, {q([]any{"a", "b"})}, {q([2]string{"a", "b"})},
		{q(local{"a", "b"})}, {q(&local{"a", "b"})}, {q(local{"ab", ""})}, {q([]local{{"a", "b"}})}, {q([]any{local{"a",
			"b"}})},
		{q(struct{ A, B string }{"a", "b"})}, {q(struct {
			A string `json:"a"`
			B string
		}{"a", "b"})},
		{q(map[string]int{"a": 1, "b": 2}), q(map[string]int{"b": 2, "a": 1})}, {q(map[string]int{"a": 2, "b": 1})},
		{q(map[string]any{"a": 1, "b": 2})}, {q(map[string]int(nil))}, {q(map[string]int{})},
		{q([]int{1, 2}), q([]int{1, 2})}, {q([]int64{1, 2})}, {q([]int{12})}, {q([][]int{{1}, {2}})}, {q([][]int{{1, 2},
			{}})},
		{q([][]byte{{1}, {}})}, {q([][]byte{{1, 1}})}, {q([]*int{&five}), q([]*int{pointer(five)})}, {q([]*int{nil})},
		{q([]*int{nil, nil})},
		{q(sql.Named("n", 5)), q(sql.Named("n", &five))}, {q(sql.Named("m", 5))}, {q(sql.Named("n", "5"))}, {q("n", 5)},
		{q(at), q(at.Add(0)), q(at.In(time.FixedZone("UTC", 0)))}, {q(at.Add(1))}, {q(&at)}, {q(sql.NullTime{Time: at})},
		{q(at.In(time.FixedZone("", 3600)))}, {q(at.UnixNano())},
		{q(time.Time{})}, {q(time.Unix(1<<40, 0))}, {q(time.Unix(0, 0).UTC())}, {q(at.String())},
		{q(netip.MustParseAddr("10.0.0.1")), q(netip.AddrFrom4([4]byte{10, 0, 0, 1}))},
		{q(netip.MustParseAddr("::ffff:10.0.0.1"))},
		{q(netip.MustParseAddr("fe80::1%a"))}, {q(netip.MustParseAddr("fe80::1%b"))}, {q(netip.Addr{})},
		{q(netip.MustParsePrefix("10.0.0.1/8"))}, {q(netip.MustParsePrefix("10.0.0.1/9"))}, {q(netip.Prefix{})},
		{q(netip.MustParseAddrPort("10.0.0.1:8"))}, {q([4]byte{10, 0, 0, 1})}, {q(net.IPv4(10, 0, 0, 1))}, {q(complex(1, 2))},
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
	q, err := newRequest(&none, "q", []any{now})
	if err != nil || strings.Contains(q.args[0].(time.Time).String(), "m=") ||
		keyOf(t, "q", now) != keyOf(t, "q", now.Round(0)) {
		t.Errorf("sent %v, %v", q.args, err)
	}
}

func pointer[T any](v T) *T { return &v }

// hidden has all that it refers to in fields that are not exported.
type hidden struct {
	n    *int
	list []*big.Int
	at   *time.Time
	in   any
	zone *time.Location
	addr map[netip.Addr][]string
}

// The copy of an argument must equal the argument, and must share no memory with it.
func TestArgumentsAreCopiedDeeply(t *testing.T) {
	n, at := 5, time.Date(2024, 7, 1, 12, 0, 0, 1, time.UTC)
	make := func() []any {
		n, at := n, at
		addr := netip.MustParseAddr("fe80::1%a")
		return []any{
			&n, []byte("a"), []*int{&n, nil}, map[string][]int{"a": {1}}, [2][]string{{"a"}, nil}, json.RawMessage("{}"),
			&hidden{&n, []*big.Int{big.NewInt(7)}, &at, []any{&n}, time.Local, map[netip.Addr][]string{addr: {"x"}}},
			big.NewRat(1, 3), sql.Named("n", []int{1}), struct{ error }{}, []any{nil, 1, []any{"x"}}, &at,
		}
	}
	args := make()
	q, err := newRequest(&none, "q", args)
	if err != nil {
		t.Fatal(err)
	}
	*args[0].(*int) = 6
	args[1].([]byte)[0] = 'b'
	args[3].(map[string][]int)["a"][0] = 2
	args[4].([2][]string)[0][0] = "b"
	args[5].(json.RawMessage)[0] = '['
	h := args[6].(*hidden)
	h.list[0].SetInt64(8)
	*h.at = time.Time{}
	h.in.([]any)[0] = 0
	h.addr[netip.Addr{}] = nil
	args[7].(*big.Rat).SetInt64(4)
	args[8].(sql.NamedArg).Value.([]int)[0] = 9
	args[10].([]any)[2].([]any)[0] = 7
	*args[11].(*time.Time) = time.Time{}
	for i, want := range make() {
		if !reflect.DeepEqual(q.args[i], want) {
			t.Errorf("args[%d] is %#v, want %#v", i, q.args[i], want)
		}
	}
	again := keyOf(t, "q", make()...)
	if again != q.key(allRows) || again == keyOf(t, "q", args...) {
		t.Error("the key does not follow the values")
	}
}

// What is no value must be refused before the query runs, and the error must name it.
func TestArgumentsWithoutAnEncoding(t *testing.T) {
	loop := []any{nil}
	loop[0] = loop
	for want, arg := range map[string]any{
		"chan int":      make(chan int),
		"func()":        []any{func() {}},
		"levels deep":   loop,
		"unique.Handle": unique.Make("a"),
		"an option":     rewriter{},
		"sql.Out":       sql.Out{},
	} {
		_, err := newRequest(&none, "q", []any{1, arg})
		if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "args[1]") ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("want %q: got %v", want, err)
		}
	}
}

// rewriter has the method of pgx.QueryRewriter.
type rewriter struct{}

func (rewriter) RewriteQuery() {}

func TestKeyIsLegibleAndBounded(t *testing.T) {
	query := "  SELECT *\n\tFROM users u WHERE u.name = 'Bob ü' AND " + strings.Repeat("x", 1<<16)
	q, err := newRequest(&none, query, []any{"secret"})
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
			one, err1 := newRequest(&none, query1, []any{as(a1), as(b1)})
			two, err2 := newRequest(&none, query2, []any{as(a2), as(b2)})
			if err1 != nil || err2 != nil {
				continue
			}
			same := query1 == query2 && reflect.DeepEqual(one.args, two.args)
			if (one.key(allRows) == two.key(allRows)) != same {
				t.Errorf("%q and %q", one.args, two.args)
			}
			if single, err := newRequest(&none, query1,
				[]any{as(a1 + b1)}); err != nil || single.key(allRows) == one.key(allRows) {
				t.Error("one argument and two share a key")
			}
		}
	})
}
