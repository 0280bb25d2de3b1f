package refill_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// This file tests the back-off after a failed load: its length, the callers that share the error, and what ends a
// back-off.

func TestErrorIsSharedAndBacksOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 50 * time.Millisecond}
		boom := errors.New("boom")
		d.fail(boom)
		nodes := fleet(t, 2, d, refill.Config{ErrorTTL: 2 * time.Second})
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				_, err := nodes[i%2].Get(t.Context(), "k")
				var le *refill.LoadError
				if !errors.As(err, &le) || le.Key != "k" || le.Err.Error() != "boom" {
					t.Errorf("got %v, want a LoadError of boom", err)
				}
			})
		}
		wg.Wait()
		if n := d.loads.Load(); n != 2 {
			t.Fatalf("got %d loads, want 2: one of each node", n)
		}
		time.Sleep(1900 * time.Millisecond)
		for _, l := range nodes {
			if _, err := l.Get(t.Context(), "k"); err == nil {
				t.Error("Get within ErrorTTL succeeded, want the error")
			}
		}
		if n := d.loads.Load(); n != 2 {
			t.Fatalf("got %d loads within ErrorTTL, want 2", n)
		}
		d.fail(nil)
		time.Sleep(200 * time.Millisecond)
		get(t, nodes[1], "k")
		get(t, nodes[0], "k")
		if n := d.loads.Load(); n != 3 {
			t.Fatalf("got %d loads after ErrorTTL, want 3", n)
		}
	})
}

// ErrorTTL is negative, so a failed load starts no back-off. 40 callers on four nodes ask for a key at the same time.
// One node loads the key, and the load fails. The failure may be a fault of that node alone, so one of the waiting
// nodes loads the key again. That load fails as well. All 40 callers must get the error of one of these two loads.
func TestAnErrorIsSharedWithoutBackOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms, err: errDown}
		nodes := fleet(t, 4, d, refill.Config{ErrorTTL: -1})
		var wg sync.WaitGroup
		for i := range 40 {
			wg.Go(func() {
				if _, err := nodes[i%4].Get(t.Context(), "k"); err == nil {
					t.Error("Get succeeded, want the error of the load")
				}
			})
		}
		wg.Wait()
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2, of two nodes", n)
		}
		d.fail(nil)
		get(t, nodes[3], "k")
	})
}

// Two nodes load a key, and both loads fail, so the back-off holds for all nodes. A third node misses the announcements
// of the failures. A Get on the third node must find the back-off in the store, where it has the place of the lease.
// The Get must not load.
func TestABackOffIsFoundWithoutItsAnnouncement(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms, err: errDown}
		shared := memory.New()
		s := newSpy(shared)
		l := node(t, d.load, refill.Config{Shared: s})
		s.mute.Store(true)
		for range 2 {
			_, _ = node(t, d.load, refill.Config{Shared: shared}).Get(t.Context(), "k")
		}
		if _, err := l.Get(t.Context(), "k"); err == nil || d.loads.Load() != 2 {
			t.Errorf("got error %v after %d loads, want an error after 2", err, d.loads.Load())
		}
	})
}

// The database fails. The test runs once with a store that answers, and once with a store that does not answer. The
// node must not ask the database again within ErrorTTL. A Get within the back-off must return the error that the load
// function returned. A Refresh must load without waiting for the end of the back-off.
func TestBackOffKeepsTheError(t *testing.T) {
	for _, down := range []bool{false, true} {
		t.Run(fmt.Sprint("store down ", down), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				broken := errors.New("connection refused")
				d := &db{took: 10 * ms, err: broken}
				s := newSpy(memory.New())
				l := node(t, d.load, refill.Config{TTL: time.Minute, ErrorTTL: 2 * time.Second, Shared: s})
				if down {
					s.cut(true)
				}
				for range 20 {
					_, err := l.Get(t.Context(), "k")
					var failed *refill.LoadError
					if !errors.Is(err, broken) || !errors.As(err, &failed) ||
						failed.RetryAfter <= 0 || failed.RetryAfter > 2*time.Second {
						t.Errorf("got %v, want the load's own error with RetryAfter in (0, 2 s]", err)
					}
					time.Sleep(200 * ms)
				}
				if n := d.loads.Load(); n != 2 {
					t.Errorf("got %d loads in 4 s, want 2: ErrorTTL is 2 s", n)
				}
				d.fail(nil)
				if err := l.Refresh(t.Context(), "k"); err != nil {
					t.Errorf("Refresh within the back-off: %v", err)
				}
				get(t, l, "k")
			})
		})
	}
}

