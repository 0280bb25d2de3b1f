package history

import (
	"cmp"
	"fmt"
	"slices"
	"sort"
	"time"
)

// rules check the promises G1–G7 (docs/guarantees.md), as far as a history shows them. g6 checks that the failures of
// one node stay with that node. g7Errors (which errors a Get may return) and g4Deadline (how long a Get may take) cover
// the rest of G6. TestHistory checks G8 at the end of the run.
var rules = []func(*checker){
	(*checker).g1, (*checker).g2SameProcess, (*checker).g2Retried, (*checker).g2Store, (*checker).g2Announced,
	(*checker).g3Store, (*checker).g3Node, (*checker).g4Deadline, (*checker).g4Takeover, (*checker).g5, (*checker).g6,
	(*checker).g7Loads, (*checker).g7Errors, (*checker).values,
}

// g1 checks that there is one load per key per expiry in the fleet. g1 judges only times in which Redis and all nodes
// are healthy and no call invalidates, expires or refreshes the key. During a fault and shortly after a fault, two
// loads of a key may overlap. g1 does not report such loads, but counts them (Stats.Overlaps).
func (c *checker) g1() {
	for key, loads := range c.loads {
		for i, y := range loads {
			overlapped, judged := false, false
			for j := i - 1; j >= 0 && loads[j].Begin > y.Begin-int64(2*c.LoadTimeout+c.TTL); j-- {
				x := loads[j]
				// The node takes the claim of load x a moment before the load function begins, and an invalidation may
				// remove the claim from then on. So g1 looks for invalidations from slack before x.Begin.
				from := x.Begin - int64(slack)
				if c.invalidated(key, from, y.Begin) {
					continue
				}
				// If all callers of load x have left (outcome "ended"), load y may begin a moment before x ends.
				overlap := x.End == 0 || x.End > y.Begin && (x.Outcome != "ended" || x.End > y.Begin+int64(slack))
				healthy := c.healthy(from, y.Begin)
				overlapped, judged = overlapped || overlap, judged || healthy
				switch {
				case overlap && healthy:
					c.violate("G1 overlap", y.Begin, "a load began while another load of the key ran", y, x)
				case healthy && !overlap && c.tooEarly(x, y):
					c.violate("G1 too early", y.Begin, "a load began while the result of an earlier load was still valid", y, x)
				}
			}
			if overlapped {
				c.report.Stats.Overlaps++
			}
			if judged {
				c.report.Stats.Judged++
			}
		}
	}
}

// tooEarly reports whether load y began although the value or absence from load x was still fresh, or the back-off
// after load x was not over. The caller has checked that no invalidation came between x and y.
func (c *checker) tooEarly(x, y Event) bool {
	if overlaps(c.refreshes[x.Key], x.Begin, y.Begin) {
		return false
	}
	var until int64
	least := 1 - c.Jitter
	switch x.Outcome {
	case "ok":
		until = x.Begin + int64(float64(c.TTL)*least)
	case "absent":
		until = x.Begin + int64(float64(c.NotFoundTTL)*least)
	case "failed":
		// If the last caller leaves at the moment in which the load fails, there is no back-off.
		return y.Begin < x.End+int64(c.ErrorTTL-slack/2) && !c.wasReported(x, "load-abandoned") &&
			(y.Process == x.Process || c.second(x))
	}
	// If the last caller leaves at the moment in which the load succeeds, the value is not published.
	return y.Begin < until-int64(slack) && c.wasReported(x, "published")
}

// second reports whether the failure of load x holds back all nodes, because a load of the key had failed on another
// node just before. Otherwise the failure holds back only the node of x.
func (c *checker) second(x Event) bool {
	return slices.ContainsFunc(c.loads[x.Key], func(p Event) bool {
		return p.Outcome == "failed" && p.Process != x.Process && p.End != 0 && p.End <= x.Begin-int64(slack/2) &&
			x.Begin < p.End+int64(c.ErrorTTL-slack/2) && !c.wasReported(p, "load-abandoned") &&
			c.healthy(p.Begin-int64(slack), x.End) && !c.invalidated(x.Key, p.Begin-int64(slack), x.End) &&
			!overlaps(c.refreshes[x.Key], p.Begin, x.End) && !c.succeededBetween(x.Key, p.End, x.Begin)
	})
}

// succeededBetween reports whether a load of the key ended between from and to and did not fail.
func (c *checker) succeededBetween(key string, from, to int64) bool {
	return slices.ContainsFunc(c.loads[key], func(l Event) bool {
		return l.End >= from && l.Begin <= to && l.Outcome != "failed"
	})
}

