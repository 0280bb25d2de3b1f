// Package httprefill is a net/http middleware that protects a handler from cache stampedes. When a page expires, the
// handler runs once in the whole fleet. Every other request gets the stale page or waits for that run.
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
// A response that allows caching must depend on nothing but the key. The key consists of the request's scheme, host,
// path and query, and of the fields that handlers make URLs from: Forwarded, X-Forwarded-Host, -Proto, -Prefix, -Path,
// -Port, -Protocol, -Scheme, -Server, -Ssl, -Uri and -Url, Front-End-Https, X-Envoy-Original-Path, X-Host,
// X-Http-Host-Override, X-Original-Host, X-Script-Name and X-Url-Scheme. Config.KeyHeaders and Config.Key add to the
// key. The handler sees the host in lower case, as in the key. A response may depend on something else, for
// instance the user, another header field, the client's address, or a value in the request's context. Such a
// response must say private or no-store. If it depends on another header field, it may name that field in Vary
// instead.
//
// # What is shared
//
// A response is stored, and given to the requests that waited for it, only if all statements of the list below are
// true. Otherwise the response belongs to the one request that it was made for. Every other request then runs the
// handler itself, in parallel.
//
//   - The status is any final status but 206 and 304.
//   - The response says how long it is fresh, by s-maxage, max-age or Expires. Its age is below that time.
//   - Cache-Control can be parsed. It does not say no-cache or private. It does not say no-store, unless it also says
//     must-understand, and the status is one of RFC 9110. If no-cache or private lists field names, the listed fields
//     reach only the client that the handler ran for.
//   - The response has no Set-Cookie, Vary, Content-Encoding, Content-Range, Upgrade or trailer. It has no
//     Access-Control-Allow-Origin other than "*", and is not an event stream. A handler that compresses sets
//     Content-Encoding, so compress outside of this middleware.
//   - If the request came with a Cookie, the response says public or s-maxage. If the request came with
//     Authorization or a TLS client certificate, the response says public, s-maxage or must-revalidate (RFC 9111,
//     3.5). A stored response without these directives is not given to a request with credentials either. This
//     middleware recognises no other credentials, for instance no API key.
//   - The body is complete, has at most MaxBody bytes, and is as long as Content-Length says. The header fields have
//     at most MaxHeader bytes. The handler sent no 1xx response before this response.
//
// The spelling of a field name does not matter, also if the handler has set h["set-cookie"].
//
// A request goes straight to the handler if its method is neither GET nor HEAD, or if it has a body. So does a
// request with Upgrade, Range, Expect, If-Match or If-Unmodified-Since, and a request that accepts
// text/event-stream. So does a request with a header field that claims another URL or method (X-Original-Url,
// X-Http-Method-Override …).
//
// A HEAD is answered with the response that a GET stored. If no response is stored, the HEAD goes straight to the
// handler. The middleware ignores a client's Cache-Control and Pragma. Otherwise any client could use these fields
// to force the handler to run.
//
// # How the handler runs
//
// If a response may turn out to be shared, the handler runs on a goroutine of its own. The request that the handler
// gets has no conditions (If-None-Match …). The handler's context keeps the values of the first request's context,
// but does not end when the first client leaves. The middleware collects the response. Flush does nothing until the
// response is complete.
//
// The run is handed over to the request that started it as soon as one of these things happens: the header says that
// the response is not to be shared; the body outgrows MaxBody; the handler sends a 1xx response, hijacks the
// connection or takes longer than LoadTimeout. After the hand-over, the handler's output streams to that request's
// client, and the handler's context ends when that client leaves. If that client has already left, the handler's
// context is cancelled.
//
// On this node, later requests for such a URL go straight to the handler, so that they do not queue for a response that
// cannot be shared. This is a pass. A URL whose run takes longer than LoadTimeout is passed as well. The passes end ten
// seconds after the last of them. Meanwhile one request at a time is still collected. As soon as its response can be
// shared, the passes end.
//
// A request waits for WaitTimeout at most. Then it runs the handler alone, and its response is not stored. So no
// request gets a 504 because another request's run is slow. At most MaxAlone requests per URL run alone at once in a
// process. The others wait on.
//
// # Failures
//
// A panic, a body that is cut short, and a 5xx response that does not say how long it is fresh are failed loads. Within
// the stale-if-error of the stored response, or within StaleIfError, all requests get the stale response, and the
// handler does not run again before ErrorTTL is over.
//
// Otherwise a failure belongs to the request that the handler ran for. This request gets what the handler wrote, as
// without this middleware. A panic continues in that request's goroutine, without the stack of the handler.
// Config.OnEvent gets the stack. No other request gets anything of the failure: one of the requests that waited runs
// the handler again, for all of them. If that run fails as well, each of the others runs the handler alone. So a client
// whose request makes the handler fail does not make the URL fail for others.
//
// A request beyond MaxWaiters gets 503 with Retry-After. While the store is down, a request beyond MaxLoads also
// gets 503 with Retry-After. On any other problem of the cache, and after Close, the handler runs as if there were
// no cache.
package httprefill

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/refill-go/refill"
)

