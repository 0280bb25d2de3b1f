package refilltest

import (
	"time"

	"github.com/refill-go/refill"
)

var beginCases = []storeCase{
	{
		"begin-exclusive",
		`Begin takes the lease if it is free, or says who has it; each key has its own. Where two win, two nodes load
the same key: the stampede that the lease is there to prevent.`,
		beginExclusive,
	},
	{
		"begin-takes-both",
		`BeginTaken is lease and claim in one: the lease for LeaseTTL, the claim for ClaimTTL, however it was asked. With one of
the two the load can be renewed by nobody, or stored by nobody, and all who want the value wait for it.`,
		beginTakesBoth,
	},
	{
		"begin-own-token",
		`An own token found under the key counts as free: the reply to an earlier try was lost and the client sent it
again. Otherwise the winner waits for itself until the lease is over (go-redis retries three times by itself).`,
		beginOwnToken,
	},
	{
		"begin-late",
		`A Begin that is carried out again leaves a claim alone that is the token's already, and says when it was taken. After
the fill was voided it makes a new one, and what was loaded under the first is refused: else a copy of the request that
the network has kept undoes an Invalidate (G2).`,
		beginLate,
	},
	{
		"begin-left",
		`AskLeft and AskForce say how long the holder's lease has to live: more than 0, at most its ttl. A waiter sleeps
that long when nobody wakes it; a wrong unit makes it wait for minutes behind a dead holder, or poll. Nor does asking
lengthen it.`,
		beginLeft,
	},
	{
		"begin-held",
		`BeginHeld leaves lease and claim of the holder alone: it renews and is stored as if nobody had asked, and who asked can do
neither. Otherwise whoever comes too late takes away what the holder has loaded, and the key is never stored under load.`,
		beginHeld,
	},
	{
		"begin-sees",
		`Begin is taken when the value is absent or the record whose token was seen. Otherwise a refresh, which always finds
a value, can never begin.`,
		beginSees,
	},
	{
		"begin-other",
		`When another record than the one seen is there, Begin returns it and takes nothing. The value came after the look:
loading it again is needless, and a lease that stays lets all others sleep out its whole life with nobody loading (V11, V12).
What AskLeft and AskForce did not take is not announced either: a wake-up without a cause.`,
		beginOther,
	},
	{
		"begin-other-first",
		`With AskLeft and AskForce the value is looked at before the lease: another record than the one seen is returned even while
somebody has the lease, which is left alone. Otherwise a miss waits for a refresh, though the value has been there since.`,
		beginOtherFirst,
	},
	{
		"begin-other-gives-back",
		`A lease that the token has although another record is there is given back, and announced as released. One that stays is
slept out by every node with nobody loading; one freed in silence by all who wait (V11).`,
		beginOtherGivesBack,
	},
	{
		"begin-foreign",
		`Bytes that are no record have no token, so they are what was seen by somebody who saw nothing. Otherwise a foreign
or cut-off value under the key can never be replaced. A script that reads the token must not trip over short ones.`,
		beginForeign,
	},
	{
		"begin-clock",
		`Begun.Now is the store's clock, the one that Now returns, and it does not go back. The record's age is counted
from it on every node: where the two differ, one node calls dead what another calls fresh.`,
		beginClock,
	},
}

// asks are all ways to ask for a lease.
func asks() []refill.Ask { return []refill.Ask{refill.AskOnce, refill.AskLeft, refill.AskForce} }

func beginExclusive(s *stores) {
	s.begin(s.A, key, "a#1", long)
	s.lose(s.A, key, "a#2", "a#1")
	s.lose(s.B, key, "b#1", "a#1")
	s.begin(s.B, "product:43", "b#2", long)
	s.begin(s.B, "user:42", "b#3", long)
	s.holds(key, nil)
	s.alive(s.A, key, "a#1")
}

func beginTakesBoth(s *stores) {
	for _, how := range asks() {
		s.take(s.A, s.bid(s.A, key, "a#1", long, how))
		s.within("Left of the lease", s.await(s.B, key, "b#1", "a#1").Left, long)
		s.alive(s.A, key, "a#1")
		s.finish(s.A, key, "a#1", s.record("a#1", "v1"), refill.PublishStored)
		s.invalidate(s.B, "b#2", key)

		s.take(s.A, s.bid(s.A, key, "a#2", s.short, how))
		s.ended(s.B, key, "b#3") // the lease ends, although the claim would not
		s.invalidate(s.B, "b#4", key)
	}
}

