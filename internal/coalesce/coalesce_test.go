package coalesce

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// server is a server whose calls last for took.
type server struct {
	took  time.Duration
	mu    sync.Mutex
	calls [][]string // the keys of each call, sorted
	err   error
}

func (s *server) call(keys []string) (string, error) {
	s.mu.Lock()
	s.calls = append(s.calls, slices.Sorted(slices.Values(keys)))
	s.mu.Unlock()
	time.Sleep(s.took)
	return "result", s.err
}

// One caller comes, and 100 callers come while the call of the first one runs. The 100 callers share one call, which
// has each of their keys once.
func TestCallersShareTheNextCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{took: time.Second}
		c := New(s.call)
		var group sync.WaitGroup
		group.Go(func() { _, _ = c.Do(t.Context(), "first") })
		synctest.Wait()
		began := time.Now()
		for range 50 {
			for _, key := range []string{"a", "b"} {
				group.Go(func() {
					if r, err := c.Do(t.Context(), key, "c"); r != "result" || err != nil {
						t.Errorf("got %q, %v, want the result", r, err)
					}
				})
			}
		}
		group.Wait()
		c.Wait()
		if took := time.Since(began); took != 2*s.took {
			t.Errorf("the callers waited %v, want %v", took, 2*s.took)
		}
		if len(s.calls) != 2 || !slices.Equal(s.calls[1], []string{"a", "b", "c"}) {
			t.Errorf("got the calls %v, want one for the first caller and one for a, b and c", s.calls)
		}
	})
}

// Two callers share a call. The ctx of one caller ends, so its Do must return. The other caller must get the result.
func TestACallerLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{took: time.Second}
		c := New(s.call)
		var group sync.WaitGroup
		group.Go(func() { _, _ = c.Do(t.Context(), "first") })
		synctest.Wait()
		group.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), s.took/2)
			defer cancel()
			if _, err := c.Do(ctx, "a"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v, want the error of ctx", err)
			}
		})
		group.Go(func() {
			if r, err := c.Do(t.Context(), "b"); r != "result" || err != nil {
				t.Errorf("got %q, %v, want the result", r, err)
			}
		})
		group.Wait()
	})
}

// A call fails. Every caller of this call must get its error. The next call must not be affected.
func TestAllCallersGetTheError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{took: time.Second, err: errors.New("down")}
		c := New(s.call)
		var group sync.WaitGroup
		for range 3 {
			group.Go(func() {
				if _, err := c.Do(t.Context(), "a"); !errors.Is(err, s.err) {
					t.Errorf("got %v, want the error of the call", err)
				}
			})
		}
		group.Wait()
		c.Wait()
		s.err = nil
		if r, err := c.Do(t.Context(), "a"); r != "result" || err != nil {
			t.Errorf("got %q, %v, want the result", r, err)
		}
	})
}

// A call runs, and a second call waits for its end. All callers of the second call leave. Wait must return only when
// the second call has ended.
func TestWaitForACallWithoutCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{took: time.Second}
		c := New(s.call)
		first := make(chan struct{})
		go func() {
			defer close(first)
			_, _ = c.Do(t.Context(), "first")
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), s.took/2)
		defer cancel()
		_, _ = c.Do(ctx, "a")
		<-first
		began := time.Now()
		c.Wait()
		if took := time.Since(began); took != s.took || len(s.calls) != 2 {
			t.Errorf("Wait returned after %v and %d calls, want %v and 2", took, len(s.calls), s.took)
		}
	})
}
