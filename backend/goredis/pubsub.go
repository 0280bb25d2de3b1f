package goredis

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/driver"
)

// watchDelay is how long the Store waits after the first Watch before it opens a subscription. Taking a free lock
// needs less time, so only a caller that has to wait for a lock causes a subscription.
const watchDelay = 5 * time.Millisecond

// pubsub passes announcements to its users, which are subscribers and watchers. While there is a user, one
// subscription runs, see subscription.go.
//
// handle functions run without a mutex held, because they may call code of the user. Announcements are delivered one at
// a time, in order of arrival, on the goroutine that read them. There is one exception. subscribe itself delivers the
// current state to the new listener, even while another delivery is running. If subscribe waited for the running
// delivery, it could wait for ever: the handle that is being called may itself have called subscribe, or may wait for
// the goroutine that called subscribe. In every case, the calls of one handle are made one at a time, and no call is
// made after the stop of that handle has returned.
//
// Lock order: life before mu, delivery before mu, mu before selfCheck.mu. life and delivery are never taken while mu is
// held.
type pubsub struct {
	userClient redis.UniversalClient
	channel    string

	own       atomic.Pointer[ownClient] // written only by the running subscription; nil if none runs
	selfCheck selfCheck

	life  sync.Mutex         // guards users, end and ended; held while the subscription starts or ends
	users int                // how many subscribers and watchers there are
	end   context.CancelFunc // ends the subscription
	ended chan struct{}      // closed when the subscription has ended

	// delivery is full while an announcement is delivered. A channel serves its senders in order, and a mutex need not.
	// So a flood of announcements from one shard of a Ring does not hold up the announcements of another shard.
	delivery chan struct{}

	mu        sync.Mutex              // guards all below; released while a handle runs
	state     driver.AnnouncementKind // 0 when a subscription begins, then Subscribed or Disconnected
	warnings  []error                 // about the server, found by this subscription
	listeners map[*listener]struct{}
	watchers  map[string]map[chan struct{}]struct{} // by "name:key"; each channel holds one wake-up

	returned sync.Cond // on mu; signals that a handle has returned
}

type listener struct {
	name     string
	handle   func(driver.Announcement)
	handling bool // handle runs; guarded by pubsub.mu
}

func (p *pubsub) setUp(userClient redis.UniversalClient, channel string) {
	p.userClient, p.channel = userClient, channel
	p.listeners = make(map[*listener]struct{})
	p.watchers = make(map[string]map[chan struct{}]struct{})
	p.delivery = make(chan struct{}, 1)
	p.returned.L = &p.mu
}

// addUser counts one more user. For the first user, it starts the subscription after delay.
func (p *pubsub) addUser(delay time.Duration) {
	p.life.Lock()
	defer p.life.Unlock()
	if p.users++; p.users > 1 {
		return
	}
	var ctx context.Context
	ctx, p.end = context.WithCancel(context.Background())
	ended := make(chan struct{})
	p.ended = ended
	go func() {
		defer close(ended)
		p.run(ctx, delay)
	}()
}

// removeUser counts one user fewer. For the last user, it ends the subscription and waits for its end. removeUser holds
// life while it waits. That is no deadlock: when the last user leaves, no listener is left, so no handle runs that
// could wait for life.
func (p *pubsub) removeUser() {
	p.life.Lock()
	defer p.life.Unlock()
	if p.users--; p.users == 0 {
		p.end()
		<-p.ended
	}
}

func (p *pubsub) subscribe(name string, handle func(driver.Announcement)) (stop func()) {
	p.addUser(0)
	l := &listener{name: name, handle: handle}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listeners[l] = struct{}{}
	state, warnings := p.state, p.warnings
	if state == driver.Subscribed {
		p.call(l, driver.Announcement{Kind: driver.Subscribed})
	}
	for _, err := range warnings {
		p.call(l, driver.Announcement{Kind: driver.Warning, Err: err})
	}
	return sync.OnceFunc(func() {
		p.removeListener(l)
		p.removeUser()
	})
}

// removeListener removes the listener and returns when its handle no longer runs.
func (p *pubsub) removeListener(l *listener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.listeners, l)
	for l.handling {
		p.returned.Wait()
	}
}

