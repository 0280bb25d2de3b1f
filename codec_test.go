package refill_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests codecs: fields of a value that a codec leaves out, errors and panics of a codec, and records that a
// codec cannot decode.

func TestCodec(t *testing.T) {
	type leaky struct {
		Shown  int
		hidden int
		Fn     func() `json:"-"`
	}
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		l, err := refill.New("leaky", func(context.Context, string) (leaky, error) {
			return leaky{1, 2, func() {}}, nil
		}, refill.Config{TTL: time.Minute, Shared: shared})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if v, err := l.Get(t.Context(), "k"); err != nil || v.Shown != 1 || v.hidden != 0 || v.Fn != nil {
			t.Errorf("got %+v, %v on the node that loads, want what the other nodes decode: only Shown", v, err)
		}
		var ev events
		bad, err := refill.New("bad", func(context.Context, string) (map[string]any, error) {
			return map[string]any{"c": make(chan int)}, nil
		}, refill.Config{TTL: time.Minute, Shared: shared, OnEvent: ev.on})
		if err != nil {
			t.Fatal(err)
		}
		defer bad.Close()
		v, err := bad.Get(t.Context(), "the key")
		if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), `"the key"`) ||
			!strings.Contains(err.Error(), "json") {
			t.Errorf("got %v, want ErrInvalid that names key and codec", err)
		}
		if v["c"] == nil {
			t.Errorf("got %v with the error, want the value that was loaded", v)
		}
	})
}

func TestCodecPanic(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l, err := refill.New("panicky", func(context.Context, string) (panicky, error) {
			return panicky{"v"}, nil
		}, refill.Config{TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if v, err := l.Get(t.Context(), "k"); !errors.Is(err, refill.ErrInvalid) || v.S != "v" {
			t.Errorf("got %+v, %v; want ErrInvalid, and the value that was loaded", v, err)
		}
	})
}

func TestABadRecordIsAMissAndAnEvent(t *testing.T) {
	rec := driver.Record{
		Token: "x#1", LoadBegan: time.Now(), FreshUntil: time.Now().Add(time.Hour),
		Kind: "raw string", Payload: []byte("v"),
	}
	good, err := rec.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	other := rec
	other.Kind = "json main.Other"
	otherType, _ := other.Append(nil)
	flipped := append([]byte(nil), good...)
	flipped[len(flipped)-1] ^= 1
	future := append([]byte("RF2"), good[3:]...)
	for name, record := range map[string][]byte{
		"foreign bytes":   []byte("hello"),
		"one zero byte":   {0},
		"a flipped bit":   flipped,
		"cut short":       good[:40],
		"another type":    otherType,
		"a later version": future,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 10 * ms}
				shared := memory.New()
				foreign(t, shared, "thing:k", record)
				var ev events
				l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared, OnEvent: ev.on})
				if v := get(t, l, "k"); v != "k v0" || d.loads.Load() != 1 {
					t.Errorf("got %q after %d loads, want %q after 1", v, d.loads.Load(), "k v0")
				}
				if ev.of(refill.EventBadRecord) == 0 {
					t.Error("got no EventBadRecord, want one")
				}
				peer := node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared})
				if v := get(t, peer, "k"); v != "k v0" || d.loads.Load() != 1 {
					t.Errorf("another node: got %q after %d loads, want %q after 1: the bad record was not replaced",
						v, d.loads.Load(), "k v0")
				}
			})
		})
	}
}

// The codec cannot encode the loaded value, which counts as a failed load. The test runs once with a store that
// answers, and once with a store that does not answer. A second Get within the back-off must return an error that wraps
// ErrInvalid. After a second failure in a row, the back-off must have doubled.
func TestTheCauseOfAValueThatCannotBeEncoded(t *testing.T) {
	for _, down := range []bool{false, true} {
		bubble(t, func(t *testing.T) {
			s := newSpy(memory.New())
			loads := 0
			l, err := refill.New("bad", func(context.Context, string) (chan int, error) {
				loads++
				return make(chan int), nil
			}, refill.Config{TTL: time.Minute, ErrorTTL: time.Second, MaxErrorTTL: time.Hour, Shared: s})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			s.cut(down)
			if v, err := l.Get(t.Context(), "k"); !errors.Is(err, refill.ErrInvalid) || v == nil {
				t.Errorf("got %v, %v; want the value and ErrInvalid", v, err)
			}
			var failed *refill.LoadError
			if _, err := l.Get(t.Context(), "k"); !errors.Is(err, refill.ErrInvalid) || !errors.As(err, &failed) {
				t.Errorf("within the back-off: got %v, want a *LoadError that wraps ErrInvalid", err)
			}
			time.Sleep(1100 * ms)
			_, _ = l.Get(t.Context(), "k") // the second failure in a row: the back-off is 2 s
			time.Sleep(1100 * ms)
			if _, err := l.Get(t.Context(), "k"); loads != 2 || !errors.Is(err, refill.ErrInvalid) {
				t.Errorf("got %d loads, %v; want 2 loads, and ErrInvalid: the back-off has doubled", loads, err)
			}
		})
	}
}
