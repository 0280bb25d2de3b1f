package refilltest

import (
	"time"

	"github.com/refill-go/refill"
)

// These cases need a hand in the place itself; a world that has none lacks the hook, and the case says so.
var hookCases = []storeCase{
	{
		"endless-lease",
		`A lease without an end counts as free when it is asked how long it lasts: somebody set it with SETNX and died, or a
restore dropped its end. All who wait for it would wait for ever, or poll.`,
		endlessLease,
	},
	{
		"garbled-lease",
		`A lease of a foreign type counts as free when it is asked how long it lasts. A script that trips over it fails for
that key until somebody deletes it by hand.`,
		garbledLease,
	},
	{
		"publish-before-heir",
		`While the lease is another's already and the claim is not yet, as with an AskOnce that takes the lease first, the claim
decides: its load is stored, announced, and frees whatever lease there is. The heir then finds the value instead of loading
it.`,
		publishBeforeHeir,
	},
	{
		"fail-before-heir",
		`A Fail with the claim alone ends its own load only: another's lease stays, and no back-off takes its place. Whoever
took over tries for himself; a back-off there lets a third one in beside him.`,
		failBeforeHeir,
	},
	{
		"release-before-heir",
		`A Release with the claim alone frees the claim and announces it: another's lease stays. Otherwise a late release lets a
third one in (seeds row 5).`,
		releaseBeforeHeir,
	},
	{
		"foreign-claim",
		`A claim of somebody unknown, one without an end, or one of a foreign type is taken over by Begin, as any other,
and lets nobody publish before. Where it stops a script, the key is never stored again.`,
		foreignClaim,
	},
	{
		"garbled-value",
		`A value of a foreign type is a miss, replaced by the next fill, and no obstacle to Invalidate and Expire (G7). Where it is
an error, every Get of that key goes to the database until somebody deletes it by hand.`,
		garbledValue,
	},
	{
		"foreign-mark",
		`A mark of foreign bytes or of a foreign type is no mark: its tag is not known, and the next call that holds or voids the tag
replaces it by one that ends. Where it stops a script, nothing that carries the tag is ever stored again.`,
		foreignMark,
	},
	{
		"silent-server",
		`Every call returns when its ctx ends, also when the server does not answer, and works again when it does. Most clients
do not look at the ctx while they wait for an answer: a Get hangs for as long as theirs lasts (G7).`,
		silentServer,
	},
	{
		"broken-subscription",
		`A subscription that breaks is announced as NoteDown, its return as NoteUp, and then everything is heard again. A break
that goes unnoticed leaves old values in L1 until LocalTTL.`,
		brokenSubscription,
	},
	{
		"no-room",
		`Publish frees before it stores, and announces, so that a full store still lets the waiters go. Otherwise each node in
turn sleeps out LockTTL and loads.`,
		noRoom,
	},
}

func endlessLease(s *stores) {
	needs(s, "StoreWorld.Plant", s.Plant != nil)
	for _, how := range []refill.Ask{refill.AskLeft, refill.AskForce} {
		s.Plant(key, PartLease, "dead#1")
		s.healed(how)
	}
}

func garbledLease(s *stores) {
	needs(s, "StoreWorld.Garble", s.Garble != nil)
	for _, how := range []refill.Ask{refill.AskLeft, refill.AskForce} {
		s.Garble(key, PartLease)
		s.healed(how)
		s.Garble(key, PartLease)
		s.invalidate(s.A, "a#1", key)
		s.begin(s.A, key, "a#2", long)
		s.release(s.A, key, "a#2")
	}
}

// healed demands that the lease can be taken, with an end, and that the fill goes its way.
func (s *stores) healed(how refill.Ask) {
	s.Helper()
	s.take(s.A, s.bid(s.A, key, "a#1", long, how))
	s.within("Left", s.await(s.B, key, "b#1", "a#1").Left, long)
	s.alive(s.A, key, "a#1")
	s.finish(s.A, key, "a#1", s.record("a#1", "x"), refill.PublishStored)
	s.holds(key, s.record("a#1", "x"))
	s.begin(s.B, key, "b#1", long)
	s.release(s.B, key, "b#1")
}

