package refill_test

import (
	"context"
	"errors"
	"fmt"
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

// This file tests what a refill stores and announces: a value, an absence, or, if the refill has lost its claim,
// nothing.

// Guarantee G3 of the README: a node that was frozen for longer than its lease must not overwrite a newer value.
//
// Node a reads v0 and freezes. The lease of node a ends after 1 s. Node b takes lease and claim, and reads v1. Node a
// resumes, and the load of node a ends before the load of node b. The store must reject v0, because node a has lost its
// claim.
func TestAnOvertakenFillerDoesNotPublish(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 2 * time.Second}
		shared := memory.New()
		a := newSpy(shared)
		var ev events
		na := node(t, d.load, refill.Config{TTL: time.Minute, Shared: a, OnEvent: ev.on})
		nb := node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared})
		var wg sync.WaitGroup
		wg.Go(func() { get(t, na, "k") }) // reads v0
		time.Sleep(100 * ms)
		a.died.Store(true) // node a is frozen, so its lease is not renewed
		d.version.Store(1)
		wg.Go(func() { get(t, nb, "k") }) // takes over when the lease of a ends
		time.Sleep(1500 * ms)
		a.died.Store(false) // node a resumes at 1.6 s; the load of a ends at 2 s, the load of b at 3 s
		wg.Wait()
		if v := get(t, nb, "k"); v != "k v1" {
			t.Errorf("node b serves %q, want \"k v1\"", v)
		}
		if v := get(t, na, "k"); v != "k v1" {
			t.Errorf("the overtaken node serves %q, want \"k v1\"", v)
		}
		if ev.of(refill.EventPublishRejected) != 1 || ev.of(refill.EventLeaseLost) != 1 {
			t.Errorf("got events %v, want one publish-rejected and one lease-lost", ev.count)
		}
	})
}

// A publication is announced in three cases: a caller on another node waits for the value, the publication replaces a
// value that other nodes may have, or the publication ends a back-off that other nodes remember. If every publication
// were announced, every load of a rarely used key would cost each node a message.
func TestWhatIsAnnounced(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		var filled atomic.Int64
		defer shared.Subscribe("thing", func(n driver.Announcement) {
			if n.Kind == driver.Filled {
				filled.Add(1)
			}
		})()
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleFor: time.Second, Jitter: -1, Shared: shared})
		announced := func(what string, want int64) {
			t.Helper()
			synctest.Wait()
			if n := filled.Swap(0); n != want {
				t.Errorf("%s: got %d announcements, want %d", what, n, want)
			}
		}
		get(t, nodes[0], "rare")
		announced("no waiter, no old value", 0)

		time.Sleep(1500 * ms)
		get(t, nodes[0], "rare")
		time.Sleep(200 * ms)
		announced("a value is replaced", 1)

		waited := behind(t, nodes[0], "wanted")
		time.Sleep(50 * ms)
		began := time.Now()
		get(t, nodes[1], "wanted")
		if took := time.Since(began); took != 50*ms {
			t.Errorf("the other node waited %v, want the 50ms that the load still took", took)
		}
		waited()
		announced("another node waits", 1)

		d.fail(errors.New("no"))
		if _, err := nodes[0].Get(t.Context(), "failing"); err == nil {
			t.Error("Get returned no error although the load failed")
		}
		d.fail(nil)
		time.Sleep(1001 * ms)
		get(t, nodes[0], "failing")
		announced("a back-off has ended", 1)
	})
}

// An announcement carries a record that is smaller than driver.MaxAnnouncedRecord. If the record is larger, a node that
// has the key in L1 reads the record from the store in the background. Meanwhile the node serves its old value.
func TestAnnouncementCarriesASmallValue(t *testing.T) {
	for _, size := range []int{10, 100_000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var version atomic.Int64
				load := func(context.Context, string) (string, error) {
					return strings.Repeat(fmt.Sprint(version.Load()), size), nil
				}
				shared := memory.New()
				s := newSpy(shared)
				a := node(t, load, refill.Config{TTL: time.Hour, Shared: shared})
				b := node(t, load, refill.Config{TTL: time.Hour, Shared: s})
				get(t, a, "k")
				get(t, b, "k")
				version.Store(1)
				if err := a.Refresh(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				gets := s.gets.Load()
				first := get(t, b, "k")
				synctest.Wait()
				second := get(t, b, "k")
				if size < driver.MaxAnnouncedRecord {
					if first[0] != '1' || s.gets.Load() != gets {
						t.Errorf("got a value of %q after %d GETs, want '1' from the announcement without a GET",
							first[0], s.gets.Load()-gets)
					}
				} else if first[0] != '0' || second[0] != '1' || s.gets.Load() != gets+1 {
					t.Errorf("got values of %q, then of %q, and %d GETs, want '0' at once, then '1' after 1 GET",
						first[0], second[0], s.gets.Load()-gets)
				}
			})
		})
	}
}

