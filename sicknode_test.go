package refill_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests a fleet in which the loads of one node or of several nodes fail. The failures of one node must not
// cause errors on the other nodes.

var errNoDatabase = errors.New("no database")

// nodesOf makes one node per database. The nodes share one store.
func nodesOf(t *testing.T, cfg refill.Config, dbs ...*db) []*refill.Loader[string] {
	t.Helper()
	if cfg.Shared == nil {
		cfg.Shared = memory.New()
	}
	nodes := make([]*refill.Loader[string], len(dbs))
	for i, d := range dbs {
		nodes[i] = node(t, d.load, cfg)
	}
	return nodes
}

// tally counts the Gets of one node, and how many of these Gets failed.
type tally struct{ gets, errs atomic.Int64 }

func (c *tally) note(err error) {
	c.gets.Add(1)
	if err != nil {
		c.errs.Add(1)
	}
}

// For 10 s, hammer calls Get on each node from 40 goroutines, for keys chosen at random. hammer returns one tally per
// node.
func hammer(t *testing.T, nodes []*refill.Loader[string], keys []string) []tally {
	t.Helper()
	tallies, began := make([]tally, len(nodes)), time.Now()
	var wg sync.WaitGroup
	for i, l := range nodes {
		for seed := range 40 {
			random := rand.New(rand.NewPCG(uint64(i), uint64(seed)))
			wg.Go(func() {
				time.Sleep(time.Duration(random.IntN(10_000)) * time.Microsecond)
				for time.Since(began) < 10*time.Second {
					_, err := l.Get(t.Context(), keys[random.IntN(len(keys))])
					tallies[i].note(err)
					time.Sleep(10 * ms)
				}
			})
		}
	}
	wg.Wait()
	return tallies
}

// One of four nodes cannot reach its database, and each of its loads fails at once. No Get on the other three nodes may
// fail.
func TestOneNodeWhoseLoadsFail(t *testing.T) {
	bubble(t, func(t *testing.T) {
		dbs := []*db{{took: 20 * ms}, {took: 20 * ms}, {took: 20 * ms}, {err: errNoDatabase}}
		nodes := nodesOf(t, refill.Config{TTL: time.Second}, dbs...)
		tallies := hammer(t, nodes, names(0, 200))
		for i := range 3 {
			if n := tallies[i].errs.Load(); n > 0 {
				t.Errorf("node %d: %d of %d Gets failed, want 0", i, n, tallies[i].gets.Load())
			}
		}
		if n := tallies[3].gets.Load(); n < 5000 {
			t.Errorf("the node without a database made %d Gets, want 5,000 at least: the test has tested too little", n)
		}
	})
}

// The database of one of four nodes does not answer, so each load of that node lasts until its ctx ends. Each node gets
// 2,000 requests per second for 20 keys, with a deadline of 1 s. After the first 4 s, at most 1 % of the Gets on the
// other three nodes may fail. The first 4 s do not count, because the sick node lets other nodes load first only after
// its own loads have failed: LoadTimeout is 2 s, so the first loads of the sick node fail after 2 s, and loads that
// began until then may hang until 4 s. With only 20 keys, the healthy nodes ask for each key often, so they usually
// acquire its lease before the sick node.
func TestOneNodeWhoseLoadsHang(t *testing.T) {
	bubble(t, func(t *testing.T) {
		dbs := []*db{{took: 20 * ms}, {took: 20 * ms}, {took: 20 * ms}, {took: time.Hour}}
		nodes := nodesOf(t, refill.Config{TTL: time.Second, LoadTimeout: 2 * time.Second}, dbs...)
		keys, began := names(0, 20), time.Now()
		tallies := make([]tally, len(nodes))
		var wg sync.WaitGroup
		for i, l := range nodes {
			random := rand.New(rand.NewPCG(uint64(i), 1))
			wg.Go(func() {
				for range 20_000 {
					time.Sleep(500 * time.Microsecond)
					key := keys[random.IntN(len(keys))]
					wg.Go(func() {
						from := time.Since(began)
						ctx, cancel := context.WithTimeout(t.Context(), time.Second)
						defer cancel()
						if _, err := l.Get(ctx, key); from > 4*time.Second {
							tallies[i].note(err)
						}
					})
				}
			})
		}
		wg.Wait()
		for i := range 3 {
			if n, all := tallies[i].errs.Load(), tallies[i].gets.Load(); n*100 > all {
				t.Errorf("node %d: %d of %d Gets failed, want 1 %% at most", i, n, all)
			}
		}
	})
}

