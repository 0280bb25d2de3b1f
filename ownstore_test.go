package refill_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

// A Loader without Config.Shared makes a store of its own. The test loads 10,000 values of 20 KB (191 MiB in all)
// through a Loader with LocalBytes 1 MiB. The heap may grow by 16 MiB at most.
func TestTheOwnStoreOfALoaderIsBounded(t *testing.T) {
	load := func(context.Context, string) ([]byte, error) { return make([]byte, 20_000), nil }
	l, err := refill.New("thing", load, refill.Config{TTL: time.Minute, LocalEntries: 100, LocalBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for i := range 10_000 {
		if _, err := l.Get(t.Context(), fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	if after := heap(); after > before+16<<20 {
		t.Errorf("the heap has grown by %d MiB, want at most 16", (after-before)>>20)
	}
}
