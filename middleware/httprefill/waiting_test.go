package httprefill

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// A long poll takes 25 s and must not be stored. Eight clients at a time poll on two nodes, three times. Each client
// must get a status 200. In the first round nothing is known of the URL, so a client may wait for WaitTimeout first. In
// the later rounds no client may wait for longer than a request that is collected.
func TestALongPollIsAnswered(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 25 * time.Second, answer: says("event", "Cache-Control: no-store")}
		cfg := Config{Config: refill.Config{Shared: memory.New()}}
		nodes := []http.Handler{cached(t, s, cfg), cached(t, s, cfg)}
		for round := range 3 {
			began := time.Now()
			for _, w := range all(8, func(i int) *httptest.ResponseRecorder { return ask(nodes[i%2], "GET", "/") }) {
				if w.Code != 200 || w.Body.String() != "event" {
					t.Errorf("round %d: %d %q", round, w.Code, w.Body)
				}
			}
			most := s.took + maxPatience
			if round == 0 {
				most = s.took + defaultWaitTimeout
			}
			if took := time.Since(began); took > most {
				t.Errorf("round %d took %v, want %v at most", round, took, most)
			}
		}
		if n := s.runs.Load(); n > 24+1 { // a run of a client that had left its flight may be cancelled
			t.Errorf("%d runs for 24 requests", n)
		}
	})
}

// A handler is slower than LoadTimeout, and its response could be shared. The owner must get the response, and no
// client may get a 504. With WaitTimeout off, the clients wait until LoadTimeout.
func TestSlowerThanLoadTimeout(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  Config
		wait time.Duration
	}{
		"default":         {Config{}, 5 * time.Second},
		"no WaitTimeout":  {Config{WaitTimeout: -1}, 10 * time.Second},
		"own WaitTimeout": {Config{WaitTimeout: time.Second}, time.Second},
		"own LoadTimeout": {Config{Config: refill.Config{LoadTimeout: 2 * time.Second}}, 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{took: 30 * time.Second, answer: says("report", "Cache-Control: max-age=60")}
				h := cached(t, s, c.cfg)
				began := time.Now()
				var wg sync.WaitGroup
				for i := range 4 {
					wg.Go(func() {
						w := ask(h, "GET", "/")
						want := s.took
						if i > 0 {
							want += c.wait
						}
						if took := time.Since(began); w.Code != 200 || w.Body.String() != "report" || took != want {
							t.Errorf("request %d: %d %q after %v, want %v", i, w.Code, w.Body, took, want)
						}
					})
					synctest.Wait() // the first request is the owner
				}
				time.Sleep(12 * time.Second) // the run of the owner has outlived LoadTimeout
				for range 2 {
					wg.Go(func() {
						if w := ask(h, "GET", "/"); w.Code != 200 || time.Since(began) != 12*time.Second+s.took {
							t.Errorf("a request after LoadTimeout: %d %q after %v", w.Code, w.Body, time.Since(began))
						}
					})
				}
				wg.Wait()
				began = time.Now()
				for _, w := range all(3, func(int) *httptest.ResponseRecorder { return ask(h, "GET", "/") }) {
					if w.Code != 200 || time.Since(began) != s.took {
						t.Errorf("later: %d after %v", w.Code, time.Since(began))
					}
				}
			})
		})
	}
}

// A page takes 8 s, and 10 requests wait for it. After WaitTimeout, two of them run alone, because MaxAlone is 2. The
// others wait on, and get the shared response.
func TestRunsAloneAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 8 * time.Second, answer: says("page", "Cache-Control: max-age=60")}
		h := cached(t, s, Config{MaxAlone: 2})
		began := time.Now()
		var late atomic.Int64
		all(10, func(int) *httptest.ResponseRecorder {
			w := ask(h, "GET", "/")
			if w.Code != 200 || w.Body.String() != "page" {
				t.Errorf("%d %q", w.Code, w.Body)
			}
			if time.Since(began) > s.took {
				late.Add(1)
			}
			return w
		})
		if n, l := s.runs.Load(), late.Load(); n != 3 || l != 2 {
			t.Errorf("%d runs, %d of them alone; want 3 and 2", n, l)
		}
	})
}

// A run alone gives its slot back even if it panics, and an unused key takes no memory.
func TestASlotIsGivenBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c, err := New(Config{MaxAlone: 1, WaitTimeout: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		s := &site{took: 3 * time.Second, answer: func(http.ResponseWriter, *http.Request) { panic("ouch") }}
		h := c.Middleware(s)
		all(5, func(int) *httptest.ResponseRecorder {
			defer func() {
				if p := recover(); p != "ouch" {
					t.Errorf("panic %v", p)
				}
			}()
			return ask(h, "GET", "/")
		})
		if s.runs.Load() != 5 || len(c.alone.byKey) != 0 {
			t.Errorf("%d runs, %d keys", s.runs.Load(), len(c.alone.byKey))
		}
	})
}

