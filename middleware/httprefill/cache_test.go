package httprefill

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

const ms = time.Millisecond

// site is a handler. Each run takes the time took. runs counts the runs, and most is the largest number of runs at
// once.
type site struct {
	took   time.Duration
	runs   atomic.Int64
	now    atomic.Int64
	most   atomic.Int64
	answer func(w http.ResponseWriter, r *http.Request)
}

func (s *site) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.runs.Add(1)
	n := s.now.Add(1)
	defer s.now.Add(-1)
	for m := s.most.Load(); n > m && !s.most.CompareAndSwap(m, n); m = s.most.Load() {
	}
	select {
	case <-time.After(s.took):
	case <-r.Context().Done():
		return
	}
	s.answer(w, r)
}

// says returns a handler function that answers with this body and the header fields "name: value".
func says(body string, fields ...string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		for _, f := range fields {
			name, value, _ := strings.Cut(f, ": ")
			w.Header().Add(name, value)
		}
		fmt.Fprint(w, body)
	}
}

func cached(t *testing.T, next http.Handler, cfg Config) http.Handler {
	t.Helper()
	cfg.Jitter = -1
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c.Middleware(next)
}

// ask sends a request with the header fields "name: value".
func ask(h http.Handler, method, url string, fields ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, url, nil)
	for _, f := range fields {
		name, value, _ := strings.Cut(f, ": ")
		r.Header.Add(name, value)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

func TestOneRunPerExpiryInTheFleet(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 100 * ms}
		s.answer = func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Cache-Control", "public, max-age=10")
			fmt.Fprint(w, "page ", s.runs.Load())
		}
		shared := memory.New()
		nodes := []http.Handler{
			cached(t, s, Config{Config: refill.Config{Shared: shared}}),
			cached(t, s, Config{Config: refill.Config{Shared: shared}}),
		}
		for round := 1; round <= 2; round++ {
			var wg sync.WaitGroup
			for i := range 50 {
				wg.Go(func() {
					w := ask(nodes[i%2], "GET", "http://a.example/p?x=1")
					if w.Code != 200 || w.Body.String() != fmt.Sprint("page ", round) {
						t.Errorf("%d %q in round %d", w.Code, w.Body, round)
					}
				})
			}
			wg.Wait()
			if n := s.runs.Load(); n != int64(round) {
				t.Errorf("%d runs in round %d", n, round)
			}
			time.Sleep(5 * time.Second)
			if age := ask(nodes[1], "GET", "http://a.example/p?x=1").Header().Get("Age"); age != "5" {
				t.Errorf("Age: %s after 5 s", age)
			}
			time.Sleep(6 * time.Second)
		}
	})
}

func TestStaleWhileRevalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 100 * ms}
		s.answer = func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Cache-Control", "max-age=10, stale-while-revalidate=60")
			fmt.Fprint(w, s.runs.Load())
		}
		h := cached(t, s, Config{})
		ask(h, "GET", "/")
		time.Sleep(20 * time.Second)
		began := time.Now()
		if w := ask(h, "GET", "/"); w.Body.String() != "1" || time.Since(began) != 0 {
			t.Errorf("%q after %v, want the stale page at once", w.Body, time.Since(began))
		}
		time.Sleep(time.Second)
		if w := ask(h, "GET", "/"); w.Body.String() != "2" {
			t.Errorf("%q, want the refreshed page", w.Body)
		}
	})
}

// 20 users ask at once for a page that must not be shared. Each user must get the page made for that user, and the
// requests must not queue.
func TestNoUserGetsTheResponseOfAnother(t *testing.T) {
	for name, fields := range map[string][]string{
		"private":         {"Cache-Control: private, max-age=60"},
		"no-store":        {"Cache-Control: no-store"},
		"no-cache":        {"Cache-Control: no-cache"},
		"nothing said":    nil,
		"Set-Cookie":      {"Cache-Control: public, max-age=60", "Set-Cookie: session=1"},
		"Vary":            {"Cache-Control: public, max-age=60", "Vary: X-User"},
		"CORS":            {"Cache-Control: public, max-age=60", "Access-Control-Allow-Origin: https://a.example"},
		"max-age=0":       {"Cache-Control: public, max-age=0"},
		"garbage":         {`Cache-Control: max-age="60`},
		"expires in past": {"Expires: Thu, 01 Jan 1998 00:00:00 GMT"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{took: 100 * ms}
				s.answer = func(w http.ResponseWriter, r *http.Request) { says("of "+r.Header.Get("X-User"), fields...)(w, r) }
				h := cached(t, s, Config{})
				for range 2 {
					began := time.Now()
					var wg sync.WaitGroup
					for i := range 20 {
						wg.Go(func() {
							user := fmt.Sprint("user", i)
							if w := ask(h, "GET", "/me", "X-User: "+user); w.Code != 200 || w.Body.String() != "of "+user {
								t.Errorf("%s got %d %q", user, w.Code, w.Body)
							}
						})
					}
					wg.Wait()
					if took := time.Since(began); took > 200*ms {
						t.Errorf("took %v: they queued", took)
					}
				}
				if n := s.runs.Load(); n != 40 {
					t.Errorf("%d runs for 40 requests", n)
				}
			})
		})
	}
}