// Eight nodes ask for a key that cannot be loaded. Each time the back-off is over, two nodes load, because the failure
// of one node does not yet hold the other nodes back. The next back-off is twice as long, up to MaxErrorTTL. After a
// successful load, the next back-off must be ErrorTTL again.
func TestBackOffGrows(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		d.fail(errors.New("boom"))
		nodes := fleet(t, 8, d, refill.Config{ErrorTTL: time.Second, MaxErrorTTL: 5 * time.Second, Jitter: -1})
		probes := func(total time.Duration) (at []time.Duration) {
			began := time.Now()
			d.mu.Lock()
			d.begins = nil
			d.mu.Unlock()
			for time.Since(began) < total {
				for i := range nodes { // each load changes which node asks first
					_, _ = nodes[(i+len(at))%len(nodes)].Get(t.Context(), "k")
				}
				d.mu.Lock()
				if n := len(d.begins); n > len(at) {
					at = append(at, d.begins[n-1].Sub(began).Round(10*time.Millisecond))
				}
				d.mu.Unlock()
				time.Sleep(10 * time.Millisecond)
			}
			return at
		}
		got := probes(18 * time.Second)
		for i, want := range []time.Duration{0, 0, 1, 1, 3, 3, 7, 7, 12, 12, 17, 17} {
			off := got[min(i, len(got)-1)] - want*time.Second
			if len(got) != 12 || off < 0 || off > 100*time.Millisecond {
				t.Fatalf("got loads at %v, want two nodes' loads at 0, 1, 3, 7, 12, 17 s", got)
			}
		}
		d.fail(nil)
		time.Sleep(5 * time.Second)
		get(t, nodes[3], "k")
		d.fail(errors.New("boom again"))
		time.Sleep(2 * time.Second)
		if got := probes(2500 * time.Millisecond); len(got) != 4 || got[2]-got[0] > 1100*ms {
			t.Errorf("got loads at %v after a success, want two nodes' loads, and again 1 s later", got)
		}
	})
}

// The loads of a key have failed many times on one node, so the next back-off of that node is long. The failures of one
// node do not hold other nodes back, so a new node loads the key one time. This load fails as well. Since two nodes
// have failed, the long back-off must now hold for all nodes.
func TestLongBackOffOnANewNode(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		d.fail(errors.New("boom"))
		cfg := refill.Config{ErrorTTL: time.Second, MaxErrorTTL: time.Hour, Shared: memory.New()}
		l := node(t, d.load, cfg)
		var failed *refill.LoadError
		for range 9 {
			_, err := l.Get(t.Context(), "k")
			if !errors.As(err, &failed) {
				t.Fatal(err)
			}
			if failed.RetryAfter > 2*time.Minute {
				break
			}
			time.Sleep(failed.RetryAfter)
		}
		before := d.loads.Load()
		for range 3 {
			_, err := node(t, d.load, cfg).Get(t.Context(), "k")
			if !errors.As(err, &failed) || failed.RetryAfter < 2*time.Minute {
				t.Errorf("got %v, want an error with the long back-off", err)
			}
		}
		if n := d.loads.Load() - before; n != 1 {
			t.Errorf("got %d loads of new nodes within the back-off, want 1", n)
		}
	})
}

