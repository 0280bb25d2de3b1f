package flight

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
)

// ErrFull is returned by Admit when too many callers wait already.
var ErrFull = errors.New("flight: too many callers")

// Group holds flights. At most one flight per key can be joined.
type Group[A, M any] struct {
	maxWaiters int64
	waiting    atomic.Int64 // callers between Admit and Depart

	closed atomic.Bool   // set by Close, under mu; then no new flight starts
	done   chan struct{} // closed when the group is closed and no flight runs

	mu        sync.Mutex                 // guards all below, and the fields of a Flight that name it
	byKey     map[string]*Flight[A, M]   // the flight that can be joined
	listening map[string]*Flight[A, M]   // flights with an inbox, linked by sibling; some can no longer be joined
	running   map[*Flight[A, M]]struct{} // flights that have not ended
}

// NewGroup returns a Group that admits maxWaiters callers at once.
func NewGroup[A, M any](maxWaiters int) *Group[A, M] {
	return &Group[A, M]{
		maxWaiters: int64(maxWaiters),
		done:       make(chan struct{}),
		byKey:      make(map[string]*Flight[A, M]),
		listening:  make(map[string]*Flight[A, M]),
		running:    make(map[*Flight[A, M]]struct{}),
	}
}

// Want says what a caller expects of a flight.
type Want uint8

// The kinds of Want.
const (
	// Answer: any answer will do.
	Answer Want = iota
	// Refresh: the call must do its work even if there is an answer already. The caller joins only a flight that was
	// started for a Refresh.
	Refresh
	// Background: the caller does not wait. The caller starts a flight only if the key has none.
	Background
	// Final is like Answer, but the caller may refuse an early answer and wait for the final one. Until such a caller
	// leaves, the flight counts as awaited.
	Final
)

// Role is what a caller is in a flight.
type Role uint8

// The roles in a flight.
const (
	// None: a caller with Background found a flight, so it has nothing to do.
	None Role = iota
	// Leader: the caller has started the flight, and owns the flight. A Leader that did not join with Background also
	// waits and leaves like a Waiter.
	Leader
	// Waiter: the caller has joined a flight. The caller calls Wait, and Leave at the end.
	Waiter
	// Latecomer: the caller has joined a flight after its first answer or after MarkLate. The caller waits and leaves like
	// a Waiter, but has to judge whether the answer is new enough.
	Latecomer
	// Observer: a caller with Refresh found a flight that was not started for a Refresh. The caller may call WaitEnd,
	// but does not call Leave.
	Observer
)

// Admit counts a caller that is going to wait, until the caller calls Depart. If the number of counted callers has
// reached maxWaiters, Admit returns ErrFull and does not count the caller. An exempt caller is counted in any case.
func (g *Group[A, M]) Admit(exempt bool) error {
	for {
		n := g.waiting.Load()
		if n >= g.maxWaiters && !exempt {
			return ErrFull
		}
		if g.waiting.CompareAndSwap(n, n+1) {
			return nil
		}
	}
}

// Depart ends the count of an admitted caller. Each admitted caller calls Depart once, when it no longer waits.
func (g *Group[A, M]) Depart() { g.waiting.Add(-1) }

// Join joins the flight of key, or starts one if there is none. A caller that wants an Answer or Final does not join a
// flight that was started for a Refresh, because that flight does not answer with a stored value. Join starts another
// flight for this caller, and later callers join that other flight. urgent says that the call must not wait in a queue
// while this caller waits for the call. The call learns of that through [Flight.Urgent].
func (g *Group[A, M]) Join(
	ctx context.Context, key string, want Want, urgent bool,
) (f *Flight[A, M], role Role, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed.Load() {
		return nil, None, ErrClosed
	}
	f = g.byKey[key]
	switch {
	case f == nil || f.refresh && (want == Answer || want == Final):
		return g.start(ctx, key, want, urgent), Leader, nil
	case want == Background:
		return nil, None, nil
	case want == Refresh && !f.refresh:
		return f, Observer, nil
	}
	f.enter(want)
	if urgent && !f.hurried {
		f.hurried = true
		if f.urgent != nil {
			close(f.urgent)
		}
	}
	if f.late || f.delivered() {
		return f, Latecomer, nil
	}
	return f, Waiter, nil
}

// start makes a flight. The caller holds g.mu.
func (g *Group[A, M]) start(ctx context.Context, key string, want Want, urgent bool) *Flight[A, M] {
	f := &Flight[A, M]{
		group: g, key: key, refresh: want == Refresh, hurried: urgent,
		ready: make(chan struct{}), done: make(chan struct{}),
	}
	if f.background = want == Background; !f.background {
		f.enter(want)
	}
	f.values = context.WithoutCancel(ctx)
	f.ctx, f.cancel = context.WithCancelCause(f.values)
	g.byKey[key] = f
	g.running[f] = struct{}{}
	return f
}

// forget keeps later callers from joining a flight. The caller holds g.mu.
func (g *Group[A, M]) forget(f *Flight[A, M]) {
	if g.byKey[f.key] == f {
		delete(g.byKey, f.key)
	}
}

// Has reports whether key has a flight that can be joined.
func (g *Group[A, M]) Has(key string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.byKey[key] != nil
}

// Forget keeps later callers from joining the flight of key. The flight goes on for the callers that have joined.
func (g *Group[A, M]) Forget(key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.byKey, key)
}

// ForgetAll does for all keys what Forget does for one key.
func (g *Group[A, M]) ForgetAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	clear(g.byKey)
}

// Notify puts a message into the inbox of every flight of key, including flights that can no longer be joined. A flight
// that callers can join notes the message for Latest, even if the flight has no inbox.
func (g *Group[A, M]) Notify(key string, m M) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if f := g.byKey[key]; f != nil {
		f.setLatest(m)
	}
	for f := g.listening[key]; f != nil; f = f.sibling {
		f.setLatest(m)
		f.receive(m)
	}
}

// NotifyAll puts a message into the inbox of every flight.
func (g *Group[A, M]) NotifyAll(m M) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for f := range g.running {
		f.receive(m) // a flight without an inbox drops m
	}
}

// unlisten removes a flight that has ended from the flights with an inbox. The caller holds g.mu.
func (g *Group[A, M]) unlisten(f *Flight[A, M]) {
	first := g.listening[f.key]
	switch {
	case f.inbox == nil:
	case first != f:
		for first.sibling != f {
			first = first.sibling
		}
		first.sibling = f.sibling
	case f.sibling != nil:
		g.listening[f.key] = f.sibling
	default:
		delete(g.listening, f.key)
	}
}

// Close keeps new flights from starting. It also ends the context of each background flight that no caller waits for.
func (g *Group[A, M]) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed.Swap(true) {
		return
	}
	for f := range g.running {
		if f.background && f.waiters == 0 {
			f.cancel(ErrClosed)
		}
	}
	g.checkDone()
}

// Closed reports whether Close was called.
func (g *Group[A, M]) Closed() bool { return g.closed.Load() }

// Done returns a channel that is closed after Close, when no flight runs any more.
func (g *Group[A, M]) Done() <-chan struct{} { return g.done }

// Abort ends the context of every flight.
func (g *Group[A, M]) Abort() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for f := range g.running {
		f.cancel(ErrClosed)
	}
}

// checkDone closes done if the group is closed and no flight runs. End and Close call it. The caller holds g.mu.
func (g *Group[A, M]) checkDone() {
	if g.closed.Load() && len(g.running) == 0 {
		close(g.done)
	}
}
