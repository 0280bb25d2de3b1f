package refill_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests that a node keeps a lease until the node has published the loaded value. In some tests a node has
// many leases at once. In another test a publication takes long.

// farAway is a store whose Renew, Acquire and Publish take the time took. At most cap(slots) calls of Renew run at the
// same time. Further calls of Renew wait. If slots is nil, every Renew waits until its ctx ends, and fails.
type farAway struct {
	driver.Store
	took  time.Duration
	slots chan struct{}
}

func (s *farAway) Renew(ctx context.Context, ttl time.Duration, leases ...driver.Lease) ([]bool, error) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if err := wait(ctx, s.took); err != nil {
		return nil, err
	}
	return s.Store.Renew(ctx, ttl, leases...)
}

func (s *farAway) Acquire(ctx context.Context, r driver.AcquireRequest) (driver.AcquireResult, error) {
	if err := wait(ctx, s.took); err != nil {
		return driver.AcquireResult{}, err
	}
	return s.Store.Acquire(ctx, r)
}

func (s *farAway) Publish(ctx context.Context, r driver.PublishRequest) (driver.PublishResult, error) {
	if err := wait(ctx, s.took); err != nil {
		return 0, err
	}
	return s.Store.Publish(ctx, r)
}

// A bulk load of 400 keys takes 3 s, three times as long as LockTTL. Renew, Acquire and Publish of the store take 20
// ms, and two calls of Renew may run at the same time. One Renew per lease would take 4 s for all leases. So the node
// must renew many leases with one call. A second node asks for the keys 300 ms after the first node. No key may be
// loaded twice, and the store may not reject a publication.
func TestTheLeasesOfABulkLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var ev events
		d := &table{took: 3 * time.Second}
		shared := memory.New()
		cfg := refill.Config{
			Shared: &farAway{Store: shared, took: 20 * ms, slots: make(chan struct{}, 2)}, OnEvent: ev.on,
		}
		first, second := bulk(t, d, cfg), bulk(t, d, cfg)
		keys := names(0, 400)
		var wg sync.WaitGroup
		wg.Go(func() { all(t, first, keys) })
		time.Sleep(300 * ms)
		all(t, second, keys)
		wg.Wait()
		if loaded := slices.Concat(d.asked()...); len(loaded) != len(keys) {
			t.Errorf("got loads of %d keys, want each of %d once", len(loaded), len(keys))
		}
		if lost, rejected := ev.of(refill.EventLeaseLost), ev.of(refill.EventPublishRejected); lost+rejected > 0 {
			t.Errorf("%d leases were lost and %d publications rejected, want 0", lost, rejected)
		}
	})
}

// A node loads 400 keys with one load per key, and each load takes 3 s, three times as long as LockTTL. The store needs
// 20 ms for a call of Renew, and executes two of these calls at the same time. So the node must renew many leases with
// one call. A second node asks for the keys 300 ms later. No key may be loaded twice, and the store may not reject a
// publication.
func TestTheLeasesOfManyLoads(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var ev events
		d := &db{took: 3 * time.Second}
		shared := memory.New()
		cfg := refill.Config{
			TTL: time.Minute, MaxLoads: -1, OnEvent: ev.on,
			Shared: &farAway{Store: shared, took: 20 * ms, slots: make(chan struct{}, 2)},
		}
		first, second := node(t, d.load, cfg), node(t, d.load, cfg)
		var wg sync.WaitGroup
		for _, key := range names(0, 400) {
			wg.Go(func() { get(t, first, key) })
			wg.Go(func() {
				time.Sleep(300 * ms)
				get(t, second, key)
			})
		}
		wg.Wait()
		if n := d.loads.Load(); n != 400 {
			t.Errorf("got %d loads, want 400: %d keys were loaded twice", n, n-400)
		}
		if lost, rejected := ev.of(refill.EventLeaseLost), ev.of(refill.EventPublishRejected); lost+rejected > 0 {
			t.Errorf("%d leases were lost and %d publications rejected, want 0", lost, rejected)
		}
	})
}

// slowEnd is a store whose EnsureTags and Publish take the time took.
type slowEnd struct {
	driver.Store
	took time.Duration
}

func (s *slowEnd) EnsureTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	if err := wait(ctx, s.took); err != nil {
		return err
	}
	return s.Store.EnsureTags(ctx, reach, keep, tags...)
}

func (s *slowEnd) Publish(ctx context.Context, r driver.PublishRequest) (driver.PublishResult, error) {
	if err := wait(ctx, s.took); err != nil {
		return 0, err
	}
	return s.Store.Publish(ctx, r)
}

// The publication of a tagged value takes 720 ms, because it waits for three calls: the EnsureTags of another load, its
// own EnsureTags, and Publish. Each of these calls takes 240 ms, just below StoreTimeout. The node renews its lease of
// 1 s every 333 ms, and the load ends just before a renewal. A second node waits for the key. The second node must not
// load, and the store must not reject the publication.
func TestTheLeaseDuringAPublication(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var ev events
		shared := memory.New()
		d, slower := &db{took: 980 * ms}, &db{took: 990 * ms}
		load := func(ctx context.Context, key string) (string, error) {
			refill.FillFrom(ctx).Tag(key)
			if key == "k" {
				return slower.load(ctx, key)
			}
			return d.load(ctx, key)
		}
		cfg := refill.Config{
			TTL: time.Minute, Shared: &slowEnd{shared, 240 * ms}, OnEvent: ev.on,
		}
		l := node(t, load, cfg)
		cfg.Shared = shared
		peer := node(t, load, cfg)
		defer behind(t, l, "other")()
		defer behind(t, l, "k")()
		time.Sleep(100 * ms)
		get(t, peer, "k")
		time.Sleep(3 * time.Second)
		if n, rejected := slower.loads.Load(), ev.of(refill.EventPublishRejected); n != 1 || rejected != 0 {
			t.Errorf("got %d loads and %d rejected publications, want 1 and 0", n, rejected)
		}
	})
}
