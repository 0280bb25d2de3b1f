package refill_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests tags: Fill.Tag, InvalidateTag, ExpireTag, and the tag states in the store.

// When InvalidateTag returns, all values of the tag are invalid in the store. The announcement then invalidates them in
// the L1 of other nodes.
func TestInvalidateTag(t *testing.T) {
	for name, localTTL := range map[string]time.Duration{"with L1": 0, "without L1": -1} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				s, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour, LocalTTL: localTTL})
				keys := []string{"red:1", "red:2", "red,blue:3", "blue:4", "green:5", strings.Repeat("x", 300) + ":6"}
				for _, key := range keys {
					get(t, l, key)
					get(t, peer, key)
				}
				time.Sleep(ms)
				if n := d.loads.Load(); n != int64(len(keys)) {
					t.Fatalf("got %d loads of %d keys, want one each", n, len(keys))
				}
				d.version.Store(1)
				s.mute.Store(localTTL < 0) // without L1 the result must not depend on an announcement
				if err := peer.InvalidateTag(t.Context(), "red", "red", strings.Repeat("x", 300)); err != nil {
					t.Fatal(err)
				}
				if localTTL >= 0 {
					synctest.Wait()
				}
				for i, key := range keys {
					want := map[bool]string{true: " v1", false: " v0"}[i < 3 || i == 5]
					for n, node := range []*refill.Loader[string]{l, peer} {
						if v := get(t, node, key); v != key+want {
							t.Errorf("node %d, key %.10s…: got %q, want it to end with %q", n, key, v, want)
						}
					}
				}
				if n := d.loads.Load(); n != int64(len(keys))+4 {
					t.Errorf("got %d loads, want %d: the first ones, and one each of the four invalid values", n, len(keys)+4)
				}
				if r, err := l.GetResult(t.Context(), "red,blue:3"); err != nil || fmt.Sprint(r.Tags) != "[red blue]" {
					t.Errorf("got tags %v, %v, want [red blue]", r.Tags, err)
				}
			})
		})
	}
}

// A load begins before an InvalidateTag. No node stores the value of this load as fresh, and no later Get joins its
// flight. The tags of a value are known only after its load, so the moment at which the load began decides.
func TestInvalidateTagDuringALoad(t *testing.T) {
	for _, here := range []bool{true, false} {
		t.Run(fmt.Sprint("on the same node ", here), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: time.Second}
				_, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour, StaleFor: time.Hour})
				var wg sync.WaitGroup
				wg.Go(func() {
					if v := get(t, l, "red:1"); v != "red:1 v0" {
						t.Errorf("the caller of the old load got %q, want \"red:1 v0\"", v)
					}
				})
				wg.Go(func() {
					time.Sleep(100 * ms)
					get(t, peer, "red:1") // may get the old or the new value
				})
				time.Sleep(500 * ms)
				d.version.Store(1)
				by := peer
				if here {
					by = l
				}
				if err := by.InvalidateTag(t.Context(), "red"); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				for _, node := range []*refill.Loader[string]{l, peer} {
					wg.Go(func() {
						if v := get(t, node, "red:1"); v != "red:1 v1" {
							t.Errorf("a Get after InvalidateTag got %q, want \"red:1 v1\"", v)
						}
					})
				}
				wg.Wait()
				for _, node := range []*refill.Loader[string]{l, peer} {
					if v := get(t, node, "red:1"); v != "red:1 v1" {
						t.Errorf("got %q, want \"red:1 v1\": the value of the old load is served as fresh", v)
					}
				}
				if n := d.loads.Load(); n != 2 {
					t.Errorf("got %d loads, want 2: the old one and one more", n)
				}
			})
		})
	}
}

