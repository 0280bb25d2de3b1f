package refill_test

import (
	"testing"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// This file tests Loaders that nobody uses for a while.

// The coarse clock of L1 sleeps while no Loader of the store is used. A value that expires meanwhile must not be served
// as fresh, and one that does not expire must be a hit, also for another Loader of the store and for a Loader with a
// store of its own.
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
					time.Sleep(sleep) // much longer than a tick
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
