package main

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

func TestTurnsAlternateBetweenTheSubjects(t *testing.T) {
	var (
		mu    sync.Mutex
		order []string
		seen  = map[string]bool{}
		rigs  []*rig
	)
	u := turns{callers: 3, chunks: 2, size: 20}
	for _, name := range []string{"a", "b", "c"} {
		u.subjects = append(u.subjects, peers.Peer{Name: name})
		rigs = append(rigs, &rig{t: t, Cache: getter(func(key string) {
			mu.Lock()
			defer mu.Unlock()
			order = append(order, name)
			if seen[key] {
				t.Errorf("%s is requested twice", key)
			}
			seen[key] = true
		})})
	}
	table := &Table{}
	if err := u.take(t.Context(), table, rigs); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, name := range []string{"a", "b", "c", "a", "b", "c"} {
		want = append(want, slices.Repeat([]string{name}, u.size)...)
	}
	if !slices.Equal(order, want) {
		t.Errorf("got the Gets %v", order)
	}
	for _, row := range table.Rows {
		for _, column := range turnColumns() {
			if n := len(row.Samples[column.Name]); n != u.chunks {
				t.Errorf("%s, %s: %d samples, want one for each chunk", row.Subject, column.Name, n)
			}
		}
	}
}

// Each suite runs with few Gets. The test does not check speed.
func TestTurnsOfTheSuites(t *testing.T) {
	realtest.StartRedis(t) // skips the test if Redis is not installed
	small := func(u turns) turns {
		u.chunks, u.size = 2, 40
		return u
	}
	for _, c := range []struct {
		name                  string
		run                   func(context.Context, *bench) error
		subjects              []string
		commands, most, loads float64 // of refill, per Get
	}{
		{
			name: "l2-4", subjects: []string{"refill", "goredis", "goredis-get"}, commands: 1, most: 1.1, loads: 0,
			run: func(ctx context.Context, b *bench) error { return b.l2Tables(ctx, small(b.l2Turns()), 4) },
		},
		{
			name: "miss-4", subjects: []string{"refill", "sf"}, commands: 9, most: 10.1, loads: 1,
			run: func(ctx context.Context, b *bench) error {
				return b.missTable(ctx, "miss-4", small(b.missTurns(4, time.Millisecond)))
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := &bench{rounds: 2, only: regexp.MustCompile("^refill$"), tables: regexp.MustCompile(c.name), stage: newStage()}
			defer b.close()
			if err := c.run(t.Context(), b); err != nil {
				t.Fatal(err)
			}
			table := b.report.Tables[0]
			var got []string
			for _, row := range table.Rows {
				got = append(got, row.Subject)
				if n := len(row.Samples["CPU"]); n != 4 {
					t.Errorf("%s: %d samples of 2 rounds with 2 chunks", row.Subject, n)
				}
				for _, column := range []string{"wall", "CPU", "allocs/Get", "B/Get"} {
					if m := table.Median(row.Subject, column); !(m > 0) {
						t.Errorf("%s: %s is %v", row.Subject, column, m)
					}
				}
			}
			if table.Name != c.name || !slices.Equal(got, c.subjects) {
				t.Errorf("table %s has the subjects %v, want %s and %v", table.Name, got, c.name, c.subjects)
			}
			if n := table.Median("refill", "loads/Get"); n != c.loads {
				t.Errorf("%v loads per Get, want %v", n, c.loads)
			}
			if n := table.Median("refill", "commands/Get"); n < c.commands || n > c.most {
				t.Errorf("%v commands per Get, want %v", n, c.commands)
			}
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			if err := c.run(ended, b); !errors.Is(err, context.Canceled) {
				t.Errorf("the suite ignores its ctx: %v", err)
			}
		})
	}
}