// inherited makes this of key: the claim is slow's, and the lease is heir's, one that never ends.
func (s *stores) inherited(slow, heir string) {
	s.Helper()
	needs(s, "StoreWorld.Plant", s.Plant != nil)
	s.lapsed(key, slow)
	s.Plant(key, PartLease, heir)
	s.renew(s.A, key, slow, false)
	s.renew(s.B, key, heir, false)
	s.lose(s.B, key, "z#1", heir)
}

func publishBeforeHeir(s *stores) {
	e := s.listen(s.B, "product")
	s.inherited("a#1", "b#1")
	s.quiet("a#1") // its own lease is not there any more, so it has to be announced
	e.hearsQuiet("a#1")
	b := refill.Bid{Key: key, Token: "b#1", LeaseTTL: long, ClaimTTL: long}
	for _, b.Ask = range []refill.Ask{refill.AskLeft, refill.AskForce} {
		s.finds(s.B, b, s.record("a#1", "x"))
	}
	s.begin(s.A, key, "a#2", long)
	s.lose(s.B, key, "b#2", "a#2")
	e.heardAll(key)
}

// succeeds demands that the end of a#1's fill has left the lease to b#1, who goes on with it, and was heard of.
func (s *stores) succeeds(e *ear) {
	s.Helper()
	s.lose(s.A, key, "a#2", "b#1")
	s.finish(s.A, key, "a#1", s.record("a#1", "x"), refill.PublishRefused)
	s.take(s.B, s.bid(s.B, key, "b#1", long, refill.AskOnce))
	s.alive(s.B, key, "b#1")
	e.heardAll(key)
}

func failBeforeHeir(s *stores) {
	e := s.listen(s.B, "product")
	s.inherited("a#1", "b#1")
	s.fail(s.A, key, "a#1", "boom", long)
	e.hears(refill.Note{Kind: refill.NoteFailed, Key: key, Token: "a#1", Failure: "boom"})
	s.succeeds(e)
}

func releaseBeforeHeir(s *stores) {
	e := s.listen(s.B, "product")
	s.inherited("a#1", "b#1")
	s.release(s.A, key, "a#1")
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#1"})
	s.succeeds(e)
}

func foreignClaim(s *stores) {
	needs(s, "StoreWorld.Plant or Garble", s.Plant != nil || s.Garble != nil)
	plant := func() { s.Plant(key, PartClaim, "dead#1") }
	garble := func() { s.Garble(key, PartClaim) }
	if s.Plant == nil {
		plant = garble
	}
	if s.Garble == nil {
		garble = plant
	}
	for _, put := range []func(){plant, garble} {
		put()
		s.finish(s.A, key, "a#0", s.record("a#0", "x"), refill.PublishRefused)
		s.begin(s.A, key, "a#1", long)
		s.alive(s.A, key, "a#1")
		s.finish(s.A, key, "a#1", s.record("a#1", "x"), refill.PublishStored)
		put()
		s.invalidate(s.A, "a#2", key)
		s.begin(s.B, key, "b#1", long)
		put()
		s.fail(s.B, key, "b#1", "boom", 0)
		s.begin(s.A, key, "a#3", long)
		put()
		s.renew(s.A, key, "a#3", false)
		s.lose(s.B, key, "b#2", "a#3")
		s.release(s.A, key, "a#3")
		s.begin(s.A, key, "a#4", long)
		s.release(s.A, key, "a#4")
		s.expire(s.A, "a#5", key)
	}
}

func garbledValue(s *stores) {
	needs(s, "StoreWorld.Garble", s.Garble != nil)
	s.Garble(key, PartValue)
	s.holds(key, nil)
	s.fill(s.A, key, "a#1", s.record("a#1", "healed"))
	s.holds(key, s.record("a#1", "healed"))
	for _, void := range []func(refill.Store, string, ...string){s.invalidate, s.expire} {
		s.Garble(key, PartValue)
		void(s.A, "a#2", key)
		s.holds(key, nil)
		s.fill(s.B, key, "b#1", s.record("b#1", "healed"))
		s.holds(key, s.record("b#1", "healed"))
	}
}

