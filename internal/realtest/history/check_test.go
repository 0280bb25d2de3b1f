package history

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// limits of the histories in this file; their times are milliseconds.
var limits = Limits{
	TTL: 400 * time.Millisecond, StaleFor: 400 * time.Millisecond, StaleIfError: 800 * time.Millisecond,
	LocalTTL: 300 * time.Millisecond, LockTTL: 300 * time.Millisecond, StoreTimeout: 50 * time.Millisecond,
	LoadTimeout: time.Second, ErrorTTL: 150 * time.Millisecond, NotFoundTTL: 200 * time.Millisecond,
	Jitter: 0.1, MaxLoads: 2,
}

// ms is a time in a history. They begin at 10 s, so that nothing is before 0.
func ms(t int) int64 { return int64(10*time.Second) + int64(t)*int64(time.Millisecond) }

// The makers of events. who is a process, ids tell the loads of a process from each other.

func load(who string, id int64, key string, begin, end int, outcome string) Event {
	return Event{Kind: Load, Process: who, ID: id, Key: key, Begin: ms(begin), End: ms(end), Outcome: outcome}
}

// published is a load that went well, and the note that says that its value is in the store.
func published(who string, id int64, key string, begin, end int) []Event {
	return []Event{
		load(who, id, key, begin, end, "ok"),
		{Kind: Note, Process: who, Key: key, Begin: ms(end + 1), End: ms(end + 1), Op: "published"},
	}
}

// get is a Get that was answered by a load.
func get(who string, begin, end int, outcome string, by Event) Event {
	return Event{
		Kind: Get, Process: who, Key: by.Key, Begin: ms(begin), End: ms(end), Outcome: outcome, Deadline: ms(begin + 5000),
		Value: &Value{Key: by.Key, Version: by.Version, Began: by.Begin, Process: by.Process, Load: by.ID},
	}
}

func failedGet(who string, begin, end int, err string, by *Event) Event {
	g := Event{Kind: Get, Process: who, Key: "a", Begin: ms(begin), End: ms(end), Deadline: ms(begin + 5000), Outcome: "error"}
	if by != nil {
		g = get(who, begin, end, "error", *by)
	}
	g.Err = err
	return g
}

func sampleOf(begin, end int, by Event) Event {
	s := get("", begin, end, "fresh", by)
	s.Kind, s.Deadline = Sample, 0
	return s
}

func void(who, op string, begin, end int) Event {
	return Event{Kind: Void, Process: who, ID: int64(begin), Key: "a", Begin: ms(begin), End: ms(end), Op: op}
}

func fault(who, op string, begin, end int) Event {
	return Event{Kind: Fault, Process: who, ID: int64(begin), Begin: ms(begin), End: ms(end), Op: op}
}

// join makes one history of events and lists of them.
func join(parts ...any) []Event {
	var all []Event
	for _, p := range parts {
		switch p := p.(type) {
		case Event:
			all = append(all, p)
		case []Event:
			all = append(all, p...)
		}
	}
	return all
}

var (
	first  = published("n0.1", 1, "a", 0, 50)
	second = published("n1.1", 1, "a", 410, 450)
	third  = published("n0.1", 2, "a", 700, 750)
)

// A good history: each event is one that a rule looks at, and finds to be right.
func TestGoodHistory(t *testing.T) {
	absent := load("n1.1", 2, "b", 100, 120, "absent")
	failed := load("n1.1", 3, "c", 100, 120, "failed")
	good := join(
		first, get("n0.1", 0, 51, "led", first[0]), get("n0.1", 10, 51, "joined", first[0]),
		get("n1.1", 5, 52, "waited", first[0]), get("n1.1", 300, 300, "hit", first[0]),
		get("n1.1", 420, 420, "stale", first[0]), get("n1.1", 420, 420, "", first[0]),
		second, sampleOf(460, 461, second[0]), get("n0.1", 470, 471, "shared", second[0]),
		void("n0.1", "invalidate", 600, 610),
		get("n1.1", 605, 605, "hit", second[0]), // began before the void had returned
		get("n1.1", 700, 700, "hit", second[0]), // the push is on its way
		third, get("n0.1", 700, 751, "led", third[0]), get("n1.1", 760, 760, "shared", third[0]),
		absent, failedGet("n1.1", 90, 121, ErrAbsent, &absent),
		failed, failedGet("n0.1", 90, 121, ErrLoad, &failed), failedGet("n2.1", 200, 201, ErrLoad, &failed),
	)
	if r := Check(good, limits); len(r.Violations) > 0 {
		t.Errorf("a good history is found to be wrong:\n%s", r)
	}
}

// story is a history that breaks a rule.
type story struct {
	name, rule string
	wrong      []Event
	excuse     []Event // with these, the rule excuses it; nil = there is no excuse
}

