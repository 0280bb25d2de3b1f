package httprefill

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// run is one run of the handler whose response may turn out to be shared. The handler writes to the run from a
// goroutine of its own. At first the run collects the response. Then the response is either complete or handed over.
// After the hand-over, the request that the run began for (its owner) carries out every call of the handler, on the
// owner's goroutine. A ResponseWriter must not be used on any other goroutine, nor after its request was answered.
//
//	handler     Write ── Write ── Write ─┐ waits ──────── Write ─┐ ─── returns
//	run         collecting ── too large: handed over        │    │       ended
//	load                          └─ returns: not shared    │    │         │
//	owner       waits for the load ─────────┴─ serve: header, what was collected, each Write … returns
type run struct {
	begun   time.Time
	owner   context.Context // ends when the owner was answered, or when the owner's client has left
	class   class           // of the owner
	ctx     context.Context // the handler's
	cancel  context.CancelFunc
	terms   terms
	maxBody int
	learn   func(verdict) // see remember

	decided chan struct{}      // closed as soon as phase is no longer collecting
	calls   chan func(*outlet) // from the handler to the owner, once handed over
	carried chan struct{}      // answers each call
	ended   chan struct{}      // closed when the handler has returned

	// These belong to the handler's goroutine. The owner reads header once ended is closed.
	header http.Header
	wrote  bool // WriteHeader was called

	mu       sync.Mutex // guards the fields below
	phase    phase
	verdict  verdict     // by the part of the header that is known; fixed when decided is closed
	status   int         // 0 until the status is collected; stays 0 if the run was handed over before
	sent     http.Header // header when status was collected
	body     []byte
	took     time.Duration // until the response was complete
	flushed  bool          // the handler asked for a flush while the response was collected
	panicked any
	deadline [2]*time.Time // set by the handler for its connection: read, write
}

type phase uint8

const (
	collecting phase = iota
	handedOver       // the owner continues the response; status, sent and body no longer change
	complete         // the response may be shared
	broken           // the handler panicked before its response was complete or handed over
)

var (
	errGone = errors.New("httprefill: no request waits for this response")
	errOver = errors.New("httprefill: the handler has returned")
)

// handle runs the handler. r belongs to the handler alone. handle needs a goroutine of its own, because nothing that
// the handler does may harm the requests that wait for the result.
func (u *run) handle(next http.Handler, r *http.Request) {
	defer u.cancel()
	defer close(u.ended)
	returned := false
	defer func() {
		p := recover()
		if p == nil && !returned {
			p = http.ErrAbortHandler // runtime.Goexit
		}
		u.finish(p)
	}()
	next.ServeHTTP(u, r)
	returned = true
}

// finish decides what became of the response, after the handler has ended.
func (u *run) finish(p any) {
	if p == nil && !u.wrote {
		u.WriteHeader(http.StatusOK)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.panicked = p
	switch {
	case u.phase != collecting:
	case p != nil:
		status := http.StatusInternalServerError
		if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
			status = http.StatusBadGateway
		}
		u.settle(broken, u.failure(status, fmt.Sprintf("panic: %v\n\n%s", p, debug.Stack())))
	case !u.whole():
		u.settle(handedOver, u.failure(http.StatusBadGateway, "the body is shorter than its Content-Length"))
	case u.trailers():
		u.settle(handedOver, notShared("trailers"))
	default:
		u.took = time.Since(u.begun)
		u.settle(complete, u.verdict)
	}
}

// settle ends the collecting. The caller holds u.mu.
func (u *run) settle(p phase, v verdict) {
	u.phase, u.verdict = p, v
	if p == handedOver {
		context.AfterFunc(u.owner, u.cancel) // runs at once if the owner has gone
	}
	u.remember(v)
	close(u.decided)
}

// remember records that the response is not shared. The response of a cancelled handler is no evidence of that.
func (u *run) remember(v verdict) {
	if v.kind == uncacheable && u.ctx.Err() == nil {
		u.learn(v)
	}
}

// handOver ends the collecting from outside of the handler, or before there is a status.
func (u *run) handOver(v verdict) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.phase == collecting {
		u.settle(handedOver, v)
	}
}

