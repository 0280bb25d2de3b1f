package refill_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests each cell of the table in docs/what-a-load-may-say.md. A row of that table is a setting, that is, one
// or two calls of Fill methods. The columns say what the setting means if the load returns a value, returns an absence,
// fails, or also calls NoStore. The tests also make each setting for one key of a bulk load.

// termsConfig returns the Config of the tests in this file. With its LocalTTL of 1 h, L1 serves a value until the TTL
// of the value is over.
func termsConfig(shared driver.Store) refill.Config {
	return refill.Config{
		TTL: 10 * time.Second, StaleFor: 20 * time.Second, NotFoundTTL: 5 * time.Second, ErrorTTL: 2 * time.Second,
		LocalTTL: time.Hour, Jitter: -1, Shared: shared,
	}
}

// termsCell is a row of the table. set makes the setting, and the fields value, absence, failing and noStore are the
// columns. A column is a string with one letter per moment (afterLoad, afterFailure). The letter says what a Get at
// that moment must return. f: a fresh value. s: a stale value. e: the old value in place of an error. a: an absence. A
// dash: the error of the load. In noStore, n means that the store still remembers the no-store, and a dash means that
// it does not.
type termsCell struct {
	name                             string
	set                              func(f *refill.Fill)
	value, absence, failing, noStore string
}

// afterLoad has the moments of the columns value, absence and noStore. afterFailure has the moments of the column
// failing. All moments count from the start of the first load.
var (
	afterLoad    = seconds(1, 6, 12, 25, 35, 70)
	afterFailure = seconds(16, 20, 25, 35)
)

func seconds(at ...int) (moments []time.Duration) {
	for _, s := range at {
		moments = append(moments, time.Duration(s)*time.Second)
	}
	return moments
}

var termsCells = []termsCell{
	{"nothing", func(*refill.Fill) {}, "ffss--", "a-----", "sss-", "nn----"},
	{"SetTTL(30s)", func(f *refill.Fill) { f.SetTTL(30 * time.Second) }, "ffffs-", "aaaa--", "sss-", "nnnn--"},
	{"SetTTL(0)", func(f *refill.Fill) { f.SetTTL(0) }, "------", "------", "sss-", "------"},
	{"SetTTL(-1)", func(f *refill.Fill) { f.SetTTL(-1) }, "------", "------", "sss-", "------"},
	{"SetTTL(0), SetStaleFor(30s)", func(f *refill.Fill) {
		f.SetTTL(0)
		f.SetStaleFor(30 * time.Second)
	}, "ssss--", "------", "sss-", "------"},
	{"SetTTL(0), SetStaleIfError(30s)", func(f *refill.Fill) {
		f.SetTTL(0)
		f.SetStaleIfError(30 * time.Second)
	}, "eeee--", "------", "sss-", "------"},
	{"SetStaleFor(50s)", func(f *refill.Fill) { f.SetStaleFor(50 * time.Second) }, "ffsss-", "a-----", "sss-", "nn----"},
	{"SetStaleFor(0)", func(f *refill.Fill) { f.SetStaleFor(0) }, "ff----", "a-----", "----", "nn----"},
	{"SetStaleFor(2s)", func(f *refill.Fill) { f.SetStaleFor(2 * time.Second) }, "ff----", "a-----", "----", "nn----"},
	{"SetStaleIfError(50s)", func(f *refill.Fill) {
		f.SetStaleIfError(50 * time.Second)
	}, "ffsse-", "a-----", "sss-", "nn----"},
	{"SetStaleIfError(0)", func(f *refill.Fill) { f.SetStaleIfError(0) }, "ffss--", "a-----", "----", "nn----"},
	{"SetStaleFor(0), SetStaleIfError(50s)", func(f *refill.Fill) {
		f.SetStaleIfError(50 * time.Second)
		f.SetStaleFor(0)
	}, "ffeee-", "a-----", "sss-", "nn----"},
	{"SetErrorTTL(5s)", func(f *refill.Fill) { f.SetErrorTTL(5 * time.Second) }, "ffss--", "a-----", "sss-", "nn----"},
	{"SetKeep(1h)", func(f *refill.Fill) { f.SetKeep(time.Hour) }, "ffss--", "a-----", "sss-", "nn----"},
	{"SetValidator(v)", func(f *refill.Fill) { f.SetValidator("v") }, "ffss--", "a-----", "sss-", "nn----"},
	{"Tag(t)", func(f *refill.Fill) { f.Tag("t") }, "ffss--", "a-----", "sss-", "nn----"},
	{"NoStore()", func(f *refill.Fill) { f.NoStore() }, "------", "------", "sss-", "nn----"},
}

