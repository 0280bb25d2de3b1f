package refilltest

import (
	"testing"
	"time"

	"github.com/refill-go/refill/backend/memory"
)

func memoryWorld(testing.TB) StoreWorld {
	m := memory.New()
	return StoreWorld{A: m, B: m}
}

func memoryLocks(testing.TB) LockWorld {
	m := memory.New()
	return LockWorld{A: m, B: m}
}

func TestMemory(t *testing.T) {
	TestStore(t, StoreHarness{World: memoryWorld, Bubble: true})
}

func TestMemoryLocks(t *testing.T) {
	TestLocks(t, LockHarness{World: memoryLocks, Bubble: true})
}

// TestMemoryRealTime runs the suites outside a bubble. There, goroutines are scheduled as in production, and time is
// real.
func TestMemoryRealTime(t *testing.T) {
	TestStore(t, StoreHarness{World: memoryWorld, Short: 200 * time.Millisecond})
	TestLocks(t, LockHarness{World: memoryLocks, Short: 200 * time.Millisecond})
}
