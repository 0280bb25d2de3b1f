package refilltest

import (
	"fmt"

	"github.com/refill-go/refill/driver"
)

var announceCases = []storeCase{
	{
		"publish-announces-if-awaited",
		`A Publish with AnnounceIfAwaited is announced if an Acquire in mode Wait or Force has lost to its fill. Otherwise the
waiters sleep until the lease would have ended by itself.`,
		publishAnnouncesIfAwaited,
	},
	{
		"lease-stays-awaited",
		`The store knows that a lease is awaited until the lease ends, also after its holder renews it, or repeats Acquire
because the reply was lost. If such a step forgets the waiters, they sleep until the lease would have ended.`,
		leaseStaysAwaited,
	},
	{
		"publish-after-lease-end",
		`A Publish with AnnounceIfAwaited is announced if the lease of its load has ended, because the waiters noted on the
lease were lost with it. Otherwise callers that waited for that load, and now wait for a load slot, load a value that is
already stored.`,
		publishAfterLeaseEnd,
	},
}

// publishIfAwaited publishes a record with AnnounceIfAwaited: the store may skip the announcement if no token waits for
// the lease.
func (s *stores) publishIfAwaited(token string) {
	s.Helper()
	p := driver.PublishRequest{Key: key, Token: token, Record: s.record(token, "x"), Keep: long, AnnounceIfAwaited: true}
	if state, err := s.A.Publish(s.ctx, p); err != nil || state != driver.Stored {
		s.Fatalf("Publish(%s) with AnnounceIfAwaited = %s, %v, want Stored", token, publishText(state), err)
	}
	s.wantValue(key, p.Record)
}

// wantFilled demands the announcement of the record that publishIfAwaited has published.
func (sub *subscription) wantFilled(token string) {
	sub.s.Helper()
	sub.want(driver.Announcement{Kind: driver.Filled, Key: key, Token: token, Record: sub.s.record(token, "x")})
}

func publishAnnouncesIfAwaited(s *stores) {
	sub := s.subscribe(s.B, "product")
	for i, mode := range []driver.Mode{driver.Wait, driver.Force} {
		token := fmt.Sprint("a#", i)
		s.start(s.A, key, token, long)
		s.wantHeld(s.acquireKey(s.B, key, "b#1", long, mode), token)
		s.lose(s.B, key, "b#2", token) // a token that does not wait changes nothing
		s.publishIfAwaited(token)
		sub.wantFilled(token)
	}
	s.start(s.A, key, "a#8", long)
	s.await(s.B, key, "b#1", "a#8")
	s.release(s.A, key, "a#8")
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#8"})
	s.start(s.A, key, "a#9", long)
	s.publishIfAwaited("a#9") // not awaited: the store may announce it or not
}

func leaseStaysAwaited(s *stores) {
	sub := s.subscribe(s.B, "product")
	for i, mode := range modes() {
		token := fmt.Sprint("a#", i)
		s.start(s.A, key, token, long)
		s.await(s.B, key, "b#1", token)
		s.wantAcquired(s.A, s.request(s.A, key, token, long, mode))
		s.publishIfAwaited(token)
		sub.wantFilled(token)
	}
	s.start(s.A, key, "a#9", long)
	s.await(s.B, key, "b#1", "a#9")
	s.renew(s.A, key, "a#9", true)
	s.publishIfAwaited("a#9")
	sub.wantFilled("a#9")
	sub.wantNoMore(key)
}

func publishAfterLeaseEnd(s *stores) {
	sub := s.subscribe(s.B, "product")
	s.start(s.A, key, "a#1", s.short)
	s.await(s.B, key, "b#1", "a#1")
	s.letLeaseEnd(key, "a#1")
	s.publishIfAwaited("a#1")
	sub.wantFilled("a#1")

	s.leaseEnded(key, "a#2") // a lease that was never awaited
	s.publishIfAwaited("a#2")
	sub.wantFilled("a#2")
	sub.wantNoMore(key)
}

// A store may record in the lease itself that the lease is awaited. A broken store then no longer recognizes the
// token in the lease. These cases find such a store.
var awaitedCases = []storeCase{
	{
		"acquire-awaited",
		`An awaited lease keeps its holder: Acquire names the same token as before, and the holder itself can repeat Acquire.
If a waiter changes the token, the next waiter waits for a fill that does not exist, and a lost reply locks its sender
out.`,
		acquireAwaited,
	},
	{
		"lease-ends-awaited",
		`An awaited lease ends when it would have ended without waiters. If the note of a waiter removes its end, the lease
of a holder that died stays for ever.`,
		leaseEndsAwaited,
	},
	{
		"renew-awaited",
		`The holder of an awaited lease renews it as before. Otherwise a load longer than LockTTL loses its lease as soon as a
caller waits for it.`,
		renewAwaited,
	},
	{
		"publish-awaited",
		`Publish by the holder of an awaited lease stores and frees the lease as before. If it is rejected, it frees the lease
and announces released. Otherwise the lease stays exactly when callers wait for it.`,
		publishAwaited,
	},
	{
		"fail-awaited",
		`Fail by the holder of an awaited lease leaves a back-off, or nothing if ttl is 0, as before. If the store does not
recognize the lease as the holder's own, the lease stays, and all waiters wait for a load that has ended.`,
		failAwaited,
	},
	{
		"release-awaited",
		`Release by the holder of an awaited lease frees it as before. Otherwise the lease stays exactly when callers wait for
it.`,
		releaseAwaited,
	},
}

