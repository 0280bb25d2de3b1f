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
// goroutine of its own. At first the run collects the response. Then the run is either complete or handed over to
// its owner, the request that it began for. After the hand-over, the owner's goroutine carries out every call that
// the handler makes. A ResponseWriter must not be used on any other goroutine, nor after its request was answered.
//
//	handler     Write ── Write ── Write ─┐ waits ──────── Write ─┐ ─── returns
//	run         collecting ── too large: handed over        │    │       ended
//	load                          └─ returns: not shared    │    │         │
//	owner       waits for the load ─────────┴─ serve: header, what was collected, each Write … returns
type run struct {
	begun  time.Time
	owner  context.Context // ends when the owner is answered, or when the owner's client leaves
	class  class           // the owner's credentials
	ctx    context.Context // the context of the handler
	cancel context.CancelFunc
	terms  terms
	limits limits
	learn  func(took time.Duration) // sets a pass mark, see remember

	decided chan struct{}      // closed as soon as phase is no longer collecting
	calls   chan func(*outlet) // from the handler to the owner, once handed over
	carried chan struct{}      // gets a value when the owner has carried out a call
	ended   chan struct{}      // closed when the handler has returned

	// These belong to the handler's goroutine. The owner reads header and pattern once ended is closed.
	header  http.Header
	wrote   bool   // WriteHeader was called
	pattern string // set when the handler has ended, see response.pattern

	mu       sync.Mutex // guards the fields below
	phase    phase
	verdict  verdict     // the latest decision about the response; does not change after decided is closed
	status   int         // 0 until the status is collected; stays 0 if the run is handed over before that
	sent     http.Header // a copy of header from the moment when the status was collected
	fields   http.Header // sent with canonical names: what is judged and stored
	body     []byte
	flushed  bool // the handler asked for a flush while the response was collected
	panicked any
	deadline [2]*time.Time // the read and the write deadline that the handler has set; nil = not set
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

// handle runs the handler. r belongs to the handler alone. The caller starts handle on a goroutine of its own, so
// that a panic or Goexit of the handler does not harm the requests that wait for the result.
func (u *run) handle(next http.Handler, r *http.Request) {
	defer u.cancel()
	defer close(u.ended)
	returned, before := false, r.Pattern
	defer func() {
		p := recover()
		if p == nil && !returned {
			p = http.ErrAbortHandler // runtime.Goexit
		}
		if r.Pattern != before {
			u.pattern = r.Pattern
		}
		u.finish(p)
	}()
	next.ServeHTTP(u, r)
	returned = true
}

// finish settles the run after the handler has ended. p is what the handler panicked with, or nil.
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
		u.settle(complete, u.verdict)
	}
}

// settle ends the phase collecting, with p as the next phase and v as the verdict. The caller holds u.mu.
func (u *run) settle(p phase, v verdict) {
	u.phase, u.verdict = p, v
	if p == handedOver {
		context.AfterFunc(u.owner, u.cancel) // calls u.cancel at once if the owner has gone
	}
	u.remember(v)
	close(u.decided)
}

// remember sets a pass mark if the response is uncacheable. While the mark stands, requests of this class for this key
// go to the handler at once, and do not wait for each other (hit-for-miss). A handler that was cancelled may answer
// anything, so remember ignores its response.
func (u *run) remember(v verdict) {
	if v.kind == uncacheable && u.ctx.Err() == nil {
		u.learn(time.Since(u.begun))
	}
}

// handOver hands the run over if the run is still collecting. The handler calls handOver for a 1xx response and for a
// hijack. The owner and its load call handOver when they no longer wait for the response.
func (u *run) handOver(v verdict) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.phase == collecting {
		u.settle(handedOver, v)
	}
}

func (u *run) failure(status int, detail string) verdict {
	return verdict{kind: failed, why: &failure{status: status, detail: detail}}
}

// whole reports whether the body is as long as the header says.
func (u *run) whole() bool {
	declared := u.declared()
	return declared < 0 || declared == int64(len(u.body)) || !bodyAllowed(u.status)
}

