package httprefill

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"
)

// fields returns a header with the fields "name: value".
func fields(lines ...string) http.Header {
	h := make(http.Header)
	for _, line := range lines {
		name, value, _ := strings.Cut(line, ": ")
		h.Add(name, value)
	}
	return h
}

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// RFC 9111, 3: which responses may be stored. Each of them says that it is fresh for 60 s.
func TestMayStore(t *testing.T) {
	for _, c := range []struct {
		section string
		status  int
		lines   []string
		want    kind
	}{
		{"3, final statuses", 199, nil, uncacheable},
		{"3, final statuses", 200, nil, shared},
		{"3, final statuses", 299, nil, shared},
		{"3, final statuses", 302, nil, shared},
		{"3, final statuses", 400, nil, shared},
		{"3, final statuses", 403, nil, shared},
		{"3, final statuses", 404, nil, shared},
		{"3, final statuses", 499, nil, shared},
		{"3, final statuses", 500, nil, shared},
		{"3, final statuses", 503, nil, shared},
		{"3, final statuses", 599, nil, shared},
		{"3, final statuses", 999, nil, shared},
		{"3, no 206 and 304", 206, nil, uncacheable},
		{"3, no 206 and 304", 304, nil, uncacheable},
		{"3, a 5xx that must not be stored is a failure", 503, []string{"Cache-Control: no-store"}, failed},
		{"5.2.2.3 must-understand", 200, []string{"Cache-Control: must-understand"}, shared},
		{"5.2.2.3 must-understand", 200, []string{"Cache-Control: no-store, must-understand"}, shared},
		{"5.2.2.3 must-understand", 404, []string{"Cache-Control: must-understand, no-store"}, shared},
		{"5.2.2.3 must-understand", 299, []string{"Cache-Control: must-understand"}, uncacheable},
		{"5.2.2.3 must-understand", 226, []string{"Cache-Control: no-store, must-understand"}, uncacheable},
		{"5.2.2.3 must-understand", 206, []string{"Cache-Control: must-understand"}, uncacheable},
		{"5.2.2.3 must-understand", 200, []string{"Cache-Control: no-store, must-understand, private"}, uncacheable},
		{"5.2.2.4 no-cache", 200, []string{"Cache-Control: no-cache"}, uncacheable},
		{"5.2.2.4 no-cache", 200, []string{"Cache-Control: NO-CACHE"}, uncacheable},
		{"5.2.2.4 no-cache", 200, []string{`Cache-Control: no-cache="a"`}, shared},
		{"5.2.2.4 no-cache", 200, []string{`Cache-Control: no-cache="a", no-cache`}, uncacheable},
		{"5.2.2.4 no-cache", 200, []string{`Cache-Control: no-cache=""`}, uncacheable},
		{"5.2.2.4 no-cache", 200, []string{`Cache-Control: no-cache="a b"`}, uncacheable},
		{"5.2.2.4 no-cache", 200, []string{`Cache-Control: no-cache=`}, uncacheable},
		{"5.2.2.5 no-store", 200, []string{"Cache-Control: no-store"}, uncacheable},
		{"5.2.2.5 no-store", 200, []string{"Cache-Control: no-store=x"}, uncacheable},
		{"5.2.2.7 private", 200, []string{"Cache-Control: private"}, uncacheable},
		{"5.2.2.7 private", 200, []string{"Cache-Control: x", "Cache-Control: private"}, uncacheable},
		{"5.2.2.7 private", 200, []string{`Cache-Control: private="a"`}, shared},
		{"5.2.2.7 private", 200, []string{`Cache-Control: private=a`}, shared},
		{"5.2 cannot be parsed", 200, []string{`Cache-Control: x="y`}, uncacheable},
		{"5.2 in a quoted string", 200, []string{`Cache-Control: x="a, private, no-store"`}, shared},
		{"5.2 unknown", 200, []string{"Cache-Control: immutable, x, y=z,,"}, shared},
		{"5.4 Pragma means nothing in a response", 200, []string{"Pragma: no-cache"}, shared},
		{"never", 200, []string{"Set-Cookie: a=b"}, uncacheable},
		{"never", 200, []string{"Set-Cookie: a=b", `Cache-Control: private="set-cookie"`}, uncacheable},
		{"never", 200, []string{"Vary: *"}, uncacheable},
		{"never", 200, []string{"Vary: Cookie", `Cache-Control: no-cache="vary"`}, uncacheable},
		{"never", 200, []string{"Content-Range: bytes 0-1/2"}, uncacheable},
		{"not yet", 200, []string{"Vary: Accept"}, uncacheable},
		{"not yet", 200, []string{"Content-Encoding: gzip"}, uncacheable},
		{"CORS", 200, []string{"Access-Control-Allow-Origin: https://a.example"}, uncacheable},
		{"CORS", 200, []string{"Access-Control-Allow-Origin: *"}, shared},
		{"streams", 200, []string{"Content-Type: Text/Event-Stream"}, uncacheable},
	} {
		v := judge(c.status, fields(append(c.lines, "Cache-Control: max-age=60")...), 0, terms{most: time.Hour}, noon, noon)
		if v.kind != c.want {
			t.Errorf("%s: %d %q: %v, want %v (%v)", c.section, c.status, c.lines, v.kind, c.want, v.why)
		}
	}
	for _, status := range []int{500, 503, 599} {
		if v := judge(status, nil, 0, terms{most: time.Hour}, noon, noon); v.kind != failed {
			t.Errorf("%d without a lifetime: %v", status, v.kind)
		}
	}
}

