package sqlxrefill_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/middleware/sqlxrefill"
)

// A DB must satisfy the interfaces that *sqlx.DB satisfies.
var (
	_ sqlx.Ext             = (*sqlxrefill.DB)(nil)
	_ sqlx.ExtContext      = (*sqlxrefill.DB)(nil)
	_ sqlx.Preparer        = (*sqlxrefill.DB)(nil)
	_ sqlx.PreparerContext = (*sqlxrefill.DB)(nil)
)

// Every method of *sqlx.DB must be there with the same signature, so that a DB fits every interface of a repository.
// Only the method DB of this package stands in the place of a field.
func TestHasTheMethodsOfSqlx(t *testing.T) {
	want, got := reflect.TypeFor[*sqlx.DB](), reflect.TypeFor[*sqlxrefill.DB]()
	for i := range want.NumMethod() {
		m := want.Method(i)
		ours, ok := got.MethodByName(m.Name)
		if !ok || ours.Type.NumIn() != m.Type.NumIn() || ours.Type.NumOut() != m.Type.NumOut() {
			t.Fatalf("%s: %v, want %v", m.Name, ours.Type, m.Type)
		}
		for j := 1; j < m.Type.NumIn(); j++ {
			if ours.Type.In(j) != m.Type.In(j) {
				t.Errorf("%s: %v, want %v", m.Name, ours.Type, m.Type)
			}
		}
		for j := range m.Type.NumOut() {
			if ours.Type.Out(j) != m.Type.Out(j) {
				t.Errorf("%s: %v, want %v", m.Name, ours.Type, m.Type)
			}
		}
	}
}

// Only Get, Select, GetContext and SelectContext may be answered from the cache.
func TestOnlyGetAndSelectAreCached(t *testing.T) {
	s := always(oneRow)
	db := cached(t, s, sqlxrefill.Config{})
	ctx := t.Context()
	read := func(name string, perCall int, call func() (row, error)) {
		t.Helper()
		before := s.count()
		for range 3 {
			if got, err := call(); err != nil || got != (row{1, "one"}) {
				t.Errorf("%s: %v, %v", name, got, err)
			}
		}
		if n := s.count() - before; n != 3*perCall && (perCall != 0 || n > 1) {
			t.Errorf("%s: %d queries", name, n)
		}
	}
	const q = "SELECT a, b"
	read("Get", 0, func() (r row, err error) { return r, db.Get(&r, q) })
	read("GetContext", 0, func() (r row, err error) { return r, db.GetContext(ctx, &r, q) })
	read("Select", 0, func() (row, error) { return first(func(l *[]row) error { return db.Select(l, q) }) })
	read("SelectContext", 0, func() (row, error) {
		return first(func(l *[]row) error { return db.SelectContext(ctx, l, q) })
	})
	read("QueryRowxContext", 1, func() (r row, err error) { return r, db.QueryRowxContext(ctx, q).StructScan(&r) })
	read("QueryRow", 1, func() (r row, err error) { return r, db.QueryRow(q).Scan(&r.A, &r.B) })
	read("sqlx.Get", 1, func() (r row, err error) { return r, sqlx.GetContext(ctx, db, &r, q) })
	read("sqlx.Select", 1, func() (row, error) {
		return first(func(l *[]row) error { return sqlx.Select(db, l, q) })
	})
	read("Unsafe", 1, func() (r row, err error) { return r, db.Unsafe().GetContext(ctx, &r, q) })
	read("Tx", 1, func() (r row, err error) {
		tx, err := db.BeginTxx(ctx, nil)
		if err != nil {
			return r, err
		}
		return r, errors.Join(tx.GetContext(ctx, &r, q), tx.Commit())
	})
	read("Tx of Beginx", 1, func() (row, error) {
		tx := db.MustBegin()
		defer func() { _ = tx.Rollback() }()
		return first(func(l *[]row) error { return tx.Select(l, q) })
	})
	read("Conn", 1, func() (r row, err error) {
		conn, err := db.Connx(ctx)
		if err != nil {
			return r, err
		}
		return r, errors.Join(conn.GetContext(ctx, &r, q), conn.Close())
	})
	read("NamedQuery", 1, func() (r row, err error) {
		rows, err := db.NamedQueryContext(ctx, "SELECT a, b WHERE c = :c", map[string]any{"c": 1})
		if err != nil || !rows.Next() {
			return r, errors.Join(err, sql.ErrNoRows)
		}
		return r, errors.Join(rows.StructScan(&r), rows.Close())
	})
	if s.inTx != 0 {
		t.Errorf("%d transactions are open", s.inTx)
	}
}

func first(sel func(*[]row) error) (row, error) {
	var list []row
	if err := sel(&list); err != nil {
		return row{}, err
	}
	return list[0], nil
}

// A mapper that is set through the DB must hold for cached reads as well.
func TestMapperFunc(t *testing.T) {
	db := cached(t, always(&table{columns: []string{"A"}, rows: [][]driver.Value{{int64(7)}}}), sqlxrefill.Config{})
	db.MapperFunc(strings.ToUpper)
	type upper struct{ A int }
	for range 2 {
		if got := mustGet[upper](t, db, "SELECT A"); got.A != 7 {
			t.Errorf("got %v", got)
		}
	}
}

// Config.Tags are on results and on absent rows. After InvalidateTag no node may serve either.
func TestInvalidateTag(t *testing.T) {
	s := &source{}
	n := int64(0)
	s.answer = func(query string, _ []driver.NamedValue) (*table, error) {
		if n++; strings.Contains(query, "none") && n < 4 {
			return &table{columns: []string{"n"}}, nil
		}
		return &table{columns: []string{"n"}, rows: [][]driver.Value{{n}}}, nil
	}
	cfg := sqlxrefill.Config{Config: refill.Config{
		TTL: time.Minute, StaleFor: time.Hour, Tags: []string{"all"}, Shared: memory.New(),
	}}
	one, other := cached(t, s, cfg), cached(t, s, cfg)
	var got []int
	readAll := func() {
		for _, db := range []*sqlxrefill.DB{one, other} {
			got = append(got, mustGet[int](t, db, "SELECT q"), mustSelect[int](t, db, "SELECT q")[0])
		}
	}
	readAll()
	var absent int
	if err := one.Get(&absent, "SELECT none"); err != sql.ErrNoRows {
		t.Fatal(err)
	}
	if err := other.InvalidateTag(context.Background(), "all"); err != nil {
		t.Fatal(err)
	}
	if mustGet[int](t, other, "SELECT none") != 4 {
		t.Error("an absent row has outlived its tag")
	}
	got = append(got, mustGet[int](t, other, "SELECT q"))
	if !slices.Equal(got, []int{1, 2, 1, 2, 5}) {
		t.Errorf("got %v", got)
	}
	if err := other.ExpireTag(context.Background(), "all"); err != nil {
		t.Fatal(err)
	}
	if old := mustGet[int](t, other, "SELECT q"); old != 5 {
		t.Errorf("an expired result is not served as stale: got %d", old)
	}
}
