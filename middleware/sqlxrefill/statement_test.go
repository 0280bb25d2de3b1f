package sqlxrefill_test

import (
	"database/sql"
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

const (
	rowByID = "SELECT n FROM rows WHERE id = $1"
	allOf   = "SELECT n FROM rows"
)

// counting is a source whose answers have one row each, with the number of the query. Queries about "none" find no row.
func counting() *source {
	s, n := &source{}, int64(0)
	s.answer = func(query string, _ []driver.NamedValue) (*table, error) {
		n++
		tab := &table{columns: []string{"n"}, rows: [][]driver.Value{{n}}}
		if strings.Contains(query, "none") {
			tab.rows = nil
		}
		return tab, nil
	}
	return s
}

// A Statement has its own TTL, StaleFor and NotFoundTTL. Other texts have those of Config.
func TestStatementTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := counting()
		db := cached(t, s, sqlxrefill.Config{
			Config: refill.Config{TTL: time.Minute, NotFoundTTL: time.Second, Jitter: -1},
			Statements: []sqlxrefill.Statement{
				{Name: "short", Query: "SELECT short", TTL: time.Second},
				{Name: "stale", Query: "SELECT stale", StaleFor: time.Hour},
				{Name: "none", Query: "SELECT none", NotFoundTTL: time.Hour},
			},
		})
		var n int
		read := func() {
			for _, q := range []string{"SELECT short", "SELECT stale", "SELECT other"} {
				mustGet[int](t, db, q)
			}
			for _, q := range []string{"SELECT none", "SELECT none other"} {
				if err := db.Get(&n, q); err != sql.ErrNoRows {
					t.Fatal(err)
				}
			}
		}
		read()
		time.Sleep(2 * time.Second)
		before := s.count()
		read()
		if got := s.count() - before; got != 2 { // short and the other absence
			t.Errorf("%d queries after 2 s", got)
		}
		time.Sleep(10 * time.Minute)
		began, old := time.Now(), mustGet[int](t, db, "SELECT stale")
		if old != 2 || time.Since(began) != 0 {
			t.Errorf("the stale result: %d", old)
		}
	})
}

// The name of a Statement must stand in the keys, so that events and errors show it.
func TestStatementNameIsInKeys(t *testing.T) {
	var keys []string
	db := cached(t, counting(), sqlxrefill.Config{
		Config: refill.Config{TTL: time.Minute, OnEvent: func(e refill.Event) {
			if e.Kind == refill.EventGet {
				keys = append(keys, e.Key)
			}
		}},
		Statements: []sqlxrefill.Statement{{Name: "row.by_id-1", Query: rowByID}},
	})
	mustGet[int](t, db, rowByID, 1)
	mustSelect[int](t, db, rowByID, 1)
	mustGet[int](t, db, allOf)
	for i, want := range []string{"get:row.by_id-1:", "select:row.by_id-1:", "get:SELECT-n-FROM-rows:"} {
		if !strings.HasPrefix(keys[i], want) {
			t.Errorf("key %q, want %q", keys[i], want)
		}
	}
}

// The tags of a Statement depend on the arguments. A tag of one row must void that row and the lists on all nodes, and
// no other row.
func TestStatementTags(t *testing.T) {
	s := counting()
	cfg := sqlxrefill.Config{
		Config: refill.Config{TTL: time.Minute, Shared: memory.New()},
		Statements: []sqlxrefill.Statement{
			{Name: "row", Query: rowByID, Tags: func(args []any) []string {
				return []string{"rows", fmt.Sprint("rows/", args[0])}
			}},
			{Name: "none", Query: "SELECT none", Tags: func([]any) []string { return []string{"rows"} }},
			{Name: "all", Query: allOf, Tags: func([]any) []string { return []string{"rows"} }},
		},
	}
	one, other := cached(t, s, cfg), cached(t, s, cfg)
	queries := func(want int) {
		t.Helper()
		before := s.count()
		for _, db := range []*sqlxrefill.DB{other, one} {
			mustGet[int](t, db, rowByID, 1)
			mustGet[int](t, db, rowByID, 2)
			mustSelect[int](t, db, allOf)
			var n int
			if err := db.Get(&n, "SELECT none"); err != sql.ErrNoRows {
				t.Fatal(err)
			}
		}
		if got := s.count() - before; got != want {
			t.Errorf("%d queries, want %d", got, want)
		}
	}
	queries(4)
	queries(0)
	if err := other.InvalidateTag(t.Context(), "rows/1"); err != nil {
		t.Fatal(err)
	}
	queries(1)
	if err := other.InvalidateTag(t.Context(), "rows"); err != nil {
		t.Fatal(err)
	}
	queries(4)
}

// A result that exceeds its Statement is refused, and the rest of its rows is not read. Get reads one row only.
func TestStatementLimits(t *testing.T) {
	tab := &table{columns: []string{"n"}, err: errors.New("read too far")}
	for range 4 {
		tab.rows = append(tab.rows, []driver.Value{strings.Repeat("x", 100)})
	}
	db := cached(t, always(tab), sqlxrefill.Config{Statements: []sqlxrefill.Statement{
		{Name: "rows", Query: "SELECT rows", MaxRows: 3}, {Name: "bytes", Query: "SELECT bytes", MaxBytes: 350},
	}})
	for name, want := range map[string]string{"rows": "rows: more than 3 rows", "bytes": "bytes: more than 350 bytes"} {
		var list []string
		err := db.Select(&list, "SELECT "+name)
		if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), want) || list != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := mustGet[string](t, db, "SELECT "+name); len(got) != 100 {
			t.Errorf("%s: got %q", name, got)
		}
	}
}

// An uncached Statement must query at each call, and may write.
func TestUncachedStatement(t *testing.T) {
	const insert = "INSERT INTO rows DEFAULT VALUES RETURNING n"
	s := counting()
	db := cached(t, s, sqlxrefill.Config{Statements: []sqlxrefill.Statement{{Name: "new", Query: insert, Uncached: true}}})
	for i := 1; i < 6; i += 2 {
		if a, b := mustGet[int](t, db, insert), mustSelect[int](t, db, insert)[0]; a != i || b != i+1 {
			t.Errorf("got %d and %d", a, b)
		}
	}
}

func TestBadStatements(t *testing.T) {
	plain := counting().open(t)
	for want, list := range map[string][]sqlxrefill.Statement{
		"Statements[0]: refill: invalid: Name": {{Query: allOf}},
		"a b":                                  {{Name: "a b", Query: allOf}},
		"1 to 64":                              {{Name: strings.Repeat("x", 65), Query: allOf}},
		"query: empty":                         {{Name: "a"}},
		`"DELETE" may write`:                   {{Name: "a", Query: "DELETE FROM t"}},
		`two statements have the name "a"`:     {{Name: "a", Query: allOf}, {Name: "a", Query: rowByID}},
		`"a" and "b" have the same text`:       {{Name: "a", Query: allOf}, {Name: "b", Query: allOf}},
		"TTL: -1ns":                            {{Name: "a", Query: allOf, TTL: -1}},
		"MaxRows":                              {{Name: "a", Query: allOf, MaxRows: -1}},
		"MaxBytes":                             {{Name: "a", Query: allOf, MaxBytes: -1}},
	} {
		_, err := sqlxrefill.New(plain, sqlxrefill.Config{
			Name: "n", Config: refill.Config{TTL: time.Minute}, Statements: list,
		})
		if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q: got %v", want, err)
		}
	}
}
