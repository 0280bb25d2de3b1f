package refill

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"testing"
	"time"
)

// Nodes draw apart for one record, each the same whenever it asks, and never 0, of which there is no logarithm.
func TestDrawn(t *testing.T) {
	cfg, err := Config{TTL: time.Second, LocalTTL: -1}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[float64]bool)
	for range 20 {
		l, err := newLocal[string](&cfg, nil)
		if err != nil {
			t.Fatal(err)
		}
		x := l.drawn("n#1")
		if x <= 0 || x > 1 || x != l.drawn("n#1") || x == l.drawn("n#2") {
			t.Errorf("drew %v, then %v; %v for another", x, l.drawn("n#1"), l.drawn("n#2"))
		}
		seen[x] = true
	}
	if len(seen) != 20 {
		t.Errorf("20 nodes drew %d numbers", len(seen))
	}
}

// However many keys fail, the memory of it is bounded, and those that are over make room.
func TestFailuresAreBounded(t *testing.T) {
	f := failures{byKey: make(map[string]pastFailure)}
	for i := range 2 * maxFailures {
		f.remember(fmt.Sprint(i), &LoadError{RetryAfter: time.Hour}, 0)
	}
	if len(f.byKey) != maxFailures {
		t.Errorf("%d failures in memory", len(f.byKey))
	}
	for key, p := range f.byKey {
		p.until = time.Now().Add(-3 * time.Hour)
		f.byKey[key] = p
	}
	f.remember("new", &LoadError{RetryAfter: time.Hour}, 0)
	if f.recall("new", 0) == nil || len(f.byKey) != 1 {
		t.Errorf("%d failures in memory, all but one of them over", len(f.byKey))
	}
	f.remember("none", &LoadError{}, 0)
	if len(f.byKey) != 1 {
		t.Error("a failure without a back-off is kept")
	}
}

// Fields that this release does not know are skipped; bytes that are no fields are no record.
func TestExtraOfALaterRelease(t *testing.T) {
	r := Record{Token: "n#1", LoadBegan: time.UnixMicro(1), FreshUntil: time.UnixMicro(2), Kind: "raw string", Validator: "abc", Tags: []string{"t"}}
	at := offToken + 1 + len(r.Token) + 1 + 5*8 + 2 + len(r.Kind) + 2 // where the extra begins
	for name, c := range map[string]struct {
		change func(b []byte)
		fine   bool
	}{
		"another letter": {func(b []byte) { b[at] = 'z' }, true},
		"cut off":        {func(b []byte) { b[at+2] = 200 }, false},
	} {
		b, err := r.Append(nil)
		if err != nil || b[at] != 'v' {
			t.Fatalf("%v, %q", err, b)
		}
		c.change(b)
		binary.BigEndian.PutUint32(b[offSum:], crc32.Checksum(b[offToken:], castagnoli))
		got, err := DecodeRecord(b)
		if (err == nil) != c.fine || c.fine && (got.Validator != "" || len(got.Tags) != 1 || len(recordTags(b)) != 1) || !c.fine && recordTags(b) != nil {
			t.Errorf("%s: %+v, %v; tags %v", name, got, err, recordTags(b))
		}
	}
}
