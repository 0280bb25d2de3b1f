package sqlxrefill_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/middleware/sqlxrefill"
)

var oneRow = &table{columns: []string{"a", "b"}, rows: [][]driver.Value{{int64(1), "one"}, {int64(2), "two"}}}

func TestOneQueryPerExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := always(oneRow)
		s.takes = 100 * time.Millisecond
		db := cached(t, s, sqlxrefill.Config{})
		for round := 1; round <= 3; round++ {
			var wg sync.WaitGroup
			for range 100 {
				wg.Go(func() {
					if got := mustGet[row](t, db, "SELECT q", 1); got != (row{1, "one"}) {
						t.Errorf("got %v", got)
					}
				})
				wg.Go(func() {
					if got := mustSelect[row](t, db, "SELECT q", 1); !slices.Equal(got, []row{{1, "one"}, {2, "two"}}) {
						t.Errorf("got %v", got)
					}
				})
			}
			wg.Wait()
			if s.count() != 2*round { // one for Get, one for Select
				t.Fatalf("round %d: %d queries", round, s.count())
			}
			time.Sleep(time.Minute)
		}
	})
}

func TestStaleIsServedWhileOneQueryRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := int64(0)
		s := &source{takes: time.Second}
		s.answer = func(string, []driver.NamedValue) (*table, error) {
			n++
			return &table{columns: []string{"n"}, rows: [][]driver.Value{{n}}}, nil
		}
		db := cached(t, s, sqlxrefill.Config{Config: refill.Config{TTL: time.Minute, Jitter: -1, StaleFor: time.Hour}})
		mustGet[int](t, db, "SELECT q")
		time.Sleep(2 * time.Minute)
		began := time.Now()
		for range 100 {
			if got := mustGet[int](t, db, "SELECT q"); got != 1 {
				t.Fatalf("got %d", got)
			}
		}
		if time.Since(began) != 0 {
			t.Errorf("a stale result took %v", time.Since(began))
		}
		time.Sleep(2 * time.Second)
		if got := mustGet[int](t, db, "SELECT q"); got != 2 || s.count() != 2 {
			t.Errorf("got %d after %d queries", got, s.count())
		}
	})
}

func TestAbsence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tab := &table{columns: []string{"a"}}
		s := &source{answer: func(string, []driver.NamedValue) (*table, error) { return tab, nil }}
		shared := memory.New()
		cfg := sqlxrefill.Config{Config: refill.Config{
			TTL: time.Minute, Jitter: -1, NotFoundTTL: 5 * time.Second, Shared: shared,
		}}
		db, other := cached(t, s, cfg), cached(t, s, cfg)
		for range 3 {
			for _, db := range []*sqlxrefill.DB{db, other} {
				n := 7
				if err := db.GetContext(t.Context(), &n, "SELECT q"); !errors.Is(err, sql.ErrNoRows) || n != 7 {
					t.Fatalf("%v, and dest is %d", err, n)
				}
			}
		}
		if s.count() != 1 {
			t.Errorf("%d queries", s.count())
		}
		tab = &table{columns: []string{"a"}, rows: [][]driver.Value{{int64(3)}}}
		time.Sleep(5*time.Second + 50*time.Millisecond) // longer than NotFoundTTL and a tick of the Loader's coarse clock
		if got := mustGet[int](t, db, "SELECT q"); got != 3 {
			t.Errorf("got %d", got)
		}
	})
}

type driverError struct{ code int }

func (e *driverError) Error() string { return fmt.Sprintf("fake: code %d", e.code) }

// A query fails in one of three ways: at once, after its rows, or when its rows are closed. All waiters must get the
// driver's error, and the database must not be queried again within ErrorTTL.
func TestErrorIsShared(t *testing.T) {
	failure := &driverError{23}
	one := [][]driver.Value{{int64(1)}}
	for name, answer := range map[string]func() (*table, error){
		"at once":    func() (*table, error) { return nil, failure },
		"after rows": func() (*table, error) { return &table{columns: []string{"a"}, err: failure, rows: nil}, nil },
		"at the closing": func() (*table, error) {
			return &table{columns: []string{"a"}, rows: one, closeErr: failure}, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &source{takes: time.Second, answer: func(string, []driver.NamedValue) (*table, error) { return answer() }}
				db := cached(t, s, sqlxrefill.Config{})
				var wg sync.WaitGroup
				for range 100 {
					wg.Go(func() {
						var n int
						err := db.GetContext(t.Context(), &n, "SELECT a")
						var load *refill.LoadError
						var own *driverError
						if !errors.As(err, &load) || !errors.As(err, &own) || own.code != 23 || !errors.Is(err, failure) {
							t.Errorf("got %v", err)
						}
					})
				}
				wg.Wait()
				var n int
				err := db.GetContext(t.Context(), &n, "SELECT a")
				if err == nil || !strings.Contains(err.Error(), failure.Error()) {
					t.Errorf("in the back-off: %v", err)
				}
				if s.count() != 1 {
					t.Errorf("%d queries", s.count())
				}
			})
		})
	}
}

