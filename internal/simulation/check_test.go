package simulation

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/refill-go/refill"
)

// This file contains the rules about the answers of Gets. load_check_test.go contains the rules about loads.

const (
	grace = 1500 * ms // time for the fleet to recover from a fault: breakers close, leases end, invalidations succeed
	tick  = 60 * ms   // tolerance of the rules: a tick of the coarse clock of L1 (at most 50 ms), and the time of a call
)

// verify checks all rules after the run of the schedule.
func (w *world) verify() {
	slices.SortFunc(w.changes, func(a, b *change) int { return int(a.begin - b.begin) })
	for _, g := range w.calls {
		w.checkErrors(g)
		w.checkLength(g)
		w.checkTakeover(g)
		if g.has {
			w.checkAge(g)
			w.checkChanges(g)
			w.checkStored(g)
		}
	}
	w.checkLoads()
}

// storeWorks reports whether no fault disturbs the calls of a node, and the store does not restart, between two
// moments. A fault that has ended less than grace before the moment from counts as well.
func (w *world) storeWorks(node int, from, to time.Duration) bool {
	return !w.any(from-grace, to, node, anyKey, callFaults...) && !w.any(from-grace, to, anyNode, anyKey, restart)
}

// newsWorks reports whether no fault disturbs the announcements to a node between two moments. A fault that has ended
// less than grace before the moment from counts as well.
func (w *world) newsWorks(node int, from, to time.Duration) bool {
	return !w.any(from-grace, to, node, anyKey, newsFaults...)
}

func stale(o refill.Outcome) bool {
	return o == refill.OutcomeStale || o == refill.OutcomeStaleOnError
}

// fromStore reports whether a value came from the store or from a load for this caller. A value of L1, and a value of
// the flight of another caller, do not count.
func fromStore(o refill.Outcome) bool {
	return o == refill.OutcomeShared || o == refill.OutcomeLoaded || o == refill.OutcomeLoadedElsewhere
}

// spans returns the TTL of v, how long after its TTL v may be served as stale, and how long after its TTL v may be
// served if a load fails.
func (w *world) spans(v value) (ttl, staleFor, staleIfError time.Duration) {
	ttl, staleFor, staleIfError = w.cfg.TTL, w.cfg.StaleFor, w.cfg.StaleIfError
	if v.TTL > 0 {
		ttl = v.TTL
	}
	if v.StaleFor > 0 {
		staleFor = v.StaleFor
	}
	if staleIfError == 0 {
		staleIfError = w.cfg.StaleFor
	}
	return ttl, staleFor, max(staleIfError, staleFor)
}

// checkAge checks G5: no value is served past its TTL, StaleFor and StaleIfError. A caller that waited for the load of
// its value may get the value at any age.
func (w *world) checkAge(g *get) {
	ttl, staleFor, staleIfError := w.spans(g.value)
	if w.db.absent(g.value.Version) {
		ttl = max(ttl, w.notFoundTTL(w.cfg.TTL))
	}
	most, end := ttl, g.end
	if g.op == "get-many" { // the call may have waited for other keys after it got this value
		end = g.begin
	}
	switch g.outcome {
	case refill.OutcomeStale:
		most += staleFor
	case refill.OutcomeStaleOnError, 0:
		most += staleIfError
	}
	if g.noStale && stale(g.outcome) {
		w.violate("G5", "NoStale, but %s", show(g))
	}
	// b is the load of the value. A Get that began before the moment published may have waited for b, and may get the
	// value at any age.
	b := w.db.loads[g.value.Load]
	published := b.end + 4*w.storeTimeout() + tick
	if w.any(b.begin, g.end, anyNode, anyKey, callFaults...) || w.any(b.begin, g.end, anyNode, anyKey, newsFaults...) {
		published += lateBy + w.cfg.LockTTL
	}
	if age := end - g.value.Began; age > most+tick && (b.end >= 0 && published < g.begin) {
		w.violate("G5", "%s is %v old, more than %v", show(g), age, most)
	}
}