func beginOwnToken(s *stores) {
	for _, first := range asks() {
		s.take(s.A, s.bid(s.A, key, "a#1", long, first))
		for _, how := range asks() {
			if r := s.try(s.A, key, "a#1", long, how); r.State != refill.BeginTaken {
				s.Fatalf("Begin with the holder's own token, Ask %d after %d: %s, want it taken", how, first, begunText(r))
			}
			s.alive(s.A, key, "a#1")
		}
		s.lose(s.B, key, "b#1", "a#1")
		s.finish(s.A, key, "a#1", s.record("a#1", "x"), refill.PublishStored)
	}
}

func beginLate(s *stores) {
	for _, how := range asks() {
		b := s.bid(s.A, key, "a#1", long, how)
		publish := func(began time.Time, want refill.Published) {
			s.Helper()
			p := refill.Publication{Key: key, Token: "a#1", Began: began, Record: s.record("a#1", "x"), Keep: long}
			if state, err := s.A.Publish(s.ctx, p); err != nil || state != want {
				s.Fatalf("Publish with the claim of %v = %s, %v, want %s", began, publishedName(state), err, publishedName(want))
			}
		}
		first := s.take(s.A, b).Now
		time.Sleep(time.Millisecond) // not Pass, which may move the ends of keys alone: the moments have to differ
		if again := s.take(s.A, b).Now; !again.Equal(first) {
			s.Fatalf("Begin again, Ask %d: the claim is of %v, want %v as before", how, again, first)
		}
		s.invalidate(s.B, "b#1", key)
		s.take(s.A, b) // the copy
		publish(first, refill.PublishRefused)
		s.holds(key, nil)
		s.begin(s.B, key, "b#2", long) // nothing is left of it
		s.release(s.B, key, "b#2")

		first = s.take(s.A, b).Now
		time.Sleep(time.Millisecond) // not Pass, which may move the ends of keys alone: the moments have to differ
		s.take(s.A, b)
		publish(first, refill.PublishStored)
		s.invalidate(s.B, "b#3", key)
	}
}

func beginLeft(s *stores) {
	s.begin(s.A, key, "a#1", long)
	for _, how := range []refill.Ask{refill.AskLeft, refill.AskForce, refill.AskLeft} {
		r := s.try(s.B, key, "b#1", time.Hour, how)
		s.heldBy(r, "a#1")
		s.within("Left of the lease", r.Left, long)
	}
	s.alive(s.A, key, "a#1")
}

// within demands a life that has just begun: of at most ttl, and not much less.
func (s *stores) within(what string, left, ttl time.Duration) {
	s.Helper()
	if left <= ttl-callTime || left > ttl {
		s.Fatalf("%s = %v, want at most its ttl, %v, and not much less", what, left, ttl)
	}
}

func beginHeld(s *stores) {
	for _, how := range asks() {
		s.begin(s.A, key, "a#1", long)
		s.heldBy(s.try(s.B, key, "b#1", long, how), "a#1")
		s.renew(s.B, key, "b#1", false)
		s.alive(s.A, key, "a#1")
		s.lose(s.B, key, "b#2", "a#1")
		s.finish(s.B, key, "b#1", s.record("b#1", "x"), refill.PublishRefused)
		s.finish(s.A, key, "a#1", s.record("a#1", "y"), refill.PublishStored)
		s.holds(key, s.record("a#1", "y"))
	}
}

func beginSees(s *stores) {
	for _, how := range asks() {
		s.fill(s.A, key, "a#1", s.record("a#1", "v1"))
		b := s.bid(s.B, key, "b#1", long, how)
		b.Seen = "a#1"
		s.take(s.B, b)
		s.holds(key, s.record("a#1", "v1"))
		s.finish(s.B, key, "b#1", s.record("b#1", "v2"), refill.PublishStored)
		s.invalidate(s.A, "a#2", key)
		b.Token, b.Seen = "a#3", "b#1" // what was there is not there any more
		s.take(s.A, b)
		s.invalidate(s.A, "a#4", key)
	}
}

// finds demands BeginOther with the record.
func (s *stores) finds(st refill.Store, b refill.Bid, want []byte) {
	s.Helper()
	if r := s.ask(st, b); r.State != refill.BeginOther || string(r.Record) != string(want) {
		s.Fatalf("Begin(%s), Ask %d, with %q seen = %s, want BeginOther and %s", b.Token, b.Ask, b.Seen, begunText(r), shown(want))
	}
}

