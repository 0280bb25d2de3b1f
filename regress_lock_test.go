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
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// The regress_*_test.go files test that refill does not have certain bugs of other cache and lock libraries. The
// comment above a test names the library, its issue if there is one, and the damage that the bug does. The sentence
// that begins with "Here" says what refill does instead. This file tests the lease, the claim and locks. Tests in
// other files check that refill does not have these bugs:
//
//	bsm/redislock#21, #34, #74: a wait for a lock ends with the lock's TTL     TestLockWaitsForCtxOnly
//	etcd#10811, redisson#3636: a lock that has ended is not reported as lost   TestLockIsLostInTime
//	consul#18271: Lost comes minutes late if the server does not answer        TestLockIsLostInTime
//	etcd#11456: a waiter whose lease has ended still takes the lock            TestLockTakenAwayIsNoticed
//	redis/docs: a waiter whose wake-up is lost loads without a lookup          TestALostFilledAnnouncement
//
// internal/realtest tests refill against bugs that need a real server: expiry of keys, clocks, lost replies and slots.

// rockscache sets its lock without a TTL. So do Laravel's flexible() (0 s by default), dogpile.cache (#261) and
// Spring's ~lock (#2598). After a crash the key is locked for ever. Here a node dies after one step of a refill, and
// another node loads the key at most LockTTL + 500 ms later. The test has one run per step.
func TestLeaseEndsWhenItsHolderDies(t *testing.T) {
	for _, step := range []string{"acquire", "renew", "publish"} {
		t.Run("dies after "+step, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				shared := memory.New()
				s := newSpy(shared)
				died := make(chan struct{})
				s.onStep(func(_ context.Context, did string) error {
					if did != step || s.died.Swap(true) {
						return nil
					}
					close(died)
					return errDown
				})
				a := node(t, says("v", 500*ms), refill.Config{TTL: time.Hour, Shared: s})
				b := node(t, says("v", 0), refill.Config{TTL: time.Hour, Shared: shared})
				go func() { _, _ = a.Get(t.Context(), "k") }()
				<-died
				began := time.Now()
				get(t, b, "k")
				if took := time.Since(began); took > 1500*ms {
					t.Errorf("Get waited %v for the lease of a dead node, want at most LockTTL + 500ms", took)
				}
				lockIsFree(t, shared, "k")
			})
		})
	}
}

// In rueidisaside the lock lives as long as the value. After a panic in a load the process lives on and keeps the lock,
// so all nodes wait for the whole TTL. Here the lease is free at once after a panic.
func TestLeaseIsFreeAfterAPanic(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		cfg := refill.Config{TTL: time.Hour, ErrorTTL: -1, Shared: shared}
		a := node(t, func(context.Context, string) (string, error) { panic("ouch") }, cfg)
		b := node(t, says("v", 0), cfg)
		if _, err := a.Get(t.Context(), "k"); err == nil {
			t.Error("Get returned no error although its load panicked")
		}
		began := time.Now()
		if get(t, b, "k"); time.Since(began) != 0 {
			t.Errorf("Get waited %v for a lease without a holder, want 0s", time.Since(began))
		}
	})
}

// In rueidis (#1010) and entcache all fills of one process have the same owner id. So if a first fill was invalidated
// and a second fill of the key runs, the first fill stores its old value at its end, or frees the lock of the second
// fill. Here each fill has its own token, so the first fill stores nothing and does not free the lease of the second
// fill.
func TestFillsOfOneProcessHaveTheirOwnTokens(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		t.Run(fmt.Sprintf("the first caller leaves %v", leaves), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				shared := memory.New()
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
				time.Sleep(500 * ms) // until the first load has ended
				if v := get(t, peer, "k"); v != "second" {
					t.Errorf("got %q, want \"second\"", v)
				}
			})
		})
	}
}

