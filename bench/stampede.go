package main

import (
	"context"
	"fmt"
	"time"

	"github.com/refill-go/refill/bench/peers"
)

// This suite measures one hot key in many processes, which is the main purpose of refill.

// aCallerEvery is the time from the begin of a caller's Get to the begin of its next Get. So 8 × 200 callers make
// 16,000 Gets a second.
const aCallerEvery = 100 * time.Millisecond

// staleFor is the StaleFor of the jobs that allow stale values. staleFor is so long that a stale value is always
// replaced before it expires.
const staleFor = 10 * time.Second

// A subject is a peer in one configuration.
type subject struct {
	name, peer string
	jitter     float64
}

// contenders returns the peers for which fits returns true, without the raw operations (Peer.Limit).
func (b *bench) contenders(fits func(peers.Peer) bool) []subject {
	return b.asTheyAre(func(p peers.Peer) bool { return !p.Limit && fits(p) })
}

// asTheyAre returns the peers for which fits returns true, each in its default configuration.
func (b *bench) asTheyAre(fits func(peers.Peer) bool) (s []subject) {
	for _, p := range b.subjects(fits) {
		s = append(s, subject{name: p.Name, peer: p.Name})
	}
	return s
}

// After refill, withoutJitter adds a second subject: refill without its default jitter. Jitter shortens TTL, so with
// jitter refill has slightly more than one load per TTL.
func withoutJitter(all []subject) (s []subject) {
	for _, one := range all {
		s = append(s, one)
		if one.peer == "refill" {
			s = append(s, subject{name: "refill, no jitter", peer: one.peer, jitter: -1})
		}
	}
	return s
}

// contest runs each subject once per round, and prints the table.
func (b *bench) contest(ctx context.Context, t *Table, subjects []subject, run func(s subject, round int)) error {
	for round := range b.rounds {
		for _, s := range subjects {
			if err := ctx.Err(); err != nil {
				return err
			}
			b.progress("%s %d/%d: %s", t.Name, round+1, b.rounds, s.name)
			run(s, round)
		}
	}
	b.done(t)
	return nil
}

func anyPeer(peers.Peer) bool     { return true }
func stalePeer(p peers.Peer) bool { return p.Stale }
func sharedPeer(p peers.Peer) bool {
	return p.Shared
}

// flow is a case of the suite in which the callers send Gets at a steady rate.
type flow struct {
	name, about string
	fits        func(peers.Peer) bool
	job         job
}

func (b *bench) flows() []flow {
	hot := job{TTL: time.Second, Load: 100 * time.Millisecond}.midLife(b.length)
	slow := job{TTL: 4 * time.Second, Load: 3 * time.Second}.midLife(b.length * 12 / 10)
	longer := job{TTL: time.Second, Load: 3 * time.Second}.midLife(b.length * 8 / 10)
	flows := []flow{
		{"stampede-hot", "A hot key expires", anyPeer, hot},
		{"stampede-slow", "A hot key expires and its load is slow", anyPeer, slow},
		{"stampede-longer", "The load takes longer than the value lives", anyPeer, longer},
	}
	for _, f := range flows {
		f.name, f.about, f.fits, f.job.StaleFor = f.name+"-stale", f.about+", stale values may be served", stalePeer, staleFor
		flows = append(flows, f)
	}
	return append(flows, flow{"stampede-invalidate", "The key is invalidated each second", sharedPeer, job{
		TTL: time.Minute, Load: 100 * time.Millisecond, Invalidate: time.Second,
	}.midLife(b.length)})
}

func stampede(ctx context.Context, b *bench) error {
	for _, f := range b.flows() {
		if err := b.part(ctx, f.name, func(ctx context.Context) error { return b.flow(ctx, f) }); err != nil {
			return err
		}
	}
	if err := b.part(ctx, "stampede-cold", b.coldStart); err != nil {
		return err
	}
	return b.part(ctx, "stampede-killed", b.killedLoader)
}

// part runs one table of a suite, if -tables matches the table.
func (b *bench) part(ctx context.Context, table string, run func(context.Context) error) error {
	if !b.tables.MatchString(table) {
		return nil
	}
	return run(ctx)
}

func (b *bench) flow(ctx context.Context, f flow) error {
	f.job.Way, f.job.Callers, f.job.Every = steady, b.callers, aCallerEvery
	t := &Table{Name: f.name, Title: fmt.Sprintf("%s: %d processes, %v. Each caller begins a Get every %v; one that "+
		"outlasts that also counts for those it held up. Quantiles are after the first value. Expiries: %.0f, as many "+
		"values as the run has room for, including the first one. %s %s",
		f.about, b.processes, f.job, aCallerEvery, f.job.expiries(), commandsMean, ageMeans(f.job)), Columns: []Column{
		{Name: "loads/expiry", Digits: 1}, {Name: "most at once"},
		{Name: "p50", Unit: "ms", Digits: 4}, {Name: "p99", Unit: "ms", Digits: 3},
		{Name: "p99.9", Unit: "ms", Digits: 3}, {Name: "max", Unit: "ms", Digits: 1},
		{Name: "commands/expiry"}, {Name: "trips/expiry"},
		{Name: "stale", Unit: "%", Digits: 1}, {Name: "oldest", Unit: "ms"}, {Name: "errors", Unit: "%", Digits: 2},
	}}
	return b.contest(ctx, t, withoutJitter(b.contenders(f.fits)), func(s subject, round int) {
		o := b.run(ctx, fleet{job: f.job.of(s), processes: b.processes})
		o.addTo(t, s.name, f.job)
		if round == 0 {
			t.Series = append(t.Series, o.loadsOverTime(s.name, f.job.For), o.percentiles(s.name))
		}
	})
}

