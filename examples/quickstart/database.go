package main

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jmoiron/sqlx"
	_ "github.com/lib/pq"
	_ "modernc.org/sqlite"
)

// poolSize is how many connections the nodes together have to the database, and so how many queries run at a time.
// Further queries wait for a connection, as in production.
const poolSize = 50

// rig stands between database/sql and the real driver, so that the nodes see an ordinary *sqlx.DB. The rig counts every
// query. With delay and down, the program makes queries slow or makes them fail.
type rig struct {
	driver  driver.Driver
	dsn     string
	queries atomic.Int64
	delay   atomic.Int64 // a sleep before every query, in ns
	down    atomic.Bool  // queries fail after the delay
}

func (r *rig) Driver() driver.Driver { return r.driver }

func (r *rig) Connect(context.Context) (driver.Conn, error) {
	conn, err := r.driver.Open(r.dsn)
	if err != nil {
		return nil, err
	}
	return &riggedConn{conn, r}, nil
}

type riggedConn struct {
	driver.Conn
	rig *rig
}

var errDown = errors.New("the database is down")

// QueryContext runs every SELECT. The sleep before the query keeps the connection busy, as a slow query would.
func (c *riggedConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	c.rig.queries.Add(1)
	if err := pause(ctx, time.Duration(c.rig.delay.Load())); err != nil {
		return nil, err
	}
	if c.rig.down.Load() {
		return nil, errDown
	}
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, query, args)
}

// openDatabase opens a database behind a rig. The dsn is postgres://… or a DSN of SQLite. If dsn is empty, the database
// is an SQLite database in memory, which is deleted when its last connection is closed.
func openDatabase(dsn string) (*sqlx.DB, *rig, error) {
	name := "postgres"
	if !strings.HasPrefix(dsn, "postgres://") {
		name, dsn = "sqlite", cmp.Or(dsn, "file:/refill-quickstart?vfs=memdb")
	}
	direct, err := sql.Open(name, dsn)
	if err != nil {
		return nil, nil, err
	}
	r := &rig{driver: direct.Driver(), dsn: dsn}
	db := sqlx.NewDb(sql.OpenDB(r), name)
	db.SetMaxOpenConns(poolSize)
	db.SetMaxIdleConns(poolSize)
	return db, r, direct.Close() // direct has no connections; only its driver is used
}

// dropTable and createTable are the only functions of this program that write to the database.
func dropTable(db *sqlx.DB) error {
	_, err := db.Exec(`DROP TABLE IF EXISTS refill_quickstart`)
	return err
}

func createTable(db *sqlx.DB) error {
	if err := dropTable(db); err != nil {
		return err
	}
	_, create := db.Exec(`CREATE TABLE refill_quickstart (id INTEGER PRIMARY KEY, name VARCHAR(40), cents INTEGER)`)
	_, insert := db.Exec(`INSERT INTO refill_quickstart VALUES (42, 'kettle', 2490)`)
	return errors.Join(create, insert)
}