var errTerms = errors.New("no answer")

// The load function of a speaker takes 500 ms and returns what say returns. While say is nil, the load function fails
// at once with errTerms.
type speaker struct {
	say   atomic.Pointer[func(f *refill.Fill) (string, error)]
	loads atomic.Int64
}

func (s *speaker) load(ctx context.Context, _ string) (string, error) {
	s.loads.Add(1)
	if say := s.say.Load(); say != nil {
		time.Sleep(500 * ms)
		return (*say)(refill.FillFrom(ctx))
	}
	return "", errTerms
}

func (s *speaker) says(v string, err error, set func(f *refill.Fill)) {
	say := func(f *refill.Fill) (string, error) {
		set(f)
		return v, err
	}
	s.say.Store(&say)
}

// letter gets a key from a node, and returns the letter of termsCell that describes the result.
func letter(t *testing.T, l *refill.Loader[string], key string) byte {
	t.Helper()
	r, err := l.GetResult(t.Context(), key)
	synctest.Wait() // until the refresh in the background has ended
	switch {
	case errors.Is(err, refill.ErrNotFound):
		return 'a'
	case errors.Is(err, errTerms) || err != nil && r.Value == "":
		return '-'
	case r.Outcome == refill.OutcomeStaleOnError:
		return 'e'
	case r.Outcome == refill.OutcomeStale:
		return 's'
	}
	return 'f'
}

// observe gets a key from each node at each moment, and compares the letters of each node with want.
func observe(t *testing.T, began time.Time, at []time.Duration, nodes []*refill.Loader[string], key, want string) {
	t.Helper()
	got := make([][]byte, len(nodes))
	for _, moment := range at {
		time.Sleep(time.Until(began.Add(moment)))
		for i, l := range nodes {
			got[i] = append(got[i], letter(t, l, key))
		}
	}
	for i := range nodes {
		if string(got[i]) != want {
			t.Errorf("node %d, %s: got %q at %v, want %q", i, key, got[i], at, want)
		}
	}
}

// askBoth gets a key from both nodes at the same time. askBoth checks that one load serves both Gets, and that both
// Gets return want and wantErr. Then askBoth makes all later loads of s fail.
func askBoth(t *testing.T, s *speaker, nodes []*refill.Loader[string], key, want string, wantErr error) {
	t.Helper()
	before := s.loads.Load()
	var wg sync.WaitGroup
	for _, l := range nodes {
		wg.Go(func() {
			if v, err := l.Get(t.Context(), key); v != want || !errors.Is(err, wantErr) {
				t.Errorf("those who waited for the load: got %q, %v; want %q, %v", v, err, want, wantErr)
			}
		})
	}
	wg.Wait()
	if n := s.loads.Load() - before; n != 1 {
		t.Errorf("got %d loads for two nodes that ask at once, want 1", n)
	}
	s.say.Store(nil)
}

func TestWhatALoadMaySay(t *testing.T) {
	for _, c := range termsCells {
		t.Run(c.name, func(t *testing.T) {
			t.Run("value", func(t *testing.T) { bubble(t, c.testValue) })
			t.Run("absence", func(t *testing.T) { bubble(t, c.testAbsence) })
			t.Run("failing load", func(t *testing.T) { bubble(t, c.testFailing) })
			t.Run("bulk part", func(t *testing.T) { bubble(t, c.testBulkPart) })
			t.Run("no-store", func(t *testing.T) { bubble(t, c.testNoStore) })
		})
	}
}

func termsNodes(t *testing.T, s *speaker) (driver.Store, []*refill.Loader[string]) {
	shared := memory.New()
	cfg := termsConfig(shared)
	a := node(t, s.load, cfg)
	cfg.LocalTTL = -1
	return shared, []*refill.Loader[string]{a, node(t, s.load, cfg)}
}

func (c termsCell) testValue(t *testing.T) {
	var s speaker
	_, nodes := termsNodes(t, &s)
	began := time.Now()
	s.says("v", nil, c.set)
	if c.name == "NoStore()" { // the other node would load its own value, so only one node asks
		get(t, nodes[0], "k")
		s.say.Store(nil)
	} else {
		askBoth(t, &s, nodes, "k", "v", nil)
	}
	observe(t, began, afterLoad, nodes, "k", c.value)
}

func (c termsCell) testAbsence(t *testing.T) {
	var s speaker
	_, nodes := termsNodes(t, &s)
	began := time.Now()
	s.says("", refill.ErrNotFound, c.set)
	if c.name == "NoStore()" {
		_, _ = nodes[0].Get(t.Context(), "k")
		s.say.Store(nil)
	} else {
		askBoth(t, &s, nodes, "k", "", refill.ErrNotFound)
	}
	observe(t, began, afterLoad, nodes, "k", c.absence)
}

