package simulation

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/refill-go/refill"
)

// This file draws a schedule from a seed: the settings of the Loaders, and the faults.

const (
	ms      = time.Millisecond
	nodes   = 3
	keys    = 3
	clients = 5
	anyNode = -1
	anyKey  = -1

	maxLoad = 250 * ms // the longest duration of a load without a fault
)

// fault is a kind of fault.
type fault string

const (
	// Faults of the calls that a node makes of the store.
	sluggish    fault = "sluggish"     // each call takes longer, but less than StoreTimeout
	slow        fault = "slow"         // some calls take longer than StoreTimeout
	lostRequest fault = "lost-request" // some calls do not reach the store
	lostReply   fault = "lost-reply"   // some calls take effect, but the caller gets an error
	lateCopy    fault = "late-copy"    // some calls take effect twice
	frozen      fault = "frozen"       // calls, replies, announcements and loads of the node wait until the fault ends
	// Faults of the announcements to a node.
	unsubscribed fault = "unsubscribed" // announcements are lost, and the node learns of the loss at once
	toldLate     fault = "told-late"    // announcements are lost, and the node learns of the loss when the fault ends
	unnoticed    fault = "unnoticed"    // announcements are lost, and the node never learns of the loss
	lateNews     fault = "late-news"    // announcements come up to 500 ms late
	// Faults of the store, for all nodes.
	full    fault = "full"    // Publish stores nothing
	restart fault = "restart" // the store loses all data and all subscriptions
	evict   fault = "evict"   // the store loses single records and tag states
	// Faults of the loads of a node, for one key or all keys.
	failing  fault = "failing"  // a load returns an error
	panics   fault = "panics"   // a load panics or calls runtime.Goexit
	hangs    fault = "hangs"    // a load returns when its ctx ends
	deaf     fault = "deaf"     // a load ignores its ctx, and fails after the fault has ended
	slowLoad fault = "slowLoad" // a load takes 0.5 to 1.5 times LoadTimeout
)

var (
	callFaults  = []fault{slow, lostRequest, lostReply, lateCopy, frozen}
	newsFaults  = []fault{unsubscribed, toldLate, unnoticed, lateNews, frozen, restart}
	storeFaults = []fault{full, restart, evict}
	loadFaults  = []fault{failing, panics, hangs, deaf, slowLoad, frozen}
	all         = []fault{
		sluggish, slow, lostRequest, lostReply, lateCopy, frozen, unsubscribed, toldLate, unnoticed, lateNews,
		full, restart, evict, failing, panics, hangs, deaf, slowLoad,
	}
)

// window is one fault of a schedule, from the moment from to the moment to. Moments count from the start of the
// schedule.
type window struct {
	fault     fault
	node, key int // anyNode = all nodes, anyKey = all keys
	from, to  time.Duration
	share     float64 // the part of the calls that the fault hits; only for faults that hit "some calls"
}

func (w window) String() string {
	return fmt.Sprintf("%s node %d key %d %v-%v share %.1f", w.fault, w.node, w.key, w.from, w.to, w.share)
}

// schedule is everything that is drawn from a seed before the run begins.
type schedule struct {
	seed    uint64
	cfg     refill.Config // the Config of all Loaders, without Shared and OnEvent
	bulk    bool          // the Loaders have bulk load functions
	tags    bool          // each load sets the tag tagName of its key
	strange bool          // some loads call SetTTL, SetStaleFor or NoStore, and some loads find no row
	length  time.Duration // how long the clients make calls
	restart int           // the node whose Loader is closed and replaced by a new Loader; anyNode = none
	at      time.Duration // when the Loader of the node restart is closed
	faults  []window
}

// random returns the random source of one actor of a schedule: a client, a node, or the drawing of the schedule itself.
func random(seed uint64, actor int) *rand.Rand { return rand.New(rand.NewPCG(seed, uint64(actor))) }

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

func between(r *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(r.Int64N(int64(most-least)+1))
}

// draw draws the schedule of a seed.
func draw(seed uint64) *schedule {
	r := random(seed, 0)
	s := &schedule{
		seed: seed, cfg: drawConfig(r), bulk: r.IntN(4) == 0, tags: r.IntN(3) == 0, strange: r.IntN(4) == 0,
		length: between(r, 4*time.Second, 10*time.Second), restart: anyNode,
	}
	if r.IntN(5) == 0 {
		s.cfg.Tags = []string{"all"}
	}
	if r.IntN(4) == 0 {
		s.restart, s.at = r.IntN(nodes), between(r, time.Second, s.length)
	}
	if s.bulk {
		s.cfg.BulkWindow = pick(r, 0, 0, 20*ms)
	}
	for range pick(r, 0, 1, 1, 1, 2, 2, 3, 5) {
		s.faults = append(s.faults, s.drawFault(r))
	}
	return s
}

