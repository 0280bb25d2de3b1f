package retry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

var errDown = errors.New("server is down")

// server records the calls of try and done. While down is set, try fails.
type server struct {
	down atomic.Bool

	mu    sync.Mutex
	tried []string
	done  []string
}

func (s *server) try(_ context.Context, key string, work int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tried = append(s.tried, fmt.Sprint(key, work)); s.down.Load() {
		return errDown
	}
	return nil
}

func (s *server) finish(key string, work int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done = append(s.done, fmt.Sprint(key, work, " ", err))
}

func (s *server) lists() (tried, done []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tried, done = slices.Sorted(slices.Values(s.tried)), slices.Sorted(slices.Values(s.done))
	s.tried, s.done = nil, nil
	return tried, done
}

func newQueue(t *testing.T, s *server) *Queue[string, int] {
	q := New(s.try, s.finish, func(old, new int) int { return min(old, new) })
	t.Cleanup(q.Close)
	return q
}

func TestWorkIsRepeatedUntilItSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(server)
		s.down.Store(true)
		q := newQueue(t, s)
		q.Add([]string{"a", "b"}, 1, time.Now().Add(time.Hour))
		if tried, done := s.lists(); tried != nil || done != nil {
			t.Errorf("at once: tried %v, done %v", tried, done)
		}
		time.Sleep(pause)
		synctest.Wait()
		// After the first try has failed, the queue does not try the other key until the next pause is over.
		if tried, done := s.lists(); len(tried) != 1 || done != nil {
			t.Errorf("first round: tried %v, done %v", tried, done)
		}
		s.down.Store(false)
		time.Sleep(pause)
		synctest.Wait()
		if tried, done := s.lists(); !slices.Equal(tried, []string{"a1", "b1"}) ||
			!slices.Equal(done, []string{"a1 <nil>", "b1 <nil>"}) {
			t.Errorf("second round: tried %v, done %v", tried, done)
		}
		time.Sleep(10 * pause)
		if tried, _ := s.lists(); tried != nil {
			t.Errorf("tried again: %v", tried)
		}
		q.Add([]string{"c"}, 2, time.Now().Add(time.Hour)) // the goroutine has ended and starts again
		time.Sleep(pause)
		synctest.Wait()
		if _, done := s.lists(); !slices.Equal(done, []string{"c2 <nil>"}) {
			t.Errorf("later: done %v", done)
		}
	})
}

func TestWakeTriesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(server)
		q := newQueue(t, s)
		q.Add([]string{"a"}, 1, time.Now().Add(time.Hour))
		q.Wake()
		q.Wake()
		synctest.Wait()
		if _, done := s.lists(); len(done) != 1 {
			t.Errorf("done %v", done)
		}
	})
}

func TestWorkEndsWithItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(server)
		s.down.Store(true)
		q := newQueue(t, s)
		q.Add([]string{"a"}, 1, time.Now().Add(10*pause))
		time.Sleep(20 * pause)
		synctest.Wait()
		tried, done := s.lists()
		if len(tried) != 11 || !slices.Equal(done, []string{"a1 server is down"}) {
			t.Errorf("tried %d times, done %v", len(tried), done)
		}
	})
}

func TestWorkForOneKeyIsMerged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(server)
		q := newQueue(t, s)
		for _, work := range []int{2, 1, 3} {
			q.Add([]string{"a"}, work, time.Now().Add(time.Hour))
		}
		time.Sleep(pause)
		synctest.Wait()
		if _, done := s.lists(); !slices.Equal(done, []string{"a1 <nil>"}) {
			t.Errorf("done %v", done)
		}
	})
}

// While the work of a key is being tried, new work is added for this key. The first try succeeds. The queue must not
// drop the new work, but try it as well.
func TestWorkThatIsAddedDuringItsTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q *Queue[string, int]
		var tries []int
		q = New(func(_ context.Context, key string, work int) error {
			if tries = append(tries, work); len(tries) == 1 {
				q.Add([]string{key}, 1, time.Now().Add(time.Hour))
			}
			return nil
		}, func(string, int, error) {}, func(_, new int) int { return new })
		defer q.Close()
		q.Add([]string{"a"}, 2, time.Now().Add(time.Hour))
		time.Sleep(5 * pause)
		synctest.Wait()
		if !slices.Equal(tries, []int{2, 1}) {
			t.Errorf("tried %v", tries)
		}
	})
}

func TestQueueIsBounded(t *testing.T) {
	s := new(server)
	s.down.Store(true)
	q := newQueue(t, s)
	keys := make([]string, maxPending+2)
	for i := range keys {
		keys[i] = fmt.Sprint(i, "-")
	}
	q.Add(keys, 1, time.Now().Add(time.Hour))
	if _, done := s.lists(); len(done) != 2 || done[0] != fmt.Sprint(maxPending, "-1 ", ErrFull) {
		t.Errorf("done %v", done)
	}
	q.Add(keys[:1], 1, time.Now().Add(time.Hour))
	if _, done := s.lists(); done != nil {
		t.Errorf("a key that is in the queue needs no room: %v", done)
	}
}

func TestCloseEndsTheGoroutine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(server)
		s.down.Store(true)
		q := New(s.try, s.finish, func(_, new int) int { return new })
		q.Add([]string{"a"}, 1, time.Now().Add(time.Hour))
		q.Close()
		q.Add([]string{"b"}, 1, time.Now().Add(time.Hour)) // must start no goroutine
	})
}

// The queue tries two pieces of work, one after the other. While the first try runs, TryNow does the other piece. The
// queue must not do that piece again.
func TestWorkOfTryNowIsNotRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(server)
		trying, goOn := make(chan string), make(chan struct{})
		var blocked atomic.Bool
		q := New(func(ctx context.Context, key string, work int) error {
			if !blocked.Swap(true) {
				trying <- key
				<-goOn
			}
			return s.try(ctx, key, work)
		}, s.finish, func(old, new int) int { return min(old, new) })
		t.Cleanup(q.Close)
		q.Add([]string{"a", "b"}, 1, time.Now().Add(time.Hour))
		other := map[string]string{"a": "b", "b": "a"}[<-trying]
		if err := q.TryNow(other); err != nil {
			t.Error(err)
		}
		close(goOn)
		synctest.Wait()
		if tried, done := s.lists(); len(tried) != 2 || len(done) != 2 {
			t.Errorf("tried %q, done %q, want each key once", tried, done)
		}
	})
}
