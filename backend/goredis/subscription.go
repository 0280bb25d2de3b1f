package goredis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// This file runs the one subscription of a Store, over one connection after another. go-redis alone would reconnect
// without a notice, and no listener would learn that announcements were missed. So when a connection may have missed
// an announcement, serve notifies all listeners and closes the connection. run then makes a new connection.

const (
	// silence is how long a connection may be quiet before the Store sends a PING on it, and how long the reply to the
	// PING may take.
	silence = time.Second
	// maxConnect is how long connecting and subscribing may take.
	maxConnect = 3 * time.Second
	// The Store waits minWait before it connects again. Each further failure doubles the wait, up to maxWait.
	minWait = 50 * time.Millisecond
	maxWait = time.Second
)

var (
	errNoReply      = errors.New("no reply to PING")
	errNotReceiving = errors.New("subscription is stale: did not receive our own announcement")
	errShards       = errors.New("the set of Ring shards that are up has changed")
)

// run runs a subscription until ctx ends. It first waits for delay. addUser starts run for the first user, and
// removeUser ends ctx when the last user leaves.
func (p *pubsub) run(ctx context.Context, delay time.Duration) {
	if !sleep(ctx, delay) {
		return
	}
	own := newOwnClient(ctx, p.userClient)
	p.own.Store(own)
	defer func() {
		p.own.Store(nil)
		own.close()
		p.reset()
	}()
	for wait := minWait; ; wait = min(2*wait, maxWait) {
		if p.serve(ctx, own) > maxWait {
			wait = minWait
		}
		// Half of the wait is random, because thousands of processes lose a server at the same moment.
		if !sleep(ctx, wait/2+rand.N(wait/2)) {
			return
		}
	}
}

// sleep waits for d. It returns false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// serve connects to every server of the subscription, and passes on the announcements that the servers send. It returns
// when a connection breaks or may have missed an announcement. The result is how long the subscription worked.
func (p *pubsub) serve(ctx context.Context, own *ownClient) time.Duration {
	links, err := p.connect(ctx, own)
	inner, cancel := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer func() {
		if ctx.Err() == nil { // the listeners learn of the break first, because closing the links may take a moment
			p.setDisconnected(fmt.Errorf("goredis: disconnected: %w", explainDenied(err)))
		}
		cancel()
		for _, l := range links {
			l.Close()
		}
		tasks.Wait()
	}()
	if err != nil {
		return 0
	}
	began := time.Now()
	p.setSubscribed()
	broken := make(chan error, len(links))
	for _, l := range links {
		tasks.Go(func() { broken <- p.read(l) })
	}
	tasks.Go(func() { p.inspect(inner, links) })
	err = p.monitor(ctx, own, links, broken)
	return time.Since(began)
}

// link is the connection to one server.
type link struct {
	*redis.PubSub
	server   client
	base     time.Time    // when the link was made
	received atomic.Int64 // when something last arrived, since base; written by the reader of the link
	pinged   int64        // when the last PING was sent, since base; only monitor uses it
	probed   int          // the number that probe sent in its last PING; only monitor uses it
	replied  atomic.Int64 // the number in the last reply to such a PING; written by the reader of the link
}

// connect subscribes at every server, and returns once every server has confirmed the subscription.
func (p *pubsub) connect(ctx context.Context, own *ownClient) (links []*link, err error) {
	ctx, cancel := context.WithTimeout(ctx, maxConnect)
	defer cancel()
	for _, server := range own.servers() {
		links = append(links, &link{PubSub: server.Subscribe(ctx, p.channel), server: server, base: time.Now()})
	}
	for _, l := range links {
		for confirmed := false; !confirmed; {
			message, err := l.Receive(ctx)
			if err != nil {
				return links, err
			}
			s, ok := message.(*redis.Subscription)
			confirmed = ok && s.Kind == "subscribe" && s.Channel == p.channel
		}
	}
	if len(links) == 0 {
		return nil, errShards
	}
	return links, nil
}

// noReconnect returns a ctx that has already ended. Its deadline is after the given span, or there is none if the span
// is 0. A PubSub of go-redis checks only before a reconnect whether its ctx has ended. So with this ctx, a PubSub never
// reconnects. The reads and writes of a PubSub obey only the deadline of the ctx.
func noReconnect(deadline time.Duration) context.Context {
	ctx, cancel := context.Background(), context.CancelFunc(nil)
	if deadline > 0 {
		ctx, cancel = context.WithTimeout(ctx, deadline)
	} else {
		ctx, cancel = context.WithCancel(ctx)
	}
	cancel()
	return ctx
}

