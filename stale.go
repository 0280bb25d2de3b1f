package refill

import (
	"math"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file holds every decision about time, as pure functions: the current moment and random numbers are arguments. A
// moment is a number of microseconds since 1970, by the store's clock. So all nodes decide alike, whatever their own
// clocks say.

// freshness is what may be done with a value at a moment. In the course of its life, a value passes through the
// constants from first to last.
type freshness uint8

const (
	fresh      freshness = iota // serve the value
	refreshDue                  // serve the value as fresh, and start a refresh
	stale                       // serve the value, and start a refresh
	errorOnly                   // serve the value only if its refill fails
	expired                     // do not serve the value
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

// maxFuture is how far in the future a load may have begun, in microseconds. The nodes' estimates of the store's clock
// differ by less than maxFuture. If a load began further in the future, the store's clock was set back since.
const maxFuture = int64(time.Second / time.Microsecond)

// lifeOf returns the life of the value in a record. StaleFor and StaleIfError both count from the end of freshness (RFC
// 5861). Expire may have moved the end of freshness to an earlier moment, but never to a later moment.
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

// expiredAt returns the life of a value that Expire or ExpireTag has marked as stale at the moment at. StaleFor and
// StaleIfError count from that moment. Freshness ends at the start of the load, so the value is fresh on no node, even
// if a node's estimate of the store's clock is a little behind. If the value was stale before that moment, its life
// stays as it is.
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

// wasExpired reports whether Expire or ExpireTag ended the freshness of the value, or the value was never fresh.
func (l life) wasExpired() bool { return l.freshUntil <= l.began }

// at returns the freshness of a value at the moment now. If the load of the value began in the future, the clock was
// set back since. Then the age of the value is unknown, so the value counts as expired.
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

// inL1 returns the freshness of an entry of L1. Until trustUntil (the end of LocalTTL), the entry is as fresh as its
// value. After trustUntil, a fresh entry counts as stale or, if StaleFor is 0, as expired. The reason: this process may
// have missed the announcement of an invalidation. An entry is superseded if another node has announced a newer value.
// A superseded entry counts as stale: it is served while the newer value is fetched.
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
// than the value lives, callers on other nodes that waited for the value must still find it.
func (l life) keep(now int64) time.Duration { return max(span(l.end-now), minKeep) }

const minKeep = time.Second

// spans are how long a value lives.
type spans struct {
	ttl                    time.Duration
	staleFor, staleIfError time.Duration // both count from the end of ttl
	follows                bool          // Config.StaleIfError is not set; a load that sets StaleFor then sets both
}

// of returns the spans of a value whose load has set t. s holds the settings of Config. If the load has set a TTL of 0,
// the value is not kept: its StaleFor and StaleIfError are 0 as well, unless the load has set them.
func (s spans) of(t terms) spans {
	if s.ttl = t.ttl.or(s.ttl); t.ttl.set && s.ttl == 0 {
		s.staleFor, s.staleIfError = 0, 0
	}
	if t.staleFor.set && s.follows {
		s.staleIfError = t.staleFor.d
	}
	s.staleFor, s.staleIfError = t.staleFor.or(s.staleFor), t.staleIfError.or(s.staleIfError)
	return s
}

// forbids reports whether a failed load forbids to serve the old value. t is what the load has set, l is the life of
// the old value, and s holds the settings of Config. The load can limit how long the old value is served in place of an
// error. The limit counts from the end of freshness of the old value. The load cannot forbid a value that is still
// fresh.
func (s spans) forbids(t terms, l life, now int64) bool {
	limit := t.staleIfError
	if !limit.set {
		if limit = t.staleFor; !s.follows {
			limit.d = max(limit.d, s.staleIfError)
		}
	}
	f := l.at(now)
	return limit.set && (f == stale || f == errorOnly) && now >= l.freshUntil+limit.d.Microseconds()
}

// publishedLate reports whether a value is published after the end of its TTL, because its load took too long. A value
// with a TTL of 0 is never late.
func (l life) publishedLate(now int64) bool { return l.freshUntil > l.began && now >= l.freshUntil }

func span(micros int64) time.Duration { return time.Duration(micros) * time.Microsecond }

// micros returns t as microseconds since 1970, and 0 for the zero time.
func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// jittered shortens ttl by the share jitter·random, where random is in [0, 1). It never lengthens ttl, because no value
// may be fresh for longer than its TTL.
func jittered(ttl time.Duration, jitter, random float64) time.Duration {
	return ttl - time.Duration(float64(ttl)*jitter*random)
}

// refreshFrom returns the moment from which a fresh value may be refreshed. EarlyRefresh (share) and XFetch (beta) each
// give a moment, and the earlier moment counts. A share or a beta of 0 gives no moment. With ttl as the time from began
// to freshUntil, EarlyRefresh gives began + share·ttl. XFetch gives freshUntil − beta·took·−ln(random), where took is
// how long the load took and random is in (0, 1]. The moment of XFetch is never in the first half of ttl. Otherwise a
// value whose load takes as long as the value lives would be refreshed without end. The source of XFetch is Vattani,
// Chierichetti, Lowenstein, Optimal Probabilistic Cache Stampede Prevention, PVLDB 8(8), 2015.
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

// uniform maps the hash of a token to a number in (0, 1], which XFetch uses as its random number. Within a process, a
// token always has the same hash. So a process that reads a record again gets the same number again. Each process
// hashes with a seed of its own. So the processes get different numbers.
func uniform(hash uint64) float64 { return float64(hash>>11+1) / (1 << 53) }

// backOff returns the back-off after a number of failures in a row. It begins with first, and doubles with each further
// failure, up to most.
func backOff(first, most time.Duration, failures int) time.Duration {
	for ; failures > 1 && first < most; failures-- {
		first *= 2
	}
	return min(first, most)
}

// yieldFor is how long a node lets other nodes go first if its last loads failed. took is how long the last of these
// loads ran. The result is took, but 50 ms at least and lockTTL at most.
func yieldFor(took, lockTTL time.Duration) time.Duration {
	return min(max(took, 50*time.Millisecond), lockTTL)
}

// tickOf is the interval at which the coarse clock of L1 reads the time: ttl/200, but 1 ms at least and 50 ms at most.
func tickOf(ttl time.Duration) time.Duration {
	return min(max(ttl/200, time.Millisecond), 50*time.Millisecond)
}

// tooLong reports whether left, the rest of a back-off, is longer than the back-off can be. said is its length as the
// failed node has noted it, and 0 if that node has noted none. If left exceeds both said and MaxErrorTTL by more than a
// minute, the store's clock was set back.
func tooLong(left, said, maxErrorTTL time.Duration) bool {
	return left > max(said, maxErrorTTL)+time.Minute
}

// renewEvery is the time between two renewals of a lease. A third of ttl leaves time for two more tries if one renewal
// fails.
func renewEvery(ttl time.Duration) time.Duration { return ttl / 3 }

// waitFor is how long a caller waits for the lease of another holder if no announcement comes: the remaining life of
// the lease, plus 2 ms that the store may have rounded off. If left is 0 (unknown) or longer than a lease can live,
// waitFor counts with lockTTL.
func waitFor(left, lockTTL time.Duration) time.Duration {
	if left <= 0 || left > lockTTL {
		left = lockTTL
	}
	return left + 2*time.Millisecond
}

// lineDue reports whether a kind of line may be logged again, a minute after the last such line. The times are Unix
// microseconds, and last is 0 before the first line. If now is before last, the clock was set back, and the line is
// due.
func lineDue(last, now int64) bool {
	return last == 0 || now < last || now-last >= time.Minute.Microseconds()
}
