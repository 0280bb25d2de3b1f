package httprefill

import (
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

func sample() *response {
	return &response{
		open: withCookie | withAuthorization, born: time.UnixMicro(1_000_000), lifetime: time.Second,
		spare: time.Millisecond, pattern: "GET /", status: 200,
		header: http.Header{"A": {"1", "2"}, "Date": nil}, body: []byte("body"),
	}
}

// Two releases may share one store, so each release must read what the other has written. The bytes of a response
// must stay the same as long as the version does.
func TestEncodingDoesNotChange(t *testing.T) {
	b, err := codec{}.Marshal(sample())
	if err != nil {
		t.Fatal(err)
	}
	const want = "0203" + "00000000000f4240" + "c0843d" + "e807" + "05474554202f" + "c801" +
		"02" + "0141" + "02" + "0131" + "0132" + "0444617465" + "00" + "04626f6479"
	if got := hex.EncodeToString(b); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}

func TestDecodingIsStrict(t *testing.T) {
	good, err := codec{}.Marshal(sample())
	if err != nil {
		t.Fatal(err)
	}
	bad := map[string][]byte{"more": append(good[:len(good):len(good)], 0)}
	for n := range good {
		bad[fmt.Sprint("the first ", n)] = good[:n]
	}
	for name, change := range map[string]func([]byte){
		"version":     func(b []byte) { b[0] = 1 },
		"flag":        func(b []byte) { b[1] |= 4 },
		"status":      func(b []byte) { b[22] = 0 },
		"name order":  func(b []byte) { b[25] = 'Z' },
		"many fields": func(b []byte) { b[23] = 0x7f },
	} {
		b := append([]byte(nil), good...)
		change(b)
		bad[name] = b
	}
	for name, b := range bad {
		var p *response
		if err := (codec{}).Unmarshal(b, &p); err == nil || p != nil {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
	for _, v := range []any{nil, "x", (*response)(nil), &response{uncacheable: true}} {
		if _, err := (codec{}).Marshal(v); err == nil {
			t.Errorf("%v can be stored", v)
		}
	}
}

func TestMatches(t *testing.T) {
	for _, c := range []struct {
		list, tag string
		want      bool
	}{
		{`"a"`, `"a"`, true},
		{`W/"a"`, `"a"`, true},
		{`"a"`, `W/"a"`, true},
		{`"x", "a"`, `"a"`, true},
		{`"x,y","a"`, `"a"`, true},
		{`"x", "a,b"`, `"a"`, false},
		{`"b"`, `"a"`, false},
		{`a`, `"a"`, false},
		{`a`, `a`, false},
		{`*`, ``, true},
		{``, ``, false},
		{`"a`, `"a"`, false},
		{`"`, `"`, false},
		{`"", "a"`, `"a"`, true},
		{`"x", b, "a"`, `"a"`, false},
		{`W/`, `W/`, false},
	} {
		if got := matches(c.list, c.tag); got != c.want {
			t.Errorf("matches(%q, %q) = %v", c.list, c.tag, got)
		}
	}
}

func FuzzJudge(f *testing.F) {
	f.Add(`max-age=60, ext="a\"b"`, "12", "Sat, 21 Nov 2026 12:00:00 GMT", "Sat, 21 Nov 2026 12:00:00 GMT")
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, cc, age, date, expires string) {
		h := http.Header{"Cache-Control": {cc}, "Age": {age}, "Date": {date}, "Expires": {expires}}
		v := judge(200, h, 0, terms{most: time.Hour}, now, now)
		if v.kind == shared && (v.lifetime-v.age <= 0 || v.lifetime-v.age > time.Hour || v.age < 0 || v.staleFor < 0) {
			t.Errorf("%+v", v)
		}
		if low := strings.ToLower(cc); v.kind == shared && !strings.Contains(low, `"`) &&
			strings.Contains(low, "no-store,") && strings.HasPrefix(low, "no-store") {
			t.Errorf("%q is shared", cc)
		}
	})
}

// Two different requests must have different keys, whatever their host, path and query contain.
func FuzzKey(f *testing.F) {
	f.Add("a.example", "/b", "c=1", "a.example/", "b", "c=1")
	f.Add("a", "/", "", "a/", "", "?")
	f.Fuzz(func(t *testing.T, host1, path1, query1, host2, path2, query2 string) {
		request := func(host, path, query string) *http.Request {
			return &http.Request{Host: host, URL: &url.URL{Path: path, RawQuery: query}}
		}
		a, b := defaultKey(request(host1, path1, query1)), defaultKey(request(host2, path2, query2))
		same := strings.EqualFold(host1, host2) && query1 == query2 &&
			(path1 == path2 || strings.Trim(path1, "/") == "" && strings.Trim(path2, "/") == "")
		if a == b && !same {
			t.Errorf("%q for %q %q %q and %q %q %q", a, host1, path1, query1, host2, path2, query2)
		}
	})
}

func TestInvalidateBehindAProxy(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		s := &site{answer: says("page", "Cache-Control: public, max-age=60")}
		h := c.Middleware(s)
		for i := range int64(2) {
			ask(h, "GET", "http://a.example/p", "X-Forwarded-Proto: https")
			ask(h, "HEAD", "http://a.example/p", "X-Forwarded-Proto: https")
			if n := s.runs.Load(); n != i+1 {
				t.Errorf("%d runs, want %d", n, i+1)
			}
			post := httptest.NewRequest("POST", "/p", strings.NewReader("x"))
			post.Host = "A.example"
			if err := c.Invalidate(t.Context(), post); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestRequestsWithABodyBypassTheCache(t *testing.T) {
	for name, change := range map[string]func(*http.Request){
		"length":  func(r *http.Request) { r.ContentLength = 1 },
		"unknown": func(r *http.Request) { r.ContentLength = -1 },
		"chunked": func(r *http.Request) { r.TransferEncoding = []string{"chunked"} },
	} {
		r := httptest.NewRequest("GET", "/", nil)
		if !eligible(r) {
			t.Fatal("a plain GET is not eligible")
		}
		if change(r); eligible(r) {
			t.Error(name)
		}
	}
}

// The middleware wraps a reverse proxy. A page that the origin sends in chunks must be shared, and a body that is
// cut short must end in an error.
func TestServerAroundAProxy(t *testing.T) {
	var runs atomic.Int64
	origin := httptest.NewServer(handlerFunc(func(w http.ResponseWriter, r *http.Request) {
		runs.Add(1)
		switch r.URL.Path {
		case "/chunked":
			w.Header().Set("Cache-Control", "max-age=60")
			w.(http.Flusher).Flush()
			fmt.Fprint(w, "page")
		case "/broken":
			w.Header().Set("Cache-Control", "max-age=60")
			w.Header().Set("Content-Length", "100")
			fmt.Fprint(w, "half")
		}
	}))
	defer origin.Close()
	target, err := url.Parse(origin.URL)
	if err != nil {
		t.Fatal(err)
	}
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }}
	srv := server(t, proxy.ServeHTTP)
	for range 3 {
		if body, err := io.ReadAll(get(t, srv, "/chunked").Body); string(body) != "page" || err != nil {
			t.Errorf("%q, %v", body, err)
		}
	}
	if n := runs.Load(); n != 1 {
		t.Errorf("%d runs of a page in chunks, want 1", n)
	}
	for range 2 {
		if res, err := srv.Client().Get(srv.URL + "/broken"); err == nil {
			if body, err := io.ReadAll(res.Body); err == nil {
				t.Errorf("half a body was read without an error: %d %q", res.StatusCode, body)
			}
			res.Body.Close()
		}
	}
}

func BenchmarkHit(b *testing.B) {
	c, err := New(Config{Config: refill.Config{TTL: time.Hour}})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	page := says(strings.Repeat("x", 1000), "Cache-Control: public, max-age=3600", "Content-Type: text/plain")
	h := c.Middleware(handlerFunc(page))
	r := httptest.NewRequest("GET", "/page?x=1", nil)
	r.Header.Set("User-Agent", "bench")
	r.Header.Set("Accept", "*/*")
	w := &discard{}
	b.ReportAllocs()
	for b.Loop() {
		w.header = make(http.Header)
		h.ServeHTTP(w, r)
	}
}

type discard struct{ header http.Header }

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) WriteHeader(int)             {}
func (d *discard) Write(b []byte) (int, error) { return len(b), nil }