// The loads of all four nodes fail. The fleet may load each key at most twice within ErrorTTL (2 s).
func TestAllNodesWithoutADatabase(t *testing.T) {
	for name, took := range map[string]time.Duration{"at once": 0, "slowly": 100 * ms} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var mu sync.Mutex
				begins := map[string][]time.Time{}
				load := func(_ context.Context, key string) (string, error) {
					mu.Lock()
					begins[key] = append(begins[key], time.Now())
					mu.Unlock()
					time.Sleep(took)
					return "", errNoDatabase
				}
				cfg := refill.Config{ErrorTTL: 2 * time.Second, Shared: memory.New()}
				var nodes []*refill.Loader[string]
				for range 4 {
					nodes = append(nodes, node(t, load, cfg))
				}
				keys := names(0, 50)
				hammer(t, nodes, keys)
				for _, key := range keys {
					all := begins[key]
					if len(all) < 5 {
						t.Errorf("%s: got %d loads in 10 s, want 5 at least: the fleet has given up", key, len(all))
					}
					for i := 2; i < len(all); i++ {
						if between := all[i].Sub(all[i-2]); between < 2*time.Second {
							t.Errorf("%s: three loads within %v, want two at most within ErrorTTL (2 s)", key, between)
						}
					}
				}
			})
		})
	}
}

// sickPair makes two nodes, sick and well, that share one store. A load of the key "k" on sick has just failed, so sick
// is held back: sick does not load "k" for ErrorTTL (a minute). The loads of sick use the database dead and fail. The
// loads of well use the database alive and take 500 ms. s is the connection of sick to the store.
func sickPair(t *testing.T) (s *spy, sick, well *refill.Loader[string], dead, alive *db) {
	t.Helper()
	shared := memory.New()
	s = newSpy(shared)
	dead, alive = &db{err: errNoDatabase}, &db{took: 500 * ms}
	cfg := refill.Config{TTL: time.Hour, ErrorTTL: time.Minute, Shared: s}
	sick = node(t, dead.load, cfg)
	cfg.Shared = shared
	well = node(t, alive.load, cfg)
	if _, err := sick.Get(t.Context(), "k"); !errors.Is(err, errNoDatabase) {
		t.Errorf("got %v, want the error of the load", err)
	}
	return s, sick, well, dead, alive
}

// A node is held back: its load of a key has failed, so it does not load the key for ErrorTTL. Another node loads the
// key, and the announcement of the new value is lost. The next Get of the node that is held back must find the value in
// the store.
func TestANodeHeldBackReadsTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, sick, well, dead, _ := sickPair(t)
		for range 3 {
			if _, err := sick.Get(t.Context(), "k"); !errors.Is(err, errNoDatabase) {
				t.Errorf("got %v within the back-off, want the error of the load", err)
			}
		}
		s.mute.Store(true)
		get(t, well, "k")
		if v := get(t, sick, "k"); v != "k v0" || dead.loads.Load() != 1 {
			t.Errorf("got %q after %d loads here, want \"k v0\" after 1", v, dead.loads.Load())
		}
	})
}

