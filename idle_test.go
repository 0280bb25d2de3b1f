package refill_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests Loaders that are not called for a while.

// L1 takes the time from a coarse clock, which reads the store's clock at each tick (50 ms here). The Loaders of one
// store share a coarse clock, and it sleeps while none of them is used. If a value expires meanwhile, the value must
// not be served as fresh. If a value is still fresh after the sleep, a Get must be a hit. The test runs with two
// Loaders of one store, and with two Loaders that have a store each.
func TestAValueThatExpiresWhileTheClockSleeps(t *testing.T) {
	for name, shared := range map[string]bool{"one store": true, "no store": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				short, long := refill.Config{TTL: time.Minute}, refill.Config{TTL: time.Hour, LocalTTL: time.Hour}
				if shared {
					short.Shared = memory.New()
					long.Shared = short.Shared
				}
				d := &db{}
				a, err := refill.New("short", d.load, short)
				if err != nil {
					t.Fatal(err)
				}
				defer a.Close()
				b := node(t, d.load, long)
				for _, l := range []*refill.Loader[string]{a, b} {
					get(t, l, "k")
				}
				d.version.Store(1)
				for _, sleep := range []time.Duration{50 * time.Second, 20 * time.Second} {
					time.Sleep(sleep) // much longer than ten ticks without a use, after which the coarse clock sleeps
					if v := get(t, b, "k"); v != "k v0" || d.loads.Load() != 2 {
						t.Errorf("got %q after %d loads, want a hit", v, d.loads.Load())
					}
				}
				if v := get(t, a, "k"); v != "k v1" {
					t.Errorf("got %q after the end of TTL, want %q", v, "k v1")
				}
			})
		})
	}
}

// New must start no goroutine, and must allocate at most 16 KiB.
func TestAnIdleLoaderCostsLittle(t *testing.T) {
	const loaders, most = 100, 16 << 10
	for name, shared := range map[string]driver.Store{"one store": memory.New(), "no store": nil} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			goroutines := runtime.NumGoroutine()
			for i := range loaders {
				l, err := refill.New(fmt.Sprint("thing-", i), says("value", 0), refill.Config{TTL: time.Minute, Shared: shared})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
			}
			if n := runtime.NumGoroutine() - goroutines; n > 0 {
				t.Errorf("%d idle Loaders have %d goroutines, want 0", loaders, n)
			}
			runtime.ReadMemStats(&after)
			if each := (after.TotalAlloc - before.TotalAlloc) / loaders; each > most {
				t.Errorf("New allocates %d bytes, want %d at most", each, most)
			}
		})
	}
}
