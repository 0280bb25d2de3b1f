package refill_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/refill-go/refill"
)

// This file tests Close while other goroutines call other methods.

// The test runs 300 rounds, and 10,000 rounds with REFILL_TORTURE=1. In each round, several goroutines call methods of
// a new Loader in a loop, and Close is called meanwhile. No call may panic, every error must wrap ErrClosed, and no
// goroutine may be left at the end of the round. The race detector must find nothing.
func TestCallsBesideClose(t *testing.T) {
	rounds := 300
	if os.Getenv("REFILL_TORTURE") == "1" {
		rounds = 10_000
	}
	for range rounds {
		bubble(t, closeBesideCalls) // fails if a goroutine is left
	}
}

func closeBesideCalls(t *testing.T) {
	load := func(ctx context.Context, key string) (string, error) {
		refill.FillFrom(ctx).Tag("tag")
		return key, nil
	}
	// L1 is a small hot table with ristretto, a cache library, behind it. Here many keys share the few slots of the hot
	// table, so most calls go on to ristretto.
	l := node(t, load, refill.Config{LocalEntries: 32})
	ctx := t.Context()
	calls := []func(key string) error{
		func(key string) error { _, err := l.Get(ctx, key); return err },
		func(key string) error { _, err := l.Get(ctx, key); return err },
		func(key string) error { _, err := l.GetMany(ctx, []string{key, "1", "2"}); return err },
		func(key string) error { return l.Invalidate(ctx, key) },
		func(key string) error { return l.Invalidate(ctx, key) },
		func(string) error { return l.InvalidateTag(ctx, "tag") },
		func(key string) error { return l.Refresh(ctx, key) },
	}
	var (
		wg    sync.WaitGroup
		stop  atomic.Bool
		count atomic.Int64
	)
	for _, call := range calls {
		wg.Go(func() {
			for !stop.Load() {
				if err := call(fmt.Sprint(rand.IntN(32))); err != nil && !errors.Is(err, refill.ErrClosed) {
					t.Errorf("got %v beside Close, want an answer or ErrClosed", err)
					return
				}
				count.Add(1)
				runtime.Gosched() // otherwise each goroutine runs for its whole time slice, and a round takes long
			}
		})
	}
	callsDone := func(n int64) {
		for end := count.Load() + n; count.Load() < end && !t.Failed(); {
			runtime.Gosched()
		}
	}
	callsDone(rand.Int64N(200))
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	callsDone(100)
	stop.Store(true)
	wg.Wait()
}
