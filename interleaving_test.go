package refill_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// This file tests interleavings that would break a promise. The comment above a test tells the losing interleaving,
// step by step.

// A Get has read a value from the store. The node handles the announcement that invalidates the value. Then the Get
// puts the value into L1. L1 must not serve the value.
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
			synctest.Wait() // the announcement has been handled: L1 had nothing to drop
		})
		get(t, l, "k") // began before the Invalidate: may be old
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q after the Invalidate, want %q", v, "k v1")
		}
	})
}

// A Get has read a value from the store. The subscription breaks, and the announcement that invalidates the value is
// lost. The subscription returns. Then the Get puts the value into L1. L1 must not serve the value.
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
			t.Errorf("got %q after the break, want %q", v, "k v1")
		}
	})
}

// A load is in flight. The subscription breaks, an Invalidate is missed, and the subscription returns. A Get after the
// return must not join that flight. Callers that joined before the break get the value of the flight. (The model
// checker Spin found this interleaving: docs/model.)
func TestAFlightAcrossABreakOfTheSubscription(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Minute})
		var wg sync.WaitGroup
		wg.Go(func() {
			if v := get(t, l, "k"); v != "k v0" {
				t.Errorf("the first caller got %q, want %q", v, "k v0")
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
			t.Errorf("a Get after the return got %q, want %q", v, "k v1")
		}
		wg.Wait()
	})
}

// A node waits for the load of another node. The subscription breaks, and the announcement of the value is lost. When
// the subscription returns, the waiting node reads the store again.
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
			t.Errorf("got the value after %v and %d loads, want 400 ms and 1", took, d.loads.Load())
		}
	})
}

// Node B looks up a key and finds nothing. Node A publishes a value. Then B sends its Acquire. B must get the value of
// A and must not load.
func TestAPublishBetweenLookupAndAcquire(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		s.onGet(func() {
			s.onGet(nil)
			get(t, peer, "k")
		})
		get(t, l, "k")
		if n := d.loads.Load(); n != 1 {
			t.Errorf("got %d loads, want 1", n)
		}
		if v := get(t, l, "k"); v != "k v0" {
			t.Errorf("got %q, want the value that the peer has published", v)
		}
		lockIsFree(t, s, "k")
	})
}

// The announcement filled(v0), which carries v0, is on its way to a node. The node invalidates the key and drops its L1
// entry. Then filled(v0) arrives. L1 must not serve v0 again.
func TestAnAnnouncementFromBeforeTheInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		get(t, peer, "k")
		get(t, l, "k")
		s.holdAnnouncements(true)
		if err := peer.Refresh(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		d.version.Store(1)
		if err := l.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		s.holdAnnouncements(false)
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q after the Invalidate, want %q", v, "k v1")
		}
	})
}

// A node has v0 in L1. A peer publishes v1 and v2, and the announcements of v1 and v2 are late. The node loads v3
// itself and misses the announcement of v3. Then filled(v1 for v0) and filled(v2 for v1) arrive. L1 must not go back to
// v1 or v2.
func TestAnAnnouncementOutOfOrder(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		get(t, peer, "k")
		get(t, l, "k")
		s.holdAnnouncements(true)
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
		s.loseLastHeld()           // its own announcement
		s.holdAnnouncements(false) // filled(v1 for v0), filled(v2 for v1)
		get(t, l, "k")
		synctest.Wait()
		if v := get(t, l, "k"); v != "k v3" {
			t.Errorf("got %q, want %q", v, "k v3")
		}
	})
}

// A node waits for the load of another node, and the announcement of the value is lost. The waiting node reads the
// store at the moment when the lease would have ended. It finds the value and does not load.
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
			t.Errorf("got the value after %v and %d loads, want LockTTL (1 s) at most and 1", took, d.loads.Load())
		}
	})
}
