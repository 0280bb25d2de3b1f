package refill_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// The losing interleavings of the design review, each as a test.

// V6: a read has its reply in hand; the announcement that voids it is processed; then the read enters L1.
func TestAReadOvertakenByAnInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		get(t, peer, "k")
		s.onGet(func() {
			s.onGet(nil)
			d.version.Store(1)
			if err := peer.Invalidate(t.Context(), "k"); err != nil {
				t.Error(err)
			}
			synctest.Wait() // the push has been processed: there was nothing in L1 to drop
		})
		get(t, l, "k") // began before the Invalidate: may be old
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("%q: a read that was overtaken entered L1 as good", v)
		}
	})
}

// V7: the same with a break of the subscription, in which the announcement is lost.
func TestAReadAcrossABreakOfTheSubscription(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		get(t, peer, "k")
		s.onGet(func() {
			s.onGet(nil)
			s.cut(true)
			d.version.Store(1)
			if err := peer.Invalidate(t.Context(), "k"); err != nil {
				t.Error(err)
			}
			synctest.Wait()
			s.cut(false)
		})
		get(t, l, "k")
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("%q: a read from before the break counts after it", v)
		}
	})
}

// V5: Invalidate must not rely on its own announcement, which may come late, nor let a Get join what began before.
func TestInvalidateIsDoneWhenItReturns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		s := newSpy(refill.NewMemory())
		l := node(t, d.load, refill.Config{TTL: time.Hour, Shared: s})
		get(t, l, "in L1")
		s.holdNotes(true)
		var wg sync.WaitGroup
		wg.Go(func() { get(t, l, "in flight") })
		time.Sleep(50 * ms)
		d.version.Store(1)
		if err := l.Invalidate(t.Context(), "in L1", "in flight"); err != nil {
			t.Fatal(err)
		}
		for _, key := range []string{"in flight", "in L1"} {
			if v := get(t, l, key); v != key+" v1" {
				t.Errorf("%q after Invalidate has returned", v)
			}
		}
		wg.Wait()
		s.holdNotes(false)
	})
}

// V10: n0's inbox holds filled(v0); n0 invalidates and drops L1; then it hears filled(v0), which carries the value.
func TestAnAnnouncementFromBeforeTheInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		get(t, peer, "k")
		get(t, l, "k")
		s.holdNotes(true)
		if err := peer.Refresh(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		d.version.Store(1)
		if err := l.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		s.holdNotes(false)
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("%q: an announcement brought back what was invalidated", v)
		}
	})
}

// A value announced while L1 holds another one than it replaced: L1 must not go back to it.
func TestAnAnnouncementOutOfOrder(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		get(t, peer, "k")
		get(t, l, "k")
		s.holdNotes(true)
		for range 2 { // v1, v2
			d.version.Add(1)
			if err := peer.Refresh(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		d.version.Add(1)
		if err := l.Refresh(t.Context(), "k"); err != nil { // v3, loaded here
			t.Fatal(err)
		}
		synctest.Wait()
		s.loseLast()       // its own announcement
		s.holdNotes(false) // filled(v1 for v0), filled(v2 for v1)
		get(t, l, "k")
		synctest.Wait()
		if v := get(t, l, "k"); v != "k v3" {
			t.Errorf("%q, want v3", v)
		}
	})
}

// V11: A publishes between B's look and B's Begin. B must not load again.
func TestASecondLookUnderTheLease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		s.onGet(func() {
			s.onGet(nil)
			get(t, peer, "k")
		})
		get(t, l, "k")
		if n := d.loads.Load(); n != 1 {
			t.Errorf("%d loads, want 1", n)
		}
		if v := get(t, l, "k"); v != "k v0" {
			t.Errorf("%q, want what the peer has published", v)
		}
		nobodyHas(t, s, "k")
	})
}

// A waiter whose announcement is lost finds the value when the lease would have ended, and does not load.
func TestALostFilledAnnouncement(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 300 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		s.mute.Store(true)
		defer behind(t, peer, "k")()
		time.Sleep(10 * ms)
		began := time.Now()
		get(t, l, "k")
		if took := time.Since(began); took > 1010*ms || d.loads.Load() != 1 {
			t.Errorf("had it after %v and %d loads; want LockTTL at most, and 1", took, d.loads.Load())
		}
	})
}

// A back-off whose announcement was missed is read from where the lease was (V8).
func TestABackOffIsFoundWithoutItsAnnouncement(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms, err: errDown}
		shared := refill.NewMemory()
		s := newSpy(shared)
		l := node(t, d.load, refill.Config{Shared: s})
		peer := node(t, d.load, refill.Config{Shared: shared})
		s.mute.Store(true)
		_, _ = peer.Get(t.Context(), "k")
		if _, err := l.Get(t.Context(), "k"); err == nil || d.loads.Load() != 1 {
			t.Errorf("%v after %d loads", err, d.loads.Load())
		}
	})
}