// startAwaited starts a fill. Two other tokens wait for its lease.
func (s *stores) startAwaited(token string) {
	s.Helper()
	s.start(s.A, key, token, long)
	s.awaitTwice(token)
}

func (s *stores) awaitTwice(token string) {
	s.Helper()
	s.await(s.B, key, "w#1", token)
	s.await(s.B, key, "w#2", token)
}

func acquireAwaited(s *stores) {
	s.startAwaited("a#1")
	for _, mode := range modes() {
		s.wantHeld(s.acquireKey(s.B, key, "b#1", long, mode), "a#1")
	}
	for _, mode := range modes() {
		s.wantAcquired(s.A, s.request(s.A, key, "a#1", long, mode))
		s.wantLife("Left of the lease", s.await(s.B, key, "b#1", "a#1").Left, long)
	}
	s.publish(s.A, key, "a#1", s.record("a#1", "v1"), driver.Stored)

	sub := s.subscribe(s.B, "product")
	s.startAwaited("a#2")
	req := driver.AcquireRequest{Key: key, Token: "a#2", LeaseTTL: long, ClaimTTL: long, Mode: driver.Wait}
	s.wantChanged(s.A, req, s.record("a#1", "v1"))
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#2"})
	s.start(s.B, key, "b#2", long)
	sub.wantNoMore(key)
}

func leaseEndsAwaited(s *stores) {
	s.start(s.A, key, "a#1", s.short)
	s.await(s.B, key, "b#1", "a#1")
	// The mode is Try, because Wait and Force would also take a lease that has no end.
	if !s.runOut(func() bool { return s.acquireKey(s.B, key, "b#1", long, driver.Try).State == driver.Acquired }) {
		s.Fatalf("Acquire is not Acquired long after the end of the awaited lease of %v", s.short)
	}
}

func renewAwaited(s *stores) {
	s.start(s.A, key, "a#1", s.short)
	s.await(s.B, key, "b#1", "a#1")
	s.renew(s.A, key, "a#1", true)
	s.wantLife("Left of the renewed lease", s.await(s.B, key, "b#1", "a#1").Left, long)
	s.renew(s.A, key, "a#1", true)
	s.invalidate(s.B, "b#2", key)
	s.renew(s.A, key, "a#1", false)
}

func publishAwaited(s *stores) {
	v1 := s.record("a#1", "v1")
	sub := s.subscribe(s.B, "product")
	s.startAwaited("a#1")
	s.publish(s.A, key, "a#1", v1, driver.Stored)
	sub.want(driver.Announcement{Kind: driver.Filled, Key: key, Token: "a#1", Record: v1})
	s.claimEnded(key, "a#2")
	s.awaitTwice("a#2")
	s.publish(s.A, key, "a#2", s.record("a#2", "x"), driver.Rejected)
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#2"})
	s.start(s.B, key, "b#1", long)
	s.wantValue(key, v1)
	sub.wantNoMore(key)
}

func failAwaited(s *stores) {
	sub := s.subscribe(s.B, "product")
	s.startAwaited("a#1")
	s.fail(s.A, key, "a#1", "boom", long)
	sub.want(driver.Announcement{Kind: driver.Failed, Key: key, Token: "a#1", Failure: "boom"})
	s.wantBackOff(s.B, key, "boom")
	sub.wantNoMore(key)
	s.startAwaited("a#2")
	s.fail(s.A, key, "a#2", "boom", 0)
	sub.want(driver.Announcement{Kind: driver.Failed, Key: key, Token: "a#2", Failure: "boom"})
	s.start(s.B, key, "b#1", long)
	sub.wantNoMore(key)
}

func releaseAwaited(s *stores) {
	sub := s.subscribe(s.B, "product")
	s.startAwaited("a#1")
	s.release(s.A, key, "a#1")
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#1"})
	s.claimEnded(key, "a#2")
	s.awaitTwice("a#2")
	s.release(s.A, key, "a#2")
	sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#2"})
	s.start(s.B, key, "b#1", long)
	sub.wantNoMore(key)
}
