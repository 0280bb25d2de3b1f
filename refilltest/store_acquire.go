package refilltest

import (
	"time"

	"github.com/refill-go/refill/driver"
)

var acquireCases = []storeCase{
	{
		"acquire-exclusive",
		`Acquire takes the lease if it is free. Otherwise it names the holder. Each key has its own lease. If two fills hold
one lease, two nodes load the same key: that is the stampede which the lease prevents.`,
		acquireExclusive,
	},
	{
		"acquire-takes-lease-and-claim",
		`Acquired means that the token has both, in every mode: the lease for LeaseTTL and the claim for ClaimTTL. With only
one of them, the load cannot be renewed or cannot be stored, and all waiters wait in vain.`,
		acquireTakesLeaseAndClaim,
	},
	{
		"acquire-own-token",
		`A lease that belongs to the token already counts as free: the reply to an earlier try was lost, and the client sent
the request again (go-redis retries three times by itself). Otherwise the winner waits for itself until its lease
ends.`,
		acquireOwnToken,
	},
	{
		"acquire-replayed",
		`A repeated Acquire keeps a claim that belongs to the token already, and Now is the moment at which that claim was
taken. After an Invalidate it takes a new claim, and a load under the old one is rejected. Otherwise a copy of the
request that the network delivers late undoes the Invalidate (G2).`,
		acquireReplayed,
	},
	{
		"acquire-left",
		`In modes Wait and Force, Left is the remaining life of the holder's lease: more than 0, at most its ttl. A waiter
sleeps that long if no announcement wakes it. With a wrong unit it waits for minutes after the holder has died, or it
polls. A request does not lengthen the lease of the holder.`,
		acquireLeft,
	},
	{
		"acquire-held",
		`Held leaves lease and claim of the holder unchanged: the holder renews and publishes as before, and the token that
lost can do neither. Otherwise each late request takes away what the holder has loaded, and under load the key is never
stored.`,
		acquireHeld,
	},
	{
		"acquire-seen",
		`Acquire succeeds if there is no value, or if the value is the record that the fill has seen. Otherwise a refresh,
which always finds a value, can never begin.`,
		acquireSeen,
	},
	{
		"acquire-changed",
		`If the stored record is not the one seen, Acquire returns it and takes nothing. It was stored after the lookup, so
another load is needless. A lease that stays makes all nodes wait for its whole life while no node loads. In modes Wait
and Force nothing is announced: no lease was freed, and a wake-up without a cause sends all waiters to the store.`,
		acquireChanged,
	},
	{
		"acquire-changed-before-held",
		`In modes Wait and Force the record is compared before the lease. A record that was not seen is returned even while
another fill has the lease, and that fill is not disturbed. Otherwise a caller that missed waits for a refresh although
the value is already stored.`,
		acquireChangedBeforeHeld,
	},
	{
		"acquire-changed-frees-lease",
		`If the record has changed and the token has the lease, Acquire frees the lease and announces released. If the lease
stays, every node waits until it ends while no node loads. If it is freed without an announcement, all waiters still
sleep that long.`,
		acquireChangedFreesLease,
	},
	{
		"acquire-foreign",
		`Bytes that are not a record have no token, so they match an empty Seen. Otherwise a foreign or truncated value can
never be replaced. A script that reads the token must not fail on short values.`,
		acquireForeign,
	},
	{
		"acquire-clock",
		`AcquireResult.Now is read from the clock of the store, the one that Now returns, and it does not go back. Every node
computes the age of a record from it. If the two clocks differ, a record that one node serves as fresh is expired for
another.`,
		acquireClock,
	},
}

// modes are all modes in which Acquire may take the lease.
func modes() []driver.Mode { return []driver.Mode{driver.Try, driver.Wait, driver.Force} }

func acquireExclusive(s *stores) {
	s.start(s.A, key, "a#1", long)
	s.lose(s.A, key, "a#2", "a#1")
	s.lose(s.B, key, "b#1", "a#1")
	s.start(s.B, "product:43", "b#2", long)
	s.start(s.B, "user:42", "b#3", long)
	s.wantValue(key, nil)
	s.wantRunning(s.A, key, "a#1")
}

func acquireTakesLeaseAndClaim(s *stores) {
	for _, mode := range modes() {
		s.wantAcquired(s.A, s.request(s.A, key, "a#1", long, mode))
		s.wantLife("Left of the lease", s.await(s.B, key, "b#1", "a#1").Left, long)
		s.wantRunning(s.A, key, "a#1")
		s.publish(s.A, key, "a#1", s.record("a#1", "v1"), driver.Stored)
		s.invalidate(s.B, "b#2", key)

		s.wantAcquired(s.A, s.request(s.A, key, "a#2", s.short, mode))
		s.takeOver(s.B, key, "b#3") // the lease has ended, the claim has not
		s.invalidate(s.B, "b#4", key)
	}
}

