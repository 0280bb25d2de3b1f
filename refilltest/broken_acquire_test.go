package refilltest

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/refill-go/refill/driver"
)

// has reports whether a lease belongs to the token. If the place has the given flaw, an awaited lease belongs to no
// token.
func (n *node) has(lease *slot, token, flaw string) bool {
	return lease.data == token && !(lease.awaited && n.is(flaw))
}

// Acquire looks at the lease before the record in mode Try, as a Store may. A token that loses gets Held, whatever
// the record is. A token that wins already has the lease when Acquire compares the record.
func (n *node) Acquire(ctx context.Context, req driver.AcquireRequest) (r driver.AcquireResult, err error) {
	actErr := n.act(ctx, req.Key, func(c *brokenCell, now time.Time) {
		lease := *c.lease
		n.gap("race-acquire")
		if err = n.scriptError(c, req); err != nil {
			return
		}
		if req.Mode == driver.Look {
			r = n.look(c, req, now)
			return
		}
		free, other := n.open(lease, req), n.changed(c, req)
		first := req.Mode == driver.Try || n.is("held-before-changed") ||
			req.Mode == driver.Force && n.is("force-held-before-changed")
		switch {
		case other && (free || !first):
			r = n.foundChanged(c, req)
		case free:
			n.take(c, lease, req, now)
			r.Now, r.Failure = now, n.noted(lease, req)
			if c.claim.data == req.Token && !n.is("acquire-replay-wrong-now") {
				r.Now = c.claim.began
			}
			if n.is("acquire-clock-back") && n.id == "b" {
				r.Now = now.Add(-50 * time.Millisecond)
			}
		default:
			r = n.held(lease, req, now)
			n.noteWaiter(c, req, now)
		}
	})
	return r, errors.Join(err, actErr)
}

// scriptError returns an error if the place has a flaw in which a script fails on foreign data.
func (n *node) scriptError(c *brokenCell, req driver.AcquireRequest) error {
	record := []byte(c.value.data)
	switch {
	case c.lease.garbled && n.is("garbled-lease-error"),
		c.claim.endless && n.is("foreign-claim-error"),
		strings.HasPrefix(c.value.data, "RF1") && driver.RecordToken(record) == "" && n.is("acquire-foreign-error"):
		return errGarbled
	}
	return nil
}

// open reports whether the lease is free for a request.
func (n *node) open(lease slot, req driver.AcquireRequest) bool {
	failed := strings.HasPrefix(lease.data, "!")
	switch {
	case lease.data == "", strings.HasPrefix(lease.data, "?") && !n.is("note-blocks") &&
		!(n.is("note-blocks-try") && req.Mode == driver.Try),
		n.has(&lease, req.Token, "awaited-blocks-acquire") && !n.is("own-token-lost"),
		failed && req.Mode == driver.Force && !n.is("force-obeys-back-off"),
		failed && n.is("back-off-ignored"),
		req.Mode == driver.Force && n.is("force-steals"),
		lease.garbled,
		lease.endless && req.Mode != driver.Try && !n.is("endless-lease-held"),
		n.is("lease-shared"), n.is("lease-per-node") && !strings.HasPrefix(lease.data, n.id):
		return true
	}
	return false
}

// noted returns the failure that Acquire finds noted in the place of the lease.
func (n *node) noted(lease slot, req driver.AcquireRequest) string {
	text, noted := strings.CutPrefix(lease.data, "?")
	switch {
	case noted && !n.is("note-unsaid"):
		n.lastNote = text
		return text
	case lease.data == "" && n.is("note-stays"):
		return n.lastNote
	case n.is("force-says-back-off"):
		return strings.TrimPrefix(lease.data, "!")
	}
	return ""
}

// look is Acquire in mode Look.
func (n *node) look(c *brokenCell, req driver.AcquireRequest, now time.Time) driver.AcquireResult {
	note, noted := strings.CutPrefix(c.lease.data, "?")
	failed := strings.HasPrefix(c.lease.data, "!")
	switch {
	case n.changed(c, req) && !n.is("look-ignores-record"):
		if c.lease.data == req.Token && n.is("look-frees-lease") {
			return n.foundChanged(c, req)
		}
		return driver.AcquireResult{State: driver.Changed, Record: []byte(c.value.data)}
	case c.lease.data == "" || noted || c.lease.endless || c.lease.garbled || failed && n.is("look-ignores-back-off"),
		c.lease.data == req.Token && n.is("look-own-free"):
		switch {
		case n.is("look-takes-lease"):
			*c.lease = slot{data: req.Token, until: now.Add(req.LeaseTTL)}
		case n.is("look-takes-claim"):
			*c.claim = slot{data: req.Token, until: now.Add(req.ClaimTTL)}
		case n.is("look-eats-note"):
			*c.lease = slot{}
		case n.is("look-no-note"):
			note = ""
		}
		if !noted {
			note = ""
		}
		return driver.AcquireResult{State: driver.Free, Failure: note}
	}
	r := n.held(*c.lease, req, now)
	if n.is("look-no-left") {
		r.Left = 0
	}
	if !n.is("look-not-noted") {
		c.lease.awaited = true
	}
	return r
}

