package history

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Limits are the settings of the Loaders that wrote a history. The fields are named as in refill.Config.
type Limits struct {
	TTL, StaleFor, StaleIfError, LocalTTL, LockTTL, StoreTimeout time.Duration
	LoadTimeout, ErrorTTL, NotFoundTTL                           time.Duration
	Jitter                                                       float64
	MaxLoads                                                     int
}

// These tolerances excuse short delays of a busy machine. If a process pauses for longer, the process writes a Gap into
// the history.
const (
	slack    = 60 * time.Millisecond  // the longest delay between two consecutive steps of a process
	announce = 150 * time.Millisecond // from the end of an Invalidate until other nodes have dropped the value from L1
	grace    = time.Second            // from the end of a fault until all connections and the subscription are back
	gapGrace = 300 * time.Millisecond // from the end of a Gap until the process is healthy; a Gap may cost a lease
)

// Violation is a broken promise.
type Violation struct {
	Rule   string // the name that the rule passes to violate
	Text   string
	Events []Event // the first event breaks the promise
	At     int64
}

// Report is what Check found.
type Report struct {
	Violations []Violation
	Stats      Stats
	start      int64
}

// Stats counts what happened in a history.
type Stats struct {
	Gets, Loads, Invalidations, Refreshes, Samples int
	Outcomes, Faults, Events, Errors               map[string]int
	Overlaps                                       int // loads that ran at the same time as another load of their key
	Judged                                         int // loads for which Check could judge G1
	NoDB                                           int // loads that could not reach the database
	Foreign                                        int // failures of loads on another node that g6 judged
	Takeovers                                      int // loads whose process was stopped, without any other fault
	Gaps                                           int
	Healthy                                        float64 // share of the time in which G1 was checked
	MaxGet                                         time.Duration
	Length                                         time.Duration
}

// span is a time in which something was wrong with a node. If node is empty, something was wrong with all nodes.
type span struct {
	node       string
	begin, end int64 // end includes a grace period
	raw        int64 // end without the grace period
	op         string
}

// checker is a history, sorted for the rules.
type checker struct {
	Limits
	report    Report
	gets      []Event            // sorted by Begin
	loads     map[string][]Event // by key, sorted by Begin
	load      map[loadID]Event
	refreshes map[string][]Event // by key, sorted by Begin
	reported  map[string][]Event // the events passed to OnEvent, by "process key kind"
	samples   []Event
	wrong     []span
	killed    map[string]int64 // by process: when it was killed
	stop      int64            // the end of the run

	// invalidations by key, sorted by End. An invalidation that failed has Err, and its End is that of its last retry.
	invalidations map[string][]Event
	retried       []Event // invalidations that failed and succeeded at a retry; End is the time of the retry
}

type loadID struct {
	process string
	id      int64
}

// Check returns every broken promise of a history.
func Check(events []Event, limits Limits) Report {
	c := &checker{
		Limits: limits, loads: map[string][]Event{}, load: map[loadID]Event{}, invalidations: map[string][]Event{},
		refreshes: map[string][]Event{}, reported: map[string][]Event{}, killed: map[string]int64{},
	}
	c.report.start = math.MaxInt64
	s := &c.report.Stats
	s.Outcomes, s.Faults, s.Events, s.Errors = map[string]int{}, map[string]int{}, map[string]int{}, map[string]int{}
	for _, e := range events {
		c.report.start = min(c.report.start, e.Begin)
		c.stop = max(c.stop, e.Begin, e.End)
	}
	for _, e := range events {
		c.add(e)
	}
	c.order()
	for _, rule := range rules {
		rule(c)
	}
	s.Length = time.Duration(c.stop - c.report.start)
	s.Healthy = c.healthyShare()
	slices.SortStableFunc(c.report.Violations, func(a, b Violation) int { return cmp.Compare(a.At, b.At) })
	return c.report
}

