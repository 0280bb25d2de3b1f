package httprefill

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill"
)

// visit is one request that may be answered from the cache.
type visit struct {
	*handler
	w     http.ResponseWriter
	r     *http.Request
	key   string
	page  string // the tag of the response, or empty, see keyer.of
	class class
	mark  *passMark // this request is the one that is collected while the mark stands; nil for most requests

	owner  context.Context // ends when this request is answered, runs the handler alone, or when its client leaves
	leave  context.CancelFunc
	fill   *http.Request       // what the handler gets when its response may be for all clients
	latest atomic.Pointer[run] // the last run that began while this request waited, also as a background refresh

	collectedOnce atomic.Bool // this request has given back mark.collecting, which another request may have by now

	mu    sync.Mutex // guards the next two
	state visitState
	free  func() // gives the slot of the run alone back; set with state runsAlone
}

// visitState says how a request will be answered. The state changes once, from waits, and then to isAnswered. The
// change decides a race: 1. The time of this request to wait is over, and it wants to run the handler alone. 2. At the
// same moment the flight, whose leader this request is, begins to run the handler for it. If both happened, the handler
// would run twice for one request, and one of the runs would wait for an owner that does not serve it.
type visitState uint8

const (
	waits      visitState = iota // for the response of any run
	runs                         // a run of the handler has begun for this request, which waits for the run
	runsAlone                    // the handler runs for this request alone
	isAnswered                   // or is being answered; a run that begins now is a background refresh
)

// beginRun makes u the run of this request, and reports whether the request waits for it.
func (v *visit) beginRun(u *run) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.state > runs {
		return false
	}
	v.state = runs
	v.latest.Store(u)
	return true
}

// goAlone decides that the handler runs for this request alone. It reports false if that was too late. free gives the
// slot of the run back, and goAlone owns it.
func (v *visit) goAlone(free func()) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.state != waits {
		free()
		return false
	}
	v.state, v.free = runsAlone, free
	return true
}

// answered ends the waiting. If this request is to run the handler alone, answered returns the function that gives the
// slot back.
func (v *visit) answered() (free func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.state = isAnswered
	return v.free
}

// isDone reports whether this request no longer waits for the run of another request, or its client has left.
func (v *visit) isDone() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.state != waits || v.owner.Err() != nil
}

// collected lets another request be collected, if this request was the one under a pass mark.
func (v *visit) collected() {
	if v.mark != nil && v.collectedOnce.CompareAndSwap(false, true) {
		v.mark.collecting.Store(false)
	}
}

// load runs the handler. load returns as soon as it is known whether the response is shared, so that no request
// waits for a response that this request cannot have. The handler may continue to run for its owner. A background
// refresh also calls load. At that time the owner has already been answered.
func (v *visit) load(ctx context.Context, key string) (*response, error) {
	defer v.collected()
	c, fill, fallback := v.cache, refill.FillFrom(ctx), hasFallback(ctx)
	if !fallback {
		fill.SetErrorTTL(0) // a failure belongs to its request: the next request may well succeed
	}
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	u := &run{
		begun: time.Now(), owner: v.owner, ctx: own, cancel: cancel, class: v.class, terms: c.terms, limits: c.limits,
		learn:   func(took time.Duration) { c.passMarks.set(key, v.class, took) },
		decided: make(chan struct{}), ended: make(chan struct{}),
		calls: make(chan func(*outlet)), carried: make(chan struct{}),
		header: make(http.Header),
	}
	v.beginRun(u)
	go u.handle(v.next, v.fill.Clone(own))
	select {
	case <-u.decided:
	case <-ctx.Done(): // LoadTimeout, or all waiters have left: the run goes to its owner
		if ctx.Err() == context.DeadlineExceeded && !fallback {
			c.passMarks.set(key, v.class, c.loadTimeout)
		}
		u.handOver(verdict{kind: failed, why: context.Cause(ctx)})
	}
	switch d := u.verdict; d.kind {
	case failed:
		return nil, d.why
	case uncacheable:
		fill.NoStore()
		fill.SetTTL(0) // a pass mark remembers the no-store, for this class of requests only
		return &response{uncacheable: true}, nil
	default:
		fill.SetTTL(d.lifetime - d.age)
		if v.page != "" {
			fill.Tag(v.page)
		}
		fill.SetStaleFor(d.staleFor)
		fill.SetStaleIfError(d.staleIfError)
		return u.response(), nil
	}
}

// hasFallback reports whether the Loader has an old response to serve if the load with ctx fails. Then the failure has
// a back-off. If the clocks of two nodes differ, hasFallback may be wrong. Then a request may find a back-off without
// an old response, and runs the handler alone.
func hasFallback(ctx context.Context) bool {
	p, _, ok := refill.Previous[*response](ctx)
	return ok && p != nil && p.age(time.Now()) < p.lifetime+p.spare
}
