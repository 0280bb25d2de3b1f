package refill

import (
	"fmt"
	"testing"
	"time"
)

// A node remembers at most maxBackoffs failures. At that bound, remember first drops the failures whose back-off ended
// longer ago than the back-off lasted. If that makes no room, remember drops the new failure. A failure without a
// back-off is never remembered.
func TestBackoffsAreBounded(t *testing.T) {
	b := backoffs{}
	for i := range 2 * maxBackoffs {
		b.remember(fmt.Sprint(i), &LoadError{RetryAfter: time.Hour}, 0)
	}
	if len(b.byKey) != maxBackoffs {
		t.Errorf("got %d failures in memory, want %d", len(b.byKey), maxBackoffs)
	}
	for key, p := range b.byKey {
		p.until = time.Now().Add(-3 * time.Hour)
		b.byKey[key] = p
	}
	b.remember("new", &LoadError{RetryAfter: time.Hour}, 0)
	if b.get("new", 0) == nil || len(b.byKey) != 1 {
		t.Errorf("got %d failures in memory, want only the new one: the others are over", len(b.byKey))
	}
	b.remember("none", &LoadError{}, 0)
	if len(b.byKey) != 1 {
		t.Errorf("got %d failures in memory, want 1: a failure without a back-off is not kept", len(b.byKey))
	}
}
