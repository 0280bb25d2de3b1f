package refill_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// This file tests the methods of a Loader: invalid input, outcomes, Refresh, Peek, nested Gets and Close. Other files
// test Get (get_test.go), Invalidate and Expire (invalidate_test.go) and GetMany (bulk_test.go).

func TestBadInput(t *testing.T) {
	load := func(context.Context, string) (string, error) { return "v", nil }
	_, err := refill.New("", load, refill.Config{TTL: time.Second})
	if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "name") {
		t.Errorf("New with an empty name: got %v, want ErrInvalid about the name", err)
	}
	_, err = refill.New("x", load, refill.Config{})
	if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "TTL: required") {
		t.Errorf("New without a TTL: got %v, want ErrInvalid about TTL", err)
	}
	bubble(t, func(t *testing.T) {
		ctx := t.Context()
		l := node(t, nil, refill.Config{})
		if _, err := l.Get(ctx, "k"); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "load") {
			t.Errorf("Get without a load function: got %v, want ErrInvalid about the load function", err)
		}
		if err := l.Refresh(ctx, "k"); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "load") {
			t.Errorf("Refresh without a load function: got %v, want ErrInvalid about the load function", err)
		}
		if _, err := l.GetWith(ctx, "k", nil); !errors.Is(err, refill.ErrInvalid) {
			t.Errorf("GetWith without a load function: got %v, want ErrInvalid", err)
		}
		if v, err := l.GetWith(ctx, "k", load); err != nil || v != "v" {
			t.Errorf("GetWith: got %q, %v, want \"v\"", v, err)
		}
		for name, f := range map[string]func(string) error{
			"Get":        func(k string) error { _, err := l.GetWith(ctx, k, load); return err },
			"Invalidate": func(k string) error { return l.Invalidate(ctx, "fine", k) },
			"Expire":     func(k string) error { return l.Expire(ctx, k) },
		} {
			if err := f(""); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "key: empty") {
				t.Errorf("%s of an empty key: got %v, want ErrInvalid about the key", name, err)
			}
		}
		if err := errors.Join(l.Invalidate(ctx), l.Expire(ctx)); err != nil {
			t.Errorf("Invalidate and Expire without keys: got %v, want no error", err)
		}
		over, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := l.GetWith(over, "k2", load); !errors.Is(err, context.Canceled) {
			t.Errorf("GetWith with a cancelled ctx: got %v, want context.Canceled", err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		_, e1 := l.GetWith(ctx, "k", load) // L1 has the value
		_, e2 := l.Get(ctx, "k")
		_, e3 := l.GetResult(ctx, "k")
		_, ok := l.Peek(ctx, "k")
		for i, err := range []error{e1, e2, e3, l.Invalidate(ctx, "k"), l.Expire(ctx, "k")} {
			if !errors.Is(err, refill.ErrClosed) {
				t.Errorf("call %d after Close: got %v, want ErrClosed", i, err)
			}
		}
		if ok {
			t.Error("Peek after Close returned a value")
		}
		if err := l.Close(); err != nil {
			t.Errorf("second Close: got %v, want no error", err)
		}
	})
}

