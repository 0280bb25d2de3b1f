package refill

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// This file tests a batch by itself: moments that a test through the API would have to be lucky to meet.

func batchOf(t *testing.T, load func(context.Context, []string) (map[string]string, error)) *batch[string] {
	t.Helper()
	l, err := NewBulk("thing", load, Config{TTL: time.Minute, MaxLoads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return newBatch(l)
}

func nothing(context.Context, []string) (map[string]string, error) { return nil, nil }

// All have left a batch at the moment at which it gets its place among MaxLoads: the place is free again.
func TestBatchThatIsLeftFreesItsSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := batchOf(t, nothing).l
		for range 64 { // which of the two is seen first is chance
			b := newBatch(l)
			s := b.enter(&call[string]{given: "k"})
			b.close()
			b.acquire()
			s.leave()
			synctest.Wait()
			if n := len(l.slots); n != 0 {
				t.Fatalf("%d places are taken by nobody", n)
			}
		}
	})
}

// A flight ends before the goroutine of its load has begun: the load gives up at once, and the batch still runs for others.
func TestSeatThatWasLeftBeforeItsLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := batchOf(t, func(_ context.Context, keys []string) (map[string]string, error) {
			return map[string]string{keys[0]: "row"}, nil
		})
		one, two := b.enter(&call[string]{given: "one"}), b.enter(&call[string]{given: "two"})
		b.close()
		one.leave()
		one.leave() // again, as fly does
		dead, cancel := context.WithCancel(context.WithValue(t.Context(), fillKey{}, new(Fill)))
		cancel()
		if r := one.load(dead); r.err == nil {
			t.Errorf("loaded %+v for a flight that had ended", r)
		}
		if r := two.load(context.WithValue(t.Context(), fillKey{}, new(Fill))); r.value != "row" || r.err != nil {
			t.Errorf("the other one got %+v", r)
		}
	})
}

// Everybody gives up between the batch's decision to run and the call: the call begins with a ctx that has ended.
func TestBatchThatIsGivenUpAsItStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended bool
		b := batchOf(t, func(ctx context.Context, _ []string) (map[string]string, error) {
			select {
			case <-ctx.Done():
				ended = true
			case <-time.After(time.Second):
			}
			return nil, ctx.Err()
		})
		s := b.enter(&call[string]{given: "k"})
		s.ctx, s.fill, s.left = t.Context(), new(Fill), true
		b.open, b.inside, b.asked, b.running, b.wanted = false, 0, []*seat[string]{s}, true, 1
		s.giveUp()
		b.run(b.asked)
		if !ended {
			t.Error("the load function ran on for nobody")
		}
	})
}
