package refilltest

import (
	"fmt"

	"github.com/refill-go/refill"
)

var quietCases = []storeCase{
	{
		"publish-quiet",
		`A Publish that may be quiet is announced all the same if a Begin with AskLeft or AskForce has lost to its fill.
Otherwise those who wait for it sleep until the lease would have ended by itself.`,
		publishQuiet,
	},
	{
		"quiet-after-repeat",
		`That somebody waits is noted for as long as the lease lives, also when its holder begins again, since the reply to its
Begin was lost, or renews. A step that writes the lease anew forgets who waits, and they sleep it out.`,
		quietAfterRepeat,
	},
	{
		"quiet-after-lease",
		`A quiet Publish of a load whose lease ran out is announced: what was noted in the lease went with it. Those who have
waited for it, and wait for their turn to ask again, would load what is there.`,
		quietAfterLease,
	},
}

// quiet publishes something that nobody has to hear of who does not wait.
func (s *stores) quiet(token string) {
	s.Helper()
	p := refill.Publication{Key: key, Token: token, Record: s.record(token, "x"), Keep: long, Quiet: true}
	if state, err := s.A.Publish(s.ctx, p); err != nil || state != refill.PublishStored {
		s.Fatalf("a quiet Publish(%s) = %s, %v, want it stored", token, publishedName(state), err)
	}
	s.holds(key, p.Record)
}

// hearsQuiet demands that a quiet publication was announced.
func (e *ear) hearsQuiet(token string) {
	e.s.Helper()
	e.hears(refill.Note{Kind: refill.NoteFilled, Key: key, Token: token, Record: e.s.record(token, "x")})
}

func publishQuiet(s *stores) {
	e := s.listen(s.B, "product")
	for i, how := range []refill.Ask{refill.AskLeft, refill.AskForce} {
		token := fmt.Sprint("a#", i)
		s.begin(s.A, key, token, long)
		s.heldBy(s.try(s.B, key, "b#1", long, how), token)
		s.lose(s.B, key, "b#2", token) // who does not wait changes nothing
		s.quiet(token)
		e.hearsQuiet(token)
	}
	s.begin(s.A, key, "a#8", long)
	s.await(s.B, key, "b#1", "a#8")
	s.release(s.A, key, "a#8")
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#8"})
	s.begin(s.A, key, "a#9", long)
	s.quiet("a#9") // announced or not
}

func quietAfterRepeat(s *stores) {
	e := s.listen(s.B, "product")
	for i, how := range asks() {
		token := fmt.Sprint("a#", i)
		s.begin(s.A, key, token, long)
		s.await(s.B, key, "b#1", token)
		s.take(s.A, s.bid(s.A, key, token, long, how))
		s.quiet(token)
		e.hearsQuiet(token)
	}
	s.begin(s.A, key, "a#9", long)
	s.await(s.B, key, "b#1", "a#9")
	s.renew(s.A, key, "a#9", true)
	s.quiet("a#9")
	e.hearsQuiet("a#9")
	e.heardAll(key)
}

func quietAfterLease(s *stores) {
	e := s.listen(s.B, "product")
	s.begin(s.A, key, "a#1", s.short)
	s.await(s.B, key, "b#1", "a#1")
	s.lapses(key, "a#1")
	s.quiet("a#1")
	e.hearsQuiet("a#1")

	s.lapsed(key, "a#2") // with nobody who has noted it
	s.quiet("a#2")
	e.hearsQuiet("a#2")
	e.heardAll(key)
}

// That somebody waits may be noted in the lease itself. These cases find a store that knows its own token no more then.
var awaitedCases = []storeCase{
	{
		"begin-awaited",
		`A lease that somebody waits for is held by the same holder as before: others are told its token, and the holder itself
begins again. Where a waiter changes the token, the next one waits for nobody, and a lost reply locks its sender out.`,
		beginAwaited,
	},
	{
		"lease-ends-awaited",
		`A lease that somebody waits for ends when it would have ended. One that a waiter has made endless by its note outlives a
holder that died for ever.`,
		leaseEndsAwaited,
	},
	{
		"renew-awaited",
		`A holder that somebody waits for renews as before. Otherwise each load longer than LockTTL is lost as soon as somebody
wants it.`,
		renewAwaited,
	},
	{
		"publish-awaited",
		`A Publish by a holder that somebody waits for stores, and frees its lease, as before; one that is refused frees its lease
and announces it. Otherwise the lease stays just where somebody waits for it.`,
		publishAwaited,
	},
	{
		"fail-awaited",
		`A Fail by a holder that somebody waits for leaves its back-off, or nothing with ttl 0, as before. Where its lease is taken for
another's, it stays, and all wait for a load that is over.`,
		failAwaited,
	},
	{
		"release-awaited",
		`A Release by a holder that somebody waits for frees its lease as before. Otherwise the lease stays just where somebody
waits for it.`,
		releaseAwaited,
	},
}