func TestOutcomes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		var ev events
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleFor: 10 * time.Second, Jitter: -1, OnEvent: ev.on})
		want := func(l *refill.Loader[string], outcome refill.Outcome, age time.Duration) {
			t.Helper()
			r, err := l.GetResult(t.Context(), "k")
			remaining := max(0, time.Second-age)
			if err != nil || r.Outcome != outcome || r.Age != age || r.Remaining != remaining || r.Node == "" {
				t.Errorf("got %+v, %v, want outcome %v, age %v, %v left, and a node", r, err, outcome, age, remaining)
			}
		}
		if _, ok := nodes[0].Peek(t.Context(), "k"); ok {
			t.Error("Peek returned a value before the first load")
		}
		var wg sync.WaitGroup
		wg.Go(func() { want(nodes[0], refill.OutcomeLoaded, 100*ms) })
		time.Sleep(ms)
		wg.Go(func() { want(nodes[0], refill.OutcomeCoalesced, 100*ms) })
		wg.Go(func() { want(nodes[1], refill.OutcomeLoadedElsewhere, 100*ms) })
		wg.Wait()
		want(nodes[0], refill.OutcomeHit, 100*ms)
		time.Sleep(900 * ms)
		if r, ok := nodes[1].Peek(t.Context(), "k"); !ok || r.Outcome != refill.OutcomeStale || r.Age != time.Second {
			t.Errorf("Peek: got %+v, %v, want a stale value of age 1s", r, ok)
		}
		if n := d.loads.Load(); n != 1 {
			t.Errorf("got %d loads after Peek, want 1", n)
		}
		want(nodes[1], refill.OutcomeStale, time.Second)
		time.Sleep(200 * ms)
		want(nodes[1], refill.OutcomeHit, 200*ms)
		want(nodes[0], refill.OutcomeHit, 200*ms)
		for kind, n := range map[any]int{
			refill.OutcomeLoaded: 1, refill.OutcomeCoalesced: 1, refill.OutcomeLoadedElsewhere: 1,
			refill.OutcomeHit: 3, refill.OutcomeStale: 1,
			refill.EventLoaded: 2, refill.EventPublished: 2, refill.EventStoreUp: 2,
		} {
			if ev.of(kind) != n {
				t.Errorf("got %d events %v, want %d", ev.of(kind), kind, n)
			}
		}
	})
}

func TestRefresh(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Minute})
		for _, l := range nodes {
			get(t, l, "k")
		}
		d.version.Store(1)
		var wg sync.WaitGroup
		for _, l := range nodes { // two Refreshes at the same time share one load
			wg.Go(func() {
				if err := l.Refresh(t.Context(), "k"); err != nil {
					t.Error(err)
				}
				if v := get(t, l, "k"); v != "k v1" {
					t.Errorf("Get after Refresh: got %q, want \"k v1\"", v)
				}
			})
		}
		wg.Wait()
		if n := d.loads.Load(); n != 2 {
			t.Errorf("got %d loads, want 2", n)
		}
		d.fail(errors.New("boom"))
		if err := nodes[0].Refresh(t.Context(), "k"); err == nil {
			t.Error("Refresh returned no error although the load failed")
		}
		if v := get(t, nodes[0], "k"); v != "k v1" {
			t.Errorf("Get after a failed Refresh: got %q, want \"k v1\"", v)
		}
		d.fail(nil)
		d.version.Store(2)
		if err := nodes[1].Refresh(t.Context(), "k", "k2"); err != nil { // within the back-off
			t.Errorf("Refresh within the back-off: got %v, want no error", err)
		}
		synctest.Wait()
		for i, l := range nodes { // both nodes have the value, because the announcement carried the value
			if v := get(t, l, "k"); v != "k v2" {
				t.Errorf("node %d: got %q, want \"k v2\"", i, v)
			}
		}
	})
}

// A Get joins the flight of a Refresh, and the load of that flight fails. The Get must be served the old value, which
// is error-only.
func TestGetDuringARefresh(t *testing.T) {
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
			t.Errorf("got %q, %v, want the error-only value", v, err)
		}
		wg.Wait()
	})
}

// L1 is off, and a Refresh of a key takes 8 s. A Get of that key must return the fresh value of the store at once, and
// must not wait for the Refresh.
func TestGetDuringARefreshWithoutL1(t *testing.T) {
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
			t.Errorf("Get took %v although the store has a fresh value, want at most 1ms", took)
		}
		wg.Wait()
	})
}

// Peek returns when its ctx ends, even if the store does not answer the read of the tag states.
func TestPeekObeysItsContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSpy(memory.New())
		l := node(t, d.tagged, refill.Config{TTL: time.Hour, LocalTTL: -1, Shared: s})
		get(t, l, "red:1")
		s.noTags.Store(true)
		ctx, cancel := context.WithTimeout(t.Context(), 10*ms)
		defer cancel()
		began := time.Now()
		l.Peek(ctx, "red:1")
		if took := time.Since(began); took > 20*ms {
			t.Errorf("Peek took %v, its ctx ended after 10ms", took)
		}
	})
}

