// Package sqlxrefill caches the reads of github.com/jmoiron/sqlx. It is built on package refill. A [DB] takes the place
// of an *sqlx.DB. [DB.GetContext] and [DB.SelectContext] read through the cache: when the result of a hot query
// expires, one caller on one node runs the query again. Every other caller gets the stale result or waits for that
// query. All other methods, transactions among them, go to the database as they are.
//
//	db, err := sqlxrefill.New(sqlx.MustConnect("pgx", address), sqlxrefill.Config{
//		Name:   "shop",
//		Config: refill.Config{TTL: time.Minute, Shared: shared},
//	})
//	var u User
//	err = db.GetContext(ctx, &u, `SELECT * FROM users WHERE id = $1`, 42) // cached
//	_, err = db.ExecContext(ctx, `DELETE FROM users WHERE id = $1`, 42)   // not cached
//
// The cache holds the rows as the driver returned them, not the caller's struct. Every call scans these rows anew
// with sqlx's own code. So NULLs, Scanners, db tags and errors about a dest work as in sqlx, and a caller may change
// the values that it gets. In memory the rows are encoded, so a result takes about as many bytes there as its text.
// LocalBytes, by default 64 MiB, bounds the sum.
//
// # Limits
//
// The key of a result consists of the query's text and its arguments, and nothing else. Do not read a result through
// this package if the result depends on anything else. Examples are the current user or role (row-level security),
// session settings such as search_path or the time zone, the time, random numbers, and the transaction or its
// isolation.
//
// So a transaction must read through its own Tx, as with sqlx, and must not base a decision on a result of GetContext
// or SelectContext, which may be as old as TTL + StaleFor. Use [DB.DB] for reads that must not be cached. A text that
// may write, lock rows or change the session is refused before it runs: INSERT … RETURNING, SELECT … FOR UPDATE,
// nextval. Such a text would write only when nothing is cached. The check reads the text, not the functions that the
// text calls, see Config.ReadOnly.
//
// # Writes
//
// [DB.InTx] runs a transaction, and removes the results that the transaction has touched once it is committed. Results
// are named by tags, see [Statement]. [DB.InvalidateTag] and [DB.Invalidate] remove results after a write of another
// kind. Call them after the transaction is committed, not inside the transaction. A load that begins after Invalidate
// but before the commit would read the old rows and cache them.
package sqlxrefill

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"

	"github.com/jmoiron/sqlx"

	"github.com/refill-go/refill"
)

// Config configures a [DB]. Name is required, and so is TTL, a field of the embedded refill.Config.
type Config struct {
	// Config configures the Loader of the DB: how long results live, and which store the fleet shares. Codec must be
	// nil, see WrapCodec. An absent row (sql.ErrNoRows of GetContext) lives for NotFoundTTL. An empty result of
	// SelectContext is a result, and lives for TTL.
	refill.Config

	// Name precedes the keys in the shared store and appears in events. Name is required. Two databases that share a
	// store need two names, because the key of a query does not depend on the database. If another database of this
	// process uses the name in the same store, New returns an error. Letters, digits, '.', '_' and '-', at most 64
	// bytes.
	Name string

	// SameData says that this database has the same data as all other databases of this Name and store. Set SameData,
	// for instance, if two *sqlx.DB of one process are connected to the same server, or to a server and its replica.
	// Then New accepts the Name.
	SameData bool

	// ReadOnly runs each query in a READ ONLY transaction, so that the database refuses a function that writes, too. It
	// costs two more exchanges with the database per query. The driver must support such transactions. Default: the
	// text of a query is checked, but not the functions that it calls.
	ReadOnly bool

	// Statements are queries with a name and settings of their own. Default: none. A query without a Statement has the
	// settings of this Config.
	Statements []Statement

	// MaxBytes limits the results that are stored, in encoded bytes (about the size of their text). A larger result
	// goes only to the callers in this process that already wait for it. Later calls query the database again. See
	// refill.Fill.NoStore. Default 1 MiB. Negative: no limit.
	MaxBytes int

	// WrapCodec, if not nil, gets the codec of results and returns the codec to use, for instance one that compresses.
	// After a change of the codec, all results in the shared store are misses. MaxBytes counts bytes before
	// compression.
	//
	//	WrapCodec: func(c refill.Codec) refill.Codec { return codec.Compress(c, 4<<10) }
	WrapCodec func(refill.Codec) refill.Codec
}

const defaultMaxBytes = 1 << 20

