package refilltest

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/refill-go/refill"
)

var tagCases = []storeCase{
	{
		"tags-unknown",
		`A tag that was never used, or has run out, is not known, and Tags answers in the order of the tags, also where one is
asked for twice. Otherwise a mark that was evicted revives all that was invalidated before, or one tag is judged by
another's mark.`,
		tagsUnknown,
	},
	{
		"hold-makes-known-with-reach",
		`HoldTags makes a tag known as invalidated reach before now, by the store's clock, and announces nothing. A later moment
voids the very load that holds it, and it is never stored; an earlier one revives what was invalidated before the
mark was lost.`,
		holdMakesKnown,
	},
	{
		"hold-keeps",
		`HoldTags changes neither moment of a tag that is known, and lengthens its life, but never shortens it. If it moves a
moment back, an invalidation is undone by the next load; if the mark ends before the values, those are void for nothing.`,
		holdKeeps,
	},
	{
		"tag-invalidate",
		`InvalidateTags marks each tag as invalidated now, by the store's clock, and no other, and announces it with the moment.
A mark that is older than a load which began before lets that load be served after InvalidateTags has returned.`,
		func(s *stores) { s.tagVoided(invalidating) },
	},
	{
		"tag-expire",
		`ExpireTags marks each tag as expired now, by the rules of InvalidateTags.`,
		func(s *stores) { s.tagVoided(expiring) },
	},
	{
		"tag-voids-keep-each-other",
		`InvalidateTags leaves Expired as it is, and ExpireTags leaves Invalidated as it is: a soft void that became a hard one
empties the cache. But a tag that ExpireTags finds unknown was void, and stays it: it becomes invalidated now, too.`,
		tagVoidsKeepEachOther,
	},
	{
		"tag-voids-keep-life",
		`InvalidateTags and ExpireTags take the longer of what a mark has left and keep. One that ends too early voids all that
carries its tag; where the values live longer than keep, all of them are loaded again.`,
		tagVoidsKeepLife,
	},
	{
		"tag-is-no-key",
		`A tag and a key of the same text are two things: voiding one touches nothing of the other, and a mark is no value. A
user who tags products with "42" does not mean the product 42.`,
		tagIsNoKey,
	},
	{
		"tags-apart",
		`The mark of one tag is never that of another, whatever characters the tags hold. They are made of what users type, as keys
are.`,
		tagsApart,
	},
	{
		"tag-mark-ends",
		`A mark ends by itself: tags are as many as users make, and nothing is left behind (G8).`,
		tagMarkEnds,
	},
	{
		"tags-agree",
		`The marks are the place's, by its one clock: what one node marks, the other sees at once, and moments never go back from
one node to the other. A moment by a node's own clock lets through what a faster clock has loaded.`,
		tagsAgree,
	},
	{
		"race-tags",
		`Whatever runs at the same time, no mark is lost. A HoldTags that reads, and then writes, undoes the InvalidateTags that
came between; so do InvalidateTags and ExpireTags to each other.`,
		raceTags,
	},
}

// The tags that most cases are about.
const (
	red   = "product:red"
	blue  = "product:blue"
	green = "product:green"
)

// A tagVoid is one of the two ways to void what carries a tag.
type tagVoid struct {
	name string
	kind refill.NoteKind
	call func(st refill.Store, ctx context.Context, by string, keep time.Duration, tags ...string) error
	at   func(refill.TagState) time.Time
}

var (
	invalidating = tagVoid{"InvalidateTags", refill.NoteTagInvalidated, refill.Store.InvalidateTags,
		func(t refill.TagState) time.Time { return t.Invalidated }}
	expiring = tagVoid{"ExpireTags", refill.NoteTagExpired, refill.Store.ExpireTags,
		func(t refill.TagState) time.Time { return t.Expired }}
)

func (s *stores) voidTags(v tagVoid, st refill.Store, by string, keep time.Duration, tags ...string) {
	s.Helper()
	s.ok(v.call(st, s.ctx, by, keep, tags...), "%s(%q)", v.name, tags)
}

func (s *stores) hold(st refill.Store, reach, keep time.Duration, tags ...string) {
	s.Helper()
	s.ok(st.HoldTags(s.ctx, reach, keep, tags...), "HoldTags(%q)", tags)
}

// states are the marks of tags, known or not.
func (s *stores) states(st refill.Store, tags ...string) []refill.TagState {
	s.Helper()
	states, err := st.Tags(s.ctx, tags...)
	s.ok(err, "Tags(%q)", tags)
	if len(states) != len(tags) {
		s.Fatalf("Tags(%q) gives %d states for %d tags", tags, len(states), len(tags))
	}
	return states
}

// mark is the mark of a tag that has to be known, as both nodes see it.
func (s *stores) mark(tag string) refill.TagState {
	s.Helper()
	a, b := s.states(s.A, tag)[0], s.states(s.B, tag)[0]
	if !a.Known || !sameState(a, b) {
		s.Fatalf("Tags(%q) = %s on A, %s on B, want it known, and the same", tag, stateText(a), stateText(b))
	}
	return a
}