// A load can Get other keys. A Get inside a load returns ErrInvalid at once if the Get would wait for that same load.
func TestNestedGets(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var l *refill.Loader[string]
		load := func(ctx context.Context, key string) (string, error) {
			switch key {
			case "self":
				return l.Get(ctx, "self")
			case "ring a":
				return l.Get(ctx, "ring b")
			case "ring b":
				return l.Get(ctx, "ring a")
			case "outer", "outer 2":
				time.Sleep(10 * ms)
				v, err := l.Get(ctx, "inner")
				return "outer of " + v, err
			}
			time.Sleep(100 * ms)
			return key, nil
		}
		l = node(t, load, refill.Config{TTL: time.Minute, MaxLoads: 1})
		for _, key := range []string{"self", "ring a"} {
			began := time.Now()
			if _, err := l.Get(t.Context(), key); !errors.Is(err, refill.ErrInvalid) || time.Since(began) > 0 {
				t.Errorf("Get(%q): got %v after %v, want ErrInvalid at once", key, err, time.Since(began))
			}
		}
		// The load of outer has the only load slot and gets inner. The load of inner needs no slot, even if another
		// caller already waits for a slot to load inner.
		var wg sync.WaitGroup
		began := time.Now()
		wg.Go(func() {
			if v := get(t, l, "outer"); v != "outer of inner" {
				t.Errorf("got %q, want \"outer of inner\"", v)
			}
		})
		time.Sleep(ms)
		wg.Go(func() { get(t, l, "inner") })
		wg.Wait()
		if time.Since(began) > 200*ms {
			t.Errorf("the Gets took %v, want at most 200ms: the nested load waited for a slot", time.Since(began))
		}
	})
}

func TestClose(t *testing.T) {
	t.Run("a background refresh is cancelled, a load with a waiter is not", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			d := &db{took: 100 * ms}
			var ev events
			l := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1, OnEvent: ev.on})
			get(t, l, "stale")
			time.Sleep(2 * time.Second)
			get(t, l, "stale") // starts a refresh
			synctest.Wait()
			d.slow(500 * ms)
			var wg sync.WaitGroup
			wg.Go(func() { get(t, l, "wanted") })
			synctest.Wait()
			began := time.Now()
			if err := l.Close(); err != nil || time.Since(began) != 500*ms {
				t.Errorf("Close: got %v after %v, want nil after the 500ms of the load with a waiter", err, time.Since(began))
			}
			wg.Wait()
			if n := ev.of(refill.EventLoadAbandoned); n != 1 {
				t.Errorf("got %d load-abandoned events, want 1 for the refresh: %v", n, ev.count)
			}
		})
	})
	t.Run("a load that does not end is named", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			release := make(chan struct{})
			l := node(t, func(context.Context, string) (string, error) { <-release; return "", nil },
				refill.Config{LoadTimeout: 3 * time.Second})
			go func() { _, _ = l.Get(t.Context(), "stuck") }()
			synctest.Wait()
			began := time.Now()
			err := l.Close()
			if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "stuck") || took != 3*time.Second {
				t.Errorf("Close: got %v after %v, want an error that names \"stuck\" after 3s", err, took)
			}
			close(release)
		})
	})
	t.Run("an aborted load releases its lease first", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			s := newSpy(memory.New())
			d := &db{took: 2 * time.Second}
			l := node(t, d.load, refill.Config{LoadTimeout: 3 * time.Second, MaxLoads: 1, Shared: s})
			go func() { _, _ = l.Get(t.Context(), "first") }()
			time.Sleep(100 * ms)
			d.slow(time.Hour)
			go func() { _, _ = l.Get(t.Context(), "queued") }() // its load begins at 2 s, when the first load ends
			synctest.Wait()
			began := time.Now()
			time.AfterFunc(2900*ms, func() { s.stuck.Store(true) })
			if err := l.Close(); err == nil || time.Since(began) != 3250*ms {
				t.Errorf("Close: got %v after %v, want an error after LoadTimeout + StoreTimeout", err, time.Since(began))
			}
		})
	})
}

