package deadline

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		rang := make(map[int]time.Duration)
		var mu sync.Mutex
		a := NewAlarm(320*time.Millisecond, func(v int) {
			mu.Lock()
			defer mu.Unlock()
			rang[v] = time.Since(began)
		})
		var cohorts []*Cohort[int] // by value
		for v := range 50 {        // one per ms
			cohorts = append(cohorts, a.Add(v))
			time.Sleep(time.Millisecond)
		}
		for v := 0; v < 50; v += 2 {
			cohorts[v].Remove(v)
			cohorts[v].Remove(v)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		for v := range 50 {
			added, at := time.Duration(v)*time.Millisecond, rang[v]
			if v%2 == 0 && at != 0 {
				t.Errorf("value %d was removed, but its alarm rang", v)
			}
			if v%2 == 1 && (at < added+310*time.Millisecond || at > added+320*time.Millisecond) {
				t.Errorf("value %d: the alarm rang %v after Add, want 310 to 320 ms", v, at-added)
			}
		}
		for v, c := range cohorts {
			if c.Remove(v); len(c.values) != 0 || a.newest != nil {
				t.Errorf("the alarm still holds %d values, newest %v", len(c.values), a.newest)
			}
		}
	})
}
