package refill_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// This file tests background refreshes: how many may run, how much memory they may take, and which of them queue for a
// load slot.

// One caller asks for 5,000 values, one after the other. All values are stale in the store, so each Get starts a
// background refresh. The loads do not end during the test, and MaxLoads is 4. After the Gets, the process may have at
// most 100 goroutines and 10 MiB of heap more than before.
func TestManyStaleValues(t *testing.T) {
	const keys = 5000
	for name, bulkLoad := range map[string]bool{"single": false, "bulk": true} {
		t.Run(name, func(t *testing.T) {
			shared, cfg := memory.New(), refill.Config{TTL: 10 * ms, StaleFor: time.Hour}
			cfg.Shared = shared
			first := node(t, func(context.Context, string) (string, error) { return "v0", nil }, cfg)
			for _, key := range names(0, keys) {
				get(t, first, key)
			}
			end := make(chan struct{})
			cfg.MaxLoads, cfg.MaxWaiters, cfg.LocalEntries = 4, 100, 100
			l, err := refill.New("thing", func(context.Context, string) (string, error) {
				<-end
				return "v1", nil
			}, cfg)
			if bulkLoad {
				l, err = refill.NewBulk("thing", func(context.Context, []string) (map[string]string, error) {
					<-end
					return nil, nil
				}, cfg)
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
			defer close(end)
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			goroutines := runtime.NumGoroutine()
			for _, key := range names(0, keys) {
				if bulkLoad {
					if m, err := l.GetMany(t.Context(), []string{key}); err != nil || m[key] != "v0" {
						t.Errorf("GetMany: got %q, %v, want the stale value", m[key], err)
					}
				} else if v := get(t, l, key); v != "v0" {
					t.Errorf("got %q, want the stale value", v)
				}
			}
			more := runtime.NumGoroutine() - goroutines
			for try := 0; more > 100 && try < 100; try++ { // a refresh that finds no load slot ends a moment later
				runtime.Gosched()
				more = runtime.NumGoroutine() - goroutines
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			if heap := int64(after.HeapAlloc) - int64(before.HeapAlloc); more > 100 || heap > 10<<20 {
				t.Errorf("%d Gets left %d goroutines and %d KiB, want 100 and 10,240 KiB at most", keys, more, heap>>10)
			}
		})
	}
}

// All load slots are taken, so the background refresh of a stale value ends without a load. A Get within the next 50 ms
// must not start another refresh. Later the load slot is free. Then the next Get must start a refresh that loads.
func TestARefreshThatFoundNoSlotIsTriedAgain(t *testing.T) {
	for name, get := range map[string]func(t *testing.T, l *refill.Loader[string], key string) string{
		"Get": get,
		"GetMany": func(t *testing.T, l *refill.Loader[string], key string) string {
			m, err := l.GetMany(t.Context(), []string{key})
			if err != nil {
				t.Error(err)
			}
			return m[key]
		},
	} {
		for _, soft := range []time.Duration{0, 20 * ms} {
			t.Run(fmt.Sprintf("%s, SoftTimeout %v", name, soft), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					var ev events
					d := new(db)
					l := node(t, d.load, refill.Config{
						TTL: time.Second, StaleFor: time.Hour, MaxLoads: 1, SoftTimeout: soft, OnEvent: ev.on,
					})
					get(t, l, "k")
					time.Sleep(2 * time.Second)
					d.slow(time.Second)
					d.version.Store(1)
					stopped := behind(t, l, "slow")
					synctest.Wait()
					if v := get(t, l, "k"); v != "k v0" {
						t.Errorf("got %q, want the stale value", v)
					}
					time.Sleep(soft + ms)
					if n := ev.of(refill.EventRefreshSkipped); n != 1 {
						t.Errorf("got %d skipped refreshes, want 1", n)
					}
					get(t, l, "k")
					synctest.Wait()
					if n := ev.of(refill.EventRefreshSkipped); n != 1 {
						t.Errorf("got %d skipped refreshes after two Gets within 50 ms, want 1", n)
					}
					stopped()
					d.slow(0)
					get(t, l, "k")
					time.Sleep(10 * ms)
					if v := get(t, l, "k"); v != "k v1" || d.loads.Load() != 3 {
						t.Errorf("got %q after %d loads, want the refreshed value after 3", v, d.loads.Load())
					}
				})
			})
		}
	}
}

// All load slots are taken. A caller waits for the refresh of a stale value, because it calls Refresh, Get with
// NoStale, or Get with SoftTimeout (one case each). The refresh must queue for a load slot, and the caller must get the
// new value.
func TestARefreshWithACallerQueues(t *testing.T) {
	for name, ask := range map[string]func(ctx context.Context, l *refill.Loader[string]) (string, error){
		"Refresh": func(ctx context.Context, l *refill.Loader[string]) (string, error) {
			if err := l.Refresh(ctx, "k"); err != nil {
				return "", err
			}
			return l.Get(ctx, "k")
		},
		"NoStale": func(ctx context.Context, l *refill.Loader[string]) (string, error) {
			r, err := l.GetResultWith(ctx, "k", refill.GetOptions[string]{NoStale: true})
			return r.Value, err
		},
		"SoftTimeout": func(ctx context.Context, l *refill.Loader[string]) (string, error) { return l.Get(ctx, "k") },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := new(db)
				cfg := refill.Config{TTL: time.Second, StaleFor: time.Hour, MaxLoads: 1}
				if name == "SoftTimeout" {
					cfg.SoftTimeout = 3 * time.Second
				}
				l := node(t, d.load, cfg)
				get(t, l, "k")
				time.Sleep(2 * time.Second)
				d.slow(500 * ms)
				d.version.Store(1)
				defer behind(t, l, "slow")()
				synctest.Wait()
				began := time.Now()
				if v, err := ask(t.Context(), l); v != "k v1" || err != nil || time.Since(began) != time.Second {
					t.Errorf("got %q, %v after %v, want \"k v1\" after 1 s", v, err, time.Since(began))
				}
			})
		})
	}
}

// All load slots are taken. A Get with NoStale waits for the refresh of a stale value. A second Get, without NoStale,
// must get the stale value at once. The refresh must stay in the queue for a load slot, and the first Get must get the
// new value.
func TestNoStaleKeepsARefreshInTheQueue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := new(db)
		l := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, MaxLoads: 1})
		get(t, l, "k")
		time.Sleep(2 * time.Second)
		d.slow(500 * ms)
		d.version.Store(1)
		defer behind(t, l, "slow")()
		synctest.Wait()
		var wg sync.WaitGroup
		wg.Go(func() {
			r, err := l.GetResultWith(t.Context(), "k", refill.GetOptions[string]{NoStale: true})
			if r.Value != "k v1" || err != nil {
				t.Errorf("NoStale got %q, %v, want \"k v1\"", r.Value, err)
			}
		})
		synctest.Wait()
		if v := get(t, l, "k"); v != "k v0" {
			t.Errorf("got %q, want the stale value", v)
		}
		wg.Wait()
	})
}