func (u *run) failure(status int, detail string) verdict {
	return verdict{kind: failed, why: &failure{status: status, personal: u.class != 0, detail: detail}}
}

// whole reports whether the body is as long as the header says.
func (u *run) whole() bool {
	declared := u.declared()
	return declared < 0 || declared == int64(len(u.body)) || !bodyAllowed(u.status)
}

// declared returns the Content-Length, negative if there is none.
func (u *run) declared() int64 {
	values := u.sent["Content-Length"]
	if len(values) == 0 {
		return -1
	}
	n, err := strconv.ParseInt(values[0], 10, 64)
	if err != nil || n < 0 || len(values) > 1 {
		return -1
	}
	return n
}

func (u *run) trailers() bool {
	for name := range u.header {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			return true
		}
	}
	return false
}

// response returns the complete response.
func (u *run) response() *response {
	v := u.verdict
	h := storable(u.sent, u.begun)
	if _, set := h["Content-Type"]; !set && len(u.body) > 0 { // as the server would
		h.Set("Content-Type", http.DetectContentType(u.body))
	}
	return &response{
		open: v.open, strict: v.strict, born: u.begun.Add(-v.age), took: v.age + u.took, lifetime: v.lifetime,
		status: u.status, header: h, body: u.body,
	}
}

// Header implements http.ResponseWriter.
func (u *run) Header() http.Header { return u.header }

// WriteHeader decides whether the response may be shared.
func (u *run) WriteHeader(status int) {
	if status >= 100 && status < 200 {
		u.handOver(notShared("status %d", status))
		u.interim(status)
		return
	}
	if u.wrote {
		return
	}
	u.wrote = true
	sent := u.header.Clone()
	if !u.collect(status, sent) {
		_ = u.do(func(o *outlet) { o.writeHeader(status, sent) })
	}
}

func (u *run) interim(status int) {
	if u.wrote {
		return
	}
	if status == http.StatusSwitchingProtocols {
		u.wrote = true // this status is final
	}
	sent := u.header.Clone()
	_ = u.do(func(o *outlet) { o.writeHeader(status, sent) })
}

// collect takes the status, unless the run was handed over.
func (u *run) collect(status int, sent http.Header) bool {
	v := judge(status, sent, u.class, u.terms, time.Now())
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.phase != collecting {
		u.remember(v) // this run is already handed over; the next requests use the verdict
		return false
	}
	u.status, u.sent, u.verdict = status, sent, v
	if v.kind != shared {
		u.settle(handedOver, v)
	} else if u.declared() > int64(u.maxBody) {
		u.settle(handedOver, u.tooLarge())
	}
	return true
}

func (u *run) tooLarge() verdict {
	v := notShared("body above %d bytes", u.maxBody)
	v.once = true
	return v
}

// Write collects p, or passes it to the owner.
func (u *run) Write(p []byte) (n int, err error) {
	if !u.wrote {
		u.WriteHeader(http.StatusOK)
	}
	if taken, err := u.collectBody(p); taken {
		return len(p), err
	} else if err != nil {
		return 0, err
	}
	if gone := u.do(func(o *outlet) { n, err = o.w.Write(p) }); gone != nil {
		return 0, gone
	}
	return n, err
}

func (u *run) collectBody(p []byte) (taken bool, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch declared := u.declared(); {
	case u.phase == handedOver:
		return false, nil
	case u.phase != collecting:
		return false, errOver
	case !bodyAllowed(u.status):
		return false, http.ErrBodyNotAllowed
	case declared >= 0 && int64(len(u.body)+len(p)) > declared:
		u.settle(handedOver, notShared("body longer than its Content-Length"))
		return false, nil
	case len(u.body)+len(p) > u.maxBody:
		u.settle(handedOver, u.tooLarge())
		return false, nil
	}
	u.body = append(u.body, p...)
	return true, nil
}

// FlushError flushes what was written, once it is known that the response goes to one client only. Before that there
// is no client to flush to, because a response that may be shared is sent only when it is complete.
func (u *run) FlushError() (err error) {
	if !u.wrote {
		u.WriteHeader(http.StatusOK)
	}
	u.mu.Lock()
	u.flushed = u.flushed || u.phase == collecting
	u.mu.Unlock()
	return u.ask(func(rc *http.ResponseController) error { return rc.Flush() })
}

