package refilltest

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"strings"
	"time"

	"github.com/refill-go/refill/driver"
)

var valueCases = []storeCase{
	{
		"check",
		`Check returns what is wrong with the configuration of the store. A store under test must have nothing wrong. In
production refill.New reports the error.`,
		func(s *stores) {
			s.ok(s.A.Check(), "Check of A")
			s.ok(s.B.Check(), "Check of B")
		},
	},
	{
		"get-absent",
		`Get returns nil and no error if there is no record. A lease or a back-off under the key is not a record. If it were
returned as one, a key that is being loaded would be served or counted as a bad record.`,
		getAbsent,
	},
	{
		"get-bytes",
		`Get returns the record byte for byte, on every node, and neither side keeps the slice of the other. A store that
treats records as text loses those of binary codecs. A store that shares memory corrupts values under load.`,
		getBytes,
	},
	{
		"get-large",
		`A record of a megabyte is handled like any other. If the store truncates it, every Get of the key is a miss.`,
		getLarge,
	},
	{
		"getmany-order",
		`GetMany returns the records in the order of the keys, nil for a key without a record, and the same record twice for a
key that is listed twice. If one is left out, all that follow shift, and each key is served the value of another.`,
		getManyOrder,
	},
	{
		"getmany-foreign",
		`GetMany returns foreign bytes unchanged, as Get does, and nil for a value of a foreign type. If a foreign type is an
error, one damaged key makes every key of the same call a miss.`,
		getManyForeign,
	},
	{
		"keep-ends",
		`The record is gone after Keep, so that nothing is left behind (G8), but not before: callers that waited for a load
longer than TTL must still find it. Expire does not change that end. A store that drops it keeps the record for ever.`,
		keepEnds,
	},
	{
		"keys-apart",
		`Lease, claim and value of one key are never those of another key, whatever characters the keys contain. Users choose
the keys. If "42" with a suffix is the same as "42:lease", one customer waits for the value of another, or gets it.`,
		keysApart,
	},
	{
		"locks-apart",
		`If one object implements Store and Locks, a lock of a key and the refill lease of the same key are independent.
Otherwise a user who locks an order stops the refill of its cache entry.`,
		locksApart,
	},
}

func getAbsent(s *stores) {
	s.wantValue(key, nil)
	s.start(s.A, key, "a#1", long)
	s.wantValue(key, nil)
	s.fail(s.A, key, "a#1", "boom", long)
	s.wantValue(key, nil)
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
		s.start(s.A, key, token, long)
		s.publish(s.A, key, token, sent, driver.Stored)
		if !bytes.Equal(sent, data) {
			s.Fatalf("Publish changed the record that it was given: %s", shown(sent))
		}
		clear(sent) // after Publish, the slice belongs to the caller again
		s.wantValue(key, data)
		clear(s.get(s.A, key))
		s.wantValue(key, data)
		s.invalidate(s.A, "a#9", key)
	}
}

func getLarge(s *stores) {
	payload := make([]byte, 1<<20)
	rand.Read(payload)
	data := s.record("a#1", string(payload))
	s.fill(s.A, key, "a#1", data)
	s.wantValue(key, data)
	req := driver.AcquireRequest{Key: key, Token: "b#1", LeaseTTL: long, ClaimTTL: long, Mode: driver.Wait}
	s.wantChanged(s.B, req, data)
	s.expire(s.B, "b#2", key)
	r, err := driver.DecodeRecord(s.get(s.A, key))
	s.ok(err, "DecodeRecord of a large record that was expired")
	if !bytes.Equal(r.Payload, payload) || r.ExpiredAt.IsZero() {
		s.Fatalf("after Expire a large record has ExpiredAt %v and payload %s", r.ExpiredAt, shown(r.Payload))
	}
}

func getManyOrder(s *stores) {
	s.wantMany(nil)
	v := map[string][]byte{}
	for _, k := range []string{"product:3", "product:1", "product:{1}", "product:2"} {
		v[k] = s.record("a#1", k)
		s.fill(s.A, k, "a#1", v[k])
	}
	s.start(s.A, "product:0", "a#2", long)
	s.wantMany(v, "product:2")
	s.wantMany(v, "product:0")
	s.wantMany(v, "product:2", "product:0", "product:{1}", "product:1", "product:absent", "product:3", "product:1",
		"product:0")
	s.invalidate(s.A, "a#3", "product:1")
	delete(v, "product:1")
	s.wantMany(v, "product:3", "product:1", "product:2")
}

