package goredis

import (
	"testing"
	"time"

	"github.com/refill-go/refill/driver"
)

func TestSelfCheck(t *testing.T) {
	const key, token = "product:42", "a#1"
	later := func() time.Time { return time.Now().Add(2*silence + time.Second) }
	own := driver.Announcement{Key: key, Token: token}
	for _, c := range []struct {
		name    string
		act     func(s *selfCheck)
		missing bool
	}{
		{"nothing was announced", func(*selfCheck) {}, false},
		{"no subscription", func(s *selfCheck) {
			s.reset(false)
			s.expect(key, token)
			s.announced(key, token, true)
		}, false},
		{"call in progress", func(s *selfCheck) { s.expect(key, token) }, false},
		{"not received", func(s *selfCheck) {
			s.expect(key, token)
			s.announced(key, token, true)
		}, true},
		{"not made", func(s *selfCheck) {
			s.expect(key, token)
			s.announced(key, token, false)
		}, false},
		{"received", func(s *selfCheck) {
			s.expect(key, token)
			s.announced(key, token, true)
			s.received(own)
		}, false},
		{"received before the reply", func(s *selfCheck) {
			s.expect(key, token)
			s.received(own)
			s.announced(key, token, true)
		}, false},
		{"of another token or key", func(s *selfCheck) {
			s.expect(key, token)
			s.announced(key, token, true)
			s.received(driver.Announcement{Key: key, Token: "b#1"})
			s.received(driver.Announcement{Key: "product:43", Token: token})
		}, true},
		{"one at a time", func(s *selfCheck) {
			s.expect(key, token)
			s.expect("product:43", "a#2")
			s.announced("product:43", "a#2", true)
			s.announced(key, token, true)
			s.received(own)
		}, false},
		{"a new subscription", func(s *selfCheck) {
			s.expect(key, token)
			s.announced(key, token, true)
			s.reset(true)
		}, false},
	} {
		var s selfCheck
		s.reset(true)
		c.act(&s)
		if s.missing(time.Now()) != 0 {
			t.Errorf("%s: missing at once", c.name)
		}
		if got := s.missing(later()) != 0; got != c.missing {
			t.Errorf("%s: missing %v, want %v", c.name, got, c.missing)
		}
	}
}