// marked demands the mark of a tag.
func (s *stores) marked(tag string, want refill.TagState) {
	s.Helper()
	if got := s.mark(tag); !sameState(got, want) {
		s.Fatalf("Tags(%q) = %s, want %s", tag, stateText(got), stateText(want))
	}
}

// unknown demands that no node knows the tags.
func (s *stores) unknown(tags ...string) {
	s.Helper()
	for _, st := range []refill.Store{s.A, s.B} {
		for i, t := range s.states(st, tags...) {
			if !sameState(t, refill.TagState{}) {
				s.Fatalf("Tags(%q) = %s, want it unknown, and nothing said of it", tags[i], stateText(t))
			}
		}
	}
}

// moment is when a load that begins now has begun. Time has passed since the call before.
func (s *stores) moment() time.Time {
	s.Helper()
	const key, token = "clock:1", "clock#1" // of a name that nobody listens to
	s.pass(2 * time.Millisecond)
	now := s.begin(s.A, key, token, long).Now
	s.release(s.A, key, token)
	return now
}

// between demands that a moment lies between two loads.
func (s *stores) between(what string, at, before, after time.Time) {
	s.Helper()
	if at.Before(before) || at.After(after) {
		s.Fatalf("%s = %v, want it between %v and %v, when loads began before and after the call", what, at, before, after)
	}
}

func sameState(a, b refill.TagState) bool {
	return a.Known == b.Known && a.Invalidated.Equal(b.Invalidated) && a.Expired.Equal(b.Expired)
}

func stateText(t refill.TagState) string {
	return fmt.Sprintf("{Known: %v, Invalidated: %v, Expired: %v}", t.Known, t.Invalidated, t.Expired)
}

func tagsUnknown(s *stores) {
	s.unknown(red, blue)
	s.hold(s.A, time.Hour, long, blue)
	for _, st := range []refill.Store{s.A, s.B} {
		got := s.states(st, red, blue, green, blue)
		for i, known := range []bool{false, true, false, true} {
			if got[i].Known != known {
				s.Fatalf("state %d of four = %s, want Known %v", i, stateText(got[i]), known)
			}
		}
		s.states(st)
	}
	s.hold(s.A, time.Hour, long)
	s.unknown(red, green)
}

func holdMakesKnown(s *stores) {
	const reach = 10 * time.Minute
	e := s.listen(s.B, "product")
	before := s.moment()
	s.hold(s.A, reach, long, red, blue, red)
	after := s.moment()
	for _, tag := range []string{red, blue} {
		t := s.mark(tag)
		s.between("Invalidated", t.Invalidated, before.Add(-reach), after.Add(-reach))
		if !t.Expired.IsZero() {
			s.Fatalf("after HoldTags %q is %s, want it never expired", tag, stateText(t))
		}
		e.heardAll(tag)
	}
}

func holdKeeps(s *stores) {
	s.voidTags(invalidating, s.A, "a#1", long, red)
	s.voidTags(expiring, s.A, "a#2", long, red)
	s.hold(s.A, time.Hour, s.short, blue)
	was, other := s.mark(red), s.mark(blue)
	s.hold(s.B, time.Hour, s.short, red)
	s.hold(s.B, 0, long, blue)
	s.marked(red, was)
	s.marked(blue, other)
	s.pass(2 * s.short)
	s.marked(red, was)
	s.marked(blue, other)
}

// tagVoided checks what the two ways have in common: over a tag that is known, one that is not, and again.
func (s *stores) tagVoided(v tagVoid) {
	s.Helper()
	e := s.listen(s.B, "product")
	s.hold(s.A, time.Hour, long, red, green)
	apart := s.mark(green)
	for i, tag := range []string{red, blue, red} {
		by := fmt.Sprintf("a#%d", i)
		before := s.moment()
		s.voidTags(v, s.A, by, long, tag)
		after := s.moment()
		at := v.at(s.mark(tag))
		s.between("the moment of "+v.name, at, before, after)
		e.hears(refill.Note{Kind: v.kind, Key: tag, Token: by, At: at})
	}
	s.marked(green, apart)

	s.voidTags(v, s.B, "b#1", long)
	before := s.moment()
	s.voidTags(v, s.B, "b#2", long, red, blue, green)
	after := s.moment()
	heard := map[string]refill.Note{}
	for range 3 {
		n := e.next("an announcement of each tag")
		heard[n.Key] = n
	}
	for _, tag := range []string{red, blue, green} {
		at := v.at(s.mark(tag))
		s.between("the moment of "+v.name, at, before, after)
		if want := (refill.Note{Kind: v.kind, Key: tag, Token: "b#2", At: at}); !sameNote(heard[tag], want) {
			s.Fatalf("heard %s\n want %s", noteText(heard[tag]), noteText(want))
		}
		e.heardAll(tag)
	}
}

