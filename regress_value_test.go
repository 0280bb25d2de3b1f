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
)

// This file tests that refill does not have certain bugs of other libraries about values, keys and lifetimes. The
// comment at the top of regress_lock_test.go explains the regress files. Tests in other files check that refill does
// not have these bugs:
//
//	MS HybridCache, dogpile.cache (fixed): bytes of another type or version break a Get  TestABadRecordIsAMissAndAnEvent
//	FusionCache only warns of contradictory settings, where New returns an error         TestConfigErrorsNameTheField
//	Rails, Caffeine: nil is not cached, so an absence is loaded again and again          TestAbsence

// rockscache counts in whole seconds and subtracts a delay and a jitter from TTL. So rockscache never caches a value
// with a TTL below about 11 s. go-redis/cache turns a TTL below one second into an hour. async-cache-dedupe turns a
// TTL below one second into zero. Here a value with a short TTL is cached for that TTL.
func TestShortTTLs(t *testing.T) {
	for _, ttl := range []time.Duration{300 * ms, 999 * ms, 1500 * ms, 10 * time.Second} {
		t.Run(ttl.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				nodes := fleet(t, 2, d, refill.Config{TTL: ttl}) // with jitter
				getTen := func(want int64, when string) {
					t.Helper()
					for i := range 10 {
						get(t, nodes[i%2], "k")
					}
					if n := d.loads.Load(); n != want {
						t.Errorf("got %d loads %s, want %d", n, when, want)
					}
				}
				getTen(1, "at the start")
				time.Sleep(ttl * 8 / 10)
				getTen(1, "within TTL")
				time.Sleep(ttl*2/10 + 50*ms) // until TTL is over, and the 50 ms by which the clock of L1 may be late
				getTen(2, "after TTL")
			})
		})
	}
}

// The jitter of go-zero is ± 5 %, and FusionCache adds its jitter to the TTL. So both libraries serve some values for
// longer than TTL. In rueidisaside and redcache there is no jitter, so values that were loaded together expire
// together. Here values that were loaded together expire at different times, and no value is fresh for longer than TTL.
func TestJitterSpreadsAndNeverLengthens(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const ttl = 100 * time.Second
		l := fleet(t, 1, &db{}, refill.Config{TTL: ttl, Jitter: 0.2})[0]
		lives := map[time.Duration]bool{}
		for i := range 500 {
			r, err := l.GetResult(t.Context(), fmt.Sprint(i))
			if err != nil || r.Remaining > ttl || r.Remaining < ttl*8/10 {
				t.Errorf("got a value that is fresh for %v, %v, want 80s to 100s", r.Remaining, err)
			}
			lives[r.Remaining.Truncate(time.Second)] = true
		}
		if len(lives) < 15 {
			t.Errorf("got values that end in %d different seconds of 20, want at least 15", len(lives))
		}
	})
}

// jetcache-go and go-zero reserve the value "*" for "not found". rueidisaside treats a value that begins with
// "rueidisid:" as a lock. redcache treats a value that begins with "__redcache:lock:" as a lock. replicate/go rejects
// zero values. So each of these libraries cannot cache certain values. Here every value can be cached, even a value
// that looks like a lock, a failure, a record or a token of refill.
func TestNoValueIsReserved(t *testing.T) {
	const key = "k"
	for _, value := range []string{
		"", "*", "nil", "null", "0", "false", "\x00", "!", `!{"node":"x","text":"boom"}`, "rueidisid:1", "__redcache:lock:1",
		"host-000000000000#1", "RF1", "RF1\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01x", "refill: not found",
		key, "thing:" + key,
	} {
		t.Run(fmt.Sprintf("%q", value), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				cfg := refill.Config{TTL: time.Hour, StaleFor: time.Hour, Shared: memory.New()}
				l, reader := node(t, says(value, 0), cfg), node(t, never(t), cfg)
				for range 2 { // the first Gets load or read the store, the later Gets read L1
					for _, l := range []*refill.Loader[string]{l, reader} {
						if v, err := l.Get(t.Context(), key); v != value || err != nil {
							t.Errorf("got %q, %v, want %q", v, err, value)
						}
					}
				}
				if err := l.Refresh(t.Context(), key); err != nil {
					t.Error(err)
				}
				synctest.Wait()
				if v, err := reader.Get(t.Context(), key); v != value || err != nil {
					t.Errorf("got %q, %v after a refresh, want %q", v, err, value)
				}
			})
		})
	}
}

// In sturdyc a corrupt or outdated record in the shared store fails every Get until the TTL of the record ends. Here
// such a record is a miss, and the next load replaces the record. Refresh, Expire, Invalidate and Peek do not fail
// either.
func TestCorruptRecordIsReplaced(t *testing.T) {
	for name, use := range map[string]func(*refill.Loader[string]) error{
		"Get":        func(*refill.Loader[string]) error { return nil },
		"Refresh":    func(l *refill.Loader[string]) error { return l.Refresh(context.Background(), "k") },
		"Expire":     func(l *refill.Loader[string]) error { return l.Expire(context.Background(), "k") },
		"Invalidate": func(l *refill.Loader[string]) error { return l.Invalidate(context.Background(), "k") },
		"Peek": func(l *refill.Loader[string]) error {
			if r, ok := l.Peek(context.Background(), "k"); ok {
				return fmt.Errorf("found %+v", r)
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				cfg := refill.Config{TTL: time.Hour, Shared: memory.New()}
				foreign(t, cfg.Shared, "thing:k", []byte(`{"an":"older schema"}`))
				nodes := fleet(t, 2, d, cfg)
				if err := use(nodes[0]); err != nil {
					t.Error(err)
				}
				for _, l := range nodes {
					if v := get(t, l, "k"); v != "k v0" {
						t.Errorf("got %q, want \"k v0\"", v)
					}
				}
				if n := d.loads.Load(); n != 1 {
					t.Errorf("got %d loads, want 1: the first one replaces the record", n)
				}
			})
		})
	}
}

