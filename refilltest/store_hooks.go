package refilltest

import (
	"time"

	"github.com/refill-go/refill/driver"
)

// These cases need a fault that the world provides through a hook. Without the hook, the case is skipped.
var hookCases = []storeCase{
	{
		"endless-lease",
		`In modes Wait and Force, a lease without an end counts as free: a process set it with SETNX and died, or a restore
dropped its end. Otherwise its waiters wait for ever, or poll.`,
		endlessLease,
	},
	{
		"garbled-lease",
		`In modes Wait and Force, a lease of a foreign type counts as free. If a script fails on it, the key cannot be filled
until an operator deletes the lease by hand.`,
		garbledLease,
	},
	{
		"publish-lease-taken",
		`If another fill has the lease already, but not yet the claim (mode Try may take the lease first), the claim
decides. The load with the claim is stored and announced, and frees the lease of the other fill. Otherwise the new
holder loads a value that is already stored.`,
		publishLeaseTaken,
	},
	{
		"fail-lease-taken",
		`Fail with the claim alone ends only its own load. The lease of another fill stays, and no back-off replaces it.
The new holder makes its own try. If a back-off replaces its lease, a third node can load at the same time.`,
		failLeaseTaken,
	},
	{
		"release-lease-taken",
		`Release with the claim alone frees the claim and announces released. The lease of another fill stays. Otherwise a
late Release frees it, and a third node loads at the same time.`,
		releaseLeaseTaken,
	},
	{
		"foreign-claim",
		`Acquire replaces a claim of an unknown token, a claim without an end and a claim of a foreign type like any other.
Before that, no token can publish. If a script fails on such a claim, the key is never stored again.`,
		foreignClaim,
	},
	{
		"garbled-value",
		`A value of a foreign type is a miss. The next fill replaces it, and Invalidate and Expire delete it (G7). If it is an
error, every Get of that key goes to the database until an operator deletes the value by hand.`,
		garbledValue,
	},
	{
		"foreign-tag-state",
		`A tag state of foreign bytes or of a foreign type counts as unknown. The next EnsureTags, InvalidateTags or
ExpireTags replaces it by a state that ends. If a script fails on it, no value with the tag is ever stored again.`,
		foreignTagState,
	},
	{
		"silent-server",
		`Every call returns when its ctx ends, even if the server does not answer, and works again when the server answers.
Many clients ignore the ctx while they wait for a reply: then a Get hangs until the time-out of the client (G7).`,
		silentServer,
	},
	{
		"broken-subscription",
		`The break of a subscription is reported as Disconnected, its return as Subscribed, and then every announcement
arrives again. If a break is not reported, old values stay in L1 until LocalTTL.`,
		brokenSubscription,
	},
	{
		"store-full",
		`Publish frees lease and claim before it stores, and announces, so that a full store still wakes the waiters.
Otherwise one node after another sleeps for LockTTL and then loads.`,
		storeFull,
	},
}

func endlessLease(s *stores) {
	needs(s, "StoreWorld.Plant", s.Plant != nil)
	for _, mode := range []driver.Mode{driver.Wait, driver.Force} {
		s.Plant(key, PartLease, "gone#1")
		s.wantUsable(mode)
	}
}

func garbledLease(s *stores) {
	needs(s, "StoreWorld.Garble", s.Garble != nil)
	for _, mode := range []driver.Mode{driver.Wait, driver.Force} {
		s.Garble(key, PartLease)
		s.wantUsable(mode)
		s.Garble(key, PartLease)
		s.invalidate(s.A, "a#1", key)
		s.start(s.A, key, "a#2", long)
		s.release(s.A, key, "a#2")
	}
}

// wantUsable demands that a fill can take the lease, that its lease has an end, and that the fill can publish.
func (s *stores) wantUsable(mode driver.Mode) {
	s.Helper()
	s.wantAcquired(s.A, s.request(s.A, key, "a#1", long, mode))
	s.wantLife("Left", s.await(s.B, key, "b#1", "a#1").Left, long)
	s.wantRunning(s.A, key, "a#1")
	s.publish(s.A, key, "a#1", s.record("a#1", "x"), driver.Stored)
	s.wantValue(key, s.record("a#1", "x"))
	s.start(s.B, key, "b#1", long)
	s.release(s.B, key, "b#1")
}

