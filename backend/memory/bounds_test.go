package memory

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill/driver"
)

// fill stores a value of the given size under key.
func fill(t *testing.T, m *Store, key string, size int, keep time.Duration) {
	t.Helper()
	acquire(t, m, key)
	p := driver.PublishRequest{Key: key, Token: "a#1", Record: []byte(strings.Repeat("x", size)), Keep: keep}
	if r, err := m.Publish(t.Context(), p); err != nil || r != driver.Stored {
		t.Fatalf("Publish(%s): %v, %v", key, r, err)
	}
}

// acquire takes the lease and the claim of an absent key for the token a#1, for an hour.
func acquire(t *testing.T, m *Store, key string) {
	t.Helper()
	req := driver.AcquireRequest{Key: key, Token: "a#1", LeaseTTL: time.Hour, ClaimTTL: time.Hour}
	r, err := m.Acquire(t.Context(), req)
	if err != nil || r.State != driver.Acquired {
		t.Fatalf("Acquire(%s): %+v, %v", key, r, err)
	}
}

// counted returns the sum of the costs of all items, without the count that the Store keeps in bytes.
func (s *Store) counted() (bytes int64) {
	for key, i := range s.items {
		bytes += i.cost(key)
	}
	return bytes
}

// The test stores 3,000 values of 20 KB in a store of 1 MiB. After each value, the store must cost at most 1 MiB.
// Then the test stores values of other sizes and invalidates some of them. The store's count of bytes must be right
// at the end.
func TestBytesAreBounded(t *testing.T) {
	const limit = 1 << 20
	m := NewSized(0, limit)
	for i := range 3000 {
		fill(t, m, fmt.Sprint("thing:", i), 20_000, time.Hour)
		if m.bytes > limit {
			t.Fatalf("%d bytes after %d values, want at most %d", m.bytes, i+1, limit)
		}
	}
	if len(m.items) < 40 {
		t.Errorf("%d values are left, want about 50", len(m.items))
	}
	for i := range 1000 {
		fill(t, m, fmt.Sprint("other:", i), i, time.Hour)
		if err := m.Invalidate(t.Context(), "a#2", fmt.Sprint("other:", i/2)); err != nil {
			t.Fatal(err)
		}
	}
	if got := m.counted(); got != m.bytes || got > limit {
		t.Errorf("the items cost %d bytes, the store counts %d; want at most %d", got, m.bytes, limit)
	}
}

// The test stores a small value, and then a value that alone is above the limit. Only the small value may be kept.
func TestAValueAboveTheLimitIsNotKept(t *testing.T) {
	m := NewSized(0, 10_000)
	fill(t, m, "thing:small", 100, time.Hour)
	fill(t, m, "thing:large", 20_000, time.Hour)
	if b, err := m.Get(t.Context(), "thing:large"); b != nil || err != nil {
		t.Errorf("got %d bytes, %v, want no value", len(b), err)
	}
	if b, err := m.Get(t.Context(), "thing:small"); len(b) != 100 || err != nil {
		t.Errorf("got %d bytes, %v, want the small value", len(b), err)
	}
}

func TestEntriesAreBounded(t *testing.T) {
	m := NewSized(100, 0)
	for i := range 10_000 {
		fill(t, m, fmt.Sprint("thing:", i), 10, time.Hour)
	}
	if n := len(m.items); n > 100 || n < 90 {
		t.Errorf("%d values, want about 100", n)
	}
}

// The test stores 10,000 values, tag states and locks that end after a second. Then it stores 10,000 of each that
// live for an hour. At most 1,000 of each that have ended may be left, although no limit is reached and no caller
// asks for them.
func TestTheDeadAreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, ctx := New(), t.Context()
		add := func(name string, life time.Duration) {
			for i := range 10_000 {
				key := fmt.Sprint(name, ":", i)
				fill(t, m, key, 1000, life)
				if err := m.EnsureTags(ctx, time.Second, life, key); err != nil {
					t.Fatal(err)
				}
				if r, err := m.TryLock(ctx, key, "a#1", life); err != nil || !r.Won {
					t.Fatal(r, err)
				}
			}
		}
		add("dead", time.Second)
		time.Sleep(2 * time.Second)
		add("alive", time.Hour)
		for what, n := range map[string]int{"values": len(m.items), "tag states": len(m.tags), "locks": len(m.locks)} {
			if n < 10_000 || n > 11_000 {
				t.Errorf("%d %s, want the 10,000 that are alive and at most 1,000 dead", n, what)
			}
		}
		if m.bytes != m.counted() {
			t.Errorf("the store counts %d bytes, want %d", m.bytes, m.counted())
		}
	})
}

// The test fills a store far above its limits with leases, back-offs and locks, and with values beside some of them.
// No lease, claim, back-off, note or lock may be dropped. The values must be dropped.
func TestLeasesAreNotEvicted(t *testing.T) {
	m, ctx := NewSized(100, 10_000), t.Context()
	const n = 500
	for i := range n {
		key := fmt.Sprint("failed:", i)
		acquire(t, m, key)
		f := driver.FailRequest{Key: key, Token: "a#1", Failure: "boom", TTL: time.Hour, HoldAll: i%2 == 0}
		if err := m.Fail(ctx, f); err != nil {
			t.Fatal(err)
		}
		acquire(t, m, fmt.Sprint("held:", i))
		if r, err := m.TryLock(ctx, fmt.Sprint("job:", i), "a#1", time.Hour); err != nil || !r.Won {
			t.Fatal(r, err)
		}
	}
	for i := range 2000 {
		fill(t, m, fmt.Sprint("thing:", i), 100, time.Hour)
	}
	values := 0
	for i := range 2000 {
		if b, err := m.Get(ctx, fmt.Sprint("thing:", i)); err != nil {
			t.Fatal(err)
		} else if b != nil {
			values++
		}
	}
	if values > 100 {
		t.Errorf("%d values in a full store", values)
	}
	for i := range n {
		mine, err := m.Renew(ctx, time.Hour, driver.Lease{Key: fmt.Sprint("held:", i), Token: "a#1"})
		if err != nil || !mine[0] {
			t.Fatalf("the lease of held:%d is gone: %v, %v", i, mine, err)
		}
		r, err := m.Acquire(ctx, driver.AcquireRequest{Key: fmt.Sprint("failed:", i), Token: "b#1", Mode: driver.Look})
		if err != nil || r.Failure != "boom" {
			t.Fatalf("the failure of failed:%d is gone: %+v, %v", i, r, err)
		}
		if mine, err := m.Extend(ctx, fmt.Sprint("job:", i), "a#1", time.Hour); err != nil || !mine {
			t.Fatalf("the lock job:%d is gone: %v, %v", i, mine, err)
		}
	}
}