// Config configures a [Cache]. The zero value is a cache for this process alone.
type Config struct {
	// Config configures the Loader underneath. Here the responses say how long they live, so some settings have another
	// meaning or default than in package refill:
	//
	//   - TTL is not required. TTL limits the lifetime that a response may ask for. Default 24 h.
	//   - StaleFor applies to responses without a stale-while-revalidate of their own, and StaleIfError to responses
	//     without a stale-if-error of their own. A response with must-revalidate, proxy-revalidate or s-maxage is never
	//     served after its lifetime, whatever it says besides (RFC 9111, 5.2.2).
	//   - LoadTimeout must be longer than the handler needs to write the slowest shared response to its last byte.
	//   - ErrorTTL counts only while an old response is served in place of an error.
	//   - MaxLoads and MaxWaiters are off by default, because a handler without a cache has no such limits.
	//   - LocalBytes limits L1 to 64 MiB by default.
	//   - Codec must be nil: responses have an encoding of their own, see WrapCodec.
	refill.Config

	// Name precedes the keys in the shared store and appears in events. Default "http". Caches with the same name share
	// their responses, so the handlers that they wrap must answer alike. Letters, digits, '.', '_' and '-', at most 64
	// bytes.
	Name string

	// MaxBody is the largest body, in bytes, that is stored. A larger body streams to its client and is not shared.
	// Each response that is being collected takes up to MaxBody bytes of memory. Default 1 MiB.
	MaxBody int

	// MaxHeader bounds the header fields of a response that is stored, in bytes as HTTP/1.1 sends them. A response with
	// longer fields goes to its client and is not shared. Default 64 KiB.
	MaxHeader int

	// WaitTimeout is how long a request waits for the response of another request's run. Then the request runs the
	// handler alone, and its response is not shared. Default 5 s. Negative: a request waits until LoadTimeout.
	WaitTimeout time.Duration

	// MaxAlone limits the requests that run the handler alone at once, per process and URL. Requests run alone after
	// WaitTimeout, and after the runs of two other requests have failed. The requests beyond MaxAlone wait on, for a
	// shared response or for their turn. Requests for pages that cannot be shared are not limited. Default 64. Negative:
	// no limit.
	MaxAlone int

	// KeyHeaders lists header fields of requests that responses may depend on, for instance "X-Tenant" or
	// "Accept-Language". Requests with different values have different responses, in any number. So list only fields
	// with few values.
	KeyHeaders []string

	// Key, if not nil, returns something else of a request that responses may depend on, for instance the value of one
	// cookie. Requests for which Key returns different texts have different responses. Key is called from many goroutines,
	// for GET and HEAD requests that the cache may answer. Key must not change the request, and must not read its body.
	Key func(*http.Request) string

	// WrapCodec, if not nil, gets the codec of responses and returns the codec to use, for instance one that
	// compresses. After a change of the codec, all responses in the shared store are misses.
	//
	//	WrapCodec: func(c refill.Codec) refill.Codec { return codec.Compress(c, 4<<10) }
	WrapCodec func(refill.Codec) refill.Codec
}