// failing answers requests with the field X-Bad with 500, and other requests with a page.
func failing(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("X-Bad") != "" {
		w.Header().Set("Set-Cookie", "secret")
		http.Error(w, "the user's own text", http.StatusInternalServerError)
		return
	}
	says("page", "Cache-Control: public, max-age=60")(w, r)
}

// A request makes the handler fail, in one of four ways. The failure belongs to this request. The ten requests that
// wait must get the page, and one run must be enough for them. The next request, on another node as well, must not find
// a back-off.
func TestAFailureBelongsToItsRequest(t *testing.T) {
	for name, fail := range map[string]func(http.ResponseWriter, *http.Request){
		"500":       failing,
		"panic":     func(http.ResponseWriter, *http.Request) { panic("ouch") },
		"abort":     func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"cut short": says("half", "Cache-Control: public, max-age=60", "Content-Length: 8"),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{took: 100 * ms}
				s.answer = func(w http.ResponseWriter, r *http.Request) {
					if r.Header.Get("X-Bad") != "" {
						fail(w, r)
						return
					}
					failing(w, r)
				}
				cfg := Config{Config: refill.Config{Shared: memory.New()}}
				a, b := cached(t, s, cfg), cached(t, s, cfg)
				bad := func(node http.Handler, url string) {
					defer func() {
						if p := recover(); (p != nil) != (name == "panic" || name == "abort") {
							t.Errorf("panic %v", p)
						}
					}()
					if w := ask(node, "GET", url, "X-Bad: 1"); name == "500" && w.Body.String() != "the user's own text\n" {
						t.Errorf("the owner got %d %q", w.Code, w.Body)
					}
				}
				good := func(node http.Handler, url string) {
					w := ask(node, "GET", url)
					if w.Code != 200 || w.Body.String() != "page" || w.Header().Get("Set-Cookie") != "" {
						t.Errorf("%d %q %v", w.Code, w.Body, w.Header())
					}
				}
				var wg sync.WaitGroup
				wg.Go(func() { bad(a, "/") })
				synctest.Wait()
				for i := range 10 {
					wg.Go(func() { good([]http.Handler{a, b}[i%2], "/") })
				}
				wg.Wait()
				if n := s.runs.Load(); n != 2 {
					t.Errorf("%d runs, want 2", n)
				}
				bad(a, "/then")
				bad(b, "/then")
				good(a, "/then")
				good(b, "/then")
				if n := s.runs.Load(); n != 5 {
					t.Errorf("%d runs, want 5", n)
				}
			})
		})
	}
}

// The first two runs fail. After two failed leaders, each of the nine requests that still wait runs for itself, at most
// four of them at once. The others go on asking meanwhile, and get what one of them loads for all.
func TestAfterTwoFailedLeaders(t *testing.T) {
	for _, c := range []struct{ most, fails, runs, atOnce int64 }{
		{0, 2, 11, 9}, // each of the rest for itself
		{4, 2, 7, 5},  // two leaders, four alone, and one that succeeds for the others
		{1, 99, 11, 2},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{took: 100 * ms}
				s.answer = func(w http.ResponseWriter, r *http.Request) {
					if _, collected := w.(*run); !collected { // otherwise a slot is free when the leader is done
						time.Sleep(s.took)
					}
					if s.runs.Load() <= c.fails {
						w.WriteHeader(503)
						return
					}
					failing(w, r)
				}
				h := cached(t, s, Config{MaxAlone: int(c.most)})
				n503 := int64(0)
				for _, w := range all(11, func(int) *httptest.ResponseRecorder { return ask(h, "GET", "/") }) {
					if w.Code == 503 {
						n503++
					}
				}
				if n := s.runs.Load(); n != c.runs || n503 != min(c.fails, 11) || s.most.Load() != c.atOnce {
					t.Errorf("%d runs, %d at once, %d answers 503; want %+v", n, s.most.Load(), n503, c)
				}
			})
		})
	}
}

// The loads of the nodes a and b fail, one after the other. Node c has waited for both loads, so each of its requests
// must run the handler itself at once, and get its own answer.
func TestFailureOnAnotherNode(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 100 * ms}
		s.answer = func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(502)
			fmt.Fprint(w, s.runs.Load())
		}
		cfg := Config{Config: refill.Config{Shared: memory.New()}}
		a, b, c := cached(t, s, cfg), cached(t, s, cfg), cached(t, s, cfg)
		began := time.Now()
		go ask(a, "GET", "/")
		synctest.Wait()
		go ask(b, "GET", "/")
		time.Sleep(150 * ms) // node b runs its handler
		for _, w := range all(3, func(int) *httptest.ResponseRecorder { return ask(c, "GET", "/") }) {
			if w.Code != 502 || len(w.Body.String()) != 1 || time.Since(began) != 300*ms {
				t.Errorf("%d %q after %v", w.Code, w.Body, time.Since(began))
			}
		}
		if n := s.runs.Load(); n != 5 {
			t.Errorf("%d runs, want 5", n)
		}
	})
}

