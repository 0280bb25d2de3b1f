package refill_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// This file tests orders of events that can make a cache serve an old value or load twice. The comment above a test
// lists the events in their order, and then says what must be true.

// A Get has read a value from the store. Another node invalidates the key, and this node handles the announcement.
// Then the Get puts the value into L1. L1 must not serve the value.
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
			synctest.Wait() // until the node has handled the announcement; L1 has no entry yet
		})
		get(t, l, "k") // this Get began before the Invalidate, so this Get may return the old value
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

// A Get has read v0 from the store. Another node loads the key again and publishes v1. This node handles the
// announcement while its L1 has no entry. Then the Get puts v0 into L1. L1 may serve v0 to one more Get, but must then
// have v1.
func TestAReadOvertakenByAFill(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		get(t, peer, "k")
		s.onGet(func() {
			s.onGet(nil)
			d.version.Store(1)
			if err := peer.Refresh(t.Context(), "k"); err != nil {
				t.Error(err)
			}
			synctest.Wait() // until the node has handled the announcement
		})
		get(t, l, "k") // this Get began before the Refresh, so this Get may return the old value
		get(t, l, "k")
		synctest.Wait()
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q, want the announced value \"k v1\"", v)
		}
	})
}

// A Refresh loads v1 on a node. Meanwhile a Get on the same node reads v0 from the store, and the reply comes late:
// after the Refresh has put v1 into L1. L1 must still have v1 when the Get has ended.
func TestAReadOvertakenByALoadOfItsNode(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		get(t, peer, "k")
		s.mute.Store(true) // the announcement of v1 comes later than v0, or never
		d.version.Store(1)
		refreshed := make(chan error)
		go func() { refreshed <- l.Refresh(t.Context(), "k") }()
		synctest.Wait() // until the load has begun
		s.onGet(func() { time.Sleep(100 * ms) })
		get(t, l, "k")
		if err := <-refreshed; err != nil {
			t.Error(err)
		}
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q after the Refresh, want %q", v, "k v1")
		}
	})
}

// A node has published v0, and the reply is under way. Another node loads v1 and publishes it, and the first node
// handles the announcement while its L1 has no entry. Then the reply arrives. L1 may serve v0 to one more Get, but must
// then have v1.
func TestAPublicationOvertakenByAFill(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		s.onStep(func(_ context.Context, step string) error {
			if step != "publish" {
				return nil
			}
			s.onStep(nil)
			d.version.Store(1)
			err := peer.Refresh(t.Context(), "k")
			synctest.Wait() // until the node has handled the announcement
			return err
		})
		get(t, l, "k") // loads v0
		get(t, l, "k")
		synctest.Wait()
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q, want the announced value \"k v1\"", v)
		}
	})
}

// A load is in flight. The subscription breaks, the node misses an Invalidate, and the subscription returns. The load
// may have read the old value, so a later Get must not join the flight of that load. Callers that joined before the
// break must get the value of the flight. (The model checker Spin found this order of events in the model of refill,
// which is in docs/model.)
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
		synctest.Wait() // until the load has begun
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
// the subscription returns, the waiting node must read the store again and find the value.
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

// A peer loads v0 again and publishes it. The announcement, which carries v0, is on its way to a node. Meanwhile that
// node invalidates the key and drops its L1 entry. Then the announcement arrives. L1 of that node must not serve v0.
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

// A node has v0 in L1. A peer publishes v1 and then v2, and the two announcements are late. The node loads v3 itself
// and misses the announcement of v3. Then the announcements of v1 and v2 arrive. L1 must not go back to v1 or v2.
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
		if err := l.Refresh(t.Context(), "k"); err != nil { // loads v3 on this node
			t.Fatal(err)
		}
		synctest.Wait()
		s.loseLastHeld()           // the announcement of v3
		s.holdAnnouncements(false) // delivers the announcements of v1 and v2
		get(t, l, "k")
		synctest.Wait()
		if v := get(t, l, "k"); v != "k v3" {
			t.Errorf("got %q, want %q", v, "k v3")
		}
	})
}

// A node waits for the load of another node, and the announcement of the value is lost. A waiting node reads the store
// again after LockTTL at most, because by then the lease of a dead holder would have ended. So the waiting node must
// find the value after LockTTL at most, and must not load.
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
