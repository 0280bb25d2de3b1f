package httprefill_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/middleware/httprefill"
)

func Example() {
	renders := 0
	page := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		renders++
		w.Header().Set("Cache-Control", "public, max-age=60") // nothing is cached unless the handler says so
		fmt.Fprintf(w, "page %s", r.URL.Path)
	})

	pages, err := httprefill.New(httprefill.Config{Config: refill.Config{StaleFor: time.Minute}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pages.Close()
	handler := pages.Middleware(page)

	for range 3 {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest("GET", "/about", nil))
		fmt.Println(w.Code, w.Body)
	}
	fmt.Println(renders, "render")
	// Output:
	// 200 page /about
	// 200 page /about
	// 200 page /about
	// 1 render
}