func TestSelectFailsAfterRows(t *testing.T) {
	failure := &driverError{1}
	s := always(&table{columns: []string{"a"}, rows: [][]driver.Value{{int64(1)}}, err: failure})
	db := cached(t, s, sqlxrefill.Config{})
	got := []int{9}
	if err := db.SelectContext(t.Context(), &got, "SELECT q"); !errors.Is(err, failure) || !slices.Equal(got, []int{9}) {
		t.Errorf("%v, and dest is %v", err, got)
	}
	// GetContext reads only the first row, as sqlx does. So it does not see the error after the rows.
	if n := mustGet[int](t, db, "SELECT q"); n != 1 {
		t.Errorf("got %d", n)
	}
}

func TestInvalidateAndExpire(t *testing.T) {
	n := int64(0)
	s := &source{}
	s.answer = func(string, []driver.NamedValue) (*table, error) {
		n++
		return &table{columns: []string{"n"}, rows: [][]driver.Value{{n}}}, nil
	}
	db := cached(t, s, sqlxrefill.Config{})
	read := func(want ...int) {
		t.Helper()
		got := mustSelect[int](t, db, "SELECT q", 5)
		got = append(got, mustGet[int](t, db, "SELECT q", 5), mustGet[int](t, db, "SELECT q", 6))
		if !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	read(1, 2, 3)
	read(1, 2, 3)
	if err := db.Invalidate(t.Context(), "SELECT q", int64(5)); err != nil {
		t.Fatal(err)
	}
	read(4, 5, 3)
	if err := db.Expire(t.Context(), "SELECT q", 5); err != nil { // without StaleFor, Expire does what Invalidate does
		t.Fatal(err)
	}
	read(6, 7, 3)
	for _, err := range []error{db.Invalidate(t.Context(), ""), db.Expire(t.Context(), "SELECT q", make(chan int))} {
		if !errors.Is(err, refill.ErrInvalid) {
			t.Errorf("got %v", err)
		}
	}
}

// One node reads a result, and then another node reads the same result. The second node must get the same values
// with the same types, without a query.
func TestNodesShare(t *testing.T) {
	for name, tab := range tables() {
		s := always(tab)
		cfg := sqlxrefill.Config{Config: refill.Config{TTL: time.Minute, Shared: memory.New()}}
		one, other := cached(t, s, cfg), cached(t, s, cfg)
		var a, b []any // a scan into any keeps the type that the driver returned
		errA := one.SelectContext(t.Context(), &a, "SELECT q")
		errB := other.SelectContext(t.Context(), &b, "SELECT q")
		want := 1
		if errA != nil {
			want = 2 // a result that does not fit dest is read anew once
		}
		if !reflect.DeepEqual(a, b) || fmt.Sprint(errA) != fmt.Sprint(errB) || s.count() != want {
			t.Errorf("%s: %#v (%v) and %#v (%v), %d queries", name, a, errA, b, errB, s.count())
		}
	}
}

// The first caller of a query leaves while a second caller waits. The query must go on, and the second caller must
// get the result.
func TestQueryOutlivesItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := always(oneRow)
		s.takes = 2 * time.Second
		db := cached(t, s, sqlxrefill.Config{})
		impatient, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			var r row
			if err := db.GetContext(impatient, &r, "SELECT q"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
		})
		synctest.Wait()
		if got := mustGet[row](t, db, "SELECT q"); got != (row{1, "one"}) || s.count() != 1 {
			t.Errorf("got %v after %d queries", got, s.count())
		}
		wg.Wait()
	})
}