// declared returns the Content-Length, or -1 if the header has no valid Content-Length.
func (u *run) declared() int64 {
	values := u.fields["Content-Length"]
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

// response makes the value for the Loader from what a complete run has collected.
func (u *run) response() *response {
	v := u.verdict
	h := storable(without(u.fields, v.drop), u.begun)
	if _, set := h["Content-Type"]; !set && len(u.body) > 0 { // as net/http's server does
		h.Set("Content-Type", http.DetectContentType(u.body))
	}
	return &response{
		open: v.open, born: u.begun.Add(-v.age), lifetime: v.lifetime, spare: max(v.staleFor, v.staleIfError),
		pattern: u.pattern, status: u.status, header: h, body: u.body,
	}
}

// dropped returns the fields of a complete run that are not stored. They are for its owner alone.
func (u *run) dropped() http.Header {
	h := make(http.Header)
	for _, name := range u.verdict.drop {
		if values := u.fields[name]; len(values) > 0 {
			h[name] = values
		}
	}
	return h
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
		u.wrote = true // no other status follows 101
	}
	sent := u.header.Clone()
	_ = u.do(func(o *outlet) { o.writeHeader(status, sent) })
}

// collect keeps the status and the header, and judges them. It returns false if the run was handed over before.
func (u *run) collect(status int, sent http.Header) bool {
	fields := canonical(sent)
	v := judge(status, fields, u.class, u.terms, u.begun, time.Now())
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.phase != collecting {
		u.remember(v) // too late for this run; the next requests use the verdict
		return false
	}
	u.status, u.sent, u.fields, u.verdict = status, sent, fields, v
	switch {
	case v.kind != shared:
		u.settle(handedOver, v)
	case headerSize(fields) > u.limits.header:
		u.settle(handedOver, notShared("header fields above %d bytes", u.limits.header))
	case u.declared() > int64(u.limits.body):
		u.settle(handedOver, notShared("body above %d bytes", u.limits.body))
	}
	return true
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
	case len(u.body)+len(p) > u.limits.body:
		u.settle(handedOver, notShared("body above %d bytes", u.limits.body))
		return false, nil
	}
	u.body = append(u.body, p...)
	return true, nil
}

// FlushError flushes what the handler wrote, if the run was handed over. Before the hand-over FlushError only notes
// that the handler asked for a flush, because a response that may be shared is sent only when it is complete.
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

// Hijack hands the run over, because the handler wants the connection of the request that it sees.
func (u *run) Hijack() (conn net.Conn, buffered *bufio.ReadWriter, err error) {
	u.handOver(notShared("hijacked"))
	err = u.ask(func(rc *http.ResponseController) (err error) {
		conn, buffered, err = rc.Hijack()
		return err
	})
	u.wrote = u.wrote || err == nil // nothing more is written through this run
	return conn, buffered, err
}

// SetReadDeadline sets the deadline of the owner's connection. Before the hand-over, it only notes the deadline for
// begin.
func (u *run) SetReadDeadline(t time.Time) error { return u.setDeadline(0, t) }

// SetWriteDeadline sets the deadline of the owner's connection. Before the hand-over, it only notes the deadline for
// begin.
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

// EnableFullDuplex does nothing, because the request has no body.
func (u *run) EnableFullDuplex() error { return nil }

// ask makes a call on the owner's ResponseController. Before the hand-over, ask does nothing.
func (u *run) ask(call func(*http.ResponseController) error) (err error) {
	if !u.is(handedOver) {
		return nil
	}
	if gone := u.do(func(o *outlet) { err = call(http.NewResponseController(o.w)) }); gone != nil {
		return gone
	}
	return err
}

// is reports whether the run is in phase p.
func (u *run) is(p phase) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.phase == p
}

// do makes the owner carry out a call of the handler, and returns when the owner has done so. If the owner has gone,
// do returns errGone.
func (u *run) do(call func(*outlet)) error {
	select {
	case u.calls <- call:
		<-u.carried // carry sends to carried even if the call panicked
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

// serve answers r, the request of the owner, from a run that was handed over. serve carries out the calls of the
// handler until the handler has returned. A panic of the handler continues on this goroutine, where the server or an
// outer middleware expects the panic.
func (u *run) serve(w http.ResponseWriter, r *http.Request) {
	o := &outlet{w: w, before: maps.Clone(w.Header())}
	u.begin(o)
	for {
		select {
		case call := <-u.calls:
			u.carry(call, o)
		case <-u.ended:
			setPattern(r, u.pattern)
			if u.wrote {
				overlay(w.Header(), o.before, u.header) // sets the trailers; the header fields have been sent
			}
			if u.panicked != nil {
				panic(u.panicked)
			}
			return
		}
	}
}

// begin sends what the run collected before the hand-over.
func (u *run) begin(o *outlet) {
	u.mu.Lock()
	status, sent, body, flushed, deadline := u.status, u.sent, u.body, u.flushed, u.deadline
	u.mu.Unlock()
	rc := http.NewResponseController(o.w)
	for which, t := range deadline {
		if t != nil {
			_ = setDeadline(rc, which, *t) // the handler can no longer get this error: its call returned nil
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