func tagVoidsKeepEachOther(s *stores) {
	s.hold(s.A, time.Hour, long, red)
	want := s.mark(red)
	for _, st := range []refill.Store{s.A, s.B} {
		s.voidTags(expiring, st, "a#1", long, red)
		want.Expired = s.mark(red).Expired
		s.marked(red, want)
		s.moment()
		s.voidTags(invalidating, st, "a#2", long, red)
		want.Invalidated = s.mark(red).Invalidated
		s.marked(red, want)
	}

	s.voidTags(invalidating, s.A, "a#3", long, blue)
	if t := s.mark(blue); !t.Expired.IsZero() {
		s.Fatalf("InvalidateTags of an unknown tag makes it %s, want it never expired", stateText(t))
	}
	before := s.moment()
	s.voidTags(expiring, s.A, "a#4", long, green)
	after := s.moment()
	s.between("Invalidated after ExpireTags of an unknown tag", s.mark(green).Invalidated, before, after)
}

func tagVoidsKeepLife(s *stores) {
	var all []string
	for _, v := range []tagVoid{invalidating, expiring} {
		shorter, longer := "product:shorter-"+v.name, "product:longer-"+v.name
		s.hold(s.A, time.Hour, long, shorter)
		s.voidTags(v, s.B, "b#1", s.short, shorter)
		s.hold(s.A, time.Hour, s.short, longer)
		s.voidTags(v, s.B, "b#2", long, longer)
		all = append(all, shorter, longer)
	}
	s.pass(2 * s.short)
	for _, tag := range all {
		if !s.states(s.A, tag)[0].Known {
			s.Fatalf("%q is not known any more, after %v of %v", tag, 2*s.short, long)
		}
	}
}

func tagIsNoKey(s *stores) {
	v1 := s.record("a#1", "v1")
	s.hold(s.A, time.Hour, long, key)
	s.voidTags(invalidating, s.A, "a#0", long, key)
	s.holds(key, nil)
	s.fill(s.A, key, "a#1", v1)
	s.begin(s.A, key, "a#2", long)
	s.voidTags(invalidating, s.B, "b#1", long, key)
	s.voidTags(expiring, s.B, "b#2", long, key)
	s.hold(s.B, time.Hour, long, key)
	s.holds(key, v1)
	s.alive(s.A, key, "a#2")
	was := s.mark(key)
	s.expire(s.B, "b#3", key)
	s.invalidate(s.B, "b#4", key)
	s.fill(s.A, key, "a#3", s.record("a#3", "v2"))
	s.marked(key, was)
}

func tagsApart(s *stores) {
	tags, was := oddKeys(), map[string]refill.TagState{}
	for _, tag := range tags {
		s.hold(s.A, time.Hour, long, tag)
	}
	for _, tag := range tags {
		was[tag] = s.mark(tag)
	}
	before := s.moment()
	for i, tag := range tags {
		if i%2 == 0 {
			s.voidTags(invalidating, s.A, "a#1", long, tag)
		}
	}
	for i, tag := range tags {
		if i%2 == 1 {
			s.marked(tag, was[tag])
		} else if t := s.mark(tag); t.Invalidated.Before(before) {
			s.Fatalf("%q is %s, want it invalidated after %v", tag, stateText(t), before)
		}
	}
}

func tagMarkEnds(s *stores) {
	s.hold(s.A, time.Hour, s.short, red)
	s.voidTags(invalidating, s.A, "a#1", s.short, blue)
	s.voidTags(expiring, s.A, "a#2", s.short, green)
	s.mark(green)
	gone := func() bool {
		for _, t := range s.states(s.B, red, blue, green) {
			if t.Known {
				return false
			}
		}
		return true
	}
	if !s.ends(gone) {
		s.Fatalf("kept beyond %v: %v", s.short, s.states(s.B, red, blue, green))
	}
	s.unknown(red, blue, green)
}

func tagsAgree(s *stores) {
	var last time.Time
	for i, st := range []refill.Store{s.A, s.B, s.B, s.A, s.A, s.B} {
		v := []tagVoid{invalidating, expiring}[i%2]
		s.voidTags(v, st, "n#1", long, red)
		at := v.at(s.mark(red))
		if at.Before(last) {
			s.Fatalf("the moment of %s went back: %v after %v (call %d)", v.name, at, last, i)
		}
		last = at
	}
}

// raceTags has calls of each kind meet over a tag that nobody knows, where there is most to overwrite. Each of them is the
// first to start now and then.
func raceTags(s *stores) {
	for r := range rounds {
		tag, start := fmt.Sprintf("product:%d", r), s.moment()
		calls := []func(refill.Store) error{
			func(st refill.Store) error { return st.HoldTags(s.ctx, time.Hour, long, tag) },
			func(st refill.Store) error { return st.InvalidateTags(s.ctx, "n#1", long, tag) },
			func(st refill.Store) error { return st.HoldTags(s.ctx, time.Hour, long, tag) },
			func(st refill.Store) error { return st.ExpireTags(s.ctx, "n#2", long, tag) },
		}
		var wg sync.WaitGroup
		for i := range calls {
			wg.Go(func() {
				if err := calls[(i+r)%len(calls)](s.node(i)); err != nil {
					s.Errorf("race of tags: %v", err)
				}
			})
		}
		wg.Wait()
		if t := s.mark(tag); t.Invalidated.Before(start) || t.Expired.Before(start) {
			s.Fatalf("after a race %q is %s, want both after %v", tag, stateText(t), start)
		}
	}
}
