package refill_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// way is a node's way to a store, with hooks.
type way struct {
	refill.Store
	rename    func(string) string // of tags: a new name is a lost mark
	holdTook  time.Duration       // of HoldTags
	tagsStuck atomic.Bool
	manyTook  time.Duration
	reading   atomic.Int64
}

func (w *way) named(tags []string) []string {
	tags = slices.Clone(tags)
	for i := range tags {
		if w.rename != nil {
			tags[i] = w.rename(tags[i])
		}
	}
	return tags
}

func (w *way) Tags(ctx context.Context, tags ...string) ([]refill.TagState, error) {
	if w.tagsStuck.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return w.Store.Tags(ctx, w.named(tags)...)
}

func (w *way) HoldTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	if w.holdTook > 0 {
		select {
		case <-time.After(w.holdTook):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return w.Store.HoldTags(ctx, reach, keep, w.named(tags)...)
}

func (w *way) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return w.Store.InvalidateTags(ctx, by, keep, w.named(tags)...)
}

func (w *way) GetMany(ctx context.Context, keys ...string) ([][]byte, error) {
	w.reading.Add(1)
	defer w.reading.Add(-1)
	time.Sleep(w.manyTook)
	return w.Store.GetMany(ctx, keys...)
}

// A tag per key, and a store some way off: the tags of a bulk load are held together, so the last one is not too late.
func TestManyTagsAreHeldAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		w := &way{Store: shared, holdTook: 2 * ms} // a usual round trip to another zone
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
		cfg := refill.Config{TTL: time.Hour, Shared: w}
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
			t.Errorf("%d loads", n)
		}
	})
}

// A lost mark revives nothing that was loaded before the load that makes it anew.
func TestLostMarkRevivesNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		var lost atomic.Bool
		w := &way{Store: refill.NewMemory(), rename: func(tag string) string {
			if lost.Load() && strings.HasSuffix(tag, ":red") {
				return tag + "2"
			}
			return tag
		}}
		cfg := refill.Config{TTL: time.Hour, LocalTTL: -1, Shared: w}
		l := node(t, d.tagged, cfg)
		get(t, l, "red:1")
		time.Sleep(time.Second)
		d.version.Store(1)
		if err := l.InvalidateTag(t.Context(), "red"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		lost.Store(true)                // evicted, or its shard has restarted
		other := node(t, d.tagged, cfg) // any process that has not held the tag in the last 10 s
		get(t, other, "red:2")          // holds the tag anew
		if v := get(t, other, "red:1"); v != "red:1 v1" {
			t.Errorf("%q: void, and back", v)
		}
	})
}

// With SoftTimeout a stale value is in hand: there is no room to wait for a better one, so it is served.
func TestSoftTimeoutWithoutRoom(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		l := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, SoftTimeout: 100 * ms, MaxWaiters: 1, Jitter: -1})
		get(t, l, "k")
		time.Sleep(2 * time.Second)
		d.slow(time.Second)
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() { get(t, l, "k") })
		}
		wg.Wait()
	})
}

// SoftTimeout holds while a Refresh is under way, too.
func TestSoftTimeoutBesideARefresh(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		l := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, SoftTimeout: 100 * ms, Jitter: -1})
		get(t, l, "k")
		time.Sleep(2 * time.Second)
		d.slow(8 * time.Second)
		var wg sync.WaitGroup
		wg.Go(func() { _ = l.Refresh(t.Context(), "k") })
		time.Sleep(ms)
		began := time.Now()
		get(t, l, "k")
		if took := time.Since(began); took > 150*ms {
			t.Errorf("Get took %v, SoftTimeout is 100 ms", took)
		}
		wg.Wait()
	})
}

// A Get beside a Refresh has what is there: a spare value if the Refresh fails, a fresh one without waiting.
func TestGetBesideARefresh(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		l := node(t, d.load, refill.Config{TTL: time.Second, StaleIfError: time.Hour, Jitter: -1})
		get(t, l, "k")
		time.Sleep(2 * time.Second)
		d.slow(time.Second)
		d.fail(errors.New("no"))
		var wg sync.WaitGroup
		wg.Go(func() { _ = l.Refresh(t.Context(), "k") })
		time.Sleep(ms)
		if v, err := l.Get(t.Context(), "k"); err != nil {
			t.Errorf("%q %v, want the spare one", v, err)
		}
		wg.Wait()
	})
}

