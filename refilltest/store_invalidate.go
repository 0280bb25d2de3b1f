package refilltest

import (
	"bytes"
	"time"

	"github.com/refill-go/refill/driver"
)

var invalidateCases = []storeCase{
	{
		"invalidate-deletes",
		`Invalidate deletes value, lease and claim. A load in flight can neither renew nor publish, and the next load
begins at once. If the lease stays, all callers wait for a load that will be rejected. If the claim stays, a value
that was read before the change is served as fresh for a whole TTL (G2).`,
		invalidateDeletes,
	},
	{
		"expire-rejects-loads",
		`Expire deletes lease and claim as Invalidate does and keeps only the value. If the claim stays, a load that has read
the old state is stored as fresh after Expire has returned (G2). If the lease stays, the next refresh waits for that
load.`,
		expireRejectsLoads,
	},
	{
		"invalidate-ends-back-off",
		`Invalidate and Expire end a back-off, because after a change there is something new to load (G6). Otherwise
callers get an old error although the cause may be gone.`,
		invalidateEndsBackOff,
	},
	{
		"expire-marks-once",
		`Expire sets ExpiredAt of the record by the clock of the store, once, and changes no other byte. If a second Expire
moves ExpiredAt, a stale value is served for longer than it may be. If another byte changes, the record is a miss,
and there is no stale value left to serve.`,
		expireMarksOnce,
	},
	{
		"expire-foreign",
		`Expire deletes a value that driver.ExpireRecord cannot mark as expired, and no other. If such bytes stay, a later
release that can read them serves them as fresh. A script that fails on short values breaks every Expire of the key.`,
		expireForeign,
	},
	{
		"invalidate-many",
		`Invalidate and Expire work on several keys, on absent keys and on no key, and announce each key. In a Redis
Cluster the keys are on several servers. A key that is left out is still served as fresh.`,
		invalidateMany,
	},
}

func invalidateDeletes(s *stores) {
	s.fill(s.A, key, "a#1", s.record("a#1", "v1"))
	s.start(s.A, key, "a#2", long)
	s.invalidate(s.B, "b#1", key)
	s.wantValue(key, nil)
	s.renew(s.A, key, "a#2", false)
	s.start(s.B, key, "b#2", long)
	s.publish(s.A, key, "a#2", s.record("a#2", "old"), driver.Rejected)
	s.wantValue(key, nil)
	s.wantRunning(s.B, key, "b#2")
	s.publish(s.B, key, "b#2", s.record("b#2", "new"), driver.Stored)
	s.wantValue(key, s.record("b#2", "new"))

	s.start(s.A, key, "a#3", long) // no other fill takes the claim, so only Invalidate ends it
	s.invalidate(s.A, "a#4", key)
	s.publish(s.A, key, "a#3", s.record("a#3", "old"), driver.Rejected)
	s.wantValue(key, nil)
}

func expireRejectsLoads(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	s.start(s.A, key, "a#2", long)
	s.expire(s.B, "b#1", key)
	s.renew(s.A, key, "a#2", false)
	s.start(s.B, key, "b#2", long)
	s.publish(s.A, key, "a#2", s.record("a#2", "old"), driver.Rejected)
	if got := driver.RecordToken(s.get(s.A, key)); got != "a#1" {
		s.Fatalf("after Expire and a rejected Publish the value is from %q, want it from a#1", got)
	}
	s.wantRunning(s.B, key, "b#2")
	s.publish(s.B, key, "b#2", s.record("b#2", "new"), driver.Stored)
	s.wantValue(key, s.record("b#2", "new"))

	s.start(s.A, key, "a#3", long) // no other fill takes the claim, so only Expire ends it
	s.expire(s.A, "a#4", key)
	s.publish(s.A, key, "a#3", s.record("a#3", "old"), driver.Rejected)

	s.invalidate(s.A, "a#5", key)
	s.start(s.A, key, "a#6", long) // no value is stored
	s.expire(s.A, "a#7", key)
	s.publish(s.A, key, "a#6", s.record("a#6", "old"), driver.Rejected)
	s.wantValue(key, nil)
	s.start(s.B, key, "b#3", long)
}

func invalidateEndsBackOff(s *stores) {
	for _, remove := range []func(driver.Store, string, ...string){s.invalidate, s.expire} {
		s.start(s.A, key, "a#1", long)
		s.fail(s.A, key, "a#1", "boom", long)
		s.wantBackOff(s.B, key, "boom")
		remove(s.B, "b#1", key)
		s.start(s.A, key, "a#2", long)
		s.release(s.A, key, "a#2")
	}
}

