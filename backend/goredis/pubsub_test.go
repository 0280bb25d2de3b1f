package goredis

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/driver"
)

// connectingStore returns a Store whose subscription never gets a connection. So only the test itself makes
// announcements, through the methods of pubsub.
func connectingStore(t *testing.T) *Store {
	t.Helper()
	c := redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:1",
		Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
	})
	t.Cleanup(func() { c.Close() })
	return New(c)
}

// within fails the test if f does not return within 5 s.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Fatalf("%s does not return", what)
	}
}

func filled(token string) driver.Announcement {
	return driver.Announcement{Kind: driver.Filled, Key: "product:42", Token: token}
}

func TestHandleMayCallTheStore(t *testing.T) {
	s := connectingStore(t)
	var received []driver.AnnouncementKind
	var stopInner func()
	stop := s.Subscribe("product", func(a driver.Announcement) {
		if a.Kind != driver.Filled {
			return
		}
		_, stopWatch := s.Watch("job:1")
		stopWatch()
		s.Subscribe("order", func(driver.Announcement) {})()
		stopInner = s.Subscribe("user", func(a driver.Announcement) { received = append(received, a.Kind) })
	})
	s.pubsub.setSubscribed()
	s.pubsub.warn(errors.New("a warning"))
	within(t, "dispatch", func() { s.pubsub.dispatch(filled("a#1")) })
	if want := []driver.AnnouncementKind{driver.Subscribed, driver.Warning}; !slices.Equal(received, want) {
		t.Errorf("the new listener received %v, want %v", received, want)
	}
	within(t, "stop", func() { stopInner(); stop() })
}

// While one handle blocks, other goroutines must still be able to call Watch, Subscribe and stop, and a watcher must
// still be woken.
func TestStoreIsUsableWhileHandleBlocks(t *testing.T) {
	s := connectingStore(t)
	stopOther := s.Subscribe("product", func(driver.Announcement) {})
	_, stopWatch := s.Watch("job:1")
	blocked, release := make(chan struct{}), make(chan struct{})
	stop := s.Subscribe("order", func(driver.Announcement) {
		close(blocked)
		<-release
	})
	dispatched := make(chan struct{})
	go func() {
		defer close(dispatched)
		s.pubsub.dispatch(driver.Announcement{Kind: driver.Filled, Key: "order:1"})
	}()
	<-blocked
	within(t, "Watch", func() { _, stop := s.Watch("job:2"); stop() })
	within(t, "stop of a Watch", stopWatch)
	within(t, "stop of another listener", stopOther)
	within(t, "Subscribe", func() { s.Subscribe("user", func(driver.Announcement) {})() })
	wake, stopWatch := s.Watch("job:3")
	within(t, "dispatch of an unlock", func() {
		s.pubsub.dispatch(driver.Announcement{Kind: unlocked, Key: "job:3"})
	})
	select {
	case <-wake:
	default:
		t.Error("a watcher was not woken while a handle was running")
	}
	close(release)
	<-dispatched
	within(t, "stop", func() { stopWatch(); stop() })
}

// While one handle blocks, the test adds a listener. The new listener must receive the state of the subscription
// before Subscribe returns.
func TestLateListener(t *testing.T) {
	s := connectingStore(t)
	blocked, release := make(chan struct{}), make(chan struct{})
	stop := s.Subscribe("order", func(a driver.Announcement) {
		if a.Kind == driver.Filled {
			close(blocked)
			<-release
		}
	})
	s.pubsub.setSubscribed()
	s.pubsub.warn(errors.New("a warning"))
	var dispatches sync.WaitGroup
	dispatches.Go(func() { s.pubsub.dispatch(driver.Announcement{Kind: driver.Filled, Key: "order:1"}) })
	<-blocked
	var received []driver.AnnouncementKind
	within(t, "Subscribe", func() {
		stop := s.Subscribe("user", func(a driver.Announcement) { received = append(received, a.Kind) })
		if want := []driver.AnnouncementKind{driver.Subscribed, driver.Warning}; !slices.Equal(received, want) {
			t.Errorf("received %v before Subscribe returned, want %v", received, want)
		}
		stop()
	})
	close(release)
	dispatches.Wait()
	stop()
}

// Two announcements arrive while Subscribe calls the new handle. The new handle must receive the two announcements in
// order, after the call by Subscribe has returned.
func TestAnnouncementDuringSubscribe(t *testing.T) {
	s := connectingStore(t)
	defer s.Subscribe("order", func(driver.Announcement) {})()
	s.pubsub.setSubscribed()
	var received []driver.AnnouncementKind
	var running atomic.Bool
	var dispatches sync.WaitGroup
	stop := s.Subscribe("product", func(a driver.Announcement) {
		if running.Swap(true) {
			t.Error("handle runs twice at the same time")
		}
		if a.Kind == driver.Subscribed {
			dispatches.Go(func() {
				s.pubsub.dispatch(filled("a#1"))
				s.pubsub.setDisconnected(errors.New("broken"))
			})
			time.Sleep(20 * time.Millisecond)
		}
		received = append(received, a.Kind)
		running.Store(false)
	})
	within(t, "dispatch", dispatches.Wait)
	stop()
	want := []driver.AnnouncementKind{driver.Subscribed, driver.Filled, driver.Disconnected}
	if !slices.Equal(received, want) {
		t.Errorf("received %v, want %v", received, want)
	}
}