const commandsMean = "Commands include those called in scripts, but not those that set up a connection; trips are " +
	"all reads of a socket by the server."

func ageMeans(j job) string {
	if j.Invalidate > 0 {
		return "Stale: served more than 20 ms after an Invalidate of its value; oldest: how long after at most."
	}
	return "Stale: older than TTL as from the end of its load; oldest: age from the begin of its load."
}

// of returns j with the peer and the jitter of s.
func (j job) of(s subject) job {
	j.Peer, j.Jitter = s.peer, s.jitter
	return j
}

func (o *outcome) addTo(t *Table, subject string, j job) {
	expiries := j.expiries()
	for column, figure := range map[string]float64{
		"loads/expiry":    float64(len(o.Loads)) / expiries,
		"most at once":    float64(mostAtOnce(o.Loads)),
		"p50":             ms(o.warm, 50),
		"p99":             ms(o.warm, 99),
		"p99.9":           ms(o.warm, 99.9),
		"max":             ms(o.warm, 100),
		"commands/expiry": float64(o.redis.Commands) / expiries,
		"trips/expiry":    float64(o.redis.Reads) / expiries,
		"stale":           share(o.Stale, o.Gets) * 100,
		"oldest":          float64(o.Oldest) / 1000,
		"errors":          share(o.Failed, o.Gets) * 100,
	} {
		t.Add(subject, column, figure)
	}
}

// share returns part divided by of. If of is 0, share returns part.
func share(part, of int64) float64 { return float64(part) / float64(max(1, of)) }

// coldStart lets all callers request the same new key at the same moment, and then another new key, and so on.
func (b *bench) coldStart(ctx context.Context) error {
	j := job{
		TTL: time.Minute, Load: 100 * time.Millisecond, For: b.length, Way: bursts, Callers: b.callers,
		Every: 500 * time.Millisecond,
	}
	j.Keys = max(1, int(j.For/j.Every))
	t := &Table{Name: "stampede-cold", Title: fmt.Sprintf("All callers of %d processes Get the same new key at the same "+
		"moment: %v, %d keys one after another. Beyond the load: what the longest of these Gets took less the load's time.",
		b.processes, j, j.Keys), Columns: []Column{
		{Name: "loads/key", Digits: 1}, {Name: "most at once"}, {Name: "beyond the load", Unit: "ms", Digits: 1},
		{Name: "worst key", Unit: "ms", Digits: 1}, {Name: "commands/key"}, {Name: "errors", Unit: "%", Digits: 2},
	}}
	return b.contest(ctx, t, b.contenders(anyPeer), func(s subject, _ int) {
		o := b.run(ctx, fleet{job: j.of(s), processes: b.processes})
		worst := 0.0
		for _, ns := range o.Longest {
			beyond := (time.Duration(ns) - j.Load).Seconds() * 1000
			worst = max(worst, beyond)
			t.Add(s.name, "beyond the load", beyond)
		}
		t.Add(s.name, "worst key", worst)
		t.Add(s.name, "loads/key", float64(len(o.Loads))/float64(j.Keys))
		t.Add(s.name, "most at once", float64(mostAtOnce(o.Loads)))
		t.Add(s.name, "commands/key", float64(o.redis.Commands)/float64(j.Keys))
		t.Add(s.name, "errors", share(o.Failed, o.Gets)*100)
	})
}

// killedLoader kills the first process that loads, and measures the time until the next load and the first value.
func (b *bench) killedLoader(ctx context.Context) error {
	j := job{
		TTL: time.Minute, Load: time.Second, For: 15 * time.Second, Way: bursts, Callers: b.callers, Keys: 1,
		Every: 15 * time.Second,
	}
	t := &Table{Name: "stampede-killed", Title: fmt.Sprintf("kill -9 of the process that loads, 300 ms after it began: "+
		"%d processes, %d callers in each, a load takes %v. ms from the kill until the next load begins (0: others load "+
		"already) and until the first value is served.", b.processes, b.callers, j.Load), Columns: []Column{
		{Name: "next load", Unit: "ms"}, {Name: "first value", Unit: "ms"},
		{Name: "loads"}, {Name: "errors", Unit: "%", Digits: 2},
	}}
	return b.contest(ctx, t, b.contenders(sharedPeer), func(s subject, _ int) {
		o := b.run(ctx, fleet{job: j.of(s), processes: b.processes, killAfter: 300 * time.Millisecond})
		if next := nextLoad(o.Loads, o.killed); next >= 0 {
			t.Add(s.name, "next load", float64(next)/1000)
		}
		if o.First > 0 {
			t.Add(s.name, "first value", float64(o.First-o.killed)/1000)
		}
		t.Add(s.name, "loads", float64(len(o.Loads)))
		t.Add(s.name, "errors", share(o.Failed, o.Gets)*100)
	})
}

// nextLoad finds, among the loads that ended later than the moment given as after, the load that began first. It
// returns how long after that moment this load began, or 0 if the load was already running then. If there was no such
// load, nextLoad returns -1.
func nextLoad(loads []span, after int64) int64 {
	next := int64(-1)
	for _, l := range loads {
		if wait := max(0, l.Began-after); l.Ended > after && (next < 0 || wait < next) {
			next = wait
		}
	}
	return next
}
