package sqlxrefill

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"

	"github.com/jmoiron/sqlx"
)

// replayer scans cached results with the code of database/sql and sqlx. It is a database without a server: each of
// its queries returns the result that the ctx carries. Its connections exist only because database/sql needs
// connections.
type replayer struct {
	db sqlx.DB
}

// maxIdle is how many connections are kept for the next replays. A kept connection takes some hundred bytes. A new
// connection costs some hundred nanoseconds.
const maxIdle = 64

// newReplayer returns a replayer that scans with the settings of the database like. It copies the whole sqlx.DB,
// because the Unsafe setting has no accessor. The copy also has the Mapper and the driver's name.
func newReplayer(like *sqlx.DB) *replayer {
	r := &replayer{db: *like}
	r.db.DB = sql.OpenDB(connector{})
	r.db.SetMaxIdleConns(maxIdle)
	return r
}

func (r *replayer) scan(which span, dest any, res *result) error {
	if which == firstRow {
		return r.get(dest, res)
	}
	return r.all(dest, res)
}

func (r *replayer) get(dest any, res *result) error {
	return r.db.GetContext(carry(res), dest, "")
}

func (r *replayer) all(dest any, res *result) error {
	return r.db.SelectContext(carry(res), dest, "")
}

func (r *replayer) close() error { return r.db.Close() }

type resultKey struct{}

// carry returns a ctx that holds res and that cannot end. For a ctx that can end, database/sql would start a goroutine
// per query.
func carry(res *result) context.Context {
	return context.WithValue(context.Background(), resultKey{}, res)
}

var errReplay = errors.New("sqlxrefill: only cached results can be read here")

type connector struct{}

func (connector) Connect(context.Context) (driver.Conn, error) { return conn{}, nil }
func (connector) Driver() driver.Driver                        { return connector{} }
func (connector) Open(string) (driver.Conn, error)             { return conn{}, nil }

type conn struct{}

func (conn) Prepare(string) (driver.Stmt, error) { return nil, errReplay }
func (conn) Begin() (driver.Tx, error)           { return nil, errReplay }
func (conn) Close() error                        { return nil }

func (conn) QueryContext(ctx context.Context, _ string, _ []driver.NamedValue) (driver.Rows, error) {
	res, ok := ctx.Value(resultKey{}).(*result)
	if !ok {
		return nil, errReplay
	}
	return &rows{columns: res.columns, values: res.values(), left: res.rows}, nil
}

// rows are the rows of one replay.
type rows struct {
	columns []string
	values  cursor // at the first value of the row that Next returns
	left    int    // rows that Next has not returned
}

func (r *rows) Columns() []string { return r.columns }
func (r *rows) Close() error      { return nil }

// Next decodes one row. No value shares memory with the result, because other callers get the same result. A Scanner
// must not keep or change the slice that it gets, but some Scanners do so.
func (r *rows) Next(dest []driver.Value) error {
	if r.left == 0 {
		return io.EOF
	}
	for i := range dest {
		dest[i] = r.values.value()
	}
	r.left--
	return nil
}
