package memory

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file tests how announcements reach a subscriber.

// Keys are invalidated one after the other, the first of them while the subscriber handles Subscribed. The subscriber
// is slow. It must get each announcement, in order, and one at a time.
func TestAnnouncementsComeOneAfterTheOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New()
		invalidate := func(i int) {
			if err := s.Invalidate(t.Context(), "by", fmt.Sprint("name:", i)); err != nil {
				t.Error(err)
			}
		}
		var got, want []string
		busy := false
		stop := s.Subscribe("name", func(a driver.Announcement) {
			if busy {
				t.Error("called while an earlier call runs")
			}
			busy = true
			if a.Kind == driver.Subscribed {
				invalidate(0)
			} else {
				got = append(got, a.Key)
			}
			time.Sleep(3 * time.Millisecond)
			busy = false
		})
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		if !slices.Equal(got, []string{"name:0"}) {
			t.Errorf("got %q, want the announcement that came during Subscribed", got)
		}
		for i := range 20 {
			want = append(want, fmt.Sprint("name:", i))
			if i > 0 {
				invalidate(i)
				time.Sleep(time.Duration(i%5) * time.Millisecond)
			}
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		stop()
	})
}

// stop must wait for a call of the subscriber that is running. No call may begin after stop has returned.
func TestStopWaitsForTheSubscriber(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New()
		calls, running, stopped := 0, false, false
		stop := s.Subscribe("name", func(a driver.Announcement) {
			if stopped {
				t.Error("called after stop")
			}
			calls++
			running = true
			time.Sleep(time.Second)
			running = false
		})
		invalidate := func() {
			if err := s.Invalidate(t.Context(), "by", "name:k"); err != nil {
				t.Error(err)
			}
		}
		invalidate()
		synctest.Wait()
		stop()
		if running || calls != 2 {
			t.Errorf("%d calls, one of them running: %v; want 2 that have ended", calls, running)
		}
		stopped = true
		invalidate()
		time.Sleep(time.Minute)
	})
}