func acquireOwnToken(s *stores) {
	for _, first := range modes() {
		s.wantAcquired(s.A, s.request(s.A, key, "a#1", long, first))
		for _, mode := range modes() {
			if r := s.acquireKey(s.A, key, "a#1", long, mode); r.State != driver.Acquired {
				s.Fatalf("Acquire with the holder's own token, mode %s after %s: %s, want Acquired",
					modeText(mode), modeText(first), acquireText(r))
			}
			s.wantRunning(s.A, key, "a#1")
		}
		s.lose(s.B, key, "b#1", "a#1")
		s.publish(s.A, key, "a#1", s.record("a#1", "x"), driver.Stored)
	}
}

func acquireReplayed(s *stores) {
	for _, mode := range modes() {
		req := s.request(s.A, key, "a#1", long, mode)
		publish := func(began time.Time, want driver.PublishResult) {
			s.Helper()
			p := driver.PublishRequest{Key: key, Token: "a#1", Began: began, Record: s.record("a#1", "x"), Keep: long}
			if state, err := s.A.Publish(s.ctx, p); err != nil || state != want {
				s.Fatalf("Publish with the claim of %v = %s, %v, want %s",
					began, publishText(state), err, publishText(want))
			}
		}
		first := s.wantAcquired(s.A, req).Now
		time.Sleep(time.Millisecond) // two claims must differ in their moments; Pass may leave the clock unchanged
		if again := s.wantAcquired(s.A, req).Now; !again.Equal(first) {
			s.Fatalf("repeated Acquire, mode %s: Now = %v, want %v as before", modeText(mode), again, first)
		}
		s.invalidate(s.B, "b#1", key)
		s.wantAcquired(s.A, req) // the network delivers a late copy of the request
		publish(first, driver.Rejected)
		s.wantValue(key, nil)
		s.start(s.B, key, "b#2", long) // the rejected fill left no lease
		s.release(s.B, key, "b#2")

		first = s.wantAcquired(s.A, req).Now
		time.Sleep(time.Millisecond) // two claims must differ in their moments; Pass may leave the clock unchanged
		s.wantAcquired(s.A, req)
		publish(first, driver.Stored)
		s.invalidate(s.B, "b#3", key)
	}
}

func acquireLeft(s *stores) {
	s.start(s.A, key, "a#1", long)
	for _, mode := range []driver.Mode{driver.Wait, driver.Force, driver.Wait} {
		r := s.acquireKey(s.B, key, "b#1", time.Hour, mode)
		s.wantHeld(r, "a#1")
		s.wantLife("Left of the lease", r.Left, long)
	}
	s.wantRunning(s.A, key, "a#1")
}

// wantLife demands a remaining life of at most ttl, and not much less than ttl, because the life has just begun.
func (s *stores) wantLife(what string, left, ttl time.Duration) {
	s.Helper()
	if left <= ttl-callTime || left > ttl {
		s.Fatalf("%s = %v, want at most its ttl of %v, and not much less", what, left, ttl)
	}
}

func acquireHeld(s *stores) {
	for _, mode := range modes() {
		s.start(s.A, key, "a#1", long)
		s.wantHeld(s.acquireKey(s.B, key, "b#1", long, mode), "a#1")
		s.renew(s.B, key, "b#1", false)
		s.wantRunning(s.A, key, "a#1")
		s.lose(s.B, key, "b#2", "a#1")
		s.publish(s.B, key, "b#1", s.record("b#1", "x"), driver.Rejected)
		s.publish(s.A, key, "a#1", s.record("a#1", "y"), driver.Stored)
		s.wantValue(key, s.record("a#1", "y"))
	}
}

func acquireSeen(s *stores) {
	for _, mode := range modes() {
		s.fill(s.A, key, "a#1", s.record("a#1", "v1"))
		req := s.request(s.B, key, "b#1", long, mode)
		req.Seen = "a#1"
		s.wantAcquired(s.B, req)
		s.wantValue(key, s.record("a#1", "v1"))
		s.publish(s.B, key, "b#1", s.record("b#1", "v2"), driver.Stored)
		s.invalidate(s.A, "a#2", key)
		req.Token, req.Seen = "a#3", "b#1" // a#3 has seen the record of b#1, which is gone
		s.wantAcquired(s.A, req)
		s.invalidate(s.A, "a#4", key)
	}
}

// wantChanged demands Changed with the record.
func (s *stores) wantChanged(st driver.Store, req driver.AcquireRequest, want []byte) {
	s.Helper()
	if r := s.acquire(st, req); r.State != driver.Changed || string(r.Record) != string(want) {
		s.Fatalf("Acquire(%s), mode %s, with %q seen = %s, want Changed with %s",
			req.Token, modeText(req.Mode), req.Seen, acquireText(r), shown(want))
	}
}

