//go:build unix

package realtest

import (
	"database/sql"
	"fmt"
	"testing"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
	_ "modernc.org/sqlite"
)

const (
	pgxAddr   = "postgres://refill@127.0.0.1:%d/postgres?sslmode=disable"
	mysqlAddr = "root@tcp(127.0.0.1:%d)/?parseTime=true"
)

// The servers must answer, and must be gone when their test has ended.
func TestSQLServers(t *testing.T) {
	for _, c := range []struct {
		driver, addr string
		start        func(testing.TB, ...string) int
	}{{"pgx", pgxAddr, StartPostgres}, {"mysql", mysqlAddr, StartMariaDB}} {
		t.Run(c.driver, func(t *testing.T) {
			var f fakeT
			var port int
			f.run(func(tb testing.TB) {
				port = c.start(tb)
				db, err := sql.Open(c.driver, fmt.Sprintf(c.addr, port))
				if err != nil {
					tb.Fatalf("%v", err)
				}
				defer db.Close()
				var n int
				if err := db.QueryRow("SELECT 1").Scan(&n); err != nil || n != 1 {
					tb.Fatalf("got %d, %v", n, err)
				}
			})
			switch {
			case f.skipped:
				t.Skip(f.log.String())
			case f.failed:
				t.Fatal(f.log.String())
			case accepts(port):
				t.Error("the server has outlived its test")
			}
		})
	}
}
