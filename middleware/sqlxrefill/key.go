package sqlxrefill

import (
	"crypto/sha256"
	"database/sql"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/refill-go/refill"
)

// span says which rows of a result a call wants: the first row (GetContext) or all rows (SelectContext). The span is
// part of the key.
type span string

const (
	firstRow span = "get"
	allRows  span = "select"
)

// request is a query as the driver gets it. A request shares no memory with the arguments of the caller.
type request struct {
	statement *Statement // of the query; never nil
	query     string
	args      []any
	id        []byte // query and args, encoded so that different requests have different ids
}

// newRequest copies the arguments at once, while the caller still waits. So the driver gets exactly the values that are
// in the key. If the driver got the arguments themselves, the caller could change what they point to during the load.
// Then the result of one query would be stored as the result of another query.
func newRequest(s *Statement, query string, args []any) (*request, error) {
	q := &request{
		statement: s, query: query, args: make([]any, len(args)), id: make([]byte, 0, 64+len(query)+16*len(args)),
	}
	q.id = appendString(q.id, query)
	q.id = binary.AppendUvarint(q.id, uint64(len(args)))
	for i, arg := range args {
		if err := q.add(i, arg); err != nil {
			return nil, fmt.Errorf("%w: args[%d]: %w", refill.ErrInvalid, i, err)
		}
	}
	return q, nil
}

// add appends an argument to the id, and keeps a copy for the driver.
func (q *request) add(i int, arg any) (err error) {
	switch v := arg.(type) {
	case sql.NamedArg:
		q.id = appendString(append(q.id, tagNamed), v.Name)
		q.id, v.Value, err = copyArg(q.id, v.Value)
		q.args[i] = v
	case sql.Out:
		return errors.New("a sql.Out is not cached; use DB(), without the cache")
	default:
		q.id, q.args[i], err = copyArg(q.id, arg)
	}
	return err
}

// appendInstant appends the instant and the zone of an argument. The instant alone does not identify the argument: some
// drivers, such as lib/pq, send the wall clock time to a column without a time zone. The answer then depends on the
// zone.
func appendInstant(b []byte, t time.Time) []byte {
	zone, offset := t.Zone()
	b = binary.AppendVarint(append(b, tagTime), t.Unix())
	b = binary.AppendUvarint(b, uint64(t.Nanosecond()))
	return binary.AppendVarint(appendString(b, zone), int64(offset))
}

// key returns the key under which these rows of the query are cached. The key consists of the span, the name of the
// Statement or a legible part of the query, and a hash of the whole query with its arguments.
func (q *request) key(rows span) string {
	sum := sha256.Sum256(append(q.id, rows...))
	b := make([]byte, 0, 96)
	b = append(append(b, rows...), ':')
	if q.statement.Name != "" {
		b = append(append(b, q.statement.Name...), ':')
	} else {
		b = append(appendLegible(b, q.query, maxLegible), ':')
	}
	return string(base64.RawURLEncoding.AppendEncode(b, sum[:24]))
}

// maxLegible is how many bytes of the query a key shows.
const maxLegible = 40

// appendLegible appends the first most bytes of the query s, without arguments. One '-' replaces each run of characters
// that need care in a shell, a log or a Redis command line.
func appendLegible(b []byte, s string, most int) []byte {
	end := len(b) + most
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
