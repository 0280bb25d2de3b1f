package httprefill

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill"
)

// handler wraps an http.Handler with a Cache.
type handler struct {
	cache *Cache
	next  http.Handler
}

// ServeHTTP answers from the cache if the request allows that. ServeHTTP passes all other requests to the handler
// behind it.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !eligible(r) {
		h.next.ServeHTTP(w, r)
		return
	}
	v := &visit{handler: h, w: w, r: r, key: keyOf(r), class: classOf(r)}
	switch mark := h.cache.passMarks.get(v.key, v.class); {
	case mark != nil:
		v.pass(mark)
	case r.Method == http.MethodHead:
		v.head()
	default:
		v.get()
	}
}

// visit is one request that may be answered from the cache.
type visit struct {
	*handler
	w     http.ResponseWriter
	r     *http.Request
	key   string
	class class

	owner  context.Context     // ends when this request is answered, or when its client leaves
	fill   *http.Request       // what the handler gets when its response may be for all clients
	latest atomic.Pointer[run] // the last run that began for this request, also as a background refresh
}

// get answers a GET.
func (v *visit) get() {
	var leave context.CancelFunc
	v.owner, leave = context.WithCancel(v.r.Context())
	defer leave()
	v.fill = fillRequest(v.r)
	p, err := v.cache.loader.GetWith(v.owner, v.key, v.load)
	own := v.latest.Load() // the last run that began for this request, or nil
	if own != nil && err != nil && v.r.Context().Err() == nil {
		own.handOver(verdict{kind: failed, why: err}) // after LoadTimeout or Close, load may not have handed the run over yet
	}
	switch {
	case err == nil && p.serves(v.class):
		p.write(v.w, v.r, own != nil && own.is(complete))
	case err != nil && v.r.Context().Err() != nil: // the client has left: its handler is cancelled
		v.fail(err)
	case own != nil && own.is(handedOver):
		own.serve(v.w, v.r)
	case own != nil && own.is(broken):
		<-own.ended
		setPattern(v.r, own.pattern)
		panic(own.panicked) // the server, or an outer middleware, expects the panic on this goroutine
	case err != nil:
		v.fail(err)
	default:
		if !p.uncacheable {
			v.cache.passMarks.set(v.key, v.class, false) // the response p is not for requests of this class
		}
		v.next.ServeHTTP(v.w, v.r)
	}
}

// load runs the handler. load returns as soon as it is known whether the response is shared, so that no request
// waits for a response that this request cannot have. The handler may continue to run for its owner. A background
// refresh also calls load. At that time the owner has already been answered.
func (v *visit) load(ctx context.Context, key string) (*response, error) {
	c := v.cache
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	u := &run{
		begun: time.Now(), owner: v.owner, class: v.class, ctx: own, cancel: cancel, terms: c.terms, limits: c.limits,
		learn:   func(d verdict) { c.passMarks.set(key, v.class, d.once) },
		decided: make(chan struct{}), ended: make(chan struct{}),
		calls: make(chan func(*outlet)), carried: make(chan struct{}),
		header: make(http.Header),
	}
	v.latest.Store(u)
	go u.handle(v.next, v.fill.Clone(own))
	select {
	case <-u.decided:
	case <-ctx.Done(): // LoadTimeout, or all waiters have left: the run goes to its owner
		u.handOver(verdict{kind: failed, why: context.Cause(ctx)})
	}
	fill := refill.FillFrom(ctx)
	switch d := u.verdict; d.kind {
	case failed:
		return nil, d.why
	case uncacheable:
		fill.NoStore()
		fill.SetTTL(0) // a pass mark remembers the no-store, for this class of requests only
		return &response{uncacheable: true}, nil
	default:
		fill.SetTTL(d.lifetime - d.age)
		fill.SetStaleFor(d.staleFor)
		fill.SetStaleIfError(d.staleIfError)
		return u.response(), nil
	}
}

// head answers a HEAD with the response that a GET has stored. head never runs the handler for a GET, because the
// response to a GET may never end.
func (v *visit) head() {
	if found, ok := v.cache.loader.Peek(v.r.Context(), v.key); ok && found.Value.serves(v.class) {
		found.Value.write(v.w, v.r, false)
		return
	}
	v.next.ServeHTTP(v.w, v.r)
}

// pass lets the handler answer a request whose key and class have the pass mark m. Then pass judges the header of the
// answer. If the answer is not to be shared, pass extends the mark, so that the next requests do not wait for each
// other. If the answer could be shared, pass drops the mark, and the next request fills the cache.
func (v *visit) pass(m *passMark) {
	before := maps.Clone(v.w.Header())
	v.next.ServeHTTP(v.w, v.r)
	if m.once || v.r.Method != http.MethodGet || v.r.Context().Err() != nil {
		return
	}
	now := time.Now()
	d := judge(http.StatusOK, added(before, v.w.Header()), v.class, v.cache.terms, now)
	if d.kind == shared {
		v.cache.passMarks.drop(v.key, v.class)
		return
	}
	v.cache.passMarks.set(v.key, v.class, false)
}

// added returns the header fields and values that are in after but not in before. The handler has set the returned
// fields. An outer middleware has set the fields in before.
func added(before, after http.Header) http.Header {
	h := make(http.Header, len(after))
	for name, values := range after {
		old := before[name]
		switch {
		case slices.Equal(old, values):
		case len(old) < len(values) && slices.Equal(old, values[:len(old)]):
			h[name] = values[len(old):]
		default:
			h[name] = values
		}
	}
	return h
}

// fail answers a request for which there is no response.
func (v *visit) fail(err error) {
	var failed *refill.LoadError
	switch {
	case errors.As(err, &failed):
		f := failureOf(failed)
		if f.personal {
			v.next.ServeHTTP(v.w, v.r)
			return
		}
		answerBare(v.w, f.status, failed.RetryAfter)
	case errors.Is(err, refill.ErrOverloaded):
		answerBare(v.w, http.StatusServiceUnavailable, time.Second)
	case v.r.Context().Err() == nil:
		v.next.ServeHTTP(v.w, v.r) // the cache is closed, or has another problem
	case errors.Is(err, context.DeadlineExceeded):
		answerBare(v.w, http.StatusGatewayTimeout, 0)
	default:
		// The client has left. An outer middleware may still read the response, and must not see an empty 200.
		answerBare(v.w, http.StatusServiceUnavailable, 0)
	}
}