func TestGetBesideARefreshWithoutL1(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		l := node(t, d.load, refill.Config{TTL: time.Hour, LocalTTL: -1})
		get(t, l, "k")
		d.slow(8 * time.Second)
		var wg sync.WaitGroup
		wg.Go(func() { _ = l.Refresh(t.Context(), "k") })
		time.Sleep(ms)
		began := time.Now()
		get(t, l, "k")
		if took := time.Since(began); took > ms {
			t.Errorf("no L1: Get took %v though a fresh value is in the store", took)
		}
		wg.Wait()
	})
}

// A key that is not to be stored has a back-off, also after an Invalidate.
func TestNoStoreKeyBacksOff(t *testing.T) {
	for _, before := range []bool{false, true} {
		t.Run(fmt.Sprint(before), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var loads atomic.Int64
				var broken atomic.Bool
				l := node(t, func(ctx context.Context, key string) (string, error) {
					loads.Add(1)
					if broken.Load() {
						return "", errors.New("no")
					}
					refill.FillFrom(ctx).NoStore()
					return "v", nil
				}, refill.Config{TTL: time.Hour, ErrorTTL: time.Second})
				if before {
					_ = l.Invalidate(t.Context(), "k")
				}
				get(t, l, "k")
				synctest.Wait()
				broken.Store(true)
				loads.Store(0)
				for range 10 {
					_, _ = l.Get(t.Context(), "k")
					time.Sleep(10 * ms)
				}
				if n := loads.Load(); n != 1 {
					t.Errorf("invalidated before: %v: %d loads in 100 ms, ErrorTTL is 1 s", before, n)
				}
			})
		})
	}
}

// The keys of one bulk load are distinct, also when a key has a second flight.
func TestBulkKeysAreDistinct(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 10 * ms}
		l := bulk(t, d, refill.Config{BulkWindow: 50 * ms})
		wait := behind(t, l, "k")
		defer wait()
		time.Sleep(10 * ms)
		if err := l.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		get(t, l, "k")
		for _, keys := range d.asked() {
			if len(slices.Compact(slices.Clone(keys))) != len(keys) {
				t.Errorf("keys %q are not distinct", keys)
			}
		}
	})
}

// OnEvent panics in a GetMany, and its caller recovers, as net/http does: nothing is left behind. Not in a bubble, where the
// panic would end the test.
func TestGetManyWhoseOnEventPanics(t *testing.T) {
	d := &table{}
	var bad atomic.Bool
	l, err := refill.NewBulk("thing", d.load, refill.Config{TTL: time.Hour, LoadTimeout: 100 * ms, OnEvent: func(e refill.Event) {
		if e.Kind == refill.EventHit && bad.Swap(false) {
			panic("OnEvent")
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	get(t, l, "hit")
	bad.Store(true)
	func() {
		defer func() { _ = recover() }()
		_, _ = l.GetMany(t.Context(), []string{"cold", "hit"})
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if v, err := l.Get(ctx, "cold"); err != nil {
		t.Errorf("cold: %q %v", v, err)
	}
	closed := make(chan struct{})
	go func() { _ = l.Close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(2 * time.Second):
		t.Error("Close hangs, LoadTimeout is 100 ms")
	}
}

// A bulk load that asks, through another Loader, for a key that one of its callers is loading is told so.
func TestNestedThroughTwoLoaders(t *testing.T) {
	for _, first := range []bool{false, true} {
		t.Run(fmt.Sprint(first), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var x *refill.Loader[string]
				l, err := refill.NewBulk("bulk", func(ctx context.Context, keys []string) (map[string]string, error) {
					_, err := x.Get(ctx, "a")
					return nil, err
				}, refill.Config{TTL: time.Hour, BulkWindow: 10 * ms})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				x = node(t, func(ctx context.Context, key string) (string, error) { return l.Get(ctx, "1") }, refill.Config{TTL: time.Hour})
				if first {
					go func() { _, _ = l.Get(t.Context(), "2") }()
					time.Sleep(ms)
				}
				began := time.Now()
				_, err = x.Get(t.Context(), "a")
				if took := time.Since(began); took > time.Second || !errors.Is(err, refill.ErrInvalid) {
					t.Errorf("another key first: %v: %v after %v, want ErrInvalid", first, err, took)
				}
			})
		})
	}
}

type byValue struct {
	refill.Store
	labels any
}

// A Store may be a struct that cannot be compared.
func TestStoreThatCannotBeCompared(t *testing.T) {
	defer func() {
		if p := recover(); p != nil {
			t.Errorf("New panics: %v", p)
		}
	}()
	l, err := refill.New[string]("thing", nil, refill.Config{TTL: time.Hour, Shared: byValue{refill.NewMemory(), []string{"a"}}})
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}

// Peek ends with its ctx, also for a value with tags.
func TestPeekObeysItsContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		w := &way{Store: refill.NewMemory()}
		l := node(t, d.tagged, refill.Config{TTL: time.Hour, LocalTTL: -1, Shared: w})
		get(t, l, "red:1")
		w.tagsStuck.Store(true)
		ctx, cancel := context.WithTimeout(t.Context(), 10*ms)
		defer cancel()
		began := time.Now()
		l.Peek(ctx, "red:1")
		if took := time.Since(began); took > 20*ms {
			t.Errorf("Peek took %v with a ctx of 10 ms", took)
		}
	})
}

