package refilltest

import (
	"testing"
	"time"

	"github.com/refill-go/refill"
)

func memoryWorld(testing.TB) StoreWorld {
	m := refill.NewMemory()
	return StoreWorld{A: m, B: m}
}

func memoryLocks(testing.TB) LockWorld {
	m := refill.NewMemory()
	return LockWorld{A: m, B: m}
}

func TestMemory(t *testing.T) {
	TestStore(t, StoreHarness{World: memoryWorld, Bubble: true})
}

func TestMemoryLocks(t *testing.T) {
	TestLockDriver(t, LockHarness{World: memoryLocks, Bubble: true})
}

// Outside a bubble the goroutines are scheduled as in the field, and time is real.
func TestMemoryRealTime(t *testing.T) {
	TestStore(t, StoreHarness{World: memoryWorld, Short: 200 * time.Millisecond})
	TestLockDriver(t, LockHarness{World: memoryLocks, Short: 200 * time.Millisecond})
}
