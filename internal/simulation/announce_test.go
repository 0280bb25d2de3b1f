package simulation

import (
	"strings"
	"sync"
	"time"

	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file contains the subscriptions of the nodes.

// link is a subscription of one node. It receives the announcements of the store and passes these announcements to the
// node, in order, after a delay. Announcements that arrive while the link is down are lost.
type link struct {
	*nodeStore
	name   string
	handle func(driver.Announcement)

	linkMu sync.Mutex    // guards the fields below
	up     bool          // false: announcements are lost
	ended  bool          // stop was called
	queue  []news        // announcements that pump has not taken yet
	last   time.Duration // the latest news.due of all announcements so far
	mem    *memory.Store // the store to which the link is connected; nil while the link is down
	cut    func()        // ends the subscription of mem
	more   chan struct{} // wakes pump after an announcement was queued; holds one signal
	quit   chan struct{} // closed by stop, ends pump
	done   chan struct{} // closed when pump has ended
}

// news is an announcement on its way to a node.
type news struct {
	driver.Announcement
	due time.Duration // when the node gets the announcement
}

// Subscribe implements driver.Store.
func (n *nodeStore) Subscribe(name string, handle func(driver.Announcement)) (stop func()) {
	l := &link{
		nodeStore: n, name: name, handle: handle,
		more: make(chan struct{}, 1), quit: make(chan struct{}), done: make(chan struct{}),
	}
	go l.pump()
	n.server.linkMu.Lock()
	n.links[l] = struct{}{}
	n.server.linkMu.Unlock()
	l.connect()
	return sync.OnceFunc(l.stop)
}

// stop ends the subscription, and waits until pump has ended.
func (l *link) stop() {
	l.server.linkMu.Lock()
	delete(l.links, l)
	l.server.linkMu.Unlock()
	l.linkMu.Lock()
	l.ended = true
	cut := l.cut
	l.linkMu.Unlock()
	if cut != nil {
		cut()
	}
	close(l.quit)
	<-l.done
}

// connect subscribes to the shared store, unless a fault keeps the link down at this moment. It does nothing if stop
// was called, or if the link is already connected to this store.
func (l *link) connect() {
	l.callMu.Lock()
	mem := l.server.mem
	l.callMu.Unlock()
	l.linkMu.Lock()
	if l.ended || l.mem == mem || l.active(l.now(), l.node, anyKey, unsubscribed, toldLate) != nil {
		l.linkMu.Unlock()
		return
	}
	old := l.cut
	l.mem = mem
	l.linkMu.Unlock()
	if old != nil {
		old()
	}
	cut := mem.Subscribe(l.name, func(a driver.Announcement) { l.receive(mem, a) })
	l.linkMu.Lock()
	l.cut = cut
	ended := l.ended
	l.linkMu.Unlock()
	if ended {
		cut()
	}
}

// receive handles the announcement a of the store from. It queues the announcement for the node, unless the link is
// down or connected to another store, or a fault loses the announcement.
//
// Before that, receive hides from the node what a real store would not announce. It removes the suffix that
// server.inner has added to a tag. It drops the announcement of a simulated eviction. It replaces the announcement of a
// value that the full store did not keep by Released.
func (l *link) receive(from *memory.Store, a driver.Announcement) {
	switch a.Kind {
	case driver.TagInvalidated, driver.TagExpired:
		a.Key, _, _ = strings.Cut(a.Key, "@")
	case driver.Invalidated:
		if a.Token == evictedBy {
			return
		}
	case driver.Filled:
		l.callMu.Lock()
		isFull := l.full[a.Token]
		l.callMu.Unlock()
		if isFull {
			a = driver.Announcement{Kind: driver.Released, Key: a.Key, Token: a.Token}
		}
	}
	l.linkMu.Lock()
	defer l.linkMu.Unlock()
	if a.Kind == driver.Subscribed {
		l.up = true
	}
	lost := a.Kind != driver.Subscribed && l.active(l.now(), l.node, anyKey, unnoticed) != nil
	if from == l.mem && l.up && !lost {
		l.push(a)
	}
}

// lose cuts the link, and tells the node at once that the subscription is lost.
func (l *link) lose() {
	l.linkMu.Lock()
	defer l.linkMu.Unlock()
	l.goDown()
	l.push(driver.Announcement{Kind: driver.Disconnected, Err: errNetwork})
}

// loseSilently cuts the link, and does not tell the node.
func (l *link) loseSilently() {
	l.linkMu.Lock()
	defer l.linkMu.Unlock()
	l.goDown()
}

// goDown marks the link as down. The caller holds linkMu.
func (l *link) goDown() { l.up, l.mem = false, nil }

// returns connects the link again after a fault. If told is false, the node does not know that the link was down, so
// returns first tells the node that the subscription was lost.
func (l *link) returns(told bool) {
	if !told {
		l.linkMu.Lock()
		l.push(driver.Announcement{Kind: driver.Disconnected, Err: errNetwork})
		l.linkMu.Unlock()
	}
	l.connect()
}

// push queues an announcement for the node, with a random delay. The caller holds linkMu.
func (l *link) push(a driver.Announcement) {
	l.nodeStore.mu.Lock()
	delay := between(l.rand, 50*time.Microsecond, ms)
	if w := l.active(l.now(), l.node, anyKey, lateNews); w != nil {
		delay = between(l.rand, 0, 500*ms)
	}
	l.nodeStore.mu.Unlock()
	l.last = max(l.last, l.now()+delay)
	l.queue = append(l.queue, news{a, l.last})
	select {
	case l.more <- struct{}{}:
	default:
	}
}

// pump passes each queued announcement to the node when it is due, or when a freeze of the node ends. pump runs until
// stop closes quit.
func (l *link) pump() {
	defer close(l.done)
	for {
		select {
		case <-l.quit:
			return
		case <-l.more:
		}
		l.linkMu.Lock()
		queue := l.queue
		l.queue = nil
		l.linkMu.Unlock()
		for _, a := range queue {
			due := a.due
			if w := l.active(max(due, l.now()), l.node, anyKey, frozen); w != nil {
				due = w.to
			}
			if !l.sleep(due) {
				return
			}
			l.log(l.node, "news %d %s %s", a.Kind, a.Key, a.Token)
			l.handle(a.Announcement)
		}
	}
}

// sleep waits until the simulated moment until. It returns false if stop closes quit before that moment.
func (l *link) sleep(until time.Duration) bool {
	timer := time.NewTimer(until - l.now())
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.quit:
		return false
	}
}
