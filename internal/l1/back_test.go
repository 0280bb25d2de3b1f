package l1

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dgraph-io/ristretto/v2"
)

// Four goroutines get, put and invalidate keys, while the test closes the cache. No call may panic, and the race
// detector must find nothing. After Close, no method may call ristretto.
//
// Close of ristretto closes two channels. Invalidate writes to the first channel. Get writes to the second channel when
// a buffer of 64 reads is full. Here the buffer has one place, so each Get writes to the channel.
func TestCloseBesideCalls(t *testing.T) {
	for range 100 {
		c, tables := newTestCache(t, Config{}), &tables[int]{}
		tables.hot.setUp(c.limits)
		tables.back.setUp(c.most, &ristretto.Config[uint64, *Entry[int]]{NumCounters: 10, MaxCost: 10, BufferItems: 1})
		c.tables.Store(tables)
		var (
			wg    sync.WaitGroup
			stop  atomic.Bool
			began sync.WaitGroup
		)
		for _, key := range []string{"a", "b", "c", "d"} {
			began.Add(1)
			wg.Go(func() {
				h := c.Hash(key)
				c.Put(c.NewEntry(key, c.Epoch(key), nil, 0), 1)
				began.Done()
				for !stop.Load() {
					c.getBack(tables, h, key)
					c.Invalidate(key)
					runtime.Gosched() // otherwise each goroutine runs for its whole time slice
				}
			})
		}
		began.Wait()
		tables.back.close()
		stop.Store(true)
		wg.Wait()
		if e, _ := tables.back.get(c.Hash("a")); e != nil {
			t.Error("ristretto answers after close")
		}
	}
}
