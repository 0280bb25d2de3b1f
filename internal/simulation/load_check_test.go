package simulation

import (
	"fmt"
	"slices"
	"time"
)

// This file contains the rules about loads.

// checkLoads checks all rules about loads.
func (w *world) checkLoads() {
	byKey := map[int][]*load{}
	for _, b := range w.db.loads {
		byKey[b.key] = append(byKey[b.key], b)
		w.checkWanted(b)
	}
	for _, loads := range byKey {
		for i, b := range loads {
			for _, earlier := range loads[max(0, i-6):i] {
				w.checkPair(earlier, b)
			}
		}
		w.checkProbes(loads)
	}
	w.checkSlots()
}

// checkPair checks G1 for load a and a later load b of the same key. The two loads must not run at once, and b must not
// begin before the value of a has expired.
func (w *world) checkPair(a, b *load) {
	from := a.begin - grace
	if w.any(from-w.cfg.LoadTimeout, b.begin, anyNode, a.key, deaf, frozen, restart, evict, full) ||
		w.any(from, b.begin, anyNode, anyKey, callFaults...) || a.value.NoStore || w.remembersNoStore(a) {
		return
	}
	if a.end < 0 || b.begin < a.end {
		if !w.changed(a, b) && !w.abandoned(a) && !w.outlived(a, b.begin) {
			w.violate("G1", "two loads at once: %s, %s", showLoad(a), showLoad(b))
		}
		return
	}
	ttl, _, _ := w.spans(a.value)
	if w.db.absent(a.version) {
		ttl = min(ttl, w.notFoundTTL(ttl))
	}
	soonest := ttl
	if w.cfg.Jitter >= 0 {
		soonest -= ttl / 10
	}
	if w.cfg.EarlyRefresh > 0 {
		soonest = min(soonest, time.Duration(float64(ttl)*(w.cfg.EarlyRefresh-0.1)))
	}
	if w.any(from, a.begin, a.node, anyKey, sluggish) {
		soonest -= w.storeTimeout() // the life of a value begins when the store executes Acquire, and the reply was late
	}
	if a.ok && b.begin < a.begin+soonest-tick && !w.disturbed(a, b) && !w.abandoned(a) && !w.firstUse(a) {
		w.violate("G1", "loaded again before it expired: %s, %s", showLoad(a), showLoad(b))
	}
}

func (w *world) notFoundTTL(ttl time.Duration) time.Duration {
	switch {
	case w.cfg.NotFoundTTL < 0:
		return 0
	case w.cfg.NotFoundTTL == 0:
		return min(ttl, 10*time.Second)
	}
	return w.cfg.NotFoundTTL
}

// remembersNoStore reports whether a load of the key of a has called NoStore. Nodes may remember the no-store, and then
// callers load in parallel.
func (w *world) remembersNoStore(a *load) bool {
	return slices.ContainsFunc(w.db.loads, func(b *load) bool { return b.key == a.key && b.value.NoStore })
}

// disturbed reports whether load b may begin before the value of load a has expired. A change of the key, a Refresh of
// the key, or the Close of the Loader of a allows this.
func (w *world) disturbed(a, b *load) bool {
	refreshed := slices.ContainsFunc(w.calls, func(g *get) bool {
		return g.key == a.key && (g.op == "refresh" || g.op == "refresh-result") &&
			g.begin <= b.begin && a.begin-tick <= g.end
	})
	closed := a.life.closeBegan >= 0 && a.end >= a.life.closeBegan
	return w.changed(a, b) || refreshed || closed
}

// outlived reports whether load a has outlived LoadTimeout at the moment at. For its node, load a has then failed, so
// another node may load.
func (w *world) outlived(a *load, at time.Duration) bool { return at >= a.begin+w.cfg.LoadTimeout }

// firstUse reports whether the value of load a may be invalid from the beginning, in this way: 1. Load a begins. 2.
// Another node publishes the first value with a tag that the value of a will have. 3. EnsureTags of that node makes
// values of the tag invalid if their load began more than a second before the earliest load of that node. This is
// possible only if load a takes longer than a second.
func (w *world) firstUse(a *load) bool {
	return len(w.allTags(a.key)) > 0 && a.end-a.begin > time.Second-tick
}

// abandoned reports whether a caller of the key of a has left during the bulk load a. The bulk load may still run for
// other keys.
func (w *world) abandoned(a *load) bool {
	return w.bulk && slices.ContainsFunc(w.calls, func(g *get) bool {
		return g.life == a.life && g.key == a.key && g.leave > 0 && a.begin <= g.leave && (a.end < 0 || g.leave <= a.end+tick)
	})
}

