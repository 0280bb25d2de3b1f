package httprefill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// Each test of this file describes a bug of another HTTP cache, and then shows that httprefill does not have the
// bug. These tests in other files also cover such bugs:
//
//	TestNoUserGetsTheResponseOfAnother   go-chi/stampede#7: fields of the leader's response leak to other users;
//	                                     Varnish: requests for a page that cannot be cached queue one behind the other
//	TestCredentials                      go-chi/stampede#7
//	TestAFailureBelongsToItsRequest      go-chi/stampede: a 5xx is kept as if it were a page
//	TestServerHijack                     go-chi/stampede: no Hijacker

// go-chi/stampede makes its key from the path alone, in lower case: ?user=2 gets the body of ?user=1. Its key lacks
// method, host and credentials, and joins its parts without separators. Here requests that differ in the query,
// method, host, credentials or case of the path must never share a response.
func TestRegressKeyOfThePathAlone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		h := cached(t, handlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Cache-Control", "max-age=60")
			fmt.Fprint(w, r.Method, " ", r.Host, " ", r.URL.RequestURI(), " ", r.Header["Authorization"])
		}), Config{})
		for range 2 {
			for _, c := range []struct{ method, host, uri, field string }{
				{"GET", "a.example", "/p?user=1", ""},
				{"GET", "a.example", "/p?user=2", ""},
				{"GET", "a.example", "/p", ""},
				{"GET", "a.example", "/P", ""},
				{"GET", "a.example", "/p/", ""},
				{"GET", "a.example", "/p%3Fuser=1", ""},
				{"GET", "a.example", "/p?user=1&user=2", ""},
				{"GET", "a.exampl", "/e/p", ""},
				{"GET", "b.example", "/p", ""},
				{"POST", "a.example", "/p", ""},
				{"DELETE", "a.example", "/p", ""},
				{"GET", "a.example", "/p", "Authorization: Bearer 1"},
				{"GET", "a.example", "/p", "Authorization: Bearer 2"},
			} {
				authorization := "[]"
				if c.field != "" {
					authorization = "[" + c.field[len("Authorization: "):] + "]"
				}
				want := fmt.Sprint(c.method, " ", c.host, " ", c.uri, " ", authorization)
				if w := ask(h, c.method, "http://"+c.host+c.uri, c.field); w.Body.String() != want {
					t.Errorf("%q, want %q", w.Body, want)
				}
			}
		}
	})
}

// In go-chi/stampede, a client that disconnects turns its page into a 503, which is stored and served to all
// clients. Here the only client of a run leaves, and the next client must still get the page. The cancelled handler
// writes nothing in one case, and answers 503 in the other case.
func TestRegressDisconnectIsCached(t *testing.T) {
	for _, says503 := range []bool{false, true} {
		t.Run(fmt.Sprint("the handler says 503: ", says503), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{answer: says("page", "Cache-Control: public, max-age=60")}
				slow := true
				h := cached(t, handlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if slow {
						<-r.Context().Done()
						if says503 {
							http.Error(w, "gone", http.StatusServiceUnavailable)
						}
						return
					}
					s.ServeHTTP(w, r)
				}), Config{Config: refill.Config{ErrorTTL: time.Hour}})
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil).WithContext(ctx))
				synctest.Wait()
				slow = false
				if w := ask(h, "GET", "/"); w.Code != 200 || w.Body.String() != "page" {
					t.Errorf("%d %q after another client has left", w.Code, w.Body)
				}
			})
		})
	}
}

// writes counts the calls of Publish on a store.
type writes struct {
	driver.Store
	n atomic.Int64
}

func (s *writes) Publish(ctx context.Context, p driver.PublishRequest) (driver.PublishResult, error) {
	s.n.Add(1)
	return s.Store.Publish(ctx, p)
}

// In go-chi/stampede, each of 50 coalesced requests writes the page to the store, one after the other. Here 50
// requests must cause one write.
func TestRegressEachWaiterWrites(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 100 * ms, answer: says("page", "Cache-Control: public, max-age=60")}
		store := &writes{Store: memory.New()}
		h := cached(t, s, Config{Config: refill.Config{Shared: store}})
		all(50, func(int) *httptest.ResponseRecorder { return ask(h, "GET", "/") })
		if runs, n := s.runs.Load(), store.n.Load(); runs != 1 || n != 1 {
			t.Errorf("%d runs and %d writes for 50 requests", runs, n)
		}
	})
}

// In go-chi/stampede (#3, #10), if a handler writes nothing, the client gets nothing, or the cache panics. Here the
// client must get a 200, as with net/http.
func TestRegressHandlerWritesNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for _, fields := range [][]string{nil, {"Cache-Control: public, max-age=60"}} {
			s := &site{took: 10 * ms, answer: func(w http.ResponseWriter, _ *http.Request) {
				for range fields {
					w.Header().Set("Cache-Control", "public, max-age=60")
				}
			}}
			h := cached(t, s, Config{})
			for _, w := range all(10, func(int) *httptest.ResponseRecorder { return ask(h, "GET", "/") }) {
				if w.Code != 200 || w.Body.Len() != 0 {
					t.Errorf("%d %q", w.Code, w.Body)
				}
			}
			if n, want := s.runs.Load(), int64(10-9*len(fields)); n != want {
				t.Errorf("%d runs, want %d", n, want)
			}
		}
	})
}

