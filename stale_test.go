package refill

import (
	"math"
	"testing"
	"time"
)

func TestLifeAt(t *testing.T) {
	r := Record{
		LoadBegan: time.UnixMicro(1000), FreshUntil: time.UnixMicro(2000),
		StaleFor: 500 * time.Microsecond, StaleIfError: 800 * time.Microsecond,
	}
	for now, want := range map[int64]Freshness{
		999: Fresh, 1000: Fresh, 1999: Fresh,
		2000: Stale, 2499: Stale,
		2500: Spare, 2799: Spare,
		2800: Dead, 1 << 40: Dead,
		1000 - maxFuture: Fresh, 1000 - maxFuture - 1: Dead, // the clock was set back
	} {
		if got := lifeOf(&r).at(now); got != want {
			t.Errorf("at %d: %v, want %v", now, got, want)
		}
	}
	r.ExpiredAt = time.UnixMicro(1200)
	if l := lifeOf(&r); l.at(1100) != Stale || l.stale != 1700 || l.dead != 2000 {
		t.Errorf("expired at 1200: %+v, its windows must count from there, and no clock make it fresh again", l)
	}
	none := Record{LoadBegan: r.LoadBegan, FreshUntil: r.FreshUntil, ExpiredAt: r.ExpiredAt}
	if f := lifeOf(&none).at(1100); f != Dead {
		t.Errorf("expired, and nothing stale may be served: %v by a clock that is behind", f)
	}
	r.ExpiredAt = time.UnixMicro(2600) // Expire of a value that is stale already must not make it younger
	if l := lifeOf(&r); l.fresh != 2000 {
		t.Errorf("expired at 2600: fresh until %d, want 2000", l.fresh)
	}
}

