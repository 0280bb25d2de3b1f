package sqlxrefill_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/refill-go/refill/middleware/sqlxrefill"
)

// source is an in-memory database for these tests. It answers each query with the result of answer, and counts the
// queries.
type source struct {
	answer func(query string, args []driver.NamedValue) (*table, error)
	takes  time.Duration // the length of a query, unless its ctx ends earlier

	mu      sync.Mutex
	queries int
	dead    int                // so many queries find a dead connection
	began   []driver.TxOptions // of the transactions
	commit  func() error       // called by COMMIT; nil = it succeeds

	ended    []string // "COMMIT" or "ROLLBACK", per transaction
	executed []string // the texts of Exec
	inTx     int      // transactions that were neither committed nor rolled back
}

// table is what a query returns. The driver returns err after the last row, and closeErr from Close.
type table struct {
	columns  []string
	rows     [][]driver.Value
	err      error
	closeErr error
}

// always answers every query with t.
func always(t *table) *source {
	return &source{answer: func(string, []driver.NamedValue) (*table, error) { return t, nil }}
}

// open returns a database over s. The database is closed at the end of the test.
func (s *source) open(t testing.TB) *sqlx.DB {
	db := sqlx.NewDb(sql.OpenDB(s), "fake")
	t.Cleanup(func() { db.Close() })
	return db
}

func (s *source) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.queries
}

// sourceTx is a transaction of a source.
type sourceTx struct{ *source }

func (c sourceConn) BeginTx(_ context.Context, o driver.TxOptions) (driver.Tx, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.began = append(c.began, o)
	c.inTx++
	return sourceTx(c), nil
}

func (tx sourceTx) Commit() error {
	tx.end("COMMIT")
	if tx.commit != nil {
		return tx.commit()
	}
	return nil
}

func (tx sourceTx) Rollback() error { tx.end("ROLLBACK"); return nil }

func (tx sourceTx) end(how string) {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	tx.inTx--
	tx.ended = append(tx.ended, how)
}

// endings waits until no transaction is open, and returns how the transactions have ended.
func (s *source) endings() []string {
	for {
		s.mu.Lock()
		open, ended := s.inTx, slices.Clone(s.ended)
		s.mu.Unlock()
		if open == 0 {
			return ended
		}
		runtime.Gosched()
	}
}

func (c sourceConn) ExecContext(_ context.Context, query string, _ []driver.NamedValue) (driver.Result, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.executed = append(c.executed, query)
	return driver.RowsAffected(1), nil
}

func (s *source) Connect(context.Context) (driver.Conn, error) { return sourceConn{s}, nil }
func (s *source) Driver() driver.Driver                        { return s }
func (s *source) Open(string) (driver.Conn, error)             { return sourceConn{s}, nil }

type sourceConn struct{ *source }

func (sourceConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("fake: no statements") }
func (sourceConn) Begin() (driver.Tx, error)           { return nil, errors.New("fake: no transactions") }
func (sourceConn) Close() error                        { return nil }

func (c sourceConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	c.mu.Lock()
	if c.dead > 0 {
		c.dead--
		c.mu.Unlock()
		return nil, driver.ErrBadConn
	}
	c.queries++
	c.mu.Unlock()
	if c.takes > 0 {
		select {
		case <-time.After(c.takes):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	t, err := c.answer(query, args)
	if err != nil {
		return nil, err
	}
	return &tableRows{table: t}, nil
}

// CheckNamedValue lets uint64 through, as MySQL's driver does.
func (c sourceConn) CheckNamedValue(v *driver.NamedValue) error {
	if _, ok := v.Value.(uint64); ok {
		return nil
	}
	return driver.ErrSkip
}

type tableRows struct {
	*table
	next int
}

func (r *tableRows) Columns() []string { return r.columns }
func (r *tableRows) Close() error      { return r.closeErr }

func (r *tableRows) Next(dest []driver.Value) error {
	if r.next == len(r.rows) {
		if r.err != nil {
			return r.err
		}
		return io.EOF
	}
	copy(dest, r.rows[r.next])
	r.next++
	return nil
}

// cached returns a DB over s. The DB is closed at the end of the test. A cfg without a TTL gets a TTL of a minute
// without jitter.
func cached(t testing.TB, s *source, cfg sqlxrefill.Config) *sqlxrefill.DB {
	return cachedOver(t, s.open(t), cfg)
}

func cachedOver(t testing.TB, db *sqlx.DB, cfg sqlxrefill.Config) *sqlxrefill.DB {
	t.Helper()
	if cfg.TTL == 0 {
		cfg.TTL, cfg.Jitter = time.Minute, -1
	}
	if cfg.Name == "" {
		cfg.Name = "test"
	}
	cfg.SameData = true // the nodes of a test have an sql.DB each over one source
	c, err := sqlxrefill.New(db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return c
}

// mustGet reads one value and fails the test on an error.
func mustGet[T any](t testing.TB, db *sqlxrefill.DB, query string, args ...any) T {
	t.Helper()
	var v T
	if err := db.GetContext(context.Background(), &v, query, args...); err != nil {
		t.Fatalf("Get: %v", err)
	}
	return v
}

// mustSelect reads a list and fails the test on an error.
func mustSelect[T any](t testing.TB, db *sqlxrefill.DB, query string, args ...any) []T {
	t.Helper()
	var v []T
	if err := db.SelectContext(context.Background(), &v, query, args...); err != nil {
		t.Fatalf("Select: %v", err)
	}
	return v
}