// wasReported reports whether OnEvent was called with an event of this kind soon after the end of a load.
func (c *checker) wasReported(x Event, kind string) bool {
	return overlaps(c.reported[x.Process+" "+x.Key+" "+kind], x.End, x.End+int64(c.StoreTimeout+slack))
}

// latest answers this question: among all events that ended before a given time, which event has the largest number?
// The field of is the function that returns the number of an event, for instance its version.
type latest struct {
	ends []int64
	best []Event
	of   func(Event) int64
}

func newLatest(events []Event, of func(Event) int64) *latest {
	l := &latest{of: of}
	events = slices.Clone(events)
	slices.SortFunc(events, func(a, b Event) int { return cmp.Compare(a.End, b.End) })
	for i, e := range events {
		if i > 0 && of(l.best[i-1]) > of(e) {
			e = l.best[i-1]
		}
		l.ends = append(l.ends, events[i].End)
		l.best = append(l.best, e)
	}
	return l
}

// before returns the event with the largest number among those that ended before t. If no event ended before t, before
// returns false.
func (l *latest) before(t int64) (Event, bool) {
	if l == nil {
		return Event{}, false
	}
	n := sort.Search(len(l.ends), func(i int) bool { return l.ends[i] >= t })
	if n == 0 {
		return Event{}, false
	}
	return l.best[n-1], true
}

func begin(e Event) int64     { return e.Begin }
func loadBegan(e Event) int64 { return e.Value.Began }
func version(e Event) int64   { return e.Version }

// latestBy takes the events for which the function keep returns true, puts events with the same result of the function
// group into one group, and makes a latest of each group.
func latestBy(
	events []Event, of func(Event) int64, keep func(Event) bool, group func(Event) string,
) map[string]*latest {
	groups := map[string][]Event{}
	for _, e := range events {
		if keep(e) {
			groups[group(e)] = append(groups[group(e)], e)
		}
	}
	result := map[string]*latest{}
	for name, list := range groups {
		result[name] = newLatest(list, of)
	}
	return result
}

func (c *checker) allInvalidations() []Event {
	var all []Event
	for _, list := range c.invalidations {
		all = append(all, list...)
	}
	return all
}

func all(Event) bool                   { return true }
func succeeded(e Event) bool           { return e.Err == "" }
func succeededInvalidate(e Event) bool { return e.Err == "" && e.Op == "invalidate" }

func byKey(e Event) string               { return e.Key }
func byProcessAndKey(e Event) string     { return e.Process + " " + e.Key }
func outcome(e Event, of ...string) bool { return slices.Contains(of, e.Outcome) }

// g2SameProcess checks that, after an Invalidate or Expire has returned nil, no later Get of the same process is
// answered by a load that began before that call. After Expire this must hold for fresh values and failures. After
// Invalidate it must hold for every answer. The promise must hold at all times, whatever happens to Redis and the
// network. Get, unlike GetResult, does not say whether its value is stale, so this rule checks answers of Get against
// Invalidate only.
func (c *checker) g2SameProcess() {
	either := latestBy(c.allInvalidations(), begin, succeeded, byProcessAndKey)
	invalidates := latestBy(c.allInvalidations(), begin, succeededInvalidate, byProcessAndKey)
	for _, g := range c.gets {
		if g.Value == nil {
			continue
		}
		done := invalidates
		if outcome(g, "hit", "shared", "loaded", "coalesced", "loaded-elsewhere") || g.Err != "" && g.Outcome != "" {
			done = either
		}
		if v, ok := done[byProcessAndKey(g)].before(g.Begin); ok && g.Value.Began < v.Begin {
			c.violate("G2 same process", g.End,
				"a Get was answered by a load that began before an invalidation that had returned in this process", g, v)
		}
	}
}

// g2Retried checks invalidations that failed. When the Loader has reported that a retry succeeded, no later Get of the
// same process may be answered by a load that began before the invalidation. Before that report, a Get may return the
// old value, because the process may have read the value again.
func (c *checker) g2Retried() {
	done := latestBy(c.retried, begin, succeeded, byProcessAndKey)
	for _, g := range c.gets {
		if g.Value == nil || !outcome(g, "hit", "shared", "loaded", "coalesced", "loaded-elsewhere") {
			continue
		}
		if v, ok := done[byProcessAndKey(g)].before(g.Begin); ok && g.Value.Began < v.Begin {
			c.violate("G2 retried", g.End,
				"a Get was answered by a load that began before an invalidation that this process had retried", g, v)
		}
	}
}