func drawConfig(r *rand.Rand) refill.Config {
	c := refill.Config{
		TTL:          pick(r, 2*time.Second, 4*time.Second, 4*time.Second, 8*time.Second),
		StaleFor:     pick(r, 0, 0, 2*time.Second, 10*time.Second),
		StaleIfError: pick(r, 0, -1, 5*time.Second),
		LocalTTL:     pick(r, 0, 0, 500*ms, -1),
		EarlyRefresh: pick(r, 0, 0, 0.5, 0.8),
		LockTTL:      pick(r, 400*ms, time.Second),
		LoadTimeout:  pick(r, time.Second, 3*time.Second),
		ErrorTTL:     pick(r, 0, -1, 400*ms, 2*time.Second),
		NotFoundTTL:  pick(r, 0, -1, time.Second),
		MaxLoads:     pick(r, 1, 2, 2, 4),
		MaxWaiters:   pick(r, 100, 100, 100, 2),
		LocalEntries: pick(r, 1, 100, 100),
		Jitter:       pick(r, 0.0, -1.0),
	}
	if c.StaleFor > 0 {
		c.SoftTimeout = pick(r, 0, 0, 100*ms)
	}
	if c.ErrorTTL >= 0 && r.IntN(4) == 0 {
		c.MaxErrorTTL = 4 * time.Second
	}
	return c
}

func (s *schedule) drawFault(r *rand.Rand) window {
	w := window{fault: pick(r, all...), node: r.IntN(nodes), key: anyKey, share: pick(r, 0.2, 0.5, 1)}
	w.from = between(r, 0, s.length)
	w.to = w.from + between(r, 100*ms, 3*time.Second)
	switch {
	case slices.Contains(storeFaults, w.fault):
		w.node = anyNode
	case w.fault == frozen: // a freeze hits one node, because the checker checks the calls on the other nodes
	case r.IntN(3) == 0:
		w.node = anyNode
	}
	if slices.Contains(loadFaults, w.fault) && w.fault != frozen && r.IntN(2) == 0 {
		w.key = r.IntN(keys)
	}
	return w
}

// active returns the first fault of the given kinds that hits the node and the key at the moment at, or nil.
func (s *schedule) active(at time.Duration, node, key int, kinds ...fault) *window {
	for i := range s.faults {
		w := &s.faults[i]
		if slices.Contains(kinds, w.fault) && w.from <= at && at < w.to && w.hits(node, key) {
			return w
		}
	}
	return nil
}

func (w *window) hits(node, key int) bool {
	return (w.node == anyNode || node == anyNode || w.node == node) &&
		(w.key == anyKey || key == anyKey || w.key == key)
}

// any reports whether a fault of the given kinds hits the node and the key between two moments. A fault counts until
// its last effect is over (end).
func (s *schedule) any(from, to time.Duration, node, key int, kinds ...fault) bool {
	return slices.ContainsFunc(s.faults, func(w window) bool {
		return slices.Contains(kinds, w.fault) && w.from <= to && from <= w.end() && w.hits(node, key)
	})
}

// end returns the moment at which the last effect of the fault is over.
func (w *window) end() time.Duration {
	switch w.fault {
	case lateCopy, slow, lostRequest, frozen:
		return w.to + lateBy
	case restart:
		return w.from + time.Second
	case deaf:
		return w.to + deafBy
	}
	return w.to
}

const (
	lateBy = 2 * time.Second // the longest time from a call to its copy (fault lateCopy)
	deafBy = 2 * time.Second // the longest time for which a load ignores its ctx after the fault deaf has ended
)

// String lists the settings and the faults of the schedule.
func (s *schedule) String() string {
	var b strings.Builder
	c := s.cfg
	fmt.Fprintf(&b, "seed %d, %v, bulk %v, tags %v, strange %v, close node %d at %v\n",
		s.seed, s.length, s.bulk, s.tags, s.strange, s.restart, s.at)
	fmt.Fprintf(&b, "TTL %v StaleFor %v StaleIfError %v LocalTTL %v EarlyRefresh %v SoftTimeout %v\n",
		c.TTL, c.StaleFor, c.StaleIfError, c.LocalTTL, c.EarlyRefresh, c.SoftTimeout)
	fmt.Fprintf(&b, "LockTTL %v LoadTimeout %v ErrorTTL %v..%v NotFoundTTL %v Jitter %v\n",
		c.LockTTL, c.LoadTimeout, c.ErrorTTL, c.MaxErrorTTL, c.NotFoundTTL, c.Jitter)
	fmt.Fprintf(&b, "MaxLoads %d MaxWaiters %d LocalEntries %d Tags %v BulkWindow %v\n",
		c.MaxLoads, c.MaxWaiters, c.LocalEntries, c.Tags, c.BulkWindow)
	for _, w := range s.faults {
		fmt.Fprintln(&b, "  fault", w)
	}
	return b.String()
}
