//go:build unix

package realtest

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jmoiron/sqlx"
	"github.com/lib/pq"
	"github.com/redis/go-redis/v9"
	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/middleware/sqlxrefill"
)

// sqlMode is a driver in one of its modes, with a database.
type sqlMode struct {
	name, driver, address string
	dialect               string
}

// sqlModes starts the servers and returns all modes.
func sqlModes(t *testing.T) []sqlMode {
	postgres := fmt.Sprintf(pgxAddr, StartPostgres(t))
	mysql := fmt.Sprintf("root@tcp(127.0.0.1:%d)/test?charset=utf8mb4", StartMariaDB(t))
	admin, err := sql.Open("mysql", strings.Replace(mysql, "/test?", "/?", 1))
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	if _, err := admin.Exec("CREATE DATABASE test"); err != nil {
		t.Fatal(err)
	}
	sqlite := "file:" + filepath.Join(t.TempDir(), "db") + "?_pragma=busy_timeout(10000)"
	return []sqlMode{
		{"pgx", "pgx", postgres + "&timezone=Europe/Berlin", "postgres"},
		{"pgx exec", "pgx", postgres + "&default_query_exec_mode=exec", "postgres"},
		{"pgx simple", "pgx", postgres + "&default_query_exec_mode=simple_protocol", "postgres"},
		{"pq", "postgres", postgres + "&timezone=America/New_York", "postgres"},
		{"pq binary", "postgres", postgres + "&binary_parameters=yes", "postgres"},
		{"mysql", "mysql", mysql + "&parseTime=true&loc=Europe%2FBerlin", "mysql"},
		{"mysql interpolated", "mysql", mysql + "&interpolateParams=true", "mysql"},
		{"sqlite", "sqlite", sqlite, "sqlite"},
	}
}

// nodes returns plain sqlx over the database of a mode, and two nodes with a cache that share a Redis.
func (m *sqlMode) nodes(t *testing.T, store *goredis.Store) (plain *sqlx.DB, one, other *sqlxrefill.DB) {
	t.Helper()
	plain, err := sqlx.Open(m.driver, m.address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { plain.Close() })
	plain.SetMaxOpenConns(4)
	node := func() *sqlxrefill.DB {
		db, err := sqlxrefill.New(plain, sqlxrefill.Config{
			Name: strings.ReplaceAll(m.name, " ", "."), Config: refill.Config{TTL: time.Hour, ErrorTTL: -1, Shared: store},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		return db
	}
	return plain, node(), node()
}

type (
	namedInts   []int64
	namedText   string
	stringer    int
	pointerText struct{ s *string }
	jsonStruct  struct {
		A int            `json:"a"`
		B map[string]any `json:"b,omitempty"`
		c int
	}
)

func (s stringer) String() string                  { return fmt.Sprintf("<%d>", int(s)) }
func (p pointerText) Value() (driver.Value, error) { return *p.s, nil }

// sqlArguments are arguments of many kinds. Some of them are errors in some modes. Then the error must be that of sqlx.
func sqlArguments() []any {
	n, text, at := 7, "x", time.Date(2024, 7, 1, 12, 30, 0, 123456000, time.UTC)
	berlin, _ := time.LoadLocation("Europe/Berlin")
	return []any{
		nil, 7, int8(7), int16(7), int32(7), int64(7), uint(7), uint8(7), uint16(7), uint32(7), uint64(7),
		uint64(math.MaxUint64), float32(1.1), 1.1, math.NaN(), math.Inf(1), true, false, "x", "", "ü'\\", []byte("ab"),
		[]byte{}, []byte(nil), at, at.In(berlin), at.In(time.FixedZone("", -3600)), time.Time{},
		&n, &text, &at, (*int)(nil), (*string)(nil), (*time.Time)(nil), pointerTo(&n),
		sql.NullInt64{Int64: 7, Valid: true}, sql.NullInt64{}, sql.NullString{String: "x", Valid: true},
		sql.NullTime{Time: at, Valid: true}, sql.Null[float64]{V: 1.1, Valid: true}, &sql.NullBool{Bool: true, Valid: true},
		namedText("x"), stringer(7), pointerText{&text}, &pointerText{&text}, json.Number("7"),
		time.Duration(90 * time.Second),
		json.RawMessage(`{"a": 1}`), json.RawMessage("ABC"), jsonStruct{1, map[string]any{"x": 1.5}, 0}, &jsonStruct{A: 2},
		map[string]any{"a": 1, "b": []string{"x"}}, map[string]int{"z": 1, "a": 2},
		[]int64{1, 2}, []int{1, 2}, []int32{1, 2}, []string{"a", "b"}, []string{}, []string(nil), []float64{1.5},
		[]bool{true},
		[]*int{&n, nil}, namedInts{1, 2}, [][]int64{{1, 2}, {3, 4}}, []any{"a", "b"}, [16]byte{1, 2, 3}, [2]int{1, 2},
		[]time.Time{at}, pq.Array([]int64{1, 2}), pq.Array([]string{"a"}), pq.StringArray{"a", "b"},
		netip.MustParseAddr("10.0.0.1"), netip.MustParsePrefix("10.0.0.0/8"), net.ParseIP("10.0.0.1"),
		net.HardwareAddr{1, 2, 3, 4, 5, 6}, *big.NewInt(7), big.NewInt(7),
		pgtype.Numeric{Int: big.NewInt(123), Exp: -2, Valid: true}, pgtype.Text{String: "x", Valid: true},
		pgtype.Interval{Microseconds: 5, Days: 1, Valid: true}, pgtype.UUID{Bytes: [16]byte{1}, Valid: true},
		pgtype.Date{Time: at, Valid: true}, pgtype.Range[pgtype.Int4]{
			Lower: pgtype.Int4{Int32: 1, Valid: true}, Upper: pgtype.Int4{Int32: 5, Valid: true},
			LowerType: pgtype.Inclusive, UpperType: pgtype.Exclusive, Valid: true,
		},
		sql.Named("n", 7), complex(1, 2), struct{}{}, errors.New("x"),
	}
}

func pointerTo[T any](v T) *T { return &v }

// sqlPlaces are expressions with one argument, which give it several types.
var sqlPlaces = map[string][]string{
	"postgres": {
		"SELECT $1::text", "SELECT $1::bigint", "SELECT $1::numeric", "SELECT $1::float8", "SELECT $1::boolean",
		"SELECT $1::bytea", "SELECT $1::timestamptz", "SELECT $1::timestamp", "SELECT $1::date", "SELECT $1::interval",
		"SELECT $1::json", "SELECT $1::jsonb", "SELECT $1::uuid", "SELECT $1::inet", "SELECT $1::int8range",
		"SELECT 7 = ANY($1::bigint[])", "SELECT 'a' = ANY($1::text[])", "SELECT $1", "SELECT pg_typeof($1)::text",
	},
	"mysql": {
		"SELECT ?", "SELECT ? = 'ABC'", "SELECT CAST(? AS CHAR)", "SELECT CAST(? AS DECIMAL(20,5))", "SELECT ? + 0",
		"SELECT CAST(? AS DATETIME(6))", "SELECT HEX(?)", "SELECT CHARSET(?)",
	},
	"sqlite": {"SELECT ?", "SELECT typeof(?)", "SELECT ? || ''", "SELECT ? + 0", "SELECT hex(?)"},
}

// Each kind of argument is sent to each place, once with sqlx and three times through the cache: cold, from L1, and on
// a second node. The answers must be the same, and so must the errors.
func TestSQLArguments(t *testing.T) {
	modes := sqlModes(t)
	store := goredis.New(redis.NewClient(&redis.Options{Addr: StartRedis(t).Addr()}))
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			plain, one, other := m.nodes(t, store)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // a driver that hangs must not hang the test
			defer cancel()
			answered, failures := 0, 0
			for i, arg := range sqlArguments() {
				for _, query := range sqlPlaces[m.dialect] {
					var want any
					wantErr := plain.GetContext(ctx, &want, query, arg)
					if wantErr == nil {
						answered++
					}
					nodes := []*sqlxrefill.DB{one, one, other}
					if wantErr != nil {
						nodes = nodes[:1] // a failure is not cached in this test
					}
					for _, node := range nodes {
						var got any
						err := node.GetContext(ctx, &got, query, sqlArguments()[i])
						if err != nil {
							if failures++; failures%2 == 0 {
								succeed(ctx, t, node)
							}
						}
						if !sameError(err, wantErr) || dump(got) != dump(want) {
							t.Errorf("%s with %T %v: got %s (%v), sqlx has %s (%v)", query, arg, arg, dump(got), err, dump(want), wantErr)
						}
					}
				}
			}
			t.Logf("%d of %d calls have an answer", answered, len(sqlArguments())*len(sqlPlaces[m.dialect]))
			if answered < 100 {
				t.Errorf("only %d calls have an answer", answered)
			}
		})
	}
}