// After ExpireTag the stale value is served at once, and the fleet refreshes the value once.
func TestExpireTag(t *testing.T) {
	for name, localTTL := range map[string]time.Duration{"with L1": 0, "without L1": -1} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 50 * ms}
				_, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour, StaleFor: time.Minute, LocalTTL: localTTL})
				both := []*refill.Loader[string]{l, peer}
				for _, node := range both {
					get(t, node, "red:1")
					get(t, node, "blue:1")
				}
				d.version.Store(1)
				time.Sleep(time.Second)
				if err := l.ExpireTag(t.Context(), "red"); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				for i, node := range both {
					r, err := node.GetResult(t.Context(), "red:1")
					if err != nil || r.Value != "red:1 v0" || r.Outcome != refill.OutcomeStale {
						t.Errorf("node %d: got %+v, %v, want \"red:1 v0\" as stale", i, r, err)
					}
				}
				time.Sleep(time.Second)
				for i, node := range both {
					get(t, node, "red:1") // a node that has only the announcement fetches the new value in the background
					synctest.Wait()
					if v := get(t, node, "red:1"); v != "red:1 v1" {
						t.Errorf("node %d: got %q, want \"red:1 v1\"", i, v)
					}
					if v := get(t, node, "blue:1"); v != "blue:1 v0" {
						t.Errorf("node %d: got %q, want \"blue:1 v0\": the tag blue was not expired", i, v)
					}
				}
				if n := d.loads.Load(); n != 3 {
					t.Errorf("got %d loads, want 3", n)
				}
				if err := l.ExpireTag(t.Context(), "blue"); err != nil {
					t.Fatal(err)
				}
				time.Sleep(2 * time.Minute) // longer than StaleFor, which counts from ExpireTag
				if v := get(t, l, "blue:1"); v != "blue:1 v1" {
					t.Errorf("got %q longer than StaleFor after ExpireTag, want \"blue:1 v1\"", v)
				}
			})
		})
	}
}

// A tag of Config.Tags invalidates all values of a Loader, also on nodes that start later. A node that misses the
// announcement stops serving the invalid values within LocalTTL.
func TestEveryValueIsTagged(t *testing.T) {
	for _, expire := range []bool{false, true} {
		t.Run(fmt.Sprint("ExpireTag ", expire), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				cfg := refill.Config{TTL: time.Hour, StaleFor: time.Hour, LocalTTL: 10 * time.Second, Tags: []string{"all"}}
				s, l, peer := tagPair(t, d, cfg)
				cfg.Tags[0] = "changed by the caller"
				keys := []string{"red:1", "blue:2", "all:3"}
				for _, key := range keys {
					get(t, l, key)
					get(t, peer, key)
				}
				time.Sleep(ms)
				d.version.Store(1)
				s.mute.Store(true)
				invalidate := peer.InvalidateTag
				if expire {
					invalidate = peer.ExpireTag
				}
				if err := invalidate(t.Context(), "all"); err != nil {
					t.Fatal(err)
				}
				cfg.Shared, cfg.Tags = s.Store, []string{"all"}
				for name, n := range map[string]*refill.Loader[string]{
					"the node that invalidated": peer, "a new node": node(t, d.tagged, cfg),
				} {
					for _, key := range keys {
						if expire {
							r, err := n.GetResult(t.Context(), key)
							if err != nil || r.Value == key+" v0" && r.Outcome != refill.OutcomeStale {
								t.Errorf("%s: got %+v, %v, want the old value as stale, or the new value", name, r, err)
							}
							synctest.Wait()
						}
						if v := get(t, n, key); v != key+" v1" {
							t.Errorf("%s serves %q, want %q", name, v, key+" v1")
						}
					}
				}
				time.Sleep(10 * time.Second) // LocalTTL bounds the lost announcement
				for _, key := range keys {
					get(t, l, key)
					synctest.Wait()
					if v := get(t, l, key); v != key+" v1" {
						t.Errorf("the node that missed the announcement serves %q, want %q", v, key+" v1")
					}
				}
				if n := d.loads.Load(); n != 6 {
					t.Errorf("got %d loads, want 6: two of each key", n)
				}
				if r, _ := l.Peek(t.Context(), "red:1"); fmt.Sprint(r.Tags) != "[all red]" {
					t.Errorf("got tags %v, want [all red]", r.Tags)
				}
			})
		})
	}
}

