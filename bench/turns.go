package main

import (
	"context"
	"fmt"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

// turns is a comparison in which the subjects take turns. In one turn, each subject runs one short chunk of Gets, one
// subject after the other. A subject is compared only with the other subjects of the same turn, because the speed of
// the machine drifts from turn to turn. Each chunk is a sample. Table prints the median of the samples, and the median
// of the ratios, one ratio per turn. It never prints the best chunk, because the best chunk hides what happens only in
// some chunks.
type turns struct {
	subjects []peers.Peer
	settings peers.Settings
	load     time.Duration // how long the load function takes
	callers  int           // goroutines that call Get at the same time
	chunks   int           // chunks per subject and round
	size     int           // Gets per chunk
}

// The values of turns.chunks and turns.size in the suites. A chunk takes some 0.1 to 0.4 s.
const (
	turnChunks = 5
	turnSize   = 4_000
)

// turnColumns are the columns of a table of turns, with the ratios to each of the given subjects.
func turnColumns(per ...string) []Column {
	return []Column{
		{Name: "wall", Unit: "µs", Digits: 1, Per: per}, {Name: "CPU", Unit: "µs", Digits: 1, Per: per},
		{Name: "allocs/Get"}, {Name: "B/Get"}, {Name: "commands/Get", Digits: 2}, {Name: "loads/Get", Digits: 2},
	}
}

const turnsMean = "Wall is the elapsed time, CPU the user and system time of this process until it is idle again. " +
	"Both are per Get. Commands include those called in scripts."

// byTurns makes a table. In each round it calls prepare, and opens all subjects anew on one Redis.
func (b *bench) byTurns(ctx context.Context, t *Table, redis *realtest.Redis, u turns, prepare func() error) error {
	t.Title += fmt.Sprintf(" The subjects take turns, with chunks of %d Gets. Figures are medians of %d chunks, ratios "+
		"are medians of %d turns. %s", u.size, b.rounds*u.chunks, b.rounds*u.chunks, turnsMean)
	for round := range b.rounds {
		b.progress("%s: round %d/%d", t.Name, round+1, b.rounds)
		if err := prepare(); err != nil {
			return err
		}
		if err := u.round(ctx, b.stage, t, redis); err != nil {
			return err
		}
	}
	b.done(t)
	return nil
}

// round opens all subjects, and lets them take their turns. The first chunk of a subject is not measured. It opens the
// connections.
func (u turns) round(ctx context.Context, s *stage, t *Table, redis *realtest.Redis) error {
	var rigs []*rig
	for i, p := range u.subjects {
		r, err := u.open(s, redis, p)
		if err != nil {
			return err
		}
		defer r.Close()
		if err := r.each(ctx, u.keys(i, 0), u.callers); err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
		rigs = append(rigs, r)
	}
	settle()
	return u.take(ctx, t, rigs)
}

// take measures the chunks of all subjects, by turns.
func (u turns) take(ctx context.Context, t *Table, rigs []*rig) error {
	for chunk := 1; chunk <= u.chunks; chunk++ {
		for i, r := range rigs {
			name, keys := u.subjects[i].Name, u.keys(i, chunk)
			r.reset()
			c, err := r.timed(ctx, keys, u.callers)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			loads, commands := r.work()
			t.Add(name, "wall", c.ns/1e3)
			t.Add(name, "CPU", c.cpu/1e3)
			t.Add(name, "allocs/Get", c.allocs)
			t.Add(name, "B/Get", c.bytes)
			t.Add(name, "commands/Get", float64(commands)/float64(u.size))
			t.Add(name, "loads/Get", float64(loads)/float64(u.size))
		}
	}
	return nil
}

// open opens a subject on a Redis that it shares with the other subjects.
func (u turns) open(s *stage, redis *realtest.Redis, p peers.Peer) (*rig, error) {
	r := &rig{t: s, redis: redis, value: func(key string) *peers.Product {
		time.Sleep(u.load)
		return product(key)
	}}
	return r, r.open(p, u.settings)
}

// keys returns the keys of a chunk of a subject. No other chunk and no other subject has these keys, because the
// subjects share a Redis, and each has its own format there.
func (u turns) keys(subject, chunk int) []string {
	keys := make([]string, u.size)
	for i := range keys {
		keys[i] = fmt.Sprintf("%02d-product-%06d", subject, chunk*u.size+i)
	}
	return keys
}
