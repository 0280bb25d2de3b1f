package refilltest

import (
	"strings"

	"github.com/refill-go/refill/driver"
)

var failCases = []storeCase{
	{
		"fail-leaves-back-off",
		`Fail leaves the failure in the place of the lease: Acquire returns Held without a holder, with the failure and the
time left, also for the token that failed. The claim is gone. If the failure is only announced, each caller that comes a
moment later loads again from a database that is in trouble.`,
		failLeavesBackOff,
	},
	{
		"fail-text",
		`The text of the failure is kept and announced byte for byte, also if it is empty. Callers on other nodes get it as
their error.`,
		failText,
	},
	{
		"back-off-ends",
		`The back-off ends by itself after ttl, and then the key can be loaded. Otherwise one error lasts for ever.`,
		backOffEnds,
	},
	{
		"fail-no-back-off",
		`With a ttl of 0, Fail leaves no back-off and still announces failed: the waiters share the error, and the next caller
loads. If the lease stays, that caller waits for a fill that has ended.`,
		failNoBackOff,
	},
	{
		"fail-not-mine",
		`Fail changes nothing and announces nothing if neither lease nor claim belongs to the token. Otherwise the error of a
load that was overtaken or invalidated stops the load that replaces it (G6).`,
		failNotMine,
	},
	{
		"fail-lease-or-claim",
		`Fail works if the token has the claim alone or the lease alone. A load that outlived its lease must still report its
failure, or its waiters sleep. A load that outlived its claim must not leave its lease behind.`,
		failLeaseOrClaim,
	},
	{
		"force-ignores-back-off",
		`In mode Force a back-off counts as free, because Loader.Refresh must load now. The lease of a holder does not,
because one load at a time is the promise (G1). The failure of the back-off is not returned: it is not a note.`,
		forceIgnoresBackOff,
	},
	{
		"fail-keeps-value",
		`Fail keeps the value. Within StaleIfError it is served instead of the error. If it is deleted, every caller gets the
error.`,
		failKeepsValue,
	},
}

// wantBackOff demands a back-off with the failure.
func (s *stores) wantBackOff(st driver.Store, key, failure string) {
	s.Helper()
	for _, mode := range []driver.Mode{driver.Try, driver.Wait} {
		r := s.acquireKey(st, key, "z#1", long, mode)
		if r.State != driver.Held || r.Holder != "" || r.Failure != failure {
			s.Fatalf("Acquire during a back-off, mode %s: %s, want Held with failure %q and without a holder",
				modeText(mode), acquireText(r), failure)
		}
		if mode == driver.Wait {
			s.wantLife("Left of the back-off", r.Left, long)
		}
	}
}

func failLeavesBackOff(s *stores) {
	s.start(s.A, key, "a#1", long)
	s.fail(s.A, key, "a#1", "boom", long)
	s.wantBackOff(s.A, key, "boom")
	s.wantBackOff(s.B, key, "boom")
	for _, mode := range []driver.Mode{driver.Try, driver.Wait} {
		if r := s.acquireKey(s.A, key, "a#1", long, mode); r.State != driver.Held {
			s.Fatalf("Acquire by the token that failed, mode %s: %s, want Held by its back-off", modeText(mode), acquireText(r))
		}
	}
	s.renew(s.A, key, "a#1", false)
	s.publish(s.A, key, "a#1", s.record("a#1", "x"), driver.Rejected)
	s.wantBackOff(s.B, key, "boom")
	s.wantValue(key, nil)
}

func failText(s *stores) {
	sub := s.subscribe(s.B, "product")
	texts := []string{
		"", "!", "!boom", "a#1", "line\nline\r\n", "nul\x00nul", "\xff\xfe", "ключ: 'x' \"y\" \\z",
		strings.Repeat("e", 8<<10),
	}
	for _, text := range texts {
		s.start(s.A, key, "a#1", long)
		s.fail(s.A, key, "a#1", text, long)
		s.wantBackOff(s.B, key, text)
		sub.want(driver.Announcement{Kind: driver.Failed, Key: key, Token: "a#1", Failure: text})
		sub.wantNoMore(key)
	}
}

func backOffEnds(s *stores) {
	s.start(s.A, key, "a#1", long)
	s.fail(s.A, key, "a#1", "boom", s.short)
	if r := s.acquireKey(s.B, key, "b#1", long, driver.Try); r.State != driver.Held {
		s.Fatalf("Acquire right after Fail = %s, want Held by the back-off", acquireText(r))
	}
	s.takeOver(s.B, key, "b#1")
	s.wantRunning(s.B, key, "b#1")
}

