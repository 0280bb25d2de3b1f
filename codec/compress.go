package codec

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/klauspost/compress/s2"
	"github.com/refill-go/refill"
)

// Compress compresses what inner encodes into more than above bytes, with S2, if that makes it smaller. A nil inner is
// the default of refill.Config.Codec: JSON, and the bytes themselves for a []byte or string. A good size to begin with
// is 4<<10; with 0 or less, every value is tried.
//
// Its name is that of inner and "+s2". If above changes, what is stored stays readable. A record that would decompress
// to more than 64 MiB is refused, and so is a miss; values above that size are not compressed.
func Compress(inner refill.Codec, above int) refill.Codec {
	return compressed{inner: inner, above: above}
}

type compressed struct {
	inner refill.Codec // nil is the default
	above int
}

// The first byte of a payload says what follows: the inner codec's bytes, or those of a []byte or string, compressed or
// not. A V of type any needs the difference between the last two: Unmarshal cannot see what Marshal was given.
const (
	packed = 1 << iota
	rawBytes
	rawString

	allFlags = packed | rawBytes | rawString
)

// maxUnpacked limits what a few bytes may make a reader allocate.
const maxUnpacked = 64 << 20

var (
	errEmpty = errors.New("codec: no bytes")
	errFlags = errors.New("codec: not written by Compress")
)

// scratch has *[]byte buffers to compress into: S2 needs more room than the result takes.
var scratch sync.Pool

func (c compressed) Name() string {
	if c.inner == nil {
		return "default+s2"
	}
	if name := c.inner.Name(); name != "" {
		return name + "+s2"
	}
	return "" // which refill.New refuses
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

// encode is the inner codec's Marshal. Its result may be the caller's own memory.
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

// pack returns nil if compression gains nothing.
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

// unpack allocates its result, because a codec may keep it.
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

// setRaw sets what p points to. A []byte shares the memory of data, as in refill's default.
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
