//go:build unix

package realtest

import (
	"fmt"
	"reflect"
	"strings"
	"time"
)

// dump shows a value with the types and values of all its parts. Two values that a program could tell apart have
// different texts. Unlike reflect.DeepEqual, dump takes two NaN for equal.
func dump(v any) string {
	var b strings.Builder
	dumpTo(&b, reflect.ValueOf(v))
	return b.String()
}

func dumpTo(b *strings.Builder, v reflect.Value) {
	if !v.IsValid() {
		b.WriteString("nil")
		return
	}
	if at, ok := asTime(v); ok {
		_, offset := at.Zone()
		fmt.Fprintf(b, "%v in %v (%d)", at, at.Location(), offset)
		return
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		fmt.Fprintf(b, "%v(", v.Type())
		dumpTo(b, v.Elem())
		b.WriteString(")")
	case reflect.Struct:
		fmt.Fprintf(b, "%v{", v.Type())
		for i := range v.NumField() {
			dumpTo(b, v.Field(i))
			b.WriteString("; ")
		}
		b.WriteString("}")
	case reflect.Slice, reflect.Array:
		if v.Kind() == reflect.Slice && v.IsNil() {
			fmt.Fprintf(b, "%v(nil)", v.Type())
			return
		}
		if v.Type().Elem().Kind() == reflect.Uint8 {
			fmt.Fprintf(b, "%v %q", v.Type(), v)
			return
		}
		fmt.Fprintf(b, "%v[", v.Type())
		for i := range v.Len() {
			dumpTo(b, v.Index(i))
			b.WriteString(", ")
		}
		b.WriteString("]")
	default:
		fmt.Fprintf(b, "%v %#v", v.Type(), v)
	}
}

func asTime(v reflect.Value) (at time.Time, ok bool) {
	if v.Type() != reflect.TypeFor[time.Time]() || !v.CanInterface() {
		return at, false
	}
	return v.Interface().(time.Time), true
}
