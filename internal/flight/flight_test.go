package flight

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

type group = Group[string, int]

func newGroup() *group { return NewGroup[string, int](2) }

// join joins the flight of the key "k", and demands that Join returns role.
func join(t *testing.T, g *group, want Want, role Role) *Flight[string, int] {
	t.Helper()
	f, got, err := g.Join(t.Context(), "k", want, false)
	if err != nil || got != role {
		t.Fatalf("role %v, %v; want %v", got, err, role)
	}
	return f
}

// isClosed reports whether c is closed, without waiting.
func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestCallersShareAFlight(t *testing.T) {
	g := newGroup()
	f := join(t, g, Answer, Leader)
	for range 3 {
		if join(t, g, Answer, Waiter) != f {
			t.Fatal("a second flight of the same key")
		}
	}
	other, role, err := g.Join(t.Context(), "other", Answer, false)
	if err != nil || role != Leader || other == f {
		t.Errorf("another key: %v, %v", role, err)
	}
	go func() { f.Finish("answer"); f.End() }()
	for range 4 {
		if a, err := f.Wait(t.Context()); a != "answer" || err != nil {
			t.Errorf("%q, %v", a, err)
		}
		f.Leave(Answer)
	}
	if a, err := f.WaitEnd(t.Context()); a != "answer" || err != nil {
		t.Errorf("at the end: %q, %v", a, err)
	}
	if g.Has("k") || join(t, g, Answer, Leader) == f {
		t.Error("a flight that has ended can be joined")
	}
}

func TestRoles(t *testing.T) {
	g := newGroup()
	f := join(t, g, Answer, Leader)
	if join(t, g, Background, None) != nil {
		t.Error("a role without a flight, and a flight")
	}
	if join(t, g, Refresh, Observer) != f {
		t.Error("a Refresh observes another flight")
	}
	f.End()
	refresh := join(t, g, Refresh, Leader)
	if join(t, g, Refresh, Waiter) != refresh {
		t.Error("two Refreshes do not share a flight")
	}
	join(t, g, Background, None)
	if join(t, g, Answer, Leader) == refresh {
		t.Error("an Answer joins a Refresh, which ignores what is stored")
	}
	g.Forget("k")
	if f := join(t, g, Background, Leader); !f.Unawaited() {
		t.Error("a flight in the background has a waiter")
	}
}

// Two callers leave a flight. After the second has left, the context must have ended, and no caller may join the
// flight any more. Values must not end.
func TestLastCallerEndsTheContext(t *testing.T) {
	g := newGroup()
	f := join(t, g, Answer, Leader)
	join(t, g, Answer, Waiter)
	f.Leave(Answer)
	if f.Context().Err() != nil || !g.Has("k") {
		t.Error("ended with the first of two callers")
	}
	f.Leave(Answer)
	if context.Cause(f.Context()) != ErrAbandoned || g.Has("k") {
		t.Errorf("cause %v, joinable: %v", context.Cause(f.Context()), g.Has("k"))
	}
	if f.Values().Err() != nil {
		t.Error("Values ended as well")
	}
	if f.ContinueInBackground() {
		t.Error("goes on without callers")
	}
	f.End()
	if _, err := f.Wait(t.Context()); !errors.Is(err, ErrNoAnswer) {
		t.Errorf("Wait: %v", err)
	}
	if _, err := f.WaitEnd(t.Context()); !errors.Is(err, ErrNoAnswer) {
		t.Errorf("WaitEnd: %v", err)
	}
}

func TestContextKeepsValuesAndNoCancellation(t *testing.T) {
	type key struct{}
	ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "tenant"))
	f, _, err := newGroup().Join(ctx, "k", Answer, false)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if f.Context().Err() != nil || f.Context().Value(key{}) != "tenant" {
		t.Errorf("%v, value %v", f.Context().Err(), f.Context().Value(key{}))
	}
	if _, err := f.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Wait ignores the ctx of its caller: %v", err)
	}
	if _, err := f.WaitEnd(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("WaitEnd ignores the ctx of its caller: %v", err)
	}
}