// checkChanges checks G2: after a change has returned, no Get may return a value from before the change as fresh. The
// rule for values from the store is checked under all faults, because the claim decides what is stored, and a lost
// announcement does not matter.
func (w *world) checkChanges(g *get) {
	for _, c := range w.changes {
		if c.end >= g.begin || !slices.Contains(c.keys, g.key) || g.value.Version >= c.version[g.key] || g.op == "peek" {
			continue
		}
		switch local := c.life == g.life; {
		case errors.Is(c.err, refill.ErrClosed), c.err != nil && !local, c.tags && w.tagLost:
			continue
		case g.outcome == 0 && w.mayBeStale(), w.staleAllowed(c, g):
			continue
		case local && !stale(g.outcome):
			w.violate("G2", "same node: %s after %s", show(g), showChange(c))
		case fromStore(g.outcome):
			w.violate("G2", "from the store: %s after %s", show(g), showChange(c))
		case !w.storeWorks(g.life.node, g.begin, g.end):
			continue
		case w.newsWorks(g.life.node, c.begin, g.begin):
			if g.begin > c.end+tick && !stale(g.outcome) {
				w.violate("G2", "announced: %s after %s", show(g), showChange(c))
			}
		case g.outcome == refill.OutcomeHit && g.begin > c.end+w.localTTL()+tick && w.hitsCount(g):
			w.violate("G2", "after LocalTTL: %s after %s", show(g), showChange(c))
		case g.outcome == refill.OutcomeCoalesced && !c.tags && g.op != "refresh-result" && !w.strange && w.waited(g):
			w.violate("G2", "refused: %s after %s", show(g), showChange(c))
		}
	}
}

// mayBeStale reports whether the settings allow stale values. checkChanges asks for a Get whose outcome is unknown.
func (w *world) mayBeStale() bool { return w.cfg.StaleFor > 0 || w.cfg.StaleIfError >= 0 || w.strange }

// staleAllowed reports whether the Get g may return the value from before the change c: c expires the value, and g says
// that the value is stale.
func (w *world) staleAllowed(c *change, g *get) bool { return c.expire && stale(g.outcome) }

// hitsCount reports whether the hit g must obey LocalTTL. While the store does not answer, a node may serve values of
// L1 beyond LocalTTL.
func (w *world) hitsCount(g *get) bool {
	return !w.any(g.begin-w.cfg.TTL, g.end, g.life.node, anyKey, callFaults...)
}

// waited reports whether the Get g waited for the load of its value on its own node, while the store worked. So the
// store has stored or rejected the value of that load.
func (w *world) waited(g *get) bool {
	b := w.db.loads[g.value.Load]
	return b.node == g.life.node && b.end > g.begin && w.storeWorks(g.life.node, b.begin, g.end) && !g.value.NoStore
}

func (w *world) localTTL() time.Duration {
	switch {
	case w.cfg.LocalTTL == 0:
		return w.cfg.TTL
	case w.cfg.LocalTTL < 0:
		return 0
	}
	return w.cfg.LocalTTL
}

// checkStored checks that a fresh value of a Get is not older than a value that was stored before the Get began. The
// rule holds while no fault disturbs the node, even if its L1 has a value that the store has not confirmed.
func (w *world) checkStored(g *get) {
	from := g.begin - w.localTTL() - w.cfg.LoadTimeout - 2*time.Second
	if stale(g.outcome) || g.outcome == 0 || g.op == "peek" || !w.storeWorks(g.life.node, g.begin, g.end) ||
		!w.newsWorks(g.life.node, from, g.end) || w.any(0, g.end, anyNode, anyKey, storeFaults...) {
		return
	}
	for _, p := range w.server.pubs {
		if p.key == g.key && p.version > g.value.Version && p.at+tick < g.begin && !g.value.NoStore && !w.joined(g) {
			w.violate("G2", "older than version %d, stored at %v: %s", p.version, p.at, show(g))
			return
		}
	}
}

// joined reports whether the Get g joined a load that may have run without a lease, because its node remembered a
// no-store. The store does not judge the value of such a load.
func (w *world) joined(g *get) bool {
	b := w.db.loads[g.value.Load]
	return b.life == g.life && b.begin <= g.begin && g.begin <= b.end && w.remembersNoStore(b)
}