// A caller leaves and then changes its arguments while the query still waits for a connection. The driver must get
// the values from the time of the call.
func TestArgumentsAreCopied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sent []driver.NamedValue
		s := &source{takes: time.Second}
		s.answer = func(_ string, args []driver.NamedValue) (*table, error) { sent = args; return oneRow, nil }
		db := cachedOver(t, (&slowConnect{s}).open(t), sqlxrefill.Config{})
		text, blob, n := "x", []byte("abc"), 5
		args := []any{&text, blob, sql.Named("n", &n), boxed{&n}}
		var wg sync.WaitGroup
		wg.Go(func() { // this caller starts the query
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			var r row
			if err := db.GetContext(ctx, &r, "SELECT q", args...); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
			text, n, args[0] = "y", 6, "z"
			copy(blob, "xyz")
		})
		synctest.Wait()
		same, five := "x", 5 // these arguments join the same query and get its result
		mustGet[row](t, db, "SELECT q", &same, []byte("abc"), sql.Named("n", &five), boxed{&five})
		wg.Wait()
		if s.count() != 1 {
			t.Errorf("%d queries", s.count())
		}
		want := []driver.NamedValue{
			{Ordinal: 1, Value: "x"}, {Ordinal: 2, Value: []byte("abc")},
			{Name: "n", Ordinal: 3, Value: int64(5)}, {Ordinal: 4, Value: int64(5)},
		}
		if !reflect.DeepEqual(sent, want) {
			t.Errorf("sent %v", sent)
		}
	})
}

// slowConnect is a connector that takes a second to connect. In that second, the caller of the query leaves.
type slowConnect struct{ *source }

func (s *slowConnect) Connect(context.Context) (driver.Conn, error) {
	time.Sleep(time.Second)
	return sourceConn{s.source}, nil
}

func (s *slowConnect) open(t testing.TB) *sqlx.DB {
	db := sqlx.NewDb(sql.OpenDB(s), "fake")
	t.Cleanup(func() { db.Close() })
	return db
}

// boxed is a Valuer over a variable that can change.
type boxed struct{ n *int }

func (b boxed) Value() (driver.Value, error) { return int64(*b.n), nil }

func TestLargeResultIsNotKept(t *testing.T) {
	s := always(&table{
		columns: []string{"a"}, rows: [][]driver.Value{{strings.Repeat("x", 1000)}, {strings.Repeat("y", 1000)}},
	})
	shared := memory.New()
	small := cached(t, s, sqlxrefill.Config{MaxBytes: 2000, Config: refill.Config{TTL: time.Minute, Shared: shared}})
	for i := 1; i <= 3; i++ {
		if got := mustSelect[string](t, small, "SELECT q"); len(got) != 2 || s.count() != i {
			t.Errorf("%d strings after %d queries", len(got), s.count())
		}
	}
	for range 3 {
		mustGet[string](t, small, "SELECT q") // its one row is below MaxBytes
	}
	if s.count() != 4 {
		t.Errorf("%d queries", s.count())
	}
	for _, most := range []int{-1, 0, 3000} {
		before := s.count()
		db := cached(t, s, sqlxrefill.Config{MaxBytes: most})
		mustSelect[string](t, db, "SELECT q")
		mustSelect[string](t, db, "SELECT q")
		if s.count() != before+1 {
			t.Errorf("MaxBytes %d: %d queries", most, s.count()-before)
		}
	}
}

// keeper is a Scanner that breaks the contract of sql.Scanner: it keeps the slice that it gets. The test then
// overwrites the slice.
type keeper struct{ b []byte }

func (k *keeper) Scan(src any) error { k.b = src.([]byte); return nil }

func TestCallersDoNotShare(t *testing.T) {
	s := always(&table{columns: []string{"a"}, rows: [][]driver.Value{{[]byte("abc")}}})
	db := cached(t, s, sqlxrefill.Config{MaxBytes: 1 << 10})
	for range 3 {
		k := mustGet[keeper](t, db, "SELECT q")
		b := mustGet[[]byte](t, db, "SELECT q")
		l := mustSelect[[]byte](t, db, "SELECT q")
		raw := mustSelect[sql.RawBytes](t, db, "SELECT q")
		for _, got := range [][]byte{k.b, b, l[0], raw[0]} {
			if string(got) != "abc" {
				t.Fatalf("got %q", got)
			}
			copy(got, "xyz")
		}
	}
}

func TestBadInput(t *testing.T) {
	s := always(oneRow)
	db := cached(t, s, sqlxrefill.Config{})
	var r row
	var list []row
	for want, err := range map[string]error{
		"query: empty": db.GetContext(t.Context(), &r, " \n"),
		"query":        db.SelectContext(t.Context(), &list, ""),
		"args[1]":      db.GetContext(t.Context(), &r, "SELECT q", 1, []any{1, func() {}}),
		"args[0]":      db.SelectContext(t.Context(), &list, "SELECT q", sql.Out{Dest: new(int)}),
	} {
		if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q: got %v", want, err)
		}
	}
	if err := db.GetContext(t.Context(), r, "SELECT q"); err == nil || s.count() != 0 {
		t.Errorf("%v, after %d queries", err, s.count())
	}
}

