package goredis

import (
	"sync"
	"time"

	"github.com/refill-go/refill/driver"
)

// selfCheck finds a subscription that is connected but receives no announcements. The server of such a subscription
// may be a master that Sentinel has replaced but not yet demoted. It may also be a Cluster node that the other nodes
// cannot reach. Such a server still answers PING. So selfCheck checks that the subscription receives the
// announcements of this process itself. It waits for one such announcement at a time.
type selfCheck struct {
	mu         sync.Mutex // guards all below; may be taken while pubsub.mu is held
	subscribed bool
	waiting    bool // the announcement with this key and this token has not arrived yet
	number     int  // of the announcement that was awaited last, counted from 1
	key, token string
	since      time.Time // when the server confirmed that announcement; zero before that
	lastOwn    time.Time // when an announcement of this process was last received, or the subscription began
}

// selfCheckEvery is how long this process may go without receiving an announcement of its own. After that, its next
// publication is announced even if no caller waits for the value.
const selfCheckEvery = 5 * time.Second

// due reports whether the next publication must be announced even if no caller waits. This process then checks whether
// it receives that announcement.
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

// expect is called before the call that makes an announcement with key and token, because the announcement may arrive
// before the reply to that call.
func (s *selfCheck) expect(key, token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.subscribed && !s.waiting {
		s.waiting, s.key, s.token, s.since = true, key, token, time.Time{}
		s.number++
	}
}

// announced is called after the call that makes the announcement. made says whether the server has confirmed it.
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

// missing returns the number of an announcement that the server confirmed more than 2*silence ago, and that has not
// arrived. It returns 0 if there is no such announcement. Such an announcement need not be lost: perhaps a reader of
// the subscription has not read it yet, see pubsub.probe.
func (s *selfCheck) missing(now time.Time) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting && !s.since.IsZero() && now.Sub(s.since) > 2*silence {
		return s.number
	}
	return 0
}