// leaseTaken prepares key: slow has the claim, and next has the lease, which has no end.
func (s *stores) leaseTaken(slow, next string) {
	s.Helper()
	needs(s, "StoreWorld.Plant", s.Plant != nil)
	s.leaseEnded(key, slow)
	s.Plant(key, PartLease, next)
	s.renew(s.A, key, slow, false)
	s.renew(s.B, key, next, false)
	s.lose(s.B, key, "z#1", next)
}

func publishLeaseTaken(s *stores) {
	sub := s.subscribe(s.B, "product")
	s.leaseTaken("a#1", "b#1")
	s.publishIfAwaited("a#1") // the lease of a#1 has ended, so this Publish must be announced
	sub.wantFilled("a#1")
	req := driver.AcquireRequest{Key: key, Token: "b#1", LeaseTTL: long, ClaimTTL: long}
	for _, req.Mode = range []driver.Mode{driver.Wait, driver.Force} {
		s.wantChanged(s.B, req, s.record("a#1", "x"))
	}
	s.start(s.A, key, "a#2", long)
	s.lose(s.B, key, "b#2", "a#2")
	sub.wantNoMore(key)
}

// wantSuccessor is called when the fill of a#1 has ended. It demands that b#1 still has the lease and can continue,
// and that no further announcement was made.
func (s *stores) wantSuccessor(sub *subscription) {
	s.Helper()
	s.lose(s.A, key, "a#2", "b#1")
	s.publish(s.A, key, "a#1", s.record("a#1", "x"), driver.Rejected)
	s.wantAcquired(s.B, s.request(s.B, key, "b#1", long, driver.Try))
	s.wantRunning(s.B, key, "b#1")
	sub.wantNoMore(key)
}

func failLeaseTaken(s *stores) {
	sub := s.subscribe(s.B, "product")
	s.leaseTaken("a#1", "b#1")
	s.fail(s.A, key, "a#1", "boom", long)
	sub.want(driver.Announcement{Kind: driver.Failed, Key: key, Token: "a#1", Failure: "boom"})
	s.wantSuccessor(sub)
}

func releaseLeaseTaken(s *stores) {
	sub := s.subscribe(s.B, "product")
	s.leaseTaken("a#1", "b#1")
	s.release(s.A, key, "a#1")
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#1"})
	s.wantSuccessor(sub)
}

func foreignClaim(s *stores) {
	needs(s, "StoreWorld.Plant or Garble", s.Plant != nil || s.Garble != nil)
	plant := func() { s.Plant(key, PartClaim, "gone#1") }
	garble := func() { s.Garble(key, PartClaim) }
	if s.Plant == nil {
		plant = garble
	}
	if s.Garble == nil {
		garble = plant
	}
	for _, put := range []func(){plant, garble} {
		put()
		s.publish(s.A, key, "a#0", s.record("a#0", "x"), driver.Rejected)
		s.start(s.A, key, "a#1", long)
		s.wantRunning(s.A, key, "a#1")
		s.publish(s.A, key, "a#1", s.record("a#1", "x"), driver.Stored)
		put()
		s.invalidate(s.A, "a#2", key)
		s.start(s.B, key, "b#1", long)
		put()
		s.fail(s.B, key, "b#1", "boom", 0)
		s.start(s.A, key, "a#3", long)
		put()
		s.renew(s.A, key, "a#3", false)
		s.lose(s.B, key, "b#2", "a#3")
		s.release(s.A, key, "a#3")
		s.start(s.A, key, "a#4", long)
		s.release(s.A, key, "a#4")
		s.expire(s.A, "a#5", key)
	}
}

func garbledValue(s *stores) {
	needs(s, "StoreWorld.Garble", s.Garble != nil)
	s.Garble(key, PartValue)
	s.wantValue(key, nil)
	s.fill(s.A, key, "a#1", s.record("a#1", "healed"))
	s.wantValue(key, s.record("a#1", "healed"))
	for _, remove := range []func(driver.Store, string, ...string){s.invalidate, s.expire} {
		s.Garble(key, PartValue)
		remove(s.A, "a#2", key)
		s.wantValue(key, nil)
		s.fill(s.B, key, "b#1", s.record("b#1", "healed"))
		s.wantValue(key, s.record("b#1", "healed"))
	}
}

