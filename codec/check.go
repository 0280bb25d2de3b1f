package codec

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"sync"

	"github.com/fxamacker/cbor/v2"
)

// This file rejects types and values that CBOR cannot store. It rejects a type of which CBOR would store nothing,
// because an empty record is worse than an error. It rejects a value that contains itself, because encoding it would
// end the process.

// checkup is what Marshal must know about a type before it encodes a value of the type.
type checkup struct {
	err  error
	open bool // a value of the type can contain itself
}

// checkups holds the results of earlier checks, by reflect.Type.
var checkups sync.Map

func checked(t reflect.Type) *checkup {
	if c, ok := checkups.Load(t); ok {
		return c.(*checkup)
	}
	c := new(checkup)
	c.err = c.inspect(t, map[reflect.Type]bool{})
	checkups.Store(t, c)
	return c
}

// inspect checks a type. under is true for each type that contains t, and false for each type whose check is complete.
func (c *checkup) inspect(t reflect.Type, under map[reflect.Type]bool) error {
	if within, known := under[t]; known {
		c.open = c.open || within
		return nil
	}
	if hasAny(t, byMethod) {
		return nil
	}
	under[t] = true
	defer func() { under[t] = false }()
	switch t.Kind() {
	case reflect.Interface:
		c.open = true
	case reflect.Map:
		if err := c.inspect(t.Key(), under); err != nil {
			return err
		}
		return c.inspect(t.Elem(), under)
	case reflect.Pointer, reflect.Slice, reflect.Array:
		return c.inspect(t.Elem(), under)
	case reflect.Struct:
		return c.fields(t, under)
	}
	return nil
}

func (c *checkup) fields(t reflect.Type, under map[reflect.Type]bool) error {
	stored := false
	for i := range t.NumField() {
		if f := t.Field(i); isStored(f) {
			stored = true
			if err := c.inspect(f.Type, under); err != nil {
				return err
			}
		}
	}
	if !stored && t.NumField() > 0 && hasAny(t, byJSON) {
		return fmt.Errorf("codec: %v has MarshalJSON and no exported field: CBOR needs MarshalBinary or MarshalText", t)
	}
	return nil
}

// isStored reports whether CBOR may store a field. CBOR may store an embedded struct that is not exported, because of
// the fields that this struct exports.
func isStored(f reflect.StructField) bool {
	return (f.IsExported() || f.Anonymous) && f.Tag.Get("json") != "-" && f.Tag.Get("cbor") != "-"
}

var (
	byMethod = []reflect.Type{
		reflect.TypeFor[cbor.Marshaler](),
		reflect.TypeFor[encoding.BinaryMarshaler](),
		reflect.TypeFor[encoding.TextMarshaler](),
	}
	byJSON = []reflect.Type{reflect.TypeFor[json.Marshaler]()}
)

// hasAny reports whether t, or a pointer to it, has the methods of one of these interfaces.
func hasAny(t reflect.Type, interfaces []reflect.Type) bool {
	for _, i := range interfaces {
		if t.Implements(i) || reflect.PointerTo(t).Implements(i) {
			return true
		}
	}
	return false
}

var errCycle = errors.New("codec: the value contains itself")

// A place identifies a pointer, a map or a slice. Only the place of a slice has a len.
type place struct {
	at  uintptr
	len int
	t   reflect.Type
}

// path holds the places that the walk has entered and not yet left. If the walk reaches one of these places again,
// the value contains itself.
type path map[place]bool

func (p path) walk(v reflect.Value) error {
	switch v.Kind() {
	case reflect.Interface:
		if !v.IsNil() {
			return p.walk(v.Elem())
		}
	case reflect.Struct:
		return p.into(v)
	case reflect.Array:
		if mayHold(v.Type().Elem()) {
			return p.into(v)
		}
	case reflect.Pointer, reflect.Map, reflect.Slice:
		if v.IsNil() || !mayHold(v.Type().Elem()) {
			return nil
		}
		here := place{at: v.Pointer(), t: v.Type()}
		if v.Kind() == reflect.Slice {
			here.len = v.Len()
		}
		if p[here] {
			return errCycle
		}
		p[here] = true
		defer delete(p, here)
		return p.into(v)
	}
	return nil
}

// into continues the walk with the values that v holds. It skips the keys of a map, because they hold nothing that
// CBOR would follow.
func (p path) into(v reflect.Value) error {
	var held []reflect.Value
	switch t := v.Type(); v.Kind() {
	case reflect.Pointer:
		return p.walk(v.Elem())
	case reflect.Map:
		for i := v.MapRange(); i.Next(); {
			held = append(held, i.Value())
		}
	case reflect.Struct:
		if hasAny(t, byMethod) {
			return nil
		}
		for i := range v.NumField() {
			if isStored(t.Field(i)) {
				held = append(held, v.Field(i))
			}
		}
	default:
		for i := range v.Len() {
			held = append(held, v.Index(i))
		}
	}
	for _, h := range held {
		if err := p.walk(h); err != nil {
			return err
		}
	}
	return nil
}

// mayHold reports whether a value of type t can hold other values. The walk skips values that cannot, such as numbers
// and strings.
func mayHold(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Interface, reflect.Pointer, reflect.Map, reflect.Slice, reflect.Array, reflect.Struct:
		return true
	}
	return false
}
