package refill_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// page is a type whose values JSON encodes without a loss.
type page struct {
	Title string
	Parts []string
	At    time.Time
}

// The node that loads serves the very value that the load function has returned, not a decoded copy. It decodes only
// its first 8 values and every 64th value, to check that the codec can decode what it has encoded. Another node decodes
// the value from the store.
func TestTheLoadingNodeKeepsItsValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		made := &page{Title: "t", Parts: []string{"a"}, At: time.Now()}
		codec := &countingCodec{}
		cfg := refill.Config{TTL: time.Hour, Shared: shared, Codec: codec}
		load := func(context.Context, string) (*page, error) { return made, nil }
		a, b := newNode(t, load, cfg), newNode(t, load, cfg)
		for i := range 63 {
			key := strings.Repeat("k", i+1)
			for range 2 {
				if got, err := a.Get(t.Context(), key); err != nil || got != made {
					t.Fatalf("the loading node: got %p, %v; want the loaded value %p", got, err, made)
				}
			}
		}
		if n := codec.decoded.Load(); n != 8 {
			t.Errorf("got %d decoded values of 63 that were loaded, want the first 8", n)
		}
		if got, err := b.Get(t.Context(), "k"); err != nil || got == made || got.Title != "t" || got.Parts[0] != "a" {
			t.Errorf("another node: got %+v, %v; want an equal value", got, err)
		}
	})
}

// The type of the values has an unexported field, which JSON leaves out. So the loading node must decode every value
// that it has encoded, and serve the decoded value, as other nodes do.
func TestTheLoadingNodeDecodesATypeThatTheCodecCuts(t *testing.T) {
	type hidden struct{ Shown, shy int }
	bubble(t, func(t *testing.T) {
		load := func(context.Context, string) (hidden, error) { return hidden{1, 2}, nil }
		l := newNode(t, load, refill.Config{TTL: time.Hour})
		for i := range 100 {
			if got, err := l.Get(t.Context(), strings.Repeat("k", i+1)); err != nil || got != (hidden{1, 0}) {
				t.Fatalf("load %d: got %+v, %v; want what the record holds", i, got, err)
			}
		}
	})
}

// The load function returns a small part of a large []byte. L1 must keep a copy of the part. Otherwise L1 would keep
// the whole []byte in memory, and a later change of the []byte would change the value in L1.
func TestTheLoadingNodeCopiesBytes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		large := []byte(strings.Repeat("x", 100))
		l := newNode(t, func(context.Context, string) ([]byte, error) { return large[:3], nil },
			refill.Config{TTL: time.Hour})
		_, _ = l.Get(t.Context(), "k")
		large[0] = 'y'
		if got, err := l.Get(t.Context(), "k"); err != nil || string(got) != "xxx" || cap(got) > 16 {
			t.Errorf("got %q with a capacity of %d, %v; want a copy of 3 bytes", got, cap(got), err)
		}
	})
}

// The codec encodes one value in a way that it cannot decode.
//
//  1. The loading node stores the bad record. It does not notice, because it decodes only its first 8 values and every
//     64th value as a check.
//  2. Another node cannot decode the record. From now on, this node decodes each value that it loads as a check.
//  3. This node loads the value itself. The check fails, so its caller gets the value together with ErrInvalid.
func TestAValueThatCannotBeDecodedAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		codec := &countingCodec{}
		cfg := refill.Config{TTL: time.Hour, Shared: shared, Codec: codec}
		load := func(_ context.Context, key string) (*page, error) { return &page{Title: key}, nil }
		a, b := newNode(t, load, cfg), newNode(t, load, cfg)
		for i := range 9 { // node a decodes its first 8 values as a check, but not the next ones
			if _, err := a.Get(t.Context(), strings.Repeat("k", i+1)); err != nil {
				t.Fatal(err)
			}
		}
		codec.broken.Store(true)
		if got, err := a.Get(t.Context(), "bad"); err != nil || got.Title != "bad" {
			t.Fatalf("the loading node: got %+v, %v; want the value", got, err)
		}
		time.Sleep(2 * time.Second) // a node leaves a bad record alone until the record is older than ErrorTTL (1 s)
		if got, err := b.Get(t.Context(), "bad"); !errors.Is(err, refill.ErrInvalid) || got == nil {
			t.Errorf("another node: got %+v, %v; want the value that it has loaded, and ErrInvalid", got, err)
		}
		codec.broken.Store(false)
		before := codec.decoded.Load()
		for i := range 20 {
			if _, err := b.Get(t.Context(), strings.Repeat("n", i+1)); err != nil {
				t.Fatal(err)
			}
		}
		if n := codec.decoded.Load() - before; n != 20 {
			t.Errorf("got %d decoded values of 20 loads after the bad record, want all", n)
		}
	})
}

// Two nodes have codecs of the same name, but neither codec can decode what the other has encoded. Both nodes call Get
// of the same key every 10 ms, for 10 s. A node may replace the record of the other node only when the record is older
// than ErrorTTL (1 s). Both nodes must get values.
func TestTwoCodecsThatDoNotUnderstandEachOther(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		var loads atomic.Int64
		load := func(_ context.Context, key string) (*page, error) {
			loads.Add(1)
			return &page{Title: key}, nil
		}
		cfg := refill.Config{TTL: time.Minute, ErrorTTL: time.Second, Shared: shared}
		cfg.Codec = &countingCodec{mark: 'a'}
		a := newNode(t, load, cfg)
		cfg.Codec = &countingCodec{mark: 'b'}
		b := newNode(t, load, cfg)
		for range 1000 {
			for _, l := range []*refill.Loader[*page]{a, b} {
				if got, err := l.Get(t.Context(), "k"); err != nil || got.Title != "k" {
					t.Fatalf("got %+v, %v; want the value", got, err)
				}
			}
			time.Sleep(10 * ms)
		}
		if n := loads.Load(); n > 25 {
			t.Errorf("got %d loads in 10 s, want at most 25", n)
		}
	})
}

// newNode makes a node whose values have the type V. The node is closed at the end of the test.
func newNode[V any](t *testing.T, load func(context.Context, string) (V, error), cfg refill.Config) *refill.Loader[V] {
	t.Helper()
	l, err := refill.New("thing", load, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// countingCodec encodes a value as the byte mark and JSON. It counts the values that it decodes. While broken is set,
// Marshal returns bytes that Unmarshal cannot decode.
type countingCodec struct {
	mark    byte
	decoded atomic.Int64
	broken  atomic.Bool
}

func (c *countingCodec) Name() string { return "counting" }

func (c *countingCodec) Marshal(v any) ([]byte, error) {
	data, err := json.Marshal(v)
	if c.broken.Load() {
		return []byte("broken"), err
	}
	return append([]byte{c.mark}, data...), err
}

func (c *countingCodec) Unmarshal(data []byte, p any) error {
	c.decoded.Add(1)
	if len(data) == 0 || data[0] != c.mark {
		return errors.New("foreign mark")
	}
	return json.Unmarshal(data[1:], p)
}