// A node is held back: its load of a key has failed, so it does not load the key for ErrorTTL. While another node loads
// the key, a Get of the node that is held back must wait for that load, and return its value.
func TestANodeHeldBackWaitsForOthers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, sick, well, dead, alive := sickPair(t)
		defer behind(t, well, "k")()
		time.Sleep(100 * ms)
		r, err := sick.GetResult(t.Context(), "k")
		if err != nil || r.Outcome != refill.OutcomeLoadedElsewhere {
			t.Errorf("got %v, %v, want the value of the other node", r.Outcome, err)
		}
		if dead.loads.Load() != 1 || alive.loads.Load() != 1 {
			t.Errorf("got %d and %d loads, want 1 and 1", dead.loads.Load(), alive.loads.Load())
		}
	})
}

// A node is held back: its load of a key has failed, so it does not load the key for ErrorTTL. Another node then loads
// the key, and a Get on the node that is held back waits for this load. The only caller on the other node leaves, so
// the other node cancels its load and releases the lease without a failure. Taking the lease has removed the note of
// the first failure, so the node that is held back must then load at once.
func TestANodeHeldBackFindsAReleasedLease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, sick, well, dead, alive := sickPair(t)
		dead.fail(nil)
		left := make(chan error)
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), 300*ms)
			defer cancel()
			_, err := well.Get(ctx, "k")
			left <- err
		}()
		time.Sleep(100 * ms)
		began := time.Now()
		get(t, sick, "k")
		if took := time.Since(began); took != 200*ms {
			t.Errorf("the Get took %v, want 200 ms, until the other caller left", took)
		}
		if err := <-left; !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the error of the ctx", err)
		}
		if dead.loads.Load() != 2 || alive.loads.Load() != 1 {
			t.Errorf("got %d and %d loads, want 2 and 1", dead.loads.Load(), alive.loads.Load())
		}
	})
}

// A node is held back: its load of a key has failed, so it does not load the key for ErrorTTL. Its database works
// again. Refresh on this node, Invalidate on either node, and Expire on the other node must each end the back-off of
// this node.
func TestWhatEndsTheBackOffOfOneNode(t *testing.T) {
	for name, end := range map[string]func(ctx context.Context, sick, well *refill.Loader[string]) error{
		"refresh": func(ctx context.Context, sick, _ *refill.Loader[string]) error { return sick.Refresh(ctx, "k") },
		"invalidate": func(ctx context.Context, sick, _ *refill.Loader[string]) error {
			return sick.Invalidate(ctx, "k")
		},
		"invalidate elsewhere": func(ctx context.Context, _, well *refill.Loader[string]) error {
			return well.Invalidate(ctx, "k")
		},
		"expire elsewhere": func(ctx context.Context, _, well *refill.Loader[string]) error {
			return well.Expire(ctx, "k")
		},
	} {
		for _, mute := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, mute %v", name, mute), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					s, sick, well, dead, _ := sickPair(t)
					dead.fail(nil)
					s.mute.Store(mute) // if announcements are lost, sick must find the end of its back-off in the store
					if _, err := sick.Get(t.Context(), "k"); err == nil {
						t.Error("Get succeeded within the back-off, want the error")
					}
					if err := end(t.Context(), sick, well); err != nil {
						t.Error(err)
					}
					get(t, sick, "k")
					if n := dead.loads.Load(); n != 2 {
						t.Errorf("got %d loads, want 2", n)
					}
				})
			})
		}
	}
}

