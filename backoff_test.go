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

// This file tests the back-off after a failed load: which callers share the error, how long it holds, and what ends it.

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
		if n := d.loads.Load(); n != 1 {
			t.Fatalf("got %d loads, want 1", n)
		}
		time.Sleep(1900 * time.Millisecond)
		for _, l := range nodes {
			if _, err := l.Get(t.Context(), "k"); err == nil {
				t.Error("Get within ErrorTTL succeeded, want the error")
			}
		}
		if n := d.loads.Load(); n != 1 {
			t.Fatalf("got %d loads within ErrorTTL, want 1", n)
		}
		d.fail(nil)
		time.Sleep(200 * time.Millisecond)
		get(t, nodes[1], "k")
		get(t, nodes[0], "k")
		if n := d.loads.Load(); n != 2 {
			t.Fatalf("got %d loads after ErrorTTL, want 2", n)
		}
	})
}

// With ErrorTTL off there is no back-off. All waiters of the failed load still share its error.
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
		if n := d.loads.Load(); n != 1 {
			t.Errorf("got %d loads, want 1", n)
		}
		d.fail(nil)
		get(t, nodes[3], "k")
	})
}

// A node that missed the announcement of a failure finds the back-off in the store, in the place of the lease.
func TestABackOffIsFoundWithoutItsAnnouncement(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms, err: errDown}
		shared := memory.New()
		s := newSpy(shared)
		l := node(t, d.load, refill.Config{Shared: s})
		peer := node(t, d.load, refill.Config{Shared: shared})
		s.mute.Store(true)
		_, _ = peer.Get(t.Context(), "k")
		if _, err := l.Get(t.Context(), "k"); err == nil || d.loads.Load() != 1 {
			t.Errorf("got error %v after %d loads, want an error after 1", err, d.loads.Load())
		}
	})
}

// A failing database is not asked again within ErrorTTL, with the store or without it. On the node of the load, a Get
// within the back-off returns the load's own error.
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

// The back-off doubles with each failure in a row, on any node, up to MaxErrorTTL. A success ends the row.
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
				for i := range nodes { // another node is first each time
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
		for i, want := range []time.Duration{0, 1, 3, 7, 12, 17} {
			off := got[min(i, len(got)-1)] - want*time.Second
			if len(got) != 6 || off < 0 || off > 100*time.Millisecond {
				t.Fatalf("got loads at %v, want 0, 1, 3, 7, 12, 17 s", got)
			}
		}
		d.fail(nil)
		time.Sleep(5 * time.Second)
		get(t, nodes[3], "k")
		d.fail(errors.New("boom again"))
		time.Sleep(2 * time.Second)
		if got := probes(2500 * time.Millisecond); len(got) != 2 {
			t.Errorf("got loads at %v after a success, want a second one 1 s after the first", got)
		}
	})
}

// A long back-off also holds on a node that has just started.
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
		_, err := node(t, d.load, cfg).Get(t.Context(), "k")
		if !errors.As(err, &failed) || failed.RetryAfter < 2*time.Minute {
			t.Errorf("got %v, want the error that was left in the store", err)
		}
		if n := d.loads.Load() - before; n != 0 {
			t.Errorf("got %d loads within the back-off, want 0", n)
		}
	})
}

// A row of failures ends with a success on another node, with Invalidate, or with a pause. Then the back-off is
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

// A load begins, the key is invalidated, and then the load fails. The failure leaves no back-off. (TestHistory found
// this case.)
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