// DB takes the place of an *sqlx.DB. Get, Select, GetContext and SelectContext read through a cache. All other methods
// of sqlx.DB and sql.DB go to the database as they are: ExecContext, NamedExec, Queryx, PreparexContext, BeginTxx,
// Rebind and so on. So nothing is cached in a transaction, on a connection of Connx, in a prepared statement, or in the
// copy that Unsafe returns. A repository over an interface of its own, or over sqlx.ExtContext, takes either. The
// package functions sqlx.NamedExecContext and sqlx.NamedQueryContext do not see the Mapper of a DB, but the methods of
// these names do.
//
// Two methods differ: Close ends the cache and leaves the database open, and DB returns the database without the cache.
// The methods of a DB may be called from any goroutine.
type DB struct {
	*source // without an exported field, so that DB can be a method
	loader  *refill.Loader[*result]
	replay  *replayer
	most    int // MaxBytes; negative = no limit
	texts   texts

	statements statements // by text; read-only

	readOnly bool
	pool     *pool
	number   atomic.Uint64 // of the load that began last
	misfits  misfits
	closed   atomic.Bool

	leaveName func() // gives the name back; called by Close, a second call has no effect
}

// source is the database without the cache.
type source = sqlx.DB

// New returns a DB that caches what it reads from db. New copies db's Mapper and Unsafe setting, so change these
// before the call, or call MapperFunc of the DB. The caller still owns db, and may use and close db. An error wraps
// refill.ErrInvalid and names the invalid input. Call [DB.Close] when the DB is no longer needed.
func New(db *sqlx.DB, cfg Config) (*DB, error) {
	if db == nil || db.DB == nil {
		return nil, invalid("db", "nil")
	}
	if cfg.BulkWindow != 0 {
		return nil, invalid("BulkWindow", "has no effect here: each query has its own text")
	}
	if cfg.Codec != nil {
		return nil, invalid("Codec", "must be nil: results have an encoding of their own")
	}
	if cfg.Name == "" {
		return nil, invalid("Name", "required")
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = defaultMaxBytes
	}
	cfg.Codec = codec{}
	if cfg.WrapCodec != nil {
		cfg.Codec = cfg.WrapCodec(cfg.Codec)
	}
	if cfg.Codec == nil {
		return nil, invalid("WrapCodec", "returned nil")
	}
	d := &DB{source: db, most: cfg.MaxBytes, readOnly: cfg.ReadOnly, pool: poolOf(db.DB, cfg.ErrorTTL)}
	d.texts.dialect = dialectOf(db.DriverName())
	var err error
	if d.statements, err = newStatements(cfg.Statements, d.texts.check); err != nil {
		return nil, err
	}
	leave, err := names.enter(db.DB, cfg)
	if err != nil {
		return nil, err
	}
	if d.loader, err = refill.New[*result](cfg.Name, nil, cfg.Config); err != nil {
		leave()
		return nil, err
	}
	d.replay, d.leaveName = newReplayer(db), leave
	return d, nil
}

// DB returns the database without the cache, for writes, transactions and reads that must be up to date.
func (db *DB) DB() *sqlx.DB { return db.source }

// MapperFunc is sqlx's MapperFunc, for the cached and the other reads. Call it before the first read.
func (db *DB) MapperFunc(mf func(string) string) {
	db.source.MapperFunc(mf)
	db.replay.db.Mapper = db.source.Mapper
}

// Get is GetContext with context.Background().
func (db *DB) Get(dest any, query string, args ...any) error {
	return db.GetContext(context.Background(), dest, query, args...)
}

// Select is SelectContext with context.Background().
func (db *DB) Select(dest any, query string, args ...any) error {
	return db.SelectContext(context.Background(), dest, query, args...)
}

