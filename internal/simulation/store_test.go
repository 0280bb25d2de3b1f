package simulation

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file contains the shared store of a schedule, and the connection through which each node calls the shared store.
// announce_test.go contains the subscriptions of the nodes.

// server is the shared store of all nodes.
type server struct {
	*world
	callMu sync.Mutex // held during each call of mem, so that check sees the result of one call
	mem    *memory.Store
	stored [keys]int       // by key, the newest version that was ever stored
	floor  [keys]int       // by key, version in the database when mem last executed an Invalidate or Expire of the key
	tagged [keys]int       // by key, version in the database when mem last invalidated or expired a tag of the key
	ages   map[string]int  // by tag, how often the tag state was evicted
	full   map[string]bool // tokens of the publications that mem did not keep, because of the fault full
	pubs   []publication
	linkMu sync.Mutex // guards links
	links  map[*link]struct{}
}

// publication notes that a version of a key was stored at the moment at. All versions of the key that were stored
// before are older.
type publication struct {
	key, version int
	at           time.Duration
}

func (w *world) newServer() *server {
	return &server{
		world: w, mem: memory.New(), ages: map[string]int{}, full: map[string]bool{}, links: map[*link]struct{}{},
	}
}

// do executes one call of the shared store. It then checks G3 for the keys in touched.
func (s *server) do(op string, node int, touched []string, call func(*memory.Store)) {
	s.callMu.Lock()
	defer s.callMu.Unlock()
	call(s.mem)
	s.log(node, "store %s %v", op, touched)
	for _, full := range touched {
		if k := keyIndex(full); k >= 0 {
			s.check(k, full)
		}
	}
}

// check checks G3 for the stored record of key k. The record must not have an older version than an earlier record. If
// the record is not expired, its version must not be older than the last Invalidate or Expire of the key. If its tags
// are valid, its version must not be older than the last invalidation of its tags.
func (s *server) check(k int, full string) {
	ctx := context.Background()
	b, _ := s.mem.Get(ctx, full)
	rec, err := driver.DecodeRecord(b)
	if err != nil || rec.NoStore {
		return
	}
	v, ok := parse(string(rec.Payload))
	if !ok {
		s.violate("G3", "key %d: foreign record %q", k, rec.Payload)
		return
	}
	if v.Version < s.stored[k] {
		s.violate("G3", "key %d: version %d stored after version %d", k, v.Version, s.stored[k])
	}
	if v.Version > s.stored[k] {
		s.stored[k] = v.Version
		s.pubs = append(s.pubs, publication{k, v.Version, s.now()})
	}
	if rec.ExpiredAt.IsZero() && v.Version < s.floor[k] {
		s.violate("G3", "key %d: version %d in the store after an invalidation at version %d", k, v.Version, s.floor[k])
	}
	valid := len(rec.Tags) > 0 && !s.tagLost
	for _, tag := range rec.Tags {
		states, _ := s.mem.Tags(ctx, s.inner("sim:"+tag))
		valid = valid && states[0].Known &&
			rec.LoadBegan.After(states[0].Invalidated) && rec.LoadBegan.After(states[0].Expired)
	}
	if valid && v.Version < s.tagged[k] {
		s.violate("G3", "key %d: version %d valid after an invalidation of its tags at version %d", k, v.Version, s.tagged[k])
	}
}

// inner returns the name of a tag in mem. An eviction of a tag state gives the tag a new name in mem, so that mem does
// not find the old state.
func (s *server) inner(tag string) string { return fmt.Sprintf("%s@%d", tag, s.ages[tag]) }

func (s *server) innerAll(tags []string) []string {
	names := make([]string, len(tags))
	for i, tag := range tags {
		names[i] = s.inner(tag)
	}
	return names
}

// evictedBy is the token of an Invalidate that simulates an eviction. The links drop the announcement of such an
// Invalidate, because a real store does not announce evictions.
const evictedBy = "evicted#1"

// restart replaces mem by an empty store and cuts all links. The links of node i connect again after reconnect[i].
func (s *server) restart(reconnect []time.Duration) {
	s.callMu.Lock()
	s.mem = memory.New()
	s.log(anyNode, "restart")
	s.callMu.Unlock()
	s.linkMu.Lock()
	defer s.linkMu.Unlock()
	for l := range s.links {
		l.lose()
		s.later(reconnect[l.node], l.connect)
	}
}

// nodeStore is the connection of one node to the shared store. It delays, loses and repeats calls as the schedule says.
type nodeStore struct {
	*server
	node int
	mu   sync.Mutex // guards rand
	rand *rand.Rand
}

