package refill_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests how long callers wait if the store has stopped answering, and L1 has the values of the keys that the
// callers ask for.

// sharedSpy is a spy that several Loaders share.
type sharedSpy struct {
	*spy
	mu      sync.Mutex
	handles []func(driver.Announcement)
}

func newSharedSpy() *sharedSpy { return &sharedSpy{spy: newSpy(memory.New())} }

func (s *sharedSpy) Subscribe(name string, handle func(driver.Announcement)) func() {
	s.mu.Lock()
	s.handles = append(s.handles, handle)
	s.mu.Unlock()
	return s.spy.Subscribe(name, handle)
}

// hang(true) makes every call of the store hang, and breaks the subscriptions of all Loaders. hang(false) restores the
// calls and the subscriptions.
func (s *sharedSpy) hang(yes bool) {
	s.stuck.Store(yes)
	a := driver.Announcement{Kind: driver.Subscribed}
	if yes {
		a = driver.Announcement{Kind: driver.Disconnected, Err: errDown}
	}
	s.mu.Lock()
	handles := slices.Clone(s.handles)
	s.mu.Unlock()
	for _, handle := range handles {
		handle(a)
	}
}

// waits measures how long callers wait in Gets.
type waits struct {
	mu      sync.Mutex
	now     int           // Gets that have not returned
	since   time.Time     // when now became 1
	total   time.Duration // time in which at least one Get had not returned
	longest time.Duration // the longest time of a single call of during
}

// during calls f, which calls Get or GetMany, and measures how long f takes.
func (w *waits) during(f func()) {
	began := time.Now()
	w.mu.Lock()
	if w.now++; w.now == 1 {
		w.since = began
	}
	w.mu.Unlock()
	f()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.longest = max(w.longest, time.Since(began))
	if w.now--; w.now == 0 {
		w.total += time.Since(w.since)
	}
}

// Three Loaders share a store, and their L1 has fresh values. The subscriptions break and the store hangs. Without a
// subscription, a Get asks the store before it may answer from L1, until a first call of the store has timed out. For
// half a second, 50 callers of each Loader ask for keys that L1 has, one Get each 10 ms. One more caller of each Loader
// calls GetMany each 10 ms. The time in which at least one caller waits may be one StoreTimeout (250 ms) in all. The
// test runs two such outages, one after the other. Each outage may cost one StoreTimeout.
func TestFreshValuesWaitOnceForADeadStore(t *testing.T) {
	const loaders, callers = 3, 50
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSharedSpy()
		var nodes []*refill.Loader[string]
		for range loaders {
			nodes = append(nodes, node(t, d.load, refill.Config{TTL: time.Hour, Shared: s}))
		}
		for range 2 {
			for _, l := range nodes {
				for i := range callers {
					get(t, l, fmt.Sprint(i))
				}
			}
			loads := d.loads.Load()
			s.hang(true)
			var w waits
			var wg sync.WaitGroup
			for n, l := range nodes {
				wg.Go(func() {
					for range 50 {
						w.during(func() { getMany(t, l, "0", "1", "2") })
						time.Sleep(10 * ms)
					}
				})
				for i := range callers {
					wg.Go(func() {
						time.Sleep(time.Duration(n*callers+i) * ms)
						for range 50 {
							w.during(func() { get(t, l, fmt.Sprint(i)) })
							time.Sleep(10 * ms)
						}
					})
				}
			}
			wg.Wait()
			if w.total > 250*ms || w.longest > 250*ms {
				t.Errorf("callers waited for %v in all, and the longest Get took %v, want 250ms (StoreTimeout)", w.total, w.longest)
			}
			if n := d.loads.Load() - loads; n != 0 {
				t.Errorf("%d loads, want none: L1 has all values", n)
			}
			s.hang(false)
			synctest.Wait()
		}
	})
}