// add adds an event to the lists of the checker.
func (c *checker) add(e Event) {
	s := &c.report.Stats
	switch e.Kind {
	case Get:
		c.gets = append(c.gets, e)
		s.Gets++
		s.Outcomes[cmp.Or(e.Outcome, "plain")]++
		s.MaxGet = max(s.MaxGet, time.Duration(e.End-e.Begin))
		if e.Err != "" {
			s.Errors[e.Err]++
		}
	case Load:
		s.Loads++
		if e.Op == FaultNoDB {
			s.NoDB++
		}
		c.loads[e.Key] = append(c.loads[e.Key], e)
		c.load[loadID{e.Process, e.ID}] = e
	case Invalidation:
		s.Invalidations++
		c.invalidations[e.Key] = append(c.invalidations[e.Key], e)
	case Refresh:
		s.Refreshes++
		if e.End == 0 || e.Err != "" {
			e.End = max(e.End, e.Begin) + int64(c.LoadTimeout)
		}
		c.refreshes[e.Key] = append(c.refreshes[e.Key], e)
	case OnEvent:
		s.Events[e.Op]++
		id := e.Process + " " + e.Key + " " + e.Op
		c.reported[id] = append(c.reported[id], e)
		if e.Op == "store-error" {
			// This node could not reach its store in time, and may have loaded without a lease.
			begin, end := e.Begin-int64(c.StoreTimeout+slack), e.End+int64(announce)
			c.wrong = append(c.wrong, span{node(e.Process), begin, end, e.End, e.Op})
		}
	case Sample:
		s.Samples++
		c.samples = append(c.samples, e)
	case Gap:
		s.Gaps++
		c.wrong = append(c.wrong, span{node(e.Process), e.Begin, e.End + int64(gapGrace), e.End, "gap"})
	case Fault:
		s.Faults[e.Op]++
		c.fault(e)
	}
}

// fault adds the time of a fault to c.wrong. A kill or a freeze names a process, but the fault counts for the
// process's node.
func (c *checker) fault(e Event) {
	if mild(e.Op) {
		return
	}
	if e.End == 0 {
		e.End = c.stop
	}
	c.wrong = append(c.wrong, span{node(e.Process), e.Begin, e.End + int64(grace), e.End, e.Op})
	if e.Op == FaultKill {
		c.killed[e.Process] = e.Begin
	}
}

// order sorts all lists. order also sets the End of events that have no End.
func (c *checker) order() {
	byBegin := func(a, b Event) int { return cmp.Compare(a.Begin, b.Begin) }
	for _, of := range []map[string][]Event{c.loads, c.refreshes, c.reported} {
		for _, list := range of {
			slices.SortFunc(list, byBegin)
		}
	}
	slices.SortFunc(c.gets, byBegin)
	slices.SortFunc(c.samples, byBegin)
	slices.SortFunc(c.wrong, func(a, b span) int { return cmp.Compare(a.begin, b.begin) })
	for _, list := range c.invalidations {
		for i := range list {
			c.close(&list[i])
		}
		slices.SortFunc(list, func(a, b Event) int { return cmp.Compare(a.End, b.End) })
	}
	for _, loads := range c.loads {
		for i, l := range loads {
			if killed, ok := c.killed[l.Process]; ok && l.End == 0 {
				loads[i].End, loads[i].Outcome = max(killed, l.Begin), "killed"
				c.load[loadID{l.Process, l.ID}] = loads[i]
			}
		}
	}
}

// close sets the End of an invalidation that failed, or whose process was killed. Redis may execute such an
// invalidation at any later time. The Loader retries a failed invalidation until a retry succeeds, or until the
// invalidated values have expired.
func (c *checker) close(v *Event) {
	if v.End != 0 && v.Err == "" {
		return
	}
	returned := v.End
	v.Err = ErrStore
	v.End = max(v.Begin, v.End) + int64(c.TTL+max(c.StaleFor, c.StaleIfError)+c.LoadTimeout+2*time.Second)
	for _, retry := range c.reported[v.Process+" "+v.Key+" invalidate-retried"] {
		// If a retry began before this invalidation had failed, or at about that time, the retry may belong to an
		// earlier invalidation.
		if returned == 0 || retry.Begin < returned+int64(c.StoreTimeout+slack) {
			continue
		}
		v.End = retry.Begin
		if retry.Err == "" {
			done := *v
			done.Err = ""
			c.retried = append(c.retried, done)
		}
		return
	}
}

// healthy reports whether the given nodes had no fault between from and to. If no node is given, healthy checks all
// nodes. A fault of Redis counts for every node.
func (c *checker) healthy(from, to int64, nodes ...string) bool { return c.clean(nil, from, to, nodes) }

// clean is like healthy, but ignores the faults for which except returns true.
func (c *checker) clean(except func(span) bool, from, to int64, nodes []string) bool {
	for _, s := range c.wrong {
		if s.begin > to {
			return true
		}
		if s.end >= from && (s.node == "" || len(nodes) == 0 || slices.Contains(nodes, s.node)) &&
			(except == nil || !except(s)) {
			return false
		}
	}
	return true
}

