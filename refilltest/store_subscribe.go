package refilltest

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill/driver"
)

var subscribeCases = []storeCase{
	{
		"subscribe-in-order",
		`Every kind of announcement reaches every subscriber of the name on every node, with its fields and in the order of
the steps. Subscribed comes first. Waiters learn nothing in another way: if a kind is missing, they sleep until the
lease would have ended; if a field is missing, each node reads the record once more.`,
		subscribeInOrder,
	},
	{
		"subscribe-names-apart",
		`A subscription gets only the keys of its own name: "a" gets neither "ab" nor "a.b". Otherwise a Loader drops or takes
values of another Loader.`,
		subscribeNamesApart,
	},
	{
		"subscribe-any-key",
		`An announcement carries the key byte for byte. With an encoding that changes some bytes (JSON, UTF-8), the waiters of
some keys never wake.`,
		subscribeAnyKey,
	},
	{
		"subscribe-record",
		`A record of up to MaxAnnouncedRecord bytes travels with its announcement, byte for byte. That saves each node a read
per refill. A larger record does not travel, or each refill could send a megabyte to every node.`,
		subscribeRecord,
	},
	{
		"subscribe-nothing-freed",
		`A step that frees nothing announces nothing. A wake-up without a cause sends all waiters back to the store: a
stampede.`,
		subscribeNothingFreed,
	},
	{
		"subscribe-burst",
		`Announcements in quick succession are all delivered, in order. If a buffer drops some, nodes keep an old value until
LocalTTL, unnoticed.`,
		subscribeBurst,
	},
	{
		"subscribe-stop",
		`stop returns when handle no longer runs. handle is not called again, and other subscriptions continue. A Loader frees
what handle uses as soon as stop has returned.`,
		subscribeStop,
	},
}

func subscribeInOrder(s *stores) {
	subs := []*subscription{s.subscribe(s.A, "product"), s.subscribe(s.A, "product"), s.subscribe(s.B, "product")}
	allGet := func(n driver.Announcement) {
		s.Helper()
		n.Key = key
		for _, sub := range subs {
			sub.want(n)
		}
	}
	v1, v2 := s.record("a#1", "v1"), s.record("b#1", "v2")
	s.start(s.A, key, "a#1", long)
	s.publish(s.A, key, "a#1", v1, driver.Stored)
	allGet(driver.Announcement{Kind: driver.Filled, Token: "a#1", Record: v1})

	s.start(s.B, key, "b#1", long)
	p := driver.PublishRequest{Key: key, Token: "b#1", Replaced: "a#1", Record: v2, Keep: long}
	_, err := s.B.Publish(s.ctx, p)
	s.ok(err, "Publish")
	allGet(driver.Announcement{Kind: driver.Filled, Token: "b#1", Replaced: "a#1", Record: v2})

	s.start(s.A, key, "a#2", long)
	s.fail(s.A, key, "a#2", "boom", long)
	allGet(driver.Announcement{Kind: driver.Failed, Token: "a#2", Failure: "boom"})
	s.expire(s.B, "b#2", key)
	allGet(driver.Announcement{Kind: driver.Expired, Token: "b#2"})
	s.start(s.A, key, "a#3", long)
	s.release(s.A, key, "a#3")
	allGet(driver.Announcement{Kind: driver.Released, Token: "a#3"})
	s.invalidate(s.B, "b#3", key)
	allGet(driver.Announcement{Kind: driver.Invalidated, Token: "b#3"})
	subs[0].wantNoMore(key)
	for _, sub := range subs[1:] {
		sub.want(driver.Announcement{Kind: driver.Invalidated, Key: key, Token: "end#1"})
	}
}

func subscribeNamesApart(s *stores) {
	names := []string{"a", "ab", "a.b", "a-b", "A", "b", "a_", "aa"}
	subs := make([]*subscription, len(names))
	for i, name := range names {
		subs[i] = s.subscribe(s.A, name)
	}
	for _, name := range names {
		s.invalidate(s.B, "b#1", name+":b:42")
		s.expire(s.B, "b#1", name+":b:42")
	}
	for i, name := range names {
		subs[i].want(driver.Announcement{Kind: driver.Invalidated, Key: name + ":b:42", Token: "b#1"})
		subs[i].want(driver.Announcement{Kind: driver.Expired, Key: name + ":b:42", Token: "b#1"})
		subs[i].wantNoMore(name + ":b:42")
	}
}

