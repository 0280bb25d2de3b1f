package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

// Each key is requested once in a round, so that no L1 can answer.
const (
	l2Alone    = 2_000 // Gets from one goroutine
	l2Together = 8_000 // Gets from l2Callers
	l2Callers  = 16
	l2Chunks   = 20 // chunks of a round; after each, a chunk of bare GETs is timed (the yardstick)
)

const l2Per = "goredis-get"

// l2 times hits that only Redis can answer.
func l2(ctx context.Context, b *bench) error {
	t := &Table{
		Name: "l2",
		Title: "A hit in Redis, per Get over all goroutines: L1 is off where it can be, each subject is new in each round, " +
			"and asked for each key once. The ratio is to " + l2Per + ", timed in alternation, of the fastest of " +
			strconv.Itoa(l2Chunks) + " chunks each: the kernel puts client and server on one core or on two, which makes a " +
			"factor of three. Commands include those called in scripts.",
		Columns: []Column{
			{Name: "g=1", Unit: "µs", Digits: 1}, {Name: "g=1 ÷ GET", Digits: 2},
			{Name: "g=16", Unit: "µs", Digits: 1}, {Name: "g=16 ÷ GET", Digits: 2},
			{Name: "allocs/op"}, {Name: "commands/op", Digits: 2}, {Name: "loads"},
		},
	}
	one, other := realtest.StartRedis(b.stage), realtest.StartRedis(b.stage)
	yardstick, err := yardstickOf(b, other)
	if err != nil {
		return err
	}
	defer yardstick.Close()
	for round := range b.rounds {
		for _, p := range b.l2Subjects() {
			b.progress("l2: round %d, %s", round+1, p.Name)
			if err := b.l2Round(ctx, t, one, p, yardstick); err != nil {
				return fmt.Errorf("%s: %w", p.Name, err)
			}
		}
	}
	b.done(t)
	return nil
}

func (b *bench) l2Subjects() []peers.Peer {
	shared := b.subjects(func(p peers.Peer) bool { return p.Shared })
	for _, p := range peers.Codecs() {
		if b.only.MatchString(p.Name) {
			shared = append(shared, p)
		}
	}
	return shared
}

// yardstickOf opens the peer goredis-get, which only sends GET. The yardstick has a Redis server of its own, because
// the writes of the measured subject would disturb its GETs.
func yardstickOf(b *bench, redis *realtest.Redis) (*rig, error) {
	at := slices.IndexFunc(peers.All(), func(p peers.Peer) bool { return p.Name == l2Per })
	r, err := openRig(b.stage, redis, peers.All()[at], peers.Settings{TTL: time.Hour}, nil)
	if err != nil {
		return nil, err
	}
	return r, r.each(context.Background(), names(l2Alone+l2Together), l2Callers)
}

// l2Round takes one sample of each column for one subject.
func (b *bench) l2Round(ctx context.Context, t *Table, redis *realtest.Redis, p peers.Peer, yardstick *rig) error {
	keys := names(l2Alone + l2Together)
	s := peers.Settings{TTL: time.Hour, StaleFor: time.Hour, Entries: 2 * len(keys), NoLocal: true}
	r, err := fill(ctx, b.stage, redis, p, s, keys)
	if err != nil {
		return err
	}
	defer r.Close()
	for _, c := range []struct {
		name string
		keys []string
		g    int
	}{{"g=1", keys[:l2Alone], 1}, {"g=16", keys[l2Alone:], l2Callers}} {
		r.reset()
		get, best := math.Inf(1), math.Inf(1)
		for some := range slices.Chunk(c.keys, len(c.keys)/l2Chunks) {
			bare, err := yardstick.timed(ctx, some, c.g)
			if err != nil {
				return err
			}
			took, err := r.timed(ctx, some, c.g)
			if err != nil {
				return err
			}
			get, best = min(get, bare.ns), min(best, took.ns)
			if c.g == 1 {
				t.Add(p.Name, "allocs/op", took.allocs)
			}
		}
		t.Add(p.Name, c.name, best/1e3)
		t.Add(p.Name, c.name+" ÷ GET", best/get)
		if loads, commands := r.work(); c.g == 1 {
			t.Add(p.Name, "commands/op", float64(commands)/float64(len(c.keys)))
			t.Add(p.Name, "loads", float64(loads))
		}
	}
	return nil
}

// fill opens one instance of a subject and lets it store all keys. Then fill opens a second instance, opens its
// connections, and returns it. The second instance has not requested any of the keys.
func fill(
	ctx context.Context, t *stage, redis *realtest.Redis, p peers.Peer, s peers.Settings, keys []string,
) (*rig, error) {
	first, err := openRig(t, redis, p, s, nil)
	if err != nil {
		return nil, err
	}
	defer first.Close()
	if err := first.each(ctx, keys, l2Callers); err != nil {
		return nil, err
	}
	first.quiet()
	r, err := first.again(p, s)
	if err != nil {
		return nil, err
	}
	warmUp := make([]string, 50*l2Callers)
	for i := range warmUp {
		warmUp[i] = strings.Repeat("w", 1+i/l2Callers)
	}
	if err := r.each(ctx, warmUp, l2Callers); err != nil {
		return nil, err
	}
	r.quiet()
	return r, nil
}
