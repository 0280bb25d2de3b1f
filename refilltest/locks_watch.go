package refilltest

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
)

var watchCases = []lockCase{
	{
		"watch-wakes",
		`Unlock wakes every watch of the key, on every node, if the watch began before the try that was lost. A waiter that
misses its wake-up sleeps until the lock would have ended.`,
		watchWakes,
	},
	{
		"watch-again",
		`A watch wakes at every Unlock until it is stopped, because a waiter that was woken may lose the next try as well.
Otherwise it then sleeps until the lock ends.`,
		watchAgain,
	},
	{
		"watch-stops",
		`A watch that was stopped is not woken again, and the other watches of the key continue. A watch that stays is a
leak per wait (G8). If stop ends the other watches, their waiters sleep until the lock ends.`,
		watchStops,
	},
	{
		"watch-breaks",
		`A watch whose connection breaks wakes when the connection is made again, because it may have missed an Unlock.
Otherwise its waiter sleeps until the lock would have ended.`,
		watchBreaks,
	},
}

// lockWhenWoken takes the lock. After a lost try it waits for a wake-up before the next try. It may need several
// wake-ups, because a wake-up is a hint.
func (l *locks) lockWhenWoken(d driver.Locks, wake <-chan struct{}, key, token string) {
	l.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for !l.try(d, key, token, long).Won {
		select {
		case <-wake:
		case <-timer.C:
			l.Fatalf("TryLock(%q, %s) was lost, and no wake-up came for %v after the Unlock", key, token, patience)
		}
	}
}

func watchWakes(l *locks) {
	l.win(l.A, key, "a#1", long)
	same, stopSame := l.A.Watch(key)
	defer stopSame()
	first, stopFirst := l.B.Watch(key)
	defer stopFirst()
	second, stopSecond := l.B.Watch(key)
	defer stopSecond()
	l.lose(l.B, key, "b#1", long)
	l.unlock(l.A, key, "a#1", true)
	all := []<-chan struct{}{same, first, second}
	for _, wake := range all {
		l.wantWake(wake)
	}
	for i, wake := range all {
		token := fmt.Sprintf("b#%d", i)
		l.lockWhenWoken(l.B, wake, key, token)
		l.unlock(l.B, key, token, true)
	}
}

// wantWake demands a wake-up.
func (l *locks) wantWake(wake <-chan struct{}) {
	l.Helper()
	wait(l, wake, "a wake-up after an Unlock")
}

func watchAgain(l *locks) {
	wake, stop := l.B.Watch(key)
	defer stop()
	for i := range 5 {
		a, b := fmt.Sprintf("a#%d", i), fmt.Sprintf("b#%d", i)
		drain(wake)
		l.win(l.A, key, a, long)
		l.lose(l.B, key, b, long)
		l.unlock(l.A, key, a, true)
		l.wantWake(wake)
		l.lockWhenWoken(l.B, wake, key, b)
		l.unlock(l.B, key, b, true)
	}
}

func watchStops(l *locks) {
	stays, stopStays := l.B.Watch(key)
	defer stopStays()
	ends, stop := l.B.Watch(key)
	l.win(l.A, key, "a#1", long)
	l.unlock(l.A, key, "a#1", true)
	l.wantWake(stays)
	l.wantWake(ends)
	stop()
	drain(ends)
	drain(stays)
	for i := range 3 {
		a, b := fmt.Sprintf("a#%d", i), fmt.Sprintf("b#%d", i)
		l.win(l.A, key, a, long)
		l.lose(l.B, key, b, long)
		l.unlock(l.A, key, a, true)
		l.wantWake(stays)
		l.lockWhenWoken(l.B, stays, key, b)
		l.unlock(l.B, key, b, true)
	}
	if drain(ends) {
		l.Fatalf("a watch was woken after it had been stopped")
	}
}

func watchBreaks(l *locks) {
	needs(l, "LockWorld.Break", l.Break != nil)
	wake, stop := l.B.Watch(key)
	defer stop()
	for i := range 2 {
		a, b := fmt.Sprintf("a#%d", i), fmt.Sprintf("b#%d", i)
		l.win(l.A, key, a, long)
		l.lose(l.B, key, b, long)
		drain(wake)
		l.Break()
		l.unlock(l.A, key, a, true)
		l.wantWake(wake)
		l.lockWhenWoken(l.B, wake, key, b)
		l.unlock(l.B, key, b, true)
	}
}

// drain takes a wake-up from the channel, and reports whether there was one. A closed channel has none.
func drain(wake <-chan struct{}) bool {
	select {
	case _, woken := <-wake:
		return woken
	default:
		return false
	}
}

var lockRaceCases = []lockCase{
	{
		"race",
		`For any number of nodes that race for a lock, one holds it at a time, and the fences rise in the order of the
holders. A step that consists of two commands passes every test with one node and fails here: another node acts
between the two.`,
		lockRace,
	},
}

func lockRace(l *locks) {
	var wg sync.WaitGroup
	var held atomic.Int32
	var last, wins atomic.Uint64
	for i := range racers {
		d := l.A
		if i%2 == 1 {
			d = l.B
		}
		wg.Go(func() {
			for r := range rounds {
				token := fmt.Sprintf("n%d#%d", i, r)
				s, err := d.TryLock(l.ctx, key, token, long)
				if err != nil {
					l.Errorf("TryLock: %v", err)
					return
				}
				if !s.Won {
					runtime.Gosched()
					continue
				}
				l.alone(&held, &last, s.Fence)
				wins.Add(1)
				if mine, err := d.Unlock(l.ctx, key, token); err != nil || !mine {
					l.Errorf("Unlock of the holder = %v, %v", mine, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if wins.Load() == 0 {
		l.Fatalf("no node won the lock in %d tries", racers*rounds)
	}
	l.win(l.A, key, "a#1", long)
}

// alone is called by each holder of the lock. It demands that no other holder is there and that fence is the largest.
func (l *locks) alone(held *atomic.Int32, last *atomic.Uint64, fence uint64) {
	if n := held.Add(1); n > 1 {
		l.Errorf("%d holders of the lock at once", n)
	}
	before := last.Swap(fence)
	for range 3 {
		runtime.Gosched()
	}
	if !l.noFence && fence <= before {
		l.Errorf("fence %d after %d, want it larger", fence, before)
	}
	held.Add(-1)
}
