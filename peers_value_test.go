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

// Bugs of peers about values, keys and lifetimes. Those of this group that another test shows precisely:
//
//	MS HybridCache, dogpile.cache had to learn: bytes of another type or version are a miss    TestABadRecordIsAMissAndAnEvent
//	FusionCache warns at the start of settings that contradict each other; here New refuses    TestConfigErrorsNameTheField
//	Rails, Caffeine: nil is not cached, so what does not exist is asked for again and again    TestAbsence

// rockscache reckons in whole seconds and takes off a delay and a jitter: what shall live for less than some 11 s is never
// cached. go-redis/cache makes an hour of what is less than a second, and async-cache-dedupe nothing.
func TestPeerWholeSeconds(t *testing.T) {
	for _, ttl := range []time.Duration{300 * ms, 999 * ms, 1500 * ms, 10 * time.Second} {
		t.Run(ttl.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				nodes := fleet(t, 2, d, refill.Config{TTL: ttl}) // with jitter
				both := func(want int64, when string) {
					t.Helper()
					for i := range 10 {
						get(t, nodes[i%2], "k")
					}
					if n := d.loads.Load(); n != want {
						t.Errorf("%d loads %s, want %d", n, when, want)
					}
				}
				both(1, "at the start")
				time.Sleep(ttl * 8 / 10)
				both(1, "within TTL")
				time.Sleep(ttl*2/10 + 50*ms) // and a tick of the coarse clock
				both(2, "after TTL")
			})
		})
	}
}

// go-zero's jitter is ± 5 %, FusionCache's adds to the duration: some values are served for longer than was allowed. And
// where there is none (rueidisaside, redcache), what was loaded together expires together.
func TestPeerJitterLengthens(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const ttl = 100 * time.Second
		l := fleet(t, 1, &db{}, refill.Config{TTL: ttl, Jitter: 0.2})[0]
		lives := map[time.Duration]bool{}
		for i := range 500 {
			r, err := l.GetResult(t.Context(), fmt.Sprint(i))
			if err != nil || r.Remaining > ttl || r.Remaining < ttl*8/10 {
				t.Errorf("fresh for %v, %v, want 80 to 100 s", r.Remaining, err)
			}
			lives[r.Remaining.Truncate(time.Second)] = true
		}
		if len(lives) < 15 {
			t.Errorf("they end in %d different seconds out of 20", len(lives))
		}
	})
}

// jetcache-go and go-zero keep "*" for "not found", rueidisaside takes a value that begins with "rueidisid:" for a lock and
// redcache one with "__redcache:lock:", replicate/go refuses zero values: the data cannot say certain things. Here is what
// our own lock, failure, record and token look like, too.
func TestPeerValueThatLooksLikeAMark(t *testing.T) {
	const key = "k"
	for _, value := range []string{
		"", "*", "nil", "null", "0", "false", "\x00", "!", `!{"node":"x","text":"boom"}`, "rueidisid:1", "__redcache:lock:1",
		"host-000000000000#1", "RF1", "RF1\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01x", "refill: not found", key, "thing:" + key,
	} {
		t.Run(fmt.Sprintf("%q", value), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				cfg := refill.Config{TTL: time.Hour, StaleFor: time.Hour, Shared: refill.NewMemory()}
				l, reader := node(t, says(value, 0), cfg), node(t, never(t), cfg)
				for range 2 { // out of the load, the store, and memory
					for _, l := range []*refill.Loader[string]{l, reader} {
						if v, err := l.Get(t.Context(), key); v != value || err != nil {
							t.Errorf("%q, %v", v, err)
						}
					}
				}
				if err := l.Refresh(t.Context(), key); err != nil {
					t.Error(err)
				}
				synctest.Wait()
				if v, err := reader.Get(t.Context(), key); v != value || err != nil {
					t.Errorf("%q, %v after a refresh", v, err)
				}
			})
		})
	}
}