// Node well must not obey a back-off that has ended.
//
//  1. The loads of a key fail on two nodes, which starts a back-off of the whole fleet. The announcements are late.
//  2. A third node, well, invalidates the key, which ends the back-off in the store.
//  3. The late announcements reach node well, so node well remembers the back-off that has ended.
//  4. The load on one of the two nodes fails again. The failure of one node does not hold the fleet back.
//  5. A Get on node well asks the store and finds no back-off of the fleet. The Get must load the value.
func TestABackOffThatIsAnnouncedAfterAnInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared, dead, alive := memory.New(), &db{err: errNoDatabase}, &db{}
		s := newSpy(shared)
		cfg := refill.Config{TTL: time.Hour, ErrorTTL: time.Minute, Shared: s}
		well := node(t, alive.load, cfg)
		cfg.Shared = shared
		first, second := node(t, dead.load, cfg), node(t, dead.load, cfg)
		fail := func(l *refill.Loader[string], loads int64) {
			t.Helper()
			if _, err := l.Get(t.Context(), "k"); err == nil || dead.loads.Load() != loads {
				t.Errorf("got %v after %d loads, want an error after %d", err, dead.loads.Load(), loads)
			}
		}
		s.holdAnnouncements(true)
		fail(first, 1)
		fail(second, 2)
		if err := well.Invalidate(t.Context(), "k"); err != nil {
			t.Error(err)
		}
		s.holdAnnouncements(false)
		synctest.Wait()
		fail(first, 3)
		if v, err := well.Get(t.Context(), "k"); v != "k v0" || err != nil {
			t.Errorf("got %q, %v, want \"k v0\"", v, err)
		}
	})
}

// The load of a key fails on one node, and no other node asks for the key. The node must be held back for ErrorTTL (2
// s), and no longer.
func TestANodeThatFailedAloneRecovers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{err: errNoDatabase}
		nodes := nodesOf(t, refill.Config{ErrorTTL: 2 * time.Second}, d, &db{})
		if _, err := nodes[0].Get(t.Context(), "k"); !errors.Is(err, errNoDatabase) {
			t.Errorf("got %v, want the error of the load", err)
		}
		d.fail(nil)
		time.Sleep(1900 * ms)
		if _, err := nodes[0].Get(t.Context(), "k"); !errors.Is(err, errNoDatabase) || d.loads.Load() != 1 {
			t.Errorf("got %v after %d loads, want the error within the back-off, after 1", err, d.loads.Load())
		}
		time.Sleep(200 * ms)
		get(t, nodes[0], "k")
	})
}

// Two of four nodes cannot reach their database. When the load of a key has failed on these two nodes, Gets of the key
// must fail on a healthy node for ErrorTTL (2 s). After ErrorTTL, a healthy node must load the value.
func TestTwoSickNodesOfFour(t *testing.T) {
	bubble(t, func(t *testing.T) {
		dbs := []*db{{}, {}, {err: errNoDatabase}, {err: errNoDatabase}}
		nodes := nodesOf(t, refill.Config{TTL: time.Minute, ErrorTTL: 2 * time.Second}, dbs...)
		for round := range 3 {
			for _, l := range nodes[2:] {
				if _, err := l.Get(t.Context(), "k"); !errors.Is(err, errNoDatabase) {
					t.Errorf("round %d: got %v, want the error of the load", round, err)
				}
			}
			for range 19 {
				time.Sleep(100 * ms)
				var failure *refill.LoadError
				if _, err := nodes[0].Get(t.Context(), "k"); !errors.As(err, &failure) || failure.RetryAfter > 2*time.Second {
					t.Errorf("round %d: got %v on a healthy node, want the failure of two nodes", round, err)
				}
			}
			time.Sleep(200 * ms)
			get(t, nodes[0], "k")
			if err := nodes[0].Invalidate(t.Context(), "k"); err != nil {
				t.Error(err)
			}
		}
		if n := dbs[0].loads.Load(); n != 3 {
			t.Errorf("got %d loads on a healthy node, want 3", n)
		}
	})
}

// Two nodes whose loads fail ask for one key all the time. The back-off of the key must double after each pair of
// failures, from ErrorTTL (1 s) up to MaxErrorTTL (4 s).
func TestTheBackOffOfTwoNodesGrows(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{err: errNoDatabase}
		nodes := fleet(t, 2, d, refill.Config{ErrorTTL: time.Second, MaxErrorTTL: 4 * time.Second})
		began := time.Now()
		for time.Since(began) < 20*time.Second {
			for _, l := range nodes {
				_, _ = l.Get(t.Context(), "k")
			}
			time.Sleep(100 * ms)
		}
		var at []int
		for _, b := range d.begins {
			at = append(at, int((b.Sub(began)+50*ms)/time.Second))
		}
		want := []int{0, 0, 1, 1, 3, 3, 7, 7, 11, 11, 15, 15, 19, 19}
		if fmt.Sprint(at) != fmt.Sprint(want) {
			t.Errorf("loads after %v s, want %v", at, want)
		}
	})
}