// Tags of any length and any bytes invalidate their values.
func TestTagsOfAnyBytes(t *testing.T) {
	for name, localTTL := range map[string]time.Duration{"with L1": 0, "without L1": -1} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				_, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour, LocalTTL: localTTL})
				for i, tag := range []string{"#", "a\nb", strings.Repeat("x", 600), "ключ"} {
					key := "plain," + tag + ":1"
					d.version.Store(0)
					get(t, l, key)
					get(t, peer, key)
					time.Sleep(ms)
					d.version.Store(1)
					if err := peer.InvalidateTag(t.Context(), tag); err != nil {
						t.Fatal(err)
					}
					synctest.Wait()
					for n, node := range []*refill.Loader[string]{l, peer} {
						if v := get(t, node, key); v != key+" v1" {
							t.Errorf("tag %d: node %d serves %.30q, want it to end with \" v1\"", i, n, v)
						}
					}
				}
			})
		})
	}
}

// A value can have 64 different tags. A tag that is set again does not count.
func TestMostTags(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := node(t, func(ctx context.Context, _ string) (string, error) {
			for i := range 64 {
				refill.FillFrom(ctx).Tag(fmt.Sprint(i), "0")
			}
			return "v", nil
		}, refill.Config{TTL: time.Minute})
		if r, err := l.GetResult(t.Context(), "k"); err != nil || len(r.Tags) != 64 {
			t.Errorf("got %d tags, %v, want 64", len(r.Tags), err)
		}
	})
}

// If a load sets invalid tags, its caller gets the value and an error about the tags. The value is not stored.
func TestBadTags(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var loads atomic.Int64
		l := node(t, func(ctx context.Context, key string) (string, error) {
			loads.Add(1)
			f := refill.FillFrom(ctx)
			switch key {
			case "empty":
				f.Tag("")
			case "many":
				for i := range 65 {
					f.Tag(fmt.Sprint(i))
				}
			case "long":
				f.Tag(strings.Repeat("x", 1<<16))
			}
			return "v", nil
		}, refill.Config{TTL: time.Hour, ErrorTTL: -1})
		for _, key := range []string{"empty", "many", "long"} {
			v, err := l.Get(t.Context(), key)
			if v != "v" || !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "tag") {
				t.Errorf("%s: got %q, %v, want \"v\" and ErrInvalid about the tag", key, v, err)
			}
		}
		for name, err := range map[string]error{
			"InvalidateTag": l.InvalidateTag(t.Context(), "a", ""), "ExpireTag": l.ExpireTag(t.Context(), ""),
		} {
			if !errors.Is(err, refill.ErrInvalid) {
				t.Errorf("%s of an empty tag: got %v, want ErrInvalid", name, err)
			}
		}
		if err := l.InvalidateTag(t.Context()); err != nil {
			t.Errorf("InvalidateTag without tags: got %v, want no error", err)
		}
		_ = l.Close()
		for name, err := range map[string]error{
			"InvalidateTag": l.InvalidateTag(t.Context(), "a"), "ExpireTag": l.ExpireTag(t.Context(), "a"),
		} {
			if !errors.Is(err, refill.ErrClosed) {
				t.Errorf("%s after Close: got %v, want ErrClosed", name, err)
			}
		}
	})
}

// InvalidateTag costs one call of the store, however many values the tag has. A read of tagged values costs one call
// more than a read of other values.
func TestTagsCostOneCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour})
		for i := range 1000 {
			get(t, peer, fmt.Sprint("red:", i))
		}
		get(t, l, "red:0")
		before := s.calls.Load()
		get(t, l, "red:1")
		if n := s.calls.Load() - before; n != 2 {
			t.Errorf("got %d calls to read a tagged value, want 2", n)
		}
		before = s.calls.Load()
		if got, err := l.GetMany(t.Context(), []string{"red:2", "red:3", "red:4"}); err != nil || len(got) != 3 {
			t.Errorf("GetMany: got %v, %v, want 3 values", got, err)
		}
		if n := s.calls.Load() - before; n != 2 {
			t.Errorf("got %d calls to read three tagged values, want 2", n)
		}
		before = s.calls.Load()
		for range 5 {
			get(t, l, "red:1")
		}
		if n := s.calls.Load() - before; n != 0 {
			t.Errorf("got %d calls for hits, want 0", n)
		}
		if err := l.InvalidateTag(t.Context(), "red"); err != nil {
			t.Fatal(err)
		}
		if n := s.calls.Load() - before; n != 1 {
			t.Errorf("got %d calls to invalidate a thousand values, want 1", n)
		}
		synctest.Wait() // for the announcement to the peer
		loads := d.loads.Load()
		for i := range 1000 {
			get(t, peer, fmt.Sprint("red:", i))
		}
		if n := d.loads.Load() - loads; n != 1000 {
			t.Errorf("got %d loads after InvalidateTag, want 1000", n)
		}
	})
}

