package httprefill

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

func handlerFunc(f http.HandlerFunc) http.Handler { return f }

// all sends n requests at once and returns their answers.
func all(n int, send func(i int) *httptest.ResponseRecorder) []*httptest.ResponseRecorder {
	answers := make([]*httptest.ResponseRecorder, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { answers[i] = send(i) })
	}
	wg.Wait()
	return answers
}

// A run of the handler takes longer than the lifetime of its response, and must-revalidate forbids stale responses.
// The handler must still run only once, and all requests that waited must get the response.
func TestALoadLongerThanTheLifetimeIsOne(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 3 * time.Second, answer: says("page", "Cache-Control: public, max-age=1, must-revalidate")}
		shared := memory.New()
		cfg := Config{Config: refill.Config{Shared: shared, StaleIfError: time.Hour}}
		nodes := []http.Handler{cached(t, s, cfg), cached(t, s, cfg)}
		for _, w := range all(50, func(i int) *httptest.ResponseRecorder { return ask(nodes[i%2], "GET", "/") }) {
			if w.Code != 200 || w.Body.String() != "page" {
				t.Errorf("%d %q", w.Code, w.Body)
			}
		}
		if n := s.runs.Load(); n != 1 {
			t.Errorf("%d runs, want 1", n)
		}
	})
}

// While a page is private, its requests must run the handler in parallel. Once the page may be shared, the next
// request must fill the cache.
func TestPassMarks(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var open atomic.Bool
		s := &site{took: time.Second}
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Cache-Control", "private, max-age=60")
			if open.Load() {
				w.Header().Set("Cache-Control", "max-age=60")
			}
			fmt.Fprint(w, "page")
		}
		inner := cached(t, s, Config{})
		h := handlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Vary", "Origin") // a field of an outer middleware must not count
			inner.ServeHTTP(w, r)
		})
		ask(h, "GET", "/")
		for range 10 { // in total longer than a pass mark lasts
			s.most.Store(0)
			all(3, func(int) *httptest.ResponseRecorder { return ask(h, "GET", "/") })
			if n := s.most.Load(); n != 3 {
				t.Fatalf("%d at once, want 3", n)
			}
			time.Sleep(8 * time.Second)
		}
		open.Store(true)
		ask(h, "GET", "/") // is collected; its response is stored, and drops the pass mark
		n := s.runs.Load()
		all(5, func(int) *httptest.ResponseRecorder { return ask(h, "GET", "/") })
		if got := s.runs.Load() - n; got != 0 {
			t.Errorf("%d runs for 5 requests, want 0", got)
		}

		open.Store(false)
		time.Sleep(time.Minute) // the page and the pass marks have expired
		ask(h, "GET", "/")
		time.Sleep(passFor)
		n = s.runs.Load()
		began := time.Now()
		all(3, func(int) *httptest.ResponseRecorder { return ask(h, "GET", "/") })
		if took := time.Since(began); took != 2*s.took || s.runs.Load() != n+3 {
			t.Errorf("%d runs in %v; want one first, then the two others at once", s.runs.Load()-n, took)
		}
	})
}

// The pages of a site are private for users with a cookie, and shared for clients without a cookie. A user must get
// only pages made for that user. A private refresh must cost the clients without a cookie one run at most.
func TestLoggedInAndAnonymous(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 10 * ms}
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			user := r.Header.Get("Cookie")
			w.Header().Set("Cache-Control", "max-age=10, stale-while-revalidate=60")
			if user != "" {
				w.Header().Set("Cache-Control", "private, max-age=10")
			}
			fmt.Fprint(w, "page of ", user)
		}
		h := cached(t, s, Config{})
		burst := func(cookie bool) {
			all(20, func(i int) *httptest.ResponseRecorder {
				user, fields := "", []string(nil)
				if cookie {
					user = fmt.Sprint("user=", i)
					fields = []string{"Cookie: " + user}
				}
				w := ask(h, "GET", "/", fields...)
				if w.Code != 200 || w.Body.String() != "page of "+user {
					t.Errorf("%q got %d %q", user, w.Code, w.Body)
				}
				return w
			})
		}
		burst(false)
		burst(true)
		time.Sleep(20 * time.Second) // now the pages are stale
		burst(true)                  // one of these requests begins a refresh, which is private
		n := s.runs.Load()
		burst(false)
		time.Sleep(time.Second)
		burst(false)
		time.Sleep(time.Second)
		burst(false)
		if got := s.runs.Load() - n; got != 1 {
			t.Errorf("%d runs for requests without a cookie, want 1: the refresh", got)
		}
	})
}