// sturdyc: a corrupt or old entry of the shared store is the caller's error, again and again until its TTL is over. Expire,
// Refresh and Peek have to live with it, too.
func TestPeerCorruptEntryIsAnError(t *testing.T) {
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
				cfg := refill.Config{TTL: time.Hour, Shared: refill.NewMemory()}
				foreign(t, cfg.Shared, "thing:k", []byte(`{"an":"older schema"}`))
				nodes := fleet(t, 2, d, cfg)
				if err := use(nodes[0]); err != nil {
					t.Error(err)
				}
				for _, l := range nodes {
					if v := get(t, l, "k"); v != "k v0" {
						t.Errorf("%q", v)
					}
				}
				if n := d.loads.Load(); n != 1 {
					t.Errorf("%d loads, want 1: it has been replaced", n)
				}
			})
		})
	}
}

// jetcache-go mQueryAndSetCache stores "not found" where the value cannot be encoded: everybody else is told that what was
// just loaded does not exist.
func TestPeerUnencodableIsNotFound(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cfg := refill.Config{TTL: time.Hour, Shared: refill.NewMemory()}
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
				t.Errorf("%v", err)
			}
		}
		if record, err := cfg.Shared.Get(t.Context(), "thing:k"); record != nil || err != nil {
			t.Errorf("stored %q, %v", record, err)
		}
	})
}

// go-redis/cache: Once with SkipLocalCache still reads the local cache. Without L1, what another node has changed is seen
// with the next Get, also when no message arrives.
func TestPeerSkippedLocalCacheIsRead(t *testing.T) {
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
				t.Errorf("%q, want %q", v, want)
			}
		}
	})
}

// Rails#54229: an option that was changed for one write is still changed for the next. FusionCache gives each factory a
// copy of the options for that reason.
func TestPeerOptionsOfOneFillLeak(t *testing.T) {
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
				t.Errorf("%s: fresh for %v, %v, want %v", key, r.Remaining, err, want)
			}
		}
		life("k", time.Hour)
		life("other", time.Second)
		if err := l.Refresh(t.Context(), "k"); err != nil {
			t.Error(err)
		}
		life("k", time.Second)
		time.Sleep(2 * time.Second)
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.EventLed {
			t.Errorf("%+v, %v: the own StaleFor of the first fill holds for the second", r, err)
		}
	})
}

// MS HybridCache does not cache, nor coalesce, a key that is long or has control characters: then each of its callers
// loads. And in a cache that compares hashes, one key has the value of another.
func TestPeerOddKeys(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var loads atomic.Int64
		load := func(_ context.Context, key string) (string, error) {
			loads.Add(1)
			time.Sleep(10 * ms)
			return "of " + key, nil
		}
		cfg := refill.Config{TTL: time.Hour, Shared: refill.NewMemory(), LocalEntries: 8}
		nodes := []*refill.Loader[string]{node(t, load, cfg), node(t, load, cfg)}
		keys := []string{
			" ", "\x00", "a\x00", "a\r\nb", "ä", "a\u0308", "\xff\xfe", "A", "a", "a ", ":", "a:b", "thing:a", "lease:a", "/lease:a", "{a}", "}{",
			strings.Repeat("x", 5000), strings.Repeat("x", 5001),
		}
		for range 2 {
			var wg sync.WaitGroup
			for _, key := range keys {
				for i := range 6 {
					wg.Go(func() {
						if v := get(t, nodes[i%2], key); v != "of "+key {
							t.Errorf("%.20q: %.20q", key, v)
						}
					})
				}
			}
			wg.Wait()
		}
		if n := loads.Load(); n != int64(len(keys)) {
			t.Errorf("%d loads of %d keys", n, len(keys))
		}
	})
}

// seaguest/cache, hot: the value in the cache is the very memory that the load function returned, and changes when that
// reuses its buffer.
func TestPeerValueSharedWithItsLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		buffer := []byte("first")
		load := func(context.Context, string) ([]byte, error) { return buffer, nil }
		cfg := refill.Config{TTL: time.Hour, Shared: refill.NewMemory()}
		a, errA := refill.New("thing", load, cfg)
		b, errB := refill.New("thing", load, cfg)
		if err := errors.Join(errA, errB); err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		defer b.Close()
		for _, l := range []*refill.Loader[[]byte]{a, b, a} {
			if v, err := l.Get(t.Context(), "k"); string(v) != "first" || err != nil {
				t.Errorf("%q, %v", v, err)
			}
			copy(buffer, "later")
		}
	})
}
