package refilltest

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

// StoreHarness tells [TestStore] how to make what it tests.
type StoreHarness struct {
	// World makes an empty place and two nodes over it. It is called once per case, inside the bubble if there is one,
	// and leaves what is to be closed to t.Cleanup. Worlds of different cases must not share keys.
	World func(t testing.TB) StoreWorld

	// Bubble runs each case inside testing/synctest: everything that World makes lives in the bubble, and goroutines
	// left behind are failures. Right for a Store without a network, or over a fake one.
	Bubble bool

	// Short is the lease that the cases about its end wait for, some thirty of them. A handful of calls has to fit into it.
	// Default 400 ms.
	Short time.Duration
}

// StoreWorld is one place that two nodes share.
type StoreWorld struct {
	// A and B are two nodes: Stores with connections of their own over the same place. Where a Store has none they may be
	// the same one.
	A, B refill.Store

	// Pass lets time pass for the server. Nil is time.Sleep, right for a real server and within a bubble; miniredis
	// wants its FastForward.
	Pass func(d time.Duration)

	// Plant, where the place allows it, makes data the lease, claim or mark of key, one that never ends. As a mark, data is
	// foreign bytes.
	Plant func(key string, part Part, data string)

	// Garble, where the place allows it, puts something of a foreign type there (in Redis: a list), so that it cannot even
	// be read.
	Garble func(key string, part Part)

	// Silence, where the place allows it, makes the server keep its connections and answer nothing (in Redis: CLIENT PAUSE,
	// SIGSTOP, a proxy), until it is called with false.
	Silence func(silent bool)

	// Break, where the place allows it, cuts the connections of all subscriptions; they can be made again at once (in
	// Redis: CLIENT KILL TYPE pubsub).
	Break func()

	// Full, where the place allows it, makes the store refuse whatever would need room (in Redis: CONFIG SET maxmemory 1
	// with noeviction), until it is called with false.
	Full func(full bool)
}

// Part is one of the three things that stand under a key, or the mark of a tag.
type Part uint8

// The parts of a key. With PartMark the key is a tag.
const (
	PartValue Part = iota
	PartLease
	PartClaim
	PartMark
)

// TestStore runs the suite: one subtest per rule of [refill.Store].
func TestStore(t *testing.T, h StoreHarness) {
	for _, c := range storeCases() {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, h.Bubble, func(t testing.TB) { c.test(t, h) })
		})
	}
}

type storeCase struct {
	name        string
	explanation string
	run         func(s *stores)
}

func storeCases() []storeCase {
	return slices.Concat(valueCases, beginCases, leaseCases, renewCases, publishCases, quietCases, failCases, releaseCases,
		awaitedCases, voidCases, tagCases, noteCases, raceCases, hookCases)
}

func (c storeCase) test(t testing.TB, h StoreHarness) {
	explain(t, c.explanation)
	w := h.World(t)
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	t.Cleanup(cancel)
	c.run(&stores{TB: t, StoreWorld: w, clock: newClock(h.Short, w.Pass), ctx: ctx})
}

// stores is the world of a case, with the words in which cases are told. A word that does not come true ends the case.
type stores struct {
	testing.TB
	StoreWorld
	clock
	ctx context.Context
}

// key is what most cases are about.
const key = "product:42"

// bid is what token says of its fill when it has seen what stands there.
func (s *stores) bid(st refill.Store, key, token string, ttl time.Duration, how refill.Ask) refill.Bid {
	s.Helper()
	seen := refill.RecordToken(s.get(st, key))
	return refill.Bid{Key: key, Token: token, Seen: seen, LeaseTTL: ttl, ClaimTTL: long, Ask: how}
}

// ask puts in a bid.
func (s *stores) ask(st refill.Store, b refill.Bid) refill.Begun {
	s.Helper()
	r, err := st.Begin(s.ctx, b)
	s.ok(err, "Begin(%q, %s)", b.Key, b.Token)
	return r
}

// take puts in a bid that has to be taken.
func (s *stores) take(st refill.Store, b refill.Bid) refill.Begun {
	s.Helper()
	r := s.ask(st, b)
	if r.State != refill.BeginTaken {
		s.Fatalf("Begin(%q, %s), Ask %d, with %q seen = %s, want it taken: the lease is free and no other record is there",
			b.Key, b.Token, b.Ask, b.Seen, begunText(r))
	}
	return r
}

// try asks for lease and claim.
func (s *stores) try(st refill.Store, key, token string, ttl time.Duration, how refill.Ask) refill.Begun {
	s.Helper()
	return s.ask(st, s.bid(st, key, token, ttl, how))
}

// begin takes lease and claim, which have to be free: token's load may begin.
func (s *stores) begin(st refill.Store, key, token string, ttl time.Duration) refill.Begun {
	s.Helper()
	return s.take(st, s.bid(st, key, token, ttl, refill.AskLeft))
}

// lose finds the lease in the hands of holder, without waiting for it.
func (s *stores) lose(st refill.Store, key, token, holder string) {
	s.Helper()
	s.heldBy(s.try(st, key, token, long, refill.AskOnce), holder)
}

// await finds the lease in the hands of holder, and waits for it: the store has noted so.
func (s *stores) await(st refill.Store, key, token, holder string) refill.Begun {
	s.Helper()
	r := s.try(st, key, token, long, refill.AskLeft)
	s.heldBy(r, holder)
	return r
}

func (s *stores) heldBy(r refill.Begun, holder string) {
	s.Helper()
	if r.State != refill.BeginHeld || r.Holder != holder || r.Failure != "" {
		s.Fatalf("Begin = %s, want it held by %s", begunText(r), holder)
	}
}