func beginOther(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	e := s.listen(s.A, "product")
	for _, how := range asks() {
		for _, seen := range []string{"", "a#0", "a#11", "a#"} {
			b := refill.Bid{Key: key, Token: "b#1", Seen: seen, LeaseTTL: long, ClaimTTL: long, Ask: how}
			s.finds(s.B, b, v1)
			s.begin(s.A, key, "a#2", long) // nothing was taken
			s.release(s.A, key, "a#2")
			released := refill.Note{Kind: refill.NoteReleased, Key: key, Token: "b#1"}
			n := e.next("released by a#2")
			if how == refill.AskOnce && sameNote(n, released) { // it was taken a moment before, and given back
				n = e.next("released by a#2")
			}
			if released.Token = "a#2"; !sameNote(n, released) {
				s.Fatalf("after BeginOther, Ask %d, heard %s\n want %s", how, noteText(n), noteText(released))
			}
		}
	}
	s.finish(s.B, key, "b#1", s.record("b#1", "v2"), refill.PublishRefused)
	s.holds(key, v1)
	e.heardAll(key)
}

func beginOtherFirst(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	s.begin(s.A, key, "a#2", long)
	e := s.listen(s.B, "product")
	b := refill.Bid{Key: key, Token: "b#1", LeaseTTL: long, ClaimTTL: long}
	for _, b.Ask = range []refill.Ask{refill.AskLeft, refill.AskForce} {
		for _, b.Seen = range []string{"", "a#0"} {
			s.finds(s.B, b, v1)
		}
	}
	b.Ask = refill.AskOnce
	if r := s.ask(s.B, b); r.State != refill.BeginOther || string(r.Record) != string(v1) {
		s.heldBy(r, "a#2") // the lease was looked at a moment before
	}
	s.lose(s.B, key, "b#2", "a#2")
	s.alive(s.A, key, "a#2")
	s.finish(s.B, key, "b#1", s.record("b#1", "x"), refill.PublishRefused)
	e.heardAll(key)
	s.fill(s.A, key, "a#1", v1)
	s.begin(s.A, key, "a#3", long)
	s.fail(s.A, key, "a#3", "boom", long)
	for _, b.Ask = range []refill.Ask{refill.AskLeft, refill.AskForce} {
		s.finds(s.B, b, v1)
	}
	s.backsOff(s.A, key, "boom")
}

func beginOtherGivesBack(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	e := s.listen(s.A, "product")
	for _, how := range asks() {
		s.begin(s.B, key, "b#1", long)
		s.finds(s.B, refill.Bid{Key: key, Token: "b#1", Seen: "a#0", LeaseTTL: long, ClaimTTL: long, Ask: how}, v1)
		e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "b#1"})
		s.renew(s.B, key, "b#1", false)
		s.begin(s.A, key, "a#2", long) // it was given back
		s.release(s.A, key, "a#2")
		e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#2"})
	}
	s.holds(key, v1)
	e.heardAll(key)
}

// notRecords are bytes that a script may take for a record, or choke on.
func (s *stores) notRecords() []string {
	cut := string(s.record("a-long-token-of-a-node#1", "x"))[:30]
	return []string{"\x00", "R", "RF1", "RF2 and so on", "RF1\x00\x00", cut[:15], cut[:16], cut, `{"a":1}`, "!error"}
}

func beginForeign(s *stores) {
	for i, foreign := range s.notRecords() {
		s.begin(s.A, key, "a#1", long)
		s.finish(s.A, key, "a#1", []byte(foreign), refill.PublishStored)
		s.holds(key, []byte(foreign))
		b := refill.Bid{Key: key, Token: "b#1", LeaseTTL: long, ClaimTTL: long, Ask: asks()[i%len(asks())]}
		if r := s.ask(s.B, b); r.State != refill.BeginTaken {
			s.Fatalf("Begin over the foreign value %q = %s, want it taken", foreign, begunText(r))
		}
		s.finish(s.B, key, "b#1", s.record("b#1", "healed"), refill.PublishStored)
		s.holds(key, s.record("b#1", "healed"))
		s.invalidate(s.A, "a#2", key)
	}
}

func beginClock(s *stores) {
	var last time.Time
	for i, st := range []refill.Store{s.A, s.B, s.A, s.B} {
		asked := time.Now()
		r := s.begin(st, key, "n#1", long)
		now, took := st.Now(), time.Since(asked)
		// Half a round trip is what a node cannot know; a busy machine is given some more.
		if slack := took + 100*time.Millisecond; r.Now.Sub(now).Abs() > slack {
			s.Fatalf("Begun.Now = %v, Now() = %v: they differ by %v, want at most %v", r.Now, now, r.Now.Sub(now), slack)
		}
		if r.Now.Before(last) {
			s.Fatalf("Begun.Now went back: %v after %v (fill %d)", r.Now, last, i)
		}
		last = r.Now
		s.finish(st, key, "n#1", s.record("n#1", "x"), refill.PublishStored)
	}
	for _, st := range []refill.Store{s.A, s.B} {
		if a, b := st.Now(), st.Now(); b.Before(a) {
			s.Fatalf("Now() went back: %v after %v", b, a)
		}
	}
}
