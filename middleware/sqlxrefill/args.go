package sqlxrefill

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"
)

// This file copies the arguments of a query and encodes them for its key. The driver gets a copy of the original, of
// the same type, because only the driver knows what the argument means. For instance, pgx sends a time.Duration as an
// interval and a struct as JSON, and MySQL's driver tells json.RawMessage from []byte. The encoding names the type and
// has everything that the argument refers to. So two arguments with the same encoding mean the same to every driver.

// The type tags of arguments only, see value.go for the others. An argument of another type is tagTyped, the name of
// its type, and its parts.
const (
	tagTyped byte = 100 + iota
	tagNamed      // sql.NamedArg: the name and the argument
)

// copyArg appends the encoding of an argument to b, and returns a copy that shares no memory with the argument.
func copyArg(b []byte, arg any) ([]byte, any, error) {
	switch v := arg.(type) {
	case int: // encoded as an int64, so that Invalidate with the literal 42 finds the result of a read with int64(42)
		b, err := appendValue(b, int64(v))
		return b, v, err
	case *int64:
		return copyPointed(b, v)
	case *string:
		return copyPointed(b, v)
	case *bool:
		return copyPointed(b, v)
	case *float64:
		return copyPointed(b, v)
	case *int:
		return copyPointed(b, v)
	case []byte:
		arg = bytes.Clone(v)
	case time.Time:
		// Round(0) drops the monotonic reading, which some drivers would send.
		return appendInstant(b, v), v.Round(0), nil
	}
	if encoded, err := appendValue(b, arg); err == nil {
		return encoded, arg, nil
	}
	return copyTyped(b, arg)
}

// copyPointed is copyArg for a pointer to a basic type. All drivers take such a pointer for the value that it points
// to, so it has the encoding of that value. nil pointers are typed, because pgx may ask what type of NULL to send.
func copyPointed[T any](b []byte, p *T) ([]byte, any, error) {
	if p == nil {
		return copyTyped(b, p)
	}
	v := *p
	b, _, err := copyArg(b, v)
	return b, &v, err
}

// copyTyped is copyArg for any type.
func copyTyped(b []byte, arg any) ([]byte, any, error) {
	v := reflect.ValueOf(arg)
	if isOption(v.Type()) {
		return b, nil, fmt.Errorf("a %T is an option of the driver, not a value; use DB(), without the cache", arg)
	}
	c := copier{b: append(b, tagTyped)}
	copied := c.typed(v)
	if c.err != nil {
		return b, nil, c.err
	}
	return c.b, copied.Interface(), nil
}

// isOption reports whether arguments of type t change how the driver runs the query, as pgx.QueryExecMode and
// pgx.NamedArgs do.
func isOption(t reflect.Type) bool {
	_, rewrites := t.MethodByName("RewriteQuery")
	path := t.PkgPath()
	return rewrites || path == "github.com/jackc/pgx" || strings.HasPrefix(path, "github.com/jackc/pgx/v") &&
		strings.Count(path, "/") == 3
}

// copier copies a value and appends the encoding of its parts to b.
type copier struct {
	b     []byte
	depth int
	err   error
}

// maxDepth bounds the nesting of an argument. A value that refers to itself reaches it.
const maxDepth = 100

var errTooDeep = fmt.Errorf("more than %d levels deep; perhaps it refers to itself", maxDepth)

func (c *copier) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

// typed encodes the type of v and its parts, and returns the copy.
func (c *copier) typed(v reflect.Value) reflect.Value {
	c.b = appendString(c.b, typeName(v.Type()))
	return c.copy(v)
}

// copy encodes the parts of v, and returns a copy. v may be read without restriction: no unexported field led to it.
func (c *copier) copy(v reflect.Value) reflect.Value {
	copied := reflect.New(v.Type()).Elem()
	copied.Set(v)
	c.detach(copied)
	return copied
}

// detach encodes the parts of v, which is addressable, and replaces what v refers to by copies.
func (c *copier) detach(v reflect.Value) {
	if c.depth++; c.depth > maxDepth {
		c.fail(errTooDeep)
	}
	defer func() { c.depth-- }()
	if c.err != nil || c.opaque(v) {
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		if c.present(!v.IsNil()) {
			copied := reflect.New(v.Type().Elem())
			copied.Elem().Set(v.Elem())
			c.detach(copied.Elem())
			v.Set(copied.Convert(v.Type()))
		}
	case reflect.Interface:
		if c.present(!v.IsNil()) {
			v.Set(c.typed(v.Elem()))
		}
	case reflect.Slice:
		if c.present(!v.IsNil()) {
			copied := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
			reflect.Copy(copied, v)
			c.b = appendUint(c.b, v.Len())
			c.elements(copied)
			v.Set(copied)
		}
	case reflect.Array:
		c.elements(v)
	case reflect.Map:
		if c.present(!v.IsNil()) {
			v.Set(c.mapping(v))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Field(i) // a field that is not exported can be read, but not set
			c.detach(reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem())
		}
	default:
		c.basic(v)
	}
}

