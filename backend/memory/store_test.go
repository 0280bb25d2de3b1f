package memory

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill/driver"
)

// In a bubble of testing/synctest the clock stands still between two calls. The test changes a tag, begins a load and
// invalidates the tag. The load must begin after the first change, and not after the second.
func TestAcquireAfterATagChangeInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, ctx := New(), t.Context()
		const key, tag = "thing:1", "thing:red"
		for i := range 3 {
			for _, change := range []func() error{
				func() error { return m.InvalidateTags(ctx, "a#1", time.Minute, tag) },
				func() error { return m.ExpireTags(ctx, "a#1", time.Minute, tag) },
			} {
				if err := change(); err != nil {
					t.Fatal(err)
				}
				states, _ := m.Tags(ctx, tag)
				last := states[0].Invalidated
				if states[0].Expired.After(last) {
					last = states[0].Expired
				}
				token := fmt.Sprint("a#", i)
				r, err := m.Acquire(ctx, driver.AcquireRequest{
					Key: key, Token: token, LeaseTTL: time.Minute, ClaimTTL: time.Minute,
				})
				if err != nil || r.State != driver.Acquired || r.Now.UnixMicro() <= last.UnixMicro() {
					t.Errorf("acquired: %+v, %v, after a change of a tag at %v", r, err, last)
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

// The test writes ten times as many tag states as the limit allows. Each state must still be known right after it was
// written. At the end the number of states must equal the limit.
func TestTagsAreBounded(t *testing.T) {
	m, ctx := New(), t.Context()
	m.maxTags = 10
	for i := range 100 {
		tag := fmt.Sprint("thing:", i)
		if err := m.EnsureTags(ctx, time.Hour, time.Minute, tag); err != nil {
			t.Fatal(err)
		}
		if states, err := m.Tags(ctx, tag); err != nil || !states[0].Known {
			t.Fatalf("%s: %+v, %v", tag, states, err)
		}
	}
	if n := len(m.tags); n != m.maxTags {
		t.Errorf("%d tag states, want %d", n, m.maxTags)
	}
}
