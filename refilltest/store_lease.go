package refilltest

import "github.com/refill-go/refill"

var leaseCases = []storeCase{
	{
		"lease-ends",
		`The lease ends by itself. Otherwise a holder that died locks its key for ever. And what is over is over: its
holder cannot renew.`,
		leaseEnds,
	},
	{
		"lease-taken-over",
		`When the lease of a frozen holder is over, the next one takes lease and claim; from then on the first one's load
may not be stored, released, failed or renewed. Otherwise it overwrites a newer value when it wakes up (G3).`,
		leaseTakenOver,
	},
	{
		"lease-over-claim-stands",
		`Correctness comes from the claim, not from the lease: a load whose lease ran out, but whose claim nobody took, is
stored. Otherwise a node whose renewals are late never gets anything published, and all loads are for nothing.`,
		leaseOverClaimStands,
	},
	{
		"claim-ends",
		`The claim lives for its own ttl and no longer; then its load is refused, and its lease cannot be renewed. A load
that hangs is given up at LoadTimeout; a claim without an end would let it be stored whenever it wakes up.`,
		claimEnds,
	},
}

func leaseEnds(s *stores) {
	s.begin(s.A, key, "a#1", s.short)
	s.ended(s.B, key, "b#1")
	s.renew(s.A, key, "a#1", false)
	s.alive(s.B, key, "b#1")
}

func leaseTakenOver(s *stores) {
	s.overtaken(key, "a#1", "b#1")
	s.renew(s.A, key, "a#1", false)
	s.finish(s.A, key, "a#1", s.record("a#1", "old"), refill.PublishRefused)
	s.fail(s.A, key, "a#1", "too late", long)
	s.release(s.A, key, "a#1")
	s.holds(key, nil)
	s.lose(s.A, key, "a#2", "b#1")
	s.alive(s.B, key, "b#1")
	s.finish(s.B, key, "b#1", s.record("b#1", "new"), refill.PublishStored)
	s.finish(s.A, key, "a#1", s.record("a#1", "old"), refill.PublishRefused)
	s.holds(key, s.record("b#1", "new"))
}

func leaseOverClaimStands(s *stores) {
	s.lapsed(key, "a#1")
	s.finish(s.A, key, "a#1", s.record("a#1", "loaded"), refill.PublishStored)
	s.holds(key, s.record("a#1", "loaded"))
}

func claimEnds(s *stores) {
	s.unclaimed(key, "a#1")
	e := s.listen(s.B, "product")
	s.finish(s.A, key, "a#1", s.record("a#1", "late"), refill.PublishRefused)
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#1"})
	s.holds(key, nil)
	s.begin(s.B, key, "b#1", long)
	e.heardAll(key)
}

var renewCases = []storeCase{
	{
		"renew-lengthens",
		`Renew lets the lease live for ttl from now. A load longer than LockTTL lives on it: without it a second node
loads beside the first.`,
		renewLengthens,
	},
	{
		"renew-needs-both",
		`Renew succeeds only if lease and claim are both the token's. A load that was voided must not keep its lease: all
who want the new value would wait as long as the load for the old one runs (V1).`,
		renewNeedsBoth,
	},
	{
		"renew-never-creates",
		`Renew never creates a lease. A renewal that comes late, after the fill has ended or the lease was lost, would
lock the key with nobody loading.`,
		renewNeverCreates,
	},
	{
		"renew-not-mine",
		`Renew of somebody else's lease changes nothing. An extension without the owner check prolongs the lease of a dead
holder as long as somebody else believes to renew his own (seeds row 8).`,
		renewNotMine,
	},
}

func renewLengthens(s *stores) {
	s.begin(s.A, key, "a#1", s.short)
	s.renew(s.A, key, "a#1", true)
	s.within("Left of the renewed lease", s.await(s.B, key, "b#1", "a#1").Left, long)
	s.pass(2 * s.short)
	s.lose(s.B, key, "b#1", "a#1")
	s.finish(s.A, key, "a#1", s.record("a#1", "x"), refill.PublishStored)
}

func renewNeedsBoth(s *stores) {
	s.begin(s.A, key, "a#1", long)
	s.renew(s.A, key, "a#1", true)
	s.invalidate(s.B, "b#1", key)
	s.renew(s.A, key, "a#1", false)

	s.lapsed(key, "a#2")
	s.renew(s.A, key, "a#2", false) // a claim, no lease
	s.invalidate(s.B, "b#2", key)

	s.unclaimed(key, "a#3")
	s.renew(s.A, key, "a#3", false) // a lease, no claim
	s.lose(s.B, key, "b#3", "a#3")
}

func renewNeverCreates(s *stores) {
	s.renew(s.A, key, "a#1", false)
	s.fill(s.A, key, "a#2", s.record("a#2", "x"))
	s.renew(s.A, key, "a#2", false)
	s.begin(s.B, key, "b#1", long)
	s.release(s.B, key, "b#1")

	s.lapsed(key, "a#3")
	s.renew(s.A, key, "a#3", false) // its claim stands, the lease is free
	s.begin(s.B, key, "b#3", long)
}

func renewNotMine(s *stores) {
	s.begin(s.A, key, "a#1", s.short)
	s.renew(s.B, key, "b#1", false)
	s.ended(s.B, key, "b#2")
}