func foreignTagState(s *stores) {
	needs(s, "StoreWorld.Plant or Garble", s.Plant != nil || s.Garble != nil)
	if s.Plant != nil {
		s.wantReplaced(func() { s.Plant(red, PartTag, "gone#1") })
	}
	if s.Garble != nil {
		s.wantReplaced(func() { s.Garble(red, PartTag) })
	}
}

func (s *stores) wantReplaced(put func()) {
	s.Helper()
	put()
	s.wantUnknown(red)
	before := s.moment()
	s.ensure(s.A, time.Hour, s.short, red)
	after := s.moment()
	if t := s.states(s.B, red)[0]; t.Known { // the state lives for s.short only, so it may have ended
		s.wantBetween("Invalidated", t.Invalidated, before.Add(-time.Hour), after.Add(-time.Hour))
	}
	if !s.runOut(func() bool { return !s.states(s.B, red)[0].Known }) {
		s.Fatalf("the tag state that replaced a foreign one does not end")
	}
	for _, c := range []tagChange{invalidating, expiring} {
		put()
		before := s.moment()
		s.changeTags(c, s.A, "a#1", long, red)
		after := s.moment()
		s.wantBetween("Invalidated after "+c.name, s.tagState(red).Invalidated, before, after)
	}
}

// storeFull accepts StoreFull, and also Stored with the record in the store. Redis checks its memory only before the
// first write of a script. The first write of Publish frees memory, so the record may then fit.
func storeFull(s *stores) {
	needs(s, "StoreWorld.Full", s.Full != nil)
	s.start(s.A, key, "a#1", long)
	sub := s.subscribe(s.B, "product")
	full := fault(s, s.Full)
	full(true)
	p := driver.PublishRequest{Key: key, Token: "a#1", Record: s.record("a#1", "x"), Keep: long}
	state, err := s.A.Publish(s.ctx, p)
	s.ok(err, "Publish")
	if n := sub.next("an announcement by a#1"); n.Key != key || n.Token != "a#1" {
		s.Fatalf("the next announcement is %s, want one about %s by a#1", announcementText(n), key)
	}
	full(false)
	switch state {
	case driver.Stored:
		s.wantValue(key, p.Record)
	case driver.StoreFull:
		s.wantValue(key, nil)
	default:
		s.Fatalf("Publish with a valid claim in a full store = %s, want StoreFull or Stored", publishText(state))
	}
	s.start(s.B, key, "b#1", long)
	s.publish(s.B, key, "b#1", s.record("b#1", "x"), driver.Stored)
}

func silentServer(s *stores) {
	needs(s, "StoreWorld.Silence", s.Silence != nil)
	const free = "product:43"
	s.start(s.A, key, "a#2", long)
	silent := fault(s, s.Silence)
	silent(true)
	for _, c := range s.calls(key, free) {
		wantGivesUp(s, s.ctx, c)
	}
	silent(false)
	// The server may still be running the calls that were sent while it was silent, or the store may have to connect
	// again.
	answers := func() bool { _, err := s.A.Get(s.ctx, key); return err == nil }
	for deadline := time.Now().Add(patience); !answers(); <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.Fatalf("Get still returns errors %v after the server answers again", patience)
		}
	}
	s.start(s.A, "product:44", "a#5", long)
	s.publish(s.A, "product:44", "a#5", s.record("a#5", "x"), driver.Stored)
	s.wantValue("product:44", s.record("a#5", "x"))
}

func brokenSubscription(s *stores) {
	needs(s, "StoreWorld.Break", s.Break != nil)
	sub := s.subscribe(s.A, "product")
	for range 2 {
		s.Break()
		if n := sub.next("Disconnected"); n.Kind != driver.Disconnected {
			s.Fatalf("after a break the next announcement is %s, want Disconnected", announcementText(n))
		}
		for n := sub.next("Subscribed"); n.Kind != driver.Subscribed; n = sub.next("Subscribed") {
			if n.Kind != driver.Disconnected { // the store may need several tries to connect again
				s.Fatalf("after a break the next announcement is %s, want Subscribed", announcementText(n))
			}
		}
		sub.wantNoMore(key)
	}
}