// finish publishes data as token's and demands what becomes of it.
func (s *stores) finish(st refill.Store, key, token string, data []byte, want refill.Published) {
	s.Helper()
	p := refill.Publication{Key: key, Token: token, Record: data, Keep: long}
	got, err := st.Publish(s.ctx, p)
	s.ok(err, "Publish(%q, %s)", key, token)
	if got != want {
		s.Fatalf("Publish(%q, %s) = %s, want %s", key, token, publishedName(got), publishedName(want))
	}
}

// fill makes data the value of key.
func (s *stores) fill(st refill.Store, key, token string, data []byte) {
	s.Helper()
	s.begin(st, key, token, long)
	s.finish(st, key, token, data, refill.PublishStored)
}

// fail ends token's fill without a result.
func (s *stores) fail(st refill.Store, key, token, failure string, ttl time.Duration) {
	s.Helper()
	s.ok(st.Fail(s.ctx, key, token, failure, ttl), "Fail(%q, %s)", key, token)
}

func (s *stores) release(st refill.Store, key, token string) {
	s.Helper()
	s.ok(st.Release(s.ctx, key, token), "Release(%q, %s)", key, token)
}

func (s *stores) invalidate(st refill.Store, by string, keys ...string) {
	s.Helper()
	s.ok(st.Invalidate(s.ctx, by, keys...), "Invalidate(%q)", keys)
}

func (s *stores) expire(st refill.Store, by string, keys ...string) {
	s.Helper()
	s.ok(st.Expire(s.ctx, by, keys...), "Expire(%q)", keys)
}

// renew renews for long and demands the answer.
func (s *stores) renew(st refill.Store, key, token string, want bool) {
	s.Helper()
	mine, err := st.Renew(s.ctx, key, token, long)
	s.ok(err, "Renew(%q, %s)", key, token)
	if mine != want {
		s.Fatalf("Renew(%q, %s) = %v, want %v", key, token, mine, want)
	}
}

func (s *stores) get(st refill.Store, key string) []byte {
	s.Helper()
	b, err := st.Get(s.ctx, key)
	s.ok(err, "Get(%q)", key)
	return b
}

// holds demands the value of key, as both nodes see it; nil is none.
func (s *stores) holds(key string, want []byte) {
	s.Helper()
	for _, st := range []refill.Store{s.A, s.B} {
		got := s.get(st, key)
		if !bytes.Equal(got, want) || (got == nil) != (want == nil) {
			s.Fatalf("Get(%q) = %s, want %s", key, shown(got), shown(want))
		}
	}
}

// ended waits for the short lease of key to run out by itself; token takes it then.
func (s *stores) ended(st refill.Store, key, token string) {
	s.Helper()
	if !s.ends(func() bool { return s.try(st, key, token, long, refill.AskLeft).State == refill.BeginTaken }) {
		s.Fatalf("Begin(%q, %s) is not taken although the lease of %v is long over", key, token, s.short)
	}
}

// overtaken makes this of key: the lease of slow ran out, and next has taken lease and claim.
func (s *stores) overtaken(key, slow, next string) {
	s.Helper()
	s.begin(s.A, key, slow, s.short)
	s.ended(s.B, key, next)
}

// lapsed makes this of key: the lease of token ran out while its claim stands.
func (s *stores) lapsed(key, token string) {
	s.Helper()
	s.begin(s.A, key, token, s.short)
	s.lapses(key, token)
}

// lapses lets the short lease of token run out. Nobody can ask for it without taking it, so this takes as long as ends may.
func (s *stores) lapses(key, token string) {
	s.Helper()
	s.pass(3 * s.short)
	s.renew(s.A, key, token, false)
}

// unclaimed makes this of key: the claim of token ran out while its lease stands.
func (s *stores) unclaimed(key, token string) {
	s.Helper()
	b := s.bid(s.A, key, token, long, refill.AskLeft)
	b.ClaimTTL = s.short
	s.take(s.A, b)
	over := func() bool {
		mine, err := s.A.Renew(s.ctx, key, token, long)
		s.ok(err, "Renew(%q, %s)", key, token)
		return !mine
	}
	if !s.ends(over) {
		s.Fatalf("Renew(%q, %s) goes on although the claim of %v is long over", key, token, s.short)
	}
}

// alive demands that token's fill goes on: lease and claim are both its own.
func (s *stores) alive(st refill.Store, key, token string) {
	s.Helper()
	s.renew(st, key, token, true)
}

func (s *stores) ok(err error, call string, args ...any) {
	s.Helper()
	if err != nil {
		s.Fatalf(call+": %v", append(args, err)...)
	}
}

// record is a record as a Loader might have made it.
func (s *stores) record(token, payload string) []byte {
	s.Helper()
	began := time.Unix(1_700_000_000, 0)
	r := refill.Record{
		Token: token, LoadBegan: began, FreshUntil: began.Add(time.Hour), StaleFor: time.Hour,
		Kind: "raw string", Payload: []byte(payload),
	}
	b, err := r.Append(nil)
	s.ok(err, "Record.Append")
	return b
}

func begunText(r refill.Begun) string {
	return fmt.Sprintf("%s{Now: %v, Record: %s, Holder: %q, Failure: %q, Left: %v}",
		nameOf(int(r.State), "BeginTaken", "BeginOther", "BeginHeld"), r.Now, shown(r.Record), r.Holder, r.Failure, r.Left)
}

func publishedName(p refill.Published) string {
	return nameOf(int(p), "PublishStored", "PublishRefused", "PublishNoRoom")
}

func nameOf(i int, names ...string) string {
	if i < len(names) {
		return names[i]
	}
	return "unknown"
}
