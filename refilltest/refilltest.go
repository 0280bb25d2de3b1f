// Package refilltest holds the suites that a backend of refill must pass: [TestStore] for a shared store
// ([driver.Store]) and [TestLocks] for a lock service ([driver.Locks]). A suite is a table of cases. Each case checks
// one rule of the interface. A case that fails prints its rule, and what goes wrong in production if a backend breaks
// this rule. G1 to G8 in these texts are the guarantees of refill, listed in docs/guarantees.md.
//
// A test passes to a suite a function that makes a world. A world is an empty place and two nodes that share this
// place. The tests of a store in memory, of a fake server and of a real server differ only in that function:
//
//	func TestMemory(t *testing.T) {
//		refilltest.TestStore(t, refilltest.StoreHarness{
//			Bubble: true, // time is fake: the suite takes no time
//			World: func(t testing.TB) refilltest.StoreWorld {
//				m := memory.New()
//				return refilltest.StoreWorld{A: m, B: m}
//			},
//		})
//	}
//
// Some cases need a fault, such as a lease without an end. A world provides the fault through a hook. If a hook is
// nil, the suite skips the cases that need this hook, and the skip message names the hook.
//
// An event that must come by itself, such as an announcement, has 5 s to arrive. To show that an event does not come,
// a case waits for a later event, not for a fixed time. The cases compare the clock of a store only with itself, so
// the store's clock may be years away from the clock of the process.
package refilltest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

const (
	long     = time.Minute      // a lease or claim that does not end within a case
	patience = 5 * time.Second  // how long an announcement or a wake-up may take
	callTime = 30 * time.Second // all calls of one case must end within this time
)

// defaultShort is the ttl of a lease whose end a case waits for. A few calls must fit into this time, even on a busy
// machine.
const defaultShort = 400 * time.Millisecond

// inBubble runs body, inside a bubble if bubble is true. Call inBubble inside t.Run, because t.Run is not allowed in a
// bubble.
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
		t.SkipNow() // synctest does not report the skip, and a skipped case must not count as passed
	}
}

// explain prints the rule of a case below its failures.
func explain(t testing.TB, explanation string) {
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the rule: %s", explanation)
		}
	})
}

// clock lets time pass for the server of a world.
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

// runOut waits until a lease of length short must have ended, and reports whether over becomes true. A server that ends
// its leases late gets up to 2 × short in addition.
func (c clock) runOut(over func() bool) bool {
	c.pass(c.short)
	for range 20 {
		if over() {
			return true
		}
		c.pass(c.short / 10)
	}
	return false
}

// needs skips a case if the world lacks a hook that the case needs. The skip message names the hook.
func needs(t testing.TB, hook string, has bool) {
	t.Helper()
	if !has {
		t.Skipf("the world has no %s", hook)
	}
}

// fault returns a function that switches the fault of hook on or off. At the end of the case, fault switches it off.
func fault(t testing.TB, hook func(bool)) (set func(bool)) {
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

// wait waits for an event that must come.
func wait(t testing.TB, event <-chan struct{}, what string) {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-event:
	case <-timer.C:
		t.Fatalf("%s did not come within %v", what, patience)
	}
}

// call is a call of one method. The case chooses the ctx.
type call struct {
	name string
	do   func(ctx context.Context) error
}

// wantGivesUp demands that a call to a silent server returns an error soon after its ctx has ended.
func wantGivesUp(t testing.TB, parent context.Context, c call) {
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
		t.Fatalf("%s returns no error although the server does not answer", c.name)
	}
}
