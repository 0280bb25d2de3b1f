package refill_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// db is a database that counts, and takes its time.
type db struct {
	took    time.Duration // change it by slow
	loads   atomic.Int64
	now     atomic.Int64 // loads running
	most    atomic.Int64
	version atomic.Int64 // what it holds
	mu      sync.Mutex
	err     error
	begins  []time.Time
}

func (d *db) load(ctx context.Context, key string) (string, error) {
	d.loads.Add(1)
	n := d.now.Add(1)
	defer d.now.Add(-1)
	for m := d.most.Load(); n > m && !d.most.CompareAndSwap(m, n); m = d.most.Load() {
	}
	d.mu.Lock()
	err, took := d.err, d.took
	d.begins = append(d.begins, time.Now())
	d.mu.Unlock()
	value := fmt.Sprintf("%s v%d", key, d.version.Load()) // read first, as a query does
	select {
	case <-time.After(took):
	case <-ctx.Done():
		return "", ctx.Err()
	}
	return value, err
}

func (d *db) slow(took time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.took = took
}

func (d *db) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

// fleet is some nodes over one store and one database.
func fleet(t *testing.T, n int, d *db, cfg refill.Config) []*refill.Loader[string] {
	t.Helper()
	if cfg.Shared == nil {
		cfg.Shared = refill.NewMemory()
	}
	if cfg.TTL == 0 {
		cfg.TTL = time.Second
	}
	nodes := make([]*refill.Loader[string], n)
	for i := range nodes {
		l, err := refill.New("thing", d.load, cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := l.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
		nodes[i] = l
	}
	return nodes
}

func get(t *testing.T, l *refill.Loader[string], key string) string {
	t.Helper()
	v, err := l.Get(t.Context(), key)
	if err != nil {
		t.Errorf("Get(%q): %v", key, err)
	}
	return v
}

// behind Gets on a goroutine of its own. Defer what it returns: it waits for that, before the test's ctx ends.
func behind(t *testing.T, l *refill.Loader[string], key string) (wait func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		get(t, l, key)
	}()
	return func() { <-done }
}

// bubble runs a test in a synctest bubble: its sleeps take no time and are exact, and a goroutine left behind fails it.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

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
					t.Errorf("%d loads at once, want 1", n)
				}
				// TTL counts from the start of the load, so one load begins per second, or a little later.
				if n := d.loads.Load(); n < 9 || n > 11 {
					t.Errorf("%d loads in 10 s at a TTL of 1 s, want 10", n)
				}
				if n := waited.Load(); staleFor > 0 && n > 8*20 {
					t.Errorf("%d Gets waited, want only the %d of the cold start", n, 8*20)
				}
			})
		})
	}
}

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
			t.Fatalf("%d loads, want 1", n)
		}
		time.Sleep(1900 * time.Millisecond)
		for _, l := range nodes {
			if _, err := l.Get(t.Context(), "k"); err == nil {
				t.Error("no error within ErrorTTL")
			}
		}
		if n := d.loads.Load(); n != 1 {
			t.Fatalf("%d loads within ErrorTTL, want 1", n)
		}
		d.fail(nil)
		time.Sleep(200 * time.Millisecond)
		get(t, nodes[1], "k")
		get(t, nodes[0], "k")
		if n := d.loads.Load(); n != 2 {
			t.Fatalf("%d loads after ErrorTTL, want 2", n)
		}
	})
}

func TestInvalidateVoidsALoadElsewhere(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * time.Millisecond}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Minute})
		var wg sync.WaitGroup
		wg.Go(func() { get(t, nodes[0], "k") }) // reads v0
		time.Sleep(50 * time.Millisecond)
		d.version.Store(1)
		if err := nodes[1].Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		for i, l := range nodes {
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d serves %q after Invalidate, want v1", i, v)
			}
		}
	})
}