// RFC 9111, 3.5: responses to requests with credentials.
func TestMayReuse(t *testing.T) {
	const both = withCookie | withAuthorization
	for cc, want := range map[string]class{
		"max-age=60":                             0,
		"max-age=60, public":                     both,
		"s-maxage=60":                            both,
		"max-age=60, must-revalidate":            withAuthorization,
		"max-age=60, proxy-revalidate":           0,
		"no-store, must-understand, s-maxage=60": both,
	} {
		for c := class(0); c <= both; c++ {
			v := judge(200, fields("Cache-Control: "+cc), c, terms{most: time.Hour}, noon, noon)
			if may := c&^want == 0; (v.kind == shared) != may {
				t.Errorf("%s with credentials %b: %v", cc, c, v.kind)
			} else if may && (v.open != want || !mayReuse(v.open, c)) {
				t.Errorf("%s: open to %b, want %b", cc, v.open, want)
			}
		}
		if mayReuse(want, both) != (want == both) {
			t.Errorf("%s: reuse", cc)
		}
	}
}

// RFC 9111, 4.2.1, 4.2.3, 5.2.2 and 5.3: how long a response is fresh from now on. The run began at noon, and the
// header came 5 s later.
func TestHowLong(t *testing.T) {
	now := noon.Add(5 * time.Second)
	date := func(seconds int) string { return now.Add(time.Duration(seconds) * time.Second).Format(http.TimeFormat) }
	for _, c := range []struct {
		section string
		lines   []string
		want    int // seconds from the beginning of the run; 0 or less = not shared
	}{
		{"4.2.1 nothing said", nil, 0},
		{"4.2.1 public alone", []string{"Cache-Control: public"}, 0},
		{"4.2.1 order", []string{"Cache-Control: max-age=60, s-maxage=10", "Expires: " + date(99)}, 10},
		{"4.2.1 order", []string{"Cache-Control: s-maxage=0, max-age=60"}, 0},
		{"4.2.1 order", []string{"Cache-Control: max-age=0", "Expires: " + date(60)}, 0},
		{"4.2.1 order", []string{"Cache-Control: max-age=x", "Expires: " + date(60)}, 0},
		{"4.2.1 the first of duplicates", []string{"Cache-Control: max-age=60, max-age=1"}, 60},
		{"4.2.1 the first of duplicates", []string{"Cache-Control: max-age=1", "Cache-Control: max-age=60"}, 1},
		{"4.2.1 the first of duplicates", []string{"Cache-Control: max-age=x, max-age=60"}, 0},
		{"5.2 case", []string{"Cache-Control: MAX-AGE=60"}, 60},
		{"5.2 quoted", []string{`Cache-Control: max-age="60"`}, 60},
		{"5.2 quoted", []string{`Cache-Control: max-age="6\0"`}, 60},
		{"5.2 single quotes", []string{`Cache-Control: max-age='60'`}, 0},
		{"5.2 in a quoted string", []string{`Cache-Control: x="max-age=60"`}, 0},
		{"5.2 in a quoted string", []string{`Cache-Control: x="a\", max-age=99", max-age=60`}, 60},
		{"1.2.2 delta-seconds", []string{"Cache-Control: max-age=0060"}, 60},
		{"1.2.2 delta-seconds", []string{"Cache-Control: max-age=-1"}, 0},
		{"1.2.2 delta-seconds", []string{"Cache-Control: max-age=+60"}, 0},
		{"1.2.2 delta-seconds", []string{"Cache-Control: max-age=1.5"}, 0},
		{"1.2.2 delta-seconds", []string{"Cache-Control: max-age=60s"}, 0},
		{"1.2.2 delta-seconds", []string{"Cache-Control: max-age"}, 0},
		{"1.2.2 delta-seconds", []string{"Cache-Control: max-age="}, 0},
		{"1.2.2 delta-seconds", []string{"Cache-Control: max-age=99999999999999999999"}, 86400},
		{"5.1 Age", []string{"Cache-Control: max-age=60", "Age: 20"}, 40},
		{"5.1 Age", []string{"Cache-Control: max-age=60", "Age: 60"}, 0},
		{"5.1 Age", []string{"Cache-Control: max-age=60", "Age: 20, 0"}, 40},
		{"5.1 Age", []string{"Cache-Control: max-age=60", "Age: 20", "Age: 0"}, 40},
		{"5.1 Age", []string{"Cache-Control: max-age=60", "Age: abc"}, 60},
		{"5.1 Age", []string{"Cache-Control: max-age=60", "Age: -20"}, 60},
		{"5.1 Age", []string{"Cache-Control: max-age=60", "Age: 20.0"}, 60},
		{"5.1 Age", []string{"Cache-Control: max-age=2147483648", "Age: 2147483648"}, 0},
		{"5.1 Age", []string{"Cache-Control: max-age=2147483648", "Age: 99999999999999999999"}, 0},
		{"4.2.3 the run took 5 s until the header", []string{"Cache-Control: max-age=60", "Date: " + date(-5)}, 60},
		{"4.2.3 apparent age", []string{"Cache-Control: max-age=60", "Date: " + date(-25)}, 40},
		{"4.2.3 the larger age", []string{"Cache-Control: max-age=60", "Date: " + date(-25), "Age: 30"}, 30},
		{"4.2.3 the larger age", []string{"Cache-Control: max-age=60", "Date: " + date(-25), "Age: 10"}, 40},
		{"4.2.3 a Date ahead", []string{"Cache-Control: max-age=60", "Date: " + date(99)}, 60},
		{"5.3 Expires", []string{"Expires: " + date(60)}, 60},
		{"5.3 Expires", []string{"Expires: " + date(60), "Date: " + date(0)}, 60},
		{"5.3 Expires", []string{"Expires: " + date(60), "Date: " + date(20)}, 40},
		{"5.3 Expires", []string{"Expires: " + date(60), "Date: " + date(-25)}, 65}, // 85 s, of which 20 s are over
		{"5.3 Expires", []string{"Expires: " + date(60), "Age: 20"}, 40},
		{"5.3 Expires", []string{"Expires: " + date(-1)}, 0},
		{"5.3 Expires", []string{"Expires: 0"}, 0},
		{"5.3 Expires", []string{"Expires: -1"}, 0},
		{"5.3 two lines", []string{"Expires: " + date(60), "Expires: " + date(60)}, 0},
		{"RFC 9110, 6.6.1 a Date that is not valid", []string{"Expires: " + date(60), "Date: yesterday"}, 60},
		{"RFC 9110, 6.6.1 two Dates", []string{"Expires: " + date(60), "Date: " + date(-25), "Date: " + date(-5)}, 60},
	} {
		v := judge(200, fields(c.lines...), 0, terms{most: 24 * time.Hour}, noon, now)
		got := int((v.lifetime - v.age) / time.Second)
		if (v.kind == shared) != (c.want > 0) || v.kind == shared && got != c.want {
			t.Errorf("%s: %q: shared %v for %d s, want %d s (%v)", c.section, c.lines, v.kind == shared, got, c.want, v.why)
		}
	}
}