// A flight delivers an early answer, goes on after its last caller has left, and finishes with another answer. Wait
// must return the early answer, and WaitEnd must return the final answer.
func TestContinueInBackground(t *testing.T) {
	g := newGroup()
	f := join(t, g, Answer, Leader)
	if f.Unawaited() {
		t.Error("unawaited, with a caller")
	}
	if !f.ContinueInBackground() || f.Unawaited() {
		t.Error("does not go on, or is unawaited before its caller has an answer")
	}
	f.Deliver("stale")
	f.Deliver("late")
	if a, err := f.Wait(t.Context()); a != "stale" || err != nil || !f.Unawaited() {
		t.Errorf("%q, %v, unawaited: %v", a, err, f.Unawaited())
	}
	f.Leave(Answer)
	if f.Context().Err() != nil || !g.Has("k") {
		t.Error("ended with its last caller")
	}
	f.Finish("fresh")
	f.End()
	if a, err := f.Wait(t.Context()); a != "stale" || err != nil {
		t.Errorf("first answer %q, %v", a, err)
	}
	if a, err := f.WaitEnd(t.Context()); a != "fresh" || err != nil {
		t.Errorf("final answer %q, %v", a, err)
	}
}

func TestDeliverAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for final, want := range map[string]string{"": "stale", "fresh": "fresh"} {
			f := join(t, newGroup(), Answer, Leader)
			f.DeliverAfter(time.Second, "stale")
			f.DeliverAfter(time.Millisecond, "a second one")
			began := time.Now()
			if final != "" {
				f.Finish(final)
			}
			if a, _ := f.Wait(t.Context()); a != want || final == "" && time.Since(began) != time.Second {
				t.Errorf("%q after %v, want %q", a, time.Since(began), want)
			}
			f.End()
		}
		f := join(t, newGroup(), Answer, Leader)
		f.DeliverAfter(time.Second, "never")
		f.End()
		time.Sleep(time.Minute)
		if f.delivered() {
			t.Error("an answer after the end of the flight")
		}
	})
}

func TestMessages(t *testing.T) {
	g := newGroup()
	f := join(t, g, Answer, Leader)
	g.Notify("k", 0) // reaches no inbox, because Listen was not called yet
	f.Listen()
	f.Listen()
	g.Forget("k")
	g.Notify("k", 1)
	g.Notify("another key", 2)
	g.NotifyAll(3)
	for _, want := range []int{1, 3} {
		if m := <-f.Inbox(); m != want {
			t.Errorf("message %d, want %d", m, want)
		}
	}
	for range 100 { // a full inbox does not block
		g.Notify("k", 4)
	}
	f.DrainInbox()
	if len(f.Inbox()) != 0 {
		t.Error("the inbox was not drained")
	}
	f.End()
	g.Notify("k", 5)
	g.NotifyAll(6)
	if len(f.Inbox()) != 0 || len(g.listening) != 0 {
		t.Error("a flight that has ended gets messages")
	}
}

// Four flights of one key have an inbox. Forget was called for each of them, so the next Join started the next flight.
// The test ends the flights in different orders. A message must reach all flights that have not ended.
func TestMessagesOfManyFlights(t *testing.T) {
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}, {2, 0, 3, 1}} {
		g := newGroup()
		var flights []*Flight[string, int]
		for range 4 {
			f := join(t, g, Answer, Leader)
			f.Listen()
			g.Forget("k")
			flights = append(flights, f)
		}
		for n, ends := range order {
			g.Notify("k", n)
			for i, f := range flights {
				if want := !slices.Contains(order[:n], i); (len(f.Inbox()) == 1) != want {
					t.Errorf("order %v, %d ended, flight %d: %d messages, want one: %v", order, n, i, len(f.Inbox()), want)
				}
				f.DrainInbox()
			}
			flights[ends].End()
		}
		if len(g.listening) != 0 {
			t.Errorf("order %v: %d flights listen after all have ended", order, len(g.listening))
		}
	}
}

// Latest must return the last message about the key, with and without an inbox, also after Forget if there is an inbox.
// Latest must not return a message about another key, or a message from before DrainInbox.
func TestLatest(t *testing.T) {
	g := newGroup()
	f := join(t, g, Answer, Leader)
	want := func(what string, want int) {
		t.Helper()
		switch m := f.Latest(); {
		case want == 0 && m != nil:
			t.Errorf("%s: message %d, want none", what, *m)
		case want != 0 && (m == nil || *m != want):
			t.Errorf("%s: %v, want message %d", what, m, want)
		}
	}
	g.Notify("another key", 1)
	want("another key", 0)
	g.Notify("k", 2)
	want("without an inbox", 2)
	f.Listen()
	f.DrainInbox()
	want("after DrainInbox", 0)
	g.Forget("k")
	for i := range 100 { // more than the inbox can hold
		g.Notify("k", 3+i)
	}
	want("forgotten", 102)
	f.End()
}