// checkErrors checks the error of a Get. The main rule is G6: on a node whose own loads work, the error of a load is
// allowed only if loads fail on two other nodes.
func (w *world) checkErrors(g *get) {
	closing := g.life.closeBegan >= 0 && g.end >= g.life.closeBegan
	past := g.begin - max(w.cfg.ErrorTTL, w.cfg.MaxErrorTTL, time.Second) - w.cfg.LoadTimeout - grace
	var failure *refill.LoadError
	switch {
	case g.err == nil, errors.Is(g.err, refill.ErrNotFound) && g.has, closing:
	case errors.Is(g.err, refill.ErrClosed):
		w.violate("G7", "%s, but the Loader is open", show(g))
	case errors.As(g.err, &failure):
		if !w.mayFail(g, past) {
			w.violate("G6", "%s", show(g))
		}
	case errors.Is(g.err, context.DeadlineExceeded) || errors.Is(g.err, context.Canceled):
		if g.leave == 0 || g.end < g.leave {
			w.violate("G4", "%s, but its ctx had not ended", show(g))
		}
	case errors.Is(g.err, refill.ErrOverloaded):
		if w.cfg.MaxWaiters > clients && w.storeWorks(g.life.node, g.begin, g.end) &&
			!w.any(0, g.end, g.life.node, anyKey, loadFaults...) {
			w.violate("G7", "%s, but the store works and no load hangs", show(g))
		}
	default:
		w.violate("G7", "%s: unknown error", show(g))
	}
}

// mayFail reports whether loads of the key of g have failed on the node of g, or on two other nodes, because of a
// fault. Loads that ran at some time between the moment past and the end of g count. With bulk loads, loads of all keys
// count. A Loader that was opened after the Close of another Loader counts as another node, as it does for the fleet.
func (w *world) mayFail(g *get, past time.Duration) bool {
	failed := map[*life]bool{}
	for _, b := range w.db.loads {
		if (b.key == g.key || w.bulk) && !b.ok && b.fault != "" && b.begin <= g.end && (b.end < 0 || b.end >= past) {
			failed[b.life] = true
		}
	}
	return failed[g.life] || len(failed) >= 2
}

// checkLength checks the second half of G4: no call waits longer than its ctx. It also checks the bound of G7: no call
// takes longer than mostGet.
func (w *world) checkLength(g *get) {
	if g.leave > 0 && g.op != "peek" {
		most := g.leave + tick
		if g.cancel {
			most += w.storeTimeout()
		}
		if g.end > most {
			w.violate("G4", "%s, but its ctx ended at %v", show(g), g.leave)
		}
	}
	if took, most := g.end-g.begin, w.mostGet(); took > most {
		w.violate("G7", "%s took %v, more than %v", show(g), took, most)
	}
}

// mostGet returns the longest time that a Get whose ctx does not end may take. In the worst case, loads of all other
// keys use the load slots first, for LoadTimeout each. Then another node loads the key and fails, and then this node
// loads.
func (w *world) mostGet() time.Duration {
	turns := time.Duration(1 + (keys-1)/w.cfg.MaxLoads)
	return (turns+2)*(w.cfg.LoadTimeout+w.cfg.LockTTL) + 10*w.storeTimeout() + time.Second
}

// checkTakeover checks the first half of G4: another node takes over from a frozen node within LockTTL + 500 ms. Gets
// that any other fault may have delayed are not checked.
func (w *world) checkTakeover(g *get) {
	from := g.begin - grace - w.cfg.LoadTimeout
	for _, f := range w.faults {
		if f.from <= g.end && from <= f.end() && (f.fault != frozen || f.node == g.life.node) {
			return
		}
	}
	if took, most := g.end-g.begin, w.cfg.LockTTL+500*ms+6*maxLoad; took > most && g.op != "refresh" {
		w.violate("G4", "%s took %v, more than %v, although only other nodes are frozen", show(g), took, most)
	}
}