// ErrorTTL is 2 s, so the back-off after two failures in a row is 4 s. Then something ends the row: a success on
// another node, an Invalidate, or a pause of one minute (one case each). The back-off after the next failure must be
// ErrorTTL again.
func TestRowOfFailuresEnds(t *testing.T) {
	for name, end := range map[string]func(*testing.T, *db, *refill.Loader[string]){
		"a success elsewhere": func(t *testing.T, d *db, peer *refill.Loader[string]) {
			d.fail(nil)
			if err := peer.Refresh(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(1100 * ms)
			d.fail(errors.New("boom"))
		},
		"Invalidate": func(t *testing.T, _ *db, peer *refill.Loader[string]) {
			if err := peer.Invalidate(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		},
		"a pause": func(*testing.T, *db, *refill.Loader[string]) { time.Sleep(time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				d.fail(errors.New("boom"))
				_, l, peer := pair(t, d, refill.Config{ErrorTTL: 2 * time.Second, MaxErrorTTL: time.Minute, Jitter: -1})
				after := func() time.Duration {
					var failed *refill.LoadError
					if _, err := l.Get(t.Context(), "k"); !errors.As(err, &failed) {
						t.Fatal(err)
					}
					return failed.RetryAfter
				}
				after()
				time.Sleep(2 * time.Second)
				if got := after(); got != 4*time.Second {
					t.Fatalf("got back-off %v after the second failure, want 4 s", got)
				}
				end(t, d, peer)
				if got := after(); got != 2*time.Second {
					t.Errorf("got back-off %v, want that of a first failure: 2 s", got)
				}
			})
		})
	}
}

func TestInvalidateEndsTheBackOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms, err: errors.New("boom")}
		nodes := fleet(t, 2, d, refill.Config{ErrorTTL: time.Hour})
		_, _ = nodes[0].Get(t.Context(), "k")
		d.fail(nil)
		if err := nodes[1].Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		get(t, nodes[0], "k")
	})
}

// The store does not answer. A load of a key begins, the key is invalidated, and then the load fails. The next Get must
// load again, because a failure from before an Invalidate must leave no back-off. (TestHistory in internal/realtest
// found that the failure left a back-off.)
func TestAFailureFromBeforeAnInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms, err: errors.New("read before the write")}
		s := newSpy(memory.New())
		l := node(t, d.load, refill.Config{TTL: time.Hour, ErrorTTL: time.Minute, Shared: s})
		s.cut(true)
		failed := make(chan error)
		go func() {
			_, err := l.Get(t.Context(), "k")
			failed <- err
		}()
		time.Sleep(50 * ms)
		d.fail(nil)
		if err := l.Invalidate(t.Context(), "k"); err == nil {
			t.Error("Invalidate succeeded, want an error: the store does not answer")
		}
		if err := <-failed; err == nil {
			t.Error("the first Get succeeded, want the error of its load")
		}
		get(t, l, "k")
	})
}

// A node starts a flight of a key. Then the announcement of an Invalidate keeps later callers from joining that flight,
// so the next Get on the node starts a second flight. The loads of both flights fail. Two failures on the same node
// must not cause a back-off for other nodes, so another node must still load the key.
func TestTwoFlightsOfOneNodeFail(t *testing.T) {
	bubble(t, func(t *testing.T) {
		sick, well, shared := &db{took: time.Second}, &db{}, memory.New()
		sick.fail(errors.New("no route"))
		s := newSpy(shared)
		l := node(t, sick.load, refill.Config{TTL: time.Hour, ErrorTTL: time.Minute, Shared: s})
		peer := node(t, well.load, refill.Config{TTL: time.Hour, ErrorTTL: time.Minute, Shared: shared})
		s.holdAnnouncements(true)
		if err := peer.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			go func() { _, _ = l.Get(t.Context(), "k") }()
			time.Sleep(100 * ms)
			s.holdAnnouncements(false) // from now on, the first flight cannot be joined
		}
		time.Sleep(10 * time.Second)
		if n := sick.loads.Load(); n != 2 {
			t.Fatalf("the node without a database loaded %d times, want 2", n)
		}
		get(t, peer, "k")
	})
}