// Flush implements http.Flusher.
func (u *run) Flush() { _ = u.FlushError() }

// Hijack hands the run over: the handler wants the connection of the request that it sees.
func (u *run) Hijack() (conn net.Conn, buffered *bufio.ReadWriter, err error) {
	u.handOver(notShared("hijacked"))
	err = u.ask(func(rc *http.ResponseController) (err error) {
		conn, buffered, err = rc.Hijack()
		return err
	})
	u.wrote = u.wrote || err == nil // nothing more is written through this run
	return conn, buffered, err
}

// SetReadDeadline applies to the owner's connection, from the hand-over on.
func (u *run) SetReadDeadline(t time.Time) error { return u.setDeadline(0, t) }

// SetWriteDeadline applies to the owner's connection, from the hand-over on.
func (u *run) SetWriteDeadline(t time.Time) error { return u.setDeadline(1, t) }

func (u *run) setDeadline(which int, t time.Time) error {
	u.mu.Lock()
	u.deadline[which] = &t
	u.mu.Unlock()
	return u.ask(func(rc *http.ResponseController) error { return setDeadline(rc, which, t) })
}

func setDeadline(rc *http.ResponseController, which int, t time.Time) error {
	if which == 0 {
		return rc.SetReadDeadline(t)
	}
	return rc.SetWriteDeadline(t)
}

// EnableFullDuplex does nothing: there is no request body.
func (u *run) EnableFullDuplex() error { return nil }

// ask makes a call on the owner's connection. Before the hand-over, ask does nothing.
func (u *run) ask(call func(*http.ResponseController) error) (err error) {
	if !u.is(handedOver) {
		return nil
	}
	if gone := u.do(func(o *outlet) { err = call(http.NewResponseController(o.w)) }); gone != nil {
		return gone
	}
	return err
}

// is reports whether the run is in this phase.
func (u *run) is(p phase) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.phase == p
}

// do makes the owner carry out a call of the handler, and returns when that is done.
func (u *run) do(call func(*outlet)) error {
	select {
	case u.calls <- call:
		<-u.carried // also when the call panicked
		return nil
	case <-u.owner.Done():
		return errGone
	}
}

// outlet is the owner's ResponseWriter.
type outlet struct {
	w      http.ResponseWriter
	before http.Header // what an outer middleware had set
}

func (o *outlet) writeHeader(status int, sent http.Header) {
	h := o.w.Header()
	clear(h)
	maps.Copy(h, o.before)
	overlay(h, o.before, sent)
	h["Cache-Status"] = append(slices.Clip(h["Cache-Status"]), cacheName+"; fwd=miss")
	o.w.WriteHeader(status)
}

// serve answers the owner with a run that was handed over. A panic of the handler continues here, where the server or
// an outer middleware expects it.
func (u *run) serve(w http.ResponseWriter) {
	o := &outlet{w: w, before: maps.Clone(w.Header())}
	u.begin(o)
	for {
		select {
		case call := <-u.calls:
			u.carry(call, o)
		case <-u.ended:
			if u.wrote {
				overlay(w.Header(), o.before, u.header) // for trailers: the other header fields have been sent
			}
			if u.panicked != nil {
				panic(u.panicked)
			}
			return
		}
	}
}

// begin sends what was collected.
func (u *run) begin(o *outlet) {
	u.mu.Lock()
	status, sent, body, flushed, deadline := u.status, u.sent, u.body, u.flushed, u.deadline
	u.mu.Unlock()
	rc := http.NewResponseController(o.w)
	for which, t := range deadline {
		if t != nil {
			_ = setDeadline(rc, which, *t) // the handler already got nil, as most writers return
		}
	}
	if status != 0 {
		o.writeHeader(status, sent)
	}
	if len(body) > 0 {
		_, _ = o.w.Write(body) // the handler gets an error from its next Write
	}
	if flushed {
		_ = rc.Flush()
	}
}

func (u *run) carry(call func(*outlet), o *outlet) {
	defer func() { u.carried <- struct{}{} }()
	call(o)
}