func TestAbsence(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		nodes := fleet(t, 2, d, refill.Config{
			TTL: time.Minute, StaleFor: time.Hour, NotFoundTTL: 2 * time.Second, Jitter: -1,
		})
		d.fail(fmt.Errorf("no row 42: %w", refill.ErrNotFound))
		for range 3 {
			for _, l := range nodes {
				_, err := l.Get(t.Context(), "k")
				if !errors.Is(err, refill.ErrNotFound) || err.Error() != "no row 42: refill: not found" {
					t.Errorf("got %v, want the error of the load function, which wraps ErrNotFound", err)
				}
			}
		}
		if n := d.loads.Load(); n != 1 {
			t.Errorf("got %d loads, want 1: an absence is cached", n)
		}
		d.fail(nil)
		time.Sleep(2*time.Second + 50*ms) // NotFoundTTL, and the 50 ms by which the clock of L1 may be late
		get(t, nodes[1], "k")             // loads, because an absence is never served stale
		get(t, nodes[0], "k")
		d.fail(refill.ErrNotFound) // the row was deleted, so the absence must replace the value
		if err := nodes[0].Refresh(t.Context(), "k"); err != nil {
			t.Errorf("Refresh of a deleted row: got %v, want no error", err)
		}
		synctest.Wait()
		for i, l := range nodes {
			if v, err := l.Get(t.Context(), "k"); !errors.Is(err, refill.ErrNotFound) {
				t.Errorf("node %d: got %q, %v after the row was deleted, want ErrNotFound", i, v, err)
			}
		}
	})
}

// NotFoundTTL is negative, so an absence is not cached. The waiters of one load must share the ErrNotFound of the load.
// The next Get must load again.
func TestAbsenceNotCached(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms, err: refill.ErrNotFound}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Minute, NotFoundTTL: -1})
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				if _, err := nodes[i%2].Get(t.Context(), "k"); !errors.Is(err, refill.ErrNotFound) {
					t.Errorf("got %v, want ErrNotFound", err)
				}
			})
		}
		wg.Wait()
		if n := d.loads.Load(); n != 1 {
			t.Errorf("got %d loads for all waiters, want 1", n)
		}
		_, _ = nodes[0].Get(t.Context(), "k")
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2: the absence is not cached", n)
		}
	})
}

// NotFoundTTL is negative, so an absence is not cached. A refresh that ends with an absence must still remove the
// stale value on every node.
func TestAbsenceNotCachedReplacesAStaleValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleFor: time.Hour, NotFoundTTL: -1})
		for _, l := range nodes {
			get(t, l, "k")
		}
		d.fail(refill.ErrNotFound)
		time.Sleep(2 * time.Second)
		get(t, nodes[0], "k") // stale: starts a background refresh
		time.Sleep(100 * ms)
		for i, l := range nodes {
			if v, err := l.Get(t.Context(), "k"); !errors.Is(err, refill.ErrNotFound) {
				t.Errorf("node %d: got %q, %v, want ErrNotFound", i, v, err)
			}
		}
	})
}

// The load of a value takes longer than the TTL of the value, so every Get loads again. The Loader must report each
// such load with EventPublishedLate. A load that ends within TTL, a TTL of 0 and a no-store must not cause this event.
func TestPublishedLate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var ev events
		var took atomic.Int64
		l := node(t, func(ctx context.Context, key string) (string, error) {
			time.Sleep(time.Duration(took.Load()))
			switch f := refill.FillFrom(ctx); key {
			case "ttl 0":
				f.SetTTL(0)
			case "no-store":
				f.NoStore()
			case "long":
				f.SetTTL(time.Minute)
			}
			return "v", nil
		}, refill.Config{TTL: time.Second, Jitter: -1, OnEvent: ev.on})
		get(t, l, "in time")
		took.Store(int64(1500 * ms))
		for _, key := range []string{"ttl 0", "no-store", "long"} {
			get(t, l, key)
		}
		if n := ev.of(refill.EventPublishedLate); n != 0 {
			t.Errorf("got %d published-late, want none", n)
		}
		for range 2 {
			get(t, l, "late")
		}
		if n := ev.of(refill.EventPublishedLate); n != 2 {
			t.Errorf("got %d published-late, want 2: each Get has loaded", n)
		}
	})
}
