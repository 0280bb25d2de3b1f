package history

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// limits are the settings of the Loaders in the histories of this file.
var limits = Limits{
	TTL: 400 * time.Millisecond, StaleFor: 400 * time.Millisecond, StaleIfError: 800 * time.Millisecond,
	LocalTTL: 300 * time.Millisecond, LockTTL: 300 * time.Millisecond, StoreTimeout: 50 * time.Millisecond,
	LoadTimeout: time.Second, ErrorTTL: 150 * time.Millisecond, NotFoundTTL: 200 * time.Millisecond,
	Jitter: 0.1, MaxLoads: 2,
}

// ms returns a time in a history, t milliseconds after its begin. Histories begin at 10 s, so that times shortly before
// the begin are not negative.
func ms(t int) int64 { return int64(10*time.Second) + int64(t)*int64(time.Millisecond) }

// load returns a Load event. who is the process that loads. id is unique among the loads of that process.
func load(who string, id int64, key string, begin, end int, outcome string) Event {
	return Event{Kind: Load, Process: who, ID: id, Key: key, Begin: ms(begin), End: ms(end), Outcome: outcome}
}

// published returns a load that succeeded, and the event that reports that its value was stored.
func published(who string, id int64, key string, begin, end int) []Event {
	return []Event{
		load(who, id, key, begin, end, "ok"),
		{Kind: OnEvent, Process: who, Key: key, Begin: ms(end + 1), End: ms(end + 1), Op: "published"},
	}
}

// get returns a Get event. The argument by is the Load event of the load that made the value.
func get(who string, begin, end int, outcome string, by Event) Event {
	return Event{
		Kind: Get, Process: who, Key: by.Key, Begin: ms(begin), End: ms(end), Outcome: outcome, Deadline: ms(begin + 5000),
		Value: &Value{Key: by.Key, Version: by.Version, Began: by.Begin, Process: by.Process, Load: by.ID},
	}
}

func failedGet(who string, begin, end int, err string, by *Event) Event {
	g := Event{
		Kind: Get, Process: who, Key: "a", Begin: ms(begin), End: ms(end), Deadline: ms(begin + 5000), Outcome: "failed",
	}
	if by != nil {
		g = get(who, begin, end, "failed", *by)
	}
	g.Err = err
	return g
}

func sampleOf(begin, end int, by Event) Event {
	s := get("", begin, end, "fresh", by)
	s.Kind, s.Deadline = Sample, 0
	return s
}

func invalidation(who, op string, begin, end int) Event {
	return Event{Kind: Invalidation, Process: who, ID: int64(begin), Key: "a", Begin: ms(begin), End: ms(end), Op: op}
}

func fault(who, op string, begin, end int) Event {
	return Event{Kind: Fault, Process: who, ID: int64(begin), Begin: ms(begin), End: ms(end), Op: op}
}

// join joins events and lists of events to one history.
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

// Check must report no violation for a history that keeps all promises.
func TestGoodHistory(t *testing.T) {
	absent := load("n1.1", 2, "b", 100, 120, "absent")
	failed, failedThere := load("n1.1", 3, "c", 100, 120, "failed"), load("n0.1", 3, "c", 130, 140, "failed")
	good := join(
		first, get("n0.1", 0, 51, "loaded", first[0]), get("n0.1", 10, 51, "coalesced", first[0]),
		get("n1.1", 5, 52, "loaded-elsewhere", first[0]), get("n1.1", 300, 300, "hit", first[0]),
		get("n1.1", 420, 420, "stale", first[0]), get("n1.1", 420, 420, "", first[0]),
		second, sampleOf(460, 461, second[0]), get("n0.1", 470, 471, "shared", second[0]),
		invalidation("n0.1", "invalidate", 600, 610),
		get("n1.1", 605, 605, "hit", second[0]), // allowed: the Get began before the invalidation had returned
		get("n1.1", 700, 700, "hit", second[0]), // allowed: the announcement may not have arrived yet
		third, get("n0.1", 700, 751, "loaded", third[0]), get("n1.1", 760, 760, "shared", third[0]),
		absent, failedGet("n1.1", 90, 121, ErrAbsent, &absent),
		failed, failedGet("n1.1", 90, 121, ErrLoad, &failed), failedGet("n1.1", 200, 201, ErrLoad, &failed),
		failedThere, failedGet("n0.1", 125, 141, ErrLoad, &failedThere), failedGet("n2.1", 200, 201, ErrLoad, &failedThere),
	)
	if r := Check(good, limits); len(r.Violations) > 0 {
		t.Errorf("violations in a history that has none:\n%s", r)
	}
}

// badHistory is a history that breaks a rule.
type badHistory struct {
	name, rule string
	wrong      []Event
	excuse     []Event // if the history also has these events, the rule is not broken; nil = no excuse exists
}

