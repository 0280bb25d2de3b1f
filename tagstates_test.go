package refill_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests tag states that the store has lost, and slow reads of tag states.

// The store restarts and loses all tag states. Three seconds later four nodes ask for one key with a tag. The first
// publication creates a new tag state, in which its value must be valid for all nodes. So the fleet must load the key
// once.
func TestTagsAfterARestart(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		first := memory.New()
		spies := make([]*spy, 4)
		nodes := make([]*refill.Loader[string], 4)
		for i := range nodes {
			spies[i] = newSpy(first)
			nodes[i] = node(t, d.load, refill.Config{TTL: time.Minute, Tags: []string{"all"}, Shared: spies[i]})
			get(t, nodes[i], fmt.Sprint("before", i))
		}
		for _, s := range spies {
			s.cut(true)
		}
		for _, s := range spies {
			s.renameTag = func(tag string) string { return tag + " after the restart" }
			s.cut(false)
		}
		time.Sleep(3 * time.Second)
		before := d.loads.Load()
		for range 2 {
			var wg sync.WaitGroup
			for _, l := range nodes {
				wg.Go(func() { get(t, l, "k") })
			}
			wg.Wait()
		}
		if n := d.loads.Load() - before; n != 1 {
			t.Errorf("got %d loads for one key on four nodes, want 1", n)
		}
	})
}

// The store loses the state of a tag while L1 is off, so each Get reads the tag state. The first of 100 Gets of a value
// with that tag loads, and its publication creates a new tag state. For the other Gets the value must be valid.
func TestALostTagStateWithoutL1(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s := newSpy(memory.New())
		l := node(t, d.load, refill.Config{TTL: time.Minute, LocalTTL: -1, Tags: []string{"all"}, Shared: s})
		get(t, l, "before")
		s.renameTag = func(tag string) string { return tag + " lost" }
		time.Sleep(3 * time.Second)
		for range 100 {
			get(t, l, "k")
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads for 100 Gets after the loss, want 1", n-1)
		}
	})
}

// slowTags is a store. Calls of its Get and GetMany take the time in the field get. Calls of its Tags take the time in
// the field tags.
type slowTags struct {
	driver.Store
	get, tags time.Duration
}

// wait waits for d, or until ctx ends. In the second case, wait returns the error of ctx.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *slowTags) Get(ctx context.Context, key string) ([]byte, error) {
	if err := wait(ctx, s.get); err != nil {
		return nil, err
	}
	return s.Store.Get(ctx, key)
}

func (s *slowTags) Tags(ctx context.Context, tags ...string) ([]driver.TagState, error) {
	if err := wait(ctx, s.tags); err != nil {
		return nil, err
	}
	return s.Store.Tags(ctx, tags...)
}

// The read of a value takes 240 ms, and the read of its tag states takes 240 ms. A Get with a deadline of 260 ms must
// return after 260 ms.
func TestADeadlineDuringTheReadOfTags(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		cfg := refill.Config{TTL: time.Minute, Tags: []string{"all"}, Shared: shared}
		get(t, node(t, (&db{}).load, cfg), "k")
		cfg.Shared = &slowTags{Store: shared, get: 240 * ms, tags: 240 * ms}
		l := node(t, never(t), cfg)
		if took, err := getFor(t, l, "k", 260*ms); err == nil || took != 260*ms {
			t.Errorf("got %v after %v, want the error of the ctx after 260 ms", err, took)
		}
		synctest.Wait()
		time.Sleep(time.Second)
	})
}

func (s *slowTags) GetMany(ctx context.Context, keys ...string) ([][]byte, error) {
	if err := wait(ctx, s.get); err != nil {
		return nil, err
	}
	return s.Store.GetMany(ctx, keys...)
}

// A GetMany reads fresh values with a tag. The read of the values takes 200 ms, and the read of the tag states takes
// 200 ms. No value may be loaded, because the store answers each call within StoreTimeout.
func TestGetManyWithSlowTags(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		cfg := refill.Config{TTL: time.Minute, Tags: []string{"all"}, Shared: shared}
		first := node(t, (&db{}).load, cfg)
		keys := names(0, 20)
		for _, key := range keys {
			get(t, first, key)
		}
		cfg.Shared = &slowTags{Store: shared, get: 200 * ms, tags: 200 * ms}
		if got, err := node(t, never(t), cfg).GetMany(t.Context(), keys); err != nil || len(got) != len(keys) {
			t.Errorf("got %d values, %v, want all values", len(got), err)
		}
	})
}

