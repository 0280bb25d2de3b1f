package history

import (
	"cmp"
	"fmt"
	"slices"
	"sort"
	"time"
)

// rules are the promises G1–G7, each as far as a history shows it. G6 is covered by G7 (which errors a Get may
// return) and G4 (nobody waits); G8 is checked by the test, at the end of the run.
var rules = []func(*checker){
	(*checker).g1, (*checker).g2Here, (*checker).g2Retried, (*checker).g2Store, (*checker).g2Push, (*checker).g3Store, (*checker).g3Node,
	(*checker).g4Deadline, (*checker).g4Takeover, (*checker).g5, (*checker).g7Loads, (*checker).g7Errors,
	(*checker).values,
}

// g1: one load per key per expiry in the fleet, while Redis and all nodes are healthy and nothing voids or refreshes the
// key. Faults, and a while after each of them, are left out: there a double load is allowed, and counted.
func (c *checker) g1() {
	for key, loads := range c.loads {
		for i, y := range loads {
			double, judged := false, false
			for j := i - 1; j >= 0 && loads[j].Begin > y.Begin-int64(2*c.LoadTimeout+c.TTL); j-- {
				x := loads[j]
				// The claim, which a void may have taken away, comes a moment before the load function begins.
				from := x.Begin - int64(slack)
				if c.voided(key, from, y.Begin) {
					continue
				}
				// A load whose callers have left ends a moment after others may begin.
				overlap := x.End == 0 || x.End > y.Begin && (x.Outcome != "ended" || x.End > y.Begin+int64(slack))
				well := c.healthy(from, y.Begin)
				double, judged = double || overlap, judged || well
				switch {
				case overlap && well:
					c.breach("G1 overlap", y.Begin, "a load began while another one of the key ran", y, x)
				case well && !overlap && c.needless(x, y):
					c.breach("G1 fresh", y.Begin, "a load began while the value, or failure, of another one was in force", y, x)
				}
			}
			if double {
				c.report.Stats.Doubles++
			}
			if judged {
				c.report.Stats.Judged++
			}
		}
	}
}

// needless says that load y began while what x had brought was in force. Nothing voided the key between them.
func (c *checker) needless(x, y Event) bool {
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
		// The last caller may leave in the moment in which the load fails: then there is no back-off.
		return y.Begin < x.End+int64(c.ErrorTTL-slack/2) && !c.noted(x, "abandoned")
	}
	// Likewise, a result whose last caller leaves in the moment in which it is there is not published.
	return y.Begin < until-int64(slack) && c.noted(x, "published")
}

// noted says whether that event was told soon after the end of a load.
func (c *checker) noted(x Event, name string) bool {
	return overlaps(c.notes[x.Process+" "+x.Key+" "+name], x.End, x.End+int64(c.StoreTimeout+slack))
}

// latest answers: of all events that ended before some time, which one began (or has a value whose load began) last?
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

// before returns the event, ok = false if none ended before t.
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

