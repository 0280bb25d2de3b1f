package refill_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// This file tests GetResultWith and its options.

// optionsCase is a state of key k, for instance stale. prepare brings k into that state on node l. In prepare, peer is
// a second node, and d is the database of both nodes. plain, noStale and forced are what GetResultWith must return on l
// without an option, with NoStale, and with Refresh. The value "err" stands for the error of the load.
type optionsCase struct {
	name                   string
	prepare                func(t *testing.T, l, peer *refill.Loader[string], d *db)
	plain, noStale, forced string
}

var optionsCases = []optionsCase{
	{"fresh", func(t *testing.T, l, _ *refill.Loader[string], _ *db) { get(t, l, "k") }, "k v0", "k v0", "k v1"},
	{"stale in L1", func(t *testing.T, l, _ *refill.Loader[string], _ *db) {
		get(t, l, "k")
		time.Sleep(2 * time.Second)
	}, "k v0", "k v1", "k v1"},
	{"stale in the store", func(t *testing.T, _, peer *refill.Loader[string], _ *db) {
		get(t, peer, "k")
		time.Sleep(2 * time.Second)
	}, "k v0", "k v1", "k v1"},
	{"expired", func(t *testing.T, l, _ *refill.Loader[string], _ *db) {
		get(t, l, "k")
		time.Sleep(30 * time.Second)
	}, "k v1", "k v1", "k v1"},
	{"error-only", func(t *testing.T, l, _ *refill.Loader[string], d *db) {
		get(t, l, "k")
		time.Sleep(15 * time.Second)
		d.fail(errNoDatabase)
	}, "k v0", "err", "err"},
	{"stale and failing", func(t *testing.T, l, _ *refill.Loader[string], d *db) {
		get(t, l, "k")
		time.Sleep(2 * time.Second)
		d.fail(errNoDatabase)
	}, "k v0", "err", "err"},
	{"absent", func(*testing.T, *refill.Loader[string], *refill.Loader[string], *db) {}, "k v1", "k v1", "k v1"},
	{"back-off", func(t *testing.T, l, _ *refill.Loader[string], d *db) {
		d.fail(errNoDatabase)
		_, _ = l.Get(t.Context(), "k")
		d.fail(nil)
	}, "err", "err", "k v1"},
}

// The test calls GetResultWith with each option, in each state of optionsCases. Each case runs with and without a load
// function in the options.
func TestGetResultWith(t *testing.T) {
	for _, c := range optionsCases {
		for _, o := range []struct {
			name    string
			options refill.GetOptions[string]
			want    string
		}{
			{"plain", refill.GetOptions[string]{}, c.plain},
			{"NoStale", refill.GetOptions[string]{NoStale: true}, c.noStale},
			{"Refresh", refill.GetOptions[string]{Refresh: true}, c.forced},
			{"both", refill.GetOptions[string]{Refresh: true, NoStale: true}, c.forced},
		} {
			for _, own := range []bool{false, true} {
				t.Run(c.name+", "+o.name, func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						d := new(db)
						cfg := refill.Config{
							TTL: time.Second, StaleFor: 10 * time.Second, StaleIfError: 20 * time.Second, ErrorTTL: time.Minute,
							Shared: memory.New(),
						}
						l, peer := node(t, d.load, cfg), node(t, d.load, cfg)
						c.prepare(t, l, peer, d)
						d.version.Store(1)
						if own {
							o.options.Load = func(ctx context.Context, key string) (string, error) {
								v, err := d.load(ctx, key)
								return "own " + v, err
							}
						}
						want := o.want
						if own && want == "k v1" {
							want = "own k v1"
						}
						r, err := l.GetResultWith(t.Context(), "k", o.options)
						got := r.Value
						if errors.Is(err, errNoDatabase) {
							got = "err"
						} else if err != nil {
							t.Error(err)
						}
						if got != want {
							t.Errorf("got %q (%v), want %q", got, r.Outcome, want)
						}
						synctest.Wait()
					})
				})
			}
		}
	}
}

// A background refresh runs on this node or on another node. A Get with NoStale must wait for the refresh and return
// the new value. The Get must not cause a second load.
func TestNoStaleJoinsARefresh(t *testing.T) {
	for name, elsewhere := range map[string]bool{"here": false, "elsewhere": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := new(db)
				nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleFor: time.Hour})
				get(t, nodes[0], "k")
				get(t, nodes[1], "k")
				time.Sleep(2 * time.Second)
				d.slow(500 * ms)
				d.version.Store(1)
				if elsewhere {
					get(t, nodes[1], "k")
					synctest.Wait()
				}
				get(t, nodes[0], "k") // elsewhere: this refresh is skipped, because the other node has the lease
				began := time.Now()
				var wg sync.WaitGroup
				for range 5 {
					wg.Go(func() {
						r, err := nodes[0].GetResultWith(t.Context(), "k", refill.GetOptions[string]{NoStale: true})
						if r.Value != "k v1" || err != nil || time.Since(began) != 500*ms {
							t.Errorf("got %q, %v after %v, want \"k v1\" after 500 ms", r.Value, err, time.Since(began))
						}
					})
				}
				wg.Wait()
				if n := d.loads.Load(); n != 2 {
					t.Errorf("got %d loads, want 2", n)
				}
			})
		})
	}
}
