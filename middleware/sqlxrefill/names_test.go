package sqlxrefill_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/middleware/sqlxrefill"
)

// Two databases with one name and one store would get each other's rows. So New must refuse the second database, until
// the first DB is closed, unless one of the two has said that the data are the same.
func TestTwoDatabasesUnderOneName(t *testing.T) {
	shared := memory.New()
	config := func(name string, store driver.Store, same bool) sqlxrefill.Config {
		return sqlxrefill.Config{Name: name, SameData: same, Config: refill.Config{TTL: time.Minute, Shared: store}}
	}
	open := func(db *sqlx.DB, cfg sqlxrefill.Config) *sqlxrefill.DB {
		t.Helper()
		c, err := sqlxrefill.New(db, cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	a, b := always(oneRow).open(t), always(oneRow).open(t)
	refused := func(cfg sqlxrefill.Config) {
		t.Helper()
		if _, err := sqlxrefill.New(b, cfg); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "Name") {
			t.Errorf("a second database under the same name: %v", err)
		}
	}
	first := open(a, config("shop", shared, false))
	refused(config("shop", shared, false))
	open(a.Unsafe(), config("shop", shared, false)) // the same *sql.DB
	open(b, config("stock", shared, false))
	open(b, config("shop", memory.New(), false))
	open(b, config("shop", nil, false)) // has a store of its own
	open(b, config("shop", shared, true)).Close()
	refused(config("shop", shared, false))
	first.Close()
	first.Close()
	refused(config("shop", shared, false)) // the Unsafe copy is still open

	said := open(a, config("other", shared, true))
	open(b, config("other", shared, false))
	said.Close()
	last := open(a, config("last", shared, false))
	last.Close()
	open(b, config("last", shared, false))
}