// In rueidis (#1010) the caller gives up while its lock command is on its way. The command still takes the lock, and
// no holder ever frees it. Here refill frees a lease or lock that such a command may have taken.
func TestCancelledAcquireLeavesNoLock(t *testing.T) {
	t.Run("Loader", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			shared := memory.New()
			s := newSpy(shared)
			s.onStep(func(ctx context.Context, did string) error {
				if did != "acquire" {
					return nil
				}
				<-ctx.Done()
				return ctx.Err()
			})
			l := node(t, says("v", 0), refill.Config{TTL: time.Hour, Shared: s})
			get(t, l, "k") // loads without the store
			synctest.Wait()
			lockIsFree(t, shared, "k")
		})
	})
	t.Run("Locker", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			f := &flaky{Locks: memory.New()}
			l := locker(t, f)
			f.hang.Store(true)
			ctx, cancel := context.WithTimeout(t.Context(), 50*ms)
			defer cancel()
			if _, err := l.TryLock(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("TryLock: got %v, want DeadlineExceeded", err)
			}
			f.hang.Store(false)
			time.Sleep(400 * ms) // less than the TTL of the lock
			k, err := l.TryLock(t.Context(), "k")
			if err != nil {
				t.Fatalf("TryLock after a cancelled TryLock: got %v, want the lock", err)
			}
			_ = k.Release(t.Context())
		})
	})
}

// redis/docs, replicate/go and redsync release the lock with the ctx of the caller. If that ctx has ended, the lock is
// not released, and all other callers wait for the TTL of the lock. Here refill releases a lease or lock even if the
// ctx of the caller has ended.
func TestReleaseWithACancelledCtx(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		ctx, cancel := context.WithTimeout(t.Context(), 50*ms)
		defer cancel()
		l := node(t, (&db{took: time.Second}).load, refill.Config{Shared: shared})
		if _, err := l.Get(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Get: got %v, want DeadlineExceeded", err)
		}
		synctest.Wait()
		lockIsFree(t, shared, "k")
		jobs := locker(t, shared)
		k, err := jobs.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if err := k.Release(ctx); err != nil {
			t.Errorf("Release with a ctx that has ended: got %v, want no error", err)
		}
		k, err = jobs.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		_ = k.Release(t.Context())
	})
}

// cacheme-go ends a fill with a DEL of the lock, even if another process holds the lock. redcache ends a refresh with
// the same DEL. The lock of redcache has the value "1" for every holder. So a holder that was overtaken frees the lock
// of the new holder, and a third node loads. Here an overtaken holder does not free the lease of the new holder. The
// test has one run per way in which the load of the overtaken holder can end.
func TestOvertakenHolderFreesNoOtherLease(t *testing.T) {
	for name, end := range map[string]func(context.Context) (string, error){
		"with a value":  func(context.Context) (string, error) { return "overtaken", nil },
		"with an error": func(context.Context) (string, error) { return "", errors.New("boom") },
		"with a panic":  func(context.Context) (string, error) { panic("ouch") },
		"with NoStore": func(ctx context.Context) (string, error) {
			refill.FillFrom(ctx).NoStore()
			return "overtaken", nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				shared := memory.New()
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
				defer behind(t, b, "k")() // takes over when the lease of a ends after 1 s, and loads until 3 s
				time.Sleep(1400 * ms)
				frozen.died.Store(false) // the load of a ends after 2 s
				time.Sleep(time.Second)
				if v := get(t, c, "k"); v != "new" {
					t.Errorf("got %q, want \"new\" from the node that took over", v)
				}
			})
		})
	}
}

// In cachestore-redis and redis/docs a node does not read the cache again after it has acquired the lock.
//
//  1. A node reads the store and finds no value.
//  2. Another node fills the key.
//  3. The first node acquires the lock and loads, although the store has the value.
//
// Here the Acquire of step 3 returns the value to the first node, and the node does not load.
func TestAcquireSeesANewerValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		s := newSpy(shared)
		peer := node(t, says("v", 0), refill.Config{TTL: time.Hour, Shared: shared})
		l := node(t, never(t), refill.Config{TTL: time.Hour, Shared: s})
		s.onGet(func() { get(t, peer, "k") })
		if v := get(t, l, "k"); v != "v" {
			t.Errorf("got %q, want \"v\" from the peer", v)
		}
	})
}