// awaited is begin with somebody, and somebody else, who wait.
func (s *stores) awaited(token string) {
	s.Helper()
	s.begin(s.A, key, token, long)
	s.awaitTwice(token)
}

func (s *stores) awaitTwice(token string) {
	s.Helper()
	s.await(s.B, key, "w#1", token)
	s.await(s.B, key, "w#2", token)
}

func beginAwaited(s *stores) {
	s.awaited("a#1")
	for _, how := range asks() {
		s.heldBy(s.try(s.B, key, "b#1", long, how), "a#1")
	}
	for _, how := range asks() {
		s.take(s.A, s.bid(s.A, key, "a#1", long, how))
		s.within("Left of the lease", s.await(s.B, key, "b#1", "a#1").Left, long)
	}
	s.finish(s.A, key, "a#1", s.record("a#1", "v1"), refill.PublishStored)

	e := s.listen(s.B, "product")
	s.awaited("a#2")
	s.finds(s.A, refill.Bid{Key: key, Token: "a#2", LeaseTTL: long, ClaimTTL: long, Ask: refill.AskLeft}, s.record("a#1", "v1"))
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#2"})
	s.begin(s.B, key, "b#2", long)
	e.heardAll(key)
}

func leaseEndsAwaited(s *stores) {
	s.begin(s.A, key, "a#1", s.short)
	s.await(s.B, key, "b#1", "a#1")
	// AskOnce, since whoever is told how long it lasts takes a lease without an end.
	if !s.ends(func() bool { return s.try(s.B, key, "b#1", long, refill.AskOnce).State == refill.BeginTaken }) {
		s.Fatalf("Begin is not taken although the lease of %v, for which somebody waited, is long over", s.short)
	}
}

func renewAwaited(s *stores) {
	s.begin(s.A, key, "a#1", s.short)
	s.await(s.B, key, "b#1", "a#1")
	s.renew(s.A, key, "a#1", true)
	s.within("Left of the renewed lease", s.await(s.B, key, "b#1", "a#1").Left, long)
	s.renew(s.A, key, "a#1", true)
	s.invalidate(s.B, "b#2", key)
	s.renew(s.A, key, "a#1", false)
}

func publishAwaited(s *stores) {
	v1 := s.record("a#1", "v1")
	e := s.listen(s.B, "product")
	s.awaited("a#1")
	s.finish(s.A, key, "a#1", v1, refill.PublishStored)
	e.hears(refill.Note{Kind: refill.NoteFilled, Key: key, Token: "a#1", Record: v1})
	s.unclaimed(key, "a#2")
	s.awaitTwice("a#2")
	s.finish(s.A, key, "a#2", s.record("a#2", "x"), refill.PublishRefused)
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#2"})
	s.begin(s.B, key, "b#1", long)
	s.holds(key, v1)
	e.heardAll(key)
}

func failAwaited(s *stores) {
	e := s.listen(s.B, "product")
	s.awaited("a#1")
	s.fail(s.A, key, "a#1", "boom", long)
	e.hears(refill.Note{Kind: refill.NoteFailed, Key: key, Token: "a#1", Failure: "boom"})
	s.backsOff(s.B, key, "boom")
	e.heardAll(key)
	s.awaited("a#2")
	s.fail(s.A, key, "a#2", "boom", 0)
	e.hears(refill.Note{Kind: refill.NoteFailed, Key: key, Token: "a#2", Failure: "boom"})
	s.begin(s.B, key, "b#1", long)
	e.heardAll(key)
}

func releaseAwaited(s *stores) {
	e := s.listen(s.B, "product")
	s.awaited("a#1")
	s.release(s.A, key, "a#1")
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#1"})
	s.unclaimed(key, "a#2")
	s.awaitTwice("a#2")
	s.release(s.A, key, "a#2")
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#2"})
	s.begin(s.B, key, "b#1", long)
	e.heardAll(key)
}
