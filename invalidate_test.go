package refill_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests Invalidate and Expire: on this node, on other nodes, during a load, and during an outage of the
// store.

// When Invalidate returns, L1 of the calling node must not serve the old value, even if the announcement of the
// Invalidate is late. A later Get must not join a flight that began before the Invalidate.
func TestInvalidateIsDoneWhenItReturns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		s := newSpy(memory.New())
		l := node(t, d.load, refill.Config{TTL: time.Hour, Shared: s})
		get(t, l, "in L1")
		s.holdAnnouncements(true)
		var wg sync.WaitGroup
		wg.Go(func() { get(t, l, "in flight") })
		time.Sleep(50 * ms)
		d.version.Store(1)
		if err := l.Invalidate(t.Context(), "in L1", "in flight"); err != nil {
			t.Fatal(err)
		}
		for _, key := range []string{"in flight", "in L1"} {
			if v := get(t, l, key); v != key+" v1" {
				t.Errorf("got %q after Invalidate has returned, want %q", v, key+" v1")
			}
		}
		wg.Wait()
		s.holdAnnouncements(false)
	})
}

func TestInvalidateRejectsALoadElsewhere(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * time.Millisecond}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Minute})
		var wg sync.WaitGroup
		wg.Go(func() { get(t, nodes[0], "k") }) // reads v0
		time.Sleep(50 * time.Millisecond)
		d.version.Store(1)
		if err := nodes[1].Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		for i, l := range nodes {
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d serves %q after Invalidate, want %q", i, v, "k v1")
			}
		}
	})
}

func TestExpire(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Minute, StaleFor: time.Minute})
		for _, l := range nodes {
			get(t, l, "k")
		}
		d.version.Store(1)
		if err := nodes[0].Expire(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // until both nodes have handled the announcement
		for i, l := range nodes {
			r, err := l.GetResult(t.Context(), "k")
			if err != nil || r.Outcome != refill.OutcomeStale || r.Value != "k v0" || r.Remaining != 0 {
				t.Errorf("node %d: got %+v, %v; want the old value as a stale one", i, r, err)
			}
		}
		time.Sleep(150 * ms)
		for i, l := range nodes {
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d: got %q after the refresh, want %q", i, v, "k v1")
			}
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2", n)
		}
	})
}

// A load begins, and another node calls Expire before the load ends. The value of the load must not be stored as fresh.
func TestExpireRejectsALoadElsewhere(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Minute})
		var wg sync.WaitGroup
		wg.Go(func() { get(t, nodes[0], "k") })
		time.Sleep(50 * ms)
		d.version.Store(1)
		if err := nodes[1].Expire(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		for i, l := range nodes {
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d serves %q after Expire, want %q", i, v, "k v1")
			}
		}
	})
}

// A node misses the announcement of an Invalidate and does not notice the loss. L1 of that node stops serving the old
// value within LocalTTL.
func TestALostInvalidatedAnnouncement(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		shared := memory.New()
		s := newSpy(shared)
		l := node(t, d.load, refill.Config{TTL: time.Hour, LocalTTL: 5 * time.Second, Shared: s})
		peer := node(t, d.load, refill.Config{TTL: time.Hour, Shared: shared})
		get(t, l, "k")
		s.mute.Store(true)
		d.version.Store(1)
		if err := peer.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(4900 * ms)
		if v := get(t, l, "k"); v != "k v0" {
			t.Fatalf("got %q within LocalTTL, want %q: the announcement was not lost", v, "k v0")
		}
		time.Sleep(200 * ms)
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q after LocalTTL, want %q", v, "k v1")
		}
	})
}

// A node may miss announcements while its subscription is broken. So the node must not serve L1 entries from before the
// break, not even after the subscription has returned. While the subscription is broken, each Get must read the store.
func TestABreakOfTheSubscription(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Minute})
		get(t, l, "k")
		s.cut(true)
		d.version.Store(1)
		if err := peer.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		s.down.Store(false) // the store answers again, but the subscription is still broken
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q, want %q: without the subscription, the store is asked first", v, "k v1")
		}
		gets := s.gets.Load()
		get(t, l, "k")
		if s.gets.Load() != gets+1 {
			t.Errorf("got %d Gets of the store, want 1: without the subscription, L1 is not valid", s.gets.Load()-gets)
		}
	})
}

// An Invalidate fails, because the store does not answer. When the store answers again, it still has the old value. The
// next Get on this node must complete the Invalidate before it reads the store.
func TestAGetCompletesAPendingInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, _ := pair(t, d, refill.Config{TTL: time.Hour})
		get(t, l, "k")
		s.down.Store(true)
		d.version.Store(1)
		if err := l.Invalidate(t.Context(), "k"); err == nil {
			t.Fatal("Invalidate succeeded, want an error: the store does not answer")
		}
		synctest.Wait()
		s.down.Store(false)
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q before the retry in the background, want %q", v, "k v1")
		}
		if got, err := l.GetMany(t.Context(), []string{"k"}); err != nil || got["k"] != "k v1" {
			t.Errorf("GetMany: got %q, %v, want %q", got["k"], err, "k v1")
		}
	})
}

