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
	kinds []any // of events, and the outcomes of Gets
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

// process is one process's view of a store: in one process a name belongs to one codec.
type process struct{ driver.Store }

// node is a Loader on a store, without L1, so that each Get decodes the stored record.
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

// During a deployment the nodes of a fleet have different codecs. Each treats the other's record as a miss and loads.
// No caller sees an error or a wrong value. Once all nodes have the new codec, one load is enough for all.
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
	get(a) // the old node still runs
	get(b)
	c, seen, cLoads := node(t, shared, is, load) // the next one to be deployed
	defer c.Close()
	get(c)
	if cLoads.Load() != 0 || seen.saw(refill.EventBadRecord) || seen.saw(refill.OutcomeFailed) {
		t.Errorf("%v → %v: %d loads on the third node, events %v", was, is, cLoads.Load(), seen.kinds)
	}
}

// A node that compresses above another size reads what is stored.
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

// A record is valid, but its payload is not: for the callers it is a miss like any other.
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

// The store holds compressed bytes. Callers get the value as it was.
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

// refill.New refuses a codec without a name. A codec that cannot encode the type fails at the first load, with an error
// that names the type; the caller still has its value.
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
