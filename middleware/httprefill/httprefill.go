// Package httprefill is a net/http middleware that protects a handler from cache stampedes. When a page expires, the
// handler runs once in the whole fleet. All other requests get the stale page or wait for that run.
//
//	pages, err := httprefill.New(httprefill.Config{
//		Config: refill.Config{
//			StaleFor: time.Minute,         // an expired response is served stale, while one node refreshes it
//			Shared:   goredis.New(client), // nil: this process alone
//		},
//	})
//	if err != nil {
//		return err
//	}
//	defer pages.Close()
//	http.ListenAndServe(":8080", pages.Middleware(mux))
//
// Nothing is cached unless the handler allows it: w.Header().Set("Cache-Control", "public, max-age=60").
//
// # The one rule
//
// A response that allows caching must depend on nothing but the key: scheme, host, path and query of the request, and
// its X-Forwarded-Host, -Proto and -Prefix. A response that depends on anything else (the user, another header field,
// the address of the client, a value in the request's context) must say private or no-store, or name the field in Vary.
//
// # What is shared
//
// A response is stored, and given to the requests that waited for it, only if all of the following holds. Otherwise
// the response belongs to the one request that it was made for. All other requests then run the handler themselves, in
// parallel.
//
//   - Its status is 200, 203, 204, 301, 308, 404 or 410.
//   - It says how long it is fresh, by s-maxage, max-age or Expires (as an IMF-fixdate), and its Age is below that.
//   - It does not say no-store, no-cache or private, with or without field names. Its Cache-Control can be parsed.
//   - It has no Set-Cookie, Vary, Content-Encoding, Content-Range, Upgrade or trailer, and no
//     Access-Control-Allow-Origin other than "*". It is not an event stream. Because of Content-Encoding, compress
//     outside of this middleware.
//   - If the request came with a Cookie, the response says public or s-maxage. If the request came with Authorization
//     or a TLS client certificate, the response says public, s-maxage or must-revalidate (RFC 9111, 3.5). A stored
//     response without these directives is not given to a request with credentials either. Other credentials, for
//     instance an API key, are not recognised.
//   - Its body has at most MaxBody bytes, is complete, and is as long as its Content-Length says. No 1xx came before
//     it.
//
// Some requests go straight to the handler: those with a method other than GET and HEAD; those with a body, Upgrade,
// Range, Expect, If-Match or If-Unmodified-Since; those that accept text/event-stream; and those whose header claims
// another URL or method. A HEAD is answered with the response that a GET stored. If there is no such response, the
// HEAD goes straight to the handler. A client's Cache-Control and Pragma are ignored. Otherwise any client could use
// them to force the handler to run.
//
// # How the handler runs
//
// If a response may turn out to be shared, the handler runs on a goroutine of its own. Its request has no conditions
// (If-None-Match …). The context of the handler keeps the values of the first request's context, but does not end when
// that client leaves. The response is collected; until it is complete, Flush does nothing.
//
// The run is handed over to the request that it began for as soon as the header says that the response is not to be
// shared, the body outgrows MaxBody, or the handler sends a 1xx, hijacks the connection or takes longer than
// LoadTimeout. From then on, the handler's output streams to that client, and the handler's context ends when that
// client leaves. If the client has already left, the context is cancelled. Requests for such a URL go straight to the
// handler on this node until ten seconds after the last request for it, so that requests do not queue for a response
// that cannot be shared.
//
// # Failures
//
// A 5xx response, a panic and a body that is cut short are failed loads. Within StaleIfError all requests get the
// stale response. Otherwise the request that the handler ran for gets what the handler wrote, as without this
// middleware. A panic continues in that request's goroutine, without the stack of the handler (Config.OnEvent gets the
// stack). The requests that waited, and all that come within ErrorTTL, get the bare status: 500 for a panic, 502 for a
// response that was cut short, 504 after LoadTimeout. These requests get no body and no header field of the failed
// response, because that response may be meant for another user. If the failed request had credentials, the failure
// may be specific to its user, so all other requests run the handler themselves. If a handler answers 5xx to a
// malformed request, any client can make a URL fail for ErrorTTL. So reject bad input with 4xx, or turn ErrorTTL off.
//
// A request beyond MaxWaiters gets 503 with Retry-After. While the store is down, a request beyond MaxLoads gets the
// same answer. On any other problem of the cache, and after Close, the handler runs as if there were no cache.
package httprefill

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/refill-go/refill"
)

