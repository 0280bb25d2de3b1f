package refilltest

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/refill-go/refill/driver"
)

var tagCases = []storeCase{
	{
		"tags-unknown",
		`A tag that was never used, or whose state has ended, is unknown. Tags returns the states in the order of the tags,
also if a tag is listed twice. Otherwise values that were invalidated become valid again when their tag state is
evicted, or a value is judged by the state of another tag.`,
		tagsUnknown,
	},
	{
		"ensure-makes-known",
		`EnsureTags makes an unknown tag known as invalidated reach before now, by the clock of the store, and announces
nothing. With a later moment, the load that calls EnsureTags is itself invalid and is never stored. With an earlier one,
values that were invalidated before the tag state was lost become valid again.`,
		ensureMakesKnown,
	},
	{
		"ensure-keeps",
		`EnsureTags changes neither moment of a known tag. It may lengthen the life of the state and never shortens it. If it
moves a moment back, the next load undoes an invalidation. If the state ends before the values, they become invalid
without a cause.`,
		ensureKeeps,
	},
	{
		"tag-invalidate",
		`InvalidateTags sets Invalidated of each given tag, and of no other, to now by the clock of the store, and
announces the tag with that moment. If the moment lies before the start of a load in flight, the value of that load
is served although InvalidateTags has returned (G2).`,
		func(s *stores) { s.tagChanged(invalidating) },
	},
	{
		"tag-expire",
		`ExpireTags sets Expired of each given tag, and of no other, to now by the clock of the store, and announces the
tag with that moment. If the moment lies before the start of a load in flight, the value of that load is served as
fresh although ExpireTags has returned (G2).`,
		func(s *stores) { s.tagChanged(expiring) },
	},
	{
		"tag-moments-independent",
		`InvalidateTags does not change Expired, and ExpireTags does not change Invalidated. If ExpireTags also
invalidated, one call would empty the cache instead of marking values as stale. An unknown tag is the exception: its
values were invalid and must stay so, so ExpireTags makes it known as invalidated now.`,
		tagMomentsIndependent,
	},
	{
		"tag-keeps-longer-life",
		`After InvalidateTags and ExpireTags, the tag state lives for keep or for what it had left, whichever is longer. If it
ends before the values with the tag, all of them are invalid and are loaded again.`,
		tagKeepsLongerLife,
	},
	{
		"tag-is-not-a-key",
		`A tag and a key of the same text are independent: invalidating one does not change the other, and a tag state is
not a value. A user who tags products with "42" does not mean the product 42.`,
		tagIsNotAKey,
	},
	{
		"tags-apart",
		`The state of one tag is never that of another, whatever characters the tags contain. Users choose tags as they choose
keys. If two tags share a state, invalidating one group of values also drops the other, or the wrong one.`,
		tagsApart,
	},
	{
		"tag-state-ends",
		`A tag state ends by itself. Users make any number of tags, and a store that keeps all states grows for ever (G8).`,
		tagStateEnds,
	},
	{
		"tags-agree",
		`All nodes share the tag states, and the moments come from the one clock of the store. What one node sets, another
sees at once, and moments do not go back from one node to another. If a node uses its own clock, loads of a node
whose clock is ahead stay valid after an invalidation.`,
		tagsAgree,
	},
	{
		"race-tags",
		`No change of a tag state is lost, whatever runs at the same time. An EnsureTags that reads and then writes undoes an
InvalidateTags that comes between. InvalidateTags and ExpireTags can undo each other in the same way.`,
		raceTags,
	},
}

// The tags of most cases.
const (
	red   = "product:red"
	blue  = "product:blue"
	green = "product:green"
)

// tagChange is InvalidateTags or ExpireTags.
type tagChange struct {
	name string
	kind driver.AnnouncementKind
	call func(st driver.Store, ctx context.Context, by string, keep time.Duration, tags ...string) error
	at   func(driver.TagState) time.Time
}

