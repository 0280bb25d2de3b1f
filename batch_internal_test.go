package refill

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// This file tests a batch by itself, at moments that a test through the API would meet only by chance.

func batchOf(t *testing.T, load func(context.Context, []string) (map[string]string, error)) *batch[string] {
	t.Helper()
	l, err := NewBulk("thing", load, Config{TTL: time.Minute, MaxLoads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return newBatch(l)
}

func loadNothing(context.Context, []string) (map[string]string, error) { return nil, nil }

// A batch gets its load slot at the moment when its last entry leaves. The batch frees the slot.
func TestBatchThatIsLeftFreesItsSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := batchOf(t, loadNothing).l
		for range 64 { // the batch handles the two events in random order
			b := newBatch(l)
			s := b.enter("k")
			b.close()
			b.acquireSlot()
			s.leave()
			synctest.Wait()
			if n := len(l.loadSlots); n != 0 {
				t.Fatalf("got %d load slots in use without a load, want 0", n)
			}
		}
	})
}

// A refill ends before the goroutine of its load has begun. The load returns at once, and the batch runs for the other
// entries.
func TestBatchEntryThatIsLeftBeforeItsLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := batchOf(t, func(_ context.Context, keys []string) (map[string]string, error) {
			return map[string]string{keys[0]: "row"}, nil
		})
		one, two := b.enter("one"), b.enter("two")
		b.close()
		one.leave()
		one.leave() // again, as run does
		ended, cancel := context.WithCancel(context.WithValue(t.Context(), fillKey{}, new(Fill)))
		cancel()
		if r := one.load(ended); r.err == nil {
			t.Errorf("got %+v for a refill that had ended, want an error", r)
		}
		if r := two.load(context.WithValue(t.Context(), fillKey{}, new(Fill))); r.value != "row" || r.err != nil {
			t.Errorf("the other entry got %+v, want its row", r)
		}
	})
}

// The batch decides to run. All callers leave. Then the batch calls the load function, with a ctx that has ended.
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
		s := b.enter("k")
		s.ctx, s.fill, s.left = t.Context(), new(Fill), true
		b.open, b.pending, b.asked, b.running, b.awaited = false, 0, []*batchEntry[string]{s}, true, 1
		s.giveUp()
		b.run(b.asked)
		if !ended {
			t.Error("the load function's ctx did not end, although all callers had left")
		}
	})
}