// A background refresh turns out private. No client may get its response, and the handler's Write must return an
// error.
func TestAPrivateRefreshIsDropped(t *testing.T) {
	bubble(t, func(t *testing.T) {
		gone := make(chan error, 1)
		s := &site{}
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			if s.runs.Load() == 1 {
				says("page", "Cache-Control: max-age=10, stale-while-revalidate=60")(w, r)
				return
			}
			w.Header().Set("Cache-Control", "private")
			_, err := io.WriteString(w, "secret")
			<-r.Context().Done()
			gone <- err
		}
		h := cached(t, s, Config{})
		ask(h, "GET", "/")
		time.Sleep(11 * time.Second)
		if w := ask(h, "GET", "/"); w.Body.String() != "page" {
			t.Errorf("%q, want the stale page", w.Body)
		}
		if err := <-gone; !errors.Is(err, errGone) {
			t.Errorf("Write: %v", err)
		}
	})
}

func TestGoexitIsAnAbort(t *testing.T) {
	bubble(t, func(t *testing.T) {
		h := cached(t, handlerFunc(func(http.ResponseWriter, *http.Request) { runtime.Goexit() }), Config{})
		defer func() {
			if p := recover(); p != http.ErrAbortHandler {
				t.Errorf("panic %v", p)
			}
		}()
		ask(h, "GET", "/")
	})
}

// A handler panics once. Another page must work at once, and so must the page that panicked.
func TestAPanicHarmsNoOtherPage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{}
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Cache-Control", "max-age=60")
			fmt.Fprint(w, "half a ")
			if s.runs.Load() == 1 {
				panic("ouch")
			}
			fmt.Fprint(w, "page")
		}
		var events []refill.Event
		h := cached(t, s, Config{Config: refill.Config{OnEvent: func(e refill.Event) {
			if e.Kind == refill.EventLoadFailed {
				events = append(events, e)
			}
		}}})
		func() {
			defer func() {
				if p := recover(); p != "ouch" {
					t.Errorf("panic %v", p)
				}
			}()
			ask(h, "GET", "/")
		}()
		if w := ask(h, "GET", "/other"); w.Body.String() != "half a page" {
			t.Errorf("%q", w.Body)
		}
		if w := ask(h, "GET", "/"); w.Body.String() != "half a page" {
			t.Errorf("%q", w.Body)
		}
		if len(events) != 1 || !strings.Contains(events[0].Err.Error(), "serve_test.go") {
			t.Errorf("events %v: want one with the handler's stack", events)
		}
	})
}

// An outer middleware sets header fields before the cache answers. These fields must reach the client and must not
// be stored.
func TestOuterHeader(t *testing.T) {
	for _, cc := range []string{"private", "public, max-age=60"} {
		t.Run(cc, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				inner := cached(t, handlerFunc(func(w http.ResponseWriter, r *http.Request) {
					w.Header().Set("Server", "inner")
					says("page", "Cache-Control: "+cc)(w, r)
					if cc == "private" {
						w.Header().Add("Set-Cookie", "too=late")
					}
				}), Config{})
				for i := range 3 {
					w := httptest.NewRecorder()
					id := fmt.Sprint(i)
					w.Header().Set("X-Request-Id", id)
					w.Header().Set("Set-Cookie", "outer="+id)
					w.Header().Set("Server", "outer")
					inner.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
					h := w.Result().Header
					if h.Get("X-Request-Id") != id || h.Get("Set-Cookie") != "outer="+id || len(h["Set-Cookie"]) != 1 ||
						h.Get("Server") != "inner" {
						t.Errorf("request %d: %v", i, h)
					}
				}
			})
		})
	}
}

func TestStoredHeader(t *testing.T) {
	bubble(t, func(t *testing.T) {
		h := cached(t, handlerFunc(says("<html>", "Cache-Control: public, max-age=60", "Connection: x-hop, close", "X-Hop: 1",
			"Keep-Alive: 5", "X-End: 1", "Age: 7", "Link: a", "Link: b", "Cache-Status: origin; hit")), Config{})
		ask(h, "GET", "/")
		date := time.Now().UTC().Format(http.TimeFormat)
		time.Sleep(3 * time.Second)
		got := ask(h, "GET", "/").Result().Header
		for name, want := range map[string]string{
			"Connection": "", "X-Hop": "", "Keep-Alive": "", "X-End": "1", "Age": "10", "Date": date, "Link": "a|b",
			"Content-Length": "6", "Content-Type": "text/html; charset=utf-8",
			"Cache-Status": "origin; hit|refill; hit; ttl=50",
		} {
			if have := strings.Join(got[name], "|"); have != want {
				t.Errorf("%s: %q, want %q", name, have, want)
			}
		}
		miss := ask(h, "GET", "/other").Header()
		if miss.Get("Cache-Status") != "origin; hit" || len(miss["Cache-Status"]) != 2 {
			t.Errorf("Cache-Status of a miss: %q", miss["Cache-Status"])
		}
	})
}

