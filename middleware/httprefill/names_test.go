package httprefill

import (
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"
)

// net/http sends the fields of a response with the spelling that the handler has used. A field must forbid sharing in
// every spelling. Otherwise the second user would get the cookie of the first user.
func TestFieldNamesInAnySpelling(t *testing.T) {
	for name, value := range map[string]string{
		"set-cookie": "sid=1", "SET-COOKIE": "sid=1", "vary": "X-User", "cache-control": "private",
		"content-encoding": "gzip", "access-control-allow-origin": "https://a.example", "trailer": "X-Sum",
		"content-type": "text/event-stream",
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{}
				s.answer = func(w http.ResponseWriter, r *http.Request) {
					w.Header().Set("Cache-Control", "public, max-age=60")
					w.Header()[name] = []string{value}
					fmt.Fprint(w, "of ", r.Header.Get("X-User"))
				}
				h := cached(t, s, Config{})
				for _, user := range []string{"a", "b", "c"} {
					w := ask(h, "GET", "/", "X-User: "+user)
					if w.Body.String() != "of "+user || !reflect.DeepEqual(w.Header()[name], []string{value}) {
						t.Errorf("user %s got %q with %v", user, w.Body, w.Header())
					}
				}
			})
		})
	}
}

// A field in another spelling that forbids nothing is stored under its canonical name.
func TestStoredNamesAreCanonical(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{answer: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Cache-Control", "public, max-age=60")
			w.Header()["connection"] = []string{"x-hop"}
			w.Header()["x-HOP"] = []string{"1"}
			w.Header()["x-a"] = []string{"2"}
			w.Header()["X-A"] = []string{"1"}
			fmt.Fprint(w, "page")
		}}
		h := cached(t, s, Config{})
		ask(h, "GET", "/")
		got := ask(h, "GET", "/").Header()
		if s.runs.Load() != 1 || strings.Join(got["X-A"], " ") != "1 2" || got.Get("Connection")+got.Get("X-Hop") != "" {
			t.Errorf("%d runs, %v", s.runs.Load(), got)
		}
	})
}

// The fields of a response take memory in every process and in the store, so their length is bounded like the body.
func TestMaxHeader(t *testing.T) {
	for name, c := range map[string]struct {
		max  int
		add  func(h http.Header)
		runs int64
	}{
		"below the default":  {0, func(h http.Header) { h.Set("X-Long", strings.Repeat("x", 63<<10)) }, 1},
		"one long value":     {0, func(h http.Header) { h.Set("X-Long", strings.Repeat("x", 64<<10)) }, 2},
		"many empty values":  {0, func(h http.Header) { h["X"] = make([]string, 20_000) }, 2},
		"above the setting":  {100, func(h http.Header) { h.Set("X-Long", strings.Repeat("x", 100)) }, 2},
		"another, long name": {100, func(h http.Header) { h.Set("x"+strings.Repeat("y", 100), "") }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{answer: func(w http.ResponseWriter, r *http.Request) {
					c.add(w.Header())
					says("page", "Cache-Control: public, max-age=60")(w, r)
				}}
				h := cached(t, s, Config{MaxHeader: c.max})
				for range 2 {
					if w := ask(h, "GET", "/"); w.Body.String() != "page" || w.Header() == nil {
						t.Errorf("%q %v", w.Body, w.Header())
					}
				}
				if n := s.runs.Load(); n != c.runs {
					t.Errorf("%d runs, want %d", n, c.runs)
				}
			})
		})
	}
}
