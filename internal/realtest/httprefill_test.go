//go:build unix

package realtest

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/middleware/httprefill"
)

// This file tests middleware/httprefill with two nodes over one Redis.

// httpNodes starts Redis and two caches in front of next.
func httpNodes(t *testing.T, next http.HandlerFunc) (nodes [2]http.Handler, caches [2]*httprefill.Cache) {
	t.Helper()
	server := StartRedis(t)
	for i := range nodes {
		client := redis.NewClient(&redis.Options{Addr: server.Addr()})
		store := goredis.New(client)
		c, err := httprefill.New(httprefill.Config{
			// These timeouts are long, so that a second without an answer on a busy machine does not look like an outage.
			Config: refill.Config{Shared: store, LockTTL: 4 * time.Second, StoreTimeout: time.Second},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = c.Close()
			_ = client.Close()
		})
		nodes[i], caches[i] = c.Middleware(next), c
	}
	return nodes, caches
}

func getPage(h http.Handler, name, value string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, "/page", nil)
	if name != "" {
		r.Header.Set(name, value)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// One request makes the handler fail. Meanwhile five requests come to each of two nodes. All ten must get the page,
// from one more run of the handler.
func TestAFailedRequestFailsAlone(t *testing.T) {
	var runs atomic.Int64
	begun, fail := make(chan struct{}), make(chan struct{})
	nodes, _ := httpNodes(t, func(w http.ResponseWriter, r *http.Request) {
		runs.Add(1)
		if r.Header.Get("X-Bad") != "" {
			close(begun)
			<-fail
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		w.Header().Set("Cache-Control", "max-age=60")
		fmt.Fprint(w, "page")
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		if w := getPage(nodes[0], "X-Bad", "1"); w.Code != http.StatusInternalServerError {
			t.Errorf("the bad request got %d", w.Code)
		}
	})
	<-begun
	for i := range 10 {
		wg.Go(func() {
			if w := getPage(nodes[i%2], "", ""); w.Code != http.StatusOK || w.Body.String() != "page" {
				t.Errorf("request %d got %d %q", i, w.Code, w.Body)
			}
		})
	}
	close(fail)
	wg.Wait()
	if n := runs.Load(); n != 2 {
		t.Errorf("%d runs, want 2", n)
	}
}

// The page was asked for with X-Forwarded-Port, which is part of its key. An Invalidate on the other node, with a
// request without this field, must remove the page on both nodes. If the Invalidate comes during a run, the response of
// that run must not be stored.
func TestInvalidateAPageWithAKeyedField(t *testing.T) {
	var runs atomic.Int64
	var invalidate atomic.Pointer[func()]
	nodes, caches := httpNodes(t, func(w http.ResponseWriter, _ *http.Request) {
		n := runs.Add(1)
		if during := invalidate.Swap(nil); during != nil {
			(*during)()
		}
		w.Header().Set("Cache-Control", "max-age=60")
		fmt.Fprint(w, "page ", n)
	})
	want := func(when string, node int, page string) {
		t.Helper()
		if w := getPage(nodes[node], "X-Forwarded-Port", "443"); w.Body.String() != page {
			t.Errorf("%s: %q, want %q", when, w.Body, page)
		}
	}
	call := func() {
		if err := caches[1].Invalidate(t.Context(), httptest.NewRequest(http.MethodPost, "/page", nil)); err != nil {
			t.Error(err)
		}
	}
	want("first", 0, "page 1")
	want("from the store", 1, "page 1")
	call()
	want("after Invalidate", 1, "page 2")
	call()
	invalidate.Store(&call)
	want("during Invalidate", 0, "page 3")
	want("the run was voided", 1, "page 4")
	want("the run was voided", 1, "page 4")
}