func TestUrgent(t *testing.T) {
	for name, listenFirst := range map[string]bool{"joins before Listen": false, "joins after Listen": true} {
		g := newGroup()
		f := join(t, g, Answer, Leader)
		if listenFirst {
			f.Listen()
		}
		for range 2 {
			if _, _, err := g.Join(t.Context(), "k", Answer, true); err != nil {
				t.Fatal(err)
			}
		}
		f.Listen()
		if !isClosed(f.Urgent()) {
			t.Errorf("an urgent caller %s: the flight does not learn of it", name)
		}
	}
	f := join(t, newGroup(), Answer, Leader)
	f.Listen()
	if isClosed(f.Urgent()) {
		t.Error("urgent without an urgent caller")
	}
}

func TestForget(t *testing.T) {
	g := newGroup()
	f := join(t, g, Answer, Leader)
	g.ForgetAll()
	next := join(t, g, Answer, Leader)
	f.Forget() // f can no longer be joined, so this must not affect next
	f.End()
	if !g.Has("k") {
		t.Error("the end of a forgotten flight hides the next one")
	}
	next.Forget()
	if g.Has("k") || next.Context().Err() != nil {
		t.Error("a forgotten flight can be joined, or was cancelled")
	}
}

func TestAdmit(t *testing.T) {
	g := newGroup()
	for range 2 {
		if g.Admit(false) != nil {
			t.Fatal("refused below the limit")
		}
	}
	if g.Admit(false) == nil {
		t.Error("admitted above the limit")
	}
	if g.Admit(true) != nil {
		t.Error("an exempt caller was refused")
	}
	g.Depart()
	if g.Admit(false) == nil {
		t.Error("exempt callers do not count")
	}
	g.Depart()
	if g.Admit(false) != nil {
		t.Error("Depart frees no place")
	}
}

// Close must end the context of a background flight without waiters. It must not end the context of a flight with
// waiters. After Close, the context of a background flight must end when its last waiter leaves. Abort must end every
// context.
func TestClose(t *testing.T) {
	g := newGroup()
	idle := join(t, g, Background, Leader)
	g.Forget("k")
	awaited := join(t, g, Background, Leader)
	join(t, g, Answer, Waiter)
	g.Forget("k")
	plain := join(t, g, Answer, Leader)
	g.Close()
	g.Close()
	if context.Cause(idle.Context()) != ErrClosed || awaited.Context().Err() != nil || plain.Context().Err() != nil {
		t.Errorf("idle: %v, awaited: %v, plain: %v",
			context.Cause(idle.Context()), awaited.Context().Err(), plain.Context().Err())
	}
	if _, _, err := g.Join(t.Context(), "k", Answer, false); !errors.Is(err, ErrClosed) || !g.Closed() {
		t.Errorf("Join after Close: %v", err)
	}
	if plain.ContinueInBackground() {
		t.Error("a flight goes on in the background of a closed group")
	}
	awaited.Leave(Answer)
	if context.Cause(awaited.Context()) != ErrClosed {
		t.Errorf("after its last caller: %v", context.Cause(awaited.Context()))
	}
	idle.End()
	awaited.End()
	g.Abort()
	if context.Cause(plain.Context()) != ErrClosed || isClosed(g.Done()) {
		t.Errorf("Abort: %v; done: %v", context.Cause(plain.Context()), isClosed(g.Done()))
	}
	plain.End()
	if !isClosed(g.Done()) {
		t.Error("not done after the last flight")
	}
	empty := newGroup()
	if empty.Close(); !isClosed(empty.Done()) {
		t.Error("an empty group is not done after Close")
	}
}

// Eight goroutines join and leave flights of one key. Half of the callers leave at once, which cancels flights. The
// other half wait, and must never get the cancellation of a flight.
func TestJoinAndLeaveConcurrently(t *testing.T) {
	g := NewGroup[string, int](1 << 20)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 2000 {
				f, role, err := g.Join(t.Context(), "k", Answer, false)
				if err != nil {
					t.Error(err)
				}
				if role == Leader {
					go func() {
						defer f.End()
						for range 10 {
							runtime.Gosched()
						}
						if cause := context.Cause(f.Context()); cause == nil {
							f.Finish("answer")
						} else {
							f.Finish(cause.Error())
						}
					}()
				}
				if i%2 == 0 { // callers with an odd i leave at once
					if a, err := f.Wait(t.Context()); a != "answer" || err != nil {
						t.Errorf("%q, %v", a, err)
					}
				}
				f.Leave(Answer)
			}
		})
	}
	wg.Wait()
	g.Close()
	<-g.Done()
}
