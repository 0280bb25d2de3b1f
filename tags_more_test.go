package refill_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// What was voided while the store was there is not served from L1 when it is gone.
func TestVoidedBeforeAnOutage(t *testing.T) {
	for name, void := range map[string]func(context.Context, *refill.Loader[string]) error{
		"Invalidate":    func(ctx context.Context, l *refill.Loader[string]) error { return l.Invalidate(ctx, "red:1") },
		"Expire":        func(ctx context.Context, l *refill.Loader[string]) error { return l.Expire(ctx, "red:1") },
		"InvalidateTag": func(ctx context.Context, l *refill.Loader[string]) error { return l.InvalidateTag(ctx, "red") },
		"ExpireTag":     func(ctx context.Context, l *refill.Loader[string]) error { return l.ExpireTag(ctx, "red") },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				s, l, _ := tagPair(t, d, refill.Config{TTL: time.Hour})
				get(t, l, "red:1")
				d.version.Store(1)
				time.Sleep(ms)
				if err := void(t.Context(), l); err != nil {
					t.Fatal(err)
				}
				s.cut(true)
				if v := get(t, l, "red:1"); v != "red:1 v1" {
					t.Errorf("%q is served, although nothing stale may be", v)
				}
			})
		})
	}
}

// A load that fails is not answered with a spare value that was voided meanwhile.
func TestSpareThatWasVoidedMeanwhile(t *testing.T) {
	for name, void := range map[string]func(context.Context, *refill.Loader[string]) error{
		"Invalidate":    func(ctx context.Context, l *refill.Loader[string]) error { return l.Invalidate(ctx, "red:1") },
		"InvalidateTag": func(ctx context.Context, l *refill.Loader[string]) error { return l.InvalidateTag(ctx, "red") },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				_, l, _ := tagPair(t, d, refill.Config{TTL: time.Second, StaleIfError: time.Hour, Jitter: -1})
				get(t, l, "red:1")
				time.Sleep(2 * time.Second)
				d.slow(time.Second)
				d.fail(errors.New("boom"))
				var wg sync.WaitGroup
				wg.Go(func() {
					var failed *refill.LoadError
					if v, err := l.Get(t.Context(), "red:1"); !errors.As(err, &failed) {
						t.Errorf("%q, %v; want the load's error", v, err)
					}
				})
				time.Sleep(500 * ms)
				if err := void(t.Context(), l); err != nil {
					t.Fatal(err)
				}
				wg.Wait()
			})
		})
	}
}

type voider struct {
	*spy
	before func() error
}

func (v *voider) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	if v.before != nil {
		if err := v.before(); err != nil {
			return err
		}
	}
	return v.spy.InvalidateTags(ctx, by, keep, tags...)
}

// A Get that comes between an InvalidateTag's call of the store and its return leaves nothing old in L1, heard or not.
func TestGetDuringAnInvalidateTag(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := &voider{spy: newSpy(refill.NewMemory())}
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
			t.Errorf("%q is served after it", v)
		}
	})
}

// An InvalidateTag that is carried out late voids what was read into L1 since the first try, heard or not.
func TestInvalidateTagThatIsRetried(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		var refuses atomic.Bool
		refuses.Store(true)
		s := &voider{spy: newSpy(refill.NewMemory()), before: func() error {
			if refuses.Load() {
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
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		get(t, l, "red:1") // the store has not taken it: the old value
		refuses.Store(false)
		time.Sleep(time.Second)
		if v := get(t, l, "red:1"); v != "red:1 v1" {
			t.Errorf("%q is served after the retry", v)
		}
	})
}

// A key and a tag of the same text that wait for the store are two things; and a soft one stays soft.
func TestVoidsThatWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour, StaleFor: time.Hour})
		for _, key := range []string{"red", "red:1", "blue:1"} {
			get(t, peer, key)
		}
		time.Sleep(ms)
		d.version.Store(1)
		s.cut(true)
		if err := l.Invalidate(t.Context(), "blue"); err == nil { // first, so that it is not the tag's
			t.Error("no error")
		}
		if err := l.ExpireTag(t.Context(), "blue"); err == nil {
			t.Error("no error")
		}
		if err := l.Invalidate(t.Context(), "red"); err == nil {
			t.Error("no error")
		}
		if err := l.InvalidateTag(t.Context(), "red"); err == nil {
			t.Error("no error")
		}
		s.cut(false)
		time.Sleep(time.Second)
		for key, want := range map[string]string{"red": "red v1", "red:1": "red:1 v1", "blue:1": "blue:1 v0"} {
			if v := get(t, peer, key); v != want {
				t.Errorf("%q after the retry, want %q", v, want)
			}
		}
	})
}