// getMany calls GetMany, and fails the test if GetMany fails.
func getMany(t *testing.T, l *refill.Loader[string], keys ...string) {
	t.Helper()
	if _, err := l.GetMany(t.Context(), keys); err != nil {
		t.Errorf("GetMany: %v", err)
	}
}

// L1 has a key, but the store hangs and the subscriptions are down, so a Get asks the store before it may answer from
// L1. One caller calls Get on three Loaders in turn, 30 times in all. The first Get waits for StoreTimeout (250 ms).
// The other 29 Gets must not wait, whichever Loader they ask.
func TestOneCallerWaitsOnceForADeadStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSharedSpy()
		var nodes []*refill.Loader[string]
		for range 3 {
			l := node(t, d.load, refill.Config{TTL: time.Hour, Shared: s})
			get(t, l, "k")
			nodes = append(nodes, l)
		}
		s.hang(true)
		var w waits
		for range 10 {
			for _, l := range nodes {
				w.during(func() { get(t, l, "k") })
			}
		}
		if w.total != 250*ms {
			t.Errorf("30 Gets in a row waited for %v in all, want 250ms (StoreTimeout)", w.total)
		}
	})
}

// The store hangs and the subscription is down, while L1 has stale values. The first Get asks the store and waits for
// StoreTimeout. After this time-out, later Gets must return the stale values at once. Background refreshes must then
// load the new values without the store.
func TestStaleValuesWaitOnceForADeadStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSharedSpy()
		l := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, Shared: s, Jitter: -1})
		get(t, l, "first")
		for i := range 5 {
			get(t, l, fmt.Sprint(i))
		}
		time.Sleep(2 * time.Second)
		s.hang(true)
		d.version.Store(1)
		var w waits
		w.during(func() { get(t, l, "first") })
		for i := range 5 {
			key := fmt.Sprint(i)
			w.during(func() {
				if v := get(t, l, key); v != key+" v0" {
					t.Errorf("got %q, want the stale value", v)
				}
			})
		}
		if w.total != 250*ms {
			t.Errorf("6 Gets in a row waited for %v in all, want 250ms (StoreTimeout)", w.total)
		}
		time.Sleep(time.Second)
		for i := range 5 {
			if v := get(t, l, fmt.Sprint(i)); v != fmt.Sprint(i, " v1") {
				t.Errorf("a second later: got %q, want the refreshed value", v)
			}
		}
	})
}

// The subscription is down, and one call of the store has timed out, so the store is suspect and Gets are served from
// L1. Then the store answers a probe, while the subscription stays down. The next Get must read the store and not L1,
// because L1 may have missed an announcement.
func TestAnAnswerEndsTheSuspicion(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSharedSpy()
		l := node(t, d.load, refill.Config{TTL: time.Hour, Shared: s})
		get(t, l, "k")
		s.hang(true)
		get(t, l, "k")
		calls := s.gets.Load()
		get(t, l, "k")
		if n := s.gets.Load() - calls; n != 0 {
			t.Errorf("a Get of a value in L1 called the suspect store %d times, want none", n)
		}
		s.stuck.Store(false)    // the subscription stays down
		time.Sleep(time.Second) // a probe that runs now ends within 250 ms, and the next probe begins 500 ms later
		d.version.Store(1)
		if err := s.Store.Invalidate(t.Context(), "peer#1", "thing:k"); err != nil {
			t.Fatal(err)
		}
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q, want \"k v1\": the store answers, so the Get must ask it", v)
		}
	})
}

// The subscription is down, and calls of the store fail at once. Such failures must not make the store suspect, so
// every Get must read the store before L1.
func TestQuickFailuresBeginNoSuspicion(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSpy(memory.New())
		l := node(t, d.load, refill.Config{TTL: time.Hour, Shared: s})
		get(t, l, "k")
		s.cut(true)
		calls := s.gets.Load()
		for range 10 {
			get(t, l, "k")
		}
		if n := s.gets.Load() - calls; n != 10 {
			t.Errorf("10 Gets read the store %d times, want 10", n)
		}
	})
}
