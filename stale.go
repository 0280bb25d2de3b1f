package refill

import (
	"math"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file holds every decision about time, as pure functions: the current moment and random numbers are arguments. A
// moment is a number of microseconds by the store's clock. So all nodes agree, whatever their own clocks say.

// freshness is what may be done with a value at a moment. With time the freshness of a value only grows.
type freshness uint8

const (
	fresh      freshness = iota // serve it
	refreshDue                  // serve it as fresh, and refresh it before it ends
	stale                       // serve it, and refresh it
	errorOnly                   // serve it only if its refill fails
	expired                     // do not serve it
)

func (f freshness) String() string {
	return nameOf(int(f), []string{"fresh", "refresh-due", "stale", "error-only", "expired"})
}

// life is the life of one value:
//
//	began ─────────── refreshAt ─────── freshUntil ──────── staleUntil ──────── end
//	     fresh:            refreshDue:            stale:              errorOnly:     expired
//	     served            served, refreshed      served, refreshed   served if the load fails
type life struct{ began, refreshAt, freshUntil, staleUntil, end int64 }

// maxFuture is how far in the future a load may have begun. Clocks that are read over a network differ by less than
// maxFuture. A clock that was set back differs by more.
const maxFuture = int64(time.Second / time.Microsecond)

// lifeOf derives the life of a record. StaleFor and StaleIfError both count from the end of freshness (RFC 5861).
// Expire may have made the end of freshness earlier, but never later.
func lifeOf(r *driver.Record) life {
	l := life{began: micros(r.LoadBegan), freshUntil: micros(r.FreshUntil)}
	l.refreshAt = l.freshUntil
	l.staleUntil = l.freshUntil + r.StaleFor.Microseconds()
	l.end = max(l.staleUntil, l.freshUntil+r.StaleIfError.Microseconds())
	if e := micros(r.ExpiredAt); e != 0 {
		return l.expiredAt(e)
	}
	return l
}

// expiredAt is the life of a value that was expired at a moment. The windows of StaleFor and StaleIfError count from
// that moment. The value is no longer fresh on any node, even if a node's estimate of the store's clock is a little
// behind. The value never becomes younger.
func (l life) expiredAt(at int64) life {
	if at >= l.freshUntil {
		return l
	}
	staleFor, errorFor := l.staleUntil-l.freshUntil, l.end-l.freshUntil
	l.freshUntil = min(l.began, at)
	l.refreshAt, l.staleUntil, l.end = l.freshUntil, l.freshUntil, l.freshUntil
	if staleFor > 0 {
		l.staleUntil = at + staleFor
	}
	if errorFor > 0 {
		l.end = at + errorFor
	}
	return l
}

// at judges a value. A value from the future was stored before the clock was set back. Its age is unknown, so it counts
// as expired.
func (l life) at(now int64) freshness {
	switch {
	case now < l.notBefore() || now >= l.end && now >= l.freshUntil:
		return expired
	case now < l.refreshAt:
		return fresh
	case now < l.freshUntil:
		return refreshDue
	case now < l.staleUntil:
		return stale
	}
	return errorOnly
}

// notBefore is the earliest moment at which the value can be served.
func (l life) notBefore() int64 { return l.began - maxFuture }

// inL1 judges an entry of L1. The entry is trusted until the end of LocalTTL. After that moment, a lost announcement
// may have invalidated the entry, so the entry counts as stale. If no stale value may be served, the entry counts as
// expired. An entry is superseded if this process was told that a refill has replaced it. A superseded entry is served
// while the new value is fetched.
func (l life) inL1(now, trustUntil int64, superseded bool) freshness {
	f := l.at(now)
	switch {
	case f > refreshDue || now < trustUntil && !superseded:
		return f
	case superseded || l.staleUntil > l.freshUntil:
		return stale
	}
	return expired
}

// age is the time since the load began. It is never negative.
func (l life) age(now int64) time.Duration { return span(max(0, now-l.began)) }

// remaining is how much longer the value is fresh. It is never negative.
func (l life) remaining(now int64) time.Duration { return span(max(0, l.freshUntil-now)) }

// keep is how long the store has to keep a value: to the end of its life, and at least minKeep. If the load took longer
// than the value lives, the callers that waited for the value must still find it.
func (l life) keep(now int64) time.Duration { return max(span(l.end-now), minKeep) }

const minKeep = time.Second

func span(micros int64) time.Duration { return time.Duration(micros) * time.Microsecond }

// micros is t since 1970, and 0 for the zero time.
func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// jittered shortens ttl by a share of at most jitter. random, in [0, 1), decides how large the share is. jittered never
// lengthens ttl, because TTL is a promise.
func jittered(ttl time.Duration, jitter, random float64) time.Duration {
	return ttl - time.Duration(float64(ttl)*jitter*random)
}

// refreshFrom returns the moment from which a fresh value may be refreshed: the earlier of two moments. EarlyRefresh
// sets one of them, as a share of the value's time, which is the time from began to freshUntil. XFetch sets the other:
// beta·delta·−ln(random) before freshUntil, where delta is how long the load took and random is in (0, 1]. A share or a
// beta of 0 is off. XFetch never begins in the first half of the value's time. Otherwise a value whose load takes as
// long as the value lives would be refreshed without end. The source of XFetch is Vattani, Chierichetti, Lowenstein,
// Optimal Probabilistic Cache Stampede Prevention, PVLDB 8(8), 2015.
func refreshFrom(l life, took time.Duration, share, beta, random float64) int64 {
	from, ttl := l.freshUntil, float64(l.freshUntil-l.began)
	if share > 0 {
		from = min(from, l.began+int64(ttl*share))
	}
	if beta > 0 {
		ahead := min(beta*float64(took.Microseconds())*-math.Log(random), ttl/2)
		from = min(from, l.freshUntil-int64(ahead))
	}
	return from
}

// uniform maps a hash to a number in (0, 1]. One process hashes a token to the same number each time, and another
// process hashes it to another number. So a hit draws no random number, and a process that reads a record again does
// not draw again.
func uniform(hash uint64) float64 { return float64(hash>>11+1) / (1 << 53) }

// backOff is how long no node asks the database for a key after this many failures in a row.
func backOff(first, most time.Duration, failures int) time.Duration {
	for ; failures > 1 && first < most; failures-- {
		first *= 2
	}
	return min(first, most)
}

// tickOf is how often the coarse clock of L1 is read.
func tickOf(ttl time.Duration) time.Duration {
	return min(max(ttl/200, time.Millisecond), 50*time.Millisecond)
}

// tooLong reports whether a back-off lasts longer than the Config of any node can mean. If so, the store's clock was
// set back.
func tooLong(left, maxErrorTTL time.Duration) bool { return left > maxErrorTTL+time.Minute }

// renewEvery leaves time for two more tries within a lease if one renewal fails.
func renewEvery(ttl time.Duration) time.Duration { return ttl / 3 }

// waitFor is how long a flight waits for a lease without an announcement: until the lease ends by itself, plus the time
// that the store may have rounded off. A lease cannot last longer than lockTTL.
func waitFor(left, lockTTL time.Duration) time.Duration {
	if left <= 0 || left > lockTTL {
		left = lockTTL
	}
	return left + 2*time.Millisecond
}
