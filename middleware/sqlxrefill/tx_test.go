package sqlxrefill_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/middleware/sqlxrefill"

	storedriver "github.com/refill-go/refill/driver"
)

// tagStore counts the calls that invalidate tags, and can fail them.
type tagStore struct {
	storedriver.Store
	calls atomic.Int64
	fails atomic.Bool
}

func (s *tagStore) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	s.calls.Add(1)
	if s.fails.Load() {
		return errors.New("store: away")
	}
	if err := ctx.Err(); err != nil { // as over a network
		return err
	}
	return s.Store.InvalidateTags(ctx, by, keep, tags...)
}

// shop is two nodes over one database, whose results have the tags of their arguments.
func shop(t *testing.T) (s *source, store *tagStore, one, other *sqlxrefill.DB) {
	s, store = counting(), &tagStore{Store: memory.New()}
	cfg := sqlxrefill.Config{
		Config: refill.Config{TTL: time.Hour, Shared: store},
		Statements: []sqlxrefill.Statement{{Name: "row", Query: rowByID, Tags: func(args []any) []string {
			return []string{fmt.Sprint("rows/", args[0])}
		}}},
	}
	return s, store, cached(t, s, cfg), cached(t, s, cfg)
}

// After the commit, no node may serve what the transaction has touched, and all else must stay. Any number of tags must
// cost one call of the store.
func TestInTxRemovesWhatItTouched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, store, one, other := shop(t)
		read := func() (got []int) {
			for id := range 3 {
				got = append(got, mustGet[int](t, one, rowByID, id), mustGet[int](t, other, rowByID, id))
			}
			return got
		}
		before := read()
		err := one.InTx(t.Context(), nil, func(tx *sqlxrefill.Tx) error {
			tx.Touch("rows/1")
			for i := range 1000 {
				tx.Touch(fmt.Sprint("rows/", i+100), "rows/1")
			}
			if got := read(); !slices.Equal(got, before) || store.calls.Load() != 0 {
				t.Errorf("before the commit: %v, after %d voidings", got, store.calls.Load())
			}
			var n int
			if err := tx.Get(&n, rowByID, 0); err != nil || n == before[0] {
				t.Errorf("a read in the transaction is cached: %d, %v", n, err)
			}
			_, err := tx.Exec("UPDATE")
			return err
		})
		synctest.Wait()
		if got := read(); err != nil || !slices.Equal(got, []int{1, 1, 5, 5, 3, 3}) {
			t.Errorf("got %v, %v", got, err)
		}
		if store.calls.Load() != 1 || s.inTx != 0 || !slices.Equal(s.ended, []string{"COMMIT"}) {
			t.Errorf("%d calls, %d open transactions, %v", store.calls.Load(), s.inTx, s.ended)
		}
	})
}

// A query that began before the commit must not be kept.
func TestInTxDuringALoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _, one, other := shop(t)
		s.takes = time.Second
		go func() { mustGet[int](t, other, rowByID, 1) }()
		synctest.Wait()
		if err := one.InTx(t.Context(), nil, func(tx *sqlxrefill.Tx) error { tx.Touch("rows/1"); return nil }); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		if got := mustGet[int](t, other, rowByID, 1); got != 2 {
			t.Errorf("got %d, which was read before the commit", got)
		}
	})
}

// A transaction that is rolled back must remove nothing and must not call the store.
func TestInTxRollsBack(t *testing.T) {
	failure := errors.New("no")
	ended, cancel := context.WithCancel(context.Background())
	for name, c := range map[string]struct {
		ctx  context.Context
		end  func(*sqlxrefill.Tx) error
		want error
	}{
		"error":      {context.Background(), func(*sqlxrefill.Tx) error { return failure }, failure},
		"panic":      {context.Background(), func(*sqlxrefill.Tx) error { panic(failure) }, failure},
		"end of ctx": {ended, func(*sqlxrefill.Tx) error { cancel(); return nil }, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			s, store, one, other := shop(t)
			mustGet[int](t, other, rowByID, 1)
			err := func() (err error) {
				defer func() {
					if p := recover(); p != nil {
						err = p.(error)
					}
				}()
				return one.InTx(c.ctx, nil, func(tx *sqlxrefill.Tx) error { tx.Touch("rows/1"); return c.end(tx) })
			}()
			if got := mustGet[int](t, other, rowByID, 1); !errors.Is(err, c.want) || got != 1 || store.calls.Load() != 0 ||
				!slices.Equal(s.endings(), []string{"ROLLBACK"}) {
				t.Errorf("%v, got %d, %d calls, %v", err, got, store.calls.Load(), s.endings())
			}
		})
	}
}

