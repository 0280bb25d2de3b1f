//go:build unix

package realtest

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/realtest/history"
)

// This file runs a fleet under random faults. Package history checks what the fleet did.

var (
	historySeed = flag.Uint64("history.seed", 0, "seed of the faults of TestHistory; 0 = random")
	historyFor  = flag.Duration("history.for", 0,
		"how long TestHistory runs; 0 = 11 s, or with REFILL_TORTURE=1 REFILL_TORTURE_FOR (default 5 min)")
)

const (
	historyShort = 11 * time.Second
	historyRound = time.Minute // the length of a round of a long run
	historyNodes = 4
)

func init() {
	Child("history", func(ctx context.Context, raw json.RawMessage, _ *json.Encoder) error {
		var args history.Args
		if err := json.Unmarshal(raw, &args); err != nil {
			return err
		}
		return history.Run(ctx, args)
	})
}

// TestHistory runs a fleet of processes that read, write, invalidate, expire and refresh a few keys. Meanwhile the
// test kills and freezes processes and Redis, breaks the network, and takes the database from single nodes. Then
// history.Check must find no broken promise. A long run consists of rounds of a minute, each with its own seed.
func TestHistory(t *testing.T) {
	length := historyLength(t)
	seed := *historySeed
	if seed == 0 {
		seed = uint64(rand.Uint32())
	}
	var all []history.Stats
	for ; length > 0; length -= historyRound {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			all = append(all, runHistory(t, seed, min(length, historyRound)))
		})
		if t.Failed() {
			return
		}
		seed++
	}
	t.Logf("result: %s, no violation", history.Summary(all))
}

func historyLength(t *testing.T) time.Duration {
	switch {
	case *historyFor > 0:
		return *historyFor
	case os.Getenv("REFILL_TORTURE") != "1":
		return historyShort
	}
	length, err := time.ParseDuration(cmp.Or(os.Getenv("REFILL_TORTURE_FOR"), "5m"))
	if err != nil {
		t.Fatalf("REFILL_TORTURE_FOR: %v", err)
	}
	return length
}

func runHistory(t *testing.T, seed uint64, length time.Duration) history.Stats {
	replay := fmt.Sprintf("go test -race -run TestHistory -history.seed=%d -history.for=%v", seed, length)
	t.Log("to run the same faults again: ", replay)
	dir, err := os.MkdirTemp("", "refill-history-") // not t.TempDir: a history with violations is kept
	if err != nil {
		t.Fatal(err)
	}
	r := startFaultyFleet(t, dir, seed)
	r.injectFaults(history.NewPlan(seed, length, historyNodes), length)
	r.stop()
	if t.Failed() {
		t.Logf("the history is in %s", dir)
		return history.Stats{}
	}
	events, err := history.Read(dir)
	if err != nil {
		t.Fatalf("the history in %s: %v", dir, err)
	}
	report := history.Check(events, history.Promised(seed))
	t.Log(report.Stats)
	if len(report.Violations) == 0 {
		_ = os.RemoveAll(dir)
		return report.Stats
	}
	t.Errorf("%d violations; the history is in %s\n%s\nbefore the first violation:\n%s", len(report.Violations), dir,
		report, report.Around(events, report.Violations[0], 1500*time.Millisecond))
	return report.Stats
}

// faultyFleet is a fleet into which the test injects faults. Only the goroutine of the test calls the methods, except
// sample, which has a goroutine of its own.
type faultyFleet struct {
	t       *testing.T
	dir     string
	seed    uint64
	server  *Redis
	proxies []*Proxy
	nodes   []*Proc // the current process of each node
	starts  []int   // how often each node was started
	log     *history.Log
	db      *history.DB
	rdb     *redis.Client // straight to the server
	end     context.CancelFunc
	watch   sync.WaitGroup
}