// While the stored response may be served in place of an error, a failure has a back-off: within ErrorTTL the handler
// does not run. When the response may no longer be served, the back-off that is left must not answer a request.
func TestBackOffOnlyBesideAStaleResponse(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{}
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			if s.runs.Load() > 1 {
				http.Error(w, "down", http.StatusInternalServerError)
				return
			}
			says("page", "Cache-Control: max-age=10, stale-if-error=10")(w, r)
		}
		h := cached(t, s, Config{MaxAlone: 1, Config: refill.Config{ErrorTTL: time.Minute}})
		ask(h, "GET", "/")
		time.Sleep(15 * time.Second)
		for range 5 {
			if w := ask(h, "GET", "/"); w.Body.String() != "page" || s.runs.Load() != 2 {
				t.Errorf("%q after %d runs", w.Body, s.runs.Load())
			}
		}
		time.Sleep(10 * time.Second)
		for i := range int64(3) {
			if w := ask(h, "GET", "/"); w.Body.String() != "down\n" || s.runs.Load() != 3+i {
				t.Errorf("%d %q after %d runs", w.Code, w.Body, s.runs.Load())
			}
		}
		s.took = time.Second
		s.most.Store(0)
		all(3, func(int) *httptest.ResponseRecorder { return ask(h, "GET", "/") })
		if runs, most := s.runs.Load(), s.most.Load(); runs != 8 || most != 1 {
			t.Errorf("%d runs, %d at once; want 8, and one after the other", runs, most)
		}
	})
}

// An attacker makes the handler fail 20 times a second, on both nodes. No clean request may fail, also for a page that
// is not stored.
func TestAnAttackerFailsAlone(t *testing.T) {
	for _, cc := range []string{"max-age=1", "no-store"} {
		t.Run(cc, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{took: 30 * ms}
				s.answer = func(w http.ResponseWriter, r *http.Request) {
					if r.Header.Get("X-Bad") != "" {
						w.WriteHeader(500)
						return
					}
					says("page", "Cache-Control: "+cc)(w, r)
				}
				cfg := Config{Config: refill.Config{Shared: memory.New()}}
				nodes := []http.Handler{cached(t, s, cfg), cached(t, s, cfg)}
				var wg sync.WaitGroup
				for i := range 200 {
					wg.Go(func() {
						time.Sleep(time.Duration(i) * 50 * ms)
						ask(nodes[i%2], "GET", "/", "X-Bad: 1")
					})
				}
				for i := range 100 {
					wg.Go(func() {
						time.Sleep(time.Duration(i) * 100 * ms)
						began := time.Now()
						if w := ask(nodes[i%2], "GET", "/"); w.Code != 200 || time.Since(began) > 4*s.took {
							t.Errorf("request %d: %d after %v", i, w.Code, time.Since(began))
						}
					})
				}
				wg.Wait()
			})
		})
	}
}

// The time to wait is over at the very moment when the handler begins to run for the request, because the request of
// the other node has turned out private then. The request must get the answer of a run of its own, and no run may wait
// for ever.
func TestTheRunBeginsWhenTheWaitEnds(t *testing.T) {
	for range 20 {
		bubble(t, func(t *testing.T) {
			s := &site{took: defaultWaitTimeout}
			s.answer = func(w http.ResponseWriter, r *http.Request) {
				says("of "+r.Header.Get("X-User"), "Cache-Control: private")(w, r)
			}
			cfg := Config{Config: refill.Config{Shared: memory.New()}}
			nodes := []http.Handler{cached(t, s, cfg), cached(t, s, cfg)}
			all(4, func(i int) *httptest.ResponseRecorder {
				w := ask(nodes[i%2], "GET", "/", fmt.Sprint("X-User: ", i))
				if w.Code != 200 || w.Body.String() != fmt.Sprint("of ", i) {
					t.Errorf("user %d: %d %q", i, w.Code, w.Body)
				}
				return w
			})
		})
	}
}

// A visit is answered by its own run or alone, whatever comes first, and never by both.
func TestARequestHasOneRun(t *testing.T) {
	given := 0
	free := func() { given++ }
	v := &visit{owner: t.Context()}
	if !v.beginRun(&run{}) || v.goAlone(free) || given != 1 || v.answered() != nil {
		t.Errorf("a run had begun: %d slots given back, state %d", given, v.state)
	}
	v = &visit{owner: t.Context()}
	if !v.goAlone(free) || v.beginRun(&run{}) || v.latest.Load() != nil || v.goAlone(free) || given != 2 {
		t.Errorf("went alone: %d slots given back, run %v", given, v.latest.Load())
	}
	if v.answered() == nil || v.beginRun(&run{}) || v.goAlone(free) {
		t.Error("answered, but can still change")
	}
}
