package goredis

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

func TestMarks(t *testing.T) {
	for mark, want := range map[string]refill.TagState{
		"1700000000000042 0":                {Known: true, Invalidated: time.UnixMicro(1700000000000042)},
		"1 2":                               {Known: true, Invalidated: time.UnixMicro(1), Expired: time.UnixMicro(2)},
		"0 0":                               {Known: true},
		"8999999999999999 8999999999999999": {Known: true, Invalidated: time.UnixMicro(8999999999999999), Expired: time.UnixMicro(8999999999999999)},
	} {
		if got := parseMark(mark); got != want {
			t.Errorf("%q: %+v, want %+v", mark, got, want)
		}
	}
}

func TestForeignMarksAreUnknown(t *testing.T) {
	for _, mark := range foreignMarks {
		if got := parseMark(mark); got != (refill.TagState{}) {
			t.Errorf("%q was read as %+v", mark, got)
		}
	}
}

var foreignMarks = []string{
	"", " ", "1", "1 ", " 1", "1  2", "1 2 ", " 1 2", "1 2 3", "1 2\n", "01 2", "1 02", "+1 2", "-1 2", "1 -2", "1.0 2", "1e15 0", "0x1 0",
	"9000000000000000 0", "0 9000000000000000", "99999999999999999999 0", "inf 0", "nan 0", "x", "1\x002", "١ ٢",
}

func FuzzMark(f *testing.F) {
	f.Add("1700000000000042 0")
	for _, mark := range foreignMarks {
		f.Add(mark)
	}
	micros := func(t time.Time) int64 {
		if t.IsZero() {
			return 0
		}
		return t.UnixMicro()
	}
	f.Fuzz(func(t *testing.T, mark string) {
		got := parseMark(mark)
		if again := fmt.Sprint(micros(got.Invalidated), " ", micros(got.Expired)); got.Known && again != mark {
			t.Errorf("%q was read as %+v, which is written %q", mark, got, again)
		}
	})
}

// A list without keys or tags makes no call: there is no server here.
func TestNothingToDo(t *testing.T) {
	s, ctx := testStore(t), context.Background()
	if all, err := s.GetMany(ctx); err != nil || len(all) != 0 {
		t.Error("GetMany:", all, err)
	}
	if all, err := s.Tags(ctx); err != nil || len(all) != 0 {
		t.Error("Tags:", all, err)
	}
	for name, err := range map[string]error{
		"HoldTags":       s.HoldTags(ctx, time.Second, time.Second),
		"InvalidateTags": s.InvalidateTags(ctx, "a#1", time.Second),
		"ExpireTags":     s.ExpireTags(ctx, "a#1", time.Second),
	} {
		if err != nil {
			t.Error(name, err)
		}
	}
}