// latestBy sorts what keep wants into groups.
func latestBy(events []Event, of func(Event) int64, keep func(Event) bool, group func(Event) string) map[string]*latest {
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

func (c *checker) allVoids() []Event {
	var all []Event
	for _, voids := range c.voids {
		all = append(all, voids...)
	}
	return all
}

func done(e Event) bool { return e.Err == "" }
func hard(e Event) bool { return e.Err == "" && e.Op == "invalidate" }

func byKey(e Event) string               { return e.Key }
func byProcessAndKey(e Event) string     { return e.Process + " " + e.Key }
func outcome(e Event, of ...string) bool { return slices.Contains(of, e.Outcome) }

// g2Here: after an Invalidate or Expire has returned nil, no Get that begins later in the same process is answered by a
// load that began before the void did: as fresh, or, after an Invalidate, in any other way; nor by the failure of one.
// It holds at all times, whatever happens to Redis and the network. Of a plain Get only Invalidate can be judged,
// since it does not tell whether its value is stale.
func (c *checker) g2Here() {
	soft := latestBy(c.allVoids(), begin, done, byProcessAndKey)
	full := latestBy(c.allVoids(), begin, hard, byProcessAndKey)
	for _, g := range c.gets {
		if g.Value == nil {
			continue
		}
		voids := full
		if outcome(g, "hit", "shared", "led", "joined", "waited") || g.Err != "" && g.Outcome != "" {
			voids = soft
		}
		if v, ok := voids[byProcessAndKey(g)].before(g.Begin); ok && g.Value.Began < v.Begin {
			c.breach("G2 here", g.End, "a Get was answered by a load that began before a void that had returned in this process", g, v)
		}
	}
}

// g2Retried: the same for a void that failed, from the moment on when the Loader says that it has carried it out after all.
// Until then the process may have read the old value again.
func (c *checker) g2Retried() {
	voids := latestBy(c.retried, begin, done, byProcessAndKey)
	for _, g := range c.gets {
		if g.Value == nil || !outcome(g, "hit", "shared", "led", "joined", "waited") {
			continue
		}
		if v, ok := voids[byProcessAndKey(g)].before(g.Begin); ok && g.Value.Began < v.Begin {
			c.breach("G2 retried", g.End, "a Get was answered by a load that began before a void that this process had carried out late", g, v)
		}
	}
}

// g2Store: what a Get that begins after a void has returned, on any node, reads from the store or from an announcement (it
// says shared or waited), and what the test itself reads there, does not come from a load that began before the void;
// after Expire, not as fresh. It holds at all times. An answer that L1 gave is g2Push's.
func (c *checker) g2Store() {
	all := append(c.allVoids(), c.retried...)
	soft := latestBy(all, begin, done, byKey)
	full := latestBy(all, begin, hard, byKey)
	for _, g := range append(slices.Clone(c.gets), c.samples...) {
		if g.Value == nil || g.Kind == Get && !outcome(g, "shared", "waited") {
			continue
		}
		voids := soft
		if g.Kind == Sample && g.Outcome == "expired" {
			voids = full
		}
		if v, ok := voids[g.Key].before(g.Begin); ok && g.Value.Began < v.Begin {
			c.breach("G2 store", g.End, "the store gave what was loaded before a void that had returned", g, v)
		}
	}
}

// g2Push: other nodes follow with the push. While the node that Gets and Redis are healthy, a hit or a joined flight that
// is older than a void ends a moment after the void has returned. Where only announcements may have been lost (the
// soft faults), a hit ends with LocalTTL. A node that cannot reach its store may serve what it has: G5 bounds that.
func (c *checker) g2Push() {
	voids := latestBy(c.allVoids(), begin, done, byKey)
	lostPush := c.LocalTTL + c.StoreTimeout + slack
	for _, g := range c.gets {
		if g.Value == nil || !outcome(g, "hit", "joined") {
			continue
		}
		v, ok := voids[g.Key].before(g.Begin - int64(push))
		if ok && g.Value.Began < v.Begin && c.healthy(v.Begin, g.Begin, node(g.Process)) {
			c.breach("G2 push", g.End, "a Get was answered from memory, with what another node had voided", g, v)
		}
		v, ok = voids[g.Key].before(g.Begin - int64(lostPush))
		gentle := func(s span) bool { return soft(s.op) }
		if ok && g.Outcome == "hit" && g.Value.Began < v.Begin && c.clean(gentle, v.Begin, g.Begin, []string{node(g.Process)}) {
			c.breach("G2 local", g.End, "a Get was answered from memory, LocalTTL after the void whose push was lost", g, v)
		}
	}
}

// g3Store: in the store, as Gets (shared, waited) and the test see it, the begin of the load never goes back. It holds at
// all times, over a Redis that comes back empty, too. A value that nobody saw is not checked.
func (c *checker) g3Store() {
	seen := append(slices.Clone(c.gets), c.samples...)
	seen = slices.DeleteFunc(seen, func(e Event) bool {
		return e.Value == nil || e.Kind == Get && !outcome(e, "shared", "waited")
	})
	newest := latestBy(seen, loadBegan, func(Event) bool { return true }, byKey)
	for _, b := range seen {
		if a, ok := newest[b.Key].before(b.Begin); ok && a.Value.Began > b.Value.Began {
			c.breach("G3 store", b.End, "an older load's value came after a newer one's", b, a)
		}
	}
}

// g3Node: what a healthy node serves as fresh does not go back either. A Refresh is excused: the record that it replaces
// is as fresh as its own, and a read of the old one may arrive late. So is a node that loaded for itself alone: it is not
// healthy.
func (c *checker) g3Node() {
	fresh := func(e Event) bool { return e.Value != nil && outcome(e, "hit", "shared", "waited") }
	newest := latestBy(c.gets, loadBegan, fresh, byProcessAndKey)
	for _, b := range c.gets {
		if !fresh(b) {
			continue
		}
		a, ok := newest[byProcessAndKey(b)].before(b.Begin)
		if ok && a.Value.Began > b.Value.Began &&
			!overlaps(c.refreshes[b.Key], b.Value.Began, b.End) &&
			c.healthy(b.Value.Began, b.End, node(b.Process), node(a.Value.Process)) {
			c.breach("G3 node", b.End, "a node served an older value after a newer one", b, a)
		}
	}
}

// g4Deadline: no Get outlasts its own context; and on a healthy fleet none lasts longer than two loads, unless the key was
// voided meanwhile (each void may cost another load).
func (c *checker) g4Deadline() {
	most := 2*c.LoadTimeout + c.LockTTL + 500*time.Millisecond
	for _, g := range c.gets {
		if late := time.Duration(g.End - g.Deadline); late > slack && c.ran(g.Begin, g.End, g.Process) {
			c.breach("G4 deadline", g.End, fmt.Sprintf("a Get returned %v after its deadline", late), g)
		}
		if took := time.Duration(g.End - g.Begin); took > most && c.healthy(g.Begin, g.End) && !c.voided(g.Key, g.Begin, g.End) {
			c.breach("G4 bound", g.End, fmt.Sprintf("a Get took %v, and nothing was wrong", took), g)
		}
	}
}

// ran says that the process was not frozen or starved between the two times, nor Redis's proxies.
func (c *checker) ran(from, to int64, process string) bool {
	stopped := func(s span) bool { return s.op != "gap" && s.op != FaultFreeze || s.raw+int64(slack) < from }
	return c.clean(stopped, from-int64(slack), to+int64(slack), []string{node(process)})
}

// g4Takeover: a process that is killed, or frozen for long enough, in the middle of a load is replaced: somebody else begins
// to load the key within LockTTL + 500 ms, if nothing else is wrong. Readers want every key all the time. What cannot be
// told is whether a stale value was served meanwhile; that makes no difference to the bound.
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
					c.breach("G4 takeover", until, "nobody loads in the place of "+x.Process+", which stands still or is dead, for "+key, x)
				}
			}
		}
	}
}

