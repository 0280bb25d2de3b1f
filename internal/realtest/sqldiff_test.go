//go:build unix

package realtest

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/redis/go-redis/v9"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/middleware/sqlxrefill"
)

var (
	sqlQueries = flag.Int("sql-queries", 2000, "random queries per mode of TestSQLDifferential")
	sqlSeed    = flag.Uint64("sql-seed", 0, "seed of TestSQLDifferential; 0 = another one each time")
)

// sqlColumn is a column of the table that the random queries read, with values as SQL literals.
type sqlColumn struct {
	kind   string
	values []string
}

var sqlColumns = map[string][]sqlColumn{
	"postgres": {
		{"smallint", []string{"1", "-32768", "7"}}, {"int", []string{"7", "2147483647", "0"}},
		{"bigint", []string{"-9223372036854775808", "7"}}, {"numeric", []string{"1.10", "'NaN'", "-12345678901234567890.5"}},
		{"real", []string{"1.1", "'NaN'", "'-Infinity'"}}, {"double precision", []string{"0.1", "'Infinity'", "-0.0"}},
		{"text", []string{"'x'", "''", "'ü''\\'", "'12'"}}, {"char(5)", []string{"'ab'", "'12'"}},
		{"bytea", []string{"'\\x00ff'", "''"}}, {"boolean", []string{"true", "false"}},
		{"date", []string{"'2024-02-29'", "'0044-03-15 BC'", "'9999-12-31'"}},
		{"time", []string{"'12:30:00.5'", "'24:00'"}}, {"timestamp", []string{"'2024-07-01 12:30:00.123456'",
			"'0001-01-01'"}},
		{"timestamptz", []string{"'2024-07-01 12:30+05'", "'2024-12-01 00:00:00.000001Z'"}},
		{"interval", []string{"'1 day 2 hours'", "'-90 s'"}}, {"uuid", []string{"'00112233-4455-6677-8899-aabbccddeeff'"}},
		{"json", []string{"'{\"a\": [1, null]}'", "'7'"}}, {"jsonb", []string{"'{\"b\": 1.50}'", "'null'"}},
		{"int[]", []string{"'{1,NULL,3}'", "'{}'"}}, {"text[]", []string{"'{a,\"b,c\"}'"}}, {"inet",
			[]string{"'10.0.0.1/8'"}},
		{"bit(4)", []string{"'1010'"}}, {"money", []string{"'12.34'"}}, {"point", []string{"'(1,2)'"}},
		{"int4range", []string{"'[1,5)'", "'empty'"}}, {"xml", []string{"'<a>1</a>'"}},
	},
	"mysql": {
		{"tinyint", []string{"1", "-128"}}, {"int unsigned", []string{"4294967295", "7"}},
		{"bigint unsigned", []string{"18446744073709551615", "0"}}, {"bigint", []string{"-9223372036854775808", "7"}},
		{"decimal(20,5)", []string{"1.10000", "-12345.5"}}, {"float", []string{"1.1", "-3.5"}}, {"double", []string{"0.1",
			"7"}},
		{"varchar(20)", []string{"'x'", "''", "'ü'", "'12'"}}, {"blob", []string{"x'00ff'", "''"}}, {"text",
			[]string{"'long'"}},
		{"date", []string{"'2024-02-29'", "'0000-00-00'"}}, {"datetime(6)", []string{"'2024-07-01 12:30:00.123456'"}},
		{"timestamp", []string{"'2024-07-01 12:30:00'"}}, {"time", []string{"'-838:59:59'", "'12:30:00'"}},
		{"year", []string{"2024"}}, {"bit(5)", []string{"b'10101'"}}, {"enum('a','b')", []string{"'a'", "'b'"}},
		{"set('x','y')", []string{"'x,y'", "''"}}, {"json", []string{"'{\"a\": 1}'"}}, {"binary(3)", []string{"'ab'"}},
	},
	"sqlite": {
		{"integer", []string{"1", "-9223372036854775808", "'text'"}}, {"real", []string{"1.5", "'x'", "9e999"}},
		{"text", []string{"'x'", "''", "12", "x'00'"}}, {"blob", []string{"x'00ff'", "x''", "'text'", "7"}},
		{"numeric", []string{"'1.10'", "'abc'", "7"}}, {"datetime", []string{"'2024-07-01 12:30:00'",
			"'2024-07-01T12:30:00Z'"}},
		{"date", []string{"'2024-02-29'", "20240229"}}, {"boolean", []string{"1", "0", "'true'"}}, {"any", []string{"1.0",
			"'1'"}},
		{"timestamp", []string{"'2024-07-01 12:30:00.123'", "1719837000"}},
	},
}

const sqlRows = 12

