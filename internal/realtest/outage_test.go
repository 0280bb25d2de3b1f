//go:build unix

package realtest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
)

// This file shows what becomes of the database when Redis is lost under traffic: eight processes, a thousand hot keys.

const (
	outageNodes    = 8
	outageKeys     = 1000
	outageMaxLoads = 8
	outageTTL      = 2 * time.Second
	outageLoad     = 20 * time.Millisecond
)

func init() { Child("outage", outageNode) }

// outageLine is a line of such a process.
type outageLine struct {
	Up   int64         `json:",omitempty"` // when it had Redis (again): announcements heard, breaker closed; 0 = lost it
	Lost bool          `json:",omitempty"`
	Done *outageReport `json:",omitempty"`
}

// outageReport is what it saw. Times are nanoseconds since 1970.
type outageReport struct {
	Loads   []outageSpan
	Alone   []int64 // when Redis did not answer a Get in time, so that this node may load for itself
	Gets    int64
	Shed    int64
	Longest time.Duration
	Errors  []string // that should not be
}

type outageSpan struct {
	Key          int
	Began, Ended int64
}

// quiet drops what go-redis says of each dial that failed.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// outageProcess is one node of the fleet.
type outageProcess struct {
	mu       sync.Mutex // guards all below
	out      *json.Encoder
	report   outageReport
	deaf     bool // announcements are not heard
	breaking bool // the breaker is open
}

func outageNode(ctx context.Context, raw json.RawMessage, out *json.Encoder) error {
	var addr string
	if err := json.Unmarshal(raw, &addr); err != nil {
		return err
	}
	redis.SetLogger(quiet{})
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	defer rdb.Close()
	n := &outageProcess{out: out, deaf: true}
	l, err := refill.New("outage", n.load, refill.Config{
		TTL: outageTTL, StaleFor: outageTTL, MaxLoads: outageMaxLoads, Jitter: -1, Shared: goredis.New(rdb), OnEvent: n.hear,
	})
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for ctx.Err() == nil {
				n.get(l)
				<-time.After(20 * time.Millisecond)
			}
		})
	}
	wg.Wait()
	if err := l.Close(); err != nil {
		return err
	}
	return out.Encode(outageLine{Done: &n.report})
}

func (n *outageProcess) hear(e refill.Event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	had := !n.deaf && !n.breaking
	switch e.Kind {
	case refill.EventStoreError:
		n.report.Alone = append(n.report.Alone, time.Now().UnixNano())
		return
	case refill.EventStoreUp, refill.EventStoreDown:
		n.deaf = e.Kind == refill.EventStoreDown
	case refill.EventBreakerOpen, refill.EventBreakerClosed:
		n.breaking = e.Kind == refill.EventBreakerOpen
	default:
		return
	}
	switch has := !n.deaf && !n.breaking; {
	case has && !had:
		_ = n.out.Encode(outageLine{Up: time.Now().UnixNano()})
	case had && !has:
		_ = n.out.Encode(outageLine{Lost: true})
	}
}

func (n *outageProcess) load(ctx context.Context, key string) (string, error) {
	span := outageSpan{Began: time.Now().UnixNano()}
	if _, err := fmt.Sscan(key, &span.Key); err != nil {
		return "", err
	}
	select {
	case <-time.After(outageLoad):
	case <-ctx.Done():
	}
	span.Ended = time.Now().UnixNano()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.report.Loads = append(n.report.Loads, span)
	return key, ctx.Err()
}

func (n *outageProcess) get(l *refill.Loader[string]) {
	key := fmt.Sprint(rand.IntN(outageKeys))
	began := time.Now()
	v, err := l.Get(context.Background(), key)
	took := time.Since(began)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.report.Gets++
	n.report.Longest = max(n.report.Longest, took)
	switch {
	case errors.Is(err, refill.ErrOverloaded):
		n.report.Shed++
	case err != nil || v != key:
		n.report.Errors = append(n.report.Errors, fmt.Sprintf("%q, %v", v, err))
	}
}

// Redis dies, or hangs, under traffic with 1,000 hot keys on 8 nodes: the database never sees more than
// nodes × MaxLoads at once, no Get fails but with ErrOverloaded, and once Redis is back each expiry is loaded once by the
// whole fleet again, without a restart.
func TestOutage(t *testing.T) {
	for name, fault := range map[string]struct{ lose, find func(*Redis) }{
		"killed and back empty": {(*Redis).Kill, (*Redis).Restart},
		"frozen and back":       {(*Redis).Freeze, (*Redis).Thaw},
	} {
		t.Run(name, func(t *testing.T) {
			server := StartRedis(t)
			nodes := make([]*Proc, outageNodes)
			for i := range nodes {
				nodes[i] = StartChild(t, "outage", server.Addr())
			}
			began := outageUp(t, nodes, time.Time{})
			<-time.After(3 * outageTTL / 2)
			lost := time.Now()
			fault.lose(server)
			<-time.After(2 * outageTTL)
			fault.find(server)
			found := time.Now()
			back := outageUp(t, nodes, found)
			<-time.After(3 * outageTTL)
			ended := time.Now()
			o := outageCollect(t, nodes)
			t.Logf("result: %s: at most %d loads at once in the fleet (8 × MaxLoads = 64), longest Get %v, all nodes had Redis again after %v",
				name, atOnce(o.all, lost, found), o.total.Longest.Round(time.Millisecond), back.Sub(found).Round(time.Millisecond))
			o.draw(t, began, lost, found, ended)
			o.judge(t)
			o.onePerExpiry(t, "before", began, lost)
			// Loads that were on their way without Redis have begun, and ended, after that much.
			o.onePerExpiry(t, "after", back.Add(250*time.Millisecond+10*outageLoad), ended)
			leftBehind(t, server)
		})
	}
}

