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

// When InvalidateTag returns, all values of the tag are invalid in the store. Other nodes stop serving these values
// from L1 when the announcement arrives.
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
				s.mute.Store(localTTL < 0) // without L1, the result must not depend on announcements, so drop them
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

// A value has at most 64 tags. But a transaction may touch more, and its tags must share one call of the store.
func TestInvalidateManyTags(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour})
		get(t, peer, "t999:1")
		d.version.Store(1)
		tags := make([]string, 1000)
		for i := range tags {
			tags[i] = fmt.Sprint("t", i)
		}
		before := s.calls.Load()
		if err := l.InvalidateTag(t.Context(), tags...); err != nil {
			t.Fatal(err)
		}
		if n := s.calls.Load() - before; n != 1 {
			t.Errorf("%d calls of the store", n)
		}
		synctest.Wait()
		if v := get(t, peer, "t999:1"); v != "t999:1 v1" {
			t.Errorf("got %q", v)
		}
		if err := l.InvalidateTag(t.Context(), "a", ""); !errors.Is(err, refill.ErrInvalid) {
			t.Errorf("an empty tag: %v", err)
		}
	})
}

// A load begins before an InvalidateTag and ends after it. The tags of a value are known only after its load, so refill
// then compares the start of the load with the moment of the InvalidateTag. No node may serve the value of that load as
// fresh. A Get after the InvalidateTag may wait for that load, but must then load again and return the new value.
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

// After ExpireTag, Gets are served the stale value at once. The fleet loads the new value once.
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
					get(t, node, "red:1") // if the node lacks the new value, this Get reads the new value in the background
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
				time.Sleep(2 * time.Minute) // longer than StaleFor, which counts from the ExpireTag
				if v := get(t, l, "blue:1"); v != "blue:1 v1" {
					t.Errorf("got %q longer than StaleFor after ExpireTag, want \"blue:1 v1\"", v)
				}
			})
		})
	}
}

// A tag of Config.Tags is a tag of all values of a Loader. InvalidateTag or ExpireTag of that tag reaches all values,
// also on nodes that start later. A node that misses the announcement stops serving the old values within LocalTTL.
func TestEveryValueIsTagged(t *testing.T) {
	for _, expire := range []bool{false, true} {
		t.Run(fmt.Sprint("ExpireTag ", expire), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				cfg := refill.Config{TTL: time.Hour, StaleFor: time.Hour, LocalTTL: 10 * time.Second, Tags: []string{"all"}}
				s, l, peer := tagPair(t, d, cfg)
				cfg.Tags[0] = "changed by the caller" // has no effect, because New must have copied the tags
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
				time.Sleep(10 * time.Second) // LocalTTL is over, so l must not serve the old values any longer
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

// A tag can have any length and any bytes.
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

// A value can have up to 64 different tags. A tag that a load sets twice counts once.
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

// If a load sets an invalid tag, its caller gets the value and an error about the tag. The value is not stored.
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

// InvalidateTag costs one call of the store, however many values have the tag. A read of tagged values from the store
// costs one call more than a read of values without tags.
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
		synctest.Wait() // until the peer has handled the announcement
		loads := d.loads.Load()
		for i := range 1000 {
			get(t, peer, fmt.Sprint("red:", i))
		}
		if n := d.loads.Load() - loads; n != 1000 {
			t.Errorf("got %d loads after InvalidateTag, want 1000", n)
		}
	})
}

// A bulk load sets a different tag for each of 256 keys, and a call of EnsureTags takes 2 ms. The Loader must ensure
// all tags at the same time. If the Loader ensured one tag after another, it would ensure the last tags too late, and
// their values would be loaded again.
func TestManyTagsAreEnsuredAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		s := newSpy(shared)
		s.ensureTook = 2 * ms // as long as a usual round trip to a server in another zone
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

// EnsureTags fails, so the tag of a value has no state in the store, and the value is invalid. The next Get must load
// the value again, and then the Loader must call EnsureTags again.
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
	})
}

// A load takes 9 s, and sets a tag that has no state in the store yet. After the load, EnsureTags creates the state,
// with a moment of invalidation in the past. This moment must lie before the start of the load, so that the value is
// valid.
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

// A load begins at the very moment of an InvalidateTag. The order of the load and the InvalidateTag is unknown, so the
// value must be invalid.
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