// g5: nothing is served that is older than its outcome allows when the Get begins, counted from the begin of its load; but
// to callers that waited for that very load: their Get began before it was published. Times when the process itself
// stood still are left out. Age during a Get is not checked: a Get that waits gets what is there when it ends.
func (c *checker) g5() {
	spare := max(c.StaleFor, c.StaleIfError)
	for _, g := range c.gets {
		if g.Value == nil || g.Err != "" && g.Err != ErrAbsent {
			continue
		}
		ttl, more := c.TTL, time.Duration(0)
		switch g.Outcome {
		case "stale":
			more = c.StaleFor
		case "stale-on-error", "":
			more = spare
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
		waited := outcome(g, "led", "joined", "waited", "") && known && (load.End == 0 || g.Begin <= published)
		if !waited && c.ran(g.Begin, g.End, g.Process) {
			c.breach("G5", g.End, fmt.Sprintf("a value was served %v after its load began", age), g, load)
		}
	}
}

// g7Loads: at most MaxLoads loads at once in each process, at all times.
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
				c.breach("G7 loads", ch.at, fmt.Sprintf("%d loads at once in a process", running), ch.load)
			}
		}
	}
}

// g7Errors: a Get returns no error but that of its context when that is over, that of a load that failed a short while
// ago, ErrNotFound when a load said so, and ErrOverloaded when its node could not reach Redis.
func (c *checker) g7Errors() {
	for _, g := range c.gets {
		ok := true
		switch g.Err {
		case "", ErrAbsent: // an absence is a value: see there, and G5
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
			c.breach("G7 errors", g.End, "an error that a Get must not return, or not then", g)
		}
	}
}

// recent says that the failure of a load may be the answer of a Get: it came during the Get, or its back-off lasted until
// then. Redis, or the process, may stand still in between.
func (c *checker) recent(load, g Event) bool {
	until := load.End + int64(c.ErrorTTL+c.StoreTimeout+slack)
	return load.Begin <= g.End && (g.Begin <= until || !c.healthy(load.Begin, g.Begin))
}

// values: what a Get or the store holds was made by a load of that very key, with that very version and end; and a load
// read what the database held when it began. So nothing is invented, mixed up, or taken from a load that failed.
func (c *checker) values() {
	ends := map[string]string{"": "ok", ErrAbsent: "absent", ErrLoad: "failed"}
	written := latestBy(c.allVoids(), func(e Event) int64 { return e.Version }, func(Event) bool { return true }, byKey)
	for _, g := range append(slices.Clone(c.gets), c.samples...) {
		v := g.Value
		if v == nil {
			continue
		}
		load, known := c.load[loadID{v.Process, v.Load}]
		same := load.Key == v.Key && v.Key == g.Key && load.Begin == v.Began && load.Version == v.Version
		if !known || !same || load.Outcome != ends[g.Err] {
			c.breach("values", g.End, "a value that its load did not make", g, load)
		}
	}
	for _, load := range c.load {
		if w, ok := written[load.Key].before(load.Begin); ok && w.Version > load.Version {
			c.breach("values", load.Begin, "a load read an older version than was written before (the database of the test is broken)", load, w)
		}
	}
}