// RFC 9111, 4.2.4, and RFC 5861. Config says a StaleFor of 60 s and a StaleIfError of 600 s.
func TestHowLongStale(t *testing.T) {
	for cc, want := range map[string][2]int{ // in seconds: stale, and in place of an error
		"max-age=9":                            {60, 600},
		"max-age=9, stale-while-revalidate=0":  {0, 600},
		"max-age=9, stale-while-revalidate=5":  {5, 600},
		"max-age=9, stale-if-error=0":          {60, 0},
		"max-age=9, stale-if-error=5":          {60, 5},
		"max-age=9, stale-if-error=x":          {60, 0},
		"max-age=9, must-revalidate":           {0, 0},
		"max-age=9, proxy-revalidate":          {0, 0},
		"s-maxage=9":                           {0, 0},
		"s-maxage=9, stale-while-revalidate=5": {0, 0},
		"s-maxage=9, stale-if-error=5":         {0, 0},
		"max-age=9, must-revalidate, stale-while-revalidate=60, stale-if-error=60":  {0, 0},
		"max-age=9, proxy-revalidate, stale-while-revalidate=60, stale-if-error=60": {0, 0},
	} {
		terms := terms{most: time.Hour, staleFor: time.Minute, staleIfError: 10 * time.Minute}
		v := judge(200, fields("Cache-Control: "+cc), 0, terms, noon, noon)
		got := [2]int{int(v.staleFor.Seconds()), int(v.staleIfError.Seconds())}
		if v.kind != shared || got != want {
			t.Errorf("%s: %v, stale for %v, want %v", cc, v.kind, got, want)
		}
	}
}

