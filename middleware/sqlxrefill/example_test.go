package sqlxrefill_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/middleware/sqlxrefill"
)

// A product page that is read a thousand times a minute queries the database once a minute, on any number of nodes.
func Example() {
	s := always(&table{columns: []string{"id", "name"}, rows: [][]driver.Value{{int64(42), "kettle"}}})
	db := sqlx.NewDb(sql.OpenDB(s), "postgres") // in your program: sqlx.Connect
	defer db.Close()

	products, err := sqlxrefill.New(db, sqlxrefill.Config{
		Name: "products",
		Config: refill.Config{
			TTL:      time.Minute,      // fresh for this long
			StaleFor: 10 * time.Minute, // then served stale, while one node queries again
			// Shared: goredis.New(rdb), one for the fleet
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer products.Close()

	ctx := context.Background()
	const byID = `SELECT id, name FROM products WHERE id = $1`
	var p struct {
		ID   int
		Name string
	}
	for range 1000 {
		if err := products.GetContext(ctx, &p, byID, 42); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println(p.Name, "after", s.count(), "query")

	// A write goes to the database. Once it is committed, Invalidate removes the result on all nodes.
	if err := products.Invalidate(ctx, byID, 42); err != nil {
		log.Print(err)
	}
	if err := products.GetContext(ctx, &p, byID, 42); err != nil {
		log.Fatal(err)
	}
	fmt.Println(p.Name, "after", s.count(), "queries")
	// Output:
	// kettle after 1 query
	// kettle after 2 queries
}

// An absent row is sql.ErrNoRows, as in sqlx. The absence is cached as well.
func ExampleDB_GetContext_absent() {
	s := always(&table{columns: []string{"name"}})
	db := sqlx.NewDb(sql.OpenDB(s), "postgres")
	defer db.Close()
	products, err := sqlxrefill.New(db, sqlxrefill.Config{
		Name: "products", Config: refill.Config{TTL: time.Minute},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer products.Close()

	for range 3 {
		var name string
		err := products.GetContext(context.Background(), &name, `SELECT name FROM products WHERE id = $1`, 7)
		fmt.Println(errors.Is(err, sql.ErrNoRows))
	}
	fmt.Println(s.count(), "query")
	// Output:
	// true
	// true
	// true
	// 1 query
}

// A text that writes is refused, and does not run.
func ExampleDB_GetContext_writes() {
	s := always(&table{columns: []string{"id"}, rows: [][]driver.Value{{int64(1)}}})
	db := sqlx.NewDb(sql.OpenDB(s), "postgres")
	defer db.Close()
	orders, err := sqlxrefill.New(db, sqlxrefill.Config{Name: "orders", Config: refill.Config{TTL: time.Minute}})
	if err != nil {
		log.Fatal(err)
	}
	defer orders.Close()

	var id int
	err = orders.GetContext(context.Background(), &id, `INSERT INTO orders DEFAULT VALUES RETURNING id`)
	fmt.Println(errors.Is(err, refill.ErrInvalid), "and", s.count(), "queries")

	err = orders.DB().Get(&id, `INSERT INTO orders DEFAULT VALUES RETURNING id`)
	fmt.Println(id, err)
	// Output:
	// true and 0 queries
	// 1 <nil>
}

// userStore is a repository. It takes an *sqlx.DB and a *sqlxrefill.DB alike.
type userStore struct{ db sqlx.ExtContext }

type getter interface {
	GetContext(ctx context.Context, dest any, query string, args ...any) error
}

func (s userStore) name(ctx context.Context, id int) (name string, err error) {
	return name, s.db.(getter).GetContext(ctx, &name, s.db.Rebind(`SELECT name FROM users WHERE id = ?`), id)
}

// A program that uses sqlx gets the cache with one line: the DB takes the place of the *sqlx.DB.
func ExampleDB() {
	s := always(&table{columns: []string{"name"}, rows: [][]driver.Value{{"Jane"}}})
	plain := sqlx.NewDb(sql.OpenDB(s), "postgres")
	defer plain.Close()
	db, err := sqlxrefill.New(plain, sqlxrefill.Config{
		Name: "users", Config: refill.Config{TTL: time.Minute, Tags: []string{"users"}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	ctx, users := context.Background(), userStore{db}
	for range 100 {
		if _, err := users.name(ctx, 7); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println("100 reads,", s.count(), "query")

	// An import has changed many rows.
	if err := db.InvalidateTag(ctx, "users"); err != nil {
		log.Print(err)
	}
	name, err := users.name(ctx, 7)
	fmt.Println(name, err, s.count())
	// Output:
	// 100 reads, 1 query
	// Jane <nil> 2
}

// A transaction names what it changes. Once it is committed, no node serves what was read before.
func ExampleDB_InTx() {
	s := &source{}
	name := "Jane"
	s.answer = func(string, []driver.NamedValue) (*table, error) {
		return &table{columns: []string{"name"}, rows: [][]driver.Value{{name}}}, nil
	}
	plain := sqlx.NewDb(sql.OpenDB(s), "postgres")
	defer plain.Close()

	const userByID = `SELECT name FROM users WHERE id = $1`
	db, err := sqlxrefill.New(plain, sqlxrefill.Config{
		Name: "shop", Config: refill.Config{TTL: time.Hour},
		Statements: []sqlxrefill.Statement{{
			Name: "user.by.id", Query: userByID,
			Tags: func(args []any) []string { return []string{"users", fmt.Sprint("users/", args[0])} },
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	ctx := context.Background()
	var got string
	fmt.Println(db.GetContext(ctx, &got, userByID, 7), got)

	err = db.InTx(ctx, nil, func(tx *sqlxrefill.Tx) error {
		tx.Touch("users/7")
		name = "Joan" // what the UPDATE does
		_, err := tx.ExecContext(ctx, `UPDATE users SET name = $1 WHERE id = $2`, "Joan", 7)
		return err
	})
	var late *sqlxrefill.InvalidateError
	if errors.As(err, &late) { // committed: do not fail, refill tries again
		log.Print(late)
	} else if err != nil {
		log.Fatal(err)
	}
	fmt.Println(db.GetContext(ctx, &got, userByID, 7), got)
	// Output:
	// <nil> Jane
	// <nil> Joan
}