// A tag is invalidated twice. The announcement of the first InvalidateTag arrives after the second InvalidateTag. The
// node must keep the moment of the second InvalidateTag, and must not go back to the first.
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

// During a flight, announcements say that a tag was invalidated. The value of the flight does not have this tag. Later
// callers must still join the flight.
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

// tagHook is a store whose InvalidateTags first calls the function in the field before. If that function returns an
// error, InvalidateTags returns the error. Otherwise InvalidateTags calls the InvalidateTags of spy.
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

// A Get runs during an InvalidateTag and reads the old value. The announcement of the InvalidateTag is lost. After
// InvalidateTag has returned, L1 must not serve the old value.
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

// InvalidateTag fails, and the Loader retries it. Before the retry, a Get reads the old value into L1. The retry
// succeeds, but its announcement is lost. After the retry, L1 must not serve the old value.
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
		get(t, l, "red:1") // L1 reads the old value, because the store has not executed the InvalidateTag yet
		fails.Store(false)
		time.Sleep(time.Second)
		if v := get(t, l, "red:1"); v != "red:1 v1" {
			t.Errorf("got %q after the retry, want \"red:1 v1\"", v)
		}
	})
}

// A node loads a tagged value for longer than LocalTTL. A peer invalidates the tag meanwhile, and the node misses the
// announcement. L1 follows an InvalidateTag within LocalTTL, so L1 must not serve the value when the load has ended.
func TestInvalidateTagMissedDuringALoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 3 * time.Second}
		s, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour, LocalTTL: time.Second})
		defer behind(t, l, "red:1")()
		time.Sleep(500 * ms)
		s.mute.Store(true)
		d.version.Store(1)
		if err := peer.InvalidateTag(t.Context(), "red"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		if v := get(t, l, "red:1"); v != "red:1 v1" {
			t.Errorf("got %q, want \"red:1 v1\"", v)
		}
	})
}

// A call of InvalidateTag does not reach the store. The node of this call must not serve the old values any longer.
// When the store answers again, the Loader must retry the InvalidateTag, so that other nodes do not serve the old
// values.
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

// The store loses a tag state. The lost state may have held an invalidation, so all values of the tag are invalid.
// Values that are loaded later are valid.
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

// A lost tag state must not make an invalid value valid again.
//
//  1. A value is loaded and then invalidated by its tag.
//  2. The store loses the tag state.
//  3. Another value with the tag is loaded, which creates a new tag state.
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
		lost.Store(true)                // as if the store had evicted the tag state
		other := node(t, d.tagged, cfg) // a node without an L1, so each Get reads the state of the tag
		get(t, other, "red:2")          // creates a new tag state
		if v := get(t, other, "red:1"); v != "red:1 v1" {
			t.Errorf("got %q, want \"red:1 v1\": the invalid value is valid again", v)
		}
	})
}

// futureTagState is a store whose clock was set back. In this store, the state of the tag red says that the tag was
// invalidated an hour from now. InvalidateTags replaces this state.
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

// The moment in a tag state lies an hour in the future, so every value of the tag would be invalid for an hour. The
// Loader must replace the tag state.
func TestTagStateFromTheFuture(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := &futureTagState{spy: newSpy(memory.New())}
		l := node(t, d.tagged, refill.Config{TTL: time.Hour, Shared: s, LocalTTL: -1})
		get(t, l, "red:1")
		get(t, l, "red:1") // reads the tag state from the store
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

// While node l loads a value, node peer expires a tag of the value. Then a Get on peer waits for the load of l. The Get
// must not return the value of l, because that value was expired during its load. The Get must load again.
func TestExpireTagDuringALoadElsewhere(t *testing.T) {
	for name, cfg := range map[string]refill.Config{
		"a value":                      {TTL: time.Hour},
		"a load that outlasts its TTL": {TTL: 100 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: time.Second}
				_, l, peer := tagPair(t, d, cfg)
				get(t, l, "red:2") // the store now has a state of the tag red
				first := behind(t, l, "red:1")
				time.Sleep(500 * ms)
				d.version.Store(1)
				if err := peer.ExpireTag(t.Context(), "red"); err != nil {
					t.Fatal(err)
				}
				if v := get(t, peer, "red:1"); v != "red:1 v1" {
					t.Errorf("a Get after ExpireTag got %q, want \"red:1 v1\"", v)
				}
				first()
			})
		})
	}
}
