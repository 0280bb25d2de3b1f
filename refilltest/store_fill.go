package refilltest

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"strings"
	"time"

	"github.com/refill-go/refill"
)

var valueCases = []storeCase{
	{
		"check",
		`Check says what is wrong with the store as it was set up: nothing, or the suite has nothing to test.`,
		func(s *stores) {
			s.ok(s.A.Check(), "Check of A")
			s.ok(s.B.Check(), "Check of B")
		},
	},
	{
		"get-absent",
		`Get returns nil where there is no record; that is no error. A lease or a back-off under the key is not a record.`,
		getAbsent,
	},
	{
		"get-bytes",
		`Get returns the record byte for byte, on every node, and neither side keeps the other's slice. A store that
treats records as text loses those of other codecs; one that shares memory corrupts values under load.`,
		getBytes,
	},
	{
		"get-large",
		`A record of a megabyte is a record like any other.`,
		getLarge,
	},
	{
		"getmany-order",
		`GetMany gives the records in the order of the keys, nil where there is none, and the same one twice for a key that is
there twice. One that is left out shifts all that follow: each key is served another's value.`,
		getManyOrder,
	},
	{
		"getmany-foreign",
		`GetMany returns foreign bytes as they are, as Get does, and takes a value of a foreign type for none. Where it is an
error, one key that somebody spoilt makes a miss of all that are asked for with it.`,
		getManyForeign,
	},
	{
		"keep-ends",
		`The record is gone after Keep, so that nothing is left behind (G8), and not before: those who waited for a load longer
than TTL still have to find it (V9). Expire does not change that; a mark that drops the end keeps the record for ever.`,
		keepEnds,
	},
	{
		"keys-apart",
		`Lease, claim and value of one key are never those of another, whatever characters the keys hold. Keys are made of what
users type: where "42" with a suffix meets "42:lease", one customer waits for, or gets, what is another's.`,
		keysApart,
	},
	{
		"locks-apart",
		`Where one object is a Store and a LockDriver, a lock of a key and the refill lease of the same key are two things: a
user who locks an order would stop its cache from being refilled.`,
		locksApart,
	},
}

func getAbsent(s *stores) {
	s.holds(key, nil)
	s.begin(s.A, key, "a#1", long)
	s.holds(key, nil)
	s.fail(s.A, key, "a#1", "boom", long)
	s.holds(key, nil)
}

func getBytes(s *stores) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	for i, data := range [][]byte{
		s.record("a#1", "plain"), s.record("a#2", string(all)), s.record("a#3", ""), all, {0}, {0, 0, 0}, []byte("\r\n"),
	} {
		token := fmt.Sprintf("a#%d", i)
		sent := bytes.Clone(data)
		s.begin(s.A, key, token, long)
		s.finish(s.A, key, token, sent, refill.PublishStored)
		if !bytes.Equal(sent, data) {
			s.Fatalf("Publish changed the record that it was given: %s", shown(sent))
		}
		clear(sent) // the caller's again
		s.holds(key, data)
		clear(s.get(s.A, key))
		s.holds(key, data)
		s.invalidate(s.A, "a#9", key)
	}
}

func getLarge(s *stores) {
	payload := make([]byte, 1<<20)
	rand.Read(payload)
	data := s.record("a#1", string(payload))
	s.fill(s.A, key, "a#1", data)
	s.holds(key, data)
	s.finds(s.B, refill.Bid{Key: key, Token: "b#1", LeaseTTL: long, ClaimTTL: long, Ask: refill.AskLeft}, data)
	s.expire(s.B, "b#2", key)
	r, err := refill.DecodeRecord(s.get(s.A, key))
	s.ok(err, "DecodeRecord of a large record that was expired")
	if !bytes.Equal(r.Payload, payload) || r.ExpiredAt.IsZero() {
		s.Fatalf("a large record that was expired has ExpiredAt %v and payload %s", r.ExpiredAt, shown(r.Payload))
	}
}

func getManyOrder(s *stores) {
	s.getMany(nil)
	v := map[string][]byte{}
	for _, k := range []string{"product:3", "product:1", "product:{1}", "product:2"} {
		v[k] = s.record("a#1", k)
		s.fill(s.A, k, "a#1", v[k])
	}
	s.begin(s.A, "product:0", "a#2", long)
	s.getMany(v, "product:2")
	s.getMany(v, "product:0")
	s.getMany(v, "product:2", "product:0", "product:{1}", "product:1", "product:absent", "product:3", "product:1", "product:0")
	s.invalidate(s.A, "a#3", "product:1")
	delete(v, "product:1")
	s.getMany(v, "product:3", "product:1", "product:2")
}

