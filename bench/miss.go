package main

import (
	"context"
	"fmt"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

const missPer = "sf" // what a user writes by hand: GET, load and SET in a singleflight

// miss measures Gets of new keys in one busy process. Each Get loads, and no other caller shares the load.
func miss(ctx context.Context, b *bench) error {
	for _, m := range []struct {
		name    string
		callers int
		load    time.Duration
	}{
		{"miss-16", 16, 0}, {"miss-64", 64, 0}, {"miss-200", 200, 0}, {"miss-200-5ms", 200, 5 * time.Millisecond},
	} {
		u := b.missTurns(m.callers, m.load)
		err := b.part(ctx, m.name, func(ctx context.Context) error { return b.missTable(ctx, m.name, u) })
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) missTurns(callers int, load time.Duration) turns {
	return turns{
		subjects: b.subjects(func(p peers.Peer) bool { return p.Shared && !p.Limit }, missPer),
		settings: peers.Settings{TTL: time.Hour, Entries: 10_000},
		load:     load, callers: callers, chunks: turnChunks, size: turnSize,
	}
}

// missTable empties Redis before each round, because each round requests the same keys.
func (b *bench) missTable(ctx context.Context, name string, u turns) error {
	redis := realtest.StartRedis(b.stage)
	t := &Table{
		Name: name, Columns: turnColumns(missPer),
		Title: fmt.Sprintf("A Get of a new key. Callers in the one process: %d, without a pause between their Gets. The "+
			"load function, in the same process, takes %v.", u.callers, u.load),
	}
	return b.byTurns(ctx, t, redis, u, func() error { redis.Restart(); return nil })
}