// The last three loads of a node were loads of three different keys, and all failed. This sick node must let other
// nodes load first: it must wait 50 ms before its next Acquire. If another node begins to load the key within these 50
// ms, the sick node must wait for the load of the other node.
func TestASickNodeLetsOthersGoFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		dead, alive := &db{err: errNoDatabase}, &db{took: 200 * ms}
		nodes := nodesOf(t, refill.Config{TTL: time.Minute}, dead, alive)
		for _, key := range []string{"a", "b", "c"} {
			_, _ = nodes[0].Get(t.Context(), key)
		}
		defer behind(t, nodes[0], "k")()
		time.Sleep(10 * ms)
		get(t, nodes[1], "k")
		synctest.Wait()
		if n := dead.loads.Load(); n != 3 {
			t.Errorf("got %d loads on the sick node, want 3: the other node has loaded the last key", n)
		}
		began := time.Now()
		_, err := nodes[0].Get(t.Context(), "alone")
		if took := time.Since(began); !errors.Is(err, errNoDatabase) || took != 50*ms || dead.loads.Load() != 4 {
			t.Errorf("got %v after %v and %d loads, want the error of load 4 after 50 ms", err, took, dead.loads.Load())
		}
		dead.fail(nil)
		get(t, nodes[0], "well again")
		began = time.Now()
		get(t, nodes[0], "next")
		if took := time.Since(began); took != 0 {
			t.Errorf("a node whose last load succeeded waited %v, want 0", took)
		}
	})
}

// Three nodes wait for a load on a fourth node, and that load fails. Exactly one of the three nodes must load again at
// once. The callers on the three nodes must get the result of this second load: its value, or its error.
func TestOneWaiterTriesAgainAfterAFailure(t *testing.T) {
	for name, heals := range map[string]bool{"second node fails too": false, "second node loads": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 100 * ms, err: errNoDatabase}
				other := &db{took: 100 * ms}
				if !heals {
					other.err = errNoDatabase
				}
				nodes := nodesOf(t, refill.Config{TTL: time.Minute, ErrorTTL: time.Minute}, d, other, other, other)
				var wg sync.WaitGroup
				began := time.Now()
				for i, l := range nodes {
					wg.Go(func() {
						time.Sleep(time.Duration(i) * ms)
						_, err := l.Get(t.Context(), "k")
						if failed := err != nil; failed != (!heals || i == 0) {
							t.Errorf("node %d: got error %v", i, err)
						}
					})
				}
				wg.Wait()
				if took := time.Since(began); d.loads.Load() != 1 || other.loads.Load() != 1 || took != 200*ms {
					t.Errorf("got %d and %d loads in %v, want 1 and 1 in 200 ms", d.loads.Load(), other.loads.Load(), took)
				}
			})
		})
	}
}

// The store has a note that a load has failed on one node. An Acquire in mode Look must return the state Free and the
// note, and must not take the lease. So another node can then load the key.
func TestLookLeavesTheNote(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s, sick, well, _, _ := sickPair(t)
		for range 3 {
			_, _ = sick.Get(t.Context(), "k")
		}
		a := acquireRequest(t, s.Store, "thing:k", "outsider#1")
		a.Mode = driver.Look
		if r, err := s.Store.Acquire(t.Context(), a); err != nil || r.State != driver.Free || r.Failure == "" {
			t.Errorf("got %+v, %v, want a free lease with a note", r, err)
		}
		get(t, well, "k")
	})
}
