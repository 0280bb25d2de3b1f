package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

// rig is an open subject (a peer) in this process. A rig counts the loads of the subject, and the commands that the
// Redis of the subject has received.
type rig struct {
	peers.Cache

	t     testing.TB
	redis *realtest.Redis // nil: the subject needs none
	value func(key string) *peers.Product
	loads atomic.Int64
	done  int64 // loads at the last reset
}

// asideOfGets matches commands that set up or check a connection. rig does not count these commands.
var asideOfGets = regexp.MustCompile(`^(auth|client\|.*|command|command\|.*|hello|ping|select)$`)

// openRig opens a subject on an empty Redis. value makes the value that a load returns; nil means the function product.
func openRig(
	t testing.TB, redis *realtest.Redis, p peers.Peer, s peers.Settings, value func(key string) *peers.Product,
) (*rig, error) {
	r := &rig{t: t, value: value}
	if value == nil {
		r.value = product
	}
	if p.Shared {
		redis.Restart() // Restart empties Redis
		r.redis = redis
	}
	return r, r.open(p, s)
}

// again opens a second instance of the subject on the same Redis, as another process would.
func (r *rig) again(p peers.Peer, s peers.Settings) (*rig, error) {
	next := &rig{t: r.t, redis: r.redis, value: r.value}
	return next, next.open(p, s)
}

func (r *rig) open(p peers.Peer, s peers.Settings) (err error) {
	s.Load = func(_ context.Context, key string) (*peers.Product, error) {
		r.loads.Add(1)
		return r.value(key), nil
	}
	if r.redis != nil {
		s.Redis = r.redis.Addr()
	}
	if r.Cache, err = p.Open(s); err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	return nil
}

// reset sets the counts of loads and commands to 0.
func (r *rig) reset() {
	r.done = r.loads.Load()
	if r.redis != nil {
		r.redis.ResetStats(r.t)
	}
}

// commands returns the number of commands since the last reset, by name.
func (r *rig) commands() map[string]int64 {
	if r.redis == nil {
		return nil
	}
	calls := r.redis.Commandstats(r.t)
	for name := range calls {
		if asideOfGets.MatchString(name) {
			delete(calls, name)
		}
	}
	return calls
}

// work returns the number of loads and of commands since the last reset.
func (r *rig) work() (loads, commands int64) {
	for _, n := range r.commands() {
		commands += n
	}
	return r.loads.Load() - r.done, commands
}

// quiet returns when no commands arrive at Redis any more. Some peers write to Redis after Get has returned, so a
// caller must call quiet before it counts commands.
func (r *rig) quiet() {
	for before := int64(-1); r.redis != nil; {
		_, now := r.work()
		if now == before {
			return
		}
		before = now
		time.Sleep(20 * time.Millisecond)
	}
}

// settle returns when this process has used little CPU time for 10 ms. Some peers write to Redis after Get has
// returned, and the garbage collector may still run. That work belongs to the Gets that caused it.
func settle() {
	const step = 10 * time.Millisecond
	for before := cpuTime(); ; {
		time.Sleep(step)
		now := cpuTime()
		if now-before < step/10 {
			return
		}
		before = now
	}
}

// each calls Get once for each key, from g goroutines. A goroutine takes the next key when it is ready, so that all of
// them are busy until the last key.
func (r *rig) each(ctx context.Context, keys []string, g int) error {
	errs := make([]error, g)
	var (
		wg    sync.WaitGroup
		taken atomic.Int64
	)
	for i := range g {
		wg.Go(func() {
			for n := taken.Add(1); n <= int64(len(keys)); n = taken.Add(1) {
				if _, err := r.Get(ctx, keys[n-1]); err != nil {
					errs[i] = fmt.Errorf("%s: %w", keys[n-1], err)
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// timed calls each, and returns the cost per Get. Costs except ns include what happens after the Gets have returned.
func (r *rig) timed(ctx context.Context, keys []string, g int) (cost, error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began, cpu := time.Now(), cpuTime()
	err := r.each(ctx, keys, g)
	took := time.Since(began)
	settle()
	cpu = cpuTime() - cpu
	runtime.ReadMemStats(&after)
	c := costOf(took, &before, &after, len(keys))
	c.cpu = float64(cpu) / float64(len(keys))
	return c, err
}

// cost is the elapsed time, the CPU time in ns, the allocations and the bytes of one Get.
type cost struct{ ns, cpu, allocs, bytes float64 }

func costOf(took time.Duration, before, after *runtime.MemStats, gets int) cost {
	n := float64(gets)
	return cost{
		ns:     float64(took) / n,
		allocs: float64(after.Mallocs-before.Mallocs) / n,
		bytes:  float64(after.TotalAlloc-before.TotalAlloc) / n,
	}
}

// warm calls Get for all keys from g goroutines, ten times at most, until L1 answers every Get. warm returns the share
// of keys that L1 still does not have.
func (r *rig) warm(ctx context.Context, keys []string, g int) (missing float64, err error) {
	if p, ok := r.Cache.(peers.Putter); ok {
		all := make(map[string]*peers.Product, len(keys))
		for _, key := range keys {
			all[key] = r.value(key)
		}
		p.Put(all)
	}
	for range 10 {
		r.reset()
		if err := r.each(ctx, keys, g); err != nil {
			return 0, err
		}
		loads, commands := r.work()
		if missing = float64(loads+commands) / float64(len(keys)); missing == 0 {
			return 0, nil
		}
		r.quiet()
	}
	return missing, nil
}

// names returns n keys.
func names(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("product-%06d", i)
	}
	return keys
}
