package goredis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
)

// This file is the steps of a fill, in their order: one command or one script each.

var errReply = errors.New("the answer makes no sense")

// Get implements refill.Store.
func (s *Store) Get(ctx context.Context, key string) ([]byte, error) {
	k, due := s.keys(key).value(), s.clock.due()
	return call(ctx, &s.calls, "get", func(ctx context.Context) ([]byte, error) {
		if !due {
			return content(s.client.Get(ctx, k))
		}
		records, err := s.readAll(ctx, []string{k}, true)
		if err != nil {
			return nil, err
		}
		return records[0], nil
	})
}

// GetMany implements refill.Store.
func (s *Store) GetMany(ctx context.Context, keys ...string) ([][]byte, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	all, due := make([]string, len(keys)), s.clock.due()
	for i, key := range keys {
		all[i] = s.keys(key).value()
	}
	return call(ctx, &s.calls, "getmany", func(ctx context.Context) ([][]byte, error) {
		return s.readAll(ctx, all, due)
	})
}

// content is what a GET found, nil for nothing, for a foreign type, and for no bytes.
func content(cmd *redis.StringCmd) ([]byte, error) {
	b, err := cmd.Bytes()
	switch {
	case err == nil && len(b) > 0:
		return b, nil
	case err == nil, errors.Is(err, redis.Nil), wrongType(err):
		return nil, nil
	}
	return nil, err
}

// readAll reads many Redis keys in one pipeline (not by MGET, which a Cluster refuses for keys of different slots), and the
// server's clock if that is due. On a Ring any shard answers that: the clocks of shards are taken to agree, as they do
// where NTP runs. One key that cannot be read is an error.
func (s *Store) readAll(ctx context.Context, all []string, due bool) ([][]byte, error) {
	p, reads := s.client.Pipeline(), make([]*redis.StringCmd, len(all))
	for i, k := range all {
		reads[i] = p.Get(ctx, k)
	}
	var clock *redis.TimeCmd
	if due {
		clock = p.Time(ctx)
	}
	sent := s.clock.elapsed()
	cmds, err := p.Exec(ctx)
	if due {
		s.clock.read(clock, sent)
	}
	if err != nil && !slices.ContainsFunc(cmds, func(c redis.Cmder) bool { return c.Err() != nil }) {
		return nil, err // a hook's
	}
	contents := make([][]byte, len(all))
	for i, cmd := range reads {
		if contents[i], err = content(cmd); err != nil {
			return nil, err
		}
	}
	return contents, nil
}

// tooLong is how many milliseconds more than our own lease another's may live, for its node may have another LockTTL. One
// that lives longer was taken before the server's clock was set back, and counts as free: a holder that is still there has
// lengthened it since, and one that has not may be dead. What it costs if it is not, is a load.
const tooLong = 60_000

// Begin implements refill.Store. A refresh asks with a plain command first: on a fleet nearly all lose, and leave.
func (s *Store) Begin(ctx context.Context, b refill.Bid) (refill.Begun, error) {
	k := s.keys(b.Key)
	return call(ctx, &s.calls, "begin", func(ctx context.Context) (refill.Begun, error) {
		if b.Ask == refill.AskOnce {
			// SetNX of go-redis must not be used for this: when the client repeats a command whose answer was lost, it
			// reports our own lease as another's.
			there, err := s.client.Do(ctx, "set", k.lease(), b.Token, "nx", "get", "px", millis(b.LeaseTTL)).Text()
			switch holder := holderOf(there); {
			case err == nil && holder != "" && holder != b.Token:
				return heldBy(holder, 0), nil
			case err != nil && !errors.Is(err, redis.Nil) && !wrongType(err):
				return refill.Begun{}, err
			}
		}
		return s.begin(ctx, k, b)
	})
}

// begin runs the script, which finds a lease that is the token's already as well as none.
func (s *Store) begin(ctx context.Context, k keys, b refill.Bid) (refill.Begun, error) {
	force := "0"
	if b.Ask == refill.AskForce {
		force = "1"
	}
	sent := s.clock.elapsed()
	reply, err := beginScript.run(ctx, s.client, k.fill(),
		b.Token, s.channel(), b.Key, b.Seen, millis(b.LeaseTTL), millis(b.ClaimTTL), force, tooLong).Slice()
	if err != nil {
		return refill.Begun{}, err
	}
	got := s.clock.elapsed()
	r, err := begunOf(reply)
	if err == nil && r.State == refill.BeginTaken {
		s.clock.learn(sample{sent: sent, got: got, server: r.Now})
	}
	return r, err
}

