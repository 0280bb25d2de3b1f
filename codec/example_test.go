package codec_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/codec"
)

// CBOR encodes structs in half the time of JSON, and keeps what JSON cannot represent.
func Example_cbor() {
	type Stats struct {
		Mean float64 `json:"mean"`
		Seen time.Time
	}
	load := func(context.Context, string) (Stats, error) {
		return Stats{Mean: math.NaN(), Seen: time.Unix(0, 1).UTC()}, nil // the mean of no rows
	}
	stats, err := refill.New("stats", load, refill.Config{TTL: time.Minute, Codec: codec.CBOR})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stats.Close()
	fmt.Println(stats.Get(context.Background(), "42"))
	// Output:
	// {NaN 1970-01-01 00:00:00.000000001 +0000 UTC} <nil>
}

// The store holds pages of more than 4 KiB in compressed form. Callers get the pages unchanged.
func ExampleCompress() {
	load := func(_ context.Context, path string) ([]byte, error) {
		return []byte("<h1>" + path + "</h1>" + strings.Repeat("<p>text</p>", 1000)), nil
	}
	pages, err := refill.New("page", load, refill.Config{TTL: time.Minute, Codec: codec.Compress(nil, 4<<10)})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pages.Close()
	page, err := pages.Get(context.Background(), "/home")
	fmt.Printf("%d bytes, %s…, %v\n", len(page), page[:14], err)
	// Output:
	// 11014 bytes, <h1>/home</h1>…, <nil>
}
