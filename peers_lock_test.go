package refill_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// The peers_*_test.go files hold a test for each bug that a library of this kind has or had, and that we could have, too.
// The comment above a test names the project, the issue where there is one, and why it hurts. This file is about the lock
// and the fence. Bugs of this group that another test shows precisely:
//
//	bsm/redislock#21, #34, #74: a wait for a lock ends with the lock's TTL     TestLockWaitsForCtxOnly
//	etcd#10811, redisson#3636: a lock that is over is not reported as lost     TestLockIsLostInTime
//	consul#18271: Lost comes minutes late while the server is silent           TestLockIsLostInTime
//	etcd#11456: a waiter whose lease ended takes the lock all the same         TestLockTakenAwayIsNoticed
//	redis/docs: a waiter whose wake-up is lost loads instead of looking        TestALostFilledAnnouncement
//
// What crosses the wire (ends of keys, clocks, lost replies, slots) is in internal/realtest/peers_test.go.

// tap is a node's way to a store, with somebody at it: after is called when the store has carried out a step of a fill
// and the node does not know yet. Its error takes the place of the reply.
type tap struct {
	refill.Store
	mu    sync.Mutex
	after func(ctx context.Context, step string) error
}

func (s *tap) on(after func(ctx context.Context, step string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.after = after
}

func (s *tap) did(ctx context.Context, step string, err error) error {
	s.mu.Lock()
	after := s.after
	s.mu.Unlock()
	if after == nil || err != nil {
		return err
	}
	return after(ctx, step)
}

func (s *tap) Begin(ctx context.Context, b refill.Bid) (refill.Begun, error) {
	r, err := s.Store.Begin(ctx, b)
	return r, s.did(ctx, "begin", err)
}

func (s *tap) Renew(ctx context.Context, key, token string, ttl time.Duration) (bool, error) {
	mine, err := s.Store.Renew(ctx, key, token, ttl)
	return mine, s.did(ctx, "renew", err)
}

func (s *tap) Publish(ctx context.Context, p refill.Publication) (refill.Published, error) {
	state, err := s.Store.Publish(ctx, p)
	return state, s.did(ctx, "publish", err)
}

func (s *tap) Release(ctx context.Context, key, token string) error {
	return s.did(ctx, "release", s.Store.Release(ctx, key, token))
}

// says is a load function that takes its time and then has an answer, whatever its ctx says in between.
func says(value string, took time.Duration) func(context.Context, string) (string, error) {
	return func(context.Context, string) (string, error) {
		time.Sleep(took)
		return value, nil
	}
}

// never is a load function that must not be called.
func never(t *testing.T) func(context.Context, string) (string, error) {
	return func(context.Context, string) (string, error) {
		t.Error("a load that nobody needed")
		return "needless", nil
	}
}

// nobodyHas fails the test when somebody holds the refill lock of thing:key, or has left a back-off there.
func nobodyHas(t *testing.T, shared refill.Store, key string) {
	t.Helper()
	r, err := shared.Begin(t.Context(), bid(t, shared, "thing:"+key, "outsider#1"))
	if err != nil || r.State != refill.BeginTaken {
		t.Errorf("%+v, %v: the refill lock of %q is not free", r, err, key)
	}
	if err := shared.Release(t.Context(), "thing:"+key, "outsider#1"); err != nil {
		t.Error(err)
	}
}

// rockscache sets its lock without an end, as do Laravel's flexible() (0 s by default), dogpile.cache (#261) and Spring's
// ~lock (#2598): after a crash the key is locked for ever. Here a node dies after each step of a fill.
func TestPeerLockWithoutAnEnd(t *testing.T) {
	for _, step := range []string{"begin", "renew", "publish"} {
		t.Run("dies after "+step, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				shared := refill.NewMemory()
				wire := newSpy(shared)
				way := &tap{Store: wire}
				died := make(chan struct{})
				way.on(func(_ context.Context, did string) error {
					if did != step || wire.died.Swap(true) {
						return nil
					}
					close(died)
					return errDown
				})
				a := node(t, says("v", 500*ms), refill.Config{TTL: time.Hour, Shared: way})
				b := node(t, says("v", 0), refill.Config{TTL: time.Hour, Shared: shared})
				go func() { _, _ = a.Get(t.Context(), "k") }()
				<-died
				began := time.Now()
				get(t, b, "k")
				if took := time.Since(began); took > 1500*ms {
					t.Errorf("waited %v for the dead, want at most LockTTL + 500 ms", took)
				}
				nobodyHas(t, shared, "k")
			})
		})
	}
}