// A bulk load has one tag per key, and the store is slow. All tags are ensured at once. If they were ensured one after
// the other, the last tags would be ensured too late for their values.
func TestManyTagsAreEnsuredAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		s := newSpy(shared)
		s.ensureTook = 2 * ms // a common round trip to another zone
		var loads atomic.Int64
		load := func(ctx context.Context, keys []string) (map[string]string, error) {
			loads.Add(1)
			got := map[string]string{}
			for _, key := range keys {
				refill.FillFrom(ctx).For(key).Tag("user:" + key)
				got[key] = "row " + key
			}
			return got, nil
		}
		cfg := refill.Config{TTL: time.Hour, Shared: s}
		l, err := refill.NewBulk("thing", load, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		began := time.Now()
		all(t, l, names(0, 256))
		t.Logf("GetMany took %v", time.Since(began))
		cfg.Shared = shared
		peer, err := refill.NewBulk("thing", load, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer peer.Close()
		all(t, peer, names(0, 256))
		if n := loads.Load(); n != 1 {
			t.Errorf("got %d loads, want 1", n)
		}
	})
}

// A value whose tags could not be ensured is loaded again. Tags that were ensured a moment ago cost no further call.
func TestEnsureTagsThatFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSpy(memory.New())
		l := node(t, d.tagged, refill.Config{TTL: time.Hour, Shared: s, LocalTTL: -1})
		s.ensureFails.Store(true)
		get(t, l, "red:1")
		s.ensureFails.Store(false)
		get(t, l, "red:1") // loads: the tag has no state, so the value is invalid
		before := d.loads.Load()
		get(t, l, "red:1")
		if n := d.loads.Load() - before; n != 0 {
			t.Errorf("got %d loads after the tag was ensured, want 0", n)
		}
		ensured := s.ensures.Load()
		get(t, l, "red:2")
		get(t, l, "red:3")
		if n := s.ensures.Load() - ensured; n != 0 {
			t.Errorf("got %d more calls for a tag that was ensured a moment ago, want 0", n)
		}
	})
}

// A new tag does not invalidate its value, however long the load of the value took.
func TestSlowLoadOfANewTag(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 9 * time.Second}
		_, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour})
		get(t, l, "red:1")
		get(t, peer, "red:1")
		if n := d.loads.Load(); n != 1 {
			t.Errorf("got %d loads of a value with a new tag, want 1", n)
		}
	})
}

// A value is invalid if its load began at the very moment of InvalidateTag, because the order of the two is unknown.
func TestTagAtTheMomentOfALoad(t *testing.T) {
	for name, localTTL := range map[string]time.Duration{"with L1": 0, "without L1": -1} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				_, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour, LocalTTL: localTTL})
				get(t, l, "red:1")
				d.version.Store(1)
				if err := l.InvalidateTag(t.Context(), "red"); err != nil {
					t.Fatal(err)
				}
				for i, n := range []*refill.Loader[string]{l, peer} {
					if v := get(t, n, "red:1"); v != "red:1 v1" {
						t.Errorf("node %d serves %q, want \"red:1 v1\"", i, v)
					}
				}
			})
		})
	}
}