// The test calls stop while handle runs. stop must return only after that call of handle has returned, and no call of
// handle may begin later.
func TestStopWaitsForHandle(t *testing.T) {
	s := connectingStore(t)
	started, release := make(chan struct{}), make(chan struct{})
	var calls, returned atomic.Int32
	stop := s.Subscribe("product", func(driver.Announcement) {
		if calls.Add(1) == 1 {
			close(started)
		}
		<-release
		returned.Add(1)
	})
	var dispatches sync.WaitGroup
	for range 3 {
		dispatches.Go(func() { s.pubsub.dispatch(filled("a#1")) })
	}
	<-started
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		stop()
		if returned.Load() != calls.Load() {
			t.Error("stop returned while handle was running")
		}
	}()
	select {
	case <-stopped:
		t.Error("stop did not wait for handle")
	case <-time.After(50 * time.Millisecond):
	}
	close(release)
	<-stopped
	after := calls.Load()
	dispatches.Wait()
	s.pubsub.dispatch(filled("a#2"))
	if n := calls.Load(); n != after {
		t.Errorf("%d calls of handle after stop", n-after)
	}
}

// Four connections receive announcements at the same time, while other listeners come and go. Only one handle of the
// Store may run at a time. Every listener must receive the announcements of each connection in order.
func TestDeliveriesAreSerialised(t *testing.T) {
	const connections, announcements = 4, 200
	s := connectingStore(t)
	var running atomic.Int32
	var lists [3]map[string][]int // of each listener: what each connection announced
	for i := range lists {
		lists[i] = make(map[string][]int)
		defer s.Subscribe("product", func(a driver.Announcement) {
			if n := running.Add(1); n != 1 {
				t.Errorf("%d handle functions run at the same time", n)
			}
			if a.Kind == driver.Filled {
				lists[i][a.Token] = append(lists[i][a.Token], len(a.Record))
			}
			running.Add(-1)
		})()
	}
	s.pubsub.setSubscribed()
	var sources sync.WaitGroup
	for c := range connections {
		sources.Go(func() {
			for i := range announcements {
				a := filled(string(rune('a' + c)))
				a.Record = make([]byte, i)
				s.pubsub.dispatch(a)
			}
		})
	}
	sources.Go(func() {
		for range 50 {
			subscribed := 0
			stop := s.Subscribe("product", func(a driver.Announcement) {
				if a.Kind == driver.Subscribed {
					subscribed++
				}
			})
			s.pubsub.setSubscribed()
			stop()
			if subscribed != 2 {
				t.Errorf("a late listener received Subscribed %d times, want 2", subscribed)
			}
		}
	})
	sources.Wait()
	for i, list := range lists {
		for c := range connections {
			got := list[string(rune('a'+c))]
			if len(got) != announcements || !slices.IsSorted(got) {
				t.Errorf("listener %d received %v of connection %d", i, got, c)
			}
		}
	}
}

// The subscription works, breaks and works again. Each time a listener receives Subscribed or Disconnected, selfCheck
// must already be in the matching state.
func TestSelfCheckFollowsTheSubscription(t *testing.T) {
	s := connectingStore(t)
	var got []bool
	stop := s.Subscribe("product", func(a driver.Announcement) {
		c := &s.pubsub.selfCheck
		c.mu.Lock()
		defer c.mu.Unlock()
		got = append(got, a.Kind == driver.Subscribed, c.subscribed)
	})
	s.pubsub.setSubscribed()
	s.pubsub.setDisconnected(errors.New("broken"))
	s.pubsub.setDisconnected(errors.New("still broken"))
	s.pubsub.setSubscribed()
	stop()
	if want := []bool{true, true, false, false, true, true}; !slices.Equal(got, want) {
		t.Errorf("announced and expected: %v, want %v", got, want)
	}
}

// A handle panics, and the caller of dispatch recovers. dispatch must then deliver the next announcement, and stop
// must return.
func TestPanicInHandle(t *testing.T) {
	s := connectingStore(t)
	calls := 0
	stop := s.Subscribe("product", func(driver.Announcement) {
		if calls++; calls == 1 {
			panic("user code")
		}
	})
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was lost")
			}
		}()
		s.pubsub.dispatch(filled("a#1"))
	}()
	within(t, "dispatch", func() { s.pubsub.dispatch(filled("a#2")) })
	within(t, "stop", stop)
	if calls != 2 {
		t.Errorf("%d calls of handle, want 2", calls)
	}
}
