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

// This file tests Invalidate and Expire: on this node, on other nodes, during a load, and when the store does not
// answer.

// When Invalidate returns, L1 of the calling node must be up to date, even if the announcement of the Invalidate is
// late. A later Get must not join a flight that began before the Invalidate.
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
		synctest.Wait() // for the announcement
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

// A load that began before Expire returned must not store its value as fresh.
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

// The announcement of an Invalidate is lost, and the node does not notice. L1 stops serving the old value within
// LocalTTL.
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

// After a break of the subscription, older entries of L1 are invalid, because an announcement may have been missed.
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
		s.down.Store(false) // the store answers, but the subscription is not back yet
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

// An Invalidate fails. A Get reads the old value into L1 again. Then the retry of the Invalidate succeeds. The retry
// must also invalidate the value in L1 of this node.
func TestARetriedInvalidateReachesL1(t *testing.T) {
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
		if v := get(t, l, "k"); v != "k v0" {
			t.Fatalf("got %q before the retry, want %q: the store still has it", v, "k v0")
		}
		time.Sleep(time.Second) // the retry
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q after the retry, want %q", v, "k v1")
		}
	})
}

// While invalidations wait for the store, a key and a tag of the same name are kept apart. An Expire that waits does
// not become an Invalidate.
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
		if err := l.Invalidate(t.Context(), "blue"); err == nil { // must not change the ExpireTag below
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

// slowInvalidate is a store whose Invalidate takes 100 ms, and fails after 50 ms if one of its keys is refused.
type slowInvalidate struct {
	driver.Store
	refused atomic.Pointer[string]
	calls   atomic.Int64 // with more than one key; the retries have one key each

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

// An Invalidate of many keys makes several calls of the store. A call that fails cancels no other call. Calls that have
// not begun by then are not made. The keys that are not yet invalidated are retried in the background.
func TestInvalidateOfManyKeys(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := &slowInvalidate{Store: memory.New(), done: make(map[string]bool)}
		l := node(t, (&db{}).load, refill.Config{TTL: time.Hour, Shared: shared})
		keys := make([]string, 1500) // 6 calls, 4 of them at once
		for i := range keys {
			keys[i] = fmt.Sprint(i)
		}
		refused, none := "thing:300", "" // in the second call
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