var (
	invalidating = tagChange{"InvalidateTags", driver.TagInvalidated, driver.Store.InvalidateTags,
		func(t driver.TagState) time.Time { return t.Invalidated }}
	expiring = tagChange{"ExpireTags", driver.TagExpired, driver.Store.ExpireTags,
		func(t driver.TagState) time.Time { return t.Expired }}
)

func (s *stores) changeTags(c tagChange, st driver.Store, by string, keep time.Duration, tags ...string) {
	s.Helper()
	s.ok(c.call(st, s.ctx, by, keep, tags...), "%s(%q)", c.name, tags)
}

func (s *stores) ensure(st driver.Store, reach, keep time.Duration, tags ...string) {
	s.Helper()
	s.ok(st.EnsureTags(s.ctx, reach, keep, tags...), "EnsureTags(%q)", tags)
}

// states returns the states of tags, known or not.
func (s *stores) states(st driver.Store, tags ...string) []driver.TagState {
	s.Helper()
	states, err := st.Tags(s.ctx, tags...)
	s.ok(err, "Tags(%q)", tags)
	if len(states) != len(tags) {
		s.Fatalf("Tags(%q) returns %d states for %d tags", tags, len(states), len(tags))
	}
	return states
}

// tagState demands that both nodes know the tag, with the same state, and returns it.
func (s *stores) tagState(tag string) driver.TagState {
	s.Helper()
	a, b := s.states(s.A, tag)[0], s.states(s.B, tag)[0]
	if !a.Known || !sameState(a, b) {
		s.Fatalf("Tags(%q) = %s on A, %s on B, want the same known state", tag, stateText(a), stateText(b))
	}
	return a
}

// wantTag demands the state of a tag.
func (s *stores) wantTag(tag string, want driver.TagState) {
	s.Helper()
	if got := s.tagState(tag); !sameState(got, want) {
		s.Fatalf("Tags(%q) = %s, want %s", tag, stateText(got), stateText(want))
	}
}

// wantUnknown demands that neither node knows the tags.
func (s *stores) wantUnknown(tags ...string) {
	s.Helper()
	for _, st := range []driver.Store{s.A, s.B} {
		for i, t := range s.states(st, tags...) {
			if !sameState(t, driver.TagState{}) {
				s.Fatalf("Tags(%q) = %s, want it unknown and without moments", tags[i], stateText(t))
			}
		}
	}
}

// moment returns the start time of a load that begins now, by the clock of the store. It first lets some time pass,
// so that two moments differ.
func (s *stores) moment() time.Time {
	s.Helper()
	const key, token = "clock:1", "clock#1" // no case subscribes to the name "clock"
	s.pass(2 * time.Millisecond)
	now := s.start(s.A, key, token, long).Now
	s.release(s.A, key, token)
	return now
}

// wantBetween demands that the moment at lies between the beginnings of two loads.
func (s *stores) wantBetween(what string, at, before, after time.Time) {
	s.Helper()
	if at.Before(before) || at.After(after) {
		s.Fatalf("%s = %v, want it between %v and %v, the moments of loads before and after the call",
			what, at, before, after)
	}
}

func sameState(a, b driver.TagState) bool {
	return a.Known == b.Known && a.Invalidated.Equal(b.Invalidated) && a.Expired.Equal(b.Expired)
}

func stateText(t driver.TagState) string {
	return fmt.Sprintf("{Known: %v, Invalidated: %v, Expired: %v}", t.Known, t.Invalidated, t.Expired)
}

func tagsUnknown(s *stores) {
	s.wantUnknown(red, blue)
	s.ensure(s.A, time.Hour, long, blue)
	for _, st := range []driver.Store{s.A, s.B} {
		got := s.states(st, red, blue, green, blue)
		for i, known := range []bool{false, true, false, true} {
			if got[i].Known != known {
				s.Fatalf("Tags of four tags: state %d = %s, want Known %v", i, stateText(got[i]), known)
			}
		}
		s.states(st)
	}
	s.ensure(s.A, time.Hour, long)
	s.wantUnknown(red, green)
}