// In rueidisaside the lock lives as long as the value: after a panic in a load, all nodes wait the whole TTL, since the
// process that panicked lives on and vouches for it.
func TestPeerLockAsLongAsTheValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		cfg := refill.Config{TTL: time.Hour, ErrorTTL: -1, Shared: shared}
		a := node(t, func(context.Context, string) (string, error) { panic("ouch") }, cfg)
		b := node(t, says("v", 0), cfg)
		if _, err := a.Get(t.Context(), "k"); err == nil {
			t.Error("a panic without an error")
		}
		began := time.Now()
		if get(t, b, "k"); time.Since(began) != 0 {
			t.Errorf("waited %v for a lock that nobody holds", time.Since(began))
		}
	})
}

// rueidis#1010, entcache: one owner id per process, so two fills of one process cannot be told apart, and what ends the
// first one stores its old value or frees the lock of the second.
func TestPeerOneOwnerPerProcess(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		t.Run(fmt.Sprintf("the first caller leaves %v", leaves), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				shared := refill.NewMemory()
				l := node(t, nil, refill.Config{TTL: time.Hour, Shared: shared})
				peer := node(t, never(t), refill.Config{TTL: time.Hour, Shared: shared})
				patience := time.Hour
				if leaves {
					patience = 300 * ms
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				go func() { _, _ = l.GetWith(ctx, "k", says("first", 500*ms)) }()
				time.Sleep(100 * ms)
				if err := l.Invalidate(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
				go func() { _, _ = l.GetWith(t.Context(), "k", says("second", time.Second)) }()
				time.Sleep(500 * ms) // the first one is over
				if v := get(t, peer, "k"); v != "second" {
					t.Errorf("%q, want the second fill's value", v)
				}
			})
		})
	}
}

// rueidis#1010: the caller gives up while its command is still on its way; the lock is taken all the same, by nobody.
func TestPeerAcquireCancelledOnItsWay(t *testing.T) {
	t.Run("Loader", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			shared := refill.NewMemory()
			way := &tap{Store: shared}
			way.on(func(ctx context.Context, did string) error {
				if did != "begin" {
					return nil
				}
				<-ctx.Done()
				return ctx.Err()
			})
			l := node(t, says("v", 0), refill.Config{TTL: time.Hour, Shared: way})
			get(t, l, "k") // loads on its own
			synctest.Wait()
			nobodyHas(t, shared, "k")
		})
	})
	t.Run("Locker", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			f := &flaky{LockDriver: refill.NewMemory()}
			l := locker(t, f)
			f.hang.Store(true)
			ctx, cancel := context.WithTimeout(t.Context(), 50*ms)
			defer cancel()
			if _, err := l.TryLock(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v", err)
			}
			f.hang.Store(false)
			time.Sleep(400 * ms) // less than the lock's TTL
			k, err := l.TryLock(t.Context(), "k")
			if err != nil {
				t.Fatalf("still locked: %v", err)
			}
			_ = k.Release(t.Context())
		})
	})
}

// redis/docs, replicate/go, redsync: the lock is released with the ctx of the caller, which is over by then, so nothing is
// released and everybody waits for its TTL.
func TestPeerReleaseWithACancelledCtx(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		ctx, cancel := context.WithTimeout(t.Context(), 50*ms)
		defer cancel()
		l := node(t, (&db{took: time.Second}).load, refill.Config{Shared: shared})
		if _, err := l.Get(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		synctest.Wait()
		nobodyHas(t, shared, "k")
		jobs := locker(t, shared)
		k, err := jobs.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if err := k.Release(ctx); err != nil {
			t.Errorf("Release: %v", err)
		}
		k, err = jobs.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		_ = k.Release(t.Context())
	})
}

