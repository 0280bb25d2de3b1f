package simulation

import (
	"flag"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

var (
	seedFlag      = flag.Uint64("seed", 0, "run this schedule only, and print its trace if it fails")
	schedulesFlag = flag.Int("schedules", 2000, "how many schedules TestSchedules runs")
	firstFlag     = flag.Uint64("first", 1, "the seed of the first schedule of TestSchedules")
	linesFlag     = flag.Int("lines", 150, "how many lines of its trace a failing schedule prints")
)

// TestSchedules runs schedules with consecutive seeds. No schedule may break a guarantee.
func TestSchedules(t *testing.T) {
	first, count := *firstFlag, *schedulesFlag
	if *seedFlag != 0 {
		first, count = *seedFlag, 1
	} else if testing.Short() {
		count = min(count, 200)
	}
	var (
		next     atomic.Uint64
		failures atomic.Int64
		workers  sync.WaitGroup
	)
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for n := next.Add(1) - 1; n < uint64(count) && failures.Load() < maxFailures; n = next.Add(1) - 1 {
				if !t.Run(fmt.Sprintf("seed=%d", first+n), func(t *testing.T) { one(t, first+n) }) {
					failures.Add(1)
				}
			}
		})
	}
	workers.Wait()
}

// maxFailures is how many schedules may fail before TestSchedules gives up.
const maxFailures = 5

// one runs the schedule of a seed. The test fails if the checker finds a violation of a guarantee.
func one(t *testing.T, seed uint64) {
	synctest.Test(t, func(t *testing.T) {
		w := run(t, draw(seed))
		if len(w.violations) > 0 {
			t.Errorf("to repeat: go test -run TestSchedules -seed=%d\n%s\n%s",
				seed, strings.Join(w.violations, "\n"), w.report(*linesFlag))
		}
	})
}