// The store is down. A node calls Invalidate for the keys blue and red, ExpireTag for the tag blue, and InvalidateTag
// for the tag red. All four calls fail, and the node retries them. The retries must not confuse a key with the tag of
// the same name: a value with the tag blue must be expired, not invalidated.
func TestInvalidatesThatWaitForTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour, StaleFor: time.Hour})
		for _, key := range []string{"red", "red:1", "blue:1"} {
			get(t, peer, key)
		}
		time.Sleep(ms)
		d.version.Store(1)
		s.cut(true)
		if err := l.Invalidate(t.Context(), "blue"); err == nil { // a key, not the tag of the ExpireTag below
			t.Error("Invalidate of blue succeeded, want an error: the store is down")
		}
		if err := l.ExpireTag(t.Context(), "blue"); err == nil {
			t.Error("ExpireTag of blue succeeded, want an error: the store is down")
		}
		if err := l.Invalidate(t.Context(), "red"); err == nil {
			t.Error("Invalidate of red succeeded, want an error: the store is down")
		}
		if err := l.InvalidateTag(t.Context(), "red"); err == nil {
			t.Error("InvalidateTag of red succeeded, want an error: the store is down")
		}
		s.cut(false)
		time.Sleep(time.Second)
		for key, want := range map[string]string{"red": "red v1", "red:1": "red:1 v1", "blue:1": "blue:1 v0"} {
			if v := get(t, peer, key); v != want {
				t.Errorf("got %q after the retry, want %q", v, want)
			}
		}
	})
}

// slowInvalidate is a store whose Invalidate takes 100 ms. A call with the key in the field refused fails after 50 ms.
type slowInvalidate struct {
	driver.Store
	refused atomic.Pointer[string]
	calls   atomic.Int64 // calls with more than one key; a retry has one key

	mu   sync.Mutex
	done map[string]bool // keys that are invalidated
}

func (s *slowInvalidate) Invalidate(ctx context.Context, _ string, keys ...string) error {
	if len(keys) > 1 {
		s.calls.Add(1)
	}
	time.Sleep(50 * ms)
	if slices.Contains(keys, *s.refused.Load()) {
		return errDown
	}
	time.Sleep(50 * ms)
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range keys {
		s.done[key] = true
	}
	return nil
}

func (s *slowInvalidate) invalidated() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.done)
}

// An Invalidate of many keys makes several calls of the store, and one call fails. The calls that already run must go
// on. The calls that have not begun must not be made. Then the Loader must invalidate the remaining keys in the
// background.
func TestInvalidateOfManyKeys(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := &slowInvalidate{Store: memory.New(), done: make(map[string]bool)}
		l := node(t, (&db{}).load, refill.Config{TTL: time.Hour, Shared: shared})
		// 1,500 keys make 6 calls of up to 256 keys, and 4 calls run at the same time. The second call fails, so the first,
		// third and fourth call invalidate 768 keys, and the last two calls are not made: 732 keys remain.
		keys := make([]string, 1500)
		for i := range keys {
			keys[i] = fmt.Sprint(i)
		}
		refused, none := "thing:300", "" // a key of the second call
		shared.refused.Store(&refused)
		began := time.Now()
		err := l.Invalidate(t.Context(), keys...)
		if !errors.Is(err, errDown) || !strings.Contains(err.Error(), "732 of 1500 keys") {
			t.Errorf("got %v, want errDown for 732 of 1500 keys", err)
		}
		took := time.Since(began)
		if n := shared.invalidated(); n != 1500-732 || shared.calls.Load() != 4 || took != 100*ms {
			t.Errorf("got %d keys invalidated, %d calls, %v; want 768, 4, 100ms", n, shared.calls.Load(), took)
		}
		shared.refused.Store(&none)
		time.Sleep(5 * time.Minute)
		if n := shared.invalidated(); n != 1500 {
			t.Errorf("got %d keys invalidated after the repetition, want 1500", n)
		}
	})
}

// The store hangs, and the breaker is open. An invalidation must fail at once. When the store answers again, the Loader
// must repeat the invalidation in the background.
func TestInvalidateWithAnOpenBreaker(t *testing.T) {
	for name, invalidate := range invalidationsOfRed {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				var ev events
				s, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour, LocalTTL: -1, OnEvent: ev.on})
				get(t, l, "red:1")
				s.stuck.Store(true)
				for i := range 5 {
					get(t, l, fmt.Sprint("blue:", i))
				}
				synctest.Wait() // the breaker calls OnEvent on a goroutine of its own
				if ev.of(refill.EventBreakerOpen) != 1 {
					t.Fatal("the breaker is not open")
				}
				d.version.Store(1)
				began := time.Now()
				if err := invalidate(t.Context(), l); err == nil || time.Since(began) != 0 {
					t.Errorf("got %v after %v, want an error at once", err, time.Since(began))
				}
				s.stuck.Store(false)
				time.Sleep(time.Second)
				if n := ev.of(refill.EventInvalidateRetried); n != 1 {
					t.Errorf("retried %d invalidations, want 1", n)
				}
				if v := get(t, peer, "red:1"); v != "red:1 v1" {
					t.Errorf("the peer serves %q, want \"red:1 v1\"", v)
				}
			})
		})
	}
}