func getManyForeign(s *stores) {
	v, keys := map[string][]byte{}, []string{}
	for i, sample := range s.notRecords() {
		k := fmt.Sprintf("product:%d", i)
		s.begin(s.A, k, "a#1", long)
		s.finish(s.A, k, "a#1", []byte(sample), refill.PublishStored)
		v[k], keys = []byte(sample), append(keys, k)
	}
	s.getMany(v, keys...)
	if s.Garble != nil {
		s.Garble(key, PartValue)
		s.getMany(v, append([]string{key}, keys...)...)
	}
}

// getMany demands the values of keys, as both nodes see them.
func (s *stores) getMany(want map[string][]byte, keys ...string) {
	s.Helper()
	for _, st := range []refill.Store{s.A, s.B} {
		records, err := st.GetMany(s.ctx, keys...)
		s.ok(err, "GetMany(%q)", keys)
		if len(records) != len(keys) {
			s.Fatalf("GetMany(%q) gives %d records for %d keys", keys, len(records), len(keys))
		}
		for i, got := range records {
			if w := want[keys[i]]; !bytes.Equal(got, w) || (got == nil) != (w == nil) {
				s.Fatalf("GetMany(%q): record %d, of %q, is %s, want %s", keys, i, keys[i], shown(got), shown(w))
			}
		}
	}
}

func keepEnds(s *stores) {
	const expired = "product:43"
	keep := max(time.Second, s.short)
	for _, k := range []string{key, expired} {
		data := s.record("a#1", "x")
		s.begin(s.A, k, "a#1", long)
		_, err := s.A.Publish(s.ctx, refill.Publication{Key: k, Token: "a#1", Record: data, Keep: keep})
		s.ok(err, "Publish")
	}
	s.expire(s.A, "a#2", expired)
	s.pass(keep / 4)
	for _, k := range []string{key, expired} {
		if s.get(s.B, k) == nil {
			s.Fatalf("the record under %q is gone after %v of the %v to keep it", k, keep/4, keep)
		}
	}
	s.pass(keep - keep/4 - s.short)
	gone := func() bool { return s.get(s.B, key) == nil && s.get(s.B, expired) == nil }
	if !s.ends(gone) {
		s.Fatalf("kept beyond %v: the record as published: %s; the one that was expired: %s",
			keep, shown(s.get(s.B, key)), shown(s.get(s.B, expired)))
	}
}

// oddKeys are keys that meet in a store which glues parts together, quotes, or matches patterns.
func oddKeys() []string {
	kilo := strings.Repeat("k", 1<<10)
	keys := []string{
		"42", "42:lease", "42/lease", "42.lease", "42-lease", "42:claim", "42/claim", "42:value", "42:lock", "42:fence", "42:l",
		"42:c", "42:v", "lease:42", "claim:42", "42:", ":42", "42::", "{42}", "42}", "{42", "{}", "}{", "{", "}", "{a}{b}",
		"a", "b", "a b", " a", "a ", "a\nb", "a\r\nb", "a\n", "a\tb", "a\x00b", "a\x00", "a:b", "a/b", "a//b", "../a", "a.b",
		"ключ", "клю", "\xff\xfe", "\xff", "é", "e\u0301", "*", "?", "[4]2", "%34%32", "4%32", `"42"`, `'42'`, `\x34\x32`, "!42", "#42",
		"42#1", "-1", "042", "42.0", "A", kilo, kilo + "k", kilo + ":lease",
	}
	for i, k := range keys {
		keys[i] = "product:" + k
	}
	return append(keys, "product.b:42", "produc:t:42", "product-:42", "Product:42", "a:b", "a.b:c")
}

