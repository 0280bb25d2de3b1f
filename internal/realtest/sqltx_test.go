//go:build unix

package realtest

import (
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/redis/go-redis/v9"
	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/middleware/sqlxrefill"
)

// Transactions against real databases: what is committed must be read on both nodes, what is rolled back must not, and
// the database must refuse a write in a READ ONLY transaction.
func TestSQLTransactions(t *testing.T) {
	modes := sqlModes(t)
	store := goredis.New(redis.NewClient(&redis.Options{Addr: StartRedis(t).Addr()}))
	for _, m := range modes {
		if m.name == "pgx simple" || m.name == "pgx exec" || m.name == "pq binary" {
			continue // these modes differ in how they send arguments
		}
		t.Run(m.name, func(t *testing.T) {
			ctx := t.Context()
			plain := sqlx.MustOpen(m.driver, m.address)
			defer plain.Close()
			plain.MustExec("DROP TABLE IF EXISTS p")
			plain.MustExec("CREATE TABLE p (id int PRIMARY KEY, n int)")
			plain.MustExec("INSERT INTO p VALUES (1, 10), (2, 20)")
			byID := plain.Rebind("SELECT n FROM p WHERE id = ?")
			node := func(readOnly bool) *sqlxrefill.DB {
				db, err := sqlxrefill.New(plain, sqlxrefill.Config{
					Name: "tx." + strings.ReplaceAll(m.name, " ", "."), ReadOnly: readOnly,
					Config: refill.Config{TTL: time.Hour, Shared: store},
					Statements: []sqlxrefill.Statement{{Name: "by.id", Query: byID, Tags: func(args []any) []string {
						return []string{"p", fmt.Sprint("p/", args[0])}
					}}},
				})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { db.Close() })
				return db
			}
			one, other := node(false), node(true)
			read := func(db *sqlxrefill.DB, id int) (n int) {
				if err := db.GetContext(ctx, &n, byID, id); err != nil && !errors.Is(err, sql.ErrNoRows) {
					t.Fatal(err)
				}
				return n
			}
			bothRead := func(id, want int) {
				t.Helper()
				if n := read(one, id); n != want {
					t.Errorf("this node reads %d of %d, want %d", n, id, want)
				}
				if !eventually(func() bool { return read(other, id) == want }) {
					t.Errorf("the other node does not read %d of %d", want, id)
				}
			}
			bothRead(1, 10)
			bothRead(2, 20)
			bothRead(3, 0) // an absent row
			failure := errors.New("no")
			update := func(tx *sqlxrefill.Tx, id, n int) error {
				tx.Touch(fmt.Sprint("p/", id))
				_, err := tx.ExecContext(ctx, tx.Rebind("UPDATE p SET n = ? WHERE id = ?"), n, id)
				return err
			}
			err := one.InTx(ctx, nil, func(tx *sqlxrefill.Tx) error { return errors.Join(update(tx, 1, 66), failure) })
			if !errors.Is(err, failure) {
				t.Errorf("got %v", err)
			}
			bothRead(1, 10)
			err = one.InTx(ctx, nil, func(tx *sqlxrefill.Tx) error {
				tx.Touch("p/3")
				if _, err := tx.Exec("INSERT INTO p VALUES (3, 30)"); err != nil {
					return err
				}
				inner := tx.Savepoint(ctx, func() error { return errors.Join(update(tx, 2, 77), failure) })
				if !errors.Is(inner, failure) {
					t.Errorf("the savepoint: %v", inner)
				}
				failed := tx.Savepoint(ctx, func() error { _, err := tx.Exec("INSERT INTO p VALUES (3, 31)"); return err })
				if failed == nil {
					t.Error("the key is there twice")
				}
				return tx.Savepoint(ctx, func() error { return update(tx, 1, 11) })
			})
			if err != nil {
				t.Fatal(err)
			}
			bothRead(1, 11)
			bothRead(2, 20)
			bothRead(3, 30)
		})
	}
}

// A function that writes passes the check of the text. In a READ ONLY transaction the database must refuse it.
func TestSQLReadOnly(t *testing.T) {
	plain := sqlx.MustOpen("pgx", fmt.Sprintf(pgxAddr, StartPostgres(t)))
	defer plain.Close()
	plain.MustExec("CREATE TABLE w (n int)")
	plain.MustExec("CREATE FUNCTION sneaky() RETURNS int LANGUAGE sql AS 'INSERT INTO w VALUES (1) RETURNING n'")
	db, err := sqlxrefill.New(plain, sqlxrefill.Config{
		Name: "readonly", ReadOnly: true, Config: refill.Config{TTL: time.Minute},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var n int
	var failed *sqlxrefill.QueryError
	if err := db.Get(&n, "SELECT sneaky()"); !errors.As(err, &failed) || failed.SQLState != "25006" {
		t.Errorf("got %v", err)
	}
	if err := db.Get(&n, "SELECT count(*) FROM w"); err != nil || n != 0 {
		t.Errorf("%d rows, %v", n, err)
	}
}

// A column is renamed while each connection has a prepared statement, and the old result is cached. New code must read
// the new column at once, and no call may see the error of the outdated plan.
func TestSQLRenamedColumn(t *testing.T) {
	plain := sqlx.MustOpen("pgx", fmt.Sprintf(pgxAddr, StartPostgres(t)))
	defer plain.Close()
	plain.MustExec("CREATE TABLE c (old int)")
	plain.MustExec("INSERT INTO c VALUES (7)")
	db, err := sqlxrefill.New(plain, sqlxrefill.Config{
		Name: "renamed", Config: refill.Config{TTL: time.Millisecond, StaleFor: time.Minute},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var before struct{ Old int }
	for range 10 {
		if err := db.Get(&before, "SELECT * FROM c"); err != nil || before.Old != 7 {
			t.Fatal(before, err)
		}
	}
	plain.MustExec("ALTER TABLE c RENAME COLUMN old TO renamed")
	var after struct{ Renamed int }
	for range 20 {
		if err := db.Get(&after, "SELECT * FROM c"); err != nil || after.Renamed != 7 {
			t.Fatal(after, err)
		}
	}
}
