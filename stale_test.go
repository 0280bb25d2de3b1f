package refill

import (
	"hash/maphash"
	"math"
	"testing"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file tests the functions of stale.go, which make all decisions about time.

func TestLifeAt(t *testing.T) {
	r := driver.Record{
		LoadBegan: time.UnixMicro(1000), FreshUntil: time.UnixMicro(2000),
		StaleFor: 500 * time.Microsecond, StaleIfError: 800 * time.Microsecond,
	}
	for now, want := range map[int64]freshness{
		999: fresh, 1000: fresh, 1999: fresh,
		2000: stale, 2499: stale,
		2500: errorOnly, 2799: errorOnly,
		2800: expired, 1 << 40: expired,
		1000 - maxFuture: fresh, 1000 - maxFuture - 1: expired, // the clock was set back after the load
	} {
		if got := lifeOf(&r).at(now); got != want {
			t.Errorf("at %d: got %v, want %v", now, got, want)
		}
	}
	r.ExpiredAt = time.UnixMicro(1200)
	if l := lifeOf(&r); l.at(1100) != stale || l.staleUntil != 1700 || l.end != 2000 {
		t.Errorf("expired at 1200: got %+v, want stale at 1100, stale until 1700, and the end at 2000", l)
	}
	none := driver.Record{LoadBegan: r.LoadBegan, FreshUntil: r.FreshUntil, ExpiredAt: r.ExpiredAt}
	if f := lifeOf(&none).at(1100); f != expired {
		t.Errorf("expired at 1200, without StaleFor: got %v at 1100, by a clock that is behind, want expired", f)
	}
	r.ExpiredAt = time.UnixMicro(2600) // Expire of a stale value must not lengthen its life
	if l := lifeOf(&r); l.freshUntil != 2000 {
		t.Errorf("expired at 2600: got fresh until %d, want 2000", l.freshUntil)
	}
}

func TestInL1(t *testing.T) {
	withStale := life{began: 0, refreshAt: 80, freshUntil: 100, staleUntil: 200, end: 300}
	without := life{began: 0, refreshAt: 80, freshUntil: 100, staleUntil: 100, end: 100}
	for _, c := range []struct {
		name         string
		l            life
		now, trusted int64
		superseded   bool
		want         freshness
	}{
		{"fresh", without, 50, 60, false, fresh},
		{"refresh due", without, 80, 100, false, refreshDue},
		{"past LocalTTL, no StaleFor: the store is read first", without, 60, 60, false, expired},
		{"past LocalTTL, refresh due", without, 90, 60, false, expired},
		{"past LocalTTL, within StaleFor", withStale, 60, 60, false, stale},
		{"superseded: callers do not wait", without, 50, 60, true, stale},
		{"superseded and past TTL", without, 100, 100, true, expired},
		{"past TTL", withStale, 100, 100, false, stale},
		{"error-only", withStale, 200, 100, false, errorOnly},
	} {
		if got := c.l.inL1(c.now, c.trusted, c.superseded); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

// FuzzLife checks three rules for any record and any moment. No value counts as fresh past its TTL, as stale past the
// end of StaleFor, or as error-only past the end of StaleIfError. No value becomes fresher with time. No age is
// negative.
func FuzzLife(f *testing.F) {
	for _, now := range []int64{999, 1999, 2000, 2499, 2500, 2799, 2800} { // moments just before and at each bound
		f.Add(int64(1000), int64(1000), int64(500), int64(800), int64(0), now, int64(1))
	}
	f.Add(int64(1000), int64(1000), int64(500), int64(800), int64(34), int64(999), int64(1)) // ExpiredAt < LoadBegan
	f.Add(int64(1), int64(0), int64(0), int64(0), int64(5), int64(5), int64(1<<40))
	f.Fuzz(func(t *testing.T, began, ttl, staleFor, staleIfError, expiredAt, now, later int64) {
		clamp := func(n int64) int64 { return n & (1<<50 - 1) }
		began, ttl, staleFor, staleIfError = clamp(began), clamp(ttl), clamp(staleFor), clamp(staleIfError)
		expiredAt, now, later = clamp(expiredAt), clamp(now), clamp(later)
		r := driver.Record{
			LoadBegan: time.UnixMicro(began), FreshUntil: time.UnixMicro(began + ttl),
			StaleFor: span(staleFor), StaleIfError: span(staleIfError),
		}
		if expiredAt != 0 {
			r.ExpiredAt = time.UnixMicro(expiredAt)
		}
		l := lifeOf(&r)
		l.refreshAt = refreshFrom(l, span(later), float64(later%100)/100, float64(now%5), float64(1+now%1000)/1000)
		if l.refreshAt > l.freshUntil || l.refreshAt < l.began && l.freshUntil >= l.began {
			t.Errorf("got a refresh from %d on, want one between %d and %d, while the value is fresh",
				l.refreshAt, l.began, l.freshUntil)
		}
		if now-began >= ttl && l.at(now) <= refreshDue {
			t.Errorf("got %v past TTL, want it not fresh", l.at(now))
		}
		if now-began >= ttl+staleFor && l.at(now) <= stale {
			t.Errorf("got %v past TTL + StaleFor, want it not stale", l.at(now))
		}
		if now-began >= ttl+max(staleFor, staleIfError) && l.at(now) != expired {
			t.Errorf("got %v past TTL, StaleFor and StaleIfError, want expired", l.at(now))
		}
		if expiredAt != 0 && now >= expiredAt && l.at(now) <= refreshDue {
			t.Errorf("got %v after Expire, want it not fresh", l.at(now))
		}
		if now >= began && l.at(now+later) < l.at(now) {
			t.Errorf("got %v at %d, then %v at %d: the value became fresher", l.at(now), now, l.at(now+later), now+later)
		}
		if l.age(now) < 0 || l.remaining(now) < 0 || l.keep(now) < minKeep {
			t.Errorf("got age %v, remaining %v, keep %v, want none negative and keep at least %v",
				l.age(now), l.remaining(now), l.keep(now), minKeep)
		}
		if f := l.inL1(now, l.freshUntil, true); f <= refreshDue {
			t.Errorf("got %v for a superseded entry, want it not fresh", f)
		}
	})
}

func TestJitterOnlyShortens(t *testing.T) {
	for _, rnd := range []float64{0, 0.25, 0.999999} {
		got := jittered(time.Second, 0.1, rnd)
		if got > time.Second || got < 900*time.Millisecond {
			t.Errorf("jittered(1s, 0.1, %v) = %v, want 0.9s to 1s", rnd, got)
		}
	}
	if got := jittered(time.Second, 0, 0.5); got != time.Second {
		t.Errorf("jittered(1s, 0, 0.5) = %v, want 1s", got)
	}
}

func TestRefreshFrom(t *testing.T) {
	l := life{began: 1000, freshUntil: 2000}
	const took = 100 * time.Microsecond
	for _, c := range []struct {
		name             string
		share, beta, rnd float64
		want             int64
	}{
		{"off", 0, 0, 0.5, 2000},
		{"a share of TTL", 0.8, 0, 0.5, 1800},
		{"beta·delta·−ln(rnd) before the end", 0, 1, math.Exp(-1), 1900},
		{"a beta of 2", 0, 2, math.Exp(-1), 1800},
		{"the latest draw", 0, 1, 1, 2000},
		{"never in the first half", 0, 1, 1e-9, 1500},
		{"the earlier of share and draw", 0.95, 1, math.Exp(-1), 1900},
	} {
		if got := refreshFrom(l, took, c.share, c.beta, c.rnd); got != c.want {
			t.Errorf("%s: got %d, want %d", c.name, got, c.want)
		}
	}
}

func TestBackOff(t *testing.T) {
	for n, want := range []time.Duration{1, 1, 2, 4, 5, 5} {
		if got := backOff(time.Second, 5*time.Second, n); got != want*time.Second {
			t.Errorf("after %d failures: got %v, want %v", n, got, want*time.Second)
		}
	}
	if got := backOff(time.Second, time.Second, math.MaxInt32); got != time.Second {
		t.Errorf("a maximum equal to the first back-off: got %v, want 1s", got)
	}
}

func TestWaitFor(t *testing.T) {
	const ttl = time.Second
	for left, most := range map[time.Duration]time.Duration{
		300 * time.Millisecond: 310 * time.Millisecond, // the remaining time of the holder's lease, not a whole LockTTL
		0:                      ttl + 10*time.Millisecond,
		-1:                     ttl + 10*time.Millisecond,
		time.Hour:              ttl + 10*time.Millisecond,
	} {
		if got := waitFor(left, ttl); got <= min(max(left, 0), ttl) && left > 0 || got > most {
			t.Errorf("waitFor(%v) = %v, want at most %v", left, got, most)
		}
	}
}

// uniform draws the random number of XFetch from the token of a record and the seed of a node. The same token and seed
// must give the same number. Other tokens and other seeds must give other numbers. The number must not be 0, because
// refreshFrom takes the logarithm of the number.
func TestUniform(t *testing.T) {
	seen := make(map[float64]bool)
	for range 20 {
		seed := maphash.MakeSeed() // each node has its own seed
		draw := func(token string) float64 { return uniform(maphash.String(seed, token)) }
		x := draw("n#1")
		if x <= 0 || x > 1 || x != draw("n#1") || x == draw("n#2") {
			t.Errorf("got %v, then %v, and %v for another token, want the same number in (0, 1], then another one",
				x, draw("n#1"), draw("n#2"))
		}
		seen[x] = true
	}
	if len(seen) != 20 {
		t.Errorf("20 nodes drew %d different numbers, want 20", len(seen))
	}
	if least, most := uniform(0), uniform(math.MaxUint64); least <= 0 || most != 1 {
		t.Errorf("got draws from %v to %v, want (0, 1]", least, most)
	}
}
