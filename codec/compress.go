package codec

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/klauspost/compress/s2"
	"github.com/refill-go/refill"
)

// Compress returns a codec that encodes with inner. If the encoded value has more than above bytes, the codec
// compresses it with S2 and keeps the smaller form. A nil inner means the default of refill.Config.Codec: JSON, and
// the bytes themselves for a []byte or string. Begin with an above of 4<<10. If above is 0 or less, the codec tries
// to compress every value.
//
// The name of the codec is the name of inner followed by "+s2". If above changes, stored records stay readable. The
// codec refuses a record that would decompress to more than 64 MiB, so such a record is a miss. Values above 64 MiB
// are not compressed.
func Compress(inner refill.Codec, above int) refill.Codec {
	return compressed{inner: inner, above: above}
}

type compressed struct {
	inner refill.Codec // nil = the default of refill.Config.Codec
	above int
}

// The first byte of a payload holds these flags. It says whether bytes of the inner codec, a []byte or a string
// follow, and whether they are compressed. If V is any, only this byte tells Unmarshal whether Marshal was given a
// []byte or a string.
const (
	packed = 1 << iota
	rawBytes
	rawString

	allFlags = packed | rawBytes | rawString
)

// maxUnpacked is the largest size of a decompressed value, in bytes. It limits the memory that a short record can
// make a reader allocate.
const maxUnpacked = 64 << 20

var (
	errEmpty = errors.New("codec: no bytes")
	errFlags = errors.New("codec: not written by Compress")
)

// scratch holds *[]byte buffers to compress into, because S2 needs more room than its result.
var scratch sync.Pool

func (c compressed) Name() string {
	if c.inner == nil {
		return "default+s2"
	}
	if name := c.inner.Name(); name != "" {
		return name + "+s2"
	}
	return "" // refill.New refuses an empty name
}

func (c compressed) Marshal(v any) ([]byte, error) {
	plain, flags, err := c.encode(v)
	if err != nil {
		return nil, err
	}
	if len(plain) > c.above && len(plain) <= maxUnpacked {
		if b := pack(plain, flags); b != nil {
			return b, nil
		}
	}
	b := make([]byte, 1+len(plain))
	b[0] = flags
	copy(b[1:], plain)
	return b, nil
}

// encode calls Marshal of the inner codec. The result may share the caller's memory.
func (c compressed) encode(v any) (plain []byte, flags byte, err error) {
	if c.inner != nil {
		plain, err = c.inner.Marshal(v)
		return plain, 0, err
	}
	switch v := v.(type) {
	case []byte:
		return v, rawBytes, nil
	case string:
		return []byte(v), rawString, nil
	}
	plain, err = json.Marshal(v)
	return plain, 0, err
}

// pack compresses plain. It returns nil if the compressed form is not smaller.
func pack(plain []byte, flags byte) []byte {
	buf, _ := scratch.Get().(*[]byte)
	if buf == nil {
		buf = new([]byte)
	}
	defer scratch.Put(buf)
	if n := s2.MaxEncodedLen(len(plain)); cap(*buf) < n {
		*buf = make([]byte, n)
	}
	z := s2.EncodeBetter((*buf)[:cap(*buf)], plain)
	if len(z) >= len(plain) {
		return nil
	}
	b := make([]byte, 1+len(z))
	b[0] = flags | packed
	copy(b[1:], z)
	return b
}

func (c compressed) Unmarshal(data []byte, p any) error {
	if len(data) == 0 {
		return errEmpty
	}
	flags, data := data[0], data[1:]
	raw := flags & (rawBytes | rawString)
	if flags&^allFlags != 0 || raw == rawBytes|rawString || raw != 0 && c.inner != nil {
		return errFlags
	}
	if flags&packed != 0 {
		var err error
		if data, err = unpack(data); err != nil {
			return err
		}
	}
	switch {
	case raw != 0:
		return setRaw(data, raw, p)
	case c.inner != nil:
		return c.inner.Unmarshal(data, p)
	}
	return json.Unmarshal(data, p)
}

// unpack decompresses z. It allocates new memory for each result, because a codec may keep the bytes that it decodes.
func unpack(z []byte) ([]byte, error) {
	n, err := s2.DecodedLen(z)
	if err != nil {
		return nil, fmt.Errorf("codec: decompressing: %w", err)
	}
	if n > maxUnpacked {
		return nil, fmt.Errorf("codec: decompressing: %d bytes, at most %d", n, maxUnpacked)
	}
	plain, err := s2.Decode(make([]byte, n), z)
	if err != nil {
		return nil, fmt.Errorf("codec: decompressing: %w", err)
	}
	return plain, nil
}

// setRaw stores data in *p. If p is *any, raw says whether data is a string. A []byte shares the memory of data.
func setRaw(data []byte, raw byte, p any) error {
	data = data[:len(data):len(data)]
	switch p := p.(type) {
	case *[]byte:
		*p = data
	case *string:
		*p = string(data)
	case *any:
		*p = data
		if raw == rawString {
			*p = string(data)
		}
	default:
		return fmt.Errorf("codec: plain bytes do not fit a %T", p)
	}
	return nil
}