// Of two flights of a key each hears what its own bulk load says of the key.
func TestTwoFlightsOfAKeyInABulkLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var calls [][]string
		s := newSpy(refill.NewMemory())
		l, err := refill.NewBulk("thing", func(ctx context.Context, keys []string) (map[string]string, error) {
			calls = append(calls, keys)
			got := map[string]string{}
			for _, key := range keys {
				refill.FillFrom(ctx).For(key).Tag("red")
				got[key] = "v"
			}
			return got, nil
		}, refill.Config{TTL: time.Hour, BulkWindow: 50 * ms, Shared: s})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		s.down.Store(true) // calls fail, as after a lost reply or two
		var wg sync.WaitGroup
		look := func() {
			r, err := l.GetResult(t.Context(), "k")
			if err != nil || len(r.Tags) != 1 {
				t.Errorf("%+v %v: its load said Tag(red); calls %q", r, err, calls)
			}
		}
		wg.Go(look)
		time.Sleep(10 * ms)
		s.hear(refill.Note{Kind: refill.NoteTagInvalidated, Key: "thing:blue", At: time.Now()}) // somebody voids another group
		wg.Go(look)
		wg.Wait()
	})
}

// Close waits for the read of a GetMany, also when its flights did not need it.
func TestCloseEndsTheReadOfAGetMany(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		w := &way{Store: refill.NewMemory()}
		l, err := refill.New("thing", d.load, refill.Config{TTL: time.Second, StaleIfError: time.Hour, Shared: w})
		if err != nil {
			t.Fatal(err)
		}
		get(t, l, "a")
		time.Sleep(2 * time.Second) // past its time: the flight does not look
		w.manyTook = 200 * ms
		if _, err := l.GetMany(t.Context(), []string{"a"}); err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if n := w.reading.Load(); n != 0 {
			t.Errorf("%d reads of the store go on after Close", n)
		}
		time.Sleep(time.Second)
	})
}

// A GetMany counts among those who wait until it has its last key.
func TestGetManyIsCountedToItsEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		load := func(ctx context.Context, key string) (string, error) {
			if key == "slow" {
				time.Sleep(time.Second)
			}
			return "v", nil
		}
		l := node(t, load, refill.Config{TTL: time.Hour, MaxWaiters: 1})
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = l.GetMany(t.Context(), []string{"fast", "slow"}) })
		time.Sleep(100 * ms)
		if _, err := l.Get(t.Context(), "slow"); !errors.Is(err, refill.ErrOverloaded) {
			t.Errorf("%v: two callers wait, MaxWaiters is 1", err)
		}
		wg.Wait()
	})
}

// Voidings of other groups do not part callers who share a flight.
func TestVoidingsOfOtherTags(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var now, most atomic.Int64
		s := newSpy(refill.NewMemory())
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
			s.hear(refill.Note{Kind: refill.NoteTagInvalidated, Key: "thing:other", At: time.Now()})
		}
		wg.Wait()
		if most.Load() > 1 {
			t.Errorf("%d loads of one key at once in one process", most.Load())
		}
	})
}
