package refilltest

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/refill-go/refill"
)

// has reports whether a lease is the token's. A flaw that starts with mark- does not know it any more when somebody waits.
func (n *node) has(lease *slot, token, flaw string) bool {
	return lease.data == token && !(lease.awaited && n.is(flaw))
}

// Begin looks at the lease first with AskOnce, as a Store may: whoever loses is told so whatever the value is, and who does
// not has taken the lease when the value is looked at.
func (n *node) Begin(ctx context.Context, b refill.Bid) (r refill.Begun, err error) {
	actErr := n.act(ctx, b.Key, func(c *brokenCell, now time.Time) {
		lease := *c.lease
		n.gap("race-begin")
		if err = n.stumbles(c, b); err != nil {
			return
		}
		free, other := n.open(lease, b), n.sees(c, b)
		first := b.Ask == refill.AskOnce || n.is("held-before-other") ||
			b.Ask == refill.AskForce && n.is("force-held-before-other")
		switch {
		case other && (free || !first):
			r = n.otherThere(c, b)
		case free:
			n.take(c, lease, b, now)
			r.Now = now
			if c.claim.data == b.Token && !n.is("begin-again-lies") {
				r.Now = c.claim.began
			}
			if n.is("begin-clock-back") && n.id == "b" {
				r.Now = now.Add(-50 * time.Millisecond)
			}
		default:
			r = n.held(lease, b, now)
			n.note(c, b, now)
		}
	})
	return r, errors.Join(err, actErr)
}

// stumbles is what a flawed script trips over.
func (n *node) stumbles(c *brokenCell, b refill.Bid) error {
	record := []byte(c.value.data)
	switch {
	case c.lease.garbled && n.is("garbled-lease-error"),
		c.claim.endless && n.is("foreign-claim-error"),
		strings.HasPrefix(c.value.data, "RF1") && refill.RecordToken(record) == "" && n.is("begin-foreign-error"):
		return errGarbled
	}
	return nil
}

// open reports whether a lease is free for a bid.
func (n *node) open(lease slot, b refill.Bid) bool {
	failed := strings.HasPrefix(lease.data, "!")
	switch {
	case lease.data == "",
		n.has(&lease, b.Token, "mark-blocks-begin") && !n.is("own-token-lost"),
		failed && b.Ask == refill.AskForce && !n.is("force-ignored"),
		failed && n.is("back-off-ignored"),
		b.Ask == refill.AskForce && n.is("force-steals"),
		lease.garbled,
		lease.endless && b.Ask != refill.AskOnce && !n.is("endless-lease-held"),
		n.is("lease-shared"), n.is("lease-per-node") && !strings.HasPrefix(lease.data, n.id):
		return true
	}
	return false
}

// sees reports whether there is another record than the one seen.
func (n *node) sees(c *brokenCell, b refill.Bid) bool {
	there, some := refill.RecordToken([]byte(c.value.data)), c.value.data != "" && !c.value.garbled
	other := some && there != b.Seen
	switch {
	case n.is("begin-refuses-any"):
		other = some
	case n.is("begin-unseen"):
		other = false
	case n.is("begin-seen-prefix"):
		other = other && !strings.HasPrefix(b.Seen, there)
	case n.is("begin-foreign"):
		other = other || some && there == ""
	case n.is("begin-absent-other"):
		other = other || !some && b.Seen != ""
	}
	return other
}

// otherThere gives the lease back, if the token has it.
func (n *node) otherThere(c *brokenCell, b refill.Bid) refill.Begun {
	r := refill.Begun{State: refill.BeginOther, Record: []byte(c.value.data)}
	if n.is("begin-other-no-record") {
		r.Record = nil
	}
	if n.is("begin-other-takes") {
		*c.lease = slot{data: b.Token, until: time.Now().Add(b.LeaseTTL)}
		return r
	}
	mine := n.has(c.lease, b.Token, "mark-blocks-other") || b.Ask == refill.AskOnce
	if n.is("begin-other-frees-any") || mine && !n.is("begin-other-keeps-lease") {
		*c.lease = slot{}
	}
	if mine && !n.is("begin-other-silent") || n.is("begin-other-loud") {
		n.announce(refill.Note{Kind: refill.NoteReleased, Key: b.Key, Token: b.Token})
	}
	return r
}

// take takes lease and claim.
func (n *node) take(c *brokenCell, lease slot, b refill.Bid, now time.Time) {
	if n.is("begin-ttls-swapped") {
		b.LeaseTTL, b.ClaimTTL = b.ClaimTTL, b.LeaseTTL
	}
	if n.is("begin-once-endless") && b.Ask == refill.AskOnce {
		b.LeaseTTL += time.Hour
	}
	own := lease.data == b.Token
	*c.lease = slot{data: b.Token, until: now.Add(b.LeaseTTL), awaited: own && lease.awaited && !n.is("mark-lost-by-repeat")}
	if n.is("own-token-once") && own {
		*c.lease = slot{}
	}
	if n.is("begin-no-claim") || n.is("begin-first-claim-stays") && c.claim.data != "" {
		return
	}
	if c.claim.data != b.Token || n.is("begin-again-moves") {
		*c.claim = slot{data: b.Token, until: now.Add(b.ClaimTTL), began: now}
	}
}

// held is the answer to whom did not get the lease.
func (n *node) held(lease slot, b refill.Bid, now time.Time) refill.Begun {
	r := refill.Begun{State: refill.BeginHeld}
	failure, failed := strings.CutPrefix(lease.data, "!")
	switch {
	case failed:
		r.Failure = failure
		if n.is("back-off-holder") {
			r.Holder = lease.data
		}
		if lease.awaited && n.is("mark-in-failure") {
			r.Failure += "+"
		}
	case lease.awaited && n.is("mark-in-holder"):
		r.Holder = lease.data + "+"
	case !n.is("holder-unknown"):
		r.Holder = lease.data
	}
	switch {
	case b.Ask == refill.AskOnce, n.is("left-missing"), n.is("left-not-forced") && b.Ask == refill.AskForce:
	case n.is("left-unit"):
		r.Left = lease.until.Sub(now) / 1000
	case n.is("left-of-asker"):
		r.Left = b.LeaseTTL
	default:
		r.Left = lease.until.Sub(now)
	}
	return r
}

// note notes that somebody waits.
func (n *node) note(c *brokenCell, b refill.Bid, now time.Time) {
	switch {
	case n.is("held-takes-claim"):
		*c.claim = slot{data: b.Token, until: now.Add(b.ClaimTTL)}
	case n.is("held-drops-claim"):
		*c.claim = slot{}
	case n.is("held-frees-lease"):
		*c.lease = slot{}
	case n.is("held-lengthens"):
		c.lease.until = now.Add(b.LeaseTTL)
	}
	if b.Ask == refill.AskOnce || n.is("wait-unknown") || b.Ask == refill.AskForce && n.is("wait-not-forced") {
		return
	}
	c.lease.awaited = true
	if n.is("mark-endless") {
		c.lease.endless = true
	}
}
