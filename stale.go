package refill

import (
	"math"
	"time"
)

// This file decides everything about time: pure functions of moments that are handed in. A moment is a count of
// microseconds by the store's clock, so that all nodes agree whatever their own clocks say.

// Freshness is what may be done with a value at a moment. It only ever grows worse.
type Freshness uint8

// The ages of a value.
const (
	Fresh Freshness = iota // serve it
	Early                  // serve it as a fresh one, and refresh it before it ends
	Stale                  // serve it, and refresh it
	Spare                  // serve it only in place of an error
	Dead                   // do not serve it
)

// String returns the lower-case name.
func (f Freshness) String() string {
	return [...]string{"fresh", "early", "stale", "spare", "dead"}[min(f, Dead)]
}

// life is the life of one value:
//
//	began ────── early ────── fresh ────── stale ────── dead
//	     served       served,      served,      served
//	                  refreshed    refreshed    if the load fails
type life struct{ began, early, fresh, stale, dead int64 }

// maxFuture is how far ahead of now a load may have begun: more than clocks read over a network differ by, less than
// anybody would call a clock that was set back.
const maxFuture = int64(time.Second / time.Microsecond)

// lifeOf derives the life of a record. StaleFor and StaleIfError count from the end of freshness (RFC 5861), which
// Expire may have moved forward, never back.
func lifeOf(r *Record) life {
	l := life{began: micros(r.LoadBegan), fresh: micros(r.FreshUntil)}
	l.early = l.fresh
	l.stale = l.fresh + r.StaleFor.Microseconds()
	l.dead = max(l.stale, l.fresh+r.StaleIfError.Microseconds())
	if e := micros(r.ExpiredAt); e != 0 {
		return l.expiredAt(e)
	}
	return l
}

// expiredAt is the life of a value that was expired at a moment: its windows count from there, and it is fresh no more,
// also for a node whose idea of the store's clock is a moment behind. It never makes one younger.
func (l life) expiredAt(at int64) life {
	if at >= l.fresh {
		return l
	}
	staleFor, spareFor := l.stale-l.fresh, l.dead-l.fresh
	l.fresh = min(l.began, at)
	l.early, l.stale, l.dead = l.fresh, l.fresh, l.fresh
	if staleFor > 0 {
		l.stale = at + staleFor
	}
	if spareFor > 0 {
		l.dead = at + spareFor
	}
	return l
}

// at judges a value. One that seems to come from the future was stamped before the clock was set back: nobody knows
// its age, so it is dead.
func (l life) at(now int64) Freshness {
	switch {
	case l.began > now+maxFuture || now >= l.dead && now >= l.fresh:
		return Dead
	case now < l.early:
		return Fresh
	case now < l.fresh:
		return Early
	case now < l.stale:
		return Stale
	}
	return Spare
}

// age is how long ago the load began, never negative.
func (l life) age(now int64) time.Duration { return span(max(0, now-l.began)) }

// remaining is how much longer the value is fresh, never negative.
func (l life) remaining(now int64) time.Duration { return span(max(0, l.fresh-now)) }

// keep is how long the store has to hold a value: to its end, and long enough that those who waited for its load still
// find it when the load took longer than the value lives.
func (l life) keep(now int64) time.Duration { return max(span(l.dead-now), minKeep) }

const minKeep = time.Second

func span(micros int64) time.Duration { return time.Duration(micros) * time.Microsecond }

// jittered shortens ttl by up to the share jitter of it, rnd in [0, 1) says by how much. It never lengthens: TTL is a
// promise.
func jittered(ttl time.Duration, jitter, rnd float64) time.Duration {
	return ttl - time.Duration(float64(ttl)*jitter*rnd)
}

// refreshFrom is when a refresh of a value may begin that is still fresh, by what Config.EarlyRefresh says (share of its
// time, 0 = off) and Config.XFetch (beta, 0 = off), whichever is first. XFetch begins beta·delta·−ln(rnd) before the end,
// delta = how long the load took and rnd in (0, 1]: Vattani, Chierichetti, Lowenstein, Optimal Probabilistic Cache
// Stampede Prevention, PVLDB 8(8), 2015. Never in the first half of the value's time: one whose load takes as long as it
// lives would be refreshed without end.
func refreshFrom(l life, took time.Duration, share, beta, rnd float64) int64 {
	from, ttl := l.fresh, float64(l.fresh-l.began)
	if share > 0 {
		from = min(from, l.began+int64(ttl*share))
	}
	if beta > 0 {
		ahead := min(beta*float64(took.Microseconds())*-math.Log(rnd), ttl/2)
		from = min(from, l.fresh-int64(ahead))
	}
	return from
}

// backOff is how long the database is left alone after so many failures in a row.
func backOff(first, most time.Duration, failures int) time.Duration {
	for ; failures > 1 && first < most; failures-- {
		first *= 2
	}
	return min(first, most)
}

// tickOf is how often the coarse clock of a Loader is set: often enough for its TTL, and for nobody too often.
func tickOf(ttl time.Duration) time.Duration {
	return min(max(ttl/200, time.Millisecond), 50*time.Millisecond)
}

// tooLong says that a back-off lasts longer than any node's Config could mean: the store's clock was set back since.
func tooLong(left, maxErrorTTL time.Duration) bool { return left > maxErrorTTL+time.Minute }

// renewEvery leaves two more tries within a lease when one renewal fails.
func renewEvery(ttl time.Duration) time.Duration { return ttl / 3 }

// lookAgain is how long somebody who waits for a lease sleeps if nobody wakes them: until it ends by itself, plus what
// the store may have rounded off, and never longer than a lease can last.
func lookAgain(left, lockTTL time.Duration) time.Duration {
	if left <= 0 || left > lockTTL {
		left = lockTTL
	}
	return left + 2*time.Millisecond
}

// inL1 judges an entry of L1 that is trusted until a moment: past that, LocalTTL is over and an invalidation may have been
// missed, so it counts as stale, which is nothing where nothing stale may be served. A superseded one has been replaced
// by a refresh that this process heard of: it may be served on while the new one is fetched.
func (l life) inL1(now, trusted int64, superseded bool) Freshness {
	f := l.at(now)
	switch {
	case f > Early || now < trusted && !superseded:
		return f
	case superseded || l.stale > l.fresh:
		return Stale
	}
	return Dead
}