func keysApart(s *stores) {
	keys := oddKeys()
	token := func(i int) string { return fmt.Sprintf("a#%d", i) }
	for i, k := range keys {
		s.begin(s.A, k, token(i), long)
	}
	for i, k := range keys {
		s.lose(s.B, k, "b#1", token(i))
		s.holds(k, nil)
	}
	for i, k := range keys {
		s.finish(s.A, k, token(i), s.record(token(i), k), refill.PublishStored)
	}
	for i, k := range keys {
		s.holds(k, s.record(token(i), k))
		s.begin(s.B, k, token(i), long)
	}
	for i, k := range keys {
		s.invalidate(s.A, "a#0", k)
		s.holds(k, nil)
		if i+1 < len(keys) {
			s.holds(keys[i+1], s.record(token(i+1), keys[i+1]))
			s.lose(s.A, keys[i+1], "a#1x", token(i+1))
		}
	}
}

func locksApart(s *stores) {
	d, ok := s.A.(refill.LockDriver)
	if !ok {
		s.Skipf("%T is no LockDriver", s.A)
	}
	lock, err := d.TryLock(s.ctx, key, "a#1", long)
	s.ok(err, "TryLock")
	if !lock.Won {
		s.Fatalf("TryLock of a free lock = %+v", lock)
	}
	s.fill(s.B, key, "b#1", s.record("b#1", "x"))
	s.begin(s.B, key, "b#2", long)
	s.invalidate(s.A, "a#2", key)
	s.begin(s.B, key, "b#3", long)
	mine, err := d.Extend(s.ctx, key, "a#1", long)
	if s.ok(err, "Extend"); !mine {
		s.Fatalf("the lock is gone: a fill or an Invalidate of the same key took it")
	}
	_, err = d.Unlock(s.ctx, key, "a#1")
	s.ok(err, "Unlock")
	s.alive(s.B, key, "b#3")
}

var publishCases = []storeCase{
	{
		"publish-needs-claim",
		`Publish stores nothing without the token's claim, and still frees the token's own lease and announces released. A lease
that stays behind is slept out by every node with nobody loading; one freed in silence by all who wait (V2).`,
		publishNeedsClaim,
	},
	{
		"publish-frees",
		`Publish frees lease and claim in the act that stores. A lease that stays lets the next refresh wait for nobody.`,
		publishFrees,
	},
	{
		"publish-repeated",
		`A Publish repeated after its answer was lost is PublishStored and changes nothing, until the record is gone. Otherwise a
fill that went well is taken for one that was invalidated: its value is not kept, and an operator is told of a race. A
claim that stays would let it be stored twice.`,
		publishRepeated,
	},
	{
		"publish-refused",
		`A refused publish leaves everything of the others alone: their lease, their claim, their value, and it is silent if it
had nothing to free. Otherwise the holder that was overtaken frees the lease of the one that overtook it.`,
		publishRefused,
	},
}

func publishNeedsClaim(s *stores) {
	e := s.listen(s.B, "product")
	s.finish(s.A, key, "a#1", s.record("a#1", "x"), refill.PublishRefused) // nothing is there
	s.unclaimed(key, "a#2")
	s.finish(s.A, key, "a#2", s.record("a#2", "x"), refill.PublishRefused) // a lease only
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#2"})
	s.holds(key, nil)
	s.begin(s.B, key, "b#1", long)
	e.heardAll(key)
}

func publishFrees(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	e := s.listen(s.B, "product")
	s.begin(s.B, key, "b#1", long)
	s.lose(s.A, key, "a#2", "b#1")
	s.release(s.B, key, "b#1")
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "b#1"})
	e.heardAll(key)
}

func publishRepeated(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	e := s.listen(s.B, "product")
	s.finish(s.A, key, "a#1", s.record("a#1", "again"), refill.PublishStored)
	s.holds(key, v1)
	s.begin(s.B, key, "b#1", long)
	s.finish(s.A, key, "a#1", s.record("a#1", "again"), refill.PublishStored)
	s.alive(s.B, key, "b#1")
	e.heardAll(key)
	s.invalidate(s.B, "b#2", key)
	s.finish(s.A, key, "a#1", s.record("a#1", "again"), refill.PublishRefused)
	s.holds(key, nil)
}

func publishRefused(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	e := s.listen(s.A, "product")
	s.begin(s.B, key, "b#1", long)
	s.finish(s.A, key, "a#2", s.record("a#2", "x"), refill.PublishRefused)
	s.finish(s.A, key, "b#", s.record("b#", "x"), refill.PublishRefused)
	s.holds(key, v1)
	s.lose(s.A, key, "a#3", "b#1")
	s.alive(s.B, key, "b#1")
	e.heardAll(key)
}

