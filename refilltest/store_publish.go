package refilltest

import "github.com/refill-go/refill/driver"

var publishCases = []storeCase{
	{
		"publish-needs-claim",
		`Without the claim of the token, Publish stores nothing. It still frees the token's own lease and announces released.
If the lease stays, every node waits until it ends while no node loads. If it is freed without an announcement, all
waiters still sleep that long.`,
		publishNeedsClaim,
	},
	{
		"publish-frees",
		`Publish frees lease and claim in the act that stores. If the lease stays, the next refresh waits for a fill that has
ended.`,
		publishFrees,
	},
	{
		"publish-repeated",
		`A Publish that is repeated because its reply was lost returns Stored and changes nothing, as long as its record is
stored. Otherwise a good fill counts as invalidated: the node does not keep its value, and operators see a race that did
not happen. Publish also removes the claim, so that a fill is not stored twice.`,
		publishRepeated,
	},
	{
		"publish-rejected",
		`A rejected Publish leaves lease, claim and value of other fills unchanged. It announces nothing if it freed nothing.
Otherwise a holder that was overtaken frees the lease of the new holder, and a third node loads at the same time.`,
		publishRejected,
	},
}

func publishNeedsClaim(s *stores) {
	sub := s.subscribe(s.B, "product")
	s.publish(s.A, key, "a#1", s.record("a#1", "x"), driver.Rejected) // a#1 has neither lease nor claim
	s.claimEnded(key, "a#2")
	s.publish(s.A, key, "a#2", s.record("a#2", "x"), driver.Rejected) // a#2 has only the lease
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#2"})
	s.wantValue(key, nil)
	s.start(s.B, key, "b#1", long)
	sub.wantNoMore(key)
}

func publishFrees(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	sub := s.subscribe(s.B, "product")
	s.start(s.B, key, "b#1", long)
	s.lose(s.A, key, "a#2", "b#1")
	s.release(s.B, key, "b#1")
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "b#1"})
	sub.wantNoMore(key)
}

func publishRepeated(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	sub := s.subscribe(s.B, "product")
	s.publish(s.A, key, "a#1", s.record("a#1", "again"), driver.Stored)
	s.wantValue(key, v1)
	s.start(s.B, key, "b#1", long)
	s.publish(s.A, key, "a#1", s.record("a#1", "again"), driver.Stored)
	s.wantRunning(s.B, key, "b#1")
	sub.wantNoMore(key)
	s.invalidate(s.B, "b#2", key)
	s.publish(s.A, key, "a#1", s.record("a#1", "again"), driver.Rejected)
	s.wantValue(key, nil)
}

func publishRejected(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	sub := s.subscribe(s.A, "product")
	s.start(s.B, key, "b#1", long)
	s.publish(s.A, key, "a#2", s.record("a#2", "x"), driver.Rejected)
	s.publish(s.A, key, "b#", s.record("b#", "x"), driver.Rejected)
	s.wantValue(key, v1)
	s.lose(s.A, key, "a#3", "b#1")
	s.wantRunning(s.B, key, "b#1")
	sub.wantNoMore(key)
}
