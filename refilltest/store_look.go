package refilltest

import "github.com/refill-go/refill/driver"

var lookCases = []storeCase{
	{
		"look-takes-nothing",
		`In mode Look, Acquire takes neither lease nor claim. If no fill has the lease, the reply is Free. A caller that looks
will not load, so a lease or claim that it takes stops all others for the whole life of the lease.`,
		lookTakesNothing,
	},
	{
		"look-held",
		`In mode Look, the reply is Held with the holder and the time left if a fill has the lease, also if the token is the
holder's own. The caller waits for that fill. If it is told that the lease is free, it returns an error although a load
is under way.`,
		lookHeld,
	},
	{
		"look-noted",
		`In mode Look, a caller that finds the lease taken is noted on it as in mode Wait. Otherwise the end of the load is
not announced, and the caller sleeps until the lease would have ended by itself.`,
		lookNoted,
	},
	{
		"look-changed",
		`In mode Look, the record is compared before the lease. A record that was not seen is returned, nothing is freed and
nothing is announced, also if the token has the lease. Otherwise a caller that may not load misses the value that
another node has just stored, or stops the load that it waits for.`,
		lookChanged,
	},
	{
		"look-failure",
		`In mode Look, a back-off is Held with its failure and the time left. A note is Free with its failure, and the note
stays for the fill that takes the lease. If looking removes the note, the second node to fail does not know that it is
the second.`,
		lookFailure,
	},
}

// look sends an Acquire in mode Look, of a fill that has seen the current record.
func (s *stores) look(st driver.Store, key, token string) driver.AcquireResult {
	s.Helper()
	return s.acquireKey(st, key, token, long, driver.Look)
}

// wantFree demands Free with a noted failure, or with none if failure is empty.
func (s *stores) wantFree(st driver.Store, key, failure string) {
	s.Helper()
	if r := s.look(st, key, "z#1"); r.State != driver.Free || r.Failure != failure || r.Holder != "" {
		s.Fatalf("Acquire in mode Look = %s, want Free with the noted failure %q", acquireText(r), failure)
	}
}

func lookTakesNothing(s *stores) {
	v1 := s.record("a#1", "v1")
	for range 2 { // first without a value, then with one
		s.wantFree(s.A, key, "")
		s.wantFree(s.B, key, "")
		s.renew(s.A, key, "z#1", false)
		s.publish(s.A, key, "z#1", s.record("z#1", "x"), driver.Rejected)
		s.fill(s.A, key, "a#1", v1)
	}
	s.wantFree(s.B, key, "")
	s.claimEnded(key, "a#2")
	s.release(s.A, key, "a#2")
	s.leaseEnded(key, "a#3")
	s.wantFree(s.B, key, "")
	s.publish(s.A, key, "a#3", s.record("a#3", "x"), driver.Stored) // the claim stays
}

func lookHeld(s *stores) {
	s.start(s.A, key, "a#1", long)
	for _, token := range []string{"b#1", "a#1", "b#1"} {
		r := s.look(s.B, key, token)
		s.wantHeld(r, "a#1")
		s.wantLife("Left of the lease", r.Left, long)
	}
	s.wantRunning(s.A, key, "a#1")
	s.publish(s.A, key, "a#1", s.record("a#1", "x"), driver.Stored)
}

func lookNoted(s *stores) {
	sub := s.subscribe(s.B, "product")
	s.start(s.A, key, "a#1", long)
	s.wantHeld(s.look(s.B, key, "b#1"), "a#1")
	s.publishIfAwaited("a#1")
	sub.wantFilled("a#1")
	sub.wantNoMore(key)
}

func lookChanged(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	sub := s.subscribe(s.B, "product")
	req := driver.AcquireRequest{Key: key, Token: "b#1", LeaseTTL: long, ClaimTTL: long, Mode: driver.Look}
	for _, req.Seen = range []string{"", "a#0"} {
		s.wantChanged(s.B, req, v1)
	}
	s.start(s.A, key, "a#2", long)
	for _, req.Token = range []string{"b#1", "a#2"} {
		s.wantChanged(s.B, req, v1)
	}
	s.wantRunning(s.A, key, "a#2")
	sub.wantNoMore(key)
}

func lookFailure(s *stores) {
	s.start(s.A, key, "a#1", long)
	s.fail(s.A, key, "a#1", "boom", long)
	r := s.look(s.B, key, "b#1")
	if r.State != driver.Held || r.Holder != "" || r.Failure != "boom" {
		s.Fatalf("Acquire during a back-off, mode Look: %s, want Held with its failure", acquireText(r))
	}
	s.wantLife("Left of the back-off", r.Left, long)
	s.invalidate(s.A, "a#2", key)

	s.start(s.A, key, "a#3", long)
	s.note(s.A, key, "a#3", "noted", long)
	s.wantFree(s.B, key, "noted")
	s.wantFree(s.A, key, "noted")
	s.wantNoted(s.B, key, "b#2", driver.Wait, "noted")
}
