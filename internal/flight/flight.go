// Package flight lets many callers of one key share one call. Callers join a flight, wait and leave. The call delivers
// an answer, and the flight ends. The package does not know what the call does.
//
// This package can do four things that golang.org/x/sync/singleflight cannot. One caller can leave while the others
// wait. The context of the call ends when the last caller has left. A call can answer early and go on. A group can be
// closed.
package flight

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

var (
	// ErrAbandoned is the cause of a flight's context when the last caller has left.
	ErrAbandoned = errors.New("flight: all callers have left")
	// ErrClosed is returned by Join after Close. It is also the cause of a flight's context that Close or Abort has ended.
	ErrClosed = errors.New("flight: group is closed")
	// ErrNoAnswer is returned by Wait and WaitEnd when the flight ended without an answer.
	ErrNoAnswer = errors.New("flight: ended without an answer")
)

// Flight is the one call for a key that callers share. A is the type of the answer, and M is the type of a message
// about the key.
//
// The leader owns a flight. The leader may pass the flight on to another goroutine, which then is the owner. The owner
// calls End exactly once. Only the owner may call the methods of the flight, except those whose comment allows other
// callers.
type Flight[A, M any] struct {
	group   *Group[A, M]
	key     string
	refresh bool // the leader joined with Refresh, so this flight does not answer with a stored value

	// values has the values of the leader's context and never ends. ctx ends when the last caller has left.
	values context.Context
	ctx    context.Context
	cancel context.CancelCauseFunc

	deliver sync.Once     // guards ready and answer
	ready   chan struct{} // closed when answer can be read
	answer  A             // written before ready is closed, by the call or by the timer

	done     chan struct{} // closed when the flight has ended; final and finished are read only after that
	final    A
	finished bool // Finish was called, so final is valid

	latest atomic.Pointer[M] // see Latest; Notify sets it, and DrainInbox clears it

	timer *time.Timer // set by DeliverAfter: delivers the answer after the delay, unless another answer comes first

	// Guarded by group.mu.
	waiters    int  // callers that have joined and not left
	insisting  int  // how many of the waiters joined with Final
	late       bool // MarkLate was called
	background bool // the flight goes on without waiters
	hurried    bool // an urgent caller has joined, see Group.Join

	// Each of these is made when it is first needed. Most flights need none.
	eased  chan struct{} // gets a signal when the flight may have become Unawaited; guarded by group.mu
	inbox  chan M        // messages about the key; a full inbox drops messages, because they are hints
	urgent chan struct{} // closed when an urgent caller has joined; guarded by group.mu

	sibling *Flight[A, M] // the next flight of this key in group.listening, or nil; guarded by group.mu
}

// Context returns the context of the call, with the values of the leader's context. The context ends when the last
// caller has left, at the end of the flight, and by Abort. If the flight goes on in the background, the context does
// not end with the last caller. Then Close ends the context, as soon as no caller waits.
func (f *Flight[A, M]) Context() context.Context { return f.ctx }

// Values returns a context that has the values of Context and never ends. It is for work after the callers have left.
func (f *Flight[A, M]) Values() context.Context { return f.values }

// Deliver answers the callers. Only the first answer counts. The flight may go on.
func (f *Flight[A, M]) Deliver(a A) {
	f.deliver.Do(func() {
		f.answer = a
		close(f.ready)
	})
}

// DeliverAfter delivers a after d, unless another answer is delivered first. Only the first DeliverAfter counts.
func (f *Flight[A, M]) DeliverAfter(d time.Duration, a A) {
	switch {
	case d == 0:
		f.Deliver(a)
	case f.timer == nil:
		f.timer = time.AfterFunc(d, func() {
			f.Deliver(a)
			f.group.mu.Lock()
			defer f.group.mu.Unlock()
			f.ease()
		})
	}
}

// Finish makes a the final answer of the flight. If no answer was delivered before, Finish also delivers a.
func (f *Flight[A, M]) Finish(a A) {
	f.final, f.finished = a, true
	f.Deliver(a)
}

// Wait waits for the first answer and returns it. Any caller of the flight may call Wait.
func (f *Flight[A, M]) Wait(ctx context.Context) (a A, err error) {
	select {
	case <-f.ready:
		return f.answer, nil
	case <-ctx.Done():
		return a, ctx.Err()
	case <-f.done:
		if f.delivered() {
			return f.answer, nil
		}
		return a, ErrNoAnswer
	}
}

// WaitEnd waits for the end of the flight and returns its final answer. Any caller may call WaitEnd, including an
// Observer.
func (f *Flight[A, M]) WaitEnd(ctx context.Context) (a A, err error) {
	select {
	case <-ctx.Done():
		return a, ctx.Err()
	case <-f.done:
		if !f.finished {
			return a, ErrNoAnswer
		}
		return f.final, nil
	}
}

func (f *Flight[A, M]) delivered() bool {
	select {
	case <-f.ready:
		return true
	default:
		return false
	}
}