// An InvalidateTag fails, because the store does not answer. When the store answers again, it still has the old value
// and the old state of the tag. The next Get on this node must complete the InvalidateTag before it judges the value.
func TestAGetCompletesAPendingInvalidateTag(t *testing.T) {
	for name, ask := range map[string]func(t *testing.T, l *refill.Loader[string]) string{
		"Get": func(t *testing.T, l *refill.Loader[string]) string { return get(t, l, "red:1") },
		"GetMany": func(t *testing.T, l *refill.Loader[string]) string {
			got, err := l.GetMany(t.Context(), []string{"red:1", "red:2"})
			if err != nil {
				t.Error(err)
			}
			return got["red:1"]
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				s := newSpy(memory.New())
				l := node(t, d.tagged, refill.Config{TTL: time.Hour, Shared: s, LocalTTL: -1})
				get(t, l, "red:1")
				s.down.Store(true)
				d.version.Store(1)
				if err := l.InvalidateTag(t.Context(), "red"); err == nil {
					t.Fatal("InvalidateTag succeeded, want an error: the store does not answer")
				}
				s.down.Store(false)
				if v := ask(t, l); v != "red:1 v1" {
					t.Errorf("got %q, want the value from after the InvalidateTag", v)
				}
			})
		})
	}
}

// 20 Gets ask for 20 fresh values with one tag, a millisecond apart. A call of Tags takes 100, 150 or 200 ms, which is
// less than StoreTimeout (250 ms). The first Get makes a call of Tags. The other Gets wait for its end, and then share
// a second call. They wait for up to 400 ms in all, which must not count as a time-out. So the Gets must not load.
func TestSharedCallsAboutTags(t *testing.T) {
	for _, took := range []time.Duration{100 * ms, 150 * ms, 200 * ms} {
		t.Run(took.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				shared := memory.New()
				cfg := refill.Config{TTL: time.Minute, Tags: []string{"all"}, Shared: shared}
				first := node(t, (&db{}).load, cfg)
				for _, key := range names(0, 20) {
					get(t, first, key)
				}
				cfg.Shared = &slowTags{Store: shared, tags: took}
				l := node(t, never(t), cfg)
				var wg sync.WaitGroup
				for _, key := range names(0, 20) {
					time.Sleep(ms)
					wg.Go(func() { get(t, l, key) })
				}
				wg.Wait()
			})
		})
	}
}

// 20 callers wait for calls of Tags, and leave at their deadlines. Then the test closes the Loader. Close must wait
// until all calls of Tags have ended. Otherwise a goroutine would still run when the bubble ends, and the bubble would
// fail the test.
func TestCloseDuringACallAboutTags(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		cfg := refill.Config{TTL: time.Minute, Tags: []string{"all"}, Shared: shared}
		first := node(t, (&db{}).load, cfg)
		for _, key := range names(0, 20) {
			get(t, first, key)
		}
		cfg.Shared = &slowTags{Store: shared, tags: 200 * ms}
		l := node(t, (&db{}).load, cfg)
		var wg sync.WaitGroup
		for _, key := range names(0, 20) {
			time.Sleep(ms)
			wg.Go(func() { _, _ = getFor(t, l, key, 210*ms) })
		}
		wg.Wait()
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Two loads of one node give their values a tag that the store does not know. The load of a begins first, and ends
// last. The publication of b makes the tag known. The value of a must be valid nevertheless: a must be loaded once.
func TestANewTagDuringAnEarlierLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 5 * time.Second}
		l := node(t, d.tagged, refill.Config{TTL: time.Hour, LocalTTL: -1})
		first := behind(t, l, "red:a")
		time.Sleep(2 * time.Second)
		d.slow(0)
		get(t, l, "red:b")
		first()
		get(t, l, "red:a")
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2: one of each key", n)
		}
	})
}
