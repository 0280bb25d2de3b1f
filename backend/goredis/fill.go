package goredis

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/driver"
)

// This file holds the steps of a fill, in their order. Each step is one command or one script.

var errReply = errors.New("unexpected reply from Redis")

// Get implements driver.Store.
func (s *Store) Get(ctx context.Context, key string) ([]byte, error) {
	k, due := s.keys(key).value(), s.clock.due()
	return call(ctx, &s.calls, "get", func(ctx context.Context) ([]byte, error) {
		if !due {
			return content(s.pipelines.get(ctx, k))
		}
		records, err := s.readAll(ctx, []string{k}, true)
		if err != nil {
			return nil, err
		}
		return records[0], nil
	})
}

// GetMany implements driver.Store.
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

// content returns what a GET found. It returns nil if the key is absent, has a foreign type or has an empty value.
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

// readAll reads many Redis keys in one pipeline. If due is set, readAll also reads the server's clock. readAll does
// not use MGET, because a Cluster refuses MGET for keys of different slots. On a Ring, TIME goes to any shard,
// because the clocks of all shards are assumed to agree, as they do under NTP. If one key cannot be read, readAll
// fails.
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
		return nil, err // no command failed, so a hook of the client has returned err
	}
	contents := make([][]byte, len(all))
	for i, cmd := range reads {
		if contents[i], err = content(cmd); err != nil {
			return nil, err
		}
	}
	return contents, nil
}

// leaseMargin is in milliseconds. A lease of another fill counts as free if it would live longer than our LeaseTTL plus
// leaseMargin. The margin is for nodes with a larger LockTTL. A lease above this limit was taken before the server's
// clock was set back. Its holder has probably died, because a renewal would have set the life of the lease to LockTTL
// again. If the holder still runs, the cost is one extra load.
const leaseMargin = 60_000

// Acquire implements driver.Store. In mode Try, Acquire first sends a plain SET, which is cheaper than the script.
// Nearly all background refreshes of a fleet find the lease taken, and then give up without the script. A full Redis
// refuses the plain SET, and then the script takes the lease.
func (s *Store) Acquire(ctx context.Context, r driver.AcquireRequest) (driver.AcquireResult, error) {
	k := s.keys(r.Key)
	return call(ctx, &s.calls, "acquire", func(ctx context.Context) (driver.AcquireResult, error) {
		if r.Mode == driver.Try {
			// go-redis repeats a command whose reply was lost. SetNX would then report our own lease as the lease of another
			// fill. So Acquire uses SET with GET, which returns the token in the lease.
			lease, err := s.pipelines.set(ctx, k, "set", k.lease(), r.Token, "nx", "get", "px", millis(r.LeaseTTL)).Text()
			switch holder := holderOf(lease); {
			case err == nil && holder != "" && holder != r.Token:
				return heldBy(holder, 0), nil
			case err != nil && !errors.Is(err, redis.Nil) && !wrongType(err) && !isFull(err):
				return driver.AcquireResult{}, err
			}
		}
		return s.acquire(ctx, k, r)
	})
}

// acquire runs lua/acquire.lua. In mode Try, Acquire has usually taken the lease for the token already.
func (s *Store) acquire(ctx context.Context, k keys, r driver.AcquireRequest) (driver.AcquireResult, error) {
	sent := s.clock.elapsed()
	reply, err := s.pipelines.run(ctx, acquireScript, false, k,
		r.Token, s.channel, r.Key, r.Seen, millis(r.LeaseTTL), millis(r.ClaimTTL), int(r.Mode), leaseMargin).Slice()
	if err != nil {
		return driver.AcquireResult{}, err
	}
	got := s.clock.elapsed()
	result, err := parseAcquireReply(reply)
	if result.State == driver.Changed {
		s.pipelines.large.note(k.value(), len(result.Record))
	}
	if err == nil && result.State == driver.Acquired {
		s.clock.learn(sample{sent: sent, got: got, server: result.Now})
	}
	if r.Mode == driver.Try {
		result.Left = 0 // in mode Try a reply has no Left; here another fill took the lease after the plain SET
	}
	return result, err
}

// parseAcquireReply reads the reply of lua/acquire.lua.
func parseAcquireReply(reply []any) (driver.AcquireResult, error) {
	if len(reply) < 2 {
		return driver.AcquireResult{}, errReply
	}
	text, ok := reply[1].(string)
	switch last := reply[len(reply)-1]; {
	case !ok:
	case reply[0] == int64(driver.Acquired):
		return parseAcquired(reply[1:])
	case reply[0] == int64(driver.Free) && len(reply) == 2:
		return driver.AcquireResult{State: driver.Free, Failure: text}, nil
	case reply[0] == int64(driver.Changed) && len(reply) == 2:
		return driver.AcquireResult{State: driver.Changed, Record: []byte(text)}, nil
	case reply[0] == int64(driver.Held) && len(reply) == 3:
		if left, ok := last.(int64); ok {
			return heldBy(text, life(left)), nil
		}
	}
	return driver.AcquireResult{}, errReply
}