// The announcement of an InvalidateTag arrives after a later InvalidateTag. The later moment stays in force.
func TestLateAnnouncementOfATag(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour})
		get(t, l, "red:1")
		time.Sleep(ms)
		s.holdAnnouncements(true)
		if err := peer.InvalidateTag(t.Context(), "red"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(ms)
		get(t, l, "red:2")
		time.Sleep(ms)
		d.version.Store(1)
		if err := l.InvalidateTag(t.Context(), "red"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		s.loseLastHeld() // the announcement of l's own InvalidateTag
		s.holdAnnouncements(false)
		if v := get(t, l, "red:2"); v != "red:2 v1" {
			t.Errorf("got %q, want \"red:2 v1\": the late announcement made the old value valid again", v)
		}
	})
}

// An InvalidateTag of a tag that a flight's key does not have does not detach the callers of the flight.
func TestInvalidateOfOtherTagsKeepsTheFlight(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var now, most atomic.Int64
		s := newSpy(memory.New())
		l := node(t, func(ctx context.Context, key string) (string, error) {
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			refill.FillFrom(ctx).NoStore()
			time.Sleep(time.Second)
			return "v", nil
		}, refill.Config{TTL: time.Hour, Shared: s})
		get(t, l, "k")
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() { get(t, l, "k") })
			time.Sleep(10 * ms)
			s.announce(driver.Announcement{Kind: driver.TagInvalidated, Key: "thing:other", At: time.Now()})
		}
		wg.Wait()
		if most.Load() > 1 {
			t.Errorf("got %d loads of one key at once in one process, want 1", most.Load())
		}
	})
}

// tagHook is a store whose InvalidateTags first calls before. If before returns an error, InvalidateTags returns that
// error and does nothing.
type tagHook struct {
	*spy
	before func() error
}

func (h *tagHook) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	if h.before != nil {
		if err := h.before(); err != nil {
			return err
		}
	}
	return h.spy.InvalidateTags(ctx, by, keep, tags...)
}

// A Get that runs during an InvalidateTag leaves no old value in L1, even if the announcement is lost.
func TestGetDuringAnInvalidateTag(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := &tagHook{spy: newSpy(memory.New())}
		l := node(t, d.tagged, refill.Config{TTL: time.Hour, Shared: s})
		get(t, l, "red:1")
		time.Sleep(ms)
		s.mute.Store(true)
		s.before = func() error {
			get(t, l, "red:1")
			return nil
		}
		d.version.Store(1)
		if err := l.InvalidateTag(t.Context(), "red"); err != nil {
			t.Fatal(err)
		}
		if v := get(t, l, "red:1"); v != "red:1 v1" {
			t.Errorf("got %q after InvalidateTag, want \"red:1 v1\"", v)
		}
	})
}

// An InvalidateTag succeeds only on a retry. The retry also invalidates what L1 has read since the first try, even if
// the announcement is lost.
func TestInvalidateTagThatIsRetried(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		var fails atomic.Bool
		fails.Store(true)
		s := &tagHook{spy: newSpy(memory.New()), before: func() error {
			if fails.Load() {
				return errDown
			}
			return nil
		}}
		l := node(t, d.tagged, refill.Config{TTL: time.Hour, Shared: s})
		get(t, l, "red:1")
		time.Sleep(ms)
		s.mute.Store(true)
		d.version.Store(1)
		if err := l.InvalidateTag(t.Context(), "red"); !errors.Is(err, errDown) {
			t.Fatalf("InvalidateTag: got %v, want the error of the store", err)
		}
		time.Sleep(3 * time.Second)
		get(t, l, "red:1") // the store has not executed the InvalidateTag: L1 reads the old value
		fails.Store(false)
		time.Sleep(time.Second)
		if v := get(t, l, "red:1"); v != "red:1 v1" {
			t.Errorf("got %q after the retry, want \"red:1 v1\"", v)
		}
	})
}

