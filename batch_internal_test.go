package refill

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// This file tests the type batch, which is one call of a bulk load function. The tests use batch directly, to force
// orders of events that tests of the public API would produce only by chance.

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

// A batch has one entry and waits for a load slot. At the moment when the batch gets the slot, the entry leaves, so the
// batch has no key to load. The batch must give the slot back.
func TestBatchThatIsLeftFreesItsSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := batchOf(t, loadNothing).l
		for range 64 { // leave and the grant of the slot happen in random order
			l.loadSlots <- struct{}{}
			b := newBatch(l)
			s := b.enter("k")
			b.close()
			b.acquireSlot(true)
			<-l.loadSlots
			s.leave()
			synctest.Wait()
			if n := len(l.loadSlots); n != 0 {
				t.Fatalf("got %d load slots in use without a load, want 0", n)
			}
		}
	})
}

// A batch has two entries, which belong to the refills of two keys. The first refill ends before it asks the batch to
// load its key. A later call of load for the first entry must return an error at once. The batch must still load the
// second entry.
func TestBatchEntryThatIsLeftBeforeItsLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := batchOf(t, func(_ context.Context, keys []string) (map[string]string, error) {
			return map[string]string{keys[0]: "row"}, nil
		})
		one, two := b.enter("one"), b.enter("two")
		b.close()
		one.leave()
		one.leave() // a second leave must have no effect, because refill.run always calls leave at its end
		ctx := context.WithValue(t.Context(), fillKey{}, new(Fill))
		_, cancel := one.limit(ctx)
		cancel()
		if r := one.load(); r.err == nil {
			t.Errorf("got %+v for a refill that had ended, want an error", r)
		}
		_, cancel = two.limit(ctx)
		defer cancel()
		if r := two.load(); r.value != "row" || r.err != nil {
			t.Errorf("the other entry got %+v, want its row", r)
		}
	})
}

// The last caller of a batch leaves while the batch is about to call the load function. The ctx that the load function
// then gets must end.
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
		_, cancel := s.limit(context.WithValue(t.Context(), fillKey{}, new(Fill)))
		defer cancel()
		s.left = true
		b.open, b.pending, b.asked, b.running, b.awaited = false, 0, []*batchEntry[string]{s}, true, 1
		s.giveUp()
		b.run(b.asked)
		if !ended {
			t.Error("the load function's ctx did not end, although all callers had left")
		}
	})
}
