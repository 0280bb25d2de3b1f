package codec

import (
	"math"
	"reflect"

	"github.com/fxamacker/cbor/v2"
	"github.com/refill-go/refill"
)

// CBOR encodes values as CBOR (RFC 8949). Fields have the names that JSON gives them: `json` tags count, `cbor` tags go
// first; fields that a record lacks stay zero, those that a type lacks are skipped. It keeps what JSON loses: NaN and
// infinities, any byte in a string, a time or an integer in an interface{} (there, integers come back as int64, maps as
// map[string]any). A time keeps its nanoseconds and its offset, not the name of its zone, as with JSON.
//
// Types with MarshalBinary or MarshalText are encoded by these, but MarshalJSON is not called: a type that has nothing
// else, and no exported field, is an error, since nothing of it would be stored. So is a value that contains itself.
var CBOR refill.Codec = cborCodec{}

type cborCodec struct{}

// maxDepth is how deep encoding/json lets a value be nested.
const maxDepth = 10_000

var (
	encMode = must(cbor.EncOptions{
		Time:          cbor.TimeRFC3339Nano, // the default has whole seconds
		TimeTag:       cbor.EncTagRequired,  // so that a time in an interface{} stays one
		TextMarshaler: cbor.TextMarshalerTextString,
	}.EncMode())
	// What can be encoded can be decoded: the defaults refuse long slices, deep values and strings that are not UTF-8. The
	// number of elements needs no other bound than the record's length, which is checked before anything is allocated.
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