// Config configures a [Cache]. The zero value is a cache for this process alone.
type Config struct {
	// Config configures the Loader underneath. Here the responses say how long they live, so some settings differ from
	// their meaning in package refill:
	//
	//   - TTL is not required. It limits the lifetime that a response may ask for. Default 24 h.
	//   - StaleFor applies to responses without a stale-while-revalidate of their own. StaleFor does not apply to
	//     responses with must-revalidate, proxy-revalidate or s-maxage.
	//   - StaleIfError applies to all responses except those with must-revalidate or proxy-revalidate.
	//   - LoadTimeout must be longer than the slowest shared response takes up to its last byte.
	//   - MaxLoads and MaxWaiters are off by default, because a handler without a cache has no such limits.
	//   - LocalBytes limits L1 to 64 MiB by default.
	//   - Codec must be nil: responses have an encoding of their own, see WrapCodec.
	refill.Config

	// Name precedes the keys in the shared store and appears in events. Default "http". Caches with the same name share
	// their responses, so the handlers that they wrap must answer alike. Letters, digits, '.', '_' and '-', at most 64
	// bytes.
	Name string

	// MaxBody is the largest body, in bytes, that is stored. A larger body streams to its client and is not shared. Each
	// response that is being collected uses up to this much memory. Default 1 MiB.
	MaxBody int

	// WrapCodec, if it is not nil, gets the encoding of responses and returns the one to use, for instance to compress
	// what the shared store holds. With a new encoding, all stored responses become misses, as with any change of a
	// codec.
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
	loader    *refill.Loader[*response]
	terms     terms
	maxBody   int
	passMarks *passMarks
}

// New returns a Cache. It does not call the store, so it works while the store is down. An error wraps
// [refill.ErrInvalid] and names the setting. Call [Cache.Close] when the Cache is no longer needed.
func New(cfg Config) (*Cache, error) {
	switch {
	case cfg.Codec != nil:
		return nil, invalid("Codec", "must be nil: responses have an encoding of their own")
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
		loader: loader, terms: terms{most: cfg.TTL, staleFor: cfg.StaleFor}, maxBody: cfg.MaxBody,
		passMarks: newPassMarks(),
	}, nil
}

// Middleware returns a handler that answers from the cache or passes the request to next.
//
// The returned handler must see the URLs that clients ask for. So put it outside of any handler that rewrites URLs
// (http.StripPrefix). Otherwise Invalidate does not find the responses. One Cache may wrap several handlers if their
// URLs differ.
func (c *Cache) Middleware(next http.Handler) http.Handler {
	return &handler{cache: c, next: next}
}

// Invalidate removes the responses to GET and HEAD for the URLs of the requests, on all nodes, for both http and
// https. When Invalidate has returned nil, no response that a handler began to make before the call is served as fresh
// from the store. A response that a handler is making now is not stored. Call Invalidate after the change is
// committed.
//
// Only these parts of a request count: the Host, the URL, X-Forwarded-Host and X-Forwarded-Prefix. The request can
// come from http.NewRequest, or can be the POST that made the change. An error means that the store was not reached:
// see refill.Loader.Invalidate for what happens then.
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

// Close ends the cache: from now on requests go straight to the handlers. Close waits, for LoadTimeout at most, until
// the responses that requests wait for are complete. The shared store stays open. See refill.Loader.Close for the
// error.
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
