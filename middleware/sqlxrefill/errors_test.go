package sqlxrefill_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/middleware/sqlxrefill"
)

// pgError has the method that the errors of PostgreSQL's drivers have.
type pgError struct{ state, text string }

func (e *pgError) Error() string    { return e.text }
func (e *pgError) SQLState() string { return e.state }

// mysqlError has the fields that the error of MySQL's driver has.
type mysqlError struct {
	Number   uint16
	SQLState [5]byte
	Message  string
}

func (e *mysqlError) Error() string { return fmt.Sprintf("Error %d: %s", e.Number, e.Message) }

// Two nodes fail, so the failure holds the fleet back. A third node gets only the text of the error, and must find its
// kind all the same.
func TestKindOfErrorTravels(t *testing.T) {
	long := strings.Repeat("x", 3000)
	noColumns := func(string, []driver.NamedValue) (*table, error) { return &table{}, nil }
	for name, c := range map[string]struct {
		err    error
		answer func(string, []driver.NamedValue) (*table, error)
		want   sqlxrefill.QueryError
		inval  bool
	}{
		"PostgreSQL": {err: &pgError{"42P01", "no such relation"}, want: sqlxrefill.QueryError{SQLState: "42P01"}},
		"wrapped":    {err: fmt.Errorf("x: %w", &pgError{"57014", "x"}), want: sqlxrefill.QueryError{SQLState: "57014"}},
		"long":       {err: &pgError{"22000", long + "\nsecond line"}, want: sqlxrefill.QueryError{SQLState: "22000"}},
		"MySQL": {
			err:  &mysqlError{1146, [5]byte([]byte("42S02")), "no table"},
			want: sqlxrefill.QueryError{SQLState: "42S02", Number: 1146},
		},
		"MySQL without a state": {
			err: fmt.Errorf("x: %w", &mysqlError{Number: 2}), want: sqlxrefill.QueryError{SQLState: "HY000", Number: 2},
		},
		"none":    {err: &driverError{5}},
		"strange": {err: &pgError{"no", "SQLSTATE x: y"}},
		"invalid": {answer: noColumns, inval: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := &source{answer: c.answer}
			if s.answer == nil {
				s.answer = func(string, []driver.NamedValue) (*table, error) { return nil, c.err }
			}
			cfg := sqlxrefill.Config{Config: refill.Config{TTL: time.Minute, ErrorTTL: time.Minute, Shared: memory.New()}}
			for node := range 3 {
				var n int
				err := cached(t, s, cfg).GetContext(t.Context(), &n, "SELECT q")
				var failed *sqlxrefill.QueryError
				var load *refill.LoadError
				if errors.As(err, &failed) != (c.want.SQLState != "") || !errors.As(err, &load) ||
					errors.Is(err, refill.ErrInvalid) != c.inval {
					t.Fatalf("node %d: %v", node, err)
				}
				if failed != nil && (failed.SQLState != c.want.SQLState || failed.Number != c.want.Number) {
					t.Errorf("node %d: %+v", node, failed)
				}
				if node < 2 && c.err != nil && !errors.Is(err, c.err) {
					t.Errorf("node %d: the driver's error is lost: %v", node, err)
				}
			}
			if s.count() != 2 {
				t.Errorf("%d queries", s.count())
			}
		})
	}
}

// All connections of a node are in use. Its reads must fail before LoadTimeout, and then at once. Other nodes must load
// without a back-off, even if the pools of two nodes are full.
func TestFullPoolHoldsBackOneNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := always(oneRow)
		cfg := sqlxrefill.Config{Config: refill.Config{
			TTL: time.Minute, LoadTimeout: 10 * time.Second, ErrorTTL: 30 * time.Second, Shared: memory.New(),
		}}
		var full []*sqlxrefill.DB
		var giveBack []func() error
		for range 2 {
			db := cached(t, s, cfg)
			db.DB().SetMaxOpenConns(1)
			conn, err := db.DB().Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			full, giveBack = append(full, db), append(giveBack, conn.Close)
		}
		for _, db := range full {
			for try, want := range []time.Duration{9 * time.Second, 0, 0} {
				began := time.Now()
				var r row
				err := db.GetContext(t.Context(), &r, "SELECT q")
				if took := time.Since(began); !errors.Is(err, sqlxrefill.ErrPoolFull) || took != want {
					t.Errorf("try %d: %v, after %v", try, err, took)
				}
			}
		}
		began := time.Now()
		healthy := cached(t, s, cfg)
		if got := mustGet[row](t, healthy, "SELECT q"); got != (row{1, "one"}) || time.Since(began) != 0 {
			t.Errorf("the healthy node waited for %v", time.Since(began))
		}
		for i, db := range full { // a free connection ends the hold
			_ = giveBack[i]()
			mustSelect[row](t, db, "SELECT q", i)
		}
	})
}

