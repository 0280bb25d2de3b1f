package goredis

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestCallReturnsWhenItsContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c calls
		answers := make(chan struct{})
		silent := func(context.Context) (int, error) { <-answers; return 1, nil }
		var wg sync.WaitGroup
		for range maxAbandoned {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if _, err := call(ctx, &c, "get", silent); !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if n := c.abandoned.Load(); n != maxAbandoned {
			t.Fatalf("%d calls are counted as left behind, want %d", n, maxAbandoned)
		}
		if _, err := call(t.Context(), &c, "get", silent); !errors.Is(err, errAbandoned) {
			t.Errorf("one call above the limit: %v", err)
		}
		close(answers)
		synctest.Wait()
		if n := c.abandoned.Load(); n != 0 {
			t.Errorf("%d calls are still counted as left behind", n)
		}
		if n, err := call(t.Context(), &c, "get", silent); n != 1 || err != nil {
			t.Errorf("%d, %v although the server answers again", n, err)
		}
	})
}

// inTime must be true only for a client that obeys deadlines and a ctx whose deadline is at most maxLate away.
func TestCallInTime(t *testing.T) {
	near, cancel := context.WithTimeout(t.Context(), maxLate)
	defer cancel()
	far, cancel := context.WithTimeout(t.Context(), 2*maxLate)
	defer cancel()
	for _, c := range []struct {
		deadlines bool
		ctx       context.Context
		want      bool
	}{
		{true, near, true}, {true, far, false}, {true, t.Context(), false}, {false, near, false},
	} {
		if got := (&calls{deadlines: c.deadlines}).inTime(c.ctx); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

// The deadline of a socket may pass before the timer of the ctx fires. Even then call must return the error of the
// ctx. If the ctx has not ended, call must return only the error of the function that it ran.
func TestCallReturnsTheErrorOfItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithDeadline(t.Context(), time.Now())
		defer cancel()
		timeout := errors.New("i/o timeout")
		if err := ended(ctx); err != context.DeadlineExceeded {
			t.Error(err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		_, err := call(ctx, new(calls), "get", func(context.Context) (int, error) {
			cancel()
			return 0, timeout
		})
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = call(ctx, new(calls), "get", func(context.Context) (int, error) { return 0, timeout })
		if !errors.Is(err, timeout) || err.Error() != "goredis: get: i/o timeout" {
			t.Error(err)
		}
	})
}