// A text that writes must not reach the database, in any method.
func TestTextThatWritesIsRefused(t *testing.T) {
	s := always(oneRow)
	db := cached(t, s, sqlxrefill.Config{})
	var r row
	var list []row
	for range 3 {
		for _, text := range []string{"INSERT INTO t VALUES (1) RETURNING a", "SELECT nextval('s')", "SELECT 1 FOR UPDATE"} {
			for _, err := range []error{
				db.GetContext(t.Context(), &r, text), db.SelectContext(t.Context(), &list, text),
				db.Invalidate(t.Context(), text), db.Expire(t.Context(), text),
			} {
				if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "DB()") {
					t.Errorf("%s: %v", text, err)
				}
			}
		}
	}
	if s.count() != 0 {
		t.Errorf("%d texts were run", s.count())
	}
}

// With ReadOnly each query must run in a READ ONLY transaction, which must end also if the query fails.
func TestReadOnly(t *testing.T) {
	failure := &driverError{7}
	s := always(oneRow)
	db := cached(t, s, sqlxrefill.Config{ReadOnly: true})
	for range 2 {
		mustGet[row](t, db, "SELECT q")
		mustSelect[row](t, db, "SELECT q")
	}
	s.answer = func(string, []driver.NamedValue) (*table, error) { return nil, failure }
	var r row
	if err := db.GetContext(t.Context(), &r, "SELECT bad"); !errors.Is(err, failure) {
		t.Errorf("got %v", err)
	}
	want := driver.TxOptions{ReadOnly: true}
	if !slices.Equal(s.began, []driver.TxOptions{want, want, want}) || s.inTx != 0 || s.count() != 3 {
		t.Errorf("%d queries in the transactions %v, %d are open", s.count(), s.began, s.inTx)
	}
}

// An argument that the driver refuses must fail with the driver's own error, as in sqlx.
func TestArgumentThatTheDriverRefuses(t *testing.T) {
	for _, arg := range []any{brokenValuer{}, []int{1, 2}, struct{ A int }{1}} {
		s := always(oneRow)
		db := cached(t, s, sqlxrefill.Config{})
		var r row
		want := db.DB().GetContext(t.Context(), &r, "SELECT q", arg)
		if got := db.GetContext(t.Context(), &r, "SELECT q", arg); want == nil || got == nil ||
			!strings.Contains(got.Error(), want.Error()) || s.count() != 0 {
			t.Errorf("%v: %v, sqlx has %v", arg, got, want)
		}
	}
}

type brokenValuer struct{}

func (brokenValuer) Value() (driver.Value, error) { return nil, errors.New("broken valuer") }

func TestWhatCannotBeCached(t *testing.T) {
	for want, tab := range map[string]*table{
		"returns no columns":       {},
		`column "b": a []string c`: {columns: []string{"a", "b"}, rows: [][]driver.Value{{int64(1), []string{"x"}}}},
	} {
		db := cached(t, always(tab), sqlxrefill.Config{})
		var list []any
		err := db.SelectContext(t.Context(), &list, "SELECT q")
		if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "DB()") {
			t.Errorf("want %q: got %v", want, err)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	db := always(oneRow).open(t)
	for want, c := range map[string]struct {
		db  *sqlx.DB
		cfg sqlxrefill.Config
	}{
		"db: nil":        {nil, sqlxrefill.Config{Name: "n", Config: refill.Config{TTL: time.Minute}}},
		"db":             {&sqlx.DB{}, sqlxrefill.Config{Name: "n", Config: refill.Config{TTL: time.Minute}}},
		"TTL":            {db, sqlxrefill.Config{Name: "n"}},
		"Name: required": {db, sqlxrefill.Config{Config: refill.Config{TTL: time.Minute}}},
		"name":           {db, sqlxrefill.Config{Name: "a b", Config: refill.Config{TTL: time.Minute}}},
		"BulkWindow":     {db, sqlxrefill.Config{Name: "n", Config: refill.Config{TTL: 1, BulkWindow: 1}}},
		"Codec":          {db, sqlxrefill.Config{Name: "n", Config: refill.Config{TTL: time.Minute, Codec: jsonLike{}}}},
		"WrapCodec": {db, sqlxrefill.Config{
			Name: "n", Config: refill.Config{TTL: time.Minute},
			WrapCodec: func(refill.Codec) refill.Codec { return nil },
		}},
	} {
		got, err := sqlxrefill.New(c.db, c.cfg)
		if got != nil || !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q: got %v", want, err)
		}
	}
}

