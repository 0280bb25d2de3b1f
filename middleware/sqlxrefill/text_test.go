package sqlxrefill

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/refill-go/refill"
)

var postgres, mysql = dialect{}, dialect{mysql: true}

func TestTextsThatRead(t *testing.T) {
	for _, d := range []dialect{postgres, mysql} {
		for _, text := range []string{
			"SELECT 1", "  select * from t where a = $1 ;\n", "(SELECT 1) UNION (SELECT 2)", "VALUES (1), (2)", "TABLE t",
			"WITH a AS (SELECT 1), b AS MATERIALIZED (SELECT 2) SELECT * FROM a, b", "SHOW TABLES", "DESC t",
			"EXPLAIN SELECT 1", "EXPLAIN (ANALYZE, FORMAT JSON) SELECT 1", "/* INSERT */ SELECT 1 -- DELETE\n",
			"SELECT 'INSERT INTO t', \"DELETE FROM\" FROM t", "SELECT 'it''s; DELETE FROM t'", "SELECT `for` `update` FROM t",
			"SELECT updated, insert_at, t.delete FROM t", "SELECT replace(a, 'x', 'y'), insert('abc', 1, 1, 'x') FROM t",
			"SELECT substring(a FOR 3) FROM t", "SELECT a AS merge, deleted FROM updates", "SELECT next value FROM t",
			"SELECT t.a FROM t USE INDEX FOR JOIN (i) WHERE a IN (share)", "SELECT 1; SELECT 2;", "-- a\n-- b\nSELECT 1",
		} {
			if err := d.check(text); err != nil {
				t.Errorf("%+v %q: %v", d, text, err)
			}
		}
	}
	for _, text := range []string{
		"SELECT $$ ; DELETE FROM t $$", "SELECT $a$ $b$ INTO $b$ $a$ FROM t WHERE a = $1 AND b = $2", `SELECT '\'`,
		`SELECT E'\' INTO x' FROM t`, "SELECT a #> '{b}' FROM t", "/* a /* INTO */ INTO */ SELECT 1", "SELECT a --INTO",
	} {
		if err := postgres.check(text); err != nil {
			t.Errorf("PostgreSQL %q: %v", text, err)
		}
	}
	for _, text := range []string{
		`SELECT '\' INTO x' FROM t`, `SELECT "\" INTO x" FROM t`, "SELECT 1 # INTO\n", "SELECT 1--1 FROM t",
		"SELECT /*!50000 STRAIGHT_JOIN */ a FROM t",
	} {
		if err := mysql.check(text); err != nil {
			t.Errorf("MySQL %q: %v", text, err)
		}
	}
}

func TestTextsThatWrite(t *testing.T) {
	for _, d := range []dialect{postgres, mysql} {
		for _, text := range []string{
			"INSERT INTO t VALUES (1) RETURNING id", "insert into t select 1", "UPDATE t SET a = 1", "DELETE FROM t",
			"/* SELECT */ DELETE FROM t", "WITH a AS (SELECT 1) DELETE FROM t", "WITH a AS (SELECT 1) UPDATE \"t\" SET b = 1",
			"WITH a AS (INSERT INTO t VALUES (1) RETURNING id) SELECT id FROM a",
			"WITH a AS (DELETE FROM t RETURNING *) TABLE a",
			"WITH a AS (UPDATE t SET b = 1 RETURNING *) SELECT * FROM a", "SELECT * INTO copy FROM t",
			"WITH a AS (SELECT 1) MERGE INTO t USING a ON true WHEN MATCHED THEN DELETE", "MERGE INTO t USING s ON 1=1",
			"SELECT a FROM t FOR UPDATE", "SELECT a FROM t FOR NO KEY UPDATE SKIP LOCKED", "SELECT a FROM t FOR share",
			"SELECT a FROM t FOR KEY SHARE", "SELECT a FROM t LOCK IN SHARE MODE", "select nextval('s')",
			"SELECT pg_catalog.setval('s', 1)", "SELECT NEXT VALUE FOR s", "SELECT pg_try_advisory_lock(1)",
			"SELECT GET_LOCK('a', 1)", "SELECT 1; DELETE FROM t", "SELECT 1;;(UPDATE t SET a = 1)", "CALL p()", "EXEC p",
			"EXPLAIN ANALYZE INSERT INTO t VALUES (1)", "EXPLAIN (ANALYZE) UPDATE t SET a = 1", "SET a = 1", "TRUNCATE t",
			"REPLACE INTO t VALUES (1)", "BEGIN", "COMMIT", "CREATE TABLE t (a int)", "PRAGMA user_version = 1",
			"SELECT 'a''' INTO x", "COPY t TO STDOUT", "DO $$ $$", "LOCK TABLE t", "VACUUM", "",
		} {
			if err := d.check(text); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "query") {
				t.Errorf("%+v %q: %v", d, text, err)
			}
		}
	}
	for _, text := range []string{
		`SELECT '\', a INTO b`, "SELECT $a$ $a$ INTO b", "/* /* */ */ DELETE FROM t", "SELECT E'\\\\' INTO b",
		"SELECT a--\nINTO b",
	} {
		if postgres.check(text) == nil {
			t.Errorf("PostgreSQL accepts %q", text)
		}
	}
	for _, text := range []string{
		"SELECT 1 /*!50000 INTO OUTFILE 'x' */", "/*! DELETE */ FROM t", "/*M!100100 DELETE */ FROM t", `SELECT '\\' INTO @a`,
		"/* /* */ DELETE FROM t", "SELECT 1 # x\nINTO @a", "SELECT 1--\nINTO @a",
	} {
		if mysql.check(text) == nil {
			t.Errorf("MySQL accepts %q", text)
		}
	}
}

// The answer for a text is remembered for a bounded number of texts. Further texts must be checked as well.
func TestTextsAreBounded(t *testing.T) {
	var known texts
	for i := range 2 * maxTexts {
		read, write := fmt.Sprintf("SELECT %d", i), fmt.Sprintf("DELETE FROM t%d", i)
		for range 2 {
			if known.check(read) != nil || known.check(write) == nil {
				t.Fatalf("text %d", i)
			}
		}
	}
	n := 0
	known.checked.Range(func(any, any) bool { n++; return true })
	if n != maxTexts {
		t.Errorf("%d texts are kept", n)
	}
}

func TestDialectOf(t *testing.T) {
	for name, want := range map[string]dialect{
		"mysql": mysql, "nrmysql": mysql, "otel-MySQL": mysql, "mariadb": mysql, "postgres": postgres, "pgx": postgres,
		"sqlite": postgres, "": postgres,
	} {
		if got := dialectOf(name); got != want {
			t.Errorf("%q: %+v", name, got)
		}
	}
}

// The check must end for any text. A text that is accepted alone must be accepted after another statement as well.
func FuzzCheck(f *testing.F) {
	for _, s := range []string{"SELECT 1", "'", "$a$", "E'\\", "/*!", "/*", "--", "#", "`", "((", ";", "$", "*/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, d := range []dialect{postgres, mysql} {
			if d.check(text) == nil && d.check("SELECT 1;"+text) != nil {
				t.Errorf("%+v: %q", d, text)
			}
		}
	})
}