// cacheme-go ends a fill with DEL lock, and redcache a refresh whose lock has the value "1" for everybody: a holder that
// was overtaken frees the lock of the one that overtook it, and a third one loads.
func TestPeerReleaseOfAnothersLock(t *testing.T) {
	for name, end := range map[string]func(context.Context) (string, error){
		"with a value":  func(context.Context) (string, error) { return "overtaken", nil },
		"with an error": func(context.Context) (string, error) { return "", errors.New("boom") },
		"by a panic":    func(context.Context) (string, error) { panic("ouch") },
		"without a trace": func(ctx context.Context) (string, error) {
			refill.FillFrom(ctx).NoStore()
			return "overtaken", nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				shared := refill.NewMemory()
				frozen := newSpy(shared)
				cfg := refill.Config{TTL: time.Hour, Shared: shared}
				b, c := node(t, says("new", 2*time.Second), cfg), node(t, never(t), cfg)
				cfg.Shared = frozen
				a := node(t, func(ctx context.Context, _ string) (string, error) {
					time.Sleep(2 * time.Second)
					return end(ctx)
				}, cfg)
				go func() { _, _ = a.Get(t.Context(), "k") }()
				time.Sleep(100 * ms)
				frozen.died.Store(true)
				defer behind(t, b, "k")() // takes over after 1 s, until 3 s
				time.Sleep(1400 * ms)
				frozen.died.Store(false) // ends at 2 s
				time.Sleep(time.Second)
				if v := get(t, c, "k"); v != "new" {
					t.Errorf("%q, want the value of the one that took over", v)
				}
			})
		})
	}
}

// cachestore-redis, redis/docs: no look at the cache after the lock was won. GET, lose, win, and a second fill of what
// another has just stored.
func TestPeerNoLookUnderTheLock(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		s := newSpy(shared)
		peer := node(t, says("v", 0), refill.Config{TTL: time.Hour, Shared: shared})
		l := node(t, never(t), refill.Config{TTL: time.Hour, Shared: s})
		s.onGet(func() { get(t, peer, "k") })
		if v := get(t, l, "k"); v != "v" {
			t.Errorf("%q", v)
		}
	})
}

// redis/docs, entcache: when the wait for the lock is over, all who waited load at once. The holder has died here, nobody is
// woken, and 50 callers on five nodes wait for it.
func TestPeerTimedOutWaitersLoadAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		s := newSpy(shared)
		holder := node(t, says("dead", time.Minute), refill.Config{Shared: s, LoadTimeout: 2 * time.Minute})
		go func() { _, _ = holder.Get(t.Context(), "k") }()
		time.Sleep(100 * ms)
		s.died.Store(true)
		d := &db{took: 300 * ms}
		nodes := fleet(t, 5, d, refill.Config{TTL: time.Hour, Shared: shared})
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() { get(t, nodes[i%5], "k") })
		}
		wg.Wait()
		if n := d.loads.Load(); n != 1 {
			t.Errorf("%d loads by those who waited for a dead holder, want 1", n)
		}
	})
}

// cachestore-redis: the back-off of a waiter grows past its maximum, and rand.Intn panics. Here is a wait of some thousand
// rounds, for a load and for a lock.
func TestPeerWaitOfManyRounds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * time.Minute}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Hour, LockTTL: 200 * ms, LoadTimeout: time.Hour})
		var wg sync.WaitGroup
		for _, l := range nodes {
			wg.Go(func() { get(t, l, "k") })
		}
		wg.Wait()
		if n := d.loads.Load(); n != 1 {
			t.Errorf("%d loads", n)
		}
		jobs := locker(t, refill.NewMemory())
		k, err := jobs.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			next, err := jobs.Lock(t.Context(), "k")
			if err != nil {
				t.Error(err)
				return
			}
			_ = next.Release(t.Context())
		})
		time.Sleep(time.Hour)
		_ = k.Release(t.Context())
		wg.Wait()
	})
}