// begunOf reads the answer of lua/begin.lua.
func begunOf(reply []any) (refill.Begun, error) {
	if len(reply) < 2 {
		return refill.Begun{}, errReply
	}
	text, ok := reply[1].(string)
	switch last := reply[len(reply)-1]; {
	case !ok:
	case reply[0] == int64(refill.BeginTaken) && len(reply) == 3:
		part, _ := last.(string)
		seconds, err := strconv.ParseInt(text, 10, 64)
		micros, err2 := strconv.ParseInt(part, 10, 64)
		if err == nil && err2 == nil {
			return refill.Begun{Now: time.Unix(seconds, micros*1000)}, nil
		}
	case reply[0] == int64(refill.BeginOther) && len(reply) == 2:
		return refill.Begun{State: refill.BeginOther, Record: []byte(text)}, nil
	case reply[0] == int64(refill.BeginHeld) && len(reply) == 3:
		if left, ok := last.(int64); ok {
			return heldBy(text, life(left)), nil
		}
	}
	return refill.Begun{}, errReply
}

// heldBy is the answer to whom did not get the lease.
func heldBy(holder string, left time.Duration) refill.Begun {
	r := refill.Begun{State: refill.BeginHeld, Left: left}
	if failure, failed := strings.CutPrefix(holder, "!"); failed {
		r.Failure = failure
	} else {
		r.Holder = holder
	}
	return r
}

// holderOf is holder_of of lua/common.lua.
func holderOf(lease string) string {
	if strings.HasPrefix(lease, "!") {
		return lease
	}
	return strings.TrimSuffix(lease, "+")
}

// life is what is left of something by its PTTL. Redis rounds down, and 0 would say that nobody asked.
func life(pttl int64) time.Duration {
	return time.Duration(max(pttl, 1)) * time.Millisecond
}

// Renew implements refill.Store.
func (s *Store) Renew(ctx context.Context, key, token string, ttl time.Duration) (mine bool, err error) {
	k := s.keys(key)
	return call(ctx, &s.spare, "renew", func(ctx context.Context) (bool, error) {
		return s.hub.steady(ctx, k, func(c client) (bool, error) {
			return renewScript.run(ctx, c, k.fill(), token, millis(ttl)).Bool()
		})
	})
}

// Publish implements refill.Store.
func (s *Store) Publish(ctx context.Context, p refill.Publication) (refill.Published, error) {
	k := s.keys(p.Key)
	record := string(p.Record) // a copy: a call that was left behind may still read it
	quiet, began := "0", ""
	if !p.Began.IsZero() {
		began = fmt.Sprintf("%d.%d", p.Began.Unix(), p.Began.Nanosecond()/1000) // as TIME says it
	}
	if p.Quiet && !s.hub.echo.due(time.Now()) {
		quiet = "1"
	} else {
		s.hub.echo.expect(p.Key, p.Token)
	}
	state, err := call(ctx, &s.calls, "publish", func(ctx context.Context) (refill.Published, error) {
		state, err := publishScript.run(ctx, s.client, k.fill(),
			p.Token, s.channel(), p.Key, p.Replaced, record, millis(p.Keep), refill.MaxNoteRecord, quiet, began).Int()
		if err == nil && (state < 0 || state > int(refill.PublishNoRoom)) {
			err = errReply
		}
		return refill.Published(state), err
	})
	s.hub.echo.announced(p.Key, p.Token, err == nil && state != refill.PublishRefused)
	return state, err
}

// Fail implements refill.Store.
func (s *Store) Fail(ctx context.Context, key, token, failure string, ttl time.Duration) error {
	var backOff int64
	if ttl > 0 {
		backOff = millis(ttl)
	}
	return s.end(ctx, "fail", failScript, key, token, failure, backOff)
}

// Release implements refill.Store.
func (s *Store) Release(ctx context.Context, key, token string) error {
	return s.end(ctx, "release", releaseScript, key, token)
}

// end runs a script that frees what a token has.
func (s *Store) end(ctx context.Context, step string, x script, key, token string, more ...any) error {
	k := s.keys(key)
	_, err := call(ctx, &s.calls, step, func(ctx context.Context) (any, error) {
		return x.run(ctx, s.client, k.fill(), append([]any{token, s.channel(), key}, more...)...).Result()
	})
	return err
}

// Invalidate implements refill.Store.
func (s *Store) Invalidate(ctx context.Context, by string, keys ...string) error {
	return s.void(ctx, "invalidate", invalidateScript, by, keys)
}

// Expire implements refill.Store.
func (s *Store) Expire(ctx context.Context, by string, keys ...string) error {
	return s.void(ctx, "expire", expireScript, by, keys)
}

// void runs a script for each key. One that fails does not keep the others from being voided.
func (s *Store) void(ctx context.Context, step string, x script, by string, keys []string) error {
	if len(keys) == 0 {
		return nil
	}
	all := make([]invocation, len(keys))
	for i, key := range keys {
		all[i] = invocation{keys: s.keys(key).fill(), args: []any{by, s.channel(), key}}
	}
	return s.announceMany(ctx, step, x, by, keys[0], all)
}

// announceMany runs a script that announces, once per invocation: first is what the first of them is about.
func (s *Store) announceMany(ctx context.Context, step string, x script, by, first string, all []invocation) error {
	s.hub.echo.expect(first, by)
	_, err := call(ctx, &s.calls, step, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, x.runMany(ctx, s.client, all)
	})
	s.hub.echo.announced(first, by, err == nil)
	return err
}
