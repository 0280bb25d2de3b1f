package refill

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/refill-go/refill/driver"
)

// testLocalBytes returns the LocalBytes of the test: 16 MiB with REFILL_TORTURE=1, and otherwise 2 MiB, so that the
// test is fast with the race detector.
func testLocalBytes() int64 {
	if os.Getenv("REFILL_TORTURE") == "1" {
		return 16 << 20
	}
	return 2 << 20
}

type sizedProduct struct {
	ID, Name, Text string
	Price          float64
	Tags           []string
	Parent         *sizedProduct
	At             time.Time
}

func sizedProductOf(i int) sizedProduct {
	return sizedProduct{
		ID: fmt.Sprint(i), Name: fmt.Sprint("product ", i), Text: strings.Repeat("x", 100), At: time.Unix(int64(i), 0),
		Tags: []string{"a", "bcd", fmt.Sprint(i)}, Parent: &sizedProduct{ID: fmt.Sprint(i)},
	}
}

func sizedMap(i int) map[string]int {
	m := map[string]int{}
	for n := range 1 + i%100 {
		m[fmt.Sprint("key", n)] = i
	}
	return m
}

// L1 gets values of one kind, until their records have twice LocalBytes in all. The heap must grow by at most twice
// LocalBytes. The heap must also grow by at least half of LocalBytes, because L1 must use the memory that LocalBytes
// allows.
func TestLocalBytesBoundsTheHeap(t *testing.T) {
	t.Run("structs", heapOf(sizedProductOf))
	t.Run("pointers", heapOf(func(i int) *sizedProduct { p := sizedProductOf(i); return &p }))
	t.Run("small structs", heapOf(func(i int) struct{ N int } { return struct{ N int }{i} }))
	t.Run("slices of ints", heapOf(func(i int) []int { return make([]int, i%2000) }))
	t.Run("slices of structs", heapOf(func(i int) []sizedProduct {
		s := make([]sizedProduct, i%50)
		for n := range s {
			s[n] = sizedProductOf(n)
		}
		return s
	}))
	t.Run("slices of null", heapOf(func(i int) []any { return make([]any, i%2000) }))
	t.Run("slices of any", heapOf(func(i int) []any {
		return []any{i, "text", 1.5, nil, []any{i}, map[string]any{"a": i}}
	}))
	t.Run("slices of slices", heapOf(func(i int) [][]int { return make([][]int, i%2000) }))
	t.Run("bytes", heapOf(func(i int) []byte { return make([]byte, i%8000) }))
	t.Run("large bytes", heapOf(func(i int) []byte { return make([]byte, 200_000+i%100_000) }))
	t.Run("strings", heapOf(func(i int) string { return strings.Repeat("x", i%8000) }))
	t.Run("maps", heapOf(sizedMap))
	t.Run("maps of any", heapOf(func(i int) map[string]any {
		m := map[string]any{}
		for key, n := range sizedMap(i % 20) {
			m[key] = []any{n, key, m["key0"]}
		}
		return m
	}))
	t.Run("absences", heapOf[*sizedProduct](nil))
	small := func(i int) struct{ N int } { return struct{ N int }{i} }
	t.Run("tags and validators", heapOf(small, func(r *driver.Record) {
		r.Tags, r.Validator = []string{"a", "b", r.Token}, strings.Repeat("v", 100)
	}))
	t.Run("tokens of another form", heapOf(small, func(r *driver.Record) {
		r.Token = strings.Repeat("t", 100) + r.Token + "-"
	}))
	t.Run("spans of their own", heapOf(small, func(r *driver.Record) { r.StaleFor = time.Duration(rand.Int64N(1 << 50)) }))
}

// heapOf returns a test that puts the values of valueOf into L1, or absences if valueOf is nil, with the records as
// change leaves them. Of each three values,
// the second replaces the first, and the third is invalidated. The test then checks how much the heap has grown.
func heapOf[V any](valueOf func(i int) V, change ...func(*driver.Record)) func(t *testing.T) {
	return func(t *testing.T) {
		localBytes := testLocalBytes()
		before := heapInUse()
		l, err := New[V]("thing", nil, Config{TTL: time.Hour, LocalBytes: localBytes, LocalEntries: 100_000})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		for i, total := 0, int64(0); total < 2*localBytes; i++ {
			key := fmt.Sprint("product:", i)
			if i%3 == 1 {
				key = fmt.Sprint("product:", i-1)
			}
			record := recordOf(t, l, i, valueOf, change...)
			e, _ := l.decode(key, record, l.l1.Epoch(key))
			l.putL1(e, record)
			if i%3 == 2 {
				l.l1.Invalidate(key)
			}
			total += int64(len(record))
		}
		grown := heapInUse() - before
		t.Logf("the heap grew by %.2f of LocalBytes", float64(grown)/float64(localBytes))
		if grown > 2*localBytes || grown < localBytes/2 {
			t.Errorf("the heap grew by %d bytes, want %d to %d", grown, localBytes/2, 2*localBytes)
		}
	}
}

func recordOf[V any](
	t *testing.T, l *Loader[V], i int, valueOf func(int) V, change ...func(*driver.Record),
) []byte {
	t.Helper()
	now := time.Now()
	r := driver.Record{Token: l.node.token(), LoadBegan: now, FreshUntil: now.Add(time.Hour), Kind: l.kind}
	var err error
	if r.NotFound = valueOf == nil; r.NotFound {
		r.Payload = fmt.Append(nil, "product ", i, " does not exist")
	} else if r.Payload, err = l.codec.Marshal(valueOf(i)); err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(&r)
	}
	record, err := r.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return record
}

func heapInUse() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // the first run of the garbage collector does not free the contents of a sync.Pool
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