var errNetwork = errors.New("simulation: connection reset")

// fate is what happens to one call.
type fate struct {
	there, back         time.Duration // how long the request and the reply take
	lostThere, lostBack bool          // the request or the reply is lost
	atOnce              bool          // a lost call fails at once, and not when its ctx ends
	copyAfter           time.Duration // time from the call to the execution of its copy; 0 = no copy
	goesOn              bool          // the store executes the call even if its caller leaves before the request arrives
}

// draw draws the fate of one call at this moment.
func (n *nodeStore) draw() (f fate) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f.there, f.back = between(n.rand, 50*time.Microsecond, ms), between(n.rand, 50*time.Microsecond, ms)
	f.atOnce, f.goesOn = n.rand.IntN(2) == 0, n.rand.IntN(2) == 0
	luck, late := n.rand.Float64(), between(n.rand, ms, lateBy)
	w := n.active(n.now(), n.node, anyKey, sluggish, slow, lostRequest, lostReply, lateCopy)
	timeout := n.cfg.LockTTL / 4
	switch {
	case w == nil:
	case w.fault == sluggish:
		f.there, f.back = between(n.rand, 0, timeout*2/5), between(n.rand, 0, timeout*2/5)
	case luck >= w.share:
	case w.fault == slow:
		f.there, f.back = between(n.rand, 0, timeout*3/2), between(n.rand, 0, timeout*3/2)
	case w.fault == lostRequest:
		f.lostThere = true
	case w.fault == lostReply:
		f.lostBack = true
	case w.fault == lateCopy:
		f.copyAfter = late
	}
	return f
}

// call makes one call of the shared store for the node n, with a random fate. do executes the call on a memory.Store.
// touched are the keys for which G3 is checked after the call.
func call[T any](
	ctx context.Context, n *nodeStore, op string, touched []string, do func(*memory.Store) (T, error),
) (result T, err error) {
	var none T
	f := n.draw()
	late := func() { n.do(op+" (late)", n.node, touched, func(m *memory.Store) { _, _ = do(m) }) }
	if err := n.pause(ctx, f.there); err != nil {
		if f.goesOn && !f.lostThere {
			n.later(f.there, late)
		}
		return none, err
	}
	if f.lostThere {
		return none, n.lost(ctx, f)
	}
	n.do(op, n.node, touched, func(m *memory.Store) { result, err = do(m) })
	if f.copyAfter > 0 {
		n.later(f.copyAfter, late)
	}
	if f.lostBack {
		return none, n.lost(ctx, f)
	}
	if err := n.pause(ctx, f.back); err != nil {
		return none, err
	}
	return result, err
}

// lost returns the error of a call whose request or reply was lost: at once, or when ctx ends.
func (n *nodeStore) lost(ctx context.Context, f fate) error {
	n.log(n.node, "lost, there %v, back %v, at once %v", f.lostThere, f.lostBack, f.atOnce)
	if f.atOnce {
		return errNetwork
	}
	<-ctx.Done()
	return ctx.Err()
}