// In go-chi/stampede, the handler's ResponseWriter is no Flusher, and http.ResponseController cannot unwrap it. Here
// a handler must be able to flush while its response is collected ("public"), and while it streams ("private").
func TestRegressWriterIsNoFlusher(t *testing.T) {
	for _, cc := range []string{"public, max-age=60", "private"} {
		t.Run(cc, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				h := cached(t, handlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Cache-Control", cc)
					fmt.Fprint(w, "pa")
					if _, ok := w.(http.Flusher); !ok {
						t.Errorf("%T is no Flusher", w)
					}
					if err := http.NewResponseController(w).Flush(); err != nil {
						t.Error(err)
					}
					fmt.Fprint(w, "ge")
				}), Config{})
				if w := ask(h, "GET", "/"); w.Body.String() != "page" {
					t.Errorf("%q", w.Body)
				}
			})
		})
	}
}

// victorspringer/http-cache uses the result of a shared refresh as a response without a check. If the refresh had no
// result, all requests that joined the refresh panic. Here ten requests join a refresh after the stale page has
// expired. The refresh ends without a response that may be shared, in one of four ways. Each of the ten requests must
// still get the answer of a run of its own. If that run panics, the request panics, as without the cache.
func TestRegressRefreshWithoutAResponse(t *testing.T) {
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   int
		panics any
	}{
		"private": {says("page", "Cache-Control: private"), 200, nil},
		"error":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, 503, nil},
		"panic":   {func(http.ResponseWriter, *http.Request) { panic("ouch") }, 200, "ouch"},
		"abort":   {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 200, http.ErrAbortHandler},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				first := true
				h := cached(t, handlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if first {
						first = false
						says("page", "Cache-Control: public, max-age=10, stale-while-revalidate=10")(w, r)
						return
					}
					time.Sleep(15 * time.Second)
					c.answer(w, r)
				}), Config{Config: refill.Config{StaleIfError: -1, LoadTimeout: time.Minute}})
				ask(h, "GET", "/")
				time.Sleep(15 * time.Second)
				ask(h, "GET", "/") // gets the stale page and begins the refresh
				time.Sleep(10 * time.Second)
				all(10, func(int) *httptest.ResponseRecorder {
					w := httptest.NewRecorder()
					defer func() {
						if p := recover(); p != c.panics || w.Code != c.want {
							t.Errorf("%d %q, want %d; panic %v, want %v", w.Code, w.Body, c.want, p, c.panics)
						}
					}()
					h.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
					return w
				})
			})
		})
	}
}

// nginx runs its background update as a part of the request that found the page stale. A slow update then holds the
// connection of that client (nejc.blog). Here a refresh hangs, and the connection of the request that began the
// refresh must carry two more requests.
func TestRegressRefreshHoldsTheConnection(t *testing.T) {
	var runs, reused atomic.Int64
	refreshing, goOn := make(chan struct{}), make(chan struct{})
	c, err := New(Config{Config: refill.Config{Jitter: -1}})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(c.Middleware(handlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if runs.Add(1) > 1 {
			close(refreshing)
			<-goOn
		}
		says("page", "Cache-Control: public, max-age=3600, stale-while-revalidate=3600")(w, r)
	})))
	t.Cleanup(func() { srv.Close(); _ = c.Close() })
	trace := &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		if i.Reused {
			reused.Add(1)
		}
	}}
	send := func() {
		t.Helper()
		r, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), "GET", srv.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := srv.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if body, err := io.ReadAll(res.Body); string(body) != "page" || err != nil {
			t.Errorf("%q, %v", body, err)
		}
	}
	send()
	r, err := http.NewRequest("GET", srv.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.loader.Expire(t.Context(), keysOf(r)...); err != nil {
		t.Fatal(err)
	}
	send() // gets the stale page and begins a refresh
	<-refreshing
	send()
	send()
	close(goOn)
	if n := reused.Load(); n != 3 || runs.Load() != 2 {
		t.Errorf("%d of 3 requests found the connection free, %d runs", n, runs.Load())
	}
}

// go-zero, bool64/cache and other libraries may give their waiters neither a value nor an error. Over HTTP that is
// an empty 200. Here Invalidate is called 20 times during runs of the handler. All 100 requests must still get the
// page.
func TestRegressEmptyAnswerAfterInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 100 * ms, answer: says("page", "Cache-Control: public, max-age=60")}
		c, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		h := c.Middleware(s)
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 3 * ms)
				if w := ask(h, "GET", "/"); w.Code != 200 || w.Body.String() != "page" {
					t.Errorf("request %d: %d %q", i, w.Code, w.Body)
				}
			})
		}
		for range 20 {
			time.Sleep(17 * ms)
			err := c.Invalidate(t.Context(), httptest.NewRequest("GET", "/", nil))
			if err != nil && !errors.Is(err, refill.ErrClosed) {
				t.Error(err)
			}
		}
		wg.Wait()
	})
}
