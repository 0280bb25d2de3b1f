package refill_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests refills of one key on several nodes: the lookup, Acquire, the wait for another node, and the
// takeover from a node that died.

func TestOneLoadPerExpiryInTheFleet(t *testing.T) {
	for _, staleFor := range []time.Duration{0, 10 * time.Second} {
		t.Run(staleFor.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 100 * time.Millisecond}
				nodes := fleet(t, 8, d, refill.Config{TTL: time.Second, StaleFor: staleFor, Jitter: -1})
				var wg sync.WaitGroup
				end := time.Now().Add(10 * time.Second)
				var waited atomic.Int64
				for _, l := range nodes {
					for range 20 {
						wg.Go(func() {
							for time.Now().Before(end) {
								began := time.Now()
								get(t, l, "42")
								if time.Since(began) > 0 {
									waited.Add(1)
								}
								time.Sleep(7 * time.Millisecond)
							}
						})
					}
				}
				wg.Wait()
				if n := d.most.Load(); n != 1 {
					t.Errorf("got %d loads at once, want 1", n)
				}
				// TTL counts from the start of a load, so each load begins 1 s after the previous load began, or a little later.
				if n := d.loads.Load(); n < 9 || n > 11 {
					t.Errorf("got %d loads in 10s with a TTL of 1s, want 9 to 11", n)
				}
				if n := waited.Load(); staleFor > 0 && n > 8*20 {
					t.Errorf("got %d Gets that waited, want at most the %d of the cold start", n, 8*20)
				}
			})
		})
	}
}

// A load takes longer than TTL and LockTTL. TTL counts from the start of the load, so the value has already expired
// when it is published. All waiters on all nodes must get the value nevertheless. Otherwise the eight nodes would load
// one after another, three seconds each.
func TestLoadLongerThanTTLAndLockTTL(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 3 * time.Second}
		nodes := fleet(t, 8, d, refill.Config{TTL: time.Second, LockTTL: time.Second})
		var wg sync.WaitGroup
		began := time.Now()
		for i := range 80 {
			wg.Go(func() { get(t, nodes[i%8], "k") })
		}
		wg.Wait()
		if took := time.Since(began); took > 3100*ms {
			t.Errorf("the last waiter got its value after %v, want at most 3.1s", took)
		}
		if n := d.loads.Load(); n != 1 {
			t.Errorf("got %d loads, want 1", n)
		}
	})
}

func TestADeadHoldersWorkIsTakenOver(t *testing.T) {
	for _, announcementsLost := range []bool{false, true} {
		t.Run(fmt.Sprint("announcements lost ", announcementsLost), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 500 * ms}
				shared := memory.New()
				a, b := newSpy(shared), newSpy(shared)
				na := node(t, d.load, refill.Config{Shared: a})
				nb := node(t, d.load, refill.Config{Shared: b})
				go func() { _, _ = na.Get(t.Context(), "k") }()
				time.Sleep(400 * ms) // node a has renewed its lease once
				a.died.Store(true)
				b.mute.Store(announcementsLost)
				died := time.Now()
				get(t, nb, "k")
				d.mu.Lock()
				defer d.mu.Unlock()
				if len(d.begins) != 2 || d.begins[1].Sub(died) > 1500*ms {
					t.Errorf("got loads that began at %v, want a second one within LockTTL + 500ms of %v", d.begins, died)
				}
			})
		})
	}
}

// pairOfMisses makes a pair of nodes, and lets node l look up 40 keys that the store does not have. Since most of the
// recent lookups of l have missed, the next refills of l skip the lookup and begin with Acquire.
func pairOfMisses(t *testing.T, d *db, cfg refill.Config) (s *spy, l, peer *refill.Loader[string]) {
	t.Helper()
	s, l, peer = pair(t, d, cfg)
	for i := range 40 {
		get(t, l, fmt.Sprint("rare ", i))
	}
	s.gets.Store(0)
	s.calls.Store(0)
	d.loads.Store(0)
	return s, l, peer
}

// A node whose lookups mostly miss skips the lookup. A load must then cost two calls of the store: Acquire and Publish.
// If the store has a value, Acquire must return that value.
func TestAcquireWithoutALookup(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		s, l, peer := pairOfMisses(t, d, refill.Config{TTL: time.Minute})
		get(t, l, "another")
		if gets, calls := s.gets.Load(), s.calls.Load(); gets != 0 || calls != 2 {
			t.Errorf("got %d GETs in %d calls of the store for a load, want Acquire and Publish alone", gets, calls)
		}
		get(t, peer, "known")
		if r, err := l.GetResult(t.Context(), "known"); err != nil || r.Outcome != refill.OutcomeShared {
			t.Errorf("got %+v, %v, want the value of the store", r, err)
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads of two keys, want 2", n)
		}
		lockIsFree(t, s.Store, "known")
	})
}

// After LocalTTL a node no longer trusts its L1 entry. The node must read the store before Acquire, because the store
// may still have a fresh value. The node must do so even if its lookups mostly miss.
func TestLookupOfAValueThatL1NoLongerTrusts(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: ms}
		s, l, _ := pairOfMisses(t, d, refill.Config{TTL: time.Hour, LocalTTL: 10 * time.Second})
		get(t, l, "k")
		time.Sleep(11 * time.Second)
		r, err := l.GetResult(t.Context(), "k")
		if err != nil || r.Outcome != refill.OutcomeShared || d.loads.Load() != 1 || s.gets.Load() != 1 {
			t.Errorf("got %+v, %v after %d loads, %d GETs, want the value of the store after 1 load, 1 GET",
				r, err, d.loads.Load(), s.gets.Load())
		}
	})
}