func subscribeAnyKey(s *stores) {
	for _, k := range oddKeys() {
		if !strings.HasPrefix(k, "product:") {
			continue
		}
		sub := s.subscribe(s.A, "product")
		v := s.record("b#1", k)
		s.fill(s.B, k, "b#1", v)
		sub.want(driver.Announcement{Kind: driver.Filled, Key: k, Token: "b#1", Record: v})
		s.expire(s.B, "b#2", k)
		sub.want(driver.Announcement{Kind: driver.Expired, Key: k, Token: "b#2"})
		sub.wantNoMore(k)
		sub.stop()
	}
}

func subscribeRecord(s *stores) {
	sub := s.subscribe(s.B, "product")
	empty := len(s.record("a#1", ""))
	const limit = driver.MaxAnnouncedRecord
	for _, size := range []int{empty, 1000, limit - 1, limit, limit + 1, 100 << 10} {
		payload := make([]byte, size-empty)
		rand.Read(payload)
		v := s.record("a#1", string(payload))
		s.fill(s.A, key, "a#1", v)
		want := driver.Announcement{Kind: driver.Filled, Key: key, Token: "a#1"}
		if size <= limit {
			want.Record = v
		}
		sub.want(want)
	}
	sub.wantNoMore(key)
}

func subscribeNothingFreed(s *stores) {
	s.fill(s.A, key, "a#1", s.record("a#1", "v1"))
	s.start(s.A, key, "a#2", long)
	sub := s.subscribe(s.B, "product")
	s.wantValue(key, s.record("a#1", "v1"))
	s.acquireKey(s.B, key, "b#1", long, driver.Try)
	s.acquireKey(s.B, key, "b#1", long, driver.Wait)
	s.acquireKey(s.B, key, "b#1", long, driver.Force)
	s.acquireKey(s.A, key, "a#2", long, driver.Wait)
	s.acquire(s.B, driver.AcquireRequest{
		Key: key, Token: "b#1", Seen: "a#0", LeaseTTL: long, ClaimTTL: long, Mode: driver.Wait,
	})
	s.renew(s.A, key, "a#2", true)
	s.renew(s.B, key, "b#1", false)
	s.publish(s.B, key, "b#1", s.record("b#1", "x"), driver.Rejected)
	s.fail(s.B, key, "b#1", "boom", long)
	s.release(s.B, key, "b#1")
	sub.wantNoMore(key)
	s.release(s.B, key, "b#1")
	s.fail(s.B, key, "b#1", "boom", 0)
	sub.wantNoMore(key)
}

func subscribeBurst(s *stores) {
	const burst = 500
	sub := s.subscribe(s.B, "product")
	for i := range burst {
		s.invalidate(s.A, fmt.Sprintf("a#%d", i), key)
	}
	for i := range burst {
		sub.want(driver.Announcement{Kind: driver.Invalidated, Key: key, Token: fmt.Sprintf("a#%d", i)})
	}
}

// subscribeStop stops a subscription while handle runs and more announcements are queued.
func subscribeStop(s *stores) {
	const burst = 10
	sub := s.subscribe(s.A, "product")
	subscribed, inside, leave := make(chan struct{}), make(chan struct{}), make(chan struct{})
	stopped, announced := make(chan struct{}), make(chan struct{})
	closeSubscribed, enter := sync.OnceFunc(func() { close(subscribed) }), sync.OnceFunc(func() { close(inside) })
	var returned, late atomic.Bool
	stop := s.A.Subscribe("product", func(n driver.Announcement) {
		switch n.Kind {
		case driver.Subscribed:
			closeSubscribed()
		case driver.Invalidated:
			enter()
			<-leave
			letOthersRun()
			if returned.Load() {
				late.Store(true)
			}
		}
	})
	wait(s, subscribed, "Subscribed")
	// The calls of Invalidate run on a goroutine of their own. In this case handle blocks, although handle must not do
	// so. So any call of the store may wait for handle.
	go func() {
		defer close(announced)
		for range burst {
			if err := s.B.Invalidate(s.ctx, "b#1", key); err != nil {
				s.Errorf("Invalidate: %v", err)
			}
		}
	}()
	wait(s, inside, "an announcement")
	letOthersRun()
	go func() { stop(); returned.Store(true); close(stopped) }()
	letOthersRun()
	select {
	case <-stopped:
		s.Errorf("stop returned while handle was running")
	default:
	}
	close(leave)
	wait(s, stopped, "the return of stop")
	wait(s, announced, "the return of Invalidate")
	for range burst {
		sub.want(driver.Announcement{Kind: driver.Invalidated, Key: key, Token: "b#1"})
	}
	sub.wantNoMore(key)
	for range 3 { // gives a handle that wrongly runs after stop the time to run
		letOthersRun()
	}
	if late.Load() {
		s.Fatalf("handle ran after stop had returned")
	}
}