func TestCredentials(t *testing.T) {
	for _, c := range []struct {
		cacheControl, credentials string
		shared                    bool
	}{
		{"max-age=60", "Authorization: Bearer 1", false},
		{"max-age=60", "Cookie: session=1", false},
		{"max-age=60, public", "Authorization: Bearer 1", true},
		{"s-maxage=60", "Authorization: Bearer 1", true},
		{"max-age=60, must-revalidate", "Authorization: Bearer 1", true},
		{"max-age=60, must-revalidate", "Cookie: session=1", false},
		{"max-age=60, public", "Cookie: session=1", true},
	} {
		t.Run(c.cacheControl+" "+c.credentials, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{answer: says("body", "Cache-Control: "+c.cacheControl)}
				h := cached(t, s, Config{})
				ask(h, "GET", "/", c.credentials)
				ask(h, "GET", "/")                // without credentials
				ask(h, "GET", "/", c.credentials) // with credentials again
				want := int64(3)
				if c.shared {
					want = 1
				}
				if n := s.runs.Load(); n != want {
					t.Errorf("%d runs, want %d", n, want)
				}
			})
		})
	}
}

func TestRequestsThatBypassTheCache(t *testing.T) {
	for _, c := range []struct{ method, field string }{
		{"POST", ""}, {"PUT", ""}, {"DELETE", ""}, {"OPTIONS", ""}, {"M-SEARCH", ""},
		{"GET", "Range: bytes=0-1"}, {"GET", "Upgrade: websocket"}, {"GET", "Accept: text/event-stream"},
		{"GET", "If-Match: \"a\""}, {"GET", "X-Http-Method-Override: DELETE"}, {"GET", "X-Original-Url: /admin"},
	} {
		t.Run(c.method+" "+c.field, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var seen http.ResponseWriter
				s := &site{}
				s.answer = func(w http.ResponseWriter, r *http.Request) {
					seen = w
					says("body", "Cache-Control: public, max-age=60")(w, r)
				}
				h := cached(t, s, Config{})
				for range 2 {
					if w := ask(h, c.method, "/", c.field); seen != w {
						t.Errorf("the handler got a %T, not the request's own writer", seen)
					}
				}
				if n := s.runs.Load(); n != 2 {
					t.Errorf("%d runs", n)
				}
			})
		})
	}
}

func TestTheLeadersClientLeaves(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: time.Second, answer: says("page", "Cache-Control: public, max-age=60")}
		h := cached(t, s, Config{})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil).WithContext(ctx)) })
		time.Sleep(100 * ms)
		for range 10 {
			wg.Go(func() {
				if w := ask(h, "GET", "/"); w.Code != 200 || w.Body.String() != "page" {
					t.Errorf("%d %q", w.Code, w.Body)
				}
			})
		}
		time.Sleep(100 * ms)
		cancel()
		wg.Wait()
		if n := s.runs.Load(); n != 1 {
			t.Errorf("%d runs, want 1", n)
		}
	})
}

// slowWriter sends each piece that reaches the client to pieces, and waits until the test has read the piece.
type slowWriter struct {
	header http.Header
	pieces chan string
}

func (w *slowWriter) Header() http.Header { return w.header }
func (w *slowWriter) WriteHeader(int)     {}
func (w *slowWriter) Flush()              { w.pieces <- "flush" }
func (w *slowWriter) Write(b []byte) (int, error) {
	w.pieces <- string(b)
	return len(b), nil
}