type jsonLike struct{ refill.Codec }

// upsideDown is a codec that reverses the order of the bytes that another codec makes.
type upsideDown struct {
	refill.Codec
	used *atomic.Int64
}

func (c upsideDown) Name() string { return c.Codec.Name() + " upside down" }

func (c upsideDown) Marshal(v any) ([]byte, error) {
	b, err := c.Codec.Marshal(v)
	slices.Reverse(b)
	c.used.Add(1)
	return b, err
}

func (c upsideDown) Unmarshal(data []byte, p any) error {
	data = slices.Clone(data)
	slices.Reverse(data)
	return c.Codec.Unmarshal(data, p)
}

// Two nodes share a store and have the same WrapCodec. The second node must read what the first node has stored.
func TestWrapCodec(t *testing.T) {
	for name, tab := range tables() {
		s, used := always(tab), new(atomic.Int64)
		cfg := sqlxrefill.Config{Config: refill.Config{TTL: time.Minute, Shared: memory.New()}}
		plain := cached(t, s, cfg)
		cfg.WrapCodec = func(c refill.Codec) refill.Codec { return upsideDown{c, used} }
		cfg.Name = "wrapped"
		one, other := cached(t, s, cfg), cached(t, s, cfg)
		var a, b, c []any
		errA := one.SelectContext(t.Context(), &a, "SELECT q")
		errB := other.SelectContext(t.Context(), &b, "SELECT q")
		errC := plain.SelectContext(t.Context(), &c, "SELECT q")
		if !reflect.DeepEqual(a, b) || !reflect.DeepEqual(a, c) ||
			fmt.Sprint(errA) != fmt.Sprint(errB) || fmt.Sprint(errA) != fmt.Sprint(errC) {
			t.Errorf("%s: %#v (%v), %#v (%v) and without %#v (%v)", name, a, errA, b, errB, c, errC)
		}
		if errA == nil && (s.count() != 2 || used.Load() != 1) {
			t.Errorf("%s: %d queries, want one with and one without the wrapper, which was used %d times",
				name, s.count(), used.Load())
		}
	}
}

// After Close, calls must return ErrClosed, and the database must still be open. Synctest fails the test if a
// goroutine is left.
func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := always(oneRow)
		plain := s.open(t)
		db := cachedOver(t, plain, sqlxrefill.Config{})
		mustGet[row](t, db, "SELECT q")
		if err := errors.Join(db.Close(), db.Close()); err != nil {
			t.Fatal(err)
		}
		var r row
		var list []row
		for _, err := range []error{
			db.GetContext(t.Context(), &r, "SELECT q"), db.SelectContext(t.Context(), &list, "SELECT q"),
			db.GetContext(t.Context(), r, "SELECT q"), db.SelectContext(t.Context(), &r, "SELECT q"),
			db.Invalidate(t.Context(), "SELECT q"), db.Expire(t.Context(), "SELECT q"),
		} {
			if !errors.Is(err, refill.ErrClosed) {
				t.Errorf("got %v", err)
			}
		}
		if err := db.DB().GetContext(t.Context(), &r, "SELECT q"); err != nil || db.DB() != plain {
			t.Errorf("the database is closed: %v", err)
		}
	})
}

// Close is called while eight goroutines read. Each read must return the result or ErrClosed.
func TestCloseWhileReading(t *testing.T) {
	for range 20 {
		db := cached(t, always(oneRow), sqlxrefill.Config{})
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for {
					var list []row
					err := db.SelectContext(context.Background(), &list, "SELECT q")
					if errors.Is(err, refill.ErrClosed) {
						return
					}
					if err != nil || len(list) != 2 {
						t.Errorf("%v, %v", list, err)
						return
					}
				}
			})
		}
		time.Sleep(time.Millisecond)
		if err := db.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
	}
}

func TestReadsLeaveNothingBehind(t *testing.T) {
	db := cached(t, always(oneRow), sqlxrefill.Config{})
	mustGet[row](t, db, "SELECT q")
	mustSelect[row](t, db, "SELECT q")
	before := runtime.NumGoroutine()
	var bad int
	for range 2000 {
		mustGet[row](t, db, "SELECT q")
		mustSelect[row](t, db, "SELECT q")
		if err := db.GetContext(context.Background(), &bad, "SELECT q"); err == nil { // a failed scan also releases its rows
			t.Fatal("two columns fit into an int")
		}
	}
	if after := runtime.NumGoroutine(); after > before {
		t.Errorf("%d goroutines before, %d after", before, after)
	}
}
