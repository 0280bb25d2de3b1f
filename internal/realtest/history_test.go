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

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/internal/realtest/history"
)

// This file runs a fleet under random faults, and has package history check what it did.

var (
	historySeed = flag.Uint64("history.seed", 0, "the faults of TestHistory; 0 = random")
	historyFor  = flag.Duration("history.for", 0, "how long TestHistory runs; 0 = 11 s, with REFILL_TORTURE=1 REFILL_TORTURE_FOR or 5 min")
)

const (
	historyShort = 11 * time.Second
	historyRound = time.Minute // of a long run
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

// TestHistory lets a fleet of processes read, write, void and refresh a few keys while processes are killed and frozen,
// Redis dies and the network breaks, and checks everything that each of them did. A long run is made of rounds of a
// minute, each with a seed of its own.
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
	t.Log("the same faults again: ", replay)
	dir, err := os.MkdirTemp("", "refill-history-") // not t.TempDir: a history that is wrong is kept
	if err != nil {
		t.Fatal(err)
	}
	r := startTrouble(t, dir, seed)
	r.carryOut(history.NewPlan(seed, length, historyNodes), length)
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
	t.Errorf("%d violations; the history is in %s\n%s\nwhat happened before the first one:\n%s", len(report.Violations), dir,
		report, report.Around(events, report.Violations[0], 1500*time.Millisecond))
	return report.Stats
}

// trouble is a fleet and those who make its life hard. Its methods are for the goroutine of the test.
type trouble struct {
	t       *testing.T
	dir     string
	seed    uint64
	server  *Redis
	proxies []*Proxy
	nodes   []*Proc // nil while one is dead
	lives   []int   // how often a node was started
	log     *history.Log
	rdb     *redis.Client // straight to the server
	end     context.CancelFunc
	watch   sync.WaitGroup
}

func startTrouble(t *testing.T, dir string, seed uint64) *trouble {
	r := &trouble{
		t: t, dir: dir, seed: seed, server: StartRedis(t),
		nodes: make([]*Proc, historyNodes), lives: make([]int, historyNodes),
	}
	var err error
	if r.log, err = history.Create(filepath.Join(dir, "test.jsonl")); err != nil {
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
	})
	for i := range r.nodes {
		r.proxies = append(r.proxies, StartProxy(t, r.server.Addr()))
		r.start(i)
	}
	r.watch.Go(func() { history.Heartbeat(ctx, r.log, "") })
	r.watch.Go(func() { r.sample(ctx) })
	return r
}

// name is that of a node's present life.
func (r *trouble) name(node int) string { return fmt.Sprintf("n%d.%d", node, r.lives[node]) }

// start begins a node's next life.
func (r *trouble) start(node int) {
	r.lives[node]++
	r.nodes[node] = StartChild(r.t, "history", history.Args{
		Process: r.name(node), Addr: r.proxies[node].Addr(), Dir: r.dir, Seed: r.seed + uint64(100*node+r.lives[node]),
		Limits: history.Promised(r.seed),
	})
}

// carryOut does what the plan says, when it says so.
func (r *trouble) carryOut(plan []history.Planned, length time.Duration) {
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
				delay = 10 * time.Millisecond // a new connection takes several replies, and has StoreTimeout
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

// victim is whom a fault happens to, as the history names it: a life, a node, or nobody for Redis.
func (r *trouble) victim(p history.Planned) string {
	switch {
	case p.Node < 0:
		return ""
	case p.Op == history.FaultKill, p.Op == history.FaultFreeze:
		return r.name(p.Node)
	}
	return "n" + strconv.Itoa(p.Node)
}

func (r *trouble) begin(p history.Planned) {
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
func (r *trouble) finish(p history.Planned) {
	switch p.Op {
	case history.FaultKill:
		r.start(p.Node)
	case history.FaultFreeze:
		r.nodes[p.Node].Thaw()
	case history.FaultRedisFreeze:
		r.server.Thaw()
	case history.FaultRedisKill:
		r.server.Restart()
	default:
		if p.Node >= 0 {
			r.proxies[p.Node].Heal()
		}
	}
}

// plant puts foreign bytes in the place of a value, lease or claim: with an end, without, or of a foreign type.
func (r *trouble) plant(ctx context.Context, rnd *rand.Rand) {
	key := history.RedisKeys(history.Keys[rnd.IntN(len(history.Keys))])[rnd.IntN(3)]
	garbage := make([]byte, rnd.IntN(120))
	for i := range garbage {
		garbage[i] = byte(rnd.Uint32())
	}
	if record, err := r.rdb.Get(ctx, key).Bytes(); err == nil && len(record) > 20 && rnd.IntN(2) == 0 {
		garbage = record
		garbage[len(record)-1-rnd.IntN(len(record)-20)]++ // behind expiredAt, which has no checksum
	}
	if len(garbage) > 0 && garbage[0] == '!' { // in a lease this would be a failure
		garbage[0] = '?'
	}
	switch rnd.IntN(4) {
	case 0:
		pipe := r.rdb.TxPipeline()
		pipe.Del(ctx, key)
		pipe.RPush(ctx, key, garbage)
		_, _ = pipe.Exec(ctx) // Redis may be gone: then there is no garbage
	case 1:
		r.rdb.Set(ctx, key, garbage, 0)
	default:
		r.rdb.Set(ctx, key, garbage, between(rnd, 10, 400))
	}
}

func between(rnd *rand.Rand, least, most int) time.Duration {
	return time.Duration(least+rnd.IntN(most-least)) * time.Millisecond
}

// sample looks at the values in Redis, and writes down each one that it sees for the first time. That it has to wait for
// Redis is written down, too.
func (r *trouble) sample(ctx context.Context) {
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
		values, _ := pipe.Exec(short) // what is wrong, if anything, each of the values says
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

// sampled reads a record, if it is one.
func sampled(e *history.Event, text string) bool {
	record, err := refill.DecodeRecord([]byte(text))
	if err != nil {
		return false // garbage of ours
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

// stop ends the fleet in the orderly way, and looks for what it left behind (G8). A process fails if its Close does.
func (r *trouble) stop() {
	for _, node := range r.nodes {
		if err := node.Stop(); err != nil {
			r.t.Error(err)
		}
	}
	if !eventually(func() bool { return r.rdb.PubSubNumSub(r.t.Context(), "refill:notes").Val()["refill:notes"] == 0 }) {
		r.t.Error("subscriptions are left")
	}
	leftBehind(r.t, r.server)
	r.end()
	r.watch.Wait()
}
