package httprefill

import (
	"context"
	"errors"
	"net/http"
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
	v := &visit{handler: h, w: w, r: r, class: classOf(r)}
	v.key, v.page = h.cache.keyer.of(r)
	switch mark := h.cache.passMarks.get(v.key, v.class); {
	case mark != nil && r.Method == http.MethodGet && mark.collect():
		v.mark = mark
		v.get()
	case mark != nil:
		v.pass(mark)
	case r.Method == http.MethodHead:
		v.head()
	default:
		v.get()
	}
}

// get answers a GET.
func (v *visit) get() {
	v.owner, v.leave = context.WithCancel(v.r.Context())
	defer v.leave()
	v.fill = fillRequest(v.r)
	p, err := v.ask()
	alone := v.answered()
	if alone != nil {
		defer alone()
	}
	own := v.latest.Load() // the last run that began for this request, or nil
	if own != nil && err != nil && v.r.Context().Err() == nil {
		own.handOver(verdict{kind: failed, why: err}) // after LoadTimeout or Close, load may not have handed the run over yet
	}
	switch {
	case err == nil && p.serves(v.class):
		if v.mark != nil { // the run of this request, or of another node, was collected
			v.cache.passMarks.drop(v.key, v.class)
		}
		v.write(p, own)
	case err != nil && v.r.Context().Err() != nil: // the client has left: its handler is cancelled
		v.gone(err)
	case own != nil && own.is(handedOver): // from now on the run is a pass
		v.cache.passMarks.get(v.key, v.class).pass(func() { own.serve(v.w, v.r) })
	case own != nil && own.is(broken):
		<-own.ended
		setPattern(v.r, own.pattern)
		panic(own.panicked) // the server, or an outer middleware, expects the panic on this goroutine
	case own != nil && err != nil: // complete, while Get returned at LoadTimeout
		v.write(own.response(), own)
	case alone != nil:
		v.mark.pass(v.runAlone) // v.mark is not nil if this request has waited in vain to be collected
	default:
		v.unanswered(p, err)
	}
}

// write answers with p. own is the run that began for this request, or nil.
func (v *visit) write(p *response, own *run) {
	isOwn := own != nil && own.is(complete)
	if isOwn {
		overlay(v.w.Header(), nil, own.dropped())
	}
	p.write(v.w, v.r, isOwn)
}

// ask asks the Loader for the response. If the run of another request fails, ask asks again, so that one of the
// requests that waited runs the handler for all of them. After maxLeaders failures, this request runs the handler alone
// if a slot for that is free. Otherwise ask goes on asking, until the time to wait is over.
func (v *visit) ask() (p *response, err error) {
	defer v.collected() // what follows may take long, and must not keep another request from being collected
	if wait := v.patience(); wait >= 0 {
		timer := time.AfterFunc(wait, v.leaveFlight)
		defer timer.Stop()
	}
	for leaders := 0; ; {
		p, err = v.cache.loader.GetWith(v.owner, v.key, v.load)
		var failed *refill.LoadError
		if !errors.As(err, &failed) || failed.Timeout || v.mark != nil || v.isDone() {
			return p, err
		}
		if leaders += leadersOf(failed); leaders < maxLeaders {
			continue
		}
		if free := v.cache.alone.try(v.key); free != nil {
			v.goAlone(free)
			return p, err
		}
		if failed.RetryAfter > 0 { // the Loader would return the same error at once
			v.leaveFlight()
			return p, err
		}
	}
}

// patience is how long this request waits before it runs the handler without the others; negative = for ever.
func (v *visit) patience() time.Duration {
	if v.mark != nil {
		return v.mark.patience()
	}
	return v.cache.waitTimeout
}

// leaveFlight makes this request run the handler alone, as soon as one of the slots for that is free. It does nothing
// if the request gets an answer first, or if the handler runs for this request already.
func (v *visit) leaveFlight() {
	free := func() {} // a request under a pass mark needs no slot
	if v.mark == nil {
		if v.isDone() {
			return
		}
		if free = v.cache.alone.wait(v.owner, v.key); free == nil {
			return
		}
	}
	if v.goAlone(free) {
		v.leave() // ends GetWith
	}
}

// runAlone lets the handler answer the request itself. If that takes longer than LoadTimeout, no run can be shared, so
// runAlone sets a pass mark.
func (v *visit) runAlone() {
	began := time.Now()
	defer func() {
		if time.Since(began) > v.cache.loadTimeout {
			v.cache.passMarks.set(v.key, v.class, v.cache.loadTimeout)
		}
	}()
	v.next.ServeHTTP(v.w, v.r)
}

// unanswered answers a request for which there is no response, and whose own run has not begun.
func (v *visit) unanswered(p *response, err error) {
	c := v.cache
	var failed *refill.LoadError
	switch {
	case err == nil && p.uncacheable:
		v.pass(c.passMarks.get(v.key, v.class))
	case err == nil: // the response p is not for requests of this class
		v.pass(c.passMarks.setForeign(v.key, v.class))
	case errors.As(err, &failed) && failed.Timeout: // another request waits for longer than LoadTimeout
		v.pass(c.passMarks.set(v.key, v.class, c.loadTimeout))
	case errors.Is(err, refill.ErrOverloaded):
		answerBare(v.w, http.StatusServiceUnavailable, time.Second)
	default: // the cache is closed, or has another problem
		v.pass(v.mark)
	}
}

// head answers a HEAD with the response that a GET has stored. head never runs the handler for a GET, because the
// response to a GET may never end.
func (v *visit) head() {
	if found, ok := v.cache.loader.Peek(v.r.Context(), v.key); ok && found.Value.serves(v.class) {
		found.Value.write(v.w, v.r, false)
		return
	}
	v.pass(nil)
}

// pass lets the handler answer the request itself. The pass mark m, if not nil, stands meanwhile.
func (v *visit) pass(m *passMark) {
	m.pass(func() { v.next.ServeHTTP(v.w, v.r) })
}

// gone ends a request whose client has left. An outer middleware may still read the response, and must not see an empty
// 200.
func (v *visit) gone(err error) {
	if errors.Is(err, context.DeadlineExceeded) {
		answerBare(v.w, http.StatusGatewayTimeout, 0)
		return
	}
	answerBare(v.w, http.StatusServiceUnavailable, 0)
}
