package refilltest

import (
	"bytes"
	"time"

	"github.com/refill-go/refill"
)

var voidCases = []storeCase{
	{
		"invalidate-clears",
		`Invalidate deletes value, lease and claim: a load that runs can neither be stored nor renewed, and the next one begins
at once. If the lease stays, all wait for a load that will be refused (V1); if the claim stays, what was read before
the change is served as fresh for a whole TTL (G2).`,
		invalidateClears,
	},
	{
		"expire-voids-loads",
		`Expire voids lease and claim exactly as Invalidate does, only the value stays. If the claim stays, a load that read the old
state is stored as fresh after Expire has returned (V4); if the lease stays, the key waits for that load.`,
		expireVoidsLoads,
	},
	{
		"void-ends-back-off",
		`Invalidate and Expire end a back-off: after a change there is something new to load (G6).`,
		voidEndsBackOff,
	},
	{
		"expire-marks",
		`Expire marks the value by the store's clock, once, and changes nothing else of it. A second Expire that moved the mark
would lengthen the life of a stale value; a changed byte makes the record a miss, so that nothing stale is left to serve.`,
		expireMarks,
	},
	{
		"expire-foreign",
		`Expire deletes what it cannot mark, exactly where refill.ExpireRecord says so. Foreign bytes that stay would be
taken for the value as it was; a script that trips over short ones breaks every Expire of the key.`,
		expireForeign,
	},
	{
		"void-many",
		`Invalidate and Expire take several keys at once, absent ones and none included, and announce each key. On a cluster
the keys live on several nodes: one that is forgotten is served stale.`,
		voidMany,
	},
}

func invalidateClears(s *stores) {
	s.fill(s.A, key, "a#1", s.record("a#1", "v1"))
	s.begin(s.A, key, "a#2", long)
	s.invalidate(s.B, "b#1", key)
	s.holds(key, nil)
	s.renew(s.A, key, "a#2", false)
	s.begin(s.B, key, "b#2", long)
	s.finish(s.A, key, "a#2", s.record("a#2", "old"), refill.PublishRefused)
	s.holds(key, nil)
	s.alive(s.B, key, "b#2")
	s.finish(s.B, key, "b#2", s.record("b#2", "new"), refill.PublishStored)
	s.holds(key, s.record("b#2", "new"))

	s.begin(s.A, key, "a#3", long) // nobody comes between
	s.invalidate(s.A, "a#4", key)
	s.finish(s.A, key, "a#3", s.record("a#3", "old"), refill.PublishRefused)
	s.holds(key, nil)
}

func expireVoidsLoads(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	s.begin(s.A, key, "a#2", long)
	s.expire(s.B, "b#1", key)
	s.renew(s.A, key, "a#2", false)
	s.begin(s.B, key, "b#2", long)
	s.finish(s.A, key, "a#2", s.record("a#2", "old"), refill.PublishRefused)
	if got := refill.RecordToken(s.get(s.A, key)); got != "a#1" {
		s.Fatalf("after Expire and a refused publish the value is %q's, want a#1's", got)
	}
	s.alive(s.B, key, "b#2")
	s.finish(s.B, key, "b#2", s.record("b#2", "new"), refill.PublishStored)
	s.holds(key, s.record("b#2", "new"))

	s.begin(s.A, key, "a#3", long) // nobody comes between
	s.expire(s.A, "a#4", key)
	s.finish(s.A, key, "a#3", s.record("a#3", "old"), refill.PublishRefused)

	s.invalidate(s.A, "a#5", key)
	s.begin(s.A, key, "a#6", long) // of an absent value
	s.expire(s.A, "a#7", key)
	s.finish(s.A, key, "a#6", s.record("a#6", "old"), refill.PublishRefused)
	s.holds(key, nil)
	s.begin(s.B, key, "b#3", long)
}

func voidEndsBackOff(s *stores) {
	for _, void := range []func(refill.Store, string, ...string){s.invalidate, s.expire} {
		s.begin(s.A, key, "a#1", long)
		s.fail(s.A, key, "a#1", "boom", long)
		s.backsOff(s.B, key, "boom")
		void(s.B, "b#1", key)
		s.begin(s.A, key, "a#2", long)
		s.release(s.A, key, "a#2")
	}
}

