package goredis

import (
	"sync"
	"time"

	"github.com/refill-go/refill/driver"
)

// selfCheck finds a subscription that is connected but receives nothing: its server is a master that Sentinel has
// replaced but not yet told so, or a Cluster node that the others cannot reach. Such a server still answers PING. So
// selfCheck waits until the subscription receives an announcement of this process itself, one at a time.
type selfCheck struct {
	mu         sync.Mutex // guards all below; may be taken while pubsub.mu is held
	subscribed bool
	waiting    bool // for the announcement with this key and token
	key, token string
	since      time.Time // when the server confirmed that announcement; zero before that
	lastOwn    time.Time // when an announcement of this process was last received, or the subscription began
}

// If this process has received none of its own announcements for selfCheckEvery, its next publication is announced even
// if no caller waits for the value.
const selfCheckEvery = 5 * time.Second

// due reports whether the next publication should be announced for the sake of the check.
func (s *selfCheck) due(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.subscribed && !s.waiting && now.Sub(s.lastOwn) >= selfCheckEvery
}

// reset starts the check anew for a new subscription, or stops it if subscribed is false.
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

// announced is called after the call that makes the announcement. made says whether the server certainly made it.
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

// missing reports whether an announcement has been missing for 2*silence. A busy reader lags less than that.
func (s *selfCheck) missing(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting && !s.since.IsZero() && now.Sub(s.since) > 2*silence
}