func (p *pubsub) watch(key string) (wake <-chan struct{}, stop func()) {
	p.addUser(watchDelay)
	watcher := make(chan struct{}, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.watchers[key] == nil {
		p.watchers[key] = make(map[chan struct{}]struct{})
	}
	p.watchers[key][watcher] = struct{}{}
	return watcher, sync.OnceFunc(func() {
		p.mu.Lock()
		if delete(p.watchers[key], watcher); len(p.watchers[key]) == 0 {
			delete(p.watchers, key)
		}
		p.mu.Unlock()
		p.removeUser()
	})
}

// setSubscribed announces that the subscription works. serve starts to read the connections only after setSubscribed
// has returned, so Subscribed comes before all announcements.
func (p *pubsub) setSubscribed() {
	p.wakeWatchers()
	p.startDelivery()
	defer p.endDelivery()
	p.state = driver.Subscribed
	p.selfCheck.reset(true)
	p.deliver("", driver.Announcement{Kind: driver.Subscribed})
}

// setDisconnected announces that the subscription does not work, unless it has announced so already.
func (p *pubsub) setDisconnected(err error) {
	p.startDelivery()
	defer p.endDelivery()
	if p.state == driver.Disconnected {
		return
	}
	p.state = driver.Disconnected
	p.selfCheck.reset(false)
	p.deliver("", driver.Announcement{Kind: driver.Disconnected, Err: err})
}

// warn announces a warning about the server, now and to later subscribers of this subscription.
func (p *pubsub) warn(err error) {
	p.startDelivery()
	defer p.endDelivery()
	for _, known := range p.warnings {
		if known.Error() == err.Error() {
			return
		}
	}
	p.warnings = append(p.warnings, err)
	p.deliver("", driver.Announcement{Kind: driver.Warning, Err: err})
}

// reset clears the state of a subscription that has ended.
func (p *pubsub) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state, p.warnings = 0, nil
	p.selfCheck.reset(false)
}

// dispatch passes an announcement to its listeners, or wakes the watchers of a lock.
func (p *pubsub) dispatch(a driver.Announcement) {
	p.selfCheck.received(a)
	if a.Kind == unlocked {
		p.wakeWatchersOf(a.Key)
		return
	}
	p.startDelivery()
	defer p.endDelivery()
	name, _, _ := strings.Cut(a.Key, ":")
	p.deliver(name, a)
}

// startDelivery waits until no other delivery is running, and locks mu.
func (p *pubsub) startDelivery() {
	p.delivery <- struct{}{}
	p.mu.Lock()
}

func (p *pubsub) endDelivery() {
	p.mu.Unlock()
	<-p.delivery
}

// deliver passes an announcement to the listeners of a name, or to all listeners if the name is empty. It is called
// between startDelivery and endDelivery. mu is released during each call of a handle.
func (p *pubsub) deliver(name string, a driver.Announcement) {
	var to []*listener
	for l := range p.listeners {
		if name == "" || name == l.name {
			to = append(to, l)
		}
	}
	for _, l := range to {
		for l.handling { // subscribe is still calling this handle
			p.returned.Wait()
		}
		if _, ok := p.listeners[l]; ok {
			p.call(l, a)
		}
	}
}

// call runs the handle of a listener. If the handle panics, pubsub stays usable.
func (p *pubsub) call(l *listener, a driver.Announcement) {
	l.handling = true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		l.handling = false
		p.returned.Broadcast()
	}()
	l.handle(a)
}

// wakeWatchers wakes all watchers, because they may have missed an unlock.
func (p *pubsub) wakeWatchers() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, watchers := range p.watchers {
		signal(watchers)
	}
}

func (p *pubsub) wakeWatchersOf(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	signal(p.watchers[key])
}

// signal puts a wake-up into every channel that does not hold one yet.
func signal(watchers map[chan struct{}]struct{}) {
	for watcher := range watchers {
		select {
		case watcher <- struct{}{}:
		default:
		}
	}
}

// onOwnClient runs f on the Store's own client. If there is no own client for this key, or if f fails before ctx ends,
// onOwnClient runs f on the user's client. f fails early if the subscription has just ended. f also fails early if the
// own client could not connect, because go-redis then fails all calls of that client at once for a second.
func (p *pubsub) onOwnClient(ctx context.Context, k keys, f func(client) (bool, error)) (bool, error) {
	own := p.own.Load()
	if c := own.forKey(k.value()); c != nil {
		mine, err := f(c)
		if c, ok := own.client.(reloader); ok && err != nil {
			c.ReloadState(ctx)
		}
		if err == nil || ended(ctx) != nil {
			return mine, err
		}
	}
	return f(p.userClient)
}