// changed reports whether the key of a and b was invalidated or expired between the start of a and the start of b.
func (w *world) changed(a, b *load) bool {
	return slices.ContainsFunc(w.changes, func(c *change) bool {
		return slices.Contains(c.keys, a.key) && c.begin <= b.begin && a.begin-tick <= c.end+grace
	})
}

// checkWanted checks that a load begins during a call that asks for its key, or soon after that call. A background
// refresh that waited longer for a load slot would break this rule.
func (w *world) checkWanted(b *load) {
	if w.any(b.begin-w.cfg.LoadTimeout-grace, b.begin, b.node, anyKey, callFaults...) {
		return
	}
	const late = 300 * ms
	if !slices.ContainsFunc(w.calls, func(g *get) bool {
		most := g.end + late + w.storeTimeout()
		if w.any(0, b.begin, b.node, anyKey, loadFaults...) { // after failed loads, the node may have let others go first
			most += w.cfg.LockTTL
		}
		if w.cfg.SoftTimeout > 0 || g.err != nil { // the refill of g may still wait for the lease of another node
			most += w.cfg.LoadTimeout + w.cfg.LockTTL
		}
		return g.life == b.life && g.key == b.key && g.begin <= b.begin && b.begin <= most
	}) {
		w.violate("G7", "no caller asked for %s", showLoad(b))
	}
}

// checkProbes checks a part of G6: after loads of a key have failed on two different nodes, no node loads the key until
// ErrorTTL is over.
func (w *world) checkProbes(loads []*load) {
	if w.cfg.ErrorTTL < 0 || w.bulk || w.remembersNoStore(loads[0]) {
		return
	}
	errorTTL := w.cfg.ErrorTTL
	if errorTTL == 0 {
		errorTTL = time.Second
	}
	for i, b := range loads {
		if i < 2 {
			continue
		}
		x, y := loads[i-2], loads[i-1]
		from, apart := x.begin-grace, errorTTL-tick
		failed := plainFailure(x) && plainFailure(y) && x.life != y.life && y.begin >= x.end && b.begin >= y.end
		soon := y.begin-x.end <= apart && b.begin-y.end <= apart
		if failed && soon && !w.disturbed(x, b) && !w.any(from, b.begin, anyNode, anyKey, callFaults...) &&
			!w.any(from, b.begin, anyNode, anyKey, storeFaults...) {
			w.violate("G6", "a third probe: %s, %s, %s", showLoad(x), showLoad(y), showLoad(b))
		}
	}
}

// plainFailure reports whether load b failed because its load function returned errDatabase.
func plainFailure(b *load) bool { return b.end >= 0 && !b.ok && !b.left && b.fault == failing }

// checkSlots checks a part of G7. At most MaxLoads loads of a Loader that have not outlived LoadTimeout may run at
// once. Together with loads that have outlived LoadTimeout, at most 2·MaxLoads loads may run.
func (w *world) checkSlots() {
	for _, b := range w.db.loads {
		now, inTime, outlived := b.begin, map[int]bool{}, map[int]bool{}
		for _, other := range w.db.loads[:b.value.Load+1] {
			switch {
			case other.life != b.life, other.end >= 0 && other.end <= now && other != b:
			case now-other.begin >= w.cfg.LoadTimeout:
				outlived[other.call] = true
			default:
				inTime[other.call] = true
			}
		}
		if len(inTime) > w.cfg.MaxLoads || len(inTime)+len(outlived) > 2*w.cfg.MaxLoads {
			w.violate("G7", "%d loads at once, and %d that outlived LoadTimeout, at %s", len(inTime), len(outlived), showLoad(b))
			return
		}
	}
}

func show(g *get) string {
	return fmt.Sprintf("client %d %s of key %d on node %d, %v-%v: %v v%d (load %d), %v",
		g.client, g.op, g.key, g.life.node, g.begin, g.end, g.outcome, g.value.Version, g.value.Load, g.err)
}

func showChange(c *change) string {
	return fmt.Sprintf("change of %v to %v on node %d, %v-%v, tags %v, expire %v, %v",
		c.keys, c.version, c.life.node, c.begin, c.end, c.tags, c.expire, c.err)
}

func showLoad(b *load) string {
	return fmt.Sprintf("load %d of key %d v%d on node %d, %v-%v, ok %v, left %v, %s",
		b.value.Load, b.key, b.version, b.node, b.begin, b.end, b.ok, b.left, b.fault)
}