// g2Store checks that, after an Invalidate has returned on any node, the store gives no value of a load that began
// before the Invalidate. After an Expire, the store may give such a value, but not as fresh. The rule checks later
// Gets that were answered by the store or by an announcement (outcome shared or loaded-elsewhere), and the values
// that the test itself reads. The promise must hold at all times. g2Announced checks answers from L1.
func (c *checker) g2Store() {
	all := append(c.allInvalidations(), c.retried...)
	either := latestBy(all, begin, succeeded, byKey)
	invalidates := latestBy(all, begin, succeededInvalidate, byKey)
	for _, g := range append(slices.Clone(c.gets), c.samples...) {
		if g.Value == nil || g.Kind == Get && !outcome(g, "shared", "loaded-elsewhere") {
			continue
		}
		done := either
		if g.Kind == Sample && g.Outcome == "expired" {
			done = invalidates
		}
		if v, ok := done[g.Key].before(g.Begin); ok && g.Value.Began < v.Begin {
			c.violate("G2 store", g.End, "the store gave a value that was loaded before an invalidation that had returned", g, v)
		}
	}
}

// g2Announced checks that other nodes drop a value when its invalidation is announced. A moment after the invalidation
// has returned, a healthy node with a healthy Redis must not answer from L1, or from a flight, with an older value.
// During soft faults a node can reach its store, but may miss the announcement. In that case L1 must stop serving the
// older value after LocalTTL. A node that cannot reach its store may serve what L1 has, and G5 limits the age of that
// value.
func (c *checker) g2Announced() {
	done := latestBy(c.allInvalidations(), begin, succeeded, byKey)
	lostAnnouncement := c.LocalTTL + c.StoreTimeout + slack
	for _, g := range c.gets {
		if g.Value == nil || !outcome(g, "hit", "coalesced") {
			continue
		}
		v, ok := done[g.Key].before(g.Begin - int64(announce))
		if ok && g.Value.Began < v.Begin && c.healthy(v.Begin, g.Begin, node(g.Process)) {
			c.violate("G2 announcement", g.End,
				"a Get was answered from memory with a value that another node had invalidated", g, v)
		}
		v, ok = done[g.Key].before(g.Begin - int64(lostAnnouncement))
		isSoft := func(s span) bool { return soft(s.op) }
		if ok && g.Outcome == "hit" && g.Value.Began < v.Begin &&
			c.clean(isSoft, v.Begin, g.Begin, []string{node(g.Process)}) {
			c.violate("G2 LocalTTL", g.End,
				"a Get was answered from L1 later than LocalTTL after an invalidation whose announcement was lost", g, v)
		}
	}
}

// g3Store checks that in the store the value of an older load never follows the value of a newer load. g3Store knows
// the values that the test itself has read (samples), and the values that Gets have read (outcome shared or
// loaded-elsewhere). g3Store cannot check a value that neither has read. The promise must hold at all times, also when
// Redis comes back empty.
func (c *checker) g3Store() {
	seen := append(slices.Clone(c.gets), c.samples...)
	seen = slices.DeleteFunc(seen, func(e Event) bool {
		return e.Value == nil || e.Kind == Get && !outcome(e, "shared", "loaded-elsewhere")
	})
	newest := latestBy(seen, loadBegan, all, byKey)
	for _, b := range seen {
		if a, ok := newest[b.Key].before(b.Begin); ok && a.Value.Began > b.Value.Began {
			c.violate("G3 store", b.End, "the value of an older load followed that of a newer one", b, a)
		}
	}
}

// g3Node checks that a healthy node does not serve an older value as fresh after it has served a newer value. A Refresh
// excuses an older value: the record that a Refresh replaces is still fresh, and a Get that has read this record before
// may return it late. A node that loaded without a lease is not healthy, so g3Node does not judge that node.
func (c *checker) g3Node() {
	fresh := func(e Event) bool { return e.Value != nil && outcome(e, "hit", "shared", "loaded-elsewhere") }
	newest := latestBy(c.gets, loadBegan, fresh, byProcessAndKey)
	for _, b := range c.gets {
		if !fresh(b) {
			continue
		}
		a, ok := newest[byProcessAndKey(b)].before(b.Begin)
		if ok && a.Value.Began > b.Value.Began &&
			!overlaps(c.refreshes[b.Key], b.Value.Began, b.End) &&
			c.healthy(b.Value.Began, b.End, node(b.Process), node(a.Value.Process)) {
			c.violate("G3 node", b.End, "a node served an older value after a newer one", b, a)
		}
	}
}

