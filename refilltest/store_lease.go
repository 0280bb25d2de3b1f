package refilltest

import (
	"fmt"

	"github.com/refill-go/refill/driver"
)

var leaseCases = []storeCase{
	{
		"lease-ends",
		`The lease ends by itself, and its holder can no longer renew it. Otherwise a holder that died locks its key for
ever.`,
		leaseEnds,
	},
	{
		"lease-taken-over",
		`After the lease of a frozen holder has ended, another fill takes lease and claim. From then on the first fill can
neither publish nor renew, and its Release and Fail change nothing. Otherwise it overwrites a newer value when it
resumes (G3).`,
		leaseTakenOver,
	},
	{
		"lease-ended-claim-valid",
		`Correctness comes from the claim, not from the lease. A load whose lease has ended is stored if no other fill has
taken the claim. Otherwise a node whose renewals are late never publishes a value, and all its loads are wasted.`,
		leaseEndedClaimValid,
	},
	{
		"claim-ends",
		`The claim ends after its own ttl. Then the publication is rejected, and the lease cannot be renewed. A load that
hangs is given up at LoadTimeout; if its claim has no end, its old value is stored whenever the load returns.`,
		claimEnds,
	},
}

func leaseEnds(s *stores) {
	s.start(s.A, key, "a#1", s.short)
	s.takeOver(s.B, key, "b#1")
	s.renew(s.A, key, "a#1", false)
	s.wantRunning(s.B, key, "b#1")
}

func leaseTakenOver(s *stores) {
	s.overtaken(key, "a#1", "b#1")
	s.renew(s.A, key, "a#1", false)
	s.publish(s.A, key, "a#1", s.record("a#1", "old"), driver.Rejected)
	s.fail(s.A, key, "a#1", "too late", long)
	s.release(s.A, key, "a#1")
	s.wantValue(key, nil)
	s.lose(s.A, key, "a#2", "b#1")
	s.wantRunning(s.B, key, "b#1")
	s.publish(s.B, key, "b#1", s.record("b#1", "new"), driver.Stored)
	s.publish(s.A, key, "a#1", s.record("a#1", "old"), driver.Rejected)
	s.wantValue(key, s.record("b#1", "new"))
}

func leaseEndedClaimValid(s *stores) {
	s.leaseEnded(key, "a#1")
	s.publish(s.A, key, "a#1", s.record("a#1", "loaded"), driver.Stored)
	s.wantValue(key, s.record("a#1", "loaded"))
}

func claimEnds(s *stores) {
	s.claimEnded(key, "a#1")
	sub := s.subscribe(s.B, "product")
	s.publish(s.A, key, "a#1", s.record("a#1", "late"), driver.Rejected)
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#1"})
	s.wantValue(key, nil)
	s.start(s.B, key, "b#1", long)
	sub.wantNoMore(key)
}

var renewCases = []storeCase{
	{
		"renew-extends",
		`Renew sets the remaining life of the lease to ttl. A load longer than LockTTL depends on it. Without it, a second
node loads the same key at the same time.`,
		renewExtends,
	},
	{
		"renew-needs-lease-and-claim",
		`Renew succeeds only if lease and claim both belong to the token. A load that was invalidated must not keep its lease.
Otherwise every caller that wants the new value waits until the load of the old one ends.`,
		renewNeedsLeaseAndClaim,
	},
	{
		"renew-never-creates",
		`Renew never creates a lease. Otherwise a late renewal, after the fill has ended or the lease was lost, locks the key
while no node loads.`,
		renewNeverCreates,
	},
	{
		"renew-not-mine",
		`Renew does not change the lease of another token. Without that check, a node that has lost its lease renews the lease
of the next holder, and that lease stays even if its holder has died.`,
		renewNotMine,
	},
	{
		"renew-many",
		`Renew of many leases renews each of them: mine[i] is about leases[i], also if a lease is listed twice, and without
leases there is nothing to do. A result that is about another lease makes a node keep a load that it has lost, and give
up one that it has.`,
		renewMany,
	},
}

func renewExtends(s *stores) {
	s.start(s.A, key, "a#1", s.short)
	s.renew(s.A, key, "a#1", true)
	s.wantLife("Left of the renewed lease", s.await(s.B, key, "b#1", "a#1").Left, long)
	s.pass(2 * s.short)
	s.lose(s.B, key, "b#1", "a#1")
	s.publish(s.A, key, "a#1", s.record("a#1", "x"), driver.Stored)
}

func renewNeedsLeaseAndClaim(s *stores) {
	s.start(s.A, key, "a#1", long)
	s.renew(s.A, key, "a#1", true)
	s.invalidate(s.B, "b#1", key)
	s.renew(s.A, key, "a#1", false)

	s.leaseEnded(key, "a#2")
	s.renew(s.A, key, "a#2", false) // a#2 has only the claim
	s.invalidate(s.B, "b#2", key)

	s.claimEnded(key, "a#3")
	s.renew(s.A, key, "a#3", false) // a#3 has only the lease
	s.lose(s.B, key, "b#3", "a#3")
}

func renewNeverCreates(s *stores) {
	s.renew(s.A, key, "a#1", false)
	s.fill(s.A, key, "a#2", s.record("a#2", "x"))
	s.renew(s.A, key, "a#2", false)
	s.start(s.B, key, "b#1", long)
	s.release(s.B, key, "b#1")

	s.leaseEnded(key, "a#3")
	s.renew(s.A, key, "a#3", false) // the claim of a#3 is valid, the lease is free
	s.start(s.B, key, "b#3", long)
}

func renewMany(s *stores) {
	const n = 9 // few enough for a fake network that buffers nothing
	var leases []driver.Lease
	for i := range n {
		l := driver.Lease{Key: fmt.Sprint("product:", i), Token: fmt.Sprint("a#", i)}
		if i%3 != 0 { // the other leases are not taken
			s.start(s.A, l.Key, l.Token, s.short)
		}
		leases = append(leases, l)
	}
	s.start(s.B, key, "b#1", long)
	leases = append(leases, driver.Lease{Key: key, Token: "a#1"}, leases[1], leases[0])
	mine := s.renewMany(s.A, leases...)
	for i, l := range leases {
		want := i < n && i%3 != 0 || i == n+1 // leases[1] is listed twice
		if mine[i] != want {
			s.Fatalf("Renew of %d leases: mine[%d] = %v for %v, want %v", len(leases), i, mine[i], l, want)
		}
	}
	s.pass(3 * s.short)
	for i, l := range leases[:n] {
		if i%3 != 0 {
			s.lose(s.B, l.Key, "b#2", l.Token)
		}
	}
	if mine, err := s.A.Renew(s.ctx, long); err != nil || len(mine) != 0 {
		s.Fatalf("Renew without leases = %v, %v, want no result and no error", mine, err)
	}
}

func renewNotMine(s *stores) {
	s.start(s.A, key, "a#1", s.short)
	s.renew(s.B, key, "b#1", false)
	s.takeOver(s.B, key, "b#2")
}