func failNoBackOff(s *stores) {
	sub := s.subscribe(s.B, "product")
	s.start(s.A, key, "a#1", long)
	s.fail(s.A, key, "a#1", "boom", 0)
	sub.want(driver.Announcement{Kind: driver.Failed, Key: key, Token: "a#1", Failure: "boom"})
	s.publish(s.A, key, "a#1", s.record("a#1", "x"), driver.Rejected)
	s.start(s.B, key, "b#1", long)
	sub.wantNoMore(key)
}

func failNotMine(s *stores) {
	sub := s.subscribe(s.B, "product")
	s.fail(s.A, key, "a#1", "boom", long) // a#1 has neither lease nor claim
	s.start(s.B, key, "b#1", long)
	s.fail(s.A, key, "a#1", "boom", long)
	s.fail(s.A, key, "a#1", "boom", 0)
	s.lose(s.A, key, "a#2", "b#1")
	s.wantRunning(s.B, key, "b#1")
	sub.wantNoMore(key)
}

func failLeaseOrClaim(s *stores) {
	const other = "product:43"
	sub := s.subscribe(s.B, "product")
	s.claimEnded(key, "a#1")
	s.fail(s.A, key, "a#1", "no claim", long)
	sub.want(driver.Announcement{Kind: driver.Failed, Key: key, Token: "a#1", Failure: "no claim"})
	s.wantBackOff(s.B, key, "no claim")
	sub.wantNoMore(key)

	s.leaseEnded(other, "a#2")
	s.fail(s.A, other, "a#2", "no lease", long)
	sub.want(driver.Announcement{Kind: driver.Failed, Key: other, Token: "a#2", Failure: "no lease"})
	s.wantBackOff(s.B, other, "no lease")
	s.publish(s.A, other, "a#2", s.record("a#2", "x"), driver.Rejected)
	sub.wantNoMore(other)
}

func forceIgnoresBackOff(s *stores) {
	s.start(s.A, key, "a#1", long)
	s.fail(s.A, key, "a#1", "boom", long)
	if r := s.acquireKey(s.B, key, "b#1", long, driver.Force); r.State != driver.Acquired || r.Failure != "" {
		s.Fatalf("Acquire during a back-off, mode Force: %s, want Acquired without a failure", acquireText(r))
	}
	s.wantHeld(s.acquireKey(s.A, key, "a#2", long, driver.Force), "b#1")
	s.wantRunning(s.B, key, "b#1")
	s.publish(s.B, key, "b#1", s.record("b#1", "x"), driver.Stored)
}

func failKeepsValue(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	s.start(s.B, key, "b#1", long)
	s.fail(s.B, key, "b#1", "boom", long)
	s.wantValue(key, v1)
}

var releaseCases = []storeCase{
	{
		"release-frees",
		`Release frees lease and claim and announces released. Otherwise no node loads and no waiter wakes until the lease
ends by itself, and a load that was given up can still be stored.`,
		releaseFrees,
	},
	{
		"release-not-mine",
		`Release frees the lease if it belongs to the token, and the claim if it belongs to the token. It announces nothing if
neither does. Without that check, the late Release of a process that was frozen frees the lease of the next holder, and
a third node loads at the same time.`,
		releaseNotMine,
	},
}

func releaseFrees(s *stores) {
	v1 := s.record("a#0", "v1")
	s.fill(s.A, key, "a#0", v1)
	sub := s.subscribe(s.B, "product")
	for range 2 {
		s.start(s.A, key, "a#1", long)
		s.release(s.A, key, "a#1")
		sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#1"})
		s.publish(s.A, key, "a#1", s.record("a#1", "x"), driver.Rejected)
		s.release(s.A, key, "a#1")
	}
	s.claimEnded(key, "a#2") // a#2 has only the lease
	s.release(s.A, key, "a#2")
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#2"})
	s.wantValue(key, v1)
	s.start(s.B, key, "b#1", long)
	sub.wantNoMore(key)
}

func releaseNotMine(s *stores) {
	sub := s.subscribe(s.A, "product")
	s.start(s.B, key, "b#1", long)
	s.release(s.A, key, "a#1")
	s.wantRunning(s.B, key, "b#1")
	s.release(s.B, key, "b#1")
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "b#1"})

	s.leaseEnded(key, "a#2")
	s.release(s.A, key, "a#2") // a#2 has only the claim
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#2"})
	s.publish(s.A, key, "a#2", s.record("a#2", "x"), driver.Rejected)
	s.wantValue(key, nil)

	s.overtaken(key, "a#3", "b#2")
	s.release(s.A, key, "a#3") // a#3 has neither lease nor claim
	s.lose(s.A, key, "a#4", "b#2")
	s.wantRunning(s.B, key, "b#2")
	sub.wantNoMore(key)
}