// The context of a request ends while the handler runs, and the handler returns without an answer. The client must
// get 504 after a deadline and 503 after a cancel, not an empty 200.
func TestContextOfTheRequestEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 5 * time.Second, answer: says("page", "Cache-Control: max-age=60")}
		h := cached(t, s, Config{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/", nil).WithContext(ctx))
		if w.Code != 504 {
			t.Errorf("after a deadline: %d", w.Code)
		}
		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		w = httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/", nil).WithContext(ctx))
		if w.Code != 503 {
			t.Errorf("after a cancel: %d", w.Code)
		}
	})
}

// silentStore is a store whose Get and Acquire fail.
type silentStore struct{ driver.Store }

var errNoAnswer = errors.New("no answer")

func (silentStore) Get(context.Context, string) ([]byte, error) { return nil, errNoAnswer }

func (silentStore) Acquire(context.Context, driver.AcquireRequest) (driver.AcquireResult, error) {
	return driver.AcquireResult{}, errNoAnswer
}

func TestOverload(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 5 * time.Second, answer: says("page", "Cache-Control: max-age=60")}
		h := cached(t, s, Config{Config: refill.Config{Shared: silentStore{memory.New()}, MaxLoads: 1}})
		var wg sync.WaitGroup
		wg.Go(func() {
			if w := ask(h, "GET", "/1"); w.Code != 200 {
				t.Errorf("%d", w.Code)
			}
		})
		synctest.Wait()
		if w := ask(h, "GET", "/2"); w.Code != 503 || w.Header().Get("Retry-After") != "1" {
			t.Errorf("beyond MaxLoads: %d %v", w.Code, w.Header())
		}
		wg.Wait()
	})
}

// Two handlers behind two StripPrefix see the same URL. Each must get its own responses.
func TestRewrittenURLsHaveKeysOfTheirOwn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		mux := http.NewServeMux()
		for _, name := range []string{"users", "orders"} {
			page := handlerFunc(says(name, "Cache-Control: public, max-age=60"))
			mux.Handle("/"+name+"/", http.StripPrefix("/"+name, c.Middleware(page)))
		}
		for range 2 {
			for _, name := range []string{"users", "orders"} {
				if w := ask(mux, "GET", "/"+name+"/1"); w.Body.String() != name {
					t.Errorf("/%s/1 got %q", name, w.Body)
				}
			}
		}
	})
}

// A request target in absolute form has the same key as the usual form. So the handler must see the usual form.
func TestAbsoluteForm(t *testing.T) {
	bubble(t, func(t *testing.T) {
		h := cached(t, handlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Cache-Control", "public, max-age=60")
			fmt.Fprint(w, r.Host, " ", r.URL, " ", r.RequestURI)
		}), Config{})
		for _, url := range []string{"http://a.example/p?x=%2F", "https://a.example/p?x=%2F"} {
			r := httptest.NewRequest("GET", url, nil)
			r.TLS = nil // the URL says https, but the connection has no TLS
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if got, want := w.Body.String(), "a.example /p?x=%2F /p?x=%2F"; got != want {
				t.Errorf("%s: %q, want %q", url, got, want)
			}
		}
	})
}

// The tests below run over real connections.

func server(t *testing.T, next http.HandlerFunc) *httptest.Server {
	t.Helper()
	srv := httptest.NewServer(cached(t, next, Config{MaxBody: 1 << 10}))
	t.Cleanup(srv.Close)
	return srv
}

func get(t *testing.T, srv *httptest.Server, path string) *http.Response {
	t.Helper()
	res, err := srv.Client().Get(srv.URL + path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	return res
}

// A client asks for an event stream without an Accept field, so a run begins whose response may be shared. The client
// must get the first event while the handler still runs. When the client leaves, the handler's context must end.
func TestServerEventStream(t *testing.T) {
	left := make(chan struct{})
	srv := server(t, func(w http.ResponseWriter, r *http.Request) {
		if err := http.NewResponseController(w).SetWriteDeadline(time.Time{}); err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(left)
	})
	for range 2 {
		res := get(t, srv, "/")
		if line, err := bufio.NewReader(res.Body).ReadString('\n'); line != "data: 1\n" || err != nil {
			t.Fatalf("%q, %v", line, err)
		}
		res.Body.Close()
		<-left
		left = make(chan struct{})
	}
}

func TestServerTruncatedBody(t *testing.T) {
	srv := server(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "max-age=60")
		w.Header().Set("Content-Length", "100")
		fmt.Fprint(w, strings.Repeat("x", 50))
	})
	for range 2 {
		res := get(t, srv, "/")
		if body, err := io.ReadAll(res.Body); !errors.Is(err, io.ErrUnexpectedEOF) || len(body) != 50 {
			t.Errorf("%d bytes, %v: the client must see that something is missing", len(body), err)
		}
	}
}