// Check must find the broken rule in each bad history, and must not find it if the history has the excuse.
func TestRules(t *testing.T) {
	for _, s := range slices.Concat(badLoads(), badInvalidations(), badTimes(), badAnswers()) {
		finds := func(events []Event) bool {
			return slices.ContainsFunc(Check(events, limits).Violations, func(v Violation) bool { return v.Rule == s.rule })
		}
		if !finds(s.wrong) {
			t.Errorf("%s: rule %q is not violated; violations found:\n%s", s.name, s.rule, Check(s.wrong, limits))
		}
		if s.excuse != nil && finds(append(slices.Clone(s.wrong), s.excuse...)) {
			t.Errorf("%s: rule %q is violated in spite of the excuse", s.name, s.rule)
		}
	}
}

// badLoads returns histories that break G1.
func badLoads() []badHistory {
	overlapping := load("n1.1", 1, "a", 40, 90, "ok")
	early := load("n1.1", 1, "a", 200, 250, "ok")
	failed := load("n0.1", 1, "a", 0, 50, "failed")
	return []badHistory{
		{"two loads at once", "G1 overlap", join(first, overlapping), join(invalidation("n2.1", "expire", 10, 20))},
		{"two loads at once after a fault", "G1 overlap", join(first, overlapping),
			join(fault("n3.1", FaultFreeze, -500, -100))},
		{"two loads at once after a pause of a node", "G1 overlap", join(first, overlapping),
			join(Event{Kind: Gap, Process: "n2.1", Begin: ms(-100), End: ms(-20)})},
		{"two loads at once, an Expire pending", "G1 overlap", join(first, overlapping), join(Event{
			Kind: Invalidation, Process: "n2.1", ID: 1, Key: "a", Begin: ms(-900), End: ms(-800), Op: "expire", Err: ErrStore,
		})},
		{"a load although the value is fresh", "G1 too early", join(first, early),
			join(Event{Kind: Refresh, Process: "n1.1", ID: 1, Key: "a", Begin: ms(199), End: ms(260)})},
		{"a load within the back-off", "G1 too early", join(failed, load("n0.1", 2, "a", 100, 120, "ok")),
			join(invalidation("n1.1", "invalidate", 60, 70))},
		{"a load within the back-off of two nodes", "G1 too early",
			join(failed, load("n1.1", 1, "a", 100, 105, "failed"), load("n2.1", 1, "a", 200, 220, "ok")),
			join(fault("n1.1", FaultFreeze, -500, -100))},
	}
}

// badInvalidations returns histories that break G2.
func badInvalidations() []badHistory {
	failed := load("n0.1", 1, "a", 0, 50, "failed")
	failedInvalidate := invalidation("n0.1", "invalidate", 100, 150)
	failedInvalidate.Err = ErrStore
	retried := Event{Kind: OnEvent, Process: "n0.1", Key: "a", Op: "invalidate-retried", Begin: ms(300), End: ms(300)}
	return []badHistory{
		{"an old value after Invalidate", "G2 same process",
			join(first, invalidation("n0.1", "invalidate", 100, 110), get("n0.1", 111, 112, "hit", first[0])), nil},
		{"a flight from before an Expire joined after it", "G2 same process",
			join(first, invalidation("n0.1", "expire", 20, 30), get("n0.1", 31, 51, "coalesced", first[0])), nil},
		{"a plain Get after Invalidate", "G2 same process",
			join(first, invalidation("n0.1", "invalidate", 100, 110), get("n0.1", 111, 112, "", first[0])), nil},
		{"an old failure after Invalidate", "G2 same process",
			join(failed, invalidation("n0.1", "invalidate", 60, 70), failedGet("n0.1", 71, 72, ErrLoad, &failed)), nil},
		{"an old value after a retried Invalidate", "G2 retried",
			join(first, failedInvalidate, retried, get("n0.1", 310, 310, "hit", first[0])), nil},
		{"an old value from the store after a retried Invalidate", "G2 store",
			join(first, failedInvalidate, retried, get("n1.1", 310, 310, "shared", first[0])), nil},
		{"an old value from the store", "G2 store",
			join(first, invalidation("n0.1", "invalidate", 100, 110), get("n1.1", 111, 112, "shared", first[0])), nil},
		{"an old value seen in the store", "G2 store",
			join(first, invalidation("n0.1", "expire", 100, 110), sampleOf(111, 112, first[0])), nil},
		{"an old value in another node's memory", "G2 announcement",
			join(first, invalidation("n0.1", "expire", 100, 110), get("n1.1", 270, 270, "hit", first[0])),
			join(fault("", FaultPubSub, 90, 91))},
		{"an old value after LocalTTL", "G2 LocalTTL",
			join(first, invalidation("n0.1", "invalidate", 10, 20), get("n1.1", 435, 435, "hit", first[0]),
				fault("", FaultFlush, 15, 16)),
			join(fault("n1", FaultRefuse, 300, 350))},
	}
}

