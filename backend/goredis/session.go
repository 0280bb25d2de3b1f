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

// This file is the life of the one subscription. go-redis would reconnect it in silence; here nothing may be missed in
// silence. So on any doubt it is closed, everybody is told, and a new one is made.

const (
	// silence is how long a subscription may be quiet before it is asked for a sign of life, and how long it may then
	// take to give one.
	silence = time.Second
	// mostSetUp is how long connecting and subscribing may take.
	mostSetUp = 3 * time.Second
	// A new subscription is tried after leastWait, and ever later up to mostWait.
	leastWait = 50 * time.Millisecond
	mostWait  = time.Second
)

var (
	errSilent = errors.New("no answer to PING")
	errDeaf   = errors.New("an announcement of this process did not come back")
	errShards = errors.New("other shards of the Ring are up")
)

// run is a session: from the first listener to the end of ctx, after the last one.
func (h *hub) run(ctx context.Context, delay time.Duration) {
	if !sleep(ctx, delay) {
		return
	}
	c := newControl(ctx, h.user)
	h.control.Store(c)
	defer func() {
		h.control.Store(nil)
		c.close()
		h.forget()
	}()
	for wait := leastWait; ; wait = min(2*wait, mostWait) {
		if h.subscription(ctx, c) > mostWait {
			wait = leastWait
		}
		// Half of it is random: thousands of processes lose a server in the same moment.
		if !sleep(ctx, wait/2+rand.N(wait/2)) {
			return
		}
	}
}

// sleep reports false if ctx ended first.
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

// subscription is the life of one, from the first dial to the first doubt. It returns how long it stood.
func (h *hub) subscription(ctx context.Context, c *control) time.Duration {
	links, err := h.subscribe(ctx, c)
	inner, cancel := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer func() {
		if ctx.Err() == nil { // first of all: what follows may take a moment
			h.fall(fmt.Errorf("goredis: subscription: %w", err))
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
	h.rise()
	broken := make(chan error, len(links))
	for _, l := range links {
		tasks.Go(func() { broken <- h.read(l) })
	}
	tasks.Go(func() { h.inspect(inner, links) })
	err = h.attend(ctx, c, links, broken)
	return time.Since(began)
}

// link is a subscription at one server.
type link struct {
	*redis.PubSub
	server client
	base   time.Time
	heard  atomic.Int64 // when something last arrived, since base; written by its reader
	pinged int64        // when it was last asked for a sign of life; only attend uses it
}

// subscribe returns once every server has confirmed.
func (h *hub) subscribe(ctx context.Context, c *control) (links []*link, err error) {
	ctx, cancel := context.WithTimeout(ctx, mostSetUp)
	defer cancel()
	for _, server := range c.servers() {
		links = append(links, &link{PubSub: server.Subscribe(ctx, h.channel), server: server, base: time.Now()})
	}
	for _, l := range links {
		for confirmed := false; !confirmed; {
			message, err := l.Receive(ctx)
			if err != nil {
				return links, err
			}
			s, ok := message.(*redis.Subscription)
			confirmed = ok && s.Kind == "subscribe" && s.Channel == h.channel
		}
	}
	if len(links) == 0 {
		return nil, errShards
	}
	return links, nil
}

// over is a ctx that is over. A PubSub looks at it when it is about to reconnect, which it then cannot, and at nothing else
// but the deadline, for reading and writing.
func over(deadline time.Duration) context.Context {
	ctx, cancel := context.Background(), context.CancelFunc(nil)
	if deadline > 0 {
		ctx, cancel = context.WithTimeout(ctx, deadline)
	} else {
		ctx, cancel = context.WithCancel(ctx)
	}
	cancel()
	return ctx
}

// read passes on what arrives until the connection breaks. It reads without a deadline: one that passed in the middle of
// a message would leave the other half to be read as the next one.
func (h *hub) read(l *link) error {
	ctx := over(0)
	for {
		message, err := l.Receive(ctx)
		if err != nil {
			return err
		}
		l.heard.Store(int64(time.Since(l.base)))
		if m, ok := message.(*redis.Message); ok {
			if n, ok := parseNote(m.Payload); ok {
				h.tell(n)
			}
		}
	}
}

// attend waits for the first doubt.
func (h *hub) attend(ctx context.Context, c *control, links []*link, broken <-chan error) error {
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
		if h.echo.missing(time.Now()) {
			return errDeaf
		}
		if c.changed() {
			return errShards
		}
		timer.Reset(next)
	}
}

// check asks a quiet link for a sign of life, and says when to check again.
func (l *link) check(now time.Duration) (next time.Duration, err error) {
	heard, pinged := time.Duration(l.heard.Load()), time.Duration(l.pinged)
	switch {
	case pinged > heard && now-pinged >= silence:
		return 0, errSilent
	case pinged > heard:
		return pinged + silence - now, nil
	case now-heard < silence:
		return heard + silence - now, nil
	}
	l.pinged = int64(now)
	return silence, l.Ping(over(silence))
}

// inspect looks for settings of the servers that make the promises of refill doubtful. What a server does not tell is
// taken for fine.
func (h *hub) inspect(ctx context.Context, links []*link) {
	for _, l := range links {
		info, err := aside(ctx, new(calls), func(ctx context.Context) (string, error) {
			return l.server.Do(ctx, "info").Text()
		})
		if err != nil {
			continue
		}
		for _, doubt := range doubtsAbout(info) {
			h.warn(doubt)
		}
	}
}

// doubtsAbout reads the answer to INFO.
func doubtsAbout(info string) (doubts []error) {
	for line := range strings.Lines(info) {
		field, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch field {
		case "redis_version":
			major, _, _ := strings.Cut(value, ".")
			if n, err := strconv.Atoi(major); err == nil && n < 7 {
				doubts = append(doubts, fmt.Errorf("goredis: Redis %s: 7.0 or newer is needed (SET with NX and GET)", value))
			}
		case "role":
			if value == "slave" {
				doubts = append(doubts, errors.New("goredis: the server is a replica: what it holds may be old, and it takes no leases"))
			}
		case "maxmemory_policy":
			if value == "volatile-ttl" {
				doubts = append(doubts, errors.New("goredis: maxmemory-policy volatile-ttl evicts leases and claims first, "+
					"allkeys-lru and noeviction do not"))
			}
		}
	}
	return doubts
}