// invalidated reports whether an Invalidate or Expire of the key may have taken effect between from and to.
func (c *checker) invalidated(key string, from, to int64) bool {
	return overlaps(c.invalidations[key], from, to)
}

func overlaps(events []Event, from, to int64) bool {
	return slices.ContainsFunc(events, func(e Event) bool { return e.Begin <= to && e.End >= from })
}

func (c *checker) healthyShare() float64 {
	var unhealthy int64
	until := c.report.start
	for _, s := range c.wrong {
		begin, end := max(s.begin, until), min(s.end, c.stop)
		if end > begin {
			unhealthy += end - begin
			until = end
		}
	}
	return 1 - float64(unhealthy)/float64(max(1, c.stop-c.report.start))
}

func (c *checker) violate(rule string, at int64, text string, events ...Event) {
	c.report.Violations = append(c.report.Violations, Violation{rule, text, events, at})
}

// String describes the first ten violations, and when in the run each occurred.
func (r Report) String() string {
	var b strings.Builder
	for i, v := range r.Violations {
		if i == 10 {
			fmt.Fprintf(&b, "… and %d more\n", len(r.Violations)-i)
			break
		}
		fmt.Fprintf(&b, "%s, %.3f s into the run: %s\n", v.Rule, float64(v.At-r.start)/1e9, v.Text)
		for _, e := range v.Events {
			fmt.Fprintf(&b, "    %s\n", e.since(r.start))
		}
	}
	return b.String()
}

// Around lists what happened to the key of a violation shortly before the violation, without the Gets that L1
// answered.
func (r Report) Around(events []Event, v Violation, before time.Duration) string {
	key := ""
	if len(v.Events) > 0 {
		key = v.Events[0].Key
	}
	var near []Event
	for _, e := range events {
		ends := max(e.Begin, e.End)
		concerns := e.Key == key || e.Kind == Fault || e.Kind == Gap
		fromL1 := e.Kind == Get && e.Err == "" && (e.Outcome == "hit" || e.Outcome == "stale" || e.Outcome == "")
		if concerns && !fromL1 && ends >= v.At-int64(before) && e.Begin <= v.At+int64(100*time.Millisecond) {
			near = append(near, e)
		}
	}
	slices.SortStableFunc(near, func(a, b Event) int { return cmp.Compare(a.Begin, b.Begin) })
	var b strings.Builder
	for _, e := range near[max(0, len(near)-80):] {
		fmt.Fprintf(&b, "    %s\n", e.since(r.start))
	}
	return b.String()
}

// String formats the counts as one line.
func (s Stats) String() string {
	return fmt.Sprintf("%d Gets %v errors %v, %d loads (G1 checked for %d; %d overlapped another load, under faults), "+
		"%d loads without a database, %d failures of another node judged, "+
		"%d takeovers, %d invalidations, %d refreshes, %d store changes seen, "+
		"faults %v, events %v, %d gaps, %.0f %% of %v healthy, longest Get %v",
		s.Gets, s.Outcomes, s.Errors, s.Loads, s.Judged, s.Overlaps, s.NoDB, s.Foreign,
		s.Takeovers, s.Invalidations, s.Refreshes, s.Samples,
		s.Faults, s.Events, s.Gaps, 100*s.Healthy, s.Length.Round(time.Millisecond), s.MaxGet.Round(time.Millisecond))
}

// Summary describes several runs in one line.
func Summary(all []Stats) string {
	var sum Stats
	faults, rejected := 0, 0
	for _, s := range all {
		sum.Gets += s.Gets
		sum.Loads += s.Loads
		sum.Overlaps += s.Overlaps
		sum.Judged += s.Judged
		sum.Invalidations += s.Invalidations
		sum.Takeovers += s.Takeovers
		sum.Length += s.Length
		sum.MaxGet = max(sum.MaxGet, s.MaxGet)
		rejected += s.Events["publish-rejected"]
		for op, n := range s.Faults {
			if !mild(op) {
				faults += n
			}
		}
	}
	return fmt.Sprintf("%v with %d faults: %d Gets, the longest took %v; %d loads, of which %d overlapped another load "+
		"of their key, under faults; G1 checked for %d loads; %d invalidations, %d publishes rejected, %d takeovers",
		sum.Length.Round(time.Second), faults, sum.Gets, sum.MaxGet.Round(time.Millisecond),
		sum.Loads, sum.Overlaps, sum.Judged, sum.Invalidations, rejected, sum.Takeovers)
}
