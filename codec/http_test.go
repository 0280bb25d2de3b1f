package codec_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/codec"
	"github.com/refill-go/refill/middleware/httprefill"
)

// Two nodes serve the same page through httprefill with Compress. The handler must run once, the stored record must
// be at most half as large as the page, and both clients must get the page unchanged.
func TestCompressedPages(t *testing.T) {
	shared, runs, body := &sized{Store: memory.New()}, 0, page(40<<10)
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		runs++
		w.Header().Set("Cache-Control", "public, max-age=60")
		_, _ = w.Write(body)
	})
	for i := range 2 { // i is the number of a node
		pages, err := httprefill.New(httprefill.Config{
			Config:    refill.Config{Shared: shared},
			WrapCodec: func(c refill.Codec) refill.Codec { return codec.Compress(c, 4<<10) },
		})
		if err != nil {
			t.Fatal(err)
		}
		defer pages.Close()
		w := httptest.NewRecorder()
		pages.Middleware(handler).ServeHTTP(w, httptest.NewRequest("GET", "http://a.example/", nil))
		if w.Body.String() != string(body) || w.Code != 200 {
			t.Errorf("node %d: %d and %d bytes, want the page of %d", i, w.Code, w.Body.Len(), len(body))
		}
	}
	if n := shared.published.Load(); runs != 1 || n == 0 || n > int64(len(body)/2) {
		t.Errorf("%d runs, a record of %d bytes for a page of %d", runs, n, len(body))
	}
}