// In redis/docs and entcache all waiters load at once when the wait for the lock ends. Here 50 callers on five nodes
// wait for the lease of a holder that dies without an announcement. The waiters cause one load.
func TestWaitersOfADeadHolderLoadOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
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
			t.Errorf("got %d loads by the waiters of a dead holder, want 1", n)
		}
	})
}

// In cachestore-redis the retry interval of a waiter grows past its maximum, and then rand.Intn panics. Here a wait for
// a load can last 3,000 times LockTTL, and a wait for a user's lock can last thousands of times the TTL of that lock.
func TestWaitOfManyRounds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * time.Minute}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Hour, LockTTL: 200 * ms, LoadTimeout: time.Hour})
		var wg sync.WaitGroup
		for _, l := range nodes {
			wg.Go(func() { get(t, l, "k") })
		}
		wg.Wait()
		if n := d.loads.Load(); n != 1 {
			t.Errorf("got %d loads, want 1", n)
		}
		jobs := locker(t, memory.New())
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

// rockscache's setBatchScript stops at the first key whose lock is lost. If one key is invalidated during a fill of
// many keys, other keys stay locked and get no value. Here the other keys are stored, and the invalidated key is
// loaded again.
func TestRefreshOfManyWithOneInvalidated(t *testing.T) {
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
				t.Errorf("got %q, want %q", v, want)
			}
		}
		if n := d.loads.Load(); n != 4 {
			t.Errorf("got %d loads, want 4: three, and one key again", n)
		}
	})
}

// FusionCache did not free its lock if the write to the store was skipped (#644), if a write threw an exception
// (#646), or if the load function panicked (#647). Every later caller waited for the end of the lock. Here every load
// frees the lease. The test has one run per way in which a load can end.
func TestEveryEndOfALoadFreesTheLease(t *testing.T) {
	for name, end := range map[string]func(ctx context.Context, peer *refill.Loader[panicky]) (panicky, error){
		"NoStore": func(ctx context.Context, _ *refill.Loader[panicky]) (panicky, error) {
			refill.FillFrom(ctx).NoStore()
			return panicky{}, nil
		},
		"not found": func(context.Context, *refill.Loader[panicky]) (panicky, error) {
			return panicky{}, refill.ErrNotFound
		},
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
		"invalidated": func(ctx context.Context, peer *refill.Loader[panicky]) (panicky, error) {
			return panicky{}, errors.Join(peer.Invalidate(ctx, "k"), refill.ErrNotFound)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				cfg := refill.Config{TTL: time.Hour, ErrorTTL: -1, Shared: memory.New()}
				peer, err := refill.New[panicky]("thing", nil, cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer peer.Close()
				load := func(ctx context.Context, _ string) (panicky, error) { return end(ctx, peer) }
				l, err := refill.New("thing", load, cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				_, _ = l.Get(t.Context(), "k")
				lockIsFree(t, cfg.Shared, "k")
			})
		})
	}
}

// redisson (#775, #3194, #5698) does not repeat a renewal that failed, so a running load loses its lock. Here refill
// repeats a failed renewal, and the load keeps its lease.
func TestRenewalIsRetried(t *testing.T) {
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
			t.Errorf("got %d loads, want 1: the lease was lost", n)
		}
	})
}

// In redisson (#7272, #1966) a renewal is on its way when the lock is released. The server executes the renewal after
// the release, and the key stays locked for ever. Here no renewal follows a release, and the key is free.
func TestNoRenewalAfterRelease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := &flaky{Locks: memory.New()}
		k, err := locker(t, f).TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * ms)
		f.hang.Store(true)
		time.Sleep(100 * ms) // a renewal waits for its reply
		f.hang.Store(false)
		began := time.Now()
		if err := k.Release(t.Context()); err != nil || time.Since(began) != 0 {
			t.Errorf("Release: got %v after %v, want nil at once", err, time.Since(began))
		}
		extends := f.extends.Load()
		time.Sleep(time.Minute)
		if n := f.extends.Load() - extends; n != 0 || extends == 0 {
			t.Errorf("got %d renewals before the release and %d after it, want some and none", extends, n)
		}
		k, err = locker(t, f).TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		_ = k.Release(t.Context())
	})
}

