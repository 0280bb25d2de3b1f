package goredis

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file implements tags. The state of a tag is the text "<invalidated> <expired>". Each of these two moments is
// in microseconds since 1970 by the server's clock, in decimal, or 0 for never. The text is part of the key format
// and is final. The Loader compares tag states with the moments of claims. The claim may come from another server of
// the Cluster or Ring than the tag state. So the clocks of all servers are assumed to agree.

// Tags implements driver.Store. A state without an end (a Redis key without a TTL) counts as known, because Tags reads
// with GET, and GET does not return the TTL. EnsureTags replaces such a state by a state with an end.
func (s *Store) Tags(ctx context.Context, tags ...string) ([]driver.TagState, error) {
	if len(tags) == 0 {
		return nil, nil
	}
	all := make([]string, len(tags))
	for i, tag := range tags {
		all[i] = s.keys(tag).tagState()
	}
	return call(ctx, &s.calls, "tags", func(ctx context.Context) ([]driver.TagState, error) {
		texts, err := s.readAll(ctx, all, false)
		if err != nil {
			return nil, err
		}
		states := make([]driver.TagState, len(texts))
		for i, text := range texts {
			states[i] = parseTagState(string(text))
		}
		return states, nil
	})
}

// EnsureTags implements driver.Store.
func (s *Store) EnsureTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	if len(tags) == 0 {
		return nil
	}
	all := make([]invocation, len(tags))
	for i, tag := range tags {
		all[i] = invocation{keys: []string{s.keys(tag).tagState()}, args: []any{reach.Microseconds(), millis(keep)}}
	}
	_, err := call(ctx, &s.calls, "ensuretags", func(ctx context.Context) (struct{}, error) {
		return struct{}{}, ensureTagScript.runMany(ctx, &s.known, s.client, all)
	})
	return err
}

// InvalidateTags implements driver.Store.
func (s *Store) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return s.changeTags(ctx, "invalidatetags", kindTagInvalidated, by, keep, tags)
}

// ExpireTags implements driver.Store.
func (s *Store) ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	return s.changeTags(ctx, "expiretags", kindTagExpired, by, keep, tags)
}

// changeTags runs lua/changetag.lua for each tag.
func (s *Store) changeTags(ctx context.Context, step, kind, by string, keep time.Duration, tags []string) error {
	if len(tags) == 0 {
		return nil
	}
	all := make([]invocation, len(tags))
	for i, tag := range tags {
		all[i] = invocation{
			keys: []string{s.keys(tag).tagState()},
			args: []any{by, s.channel, tag, kind, millis(keep)},
		}
	}
	return s.announceMany(ctx, step, changeTagScript, by, tags[0], all)
}

// parseTagState reads the text of a tag state. Text in any other form means an unknown tag. The scripts also treat
// such text as an unknown tag, and replace it.
func parseTagState(text string) driver.TagState {
	invalidated, expired, _ := strings.Cut(text, " ")
	i, fine := parseMoment(invalidated)
	e, ok := parseMoment(expired)
	if !fine || !ok {
		return driver.TagState{}
	}
	return driver.TagState{Known: true, Invalidated: i, Expired: e}
}

// maxMoment is in microseconds since 1970, and lies in the year 2255. Lua's numbers are exact up to this moment.
const maxMoment = 9e15

// parseMoment reads microseconds since 1970 in canonical form: no sign, no leading zero. 0 is the zero time.
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
