package httprefill

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// The passes of a URL take longer than passFor. The mark must stand until passFor after the last of them has ended, so
// no request in this time may wait for another request.
func TestAMarkStandsWhilePassesRun(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{answer: says("page", "Cache-Control: private")}
		h := cached(t, s, Config{})
		ask(h, "GET", "/")
		s.took = 2 * passFor
		for _, pause := range []time.Duration{s.took - time.Second, passFor - time.Second} {
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() { ask(h, "GET", "/") })
			}
			synctest.Wait()
			time.Sleep(pause)
			s.most.Store(0)
			began := time.Now()
			all(3, func(int) *httptest.ResponseRecorder { return ask(h, "GET", "/") })
			if took := time.Since(began); took != s.took {
				t.Errorf("%v after the passes began: took %v, want %v", pause, took, s.took)
			}
			wg.Wait()
			time.Sleep(passFor - time.Second)
		}
	})
}

// While a mark stands, one request at a time is collected. The others get the ResponseWriter of the server.
func TestOneRequestAtATimeIsCollected(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var collected, now, most atomic.Int64
		s := &site{took: time.Second}
		h := cached(t, handlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, is := w.(*run); is {
				collected.Add(1)
				most.Store(max(most.Load(), now.Add(1)))
				defer now.Add(-1)
			}
			s.answer(w, r)
		}), Config{})
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(s.took)
			says("page", "Cache-Control: private")(w, r)
			time.Sleep(s.took) // the header is known, so the next request can be collected
		}
		ask(h, "GET", "/")
		for range 4 {
			began := time.Now()
			all(5, func(int) *httptest.ResponseRecorder { return ask(h, "GET", "/") })
			if took := time.Since(began); took != 2*s.took {
				t.Errorf("took %v", took)
			}
		}
		if n, m := collected.Load(), most.Load(); n != 5 || m != 1 {
			t.Errorf("%d requests collected, %d at once; want 5, and 1", n, m)
		}
	})
}

// The request that is collected panics, fails, or its client leaves. Another request must be collected then.
func TestCollectingGoesOn(t *testing.T) {
	for name, answer := range map[string]func(http.ResponseWriter, *http.Request){
		"panic": func(http.ResponseWriter, *http.Request) { panic("ouch") },
		"error": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) },
		"slow":  func(http.ResponseWriter, *http.Request) { time.Sleep(time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := &site{answer: says("page", "Cache-Control: private")}
				h := cached(t, s, Config{})
				ask(h, "GET", "/")
				s.answer = answer
				func() {
					defer func() { _ = recover() }()
					ask(h, "GET", "/")
				}()
				s.answer = says("page", "Cache-Control: max-age=60")
				n := s.runs.Load()
				ask(h, "GET", "/")
				ask(h, "GET", "/")
				if got := s.runs.Load() - n; got != 1 {
					t.Errorf("%d runs, want 1: the page can be shared now", got)
				}
			})
		})
	}
}

// The marks of two nodes stand, and the request that is collected on node a holds the lease. The request that is to be
// collected on node b waits in vain, and becomes a pass. While this pass runs, it must count as one, and another
// request must be able to be collected on node b.
func TestWaitedInVainToBeCollected(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{answer: says("page", "Cache-Control: private")}
		cfg := Config{Config: refill.Config{Shared: memory.New()}}
		a := cached(t, s, cfg)
		b, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		onB := b.Middleware(s)
		ask(a, "GET", "/")
		ask(onB, "GET", "/")
		s.took = 8 * time.Second
		var wg sync.WaitGroup
		wg.Go(func() { ask(a, "GET", "/") })
		synctest.Wait()
		wg.Go(func() { ask(onB, "GET", "/") })
		time.Sleep(time.Second)
		mark := b.passMarks.get(defaultKey(httptest.NewRequest("GET", "/", nil)), 0)
		if mark == nil || mark.passes.Load() != 1 || mark.collecting.Load() || s.now.Load() != 2 {
			t.Errorf("mark %+v, %d runs at once", mark, s.now.Load())
		}
		wg.Wait()
	})
}

// A body was above MaxBody. As soon as it is smaller, it must be shared.
func TestABodyThatWasTooLarge(t *testing.T) {
	bubble(t, func(t *testing.T) {
		size := 2000
		s := &site{}
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			says(strings.Repeat("x", size), "Cache-Control: max-age=60")(w, r)
		}
		h := cached(t, s, Config{MaxBody: 1000})
		for range 3 {
			ask(h, "GET", "/")
		}
		size = 500
		for range 3 {
			ask(h, "GET", "/")
		}
		if n := s.runs.Load(); n != 4 {
			t.Errorf("%d runs, want 4", n)
		}
	})
}

// A private page takes 200 ms, and every node has its own marks. Once all nodes have learnt that the page is private,
// no request may take much longer than two runs, although one request per node is collected, and only one node at a
// time has the lease.
func TestCollectingDoesNotQueueTheFleet(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &site{took: 200 * ms}
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			says("of "+r.Header.Get("X-User"), "Cache-Control: private")(w, r)
		}
		cfg := Config{Config: refill.Config{Shared: memory.New()}}
		nodes := make([]http.Handler, 8)
		for i := range nodes {
			nodes[i] = cached(t, s, cfg)
		}
		for round := range 4 {
			began := time.Now()
			all(80, func(i int) *httptest.ResponseRecorder {
				w := ask(nodes[i%8], "GET", "/", fmt.Sprint("X-User: ", i))
				if w.Code != 200 || w.Body.String() != fmt.Sprint("of ", i) {
					t.Errorf("user %d: %d %q", i, w.Code, w.Body)
				}
				return w
			})
			if took := time.Since(began); round > 0 && took > 440*ms {
				t.Errorf("round %d took %v, want 440 ms at most", round, took)
			}
		}
	})
}
