// Package httprefill is a net/http middleware that keeps a cached response from stampeding the handler behind it: when
// a page expires, the handler runs once in the whole fleet; everybody else gets the stale page or waits for that run.
//
//	pages, err := httprefill.New(httprefill.Config{
//		Config: refill.Config{
//			StaleFor: time.Minute,         // after its own lifetime a response is served stale while one node refreshes it
//			Shared:   goredis.New(client), // nil: this process alone
//		},
//	})
//	if err != nil {
//		return err
//	}
//	defer pages.Close()
//	http.ListenAndServe(":8080", pages.Middleware(mux))
//
// Nothing is cached unless the handler says so: w.Header().Set("Cache-Control", "public, max-age=60").
//
// # The one rule
//
// A response that says so must depend on nothing but what is in the key: scheme, host, path and query of the request, and
// its X-Forwarded-Host, -Proto and -Prefix. What depends on anything else (the user, another header field, the address of
// the client, a value in the request's context) has to say private or no-store, or name the field in Vary.
//
// # What is shared
//
// A response is stored, and given to those who waited for it, only if all of this holds; else it belongs to the one
// request that it was made for, and every other request runs the handler itself, at the same time, none behind another:
//
//   - its status is 200, 203, 204, 301, 308, 404 or 410;
//   - it says how long it is fresh: s-maxage, max-age or Expires (as an IMF-fixdate), more than zero after its Age;
//   - it does not say no-store, no-cache or private, with or without field names, and its Cache-Control can be read;
//   - it has no Set-Cookie, Vary, Content-Encoding, Content-Range, Upgrade, trailer, nor an Access-Control-Allow-Origin
//     other than "*", and is no event stream. So compress outside of this middleware;
//   - where the request came with a Cookie, it says public or s-maxage; where it came with Authorization or a TLS client
//     certificate, it says public, s-maxage or must-revalidate (RFC 9111, 3.5). A request with credentials is not given a
//     stored response without these words either. Other credentials, an API key for instance, are not known here;
//   - its body is at most MaxBody, is complete, and as long as its Content-Length says; there was no 1xx before it.
//
// Requests other than GET and HEAD go straight to the handler, and so do those with a body, Upgrade, Range, Expect,
// If-Match or If-Unmodified-Since, that accept text/event-stream, or whose header claims another URL or method. HEAD is
// answered from what GET has stored, or goes straight to the handler. A client's Cache-Control and Pragma are ignored:
// anybody could drive the load on the handler with them.
//
// # How the handler runs
//
// For a response that may turn out to be shared the handler runs on a goroutine of its own, with a request that has no
// conditions (If-None-Match …), and a context that keeps the values of the first request's and does not end with its
// client. Its response is collected; until it is complete, Flush does nothing. As soon as the header says that it is not to
// be shared, or the body outgrows MaxBody, or the handler sends a 1xx, hijacks the connection or takes longer than
// LoadTimeout, the run is handed over to the request that it was begun for: what it writes streams to that client, and
// its context ends with that client; if the client has left, it is cancelled. For ten seconds after its last use, such
// a URL goes straight to the handler on this node, so that requests do not queue for what cannot be shared.
//
// # Failures
//
// A 5xx response, a panic and a body that is cut short are failed loads. Within StaleIfError everybody gets the stale
// response. Else the request that the handler ran for gets what the handler wrote, as without this middleware: its panic
// goes on in that request's goroutine, without the stack of the handler (Config.OnEvent sees it). Those who waited, and
// all who come within ErrorTTL, get the bare status (500 for a panic, 502 for a response that was cut short, 504 beyond
// LoadTimeout), without body or fields of a response that may be somebody else's. If the request had credentials, the
// failure may be its own: then the others run the handler themselves. A handler that answers 5xx to a malformed request
// lets anybody fail a URL for ErrorTTL; validate input with 4xx, or turn ErrorTTL off.
//
// Beyond MaxLoads while the store is down, and beyond MaxWaiters: 503 with Retry-After. Any other trouble of the cache, and a closed one: the
// handler runs as if there were no cache.
package httprefill

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/refill-go/refill"
)

