package refill

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// In a bubble the clock stands still between two calls. All the same a load that begins after a mark is not void, and
// one that began before is.
func TestMemoryBeginsAndMarksInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, ctx := NewMemory(), t.Context()
		const key, tag = "thing:1", "thing:red"
		for i := range 3 {
			for _, void := range []func() error{
				func() error { return m.InvalidateTags(ctx, "a#1", time.Minute, tag) },
				func() error { return m.ExpireTags(ctx, "a#1", time.Minute, tag) },
			} {
				if err := void(); err != nil {
					t.Fatal(err)
				}
				states, _ := m.Tags(ctx, tag)
				last := states[0].Invalidated
				if states[0].Expired.After(last) {
					last = states[0].Expired
				}
				token := fmt.Sprint("a#", i)
				r, err := m.Begin(ctx, Bid{Key: key, Token: token, LeaseTTL: time.Minute, ClaimTTL: time.Minute})
				if err != nil || r.State != BeginTaken || micros(r.Now) <= micros(last) {
					t.Errorf("begun: %+v, %v, after a mark of %v", r, err, last)
				}
				if err := m.InvalidateTags(ctx, "a#1", time.Minute, tag); err != nil {
					t.Fatal(err)
				}
				if states, _ = m.Tags(ctx, tag); states[0].Invalidated.Before(r.Now) {
					t.Errorf("invalidated at %v, after a load that began at %v", states[0].Invalidated, r.Now)
				}
				if err := m.Release(ctx, key, token); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// Marks that nobody asks for any more are dropped when there are too many, but never the one that is being held.
func TestMemoryBoundsItsMarks(t *testing.T) {
	m, ctx := NewMemory(), t.Context()
	m.limit = 10
	for i := range 100 {
		tag := fmt.Sprint("thing:", i)
		if err := m.HoldTags(ctx, time.Hour, time.Minute, tag); err != nil {
			t.Fatal(err)
		}
		if states, err := m.Tags(ctx, tag); err != nil || !states[0].Known {
			t.Fatalf("%s: %+v, %v", tag, states, err)
		}
	}
	if n := len(m.marks); n != m.limit {
		t.Errorf("%d marks, want %d", n, m.limit)
	}
}
