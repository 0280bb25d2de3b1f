package history

import (
	"cmp"
	"fmt"
	"slices"
	"sort"
	"time"
)

// rules check the promises G1–G7, each as far as a history shows it. G7 (which errors a Get may return) and G4 (no Get
// waits for too long) also cover G6. The test checks G8 at the end of the run.
var rules = []func(*checker){
	(*checker).g1, (*checker).g2SameProcess, (*checker).g2Retried, (*checker).g2Store, (*checker).g2Announced,
	(*checker).g3Store, (*checker).g3Node, (*checker).g4Deadline, (*checker).g4Takeover, (*checker).g5,
	(*checker).g7Loads, (*checker).g7Errors, (*checker).values,
}

// g1: there is one load per key per expiry in the fleet, while Redis and all nodes are healthy and nothing invalidates,
// expires or refreshes the key. During a fault, and shortly after it, a second load is allowed and counted.
func (c *checker) g1() {
	for key, loads := range c.loads {
		for i, y := range loads {
			overlapped, judged := false, false
			for j := i - 1; j >= 0 && loads[j].Begin > y.Begin-int64(2*c.LoadTimeout+c.TTL); j-- {
				x := loads[j]
				// The claim is taken a moment before the load function begins. An invalidation may remove it from then on.
				from := x.Begin - int64(slack)
				if c.invalidated(key, from, y.Begin) {
					continue
				}
				// If all callers of a load have left, the next load may begin a moment before that one ends.
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

// tooEarly reports whether load y began while the value or the failure of load x was still valid. The key was not
// invalidated between them.
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
		return y.Begin < x.End+int64(c.ErrorTTL-slack/2) && !c.wasReported(x, "load-abandoned")
	}
	// If the last caller leaves at the moment in which the load succeeds, the value is not published.
	return y.Begin < until-int64(slack) && c.wasReported(x, "published")
}

// wasReported reports whether OnEvent was called with an event of this kind soon after the end of a load.
func (c *checker) wasReported(x Event, kind string) bool {
	return overlaps(c.reported[x.Process+" "+x.Key+" "+kind], x.End, x.End+int64(c.StoreTimeout+slack))
}

// latest finds, among all events that ended before a given time, the one with the largest number (of is what returns
// it).
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

// before returns that event, or ok = false if none ended before t.
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

// latestBy makes a latest of each group of those events that keep returns true for.
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

// g2SameProcess: after an Invalidate or Expire has returned nil, no later Get of the same process is answered by a load
// that began before that call. After Expire this holds for a fresh value and for a failure; after Invalidate, for every
// answer. It holds at all times, whatever happens to Redis and the network. Plain Get does not say whether its value is
// stale, so it is checked against Invalidate only.
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

// g2Retried: the same holds for an invalidation that failed, as soon as the Loader reports that a retry succeeded.
// Until then the process may have read the old value again.
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

// g2Store: after an invalidation has returned, on any node, the store gives no value of a load that began before it;
// after Expire, none that is fresh. That concerns later Gets that are answered by the store or by an announcement
// (outcome shared or loaded-elsewhere), and the values that the test reads itself. It holds at all times. Answers from
// L1 are checked by g2Announced.
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

// g2Announced: other nodes drop a value when its invalidation is announced. A moment after the invalidation has
// returned, a healthy node with a healthy Redis no longer answers from L1, or from a flight, with an older value.
// During soft faults the node can reach its store, but may miss the announcement. Then L1 stops serving the older value
// after LocalTTL. A node that cannot reach its store may serve what it has; G5 bounds that.
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

// g3Store: an older load's value never follows a newer one's in the store. Gets (outcome shared or loaded-elsewhere)
// and the test read it; a value that none of them read is not checked. It holds at all times, also when Redis comes
// back empty.
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

// g3Node: a healthy node does not serve an older value as fresh after a newer one either. A Refresh is excused: the
// record that it replaces is as fresh as its own, and a read of the old one may arrive late. A node that loaded without
// a lease is also excused, because it is not healthy.
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

// g4Deadline: no Get outlasts its own context. In a healthy fleet no Get lasts longer than two loads, unless the key
// was invalidated meanwhile: each invalidation may cost another load.
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

// ran reports whether the process, and the test with its proxies, ran without a pause between the two times.
func (c *checker) ran(from, to int64, process string) bool {
	stopped := func(s span) bool { return s.op != "gap" && s.op != FaultFreeze || s.raw+int64(slack) < from }
	return c.clean(stopped, from-int64(slack), to+int64(slack), []string{node(process)})
}

// g4Takeover: if a process is killed, or frozen for long enough, during a load, another process begins to load the key
// within LockTTL + 500 ms, if nothing else is wrong. (All nodes read every key all the time.) Whether a stale value was
// served meanwhile makes no difference to this bound.
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

// g5: no value is served that is older, at the begin of the Get, than its outcome allows. Age is counted from the begin
// of the load. Callers that waited for that very load are excepted: their Get began before the value was published.
// Times in which the process itself did not run are left out. Age during a Get is not checked.
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

// g7Loads: each process runs at most MaxLoads loads at once, at all times.
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

// g7Errors: a Get returns only these errors: that of its context, after the context has ended; that of a load that
// failed recently; ErrNotFound, if a load returned it; and ErrOverloaded, if its node could not reach Redis.
func (c *checker) g7Errors() {
	for _, g := range c.gets {
		ok := true
		switch g.Err {
		case "", ErrAbsent: // an absence is a value: checked by values and g5
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

// recent reports whether the failure of a load may answer a Get: the load failed during the Get, or its back-off had
// not ended. Redis, or the process, may have stood still in between.
func (c *checker) recent(load, g Event) bool {
	until := load.End + int64(c.ErrorTTL+c.StoreTimeout+slack)
	return load.Begin <= g.End && (g.Begin <= until || !c.healthy(load.Begin, g.Begin))
}

// values: every value that a Get returned or the store held comes from a load of that very key, with the same version
// and the same outcome; and each load read what the database held when it began. So no value is invented, belongs to
// another key, or comes from a load that failed.
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
