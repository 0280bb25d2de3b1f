package main

import (
	"context"
	"fmt"
	"time"

	"github.com/refill-go/refill/bench/peers"
)

// wait measures the time from the end of a load until a caller that waits for this load on another node has the value.
func wait(ctx context.Context, b *bench) error {
	j := job{
		TTL: time.Minute, Way: relay, Callers: 1, Every: 30 * time.Millisecond, For: b.length,
		Load: 20 * time.Millisecond, Spread: 100 * time.Millisecond, // so a load ends at any moment between two polls
	}
	j.Keys = max(1, int(j.For/j.Every))
	t := &Table{Name: "wait", Title: fmt.Sprintf("Process A begins to load a new key every %v, for %v to %v each; %v "+
		"later B asks for it. From the end of the load until B has the value; %d keys a round. Elsewhere: how often B "+
		"got what A had loaded. Commands are those of A and B for one key, including those in scripts.",
		j.Every, j.Load, j.Load+j.Spread, relayAfter, j.Keys), Columns: []Column{
		{Name: "p50", Unit: "ms", Digits: 2}, {Name: "p99", Unit: "ms", Digits: 2}, {Name: "elsewhere", Unit: "%"},
		{Name: "commands/key", Digits: 1}, {Name: "trips/key", Digits: 1}, {Name: "errors", Unit: "%", Digits: 2},
	}}
	subjects := append(b.contenders(sharedPeer), b.asTheyAre(func(p peers.Peer) bool { return p.Limit && p.Locks })...)
	return b.contest(ctx, t, subjects, func(s subject, _ int) {
		o := b.run(ctx, fleet{job: j.of(s), processes: 2})
		keys := int64(j.Keys)
		t.Add(s.name, "p50", ms(o.warm, 50))
		t.Add(s.name, "p99", ms(o.warm, 99))
		t.Add(s.name, "elsewhere", share(o.Relayed, keys)*100)
		t.Add(s.name, "commands/key", share(o.redis.Commands, keys))
		t.Add(s.name, "trips/key", share(o.redis.Reads, keys))
		t.Add(s.name, "errors", share(o.Failed, o.Gets)*100)
	})
}