// In etcd (#22082) a second unlock of an old lock deletes the newer lock of the same session. Here a second Release of
// an old lock does not free the newer lock.
func TestSecondReleaseKeepsTheNewerLock(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := memory.New()
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
			t.Errorf("Unlock with the old token: got %v, %v, want false", mine, err)
		}
		time.Sleep(2 * time.Second)
		if err := k.Release(t.Context()); err != nil {
			t.Errorf("Release of the newer lock: got %v, want no error", err)
		}
	})
}

// In cirello-io/pglock (#175, #18) the renewal uses the ctx with which the lock was acquired. So a deadline that
// should bound the acquisition also ends the lock. Here a lock lives on after the ctx of its Lock call has ended.
func TestLockOutlivesTheCtxOfItsAcquire(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 100*ms)
		k, err := locker(t, memory.New()).Lock(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		time.Sleep(10 * time.Second)
		if lost(k) || k.Context().Err() != nil {
			t.Errorf("got lost %v, ctx error %v, want a lock that outlives the ctx of Lock", lost(k), k.Context().Err())
		}
		if err := k.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// In curator (#1193, CURATOR-678) and consul (#4902) a release does not reach the server. The process that tried to
// release the lock can then never take the lock again. Here this process can take the lock again when the TTL of the
// lock ends.
func TestLockAfterAFailedRelease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := &flaky{Locks: memory.New()}
		l := locker(t, f)
		k, err := l.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		f.down.Store(true)
		if err := k.Release(t.Context()); !errors.Is(err, errDown) {
			t.Errorf("Release without the store: got %v, want the error of the store", err)
		}
		f.down.Store(false)
		began := time.Now()
		next, err := l.Lock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > 1010*ms || next.Fence() <= k.Fence() {
			t.Errorf("Lock took %v, got fence %d after %d, want at most 1.01s and a larger fence", took, next.Fence(), k.Fence())
		}
		_ = next.Release(t.Context())
	})
}

// lateRelease is a driver.Locks. If lost is set, the next TryLock that finds the lock held clears lost, and calls the
// function that was in lost before TryLock returns.
type lateRelease struct {
	driver.Locks
	lost atomic.Pointer[func()]
}

func (d *lateRelease) TryLock(ctx context.Context, key, token string, ttl time.Duration) (driver.LockResult, error) {
	s, err := d.Locks.TryLock(ctx, key, token, ttl)
	if release := d.lost.Load(); release != nil && !s.Won {
		d.lost.Store(nil)
		(*release)()
	}
	return s, err
}

// In redisson (#1763) a waiter subscribes after its failed try. If the lock is released between the try and the
// subscription, the waiter misses the release and waits for the end of the TTL. Here the waiter gets the lock at once.
func TestReleaseBeforeTheWaitBegins(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &lateRelease{Locks: memory.New()}
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
			t.Fatalf("Lock: got %v after %v, want the lock at once: the waiter missed the release", err, time.Since(began))
		}
		_ = next.Release(t.Context())
	})
}

// In dogpile.cache two processes that lock the same keys in different orders waited for each other for ever.
// (dogpile.cache now sorts the keys.) Here two nodes refresh the same keys in opposite orders, and each Refresh ends.
func TestRefreshOfKeysInTwoOrders(t *testing.T) {
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

// Symfony locks one of 25 slots, chosen by the hash of the key. If a load gets another key of the same slot, the load
// waits for the lock that it holds itself. For years this bug made whole worker pools hang (#41130, #59191, #62328).
// Here a load can get 300 other keys with one load slot.
func TestManyNestedLoadsWithOneSlot(t *testing.T) {
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
			t.Errorf("got %q after %d loads, want \"0\" after 301 loads", v, loads.Load())
		}
	})
}
