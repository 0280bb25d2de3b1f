package refilltest

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/refill-go/refill/driver"
)

// StoreHarness tells [TestStore] how to make the stores that it tests.
type StoreHarness struct {
	// World makes an empty place and two nodes that share it. TestStore calls World once per case, inside the bubble if
	// there is one. With t.Cleanup, World closes all that it has opened. Worlds of different cases must not share keys.
	World func(t testing.TB) StoreWorld

	// Bubble runs each case inside testing/synctest. Everything that World makes lives in the bubble, and a goroutine
	// that is left behind fails the case. Use Bubble for a Store without a network, or over a fake network.
	Bubble bool

	// Short is the ttl of a lease whose end a case waits for. Some thirty cases wait for such an end. A few calls must
	// fit into this time. Default 400 ms.
	Short time.Duration
}

// StoreWorld is one place that two nodes share.
type StoreWorld struct {
	// A and B are two nodes: Stores over the same place, each with its own connections. A and B may be one Store if the
	// Store has no connections.
	A, B driver.Store

	// Pass lets time pass for the server. Nil means time.Sleep, which is right for a real server and inside a bubble. For
	// miniredis, use its FastForward.
	Pass func(d time.Duration)

	// Plant sets the lease, the claim or the tag state of key to data, without an end. As a tag state, data is foreign
	// bytes. Nil if the place does not allow this.
	Plant func(key string, part Part, data string)

	// Garble replaces the given part of key by a value of a foreign type, which the store cannot read (in Redis: a
	// list). Nil if the place does not allow this.
	Garble func(key string, part Part)

	// Silence(true) makes the server keep its connections and answer nothing (in Redis: CLIENT PAUSE, SIGSTOP, a proxy).
	// Silence(false) makes the server answer again. Nil if the place does not allow this.
	Silence func(silent bool)

	// Break cuts the connections of all subscriptions (in Redis: CLIENT KILL TYPE pubsub). The store can connect again
	// at once. Nil if the place does not allow this.
	Break func()

	// Full(true) makes the store reject every write that needs room (in Redis: CONFIG SET maxmemory 1 with noeviction).
	// Full(false) makes room again. Nil if the place does not allow this.
	Full func(full bool)
}

// Part is one of the three things that are stored under a key (value, lease, claim), or the state of a tag.
type Part uint8

// The parts of a key. With PartTag the key is a tag.
const (
	PartValue Part = iota
	PartLease
	PartClaim
	PartTag
)

// TestStore runs the suite: one subtest per rule of [driver.Store].
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
	return slices.Concat(valueCases, acquireCases, lookCases, leaseCases, renewCases, publishCases, announceCases,
		failCases, noteCases, releaseCases, awaitedCases, invalidateCases, tagCases, subscribeCases, raceCases, hookCases)
}

func (c storeCase) test(t testing.TB, h StoreHarness) {
	explain(t, c.explanation)
	w := h.World(t)
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	t.Cleanup(cancel)
	c.run(&stores{TB: t, StoreWorld: w, clock: newClock(h.Short, w.Pass), ctx: ctx})
}

// stores is the world of a case. Its methods are the steps that cases consist of. A step that does not do what the case
// wants ends the case.
type stores struct {
	testing.TB
	StoreWorld
	clock
	ctx context.Context
}

// key is the key of most cases.
const key = "product:42"

// request returns the request of a fill that has seen the current record.
func (s *stores) request(
	st driver.Store, key, token string, ttl time.Duration, mode driver.Mode,
) driver.AcquireRequest {
	s.Helper()
	seen := driver.RecordToken(s.get(st, key))
	return driver.AcquireRequest{Key: key, Token: token, Seen: seen, LeaseTTL: ttl, ClaimTTL: long, Mode: mode}
}

func (s *stores) acquire(st driver.Store, req driver.AcquireRequest) driver.AcquireResult {
	s.Helper()
	r, err := st.Acquire(s.ctx, req)
	s.ok(err, "Acquire(%q, %s)", req.Key, req.Token)
	return r
}