// A flight finds all load slots in use. The flight must read the store before it waits for a load slot. If the store
// has a value, the flight needs no load.
func TestLookupWithoutALoadSlot(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		s, l, peer := pairOfMisses(t, d, refill.Config{TTL: time.Minute, MaxLoads: 1})
		get(t, peer, "known")
		defer behind(t, l, "long")()
		time.Sleep(50 * ms)
		began := time.Now()
		get(t, l, "known")
		if took := time.Since(began); took != 0 || s.gets.Load() != 1 {
			t.Errorf("Get took %v and %d GETs, want one GET at once", took, s.gets.Load())
		}
	})
}

// Acquire without a lookup finds a stale value in the store. The caller is served the stale value at once, and a
// background refresh loads the new value.
func TestAcquireFindsAStaleValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		_, l, peer := pairOfMisses(t, d, refill.Config{TTL: time.Second, StaleFor: time.Minute, Jitter: -1})
		get(t, peer, "k")
		time.Sleep(2 * time.Second)
		began := time.Now()
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.OutcomeStale || time.Since(began) != 0 {
			t.Errorf("got %+v, %v after %v, want the stale value at once", r, err, time.Since(began))
		}
		time.Sleep(150 * ms)
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.OutcomeHit || d.loads.Load() != 2 {
			t.Errorf("got %+v, %v after %d loads, want a hit after 2 loads", r, err, d.loads.Load())
		}
	})
}

// Acquire without a lookup finds that another node holds the lease. The caller must get the value at the moment when
// the holder publishes it.
func TestAcquireThatLosesWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		_, l, peer := pairOfMisses(t, d, refill.Config{TTL: time.Minute})
		defer behind(t, peer, "k")()
		time.Sleep(40 * ms)
		began := time.Now()
		get(t, l, "k")
		if took := time.Since(began); took != 60*ms || d.loads.Load() != 1 {
			t.Errorf("Get took %v and %d loads, want the 60ms of 1 load on the other node", took, d.loads.Load())
		}
	})
}

// The holder of the lease announces its value while another node waits for the reply to its Acquire. The other node
// must not miss the announcement.
func TestAnnouncementBeforeTheReplyToAcquire(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		shared := memory.New()
		s := newSpy(shared)
		l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: s})
		for i := range 40 { // lookups that miss, so that the next refill skips the lookup and begins with Acquire
			get(t, l, fmt.Sprint("rare ", i))
		}
		defer behind(t, node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared}), "k")()
		time.Sleep(50 * ms)
		s.onStep(func(_ context.Context, step string) error {
			time.Sleep(100 * ms)
			return nil
		})
		began := time.Now()
		get(t, l, "k")
		if took := time.Since(began); took != 100*ms {
			t.Errorf("Get took %v, want the 100ms of the reply", took)
		}
	})
}

// Acquire returns an error, so the node loads without the store. The store may have executed the Acquire and only lost
// the reply, so the node must release the lease.
func TestAcquireThatFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: ms}
		s, l, _ := pairOfMisses(t, d, refill.Config{TTL: time.Minute})
		s.down.Store(true)
		if v := get(t, l, "k"); v == "" {
			t.Error("got no value, want the loaded one")
		}
		s.down.Store(false)
		lockIsFree(t, s.Store, "k")
	})
}

// A flight acquires the lease without a lookup. Its only caller leaves during the load. The flight must release the
// lease at once.
func TestCallerLeavesDuringTheLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		s, l, _ := pairOfMisses(t, d, refill.Config{TTL: time.Minute})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*ms, cancel)
		if _, err := l.Get(ctx, "k"); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want context.Canceled", err)
		}
		time.Sleep(ms)
		lockIsFree(t, s.Store, "k")
	})
}

// The network delivers an Acquire twice.
//
//  1. A node acquires the lease and begins to load.
//  2. Another node invalidates the key, which removes the lease and the claim.
//  3. The copy of the Acquire arrives, and takes lease and claim again with the token of the first Acquire.
//  4. The load ends. Its value must not be stored, because the load began before the Invalidate.
func TestDuplicatedAcquireAfterAnInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		s, d := newSpy(shared), &db{took: 100 * ms}
		l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: s})
		loaded := behind(t, l, "k")
		time.Sleep(50 * ms)
		if err := shared.Invalidate(t.Context(), "peer#1", "thing:k"); err != nil {
			t.Fatal(err)
		}
		if r, err := shared.Acquire(t.Context(), *s.lastAcquire.Load()); err != nil || r.State != driver.Acquired {
			t.Fatalf("Acquire: got %+v, %v, want Acquired", r, err)
		}
		loaded()
		if record, err := shared.Get(t.Context(), "thing:k"); err != nil || record != nil {
			t.Errorf("got record %q, %v, want none: the load began before the Invalidate", record, err)
		}
		lockIsFree(t, shared, "k")
	})
}
