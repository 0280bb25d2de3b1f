package sqlxrefill

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"

	"github.com/jmoiron/sqlx"
)

// Tx is a transaction of [DB.InTx]. It has the methods of *sqlx.Tx: nothing that it reads comes from the cache. It must
// not be used after the function of InTx has returned.
type Tx struct {
	*sqlx.Tx
	tags  []string
	saves int // savepoints that were set
}

// Touch names tags that stand for what the transaction changes. When the transaction is committed, InTx removes all
// results with these tags. Touch may be called before or after the statement that changes the data.
func (tx *Tx) Touch(tags ...string) { tx.tags = append(tx.tags, tags...) }

// Savepoint runs fn within a savepoint. If fn returns an error or panics, the statements of fn are rolled back, the
// tags that fn has named are forgotten, and the transaction can go on. Savepoint returns the error of fn.
func (tx *Tx) Savepoint(ctx context.Context, fn func() error) (err error) {
	tx.saves++
	name, tags, returned := fmt.Sprintf("refill_%d", tx.saves), len(tx.tags), false
	if _, err := tx.ExecContext(ctx, "SAVEPOINT "+name); err != nil {
		return err
	}
	defer func() {
		if returned && err == nil {
			return
		}
		_, undo := tx.ExecContext(context.WithoutCancel(ctx), "ROLLBACK TO SAVEPOINT "+name)
		if undo == nil {
			tx.tags = tx.tags[:tags] // otherwise the transaction is broken, or its statements may stay
		}
		err = errors.Join(err, undo)
	}()
	if err = fn(); err == nil {
		_, err = tx.ExecContext(ctx, "RELEASE SAVEPOINT "+name)
	}
	returned = true
	return err
}

var errOwnEnd = errors.New("sqlxrefill: InTx ends the transaction: return nil to commit, and an error to roll back")

// Commit returns an error, because InTx commits.
func (tx *Tx) Commit() error { return errOwnEnd }

// Rollback returns an error, because InTx rolls back if its function returns an error.
func (tx *Tx) Rollback() error { return errOwnEnd }

// InvalidateError says that a transaction of InTx is committed, but that its results could not be removed from the
// store. Do not repeat the transaction, and do not report it as failed. The removal is tried again in the background,
// and before each read of such a result on this node. Other nodes may serve old results until the removal succeeds, for
// at most TTL + StaleFor.
type InvalidateError struct {
	Tags []string
	Err  error // of refill.Loader.InvalidateTag
}

// Error says that the transaction is committed, and why the results could not be removed.
func (e *InvalidateError) Error() string {
	return fmt.Sprintf("sqlxrefill: the transaction is committed, but %d tags could not be invalidated: %v", len(e.Tags),
		e.Err)
}

// Unwrap returns Err.
func (e *InvalidateError) Unwrap() error { return e.Err }

// InTx runs fn in a transaction, and commits it if fn returns nil. After the commit, InTx removes all results with the
// tags that fn has named by [Tx.Touch], on all nodes, also results of queries that are running, in one exchange with
// the store. If fn returns an error or panics, the transaction is rolled back, nothing is removed, and InTx returns the
// error.
//
//	err := db.InTx(ctx, nil, func(tx *sqlxrefill.Tx) error {
//		tx.Touch("users", "users/42")
//		_, err := tx.ExecContext(ctx, `UPDATE users SET name = $1 WHERE id = 42`, name)
//		return err
//	})
//	var late *sqlxrefill.InvalidateError
//	if errors.As(err, &late) { // committed, but old results may be served for a while
//		log.Print(late)
//		err = nil
//	}
//
// InTx removes the results even if ctx ends after the commit. If the answer of the database to COMMIT is lost, InTx
// returns the error of COMMIT and removes the results as well, because the transaction may be committed. If this
// process dies between the commit and the removal, the results stay for the rest of their lives.
func (db *DB) InTx(ctx context.Context, opts *sql.TxOptions, fn func(tx *Tx) error) error {
	inner, err := db.source.BeginTxx(ctx, opts)
	if err != nil {
		return err
	}
	tx := &Tx{Tx: inner}
	defer func() { _ = inner.Rollback() }() // has no effect after a commit
	if err := fn(tx); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	err = inner.Commit()
	if errors.Is(err, sql.ErrTxDone) { // the end of ctx has rolled the transaction back
		return err
	}
	return errors.Join(err, db.removeTouched(context.WithoutCancel(ctx), tx.tags))
}

func (db *DB) removeTouched(ctx context.Context, tags []string) error {
	slices.Sort(tags)
	tags = slices.Compact(tags)
	if err := db.loader.InvalidateTag(ctx, tags...); err != nil {
		return &InvalidateError{tags, err}
	}
	return nil
}
