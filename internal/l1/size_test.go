package l1

import (
	"math"
	"runtime"
	"testing"
	"time"
)

// SizeOf counts a record once if parts of the value share its memory, and leaves out a record that is not shared.
func TestSizeOfCountsASharedRecordOnce(t *testing.T) {
	type pair struct{ A, B []byte }
	record := make([]byte, 1024)
	shared, own := pair{record[:10], record[500:600]}, pair{make([]byte, 1024), nil}
	if n := SizeOf(&shared, record); n != 1024 {
		t.Errorf("got %d bytes for two parts of a record of 1024 bytes, want 1024", n)
	}
	if n := SizeOf(&own, record); n != 1024 {
		t.Errorf("got %d bytes for a slice of 1024 bytes, want 1024", n)
	}
}

// SizeOf must end for a value that refers to itself, and for a slice that is too long to look at each element.
func TestSizeOfIsBounded(t *testing.T) {
	type node struct {
		Next *node
		Kids []*node
		Any  any
	}
	ring := &node{}
	ring.Next, ring.Any, ring.Kids = ring, ring, []*node{ring, ring}
	if n := SizeOf(&ring, nil); n <= 0 {
		t.Errorf("got %d bytes for a ring", n)
	}
	long := make([]string, 1_000_000)
	for i := range long {
		long[i] = "0123456789abcdef"
	}
	if n := SizeOf(&long, nil); n < 32e6 || n > 33e6 {
		t.Errorf("got %d bytes for 1,000,000 strings of 16 bytes, want 32e6 to 33e6", n)
	}
}

// A value is replaced by larger and larger values, and no new key comes. The sum of the sizes must stay within Bytes.
// ristretto alone would not evict anything, because it makes room for new keys only.
func TestLargerValuesKeepTheBound(t *testing.T) {
	const most = 1 << 20
	c := newTestCache(t, Config{Bytes: most})
	keys := []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"}
	for size := int64(1000); size < most/4-2000; size *= 2 {
		for _, key := range keys {
			c.Put(c.NewEntry(key, c.Epoch(key), nil, 0), size)
		}
		c.tables.Load().back.cache.Wait()
	}
	tables := c.tables.Load()
	var sum int64
	tables.back.cache.IterValues(func(e *Entry[int]) bool { sum += costOf(e); return false })
	if held := tables.back.held.Load(); sum != held {
		t.Errorf("ristretto holds %d bytes, %d are counted", sum, held)
	}
	if all := sum + tables.hot.used.Load(); all > most {
		t.Errorf("L1 holds %d bytes, want %d at most", all, most)
	}
}

// The largest number of entries must not make the first Put take much memory. Without a bound on the counters of
// ristretto, the first Put would take 40 GiB.
func TestTheLargestNumberOfEntries(t *testing.T) {
	for _, bytes := range []int64{64 << 20, math.MaxInt64} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		c := New[int](Config{Entries: 1 << 30, Bytes: bytes, Tick: time.Hour, Now: time.Now})
		c.Put(c.NewEntry("k", c.Epoch("k"), nil, 0), 1)
		runtime.ReadMemStats(&after)
		c.Close()
		if n := (after.TotalAlloc - before.TotalAlloc) >> 20; n > 100 {
			t.Errorf("Bytes %d: New and Put take %d MiB, want 100 at most", bytes, n)
		} else {
			t.Logf("Bytes %d: New and Put take %d MiB", bytes, n)
		}
	}
}

type benchProduct struct {
	ID, Name, Text string
	Price          float64
	Tags           []string
	At             time.Time
}

// BenchmarkSizeOf measures SizeOf, which runs once per miss.
func BenchmarkSizeOf(b *testing.B) {
	p := benchProduct{ID: "1", Name: "product 1", Text: "text", Tags: []string{"a", "b", "c"}}
	b.Run("struct", func(b *testing.B) { benchmarkSizeOf(b, &p) })
	raw := make([]byte, 1000)
	b.Run("bytes", func(b *testing.B) { benchmarkSizeOf(b, &raw) })
	many := make([]benchProduct, 10_000)
	for i := range many {
		many[i] = p
	}
	b.Run("10,000 structs", func(b *testing.B) { benchmarkSizeOf(b, &many) })
	tree := map[string]any{"a": 1.5, "b": "text", "c": []any{"x", 1.0, nil}, "d": map[string]any{"e": "f"}}
	b.Run("map of any", func(b *testing.B) { benchmarkSizeOf(b, &tree) })
}

func benchmarkSizeOf[V any](b *testing.B, v *V) {
	b.ReportAllocs()
	for b.Loop() {
		SizeOf(v, nil)
	}
}