// rockscache setBatchScript returns at the first key whose lock is lost: one key that is invalidated during a fill of many
// leaves the others locked and without a value.
func TestPeerOneLostKeyOfMany(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Hour})
		done := make(chan error)
		go func() { done <- nodes[0].Refresh(t.Context(), "a", "b", "c") }()
		time.Sleep(50 * ms)
		d.version.Store(1)
		if err := nodes[1].Invalidate(t.Context(), "b"); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		for key, want := range map[string]string{"a": "a v0", "b": "b v1", "c": "c v0"} {
			if v := get(t, nodes[1], key); v != want {
				t.Errorf("%q, want %q", v, want)
			}
		}
		if n := d.loads.Load(); n != 4 {
			t.Errorf("%d loads, want three and one again", n)
		}
	})
}

// FusionCache leaked its lock where the write to the store was skipped (#644), where a write threw (#646) and where the
// factory panicked (#647): every later caller waited for the lock's end. Here is every way in which a load can end.
func TestPeerLockLeakedOnAPath(t *testing.T) {
	for name, end := range map[string]func(ctx context.Context, peer *refill.Loader[panicky]) (panicky, error){
		"skipped": func(ctx context.Context, _ *refill.Loader[panicky]) (panicky, error) {
			refill.FillFrom(ctx).NoStore()
			return panicky{}, nil
		},
		"not found": func(context.Context, *refill.Loader[panicky]) (panicky, error) { return panicky{}, refill.ErrNotFound },
		"unencodable": func(context.Context, *refill.Loader[panicky]) (panicky, error) {
			return panicky{"v"}, nil
		},
		"error": func(context.Context, *refill.Loader[panicky]) (panicky, error) { return panicky{}, errDown },
		"panic": func(context.Context, *refill.Loader[panicky]) (panicky, error) { panic("ouch") },
		"Goexit": func(context.Context, *refill.Loader[panicky]) (panicky, error) {
			runtime.Goexit()
			return panicky{}, nil
		},
		"hangs": func(ctx context.Context, _ *refill.Loader[panicky]) (panicky, error) {
			<-ctx.Done()
			return panicky{}, ctx.Err()
		},
		"voided": func(ctx context.Context, peer *refill.Loader[panicky]) (panicky, error) {
			return panicky{}, errors.Join(peer.Invalidate(ctx, "k"), refill.ErrNotFound)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				cfg := refill.Config{TTL: time.Hour, ErrorTTL: -1, Shared: refill.NewMemory()}
				peer, err := refill.New[panicky]("thing", nil, cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer peer.Close()
				l, err := refill.New("thing", func(ctx context.Context, _ string) (panicky, error) { return end(ctx, peer) }, cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				_, _ = l.Get(t.Context(), "k")
				nobodyHas(t, cfg.Shared, "k")
			})
		})
	}
}

// redisson#775, #3194, #5698: after one failed renewal there is no other, and a load that is still running loses its lock.
func TestPeerRenewalGivesUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 5 * time.Second}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour})
		var wg sync.WaitGroup
		wg.Go(func() { get(t, l, "k") })
		time.Sleep(300 * ms)
		wg.Go(func() { get(t, peer, "k") })
		for range 3 {
			s.down.Store(true)
			time.Sleep(500 * ms)
			s.down.Store(false)
			time.Sleep(500 * ms)
		}
		wg.Wait()
		if n := d.loads.Load(); n != 1 {
			t.Errorf("%d loads: the lease was lost", n)
		}
	})
}

// redisson#7272, #1966: a renewal that is under way when the lock is released comes after it, and holds the key for ever.
func TestPeerRenewalOutlivesRelease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := &flaky{LockDriver: refill.NewMemory()}
		k, err := locker(t, f).TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * ms)
		f.hang.Store(true)
		time.Sleep(100 * ms) // a renewal is stuck
		f.hang.Store(false)
		began := time.Now()
		if err := k.Release(t.Context()); err != nil || time.Since(began) != 0 {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		extends := f.extends.Load()
		time.Sleep(time.Minute)
		if n := f.extends.Load() - extends; n != 0 || extends == 0 {
			t.Errorf("%d renewals before the release, %d after it", extends, n)
		}
		k, err = locker(t, f).TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		_ = k.Release(t.Context())
	})
}

