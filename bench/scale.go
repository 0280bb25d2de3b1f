package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/internal/realtest"
)

// scale measures what refill costs with more nodes, with more keys, and on a Cluster.
func scale(ctx context.Context, b *bench) error {
	if !b.only.MatchString("refill") {
		return nil
	}
	if err := b.part(ctx, "scale-nodes", b.scaleNodes); err != nil {
		return err
	}
	if err := b.part(ctx, "scale-keys", b.scaleKeys); err != nil {
		return err
	}
	return b.part(ctx, "scale-cluster", b.scaleCluster)
}

// scaleJob is a job with one hot key, whose stale values may be served.
func (b *bench) scaleJob() job {
	return job{
		Peer: "refill", Jitter: -1, TTL: time.Second, StaleFor: staleFor, Load: 100 * time.Millisecond,
		Way: steady, Callers: 10, Every: aCallerEvery,
	}.midLife(b.length)
}

// scaleNodes measures one hot key with 1, 2, 4 and more nodes.
func (b *bench) scaleNodes(ctx context.Context) error {
	j := b.scaleJob()
	t := &Table{Name: "scale-nodes", Title: fmt.Sprintf("One hot key, StaleFor %v, more and more nodes: %v, a Get each "+
		"%v. A node is a Loader with a client of its own; the nodes are spread over at most %d processes. %s Bytes are "+
		"in and out of Redis.", j.StaleFor, j, j.Every, b.processes, commandsMean), Columns: scaleColumns}
	for round := range b.rounds {
		for n := 1; n <= b.nodes; n *= 2 {
			if err := ctx.Err(); err != nil {
				return err
			}
			b.progress("%s %d/%d: %d", t.Name, round+1, b.rounds, n)
			processes := min(n, b.processes)
			j.Instances = n / processes
			o := b.run(ctx, fleet{job: j, processes: processes})
			o.addScale(t, strconv.Itoa(processes*j.Instances), j.expiries())
		}
	}
	b.done(t)
	return nil
}

var scaleColumns = []Column{
	{Name: "loads/expiry", Digits: 1}, {Name: "most at once"},
	{Name: "commands/expiry", Digits: 1}, {Name: "trips/expiry", Digits: 1},
	{Name: "bytes/expiry"}, {Name: "connections"}, {Name: "commands/Get", Digits: 4}, {Name: "p99", Unit: "ms", Digits: 3},
	{Name: "MOVED"}, {Name: "errors", Unit: "%", Digits: 2},
}

func (o *outcome) addScale(t *Table, subject string, expiries float64) {
	for column, figure := range map[string]float64{
		"loads/expiry":    float64(len(o.Loads)) / expiries,
		"most at once":    float64(mostAtOnce(o.Loads)),
		"commands/expiry": float64(o.redis.Commands) / expiries,
		"trips/expiry":    float64(o.redis.Reads) / expiries,
		"bytes/expiry":    float64(o.redis.In+o.redis.Out) / expiries,
		"connections":     float64(o.redis.Connections),
		"commands/Get":    share(o.redis.Commands, o.Gets),
		"p99":             ms(o.warm, 99),
		"MOVED":           float64(o.redis.Moved),
		"errors":          share(o.Failed, o.Gets) * 100,
	} {
		t.Add(subject, column, figure)
	}
}

// scaleCluster measures a single server and a Cluster of three masters: first with one hot key, then with 30 keys. In
// the Cluster, the 30 keys are spread over all masters.
func (b *bench) scaleCluster(ctx context.Context) error {
	j := b.scaleJob()
	const many = 30
	t := &Table{Name: "scale-cluster", Title: fmt.Sprintf("One server and a Redis Cluster of three masters, %d "+
		"processes, StaleFor %v, %v, a Get each %v. An expiry is one of one key. MOVED counts redirects after all have "+
		"begun, which is when clients first connect.", b.processes, j.StaleFor, j, j.Every), Columns: scaleColumns}
	for round := range b.rounds {
		for _, keys := range []int{1, many} {
			for _, masters := range []int{1, 3} {
				if err := ctx.Err(); err != nil {
					return err
				}
				b.progress("%s %d/%d: %d masters, %d keys", t.Name, round+1, b.rounds, masters, keys)
				s := b.sub()
				f := fleet{job: j, processes: b.processes}
				f.Keys = keys
				name := "one server"
				if masters > 1 {
					name = fmt.Sprintf("%d masters", masters)
					f.servers = realtest.StartCluster(s, masters, 0).Servers()
				}
				o := b.run(ctx, f)
				s.close()
				o.addScale(t, fmt.Sprintf("%s, keys: %d", name, keys), f.expiries()*float64(keys))
			}
		}
	}
	b.done(t)
	return nil
}

