package refilltest

import (
	"time"

	"github.com/refill-go/refill"
)

var leaseCases = []storeCase{
	{
		"lease-exclusive",
		`TryLease takes the lease if it is free, or says who has it; each key has its own. Where two win, two nodes load
the same key: the stampede that the lease is there to prevent.`,
		leaseExclusive,
	},
	{
		"lease-own-token",
		`An own token found under the key counts as won: the reply to an earlier try was lost and the client sent it
again. Otherwise the winner waits for itself until the lease is over (go-redis retries three times by itself).`,
		leaseOwnToken,
	},
	{
		"lease-left",
		`AskLeft and AskForce say how long the holder's lease has to live: more than 0, at most its ttl. A waiter sleeps
that long when nobody wakes it; a wrong unit makes it wait for minutes behind a dead holder, or poll.`,
		leaseLeft,
	},
	{
		"lease-ends",
		`The lease ends by itself. Otherwise a holder that died locks its key for ever. And what is over is over: its
holder can neither renew nor claim.`,
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
}

func leaseExclusive(s *stores) {
	s.win(s.A, key, "a#1", long)
	s.lose(s.A, key, "a#2", "a#1")
	s.lose(s.B, key, "b#1", "a#1")
	s.win(s.B, "product:43", "b#2", long)
	s.win(s.B, "user:42", "b#3", long)
	s.holds(key, nil)
	if c := s.claim(s.A, key, "a#1", "", long); c.State != refill.ClaimTaken {
		s.Fatalf("Claim of the winner = %s, want ClaimTaken", stateName(c.State))
	}
}

func leaseOwnToken(s *stores) {
	s.win(s.A, key, "a#1", long)
	for _, how := range []refill.Ask{refill.AskOnce, refill.AskLeft, refill.AskForce} {
		if l := s.try(s.A, key, "a#1", long, how); !l.Won {
			s.Fatalf("TryLease with the holder's own token, Ask %d: %+v, want it won", how, l)
		}
	}
	s.lose(s.B, key, "b#1", "a#1")
}

func leaseLeft(s *stores) {
	s.begin(s.A, key, "a#1", long)
	for _, how := range []refill.Ask{refill.AskLeft, refill.AskForce} {
		l := s.try(s.B, key, "b#1", time.Hour, how)
		if l.Won || l.Holder != "a#1" || l.Failure != "" {
			s.Fatalf("TryLease of a held lease, Ask %d: %+v, want it lost to a#1", how, l)
		}
		s.within("Left of the lease", l.Left, long)
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

func leaseEnds(s *stores) {
	s.win(s.A, key, "a#1", s.short)
	s.ended(s.B, key, "b#1")
	s.renew(s.A, key, "a#1", false)
	if c := s.claim(s.A, key, "a#1", "", long); c.State != refill.ClaimLost {
		s.Fatalf("Claim after the lease = %s, want ClaimLost", stateName(c.State))
	}
	s.take(s.B, key, "b#1")
	s.alive(s.B, key, "b#1")
}

func leaseTakenOver(s *stores) {
	s.overtaken(key, "a#1", "b#1")
	s.take(s.B, key, "b#1")
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
	s.begin(s.A, key, "a#1", s.short)
	// Somebody else's turn, who went away again without a claim: now the lease is surely over.
	s.ended(s.B, key, "b#1")
	s.release(s.B, key, "b#1")
	s.finish(s.A, key, "a#1", s.record("a#1", "loaded"), refill.PublishStored)
	s.holds(key, s.record("a#1", "loaded"))
}

var claimCases = []storeCase{
	{
		"claim-needs-lease",
		`Claim gives ClaimLost when the lease is not the token's, and changes nothing. Otherwise somebody who lost the
lease loads beside its holder.`,
		claimNeedsLease,
	},
	{
		"claim-sees",
		`Claim is taken when the value is absent or the record whose token was seen. Otherwise a refresh, which always finds
a value, can never begin.`,
		claimSees,
	},
	{
		"claim-other",
		`When another record than the one seen is there, Claim returns it, gives the lease back and announces released.
The value came between a look and the lease: loading it again is needless, and a lease that is given back in silence
lets those who lost it sleep out its whole life with nobody loading (V11, V12).`,
		claimOther,
	},
	{
		"claim-foreign",
		`Bytes that are no record have no token, so they are what was seen by somebody who saw nothing. Otherwise a foreign
or cut-off value under the key can never be replaced. A script that reads the token must not trip over short ones.`,
		claimForeign,
	},
	{
		"claim-clock",
		`Claim.Now is the store's clock, the one that Now returns, and it does not go back. The record's age is counted
from it on every node: where the two differ, one node calls dead what another calls fresh.`,
		claimClock,
	},
	{
		"claim-ends",
		`The claim lives for its own ttl and no longer; then its load is refused, and its lease cannot be renewed. A load
that hangs is given up at LoadTimeout; a claim without an end would let it be stored whenever it wakes up.`,
		claimEnds,
	},
}

func claimNeedsLease(s *stores) {
	lost := func(st refill.Store, token string) {
		s.Helper()
		if c := s.claim(st, key, token, "", long); c.State != refill.ClaimLost {
			s.Fatalf("Claim(%s) = %s, want ClaimLost", token, stateName(c.State))
		}
	}
	lost(s.A, "a#1")
	s.finish(s.A, key, "a#1", s.record("a#1", "x"), refill.PublishRefused)
	s.begin(s.A, key, "a#2", long)
	lost(s.B, "b#1")
	s.alive(s.A, key, "a#2")
	s.finish(s.B, key, "b#1", s.record("b#1", "x"), refill.PublishRefused)
	s.finish(s.A, key, "a#2", s.record("a#2", "y"), refill.PublishStored)
}

func claimSees(s *stores) {
	s.fill(s.A, key, "a#1", s.record("a#1", "v1"))
	s.win(s.B, key, "b#1", long)
	if c := s.claim(s.B, key, "b#1", "a#1", long); c.State != refill.ClaimTaken {
		s.Fatalf("Claim with the value's token seen = %s, want ClaimTaken", stateName(c.State))
	}
	s.holds(key, s.record("a#1", "v1"))
	s.finish(s.B, key, "b#1", s.record("b#1", "v2"), refill.PublishStored)
	s.invalidate(s.A, "a#2", key)
	s.win(s.A, key, "a#3", long)
	if c := s.claim(s.A, key, "a#3", "b#1", long); c.State != refill.ClaimTaken {
		s.Fatalf("Claim of an absent value = %s, want ClaimTaken whatever was seen before", stateName(c.State))
	}
}

func claimOther(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	e := s.listen(s.A, "product")
	for _, seen := range []string{"", "a#0", "a#11", "a#"} {
		s.win(s.B, key, "b#1", long)
		c := s.claim(s.B, key, "b#1", seen, long)
		if c.State != refill.ClaimOther || string(c.Record) != string(v1) {
			s.Fatalf("Claim with %q seen = %s, record %s, want ClaimOther and %s", seen, stateName(c.State), shown(c.Record), shown(v1))
		}
		e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "b#1"})
		s.win(s.A, key, "a#2", long) // it was given back
		s.release(s.A, key, "a#2")
		e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#2"})
	}
	s.finish(s.B, key, "b#1", s.record("b#1", "v2"), refill.PublishRefused)
	s.holds(key, v1)
	e.heardAll(key)
}

// notRecords are bytes that a script may take for a record, or choke on.
func (s *stores) notRecords() []string {
	cut := string(s.record("a-long-token-of-a-node#1", "x"))[:30]
	return []string{"\x00", "R", "RF1", "RF2 and so on", "RF1\x00\x00", cut[:15], cut[:16], cut, `{"a":1}`, "!error"}
}

func claimForeign(s *stores) {
	for _, foreign := range s.notRecords() {
		s.begin(s.A, key, "a#1", long)
		s.finish(s.A, key, "a#1", []byte(foreign), refill.PublishStored)
		s.holds(key, []byte(foreign))
		s.win(s.B, key, "b#1", long)
		if c := s.claim(s.B, key, "b#1", "", long); c.State != refill.ClaimTaken {
			s.Fatalf("Claim over the foreign value %q = %s, want ClaimTaken", foreign, stateName(c.State))
		}
		s.finish(s.B, key, "b#1", s.record("b#1", "healed"), refill.PublishStored)
		s.holds(key, s.record("b#1", "healed"))
		s.invalidate(s.A, "a#2", key)
	}
}

func claimClock(s *stores) {
	var last time.Time
	for i, st := range []refill.Store{s.A, s.B, s.A, s.B} {
		asked := time.Now()
		c := s.begin(st, key, "n#1", long)
		now, took := st.Now(), time.Since(asked)
		// Half a round trip is what a node cannot know; a busy machine is given some more.
		if slack := took + 100*time.Millisecond; c.Now.Sub(now).Abs() > slack {
			s.Fatalf("Claim.Now = %v, Now() = %v: they differ by %v, want at most %v", c.Now, now, c.Now.Sub(now), slack)
		}
		if c.Now.Before(last) {
			s.Fatalf("Claim.Now went back: %v after %v (claim %d)", c.Now, last, i)
		}
		last = c.Now
		s.finish(st, key, "n#1", s.record("n#1", "x"), refill.PublishStored)
	}
	for _, st := range []refill.Store{s.A, s.B} {
		if a, b := st.Now(), st.Now(); b.Before(a) {
			s.Fatalf("Now() went back: %v after %v", b, a)
		}
	}
}

func claimEnds(s *stores) {
	s.win(s.A, key, "a#1", long)
	if c := s.claim(s.A, key, "a#1", "", s.short); c.State != refill.ClaimTaken {
		s.Fatalf("Claim = %s, want ClaimTaken", stateName(c.State))
	}
	e := s.listen(s.B, "product")
	over := func() bool {
		mine, err := s.A.Renew(s.ctx, key, "a#1", long)
		s.ok(err, "Renew")
		return !mine
	}
	if !s.ends(over) {
		s.Fatalf("Renew goes on although the claim of %v is long over", s.short)
	}
	s.finish(s.A, key, "a#1", s.record("a#1", "late"), refill.PublishRefused)
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#1"})
	s.holds(key, nil)
	s.win(s.B, key, "b#1", long)
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
	l := s.try(s.B, key, "b#1", long, refill.AskLeft)
	if l.Won || l.Holder != "a#1" {
		s.Fatalf("TryLease of a renewed lease = %+v, want it lost to a#1", l)
	}
	s.within("Left of the renewed lease", l.Left, long)
	s.pass(2 * s.short)
	s.lose(s.B, key, "b#1", "a#1")
	s.finish(s.A, key, "a#1", s.record("a#1", "x"), refill.PublishStored)
}

func renewNeedsBoth(s *stores) {
	s.win(s.A, key, "a#1", long)
	s.renew(s.A, key, "a#1", false) // a lease, no claim
	s.take(s.A, key, "a#1")
	s.renew(s.A, key, "a#1", true)
	s.invalidate(s.B, "b#1", key)
	s.renew(s.A, key, "a#1", false)

	s.overtaken(key, "a#2", "b#2")
	s.renew(s.A, key, "a#2", false) // a claim, and the lease is another's
	s.renew(s.B, key, "b#2", false) // a lease, and the claim is another's
}

func renewNeverCreates(s *stores) {
	s.renew(s.A, key, "a#1", false)
	s.fill(s.A, key, "a#2", s.record("a#2", "x"))
	s.renew(s.A, key, "a#2", false)
	s.win(s.B, key, "b#1", long)
	s.release(s.B, key, "b#1")

	s.overtaken(key, "a#3", "b#2")
	s.release(s.B, key, "b#2")
	s.renew(s.A, key, "a#3", false) // its claim stands, the lease is free
	s.win(s.B, key, "b#3", long)
}

func renewNotMine(s *stores) {
	s.begin(s.A, key, "a#1", s.short)
	s.renew(s.B, key, "b#1", false)
	s.ended(s.B, key, "b#2")
}