// etcd#22082: a repeated unlock deletes the newer lock of the same session.
func TestPeerUnlockTwice(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := refill.NewMemory()
		l := locker(t, m)
		old, err := l.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		_ = old.Release(t.Context())
		k, err := l.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		_ = old.Release(t.Context())
		if mine, err := m.Unlock(t.Context(), "job:k", old.Token()); mine || err != nil {
			t.Errorf("%v, %v: the old token unlocked", mine, err)
		}
		time.Sleep(2 * time.Second)
		if err := k.Release(t.Context()); err != nil {
			t.Errorf("the newer lock was lost: %v", err)
		}
	})
}

// cirello-io/pglock#175, #18: the renewal lives on the ctx that the lock was asked for with, so that a short patience for
// the lock is also the end of the lock.
func TestPeerRenewalOnTheCtxOfTheAcquire(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 100*ms)
		k, err := locker(t, refill.NewMemory()).Lock(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		time.Sleep(10 * time.Second)
		if lost(k) || k.Context().Err() != nil {
			t.Error("the lock ended with the ctx that it was asked for with")
		}
		if err := k.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// curator#1193 (CURATOR-678), consul#4902: a release that did not reach the server leaves a lock that its own process can
// never take again.
func TestPeerNotLockableAfterAFailedRelease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := &flaky{LockDriver: refill.NewMemory()}
		l := locker(t, f)
		k, err := l.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		f.down.Store(true)
		if err := k.Release(t.Context()); !errors.Is(err, errDown) {
			t.Errorf("Release: %v", err)
		}
		f.down.Store(false)
		began := time.Now()
		next, err := l.Lock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > 1010*ms || next.Fence() <= k.Fence() {
			t.Errorf("waited %v; fence %d after %d", took, next.Fence(), k.Fence())
		}
		_ = next.Release(t.Context())
	})
}

// lateEar releases the lock when somebody has just been told that it is held.
type lateEar struct {
	refill.LockDriver
	lost atomic.Pointer[func()]
}

func (d *lateEar) TryLock(ctx context.Context, key, token string, ttl time.Duration) (refill.LockState, error) {
	s, err := d.LockDriver.TryLock(ctx, key, token, ttl)
	if release := d.lost.Load(); release != nil && !s.Won {
		d.lost.Store(nil)
		(*release)()
	}
	return s, err
}

// redisson#1763: whoever subscribes after the try that failed misses a release in between, and waits for the lock's end.
func TestPeerLostWakeUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &lateEar{LockDriver: refill.NewMemory()}
		l := locker(t, d)
		k, err := l.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		release := func() { _ = k.Release(t.Context()) }
		d.lost.Store(&release)
		began := time.Now()
		next, err := l.Lock(t.Context(), "k")
		if err != nil || time.Since(began) != 0 {
			t.Fatalf("%v after %v: the release was not heard", err, time.Since(began))
		}
		_ = next.Release(t.Context())
	})
}

// dogpile.cache had to sort the keys before it locked them: two processes that refill the same keys in two orders wait for
// each other for ever.
func TestPeerKeysLockedInTwoOrders(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Hour, MaxLoads: 1})
		var wg sync.WaitGroup
		for i, keys := range [][]string{{"a", "b", "c"}, {"c", "b", "a"}} {
			wg.Go(func() {
				if err := nodes[i].Refresh(t.Context(), keys...); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
}

// Symfony locks one of 25 slots by the hash of a key: a load that gets another key of the same slot waits for itself, and
// took whole pools down for years (#41130, #59191, #62328). Here a load gets 300 others, and there is one place for loads.
func TestPeerNestedLoadsDeadlock(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var l *refill.Loader[string]
		var loads atomic.Int64
		load := func(ctx context.Context, key string) (string, error) {
			loads.Add(1)
			if key != "outer" {
				return key, nil
			}
			for i := range 300 {
				if _, err := l.Get(ctx, fmt.Sprint(i)); err != nil {
					return "", err
				}
			}
			return l.Get(ctx, "0")
		}
		l = node(t, load, refill.Config{TTL: time.Hour, MaxLoads: 1})
		if v := get(t, l, "outer"); v != "0" || loads.Load() != 301 {
			t.Errorf("%q after %d loads", v, loads.Load())
		}
	})
}