func foreignMark(s *stores) {
	needs(s, "StoreWorld.Plant or Garble", s.Plant != nil || s.Garble != nil)
	if s.Plant != nil {
		s.replacesMark(func() { s.Plant(red, PartMark, "dead#1") })
	}
	if s.Garble != nil {
		s.replacesMark(func() { s.Garble(red, PartMark) })
	}
}

func (s *stores) replacesMark(put func()) {
	s.Helper()
	put()
	s.unknown(red)
	before := s.moment()
	s.hold(s.A, time.Hour, s.short, red)
	after := s.moment()
	if t := s.states(s.B, red)[0]; t.Known { // it ends soon
		s.between("Invalidated", t.Invalidated, before.Add(-time.Hour), after.Add(-time.Hour))
	}
	if !s.ends(func() bool { return !s.states(s.B, red)[0].Known }) {
		s.Fatalf("the mark in the place of a foreign one does not end")
	}
	for _, v := range []tagVoid{invalidating, expiring} {
		put()
		before := s.moment()
		s.voidTags(v, s.A, "a#1", long, red)
		after := s.moment()
		s.between("Invalidated after "+v.name, s.mark(red).Invalidated, before, after)
	}
}

// noRoom allows that the record is stored: Redis checks its memory before the first write of a script only, and a free one
// comes before it.
func noRoom(s *stores) {
	needs(s, "StoreWorld.Full", s.Full != nil)
	s.begin(s.A, key, "a#1", long)
	e := s.listen(s.B, "product")
	full := undone(s, s.Full)
	full(true)
	p := refill.Publication{Key: key, Token: "a#1", Record: s.record("a#1", "x"), Keep: long}
	state, err := s.A.Publish(s.ctx, p)
	s.ok(err, "Publish")
	if n := e.next("an announcement by a#1"); n.Key != key || n.Token != "a#1" {
		s.Fatalf("heard %s, want an announcement of %s by a#1", noteText(n), key)
	}
	full(false)
	switch state {
	case refill.PublishStored:
		s.holds(key, p.Record)
	case refill.PublishNoRoom:
		s.holds(key, nil)
	default:
		s.Fatalf("Publish with a good claim in a full store = %s, want PublishNoRoom or PublishStored", publishedName(state))
	}
	s.begin(s.B, key, "b#1", long)
	s.finish(s.B, key, "b#1", s.record("b#1", "x"), refill.PublishStored)
}

func silentServer(s *stores) {
	needs(s, "StoreWorld.Silence", s.Silence != nil)
	const free = "product:43"
	s.begin(s.A, key, "a#2", long)
	silent := undone(s, s.Silence)
	silent(true)
	for _, c := range s.calls(key, free) {
		giveUp(s, s.ctx, c)
	}
	silent(false)
	// What was asked meanwhile may still be carried out, or the connections have to be made again.
	answers := func() bool { _, err := s.A.Get(s.ctx, key); return err == nil }
	for deadline := time.Now().Add(patience); !answers(); <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.Fatalf("Get gives errors %v after the server answers again", patience)
		}
	}
	s.begin(s.A, "product:44", "a#5", long)
	s.finish(s.A, "product:44", "a#5", s.record("a#5", "x"), refill.PublishStored)
	s.holds("product:44", s.record("a#5", "x"))
}

func brokenSubscription(s *stores) {
	needs(s, "StoreWorld.Break", s.Break != nil)
	e := s.listen(s.A, "product")
	for range 2 {
		s.Break()
		if n := e.next("NoteDown"); n.Kind != refill.NoteDown {
			s.Fatalf("after a break heard %s, want NoteDown", noteText(n))
		}
		for n := e.next("NoteUp"); n.Kind != refill.NoteUp; n = e.next("NoteUp") {
			if n.Kind != refill.NoteDown { // it may take several tries
				s.Fatalf("after a break heard %s, want NoteUp", noteText(n))
			}
		}
		e.heardAll(key)
	}
}