var failCases = []storeCase{
	{
		"fail-backs-off",
		`Fail leaves the failure in the place of the lease: it is held by nobody, with the failure and the time left, for the
failed token as well, and the claim is gone. A failure that is only announced is missed by everybody who asks a moment
later, and each of them loads again from a database that is in trouble (V8).`,
		failBacksOff,
	},
	{
		"fail-text",
		`The failure travels as it is, empty or not, whatever bytes it holds: it is what callers on other nodes are shown.`,
		failText,
	},
	{
		"fail-ends",
		`The back-off ends by itself after ttl, and then the key can be loaded. Otherwise one error is for ever.`,
		failEnds,
	},
	{
		"fail-no-back-off",
		`With ttl 0 Fail leaves nothing and announces failed all the same: those who waited share the error, the next one
loads. A lease that stays would be waited for.`,
		failNoBackOff,
	},
	{
		"fail-not-mine",
		`Fail changes nothing and is silent if neither lease nor claim are the token's. Otherwise a load that was overtaken or
voided stops, with its error, the load that is to replace it (G6).`,
		failNotMine,
	},
	{
		"fail-one-of-two",
		`The claim alone or the lease alone is enough for Fail: a load that outlived its lease has failed all the same, and one
that outlived its claim must not leave its lease.`,
		failOneOfTwo,
	},
	{
		"fail-forced",
		`AskForce passes a back-off, since Refresh is to load now, and never a live holder, since one load at a time is the
promise.`,
		failForced,
	},
	{
		"fail-keeps-value",
		`Fail leaves the value: it is served in place of the error.`,
		failKeepsValue,
	},
}

// backsOff demands a back-off.
func (s *stores) backsOff(st refill.Store, key, failure string) {
	s.Helper()
	for _, how := range []refill.Ask{refill.AskOnce, refill.AskLeft} {
		r := s.try(st, key, "z#1", long, how)
		if r.State != refill.BeginHeld || r.Holder != "" || r.Failure != failure {
			s.Fatalf("Begin during a back-off, Ask %d: %s, want it held with failure %q and without a holder", how, begunText(r), failure)
		}
		if how == refill.AskLeft {
			s.within("Left of the back-off", r.Left, long)
		}
	}
}

func failBacksOff(s *stores) {
	s.begin(s.A, key, "a#1", long)
	s.fail(s.A, key, "a#1", "boom", long)
	s.backsOff(s.A, key, "boom")
	s.backsOff(s.B, key, "boom")
	for _, how := range []refill.Ask{refill.AskOnce, refill.AskLeft} {
		if r := s.try(s.A, key, "a#1", long, how); r.State != refill.BeginHeld {
			s.Fatalf("Begin of the token that failed, Ask %d: %s during its own back-off, want it held", how, begunText(r))
		}
	}
	s.renew(s.A, key, "a#1", false)
	s.finish(s.A, key, "a#1", s.record("a#1", "x"), refill.PublishRefused)
	s.backsOff(s.B, key, "boom")
	s.holds(key, nil)
}

func failText(s *stores) {
	e := s.listen(s.B, "product")
	texts := []string{"", "!", "!boom", "a#1", "line\nline\r\n", "nul\x00nul", "\xff\xfe", "ключ: 'x' \"y\" \\z", strings.Repeat("e", 8<<10)}
	for _, text := range texts {
		s.begin(s.A, key, "a#1", long)
		s.fail(s.A, key, "a#1", text, long)
		s.backsOff(s.B, key, text)
		e.hears(refill.Note{Kind: refill.NoteFailed, Key: key, Token: "a#1", Failure: text})
		e.heardAll(key)
	}
}

func failEnds(s *stores) {
	s.begin(s.A, key, "a#1", long)
	s.fail(s.A, key, "a#1", "boom", s.short)
	if r := s.try(s.B, key, "b#1", long, refill.AskOnce); r.State != refill.BeginHeld {
		s.Fatalf("Begin right after Fail = %s, want the back-off", begunText(r))
	}
	s.ended(s.B, key, "b#1")
	s.alive(s.B, key, "b#1")
}

func failNoBackOff(s *stores) {
	e := s.listen(s.B, "product")
	s.begin(s.A, key, "a#1", long)
	s.fail(s.A, key, "a#1", "boom", 0)
	e.hears(refill.Note{Kind: refill.NoteFailed, Key: key, Token: "a#1", Failure: "boom"})
	s.finish(s.A, key, "a#1", s.record("a#1", "x"), refill.PublishRefused)
	s.begin(s.B, key, "b#1", long)
	e.heardAll(key)
}

