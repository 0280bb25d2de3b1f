package deadline

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

type key struct{}

func TestContextEndsAtItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		timeouts := New(320 * time.Millisecond)
		parent, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "v"))
		ctx := timeouts.Context(parent)
		end, ok := ctx.Deadline()
		if !ok || time.Until(end) != 320*time.Millisecond {
			t.Errorf("got a deadline in %v, %v; want 320ms", time.Until(end), ok)
		}
		cancel()
		time.Sleep(319 * time.Millisecond)
		if err := ctx.Err(); err != nil || ctx.Value(key{}) != "v" {
			t.Errorf("got %v, value %v; want no end with the parent, and the parent's value", err, ctx.Value(key{}))
		}
		<-ctx.Done()
		if err := ctx.Err(); !errors.Is(err, context.DeadlineExceeded) || time.Until(end) != 0 {
			t.Errorf("got %v, %v after the deadline; want DeadlineExceeded at the deadline", err, time.Since(end))
		}
	})
}

// Contexts that are made at nearly the same time share a timer, and end together. No context may end before 31/32 of
// its time is over.
func TestContextsShareTimers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		timeouts := New(320 * time.Millisecond)
		dones := map[<-chan struct{}]bool{}
		for range 100 {
			ctx := timeouts.Context(context.Background())
			end, _ := ctx.Deadline()
			if left := time.Until(end); left > 320*time.Millisecond || left < 310*time.Millisecond {
				t.Errorf("got a deadline in %v, want 310 to 320 ms", left)
			}
			dones[ctx.Done()] = true
			time.Sleep(time.Millisecond)
		}
		if len(dones) != 10 {
			t.Errorf("got %d timers for 100 contexts in 100 ms, want 10", len(dones))
		}
		last := timeouts.Context(context.Background())
		<-last.Done()
		for done := range dones {
			<-done // each ends
		}
	})
}

func TestContextsOfManyGoroutines(t *testing.T) {
	timeouts := New(20 * time.Millisecond)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				ctx := timeouts.Context(context.Background())
				if end, _ := ctx.Deadline(); time.Until(end) > 20*time.Millisecond {
					t.Errorf("got a deadline in %v, want at most 20 ms", time.Until(end))
				}
			}
			<-timeouts.Context(context.Background()).Done()
		})
	}
	wg.Wait()
}
