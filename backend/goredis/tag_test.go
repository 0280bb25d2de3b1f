package goredis

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/refill-go/refill/driver"
)

func TestParseTagState(t *testing.T) {
	for text, want := range map[string]driver.TagState{
		"1700000000000042 0": {Known: true, Invalidated: time.UnixMicro(1700000000000042)},
		"1 2":                {Known: true, Invalidated: time.UnixMicro(1), Expired: time.UnixMicro(2)},
		"0 0":                {Known: true},
		"8999999999999999 8999999999999999": {
			Known: true, Invalidated: time.UnixMicro(8999999999999999), Expired: time.UnixMicro(8999999999999999),
		},
	} {
		if got := parseTagState(text); got != want {
			t.Errorf("%q: %+v, want %+v", text, got, want)
		}
	}
}

func TestForeignTagStatesAreUnknown(t *testing.T) {
	for _, text := range foreignTagStates {
		if got := parseTagState(text); got != (driver.TagState{}) {
			t.Errorf("%q was read as %+v", text, got)
		}
	}
}

var foreignTagStates = []string{
	"", " ", "1", "1 ", " 1", "1  2", "1 2 ", " 1 2", "1 2 3", "1 2\n", "01 2", "1 02", "+1 2", "-1 2", "1 -2", "1.0 2",
	"1e15 0", "0x1 0", "9000000000000000 0", "0 9000000000000000", "99999999999999999999 0", "inf 0", "nan 0", "x",
	"1\x002", "١ ٢",
}

func FuzzParseTagState(f *testing.F) {
	f.Add("1700000000000042 0")
	for _, text := range foreignTagStates {
		f.Add(text)
	}
	micros := func(t time.Time) int64 {
		if t.IsZero() {
			return 0
		}
		return t.UnixMicro()
	}
	f.Fuzz(func(t *testing.T, text string) {
		got := parseTagState(text)
		if again := fmt.Sprint(micros(got.Invalidated), " ", micros(got.Expired)); got.Known && again != text {
			t.Errorf("%q was read as %+v, which is written %q", text, got, again)
		}
	})
}

// No server runs in this test. A call without keys or tags must return no error, because it must not call the server.
func TestCallsWithoutKeysOrTags(t *testing.T) {
	s, ctx := testStore(t), context.Background()
	if all, err := s.GetMany(ctx); err != nil || len(all) != 0 {
		t.Error("GetMany:", all, err)
	}
	if all, err := s.Tags(ctx); err != nil || len(all) != 0 {
		t.Error("Tags:", all, err)
	}
	for name, err := range map[string]error{
		"EnsureTags":     s.EnsureTags(ctx, time.Second, time.Second),
		"InvalidateTags": s.InvalidateTags(ctx, "a#1", time.Second),
		"ExpireTags":     s.ExpireTags(ctx, "a#1", time.Second),
	} {
		if err != nil {
			t.Error(name, err)
		}
	}
}
