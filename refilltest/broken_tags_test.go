package refilltest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/refill-go/refill"
)

// brokenTag is the mark of a tag in a place.
type brokenTag struct {
	refill.TagState
	until   time.Time
	foreign bool // bytes that are no mark, or another type; without an end
}

func (p *place) plantTag(tag string) { p.tags[tag] = &brokenTag{foreign: true} }

func (n *node) GetMany(ctx context.Context, keys ...string) (records [][]byte, err error) {
	seen := map[string]bool{}
	if n.is("many-sorted") {
		keys = slices.Sorted(slices.Values(keys))
	}
	for _, key := range keys {
		var record []byte
		actErr := n.act(ctx, key, func(c *brokenCell, _ time.Time) {
			switch {
			case c.value.garbled && n.is("many-garbled-error"):
				err = errGarbled
			case n.is("many-once") && seen[key], n.is("many-decodes") && refill.RecordToken([]byte(c.value.data)) == "":
			case c.value.data != "" && !c.value.garbled:
				record = []byte(c.value.data)
			case n.is("many-empty"):
				record = []byte{}
			}
		})
		if err = errors.Join(err, actErr); err != nil {
			return nil, err
		}
		seen[key] = true
		if record != nil || !n.is("many-skips") {
			records = append(records, record)
		}
	}
	return records, nil
}

// mark runs a step on the mark of a tag.
func (n *node) mark(ctx context.Context, tag string, step func(k *brokenTag, now time.Time)) (err error) {
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

func (n *node) Tags(ctx context.Context, tags ...string) (states []refill.TagState, err error) {
	if n.is("tags-sorted") {
		tags = slices.Sorted(slices.Values(tags))
	}
	for _, tag := range tags {
		err = errors.Join(err, n.mark(ctx, tag, func(k *brokenTag, _ time.Time) {
			t := k.TagState
			if n.is("tags-always-known") {
				t.Known = true
			}
			states = append(states, t)
		}))
	}
	return states, err
}

func (n *node) HoldTags(ctx context.Context, reach, keep time.Duration, tags ...string) (err error) {
	if n.is("hold-first") && len(tags) > 1 {
		tags = tags[:1]
	}
	if n.is("hold-no-reach") {
		reach = 0
	}
	for _, tag := range tags {
		err = errors.Join(err, n.mark(ctx, tag, func(k *brokenTag, now time.Time) {
			known := k.Known
			n.gap("race-hold")
			if !known || n.is("hold-overwrites") {
				k.TagState = refill.TagState{Known: true, Invalidated: now.Add(-reach)}
			}
			n.live(k, now.Add(keep), n.is("hold-shortens"), n.is("hold-idle") && known)
			if n.is("hold-loud") {
				n.announce(refill.Note{Kind: refill.NoteTagInvalidated, Key: tag})
			}
		}))
	}
	return err
}

// live is the life of a mark that is held or voided.
func (n *node) live(k *brokenTag, until time.Time, shortens, idle bool) {
	if !idle && (shortens || k.until.Before(until)) {
		k.until = until
	}
	if !n.is("foreign-tag-endless") {
		k.foreign = false
	}
}

func (n *node) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return n.voidTags(ctx, refill.NoteTagInvalidated, by, keep, tags, func(k *brokenTag, at time.Time) {
		k.Invalidated = at
		if n.is("tag-invalidate-forgets") {
			k.Expired = time.Time{}
		}
	})
}

func (n *node) ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return n.voidTags(ctx, refill.NoteTagExpired, by, keep, tags, func(k *brokenTag, at time.Time) {
		if !k.Known && !n.is("tag-expire-revives") || n.is("tag-expire-invalidates") {
			k.Invalidated = at
		}
		k.Expired = at
	})
}

func (n *node) voidTags(
	ctx context.Context, kind refill.NoteKind, by string, keep time.Duration, tags []string, step func(*brokenTag, time.Time),
) (err error) {
	if n.is("tag-void-first") && len(tags) > 1 {
		tags = tags[:1]
	}
	for _, tag := range tags {
		err = errors.Join(err, n.mark(ctx, tag, func(k *brokenTag, now time.Time) {
			at, was := n.momentOf(now), *k
			n.gap("race-tag-void")
			if n.is("race-tag-void") {
				*k = was
			}
			if !k.Known || !n.is("tag-void-once") {
				step(k, at)
			}
			k.Known = true
			n.live(k, now.Add(keep), n.is("tag-void-shortens"), n.is("tag-void-keeps-end") && was.Known)
			n.besides(tag, at)
			n.announceTag(refill.Note{Kind: kind, Key: tag, Token: by, At: at})
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

// besides does what a void of a tag must not do.
func (n *node) besides(tag string, at time.Time) {
	if n.is("tag-voids-all") {
		for _, k := range n.tags {
			k.Invalidated, k.Expired = at, at
		}
	}
	if n.is("tag-voids-key") {
		*n.cell(tag).value = slot{}
	}
	if n.is("tag-voids-load") {
		*n.cell(tag).claim = slot{}
	}
}

func (n *node) announceTag(note refill.Note) {
	switch {
	case n.is("tag-void-silent"):
		return
	case n.is("tag-note-no-at"):
		note.At = time.Time{}
	case n.is("tag-note-no-token"):
		note.Token = ""
	case n.is("tag-note-as-key"):
		note.Kind = refill.NoteInvalidated
	}
	n.announce(note)
}