// What was touched within a savepoint that is rolled back must stay. All else must be removed.
func TestSavepoint(t *testing.T) {
	s, _, one, _ := shop(t)
	for id := range 4 {
		mustGet[int](t, one, rowByID, id)
	}
	failure := errors.New("no")
	err := one.InTx(t.Context(), nil, func(tx *sqlxrefill.Tx) error {
		tx.Touch("rows/0")
		if err := tx.Savepoint(t.Context(), func() error { tx.Touch("rows/1"); return failure }); !errors.Is(err, failure) {
			t.Errorf("got %v", err)
		}
		return tx.Savepoint(t.Context(), func() error { tx.Touch("rows/2"); return nil })
	})
	var got []int
	for id := range 4 {
		got = append(got, mustGet[int](t, one, rowByID, id))
	}
	if err != nil || !slices.Equal(got, []int{5, 2, 6, 4}) {
		t.Errorf("got %v, %v", got, err)
	}
	want := []string{
		"SAVEPOINT refill_1", "ROLLBACK TO SAVEPOINT refill_1", "SAVEPOINT refill_2", "RELEASE SAVEPOINT refill_2",
	}
	if !slices.Equal(s.executed, want) {
		t.Errorf("executed %q", s.executed)
	}
}

// ctx ends during COMMIT, and the connection breaks, so the answer to COMMIT is lost. The transaction may be committed,
// so InTx must still remove the cached results with the tags that were touched.
func TestInTxWithAnUnknownCommit(t *testing.T) {
	s, _, one, other := shop(t)
	mustGet[int](t, other, rowByID, 1)
	ctx, cancel := context.WithCancel(t.Context())
	s.commit = func() error { cancel(); return driver.ErrBadConn }
	err := one.InTx(ctx, nil, func(tx *sqlxrefill.Tx) error { tx.Touch("rows/1"); return nil })
	var late *sqlxrefill.InvalidateError
	if !errors.Is(err, driver.ErrBadConn) || errors.As(err, &late) {
		t.Errorf("got %v", err)
	}
	if got := mustGet[int](t, one, rowByID, 1); got != 2 {
		t.Errorf("got %d, which was read before the commit", got)
	}
}

// The store is away after the commit. The error must say that the transaction is committed, and the results must be
// removed when the store is back.
func TestInTxWithoutTheStore(t *testing.T) {
	s, store, one, other := shop(t)
	mustGet[int](t, other, rowByID, 1)
	store.fails.Store(true)
	err := one.InTx(t.Context(), nil, func(tx *sqlxrefill.Tx) error { tx.Touch("rows/1"); return nil })
	var late *sqlxrefill.InvalidateError
	if !errors.As(err, &late) || !slices.Equal(late.Tags, []string{"rows/1"}) || !slices.Equal(s.ended,
		[]string{"COMMIT"}) {
		t.Errorf("%v, %v", err, s.ended)
	}
	store.fails.Store(false)
	if got := mustGet[int](t, one, rowByID, 1); got != 2 {
		t.Errorf("got %d, which was read before the commit", got)
	}
}

// InTx ends the transaction. The function must not be able to.
func TestTxDoesNotEndItself(t *testing.T) {
	s, _, one, _ := shop(t)
	err := one.InTx(t.Context(), nil, func(tx *sqlxrefill.Tx) error {
		if tx.Commit() == nil || tx.Rollback() == nil {
			t.Error("no error")
		}
		return nil
	})
	if err != nil || !slices.Equal(s.ended, []string{"COMMIT"}) {
		t.Errorf("%v, %v", err, s.ended)
	}
}