// GetContext is sqlx's GetContext with a cache: it scans the first row of the query into dest. If there is no row,
// GetContext returns sql.ErrNoRows and leaves dest as it was, even if dest does not fit the columns.
//
// The query runs for all callers that want its result. So the query is cancelled at LoadTimeout, or when the
// contexts of all these callers have ended. This call returns when its own context ends.
//
// When the query fails, the error is a *refill.LoadError. If the driver says which kind of error the database has
// reported, the LoadError wraps a [*QueryError], on all nodes. Callers in this process find the driver's own error in
// the LoadError with errors.Is and errors.As. Callers on other nodes get only the text of that error. An error that
// wraps refill.ErrInvalid names the query, argument or column that is at fault. Such a call fails at every retry.
// ErrClosed and ErrOverloaded are as in package refill.
//
// If a cached result does not fit dest, the query runs once more, because the table may have changed since the result
// was read. Then the new result replaces the old result on all nodes.
//
// The call copies its arguments at once, with all that they refer to, and the driver gets these copies, in their
// original types. So every type that the driver knows means the same as in sqlx: slices, maps, structs, Valuers. The
// values and the types of the arguments are part of the key. Some arguments cannot be part of a key: channels,
// functions, sql.Out, and options of pgx such as QueryExecMode and NamedArgs. With such an argument the call fails
// before the query runs, and the error says which argument it is.
func (db *DB) GetContext(ctx context.Context, dest any, query string, args ...any) error {
	if db.statements.uncached(query) {
		return db.source.GetContext(ctx, dest, query, args...)
	}
	if !pointsTo(dest, reflect.Invalid) {
		return db.orClosed(db.replay.get(dest, new(result))) // get returns sqlx's own error about dest, without a load
	}
	err := db.read(ctx, firstRow, dest, query, args)
	if errors.Is(err, refill.ErrNotFound) {
		return sql.ErrNoRows
	}
	return err
}

// SelectContext is sqlx's SelectContext with a cache: it scans all rows of the query into the slice that dest points
// to. Contexts, errors and arguments are as in [DB.GetContext], except that an empty result is no error.
func (db *DB) SelectContext(ctx context.Context, dest any, query string, args ...any) error {
	if db.statements.uncached(query) {
		return db.source.SelectContext(ctx, dest, query, args...)
	}
	if !pointsTo(dest, reflect.Slice) {
		return db.orClosed(db.replay.all(dest, new(result))) // all returns sqlx's own error about dest, without a load
	}
	return db.read(ctx, allRows, dest, query, args)
}

// Invalidate removes the results of this query with these arguments, for both GetContext and SelectContext, on all
// nodes. When Invalidate has returned nil, no result of a query that began before the call is served as fresh. Pass the
// same text as the reads, and arguments of the same types and values. int and int64 count as one type, and a pointer to
// a basic type counts as the value. But int32(5), "5" and a type of your own are other arguments than 5. The same
// moment in two time zones counts as two values.
//
// Call Invalidate after the transaction that changed the rows is committed. An error means that the shared store was
// not reached. See refill.Loader.Invalidate for what happens then.
func (db *DB) Invalidate(ctx context.Context, query string, args ...any) error {
	return db.forBoth(ctx, db.loader.Invalidate, query, args)
}

// Expire makes stale the results that Invalidate would remove. Within StaleFor these results are still served, while
// one node runs the query again.
func (db *DB) Expire(ctx context.Context, query string, args ...any) error {
	return db.forBoth(ctx, db.loader.Expire, query, args)
}

// forBoth calls do with the two keys of a query: the key for GetContext and the key for SelectContext.
func (db *DB) forBoth(
	ctx context.Context, do func(context.Context, ...string) error, query string, args []any,
) error {
	q, err := db.request(query, args)
	if err != nil {
		return err
	}
	return do(ctx, q.key(firstRow), q.key(allRows))
}

// InvalidateTag removes all results that have one of the tags, on all nodes, as Invalidate does for one result. Results
// have Config.Tags and the tags of their Statement. Absent rows have these tags as well. Call it after the commit of a
// transaction that has changed what a tag stands for, for instance a table or a row.
func (db *DB) InvalidateTag(ctx context.Context, tags ...string) error {
	return db.loader.InvalidateTag(ctx, tags...)
}

// ExpireTag makes stale the results that InvalidateTag would remove.
func (db *DB) ExpireTag(ctx context.Context, tags ...string) error {
	return db.loader.ExpireTag(ctx, tags...)
}

// Close ends the cache: later calls return refill.ErrClosed. Close waits for queries that still run for callers. See
// refill.Loader.Close for the longest wait and for the error. The database stays open.
func (db *DB) Close() error {
	err := db.loader.Close()
	db.closed.Store(true)
	db.leaveName()
	return errors.Join(err, db.replay.close())
}

// orClosed returns ErrClosed in place of the error of a scan if the DB was closed. Close may have come before the call,
// or between the load and the scan of the call.
func (db *DB) orClosed(err error) error {
	if err != nil && db.closed.Load() {
		return refill.ErrClosed
	}
	return err
}

// invalid returns an error about an input; what names the input.
func invalid(what, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", refill.ErrInvalid, what, fmt.Sprintf(format, args...))
}