func startFaultyFleet(t *testing.T, dir string, seed uint64) *faultyFleet {
	r := &faultyFleet{
		t: t, dir: dir, seed: seed, server: StartRedis(t),
		nodes: make([]*Proc, historyNodes), starts: make([]int, historyNodes),
	}
	var err error
	if r.log, err = history.Create(filepath.Join(dir, "test.jsonl")); err != nil {
		t.Fatal(err)
	}
	if r.db, err = history.OpenDB(filepath.Join(dir, "db")); err != nil {
		t.Fatal(err)
	}
	r.rdb = redis.NewClient(&redis.Options{Addr: r.server.Addr(), ContextTimeoutEnabled: true, MaxRetries: -1})
	var ctx context.Context
	ctx, r.end = context.WithCancel(context.Background())
	t.Cleanup(func() {
		r.end()
		r.watch.Wait()
		_ = r.rdb.Close()
		_ = r.log.Close()
		_ = r.db.Close()
	})
	for i := range r.nodes {
		r.proxies = append(r.proxies, StartProxy(t, r.server.Addr()))
		r.start(i)
	}
	r.watch.Go(func() { history.Heartbeat(ctx, r.log, "") })
	r.watch.Go(func() { r.sample(ctx) })
	return r
}

// name is the name of a node's current process.
func (r *faultyFleet) name(node int) string { return fmt.Sprintf("n%d.%d", node, r.starts[node]) }

// start starts the next process of a node.
func (r *faultyFleet) start(node int) {
	r.starts[node]++
	r.nodes[node] = StartChild(r.t, "history", history.Args{
		Process: r.name(node), Node: node, Addr: r.proxies[node].Addr(), Dir: r.dir,
		Seed:   r.seed + uint64(100*node+r.starts[node]),
		Limits: history.Promised(r.seed),
	})
}

// injectFaults begins and ends each fault of the plan at its time.
func (r *faultyFleet) injectFaults(plan []history.Planned, length time.Duration) {
	type action struct {
		at time.Duration
		do func()
	}
	var actions []action
	for i, p := range plan {
		e := history.Event{Kind: history.Fault, ID: int64(i + 1), Op: p.Op, Outcome: p.Arg}
		begin := func() {
			e.Process, e.Begin = r.victim(p), history.Now()
			r.log.Write(e)
			r.begin(p)
		}
		end := func() {
			r.finish(p)
			e.End = history.Now()
			r.log.Write(e)
		}
		actions = append(actions, action{p.At, begin}, action{p.At + p.For, end})
		at, late := p.At, false
		for _, step := range p.Steps {
			late = !late
			delay := time.Duration(0)
			if late {
				delay = 10 * time.Millisecond // short, because a new connection needs several replies within StoreTimeout
			}
			actions = append(actions, action{at, func() { r.proxies[p.Node].Delay(delay) }})
			at += min(step, p.At+p.For-at)
		}
	}
	slices.SortStableFunc(actions, func(a, b action) int { return cmp.Compare(a.at, b.at) })
	began := time.Now()
	for _, a := range actions {
		time.Sleep(time.Until(began.Add(a.at)))
		a.do()
	}
	time.Sleep(time.Until(began.Add(length)))
}

// victim names the victim of a fault in the history: a process, a node, or "" for Redis.
func (r *faultyFleet) victim(p history.Planned) string {
	switch {
	case p.Node < 0:
		return ""
	case p.Op == history.FaultKill, p.Op == history.FaultFreeze:
		return r.name(p.Node)
	}
	return "n" + strconv.Itoa(p.Node)
}

