package goredis

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

const (
	// maxAbandoned is how many calls may be left behind at a time. Above it, further calls that could be left behind fail
	// at once.
	maxAbandoned = 1000
	// A client that obeys deadlines does not notice a cancelled ctx before the deadline. maxLate is how much later that
	// may be.
	maxLate = time.Second
)

var errAbandoned = errors.New("too many earlier calls still wait for a server that does not answer")

// calls makes the calls of one client. A call that outlasts its ctx is left behind, and the client's own time-outs end
// it. calls counts the calls that were left behind.
type calls struct {
	refused   error                 // what Check returns; if it is not nil, every call returns it at once
	moved     func(context.Context) // makes a Cluster client reload its masters, which may have moved; otherwise nil
	deadlines bool                  // the client obeys the deadline of a ctx on its sockets: ContextTimeoutEnabled
	abandoned atomic.Int64
}

// call runs f and returns when ctx ends, even if f goes on. go-redis itself checks ctx before it uses a socket. While
// go-redis uses the socket, it obeys only the deadline of ctx, and only if ContextTimeoutEnabled is set. So here f runs
// on a goroutine that call can leave behind, unless the deadline is enough (see inTime). Every step of the Store goes
// through call.
func call[T any](ctx context.Context, c *calls, step string, f func(context.Context) (T, error)) (T, error) {
	var r T
	if c.refused != nil {
		return r, c.refused
	}
	err := ctx.Err()
	switch {
	case err != nil:
	case c.inTime(ctx):
		r, err = f(ctx)
	case c.abandoned.Load() >= maxAbandoned:
		err = errAbandoned
	default:
		r, err = detached(ctx, c, f)
	}
	if err == nil {
		return r, nil
	}
	if c.moved != nil {
		c.moved(ctx)
	}
	if end := ended(ctx); end != nil && !errors.Is(err, end) {
		err = fmt.Errorf("%w (%w)", end, err)
	}
	return r, fmt.Errorf("goredis: %s: %w", step, err)
}

// ended returns the error of ctx. The deadline of a socket may fire before the timer of ctx does. So ended returns
// DeadlineExceeded as soon as the deadline has passed.
func ended(ctx context.Context) error {
	if end, ok := ctx.Deadline(); ok && ctx.Err() == nil && !time.Now().Before(end) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// inTime reports whether the client itself returns when ctx ends, or soon after. Such a call needs no goroutine. A
// goroutine would cost a third of the time of a GET on loopback.
func (c *calls) inTime(ctx context.Context) bool {
	end, ok := ctx.Deadline()
	return ok && c.deadlines && time.Until(end) <= maxLate
}

// detached runs f on a goroutine and waits for it until ctx ends.
func detached[T any](ctx context.Context, c *calls, f func(context.Context) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var parted atomic.Bool // each side sets it at its end; the second side takes the call out of the count
	done := make(chan result, 1)
	go func() {
		v, err := f(ctx)
		done <- result{v, err}
		if parted.Swap(true) {
			c.abandoned.Add(-1)
		}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
	}
	c.abandoned.Add(1)
	if parted.Swap(true) {
		c.abandoned.Add(-1)
		r := <-done
		return r.value, r.err
	}
	var none T
	return none, ctx.Err()
}
