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
)

// tagged is a load function whose values are in the groups that the key names: "a,b:1" is in a and b.
func (d *db) tagged(ctx context.Context, key string) (string, error) {
	groups, _, _ := strings.Cut(key, ":")
	refill.FillFrom(ctx).Tag(strings.Split(groups, ",")...)
	return d.load(ctx, key)
}

// tagPair makes a node behind a spy and a peer, over one store.
func tagPair(t *testing.T, d *db, cfg refill.Config) (s *spy, l, peer *refill.Loader[string]) {
	t.Helper()
	shared := refill.NewMemory()
	s = newSpy(shared)
	cfg.Shared = s
	l = node(t, d.tagged, cfg)
	cfg.Shared = shared
	return s, l, node(t, d.tagged, cfg)
}

// A group is void on every node when InvalidateTag has returned, in the store; in other nodes' memory with the push.
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
					t.Fatalf("%d loads of %d keys", n, len(keys))
				}
				d.version.Store(1)
				s.mute.Store(localTTL < 0) // then it must not depend on a push
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
							t.Errorf("node %d: %.10s… = %q, want%s", n, key, v, want)
						}
					}
				}
				if n := d.loads.Load(); n != int64(len(keys))+4 {
					t.Errorf("%d loads, want the first ones and one each of the four that were void", n)
				}
				if r, err := l.GetResult(t.Context(), "red,blue:3"); err != nil || fmt.Sprint(r.Tags) != "[red blue]" {
					t.Errorf("tags %v, %v", r.Tags, err)
				}
			})
		})
	}
}

// A load that began before an InvalidateTag is not stored as fresh on any node, and no later Get joins it: the tags of its
// value are not known yet, so it is its beginning that is judged.
func TestInvalidateTagDuringALoad(t *testing.T) {
	for _, here := range []bool{true, false} {
		t.Run(fmt.Sprint("on the same node ", here), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: time.Second}
				_, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour, StaleFor: time.Hour})
				var wg sync.WaitGroup
				wg.Go(func() {
					if v := get(t, l, "red:1"); v != "red:1 v0" {
						t.Errorf("who waited for the old load got %q", v)
					}
				})
				wg.Go(func() {
					time.Sleep(100 * ms)
					get(t, peer, "red:1") // may get either
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
							t.Errorf("a Get after InvalidateTag got %q", v)
						}
					})
				}
				wg.Wait()
				for _, node := range []*refill.Loader[string]{l, peer} {
					if v := get(t, node, "red:1"); v != "red:1 v1" {
						t.Errorf("%q: the old load's value is served as fresh", v)
					}
				}
				if n := d.loads.Load(); n != 2 {
					t.Errorf("%d loads, want the old one and one more", n)
				}
			})
		})
	}
}

// ExpireTag: stale is served at once, and refreshed once in the fleet.
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
					if err != nil || r.Value != "red:1 v0" || r.Outcome != refill.EventStale {
						t.Errorf("node %d: %+v, %v; want the stale one at once", i, r, err)
					}
				}
				time.Sleep(time.Second)
				for i, node := range both {
					get(t, node, "red:1") // a node that was only told of the new value fetches it behind this one
					synctest.Wait()
					if v := get(t, node, "red:1"); v != "red:1 v1" {
						t.Errorf("node %d: %q, want the refreshed one", i, v)
					}
					if v := get(t, node, "blue:1"); v != "blue:1 v0" {
						t.Errorf("node %d: %q, another group's", i, v)
					}
				}
				if n := d.loads.Load(); n != 3 {
					t.Errorf("%d loads, want 3", n)
				}
				if err := l.ExpireTag(t.Context(), "blue"); err != nil {
					t.Fatal(err)
				}
				time.Sleep(2 * time.Minute) // longer than StaleFor, which counts from there
				if v := get(t, l, "blue:1"); v != "blue:1 v1" {
					t.Errorf("%q: served longer than StaleFor after it was expired", v)
				}
			})
		})
	}
}

