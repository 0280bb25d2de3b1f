//go:build unix

package realtest

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
)

// The tests of this file hold many leases during loads that take three times as long as LockTTL. Redis is behind a
// proxy that delays each reply by 20 ms.

// farWorld is a Redis behind a proxy that delays each reply.
func farWorld(t *testing.T) manyWorld {
	t.Helper()
	server := StartRedis(t)
	proxy := StartProxy(t, server.Addr())
	proxy.Delay(20 * time.Millisecond)
	return manyWorld{servers: []*Redis{server}, connect: func() redis.UniversalClient {
		return redis.NewClient(&redis.Options{Addr: proxy.Addr(), ContextTimeoutEnabled: true})
	}}
}

// A node gets 1,024 keys in one bulk load that takes 3 s. A second node asks for the keys 300 ms after the load has
// begun. No key may be loaded twice, no lease may be lost, and no publication may be rejected. No call of the store may
// take longer than StoreTimeout (250 ms), so the 1,024 publications must not queue for a connection.
func TestTheLeasesOfABulkLoad(t *testing.T) {
	w := farWorld(t)
	d, rejected := &rows{took: 3 * time.Second}, new(atomic.Int64)
	cfg := refill.Config{TTL: time.Minute, LockTTL: time.Second, OnEvent: func(e refill.Event) {
		if e.Kind == refill.EventPublishRejected {
			rejected.Add(1)
		}
	}}
	first, _ := w.node(t, d, cfg)
	second, _ := w.node(t, d, cfg)
	keys := numbered(0, 1024)
	var wg sync.WaitGroup
	wg.Go(func() { getsAll(t, first, keys, " v0") })
	eventually(func() bool { return d.calls.Load() > 0 })
	<-time.After(300 * time.Millisecond) // the load takes another 2.7 s
	getsAll(t, second, keys, " v0")
	wg.Wait()
	twice := 0
	for _, n := range d.times {
		twice += n - 1
	}
	t.Logf("result: %d keys in %d bulk loads of 3 s, %d keys loaded twice, %d publications rejected",
		len(d.times), d.calls.Load(), twice, rejected.Load())
	if len(d.times) != len(keys) || twice > 0 || rejected.Load() > 0 {
		t.Errorf("%d keys were loaded, %d twice, and %d publications were rejected; want %d, 0 and 0",
			len(d.times), twice, rejected.Load(), len(keys))
	}
}

// 1,000 callers on one node get a key each, and each load takes 3 s. 300 ms after the loads have begun, 1,000 callers
// on a second node ask for the same keys. No key may be loaded twice, no lease may be lost, and no publication may be
// rejected.
func TestTheLeasesOfManyLoads(t *testing.T) {
	r := newRig(t)
	r.proxy.Delay(20 * time.Millisecond)
	var mu sync.Mutex // guards times
	times := map[string]int{}
	load := func(ctx context.Context, key string) (string, error) {
		mu.Lock()
		times[key]++
		mu.Unlock()
		select {
		case <-time.After(3 * time.Second):
			return key, nil
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
	cfg := refill.Config{TTL: time.Minute, LockTTL: time.Second, MaxLoads: -1}
	var nodes []*rigNode
	for range 2 {
		n := r.node(redis.Options{Addr: r.proxy.Addr()}, cfg)
		n.load = load
		nodes = append(nodes, n)
	}
	keys := numbered(0, 1000)
	var wg sync.WaitGroup
	for i, n := range nodes {
		for _, key := range keys {
			wg.Go(func() { n.gets(key, key) })
		}
		if i == 0 {
			eventually(func() bool { return n.loads.Load() == int64(len(keys)) })
			<-time.After(300 * time.Millisecond)
		}
	}
	wg.Wait()
	twice, lost, late := 0, int64(0), int64(0)
	for _, n := range times {
		twice += n - 1
	}
	for _, n := range nodes {
		lost += n.count(refill.EventLeaseLost) + n.count(refill.EventPublishRejected)
		late += n.count(refill.EventStoreError)
	}
	t.Logf("result: %d keys in %d and %d single loads of 3 s, %d leases lost or publications rejected, %d store errors",
		len(times), nodes[0].loads.Load(), nodes[1].loads.Load(), lost, late)
	if len(times) != len(keys) || twice > 0 || lost > 0 {
		t.Errorf("%d keys were loaded, %d twice, and %d leases were lost or publications rejected; want %d, 0 and 0",
			len(times), twice, lost, len(keys))
	}
}
