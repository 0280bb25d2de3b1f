package history

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Limits is what the Loaders of a history were set to, as refill.Config has it.
type Limits struct {
	TTL, StaleFor, StaleIfError, LocalTTL, LockTTL, StoreTimeout time.Duration
	LoadTimeout, ErrorTTL, NotFoundTTL                           time.Duration
	Jitter                                                       float64
	MaxLoads                                                     int
}

// What a busy machine is granted. Where a process did not run for longer, there is a Gap.
const (
	slack    = 60 * time.Millisecond  // between two steps of a process that follow each other
	push     = 150 * time.Millisecond // from the end of an Invalidate to the memory of another node
	grace    = time.Second            // after a fault, until all connections and the subscription are back
	gapGrace = 300 * time.Millisecond // after a Gap: a lease may have been lost by it
)

// Violation is a promise that a history breaks.
type Violation struct {
	Rule   string // as in rules.go
	Text   string
	Events []Event // the guilty ones first
	At     int64
}

// Report is what Check found.
type Report struct {
	Violations []Violation
	Stats      Stats
	start      int64
}

// Stats is what happened in a history.
type Stats struct {
	Gets, Loads, Voids, Refreshes, Samples int
	Outcomes, Faults, Notes, Errors        map[string]int
	Doubles                                int // loads that ran beside another one of the key, under faults
	Judged                                 int // loads for which G1 could be checked
	Takeovers                              int // processes stopped in the middle of a load, and nothing else wrong
	Gaps                                   int
	Healthy                                float64 // share of the time when G1 was checked
	MaxGet                                 time.Duration
	Length                                 time.Duration
}

// span is a time in which something was wrong with a node, with all nodes if it has no name.
type span struct {
	node       string
	begin, end int64 // end includes the grace
	raw        int64 // end without it
	op         string
}

// checker is a history in the order that the rules want.
type checker struct {
	Limits
	report    Report
	gets      []Event // by begin
	loads     map[string][]Event
	load      map[loadID]Event
	voids     map[string][]Event // by end; one that failed counts to the end of its tries, and has Err
	retried   []Event            // those that failed, and were carried out later: their End
	refreshes map[string][]Event
	notes     map[string][]Event // by "process key name"
	samples   []Event
	wrong     []span
	died      map[string]int64 // when a process was killed
	stop      int64            // of the run
}

type loadID struct {
	process string
	id      int64
}