// Config.Tags: everything at once, also for nodes that start later, and for one that misses the push.
func TestEveryValueIsTagged(t *testing.T) {
	for _, soft := range []bool{false, true} {
		t.Run(fmt.Sprint("soft ", soft), func(t *testing.T) {
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
				void := peer.InvalidateTag
				if soft {
					void = peer.ExpireTag
				}
				if err := void(t.Context(), "all"); err != nil {
					t.Fatal(err)
				}
				cfg.Shared, cfg.Tags = s.Store, []string{"all"}
				for name, n := range map[string]*refill.Loader[string]{"the one that said so": peer, "a new one": node(t, d.tagged, cfg)} {
					for _, key := range keys {
						if soft {
							if r, err := n.GetResult(t.Context(), key); err != nil || r.Value == key+" v0" && r.Outcome != refill.EventStale {
								t.Errorf("%s: %+v, %v; want it stale, or new", name, r, err)
							}
							synctest.Wait()
						}
						if v := get(t, n, key); v != key+" v1" {
							t.Errorf("%s serves %q", name, v)
						}
					}
				}
				time.Sleep(10 * time.Second) // it missed the push: LocalTTL bounds that
				for _, key := range keys {
					get(t, l, key)
					synctest.Wait()
					if v := get(t, l, key); v != key+" v1" {
						t.Errorf("the one that missed the push serves %q", v)
					}
				}
				if n := d.loads.Load(); n != 6 {
					t.Errorf("%d loads, want each key twice", n)
				}
				if r, _ := l.Peek(t.Context(), "red:1"); fmt.Sprint(r.Tags) != "[all red]" {
					t.Errorf("tags %v", r.Tags)
				}
			})
		})
	}
}

// The mark of a tag is lost: nobody knows what its values have missed, so they are void, and the next ones are not.
func TestLostMark(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, _ := tagPair(t, d, refill.Config{TTL: time.Hour, LocalTTL: -1})
		get(t, l, "red:1")
		s.forgetTags.Store(true)
		d.version.Store(1)
		if v := get(t, l, "red:1"); v != "red:1 v1" {
			t.Errorf("%q, although nobody knows whether it is void", v)
		}
		s.forgetTags.Store(false)
		get(t, l, "red:1")
		if v := get(t, l, "red:1"); v != "red:1 v1" || d.loads.Load() != 2 {
			t.Errorf("%q after %d loads", v, d.loads.Load())
		}
	})
}

// A group of any size costs one call, and its values one more each when they are read from the store.
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
			t.Errorf("%d calls to read a tagged value, want 2", n)
		}
		before = s.calls.Load()
		if got, err := l.GetMany(t.Context(), []string{"red:2", "red:3", "red:4"}); err != nil || len(got) != 3 {
			t.Errorf("%v, %v", got, err)
		}
		if n := s.calls.Load() - before; n != 2 {
			t.Errorf("%d calls to read three of them, want 2", n)
		}
		before = s.calls.Load()
		for range 5 {
			get(t, l, "red:1")
		}
		if n := s.calls.Load() - before; n != 0 {
			t.Errorf("%d calls for hits", n)
		}
		if err := l.InvalidateTag(t.Context(), "red"); err != nil {
			t.Fatal(err)
		}
		if n := s.calls.Load() - before; n != 1 {
			t.Errorf("%d calls to invalidate a thousand values, want 1", n)
		}
		synctest.Wait() // the peer has heard of it
		loads := d.loads.Load()
		for i := range 1000 {
			get(t, peer, fmt.Sprint("red:", i))
		}
		if n := d.loads.Load() - loads; n != 1000 {
			t.Errorf("%d loads after it, want all", n)
		}
	})
}

// The store does not take it: what this node holds is gone, and it is tried again.
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
			t.Errorf("%v, want the store's error", err)
		}
		if v := get(t, l, "red:1"); v != "red:1 v1" {
			t.Errorf("this node serves %q", v)
		}
		time.Sleep(time.Second)
		s.cut(false)
		time.Sleep(time.Second)
		for i, n := range []*refill.Loader[string]{l, peer} {
			if v := get(t, n, "red:1"); v != "red:1 v1" {
				t.Errorf("node %d serves %q after the store has come back", i, v)
			}
		}
	})
}

// Tags that cannot be: the value goes to its caller with an error that names them, and is not stored.
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
				t.Errorf("%s: %q, %v", key, v, err)
			}
		}
		for name, err := range map[string]error{
			"InvalidateTag": l.InvalidateTag(t.Context(), "a", ""), "ExpireTag": l.ExpireTag(t.Context(), ""),
		} {
			if !errors.Is(err, refill.ErrInvalid) {
				t.Errorf("%s of an empty tag: %v", name, err)
			}
		}
		if err := l.InvalidateTag(t.Context()); err != nil {
			t.Errorf("no tags: %v", err)
		}
		_ = l.Close()
		for name, err := range map[string]error{
			"InvalidateTag": l.InvalidateTag(t.Context(), "a"), "ExpireTag": l.ExpireTag(t.Context(), "a"),
		} {
			if !errors.Is(err, refill.ErrClosed) {
				t.Errorf("%s after Close: %v", name, err)
			}
		}
	})
}
