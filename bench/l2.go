package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

const (
	l2Get    = "goredis-get" // a bare GET
	l2ByHand = "goredis"     // GET, and JSON by hand
)

// l2 measures hits that only Redis can answer. L1 is off where it can be, and each instance of a subject requests each
// key once.
func l2(ctx context.Context, b *bench) error {
	return b.l2Tables(ctx, b.l2Turns(), 1, 16, 64, 200)
}

func (b *bench) l2Turns() turns {
	shared := b.subjects(func(p peers.Peer) bool { return p.Shared }, l2Get, l2ByHand)
	for _, p := range peers.Codecs() {
		if b.only.MatchString(p.Name) {
			shared = append(shared, p)
		}
	}
	return turns{
		subjects: shared,
		settings: peers.Settings{
			TTL: time.Hour, StaleFor: time.Hour, Entries: 2 * (1 + turnChunks) * turnSize, NoLocal: true,
		},
		chunks: turnChunks, size: turnSize,
	}
}

// l2Tables makes a table for each number of callers. All tables read the same values.
func (b *bench) l2Tables(ctx context.Context, u turns, callers ...int) error {
	redis := realtest.StartRedis(b.stage)
	filled := sync.OnceValue(func() error { return u.fill(ctx, b, redis) })
	for _, u.callers = range callers {
		t := &Table{
			Name: fmt.Sprintf("l2-%d", u.callers), Columns: turnColumns(l2Get, l2ByHand),
			Title: fmt.Sprintf("A hit in Redis, with L1 off where it can be. Callers in the one process: %d. %s only sends "+
				"GET; %s also decodes the JSON, by hand.", u.callers, l2Get, l2ByHand),
		}
		err := b.part(ctx, t.Name, func(ctx context.Context) error { return b.byTurns(ctx, t, redis, u, filled) })
		if err != nil {
			return err
		}
	}
	return nil
}

// fill makes an instance of each subject store all keys that other instances request later.
func (u turns) fill(ctx context.Context, b *bench, redis *realtest.Redis) error {
	for i, p := range u.subjects {
		b.progress("l2: %s stores its values", p.Name)
		r, err := u.open(b.stage, redis, p)
		if err != nil {
			return err
		}
		defer r.Close()
		for chunk := range 1 + u.chunks {
			if err := r.each(ctx, u.keys(i, chunk), 16); err != nil {
				return fmt.Errorf("%s: %w", p.Name, err)
			}
		}
		r.quiet()
	}
	return nil
}
