package refill_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// This file tests loads that call Get of another Loader. MaxLoads and MaxWaiters of the other Loader hold for such a
// Get. Only if loads of the two Loaders could wait for each other's load slots, the Get needs no slot.

// pagesOf makes a Loader of pages without a bound on its loads (MaxLoads -1). The load of a page calls rows.Get with
// the key of the page.
func pagesOf(t *testing.T, rows *refill.Loader[string]) *refill.Loader[string] {
	t.Helper()
	pages, err := refill.New("pages", func(ctx context.Context, key string) (string, error) {
		return rows.Get(ctx, key)
	}, refill.Config{TTL: time.Minute, MaxLoads: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pages.Close() })
	return pages
}

// 200 loads of pages run at once, and each calls Get of a row. At most 4 loads of rows may run at once, which is
// MaxLoads of rows.
func TestMaxLoadsInsideOfLoads(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		pages := pagesOf(t, node(t, d.load, refill.Config{TTL: time.Minute, MaxLoads: 4}))
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() { get(t, pages, fmt.Sprint("k", i)) })
		}
		wg.Wait()
		if most, n := d.most.Load(), d.loads.Load(); most > 4 || n != 200 {
			t.Errorf("%d loads of rows ran at once, want 4 at most; got %d loads, want 200", most, n)
		}
	})
}

// One load calls Get of 100 stale rows. At most 4 refreshes of these rows may run at once, which is MaxLoads of rows.
func TestRefreshesInsideOfALoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := new(db)
		rows := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, MaxLoads: 4})
		keys := names(0, 100)
		for _, key := range keys {
			get(t, rows, key)
		}
		time.Sleep(2 * time.Second)
		d.slow(100 * ms)
		page := node(t, func(ctx context.Context, _ string) (string, error) {
			for _, key := range keys {
				if _, err := rows.Get(ctx, key); err != nil {
					return "", err
				}
			}
			return "page", nil
		}, refill.Config{Shared: memory.New()})
		get(t, page, "p")
		time.Sleep(time.Second)
		if most := d.most.Load(); most > 4 {
			t.Errorf("%d refreshes ran at once, want 4 at most", most)
		}
	})
}

// Two or three Loaders have one load slot each. A load of one Loader calls Get of the next Loader, and a load of the
// last Loader calls Get of the first Loader, until six loads run inside of each other. If the loads waited for each
// other's slots, the Gets would end at LoadTimeout (1 min). All Gets must return within 30 s.
func TestLoadersThatAskEachOther(t *testing.T) {
	for _, levels := range []int{2, 3} {
		t.Run(fmt.Sprint(levels, " Loaders"), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				loaders := make([]*refill.Loader[string], levels)
				for i := range loaders {
					load := func(ctx context.Context, key string) (string, error) {
						time.Sleep(10 * ms)
						if len(key) == 6 {
							return key, nil
						}
						return loaders[(i+1)%levels].Get(ctx, key+"x")
					}
					cfg := refill.Config{TTL: time.Minute, MaxLoads: 1, LoadTimeout: time.Minute, Shared: memory.New()}
					loaders[i] = node(t, load, cfg)
				}
				var wg sync.WaitGroup
				for i := range 20 * levels {
					wg.Go(func() { get(t, loaders[i%levels], string(rune('a'+i/levels))) })
				}
				began := time.Now()
				wg.Wait()
				if took := time.Since(began); took > 30*time.Second {
					t.Errorf("the Gets took %v, want 30 s at most", took)
				}
			})
		})
	}
}

// Ten loads of pages call rows.Get at the same time, and MaxWaiters of rows is 2. Eight of these Gets must fail with
// ErrOverloaded.
func TestMaxWaitersInsideOfLoads(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		pages := pagesOf(t, node(t, d.load, refill.Config{TTL: time.Minute, MaxWaiters: 2}))
		var mu sync.Mutex
		var wg sync.WaitGroup
		overloaded := 0
		for i := range 10 {
			wg.Go(func() {
				_, err := pages.Get(t.Context(), fmt.Sprint("k", i))
				mu.Lock()
				defer mu.Unlock()
				if errors.Is(err, refill.ErrOverloaded) {
					overloaded++
				} else if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if overloaded != 8 {
			t.Errorf("%d of 10 Gets failed with ErrOverloaded, want 8", overloaded)
		}
	})
}

// The values a and b are stale. The load of a Gets b, and the load of b Gets a. A Get of a starts a refresh of a, and
// the refresh of a starts a refresh of b. Each Get inside a load is served the stale value at once. So no load waits
// for another load, and neither refresh may fail.
func TestStaleValuesThatAskEachOther(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var (
			l        *refill.Loader[string]
			nest     bool
			failures events
		)
		load := func(ctx context.Context, key string) (string, error) {
			if !nest {
				return key, nil
			}
			other := map[string]string{"a": "b", "b": "a"}[key]
			v, err := l.Get(ctx, other)
			time.Sleep(100 * ms)
			return key + " with " + v, err
		}
		l = node(t, load, refill.Config{StaleFor: time.Hour, OnEvent: failures.on})
		get(t, l, "a")
		get(t, l, "b")
		time.Sleep(2 * time.Second)
		nest = true
		get(t, l, "a")
		time.Sleep(500 * ms)
		if n := failures.of(refill.EventLoadFailed); n != 0 {
			t.Errorf("%d loads failed, the last with %v, want 0", n, failures.last[refill.EventLoadFailed].Err)
		}
		if v := get(t, l, "a"); v != "a with b" {
			t.Errorf("got %q, want the refreshed value \"a with b\"", v)
		}
	})
}
