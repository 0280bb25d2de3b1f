package l1

import (
	"math/bits"
	"math/rand/v2"
	"reflect"
	"sync"
	"time"
	"unsafe"
)

// This file estimates how much memory a value takes.

const (
	maxSamples = 64   // elements of a slice, array or map that are looked at; SizeOf extrapolates from them
	maxVisits  = 4096 // parts of one value that are looked at; parts beyond them count as nothing
)

// SizeOf estimates how many bytes *v refers to. The bytes of *v itself are not among them. v was decoded from record.
// If a part of *v shares the memory of record, SizeOf counts the whole record, once. Otherwise record is not counted.
// The work is bounded: SizeOf looks at a sample of the elements of a long slice or map.
func SizeOf[V any](v *V, record []byte) int64 {
	p := planOf(reflect.TypeFor[V]())
	if p.flat {
		return 0
	}
	m := meter{record: record}
	n := m.refs(p, reflect.ValueOf(v).Elem(), 4*maxSamples)
	if m.shared {
		n += allocated(cap(record))
	}
	return n
}

// plan says how to find what a value of a type refers to.
type plan struct {
	kind   reflect.Kind
	flat   bool  // a value of the type refers to no other memory
	size   int   // of a value itself, in bytes
	key    *plan // of the keys; only for a map
	elem   *plan // of the elements; only for a slice, array, map or pointer
	fields []fieldPlan
}

// fieldPlan is a field that is not flat.
type fieldPlan struct {
	index int
	plan  *plan
}

var plans sync.Map // reflect.Type to *plan

func planOf(t reflect.Type) *plan {
	if p, ok := plans.Load(t); ok {
		return p.(*plan)
	}
	made := map[reflect.Type]*plan{}
	makePlan(t, made)
	for t, p := range made { // stored only when all are complete, because other goroutines may use them at once
		plans.LoadOrStore(t, p)
	}
	return made[t]
}

// makePlan adds the plan of t to made. A type that refers to itself finds its own plan in made.
func makePlan(t reflect.Type, made map[reflect.Type]*plan) *plan {
	if p := made[t]; p != nil {
		return p
	}
	p := &plan{kind: t.Kind(), size: int(t.Size())}
	made[t] = p
	switch t.Kind() {
	case reflect.String, reflect.Interface:
	case reflect.Slice:
		p.elem = makePlan(t.Elem(), made)
	case reflect.Pointer:
		if p.flat = t == reflect.TypeFor[*time.Location](); !p.flat { // not counted: all times share few locations
			p.elem = makePlan(t.Elem(), made)
		}
	case reflect.Map:
		p.key, p.elem = makePlan(t.Key(), made), makePlan(t.Elem(), made)
	case reflect.Array:
		p.elem = makePlan(t.Elem(), made)
		p.flat = p.elem.flat
	case reflect.Struct:
		for i := range t.NumField() {
			if f := makePlan(t.Field(i).Type, made); !f.flat {
				p.fields = append(p.fields, fieldPlan{i, f})
			}
		}
		p.flat = len(p.fields) == 0
	default:
		p.flat = true
	}
	return p
}

// meter measures one value.
type meter struct {
	record []byte
	shared bool // a part of the value shares the memory of record
	visits int  // how many parts of the value were looked at
}

// refs returns how many bytes v refers to. samples bounds how many elements of v are looked at.
func (m *meter) refs(p *plan, v reflect.Value, samples int) (n int64) {
	if m.visits++; p.flat || m.visits > maxVisits {
		return 0
	}
	switch p.kind {
	case reflect.String:
		s := v.String()
		return m.block(unsafe.Pointer(unsafe.StringData(s)), len(s))
	case reflect.Slice:
		return m.block(v.UnsafePointer(), v.Cap()*p.elem.size) + m.elems(p.elem, v, samples)
	case reflect.Array:
		return m.elems(p.elem, v, samples)
	case reflect.Struct:
		for _, f := range p.fields {
			n += m.refs(f.plan, v.Field(f.index), samples)
		}
	case reflect.Pointer:
		if !v.IsNil() {
			n = allocated(p.elem.size) + m.refs(p.elem, v.Elem(), samples)
		}
	case reflect.Interface:
		return m.boxed(v.Elem(), samples)
	case reflect.Map:
		return m.table(p, v, samples)
	}
	return n
}

// block returns the size of the memory at p, or 0 if that memory belongs to the record.
func (m *meter) block(p unsafe.Pointer, size int) int64 {
	if size == 0 {
		return 0
	}
	start := uintptr(unsafe.Pointer(unsafe.SliceData(m.record)))
	if at := uintptr(p); at >= start && at < start+uintptr(cap(m.record)) {
		m.shared = true
		return 0
	}
	return allocated(size)
}

// elems returns what the elements of a slice or an array refer to.
func (m *meter) elems(p *plan, v reflect.Value, samples int) (n int64) {
	if p.flat || v.Len() == 0 {
		return 0
	}
	all := v.Len()
	k := min(all, samples, maxSamples)
	for i := range k { // one element of each of k parts of equal length
		from, to := i*(all/k), (i+1)*(all/k)
		if i == k-1 {
			to = all
		}
		at := from
		if to-from > 1 {
			at += rand.IntN(to - from)
		}
		n += m.refs(p, v.Index(at), max(1, samples/k))
	}
	return n * int64(all) / int64(k)
}

// boxed returns the size of the value in an interface.
func (m *meter) boxed(v reflect.Value, samples int) int64 {
	if !v.IsValid() {
		return 0
	}
	p := planOf(v.Type())
	switch p.kind {
	case reflect.Pointer, reflect.Map, reflect.Chan, reflect.Func, reflect.UnsafePointer:
		return m.refs(p, v, samples) // the interface holds the pointer itself
	}
	return allocated(p.size) + m.refs(p, v, samples)
}

// table returns the size of a map and of what its keys and elements refer to. A map has groups of 8 places, and one
// byte per place. A map of up to 8 keys has one group. A larger map has a power of two of places, or several tables of
// 1,024 places, and an eighth of its places or more is free.
func (m *meter) table(p *plan, v reflect.Value, samples int) (n int64) {
	if v.IsNil() {
		return 0
	}
	const head = 48 // the map itself
	all := v.Len()
	places := 8
	switch need := all * 8 / 7; {
	case all > 896:
		places = need * 4 / 3
	case all > 8:
		places = 1 << bits.Len(uint(need-1))
	}
	size := head + int64(places)*int64(p.key.size+p.elem.size+1)
	if all == 0 || p.key.flat && p.elem.flat {
		return size
	}
	k := min(all, samples, maxSamples/4)
	it := v.MapRange()
	for i := 0; i < k && it.Next(); i++ {
		n += m.refs(p.key, it.Key(), max(1, samples/k)) + m.refs(p.elem, it.Value(), max(1, samples/k))
	}
	return size + n*int64(all)/int64(k)
}

// allocated returns about how many bytes Go allocates for size bytes. Go rounds up to one of its size classes, whose
// distance is about an eighth of their size. Above 32 KiB, Go rounds up to pages of 8 KiB.
func allocated(size int) int64 {
	n, step := int64(size), int64(16)
	switch {
	case n > 32<<10:
		step = 8 << 10
	case n > 128:
		step = 1 << (bits.Len64(uint64(n-1)) - 4)
	case n <= 8:
		step = 8
	}
	return (n + step - 1) / step * step
}