// offUnchanged is the offset at which the unchanged bytes of a record begin after Expire. The magic and ExpiredAt
// come before this offset.
const offUnchanged = 11

func expireMarksOnce(s *stores) {
	v1 := s.record("a#1", "v1")
	asked := time.Now()
	s.fill(s.A, key, "a#1", v1)
	s.expire(s.A, "a#2", key)
	now, slack := s.A.Now(), time.Since(asked)+100*time.Millisecond
	got := s.get(s.B, key)
	r, err := driver.DecodeRecord(got)
	if err != nil || !bytes.Equal(got[offUnchanged:], v1[offUnchanged:]) {
		s.Fatalf("after Expire the record is %s (%v), want %s with ExpiredAt set", shown(got), err, shown(v1))
	}
	if r.ExpiredAt.Sub(now).Abs() > slack {
		s.Fatalf("ExpiredAt = %v, the store's clock says %v, want at most %v between them", r.ExpiredAt, now, slack)
	}
	s.pass(10 * time.Millisecond)
	s.expire(s.B, "b#1", key)
	s.wantValue(key, got)
}

func expireForeign(s *stores) {
	whole := string(s.record("a#1", "x"))
	samples := append(s.notRecords(), whole, whole[:61], whole[:62], "RF1"+string(make([]byte, 58)),
		"RF1"+string(make([]byte, 59)), "RF2"+whole[3:], "rf1"+whole[3:], " "+whole)
	for _, sample := range samples {
		s.start(s.A, key, "a#1", long)
		s.publish(s.A, key, "a#1", []byte(sample), driver.Stored)
		stays := driver.ExpireRecord([]byte(sample), time.Unix(1, 0))
		s.expire(s.B, "b#1", key)
		got := s.get(s.A, key)
		switch {
		case !stays && got != nil:
			s.Fatalf("after Expire of %q, which is not a record, there is %q, want nothing", sample, got)
		case stays && (len(got) != len(sample) || string(got[offUnchanged:]) != sample[offUnchanged:]):
			s.Fatalf("after Expire of %q there is %s, want it with ExpiredAt set", sample, shown(got))
		}
		s.invalidate(s.A, "a#2", key)
	}
}

func invalidateMany(s *stores) {
	keys := []string{"product:1", "product:2", "product:3", "product:{1}", "product:absent", "product:4"}
	sub := s.subscribe(s.A, "product")
	for _, k := range keys {
		if k != "product:absent" {
			s.fill(s.A, k, "a#1", s.record("a#1", k))
			sub.next("filled")
		}
	}
	s.expire(s.B, "b#0")
	s.expire(s.B, "b#1", keys...)
	sub.wantEach(driver.Expired, "b#1", keys)
	for _, k := range keys {
		r, err := driver.DecodeRecord(s.get(s.A, k))
		if stays := err == nil && !r.ExpiredAt.IsZero(); stays != (k != "product:absent") {
			s.Fatalf("after Expire of several keys, the value of %q is %s, want it expired, or none if there was none",
				k, shown(s.get(s.A, k)))
		}
	}
	for _, k := range keys {
		s.start(s.A, k, "a#2", long)
	}
	s.invalidate(s.B, "b#2")
	s.invalidate(s.B, "b#3", keys...)
	sub.wantEach(driver.Invalidated, "b#3", keys)
	for _, k := range keys {
		s.wantValue(k, nil)
		s.publish(s.A, k, "a#2", s.record("a#2", k), driver.Rejected)
	}
	sub.wantNoMore(keys[0])
}

// wantEach demands one announcement of kind per key, in any order, because there is no order between keys.
func (sub *subscription) wantEach(kind driver.AnnouncementKind, by string, keys []string) {
	sub.s.Helper()
	missing := make(map[string]bool, len(keys))
	for _, k := range keys {
		missing[k] = true
	}
	for len(missing) > 0 {
		n := sub.next("an announcement of every key")
		if !missing[n.Key] || !sameAnnouncement(n, driver.Announcement{Kind: kind, Key: n.Key, Token: by}) {
			sub.s.Fatalf("the next announcement is %s, want one for each of %q", announcementText(n), keys)
		}
		delete(missing, n.Key)
	}
}