func TestInL1(t *testing.T) {
	withStale := life{began: 0, early: 80, fresh: 100, stale: 200, dead: 300}
	without := life{began: 0, early: 80, fresh: 100, stale: 100, dead: 100}
	for _, c := range []struct {
		name         string
		l            life
		now, trusted int64
		superseded   bool
		want         Freshness
	}{
		{"fresh", without, 50, 60, false, Fresh},
		{"to be refreshed early", without, 80, 100, false, Early},
		{"past LocalTTL, nothing stale allowed: the store is asked", without, 60, 60, false, Dead},
		{"past LocalTTL, to be refreshed early", without, 90, 60, false, Dead},
		{"past LocalTTL, stale allowed", withStale, 60, 60, false, Stale},
		{"superseded: never a wait", without, 50, 60, true, Stale},
		{"superseded and past its time", without, 100, 100, true, Dead},
		{"past its time", withStale, 100, 100, false, Stale},
		{"only for an error", withStale, 200, 100, false, Spare},
	} {
		if got := c.l.inL1(c.now, c.trusted, c.superseded); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// FuzzLife: never served past its bounds, never younger as time goes by, never a negative age.
func FuzzLife(f *testing.F) {
	for _, now := range []int64{999, 1999, 2000, 2499, 2500, 2799, 2800} { // both sides of every bound
		f.Add(int64(1000), int64(1000), int64(500), int64(800), int64(0), now, int64(1))
	}
	f.Add(int64(1000), int64(1000), int64(500), int64(800), int64(34), int64(999), int64(1)) // expired before it began
	f.Add(int64(1), int64(0), int64(0), int64(0), int64(5), int64(5), int64(1<<40))
	f.Fuzz(func(t *testing.T, began, ttl, staleFor, staleIfError, expired, now, later int64) {
		clamp := func(n int64) int64 { return n & (1<<50 - 1) }
		began, ttl, staleFor, staleIfError = clamp(began), clamp(ttl), clamp(staleFor), clamp(staleIfError)
		expired, now, later = clamp(expired), clamp(now), clamp(later)
		r := Record{
			LoadBegan: time.UnixMicro(began), FreshUntil: time.UnixMicro(began + ttl),
			StaleFor: span(staleFor), StaleIfError: span(staleIfError),
		}
		if expired != 0 {
			r.ExpiredAt = time.UnixMicro(expired)
		}
		l := lifeOf(&r)
		l.early = refreshFrom(l, span(later), float64(later%100)/100, float64(now%5), float64(1+now%1000)/1000)
		if l.early > l.fresh || l.early < l.began && l.fresh >= l.began {
			t.Errorf("refreshed from %d, fresh from %d to %d", l.early, l.began, l.fresh)
		}
		if now-began >= ttl && l.at(now) <= Early {
			t.Errorf("fresh past TTL")
		}
		if now-began >= ttl+staleFor && l.at(now) <= Stale {
			t.Errorf("served stale past TTL + StaleFor")
		}
		if now-began >= ttl+max(staleFor, staleIfError) && l.at(now) != Dead {
			t.Errorf("served past every window")
		}
		if expired != 0 && now >= expired && l.at(now) <= Early {
			t.Errorf("fresh after Expire")
		}
		if now >= began && l.at(now+later) < l.at(now) {
			t.Errorf("%v at %d, but %v at %d: grew younger", l.at(now), now, l.at(now+later), now+later)
		}
		if l.age(now) < 0 || l.remaining(now) < 0 || l.keep(now) < minKeep {
			t.Errorf("age %v, remaining %v, keep %v", l.age(now), l.remaining(now), l.keep(now))
		}
		if f := l.inL1(now, l.fresh, true); f <= Early {
			t.Errorf("a superseded entry is fresh")
		}
	})
}

func TestJitterOnlyShortens(t *testing.T) {
	for _, rnd := range []float64{0, 0.25, 0.999999} {
		got := jittered(time.Second, 0.1, rnd)
		if got > time.Second || got < 900*time.Millisecond {
			t.Errorf("jittered(1s, 0.1, %v) = %v", rnd, got)
		}
	}
	if got := jittered(time.Second, 0, 0.5); got != time.Second {
		t.Errorf("no jitter: %v", got)
	}
}

func TestRefreshFrom(t *testing.T) {
	l := life{began: 1000, fresh: 2000}
	const took = 100 * time.Microsecond
	for _, c := range []struct {
		name             string
		share, beta, rnd float64
		want             int64
	}{
		{"off", 0, 0, 0.5, 2000},
		{"a share of its time", 0.8, 0, 0.5, 1800},
		{"beta·delta·−ln(rnd) before its end", 0, 1, math.Exp(-1), 1900},
		{"twice that", 0, 2, math.Exp(-1), 1800},
		{"the luckiest draw", 0, 1, 1, 2000},
		{"never in the first half", 0, 1, 1e-9, 1500},
		{"whichever is first", 0.95, 1, math.Exp(-1), 1900},
	} {
		if got := refreshFrom(l, took, c.share, c.beta, c.rnd); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

func TestBackOff(t *testing.T) {
	for n, want := range []time.Duration{1, 1, 2, 4, 5, 5} {
		if got := backOff(time.Second, 5*time.Second, n); got != want*time.Second {
			t.Errorf("after %d failures %v, want %v", n, got, want*time.Second)
		}
	}
	if got := backOff(time.Second, time.Second, math.MaxInt32); got != time.Second {
		t.Errorf("one that does not grow: %v", got)
	}
}

func TestLookAgain(t *testing.T) {
	const ttl = time.Second
	for left, most := range map[time.Duration]time.Duration{
		300 * time.Millisecond: 310 * time.Millisecond, // the holder's lease, not a whole one of ours
		0:                      ttl + 10*time.Millisecond,
		-1:                     ttl + 10*time.Millisecond,
		time.Hour:              ttl + 10*time.Millisecond,
	} {
		if got := lookAgain(left, ttl); got <= min(max(left, 0), ttl) && left > 0 || got > most {
			t.Errorf("lookAgain(%v) = %v, want at most %v", left, got, most)
		}
	}
}
