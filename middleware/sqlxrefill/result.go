package sqlxrefill

import (
	"database/sql"
	"fmt"
	"strconv"
)

// result is the set of rows that a query returned. Callers share a result, so nothing changes it after it was read or
// decoded.
type result struct {
	columns []string
	values  []any // row by row, as the driver returned them
}

// readResult reads the rows of a query. size is the size of the encoded rows in bytes.
func readResult(rows *sql.Rows, which span) (r *result, size int, err error) {
	r = new(result)
	if r.columns, err = rows.Columns(); err != nil {
		return nil, 0, err
	}
	if len(r.columns) == 0 {
		return nil, 0, invalid("query", "it returns no columns; run statements through DB(), without the cache")
	}
	row := make([]any, len(r.columns))
	dest := make([]any, len(row))
	for i := range row {
		dest[i] = &row[i]
	}
	var scratch []byte
	for rows.Next() {
		if err := rows.Scan(dest...); err != nil {
			return nil, 0, err
		}
		for i, v := range row {
			if scratch, err = appendValue(scratch[:0], v); err != nil {
				return nil, 0, invalid("column "+strconv.Quote(r.columns[i]), "%v; read it through DB(), without the cache", err)
			}
			size += len(scratch)
		}
		r.values = append(r.values, row...)
		if which == firstRow {
			return r, size, nil
		}
	}
	return r, size, rows.Err()
}

// codec is the encoding of results in the shared store. Integers are varints. Strings have their length in front:
//
//	number of columns, their names, number of rows, values row by row
//
// A value is a type tag (see value.go) and the data for that type. A change of this format needs a new name of the
// codec, because a record with another codec name is a miss.
type codec struct{}

func (codec) Name() string { return "sqlx1" }

func (codec) Marshal(v any) ([]byte, error) {
	r, ok := v.(*result)
	if !ok || r == nil || len(r.columns) == 0 {
		return nil, fmt.Errorf("sqlxrefill: cannot encode %T as a result", v)
	}
	return r.encode()
}

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

func (r *result) encode() (b []byte, err error) {
	b = appendUint(b, len(r.columns))
	for _, name := range r.columns {
		b = appendString(b, name)
	}
	b = appendUint(b, len(r.values)/len(r.columns))
	for _, v := range r.values {
		if b, err = appendValue(b, v); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// decodeResult accepts only bytes that encode made. The result shares no memory with data.
func decodeResult(data []byte) (*result, error) {
	c := cursor{b: data}
	r := &result{columns: make([]string, c.count(1))}
	for i := range r.columns {
		r.columns[i] = c.string()
	}
	if len(r.columns) == 0 {
		return nil, errNotResult
	}
	r.values = make([]any, len(r.columns)*c.count(len(r.columns)))
	for i := range r.values {
		r.values[i] = c.value()
	}
	if c.bad || len(c.b) > 0 {
		return nil, errNotResult
	}
	return r, nil
}