// Config is how a [Cache] works. The zero value is a cache for this process alone.
type Config struct {
	// Config is that of the Loader underneath. The responses say how long they live, so some settings mean something
	// else here:
	//
	//   - TTL is not required: it is the most that a response may ask for. Default 24 h.
	//   - StaleFor is for responses without stale-while-revalidate of their own. It does not apply to those with
	//     must-revalidate, proxy-revalidate or s-maxage.
	//   - StaleIfError applies to all responses but those with must-revalidate or proxy-revalidate.
	//   - LoadTimeout has to be above what the slowest response to be shared takes from the first byte to the last.
	//   - MaxLoads and MaxWaiters are off by default: nobody asked for a limit on a handler.
	//   - LocalBytes bounds L1 by default, to 64 MiB.
	//   - Codec must be nil: responses have an encoding of their own, see WrapCodec.
	refill.Config

	// Name stands in front of the keys in the shared store and in events. Default "http". Caches of one name share their
	// responses, so what they wrap must answer alike. Letters, digits, '.', '_' and '-', at most 64 bytes.
	Name string

	// MaxBody is the largest body, in bytes, that is stored. A larger one streams on to its client, and is not shared.
	// Up to this much memory is in use for each response that is being collected. Default 1 MiB.
	MaxBody int

	// WrapCodec, if it is not nil, is given the encoding of responses and returns the one to use: to compress what stands in
	// the shared store. Another one makes misses of what is stored, as any change of a codec does.
	//
	//	WrapCodec: func(c refill.Codec) refill.Codec { return codec.Compress(c, 4<<10) }
	WrapCodec func(refill.Codec) refill.Codec
}

const (
	defaultName       = "http"
	defaultTTL        = 24 * time.Hour
	defaultLocalBytes = 64 << 20
	defaultMaxBody    = 1 << 20
)

// Cache caches and coalesces responses. Its methods may be called from any goroutine.
type Cache struct {
	loader  *refill.Loader[*response]
	terms   terms
	maxBody int
	marks   *marks
}

// New returns a Cache. It makes no call to the store, so it works while the store is down. An error wraps
// [refill.ErrInvalid] and names the setting. End it with [Cache.Close].
func New(cfg Config) (*Cache, error) {
	switch {
	case cfg.Codec != nil:
		return nil, invalid("Codec", "must be nil, responses have an encoding of their own")
	case cfg.MaxBody < 0:
		return nil, invalid("MaxBody", "%d is negative", cfg.MaxBody)
	}
	setDefault(&cfg.Name, defaultName)
	setDefault(&cfg.MaxBody, defaultMaxBody)
	setDefault(&cfg.TTL, defaultTTL)
	setDefault(&cfg.LocalBytes, defaultLocalBytes)
	setDefault(&cfg.MaxLoads, -1)
	setDefault(&cfg.MaxWaiters, -1)
	cfg.Codec = codec{}
	if cfg.WrapCodec != nil {
		cfg.Codec = cfg.WrapCodec(cfg.Codec)
	}
	if cfg.Codec == nil {
		return nil, invalid("WrapCodec", "returned nil")
	}
	loader, err := refill.New[*response](cfg.Name, nil, cfg.Config)
	if err != nil {
		return nil, err
	}
	return &Cache{
		loader: loader, terms: terms{most: cfg.TTL, staleFor: cfg.StaleFor}, maxBody: cfg.MaxBody, marks: newMarks(),
	}, nil
}

// Middleware returns a handler that answers from the cache, or with what next answers.
//
// It has to see the URLs that clients ask for: put it outside of whatever rewrites them (http.StripPrefix), or Invalidate
// does not find them. One Cache may wrap several handlers, of different URLs.
func (c *Cache) Middleware(next http.Handler) http.Handler {
	return &handler{cache: c, next: next}
}

// Invalidate drops the responses to GET and HEAD for the URLs of the requests, on all nodes, as seen by http and https
// both. When it has returned nil, no response whose making began before is served as fresh from the store; what a
// handler is making now is stored nowhere. Call it after the change is committed.
//
// Of a request only the Host, the URL, and the fields X-Forwarded-Host and X-Forwarded-Prefix count: it can be one that
// http.NewRequest made, or the very POST that made the change. An error means that the store was not reached: see
// refill.Loader.Invalidate for what happens then.
func (c *Cache) Invalidate(ctx context.Context, requests ...*http.Request) error {
	var keys []string
	for _, r := range requests {
		keys = append(keys, keysOf(r)...)
	}
	if len(keys) == 0 {
		return nil
	}
	return c.loader.Invalidate(ctx, keys...)
}

// Close ends the cache: from now on requests go straight to the handlers. It waits for responses that others wait for,
// for LoadTimeout at most, and leaves the shared store open. See refill.Loader.Close for its error.
func (c *Cache) Close() error { return c.loader.Close() }

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func invalid(what, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", refill.ErrInvalid, what, fmt.Sprintf(format, args...))
}
