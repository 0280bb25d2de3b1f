package codec_test

import (
	"bytes"
	"runtime/metrics"
	"testing"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/codec"
)

// allocated returns how many bytes this process allocates while f runs.
func allocated(f func()) uint64 {
	read := func() uint64 {
		s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
		metrics.Read(s)
		return s[0].Value.Uint64()
	}
	before := read()
	f()
	return read() - before
}

// hostile decodes data into values of several types. Decoding must not panic, and must not allocate more than most
// bytes.
func hostile(t *testing.T, c refill.Codec, data []byte, most uint64) {
	for _, p := range []any{new(Product), new(any), new([]byte), new(string), new([]drawn), new(map[string]int)} {
		if n := allocated(func() { _ = c.Unmarshal(data, p) }); n > most {
			t.Errorf("%s into %T: %d bytes allocated for %d", c.Name(), p, n, len(data))
		}
	}
}

func seed(f *testing.F, c refill.Codec) {
	for _, v := range []any{product(), []any{1, "x", nil}, "text", bytes.Repeat([]byte("text "), 50)} {
		b, err := c.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(b[:len(b)/2])
	}
}

func FuzzCBOR(f *testing.F) {
	seed(f, codec.CBOR)
	f.Add([]byte{0x9b, 0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff}) // an array that claims 2^31-1 elements and has none
	f.Add(bytes.Repeat([]byte{0x81}, 20_000))               // arrays in arrays
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) < 64<<10 {
			hostile(t, codec.CBOR, data, 64<<20)
		}
	})
}

func FuzzCompress(f *testing.F) {
	seed(f, codec.Compress(nil, 0))
	seed(f, codec.Compress(codec.CBOR, 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		hostile(t, codec.Compress(nil, 0), data, 1<<30)
		hostile(t, codec.Compress(codec.CBOR, 0), data, 1<<30)
		b, err := codec.Compress(nil, 0).Marshal(data)
		if err != nil {
			t.Fatal(err)
		}
		var back []byte
		if err := codec.Compress(nil, 0).Unmarshal(b, &back); err != nil || !bytes.Equal(back, data) {
			t.Fatalf("%x became %x: %v", data, back, err)
		}
	})
}