// Check looks for what the promises exclude.
func Check(events []Event, limits Limits) Report {
	c := &checker{
		Limits: limits, loads: map[string][]Event{}, load: map[loadID]Event{}, voids: map[string][]Event{},
		refreshes: map[string][]Event{}, notes: map[string][]Event{}, died: map[string]int64{},
	}
	c.report.start = math.MaxInt64
	s := &c.report.Stats
	s.Outcomes, s.Faults, s.Notes, s.Errors = map[string]int{}, map[string]int{}, map[string]int{}, map[string]int{}
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

// add puts an event where it belongs.
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
		c.loads[e.Key] = append(c.loads[e.Key], e)
		c.load[loadID{e.Process, e.ID}] = e
	case Void:
		s.Voids++
		c.voids[e.Key] = append(c.voids[e.Key], e)
	case Refresh:
		s.Refreshes++
		if e.End == 0 || e.Err != "" {
			e.End = max(e.End, e.Begin) + int64(c.LoadTimeout)
		}
		c.refreshes[e.Key] = append(c.refreshes[e.Key], e)
	case Note:
		s.Notes[e.Op]++
		id := e.Process + " " + e.Key + " " + e.Op
		c.notes[id] = append(c.notes[id], e)
		if e.Op == "store-error" {
			// Whatever the reason: this node could not reach its store in time, and may have loaded for itself.
			c.wrong = append(c.wrong, span{node(e.Process), e.Begin - int64(c.StoreTimeout+slack), e.End + int64(push), e.End, e.Op})
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

// fault notes when something was wrong. A kill names the process; what is wrong is the node.
func (c *checker) fault(e Event) {
	if mild(e.Op) {
		return
	}
	if e.End == 0 {
		e.End = c.stop
	}
	c.wrong = append(c.wrong, span{node(e.Process), e.Begin, e.End + int64(grace), e.End, e.Op})
	if e.Op == FaultKill {
		c.died[e.Process] = e.Begin
	}
}

// order sorts, and completes what was left open.
func (c *checker) order() {
	byBegin := func(a, b Event) int { return cmp.Compare(a.Begin, b.Begin) }
	for _, of := range []map[string][]Event{c.loads, c.refreshes, c.notes} {
		for _, list := range of {
			slices.SortFunc(list, byBegin)
		}
	}
	slices.SortFunc(c.gets, byBegin)
	slices.SortFunc(c.samples, byBegin)
	slices.SortFunc(c.wrong, func(a, b span) int { return cmp.Compare(a.begin, b.begin) })
	for _, voids := range c.voids {
		for i := range voids {
			c.close(&voids[i])
		}
		slices.SortFunc(voids, func(a, b Event) int { return cmp.Compare(a.End, b.End) })
	}
	for _, loads := range c.loads {
		for i, l := range loads {
			if died, ok := c.died[l.Process]; ok && l.End == 0 {
				loads[i].End, loads[i].Outcome = max(died, l.Begin), "killed"
				c.load[loadID{l.Process, l.ID}] = loads[i]
			}
		}
	}
}

// close gives an end to a void that failed, or whose process was killed: Redis may carry it out any time later, and
// the Loader tries it again until it succeeds or the values concerned have died of age.
func (c *checker) close(v *Event) {
	if v.End != 0 && v.Err == "" {
		return
	}
	returned := v.End
	v.Err = ErrStore
	v.End = max(v.Begin, v.End) + int64(c.TTL+max(c.StaleFor, c.StaleIfError)+c.LoadTimeout+2*time.Second)
	for _, again := range c.notes[v.Process+" "+v.Key+" void-retried"] {
		// A try that was under way when this one failed may be that of an earlier one.
		if returned == 0 || again.Begin < returned+int64(c.StoreTimeout+slack) {
			continue
		}
		v.End = again.Begin
		if again.Err == "" {
			done := *v
			done.Err = ""
			c.retried = append(c.retried, done)
		}
		return
	}
}

// healthy says that nothing was wrong with the nodes between the two times; all = true means every node, else those
// named. Redis is everybody's.
func (c *checker) healthy(from, to int64, nodes ...string) bool { return c.clean(nil, from, to, nodes) }

// clean is healthy, but for spans that except excuses.
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

// voided says whether something voided the key between the two times, as far as anybody can know.
func (c *checker) voided(key string, from, to int64) bool { return overlaps(c.voids[key], from, to) }

func overlaps(events []Event, from, to int64) bool {
	return slices.ContainsFunc(events, func(e Event) bool { return e.Begin <= to && e.End >= from })
}

func (c *checker) healthyShare() float64 {
	var ill, until int64
	until = c.report.start
	for _, s := range c.wrong {
		begin, end := max(s.begin, until), min(s.end, c.stop)
		if end > begin {
			ill += end - begin
			until = end
		}
	}
	return 1 - float64(ill)/float64(max(1, c.stop-c.report.start))
}

func (c *checker) breach(rule string, at int64, text string, events ...Event) {
	c.report.Violations = append(c.report.Violations, Violation{rule, text, events, at})
}

// String tells the violation, and when in the run it was.
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

// Around shows what happened to the key of a violation shortly before it, without the Gets that hit.
func (r Report) Around(events []Event, v Violation, before time.Duration) string {
	key := ""
	if len(v.Events) > 0 {
		key = v.Events[0].Key
	}
	var near []Event
	for _, e := range events {
		ends := max(e.Begin, e.End)
		concerns := e.Key == key || e.Kind == Fault || e.Kind == Gap
		dull := e.Kind == Get && e.Err == "" && (e.Outcome == "hit" || e.Outcome == "stale" || e.Outcome == "")
		if concerns && !dull && ends >= v.At-int64(before) && e.Begin <= v.At+int64(100*time.Millisecond) {
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

// String is one line.
func (s Stats) String() string {
	return fmt.Sprintf("%d Gets %v errors %v, %d loads (G1 checked for %d; %d beside another under faults), %d takeovers, %d voids, %d refreshes, %d store changes seen, "+
		"faults %v, notes %v, %d gaps, %.0f %% of %v healthy, longest Get %v",
		s.Gets, s.Outcomes, s.Errors, s.Loads, s.Judged, s.Doubles, s.Takeovers, s.Voids, s.Refreshes, s.Samples,
		s.Faults, s.Notes, s.Gaps, 100*s.Healthy, s.Length.Round(time.Millisecond), s.MaxGet.Round(time.Millisecond))
}

// Summary is what happened in some runs, in one line.
func Summary(all []Stats) string {
	var sum Stats
	faults, refused := 0, 0
	for _, s := range all {
		sum.Gets += s.Gets
		sum.Loads += s.Loads
		sum.Doubles += s.Doubles
		sum.Judged += s.Judged
		sum.Voids += s.Voids
		sum.Takeovers += s.Takeovers
		sum.Length += s.Length
		sum.MaxGet = max(sum.MaxGet, s.MaxGet)
		refused += s.Notes["refused"]
		for op, n := range s.Faults {
			if !mild(op) {
				faults += n
			}
		}
	}
	return fmt.Sprintf("%v with %d faults: %d Gets, the longest %v; %d loads, %d of them beside another one of their key under faults, "+
		"%d judged by G1; %d voidings, %d publications refused, %d takeovers",
		sum.Length.Round(time.Second), faults, sum.Gets, sum.MaxGet.Round(time.Millisecond), sum.Loads, sum.Doubles, sum.Judged,
		sum.Voids, refused, sum.Takeovers)
}
