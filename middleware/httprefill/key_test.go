package httprefill

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// A handler makes URLs from a field of the request, and does not say so in Vary. A client that sends the field must not
// poison the page for clients that do not send it, and these clients must not get the page of that client.
func TestFieldsThatHandlersMakeURLsFrom(t *testing.T) {
	for _, name := range []string{
		"Forwarded", "Front-End-Https", "X-Envoy-Original-Path", "X-Forwarded-Host", "X-Forwarded-Path",
		"X-Forwarded-Port", "X-Forwarded-Prefix", "X-Forwarded-Proto", "X-Forwarded-Protocol", "X-Forwarded-Scheme",
		"X-Forwarded-Server", "X-Forwarded-Ssl", "X-Forwarded-Uri", "X-Forwarded-Url", "X-HTTP-Host-Override", "X-Host",
		"X-Original-Host", "X-Script-Name", "X-Url-Scheme",
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{answer: func(w http.ResponseWriter, r *http.Request) {
					says("link to "+r.Header.Get(name), "Cache-Control: public, max-age=60")(w, r)
				}}
				h := cached(t, s, Config{})
				for _, value := range []string{"evil", "", "evil", "other", ""} {
					var fields []string
					if value != "" {
						fields = []string{name + ": " + value}
					}
					if w := ask(h, "GET", "/", fields...); w.Body.String() != "link to "+value {
						t.Errorf("with %q: %q", value, w.Body)
					}
				}
				if n := s.runs.Load(); n != 3 {
					t.Errorf("%d runs, want one per value", n)
				}
			})
		})
	}
}

// Two fields with the same value, and one field with two values, must have different keys.
func TestKeyedFieldsAreApart(t *testing.T) {
	seen := map[string]int{}
	for i, fields := range [][]string{
		{}, {"X-Host", "a"}, {"X-Original-Host", "a"}, {"X-Host", "a", "X-Original-Host", "a"}, {"X-Host", "aa"},
		{"X-Host", "a", "X-Host", "a"}, {"Forwarded", "a"}, {"X-Forwarded-Host", "a"},
	} {
		r := httptest.NewRequest("GET", "/", nil)
		for f := 0; f < len(fields); f += 2 {
			r.Header.Add(fields[f], fields[f+1])
		}
		if other, taken := seen[defaultKey(r)]; taken {
			t.Errorf("requests %d and %d have the same key", i, other)
		}
		seen[defaultKey(r)] = i
	}
}

// The handler must see the host as it is in the key, whatever the first client has written.
func TestTheHandlerSeesTheHostOfTheKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		h := cached(t, handlerFunc(func(w http.ResponseWriter, r *http.Request) {
			says("http://"+r.Host+"/", "Cache-Control: public, max-age=60")(w, r)
		}), Config{})
		for _, host := range []string{"GOOD.test", "good.test", "Good.Test"} {
			r := httptest.NewRequest("GET", "/", nil)
			r.Host = host
			w := httptest.NewRecorder()
			if h.ServeHTTP(w, r); w.Body.String() != "http://good.test/" || r.Host != host {
				t.Errorf("%s: %q, the request has %s", host, w.Body, r.Host)
			}
		}
	})
}

// Proxies in front of the nodes add X-Forwarded-Port or Forwarded, KeyHeaders and Key are set. An Invalidate with a
// request that knows nothing of that must remove all responses of the URL, on both nodes, and no other response. The
// Invalidate must also void the run that is under way.
func TestInvalidateFindsAllKeysOfAURL(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		s := &site{answer: func(w http.ResponseWriter, r *http.Request) {
			says("page", "Cache-Control: public, max-age=3600")(w, r)
		}}
		var caches []*Cache
		var nodes []http.Handler
		for range 2 {
			c, err := New(Config{
				Config: refill.Config{Shared: shared, Jitter: -1}, KeyHeaders: []string{"x-tenant"},
				Key: func(r *http.Request) string { return r.Header.Get("X-Shop") },
			})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			caches, nodes = append(caches, c), append(nodes, c.Middleware(s))
		}
		requests := [][]string{
			nil, {"X-Forwarded-Port: 443"}, {"Forwarded: for=a;proto=https"}, {"X-Forwarded-Proto: https"},
			{"X-Forwarded-Proto: https", "X-Forwarded-Port: 443"}, {"X-Tenant: a"}, {"X-Tenant: b"}, {"X-Shop: a"},
		}
		visit := func(url string) (runs int64) {
			before := s.runs.Load()
			for _, fields := range requests {
				for i := range 4 {
					ask(nodes[i%2], "GET", url, fields...)
				}
			}
			return s.runs.Load() - before
		}
		if a, b := visit("/a"), visit("/b"); a != 8 || b != 8 {
			t.Fatalf("%d and %d runs, want one per key", a, b)
		}
		if err := caches[0].Invalidate(t.Context(), httptest.NewRequest("POST", "/a", nil)); err != nil {
			t.Fatal(err)
		}
		if a, b := visit("/a"), visit("/b"); a != 8 || b != 0 {
			t.Errorf("%d and %d runs after Invalidate, want 8 and 0", a, b)
		}

		s.took = time.Second
		for _, fields := range requests {
			done := make(chan struct{})
			go func() { ask(nodes[0], "GET", "/c", fields...); close(done) }()
			time.Sleep(s.took / 2)
			if err := caches[1].Invalidate(t.Context(), httptest.NewRequest("POST", "/c", nil)); err != nil {
				t.Fatal(err)
			}
			<-done
		}
		s.took = 0
		if c := visit("/c"); c != 8 {
			t.Errorf("%d runs after Invalidate during a run, want 8: a response from before is served", c)
		}
	})
}

// The options of the key.
func TestKeyOptions(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{answer: func(w http.ResponseWriter, r *http.Request) {
			says(fmt.Sprint(r.Header["X-Tenant"], r.Header["X-Shop"]), "Cache-Control: public, max-age=60")(w, r)
		}}
		h := cached(t, s, Config{
			KeyHeaders: []string{"x-tenant"}, Key: func(r *http.Request) string { return r.Header.Get("X-Shop") },
		})
		for range 2 {
			for _, c := range []struct{ field, want string }{
				{"X-Tenant: 1", "[1] []"}, {"X-Tenant: 2", "[2] []"}, {"X-Shop: 1", "[] [1]"}, {"X-Other: 1", "[] []"},
			} {
				if w := ask(h, "GET", "/", c.field); w.Body.String() != c.want {
					t.Errorf("%s: %q", c.field, w.Body)
				}
			}
		}
		if n := s.runs.Load(); n != 4 {
			t.Errorf("%d runs", n)
		}
	})
}