func getManyForeign(s *stores) {
	v, keys := map[string][]byte{}, []string{}
	for i, sample := range s.notRecords() {
		k := fmt.Sprintf("product:%d", i)
		s.start(s.A, k, "a#1", long)
		s.publish(s.A, k, "a#1", []byte(sample), driver.Stored)
		v[k], keys = []byte(sample), append(keys, k)
	}
	s.wantMany(v, keys...)
	if s.Garble != nil {
		s.Garble(key, PartValue)
		s.wantMany(v, append([]string{key}, keys...)...)
	}
}

// wantMany demands the values of keys on both nodes.
func (s *stores) wantMany(want map[string][]byte, keys ...string) {
	s.Helper()
	for _, st := range []driver.Store{s.A, s.B} {
		records, err := st.GetMany(s.ctx, keys...)
		s.ok(err, "GetMany(%q)", keys)
		if len(records) != len(keys) {
			s.Fatalf("GetMany(%q) returns %d records for %d keys", keys, len(records), len(keys))
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
		s.start(s.A, k, "a#1", long)
		_, err := s.A.Publish(s.ctx, driver.PublishRequest{Key: k, Token: "a#1", Record: data, Keep: keep})
		s.ok(err, "Publish")
	}
	s.expire(s.A, "a#2", expired)
	s.pass(keep / 4)
	for _, k := range []string{key, expired} {
		if s.get(s.B, k) == nil {
			s.Fatalf("the record under %q is gone after %v, although Keep is %v", k, keep/4, keep)
		}
	}
	s.pass(keep - keep/4 - s.short)
	gone := func() bool { return s.get(s.B, key) == nil && s.get(s.B, expired) == nil }
	if !s.runOut(gone) {
		s.Fatalf("after Keep of %v there is still: the published record %s, the expired record %s, want nothing",
			keep, shown(s.get(s.B, key)), shown(s.get(s.B, expired)))
	}
}

// oddKeys returns different keys. Some of them become equal in a store that concatenates parts, quotes keys, or
// matches patterns.
func oddKeys() []string {
	kilo := strings.Repeat("k", 1<<10)
	keys := []string{
		"42", "42:lease", "42/lease", "42.lease", "42-lease", "42:claim", "42/claim", "42:value", "42:lock", "42:fence",
		"42:l", "42:c", "42:v", "lease:42", "claim:42", "42:", ":42", "42::", "{42}", "42}", "{42", "{}", "}{", "{", "}",
		"{a}{b}", "a", "b", "a b", " a", "a ", "a\nb", "a\r\nb", "a\n", "a\tb", "a\x00b", "a\x00", "a:b", "a/b", "a//b",
		"../a", "a.b", "ключ", "клю", "\xff\xfe", "\xff", "é", "e\u0301", "*", "?", "[4]2", "%34%32", "4%32", `"42"`,
		`'42'`, `\x34\x32`, "!42", "#42", "42#1", "-1", "042", "42.0", "A", kilo, kilo + "k", kilo + ":lease",
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
		s.start(s.A, k, token(i), long)
	}
	for i, k := range keys {
		s.lose(s.B, k, "b#1", token(i))
		s.wantValue(k, nil)
	}
	for i, k := range keys {
		s.publish(s.A, k, token(i), s.record(token(i), k), driver.Stored)
	}
	for i, k := range keys {
		s.wantValue(k, s.record(token(i), k))
		s.start(s.B, k, token(i), long)
	}
	for i, k := range keys {
		s.invalidate(s.A, "a#0", k)
		s.wantValue(k, nil)
		if i+1 < len(keys) {
			s.wantValue(keys[i+1], s.record(token(i+1), keys[i+1]))
			s.lose(s.A, keys[i+1], "a#1x", token(i+1))
		}
	}
}

func locksApart(s *stores) {
	d, ok := s.A.(driver.Locks)
	if !ok {
		s.Skipf("%T does not implement driver.Locks", s.A)
	}
	lock, err := d.TryLock(s.ctx, key, "a#1", long)
	s.ok(err, "TryLock")
	if !lock.Won {
		s.Fatalf("TryLock of a free lock = %+v, want Won", lock)
	}
	s.fill(s.B, key, "b#1", s.record("b#1", "x"))
	s.start(s.B, key, "b#2", long)
	s.invalidate(s.A, "a#2", key)
	s.start(s.B, key, "b#3", long)
	mine, err := d.Extend(s.ctx, key, "a#1", long)
	if s.ok(err, "Extend"); !mine {
		s.Fatalf("the lock is gone: a fill or an Invalidate of the same key removed it")
	}
	_, err = d.Unlock(s.ctx, key, "a#1")
	s.ok(err, "Unlock")
	s.wantRunning(s.B, key, "b#3")
}