// testFailing first loads a value without a setting. 15 s later, when the value is stale, a second load applies c.set
// and fails. The test then checks how long the nodes still serve the old value.
func (c termsCell) testFailing(t *testing.T) {
	var s speaker
	_, nodes := termsNodes(t, &s)
	began := time.Now()
	s.says("v", nil, func(*refill.Fill) {})
	askBoth(t, &s, nodes, "k", "v", nil)
	time.Sleep(time.Until(began.Add(15 * time.Second)))
	s.says("", errTerms, c.set)
	if v := get(t, nodes[0], "k"); v != "v" {
		t.Errorf("before the failure: got %q, want the stale value", v)
	}
	time.Sleep(600 * ms)
	s.say.Store(nil)
	observe(t, began, afterFailure, nodes, "k", c.failing)
}

// testBulkPart applies c.set to key k in a bulk load of the keys k and plain. The setting must hold for k. The nodes
// must serve plain as if no setting had been made.
func (c termsCell) testBulkPart(t *testing.T) {
	shared := memory.New()
	var fails atomic.Bool
	load := func(ctx context.Context, keys []string) (map[string]string, error) {
		if fails.Load() {
			return nil, errTerms
		}
		c.set(refill.FillFrom(ctx).For("k"))
		return map[string]string{"k": "v", "plain": "v"}, nil
	}
	nodes := make([]*refill.Loader[string], 2)
	for i := range nodes {
		l, err := refill.NewBulk("thing", load, termsConfig(shared))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		nodes[i] = l
	}
	began := time.Now()
	got, err := nodes[0].GetMany(t.Context(), []string{"k", "plain"})
	if err != nil || len(got) != 2 {
		t.Errorf("GetMany: got %v, %v; want both values", got, err)
	}
	fails.Store(true)
	for i, moment := range afterLoad {
		observe(t, began, []time.Duration{moment}, nodes, "k", c.value[i:i+1])
		observe(t, began, []time.Duration{moment}, nodes, "plain", termsCells[0].value[i:i+1])
	}
}

// testNoStore applies the setting of c in a load that also calls NoStore. testNoStore then checks at each moment of
// afterLoad whether the store still remembers the no-store.
func (c termsCell) testNoStore(t *testing.T) {
	var s speaker
	shared, nodes := termsNodes(t, &s)
	began := time.Now()
	s.says("v", nil, func(f *refill.Fill) {
		c.set(f)
		f.NoStore()
	})
	get(t, nodes[0], "k")
	var got []byte
	for _, moment := range afterLoad {
		time.Sleep(time.Until(began.Add(moment)))
		b, err := shared.Get(t.Context(), "thing:k")
		if err != nil {
			t.Fatal(err)
		}
		r, err := driver.DecodeRecord(b)
		switch {
		case err == nil && !r.NoStore:
			t.Errorf("the store holds %+v, want no value", r)
		case err == nil && shared.Now().Before(r.FreshUntil):
			got = append(got, 'n')
		default:
			got = append(got, '-')
		}
	}
	if string(got) != c.noStore {
		t.Errorf("got %q at %v, want %q", got, afterLoad, c.noStore)
	}
}

// The loads of a key call SetErrorTTL and fail. Each of the two nodes loads once. Then the back-off of SetErrorTTL must
// hold on both nodes, even if it is longer than Config.MaxErrorTTL. The back-off must not grow with the next failure.
func TestSetErrorTTL(t *testing.T) {
	for _, c := range []struct {
		set, want time.Duration
	}{{5 * time.Minute, 5 * time.Minute}, {100 * ms, 100 * ms}, {0, 0}, {-1, 0}, {1 << 62, 20 * 365 * 24 * time.Hour}} {
		t.Run(c.set.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var s speaker
				_, nodes := termsNodes(t, &s)
				began := time.Now()
				s.says("", errTerms, func(f *refill.Fill) { f.SetErrorTTL(c.set) })
				var wg sync.WaitGroup
				for _, l := range nodes {
					wg.Go(func() {
						_, err := l.Get(t.Context(), "k")
						var failed *refill.LoadError
						if !errors.As(err, &failed) || failed.RetryAfter.Round(ms) != c.want {
							t.Errorf("got %v, want a back-off of %v", err, c.want)
						}
					})
				}
				wg.Wait()
				for round := int64(1); round <= 2; round++ {
					want := 2 * round
					if c.want == 0 {
						want = round + 1 // no back-off: two loads before the rounds, and one load at the end of each round
					}
					if c.want > 0 {
						for _, l := range nodes {
							_, _ = l.Get(t.Context(), "k")
						}
						if n := s.loads.Load(); n != want {
							t.Errorf("got %d loads right after failure %d, want %d", n, round, want)
						}
					}
					if c.want > time.Hour {
						return
					}
					if c.want > 0 {
						time.Sleep(c.want - 10*ms)
						for _, l := range nodes {
							_, _ = l.Get(t.Context(), "k")
						}
						time.Sleep(20 * ms)
					}
					if n := s.loads.Load(); n != want {
						t.Errorf("got %d loads after %v, want %d: the back-off holds on both nodes", n, time.Since(began), want)
					}
					_, _ = nodes[round%2].Get(t.Context(), "k")
				}
			})
		})
	}
}