func TestServerBodyLongerThanSaid(t *testing.T) {
	srv := server(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "max-age=60")
		w.Header().Set("Content-Length", "3")
		if _, err := fmt.Fprint(w, "four"); !errors.Is(err, http.ErrContentLength) {
			t.Errorf("Write: %v", err)
		}
	})
	if res, err := srv.Client().Get(srv.URL); err == nil {
		if _, err = io.ReadAll(res.Body); err == nil {
			t.Error("an incomplete response was read without an error")
		}
		res.Body.Close()
	}
}

func TestServerInterimAndTrailers(t *testing.T) {
	runs := atomic.Int64{}
	srv := server(t, func(w http.ResponseWriter, r *http.Request) {
		runs.Add(1)
		w.Header().Set("Cache-Control", "public, max-age=60")
		if r.URL.Path == "/early" {
			w.Header().Set("Link", "</style.css>")
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Del("Link")
		}
		fmt.Fprint(w, "page")
		w.(http.Flusher).Flush()
		if r.URL.Path == "/trailer" {
			w.Header().Set(http.TrailerPrefix+"X-Sum", "42")
		}
	})
	hints := ""
	trace := &httptrace.ClientTrace{Got1xxResponse: func(_ int, h textproto.MIMEHeader) error {
		hints = h.Get("Link")
		return nil
	}}
	for _, path := range []string{"/early", "/trailer"} {
		for range 2 {
			hints = ""
			r, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), "GET", srv.URL+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			res, err := srv.Client().Do(r)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(res.Body)
			if string(body) != "page" || err != nil || res.StatusCode != 200 {
				t.Errorf("%s: %d %q %v", path, res.StatusCode, body, err)
			}
			switch {
			case path == "/early" && (hints != "</style.css>" || res.Header.Get("Link") != ""):
				t.Errorf("hints %q, then %v", hints, res.Header)
			case path == "/trailer" && res.Trailer.Get("X-Sum") != "42":
				t.Errorf("trailers %v", res.Trailer)
			}
			res.Body.Close()
		}
	}
	if n := runs.Load(); n != 4 {
		t.Errorf("%d runs, want 4: no response may be shared", n)
	}
}

func TestServerHijack(t *testing.T) {
	srv := server(t, func(w http.ResponseWriter, r *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nraw")
	})
	for range 2 {
		if body, err := io.ReadAll(get(t, srv, "/").Body); string(body) != "raw" || err != nil {
			t.Errorf("%q, %v", body, err)
		}
	}
}

// HEAD and GET alternate. The answer to HEAD must not be stored, so each GET must get the body.
func TestServerHead(t *testing.T) {
	srv := server(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "public, max-age=60")
		if r.Method == http.MethodGet {
			fmt.Fprint(w, "page")
		}
	})
	for _, method := range []string{"HEAD", "GET", "HEAD", "GET"} {
		r, err := http.NewRequest(method, srv.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := srv.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(res.Body)
		if want := map[string]string{"GET": "page"}[method]; string(body) != want || err != nil {
			t.Errorf("%s: %q %v", method, body, err)
		}
		res.Body.Close()
	}
}

// The handler writes a body above MaxBody in pieces. The client must get the whole body, in the right order.
func TestServerLargeBody(t *testing.T) {
	const size = 8 << 20
	srv := server(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "public, max-age=60")
		for i := range size / 1024 {
			if _, err := w.Write([]byte(strings.Repeat(string(rune('a'+i%26)), 1024))); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for range 2 {
		body, err := io.ReadAll(get(t, srv, "/").Body)
		if err != nil || len(body) != size || body[1024] != 'b' || body[size-1] != byte('a'+(size/1024-1)%26) {
			t.Errorf("%d bytes, %v", len(body), err)
		}
	}
}

// The client of a private page leaves in the middle of the body. The handler's context must end, and the next client
// must get a whole page.
func TestServerClientLeavesInTheMiddle(t *testing.T) {
	left := make(chan struct{}, 1)
	srv := server(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "private")
		if r.Header.Get("X-Leaves") == "" {
			fmt.Fprint(w, "whole")
			return
		}
		for r.Context().Err() == nil {
			fmt.Fprint(w, "some more")
			w.(http.Flusher).Flush()
		}
		left <- struct{}{}
	})
	ctx, cancel := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, "GET", srv.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Leaves", "1")
	res, err := srv.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if _, err := io.ReadFull(res.Body, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	cancel()
	<-left
	if body, err := io.ReadAll(get(t, srv, "/").Body); string(body) != "whole" || err != nil {
		t.Errorf("%q, %v", body, err)
	}
}