// wantAcquired sends a request and demands Acquired.
func (s *stores) wantAcquired(st driver.Store, req driver.AcquireRequest) driver.AcquireResult {
	s.Helper()
	r := s.acquire(st, req)
	if r.State != driver.Acquired || r.Failure != "" {
		s.Fatalf("Acquire(%q, %s), mode %s, with %q seen = %s, want Acquired: the lease is free, the record is the one seen",
			req.Key, req.Token, modeText(req.Mode), req.Seen, acquireText(r))
	}
	return r
}

// acquireKey sends an Acquire of a fill that has seen the current record.
func (s *stores) acquireKey(
	st driver.Store, key, token string, ttl time.Duration, mode driver.Mode,
) driver.AcquireResult {
	s.Helper()
	return s.acquire(st, s.request(st, key, token, ttl, mode))
}

// start starts a fill: it takes lease and claim, which must be free.
func (s *stores) start(st driver.Store, key, token string, ttl time.Duration) driver.AcquireResult {
	s.Helper()
	return s.wantAcquired(st, s.request(st, key, token, ttl, driver.Wait))
}

// lose sends an Acquire for token in mode Try and demands that holder has the lease.
func (s *stores) lose(st driver.Store, key, token, holder string) {
	s.Helper()
	s.wantHeld(s.acquireKey(st, key, token, long, driver.Try), holder)
}

// await sends an Acquire for token in mode Wait and demands that holder has the lease. The store then knows that the
// lease is awaited.
func (s *stores) await(st driver.Store, key, token, holder string) driver.AcquireResult {
	s.Helper()
	r := s.acquireKey(st, key, token, long, driver.Wait)
	s.wantHeld(r, holder)
	return r
}

func (s *stores) wantHeld(r driver.AcquireResult, holder string) {
	s.Helper()
	if r.State != driver.Held || r.Holder != holder || r.Failure != "" {
		s.Fatalf("Acquire = %s, want Held by %s", acquireText(r), holder)
	}
}

// publish publishes data for token and demands the result.
func (s *stores) publish(st driver.Store, key, token string, data []byte, want driver.PublishResult) {
	s.Helper()
	p := driver.PublishRequest{Key: key, Token: token, Record: data, Keep: long}
	got, err := st.Publish(s.ctx, p)
	s.ok(err, "Publish(%q, %s)", key, token)
	if got != want {
		s.Fatalf("Publish(%q, %s) = %s, want %s", key, token, publishText(got), publishText(want))
	}
}

// fill makes data the value of key.
func (s *stores) fill(st driver.Store, key, token string, data []byte) {
	s.Helper()
	s.start(st, key, token, long)
	s.publish(st, key, token, data, driver.Stored)
}

// fail ends the fill of token with a failure, and leaves a back-off for ttl.
func (s *stores) fail(st driver.Store, key, token, failure string, ttl time.Duration) {
	s.Helper()
	s.failWith(st, driver.FailRequest{Key: key, Token: token, Failure: failure, TTL: ttl, HoldAll: true})
}

func (s *stores) failWith(st driver.Store, r driver.FailRequest) {
	s.Helper()
	s.ok(st.Fail(s.ctx, r), "Fail(%q, %s)", r.Key, r.Token)
}

func (s *stores) release(st driver.Store, key, token string) {
	s.Helper()
	s.ok(st.Release(s.ctx, key, token), "Release(%q, %s)", key, token)
}

func (s *stores) invalidate(st driver.Store, by string, keys ...string) {
	s.Helper()
	s.ok(st.Invalidate(s.ctx, by, keys...), "Invalidate(%q)", keys)
}

func (s *stores) expire(st driver.Store, by string, keys ...string) {
	s.Helper()
	s.ok(st.Expire(s.ctx, by, keys...), "Expire(%q)", keys)
}

// renew renews the lease for long, and demands that Renew returns want.
func (s *stores) renew(st driver.Store, key, token string, want bool) {
	s.Helper()
	if mine := s.renewMany(st, driver.Lease{Key: key, Token: token})[0]; mine != want {
		s.Fatalf("Renew(%q, %s) = %v, want %v", key, token, mine, want)
	}
}

