package refill_test

import (
	"encoding/json"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

type sizingCodec struct {
	size func() int64
}

func (sizingCodec) Name() string                       { return "sizing" }
func (sizingCodec) Marshal(v any) ([]byte, error)      { return json.Marshal(v) }
func (sizingCodec) Unmarshal(data []byte, p any) error { return json.Unmarshal(data, p) }
func (c sizingCodec) Size(any) int64                   { return c.size() }

// The Size method of a codec returns how many bytes a decoded value takes. L1 must not keep a value that is larger than
// a quarter of LocalBytes. A negative size counts as 0. If Size panics, refill estimates the size.
func TestSizerSaysWhatAValueTakes(t *testing.T) {
	for name, test := range map[string]struct {
		size func() int64
		want refill.Outcome
	}{
		"small":    {func() int64 { return 1000 }, refill.OutcomeHit},
		"large":    {func() int64 { return 300_000 }, refill.OutcomeShared},
		"negative": {func() int64 { return -1 << 62 }, refill.OutcomeHit},
		"panic":    {func() int64 { panic("no size") }, refill.OutcomeHit},
	} {
		t.Run(name, func(t *testing.T) {
			d := &db{}
			l := node(t, d.load, refill.Config{TTL: time.Hour, LocalBytes: 1 << 20, Codec: sizingCodec{test.size}})
			get(t, l, "k")
			r, err := l.GetResult(t.Context(), "k")
			if err != nil || r.Outcome != test.want {
				t.Errorf("got %v, %v from the second Get, want %v", r.Outcome, err, test.want)
			}
		})
	}
}

// L1 has a small value of a key, and a Refresh loads a value that is too large for L1. L1 must remove the small value.
// Otherwise Gets would still be served the small value.
func TestAValueTooLargeForL1(t *testing.T) {
	var size atomic.Int64
	size.Store(1000)
	d := &db{}
	l := node(t, d.load, refill.Config{
		TTL: time.Hour, LocalBytes: 1 << 20, Codec: sizingCodec{size.Load},
	})
	get(t, l, "k")
	size.Store(1 << 20)
	d.version.Store(1)
	if err := l.Refresh(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	if v := get(t, l, "k"); v != "k v1" {
		t.Errorf("got %q after the Refresh, want %q", v, "k v1")
	}
}
