package goredis

import (
	"context"
	"errors"
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
	case errors.Is(err, redis.Nil), wrongType(err), len(b) == 0 && err == nil:
		return nil, nil
	}
	return b, err
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

// TryLease implements refill.Store. The plain command does nearly always; the script mends what it cannot.
func (s *Store) TryLease(ctx context.Context, key, token string, ttl time.Duration, how refill.Ask) (refill.Lease, error) {
	k := s.keys(key)
	return call(ctx, &s.calls, "lease", func(ctx context.Context) (refill.Lease, error) {
		if how == refill.AskForce {
			return s.forceLease(ctx, k, token, ttl, how)
		}
		// SetNX of go-redis must not be used for this: when the client repeats a command whose answer was lost, it reports
		// our own lease as another's.
		there, err := s.client.Do(ctx, "set", k.lease(), token, "nx", "get", "px", millis(ttl)).Text()
		switch {
		case errors.Is(err, redis.Nil):
			return refill.Lease{Won: true}, nil
		case wrongType(err), err == nil && there == "":
			return s.forceLease(ctx, k, token, ttl, how)
		case err != nil:
			return refill.Lease{}, err
		case there == token:
			return refill.Lease{Won: true}, nil // the client tried before, and lost the answer
		case how == refill.AskOnce:
			return heldLease(there, 0, how), nil
		}
		left, err := s.await(ctx, k, token, ttl)
		if err == nil && (left < 0 || left > millis(ttl)+tooLong) {
			return s.forceLease(ctx, k, token, ttl, how)
		}
		return heldLease(there, left, how), err
	})
}

// await notes that somebody waits for the holder of the lease, and returns what is left of it in ms. In this order: a lease
// that is there still after the note will be announced when it is freed, and one that is gone is tried for again.
func (s *Store) await(ctx context.Context, k keys, token string, ttl time.Duration) (left int64, err error) {
	p := s.client.Pipeline()
	p.Do(ctx, "set", k.wait(), token, "px", 2*millis(ttl))
	life := p.Do(ctx, "pttl", k.lease())
	_, failed := p.Exec(ctx)
	if left, err = life.Int64(); err != nil && failed != nil {
		err = failed // perhaps a hook's
	}
	return left, err
}

// forceLease takes the lease also where it has no end or is of a foreign type, and, if asked to, where it is a back-off.
func (s *Store) forceLease(
	ctx context.Context, k keys, token string, ttl time.Duration, how refill.Ask,
) (refill.Lease, error) {
	force := "0"
	if how == refill.AskForce {
		force = "1"
	}
	reply, err := leaseScript.run(ctx, s.client, []string{k.lease(), k.wait()}, token, millis(ttl), force, tooLong).Slice()
	if err != nil {
		return refill.Lease{}, err
	}
	if len(reply) == 1 {
		return refill.Lease{Won: true}, nil
	}
	if len(reply) != 3 {
		return refill.Lease{}, errReply
	}
	there, ok := reply[1].(string)
	left, fine := reply[2].(int64)
	if !ok || !fine {
		return refill.Lease{}, errReply
	}
	return heldLease(there, left, how), nil
}

func heldLease(there string, left int64, how refill.Ask) (l refill.Lease) {
	if failure, ok := strings.CutPrefix(there, "!"); ok {
		l.Failure = failure
	} else {
		l.Holder = there
	}
	if how != refill.AskOnce {
		l.Left = life(left)
	}
	return l
}

// life is what is left of something by its PTTL. Redis rounds down, and 0 would say that nobody asked.
func life(pttl int64) time.Duration {
	return time.Duration(max(pttl, 1)) * time.Millisecond
}

// Claim implements refill.Store.
func (s *Store) Claim(ctx context.Context, key, token, seen string, ttl time.Duration) (refill.Claim, error) {
	k := s.keys(key)
	return call(ctx, &s.calls, "claim", func(ctx context.Context) (refill.Claim, error) {
		sent := s.clock.elapsed()
		reply, err := claimScript.run(ctx, s.client, k.fill(), token, s.channel(), key, seen, millis(ttl)).Slice()
		if err != nil {
			return refill.Claim{}, err
		}
		got := s.clock.elapsed()
		c, err := claimOf(reply)
		if err == nil {
			s.clock.learn(sample{sent: sent, got: got, server: c.Now})
		}
		return c, err
	})
}

func claimOf(reply []any) (c refill.Claim, err error) {
	if len(reply) < 3 {
		return c, errReply
	}
	state, ok := reply[0].(int64)
	ok = ok && state >= 0 && state <= int64(refill.ClaimLost)
	var number [2]int64
	for i := range number {
		text, _ := reply[1+i].(string)
		number[i], err = strconv.ParseInt(text, 10, 64)
		ok = ok && err == nil
	}
	c.State, c.Now = refill.ClaimState(state), time.Unix(number[0], number[1]*1000)
	if c.State == refill.ClaimOther {
		record, there := "", len(reply) > 3
		if there {
			record, there = reply[3].(string)
		}
		c.Record, ok = []byte(record), ok && there
	}
	if !ok {
		return refill.Claim{}, errReply
	}
	return c, nil
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
	quiet := "0"
	if p.Quiet && !s.hub.echo.due(time.Now()) {
		quiet = "1"
	} else {
		s.hub.echo.expect(p.Key, p.Token)
	}
	state, err := call(ctx, &s.calls, "publish", func(ctx context.Context) (refill.Published, error) {
		state, err := publishScript.run(ctx, s.client, append(k.fill(), k.wait()),
			p.Token, s.channel(), p.Key, p.Replaced, record, millis(p.Keep), refill.MaxNoteRecord, quiet).Int()
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