// read passes on the announcements of a link until the connection breaks. It reads without a deadline. If a deadline
// passed in the middle of a message, the second half of that message would be read as the next message.
func (p *pubsub) read(l *link) error {
	ctx := noReconnect(0)
	for {
		message, err := l.Receive(ctx)
		if err != nil {
			return err
		}
		l.received.Store(int64(time.Since(l.base)))
		switch m := message.(type) {
		case *redis.Message:
			if a, ok := parseAnnouncement(m.Payload); ok {
				p.dispatch(a)
			}
		case *redis.Pong:
			if n, err := strconv.ParseInt(m.Payload, 10, 64); err == nil {
				l.replied.Store(n)
			}
		}
	}
}

// monitor returns an error at the first sign that a connection may have missed an announcement.
func (p *pubsub) monitor(ctx context.Context, own *ownClient, links []*link, broken <-chan error) error {
	timer := time.NewTimer(silence)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-broken:
			return err
		case <-timer.C:
		}
		next := silence
		for _, l := range links {
			due, err := l.check(time.Since(l.base))
			if err != nil {
				return err
			}
			next = min(next, due)
		}
		if err := p.probe(links); err != nil {
			return err
		}
		if own.changed() {
			return errShards
		}
		timer.Reset(next)
	}
}

// check sends a PING if the link has been quiet for silence, and returns how long to wait before the next check.
func (l *link) check(now time.Duration) (next time.Duration, err error) {
	received, pinged := time.Duration(l.received.Load()), time.Duration(l.pinged)
	switch {
	case pinged > received && now-pinged >= silence:
		return 0, errNoReply
	case pinged > received:
		return pinged + silence - now, nil
	case now-received < silence:
		return received + silence - now, nil
	}
	l.pinged = int64(now)
	return silence, l.Ping(noReconnect(silence))
}

// probe returns errNotReceiving if an announcement of this process is missing on the links. A reader that lags behind
// a flood of announcements still has that announcement to read. So probe sends a PING on every link, with the number
// of the missing announcement. A server replies to the PING after all that it announced before. If every reader has
// read the reply to its PING, and the announcement has not arrived, the announcement is lost.
func (p *pubsub) probe(links []*link) error {
	missing := p.selfCheck.missing(time.Now())
	if missing == 0 {
		return nil
	}
	lost := true
	for _, l := range links {
		if l.probed != missing {
			l.probed = missing
			if err := l.Ping(noReconnect(silence), strconv.Itoa(missing)); err != nil {
				return err
			}
		}
		lost = lost && l.replied.Load() == int64(missing)
	}
	if lost && p.selfCheck.missing(time.Now()) == missing {
		return errNotReceiving
	}
	return nil
}

// inspect warns about settings of the servers that put the promises of refill in doubt. A setting that a server does
// not report is assumed to be fine.
func (p *pubsub) inspect(ctx context.Context, links []*link) {
	for _, l := range links {
		info, err := detached(ctx, new(calls), func(ctx context.Context) (string, error) {
			return l.server.Do(ctx, "info").Text()
		})
		if err != nil {
			continue
		}
		for _, warning := range parseInfo(info) {
			p.warn(warning)
		}
	}
}

// parseInfo returns the warnings that follow from a reply to INFO.
func parseInfo(info string) (warnings []error) {
	for line := range strings.Lines(info) {
		field, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch field {
		case "redis_version":
			major, _, _ := strings.Cut(value, ".")
			if n, err := strconv.Atoi(major); err == nil && n < 7 {
				warnings = append(warnings,
					fmt.Errorf("goredis: Redis %s: 7.0 or newer is needed (SET with NX and GET)", value))
			}
		case "role":
			if value == "slave" {
				warnings = append(warnings,
					errors.New("goredis: the server is a replica: its data may be old, and it grants no leases"))
			}
		case "maxmemory_policy":
			if value == "volatile-ttl" {
				warnings = append(warnings, errors.New("goredis: maxmemory-policy volatile-ttl evicts leases and claims "+
					"first; allkeys-lru and noeviction do not"))
			}
		}
	}
	return warnings
}
