package main

import (
	"context"
	"fmt"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

const againKeys = 2_000

// again counts the loads and commands of a second Get that begins right after a first Get has loaded the same key in
// the same process.
func again(ctx context.Context, b *bench) error {
	t := &Table{
		Name: "again",
		Title: fmt.Sprintf("A second Get, right after the first one of its key has returned what it loaded, for %d new "+
			"keys: how many loads and commands there are beyond those of as many keys that are asked for once.", againKeys),
		Columns: []Column{{Name: "loads"}, {Name: "commands"}},
	}
	redis := realtest.StartRedis(b.stage)
	for range b.rounds {
		for _, p := range b.subjects(func(p peers.Peer) bool { return p.Local && !p.Limit }) {
			b.progress("again: %s", p.Name)
			r, err := openRig(b.stage, redis, p, peers.Settings{TTL: time.Hour, Entries: 4 * againKeys}, nil)
			if err != nil {
				return err
			}
			loads, commands, err := r.secondGets(ctx, names(2*againKeys))
			if err != nil {
				return fmt.Errorf("%s: %w", p.Name, err)
			}
			t.Add(p.Name, "loads", float64(loads))
			t.Add(p.Name, "commands", float64(commands))
			if err := r.Close(); err != nil {
				return fmt.Errorf("%s: %w", p.Name, err)
			}
		}
	}
	b.done(t)
	return nil
}

// secondGets calls Get once for each key of the first half of keys, and twice for each key of the second half.
// secondGets returns how many more loads and commands the second half caused than the first half. At its start it
// requests another key, because the first use of a connection or of a script needs further commands.
func (r *rig) secondGets(ctx context.Context, keys []string) (loads, commands int64, err error) {
	if err := r.each(ctx, []string{"the first"}, 1); err != nil {
		return 0, 0, err
	}
	half := len(keys) / 2
	for i, times := range []int{1, 2} {
		r.quiet()
		r.reset()
		for _, key := range keys[i*half : (i+1)*half] {
			for range times {
				if _, err := r.Get(ctx, key); err != nil {
					return 0, 0, err
				}
			}
		}
		r.quiet()
		l, c := r.work()
		loads, commands = l-loads, c-commands
	}
	return loads, commands, nil
}
