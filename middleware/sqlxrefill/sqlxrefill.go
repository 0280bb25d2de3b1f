// Package sqlxrefill is a caching form of the reads of github.com/jmoiron/sqlx: [DB.GetContext] and [DB.SelectContext]
// with sqlx's own signatures, on top of package refill. When a hot query's result expires, one caller of one node runs
// the query again; everybody else gets the stale result or waits for that one.
//
//	users, err := sqlxrefill.New(db, sqlxrefill.Config{
//		Name:   "users",
//		Config: refill.Config{TTL: time.Minute, Shared: shared},
//	})
//	var u User
//	err = users.GetContext(ctx, &u, `SELECT * FROM users WHERE id = $1`, 42)
//
// What is cached is the result as the driver returned it, not the struct. Every call scans it anew with sqlx itself, so
// that NULLs, Scanners, db tags, and errors about a dest are sqlx's own, and what a caller gets is its own to change.
//
// # What to mind
//
// The key of a result is the query's text and its arguments, and nothing else. A result that depends on more than them
// must not be read through this package: on the current user or role (row-level security), on session settings such
// as search_path or the time zone, on the time, on random numbers, on the transaction or its isolation.
//
// So never read through it inside a transaction, and never what a transaction will decide upon: a result is up to TTL
// old, and with StaleFor as old as both together. Use [DB.DB] for transactions, writes and all other reads. A statement
// that writes and returns rows (INSERT … RETURNING) would write only when nothing is cached.
//
// Call [DB.Invalidate] after the transaction is committed, not inside it: a load that begins between the two would read
// the old rows and keep them.
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

// Config is how a [DB] caches. TTL, of the embedded refill.Config, is required.
type Config struct {
	// Config is that of the Loader underneath: how long results live, and which store the fleet shares. Codec must be
	// nil, see WrapCodec. An absent row (sql.ErrNoRows of GetContext) lives for NotFoundTTL; an empty result of SelectContext is a
	// result, and lives for TTL.
	refill.Config

	// Name stands in front of the keys in the shared store and in events. Default "sql". Two databases that share
	// a store need two names: the same query has the same key in both. Letters, digits, '.', '_' and '-', at most 64 bytes.
	Name string

	// MaxBytes bounds the results that are kept, in encoded bytes (about the size of their text). A larger one
	// goes to the callers that wait for it in this process and is kept nowhere, so that each further call queries the
	// database, one at a time in the fleet. Default 1 MiB. Negative: no bound.
	MaxBytes int

	// WrapCodec, if it is not nil, is given the encoding of results and returns the one to use: to compress what stands in
	// the shared store. Another one makes misses of what is stored, as any change of a codec does. MaxBytes is of what is
	// compressed.
	//
	//	WrapCodec: func(c refill.Codec) refill.Codec { return codec.Compress(c, 4<<10) }
	WrapCodec func(refill.Codec) refill.Codec
}

const (
	defaultName     = "sql"
	defaultMaxBytes = 1 << 20
)

// DB reads through a cache. Its methods may be called from any goroutine.
type DB struct {
	source *sqlx.DB
	loader *refill.Loader[*result]
	replay *replayer
	most   int // MaxBytes; negative = no bound
	closed atomic.Bool
}

