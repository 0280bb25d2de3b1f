package refill_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// table is a database that is asked for many keys at once.
type table struct {
	took  time.Duration
	mu    sync.Mutex
	calls [][]string
	err   error
	lacks map[string]bool
}

func (d *table) load(ctx context.Context, keys []string) (map[string]string, error) {
	d.mu.Lock()
	d.calls = append(d.calls, slices.Sorted(slices.Values(keys)))
	err := d.err
	d.mu.Unlock()
	select {
	case <-time.After(d.took):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	rows := map[string]string{}
	for _, key := range keys {
		if !d.lacks[key] {
			rows[key] = "row " + key
		}
	}
	return rows, err
}

func (d *table) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

// asked returns the calls since the last time.
func (d *table) asked() (calls [][]string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	calls, d.calls = d.calls, nil
	return calls
}

func bulk(t *testing.T, d *table, cfg refill.Config) *refill.Loader[string] {
	t.Helper()
	if cfg.TTL == 0 {
		cfg.TTL = time.Minute
	}
	l, err := refill.NewBulk("thing", d.load, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func names(from, to int) (keys []string) {
	for i := from; i < to; i++ {
		keys = append(keys, fmt.Sprintf("k%04d", i))
	}
	return keys
}

// all demands a row for each key.
func all(t *testing.T, l *refill.Loader[string], keys []string) {
	t.Helper()
	got, err := l.GetMany(t.Context(), keys)
	if err != nil {
		t.Error(err)
	}
	for _, key := range keys {
		if got[key] != "row "+key {
			t.Errorf("%s = %q", key, got[key])
		}
	}
}

func TestGetMany(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 50 * ms, lacks: map[string]bool{"k0003": true}}
		s := newSpy(refill.NewMemory())
		l := bulk(t, d, refill.Config{Shared: s, NotFoundTTL: time.Minute, Jitter: -1})
		get(t, l, "k0000")
		if calls := d.asked(); len(calls) != 1 || len(calls[0]) != 1 {
			t.Fatalf("one Get made the calls %v", calls)
		}
		before := s.gets.Load()
		keys := append(names(0, 10), "k0001") // one twice
		for range 2 {                         // the second time from L1
			got, err := l.GetMany(t.Context(), keys)
			synctest.Wait() // L1 takes its time with keys that share a place in front
			if err != nil || len(got) != 9 || got["k0007"] != "row k0007" {
				t.Errorf("%v, %v", got, err)
			}
			if _, there := got["k0003"]; there {
				t.Error("a key that is not found has a value")
			}
		}
		if calls := d.asked(); len(calls) != 1 || !slices.Equal(calls[0], names(1, 10)) {
			t.Errorf("calls %v, want one for exactly the nine that are missing", calls)
		}
		if n := s.many.Load(); n != 1 || s.gets.Load() != before {
			t.Errorf("%d reads of many and %d of one, want 1 and 0", n, s.gets.Load()-before)
		}
		if got, err := l.GetMany(t.Context(), nil); err != nil || len(got) != 0 {
			t.Errorf("no keys: %v, %v", got, err)
		}
	})
}

// Two nodes with overlapping keys in opposite order: each key is loaded once, by two calls in all, and nobody blocks.
func TestGetManyOfOverlappingKeys(t *testing.T) {
	for _, callers := range []int{1, 3} {
		t.Run(fmt.Sprint(callers, " on each"), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &table{took: 100 * ms}
				shared := refill.NewMemory()
				cfg := refill.Config{Shared: shared}
				a, b := bulk(t, d, cfg), bulk(t, d, cfg)
				all(t, a, names(0, 700))
				d.asked()
				back := names(600, 1000)
				slices.Reverse(back)
				var wg sync.WaitGroup
				for range callers {
					wg.Go(func() { all(t, a, names(500, 900)) })
					wg.Go(func() { all(t, b, back) })
				}
				wg.Wait()
				loaded := map[string]int{}
				calls := d.asked()
				for _, call := range calls {
					for _, key := range call {
						loaded[key]++
					}
				}
				if len(loaded) != 300 || len(calls) > 2*callers {
					t.Errorf("%d keys in %d calls, want the 300 that were missing in %d at most", len(loaded), len(calls), 2*callers)
				}
				for key, n := range loaded {
					if n != 1 {
						t.Errorf("%s was loaded %d times", key, n)
					}
				}
			})
		})
	}
}

