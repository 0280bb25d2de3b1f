package goredis

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
)

// watchDelay is how long the first Watch waits before it opens a subscription: longer than taking a free lock takes,
// so that only those who have to wait for a lock cause one.
const watchDelay = 5 * time.Millisecond

// hub passes announcements on to those who listen and watch. While there is anybody, a session runs, see session.go.
type hub struct {
	user    redis.UniversalClient
	channel string

	control atomic.Pointer[control] // the session's; only the session writes it
	echo    echo

	life  sync.Mutex // guards the next three: one beginning or end of a session at a time. Not taken while mu is held.
	users int
	end   context.CancelFunc
	ended chan struct{}

	// mu guards all below. It is held while somebody hears: so one note is heard at a time, in the order of arrival, and
	// none once stop has returned.
	mu        sync.Mutex
	state     refill.NoteKind // NoteUp, NoteDown, or 0 before the first of them in a session
	doubts    []error         // about the server, found by this session
	listeners map[*listener]struct{}
	bells     map[string]map[chan struct{}]struct{} // by "name:key"; each holds one wake-up
}

type listener struct {
	name string
	hear func(refill.Note)
}

func (h *hub) setUp(user redis.UniversalClient, channel string) {
	h.user, h.channel = user, channel
	h.listeners = make(map[*listener]struct{})
	h.bells = make(map[string]map[chan struct{}]struct{})
}

// enter counts one more user, for whom the session runs from now on.
func (h *hub) enter(delay time.Duration) {
	h.life.Lock()
	defer h.life.Unlock()
	if h.users++; h.users > 1 {
		return
	}
	var ctx context.Context
	ctx, h.end = context.WithCancel(context.Background())
	ended := make(chan struct{})
	h.ended = ended
	go func() {
		defer close(ended)
		h.run(ctx, delay)
	}()
}

// leave counts one less. The last one ends the session, and waits for that.
func (h *hub) leave() {
	h.life.Lock()
	defer h.life.Unlock()
	if h.users--; h.users == 0 {
		h.end()
		<-h.ended
	}
}

func (h *hub) listen(name string, hear func(refill.Note)) (stop func()) {
	h.enter(0)
	l := &listener{name, hear}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.listeners[l] = struct{}{}
	if h.state == refill.NoteUp {
		hear(refill.Note{Kind: refill.NoteUp})
	}
	for _, err := range h.doubts {
		hear(refill.Note{Kind: refill.NoteWarning, Err: err})
	}
	return sync.OnceFunc(func() {
		h.mu.Lock()
		delete(h.listeners, l)
		h.mu.Unlock()
		h.leave()
	})
}

func (h *hub) watch(key string) (wake <-chan struct{}, stop func()) {
	h.enter(watchDelay)
	bell := make(chan struct{}, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.bells[key] == nil {
		h.bells[key] = make(map[chan struct{}]struct{})
	}
	h.bells[key][bell] = struct{}{}
	return bell, sync.OnceFunc(func() {
		h.mu.Lock()
		if delete(h.bells[key], bell); len(h.bells[key]) == 0 {
			delete(h.bells, key)
		}
		h.mu.Unlock()
		h.leave()
	})
}

// rise tells that the subscription stands.
func (h *hub) rise() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state = refill.NoteUp
	h.echo.begin(true)
	h.tellAll(refill.Note{Kind: refill.NoteUp})
	for _, bells := range h.bells {
		ring(bells)
	}
}

// fall tells, once, that it does not.
func (h *hub) fall(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.state == refill.NoteDown {
		return
	}
	h.state = refill.NoteDown
	h.echo.begin(false)
	h.tellAll(refill.Note{Kind: refill.NoteDown, Err: err})
}

// warn tells of a doubt about the server, now and to those who will listen later in this session.
func (h *hub) warn(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, known := range h.doubts {
		if known.Error() == err.Error() {
			return
		}
	}
	h.doubts = append(h.doubts, err)
	h.tellAll(refill.Note{Kind: refill.NoteWarning, Err: err})
}

// forget is the end of a session.
func (h *hub) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state, h.doubts = 0, nil
	h.echo.begin(false)
}

// tellAll is called with mu held.
func (h *hub) tellAll(n refill.Note) {
	for l := range h.listeners {
		l.hear(n)
	}
}

// tell passes on an announcement.
func (h *hub) tell(n refill.Note) {
	h.echo.hear(n)
	h.mu.Lock()
	defer h.mu.Unlock()
	if n.Kind == noteUnlocked {
		ring(h.bells[n.Key])
		return
	}
	name, _, _ := strings.Cut(n.Key, ":")
	for l := range h.listeners {
		if l.name == name {
			l.hear(n)
		}
	}
}

// ring leaves a wake-up in every bell that holds none.
func ring(bells map[chan struct{}]struct{}) {
	for bell := range bells {
		select {
		case bell <- struct{}{}:
		default:
		}
	}
}

// steady runs f on the session's own client; and on the user's when no session runs, or has just ended, or its client
// cannot get a connection: then go-redis lets it fail at once for a second.
func (h *hub) steady(ctx context.Context, k keys, f func(client) (bool, error)) (bool, error) {
	if c := h.control.Load(); c != nil {
		mine, err := f(c.forKey(k.value()))
		if own, ok := c.own.(reloader); ok && err != nil {
			own.ReloadState(ctx)
		}
		if err == nil || ctx.Err() != nil {
			return mine, err
		}
	}
	return f(h.user)
}
