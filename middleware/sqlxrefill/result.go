package sqlxrefill

import (
	"bytes"
	"database/sql"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
)

// result is the set of rows that a query returned, in encoded form. Each scan decodes the rows one by one. Decoded
// rows would take several times the memory: a small number takes 2 bytes in encoded form, and 24 bytes as an any.
// Callers share a result, so nothing changes it after it was read.
//
// Integers are varints. Strings have their length in front:
//
//	number of rows (8 bytes, big endian), number of columns, names of the columns, values row by row
//
// A value is a type tag (see value.go) and the data for that type. A change of this format needs a new name of the
// codec, because a record with another codec name is a miss.
type result struct {
	columns []string
	rows    int
	encoded []byte
	body    int    // where the values begin in encoded
	number  uint64 // of the load of this process that has read the result; 0 = another process has read it
}

// readResult reads the rows of a query. limit returns an error as soon as the result is too large.
func readResult(rows *sql.Rows, which span, limit func(*result) error) (*result, error) {
	columns, err := rows.Columns()
	if err != nil {
		return nil, err
	}
	if len(columns) == 0 {
		return nil, invalid("query", "it returns no columns; run statements through DB(), without the cache")
	}
	r := newResult(columns)
	row := make([]any, len(columns))
	dest := make([]any, len(row))
	for i := range row {
		dest[i] = &row[i]
	}
	for rows.Next() {
		if err := rows.Scan(dest...); err != nil {
			return nil, err
		}
		if err := r.add(row); err != nil {
			return nil, err
		}
		if err := limit(r); err != nil {
			return nil, err
		}
		if which == firstRow {
			return r.complete(), nil
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	return r.complete(), nil
}

// newResult returns a result without rows. The caller adds the rows, and then calls complete.
func newResult(columns []string) *result {
	r := &result{columns: columns, encoded: make([]byte, countSize, 256)}
	r.encoded = appendUint(r.encoded, len(columns))
	for _, name := range columns {
		r.encoded = appendString(r.encoded, name)
	}
	r.body = len(r.encoded)
	return r
}

// countSize is the length of the number of rows at the beginning of an encoded result.
const countSize = 8

func (r *result) add(row []any) (err error) {
	for i, v := range row {
		if r.encoded, err = appendValue(r.encoded, v); err != nil {
			return invalid("column "+strconv.Quote(r.columns[i]), "%v; read it through DB(), without the cache", err)
		}
	}
	r.rows++
	return nil
}

// complete gives back the memory that append has reserved for further rows.
func (r *result) complete() *result {
	binary.BigEndian.PutUint64(r.encoded, uint64(r.rows))
	r.encoded = bytes.Clone(r.encoded)
	return r
}

// decodeResult accepts only bytes that newResult, add and complete made. The result shares the memory of data.
func decodeResult(data []byte) (*result, error) {
	if len(data) < countSize {
		return nil, errNotResult
	}
	r := &result{encoded: data}
	c := cursor{b: data[countSize:]}
	r.columns = make([]string, c.count(1))
	for i := range r.columns {
		r.columns[i] = c.string()
	}
	r.body = len(data) - len(c.b)
	count := binary.BigEndian.Uint64(data)
	if c.bad || len(r.columns) == 0 || count > uint64(len(c.b)/len(r.columns)) || count > math.MaxInt {
		return nil, errNotResult
	}
	r.rows = int(count)
	for range r.rows * len(r.columns) {
		c.skip()
	}
	if c.bad || len(c.b) > 0 {
		return nil, errNotResult
	}
	return r, nil
}

// values returns a cursor at the first value.
func (r *result) values() cursor { return cursor{b: r.encoded[r.body:]} }

// codec is the codec of results. A decoded result shares the memory of its encoding.
type codec struct{}

func (codec) Name() string { return "sqlx2" }

func (codec) Marshal(v any) ([]byte, error) {
	r, ok := v.(*result)
	if !ok || r == nil {
		return nil, fmt.Errorf("sqlxrefill: cannot encode %T as a result", v)
	}
	return r.MarshalBinary()
}

// MarshalBinary returns a copy, because the codec of Config.WrapCodec may change the bytes, for instance encrypt them
// in place. The method also tells the Loader that the encoded form has the whole result. Without the method, the Loader
// would decode each result that it has loaded.
func (r *result) MarshalBinary() ([]byte, error) { return bytes.Clone(r.encoded), nil }

func (codec) Unmarshal(data []byte, pointer any) error {
	p, ok := pointer.(**result)
	if !ok {
		return fmt.Errorf("sqlxrefill: cannot decode a result into %T", pointer)
	}
	r, err := decodeResult(data)
	if err != nil {
		return err
	}
	*p = r
	return nil
}
