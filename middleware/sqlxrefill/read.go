package sqlxrefill

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"github.com/refill-go/refill"
)

// This file reads results, from the cache and from the database.

// read scans a result into dest. If a cached result does not fit dest, read runs the query again: the columns may have
// changed since the result was read, and sqlx alone would see the new columns.
func (db *DB) read(ctx context.Context, rows span, dest any, query string, args []any) error {
	q, err := db.request(query, args)
	if err != nil {
		return err
	}
	began := db.number.Load()
	key := q.key(rows)
	load := func(ctx context.Context, _ string) (*result, error) { return db.load(ctx, rows, q) }
	r, err := db.loader.GetWith(ctx, key, load)
	if err != nil {
		return kept(err)
	}
	err = db.orClosed(db.replay.scan(rows, dest, r))
	if err == nil || r.number > began || errors.Is(err, refill.ErrClosed) || db.misfits.known(key, dest) {
		return err
	}
	found, failed := db.loader.GetResultWith(ctx, key, refill.GetOptions[*result]{Load: load, Refresh: true})
	if failed != nil {
		return kept(failed)
	}
	if err = db.orClosed(db.replay.scan(rows, dest, found.Value)); err != nil {
		db.misfits.add(key, dest)
	}
	return err
}

// request checks and copies what the caller has passed.
func (db *DB) request(query string, args []any) (*request, error) {
	if err := db.texts.check(query); err != nil {
		return nil, err
	}
	return newRequest(db.statements.of(query), query, args)
}

// load runs the query. The caller that started the load may leave while other callers wait. So q holds copies of
// everything that the caller passed.
//
// After a change of a table, PostgreSQL fails a prepared statement once per connection ("cached plan must not change
// result type"). The driver then prepares the statement again. So load repeats such a query. Otherwise the failure of
// one connection would hold back all callers.
func (db *DB) load(ctx context.Context, rows span, q *request) (*result, error) {
	number := db.number.Add(1)
	r, err := db.query(ctx, rows, q)
	for n := 1; n < maxPlans && stateOf(err) == outdatedPlan; n++ {
		r, err = db.query(ctx, rows, q)
	}
	if err != nil {
		return nil, withKind(err)
	}
	absent := rows == firstRow && r.rows == 0
	q.statement.apply(ctx, q.args, absent)
	if absent {
		return nil, errNoRow
	}
	r.number = number
	if db.most >= 0 && len(r.encoded) > db.most {
		refill.FillFrom(ctx).NoStore()
	}
	return r, nil
}

const (
	outdatedPlan = "0A000" // the SQLSTATE feature_not_supported
	maxPlans     = 4       // how often a load runs a query that fails with outdatedPlan
)

// errNoRow makes refill cache the absence of a row.
var errNoRow = fmt.Errorf("%w: the query returned no row", refill.ErrNotFound)

// query runs a query on a connection of the pool. If the connection turns out to be dead, database/sql chooses the next
// connections, as for sqlx.
func (db *DB) query(ctx context.Context, rows span, q *request) (*result, error) {
	conn, err := db.pool.connection(ctx)
	if err != nil {
		return nil, err
	}
	r, err := db.queryOn(ctx, conn, rows, q)
	conn.Close()
	if errors.Is(err, driver.ErrBadConn) {
		return db.queryOn(ctx, db.source, rows, q)
	}
	return r, err
}

// queryer is an *sql.Conn or an *sqlx.DB.
type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error)
}

// queryOn runs a query, in a READ ONLY transaction if the Config says so.
func (db *DB) queryOn(ctx context.Context, on queryer, rows span, q *request) (*result, error) {
	query := on.QueryContext
	if db.readOnly {
		tx, err := on.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
		if err != nil {
			return nil, err
		}
		defer func() { _ = tx.Rollback() }() // there is nothing to commit
		query = tx.QueryContext
	}
	found, err := query(ctx, q.query, q.args...)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	r, err := readResult(found, rows, q.statement.exceeded)
	if err == nil && rows == firstRow {
		err = found.Close() // as in sqlx, whose GetContext also returns the error of Close
	}
	return r, err
}

// pool takes connections from the pool of a database. A full pool is no fault of the database, and says nothing about
// other nodes. So it must not become a failure that is left in the store. It holds back this node alone: for a while,
// loads that find the pool full fail at once.
type pool struct {
	db   *sql.DB
	hold time.Duration // 0 = a full pool holds no load back

	mu   sync.Mutex
	held time.Time // until then, no load waits for a connection; guarded by mu
}

func poolOf(db *sql.DB, errorTTL time.Duration) *pool {
	if errorTTL == 0 {
		errorTTL = time.Second // the default of refill.Config
	}
	return &pool{db: db, hold: max(0, errorTTL)}
}

// ErrPoolFull says that this process had no free connection to the database: all MaxOpenConns connections were in use
// until shortly before LoadTimeout. Such a failure holds back this process only. Other processes load as if there had
// been no failure.
var ErrPoolFull = errors.New("sqlxrefill: all connections of the pool are in use")

// connection waits for a connection. It gives up before LoadTimeout, because refill takes a load that has reached
// LoadTimeout for a failure of the database.
func (p *pool) connection(ctx context.Context) (*sql.Conn, error) {
	if p.isHeld() && p.full() {
		refill.FillFrom(ctx).SetErrorTTL(0)
		return nil, ErrPoolFull
	}
	wait := ctx
	if end, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		wait, cancel = context.WithDeadline(ctx, end.Add(-time.Until(end)/10))
		defer cancel()
	}
	conn, err := p.db.Conn(wait)
	if err != nil && wait.Err() != nil && p.full() {
		p.holdBack()
		refill.FillFrom(ctx).SetErrorTTL(0)
		return nil, ErrPoolFull
	}
	return conn, err
}

func (p *pool) full() bool {
	s := p.db.Stats()
	return s.MaxOpenConnections > 0 && s.InUse >= s.MaxOpenConnections
}

func (p *pool) isHeld() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Now().Before(p.held)
}

func (p *pool) holdBack() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = time.Now().Add(p.hold)
}

// misfits remembers the types of dests that do not fit even a result that was read anew. For such a dest, a cached
// result is not read anew again for a while.
type misfits struct {
	mu    sync.Mutex
	until map[misfit]time.Time // guarded by mu
}

type misfit struct {
	key  string
	dest reflect.Type
}

const (
	misfitFor  = time.Second
	maxMisfits = 1024 // bounds the memory; while there are so many, further ones are not remembered
)

func (m *misfits) known(key string, dest any) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Now().Before(m.until[misfit{key, reflect.TypeOf(dest)}])
}

func (m *misfits) add(key string, dest any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if m.until == nil {
		m.until = make(map[misfit]time.Time)
	}
	if len(m.until) >= maxMisfits {
		for old, until := range m.until {
			if !now.Before(until) {
				delete(m.until, old)
			}
		}
	}
	if len(m.until) < maxMisfits {
		m.until[misfit{key, reflect.TypeOf(dest)}] = now.Add(misfitFor)
	}
}

// pointsTo reports whether dest is a non-nil pointer to a value of this kind (Invalid = any kind).
func pointsTo(dest any, kind reflect.Kind) bool {
	v := reflect.ValueOf(dest)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		return false
	}
	return kind == reflect.Invalid || v.Type().Elem().Kind() == kind
}