// scaleKeys measures hits with 1, 100, 10,000 and more keys in the store.
func (b *bench) scaleKeys(ctx context.Context) error {
	t := &Table{Name: "scale-keys", Title: fmt.Sprintf("Hits of one goroutine with more and more keys, all asked for "+
		"equally often; values are strings of %d bytes. Bytes per entry are those of the Go heap in L1, and those of Redis. "+
		"In L1: how many of the keys just loaded L1 still has.", len(smallValue)), Columns: []Column{
		{Name: "L1 hit", Unit: "ns"}, {Name: "L2 hit", Unit: "µs", Digits: 1},
		{Name: "L1 bytes/entry"}, {Name: "Redis bytes/entry"},
		{Name: "in L1", Unit: "%", Digits: 2}, {Name: "fill", Unit: "µs/key", Digits: 1},
	}}
	for n := 1; n <= b.keys; n *= 100 {
		if err := ctx.Err(); err != nil {
			return err
		}
		b.progress("%s: %d", t.Name, n)
		if err := b.scaleKeysTo(ctx, t, n); err != nil {
			return err
		}
	}
	b.done(t)
	return nil
}

var smallValue = strings.Repeat("refill ", 15)

func loadSmall(_ context.Context, keys []string) (map[string]string, error) {
	found := make(map[string]string, len(keys))
	for _, key := range keys {
		found[key] = smallValue
	}
	return found, nil
}

func (b *bench) scaleKeysTo(ctx context.Context, t *Table, n int) error {
	s := b.sub()
	defer s.close()
	server := realtest.StartRedis(s)
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), ContextTimeoutEnabled: true})
	s.Cleanup(func() { _ = rdb.Close() })
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprint("key-", i)
	}
	// The TTL leaves time to load all keys. L1 has room for twice as many entries, because its counters are estimates.
	conf := refill.Config{TTL: time.Hour, LocalTTL: time.Hour, LocalEntries: max(1000, 2*n), Shared: goredis.New(rdb)}
	subject := strconv.Itoa(n)

	heap, used := heapBytes(), usedMemory(ctx, rdb)
	l1, err := refill.NewBulk("small", loadSmall, conf)
	if err != nil {
		return err
	}
	defer l1.Close()
	empty := heapBytes()
	began := time.Now()
	for i := 0; i < n; i += 1000 {
		if _, err := l1.GetMany(ctx, keys[i:min(n, i+1000)]); err != nil {
			return err
		}
	}
	t.Add(subject, "fill", float64(time.Since(began).Microseconds())/float64(n))
	if n > 1000 { // with fewer keys, memory for other things would dominate the figure
		t.Add(subject, "Redis bytes/entry", (usedMemory(ctx, rdb)-used)/float64(n))
		t.Add(subject, "L1 bytes/entry", (heapBytes()-min(empty, heap))/float64(n))
	}

	conf.LocalTTL = -1
	l2, err := refill.NewBulk("small", loadSmall, conf)
	if err != nil {
		return err
	}
	defer l2.Close()
	for range b.rounds {
		ns, hits, err := timeGets(ctx, l1, keys, b.length/20)
		if err != nil {
			return err
		}
		t.Add(subject, "in L1", hits*100)
		if hits > 0.99 {
			t.Add(subject, "L1 hit", ns)
		}
		if ns, _, err = timeGets(ctx, l2, keys, b.length/20); err != nil {
			return err
		}
		t.Add(subject, "L2 hit", ns/1000)
	}
	return nil
}

// timeGets first requests 4,096 random keys, and measures the share of these Gets that L1 answered. Then timeGets
// repeats the same Gets for the time length, and measures the mean time of a Get. It returns both results, the time in
// ns.
func timeGets(
	ctx context.Context, l *refill.Loader[string], keys []string, length time.Duration,
) (ns, hits float64, err error) {
	order := make([]string, 1<<12) // drawn before the measurement, because a draw costs as much as a hit
	local, gets := 0, 0
	for i := range order {
		order[i] = keys[rand.IntN(len(keys))]
		r, err := l.GetResult(ctx, order[i])
		if err != nil {
			return 0, 0, err
		}
		if r.Outcome == refill.OutcomeHit {
			local++
		}
	}
	began := time.Now()
	for time.Since(began) < length {
		for range 256 {
			if _, err := l.Get(ctx, order[gets%len(order)]); err != nil {
				return 0, 0, err
			}
			gets++
		}
	}
	return float64(time.Since(began).Nanoseconds()) / float64(gets), float64(local) / float64(len(order)), nil
}

func heapBytes() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

func usedMemory(ctx context.Context, rdb *redis.Client) float64 {
	text, err := rdb.Info(ctx, "memory").Result()
	if err != nil {
		return math.NaN()
	}
	return infoFigures(text)["used_memory"]
}