// For each rule there is a story, and the rule finds it.
func TestRules(t *testing.T) {
	for _, s := range slices.Concat(storiesOfLoads(), storiesOfVoids(), storiesOfTime(), storiesOfAnswers()) {
		finds := func(events []Event) bool {
			return slices.ContainsFunc(Check(events, limits).Violations, func(v Violation) bool { return v.Rule == s.rule })
		}
		if !finds(s.wrong) {
			t.Errorf("%s: rule %s does not see it; found:\n%s", s.name, s.rule, Check(s.wrong, limits))
		}
		if s.excuse != nil && finds(append(slices.Clone(s.wrong), s.excuse...)) {
			t.Errorf("%s: rule %s sees no excuse", s.name, s.rule)
		}
	}
}

// G1.
func storiesOfLoads() []story {
	overlapping := load("n1.1", 1, "a", 40, 90, "ok")
	early := load("n1.1", 1, "a", 200, 250, "ok")
	failed := load("n0.1", 1, "a", 0, 50, "failed")
	return []story{
		{"two loads at once", "G1 overlap", join(first, overlapping), join(void("n2.1", "expire", 10, 20))},
		{"two loads at once after a fault", "G1 overlap", join(first, overlapping), join(fault("n3.1", FaultFreeze, -500, -100))},
		{"two loads at once on a starved node", "G1 overlap", join(first, overlapping),
			join(Event{Kind: Gap, Process: "n2.1", Begin: ms(-100), End: ms(-20)})},
		{"a void that may still come", "G1 overlap", join(first, overlapping), join(Event{
			Kind: Void, Process: "n2.1", ID: 1, Key: "a", Begin: ms(-900), End: ms(-800), Op: "expire", Err: ErrStore,
		})},
		{"a load beside a fresh value", "G1 fresh", join(first, early),
			join(Event{Kind: Refresh, Process: "n1.1", ID: 1, Key: "a", Begin: ms(199), End: ms(260)})},
		{"a load within the back-off", "G1 fresh", join(failed, load("n1.1", 1, "a", 100, 120, "ok")),
			join(void("n1.1", "invalidate", 60, 70))},
	}
}

// G2.
func storiesOfVoids() []story {
	failed := load("n0.1", 1, "a", 0, 50, "failed")
	failedVoid := void("n0.1", "invalidate", 100, 150)
	failedVoid.Err = ErrStore
	retried := Event{Kind: Note, Process: "n0.1", Key: "a", Op: "void-retried", Begin: ms(300), End: ms(300)}
	return []story{
		{"an old value after Invalidate", "G2 here",
			join(first, void("n0.1", "invalidate", 100, 110), get("n0.1", 111, 112, "hit", first[0])), nil},
		{"an old flight joined after Expire", "G2 here",
			join(first, void("n0.1", "expire", 20, 30), get("n0.1", 31, 51, "joined", first[0])), nil},
		{"a plain Get after Invalidate", "G2 here",
			join(first, void("n0.1", "invalidate", 100, 110), get("n0.1", 111, 112, "", first[0])), nil},
		{"an old failure after Invalidate", "G2 here",
			join(failed, void("n0.1", "invalidate", 60, 70), failedGet("n0.1", 71, 72, ErrLoad, &failed)), nil},
		{"an old value after a late Invalidate", "G2 retried",
			join(first, failedVoid, retried, get("n0.1", 310, 310, "hit", first[0])), nil},
		{"an old value from the store after a late Invalidate", "G2 store",
			join(first, failedVoid, retried, get("n1.1", 310, 310, "shared", first[0])), nil},
		{"an old value from the store", "G2 store",
			join(first, void("n0.1", "invalidate", 100, 110), get("n1.1", 111, 112, "shared", first[0])), nil},
		{"an old value seen in the store", "G2 store",
			join(first, void("n0.1", "expire", 100, 110), sampleOf(111, 112, first[0])), nil},
		{"an old value in another node's memory", "G2 push",
			join(first, void("n0.1", "expire", 100, 110), get("n1.1", 270, 270, "hit", first[0])),
			join(fault("", FaultPubSub, 90, 91))},
		{"an old value past LocalTTL", "G2 local",
			join(first, void("n0.1", "invalidate", 10, 20), get("n1.1", 435, 435, "hit", first[0]), fault("", FaultFlush, 15, 16)),
			join(fault("n1", FaultRefuse, 300, 350))},
	}
}

