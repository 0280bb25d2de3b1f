package goredis

import (
	"sync"
	"time"

	"github.com/refill-go/refill"
)

// echo notices a subscription that stands and hears nothing: at a master that Sentinel has replaced and not yet told, at
// a node that the others of a Cluster cannot reach. A PING is answered there. But what this process itself announces must
// come back to it. One announcement at a time is waited for, which is enough to notice.
type echo struct {
	mu         sync.Mutex // guards all
	listening  bool       // the subscription stands
	waiting    bool       // for this announcement:
	key, token string
	since      time.Time // the server has confirmed it; zero while it is asked to

	heard time.Time // when one of ours was last heard, or listening began
}

// listenIn is how often a process that has nothing to announce does so all the same, to hear whether it comes back.
const listenIn = 5 * time.Second

// due reports that it is time for that.
func (e *echo) due(now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.listening && !e.waiting && now.Sub(e.heard) >= listenIn
}

// begin starts afresh with a subscription, or stops without one.
func (e *echo) begin(listening bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.listening, e.waiting, e.heard = listening, false, time.Now()
}

// expect is called before an announcement is made, since its echo may be faster than the reply.
func (e *echo) expect(key, token string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.listening && !e.waiting {
		e.waiting, e.key, e.token, e.since = true, key, token, time.Time{}
	}
}

// announced is called after it: made says whether it certainly was made.
func (e *echo) announced(key, token string, made bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.waiting && e.since.IsZero() && e.key == key && e.token == token {
		e.waiting, e.since = made, time.Now()
	}
}

func (e *echo) hear(n refill.Note) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.waiting && e.key == n.Key && e.token == n.Token {
		e.waiting, e.heard = false, time.Now()
	}
}

// missing reports that an announcement has not come back for too long: longer than a busy reader may lag.
func (e *echo) missing(now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.waiting && !e.since.IsZero() && now.Sub(e.since) > 2*silence
}