// g4Deadline checks that no Get outlasts its own context. In a healthy fleet no Get may last longer than two loads,
// unless the key was invalidated during the Get, because each invalidation may cost another load.
func (c *checker) g4Deadline() {
	most := 2*c.LoadTimeout + c.LockTTL + 500*time.Millisecond
	for _, g := range c.gets {
		if late := time.Duration(g.End - g.Deadline); late > slack && c.ran(g.Begin, g.End, g.Process) {
			c.violate("G4 deadline", g.End, fmt.Sprintf("a Get returned %v after its deadline", late), g)
		}
		took := time.Duration(g.End - g.Begin)
		if took > most && c.healthy(g.Begin, g.End) && !c.invalidated(g.Key, g.Begin, g.End) {
			c.violate("G4 duration", g.End, fmt.Sprintf("a Get of a healthy fleet took %v", took), g)
		}
	}
}

// ran reports whether two processes ran without a pause between from and to: the given process, and the process of the
// test, which contains the proxies.
func (c *checker) ran(from, to int64, process string) bool {
	stopped := func(s span) bool { return s.op != "gap" && s.op != FaultFreeze || s.raw+int64(slack) < from }
	return c.clean(stopped, from-int64(slack), to+int64(slack), []string{node(process)})
}

// g4Takeover checks what happens if a process is killed, or frozen for long enough, during a load, while everything
// else is healthy. Another process must begin to load the key within LockTTL + 500 ms. All nodes read every key all the
// time, so there is always a process that can take over. The rule does not depend on whether stale values are served in
// that time.
func (c *checker) g4Takeover() {
	for _, s := range c.wrong {
		most := int64(c.LockTTL + 500*time.Millisecond)
		until := s.begin + most + int64(slack)
		stops := s.op == FaultKill || s.op == FaultFreeze && s.raw >= until
		own := func(o span) bool { return o == s || o.op == "gap" && o.node == s.node }
		if !stops || until > c.stop-int64(grace) || !c.clean(own, s.begin-int64(c.LockTTL), until, nil) {
			continue
		}
		for key, loads := range c.loads {
			for i, x := range loads {
				runs := x.Begin < s.begin-int64(slack) && (x.Outcome == "killed" && x.End == s.begin || x.End > until)
				if node(x.Process) != s.node || !runs {
					continue
				}
				c.report.Stats.Takeovers++
				if i+1 == len(loads) || loads[i+1].Begin > until {
					c.violate("G4 takeover", until,
						"no process took over the load of "+key+" from "+x.Process+", which was killed or frozen", x)
				}
			}
		}
	}
}

// g5 checks that no value is older, at the begin of the Get, than the outcome of the Get allows. The age counts from
// the begin of the load. There are two exceptions: callers that waited for the load that made the value, and Gets
// during which the process paused.
func (c *checker) g5() {
	errorOnly := max(c.StaleFor, c.StaleIfError)
	for _, g := range c.gets {
		if g.Value == nil || g.Err != "" && g.Err != ErrAbsent {
			continue
		}
		ttl, more := c.TTL, time.Duration(0)
		switch g.Outcome {
		case "stale":
			more = c.StaleFor
		case "stale-on-error", "":
			more = errorOnly
		}
		if g.Err == ErrAbsent {
			ttl, more = c.NotFoundTTL, 0
		}
		age := time.Duration(g.Begin - g.Value.Began)
		if age <= ttl+more+slack {
			continue
		}
		load, known := c.load[loadID{g.Value.Process, g.Value.Load}]
		published := load.End + int64(2*c.StoreTimeout+slack)
		waited := outcome(g, "loaded", "coalesced", "loaded-elsewhere", "") && known &&
			(load.End == 0 || g.Begin <= published)
		if !waited && c.ran(g.Begin, g.End, g.Process) {
			c.violate("G5", g.End, fmt.Sprintf("a value was served %v after its load had begun", age), g, load)
		}
	}
}