// One that had leases dies: the other loads what it waited for when they are over, in few calls, and nothing stays locked.
func TestGetManyAndANodeThatDies(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: time.Second}
		shared := refill.NewMemory()
		s := newSpy(shared)
		a, b := bulk(t, d, refill.Config{Shared: s}), bulk(t, d, refill.Config{Shared: shared})
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = a.GetMany(t.Context(), names(0, 100)) })
		time.Sleep(10 * ms)
		s.died.Store(true)
		began := time.Now()
		all(t, b, names(50, 150))
		if took := time.Since(began); took > 2600*ms {
			t.Errorf("it took %v: the dead node's leases (1 s), and two loads of a second", took)
		}
		if calls := d.asked(); len(calls) != 3 {
			t.Errorf("%d calls, want the dead node's, and two", len(calls))
		}
		wg.Wait()
		for _, key := range names(0, 150) {
			nobodyHas(t, shared, key)
		}
	})
}

// Partial results: what is there is returned, with an error per key that has none.
func TestGetManyThatFails(t *testing.T) {
	boom := errors.New("boom")
	for name, end := range map[string]func(){
		"an error": func() {},
		"a panic":  func() { panic(boom) },
		"Goexit":   runtime.Goexit,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var failing atomic.Bool
				var calls atomic.Int64
				l, err := refill.NewBulk("thing", func(_ context.Context, keys []string) (map[string]string, error) {
					calls.Add(1)
					if failing.Load() {
						end()
						return map[string]string{keys[0]: "half"}, boom
					}
					return map[string]string{"a": "1", "b": "2"}, nil
				}, refill.Config{TTL: time.Minute})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				if _, err := l.GetMany(t.Context(), []string{"a", "b"}); err != nil {
					t.Fatal(err)
				}
				failing.Store(true)
				for range 2 { // the second time there is a back-off
					got, err := l.GetMany(t.Context(), []string{"a", "c", "b", "d", ""})
					var keys *refill.KeyErrors
					var load *refill.LoadError
					if !errors.As(err, &keys) || len(keys.Errs) != 3 || !errors.As(keys.Errs["c"], &load) ||
						!errors.As(keys.Errs["d"], &load) || !errors.Is(keys.Errs[""], refill.ErrInvalid) || !errors.Is(err, refill.ErrInvalid) {
						t.Errorf("%v, want errors of c, d and the empty key", err)
					}
					if name != "Goexit" && !errors.Is(err, boom) {
						t.Errorf("%v does not wrap the cause", err)
					}
					if len(got) != 2 || got["a"] != "1" || got["b"] != "2" {
						t.Errorf("got %v beside the error", got)
					}
				}
				if n := calls.Load(); n != 2 {
					t.Errorf("%d calls, want 2: the back-off holds for every key of a call", n)
				}
			})
		})
	}
}

// A caller that leaves gets what there is; the rest has its error; the load goes on for others, and ends with the last.
func TestGetManyIsLeft(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ended := make(chan error, 9)
		l, err := refill.NewBulk("thing", func(ctx context.Context, keys []string) (map[string]string, error) {
			if keys[0] == "there" {
				return map[string]string{"there": "yes"}, nil
			}
			<-ctx.Done()
			ended <- ctx.Err()
			return nil, ctx.Err()
		}, refill.Config{TTL: time.Minute, LoadTimeout: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		get(t, l, "there")
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		long, cancelLong := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancelLong()
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = l.Get(long, "b") }) // joins the flight of b below
		wg.Go(func() {
			time.Sleep(10 * ms)
			_, _ = l.Get(long, "c")
		})
		synctest.Wait()
		began := time.Now()
		got, err := l.GetMany(short, []string{"there", "c", "d"})
		if !errors.Is(err, context.DeadlineExceeded) || got["there"] != "yes" || time.Since(began) > 1010*ms {
			t.Errorf("%v, %v after %v", got, err, time.Since(began))
		}
		time.Sleep(time.Second)
		if len(ended) > 0 {
			t.Error("the load was cancelled although somebody waits for c")
		}
		wg.Wait()
		synctest.Wait()
		if len(ended) != 2 {
			t.Errorf("%d loads were cancelled, want both", len(ended))
		}
	})
}

