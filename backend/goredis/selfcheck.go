package goredis

import (
	"sync"
	"time"

	"github.com/refill-go/refill/driver"
)

// selfCheck notices a subscription that works but receives nothing: at a master that Sentinel has replaced and not
// notified yet, or at a node that the others of a Cluster cannot reach. Such a server still answers PING. But the
// announcements of this process must come back to it. selfCheck waits for one of them at a time, which is enough to
// notice.
type selfCheck struct {
	mu         sync.Mutex // guards all below; may be taken while pubsub.mu is held
	subscribed bool
	waiting    bool // for the announcement with this key and token
	key, token string
	since      time.Time // when the server confirmed it; zero before that
	lastOwn    time.Time // when an announcement of this process was last received, or the subscription began
}

// selfCheckEvery: if no announcement of this process was received for so long, its next publication is announced even
// if no caller waits for it.
const selfCheckEvery = 5 * time.Second

// due reports whether the next publication should be announced for the sake of the check.
func (s *selfCheck) due(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.subscribed && !s.waiting && now.Sub(s.lastOwn) >= selfCheckEvery
}

// reset starts again with a new subscription, or stops without one.
func (s *selfCheck) reset(subscribed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.subscribed, s.waiting, s.lastOwn = subscribed, false, time.Now()
}

// expect is called before an announcement is made, because it may come back before the reply to the call does.
func (s *selfCheck) expect(key, token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.subscribed && !s.waiting {
		s.waiting, s.key, s.token, s.since = true, key, token, time.Time{}
	}
}

// announced is called after the call. made says whether the announcement was certainly made.
func (s *selfCheck) announced(key, token string, made bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting && s.since.IsZero() && s.key == key && s.token == token {
		s.waiting, s.since = made, time.Now()
	}
}

// received is called with every announcement that arrives.
func (s *selfCheck) received(a driver.Announcement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting && s.key == a.Key && s.token == a.Token {
		s.waiting, s.lastOwn = false, time.Now()
	}
}

// missing reports that an announcement has not come back for longer than a busy reader may lag.
func (s *selfCheck) missing(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting && !s.since.IsZero() && now.Sub(s.since) > 2*silence
}
