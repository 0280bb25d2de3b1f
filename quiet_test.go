package refill_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// A load that nobody waits for and that replaces nothing is no news: told to the whole fleet, the loads of all rare keys
// would cost each node more than its own. One that somebody waits for, that replaces what others may hold, or that ends a
// failure which others remember, is told.
func TestWhatIsNews(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		var filled atomic.Int64
		defer shared.Listen("thing", func(n refill.Note) {
			if n.Kind == refill.NoteFilled {
				filled.Add(1)
			}
		})()
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleFor: time.Second, Jitter: -1, Shared: shared})
		told := func(what string, want int64) {
			t.Helper()
			synctest.Wait()
			if n := filled.Swap(0); n != want {
				t.Errorf("%s: %d announcements, want %d", what, n, want)
			}
		}
		get(t, nodes[0], "rare")
		told("nobody waits, nothing is replaced", 0)

		time.Sleep(1500 * ms)
		get(t, nodes[0], "rare")
		time.Sleep(200 * ms)
		told("a value is replaced", 1)

		waited := behind(t, nodes[0], "wanted")
		time.Sleep(50 * ms)
		began := time.Now()
		get(t, nodes[1], "wanted")
		if took := time.Since(began); took != 50*ms {
			t.Errorf("the other node waited %v, the load had 50ms left", took)
		}
		waited()
		told("another node waits", 1)

		d.fail(errors.New("no"))
		if _, err := nodes[0].Get(t.Context(), "failing"); err == nil {
			t.Error("no error")
		}
		d.fail(nil)
		time.Sleep(1001 * ms)
		get(t, nodes[0], "failing")
		told("a failure has ended", 1)
	})
}