// InvalidateTag does not reach the store. The values of this node are gone at once, and the call is retried.
func TestInvalidateTagWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour})
		get(t, l, "red:1")
		get(t, peer, "red:1")
		time.Sleep(ms)
		s.cut(true)
		d.version.Store(1)
		if err := l.InvalidateTag(t.Context(), "red"); !errors.Is(err, errDown) {
			t.Errorf("InvalidateTag: got %v, want the error of the store", err)
		}
		if v := get(t, l, "red:1"); v != "red:1 v1" {
			t.Errorf("this node serves %q, want \"red:1 v1\"", v)
		}
		time.Sleep(time.Second)
		s.cut(false)
		time.Sleep(time.Second)
		for i, n := range []*refill.Loader[string]{l, peer} {
			if v := get(t, n, "red:1"); v != "red:1 v1" {
				t.Errorf("node %d serves %q after the store came back, want \"red:1 v1\"", i, v)
			}
		}
	})
}

// A tag state is lost. The values of the tag may have missed an invalidation, so they are invalid. Values that are
// loaded later are valid.
func TestLostTagState(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, _ := tagPair(t, d, refill.Config{TTL: time.Hour, LocalTTL: -1})
		get(t, l, "red:1")
		s.forgetTags.Store(true)
		d.version.Store(1)
		if v := get(t, l, "red:1"); v != "red:1 v1" {
			t.Errorf("got %q, want \"red:1 v1\": a value without its tag state is invalid", v)
		}
		s.forgetTags.Store(false)
		get(t, l, "red:1")
		if v := get(t, l, "red:1"); v != "red:1 v1" || d.loads.Load() != 2 {
			t.Errorf("got %q after %d loads, want \"red:1 v1\" after 2 loads", v, d.loads.Load())
		}
	})
}

// A lost tag state makes no invalid value valid again.
//
//  1. A value is loaded and then invalidated by its tag.
//  2. The tag state is lost.
//  3. Another value with the tag is loaded, which creates the tag state again.
//  4. The first value must stay invalid.
func TestLostTagStateRevivesNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		var lost atomic.Bool
		s := newSpy(memory.New())
		s.renameTag = func(tag string) string {
			if lost.Load() && strings.HasSuffix(tag, ":red") {
				return tag + "2"
			}
			return tag
		}
		cfg := refill.Config{TTL: time.Hour, LocalTTL: -1, Shared: s}
		l := node(t, d.tagged, cfg)
		get(t, l, "red:1")
		time.Sleep(time.Second)
		d.version.Store(1)
		if err := l.InvalidateTag(t.Context(), "red"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		lost.Store(true)                // evicted, or its shard was restarted
		other := node(t, d.tagged, cfg) // a process that has not ensured the tag in the last 10 s
		get(t, other, "red:2")          // ensures the tag again
		if v := get(t, other, "red:1"); v != "red:1 v1" {
			t.Errorf("got %q, want \"red:1 v1\": the invalid value is valid again", v)
		}
	})
}

// futureTagState is a store whose clock was set back. A tag state from before lies in the future.
type futureTagState struct {
	*spy
	replaced atomic.Bool // InvalidateTags has replaced the tag state
}

func (s *futureTagState) Tags(ctx context.Context, tags ...string) ([]driver.TagState, error) {
	states, err := s.spy.Tags(ctx, tags...)
	for i, tag := range tags {
		if err == nil && strings.HasSuffix(tag, "red") && !s.replaced.Load() {
			states[i] = driver.TagState{Known: true, Invalidated: time.Now().Add(time.Hour)}
		}
	}
	return states, err
}

func (s *futureTagState) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	s.replaced.Store(true)
	return s.spy.InvalidateTags(ctx, by, keep, tags...)
}

// A tag state in the future would invalidate all values of the tag until that moment, so the Loader replaces the state.
func TestTagStateFromTheFuture(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := &futureTagState{spy: newSpy(memory.New())}
		l := node(t, d.tagged, refill.Config{TTL: time.Hour, Shared: s, LocalTTL: -1})
		get(t, l, "red:1")
		get(t, l, "red:1") // finds the tag state
		time.Sleep(2 * time.Second)
		get(t, l, "red:1")
		before := d.loads.Load()
		for range 5 {
			get(t, l, "red:1")
		}
		if n := d.loads.Load() - before; n != 0 {
			t.Errorf("got %d loads after the tag state was replaced, want 0", n)
		}
	})
}