// SetKeep keeps a value beyond StaleIfError, for Previous only. No Get and no Peek may serve the value. Within the time
// of SetKeep, a load on a new node must get the value and its validator from Previous. After an Invalidate or an
// InvalidateTag, Previous must return no value.
func TestSetKeep(t *testing.T) {
	type seen struct {
		value, validator string
		ok               bool
	}
	ctx, kept := context.Background(), seen{"v", "v7", true}
	for name, c := range map[string]struct {
		after time.Duration
		do    func(l *refill.Loader[string]) error
		want  seen
	}{
		"within":         {time.Minute, nil, kept},
		"beyond":         {3 * time.Minute, nil, seen{}},
		"invalidated":    {time.Minute, func(l *refill.Loader[string]) error { return l.Invalidate(ctx, "k") }, seen{}},
		"tag":            {time.Minute, func(l *refill.Loader[string]) error { return l.InvalidateTag(ctx, "t") }, seen{}},
		"expired":        {time.Minute, func(l *refill.Loader[string]) error { return l.Expire(ctx, "k") }, kept},
		"expired by tag": {time.Minute, func(l *refill.Loader[string]) error { return l.ExpireTag(ctx, "t") }, kept},
	} {
		for _, ttl := range []time.Duration{10 * time.Second, 0} {
			t.Run(name+" "+ttl.String(), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					var s speaker
					shared, nodes := termsNodes(t, &s)
					s.says("v", nil, func(f *refill.Fill) {
						f.SetTTL(ttl)
						f.SetValidator("v7")
						f.Tag("t")
						f.SetKeep(2 * time.Minute)
					})
					askBoth(t, &s, nodes, "k", "v", nil)
					time.Sleep(c.after)
					if c.do != nil {
						if err := c.do(nodes[0]); err != nil {
							t.Fatal(err)
						}
					}
					for i, l := range nodes {
						if r, ok := l.Peek(t.Context(), "k"); ok {
							t.Errorf("node %d: Peek found %+v, want no value", i, r)
						}
						if v, err := l.Get(t.Context(), "k"); err == nil || v != "" {
							t.Errorf("node %d: got %q, %v; want the error of the load: the value is kept for Previous only", i, v, err)
						}
					}
					time.Sleep(3 * time.Second) // until the back-off is over
					cfg := termsConfig(shared)
					cfg.LocalTTL = -1
					var got seen
					newcomer := node(t, func(ctx context.Context, _ string) (string, error) {
						got.value, got.validator, got.ok = refill.Previous[string](ctx)
						return "new", nil
					}, cfg)
					if v := get(t, newcomer, "k"); v != "new" || got != c.want {
						t.Errorf("got %q, and the load was given %+v; want \"new\" and %+v", v, got, c.want)
					}
				})
			})
		}
	}
}

// A load calls SetKeep for an absence, or together with NoStore. SetKeep must have no effect: one minute later, the
// store must hold no record of the key.
func TestSetKeepOfNoValue(t *testing.T) {
	for _, noStore := range []bool{false, true} {
		bubble(t, func(t *testing.T) {
			shared := memory.New()
			l := node(t, func(ctx context.Context, _ string) (string, error) {
				refill.FillFrom(ctx).SetKeep(time.Hour)
				if noStore {
					refill.FillFrom(ctx).NoStore()
					return "v", nil
				}
				return "", refill.ErrNotFound
			}, termsConfig(shared))
			_, _ = l.Get(t.Context(), "k")
			time.Sleep(time.Minute)
			if b, err := shared.Get(t.Context(), "thing:k"); b != nil || err != nil {
				t.Errorf("no-store %v: the store holds %q, %v; want nothing", noStore, b, err)
			}
		})
	}
}

