package goredis

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/refill-go/refill"
)

// This file is tags. The mark of a tag is text, "<invalidated> <expired>": microseconds since 1970 by the server's clock, in
// decimal, 0 for never. It is part of the key format, and as final. Marks are compared with the moments of claims, which
// other servers of a Cluster or a Ring may have given: their clocks are taken to agree.

// Tags implements refill.Store. A mark without an end, which a GET cannot tell, counts as known; HoldTags gives it one.
func (s *Store) Tags(ctx context.Context, tags ...string) ([]refill.TagState, error) {
	if len(tags) == 0 {
		return nil, nil
	}
	all := make([]string, len(tags))
	for i, tag := range tags {
		all[i] = s.keys(tag).mark()
	}
	return call(ctx, &s.calls, "tags", func(ctx context.Context) ([]refill.TagState, error) {
		marks, err := s.readAll(ctx, all, false)
		if err != nil {
			return nil, err
		}
		states := make([]refill.TagState, len(marks))
		for i, mark := range marks {
			states[i] = parseMark(string(mark))
		}
		return states, nil
	})
}

// HoldTags implements refill.Store.
func (s *Store) HoldTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	if len(tags) == 0 {
		return nil
	}
	all := make([]invocation, len(tags))
	for i, tag := range tags {
		all[i] = invocation{keys: []string{s.keys(tag).mark()}, args: []any{reach.Microseconds(), millis(keep)}}
	}
	_, err := call(ctx, &s.calls, "holdtags", func(ctx context.Context) (struct{}, error) {
		return struct{}{}, holdTagScript.runMany(ctx, s.client, all)
	})
	return err
}

// InvalidateTags implements refill.Store.
func (s *Store) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return s.voidTags(ctx, "invalidatetags", kindTagInvalidated, by, keep, tags)
}

// ExpireTags implements refill.Store.
func (s *Store) ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return s.voidTags(ctx, "expiretags", kindTagExpired, by, keep, tags)
}

func (s *Store) voidTags(ctx context.Context, step, kind, by string, keep time.Duration, tags []string) error {
	if len(tags) == 0 {
		return nil
	}
	all := make([]invocation, len(tags))
	for i, tag := range tags {
		all[i] = invocation{keys: []string{s.keys(tag).mark()}, args: []any{by, s.channel(), tag, kind, millis(keep)}}
	}
	return s.announceMany(ctx, step, voidTagScript, by, tags[0], all)
}

// parseMark reads a mark. Whatever is not written exactly like one is unknown, also to the scripts: those replace it.
func parseMark(mark string) refill.TagState {
	invalidated, expired, _ := strings.Cut(mark, " ")
	i, fine := parseMoment(invalidated)
	e, ok := parseMoment(expired)
	if !fine || !ok {
		return refill.TagState{}
	}
	return refill.TagState{Known: true, Invalidated: i, Expired: e}
}

// maxMoment is the year 2255: Lua's numbers are exact up to there.
const maxMoment = 9e15

// parseMoment takes microseconds since 1970 in their one canonical form. 0 is the zero time.
func parseMoment(digits string) (t time.Time, ok bool) {
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 0 || n >= maxMoment || strconv.FormatInt(n, 10) != digits {
		return t, false
	}
	if n > 0 {
		t = time.UnixMicro(n)
	}
	return t, true
}