func acquireChanged(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	sub := s.subscribe(s.A, "product")
	for _, mode := range modes() {
		for _, seen := range []string{"", "a#0", "a#11", "a#"} {
			req := driver.AcquireRequest{Key: key, Token: "b#1", Seen: seen, LeaseTTL: long, ClaimTTL: long, Mode: mode}
			s.wantChanged(s.B, req, v1)
			s.start(s.A, key, "a#2", long) // b#1 took nothing
			s.release(s.A, key, "a#2")
			released := driver.Announcement{Kind: driver.Released, Key: key, Token: "b#1"}
			n := sub.next("released by a#2")
			if mode == driver.Try && sameAnnouncement(n, released) { // Try may take the lease first and free it again
				n = sub.next("released by a#2")
			}
			if released.Token = "a#2"; !sameAnnouncement(n, released) {
				s.Fatalf("after Changed, mode %s: announcement %s\n want %s",
					modeText(mode), announcementText(n), announcementText(released))
			}
		}
	}
	s.publish(s.B, key, "b#1", s.record("b#1", "v2"), driver.Rejected)
	s.wantValue(key, v1)
	sub.wantNoMore(key)
}

func acquireChangedBeforeHeld(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	s.start(s.A, key, "a#2", long)
	sub := s.subscribe(s.B, "product")
	req := driver.AcquireRequest{Key: key, Token: "b#1", LeaseTTL: long, ClaimTTL: long}
	for _, req.Mode = range []driver.Mode{driver.Wait, driver.Force} {
		for _, req.Seen = range []string{"", "a#0"} {
			s.wantChanged(s.B, req, v1)
		}
	}
	req.Mode = driver.Try
	if r := s.acquire(s.B, req); r.State != driver.Changed || string(r.Record) != string(v1) {
		s.wantHeld(r, "a#2") // in mode Try, the store may look at the lease before the record
	}
	s.lose(s.B, key, "b#2", "a#2")
	s.wantRunning(s.A, key, "a#2")
	s.publish(s.B, key, "b#1", s.record("b#1", "x"), driver.Rejected)
	sub.wantNoMore(key)
	s.fill(s.A, key, "a#1", v1)
	s.start(s.A, key, "a#3", long)
	s.fail(s.A, key, "a#3", "boom", long)
	for _, req.Mode = range []driver.Mode{driver.Wait, driver.Force} {
		s.wantChanged(s.B, req, v1)
	}
	s.wantBackOff(s.A, key, "boom")
}

func acquireChangedFreesLease(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	sub := s.subscribe(s.A, "product")
	for _, mode := range modes() {
		s.start(s.B, key, "b#1", long)
		req := driver.AcquireRequest{Key: key, Token: "b#1", Seen: "a#0", LeaseTTL: long, ClaimTTL: long, Mode: mode}
		s.wantChanged(s.B, req, v1)
		sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "b#1"})
		s.renew(s.B, key, "b#1", false)
		s.start(s.A, key, "a#2", long) // b#1 has freed the lease
		s.release(s.A, key, "a#2")
		sub.want(driver.Announcement{Kind: driver.Released, Key: key, Token: "a#2"})
	}
	s.wantValue(key, v1)
	sub.wantNoMore(key)
}

// notRecords are bytes that a script may mistake for a record, or fail on.
func (s *stores) notRecords() []string {
	cut := string(s.record("a-long-token-of-a-node#1", "x"))[:30]
	return []string{"\x00", "R", "RF1", "RF2 and so on", "RF1\x00\x00", cut[:15], cut[:16], cut, `{"a":1}`, "!error"}
}

func acquireForeign(s *stores) {
	for i, foreign := range s.notRecords() {
		s.start(s.A, key, "a#1", long)
		s.publish(s.A, key, "a#1", []byte(foreign), driver.Stored)
		s.wantValue(key, []byte(foreign))
		req := driver.AcquireRequest{Key: key, Token: "b#1", LeaseTTL: long, ClaimTTL: long, Mode: modes()[i%len(modes())]}
		if r := s.acquire(s.B, req); r.State != driver.Acquired {
			s.Fatalf("Acquire over the foreign value %q = %s, want Acquired", foreign, acquireText(r))
		}
		s.publish(s.B, key, "b#1", s.record("b#1", "healed"), driver.Stored)
		s.wantValue(key, s.record("b#1", "healed"))
		s.invalidate(s.A, "a#2", key)
	}
}

func acquireClock(s *stores) {
	var last time.Time
	for i, st := range []driver.Store{s.A, s.B, s.A, s.B} {
		asked := time.Now()
		r := s.start(st, key, "n#1", long)
		now, took := st.Now(), time.Since(asked)
		// Now() may be wrong by half a round trip. The 100 ms are for a busy machine.
		if slack := took + 100*time.Millisecond; r.Now.Sub(now).Abs() > slack {
			s.Fatalf("AcquireResult.Now = %v, Now() = %v: they differ by %v, want at most %v",
				r.Now, now, r.Now.Sub(now), slack)
		}
		if r.Now.Before(last) {
			s.Fatalf("AcquireResult.Now went back: %v after %v (fill %d)", r.Now, last, i)
		}
		last = r.Now
		s.publish(st, key, "n#1", s.record("n#1", "x"), driver.Stored)
	}
	for _, st := range []driver.Store{s.A, s.B} {
		if a, b := st.Now(), st.Now(); b.Before(a) {
			s.Fatalf("Now() went back: %v after %v", b, a)
		}
	}
}