// fillTable makes the table r, with the columns id, c0, c1, … Every sixth value is NULL.
func fillTable(t *testing.T, db *sqlx.DB, columns []sqlColumn) {
	t.Helper()
	var kinds []string
	for i, c := range columns {
		null := ""
		if strings.HasPrefix(c.kind, "timestamp") {
			null = " NULL" // MariaDB
		}
		kinds = append(kinds, fmt.Sprintf("c%d %s%s", i, c.kind, null))
	}
	statements := []string{"DROP TABLE IF EXISTS r", "CREATE TABLE r (id int, " + strings.Join(kinds, ", ") + ")"}
	for id := range sqlRows {
		row := []string{fmt.Sprint(id)}
		for i, c := range columns {
			value := c.values[(id+i)%len(c.values)]
			if (id+i)%6 == 5 {
				value = "NULL"
			}
			row = append(row, value)
		}
		statements = append(statements, "INSERT INTO r VALUES ("+strings.Join(row, ", ")+")")
	}
	for _, s := range statements {
		if _, err := db.Exec(s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// scanned is a Scanner that remembers the value that it got, with the value's type.
type scanned struct{ Got string }

func (s *scanned) Scan(src any) error { s.Got = dump(src); return nil }

var sqlDests = []reflect.Type{
	reflect.TypeFor[any](), reflect.TypeFor[any](), reflect.TypeFor[scanned](), reflect.TypeFor[*scanned](),
	reflect.TypeFor[string](), reflect.TypeFor[*string](), reflect.TypeFor[**string](), reflect.TypeFor[[]byte](),
	reflect.TypeFor[int64](), reflect.TypeFor[*int32](), reflect.TypeFor[uint64](), reflect.TypeFor[int8](),
	reflect.TypeFor[float64](), reflect.TypeFor[float32](), reflect.TypeFor[bool](), reflect.TypeFor[time.Time](),
	reflect.TypeFor[sql.NullString](), reflect.TypeFor[sql.NullInt64](), reflect.TypeFor[sql.NullTime](),
	reflect.TypeFor[sql.NullFloat64](), reflect.TypeFor[sql.NullBool](), reflect.TypeFor[sql.Null[[]byte]](),
	reflect.TypeFor[json.RawMessage](), reflect.TypeFor[json.Number](), reflect.TypeFor[namedText](),
}

// sqlRead is one random read.
type sqlRead struct {
	all   bool // Select, not Get
	query string
	args  []any
	dest  reflect.Type
}

func randomRead(r *rand.Rand, m sqlMode, serial int) sqlRead {
	var read sqlRead
	columns := sqlColumns[m.dialect]
	var names []string
	var fields []reflect.StructField
	for i := range 1 + r.IntN(4) {
		c, field := r.IntN(len(columns)), fmt.Sprintf("F%d", i)
		names = append(names, fmt.Sprintf("c%d AS f%d", c, i))
		of := sqlDests[r.IntN(len(sqlDests))]
		if r.IntN(2) == 0 {
			of = sqlDests[r.IntN(4)] // these take every value
		}
		fields = append(fields, reflect.StructField{Name: field, Type: of})
	}
	read.dest = reflect.StructOf(fields)
	switch {
	case len(fields) == 1 && r.IntN(3) > 0:
		read.dest = fields[0].Type
	case r.IntN(20) == 0:
		read.dest = reflect.StructOf(fields[1:]) // lacks a field
	}
	where := []string{"id = ?", "id < ?", "id IN (?, ?, ?)", "id > ? AND id <= ?"}[r.IntN(4)]
	for range strings.Count(where, "?") {
		id := r.IntN(sqlRows + 1)
		read.args = append(read.args, []any{id, int64(id), int32(id), &id, sql.NullInt64{Int64: int64(id), Valid: true},
			nil}[r.IntN(6)])
	}
	read.query = fmt.Sprintf("SELECT %s FROM r WHERE %s ORDER BY id /* %d */", strings.Join(names, ", "), where, serial)
	if read.all = r.IntN(2) == 0; read.all && r.IntN(2) == 0 && read.dest.Kind() == reflect.Struct {
		read.dest = reflect.PointerTo(read.dest)
	}
	return read
}

// reader is what sqlx.DB and sqlxrefill.DB have in common.
type reader interface {
	GetContext(ctx context.Context, dest any, query string, args ...any) error
	SelectContext(ctx context.Context, dest any, query string, args ...any) error
	Rebind(string) string
}

func (read *sqlRead) from(ctx context.Context, db reader) (string, error) {
	to := read.dest
	if read.all {
		to = reflect.SliceOf(to)
	}
	dest := reflect.New(to)
	get := db.GetContext
	if read.all {
		get = db.SelectContext
	}
	err := get(ctx, dest.Interface(), db.Rebind(read.query), read.args...)
	return dump(dest.Interface()), err
}

// Random queries with random dests: sqlx alone, and the cache when it is cold, from L1, and on a second node. Values
// and errors must be the same. -sql-queries sets how many, and -sql-seed repeats a run.
func TestSQLDifferential(t *testing.T) {
	seed := *sqlSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-sql-seed=%d", seed)
	modes := sqlModes(t)
	filled := map[string]bool{}
	for _, m := range modes {
		if !filled[m.dialect] {
			filled[m.dialect] = true
			db := sqlx.MustOpen(m.driver, m.address)
			if m.dialect == "mysql" {
				db = sqlx.MustOpen(m.driver, m.address+"&sql_mode=''")
			}
			fillTable(t, db, sqlColumns[m.dialect])
			db.Close()
		}
	}
	store := goredis.New(redis.NewClient(&redis.Options{Addr: StartRedis(t).Addr()}))
	for i, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute+time.Duration(*sqlQueries)*20*time.Millisecond)
			defer cancel()
			r, found, failed := rand.New(rand.NewPCG(seed, uint64(i))), 0, 0
			plain, one, other := m.nodes(t, store)
			for n := range *sqlQueries {
				read := randomRead(r, m, n)
				want, wantErr := read.from(ctx, plain)
				if wantErr == nil {
					found++
				}
				for _, node := range []*sqlxrefill.DB{one, one, other} {
					got, err := read.from(ctx, node)
					if errors.Is(err, sql.ErrNoRows) && wantErr != nil {
						continue // documented: an absent row is no error of a dest that does not fit
					}
					if !sameError(err, wantErr) || got != want {
						t.Errorf("%s %v %v into %v:\ngot %s (%v)\nsqlx has %s (%v)",
							m.name, read.query, read.args, read.dest, got, err, want, wantErr)
						if failed++; failed > 5 {
							t.FailNow()
						}
					}
				}
			}
			t.Logf("%d of %d queries have an answer", found, *sqlQueries)
			if found < *sqlQueries/4 {
				t.Error("too few")
			}
		})
	}
}