func (r *faultyFleet) begin(p history.Planned) {
	if p.Node >= 0 {
		node, proxy := r.nodes[p.Node], r.proxies[p.Node]
		switch p.Op {
		case history.FaultKill:
			node.Kill()
		case history.FaultFreeze:
			node.Freeze()
		case history.FaultSlow:
			proxy.Delay(70 * time.Millisecond)
		case history.FaultReset:
			proxy.Reset()
		case history.FaultBlackHole:
			proxy.BlackHole()
		case history.FaultRefuse:
			proxy.Refuse()
		case history.FaultLose:
			proxy.LoseReply(p.Arg)
		case history.FaultNoDB:
			r.db.Gone(p.Node).Store(1)
		}
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	switch p.Op {
	case history.FaultRedisFreeze:
		r.server.Freeze()
	case history.FaultRedisKill:
		r.server.Kill()
	case history.FaultPubSub:
		r.rdb.ClientKillByFilter(ctx, "TYPE", "pubsub")
	case history.FaultFlush:
		r.rdb.ScriptFlush(ctx)
	case history.FaultGarbage:
		r.plant(ctx, rand.New(rand.NewPCG(p.Seed, 2)))
	}
}

// finish ends a fault.
func (r *faultyFleet) finish(p history.Planned) {
	switch p.Op {
	case history.FaultKill:
		r.start(p.Node)
	case history.FaultFreeze:
		r.nodes[p.Node].Thaw()
	case history.FaultRedisFreeze:
		r.server.Thaw()
	case history.FaultRedisKill:
		r.server.Restart()
	case history.FaultNoDB:
		r.db.Gone(p.Node).Store(0)
	default:
		if p.Node >= 0 {
			r.proxies[p.Node].Heal()
		}
	}
}

// plant stores foreign bytes under the Redis key of a value, lease or claim. The bytes have a TTL or no TTL, or have
// another type than a string.
func (r *faultyFleet) plant(ctx context.Context, rnd *rand.Rand) {
	key := history.RedisKeys(history.Keys[rnd.IntN(len(history.Keys))])[rnd.IntN(3)]
	garbage := make([]byte, rnd.IntN(120))
	for i := range garbage {
		garbage[i] = byte(rnd.Uint32())
	}
	if record, err := r.rdb.Get(ctx, key).Bytes(); err == nil && len(record) > 20 && rnd.IntN(2) == 0 {
		garbage = record
		garbage[len(record)-1-rnd.IntN(len(record)-20)]++ // a byte that the checksum covers; it does not cover expiredAt
	}
	if len(garbage) > 0 && garbage[0] == '!' { // a lease that begins with '!' is a back-off
		garbage[0] = '?'
	}
	switch rnd.IntN(4) {
	case 0:
		pipe := r.rdb.TxPipeline()
		pipe.Del(ctx, key)
		pipe.RPush(ctx, key, garbage)
		_, _ = pipe.Exec(ctx) // if Redis is down, nothing is planted
	case 1:
		r.rdb.Set(ctx, key, garbage, 0)
	default:
		r.rdb.Set(ctx, key, garbage, between(rnd, 10, 400))
	}
}

func between(rnd *rand.Rand, least, most int) time.Duration {
	return time.Duration(least+rnd.IntN(most-least)) * time.Millisecond
}

// sample reads the values in Redis again and again. When a value has changed, sample writes the value to the history.
// If a read takes longer than 40 ms, sample writes a Gap.
func (r *faultyFleet) sample(ctx context.Context) {
	ticker := time.NewTicker(8 * time.Millisecond)
	defer ticker.Stop()
	last := make([]string, len(history.Keys))
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		pipe := r.rdb.Pipeline()
		for _, key := range history.Keys {
			pipe.Get(ctx, history.RedisKeys(key)[0])
		}
		begin := history.Now()
		short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		values, _ := pipe.Exec(short) // each value has its own error
		cancel()
		end := history.Now()
		if time.Duration(end-begin) > 40*time.Millisecond {
			r.log.Write(history.Event{Kind: history.Gap, Begin: begin, End: end})
		}
		for i, v := range values {
			text := v.(*redis.StringCmd).Val()
			if text == last[i] {
				continue
			}
			last[i] = text
			e := history.Event{Kind: history.Sample, Key: history.Keys[i], Begin: begin, End: end}
			if sampled(&e, text) {
				r.log.Write(e)
			}
		}
	}
}

// sampled decodes the record in text into the event e. sampled returns false if text is not a record.
func sampled(e *history.Event, text string) bool {
	record, err := driver.DecodeRecord([]byte(text))
	if err != nil {
		return false // garbage that plant stored
	}
	payload := record.Payload
	if record.NotFound {
		e.Err = history.ErrAbsent
		payload = payload[:slices.Index(payload, '}')+1]
	}
	e.Value, e.Outcome = new(history.Value), "fresh"
	if !record.ExpiredAt.IsZero() {
		e.Outcome = "expired"
	}
	return json.Unmarshal(payload, e.Value) == nil
}

// stop stops every process, and checks that the fleet left no subscription and no key without a TTL (G8). A process
// whose Close returns an error fails the test.
func (r *faultyFleet) stop() {
	for _, node := range r.nodes {
		if err := node.Stop(); err != nil {
			r.t.Error(err)
		}
	}
	if !eventually(func() bool { return r.rdb.PubSubNumSub(r.t.Context(), "refill:notes").Val()["refill:notes"] == 0 }) {
		r.t.Error("the fleet left subscriptions behind")
	}
	leftBehind(r.t, r.server)
	r.end()
	r.watch.Wait()
}
