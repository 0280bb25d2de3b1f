package goredis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// maxAbandoned is how many calls may still run after their callers have left them behind. At this number, a new call
	// that might also be left behind (see inTime) fails at once.
	maxAbandoned = 1000
	// maxLate is the longest accepted time from the cancellation of a ctx to the return of the call. A client that
	// obeys deadlines does not notice a cancellation, only the deadline of the ctx. So if that deadline is further away
	// than maxLate, the call needs a goroutine of its own (see inTime).
	maxLate = time.Second
)

var errAbandoned = errors.New("too many earlier calls still wait for a server that does not answer")

// calls makes the calls of one go-redis client. If a call still runs when its ctx ends, its caller leaves it behind
// and returns. The client's own time-outs end that call later. abandoned counts such calls that still run.
type calls struct {
	refused   error                 // what Check returns; every call returns this error at once, unless it is nil
	moved     func(context.Context) // makes a Cluster client reload its masters, which may have moved; otherwise nil
	deadlines bool                  // the client obeys the deadline of a ctx on its sockets: ContextTimeoutEnabled
	abandoned atomic.Int64
}

// call runs f, which makes one call of go-redis. call returns when f returns or ctx ends, even if f still runs.
// go-redis itself checks ctx before it uses a socket. While go-redis uses the socket, it obeys only the deadline of
// ctx, and only with ContextTimeoutEnabled. Unless inTime says that this deadline is enough, f runs on a goroutine
// that call can leave behind. Every step of the Store goes through call.
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
	err = explainDenied(err)
	if c.moved != nil {
		c.moved(ctx)
	}
	if end := ended(ctx); end != nil && !errors.Is(err, end) {
		err = fmt.Errorf("%w (%w)", end, err)
	}
	return r, fmt.Errorf("goredis: %s: %w", step, err)
}

// explainDenied adds to an error that the ACL of Redis has denied a command. The text of Redis names the command.
func explainDenied(err error) error {
	if redis.HasErrorPrefix(err, "NOPERM") {
		return fmt.Errorf("the ACL of Redis denies a command: %w", err)
	}
	return err
}

// ended returns the error of ctx, or nil if ctx has not ended. The deadline of a socket may fire before the timer of
// ctx does. So ended returns DeadlineExceeded as soon as the deadline of ctx has passed.
func ended(ctx context.Context) error {
	if end, ok := ctx.Deadline(); ok && ctx.Err() == nil && !time.Now().Before(end) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// inTime reports whether go-redis alone makes a call return at most maxLate after ctx has ended. Such a call needs no
// goroutine. A goroutine would cost a third of the time of a GET on loopback.
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
	// When ctx ends, detached adds the call to c.abandoned. But f may return at the same moment, or much later. So
	// after the end of ctx, and after the return of f, one side each sets parted. The side that comes second finds
	// parted set. That side subtracts the call from c.abandoned, because f no longer runs.
	var parted atomic.Bool
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

// An exchange is the identity of one pipeline, for the errors of its calls.
type exchange struct {
	mu      sync.Mutex // guards counted
	counted []any
}

// exchangeError is the error of a call whose pipeline has failed, or whose ctx has ended before the reply. of is the
// pipeline of the call, or nil if the call was never sent.
type exchangeError struct {
	error
	of *exchange
}

func (e *exchangeError) Unwrap() error { return e.error }

// First is called by the circuit breaker of a Loader, which passes itself as who. First reports whether who must count
// the error as a failure of the store. The calls of one pipeline fail together, so for each who First returns true for
// only one of them. For a call that was never sent, First returns false.
func (e *exchangeError) First(who any) bool {
	if e.of == nil {
		return false
	}
	e.of.mu.Lock()
	defer e.of.mu.Unlock()
	if slices.Contains(e.of.counted, who) {
		return false
	}
	e.of.counted = append(e.of.counted, who)
	return true
}
