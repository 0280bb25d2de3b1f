package refill_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// slowPipe is a store behind a slow network. It sends one value at a time, and takes the time in the field perKey for
// each value. The field calls counts the calls of Get and GetMany.
type slowPipe struct {
	driver.Store
	perKey time.Duration
	calls  atomic.Int64
	line   chan struct{} // has room for one element, and is full while a value is sent
}

func (s *slowPipe) Get(ctx context.Context, key string) ([]byte, error) {
	records, err := s.GetMany(ctx, key)
	if err != nil {
		return nil, err
	}
	return records[0], nil
}

func (s *slowPipe) GetMany(ctx context.Context, keys ...string) ([][]byte, error) {
	s.calls.Add(1)
	if err := s.send(ctx, len(keys)); err != nil {
		return nil, err
	}
	return s.Store.GetMany(ctx, keys...)
}

func (s *slowPipe) Acquire(ctx context.Context, r driver.AcquireRequest) (driver.AcquireResult, error) {
	if err := s.send(ctx, 1); err != nil {
		return driver.AcquireResult{}, err
	}
	return s.Store.Acquire(ctx, r)
}

func (s *slowPipe) send(ctx context.Context, values int) error {
	for range values {
		select {
		case s.line <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		time.Sleep(s.perKey)
		<-s.line
	}
	return nil
}

// 1,024 keys are fresh in the store, but the store cannot send all their values within one StoreTimeout. GetMany must
// return all values without a load. Then the store becomes fast. After some further calls of GetMany, one GetMany must
// read all values with a single call of the store.
func TestGetManyOfLargeValues(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		keys := make([]string, 1024)
		for i := range keys {
			keys[i] = fmt.Sprint(i)
		}
		cfg := refill.Config{TTL: time.Hour, Shared: shared, LocalTTL: -1}
		d := &table{}
		if _, err := bulk(t, d, cfg).GetMany(t.Context(), keys); err != nil {
			t.Fatal(err)
		}
		pipe := &slowPipe{Store: shared, perKey: 5 * ms, line: make(chan struct{}, 1)}
		cfg.Shared = pipe
		d.asked()
		l := bulk(t, d, cfg)
		for range 2 {
			got, err := l.GetMany(t.Context(), keys)
			if loads := d.asked(); err != nil || len(got) != len(keys) || len(loads) != 0 {
				t.Fatalf("got %d values, %v after %d loads, want all values without a load", len(got), err, len(loads))
			}
		}
		pipe.perKey = 10 * time.Microsecond
		for range 8 { // GetMany reads in lots of keys; each fast read makes the next lot larger
			pipe.calls.Store(0)
			if got, err := l.GetMany(t.Context(), keys); err != nil || len(got) != len(keys) {
				t.Fatalf("got %d values, %v, want all values", len(got), err)
			}
		}
		if n := pipe.calls.Load(); n != 1 {
			t.Errorf("got %d exchanges with a fast store, want 1", n)
		}
	})
}