// An announcement that is late takes nothing back: a tag was voided when it was voided last.
func TestLateAnnouncementOfATag(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour})
		get(t, l, "red:1")
		time.Sleep(ms)
		s.holdNotes(true)
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
		s.loseLast() // our own
		s.holdNotes(false)
		if v := get(t, l, "red:2"); v != "red:2 v1" {
			t.Errorf("%q is served again", v)
		}
	})
}

// What was loaded after a tag was voided is not void when the announcement comes late: its moment is the store's.
func TestTagsAreSpelled(t *testing.T) {
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
							t.Errorf("tag %d: node %d serves the old value", i, n)
						}
					}
				}
			})
		})
	}
}

// A value that was loaded for long is not void because its tag is new.
func TestSlowLoadOfANewTag(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 9 * time.Second}
		_, l, peer := tagPair(t, d, refill.Config{TTL: time.Hour})
		get(t, l, "red:1")
		get(t, peer, "red:1")
		if n := d.loads.Load(); n != 1 {
			t.Errorf("%d loads, want 1", n)
		}
	})
}

// A value that began at the very moment of the mark is void: nobody knows which was first.
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
						t.Errorf("node %d serves %q", i, v)
					}
				}
			})
		})
	}
}

// ahead is a store with a mark from before its clock was set back.
type ahead struct {
	*spy
	back atomic.Bool // it was set again since
}

func (s *ahead) Tags(ctx context.Context, tags ...string) ([]refill.TagState, error) {
	states, err := s.spy.Tags(ctx, tags...)
	for i, tag := range tags {
		if err == nil && strings.HasSuffix(tag, "red") && !s.back.Load() {
			states[i] = refill.TagState{Known: true, Invalidated: time.Now().Add(time.Hour)}
		}
	}
	return states, err
}

func (s *ahead) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	s.back.Store(true)
	return s.spy.InvalidateTags(ctx, by, keep, tags...)
}

// A mark from the future would void its values until then: it is set again.
func TestMarkFromTheFuture(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		l := node(t, d.tagged, refill.Config{TTL: time.Hour, Shared: &ahead{spy: newSpy(refill.NewMemory())}, LocalTTL: -1})
		get(t, l, "red:1")
		get(t, l, "red:1") // finds the mark
		time.Sleep(2 * time.Second)
		get(t, l, "red:1")
		before := d.loads.Load()
		for range 5 {
			get(t, l, "red:1")
		}
		if n := d.loads.Load() - before; n != 0 {
			t.Errorf("%d loads after the mark was set again", n)
		}
	})
}

// The mark of everything costs no call per read, also without L1.
func TestHoldTagsThatFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := &holder{spy: newSpy(refill.NewMemory())}
		l := node(t, d.tagged, refill.Config{TTL: time.Hour, Shared: s, LocalTTL: -1})
		s.fails.Store(true)
		get(t, l, "red:1")
		s.fails.Store(false)
		get(t, l, "red:1") // void: its tag has no mark
		before := d.loads.Load()
		get(t, l, "red:1")
		if n := d.loads.Load() - before; n != 0 {
			t.Errorf("%d loads after the mark could be set", n)
		}
		held := s.holds.Load()
		get(t, l, "red:2")
		get(t, l, "red:3")
		if n := s.holds.Load() - held; n != 0 {
			t.Errorf("%d more calls for a tag that was held a moment ago", n)
		}
	})
}

// holder can refuse to hold tags.
type holder struct {
	*spy
	fails atomic.Bool
	holds atomic.Int64
}

func (s *holder) HoldTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	s.holds.Add(1)
	if s.fails.Load() {
		return errDown
	}
	return s.spy.HoldTags(ctx, reach, keep, tags...)
}
