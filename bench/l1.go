package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

const (
	l1Keys  = 10_000
	l1Room  = 4 * l1Keys // room for four times as many, because the shards of some caches do not fill evenly
	l1Chunk = 100 * time.Millisecond
	l1Batch = 256 // Gets between two readings of the clock

	heapEntries = 100_000
	heapRoom    = heapEntries * 5 / 4
)

// l1Per are the yardsticks, with which all subjects are compared. In each round the subjects run one after the other,
// one chunk each, so each round gives a ratio. The table shows the median of these ratios.
var l1Per = []string{"ristretto", "table"}

// A drawing is a random sequence of keys, drawn before the measurement. So the choice of a key adds only an array
// access to a Get.
type drawing []uint16

// zipf draws keys with the skew of real traffic.
func zipf() drawing {
	z := rand.NewZipf(rand.New(rand.NewSource(1)), 1.01, 1, l1Keys-1)
	d := make(drawing, 1<<16)
	for i := range d {
		d[i] = uint16(z.Uint64())
	}
	return d
}

// hotKey draws the same key each time.
func hotKey() drawing { return make(drawing, 1<<16) }

// l1 times hits in the memory of the process.
func l1(ctx context.Context, b *bench) error {
	t := &Table{
		Name: "l1",
		Title: fmt.Sprintf("A hit in L1, per Get over all goroutines: %d keys, Zipf 1.01, and one hot key, each from one "+
			"goroutine and from two. StaleFor is on where a subject has it. Misses are the loads and commands of all four "+
			"chunks together, of %v each.", l1Keys, l1Chunk),
		Columns: []Column{
			{Name: "zipf g=1", Unit: "ns", Digits: 1, Per: l1Per},
			{Name: "zipf g=2", Unit: "ns", Digits: 1, Per: l1Per},
			{Name: "hot g=1", Unit: "ns", Digits: 1, Per: l1Per},
			{Name: "hot g=2", Unit: "ns", Digits: 1, Per: l1Per},
			{Name: "allocs/op", Digits: 1}, {Name: "B/op"}, {Name: "misses"},
		},
	}
	redis, keys := realtest.StartRedis(b.stage), names(l1Keys)
	for round := range b.rounds {
		for _, p := range b.subjects(func(p peers.Peer) bool { return p.Local }, l1Per...) {
			b.progress("l1: round %d, %s", round+1, p.Name)
			if err := b.l1Round(ctx, t, redis, p, keys); err != nil {
				return err
			}
		}
	}
	b.done(t)
	return nil
}

// l1Round takes one sample of each column for one subject. l1Round opens the subject for this round only, so that no
// other subject is on the heap.
func (b *bench) l1Round(ctx context.Context, t *Table, redis *realtest.Redis, p peers.Peer, keys []string) error {
	r, err := openRig(b.stage, redis, p, peers.Settings{TTL: time.Hour, StaleFor: time.Hour, Entries: l1Room}, nil)
	if err != nil {
		return err
	}
	defer r.Close()
	if _, err := r.warm(ctx, keys, 8); err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	runtime.GC()
	r.reset()
	for _, c := range []struct {
		name string
		d    drawing
		g    int
	}{{"zipf g=1", zipf(), 1}, {"zipf g=2", zipf(), 2}, {"hot g=1", hotKey(), 1}, {"hot g=2", hotKey(), 2}} {
		h, err := hits(ctx, r.Cache, keys, c.d, c.g)
		if err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
		t.Add(p.Name, c.name, h.ns)
		if c.name == "zipf g=1" {
			t.Add(p.Name, "allocs/op", h.allocs)
			t.Add(p.Name, "B/op", h.bytes)
		}
	}
	loads, commands := r.work()
	t.Add(p.Name, "misses", float64(loads+commands))
	return nil
}

// hits calls Get from g goroutines for the time l1Chunk.
func hits(ctx context.Context, c peers.Cache, keys []string, d drawing, g int) (cost, error) {
	var (
		wg   sync.WaitGroup
		gets atomic.Int64
		errs = make([]error, g)
		m, n runtime.MemStats // before and after the Gets
	)
	runtime.ReadMemStats(&m)
	began := time.Now()
	for i := range g {
		wg.Go(func() {
			at, mine := i*len(d)/g, 0
			for ; time.Since(began) < l1Chunk && errs[i] == nil; mine += l1Batch {
				for range l1Batch {
					if _, err := c.Get(ctx, keys[d[at%len(d)]]); err != nil {
						errs[i] = err
					}
					at++
				}
			}
			gets.Add(int64(mine))
		})
	}
	wg.Wait()
	took := time.Since(began)
	runtime.ReadMemStats(&n)
	return costOf(took, &m, &n, int(gets.Load())), errors.Join(errs...)
}

// heap measures how much memory an entry of L1 needs.
func heap(ctx context.Context, b *bench) error {
	t := &Table{
		Name: "heap",
		Title: fmt.Sprintf("How much the heap grows per entry when %d entries are put into L1, after a garbage collection. "+
			"The key is not included, nor the value, which all keys share. Only subjects that keep bytes have a value for "+
			"each key, here a small one. Missing is the share that L1 did not keep.",
			heapEntries),
		Columns: []Column{{Name: "bytes/entry"}, {Name: "missing", Unit: "%", Digits: 1}},
	}
	redis, keys, one := realtest.StartRedis(b.stage), names(heapEntries), &peers.Product{ID: "1"}
	for _, p := range b.subjects(func(p peers.Peer) bool { return p.Local }) {
		b.progress("heap: %s", p.Name)
		before := heapBytes()
		r, err := openRig(b.stage, redis, p, peers.Settings{TTL: time.Hour, Entries: heapRoom},
			func(string) *peers.Product { return one })
		if err != nil {
			return err
		}
		missing, err := r.warm(ctx, keys, 1) // each connection to Redis has buffers of 64 KiB, which are not of L1
		if err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
		r.quiet()
		t.Add(p.Name, "bytes/entry", (heapBytes()-before)/heapEntries)
		t.Add(p.Name, "missing", 100*missing)
		if err := r.Close(); err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
	}
	runtime.KeepAlive(keys)
	b.done(t)
	return nil
}
