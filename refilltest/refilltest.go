// Package refilltest holds the suites that a shared store ([refill.Store]) and a driver of locks ([refill.LockDriver])
// have to pass: [TestStore] and [TestLockDriver]. They are tables of cases. Each checks one rule of the interface, and
// prints when it fails which rule that is and what goes wrong in the field where it is broken.
//
// A suite needs to know how to make a world: an empty place, and two nodes over it. One line per world is all that
// differs between a store in memory, a fake server and a real one:
//
//	func TestMemory(t *testing.T) {
//		refilltest.TestStore(t, refilltest.StoreHarness{
//			Bubble: true, // time is fake: the suite takes no time
//			World: func(t testing.TB) refilltest.StoreWorld {
//				m := refill.NewMemory()
//				return refilltest.StoreWorld{A: m, B: m}
//			},
//		})
//	}
//
// What a backend cannot be made to do, such as a lease that never ends, is a hook of the world that stays nil; the cases
// that need it are reported as skipped, with the name of the hook.
//
// What has to come by itself, such as an announcement, is given 5 s; that something does not come is found out without
// waiting for it. A store's clock is compared with itself only, so it may be years away from that of the process.
package refilltest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

const (
	long     = time.Minute     // a lease or claim that does not end within a case
	patience = 5 * time.Second // for what comes by itself: an announcement, a wake-up
	callTime = 30 * time.Second
)

// defaultShort is a lease that a case can wait for. Within it a handful of calls has to be done, also on a busy machine.
const defaultShort = 400 * time.Millisecond

// inBubble runs body within a bubble if there is to be one. t.Run is not allowed inside, so this is the innermost call.
func inBubble(t *testing.T, bubble bool, body func(t testing.TB)) {
	if !bubble {
		body(t)
		return
	}
	var skipped bool
	synctest.Test(t, func(t *testing.T) {
		defer func() { skipped = t.Skipped() }()
		body(t)
	})
	if skipped {
		t.SkipNow() // synctest does not pass it on, and a case that did not run has not passed
	}
}

// explain prints the rule that a case checks below its failures.
func explain(t testing.TB, explanation string) {
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the rule: %s", explanation)
		}
	})
}

// clock is how time passes for the server of a world.
type clock struct {
	short time.Duration
	pass  func(time.Duration)
}

func newClock(short time.Duration, pass func(time.Duration)) clock {
	if short == 0 {
		short = defaultShort
	}
	if pass == nil {
		pass = time.Sleep
	}
	return clock{short, pass}
}

// ends lets a short lease run out and reports whether over comes true: at once where the server is exact, within
// two more leases where it looks after its leases now and then.
func (c clock) ends(over func() bool) bool {
	c.pass(c.short)
	for range 20 {
		if over() {
			return true
		}
		c.pass(c.short / 10)
	}
	return false
}

// needs skips a case whose hook the world does not have, by name: a hook that is nil is the world's word that it cannot.
func needs(t testing.TB, hook string, has bool) {
	t.Helper()
	if !has {
		t.Skipf("the world has no %s", hook)
	}
}

// undone returns a switch for hook, a fault, that is switched off at the latest when the case ends.
func undone(t testing.TB, hook func(bool)) (set func(bool)) {
	now := false
	set = func(on bool) {
		if on != now {
			now = on
			hook(on)
		}
	}
	t.Cleanup(func() { set(false) })
	return set
}

// wait waits for what has to come.
func wait(t testing.TB, event <-chan struct{}, what string) {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-event:
	case <-timer.C:
		t.Fatalf("waited %v in vain for %s", patience, what)
	}
}

// A call is one method with a ctx of the case's choice.
type call struct {
	name string
	do   func(ctx context.Context) error
}

// giveUp demands that a call to a silent server returns with an error soon after its ctx has ended.
func giveUp(t testing.TB, parent context.Context, c call) {
	t.Helper()
	ctx, cancel := context.WithTimeout(parent, 100*time.Millisecond)
	defer cancel()
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = c.do(ctx)
	}()
	<-ctx.Done()
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		t.Fatalf("%s still runs 1 s after its ctx has ended", c.name)
	}
	if err == nil {
		t.Fatalf("%s gives no error although the server does not answer", c.name)
	}
}
