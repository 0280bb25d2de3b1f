package goredis

import (
	"testing"
	"time"

	"github.com/refill-go/refill"
)

func TestEcho(t *testing.T) {
	later := func() time.Time { return time.Now().Add(2*silence + time.Second) }
	note := refill.Note{Key: "product:42", Token: "a#1"}
	for _, c := range []struct {
		name    string
		act     func(e *echo)
		missing bool
	}{
		{"nothing was announced", func(*echo) {}, false},
		{"no subscription", func(e *echo) { e.begin(false); e.expect("product:42", "a#1"); e.announced("product:42", "a#1", true) }, false},
		{"under way", func(e *echo) { e.expect("product:42", "a#1") }, false},
		{"not heard", func(e *echo) { e.expect("product:42", "a#1"); e.announced("product:42", "a#1", true) }, true},
		{"not made", func(e *echo) { e.expect("product:42", "a#1"); e.announced("product:42", "a#1", false) }, false},
		{"heard", func(e *echo) { e.expect("product:42", "a#1"); e.announced("product:42", "a#1", true); e.hear(note) }, false},
		{"heard before the reply", func(e *echo) { e.expect("product:42", "a#1"); e.hear(note); e.announced("product:42", "a#1", true) }, false},
		{"another's", func(e *echo) {
			e.expect("product:42", "a#1")
			e.announced("product:42", "a#1", true)
			e.hear(refill.Note{Key: "product:42", Token: "b#1"})
			e.hear(refill.Note{Key: "product:43", Token: "a#1"})
		}, true},
		{"one at a time", func(e *echo) {
			e.expect("product:42", "a#1")
			e.expect("product:43", "a#2")
			e.announced("product:43", "a#2", true)
			e.announced("product:42", "a#1", true)
			e.hear(note)
		}, false},
		{"a new subscription", func(e *echo) {
			e.expect("product:42", "a#1")
			e.announced("product:42", "a#1", true)
			e.begin(true)
		}, false},
	} {
		var e echo
		e.begin(true)
		c.act(&e)
		if e.missing(time.Now()) {
			t.Errorf("%s: missing at once", c.name)
		}
		if got := e.missing(later()); got != c.missing {
			t.Errorf("%s: missing %v, want %v", c.name, got, c.missing)
		}
	}
}