// A failing load calls SetStaleIfError(1 min). The old value may then be served until 1 min after the end of its TTL.
// As long as its TTL lasts, the old value must stay fresh. After the 1 min, a further load fails and sets no limit.
// This load must not bring the old value back.
func TestAFailingLoadLimitsTheOldValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var s speaker
		shared := memory.New()
		cfg := termsConfig(shared)
		cfg.StaleFor, cfg.StaleIfError = 0, time.Hour
		nodes := []*refill.Loader[string]{node(t, s.load, cfg), node(t, s.load, cfg)}
		began := time.Now()
		s.says("v", nil, func(*refill.Fill) {})
		askBoth(t, &s, nodes, "k", "v", nil)
		s.says("", errTerms, func(f *refill.Fill) { f.SetStaleIfError(time.Minute) })
		if err := nodes[0].Refresh(t.Context(), "k"); !errors.Is(err, errTerms) {
			t.Errorf("Refresh: got %v, want the error of the load", err)
		}
		observe(t, began, []time.Duration{5 * time.Second}, nodes, "k", "f")
		observe(t, began, []time.Duration{15 * time.Second, 40 * time.Second, 68 * time.Second}, nodes, "k", "eee")
		observe(t, began, []time.Duration{75 * time.Second}, nodes, "k", "-")
		s.say.Store(nil) // from here on, loads fail and set no limit
		observe(t, began, []time.Duration{80 * time.Second, 5 * time.Minute}, nodes, "k", "--")
	})
}

// While the store does not answer, a failing load forbids the old value with SetStaleIfError(0). When the store answers
// again, no node may serve the old value.
func TestAFailingLoadForbidsTheOldValueDuringAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var sp speaker
		shared := memory.New()
		s := newSpy(shared)
		cfg := termsConfig(s)
		cfg.StaleFor, cfg.StaleIfError = 0, time.Hour
		a := node(t, sp.load, cfg)
		cfg.Shared = shared
		b := node(t, sp.load, cfg)
		sp.says("v", nil, func(*refill.Fill) {})
		askBoth(t, &sp, []*refill.Loader[string]{a, b}, "k", "v", nil)
		time.Sleep(15 * time.Second)
		s.cut(true)
		sp.says("", errTerms, func(f *refill.Fill) { f.SetStaleIfError(0) })
		if v, err := a.Get(t.Context(), "k"); !errors.Is(err, errTerms) {
			t.Errorf("without the store: got %q, %v; want the error of the load", v, err)
		}
		before := sp.loads.Load()
		if v, err := a.Get(t.Context(), "k"); !errors.Is(err, errTerms) || sp.loads.Load() != before {
			t.Errorf("within the back-off: got %q, %v; want the error of the load, and no further load", v, err)
		}
		s.cut(false)
		sp.say.Store(nil)
		time.Sleep(10 * time.Second) // until node a has retried the removal of the old value
		for _, l := range []*refill.Loader[string]{a, b} {
			if v, err := l.Get(t.Context(), "k"); !errors.Is(err, errTerms) && err == nil {
				t.Errorf("with the store: got %q, %v; want the error of the load", v, err)
			}
		}
	})
}

// Two nodes have an old value that is error-only, and ask for the key at the same time. One node loads, and the other
// node waits. The load fails and forbids the old value with SetStaleIfError(0). Then the other node loads, with the
// same result. Both nodes must get an error. Neither node may serve the old value later.
func TestAForbiddenValueOnANodeThatWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var s speaker
		cfg := termsConfig(memory.New())
		cfg.StaleFor, cfg.StaleIfError = 0, time.Hour
		nodes := []*refill.Loader[string]{node(t, s.load, cfg), node(t, s.load, cfg)}
		began := time.Now()
		s.says("v", nil, func(*refill.Fill) {})
		askBoth(t, &s, nodes, "k", "v", nil)
		time.Sleep(15 * time.Second)
		s.says("", errTerms, func(f *refill.Fill) { f.SetStaleIfError(0) })
		var wg sync.WaitGroup
		for _, l := range nodes {
			wg.Go(func() {
				var failed *refill.LoadError
				if v, err := l.Get(t.Context(), "k"); !errors.As(err, &failed) {
					t.Errorf("got %q, %v; want the error of the load", v, err)
				}
			})
		}
		wg.Wait()
		if n := s.loads.Load(); n != 3 {
			t.Errorf("got %d loads, want 3: one for the value, and one of each node that fails", n)
		}
		s.say.Store(nil)
		observe(t, began, seconds(16, 20, 60), nodes, "k", "---")
	})
}