// A node whose pool is full holds the lease while callers of a healthy node wait. These callers must get their result
// as soon as the first node has given up.
func TestWaitersOfAFullPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := always(oneRow)
		cfg := sqlxrefill.Config{Config: refill.Config{TTL: time.Minute, Shared: memory.New()}}
		full, healthy := cached(t, s, cfg), cached(t, s, cfg)
		full.DB().SetMaxOpenConns(1)
		conn, err := full.DB().Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		done := make(chan error)
		go func() {
			var r row
			done <- full.GetContext(context.Background(), &r, "SELECT q")
		}()
		synctest.Wait()
		began := time.Now()
		mustGet[row](t, healthy, "SELECT q")
		if took := time.Since(began); took > 9*time.Second {
			t.Errorf("the healthy node waited for %v", took)
		}
		<-done
	})
}

// After a change of a table, PostgreSQL fails a prepared statement once per connection. No caller must see that.
func TestOutdatedPlanIsPreparedAgain(t *testing.T) {
	for fails, want := range []bool{true, true, true, true, false} {
		n := 0
		s := &source{}
		s.answer = func(string, []driver.NamedValue) (*table, error) {
			if n++; n <= fails {
				return nil, &pgError{"0A000", "cached plan must not change result type"}
			}
			return oneRow, nil
		}
		var r row
		err := cached(t, s, sqlxrefill.Config{}).GetContext(t.Context(), &r, "SELECT q")
		if (err == nil) != want {
			t.Errorf("%d outdated plans: %v", fails, err)
		}
	}
}

// The server has cut all connections of the pool. As with sqlx, the next read must find a new connection.
func TestDeadConnections(t *testing.T) {
	for dead := range 4 {
		s := always(oneRow)
		s.dead = dead
		plain := s.open(t)
		var r row
		want := plain.GetContext(t.Context(), &r, "SELECT q")
		s.dead = dead
		got := cached(t, s, sqlxrefill.Config{}).GetContext(t.Context(), &r, "SELECT q")
		if want == nil && got != nil {
			t.Errorf("%d dead connections: %v, sqlx has %v", dead, got, want)
		}
	}
}

// A column is renamed while the old result is fresh on one node, and stale on another. New code must get the new column
// at its first read, on both nodes. A dest that fits neither result must not cause a query per read.
func TestResultOfAnOldTableIsReadAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tab := &table{columns: []string{"old"}, rows: [][]driver.Value{{int64(1)}}}
		s := &source{answer: func(string, []driver.NamedValue) (*table, error) { return tab, nil }}
		cfg := sqlxrefill.Config{Config: refill.Config{
			TTL: time.Minute, Jitter: -1, StaleFor: time.Hour, Shared: memory.New(),
		}}
		one, other := cached(t, s, cfg), cached(t, s, cfg)
		type before struct{ Old int }
		type after struct{ Renamed int }
		mustGet[before](t, one, "SELECT *")
		mustSelect[before](t, one, "SELECT *")
		mustGet[before](t, other, "SELECT *")
		tab = &table{columns: []string{"renamed"}, rows: [][]driver.Value{{int64(2)}}}
		if got := mustGet[after](t, one, "SELECT *"); got.Renamed != 2 {
			t.Errorf("got %v", got)
		}
		time.Sleep(2 * time.Minute)
		if got := mustSelect[after](t, other, "SELECT *"); len(got) != 1 || got[0].Renamed != 2 {
			t.Errorf("got %v", got)
		}
		if got := mustGet[after](t, other, "SELECT *"); got.Renamed != 2 {
			t.Errorf("got %v", got)
		}
		synctest.Wait()
		n := s.count()
		for range 100 {
			var wrong []before
			if err := one.SelectContext(t.Context(), &wrong, "SELECT *"); err == nil {
				t.Fatal("old code reads the new table")
			}
		}
		if more := s.count() - n; more > 1 {
			t.Errorf("%d queries for a dest that fits no result", more)
		}
	})
}