// pause waits for d. If the node is frozen at the end of d, pause waits until the freeze ends. If ctx ends first, pause
// returns the error of ctx.
func (n *nodeStore) pause(ctx context.Context, d time.Duration) error {
	if w := n.active(n.now()+d, n.node, anyKey, frozen); w != nil {
		d = w.to - n.now()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

var background = context.Background()

func (n *nodeStore) Get(ctx context.Context, key string) ([]byte, error) {
	return call(ctx, n, "get", []string{key}, func(m *memory.Store) ([]byte, error) { return m.Get(background, key) })
}

func (n *nodeStore) GetMany(ctx context.Context, keys ...string) ([][]byte, error) {
	return call(ctx, n, "get-many", keys, func(m *memory.Store) ([][]byte, error) {
		return m.GetMany(background, keys...)
	})
}

func (n *nodeStore) Acquire(ctx context.Context, r driver.AcquireRequest) (driver.AcquireResult, error) {
	return call(ctx, n, "acquire "+r.Token, []string{r.Key}, func(m *memory.Store) (driver.AcquireResult, error) {
		a, err := m.Acquire(background, r)
		n.log(n.node, "acquire %s mode %d seen %q: state %d holder %s failure %q",
			r.Token, r.Mode, r.Seen, a.State, a.Holder, a.Failure)
		return a, err
	})
}

func (n *nodeStore) Renew(ctx context.Context, ttl time.Duration, leases ...driver.Lease) ([]bool, error) {
	return call(ctx, n, "renew", nil, func(m *memory.Store) ([]bool, error) { return m.Renew(background, ttl, leases...) })
}

// Publish simulates a full store during the fault full: it sets Keep to 0, so that mem does not keep the record, and
// returns StoreFull. The links announce such a publication as Released.
func (n *nodeStore) Publish(ctx context.Context, r driver.PublishRequest) (driver.PublishResult, error) {
	r.Record = append([]byte(nil), r.Record...)
	return call(ctx, n, "publish "+r.Token, []string{r.Key}, func(m *memory.Store) (driver.PublishResult, error) {
		isFull := n.active(n.now(), n.node, anyKey, full) != nil
		if isFull {
			r.Keep, n.full[r.Token] = 0, true
		}
		result, err := m.Publish(background, r)
		if isFull && result == driver.Stored {
			result = driver.StoreFull
		}
		n.log(n.node, "publish %s: %d", r.Token, result)
		return result, err
	})
}

func (n *nodeStore) Fail(ctx context.Context, r driver.FailRequest) error {
	return n.step(ctx, "fail "+r.Token, []string{r.Key}, func(m *memory.Store) error { return m.Fail(background, r) })
}

func (n *nodeStore) Release(ctx context.Context, key, token string) error {
	return n.step(ctx, "release "+token, []string{key}, func(m *memory.Store) error {
		return m.Release(background, key, token)
	})
}

func (n *nodeStore) Invalidate(ctx context.Context, by string, keys ...string) error {
	return n.step(ctx, "invalidate", keys, func(m *memory.Store) error {
		n.raise(&n.floor, keys)
		return m.Invalidate(background, by, keys...)
	})
}

func (n *nodeStore) Expire(ctx context.Context, by string, keys ...string) error {
	return n.step(ctx, "expire", keys, func(m *memory.Store) error {
		n.raise(&n.floor, keys)
		return m.Expire(background, by, keys...)
	})
}

func (n *nodeStore) step(ctx context.Context, op string, touched []string, do func(*memory.Store) error) error {
	_, err := call(ctx, n, op, touched, func(m *memory.Store) (struct{}, error) { return struct{}{}, do(m) })
	return err
}

func (n *nodeStore) Tags(ctx context.Context, tags ...string) ([]driver.TagState, error) {
	return call(ctx, n, "tags", nil, func(m *memory.Store) ([]driver.TagState, error) {
		return m.Tags(background, n.innerAll(tags)...)
	})
}

func (n *nodeStore) EnsureTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	return n.step(ctx, "ensure-tags", nil, func(m *memory.Store) error {
		return m.EnsureTags(background, reach, keep, n.innerAll(tags)...)
	})
}

func (n *nodeStore) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return n.step(ctx, "invalidate-tags", nil, func(m *memory.Store) error {
		n.raise(&n.tagged, keysOf(tags))
		return m.InvalidateTags(background, by, keep, n.innerAll(tags)...)
	})
}

func (n *nodeStore) ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return n.step(ctx, "expire-tags", nil, func(m *memory.Store) error {
		n.raise(&n.tagged, keysOf(tags))
		return m.ExpireTags(background, by, keep, n.innerAll(tags)...)
	})
}

func (n *nodeStore) Now() time.Time { return time.Now() }

func (n *nodeStore) Check() error { return nil }

// raise notes the current versions of the keys in floor. It is called when mem executes an invalidation of the keys.
func (s *server) raise(floor *[keys]int, full []string) {
	for _, f := range full {
		if k := keyIndex(f); k >= 0 {
			floor[k] = s.db.version(k)
		}
	}
}

// keyName returns the name of key number k.
func keyName(k int) string { return fmt.Sprintf("k%d", k) }

// keyIndex returns the number of the key whose full name in the store is full, or -1.
func keyIndex(full string) int {
	for k := range keys {
		if strings.HasSuffix(full, ":"+keyName(k)) {
			return k
		}
	}
	return -1
}

// tagName returns the tag that the loads of key k set if tags is set in the schedule. Keys 0 and 1 share the tag t0.
func tagName(k int) string { return fmt.Sprintf("t%d", k/2) }

// keysOf returns the full names of the keys whose values have one of the tags.
func keysOf(tags []string) (full []string) {
	for _, tag := range tags {
		for k := range keys {
			if strings.HasSuffix(tag, ":"+tagName(k)) || strings.HasSuffix(tag, ":all") {
				full = append(full, "sim:"+keyName(k))
			}
		}
	}
	return full
}
