package simulation

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

// This file runs a schedule. It opens and closes the nodes, starts the faults, and records the trace.

// world is one run of a schedule.
type world struct {
	*schedule
	start  time.Time
	server *server
	db     *database
	node   [nodes]atomic.Pointer[life]
	tasks  sync.WaitGroup // of the goroutines that the method later has started

	// tagLost is set if the schedule evicts a tag state. After an eviction, EnsureTags may revive the value of a load that
	// was running when the tag was invalidated (see driver.Store). So the checker then ignores invalidations by tag.
	tagLost bool

	mu         sync.Mutex // guards the fields below
	trace      []event
	violations []string
	calls      []*get
	changes    []*change
	lives      []*life
}

// life is one Loader of a node.
type life struct {
	*refill.Loader[value]
	node         int
	store        *nodeStore
	closeBegan   time.Duration // when Close was called; -1 = not called
	closeEnded   time.Duration
	closeFailure error
}

// event is one line of the trace. report formats the events of a schedule that has failed.
type event struct {
	at     time.Duration
	node   int
	format string
	args   []any
}

func (w *world) now() time.Duration { return time.Since(w.start) }

func (w *world) log(node int, format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trace = append(w.trace, event{w.now(), node, format, args})
}

func (w *world) violate(rule, format string, args ...any) {
	text := fmt.Sprintf("%v %s: %s", w.now(), rule, fmt.Sprintf(format, args...))
	w.log(anyNode, "%s", "VIOLATION "+text)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.violations = append(w.violations, text)
}

// later runs f in a goroutine of its own, after the simulated time d.
func (w *world) later(d time.Duration, f func()) {
	w.tasks.Go(func() {
		time.Sleep(d)
		f()
	})
}

// run runs a schedule, and then checks all rules. The caller is in a synctest bubble.
func run(t *testing.T, s *schedule) *world {
	w := &world{schedule: s, start: time.Now()}
	w.server, w.db = w.newServer(), w.newDatabase()
	for n := range nodes {
		w.open(t, n)
	}
	w.haveFaults()
	var group sync.WaitGroup
	for c := range clients {
		group.Go(func() { w.client(c) })
	}
	if w.restart != anyNode {
		group.Go(func() {
			time.Sleep(w.at)
			l := w.node[w.restart].Load()
			w.close(l)
			w.open(t, w.restart)
		})
	}
	group.Wait()
	for n := range nodes {
		group.Go(func() { w.close(w.node[n].Load()) })
	}
	group.Wait()
	close(w.db.release)
	w.tasks.Wait()
	synctest.Wait() // until load functions that Close did not wait for have returned
	w.verify()
	return w
}

// open makes the Loader of a node, and registers the Loader in w.
func (w *world) open(t *testing.T, node int) {
	l := &life{node: node, closeBegan: -1}
	l.store = &nodeStore{server: w.server, node: node, rand: random(w.seed, 40+node)}
	cfg, err := w.cfg, error(nil)
	cfg.Shared = l.store
	cfg.OnEvent = func(e refill.Event) {
		if e.Kind != refill.EventConfigWarning {
			w.log(node, "event %v %s %v %v", e.Kind, e.Key, e.Outcome, e.Err)
		}
	}
	if w.bulk {
		l.Loader, err = refill.NewBulk("sim", w.db.many(l), cfg)
	} else {
		l.Loader, err = refill.New("sim", w.db.one(l), cfg)
	}
	if err != nil {
		t.Error(w.schedule, err)
		panic(err)
	}
	w.mu.Lock()
	w.lives = append(w.lives, l)
	w.mu.Unlock()
	w.node[node].Store(l)
}

// close closes a Loader. It notes a violation of G8 if Close takes longer than LoadTimeout + 8 times StoreTimeout.
func (w *world) close(l *life) {
	w.mu.Lock()
	l.closeBegan = w.now()
	w.mu.Unlock()
	w.log(l.node, "close")
	err := l.Close()
	w.log(l.node, "closed: %v", err)
	w.mu.Lock()
	l.closeEnded, l.closeFailure = w.now(), err
	took := l.closeEnded - l.closeBegan
	w.mu.Unlock()
	if most := w.loadTimeout() + 8*w.storeTimeout(); took > most {
		w.violate("G8", "node %d: Close took %v, more than %v", l.node, took, most)
	}
}

func (w *world) loadTimeout() time.Duration  { return w.cfg.LoadTimeout }
func (w *world) storeTimeout() time.Duration { return min(250*ms, w.cfg.LockTTL/4) }

// haveFaults schedules the faults that begin at a fixed moment: lost subscriptions, restarts of the store and
// evictions. The other faults need no start, because each call of the store and each load looks them up with active.
func (w *world) haveFaults() {
	r := random(w.seed, 1)
	for _, f := range w.faults {
		each := func(do func(*link)) func() {
			return func() {
				for _, l := range w.linksOf(f.node) {
					do(l)
				}
			}
		}
		switch f.fault {
		case unsubscribed:
			w.later(f.from, each((*link).lose))
			w.later(f.to, each(func(l *link) { l.returns(true) }))
		case toldLate:
			w.later(f.from, each((*link).loseSilently))
			w.later(f.to, each(func(l *link) { l.returns(false) }))
		case restart:
			reconnect := []time.Duration{}
			for range nodes {
				reconnect = append(reconnect, between(r, 0, time.Second))
			}
			w.later(f.from, func() { w.server.restart(reconnect) })
		case evict:
			w.evictions(r, f)
		}
	}
}

// linksOf returns the links of a node, or the links of all nodes if node is anyNode.
func (w *world) linksOf(node int) (links []*link) {
	w.server.linkMu.Lock()
	defer w.server.linkMu.Unlock()
	for l := range w.server.links {
		if node == anyNode || l.node == node {
			links = append(links, l)
		}
	}
	return links
}

// evictions lets the store lose one to four records or tag states, each at a random moment of the fault f.
func (w *world) evictions(r *rand.Rand, f window) {
	for range 1 + r.IntN(4) {
		k, at := r.IntN(keys), between(r, f.from, f.to)
		tags := r.IntN(2) == 0 && len(w.allTags(k)) > 0
		if tags {
			w.tagLost = true
		}
		w.later(at, func() {
			s := w.server
			s.callMu.Lock()
			defer s.callMu.Unlock()
			if tags {
				w.log(anyNode, "evict tag of key %d", k)
				s.ages["sim:"+w.allTags(k)[0]]++
				return
			}
			w.log(anyNode, "evict key %d", k)
			_ = s.mem.Invalidate(background, evictedBy, "sim:"+keyName(k))
		})
	}
}

// allTags returns the tags of the values of key k.
func (w *world) allTags(k int) (tags []string) {
	if w.tags {
		tags = append(tags, tagName(k))
	}
	return append(tags, w.cfg.Tags...)
}

// report returns the settings of the schedule, and the last lines of its trace, as text.
func (w *world) report(lines int) string {
	var b strings.Builder
	fmt.Fprintln(&b, w.schedule)
	from := max(0, len(w.trace)-lines)
	for _, e := range w.trace[from:] {
		fmt.Fprintf(&b, "%12v  %2d  %s\n", e.at, e.node, fmt.Sprintf(e.format, e.args...))
	}
	return b.String()
}
