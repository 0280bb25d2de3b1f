package codec

import (
	"math"
	"reflect"

	"github.com/fxamacker/cbor/v2"
	"github.com/refill-go/refill"
)

// CBOR encodes values as CBOR (RFC 8949). Fields have the same names as in JSON. CBOR reads `json` tags, and `cbor`
// tags take precedence. Fields that a record lacks stay zero. Fields that a type lacks are skipped. CBOR keeps values
// that JSON loses: NaN and infinities, any byte in a string, a time or an integer in an interface{}. In an
// interface{}, integers come back as int64, and maps as map[string]any. As with JSON, a time keeps its nanoseconds
// and its offset, but not the name of its zone.
//
// CBOR encodes a type with MarshalBinary or MarshalText by calling this method. It does not call MarshalJSON. A type
// that has only MarshalJSON and no exported field is an error, because nothing of its values would be stored. A value
// that contains itself is also an error.
var CBOR refill.Codec = cborCodec{}

type cborCodec struct{}

// maxDepth is how deeply values may nest. It is the limit of encoding/json.
const maxDepth = 10_000

var (
	encMode = must(cbor.EncOptions{
		Time:          cbor.TimeRFC3339Nano, // the library's default keeps whole seconds only
		TimeTag:       cbor.EncTagRequired,  // with a tag, a time in an interface{} stays a time
		TextMarshaler: cbor.TextMarshalerTextString,
	}.EncMode())
	// These options accept any value that can be encoded. The library's defaults refuse long slices, deep values and
	// strings that are not UTF-8. The length of the record limits the number of elements. The library checks that limit
	// before it allocates anything.
	decMode = must(cbor.DecOptions{
		MaxArrayElements: math.MaxInt32,
		MaxMapPairs:      math.MaxInt32,
		MaxNestedLevels:  maxDepth,
		UTF8:             cbor.UTF8DecodeInvalid,
		TextUnmarshaler:  cbor.TextUnmarshalerTextString,
		DefaultMapType:   reflect.TypeFor[map[string]any](),
		IntDec:           cbor.IntDecConvertSignedOrBigInt,
	}.DecMode())
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func (cborCodec) Name() string { return "cbor" }

func (cborCodec) Marshal(v any) ([]byte, error) {
	if v != nil {
		c := checked(reflect.TypeOf(v))
		if c.err != nil {
			return nil, c.err
		}
		if c.open {
			if err := make(path).walk(reflect.ValueOf(v)); err != nil {
				return nil, err
			}
		}
	}
	return encMode.Marshal(v)
}

func (cborCodec) Unmarshal(data []byte, p any) error { return decMode.Unmarshal(data, p) }
