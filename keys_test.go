package refill_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests the keys that a Loader accepts and their form in the store. It also tests that each name of a Loader
// belongs to one type of value.

// A key can have any length and any bytes. The load function gets the key unchanged. The store gets a form of the key
// that is short and has no control characters.
func TestKeysOfAnyBytes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		long := strings.Repeat("x", 513)
		// twin is the form in which the store gets the long key. twin itself is a valid key as well. A Get of twin must
		// not return the value of long.
		sum := sha256.Sum256([]byte(long))
		twin := "#" + hex.EncodeToString(sum[:])
		keys := []string{long, twin, long[:512], "a\nb", "a\x7fb", "#", "ключ", "a b", "\xff", "{x}:y"}
		s := newSpy(memory.New())
		peerLoads := never(t)
		var loads atomic.Int64
		l := node(t, func(_ context.Context, key string) (string, error) {
			loads.Add(1)
			return "of " + key, nil
		}, refill.Config{TTL: time.Minute, Shared: s})
		peer := node(t, peerLoads, refill.Config{TTL: time.Minute, Shared: s.Store})
		for range 2 { // the second Gets are served from L1
			for _, key := range keys {
				if v := get(t, l, key); v != "of "+key {
					t.Errorf("Get(%q) = %q, want %q", key, v, "of "+key)
				}
			}
		}
		if n := loads.Load(); n != int64(len(keys)) {
			t.Errorf("got %d loads, want %d: one per key", n, len(keys))
		}
		for _, key := range keys {
			if v := get(t, peer, key); v != "of "+key {
				t.Errorf("on another node Get(%q) = %q, want %q", key, v, "of "+key)
			}
			if r, ok := peer.Peek(t.Context(), key); !ok || r.Value != "of "+key {
				t.Errorf("on another node Peek(%q) = %q, %v; want %q", key, r.Value, ok, "of "+key)
			}
		}
		s.mu.Lock()
		for _, key := range s.keys {
			if len(key) > 513+len("thing:") || strings.ContainsAny(key, "\n\x7f") {
				t.Errorf("the store was asked for key %q, want a short one without control characters", key)
			}
		}
		s.mu.Unlock()
		if err := peer.Invalidate(t.Context(), keys...); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for _, key := range keys {
			get(t, l, key)
		}
		if n := loads.Load(); n != 2*int64(len(keys)) {
			t.Errorf("got %d loads after another node invalidated all keys, want %d", n, 2*len(keys))
		}
	})
}

// Keys of up to 512 bytes, with spaces and letters of any script, are stored unchanged.
func TestKeysThatStayAsTheyAre(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newSpy(memory.New())
		d := &db{}
		l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: s})
		for _, key := range []string{strings.Repeat("x", 512), "a b", "ключ", "a#"} {
			get(t, l, key)
			s.mu.Lock()
			if !slices.Contains(s.keys, "thing:"+key) {
				t.Errorf("key %.10s… is stored under another name, want it unchanged", key)
			}
			s.mu.Unlock()
		}
	})
}

// A load of a long key must get the key itself, although the store has a hash in place of the key. Fill.For must accept
// the long key. A Get of the long key inside the load must return ErrInvalid.
func TestLoadOfALongKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		long := strings.Repeat("x", 600)
		var l *refill.Loader[string]
		l = node(t, func(ctx context.Context, key string) (string, error) {
			refill.FillFrom(ctx).For(key).SetTTL(time.Hour)
			refill.FillFrom(ctx).For("").SetTTL(time.Second)
			if _, err := l.Get(ctx, key); !errors.Is(err, refill.ErrInvalid) {
				t.Errorf("a load that asks for its own key: got %v, want ErrInvalid", err)
			}
			return "v", nil
		}, refill.Config{TTL: time.Minute, Jitter: -1, LoadTimeout: time.Second})
		if r, err := l.GetResult(t.Context(), long); err != nil || r.Remaining != time.Hour {
			t.Errorf("got Remaining %v, %v; want 1 h", r.Remaining, err)
		}
	})
}

// New must refuse a second type of value under a name that is in use. Otherwise each of the two Loaders could not
// decode the values of the other Loader and would load again.
func TestOneNameTwoTypes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		number := func(context.Context, string) (int, error) { return 1, nil }
		l, err := refill.New("x", never(t), refill.Config{TTL: time.Minute, Shared: shared})
		if err != nil {
			t.Fatal(err)
		}
		_, err = refill.New("x", number, refill.Config{TTL: time.Minute, Shared: shared})
		if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "name") ||
			!strings.Contains(err.Error(), "raw string") {
			t.Errorf("a second type under the name: got %v, want ErrInvalid that names the first type", err)
		}
		for _, c := range []struct {
			name   string
			shared driver.Store
		}{{"y", shared}, {"x", memory.New()}} { // allowed: another name in this store, and this name in another store
			n, err := refill.New(c.name, number, refill.Config{TTL: time.Minute, Shared: c.shared})
			if err != nil {
				t.Error(err)
				continue
			}
			defer n.Close()
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		n, err := refill.New("x", number, refill.Config{TTL: time.Minute, Shared: shared})
		if err != nil {
			t.Fatalf("after the Close of the first Loader: got %v, want no error", err)
		}
		defer n.Close()
	})
}

// A name is in use until the last Loader with that name is closed.
func TestNameIsInUse(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cfg := refill.Config{TTL: time.Minute, Shared: memory.New()}
		a, b := node(t, never(t), cfg), node(t, never(t), cfg)
		number := func(context.Context, string) (int, error) { return 1, nil }
		for i, l := range []*refill.Loader[string]{a, b} {
			if _, err := refill.New("thing", number, cfg); !errors.Is(err, refill.ErrInvalid) {
				t.Errorf("after %d of 2 Closes: got %v, want ErrInvalid", i, err)
			}
			_ = l.Close()
		}
		n, err := refill.New("thing", number, cfg)
		if err != nil {
			t.Fatal(err)
		}
		_ = n.Close()
		// Go cannot compare values of this Store type. So this store never equals another store, and New accepts the name.
		cfg.Shared = struct {
			driver.Store
			_ []int
		}{Store: cfg.Shared}
		node(t, never(t), cfg)
	})
}

type byValue struct {
	driver.Store
	labels any
}

// Go cannot compare some struct types with ==. New must not panic if Config.Shared is such a struct.
func TestStoreThatCannotBeCompared(t *testing.T) {
	defer func() {
		if p := recover(); p != nil {
			t.Errorf("New panicked: %v", p)
		}
	}()
	l, err := refill.New[string]("thing", nil, refill.Config{TTL: time.Hour, Shared: byValue{memory.New(), []string{"a"}}})
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}