// RFC 9111, 5.2.2.4 and 5.2.2.7: the fields that no-cache="…" and private="…" list reach the client that the handler
// ran for, but no other client.
func TestListedFieldsAreNotStored(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 10 * ms, answer: says("page", "X-User: 1", "X-Token: 2", "X-All: 3", "Content-Type: text/x",
			`Cache-Control: max-age=60, private="x-user", no-cache=" X-TOKEN ,x-none"`)}
		h := cached(t, s, Config{})
		owners := 0
		answers := all(5, func(int) *httptest.ResponseRecorder { return ask(h, "GET", "/") })
		for _, w := range append(answers, ask(h, "GET", "/")) {
			got := [3]string{w.Header().Get("X-User"), w.Header().Get("X-Token"), w.Header().Get("X-All")}
			switch got {
			case [3]string{"1", "2", "3"}:
				owners++
			case [3]string{"", "", "3"}:
			default:
				t.Errorf("%q", got)
			}
		}
		if n := s.runs.Load(); n != 1 || owners != 1 {
			t.Errorf("%d runs, %d clients got the fields; want 1 and 1", n, owners)
		}
	})
}

// A response with an unusual status, and an error that says how long it is fresh, are stored.
func TestAnyFinalStatusIsStored(t *testing.T) {
	for _, status := range []int{204, 302, 307, 403, 404, 451, 500, 503, 599, 799} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{answer: func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Cache-Control", "max-age=60")
					w.Header().Set("Location", "/there")
					w.WriteHeader(status)
					_, _ = w.Write([]byte("body"))
				}}
				h := cached(t, s, Config{})
				for range 3 {
					if w := ask(h, "GET", "/"); w.Code != status || w.Header().Get("Location") != "/there" {
						t.Errorf("%d %v", w.Code, w.Header())
					}
				}
				if n := s.runs.Load(); n != 1 {
					t.Errorf("%d runs, want 1", n)
				}
			})
		})
	}
}

func TestParseCacheControl(t *testing.T) {
	sec := func(n int64) seconds { return seconds{time.Duration(n) * time.Second, true} }
	for value, want := range map[string]cacheControl{
		``:                                     {},
		`max-age=1, max-age=2`:                 {maxAge: sec(1)},
		`Public,S-MaxAge = 5`:                  {public: true, sMaxAge: sec(5)},
		`private="a, max-age=5"`:               {private: true, drop: []string{"A"}},
		`private="a b, c"`:                     {private: true},
		`no-cache="x", no-cache=y`:             {drop: []string{"X", "Y"}},
		`no-cache="x", private, no-store`:      {drop: []string{"X"}, private: true, noStore: true},
		`ext="no-store", must-revalidate`:      {mustRevalidate: true},
		`ext="a\"b, private",proxy-revalidate`: {proxyRevalidate: true},
		`stale-while-revalidate=9,,`:           {staleWhileRevalidate: sec(9)},
		`stale-if-error=9, stale-if-error=8`:   {staleIfError: sec(9)},
		`max-age="5"`:                          {maxAge: sec(5)},
		`max-age="5`:                           {bad: true},
		`max-age="5"x`:                         {maxAge: sec(0)},
		`ext="open`:                            {bad: true},
		`immutable, max-age=9999999999`:        {maxAge: sec(1 << 31)},
		`must-understand, no-store`:            {mustUnderstand: true, noStore: true},
	} {
		if got := parseCacheControl([]string{value}); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", value, got, want)
		}
	}
}

func TestUnquote(t *testing.T) {
	for s, want := range map[string]string{
		``: ``, `a`: `a`, `"`: `"`, `""`: ``, `"a"`: `a`, `"a`: `"a`, `"a\"b"`: `a"b`, `"a\\"`: `a\`, `"\"`: `\`,
	} {
		if got := unquote(s); got != want {
			t.Errorf("%s: %q, want %q", s, got, want)
		}
	}
}
