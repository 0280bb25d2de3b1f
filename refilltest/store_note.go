package refilltest

import (
	"fmt"
	"time"

	"github.com/refill-go/refill/driver"
)

var noteCases = []storeCase{
	{
		"note-leaves-lease-free",
		`Without HoldAll, Fail leaves a note. In every mode Acquire takes lease and claim as if nothing were there, and
returns the text of the note. If the note blocks, the error of one sick node stops the whole fleet (G6). If it is not
returned, the second node to fail does not know that it is the second.`,
		noteLeavesLeaseFree,
	},
	{
		"note-text",
		`The text of a note is kept and announced byte for byte. Its reader compares the node in it with its own.`,
		noteText,
	},
	{
		"note-ends",
		`A note ends by itself after its TTL, and a TTL of 0 leaves none. Otherwise two failures that are hours apart count
as two in a row.`,
		noteEnds,
	},
	{
		"note-once",
		`The fill that takes the lease removes the note. After its success or its release there is no failure any more.
Otherwise a failure from before that success still counts.`,
		noteOnce,
	},
	{
		"note-ended-by-invalidate",
		`Invalidate and Expire delete a note, as they delete a back-off: what failed before says nothing about the changed
row.`,
		noteEndedByInvalidate,
	},
	{
		"note-replaced",
		`A back-off replaces a note that was left while its load ran, and so does a newer note. Otherwise the second failure
does not hold back the fleet.`,
		noteReplaced,
	},
	{
		"note-keeps-lease",
		`A note never replaces the lease of another fill. Otherwise a third node loads at the same time as that fill.`,
		noteKeepsLease,
	},
	{
		"fail-drops-value",
		`With DropValue, Fail also deletes the value, and announces invalidated before failed. Otherwise a value that its load
has just forbidden to serve stays on this node, or in the L1 of the others.`,
		failDropsValue,
	},
	{
		"fail-drops-own",
		`With DropValue, Fail changes nothing if neither lease nor claim belongs to the token. Otherwise a load that was
overtaken deletes the value that replaced it.`,
		failDropsOwn,
	},
}

// note ends the fill of token with a failure, and leaves a note for ttl.
func (s *stores) note(st driver.Store, key, token, failure string, ttl time.Duration) {
	s.Helper()
	s.failWith(st, driver.FailRequest{Key: key, Token: token, Failure: failure, TTL: ttl})
}

// wantNoted takes lease and claim, and demands that Acquire returns the text of a note.
func (s *stores) wantNoted(st driver.Store, key, token string, mode driver.Mode, failure string) {
	s.Helper()
	if r := s.acquireKey(st, key, token, long, mode); r.State != driver.Acquired || r.Failure != failure {
		s.Fatalf("Acquire over a note, mode %s: %s, want Acquired with the failure %q",
			modeText(mode), acquireText(r), failure)
	}
}

func noteLeavesLeaseFree(s *stores) {
	sub := s.subscribe(s.B, "product")
	for i, mode := range modes() {
		for j, st := range []driver.Store{s.A, s.B} {
			token, next := fmt.Sprintf("a#%d-%d", i, j), fmt.Sprintf("b#%d-%d", i, j)
			s.start(s.A, key, token, long)
			s.note(s.A, key, token, "boom", long)
			sub.want(driver.Announcement{Kind: driver.Failed, Key: key, Token: token, Failure: "boom"})
			s.renew(s.A, key, token, false)
			s.publish(s.A, key, token, s.record(token, "x"), driver.Rejected)
			s.wantNoted(st, key, next, mode, "boom")
			s.wantLife("Left of the lease", s.await(s.A, key, "c#1", next).Left, long)
			s.wantRunning(st, key, next)
			s.publish(st, key, next, s.record(next, "x"), driver.Stored)
			sub.want(driver.Announcement{Kind: driver.Filled, Key: key, Token: next, Record: s.record(next, "x")})
			s.invalidate(s.A, "a#9", key)
			sub.want(driver.Announcement{Kind: driver.Invalidated, Key: key, Token: "a#9"})
		}
	}
}

func noteText(s *stores) {
	sub := s.subscribe(s.B, "product")
	for i, text := range []string{"", "!", "?", "+", "boom+", "a#1", "line\nline\r\n", "nul\x00nul", "\xff\xfe"} {
		mode := modes()[i%len(modes())]
		s.start(s.A, key, "a#1", long)
		s.note(s.A, key, "a#1", text, long)
		sub.want(driver.Announcement{Kind: driver.Failed, Key: key, Token: "a#1", Failure: text})
		s.wantFree(s.B, key, text)
		s.wantNoted(s.B, key, "b#1", mode, text)
		s.release(s.B, key, "b#1")
		sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "b#1"})
	}
}