// Single Gets share calls within BulkWindow.
func TestBulkWindow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 50 * ms}
		l := bulk(t, d, refill.Config{BulkWindow: 10 * ms, MaxLoads: 1})
		var wg sync.WaitGroup
		for i, key := range names(0, 90) {
			wg.Go(func() {
				time.Sleep(time.Duration(i/30) * 7 * ms) // three waves: at 0, 7 and 14 ms
				if v := get(t, l, key); v != "row "+key {
					t.Errorf("%q", v)
				}
			})
		}
		wg.Wait()
		if calls := d.asked(); len(calls) != 2 || len(calls[0]) != 60 || len(calls[1]) != 30 {
			t.Errorf("%d calls, want one of 60 keys and one of 30", len(calls))
		}
	})
}

// Stale keys are served at once and refreshed with the same call that loads the missing ones.
func TestGetManyOfStaleKeys(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{}
		l := bulk(t, d, refill.Config{TTL: time.Second, StaleFor: time.Minute, Jitter: -1})
		all(t, l, names(0, 50))
		time.Sleep(1100 * ms)
		d.asked()
		all(t, l, names(20, 80))
		synctest.Wait()
		if calls := d.asked(); len(calls) != 1 || !slices.Equal(calls[0], names(20, 80)) {
			t.Errorf("calls %v, want one: 30 stale ones and 30 missing", calls)
		}
		d.took = time.Second
		time.Sleep(1100 * ms)
		began := time.Now()
		all(t, l, names(20, 80))
		if took := time.Since(began); took > 0 {
			t.Errorf("stale values took %v", took)
		}
	})
}

// Loaders that load one key at a time have GetMany, too: single loads side by side, at most MaxLoads.
func TestGetManyWithSingleLoads(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		l := node(t, d.load, refill.Config{TTL: time.Minute, MaxLoads: 5})
		began := time.Now()
		got, err := l.GetMany(t.Context(), names(0, 20))
		if err != nil || len(got) != 20 || got["k0007"] != "k0007 v0" {
			t.Errorf("%v, %v", got, err)
		}
		if took := time.Since(began); d.most.Load() != 5 || took != 400*ms {
			t.Errorf("%d at once, %v in all; want 5 and 400 ms", d.most.Load(), took)
		}
		empty := node(t, nil, refill.Config{TTL: time.Minute})
		if _, err := empty.GetMany(t.Context(), []string{"a"}); !errors.Is(err, refill.ErrInvalid) {
			t.Errorf("without a load function: %v", err)
		}
	})
}

// One GetMany is one caller, whatever the number of its keys.
func TestGetManyAndMaxWaiters(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: time.Second}
		l := bulk(t, d, refill.Config{MaxWaiters: 2})
		var wg sync.WaitGroup
		wg.Go(func() { all(t, l, names(0, 100)) })
		wg.Go(func() { all(t, l, names(50, 150)) })
		synctest.Wait()
		if _, err := l.GetMany(t.Context(), names(0, 3)); !errors.Is(err, refill.ErrOverloaded) {
			t.Errorf("a third caller: %v", err)
		}
		wg.Wait()
		all(t, l, names(200, 300))
	})
}

// A bulk load within MaxLoads counts as one, and a load that asks for more keys of its own Loader does not wait for itself.
func TestNestedGetMany(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var l *refill.Loader[string]
		l, err := refill.NewBulk("thing", func(ctx context.Context, keys []string) (map[string]string, error) {
			rows := map[string]string{}
			for _, key := range keys {
				rows[key] = key
			}
			if slices.Contains(keys, "outer") {
				inner, err := l.GetMany(ctx, []string{"x", "y"})
				if err != nil || len(inner) != 2 {
					t.Errorf("inner: %v, %v", inner, err)
				}
				if _, err := l.Get(ctx, "outer"); !errors.Is(err, refill.ErrInvalid) {
					t.Errorf("a load that asks for its own key: %v", err)
				}
			}
			return rows, nil
		}, refill.Config{TTL: time.Minute, MaxLoads: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if got, err := l.GetMany(t.Context(), []string{"outer", "other"}); err != nil || len(got) != 2 {
			t.Errorf("%v, %v", got, err)
		}
	})
}