const (
	defaultName       = "http"
	defaultTTL        = 24 * time.Hour
	defaultLocalBytes = 64 << 20
	defaultMaxBody    = 1 << 20
	defaultMaxHeader  = 64 << 10
	defaultMaxAlone   = 64

	defaultWaitTimeout = 5 * time.Second
	defaultLoadTimeout = 10 * time.Second
)

// Cache caches and coalesces responses. Its methods may be called from any goroutine.
type Cache struct {
	loader    *refill.Loader[*response]
	keyer     keyer
	terms     terms
	limits    limits
	passMarks *passMarks
	alone     *aloneRuns

	waitTimeout, loadTimeout time.Duration // of Config, with defaults; waitTimeout is negative for no limit
}

// New returns a Cache. New does not call the store, so it works while the store is down. An error wraps
// [refill.ErrInvalid] and names the setting. Call [Cache.Close] when the Cache is no longer needed.
func New(cfg Config) (*Cache, error) {
	switch {
	case cfg.Codec != nil:
		return nil, invalid("Codec", "must be nil: responses have an encoding of their own")
	case cfg.MaxBody < 0:
		return nil, invalid("MaxBody", "%d is negative", cfg.MaxBody)
	case cfg.MaxHeader < 0:
		return nil, invalid("MaxHeader", "%d is negative", cfg.MaxHeader)
	}
	for _, name := range cfg.KeyHeaders {
		if !isToken(name) {
			return nil, invalid("KeyHeaders", "%q is not the name of a field", name)
		}
	}
	setDefault(&cfg.Name, defaultName)
	setDefault(&cfg.MaxBody, defaultMaxBody)
	setDefault(&cfg.MaxHeader, defaultMaxHeader)
	setDefault(&cfg.MaxAlone, defaultMaxAlone)
	setDefault(&cfg.WaitTimeout, defaultWaitTimeout)
	setDefault(&cfg.LoadTimeout, defaultLoadTimeout)
	setDefault(&cfg.TTL, defaultTTL)
	setDefault(&cfg.StaleIfError, cfg.StaleFor) // explicit, because the default would be the StaleFor of each response
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
		loader: loader, keyer: newKeyer(cfg.KeyHeaders, cfg.Key),
		terms:     terms{most: cfg.TTL, staleFor: cfg.StaleFor, staleIfError: max(0, cfg.StaleIfError)},
		limits:    limits{body: cfg.MaxBody, header: cfg.MaxHeader},
		passMarks: newPassMarks(), alone: newAloneRuns(cfg.MaxAlone),
		waitTimeout: cfg.WaitTimeout, loadTimeout: cfg.LoadTimeout,
	}, nil
}

// Middleware returns a handler that answers from the cache or passes the request to next.
//
// The returned handler must see the URLs that clients ask for. So put the returned handler outside of any handler
// that rewrites URLs (http.StripPrefix). Otherwise Invalidate does not find the responses. One Cache may wrap
// several handlers if their URLs differ.
func (c *Cache) Middleware(next http.Handler) http.Handler {
	return &handler{cache: c, next: next}
}

// Invalidate removes the responses to GET and HEAD for the URLs of the requests, on all nodes, for both http and
// https. When Invalidate has returned nil, no response that a handler began to make before the call is served as fresh
// from the store. A response that a handler is making now is not stored. Call Invalidate after the change is
// committed.
//
// Only these parts of a request count: the Host, the URL, X-Forwarded-Host and X-Forwarded-Prefix. All responses that
// differ only in other parts of the key are removed. The request can come from http.NewRequest, or can be the POST that
// made the change. An error means that the store was not reached. See refill.Loader.Invalidate for what happens then.
func (c *Cache) Invalidate(ctx context.Context, requests ...*http.Request) error {
	var keys, pages []string
	for _, r := range requests {
		keys, pages = append(keys, keysOf(r)...), append(pages, pageOf(r))
	}
	if len(keys) == 0 {
		return nil
	}
	return errors.Join(c.loader.Invalidate(ctx, keys...), c.loader.InvalidateTag(ctx, pages...))
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