// offChanges is where the bytes of a record begin that Expire leaves alone: behind the magic and expiredAt.
const offChanges = 11

func expireMarks(s *stores) {
	v1 := s.record("a#1", "v1")
	asked := time.Now()
	s.fill(s.A, key, "a#1", v1)
	s.expire(s.A, "a#2", key)
	now, slack := s.A.Now(), time.Since(asked)+100*time.Millisecond
	got := s.get(s.B, key)
	r, err := refill.DecodeRecord(got)
	if err != nil || !bytes.Equal(got[offChanges:], v1[offChanges:]) {
		s.Fatalf("after Expire the record is %s (%v), want %s with ExpiredAt set", shown(got), err, shown(v1))
	}
	if r.ExpiredAt.Sub(now).Abs() > slack {
		s.Fatalf("ExpiredAt = %v, by the store's clock it is %v, want at most %v between", r.ExpiredAt, now, slack)
	}
	s.pass(10 * time.Millisecond)
	s.expire(s.B, "b#1", key)
	s.holds(key, got)
}

func expireForeign(s *stores) {
	whole := string(s.record("a#1", "x"))
	samples := append(s.notRecords(), whole, whole[:61], whole[:62], "RF1"+string(make([]byte, 58)), "RF1"+string(make([]byte, 59)),
		"RF2"+whole[3:], "rf1"+whole[3:], " "+whole)
	for _, sample := range samples {
		s.begin(s.A, key, "a#1", long)
		s.finish(s.A, key, "a#1", []byte(sample), refill.PublishStored)
		stays := refill.ExpireRecord([]byte(sample), time.Unix(1, 0))
		s.expire(s.B, "b#1", key)
		got := s.get(s.A, key)
		switch {
		case !stays && got != nil:
			s.Fatalf("after Expire of %q, no record, there is %q, want nothing", sample, got)
		case stays && (len(got) != len(sample) || string(got[offChanges:]) != sample[offChanges:]):
			s.Fatalf("after Expire of %q there is %s, want it marked", sample, shown(got))
		}
		s.invalidate(s.A, "a#2", key)
	}
}

func voidMany(s *stores) {
	keys := []string{"product:1", "product:2", "product:3", "product:{1}", "product:absent", "product:4"}
	e := s.listen(s.A, "product")
	for _, k := range keys {
		if k != "product:absent" {
			s.fill(s.A, k, "a#1", s.record("a#1", k))
			e.next("filled")
		}
	}
	s.expire(s.B, "b#0")
	s.expire(s.B, "b#1", keys...)
	e.hearsEach(refill.NoteExpired, "b#1", keys)
	for _, k := range keys {
		r, err := refill.DecodeRecord(s.get(s.A, k))
		if stays := err == nil && !r.ExpiredAt.IsZero(); stays != (k != "product:absent") {
			s.Fatalf("after Expire of several keys, %q holds %s", k, shown(s.get(s.A, k)))
		}
	}
	for _, k := range keys {
		s.begin(s.A, k, "a#2", long)
	}
	s.invalidate(s.B, "b#2")
	s.invalidate(s.B, "b#3", keys...)
	e.hearsEach(refill.NoteInvalidated, "b#3", keys)
	for _, k := range keys {
		s.holds(k, nil)
		s.finish(s.A, k, "a#2", s.record("a#2", k), refill.PublishRefused)
	}
	e.heardAll(keys[0])
}

// hearsEach demands one note of kind per key, in any order: between keys there is none.
func (e *ear) hearsEach(kind refill.NoteKind, by string, keys []string) {
	e.s.Helper()
	missing := make(map[string]bool, len(keys))
	for _, k := range keys {
		missing[k] = true
	}
	for len(missing) > 0 {
		n := e.next("an announcement of every key")
		if !missing[n.Key] || !sameNote(n, refill.Note{Kind: kind, Key: n.Key, Token: by}) {
			e.s.Fatalf("heard %s, want one note about each of %q", noteText(n), keys)
		}
		delete(missing, n.Key)
	}
}