// succeed loads something on a node. A node whose loads have failed three times in a row lets other nodes load first,
// which would make each of the failing calls of these tests slow.
func succeed(ctx context.Context, t *testing.T, node *sqlxrefill.DB) {
	t.Helper()
	var n int64
	if err := node.GetContext(ctx, &n, fmt.Sprintf("SELECT %d", successes.Add(1))); err != nil {
		t.Fatal(err)
	}
}

var successes atomic.Int64

// addresses are the addresses of pointers that pgx shows in its errors.
var addresses = regexp.MustCompile("0x[0-9a-f]+")

// sameError reports whether the cache has the error of sqlx. A failed query is a LoadError around the driver's error.
func sameError(got, want error) bool {
	if got == nil || want == nil {
		return got == want
	}
	var load *refill.LoadError
	if errors.As(got, &load) {
		text, want := addresses.ReplaceAllString(load.Err.Error(), "0x"), addresses.ReplaceAllString(want.Error(), "0x")
		return text == want || strings.HasPrefix(text, "SQLSTATE ") && strings.HasSuffix(text, ": "+want)
	}
	return got.Error() == want.Error()
}

// Options of pgx are no values. They must be refused by name, and must not reach the driver.
func TestSQLOptionsOfTheDriver(t *testing.T) {
	plain := sqlx.MustOpen("pgx", fmt.Sprintf(pgxAddr, 1)) // no query is sent
	defer plain.Close()
	db, err := sqlxrefill.New(plain, sqlxrefill.Config{Name: "options", Config: refill.Config{TTL: time.Minute}})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for want, arg := range map[string]any{
		"pgx.QueryExecMode": pgx.QueryExecModeSimpleProtocol, "pgx.NamedArgs": pgx.NamedArgs{"a": 1},
		"pgx.StrictNamedArgs": pgx.StrictNamedArgs{"a": 1}, "pgx.QueryResultFormats": pgx.QueryResultFormats{1},
	} {
		var n int
		err := db.GetContext(t.Context(), &n, "SELECT 1", arg)
		if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
