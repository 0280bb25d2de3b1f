package refill

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

func newTestLocal(t *testing.T, cfg Config) *local[int] {
	t.Helper()
	cfg.TTL = time.Hour
	cfg, err := cfg.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	clock := newCoarseClock(time.Hour, time.Now) // all is within one tick
	t.Cleanup(clock.close)
	l, err := newLocal[int](&cfg, clock)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	l.heard(true)
	return l
}

// The front counts what it holds, keeps its bound, and still carries what was put last.
func TestFrontKeepsItsBound(t *testing.T) {
	for name, cfg := range map[string]Config{
		"entries": {LocalEntries: 1000}, "bytes": {LocalBytes: 1 << 16}, "one": {LocalEntries: 1}, "few bytes": {LocalBytes: 100, LocalEntries: 10},
	} {
		t.Run(name, func(t *testing.T) {
			l := newTestLocal(t, cfg)
			var wg sync.WaitGroup
			for g := range 4 {
				wg.Go(func() {
					r := rand.New(rand.NewPCG(1, uint64(g)))
					for range 5000 {
						key := fmt.Sprint(r.IntN(3000))
						switch r.IntN(10) {
						case 0:
							l.void(key)
						case 1, 2, 3:
							l.get(key)
						default:
							l.put(&entry[int]{key: key, hash: l.hash(key), at: l.note(key)}, r.IntN(2000))
						}
					}
				})
			}
			wg.Wait()
			var sum int64
			for i := range l.front.slots {
				sum += costOf(l.front.slots[i].Load())
			}
			if used := l.front.used.Load(); sum != used || used > l.front.room {
				t.Errorf("%d in the slots, %d counted, room for %d", sum, used, l.front.room)
			}
			e := &entry[int]{key: "last", hash: l.hash("last"), at: l.note("last")}
			l.put(e, 20)
			if e.cost <= l.front.room && l.get("last") != e {
				t.Error("the front does not carry what was just put")
			}
		})
	}
}

func TestEpochs(t *testing.T) {
	l := newTestLocal(t, Config{})
	fresh := func(key string) *entry[int] {
		e := &entry[int]{key: key, hash: l.hash(key), at: l.note(key)}
		l.put(e, 1)
		return e
	}
	e := fresh("k")
	if !l.current(e) {
		t.Fatal("not current")
	}
	l.void("k")
	if l.current(e) || l.unvoided(e) {
		t.Error("void voids nothing")
	}
	e = fresh("k")
	l.heard(true) // it stands already
	if !l.current(e) {
		t.Error("up while up voids")
	}
	l.heard(false)
	if l.current(e) || !l.unvoided(e) {
		t.Error("a break: no longer current, but nothing was heard against it")
	}
	whileDown := fresh("k2")
	if l.current(whileDown) {
		t.Error("read while announcements cannot be heard, and current")
	}
	l.heard(true)
	if l.current(e) || l.current(whileDown) {
		t.Error("the return makes what was read before current")
	}
	e = fresh("k")
	l.shut()
	l.heard(false)
	l.heard(true)
	if l.current(e) || l.current(fresh("k3")) {
		t.Error("current after shut")
	}
}

// A slot of the front goes to the key that is asked for more, also where both are in use all the time; but not while
// ristretto does not have the other one, which would be lost.
func TestTheHottestStandInFront(t *testing.T) {
	l := newTestLocal(t, Config{LocalEntries: 100})
	enter := func(key string) *entry[int] {
		e := &entry[int]{key: key, hash: l.hash(key), at: l.note(key)}
		l.put(e, 1)
		l.back.Wait()
		return e
	}
	hot := enter("hot")
	var cold *entry[int]
	for i := 0; cold == nil || l.front.slot(cold.hash) != l.front.slot(hot.hash); i++ {
		if key := fmt.Sprint(i); l.front.slot(l.hash(key)) == l.front.slot(hot.hash) {
			cold = enter(key)
		}
	}
	stands := func() string { return l.front.slot(hot.hash).Load().key }
	inFront := 0
	for i := range 20_000 {
		l.get("hot")
		if i%20 == 0 {
			l.get(cold.key)
		}
		if stands() == "hot" {
			inFront++
		}
	}
	if inFront < 15_000 {
		t.Errorf("a key that is asked for 20 times as often stood in front in %d of 20,000 cases", inFront)
	}
	l.front.put(cold)
	l.back.Del(cold.hash)
	l.back.Wait()
	for range 1000 {
		l.get("hot")
	}
	if stands() != cold.key {
		t.Error("an entry that ristretto does not have was sent away while it was in use")
	}
}
