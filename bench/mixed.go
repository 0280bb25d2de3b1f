package main

import (
	"context"
	"fmt"
	"time"
)

// mixed measures everyday traffic: many keys, most of which are requested too rarely to be worth a cache.
func mixed(ctx context.Context, b *bench) error {
	j := job{
		TTL: 2 * time.Second, Load: 5 * time.Millisecond, Way: steady, Callers: b.callers, Keys: 100_000, Zipf: 1.01,
		Every: time.Second * time.Duration(b.callers*b.processes) / time.Duration(b.rate), For: b.length,
		Warm: 2 * time.Second,
	}
	t := &Table{Name: "mixed", Title: fmt.Sprintf("%d keys, Zipf %v, %d Gets/s, %d processes, %v; quantiles are from "+
		"second %v on. %s",
		j.Keys, j.Zipf, b.rate, b.processes, j, j.Warm.Seconds(), commandsMean), Columns: []Column{
		{Name: "loads/s"}, {Name: "hit rate", Digits: 3},
		{Name: "p50", Unit: "ms", Digits: 3}, {Name: "p99", Unit: "ms", Digits: 1}, {Name: "p99.9", Unit: "ms", Digits: 1},
		{Name: "commands/Get", Digits: 2}, {Name: "trips/Get", Digits: 2},
		{Name: "node CPU/Get", Unit: "µs"}, {Name: "Redis CPU/Get", Unit: "µs"}, {Name: "RSS/node", Unit: "MB"},
		{Name: "Gets/s"}, {Name: "errors", Unit: "%", Digits: 2},
	}}
	return b.contest(ctx, t, b.contenders(anyPeer), func(s subject, _ int) {
		o := b.run(ctx, fleet{job: j.of(s), processes: b.processes})
		loads := int64(len(o.Loads))
		for column, figure := range map[string]float64{
			"loads/s":       float64(loads) / j.For.Seconds(),
			"hit rate":      1 - share(loads, o.Gets),
			"p50":           ms(o.warm, 50),
			"p99":           ms(o.warm, 99),
			"p99.9":         ms(o.warm, 99.9),
			"commands/Get":  share(o.redis.Commands, o.Gets),
			"trips/Get":     share(o.redis.Reads, o.Gets),
			"node CPU/Get":  share(o.CPU, o.Gets),
			"Redis CPU/Get": share(o.redis.CPU.Microseconds(), o.Gets),
			"RSS/node":      float64(o.RSS) / 1e6,
			"Gets/s":        float64(o.Gets) / j.For.Seconds(),
			"errors":        share(o.Failed, o.Gets) * 100,
		} {
			t.Add(s.name, column, figure)
		}
	})
}