// letOthersRun lets other goroutines run. It does not sleep: in a bubble a sleep does not end while a goroutine waits
// for a mutex. If letOthersRun is too short, a broken store may pass this time, but a correct store never fails.
func letOthersRun() {
	for range 1000 {
		runtime.Gosched()
	}
}

// subscription collects the announcements of one name.
type subscription struct {
	s             *stores
	announcements chan driver.Announcement
	stop          func()
}

// maxBuffered is how many announcements a subscription can hold. No case causes more.
const maxBuffered = 1 << 12

// subscribe subscribes and waits for Subscribed. It ignores warnings: they are about the configuration of the server,
// not about the rules of the interface.
func (s *stores) subscribe(st driver.Store, name string) *subscription {
	s.Helper()
	sub := &subscription{s: s, announcements: make(chan driver.Announcement, maxBuffered)}
	sub.stop = sync.OnceFunc(st.Subscribe(name, func(n driver.Announcement) {
		if n.Kind == driver.Warning {
			return
		}
		select {
		case sub.announcements <- n:
		default: // only a broken store announces so much
		}
	}))
	s.Cleanup(sub.stop)
	if n := sub.next("Subscribed"); n.Kind != driver.Subscribed {
		s.Fatalf("Subscribe(%q): the first announcement is %s, want Subscribed", name, announcementText(n))
	}
	return sub
}

// next waits for the next announcement. The failure message contains want, which describes that announcement.
func (sub *subscription) next(want string) driver.Announcement {
	sub.s.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case n := <-sub.announcements:
		return n
	case <-timer.C:
		sub.s.Fatalf("no announcement for %v, want %s", patience, want)
		return driver.Announcement{}
	}
}

// want demands the next announcement.
func (sub *subscription) want(want driver.Announcement) {
	sub.s.Helper()
	if got := sub.next(announcementText(want)); !sameAnnouncement(got, want) {
		sub.s.Fatalf("the next announcement is %s\n want %s", announcementText(got), announcementText(want))
	}
}

// wantNoMore demands that no other announcement about key is left. It invalidates the key, and demands that the next
// announcement is about this Invalidate. It need not wait for a fixed time, because announcements about one key come
// in order.
func (sub *subscription) wantNoMore(key string) {
	sub.s.Helper()
	sub.s.invalidate(sub.s.A, "end#1", key)
	sub.want(driver.Announcement{Kind: driver.Invalidated, Key: key, Token: "end#1"})
}

func sameAnnouncement(a, b driver.Announcement) bool {
	return a.Kind == b.Kind && a.Key == b.Key && a.Token == b.Token && a.Replaced == b.Replaced &&
		a.Failure == b.Failure && a.At.Equal(b.At) && bytes.Equal(a.Record, b.Record)
}

func announcementText(n driver.Announcement) string {
	kind := nameOf(int(n.Kind), "no kind", "Subscribed", "Disconnected", "Warning", "Filled", "Failed",
		"Invalidated", "Expired", "Released", "TagInvalidated", "TagExpired")
	return fmt.Sprintf("%s{Key: %s, Token: %q, Replaced: %q, Record: %s, Failure: %q, At: %v, Err: %v}",
		kind, shown([]byte(n.Key)), n.Token, n.Replaced, shown(n.Record), n.Failure, n.At, n.Err)
}

// shown returns b in readable form. It cuts a long b.
func shown(b []byte) string {
	const most = 48
	switch {
	case b == nil:
		return "nothing"
	case len(b) > most:
		return fmt.Sprintf("%q… (%d bytes)", b[:most], len(b))
	}
	return fmt.Sprintf("%q", b)
}
