package codec_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/quick"

	"github.com/klauspost/compress/s2"
	"github.com/refill-go/refill"
	"github.com/refill-go/refill/codec"
)

var compressors = []refill.Codec{codec.Compress(nil, 100), codec.Compress(codec.CBOR, 100), codec.Compress(nil, -1)}

func TestCompressKeepsValues(t *testing.T) {
	for _, c := range compressors {
		err := quick.Check(func(b []byte, s string, m map[string][]string, n uint8) bool {
			b, s = bytes.Repeat(b, int(n)), strings.Repeat(s, int(n))
			return bytes.Equal(b, through(t, c, b)) && s == through(t, c, s) && reflect.DeepEqual(m, through(t, c, m)) &&
				reflect.DeepEqual(any(s), through(t, c, any(s)))
		}, &quick.Config{MaxCount: 100})
		if err != nil {
			t.Error(c.Name(), err)
		}
		same(t, c, product())
	}
	// With V = any, the default codec must distinguish a []byte, a string and a number. JSON alone could not.
	same[any](t, compressors[0], []byte(strings.Repeat("123", 100)))
	same[any](t, compressors[0], []byte("123"))
	same[any](t, compressors[0], "123")
	same[any](t, compressors[0], 123.0)
}

// A value that is small, or does not shrink, must be stored as it is, after one byte of flags. Other values must be
// compressed.
func TestCompressOnlyWhatShrinks(t *testing.T) {
	noise := make([]byte, 10_000)
	for i := range noise {
		noise[i] = byte(rand.Uint32())
	}
	text := bytes.Repeat([]byte("some text "), 1000)
	for _, tt := range []struct {
		what  string
		in    []byte
		above int
		plain bool
	}{
		{"noise", noise, 0, true},
		{"text", text, 9_999, false},
		{"text at the limit", text, 10_000, true},
		{"nothing", nil, -1, true},
	} {
		b, err := codec.Compress(nil, tt.above).Marshal(tt.in)
		if err != nil {
			t.Fatal(err)
		}
		if plain := len(b) == len(tt.in)+1 && bytes.Equal(b[1:], tt.in); plain != tt.plain {
			t.Errorf("%s: %d of %d bytes, plain %v, want %v", tt.what, len(b), len(tt.in), plain, tt.plain)
		}
		if !tt.plain && len(b) > len(tt.in)/10 {
			t.Errorf("%s: %d of %d bytes", tt.what, len(b), len(tt.in))
		}
	}
}

// The codec must not keep or change the memory of the loaded value. It must also not return memory that it uses
// again.
func TestCompressOwnsItsMemory(t *testing.T) {
	c := codec.Compress(nil, 10)
	in := bytes.Repeat([]byte("a"), 100)
	packed, err := c.Marshal(in[:50])
	if err != nil {
		t.Fatal(err)
	}
	short, err := c.Marshal(in[:5])
	if err != nil {
		t.Fatal(err)
	}
	clear(in)
	for range 10 {
		if _, err := c.Marshal(bytes.Repeat([]byte("b"), 100)); err != nil {
			t.Fatal(err)
		}
	}
	short = append(make([]byte, 0, 100), short...) // the record has spare capacity
	var long, five []byte
	if err := errors.Join(c.Unmarshal(packed, &long), c.Unmarshal(short, &five)); err != nil {
		t.Fatal(err)
	}
	if string(long) != strings.Repeat("a", 50) || string(five) != "aaaaa" {
		t.Errorf("%q and %q", long, five)
	}
	if cap(five) != 5 { // otherwise an append to five would write into the record
		t.Errorf("cap %d", cap(five))
	}
}

// Two codecs differ only in above. They must have the same name, and each must read what the other wrote.
func TestCompressAboveMayChange(t *testing.T) {
	v := product()
	for _, inner := range []refill.Codec{nil, codec.CBOR} {
		all, none := codec.Compress(inner, 0), codec.Compress(inner, 1<<30)
		if all.Name() != none.Name() {
			t.Errorf("%q and %q", all.Name(), none.Name())
		}
		for _, way := range [][2]refill.Codec{{all, none}, {none, all}} {
			b, err := way[0].Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			var got Product
			if err := way[1].Unmarshal(b, &got); err != nil || !reflect.DeepEqual(v, got) {
				t.Errorf("%s: %v, %+v", all.Name(), err, got)
			}
		}
	}
}

func TestNames(t *testing.T) {
	for want, c := range map[string]refill.Codec{
		"cbor":       codec.CBOR,
		"default+s2": codec.Compress(nil, 0),
		"cbor+s2":    codec.Compress(codec.CBOR, 0),
		"":           codec.Compress(nameless{codec.CBOR}, 0),
	} {
		if c.Name() != want {
			t.Errorf("%q, want %q", c.Name(), want)
		}
	}
}

