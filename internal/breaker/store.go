package breaker

import (
	"context"
	"errors"
	"time"

	"github.com/refill-go/refill/driver"
)

// The methods in this file, which are the steps of a refill, go through the breaker. All other methods of driver.Store
// are promoted from the store, so they bypass the breaker.

// call makes one call of the store, unless the breaker is open.
func call[T any](b *Breaker, key string, f func() (T, error)) (T, error) {
	if b.open.Load() {
		var none T
		return none, ErrOpen
	}
	began := time.Now()
	v, err := f()
	switch {
	case err == nil:
		if b.failed.Load() != 0 { // reading a shared cache line is cheaper than writing it
			b.failed.Store(0)
		}
		b.health.answered()
	case time.Since(began) >= b.timeout/10 && b.first(err):
		b.health.doubt(key, b.timeout)
		if b.failed.Add(1) >= openAfter {
			b.trip(key, err)
		}
	}
	return v, err
}

// first reports whether err tells b of a failure that b has not counted yet. A store may send many calls together in
// one exchange, and all these calls fail if the exchange fails. The error of such a call has a method First. For each
// exchange, First(b) returns true when it is called for the first time, and then false. For a call that the store has
// not sent, First returns false. An error without this method stands for a failure of its own.
func (b *Breaker) first(err error) bool {
	var shared interface{ First(who any) bool }
	return !errors.As(err, &shared) || shared.First(b)
}

// Get implements driver.Store.
func (b *Breaker) Get(ctx context.Context, key string) ([]byte, error) {
	return call(b, key, func() ([]byte, error) { return b.Store.Get(ctx, key) })
}

// GetMany implements driver.Store.
func (b *Breaker) GetMany(ctx context.Context, keys ...string) ([][]byte, error) {
	return call(b, first(keys), func() ([][]byte, error) { return b.Store.GetMany(ctx, keys...) })
}

// Acquire implements driver.Store.
func (b *Breaker) Acquire(ctx context.Context, r driver.AcquireRequest) (driver.AcquireResult, error) {
	return call(b, r.Key, func() (driver.AcquireResult, error) { return b.Store.Acquire(ctx, r) })
}

// Publish implements driver.Store.
func (b *Breaker) Publish(ctx context.Context, r driver.PublishRequest) (driver.PublishResult, error) {
	return call(b, r.Key, func() (driver.PublishResult, error) { return b.Store.Publish(ctx, r) })
}

// Fail implements driver.Store.
func (b *Breaker) Fail(ctx context.Context, r driver.FailRequest) error {
	return callErr(b, r.Key, func() error { return b.Store.Fail(ctx, r) })
}

// Release implements driver.Store.
func (b *Breaker) Release(ctx context.Context, key, token string) error {
	return callErr(b, key, func() error { return b.Store.Release(ctx, key, token) })
}

// Tags implements driver.Store.
func (b *Breaker) Tags(ctx context.Context, tags ...string) ([]driver.TagState, error) {
	return call(b, first(tags), func() ([]driver.TagState, error) { return b.Store.Tags(ctx, tags...) })
}

// EnsureTags implements driver.Store.
func (b *Breaker) EnsureTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	return callErr(b, first(tags), func() error { return b.Store.EnsureTags(ctx, reach, keep, tags...) })
}

func callErr(b *Breaker, key string, f func() error) error {
	_, err := call(b, key, func() (struct{}, error) { return struct{}{}, f() })
	return err
}

// first returns the key that the probe is to ask about, after a call with many keys has failed. If the call is about
// tags, the result is a tag. ask may use a tag in place of a key, because ask reads the state of a tag in any case.
func first(keys []string) string {
	if len(keys) == 0 {
		return ""
	}
	return keys[0]
}