// g6 checks that the failures of one node do not fail other nodes. In a healthy fleet, a Get may return the failure of
// a load on another node only if a load of the key on a third node, or on the node of the Get, had failed just before.
// A fleet also counts as healthy during FaultNoDB. So a node without a database must not fail the Gets of other nodes.
func (c *checker) g6() {
	for _, g := range c.gets {
		if g.Err != ErrLoad {
			continue
		}
		x := c.load[loadID{g.Value.Process, g.Value.Load}]
		reach := int64(c.ErrorTTL + c.StoreTimeout + slack)
		if x.Process == g.Process || !c.healthy(x.Begin-reach, g.End) {
			continue
		}
		c.report.Stats.Foreign++
		if !slices.ContainsFunc(c.loads[g.Key], func(p Event) bool {
			timedOut := p.Outcome == "ended" && time.Duration(p.End-p.Begin) >= c.LoadTimeout-slack
			return (p.Outcome == "failed" || timedOut) && p.Process != x.Process &&
				p.End != 0 && p.End <= x.Begin+int64(slack) && p.End >= x.Begin-reach
		}) {
			c.violate("G6 failure of another node", g.End, "a Get failed because a load on one other node failed", g, x)
		}
	}
}

// g7Loads checks that each process runs at most MaxLoads loads at once, at all times.
func (c *checker) g7Loads() {
	type change struct {
		at   int64
		by   int
		load Event
	}
	changes := map[string][]change{}
	for _, loads := range c.loads {
		for _, l := range loads {
			end := l.End
			if end == 0 {
				end = c.stop
			}
			changes[l.Process] = append(changes[l.Process], change{l.Begin, 1, l}, change{end, -1, l})
		}
	}
	for _, list := range changes {
		slices.SortFunc(list, func(a, b change) int { return cmp.Or(cmp.Compare(a.at, b.at), a.by-b.by) })
		running := 0
		for _, ch := range list {
			if running += ch.by; running > c.MaxLoads && ch.by > 0 {
				c.violate("G7 loads", ch.at, fmt.Sprintf("%d loads at once in a process", running), ch.load)
			}
		}
	}
}

// g7Errors checks the errors of Gets. A Get may return the error of its context after the context has ended, and the
// error of a load that failed recently. A Get may return ErrNotFound if a load returned ErrNotFound, and ErrOverloaded
// if its node could not reach Redis. A Get must not return any other error.
func (c *checker) g7Errors() {
	for _, g := range c.gets {
		ok := true
		switch g.Err {
		case "", ErrAbsent: // an absence counts as a value, which the rules values and g5 check
		case ErrCtx:
			ok = g.End >= g.Deadline-int64(time.Millisecond)
		case ErrOverloaded:
			ok = !c.healthy(g.Begin, g.End, node(g.Process))
		case ErrLoad:
			load := c.load[loadID{g.Value.Process, g.Value.Load}]
			ok = c.recent(load, g)
		case ErrTimeout:
			ok = slices.ContainsFunc(c.loads[g.Key], func(l Event) bool {
				return l.End != 0 && time.Duration(l.End-l.Begin) >= c.LoadTimeout-slack && c.recent(l, g)
			})
		default:
			ok = false
		}
		if !ok {
			c.violate("G7 errors", g.End, "a Get returned an error that it must not return, or not at that time", g)
		}
	}
}

// recent reports whether Get g may return the failure of load. That is allowed if the load failed during the Get, if
// the back-off of the failure was not over at the begin of the Get, or if the fleet was not healthy between the load
// and the Get.
func (c *checker) recent(load, g Event) bool {
	until := load.End + int64(c.ErrorTTL+c.StoreTimeout+slack)
	return load.Begin <= g.End && (g.Begin <= until || !c.healthy(load.Begin, g.Begin))
}

// values checks where values come from. Every value that a Get returned or the store held must come from a load of the
// same key, with the same version and the same outcome. Otherwise refill has invented the value, mixed up two keys, or
// stored the value of a load that failed. Each load must have read what the database held when the load began.
func (c *checker) values() {
	ends := map[string]string{"": "ok", ErrAbsent: "absent", ErrLoad: "failed"}
	written := latestBy(c.allInvalidations(), version, all, byKey)
	for _, g := range append(slices.Clone(c.gets), c.samples...) {
		v := g.Value
		if v == nil {
			continue
		}
		load, known := c.load[loadID{v.Process, v.Load}]
		same := load.Key == v.Key && v.Key == g.Key && load.Begin == v.Began && load.Version == v.Version
		if !known || !same || load.Outcome != ends[g.Err] {
			c.violate("values", g.End, "the value does not come from the load that it names", g, load)
		}
	}
	for _, load := range c.load {
		if w, ok := written[load.Key].before(load.Begin); ok && w.Version > load.Version {
			c.violate("values", load.Begin,
				"a load read an older version than the one written before (the test's database is broken)", load, w)
		}
	}
}