// parseAcquired reads the fields of an Acquired reply: seconds, microseconds, and the noted failure if there is one.
func parseAcquired(fields []any) (r driver.AcquireResult, err error) {
	var texts [3]string
	if len(fields) != 2 && len(fields) != 3 {
		return r, errReply
	}
	for i, field := range fields {
		texts[i], _ = field.(string)
	}
	seconds, err := strconv.ParseInt(texts[0], 10, 64)
	micros, err2 := strconv.ParseInt(texts[1], 10, 64)
	if err != nil || err2 != nil {
		return r, errReply
	}
	return driver.AcquireResult{Now: time.Unix(seconds, micros*1000), Failure: texts[2]}, nil
}

// heldBy is the result for a caller that did not get the lease.
func heldBy(holder string, left time.Duration) driver.AcquireResult {
	r := driver.AcquireResult{State: driver.Held, Left: left}
	if failure, failed := strings.CutPrefix(holder, "!"); failed {
		r.Failure = failure
	} else {
		r.Holder = holder
	}
	return r
}

// holderOf does what holder_of of lua/common.lua does. It returns "" for a free lease, even if the lease has a note.
func holderOf(lease string) string {
	switch {
	case strings.HasPrefix(lease, "!"):
		return lease
	case strings.HasPrefix(lease, "?"):
		return ""
	}
	return strings.TrimSuffix(lease, "+")
}

// life converts a reply to PTTL, which is in milliseconds. It returns at least 1 ms. Redis rounds a short PTTL down
// to 0, but an AcquireResult.Left of 0 means that the remaining life was not requested.
func life(pttl int64) time.Duration {
	return time.Duration(max(pttl, 1)) * time.Millisecond
}

// Publish implements driver.Store.
func (s *Store) Publish(ctx context.Context, r driver.PublishRequest) (driver.PublishResult, error) {
	k := s.keys(r.Key)
	record := string(r.Record) // a copy, because a call that was left behind may still read the record
	ifAwaited, began := "0", ""
	if !r.Began.IsZero() {
		micros := r.Began.Nanosecond() / 1000 // as the claim contains this moment
		began = strconv.FormatInt(r.Began.Unix(), 10) + "." + strconv.Itoa(micros)
	}
	if r.AnnounceIfAwaited && !s.pubsub.selfCheck.due(time.Now()) {
		ifAwaited = "1"
	} else {
		s.pubsub.selfCheck.expect(r.Key, r.Token)
	}
	result, err := call(ctx, &s.calls, "publish", func(ctx context.Context) (driver.PublishResult, error) {
		n, err := s.pipelines.run(ctx, publishScript, true, k, r.Token, s.channel, r.Key, r.Replaced, record,
			millis(r.Keep), driver.MaxAnnouncedRecord, ifAwaited, began).Int()
		if err == nil && (n < 0 || n > int(driver.StoreFull)) {
			err = errReply
		}
		return driver.PublishResult(n), err
	})
	if err == nil && result == driver.Stored {
		s.pipelines.large.note(k.value(), len(record))
	}
	s.pubsub.selfCheck.announced(r.Key, r.Token, err == nil && result != driver.Rejected)
	return result, err
}

// Fail implements driver.Store.
func (s *Store) Fail(ctx context.Context, r driver.FailRequest) error {
	ttl, mark, drop := int64(0), "?", "0"
	if r.TTL > 0 {
		ttl = millis(r.TTL)
	}
	if r.HoldAll {
		mark = "!"
	}
	if r.DropValue {
		drop = "1"
	}
	return s.free(ctx, "fail", failScript, r.Key, r.Token, r.Failure, ttl, mark, drop)
}

// Release implements driver.Store.
func (s *Store) Release(ctx context.Context, key, token string) error {
	return s.free(ctx, "release", releaseScript, key, token)
}

// free runs a script that frees the lease and the claim of a token.
func (s *Store) free(ctx context.Context, step string, x script, key, token string, more ...any) error {
	k := s.keys(key)
	_, err := call(ctx, &s.calls, step, func(ctx context.Context) (any, error) {
		return s.pipelines.run(ctx, x, true, k, append([]any{token, s.channel, key}, more...)...).Result()
	})
	return err
}

// Invalidate implements driver.Store.
func (s *Store) Invalidate(ctx context.Context, by string, keys ...string) error {
	return s.changeKeys(ctx, "invalidate", invalidateScript, by, keys)
}

// Expire implements driver.Store.
func (s *Store) Expire(ctx context.Context, by string, keys ...string) error {
	return s.changeKeys(ctx, "expire", expireScript, by, keys)
}

// changeKeys runs a script once for each key. Each run makes an announcement. If the script fails for one key, the
// other keys are still changed.
func (s *Store) changeKeys(ctx context.Context, step string, x script, by string, keys []string) error {
	if len(keys) == 0 {
		return nil
	}
	all := make([]invocation, len(keys))
	for i, key := range keys {
		all[i] = invocation{keys: s.keys(key).fill(), args: []any{by, s.channel, key}}
	}
	return s.announceMany(ctx, step, x, by, keys[0], all)
}

// announceMany runs a script once for each invocation. Each run makes an announcement. first is the key or tag of the
// first invocation.
func (s *Store) announceMany(ctx context.Context, step string, x script, by, first string, all []invocation) error {
	s.pubsub.selfCheck.expect(first, by)
	_, err := call(ctx, &s.calls, step, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, x.runMany(ctx, &s.known, s.client, all)
	})
	s.pubsub.selfCheck.announced(first, by, err == nil)
	return err
}