// New returns a DB that caches what it reads from db. It copies db's Mapper and its Unsafe setting: make changes to them
// before. db stays the caller's, to use and to close. An error wraps refill.ErrInvalid and names what is wrong. End
// it with [DB.Close].
func New(db *sqlx.DB, cfg Config) (*DB, error) {
	if db == nil || db.DB == nil {
		return nil, invalid("db", "nil")
	}
	if cfg.Codec != nil {
		return nil, invalid("Codec", "must be nil, results have an encoding of their own")
	}
	if cfg.Name == "" {
		cfg.Name = defaultName
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
	loader, err := refill.New[*result](cfg.Name, nil, cfg.Config)
	if err != nil {
		return nil, err
	}
	return &DB{source: db, loader: loader, replay: newReplayer(db), most: cfg.MaxBytes}, nil
}

// DB returns the database without the cache: for writes, transactions, and whatever must be up to date.
func (db *DB) DB() *sqlx.DB { return db.source }

// GetContext is sqlx's GetContext out of the cache: it scans the first row of the query into dest. Where there is none it
// returns sql.ErrNoRows and leaves dest as it was, whether it would fit or not.
//
// The query runs for all who want its result, so it ends with the last of their contexts, not with the first, and at
// LoadTimeout; this call ends with its own. When the query fails, the error is a *refill.LoadError. Those who waited for the
// query in this process find the driver's own error in it with errors.Is and errors.As; on other nodes, and for all further
// calls until ErrorTTL is over, its text is left. An error that wraps refill.ErrInvalid names the query, argument or
// column that is at fault: trying again does not help. ErrClosed and ErrOverloaded are as in package refill.
//
// Arguments are made into driver values as database/sql does by default, here and now: the driver gets what the key was
// made of. So a type that only the driver knows is an error, or reaches it as the basic type that it is made of.
func (db *DB) GetContext(ctx context.Context, dest any, query string, args ...any) error {
	if !pointsTo(dest, reflect.Invalid) {
		return db.orClosed(db.replay.get(dest, new(result))) // for sqlx's own error, before there is a load
	}
	r, err := db.fetch(ctx, firstRow, query, args)
	if errors.Is(err, refill.ErrNotFound) {
		return sql.ErrNoRows
	}
	if err != nil {
		return err
	}
	return db.orClosed(db.replay.get(dest, r))
}

// SelectContext is sqlx's SelectContext out of the cache: it scans all rows of the query into the slice that dest points
// to. What is said of [DB.GetContext] holds for it, too; but no rows are no error.
func (db *DB) SelectContext(ctx context.Context, dest any, query string, args ...any) error {
	if !pointsTo(dest, reflect.Slice) {
		return db.orClosed(db.replay.all(dest, new(result))) // as above
	}
	r, err := db.fetch(ctx, allRows, query, args)
	if err != nil {
		return err
	}
	return db.orClosed(db.replay.all(dest, r))
}

// Invalidate drops the results of this query with these arguments, of GetContext and SelectContext both, on all nodes. When
// it has returned, no query that began before is served as fresh. Give it the very text and values that the reads have:
// 5 and int64(5) are the same, 5 and "5" are not, nor are the same moments in two time zones.
//
// Call it after the transaction that changed the rows is committed. An error means that the shared store was not reached:
// see refill.Loader.Invalidate for what happens then.
func (db *DB) Invalidate(ctx context.Context, query string, args ...any) error {
	return db.void(ctx, db.loader.Invalidate, query, args)
}

// Expire marks the same results as Invalidate as old: within StaleFor they are still served while one node runs the query
// again.
func (db *DB) Expire(ctx context.Context, query string, args ...any) error {
	return db.void(ctx, db.loader.Expire, query, args)
}

func (db *DB) void(ctx context.Context, how func(context.Context, ...string) error, query string, args []any) error {
	q, err := newRequest(query, args)
	if err != nil {
		return err
	}
	return how(ctx, q.key(firstRow), q.key(allRows))
}

// Close ends the cache: later calls return refill.ErrClosed. It waits for queries that callers wait for; see
// refill.Loader.Close for how long, and for the error. The database stays open.
func (db *DB) Close() error {
	err := db.loader.Close()
	db.closed.Store(true)
	return errors.Join(err, db.replay.close())
}

// orClosed is for a call that scans when Close came before it, or between its load and its scan.
func (db *DB) orClosed(err error) error {
	if err != nil && db.closed.Load() {
		return refill.ErrClosed
	}
	return err
}

// fetch returns the result of a query out of the cache. It is shared, and read-only.
func (db *DB) fetch(ctx context.Context, rows span, query string, args []any) (*result, error) {
	q, err := newRequest(query, args)
	if err != nil {
		return nil, err
	}
	return db.loader.GetWith(ctx, q.key(rows), func(ctx context.Context, _ string) (*result, error) {
		return db.load(ctx, rows, q)
	})
}

// load runs the query. It may do so after its caller has gone, and for others: q is a copy of all that the caller gave.
func (db *DB) load(ctx context.Context, rows span, q *request) (*result, error) {
	found, err := db.source.QueryContext(ctx, q.query, q.args...)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	r, size, err := readResult(found, rows)
	if err != nil {
		return nil, err
	}
	if rows == firstRow {
		if err := found.Close(); err != nil {
			return nil, err // as sqlx: what comes after the row can fail, too
		}
		if len(r.values) == 0 {
			return nil, errNoRow
		}
	}
	if db.most >= 0 && size > db.most {
		refill.FillFrom(ctx).NoStore()
	}
	return r, nil
}

// errNoRow makes refill keep the absence.
var errNoRow = fmt.Errorf("%w: the query returned no row", refill.ErrNotFound)

// pointsTo reports whether dest is a pointer that is not nil, to something of that kind (Invalid = of any).
func pointsTo(dest any, kind reflect.Kind) bool {
	v := reflect.ValueOf(dest)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		return false
	}
	return kind == reflect.Invalid || v.Type().Elem().Kind() == kind
}

// invalid makes an error about an input; what names it.
func invalid(what, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", refill.ErrInvalid, what, fmt.Sprintf(format, args...))
}
