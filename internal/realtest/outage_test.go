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

// This file tests the load of the database when Redis is lost under traffic: eight processes, a thousand hot keys.

const (
	outageNodes    = 8
	outageKeys     = 1000
	outageMaxLoads = 8
	outageTTL      = 2 * time.Second
	outageLoad     = 20 * time.Millisecond
)

func init() { Child("outage", outageNode) }

// outageLine is a line that such a process writes.
type outageLine struct {
	Up   int64         `json:",omitempty"` // when Redis became usable (again): subscribed, and the breaker is closed
	Lost bool          `json:",omitempty"` // Redis is no longer usable
	Done *outageReport `json:",omitempty"`
}

// outageReport is what such a process counted. Times are nanoseconds since 1970.
type outageReport struct {
	Loads       []outageSpan
	StoreErrors []int64 // when Redis did not answer a Get in time, so that this node may load without a lease
	Gets        int64
	Shed        int64 // failed with ErrOverloaded
	Longest     time.Duration
	Errors      []string // all other errors: there must be none
}

type outageSpan struct {
	Key          int
	Began, Ended int64
}

// quiet drops what go-redis logs about each dial that failed.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// outageProcess is one node of the fleet.
type outageProcess struct {
	mu           sync.Mutex // guards all below
	out          *json.Encoder
	report       outageReport
	unsubscribed bool
	breakerOpen  bool
}

func outageNode(ctx context.Context, raw json.RawMessage, out *json.Encoder) error {
	var addr string
	if err := json.Unmarshal(raw, &addr); err != nil {
		return err
	}
	redis.SetLogger(quiet{})
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	defer rdb.Close()
	n := &outageProcess{out: out, unsubscribed: true}
	l, err := refill.New("outage", n.load, refill.Config{
		TTL: outageTTL, StaleFor: outageTTL, MaxLoads: outageMaxLoads, Jitter: -1,
		Shared: goredis.New(rdb), OnEvent: n.onEvent,
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

func (n *outageProcess) onEvent(e refill.Event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	before := !n.unsubscribed && !n.breakerOpen
	switch e.Kind {
	case refill.EventStoreError:
		n.report.StoreErrors = append(n.report.StoreErrors, time.Now().UnixNano())
		return
	case refill.EventStoreUp, refill.EventStoreDown:
		n.unsubscribed = e.Kind == refill.EventStoreDown
	case refill.EventBreakerOpen, refill.EventBreakerClosed:
		n.breakerOpen = e.Kind == refill.EventBreakerOpen
	default:
		return
	}
	switch usable := !n.unsubscribed && !n.breakerOpen; {
	case usable && !before:
		_ = n.out.Encode(outageLine{Up: time.Now().UnixNano()})
	case before && !usable:
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

// Redis dies, or hangs, under traffic with 1,000 hot keys on 8 nodes. The database never gets more than nodes ×
// MaxLoads loads at once. Get fails only with ErrOverloaded. After the return of Redis there is again one load per
// expiry in the whole fleet, without a restart.
func TestOutage(t *testing.T) {
	for name, fault := range map[string]struct{ begin, end func(*Redis) }{
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
			fault.begin(server)
			<-time.After(2 * outageTTL)
			fault.end(server)
			found := time.Now()
			back := outageUp(t, nodes, found)
			<-time.After(3 * outageTTL)
			ended := time.Now()
			o := outageCollect(t, nodes)
			t.Logf("result: %s: at most %d loads at once in the fleet (8 × MaxLoads = 64), the longest Get took %v, "+
				"all nodes used Redis again after %v",
				name, atOnce(o.all, lost, found), o.total.Longest.Round(time.Millisecond), back.Sub(found).Round(time.Millisecond))
			o.logTimeline(t, began, lost, found, ended)
			o.check(t)
			o.onePerExpiry(t, "before", began, lost)
			// By then the loads that were started without Redis have ended.
			o.onePerExpiry(t, "after", back.Add(250*time.Millisecond+10*outageLoad), ended)
			leftBehind(t, server)
		})
	}
}

// outageUp waits until Redis has become usable for every node after since. It returns the time of the last one.
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
	storeErrors []int64
	perNode     [][]outageSpan
	all         []outageSpan
	total       outageReport
}

func outageCollect(t *testing.T, nodes []*Proc) (o outage) {
	t.Helper()
	for _, node := range nodes {
		_ = node.stdin.Close() // all processes end at the same time
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
		o.storeErrors = append(o.storeErrors, line.Done.StoreErrors...)
		o.total.Gets += line.Done.Gets
		o.total.Shed += line.Done.Shed
		o.total.Longest = max(o.total.Longest, line.Done.Longest)
		o.total.Errors = append(o.total.Errors, line.Done.Errors...)
	}
	slices.SortFunc(o.all, func(a, b outageSpan) int { return cmp.Compare(a.Began, b.Began) })
	return o
}

// atOnce is the largest number of spans that ran at the same time between two moments.
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

// logTimeline logs the load of the database over time.
func (o *outage) logTimeline(t *testing.T, began, lost, found, ended time.Time) {
	t.Logf("%d Gets, %d shed, longest %v, %d loads; per half second: loads begun, and most loads at once:",
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

// check checks the promises that hold all the time, also without Redis.
func (o *outage) check(t *testing.T) {
	if len(o.total.Errors) > 0 {
		t.Errorf("%d Gets failed: %v", len(o.total.Errors), o.total.Errors[:min(3, len(o.total.Errors))])
	}
	always := time.Unix(1<<33, 0)
	for i, spans := range o.perNode {
		if most := atOnce(spans, time.Time{}, always); most > outageMaxLoads {
			t.Errorf("node %d ran %d loads at once, MaxLoads is %d", i, most, outageMaxLoads)
		}
	}
	// When Redis is lost, a Get may wait for another node's lease: LockTTL, two StoreTimeouts, and the load.
	limit := 1*time.Second + 2*250*time.Millisecond + outageLoad
	if o.total.Longest > limit+5*time.Second { // 5 s more: this is not a measure of speed
		t.Errorf("a Get took %v, the bound is %v", o.total.Longest, limit)
	}
}

// onePerExpiry checks that no key was loaded twice within its TTL. If the machine is so busy that Redis does not answer
// within StoreTimeout, a node loads without a lease. Each such time excuses two loads: that one and its successor.
func (o *outage) onePerExpiry(t *testing.T, when string, from, to time.Time) {
	last, twice, loads := map[int]int64{}, 0, 0
	for _, s := range o.all {
		if at := time.Unix(0, s.Began); at.Before(from) || at.After(to) {
			continue
		}
		loads++
		// TTL counts from the claim, which is taken a moment before the load begins, or longer on a busy machine.
		if before, there := last[s.Key]; there && time.Duration(s.Began-before) < outageTTL-200*time.Millisecond {
			twice++
		}
		last[s.Key] = s.Began
	}
	storeErrors := 0
	for _, at := range o.storeErrors {
		if at >= from.Add(-250*time.Millisecond).UnixNano() && at <= to.UnixNano() {
			storeErrors++
		}
	}
	t.Logf("result: %s the outage: %d loads of %d keys in %.1f s, %d within the TTL of the previous one; "+
		"Redis did not answer in time %d times",
		when, loads, len(last), to.Sub(from).Seconds(), twice, storeErrors)
	if twice > 2*storeErrors || len(last) < outageKeys/2 {
		t.Errorf("%s the outage: %d of %d loads of %d keys began within the TTL of the previous one; "+
			"Redis did not answer in time %d times", when, twice, loads, len(last), storeErrors)
	}
}