// changed reports whether the stored record is not the one that the request has seen.
func (n *node) changed(c *brokenCell, req driver.AcquireRequest) bool {
	token, exists := driver.RecordToken([]byte(c.value.data)), c.value.data != "" && !c.value.garbled
	other := exists && token != req.Seen
	switch {
	case n.is("acquire-always-changed"):
		other = exists
	case n.is("acquire-never-changed"):
		other = false
	case n.is("acquire-seen-prefix"):
		other = other && !strings.HasPrefix(req.Seen, token)
	case n.is("acquire-foreign"):
		other = other || exists && token == ""
	case n.is("acquire-absent-changed"):
		other = other || !exists && req.Seen != ""
	}
	return other
}

// foundChanged returns Changed. It first frees the lease if the token has the lease.
func (n *node) foundChanged(c *brokenCell, req driver.AcquireRequest) driver.AcquireResult {
	r := driver.AcquireResult{State: driver.Changed, Record: []byte(c.value.data)}
	if n.is("changed-no-record") {
		r.Record = nil
	}
	if n.is("changed-takes-lease") {
		*c.lease = slot{data: req.Token, until: time.Now().Add(req.LeaseTTL)}
		return r
	}
	mine := n.has(c.lease, req.Token, "awaited-blocks-changed") || req.Mode == driver.Try
	if n.is("changed-frees-any") || mine && !n.is("changed-keeps-lease") {
		*c.lease = slot{}
	}
	if mine && !n.is("changed-silent") || n.is("changed-announces-always") {
		n.announce(driver.Announcement{Kind: driver.Released, Key: req.Key, Token: req.Token})
	}
	return r
}

// take takes lease and claim.
func (n *node) take(c *brokenCell, lease slot, req driver.AcquireRequest, now time.Time) {
	if n.is("acquire-ttls-swapped") {
		req.LeaseTTL, req.ClaimTTL = req.ClaimTTL, req.LeaseTTL
	}
	if n.is("acquire-try-endless") && req.Mode == driver.Try {
		req.LeaseTTL += time.Hour
	}
	own := lease.data == req.Token
	awaited := own && lease.awaited && !n.is("waiter-lost-by-repeat")
	*c.lease = slot{data: req.Token, until: now.Add(req.LeaseTTL), awaited: awaited}
	if n.is("own-token-once") && own {
		*c.lease = slot{}
	}
	if n.is("acquire-no-claim") || n.is("acquire-keeps-old-claim") && c.claim.data != "" {
		return
	}
	if c.claim.data != req.Token || n.is("acquire-replay-moves-claim") {
		*c.claim = slot{data: req.Token, until: now.Add(req.ClaimTTL), began: now}
	}
}

// held returns the reply for a token that did not get the lease.
func (n *node) held(lease slot, req driver.AcquireRequest, now time.Time) driver.AcquireResult {
	r := driver.AcquireResult{State: driver.Held}
	failure, failed := strings.CutPrefix(lease.data, "!")
	switch {
	case failed:
		r.Failure = failure
		if n.is("back-off-holder") {
			r.Holder = lease.data
		}
		if lease.awaited && n.is("awaited-in-failure") {
			r.Failure += "+"
		}
	case lease.awaited && n.is("awaited-in-holder"):
		r.Holder = lease.data + "+"
	case !n.is("holder-unknown"):
		r.Holder = lease.data
	}
	switch {
	case req.Mode == driver.Try, n.is("left-missing"), n.is("left-not-forced") && req.Mode == driver.Force:
	case n.is("left-unit"):
		r.Left = lease.until.Sub(now) / 1000
	case n.is("left-of-requester"):
		r.Left = req.LeaseTTL
	default:
		r.Left = lease.until.Sub(now)
	}
	return r
}

// noteWaiter notes on the lease that a caller waits for it. With one of the flaws held-…, it changes more.
func (n *node) noteWaiter(c *brokenCell, req driver.AcquireRequest, now time.Time) {
	switch {
	case n.is("held-takes-claim"):
		*c.claim = slot{data: req.Token, until: now.Add(req.ClaimTTL)}
	case n.is("held-drops-claim"):
		*c.claim = slot{}
	case n.is("held-frees-lease"):
		*c.lease = slot{}
	case n.is("held-lengthens"):
		c.lease.until = now.Add(req.LeaseTTL)
	}
	if req.Mode == driver.Try || n.is("waiter-not-noted") || req.Mode == driver.Force && n.is("waiter-not-noted-force") {
		return
	}
	c.lease.awaited = true
	if n.is("awaited-endless") {
		c.lease.endless = true
	}
}