// What is said of a bulk load holds for all its keys, what is said of one key for that one.
func TestFillOfABulkLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		long := fmt.Sprint("long ", string(make([]byte, 600)))
		l, err := refill.NewBulk("thing", func(ctx context.Context, keys []string) (map[string]string, error) {
			f := refill.FillFrom(ctx)
			f.SetTTL(time.Hour)
			f.For("short").SetTTL(time.Second)
			f.For(long).SetValidator("v7")
			f.For("unknown").NoStore()
			rows := map[string]string{}
			for _, key := range keys {
				rows[key] = key
			}
			return rows, nil
		}, refill.Config{TTL: time.Minute, Jitter: -1})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if _, err := l.GetMany(t.Context(), []string{"short", "plain", long}); err != nil {
			t.Fatal(err)
		}
		for key, want := range map[string]time.Duration{"short": time.Second, "plain": time.Hour, long: time.Hour} {
			if r, ok := l.Peek(t.Context(), key); !ok || r.Remaining != want || r.Value != key {
				t.Errorf("%.10s…: %v left, want %v", key, r.Remaining, want)
			}
		}
		if r, _ := l.Peek(t.Context(), long); r.Validator != "v7" {
			t.Errorf("validator %q", r.Validator)
		}
	})
}

// Refresh of many keys: one call for all, whatever is cached.
func TestRefreshMany(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 10 * ms}
		l := bulk(t, d, refill.Config{})
		all(t, l, names(0, 1100))
		synctest.Wait() // a flight that is about to end would be waited for, and its key loaded after the others
		d.asked()
		if err := l.Refresh(t.Context(), names(0, 1100)...); err != nil {
			t.Fatal(err)
		}
		if calls := d.asked(); len(calls) != 2 || len(calls[0]) != 1024 {
			t.Errorf("%d calls, want one for each 1,024 keys", len(calls))
		}
		d.fail(errors.New("boom"))
		if err := l.Refresh(t.Context(), "k0001", "new"); err == nil {
			t.Error("no error")
		}
		all(t, l, names(0, 300))
	})
}

// Without the store: what L1 has, and one bulk call for the rest.
func TestGetManyWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &table{took: 50 * ms}
		s := newSpy(refill.NewMemory())
		l := bulk(t, d, refill.Config{Shared: s})
		all(t, l, names(0, 100))
		synctest.Wait() // L1 takes its time with keys that share a place in front
		d.asked()
		s.cut(true)
		all(t, l, names(50, 200))
		if calls := d.asked(); len(calls) != 1 || len(calls[0]) != 100 {
			t.Errorf("%d calls, want one for the hundred that L1 does not have", len(calls))
		}
	})
}

// A bulk load that hangs is cut off like any other: its keys get the time-out, and work again.
func TestBulkLoadTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		hang, free := atomic.Bool{}, make(chan struct{})
		hang.Store(true)
		l, err := refill.NewBulk("thing", func(_ context.Context, keys []string) (map[string]string, error) {
			if hang.Load() {
				<-free // does not heed its ctx
			}
			return map[string]string{"a": "1", "b": "2"}, nil
		}, refill.Config{TTL: time.Minute, LoadTimeout: time.Second, ErrorTTL: -1})
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		_, err = l.GetMany(t.Context(), []string{"a", "b"})
		var keys *refill.KeyErrors
		var load *refill.LoadError
		if !errors.As(err, &keys) || len(keys.Errs) != 2 || !errors.As(err, &load) || !load.Timeout || time.Since(began) > 1100*ms {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		hang.Store(false)
		if got, err := l.GetMany(t.Context(), []string{"a", "b"}); err != nil || len(got) != 2 {
			t.Errorf("afterwards: %v, %v", got, err)
		}
		close(free)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
}