// badTimes returns histories that break G3, G4 or G5.
func badTimes() []badHistory {
	absent := load("n0.1", 1, "a", 0, 50, "absent")
	stuck := load("n0.1", 1, "a", 0, 5000, "ok")
	unfinished := stuck
	unfinished.End, unfinished.Outcome = 0, ""
	calm := invalidation("n0.1", "invalidate", 9000, 9001) // a late event, so that the run ends much later
	calm.Key = "z"
	late := get("n0.1", 0, 5100, "loaded", first[0])
	return []badHistory{
		{"an older value in the store after a newer one", "G3 store",
			join(first, second, sampleOf(460, 461, second[0]), get("n2.1", 462, 463, "shared", first[0])), nil},
		{"an older value of a node after a newer one", "G3 node",
			join(first, second, get("n2.1", 460, 461, "hit", second[0]), get("n2.1", 470, 470, "hit", first[0])),
			join(Event{Kind: Refresh, Process: "n1.1", ID: 1, Key: "a", Begin: ms(405), End: ms(451)})},
		{"a Get outlasts its context", "G4 deadline", join(first, late), join(fault("n0.1", FaultFreeze, 4000, 5080))},
		{"a Get takes too long", "G4 duration", join(stuck, get("n0.1", 0, 4900, "loaded", stuck)),
			join(fault("n2.1", FaultKill, 1000, 1100))},
		{"no process replaces a killed one", "G4 takeover", join(unfinished, fault("n0.1", FaultKill, 100, 5000), calm),
			join(load("n1.1", 1, "a", 800, 820, "ok"))},
		{"no process replaces a frozen one", "G4 takeover", join(stuck, fault("n0.1", FaultFreeze, 100, 4000), calm),
			join(load("n1.1", 1, "a", 800, 820, "ok"))},
		{"a value too old for a hit", "G5", join(first, get("n1.1", 470, 470, "hit", first[0])),
			join(Event{Kind: Gap, Process: "n1.1", Begin: ms(380), End: ms(460)})},
		{"a value too old to be stale", "G5", join(first, get("n1.1", 870, 870, "stale", first[0])), nil},
		{"a value too old to be served on an error", "G5",
			join(first, get("n1.1", 1300, 1300, "stale-on-error", first[0])), nil},
		{"an absence too old", "G5", join(absent, failedGet("n1.1", 270, 271, ErrAbsent, &absent)), nil},
		{"an old result for a caller that did not wait", "G5",
			join(first, get("n1.1", 470, 471, "loaded-elsewhere", first[0])), nil},
	}
}

// badAnswers returns histories that break G7 or the rule values.
func badAnswers() []badHistory {
	failed := load("n0.1", 1, "a", 0, 50, "failed")
	foreign := get("n1.1", 100, 101, "shared", first[0])
	foreign.Value.Version = 7
	blind := load("n1.1", 1, "a", 300, 310, "ok")
	written := invalidation("n0.1", "invalidate", 100, 110)
	written.Version = 3
	return []badHistory{
		{"too many loads", "G7 loads",
			join(first, load("n0.1", 2, "b", 10, 60, "ok"), load("n0.1", 3, "c", 20, 70, "ok")), nil},
		{"an unknown error", "G7 errors", join(failedGet("n0.1", 0, 1, "EOF", nil)), nil},
		{"the error of its context, too early", "G7 errors", join(failedGet("n0.1", 0, 1, ErrCtx, nil)), nil},
		{"overloaded although Redis is healthy", "G7 errors", join(failedGet("n0.1", 0, 1, ErrOverloaded, nil)),
			join(fault("n0", FaultRefuse, -200, -100))},
		{"a failure after its back-off", "G7 errors", join(failed, failedGet("n1.1", 400, 401, ErrLoad, &failed)),
			join(fault("", FaultRedisFreeze, 60, 390))},
		{"a failure of one other node", "G6 failure of another node",
			join(failed, failedGet("n1.1", 60, 61, ErrLoad, &failed)), join(load("n2.1", 1, "a", -100, -50, "failed"))},
		{"a failure of another node without a database", "G6 failure of another node",
			join(fault("n0", FaultNoDB, -10, 100), failed, failedGet("n1.1", 60, 61, ErrLoad, &failed)),
			join(fault("n0.1", FaultFreeze, -500, -100))},
		{"a time-out without a slow load", "G7 errors", join(first, failedGet("n0.1", 0, 60, ErrTimeout, nil)), nil},
		{"a value that no load returned", "values", join(first, foreign), nil},
		{"a value of a failed load", "values", join(failed, get("n0.1", 0, 51, "loaded", failed)), nil},
		{"a broken database", "values", join(first, written, blind), nil},
	}
}

// A killed process leaves half a line at the end of its file. decode must drop that line. An event that was written
// only at its begin must have no End. Half a line anywhere else must be an error.
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
		t.Errorf("half a line in the middle was accepted: %+v", events)
	}
}

// The same seed must give the same faults, and another seed must give other faults. No node may have two faults at a
// time.
func TestPlan(t *testing.T) {
	const length = time.Minute
	plan := NewPlan(5, length, 4)
	same := func(a, b Planned) bool {
		return a.Op == b.Op && a.At == b.At && a.For == b.For && a.Node == b.Node && a.Seed == b.Seed
	}
	if !slices.EqualFunc(plan, NewPlan(5, length, 4), same) || slices.EqualFunc(plan, NewPlan(6, length, 4), same) {
		t.Error("a plan does not depend on its seed, or depends on more than its seed")
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
		t.Errorf("a plan of a minute has only these faults: %v", seen)
	}
}