func ensureMakesKnown(s *stores) {
	const reach = 10 * time.Minute
	sub := s.subscribe(s.B, "product")
	before := s.moment()
	s.ensure(s.A, reach, long, red, blue, red)
	after := s.moment()
	for _, tag := range []string{red, blue} {
		t := s.tagState(tag)
		s.wantBetween("Invalidated", t.Invalidated, before.Add(-reach), after.Add(-reach))
		if !t.Expired.IsZero() {
			s.Fatalf("after EnsureTags the state of %q is %s, want it never expired", tag, stateText(t))
		}
		sub.wantNoMore(tag)
	}
}

func ensureKeeps(s *stores) {
	s.changeTags(invalidating, s.A, "a#1", long, red)
	s.changeTags(expiring, s.A, "a#2", long, red)
	s.ensure(s.A, time.Hour, s.short, blue)
	was, other := s.tagState(red), s.tagState(blue)
	s.ensure(s.B, time.Hour, s.short, red)
	s.ensure(s.B, 0, long, blue)
	s.wantTag(red, was)
	s.wantTag(blue, other)
	s.pass(2 * s.short)
	s.wantTag(red, was)
	s.wantTag(blue, other)
}

// tagChanged checks the rules that InvalidateTags and ExpireTags have in common. It checks these rules for a known
// tag, for an unknown tag, and for a tag that was changed before.
func (s *stores) tagChanged(c tagChange) {
	s.Helper()
	sub := s.subscribe(s.B, "product")
	s.ensure(s.A, time.Hour, long, red, green)
	apart := s.tagState(green)
	for i, tag := range []string{red, blue, red} {
		by := fmt.Sprintf("a#%d", i)
		before := s.moment()
		s.changeTags(c, s.A, by, long, tag)
		after := s.moment()
		at := c.at(s.tagState(tag))
		s.wantBetween("the moment of "+c.name, at, before, after)
		sub.want(driver.Announcement{Kind: c.kind, Key: tag, Token: by, At: at})
	}
	s.wantTag(green, apart)

	s.changeTags(c, s.B, "b#1", long)
	before := s.moment()
	s.changeTags(c, s.B, "b#2", long, red, blue, green)
	after := s.moment()
	got := map[string]driver.Announcement{}
	for range 3 {
		n := sub.next("an announcement of each tag")
		got[n.Key] = n
	}
	for _, tag := range []string{red, blue, green} {
		at := c.at(s.tagState(tag))
		s.wantBetween("the moment of "+c.name, at, before, after)
		want := driver.Announcement{Kind: c.kind, Key: tag, Token: "b#2", At: at}
		if !sameAnnouncement(got[tag], want) {
			s.Fatalf("the announcement of %q is %s\n want %s", tag, announcementText(got[tag]), announcementText(want))
		}
		sub.wantNoMore(tag)
	}
}

func tagMomentsIndependent(s *stores) {
	s.ensure(s.A, time.Hour, long, red)
	want := s.tagState(red)
	for _, st := range []driver.Store{s.A, s.B} {
		s.changeTags(expiring, st, "a#1", long, red)
		want.Expired = s.tagState(red).Expired
		s.wantTag(red, want)
		s.moment()
		s.changeTags(invalidating, st, "a#2", long, red)
		want.Invalidated = s.tagState(red).Invalidated
		s.wantTag(red, want)
	}

	s.changeTags(invalidating, s.A, "a#3", long, blue)
	if t := s.tagState(blue); !t.Expired.IsZero() {
		s.Fatalf("after InvalidateTags of an unknown tag its state is %s, want it never expired", stateText(t))
	}
	before := s.moment()
	s.changeTags(expiring, s.A, "a#4", long, green)
	after := s.moment()
	s.wantBetween("Invalidated after ExpireTags of an unknown tag", s.tagState(green).Invalidated, before, after)
}

func tagKeepsLongerLife(s *stores) {
	var all []string
	for _, c := range []tagChange{invalidating, expiring} {
		shorter, longer := "product:shorter-"+c.name, "product:longer-"+c.name
		s.ensure(s.A, time.Hour, long, shorter)
		s.changeTags(c, s.B, "b#1", s.short, shorter)
		s.ensure(s.A, time.Hour, s.short, longer)
		s.changeTags(c, s.B, "b#2", long, longer)
		all = append(all, shorter, longer)
	}
	s.pass(2 * s.short)
	for _, tag := range all {
		if !s.states(s.A, tag)[0].Known {
			s.Fatalf("%q is unknown after %v, want it known for %v", tag, 2*s.short, long)
		}
	}
}