func noteEnds(s *stores) {
	s.start(s.A, key, "a#1", long)
	s.note(s.A, key, "a#1", "boom", s.short)
	if !s.runOut(func() bool { return s.look(s.B, key, "b#1").Failure == "" }) {
		s.Fatalf("a note is still there long after its TTL of %v", s.short)
	}
	s.start(s.B, key, "b#1", long)
	s.note(s.B, key, "b#1", "boom", 0)
	s.wantFree(s.A, key, "")
	s.start(s.A, key, "a#2", long)
}

func noteOnce(s *stores) {
	for i, mode := range modes() {
		s.start(s.A, key, "a#1", long)
		s.note(s.A, key, "a#1", "boom", long)
		s.wantNoted(s.B, key, "b#1", mode, "boom")
		if i%2 == 0 {
			s.publish(s.B, key, "b#1", s.record("b#1", "x"), driver.Stored)
		} else {
			s.release(s.B, key, "b#1")
		}
		s.wantFree(s.A, key, "")
		s.start(s.A, key, "a#2", long)
		s.release(s.A, key, "a#2")
	}
}

func noteEndedByInvalidate(s *stores) {
	for _, end := range []func(driver.Store, string, ...string){s.invalidate, s.expire} {
		s.start(s.A, key, "a#1", long)
		s.note(s.A, key, "a#1", "boom", long)
		end(s.B, "b#1", key)
		s.wantFree(s.A, key, "")
		s.start(s.A, key, "a#2", long)
		s.release(s.A, key, "a#2")
	}
}

func noteReplaced(s *stores) {
	s.start(s.A, key, "a#1", long)
	s.note(s.A, key, "a#1", "first", long)
	s.wantNoted(s.B, key, "b#1", driver.Wait, "first")
	s.note(s.B, key, "b#1", "second", long)
	s.wantNoted(s.A, key, "a#2", driver.Try, "second")
	s.fail(s.A, key, "a#2", "third", long)
	s.wantBackOff(s.B, key, "third")
}

func noteKeepsLease(s *stores) {
	s.start(s.B, key, "b#1", long)
	s.note(s.A, key, "a#1", "boom", long) // a#1 has neither lease nor claim
	s.wantRunning(s.B, key, "b#1")
	if s.Plant == nil {
		return
	}
	const other = "product:43"
	s.start(s.A, other, "a#2", long)
	s.Plant(other, PartLease, "b#2") // as mode Try does before it takes the claim for b#2
	s.note(s.A, other, "a#2", "boom", long)
	s.lose(s.A, other, "c#1", "b#2")
}

func failDropsValue(s *stores) {
	sub := s.subscribe(s.B, "product")
	for i, f := range []driver.FailRequest{{}, {TTL: long}, {TTL: long, HoldAll: true}} {
		s.fill(s.A, key, "a#1", s.record("a#1", "v1"))
		sub.want(driver.Announcement{Kind: driver.Filled, Key: key, Token: "a#1", Record: s.record("a#1", "v1")})
		s.start(s.A, key, "a#2", long)
		f.Key, f.Token, f.Failure, f.DropValue = key, "a#2", "boom", true
		s.failWith(s.A, f)
		sub.want(driver.Announcement{Kind: driver.Invalidated, Key: key, Token: "a#2"})
		sub.want(driver.Announcement{Kind: driver.Failed, Key: key, Token: "a#2", Failure: "boom"})
		s.wantValue(key, nil)
		switch i {
		case 0:
			s.wantFree(s.B, key, "")
		case 1:
			s.wantFree(s.B, key, "boom")
		case 2:
			s.wantBackOff(s.B, key, "boom")
		}
		s.invalidate(s.B, "b#1", key)
		sub.want(driver.Announcement{Kind: driver.Invalidated, Key: key, Token: "b#1"})
	}
	sub.wantNoMore(key)
}

func failDropsOwn(s *stores) {
	v1 := s.record("b#1", "v1")
	s.overtaken(key, "a#1", "b#1")
	s.publish(s.B, key, "b#1", v1, driver.Stored)
	sub := s.subscribe(s.B, "product")
	s.failWith(s.A, driver.FailRequest{Key: key, Token: "a#1", Failure: "boom", TTL: long, DropValue: true})
	s.wantValue(key, v1)
	s.wantFree(s.B, key, "")
	sub.wantNoMore(key)
}