// A response that is not to be shared must stream: its first event reaches the client while the handler is still
// writing.
func TestStreaming(t *testing.T) {
	bubble(t, func(t *testing.T) {
		next := make(chan string)
		h := cached(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for event := range next {
				fmt.Fprint(w, event)
				w.(http.Flusher).Flush()
			}
		}), Config{})
		w := &slowWriter{header: make(http.Header), pieces: make(chan string)}
		done := make(chan struct{})
		go func() {
			defer close(done)
			h.ServeHTTP(w, httptest.NewRequest("GET", "/events", nil))
		}()
		for _, event := range []string{"one", "two"} {
			next <- event
			for _, want := range []string{event, "flush"} {
				if got := <-w.pieces; got != want {
					t.Errorf("got %q, want %q", got, want)
				}
			}
		}
		close(next)
		<-done
	})
}

func TestALargeBodyStreamsAndIsNotShared(t *testing.T) {
	bubble(t, func(t *testing.T) {
		body := strings.Repeat("x", 1000)
		s := &site{took: 10 * ms}
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Cache-Control", "public, max-age=60")
			for range 10 {
				fmt.Fprint(w, body)
			}
		}
		h := cached(t, s, Config{MaxBody: 5000})
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() {
				if w := ask(h, "GET", "/"); w.Body.Len() != 10_000 {
					t.Errorf("%d bytes", w.Body.Len())
				}
			})
		}
		wg.Wait()
		if n := s.runs.Load(); n != 5 {
			t.Errorf("%d runs for 5 requests", n)
		}
	})
}

// The handler fails one minute after the end of a response's life, and Config.StaleIfError is one hour. Only some
// responses may be served then.
func TestStaleIfError(t *testing.T) {
	for cc, stale := range map[string]bool{
		"max-age=10":                       true,
		"max-age=10, stale-if-error=61":    true,
		"max-age=10, stale-if-error=20":    false,
		"max-age=10, stale-if-error=0":     false,
		"max-age=10, must-revalidate":      false,
		"max-age=10, proxy-revalidate":     false,
		"s-maxage=10":                      false,
		"s-maxage=10, stale-if-error=3600": false,
	} {
		t.Run(cc, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var down atomic.Bool
				s := &site{}
				s.answer = func(w http.ResponseWriter, r *http.Request) {
					if down.Load() {
						http.Error(w, "down", http.StatusInternalServerError)
						return
					}
					says("page", "Cache-Control: public, "+cc)(w, r)
				}
				h := cached(t, s, Config{Config: refill.Config{StaleIfError: time.Hour}})
				ask(h, "GET", "/")
				down.Store(true)
				time.Sleep(time.Minute)
				want := "down\n"
				if stale {
					want = "page"
				}
				if w := ask(h, "GET", "/"); w.Body.String() != want {
					t.Errorf("%d %q, want %q", w.Code, w.Body, want)
				}
			})
		})
	}
}

func TestHeadAndConditions(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{}
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("If-None-Match") != "" {
				t.Error("the handler saw the condition of one client")
			}
			says("page", "Cache-Control: public, max-age=60", `ETag: "v1"`, "Last-Modified: Fri, 20 Nov 2026 10:00:00 GMT")(w, r)
		}
		h := cached(t, s, Config{})
		if w := ask(h, "HEAD", "/"); w.Code != 200 { // nothing is stored: the handler answers
			t.Errorf("HEAD: %d", w.Code)
		}
		if w := ask(h, "GET", "/", `If-None-Match: "other", W/"v1"`); w.Code != 304 || w.Body.Len() > 0 {
			t.Errorf("%d %q", w.Code, w.Body)
		}
		for field, want := range map[string]int{
			`If-None-Match: "v2"`: 200, `If-None-Match: *`: 304,
			"If-Modified-Since: Fri, 20 Nov 2026 10:00:00 GMT": 200 + 104,
			"If-Modified-Since: Fri, 20 Nov 2026 09:00:00 GMT": 200,
			"If-Modified-Since: yesterday":                     200,
		} {
			if w := ask(h, "GET", "/", field); w.Code != want {
				t.Errorf("%s: %d, want %d", field, w.Code, want)
			}
		}
		w := ask(h, "HEAD", "/")
		if w.Code != 200 || w.Body.Len() > 0 || w.Header().Get("Content-Length") != "4" || w.Header().Get("Age") == "" {
			t.Errorf("HEAD from the cache: %d %q %v", w.Code, w.Body, w.Header())
		}
		if w := ask(h, "GET", "/"); w.Body.String() != "page" {
			t.Errorf("GET after HEAD: %q", w.Body)
		}
		if n := s.runs.Load(); n != 2 {
			t.Errorf("%d runs, want those of the first HEAD and GET", n)
		}
	})
}

func TestInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{}
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			says(fmt.Sprint(s.runs.Load()), "Cache-Control: public, max-age=60")(w, r)
		}
		c, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		h := c.Middleware(s)
		ask(h, "GET", "http://shop.example/p/1?a=b")
		ask(h, "GET", "http://shop.example/p/2")
		r, err := http.NewRequest("GET", "https://Shop.example/p/1?a=b", nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Invalidate(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		if w := ask(h, "GET", "http://shop.example/p/1?a=b"); w.Body.String() != "3" {
			t.Errorf("%q after Invalidate", w.Body)
		}
		if w := ask(h, "GET", "http://shop.example/p/2"); w.Body.String() != "2" {
			t.Errorf("%q: another page was dropped", w.Body)
		}
		if err := errors.Join(c.Invalidate(t.Context()), c.Close()); err != nil {
			t.Error(err)
		}
		if w := ask(h, "GET", "http://shop.example/p/2"); w.Code != 200 || w.Body.String() != "4" {
			t.Errorf("%d %q after Close, want the handler's own", w.Code, w.Body)
		}
	})
}

func defaultKey(r *http.Request) string {
	key, _ := newKeyer(nil, nil).of(r)
	return key
}

func TestKeys(t *testing.T) {
	seen := map[string]string{}
	for _, url := range []string{
		"http://a.example/", "http://b.example/", "http://a.example/A", "http://a.example/a", "http://a.example/a/",
		"http://a.example/a?", "http://a.example/a?x=1", "http://a.example/a?x=2", "http://a.example/a?x=1&y=2",
		"http://a.example/a?y=2&x=1", "http://a.example/a%2Fb", "http://a.example/a/b", "http://a.example:8080/",
		"http://a.example/" + strings.Repeat("x", 300), "http://a.example/" + strings.Repeat("x", 301),
	} {
		key := defaultKey(httptest.NewRequest("GET", url, nil))
		if other, taken := seen[key]; taken {
			t.Errorf("%s and %s share a key", url, other)
		}
		if len(key) > maxKey+1 {
			t.Errorf("%d bytes for %s", len(key), url)
		}
		seen[key] = url
	}
	upper := httptest.NewRequest("GET", "http://A.Example/", nil)
	lower := httptest.NewRequest("GET", "http://a.example/", nil)
	if defaultKey(upper) != defaultKey(lower) {
		t.Error("the case of the host makes two keys")
	}
	poisoned := httptest.NewRequest("GET", "http://a.example/", nil)
	poisoned.Header.Set("X-Forwarded-Host", "evil.example")
	if seen[defaultKey(poisoned)] != "" {
		t.Error("X-Forwarded-Host is not in the key")
	}
}

func TestBadConfig(t *testing.T) {
	for field, cfg := range map[string]Config{
		"WrapCodec": {WrapCodec: func(refill.Codec) refill.Codec { return nil }},
		"Codec":     {Config: refill.Config{Codec: codec{}}}, "MaxBody": {MaxBody: -1}, "name": {Name: "a:b"},
		"KeyHeaders": {KeyHeaders: []string{"X-A", "a b"}},
		"MaxHeader":  {MaxHeader: -1}, "StaleFor": {Config: refill.Config{StaleFor: -1}},
	} {
		if _, err := New(cfg); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func FuzzCodec(f *testing.F) {
	good, err := codec{}.Marshal(&response{
		status: 200, header: http.Header{"A": {"1", "caf\xe9"}, "B": {""}}, born: time.UnixMicro(1_700_000_000_000_000),
		lifetime: time.Minute, spare: time.Hour, pattern: "/", open: withCookie, body: []byte("body"),
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		var first, second *response
		if (codec{}).Unmarshal(data, &first) != nil {
			return
		}
		again, err := codec{}.Marshal(first)
		if err != nil {
			t.Fatal(err)
		}
		if err := (codec{}).Unmarshal(again, &second); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(first, second) {
			t.Errorf("%+v became %+v", first, second)
		}
	})
}
