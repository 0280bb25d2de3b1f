package refilltest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/refill-go/refill/driver"
)

// brokenTag is the state of a tag in a place.
type brokenTag struct {
	driver.TagState
	until   time.Time
	foreign bool // the state is foreign bytes or of a foreign type, without an end
}

func (p *place) plantTag(tag string) { p.tags[tag] = &brokenTag{foreign: true} }

func (n *node) GetMany(ctx context.Context, keys ...string) (records [][]byte, err error) {
	seen := map[string]bool{}
	if n.is("getmany-sorted") {
		keys = slices.Sorted(slices.Values(keys))
	}
	for _, key := range keys {
		var record []byte
		actErr := n.act(ctx, key, func(c *brokenCell, _ time.Time) {
			switch {
			case c.value.garbled && n.is("getmany-garbled-error"):
				err = errGarbled
			case n.is("getmany-once") && seen[key], n.is("getmany-decodes") && driver.RecordToken([]byte(c.value.data)) == "":
			case c.value.data != "" && !c.value.garbled:
				record = []byte(c.value.data)
			case n.is("getmany-empty"):
				record = []byte{}
			}
		})
		if err = errors.Join(err, actErr); err != nil {
			return nil, err
		}
		seen[key] = true
		if record != nil || !n.is("getmany-skips") {
			records = append(records, record)
		}
	}
	return records, nil
}

// onTag runs one atomic step on the state of a tag.
func (n *node) onTag(ctx context.Context, tag string, step func(k *brokenTag, now time.Time)) (err error) {
	if err := n.answer(ctx); err != nil {
		return err
	}
	switch {
	case n.is("tags-fold"):
		tag = strings.ToLower(tag)
	case n.is("tags-own-node"):
		tag = n.id + tag
	}
	n.place.mu.Lock()
	defer n.place.mu.Unlock()
	k, now := n.tags[tag], time.Now()
	switch {
	case k == nil:
		k = new(brokenTag)
		n.tags[tag] = k
	case k.foreign && n.is("foreign-tag-error"):
		return errGarbled
	case k.foreign && n.is("foreign-tag-known"):
		k.Known = true
	case k.foreign && n.is("foreign-tag-endless"):
	case !now.Before(k.until) && !n.is("tag-endless"):
		*k = brokenTag{foreign: k.foreign}
	}
	step(k, now)
	return nil
}

func (n *node) Tags(ctx context.Context, tags ...string) (states []driver.TagState, err error) {
	if n.is("tags-sorted") {
		tags = slices.Sorted(slices.Values(tags))
	}
	for _, tag := range tags {
		err = errors.Join(err, n.onTag(ctx, tag, func(k *brokenTag, _ time.Time) {
			t := k.TagState
			if n.is("tags-always-known") {
				t.Known = true
			}
			states = append(states, t)
		}))
	}
	return states, err
}

func (n *node) EnsureTags(ctx context.Context, reach, keep time.Duration, tags ...string) (err error) {
	if n.is("ensure-first") && len(tags) > 1 {
		tags = tags[:1]
	}
	if n.is("ensure-no-reach") {
		reach = 0
	}
	for _, tag := range tags {
		err = errors.Join(err, n.onTag(ctx, tag, func(k *brokenTag, now time.Time) {
			known := k.Known
			n.gap("race-ensure")
			if !known || n.is("ensure-overwrites") {
				k.TagState = driver.TagState{Known: true, Invalidated: now.Add(-reach)}
			}
			n.keepState(k, now.Add(keep), n.is("ensure-shortens"), n.is("ensure-idle") && known)
			if n.is("ensure-announces") {
				n.announce(driver.Announcement{Kind: driver.TagInvalidated, Key: tag})
			}
		}))
	}
	return err
}

// keepState makes a state live until the given moment, and replaces a foreign state. If shortens is true, keepState
// also moves the end of the state closer. If idle is true, it does not move the end. Both are flaws.
func (n *node) keepState(k *brokenTag, until time.Time, shortens, idle bool) {
	if !idle && (shortens || k.until.Before(until)) {
		k.until = until
	}
	if !n.is("foreign-tag-endless") {
		k.foreign = false
	}
}

func (n *node) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return n.changeTags(ctx, driver.TagInvalidated, by, keep, tags, func(k *brokenTag, at time.Time) {
		k.Invalidated = at
		if n.is("tag-invalidate-forgets") {
			k.Expired = time.Time{}
		}
	})
}

func (n *node) ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return n.changeTags(ctx, driver.TagExpired, by, keep, tags, func(k *brokenTag, at time.Time) {
		if !k.Known && !n.is("tag-expire-revives") || n.is("tag-expire-invalidates") {
			k.Invalidated = at
		}
		k.Expired = at
	})
}

// changeTags does what InvalidateTags and ExpireTags have in common.
func (n *node) changeTags(
	ctx context.Context, kind driver.AnnouncementKind, by string, keep time.Duration, tags []string,
	step func(*brokenTag, time.Time),
) (err error) {
	if n.is("tag-only-first") && len(tags) > 1 {
		tags = tags[:1]
	}
	for _, tag := range tags {
		err = errors.Join(err, n.onTag(ctx, tag, func(k *brokenTag, now time.Time) {
			at, was := n.momentOf(now), *k
			n.gap("race-tag-change")
			if n.is("race-tag-change") {
				*k = was
			}
			if !k.Known || !n.is("tag-only-once") {
				step(k, at)
			}
			k.Known = true
			n.keepState(k, now.Add(keep), n.is("tag-shortens"), n.is("tag-keeps-end") && was.Known)
			n.sideEffects(tag, at)
			n.announceTag(driver.Announcement{Kind: kind, Key: tag, Token: by, At: at})
		}))
	}
	return err
}

func (n *node) momentOf(now time.Time) time.Time {
	switch {
	case n.is("tag-rounds"):
		return now.Truncate(time.Second)
	case n.is("tag-clock"):
		return now.Add(time.Hour)
	case n.is("tag-clock-back") && n.id == "b":
		return now.Add(-50 * time.Millisecond)
	}
	return now
}

// sideEffects changes what InvalidateTags and ExpireTags must not change, if the place has such a flaw.
func (n *node) sideEffects(tag string, at time.Time) {
	if n.is("tag-changes-all") {
		for _, k := range n.tags {
			k.Invalidated, k.Expired = at, at
		}
	}
	if n.is("tag-deletes-value") {
		*n.cell(tag).value = slot{}
	}
	if n.is("tag-deletes-claim") {
		*n.cell(tag).claim = slot{}
	}
}

func (n *node) announceTag(a driver.Announcement) {
	switch {
	case n.is("tag-silent"):
		return
	case n.is("tag-announcement-no-at"):
		a.At = time.Time{}
	case n.is("tag-announcement-no-token"):
		a.Token = ""
	case n.is("tag-announcement-as-key"):
		a.Kind = driver.Invalidated
	}
	n.announce(a)
}
