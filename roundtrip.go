package refill

import (
	"bytes"
	"encoding"
	"encoding/json"
	"reflect"
	"strings"
	"sync/atomic"
)

// This file decides which value the loading node keeps after it has encoded the value. It may keep the value as the
// load function returned it, or the value as other nodes decode it from the record. The first choice saves a decode.
// The second choice makes sure that all nodes have the same value, and that the record can be decoded at all.

// roundTrip says when the loading node decodes what it has encoded.
type roundTrip struct {
	// lossy: the codec may leave out a part of a value of this type, so the node keeps the decoded value.
	lossy bool
	// failed: a record of this Loader could not be decoded. From then on, each loaded value is decoded once.
	failed atomic.Bool
	loads  atomic.Uint32
}

const (
	firstDecoded = 8  // the first loads of a Loader are decoded
	sampleEvery  = 64 // then one of so many
)

// due reports whether the next loaded value is decoded.
func (t *roundTrip) due() bool {
	n := t.loads.Add(1)
	return t.lossy || t.failed.Load() || n <= firstDecoded || n%sampleEvery == 0
}

var (
	jsonMarshaler   = reflect.TypeFor[json.Marshaler]()
	textMarshaler   = reflect.TypeFor[encoding.TextMarshaler]()
	binaryMarshaler = reflect.TypeFor[encoding.BinaryMarshaler]()
)

// lossyType reports whether codec may leave out a part of a value of type t, or decode the part as another type. This
// is so for unexported fields, for fields with the tag "-" and for interfaces. A type that encodes itself is complete.
func lossyType(t reflect.Type, codec Codec) bool {
	marshalers := []reflect.Type{binaryMarshaler}
	switch codec.(type) {
	case rawCodec:
		return false
	case jsonCodec:
		marshalers = []reflect.Type{jsonMarshaler, textMarshaler}
	}
	return !whole(t, marshalers, map[reflect.Type]bool{})
}

// whole reports whether values of type t are encoded without a loss. seen has the types that are being looked at.
func whole(t reflect.Type, marshalers []reflect.Type, seen map[reflect.Type]bool) bool {
	if seen[t] {
		return true
	}
	seen[t] = true
	for _, m := range marshalers {
		if t.Implements(m) && t.Kind() != reflect.Interface {
			return true
		}
	}
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array:
		return whole(t.Elem(), marshalers, seen)
	case reflect.Map:
		return whole(t.Key(), marshalers, seen) && whole(t.Elem(), marshalers, seen)
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			leftOut := strings.Contains(string(f.Tag), `:"-"`) // by one codec at least
			if !f.IsExported() || leftOut || !whole(f.Type, marshalers, seen) {
				return false
			}
		}
		return true
	case reflect.Interface, reflect.Chan, reflect.Func, reflect.UnsafePointer:
		return false
	}
	return true
}

// copied returns a []byte or string that shares no memory with v. Otherwise a small part of a large array that the load
// function has read would keep the whole array in L1. A value of another type is returned as it is.
func copied[V any](v V) V {
	switch p := any(&v).(type) {
	case *string:
		*p = strings.Clone(*p)
	case *[]byte:
		if *p = bytes.Clone(*p); *p == nil {
			*p = []byte{} // as other nodes decode it
		}
	}
	return v
}