// mQueryAndSetCache of jetcache-go stores "not found" for a value that it cannot encode. All other callers then get
// "not found" for a value that exists. Here such a value is not stored, and each caller gets an error other than
// ErrNotFound.
func TestUnencodableValueIsNotStored(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cfg := refill.Config{TTL: time.Hour, Shared: memory.New()}
		load := func(context.Context, string) (panicky, error) { return panicky{"v"}, nil }
		a, errA := refill.New("thing", load, cfg)
		b, errB := refill.New("thing", load, cfg)
		if err := errors.Join(errA, errB); err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		defer b.Close()
		_, errA = a.Get(t.Context(), "k")
		_, errB = b.Get(t.Context(), "k")
		for _, err := range []error{errA, errB} {
			if err == nil || errors.Is(err, refill.ErrNotFound) {
				t.Errorf("got %v, want an error that is not ErrNotFound", err)
			}
		}
		if record, err := cfg.Shared.Get(t.Context(), "thing:k"); record != nil || err != nil {
			t.Errorf("got record %q, %v, want none", record, err)
		}
	})
}

// In go-redis/cache, the method Once reads the local cache even if SkipLocalCache is set. Here a node without L1 reads
// the store at each Get. So the next Get returns a value that another node has published, even if the announcement of
// the value is lost.
func TestWithoutL1EveryGetReadsTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Hour, StaleFor: time.Hour, LocalTTL: -1})
		s.mute.Store(true)
		for i := range 5 {
			get(t, l, "k")
			d.version.Store(int64(i))
			if err := peer.Refresh(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			if v, want := get(t, l, "k"), fmt.Sprint("k v", i); v != want {
				t.Errorf("got %q, want %q", v, want)
			}
		}
	})
}

// In Rails (#54229) an option that was changed for one write stays changed for the next write. FusionCache avoids this
// with a copy of the options for each load. Here the settings that a load makes with its Fill hold for that load only.
func TestFillSettingsHoldForOneLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var loads atomic.Int64
		load := func(ctx context.Context, key string) (string, error) {
			if loads.Add(1) == 1 {
				f := refill.FillFrom(ctx)
				f.SetTTL(time.Hour)
				f.SetStaleFor(time.Hour)
			}
			return key, nil
		}
		l := node(t, load, refill.Config{TTL: time.Second, Jitter: -1})
		life := func(key string, want time.Duration) {
			t.Helper()
			if r, err := l.GetResult(t.Context(), key); err != nil || r.Remaining != want {
				t.Errorf("%s: got a value that is fresh for %v, %v, want %v", key, r.Remaining, err, want)
			}
		}
		life("k", time.Hour)
		life("other", time.Second)
		if err := l.Refresh(t.Context(), "k"); err != nil {
			t.Error(err)
		}
		life("k", time.Second)
		time.Sleep(2 * time.Second)
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.OutcomeLoaded {
			t.Errorf("got %+v, %v, want a new load: StaleFor of the first load does not hold for the second", r, err)
		}
	})
}

// MS HybridCache neither caches nor coalesces a key that is long or has control characters, so each caller of such a
// key loads. In a cache that compares only hashes, a Get of one key can return the value of another key. Here every
// key is loaded once and has its own value.
func TestOddKeys(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var loads atomic.Int64
		load := func(_ context.Context, key string) (string, error) {
			loads.Add(1)
			time.Sleep(10 * ms)
			return "of " + key, nil
		}
		cfg := refill.Config{TTL: time.Hour, Shared: memory.New(), LocalEntries: 8}
		nodes := []*refill.Loader[string]{node(t, load, cfg), node(t, load, cfg)}
		keys := []string{
			" ", "\x00", "a\x00", "a\r\nb", "ä", "a\u0308", "\xff\xfe", "A", "a", "a ", ":", "a:b",
			"thing:a", "lease:a", "/lease:a", "{a}", "}{",
			strings.Repeat("x", 5000), strings.Repeat("x", 5001),
		}
		for range 2 {
			var wg sync.WaitGroup
			for _, key := range keys {
				for i := range 6 {
					wg.Go(func() {
						if v := get(t, nodes[i%2], key); v != "of "+key {
							t.Errorf("Get(%.20q): got %.20q, want \"of \" and the key", key, v)
						}
					})
				}
			}
			wg.Wait()
		}
		if n := loads.Load(); n != int64(len(keys)) {
			t.Errorf("got %d loads of %d keys, want one each", n, len(keys))
		}
	})
}

// In seaguest/cache and hot the cached value shares its memory with the value that the load function returned. When
// the load function reuses its buffer, the cached value changes. Here the cached value does not change.
func TestValueIsCopiedFromItsLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		buffer := []byte("first")
		load := func(context.Context, string) ([]byte, error) { return buffer, nil }
		cfg := refill.Config{TTL: time.Hour, Shared: memory.New()}
		a, errA := refill.New("thing", load, cfg)
		b, errB := refill.New("thing", load, cfg)
		if err := errors.Join(errA, errB); err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		defer b.Close()
		for _, l := range []*refill.Loader[[]byte]{a, b, a} {
			if v, err := l.Get(t.Context(), "k"); string(v) != "first" || err != nil {
				t.Errorf("got %q, %v, want \"first\"", v, err)
			}
			copy(buffer, "later")
		}
	})
}
