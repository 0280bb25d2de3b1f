//go:build unix

package realtest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/goredis"
)

// This file tests how many loads reach the database when Redis fails under traffic. Eight processes read a thousand
// hot keys.

const (
	outageNodes    = 8
	outageKeys     = 1000
	outageMaxLoads = 8
	outageTTL      = 2 * time.Second
	outageLoad     = 20 * time.Millisecond
)

func init() { Child("outage", outageNode) }

// outageLine is a line that a process of the fleet writes.
type outageLine struct {
	Up   int64         `json:",omitempty"` // when Redis became usable: the node has subscribed and the breaker is closed
	Lost bool          `json:",omitempty"` // Redis is no longer usable
	Done *outageReport `json:",omitempty"`
}

// outageReport is what a process of the fleet counted. Times are nanoseconds since 1970.
type outageReport struct {
	Loads       []outageSpan
	StoreErrors []int64 // when EventStoreError was reported; this node may then load without a lease
	Gets        int64
	Shed        int64 // failed with ErrOverloaded
	Longest     time.Duration
	Errors      []string // errors other than ErrOverloaded, and wrong values; must stay empty
}

type outageSpan struct {
	Key          int
	Began, Ended int64
}

// quiet is a logger that drops what go-redis logs about failed dials.
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

// Redis dies or hangs while 8 nodes read 1,000 hot keys. Each node may run at most MaxLoads loads at once, and Get
// may fail only with ErrOverloaded. When Redis is back, there must be one load per expiry in the whole fleet again,
// without a restart of a node.
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
			// The check begins some time after the return of Redis, when the loads that began without Redis have ended.
			o.onePerExpiry(t, "after", back.Add(250*time.Millisecond+10*outageLoad), ended)
			leftBehind(t, server)
		})
	}
}

// outageUp waits until each node has reported, later than since, that Redis is usable. outageUp returns the moment at
// which the last node found Redis usable.
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
		_ = node.stdin.Close() // lets this process end; the loop lets all processes end at the same time
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

// atOnce returns the largest number of spans that ran at the same time, among those that overlap the time between
// from and to.
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

// logTimeline logs how many loads began and ran in each half second.
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

// check checks what must hold at all times, also without Redis: errors, MaxLoads and the longest Get.
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
	// When Redis fails, a Get may be waiting for the lease of another node. So this Get may take LockTTL, two
	// StoreTimeouts and one load.
	limit := 1*time.Second + 2*250*time.Millisecond + outageLoad
	if o.total.Longest > limit+5*time.Second { // 5 s more, because the machine may be busy
		t.Errorf("a Get took %v, the bound is %v", o.total.Longest, limit)
	}
}

// onePerExpiry checks that no key was loaded twice within its TTL. On a busy machine Redis may answer too late, and
// then a node loads without a lease. So each store error excuses two loads: the load without a lease, and the next load
// of the same key.
func (o *outage) onePerExpiry(t *testing.T, when string, from, to time.Time) {
	last, twice, loads := map[int]int64{}, 0, 0
	for _, s := range o.all {
		if at := time.Unix(0, s.Began); at.Before(from) || at.After(to) {
			continue
		}
		loads++
		// TTL counts from the claim, which the node takes before the load begins. So the time between two loads may be a
		// little shorter than TTL.
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

// firstLine is a slog.Handler that sends each record to lines.
type firstLine struct {
	slog.Handler
	lines chan slog.Record
}

func (f firstLine) Enabled(context.Context, slog.Level) bool { return true }

func (f firstLine) Handle(_ context.Context, r slog.Record) error {
	f.lines <- r
	return nil
}

// No Redis listens at the address that the client has. A process with three Loaders must log one line, at once and
// without a Get. The line must name the address. After that line, Gets of keys that L1 has must not wait for Redis.
func TestWrongAddress(t *testing.T) {
	redis.SetLogger(quiet{})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := listener.Addr().String()
	_ = listener.Close() // now nothing listens there
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	defer func() { _ = rdb.Close() }()
	handler := firstLine{slog.DiscardHandler, make(chan slog.Record, 100)}
	cfg := refill.Config{TTL: time.Hour, Shared: goredis.New(rdb), Logger: slog.New(handler)}
	load := func(context.Context, string) (string, error) { return "value", nil }
	var nodes []*refill.Loader[string]
	for i := range 3 {
		l, err := refill.New(fmt.Sprint("thing", i), load, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		nodes = append(nodes, l)
	}
	var line slog.Record
	select {
	case line = <-handler.lines:
	case <-time.After(20 * time.Second):
		t.Fatal("no line within 20 s")
	}
	text := line.Message
	line.Attrs(func(a slog.Attr) bool { text += " " + a.String(); return true })
	t.Log(text)
	if line.Level != slog.LevelWarn || !strings.Contains(text, "store down") || !strings.Contains(text, addr) {
		t.Errorf("the line is %v %q, want one that names %s", line.Level, text, addr)
	}
	for _, l := range nodes {
		for range 50 {
			if v, err := l.Get(t.Context(), "k"); err != nil || v != "value" {
				t.Fatalf("Get without Redis: %q, %v", v, err)
			}
		}
	}
	for len(handler.lines) > 0 {
		if line := <-handler.lines; strings.Contains(line.Message, "store down") {
			t.Errorf("a further line about the same outage: %v", line)
		}
	}
}
