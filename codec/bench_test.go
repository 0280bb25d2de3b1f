package codec_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/codec"
)

// Product is like the values that services cache. As JSON, a Product has about 1 KiB.
type Product struct {
	Audit
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	Description string            `json:"description"`
	Price       float64           `json:"price"`
	Stock       int               `json:"stock"`
	Tags        []string          `json:"tags"`
	Ratings     []float64         `json:"ratings"`
	Updated     time.Time         `json:"updated"`
	Maker       Maker             `json:"maker"`
	Owner       *Maker            `json:"owner,omitempty"`
	Attributes  map[string]string `json:"attributes"`
	Note        *string           `json:"note"`
}

type Audit struct {
	By string
	At time.Time
}

type Maker struct {
	Name    string  `json:"name"`
	Country string  `json:"country"`
	Score   float64 `json:"score"`
}

var words = strings.Fields(`the a of and bolt nut screw steel zinc plated brass outdoor indoor wood metal hexagon head
	thread metric coarse fine pack bulk box grade finish length width diameter suitable for use with machine garden
	furniture roof deck fence heavy light duty stainless black silver grey drive slot torx socket washer spring lock
	plain wing cap eye hook ring anchor wall plug concrete brick plaster self tapping drilling sealing rubber nylon`)

func some(r *rand.Rand, n int) string {
	var b strings.Builder
	for range n {
		b.WriteString(words[r.IntN(len(words))])
		b.WriteByte(' ')
	}
	return b.String()
}

func product() Product { return products(1)[0] }

// products returns n Products. They are the same in each call.
func products(n int) []Product {
	r := rand.New(rand.NewPCG(1, 2))
	day := time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)
	list := make([]Product, n)
	for i := range list {
		note := some(r, 3)
		list[i] = Product{
			Audit: Audit{By: "importer", At: day.Add(time.Duration(r.IntN(1e9)) * time.Millisecond)},
			ID:    fmt.Sprintf("prod-%016x", r.Uint64()), Name: some(r, 4), Description: some(r, 70),
			Price: float64(r.IntN(100_000)) / 100, Stock: r.IntN(1000), Tags: []string{"steel", "outdoor", "metric", "bulk"},
			Updated: day.Add(time.Duration(r.IntN(1e9)) * time.Microsecond), Maker: Maker{some(r, 2), "DE", 4.5},
			Owner: &Maker{some(r, 1), "NL", 3.25}, Note: &note,
			Attributes: map[string]string{"length": "40 mm", "head": some(r, 1), "grade": "8.8", "finish": some(r, 1)},
		}
		for range 8 {
			list[i].Ratings = append(list[i].Ratings, float64(r.IntN(50))/10)
		}
	}
	return list
}

// page returns HTML of about size bytes, the same in each call.
func page(size int) []byte {
	r := rand.New(rand.NewPCG(3, 4))
	b := []byte("<!doctype html><html><body>\n")
	for len(b) < size {
		b = fmt.Appendf(b, "<div class=\"row item-%d\"><h2>%s</h2>\n"+
			"<p class=\"text-sm muted\">%s</p><a href=\"/p/%x\">more</a></div>\n",
			r.IntN(9), some(r, 3), some(r, 20), r.Uint32())
	}
	return b
}

type jsonCodec struct{}

func (jsonCodec) Name() string                       { return "json" }
func (jsonCodec) Marshal(v any) ([]byte, error)      { return json.Marshal(v) }
func (jsonCodec) Unmarshal(data []byte, p any) error { return json.Unmarshal(data, p) }

// BenchmarkCodecs measures what the table of docs/codecs.md shows.
func BenchmarkCodecs(b *testing.B) {
	structs := []refill.Codec{jsonCodec{}, codec.CBOR, codec.Compress(nil, 0), codec.Compress(codec.CBOR, 0)}
	for _, n := range []int{1, 16, 100} {
		for _, c := range structs {
			benchmark(b, fmt.Sprintf("products=%d/%s", n, c.Name()), c, products(n))
		}
	}
	for _, kib := range []int{4, 16, 100} {
		benchmark(b, fmt.Sprintf("html=%dKiB/%s", kib, "default+s2"), codec.Compress(nil, 0), page(kib<<10))
	}
}

func benchmark[V any](b *testing.B, name string, c refill.Codec, v V) {
	data, err := c.Marshal(v)
	if err != nil {
		b.Fatal(err)
	}
	b.Run(name+"/encode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := c.Marshal(v); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(len(data)), "stored-bytes")
	})
	b.Run(name+"/decode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var w V
			if err := c.Unmarshal(data, &w); err != nil {
				b.Fatal(err)
			}
		}
	})
}