func failNotMine(s *stores) {
	e := s.listen(s.B, "product")
	s.fail(s.A, key, "a#1", "boom", long) // nothing is there
	s.begin(s.B, key, "b#1", long)
	s.fail(s.A, key, "a#1", "boom", long)
	s.fail(s.A, key, "a#1", "boom", 0)
	s.lose(s.A, key, "a#2", "b#1")
	s.alive(s.B, key, "b#1")
	e.heardAll(key)
}

func failOneOfTwo(s *stores) {
	const other = "product:43"
	e := s.listen(s.B, "product")
	s.unclaimed(key, "a#1")
	s.fail(s.A, key, "a#1", "no claim", long)
	e.hears(refill.Note{Kind: refill.NoteFailed, Key: key, Token: "a#1", Failure: "no claim"})
	s.backsOff(s.B, key, "no claim")
	e.heardAll(key)

	s.lapsed(other, "a#2")
	s.fail(s.A, other, "a#2", "no lease", long)
	e.hears(refill.Note{Kind: refill.NoteFailed, Key: other, Token: "a#2", Failure: "no lease"})
	s.backsOff(s.B, other, "no lease")
	s.finish(s.A, other, "a#2", s.record("a#2", "x"), refill.PublishRefused)
	e.heardAll(other)
}

func failForced(s *stores) {
	s.begin(s.A, key, "a#1", long)
	s.fail(s.A, key, "a#1", "boom", long)
	if r := s.try(s.B, key, "b#1", long, refill.AskForce); r.State != refill.BeginTaken {
		s.Fatalf("Begin with AskForce during a back-off = %s, want it taken", begunText(r))
	}
	s.heldBy(s.try(s.A, key, "a#2", long, refill.AskForce), "b#1")
	s.alive(s.B, key, "b#1")
	s.finish(s.B, key, "b#1", s.record("b#1", "x"), refill.PublishStored)
}

func failKeepsValue(s *stores) {
	v1 := s.record("a#1", "v1")
	s.fill(s.A, key, "a#1", v1)
	s.begin(s.B, key, "b#1", long)
	s.fail(s.B, key, "b#1", "boom", long)
	s.holds(key, v1)
}

var releaseCases = []storeCase{
	{
		"release-frees",
		`Release frees lease and claim and announces released. Nobody would load, and nobody be woken, until the lease
ends by itself; and a load that was given up could still be stored.`,
		releaseFrees,
	},
	{
		"release-each-own",
		`Release frees lease and claim each only if it is the token's, and is silent if neither is. A release without the owner
check, late by a freeze, frees the lease of the next one, and a third comes in (seeds row 5).`,
		releaseEachOwn,
	},
}

func releaseFrees(s *stores) {
	v1 := s.record("a#0", "v1")
	s.fill(s.A, key, "a#0", v1)
	e := s.listen(s.B, "product")
	for range 2 {
		s.begin(s.A, key, "a#1", long)
		s.release(s.A, key, "a#1")
		e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#1"})
		s.finish(s.A, key, "a#1", s.record("a#1", "x"), refill.PublishRefused)
		s.release(s.A, key, "a#1")
	}
	s.unclaimed(key, "a#2") // a lease only
	s.release(s.A, key, "a#2")
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#2"})
	s.holds(key, v1)
	s.begin(s.B, key, "b#1", long)
	e.heardAll(key)
}

func releaseEachOwn(s *stores) {
	e := s.listen(s.A, "product")
	s.begin(s.B, key, "b#1", long)
	s.release(s.A, key, "a#1")
	s.alive(s.B, key, "b#1")
	s.release(s.B, key, "b#1")
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "b#1"})

	s.lapsed(key, "a#2")
	s.release(s.A, key, "a#2") // the claim only
	e.hears(refill.Note{Kind: refill.NoteReleased, Key: key, Token: "a#2"})
	s.finish(s.A, key, "a#2", s.record("a#2", "x"), refill.PublishRefused)
	s.holds(key, nil)

	s.overtaken(key, "a#3", "b#2")
	s.release(s.A, key, "a#3") // neither
	s.lose(s.A, key, "a#4", "b#2")
	s.alive(s.B, key, "b#2")
	e.heardAll(key)
}
