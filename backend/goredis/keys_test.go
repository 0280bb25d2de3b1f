package goredis

import (
	"fmt"
	"slices"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/driver"
)

func testStore(t *testing.T, opts ...Option) *Store {
	t.Helper()
	s := New(redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}), opts...)
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	return s
}

// The key format is final, because other releases and other tools read the keys. The keys of three sample names must
// equal these golden values.
func TestKeysAreGolden(t *testing.T) {
	for _, c := range []struct {
		full string
		opts []Option
		want []string // value, lease, claim, lock, fence, tag state
	}{
		{"product:42", nil, []string{
			"refill:{560}:product:42", "refill:{560}:product/lease:42", "refill:{560}:product/claim:42",
			"refill:{560}:product/lock:42", "refill:{560}:product/fence:42",
			"refill:{560}:product/tag:42",
		}},
		{"a.b:c:d", []Option{Prefix("shop-1")}, []string{
			"shop-1:{733}:a.b:c:d", "shop-1:{733}:a.b/lease:c:d", "shop-1:{733}:a.b/claim:c:d",
			"shop-1:{733}:a.b/lock:c:d", "shop-1:{733}:a.b/fence:c:d",
			"shop-1:{733}:a.b/tag:c:d",
		}},
		{"u:{7}/lease:\xff", nil, []string{
			"refill:{873}:u:{7}/lease:\xff", "refill:{873}:u/lease:{7}/lease:\xff", "refill:{873}:u/claim:{7}/lease:\xff",
			"refill:{873}:u/lock:{7}/lease:\xff", "refill:{873}:u/fence:{7}/lease:\xff",
			"refill:{873}:u/tag:{7}/lease:\xff",
		}},
	} {
		k := testStore(t, c.opts...).keys(c.full)
		if got := append(k.fill(), k.lock(), k.fence(), k.tagState()); !slices.Equal(got, c.want) {
			t.Errorf("%q:\n got %q\nwant %q", c.full, got, c.want)
		}
	}
	if got := testStore(t).channel; got != "refill:notes" {
		t.Error(got)
	}
}

func TestBucketsAreSpread(t *testing.T) {
	seen := map[string]int{}
	for i := range 100 * buckets {
		seen[bucket(fmt.Sprint("product:", i))]++
	}
	if len(seen) != buckets {
		t.Errorf("%d buckets of %d", len(seen), buckets)
	}
	for b, n := range seen {
		if n > 200 {
			t.Errorf("bucket %s has %d keys of %d", b, n, 100*buckets)
		}
	}
}

// lua/expire.lua contains the length of the shortest record, 62 bytes. A record with a token of one byte must have
// this length.
func TestShortestRecord(t *testing.T) {
	b, err := (&driver.Record{Token: "t"}).Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(b) != 62 {
		t.Errorf("%d bytes", len(b))
	}
}