// A background refresh that finds another at it leaves, and does not come back for every Get.
func TestARefreshThatLosesKeepsQuiet(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 800 * ms}
		shared := refill.NewMemory()
		s := newSpy(shared)
		var ev events
		l := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1, Shared: s, OnEvent: ev.on})
		peer := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1, Shared: shared})
		get(t, peer, "k")
		get(t, l, "k")
		time.Sleep(300 * ms)
		get(t, peer, "k") // stale: refreshes
		synctest.Wait()
		calls := s.calls.Load()
		for range 700 {
			get(t, l, "k")
			time.Sleep(ms)
		}
		if n := s.calls.Load() - calls; n != 1 || ev.of(refill.EventBusy) != 1 {
			t.Errorf("%d calls of the store by 700 Gets, %d busy; want one of each", n, ev.of(refill.EventBusy))
		}
		time.Sleep(200 * ms)
		gets := s.gets.Load()
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.EventHit || s.gets.Load() != gets {
			t.Errorf("%+v, %v: the push should have brought the new value", r, err)
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("%d loads, want 2", n)
		}
	})
}

// A waiter whose announcement is lost in a break of the subscription looks again when it is back.
func TestAWaitAcrossABreakOfTheSubscription(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 300 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		defer behind(t, peer, "k")()
		time.Sleep(10 * ms)
		began := time.Now()
		go func() {
			time.Sleep(100 * ms)
			s.cut(true)
			time.Sleep(300 * ms)
			s.cut(false)
		}()
		get(t, l, "k")
		if took := time.Since(began); took != 400*ms || d.loads.Load() != 1 {
			t.Errorf("had it after %v and %d loads, want 400 ms and 1", took, d.loads.Load())
		}
	})
}

// With ErrorTTL off there is no back-off, and still those who waited for the load share its error.
func TestAnErrorIsSharedWithoutBackOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms, err: errDown}
		nodes := fleet(t, 4, d, refill.Config{ErrorTTL: -1})
		var wg sync.WaitGroup
		for i := range 40 {
			wg.Go(func() {
				if _, err := nodes[i%4].Get(t.Context(), "k"); err == nil {
					t.Error("no error")
				}
			})
		}
		wg.Wait()
		if n := d.loads.Load(); n != 1 {
			t.Errorf("%d loads, want 1", n)
		}
		d.fail(nil)
		get(t, nodes[3], "k")
	})
}

// What is old when a load begins may be too old when it fails.
func TestStaleOnErrorKeepsItsBound(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		l := fleet(t, 1, d, refill.Config{TTL: time.Second, StaleIfError: 2 * time.Second, Jitter: -1})[0]
		get(t, l, "k")
		time.Sleep(2 * time.Second)
		d.fail(errDown)
		d.slow(3 * time.Second)
		if v, err := l.Get(t.Context(), "k"); err == nil {
			t.Errorf("%q, five seconds old, past TTL + StaleIfError", v)
		}
	})
}

// A flight from before a break of the subscription is not joined after its return: an Invalidate may have been missed.
// Those who joined before get what they waited for. (Spin found it: docs/model.)
func TestAFlightAcrossABreakOfTheSubscription(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Minute})
		var wg sync.WaitGroup
		wg.Go(func() {
			if v := get(t, l, "k"); v != "k v0" {
				t.Errorf("the first caller got %q", v)
			}
		})
		synctest.Wait() // it loads
		s.cut(true)
		d.version.Store(1)
		if err := peer.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		s.cut(false)
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("%q: a Get after the return joined the load from before the Invalidate", v)
		}
		wg.Wait()
	})
}

// An Invalidate that failed, a Get that reads the old value again, and the retry that succeeds: this node follows, too.
func TestALateInvalidateIsCarriedOutHereToo(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, _ := pair(t, d, refill.Config{TTL: time.Hour})
		get(t, l, "k")
		s.down.Store(true)
		d.version.Store(1)
		if err := l.Invalidate(t.Context(), "k"); err == nil {
			t.Fatal("the store did not answer, and there is no error")
		}
		synctest.Wait()
		s.down.Store(false)
		if v := get(t, l, "k"); v != "k v0" {
			t.Fatalf("%q: the old value is still in the store", v)
		}
		time.Sleep(time.Second) // the retry
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("%q after the void was carried out", v)
		}
	})
}