func (c *copier) present(yes bool) bool {
	if yes {
		c.b = append(c.b, 1)
	} else {
		c.b = append(c.b, 0)
	}
	return yes
}

func (c *copier) elements(v reflect.Value) {
	if v.Type().Elem().Kind() == reflect.Uint8 {
		for i := range v.Len() {
			c.b = append(c.b, byte(v.Index(i).Uint()))
		}
		return
	}
	for i := range v.Len() {
		c.detach(v.Index(i))
	}
}

// mapping encodes the pairs of a map in the order of their encoding, and returns a copy of the map.
func (c *copier) mapping(v reflect.Value) reflect.Value {
	copied := reflect.MakeMapWithSize(v.Type(), v.Len())
	var pairs []string
	for key, value := range v.Seq2() {
		pair := copier{depth: c.depth}
		copied.SetMapIndex(pair.copy(key), pair.copy(value))
		if pair.err != nil {
			c.fail(pair.err)
		}
		pairs = append(pairs, string(pair.b))
	}
	slices.Sort(pairs)
	c.b = appendUint(c.b, len(pairs))
	for _, pair := range pairs {
		c.b = appendString(c.b, pair)
	}
	return copied
}

func (c *copier) basic(v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		c.present(v.Bool())
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		c.b = binary.AppendVarint(c.b, v.Int())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uintptr:
		c.b = binary.AppendUvarint(c.b, v.Uint())
	case reflect.Float32, reflect.Float64:
		c.b, _ = appendValue(c.b, v.Float())
	case reflect.Complex64, reflect.Complex128:
		c.b, _ = appendValue(c.b, real(v.Complex()))
		c.b, _ = appendValue(c.b, imag(v.Complex()))
	case reflect.String:
		c.b = appendString(c.b, v.String())
	default: // Chan, Func, UnsafePointer
		if c.present(!v.IsZero()) {
			c.fail(fmt.Errorf("unsupported type %v", v.Type()))
		}
	}
}

var errHandle = errors.New("a unique.Handle has no encoding")

// opaque encodes values that must not be taken apart, because they compare pointers. Such values cannot change, so no
// copy is needed. opaque reports whether v is such a value.
func (c *copier) opaque(v reflect.Value) bool {
	switch o := v.Addr().Interface().(type) {
	case *time.Time:
		*o = o.Round(0)
		c.b = appendInstant(c.b, *o)
	case **time.Location:
		c.b = appendString(c.b, (*o).String())
	case *netip.Addr:
		c.b = appendString(c.b, o.String())
	case *netip.Prefix:
		c.b = binary.AppendVarint(appendString(c.b, o.Addr().String()), int64(o.Bits()))
	case *netip.AddrPort:
		c.b = appendUint(appendString(c.b, o.Addr().String()), int(o.Port()))
	default:
		if v.Type().PkgPath() == "unique" {
			c.fail(errHandle)
		}
		return c.err != nil
	}
	return true
}

// typeNames holds the names of types. The number of types in a program is bounded.
var typeNames sync.Map // reflect.Type -> string

// typeName returns a name that no other type of the program has: with the path of the package, and with all parts of a
// type that has no name of its own.
func typeName(t reflect.Type) string {
	if known, ok := typeNames.Load(t); ok {
		return known.(string)
	}
	name := makeTypeName(t)
	typeNames.Store(t, name)
	return name
}

func makeTypeName(t reflect.Type) string {
	if t.Name() != "" {
		return t.PkgPath() + "." + t.Name()
	}
	switch t.Kind() {
	case reflect.Pointer:
		return "*" + typeName(t.Elem())
	case reflect.Slice:
		return "[]" + typeName(t.Elem())
	case reflect.Array:
		return "[" + strconv.Itoa(t.Len()) + "]" + typeName(t.Elem())
	case reflect.Map:
		return "map[" + typeName(t.Key()) + "]" + typeName(t.Elem())
	case reflect.Struct:
		var b strings.Builder
		for i := range t.NumField() {
			f := t.Field(i)
			fmt.Fprintf(&b, "%s.%s %t %s %q;", f.PkgPath, f.Name, f.Anonymous, typeName(f.Type), f.Tag)
		}
		return "struct{" + b.String() + "}"
	}
	return t.String()
}
