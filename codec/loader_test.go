package codec_test

import (
	"bytes"
	"context"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/codec"
	"github.com/refill-go/refill/driver"
)

// watched collects the events of a Loader.
type watched struct {
	mu    sync.Mutex
	kinds []any // the kinds of events, and the outcomes of Gets
}

func (w *watched) on(e refill.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.kinds = append(w.kinds, e.Kind, e.Outcome)
}

func (w *watched) saw(k any) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Contains(w.kinds, k)
}

// process makes a store look like a different store to each Loader. Otherwise refill.New would refuse a second Loader
// of the same name with another codec, as it does within one process.
type process struct{ driver.Store }

// node returns a Loader on a store, with the events and the number of loads of this Loader. The Loader has no L1, so
// each Get decodes the stored record.
func node[V any](
	t *testing.T, shared driver.Store, c refill.Codec, load func() V,
) (*refill.Loader[V], *watched, *atomic.Int64) {
	t.Helper()
	w, loads := new(watched), new(atomic.Int64)
	l, err := refill.New("thing", func(context.Context, string) (V, error) {
		loads.Add(1)
		return load(), nil
	}, refill.Config{TTL: time.Hour, LocalTTL: -1, Shared: &process{shared}, Codec: c, OnEvent: w.on})
	if err != nil {
		t.Fatal(err)
	}
	return l, w, loads
}

// As during a deployment, node a has the old codec and node b the new one. Each node must treat the other's record as
// a miss and load. No caller may see an error or a wrong value. Node c, which also has the new codec, must find the
// record of node b and not load.
func TestCodecChangesUnderAFleet(t *testing.T) {
	codecs := []refill.Codec{nil, codec.CBOR, codec.Compress(nil, 0), codec.Compress(codec.CBOR, 0)}
	for i, was := range codecs {
		for j, is := range codecs {
			if i != j {
				synctest.Test(t, func(t *testing.T) {
					change(t, was, is, product)
					change(t, was, is, func() []byte { return page(5000) })
					change(t, was, is, func() string { return string(page(5000)) })
				})
			}
		}
	}
}

func change[V any](t *testing.T, was, is refill.Codec, load func() V) {
	t.Helper()
	shared := memory.New()
	get := func(l *refill.Loader[V]) {
		t.Helper()
		if got, err := l.Get(t.Context(), "k"); err != nil || !reflect.DeepEqual(got, load()) {
			t.Errorf("%v → %v: %+v, %v", was, is, got, err)
		}
	}
	a, _, aLoads := node(t, shared, was, load)
	defer a.Close()
	get(a)
	get(a)
	b, seen, bLoads := node(t, shared, is, load)
	defer b.Close()
	get(b)
	get(b)
	if !seen.saw(refill.EventBadRecord) || seen.saw(refill.OutcomeFailed) || aLoads.Load() != 1 || bLoads.Load() != 1 {
		t.Errorf("%v → %v: %d and %d loads, events %v", was, is, aLoads.Load(), bLoads.Load(), seen.kinds)
	}
	get(a) // node a still runs, and must still return the value
	get(b)
	c, seen, cLoads := node(t, shared, is, load) // the next node that is deployed
	defer c.Close()
	get(c)
	if cLoads.Load() != 0 || seen.saw(refill.EventBadRecord) || seen.saw(refill.OutcomeFailed) {
		t.Errorf("%v → %v: %d loads on the third node, events %v", was, is, cLoads.Load(), seen.kinds)
	}
}

// Three nodes have Compress with different sizes above which they compress. Only the first node may load. The two
// other nodes must read its record.
func TestAboveChangesUnderAFleet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := memory.New()
		load := func() string { return string(page(20_000)) }
		for i, above := range []int{4 << 10, 1 << 20, 0} {
			l, seen, loads := node(t, shared, codec.Compress(nil, above), load)
			defer l.Close()
			got, err := l.Get(t.Context(), "k")
			if err != nil || got != load() || seen.saw(refill.EventBadRecord) || (loads.Load() == 1) != (i == 0) {
				t.Errorf("above %d: %d bytes, %v, %d loads, %v", above, len(got), err, loads.Load(), seen.kinds)
			}
		}
	})
}

// The store returns a valid record with half of its payload. Get must treat this record as a miss, load again and
// return the value.
func TestBadPayloadIsAMiss(t *testing.T) {
	for _, c := range []refill.Codec{codec.CBOR, codec.Compress(nil, 0), codec.Compress(codec.CBOR, 0)} {
		synctest.Test(t, func(t *testing.T) {
			shared := &spoilt{Store: memory.New()}
			l, seen, loads := node(t, shared, c, product)
			defer l.Close()
			for range 2 {
				if got, err := l.Get(t.Context(), "k"); err != nil || !reflect.DeepEqual(got, product()) {
					t.Errorf("%s: %+v, %v", c.Name(), got, err)
				}
				shared.spoil.Store(true)
			}
			if !seen.saw(refill.EventBadRecord) || loads.Load() != 2 {
				t.Errorf("%s: %d loads, events %v", c.Name(), loads.Load(), seen.kinds)
			}
		})
	}
}

// spoilt returns records with half of their payload, but with the right checksum.
type spoilt struct {
	driver.Store
	spoil atomic.Bool
}

func (s *spoilt) Get(ctx context.Context, key string) ([]byte, error) {
	b, err := s.Store.Get(ctx, key)
	if !s.spoil.Load() || err != nil || b == nil {
		return b, err
	}
	r, err := driver.DecodeRecord(b)
	if err != nil {
		return nil, err
	}
	r.Payload = r.Payload[:len(r.Payload)/2]
	return r.Append(nil)
}

// A Loader with Compress loads a page of 50,000 bytes. The published record must be at most half as large, and Get
// must return the page unchanged.
func TestStoredSize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := &sized{Store: memory.New()}
		body := page(50_000)
		l, _, _ := node(t, shared, codec.Compress(nil, 4<<10), func() []byte { return body })
		defer l.Close()
		got, err := l.Get(t.Context(), "k")
		if err != nil || !bytes.Equal(got, body) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		if n := shared.published.Load(); n == 0 || n > int64(len(body))/2 {
			t.Errorf("%d bytes stored for %d", n, len(body))
		}
	})
}

type sized struct {
	driver.Store
	published atomic.Int64
}

func (s *sized) Publish(ctx context.Context, p driver.PublishRequest) (driver.PublishResult, error) {
	s.published.Store(int64(len(p.Record)))
	return s.Store.Publish(ctx, p)
}

// refill.New must refuse a codec without a name. If a codec cannot encode the type, the first Get must return an
// error that names the type. The same Get must also return the loaded value.
func TestBadCodecs(t *testing.T) {
	load := func(context.Context, string) (byJSON, error) { return byJSON{"x"}, nil }
	_, err := refill.New("thing", load, refill.Config{TTL: time.Hour, Codec: codec.Compress(nameless{codec.CBOR}, 0)})
	if err == nil || !strings.Contains(err.Error(), "Codec") {
		t.Errorf("%v, want an error that names the field", err)
	}
	l, err := refill.New("thing", load, refill.Config{TTL: time.Hour, Codec: codec.CBOR})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if got, err := l.Get(t.Context(), "k"); err == nil || !strings.Contains(err.Error(), "byJSON") || got.s != "x" {
		t.Errorf("%v, %v", got, err)
	}
}