// Leave is called exactly once by each Waiter and Latecomer, and by each Leader that did not join with Background. want
// is what the caller joined with. When the last caller leaves a flight that is not in the background, Leave cancels the
// flight. Leave holds the mutex of the group meanwhile, and keeps later callers from joining the flight. Otherwise a
// later caller could join the cancelled flight, and would get a cancellation although its own ctx has not ended.
func (f *Flight[A, M]) Leave(want Want) {
	g := f.group
	g.mu.Lock()
	defer g.mu.Unlock()
	f.waiters--
	if want == Final {
		f.insisting--
	}
	f.ease()
	switch {
	case f.waiters > 0:
	case !f.background:
		g.forget(f)
		f.cancel(ErrAbandoned)
	case g.closed.Load():
		f.cancel(ErrClosed)
	}
}

// enter adds a waiter. The caller holds group.mu.
func (f *Flight[A, M]) enter(want Want) {
	f.waiters++
	if want == Final {
		f.insisting++
	}
}

// MarkLate makes every later caller a [Latecomer].
func (f *Flight[A, M]) MarkLate() {
	f.group.mu.Lock()
	defer f.group.mu.Unlock()
	f.late = true
}

// Forget keeps later callers from joining this flight. The flight goes on for the callers that have joined. Any caller
// of the flight may call Forget.
func (f *Flight[A, M]) Forget() {
	f.group.mu.Lock()
	defer f.group.mu.Unlock()
	f.group.forget(f)
}

// ContinueInBackground lets the flight go on after its callers have left. It returns false if all callers have left
// already or the group is closed. The flight then cannot go on.
func (f *Flight[A, M]) ContinueInBackground() bool {
	f.group.mu.Lock()
	defer f.group.mu.Unlock()
	if !f.background && (f.group.closed.Load() || f.ctx.Err() != nil) {
		return false
	}
	f.background = true
	return true
}

// Unawaited reports whether the flight runs in the background and no caller waits for its answer. A caller that joined
// with Final counts as waiting until it leaves. Any other caller no longer counts after an answer was delivered.
func (f *Flight[A, M]) Unawaited() bool {
	f.group.mu.Lock()
	defer f.group.mu.Unlock()
	return f.background && f.insisting == 0 && (f.waiters == 0 || f.delivered())
}

// Eased returns a channel that gets a signal when the flight may have become [Flight.Unawaited] after the first call of
// Eased.
func (f *Flight[A, M]) Eased() <-chan struct{} {
	f.group.mu.Lock()
	defer f.group.mu.Unlock()
	if f.eased == nil {
		f.eased = make(chan struct{}, 1)
	}
	return f.eased
}

// ease signals Eased. The caller holds group.mu.
func (f *Flight[A, M]) ease() {
	if f.background && f.eased != nil {
		select {
		case f.eased <- struct{}{}:
		default:
		}
	}
}

// Listen opens the inbox of the flight. A second call has no effect.
func (f *Flight[A, M]) Listen() {
	g := f.group
	g.mu.Lock()
	defer g.mu.Unlock()
	if f.inbox != nil {
		return
	}
	f.inbox = make(chan M, 4)
	f.sibling, g.listening[f.key] = g.listening[f.key], f
}

// Inbox returns the channel that receives the messages about the key. It is nil before Listen.
func (f *Flight[A, M]) Inbox() <-chan M { return f.inbox }

// Urgent returns a channel that is closed when an urgent caller joins, see [Group.Join], or has joined already.
func (f *Flight[A, M]) Urgent() <-chan struct{} {
	f.group.mu.Lock()
	defer f.group.mu.Unlock()
	if f.urgent == nil {
		f.urgent = make(chan struct{})
		if f.hurried {
			close(f.urgent)
		}
	}
	return f.urgent
}

// Latest returns the last message of Notify about the key that came while callers could join this flight, or after
// Listen. Latest returns nil if no such message has come since the start of the flight or since DrainInbox. Any caller
// of the flight may call Latest.
func (f *Flight[A, M]) Latest() *M { return f.latest.Load() }

func (f *Flight[A, M]) setLatest(m M) { f.latest.Store(&m) }

// DrainInbox drops the messages that have arrived.
func (f *Flight[A, M]) DrainInbox() {
	f.latest.Store(nil)
	for {
		select {
		case <-f.inbox:
		default:
			return
		}
	}
}

// receive puts m into the inbox. If the inbox is full, receive drops m and does not block. The call still learns of
// the change that m reports: after each message in the inbox, the call reads the store and finds that change there.
func (f *Flight[A, M]) receive(m M) {
	select {
	case f.inbox <- m:
	default:
	}
}

// End ends the flight. Its callers get the answer that was delivered, or ErrNoAnswer.
func (f *Flight[A, M]) End() {
	g := f.group
	g.mu.Lock()
	defer g.mu.Unlock()
	g.forget(f)
	delete(g.running, f)
	g.unlisten(f)
	if f.timer != nil {
		f.timer.Stop()
	}
	close(f.done)
	f.cancel(nil)
	g.checkDone()
}