type nameless struct{ refill.Codec }

func (nameless) Name() string { return "" }

// A short record claims to decompress to more than 64 MiB. Decoding must fail without allocating so much memory.
func TestDecompressionBomb(t *testing.T) {
	bomb := append([]byte{1 | 2}, s2.Encode(nil, make([]byte, 64<<20+1))...)
	if len(bomb) > 1000 {
		t.Fatalf("%d bytes", len(bomb))
	}
	lie := append([]byte{1 | 2}, binary.AppendUvarint(nil, 1<<31)...)
	for _, b := range [][]byte{bomb, lie} {
		var got []byte
		var err error
		c := codec.Compress(nil, 0)
		if bytes := allocated(func() { err = c.Unmarshal(b, &got) }); bytes > 1<<20 {
			t.Errorf("%d bytes allocated", bytes)
		}
		if err == nil || !strings.Contains(err.Error(), "at most 67108864") {
			t.Errorf("%v, want an error that names the bound", err)
		}
	}
	if testing.Short() {
		return
	}
	// A value of more than 64 MiB must be stored and read without compression.
	c, large := codec.Compress(nil, 0), make([]byte, 64<<20+1)
	b, err := c.Marshal(large)
	if err != nil || len(b) != len(large)+1 {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
	var got []byte
	if err := c.Unmarshal(b, &got); err != nil || !bytes.Equal(got, large) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

func TestForeignBytesAreErrors(t *testing.T) {
	good, err := codec.Compress(nil, 0).Marshal(strings.Repeat("text ", 100))
	if err != nil {
		t.Fatal(err)
	}
	var s string
	var n int
	var a any
	for _, tt := range []struct {
		what string
		c    refill.Codec
		b    []byte
		p    any
	}{
		{"nothing", codec.Compress(nil, 0), nil, &s},
		{"nothing", codec.CBOR, nil, &s},
		{"unknown flag", codec.Compress(nil, 0), []byte{8 | 4, 'a'}, &s},
		{"both kinds", codec.Compress(nil, 0), []byte{6, 'a'}, &a},
		{"raw of a codec that has none", codec.Compress(codec.CBOR, 0), []byte{2, 'a'}, &a},
		{"raw for a number", codec.Compress(nil, 0), []byte{2, '1'}, &n},
		{"cut off", codec.Compress(nil, 0), good[:len(good)-1], &s},
		{"bad length", codec.Compress(nil, 0), []byte{1, 0xff}, &s},
		{"more than one value", codec.CBOR, []byte{1, 1}, &n},
		{"another type", codec.CBOR, []byte{0x61, 'a'}, &n},
	} {
		if err := tt.c.Unmarshal(tt.b, tt.p); err == nil {
			t.Errorf("%s, %s: no error", tt.c.Name(), tt.what)
		}
	}
}

// Marshal must return an error of the inner codec.
func TestInnerError(t *testing.T) {
	if _, err := codec.Compress(codec.CBOR, 0).Marshal(byJSON{}); err == nil {
		t.Error("no error")
	}
	if _, err := codec.Compress(nil, 0).Marshal(func() {}); err == nil {
		t.Error("no error")
	}
}

func TestConcurrentUse(t *testing.T) {
	c := codec.Compress(codec.CBOR, 200)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 100 {
				v := product()
				v.Name = fmt.Sprint(g, "/", i)
				v.Description = strings.Repeat(v.Name, i)
				same(t, c, v)
			}
		})
	}
	wg.Wait()
}

// Decoding must allocate only what the value needs. That is nothing for a []byte that is stored as it is, and one
// allocation for a compressed []byte.
func TestDecodeAllocations(t *testing.T) {
	c := codec.Compress(nil, 1000)
	for size, most := range map[int]float64{500: 0, 50_000: 1} {
		b, err := c.Marshal(bytes.Repeat([]byte("some text "), size/10))
		if err != nil {
			t.Fatal(err)
		}
		var got []byte
		if n := testing.AllocsPerRun(100, func() {
			if err := c.Unmarshal(b, &got); err != nil {
				t.Fatal(err)
			}
		}); n > most {
			t.Errorf("%d bytes: %v allocations, want %v at most", size, n, most)
		}
	}
	b, err := codec.CBOR.Marshal(product())
	if err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() {
		var p Product
		if err := codec.CBOR.Unmarshal(b, &p); err != nil {
			t.Fatal(err)
		}
	}); n > 40 { // 34: one per string, slice, map and pointer
		t.Errorf("CBOR: %v allocations", n)
	}
}
