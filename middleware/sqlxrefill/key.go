package sqlxrefill

import (
	"bytes"
	"crypto/sha256"
	"database/sql"
	"database/sql/driver"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/refill-go/refill"
)

// span says which rows of a result a call wants. It is part of the key.
type span string

const (
	firstRow span = "get"
	allRows  span = "select"
)

// request is a query as the driver gets it. A request shares no memory with the arguments of the caller.
type request struct {
	query string
	args  []any
	id    []byte // query and args, encoded one to one
}

// newRequest resolves pointers and Valuers now, while the caller still waits. The driver gets exactly the values that
// are in the key. If the driver got the original pointers, the caller could change the values behind them during the
// load. Then the result of one query would be stored as the result of another.
func newRequest(query string, args []any) (*request, error) {
	if strings.TrimSpace(query) == "" {
		return nil, invalid("query", "empty")
	}
	q := &request{query: query, args: make([]any, len(args)), id: make([]byte, 0, 64+len(query)+16*len(args))}
	q.id = appendString(q.id, query)
	q.id = binary.AppendUvarint(q.id, uint64(len(args)))
	for i, arg := range args {
		var err error
		if q.args[i], err = q.add(arg); err != nil {
			return nil, fmt.Errorf("%w: args[%d]: %w", refill.ErrInvalid, i, err)
		}
	}
	return q, nil
}

// add appends one argument to the id, and returns the argument as the driver gets it.
func (q *request) add(arg any) (any, error) {
	named, isNamed := arg.(sql.NamedArg)
	if isNamed {
		arg = named.Value
	}
	v, err := resolve(arg)
	if err != nil {
		return nil, err
	}
	q.id = appendString(q.id, named.Name)
	if t, ok := v.(time.Time); ok {
		q.id = appendInstant(q.id, t)
	} else if q.id, err = appendValue(q.id, v); err != nil {
		return nil, err
	}
	if isNamed {
		return sql.Named(named.Name, v), nil
	}
	return v, nil
}

// resolve converts an argument into a driver value that shares no memory with it.
func resolve(arg any) (driver.Value, error) {
	if n, ok := arg.(uint64); ok && n > math.MaxInt64 {
		return n, nil // the default conversion refuses them, MySQL takes them; another driver may refuse them
	}
	v, err := driver.DefaultParameterConverter.ConvertValue(arg)
	switch v := v.(type) {
	case []byte:
		return bytes.Clone(v), err
	case time.Time:
		return v.Round(0), err // without the monotonic reading: some drivers send String, which shows it
	}
	return v, err
}

// appendInstant appends a time as an argument: the instant, and the wall clock time. The instant alone is not enough.
// A driver that sends the wall clock time to a column without a time zone (lib/pq) gets another answer in another
// zone.
func appendInstant(b []byte, t time.Time) []byte {
	zone, offset := t.Zone()
	b = binary.AppendVarint(append(b, tagTime), t.Unix())
	b = binary.AppendUvarint(b, uint64(t.Nanosecond()))
	return binary.AppendVarint(appendString(b, zone), int64(offset))
}

// key returns the key for these rows of the result: a legible part of the query, and a hash of the whole query with
// its arguments.
func (q *request) key(rows span) string {
	sum := sha256.Sum256(append(q.id, rows...))
	b := make([]byte, 0, 96)
	b = append(append(b, rows...), ':')
	b = append(appendLegible(b, q.query), ':')
	return string(base64.RawURLEncoding.AppendEncode(b, sum[:24]))
}

// maxLegible is how many bytes of the query a key shows.
const maxLegible = 40

// appendLegible appends the beginning of s. One '-' replaces each run of characters that need care in a shell, a log or
// a Redis command line. Arguments are never shown.
func appendLegible(b []byte, s string) []byte {
	end := len(b) + maxLegible
	for i := 0; i < len(s) && len(b) < end; i++ {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '_', c == '.', c == '*':
			b = append(b, c)
		case b[len(b)-1] != '-' && b[len(b)-1] != ':':
			b = append(b, '-')
		}
	}
	return b
}