// renewMany renews many leases for long, and demands one result per lease.
func (s *stores) renewMany(st driver.Store, leases ...driver.Lease) []bool {
	s.Helper()
	mine, err := st.Renew(s.ctx, long, leases...)
	s.ok(err, "Renew(%v)", leases)
	if len(mine) != len(leases) {
		s.Fatalf("Renew of %d leases returns %d results", len(leases), len(mine))
	}
	return mine
}

func (s *stores) get(st driver.Store, key string) []byte {
	s.Helper()
	b, err := st.Get(s.ctx, key)
	s.ok(err, "Get(%q)", key)
	return b
}

// wantValue demands the value of key on both nodes; nil means that there is none.
func (s *stores) wantValue(key string, want []byte) {
	s.Helper()
	for _, st := range []driver.Store{s.A, s.B} {
		got := s.get(st, key)
		if !bytes.Equal(got, want) || (got == nil) != (want == nil) {
			s.Fatalf("Get(%q) = %s, want %s", key, shown(got), shown(want))
		}
	}
}

// takeOver waits until the short lease of key has ended by itself and token has taken the lease.
func (s *stores) takeOver(st driver.Store, key, token string) {
	s.Helper()
	if !s.runOut(func() bool { return s.acquireKey(st, key, token, long, driver.Wait).State == driver.Acquired }) {
		s.Fatalf("Acquire(%q, %s) is not Acquired long after the end of the lease of %v", key, token, s.short)
	}
}

// overtaken prepares key: the lease of slow has ended, and next has taken lease and claim.
func (s *stores) overtaken(key, slow, next string) {
	s.Helper()
	s.start(s.A, key, slow, s.short)
	s.takeOver(s.B, key, next)
}

// leaseEnded prepares key: the lease of token has ended, but the claim of token is still valid.
func (s *stores) leaseEnded(key, token string) {
	s.Helper()
	s.start(s.A, key, token, s.short)
	s.letLeaseEnd(key, token)
}

// letLeaseEnd lets the short lease of token end. It always waits for the longest time of runOut. It cannot poll,
// because a request that finds the lease free would take the lease.
func (s *stores) letLeaseEnd(key, token string) {
	s.Helper()
	s.pass(3 * s.short)
	s.renew(s.A, key, token, false)
}

// claimEnded prepares key: the claim of token has ended, but the lease of token has not.
func (s *stores) claimEnded(key, token string) {
	s.Helper()
	req := s.request(s.A, key, token, long, driver.Wait)
	req.ClaimTTL = s.short
	s.wantAcquired(s.A, req)
	over := func() bool { return !s.renewMany(s.A, driver.Lease{Key: key, Token: token})[0] }
	if !s.runOut(over) {
		s.Fatalf("Renew(%q, %s) still succeeds long after the end of the claim of %v", key, token, s.short)
	}
}

// wantRunning demands that the fill of token still has lease and claim.
func (s *stores) wantRunning(st driver.Store, key, token string) {
	s.Helper()
	s.renew(st, key, token, true)
}

func (s *stores) ok(err error, call string, args ...any) {
	s.Helper()
	if err != nil {
		s.Fatalf(call+": %v", append(args, err)...)
	}
}

// record returns a record as a Loader would make it.
func (s *stores) record(token, payload string) []byte {
	s.Helper()
	began := time.Unix(1_700_000_000, 0)
	r := driver.Record{
		Token: token, LoadBegan: began, FreshUntil: began.Add(time.Hour), StaleFor: time.Hour,
		Kind: "raw string", Payload: []byte(payload),
	}
	b, err := r.Append(nil)
	s.ok(err, "Record.Append")
	return b
}

func acquireText(r driver.AcquireResult) string {
	return fmt.Sprintf("%s{Now: %v, Record: %s, Holder: %q, Failure: %q, Left: %v}",
		nameOf(int(r.State), "Acquired", "Changed", "Held", "Free"), r.Now, shown(r.Record), r.Holder, r.Failure, r.Left)
}

func modeText(m driver.Mode) string {
	return nameOf(int(m), "Try", "Wait", "Force", "Look")
}

func publishText(p driver.PublishResult) string {
	return nameOf(int(p), "Stored", "Rejected", "StoreFull")
}

func nameOf(i int, names ...string) string {
	if i < len(names) {
		return names[i]
	}
	return "unknown"
}