// G3, G4, G5.
func storiesOfTime() []story {
	absent := load("n0.1", 1, "a", 0, 50, "absent")
	stuck := load("n0.1", 1, "a", 0, 5000, "ok")
	unfinished := stuck
	unfinished.End, unfinished.Outcome = 0, ""
	calm := void("n0.1", "invalidate", 9000, 9001) // an end of the run that is far away
	calm.Key = "z"
	late := get("n0.1", 0, 5100, "led", first[0])
	return []story{
		{"the store goes back", "G3 store",
			join(first, second, sampleOf(460, 461, second[0]), get("n2.1", 462, 463, "shared", first[0])), nil},
		{"a node goes back", "G3 node",
			join(first, second, get("n2.1", 460, 461, "hit", second[0]), get("n2.1", 470, 470, "hit", first[0])),
			join(Event{Kind: Refresh, Process: "n1.1", ID: 1, Key: "a", Begin: ms(405), End: ms(451)})},
		{"a Get outlasts its context", "G4 deadline", join(first, late), join(fault("n0.1", FaultFreeze, 4000, 5080))},
		{"a Get takes too long", "G4 bound", join(stuck, get("n0.1", 0, 4900, "led", stuck)),
			join(fault("n2.1", FaultKill, 1000, 1100))},
		{"nobody replaces the dead", "G4 takeover", join(unfinished, fault("n0.1", FaultKill, 100, 5000), calm),
			join(load("n1.1", 1, "a", 800, 820, "ok"))},
		{"nobody replaces the frozen", "G4 takeover", join(stuck, fault("n0.1", FaultFreeze, 100, 4000), calm),
			join(load("n1.1", 1, "a", 800, 820, "ok"))},
		{"a value too old for a hit", "G5", join(first, get("n1.1", 470, 470, "hit", first[0])),
			join(Event{Kind: Gap, Process: "n1.1", Begin: ms(380), End: ms(460)})},
		{"a value too old to be stale", "G5", join(first, get("n1.1", 870, 870, "stale", first[0])), nil},
		{"a value too old for anything", "G5", join(first, get("n1.1", 1300, 1300, "stale-on-error", first[0])), nil},
		{"an absence too old", "G5", join(absent, failedGet("n1.1", 270, 271, ErrAbsent, &absent)), nil},
		{"an old result for one who did not wait", "G5", join(first, get("n1.1", 470, 471, "waited", first[0])), nil},
	}
}

// G7, and that nothing is made up.
func storiesOfAnswers() []story {
	failed := load("n0.1", 1, "a", 0, 50, "failed")
	foreign := get("n1.1", 100, 101, "shared", first[0])
	foreign.Value.Version = 7
	blind := load("n1.1", 1, "a", 300, 310, "ok")
	written := void("n0.1", "invalidate", 100, 110)
	written.Version = 3
	return []story{
		{"too many loads", "G7 loads", join(first, load("n0.1", 2, "b", 10, 60, "ok"), load("n0.1", 3, "c", 20, 70, "ok")), nil},
		{"a strange error", "G7 errors", join(failedGet("n0.1", 0, 1, "EOF", nil)), nil},
		{"its context's error, too early", "G7 errors", join(failedGet("n0.1", 0, 1, ErrCtx, nil)), nil},
		{"overloaded, and Redis is well", "G7 errors", join(failedGet("n0.1", 0, 1, ErrOverloaded, nil)),
			join(fault("n0", FaultRefuse, -200, -100))},
		{"a failure after its back-off", "G7 errors", join(failed, failedGet("n1.1", 400, 401, ErrLoad, &failed)),
			join(fault("", FaultRedisFreeze, 60, 390))},
		{"a time-out that was none", "G7 errors", join(first, failedGet("n0.1", 0, 60, ErrTimeout, nil)), nil},
		{"a value that nobody made", "values", join(first, foreign), nil},
		{"a value of a failed load", "values", join(failed, get("n0.1", 0, 51, "led", failed)), nil},
		{"a broken database", "values", join(first, written, blind), nil},
	}
}

// A killed process leaves half a line; what it had begun stays open. Half a line anywhere else is an error.
func TestDecode(t *testing.T) {
	text := `{"k":"load","p":"n0.1","i":1,"key":"a","b":10}
{"k":"load","p":"n0.1","i":2,"key":"b","b":11}
{"k":"load","p":"n0.1","i":1,"key":"a","b":10,"e":20,"o":"ok"}
{"k":"load","p":"n0.1","i":2,"key":"b","b":1`
	events, err := decode(strings.NewReader(text))
	if err != nil || len(events) != 2 || events[0].End != 20 || events[1].End != 0 {
		t.Errorf("%+v, %v", events, err)
	}
	if events, err := decode(strings.NewReader(text + "\n")); err == nil {
		t.Errorf("half a line in the middle is accepted: %+v", events)
	}
}

// The same seed gives the same faults; another one gives others. No node has two at a time.
func TestPlan(t *testing.T) {
	const length = time.Minute
	plan := NewPlan(5, length, 4)
	same := func(a, b Planned) bool {
		return a.Op == b.Op && a.At == b.At && a.For == b.For && a.Node == b.Node && a.Seed == b.Seed
	}
	if !slices.EqualFunc(plan, NewPlan(5, length, 4), same) || slices.EqualFunc(plan, NewPlan(6, length, 4), same) {
		t.Error("a plan does not depend on its seed, or on more than that")
	}
	seen, until := map[string]bool{}, map[int]time.Duration{}
	for _, p := range plan {
		seen[p.Op] = true
		if p.At < until[p.Node] || p.At+p.For > length {
			t.Errorf("%+v begins before %v, or ends after %v", p, until[p.Node], length)
		}
		until[p.Node] = p.At + p.For
	}
	if len(seen) < 10 {
		t.Errorf("a minute has only %v", seen)
	}
}