// Close must cancel a background refresh for which no caller waits. In the cases, the refresh has begun because a value
// was stale or because of EarlyRefresh, and a Get has found this value in L1 or in the store.
func TestCloseCancelsRefreshes(t *testing.T) {
	for name, cfg := range map[string]refill.Config{
		"stale, from L1":        {StaleFor: time.Minute},
		"stale, from the store": {StaleFor: time.Minute, LocalTTL: -1},
		"early, from L1":        {TTL: 2 * time.Second, EarlyRefresh: 0.5},
		"early, from the store": {TTL: 2 * time.Second, EarlyRefresh: 0.5, LocalTTL: -1},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				cfg.Jitter = -1
				l := node(t, d.load, cfg)
				get(t, l, "k")
				time.Sleep(1100 * ms)
				d.slow(5 * time.Second)
				began := time.Now()
				get(t, l, "k")
				synctest.Wait()
				if n := d.now.Load(); n != 1 {
					t.Fatalf("got %d refreshes in progress, want 1", n)
				}
				if err := l.Close(); err != nil || time.Since(began) > 0 {
					t.Errorf("Close: got %v after %v, want nil at once", err, time.Since(began))
				}
			})
		})
	}
}

// Close does not cancel a background refresh for which a caller waits.
func TestCloseLetsARefreshFinish(t *testing.T) {
	t.Run("within SoftTimeout", func(t *testing.T) {
		closeDuringARefresh(t, refill.Config{StaleFor: time.Minute, SoftTimeout: 5 * time.Second})
	})
	t.Run("past the stale value", func(t *testing.T) {
		closeDuringARefresh(t, refill.Config{StaleFor: 200 * ms})
	})
}

func closeDuringARefresh(t *testing.T, cfg refill.Config) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		cfg.Jitter = -1
		l := node(t, d.load, cfg)
		get(t, l, "k")
		time.Sleep(1100 * ms)
		d.slow(time.Second)
		d.version.Store(1)
		if cfg.SoftTimeout == 0 {
			get(t, l, "k")
			time.Sleep(300 * ms)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("got %q, want \"k v1\" from the refresh", v)
			}
		})
		time.Sleep(100 * ms)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
	})
}

// A Loader has no load function. Get, GetResult and GetMany must return ErrInvalid even if GetWith has cached a fresh
// value.
func TestGetWithoutALoadFunction(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ctx := t.Context()
		l := node(t, nil, refill.Config{TTL: time.Minute})
		if v, err := l.GetWith(ctx, "k", says("v", 0)); err != nil || v != "v" {
			t.Errorf("GetWith: got %q, %v; want \"v\"", v, err)
		}
		if v, err := l.Get(ctx, "k"); !errors.Is(err, refill.ErrInvalid) {
			t.Errorf("Get: got %q, %v; want ErrInvalid", v, err)
		}
		if r, err := l.GetResult(ctx, "k"); !errors.Is(err, refill.ErrInvalid) {
			t.Errorf("GetResult: got %+v, %v; want ErrInvalid", r, err)
		}
		if got, err := l.GetMany(ctx, []string{"k"}); !errors.Is(err, refill.ErrInvalid) || len(got) != 0 {
			t.Errorf("GetMany: got %v, %v; want ErrInvalid", got, err)
		}
		if v, err := l.GetWith(ctx, "k", never(t)); err != nil || v != "v" {
			t.Errorf("GetWith of a cached value: got %q, %v; want \"v\"", v, err)
		}
	})
}

// A load returns ErrNotFound. Peek must return Absent on the node that loaded and on another node, until NotFoundTTL is
// over. GetResult must return Absent as well.
func TestPeekOfAnAbsence(t *testing.T) {
	bubble(t, func(t *testing.T) {
		load := func(context.Context, string) (string, error) { return "", refill.ErrNotFound }
		cfg := refill.Config{TTL: time.Minute, NotFoundTTL: 5 * time.Second, Jitter: -1, Shared: memory.New()}
		nodes := []*refill.Loader[string]{node(t, load, cfg), node(t, load, cfg)}
		peek := func(when string, want bool) {
			t.Helper()
			for i, l := range nodes {
				if r, ok := l.Peek(t.Context(), "k"); ok || r.Absent != want {
					t.Errorf("%s: node %d: got %+v, %v; want no value and Absent %v", when, i, r, ok, want)
				}
			}
		}
		peek("before the load", false)
		if r, err := nodes[0].GetResult(t.Context(), "k"); !errors.Is(err, refill.ErrNotFound) || !r.Absent {
			t.Errorf("GetResult: got %+v, %v; want ErrNotFound and Absent", r, err)
		}
		peek("after the load", true)
		time.Sleep(5 * time.Second)
		peek("after NotFoundTTL", false)
	})
}