func tagIsNotAKey(s *stores) {
	v1 := s.record("a#1", "v1")
	s.ensure(s.A, time.Hour, long, key)
	s.changeTags(invalidating, s.A, "a#0", long, key)
	s.wantValue(key, nil)
	s.fill(s.A, key, "a#1", v1)
	s.start(s.A, key, "a#2", long)
	s.changeTags(invalidating, s.B, "b#1", long, key)
	s.changeTags(expiring, s.B, "b#2", long, key)
	s.ensure(s.B, time.Hour, long, key)
	s.wantValue(key, v1)
	s.wantRunning(s.A, key, "a#2")
	was := s.tagState(key)
	s.expire(s.B, "b#3", key)
	s.invalidate(s.B, "b#4", key)
	s.fill(s.A, key, "a#3", s.record("a#3", "v2"))
	s.wantTag(key, was)
}

func tagsApart(s *stores) {
	tags, was := oddKeys(), map[string]driver.TagState{}
	for _, tag := range tags {
		s.ensure(s.A, time.Hour, long, tag)
	}
	for _, tag := range tags {
		was[tag] = s.tagState(tag)
	}
	before := s.moment()
	for i, tag := range tags {
		if i%2 == 0 {
			s.changeTags(invalidating, s.A, "a#1", long, tag)
		}
	}
	for i, tag := range tags {
		if i%2 == 1 {
			s.wantTag(tag, was[tag])
		} else if t := s.tagState(tag); t.Invalidated.Before(before) {
			s.Fatalf("the state of %q is %s, want it invalidated after %v", tag, stateText(t), before)
		}
	}
}

func tagStateEnds(s *stores) {
	s.ensure(s.A, time.Hour, s.short, red)
	s.changeTags(invalidating, s.A, "a#1", s.short, blue)
	s.changeTags(expiring, s.A, "a#2", s.short, green)
	s.tagState(green)
	gone := func() bool {
		for _, t := range s.states(s.B, red, blue, green) {
			if t.Known {
				return false
			}
		}
		return true
	}
	if !s.runOut(gone) {
		s.Fatalf("tag states still known after keep of %v: %v", s.short, s.states(s.B, red, blue, green))
	}
	s.wantUnknown(red, blue, green)
}

func tagsAgree(s *stores) {
	var last time.Time
	for i, st := range []driver.Store{s.A, s.B, s.B, s.A, s.A, s.B} {
		c := []tagChange{invalidating, expiring}[i%2]
		s.changeTags(c, st, "n#1", long, red)
		at := c.at(s.tagState(red))
		if at.Before(last) {
			s.Fatalf("the moment of %s went back: %v after %v (call %d)", c.name, at, last, i)
		}
		last = at
	}
}

// raceTags runs EnsureTags, InvalidateTags and ExpireTags at the same time on an unknown tag, because on an unknown tag
// each of these calls writes a new state. Each call starts first in some rounds.
func raceTags(s *stores) {
	for r := range rounds {
		tag, start := fmt.Sprintf("product:%d", r), s.moment()
		calls := []func(driver.Store) error{
			func(st driver.Store) error { return st.EnsureTags(s.ctx, time.Hour, long, tag) },
			func(st driver.Store) error { return st.InvalidateTags(s.ctx, "n#1", long, tag) },
			func(st driver.Store) error { return st.EnsureTags(s.ctx, time.Hour, long, tag) },
			func(st driver.Store) error { return st.ExpireTags(s.ctx, "n#2", long, tag) },
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
		if t := s.tagState(tag); t.Invalidated.Before(start) || t.Expired.Before(start) {
			s.Fatalf("after a race the state of %q is %s, want both moments after %v", tag, stateText(t), start)
		}
	}
}