// outageUp waits until every node has got Redis after since, and returns when the last one did.
func outageUp(t *testing.T, nodes []*Proc, since time.Time) (last time.Time) {
	t.Helper()
	for _, node := range nodes {
		for up := since; !up.After(since); {
			var line outageLine
			node.Next(&line)
			if line.Up != 0 {
				up = time.Unix(0, line.Up)
			}
			if up.After(last) {
				last = up
			}
		}
	}
	return last
}

type outage struct {
	alone   []int64
	perNode [][]outageSpan
	all     []outageSpan
	total   outageReport
}

func outageCollect(t *testing.T, nodes []*Proc) (o outage) {
	t.Helper()
	for _, node := range nodes {
		_ = node.stdin.Close() // all end at once
	}
	for _, node := range nodes {
		var line outageLine
		for line.Done == nil {
			node.Next(&line)
		}
		if err := node.Wait(); err != nil {
			t.Error(err)
		}
		o.perNode = append(o.perNode, line.Done.Loads)
		o.all = append(o.all, line.Done.Loads...)
		o.alone = append(o.alone, line.Done.Alone...)
		o.total.Gets += line.Done.Gets
		o.total.Shed += line.Done.Shed
		o.total.Longest = max(o.total.Longest, line.Done.Longest)
		o.total.Errors = append(o.total.Errors, line.Done.Errors...)
	}
	slices.SortFunc(o.all, func(a, b outageSpan) int { return cmp.Compare(a.Began, b.Began) })
	return o
}

// atOnce is the most spans that ran at the same time between two moments.
func atOnce(spans []outageSpan, from, to time.Time) (most int) {
	type step struct {
		at int64
		by int
	}
	var steps []step
	for _, s := range spans {
		if s.Ended >= from.UnixNano() && s.Began < to.UnixNano() {
			steps = append(steps, step{s.Began, 1}, step{s.Ended, -1})
		}
	}
	slices.SortFunc(steps, func(a, b step) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.by, b.by)) })
	running := 0
	for _, s := range steps {
		running += s.by
		most = max(most, running)
	}
	return most
}

// draw shows the load of the database over time.
func (o *outage) draw(t *testing.T, began, lost, found, ended time.Time) {
	t.Logf("%d Gets, %d shed, longest %v, %d loads; each half second, loads begun and most at once:",
		o.total.Gets, o.total.Shed, o.total.Longest, len(o.all))
	const step = 500 * time.Millisecond
	for from := began; from.Before(ended); from = from.Add(step) {
		begun := 0
		for _, s := range o.all {
			if at := time.Unix(0, s.Began); !at.Before(from) && at.Before(from.Add(step)) {
				begun++
			}
		}
		state := ""
		if from.Add(step).After(lost) && from.Before(found) {
			state = "without Redis"
		}
		t.Logf("%5.1f s %5d %3d %s %s", from.Sub(began).Seconds(), begun, atOnce(o.all, from, from.Add(step)),
			strings.Repeat("#", begun/25), state)
	}
}

// judge holds the whole run to what is promised without Redis, too.
func (o *outage) judge(t *testing.T) {
	if len(o.total.Errors) > 0 {
		t.Errorf("%d Gets failed: %v", len(o.total.Errors), o.total.Errors[:min(3, len(o.total.Errors))])
	}
	always := time.Unix(1<<33, 0)
	for i, spans := range o.perNode {
		if most := atOnce(spans, time.Time{}, always); most > outageMaxLoads {
			t.Errorf("node %d ran %d loads at once, MaxLoads is %d", i, most, outageMaxLoads)
		}
	}
	// A Get may wait for another node's lease when Redis is lost: its LockTTL, and two StoreTimeouts, and the load.
	if limit := 1*time.Second + 2*250*time.Millisecond + outageLoad; o.total.Longest > limit+5*time.Second { // not a measure of speed
		t.Errorf("a Get took %v, the bound is %v", o.total.Longest, limit)
	}
}

// onePerExpiry demands that no key was loaded twice within its TTL. On a machine that is so busy that Redis misses its
// StoreTimeout a node loads for itself: that many loads are excused, and those behind them.
func (o *outage) onePerExpiry(t *testing.T, when string, from, to time.Time) {
	last, twice, loads := map[int]int64{}, 0, 0
	for _, s := range o.all {
		if at := time.Unix(0, s.Began); at.Before(from) || at.After(to) {
			continue
		}
		loads++
		// TTL counts from the claim, a moment before the load begins; a busy machine makes it a long one.
		if before, there := last[s.Key]; there && time.Duration(s.Began-before) < outageTTL-200*time.Millisecond {
			twice++
		}
		last[s.Key] = s.Began
	}
	alone := 0
	for _, at := range o.alone {
		if at >= from.Add(-250*time.Millisecond).UnixNano() && at <= to.UnixNano() {
			alone++
		}
	}
	t.Logf("result: %s: %d loads of %d keys in %.1f s, %d within the TTL of the one before, %d times Redis did not answer in time",
		when, loads, len(last), to.Sub(from).Seconds(), twice, alone)
	if twice > 2*alone || len(last) < outageKeys/2 {
		t.Errorf("%s: %d of %d loads of %d keys came within the TTL of the one before; %d times Redis did not answer in time",
			when, twice, loads, len(last), alone)
	}
}
