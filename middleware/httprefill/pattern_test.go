package httprefill

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// A middleware outside of the cache counts requests by route: it reads Request.Pattern after the request was answered.
// The ServeMux inside sets the Pattern of the request that it gets, which is a copy of the client's request. The
// outside must see the Pattern after a miss, a hit on either node, a private response and a panic.
func TestAnOuterMiddlewareSeesThePattern(t *testing.T) {
	bubble(t, func(t *testing.T) {
		mux := http.NewServeMux()
		mux.HandleFunc("GET /shared/{id}", says("page", "Cache-Control: public, max-age=60"))
		mux.HandleFunc("GET /private/{id}", says("page", "Cache-Control: private"))
		mux.HandleFunc("GET /panics/{id}", func(http.ResponseWriter, *http.Request) { panic("ouch") })
		mux.HandleFunc("GET /late/{id}", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Cache-Control", "private")
			fmt.Fprint(w, "half")
			panic("ouch")
		})
		shared := memory.New()
		var nodes []http.Handler
		for range 2 {
			nodes = append(nodes, cached(t, mux, Config{Config: refill.Config{Shared: shared}}))
		}
		for _, page := range []string{"shared", "private", "panics", "late"} {
			for i, node := range []http.Handler{nodes[0], nodes[0], nodes[1], nodes[1]} {
				r := httptest.NewRequest("GET", "/"+page+"/7", nil)
				r.Pattern = "/" // an outer ServeMux has set it
				func() {
					defer func() { _ = recover() }()
					node.ServeHTTP(httptest.NewRecorder(), r)
				}()
				if want := "GET /" + page + "/{id}"; r.Pattern != want && !(page == "panics" && i%2 == 1) {
					t.Errorf("request %d of %s: Pattern %q, want %q", i, page, r.Pattern, want)
				}
			}
		}
	})
}

// The Pattern that a ServeMux outside of the cache has set stays, if no ServeMux inside sets another one.
func TestThePatternOfAnOuterMuxStays(t *testing.T) {
	bubble(t, func(t *testing.T) {
		h := cached(t, handlerFunc(says("page", "Cache-Control: public, max-age=60")), Config{})
		for _, method := range []string{"GET", "HEAD"} {
			r := httptest.NewRequest(method, "/", nil)
			r.Pattern = method + " /"
			h.ServeHTTP(httptest.NewRecorder(), r)
			if r.Pattern != method+" /" {
				t.Errorf("%s: %q", method, r.Pattern)
			}
		}
	})
}
