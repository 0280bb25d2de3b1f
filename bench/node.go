package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

// This file runs in each process of a fleet. fleet.go starts the processes and sums up their results.

func init() { realtest.Child("node", runNode) }

// The ways in which callers call Get.
const (
	steady = "steady" // each caller begins one Get of a random key per Every, the first at a random moment
	bursts = "bursts" // once per Every, all callers begin to Get the next key at the same moment
	relay  = "relay"  // once per Every, process 0 asks for a new key, and process 1 asks for it relayAfter later
)

const relayAfter = 5 * time.Millisecond

// job is what the processes of a fleet do. All processes have the same job, except for Process.
type job struct {
	Peer          string
	TTL, StaleFor time.Duration
	Jitter        float64       // only for refill; 0 = the default of refill
	Entries       int           // how many entries have to fit into L1
	Redis         []string      // addresses; more than one: a Cluster, which only refill supports
	Load, Spread  time.Duration // a load takes Load and a random time up to Spread

	Process   int
	Instances int    // caches in each process, each with a client of its own
	Callers   int    // callers of each instance
	Way       string // steady, bursts or relay
	Keys      int
	Zipf      float64 // the skew of the keys; 0 = all keys equally often
	Every     time.Duration
	Warm, For time.Duration // times since the start: latencies count from Warm on, and the run ends at For

	Invalidate time.Duration // process 0 invalidates once per interval; 0 = never
	Starter    string        // address of the process that says when to begin
	Profiles   string        // directory for a CPU profile; empty = none
}

// message is a line that a process prints when it has its result and, with the way bursts, also when its first load
// begins.
type message struct {
	Loads  bool    `json:",omitempty"`
	Result *result `json:",omitempty"`
}

// result is what a process has measured. Moments are in µs since 1970. The moments of different processes can be
// compared, because all processes run on one machine.
type result struct {
	WarmGets, ColdGets []byte // HDR histograms of the latencies of Gets, ns
	Gets               int64
	Failed             int64 // Gets that failed, or have not returned
	Error              string
	Stale              int64
	Oldest             int64   // µs, see node.age
	Loads              []span  // ordered by begin
	Longest            []int64 `json:",omitempty"` // the longest Get of each burst, ns
	First              int64   // when the first value was served, µs since 1970
	Relayed            int64   // Gets whose value another process had loaded
	CPU                int64   // µs
	RSS                int64   // bytes
}

// span is when a load began and when it ended, µs since 1970.
type span struct{ Began, Ended int64 }

// node is the state of one process.
type node struct {
	job

	keys   []string
	caches []peers.Cache
	start  time.Time
	served atomic.Bool

	mu         sync.Mutex // guards the fields below
	out        *json.Encoder
	warm, cold *hdrhistogram.Histogram
	callers    int // callers that have not ended
	result
}

func runNode(ctx context.Context, args json.RawMessage, out *json.Encoder) error {
	n := &node{out: out, warm: newHistogram(), cold: newHistogram()}
	if err := json.Unmarshal(args, &n.job); err != nil {
		return err
	}
	n.keys = make([]string, n.Keys)
	if n.Way == bursts {
		n.Longest = make([]int64, n.Keys)
	}
	for i := range n.keys {
		n.keys[i] = fmt.Sprint("product-", i)
	}
	for range n.Instances {
		c, err := n.open()
		if err != nil {
			return err
		}
		n.caches = append(n.caches, c)
	}
	var err error
	if n.start, err = n.startMoment(); err != nil {
		return err
	}
	stopProfile, err := profile(n.Profiles, fmt.Sprint(n.Peer, "-", n.Process))
	if err != nil {
		return err
	}
	before := cpuTime()
	n.work(ctx)
	stopProfile()
	r, err := n.sumUp(cpuTime() - before)
	if err != nil {
		return err
	}
	n.send(message{Result: r})
	<-ctx.Done() // the parent reads the figures of Redis before this process closes anything
	return nil
}

func newHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(1, int64(2*time.Minute), 3) }

func (n *node) open() (peers.Cache, error) {
	p, err := peerNamed(n.Peer)
	if err != nil {
		return nil, err
	}
	return p.Open(peers.Settings{
		Load: n.load, TTL: n.TTL, StaleFor: n.StaleFor, Jitter: n.Jitter, Entries: n.Entries,
		Redis: strings.Join(n.Redis, ","),
	})
}

func peerNamed(name string) (peers.Peer, error) {
	for _, p := range peers.All() {
		if p.Name == name {
			return p, nil
		}
	}
	return peers.Peer{}, fmt.Errorf("no peer is called %q", name)
}

// startMoment tells the parent that this process is ready, and returns the moment when all processes begin.
func (n *node) startMoment() (time.Time, error) {
	conn, err := net.Dial("tcp", n.Starter)
	if err != nil {
		return time.Time{}, err
	}
	defer conn.Close()
	var at [8]byte
	if _, err := io.ReadFull(conn, at[:]); err != nil {
		return time.Time{}, err
	}
	// The returned time has no monotonic reading, so the process compares times with it by the wall clock, which all
	// processes share.
	return time.UnixMicro(int64(binary.BigEndian.Uint64(at[:]))), nil
}

// work starts the callers, and waits until all callers have ended, but no longer than 25 s after the end of the run: 20
// s after that end the ctx of all Gets ends, and 5 s more are for Gets that ignore their ctx.
func (n *node) work(ctx context.Context) {
	ctx, cancel := context.WithDeadline(ctx, n.start.Add(n.For+20*time.Second))
	defer cancel()
	var wg sync.WaitGroup
	for _, c := range n.caches {
		for range n.Callers {
			n.callers++
			wg.Go(func() {
				n.call(ctx, c)
				n.mu.Lock()
				n.callers--
				n.mu.Unlock()
			})
		}
	}
	if n.Invalidate > 0 && n.Process == 0 {
		wg.Go(func() { n.invalidate(ctx) })
	}
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(time.Until(n.start) + n.For + 25*time.Second):
	}
}

// call runs one caller, in the way n.Way, until the run ends.
func (n *node) call(ctx context.Context, c peers.Cache) {
	switch n.Way {
	case steady:
		draw := n.drawer()
		first := n.start.Add(rand.N(n.Every))
		for i := time.Duration(0); ; i++ {
			// If a Get took longer than Every, this caller skips the Gets that were due meanwhile. The histogram still
			// gets latencies for the skipped Gets, from RecordCorrectedValue.
			i = max(i, (time.Since(first)+n.Every-1)/n.Every)
			at := first.Add(i * n.Every)
			if at.After(n.start.Add(n.For)) || !sleepUntil(ctx, at) {
				return
			}
			n.get(ctx, c, draw())
		}
	case bursts:
		for i, key := range n.keys {
			at := n.start.Add(time.Duration(i) * n.Every)
			for ok := sleepUntil(ctx, at); ok; ok = sleepUntil(ctx, time.Now().Add(10*time.Millisecond)) {
				took, got := n.get(ctx, c, key)
				n.mu.Lock()
				n.Longest[i] = max(n.Longest[i], int64(took))
				n.mu.Unlock()
				if got {
					break
				}
			}
		}
	case relay:
		var wg sync.WaitGroup
		for i, key := range n.keys {
			if sleepUntil(ctx, n.start.Add(time.Duration(i)*n.Every+time.Duration(n.Process)*relayAfter)) {
				wg.Go(func() { n.get(ctx, c, key) })
			}
		}
		wg.Wait()
	}
}

// drawer returns a function that draws random keys for one caller.
func (n *node) drawer() func() string {
	if n.Zipf == 0 {
		return func() string { return n.keys[rand.IntN(len(n.keys))] }
	}
	z := rand.NewZipf(rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())), n.Zipf, 1, uint64(len(n.keys)-1))
	return func() string { return n.keys[z.Uint64()] }
}

func sleepUntil(ctx context.Context, at time.Time) bool {
	timer := time.NewTimer(time.Until(at))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// get makes one Get and records its result. A Get belongs to the cold start if this process has not served a value yet,
// or if Warm is not over.
func (n *node) get(ctx context.Context, c peers.Cache, key string) (took time.Duration, ok bool) {
	warm := n.served.Load() && time.Since(n.start) >= n.Warm
	began := time.Now()
	p, err := c.Get(ctx, key)
	took = time.Since(began)
	now := time.Now().UnixMicro()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.Gets++
	if err != nil {
		n.Failed++
		n.Error = cmp.Or(n.Error, err.Error())
		return took, false
	}
	if n.First == 0 {
		n.First = now
		n.served.Store(true)
	}
	if n.Way == relay {
		if int(p.Seq>>32) != n.Process {
			n.Relayed++
			_ = n.warm.RecordValue(max(0, now-p.Ended) * 1000)
		}
		return took, true
	}
	old, stale := n.age(p, began.UnixMicro(), now)
	n.Oldest = max(n.Oldest, old)
	if stale {
		n.Stale++
	}
	if warm {
		_ = n.warm.RecordCorrectedValue(int64(took), int64(n.Every))
	} else {
		_ = n.cold.RecordValue(int64(took)) // the error is nil, because no Get takes longer than the histogram's 2 minutes
	}
	return took, true
}

// age returns how old an answer was, in µs since the start of its load. The answer was stale if more than TTL had
// passed since the end of the load: some peers count the TTL from there. In runs with invalidations, age returns how
// long before the Get the value was first invalidated. Then the answer was stale if that was more than 20 ms before.
// The 20 ms are allowed, because a process knows only the schedule of the Invalidates, not the moments at which they
// returned.
func (n *node) age(p *peers.Product, began, now int64) (old int64, stale bool) {
	if n.Invalidate == 0 {
		return now - p.Began, now-p.Ended > n.TTL.Microseconds()
	}
	every := n.Invalidate.Microseconds()
	invalidated := n.start.UnixMicro() + (max(0, p.Began-n.start.UnixMicro())/every+1)*every
	return max(0, began-invalidated), began-invalidated > 20_000
}

// invalidate calls Invalidate once per interval.
func (n *node) invalidate(ctx context.Context) {
	for i := time.Duration(1); i*n.Invalidate < n.For && sleepUntil(ctx, n.start.Add(i*n.Invalidate)); i++ {
		if v, ok := n.caches[0].(peers.Invalidator); ok {
			if err := v.Invalidate(ctx, n.keys[0]); err != nil {
				n.mu.Lock()
				n.Failed++
				n.Error = cmp.Or(n.Error, err.Error())
				n.mu.Unlock()
			}
		}
	}
}

// load stands for the database query.
func (n *node) load(ctx context.Context, key string) (*peers.Product, error) {
	n.mu.Lock()
	i := len(n.Loads)
	n.Loads = append(n.Loads, span{Began: time.Now().UnixMicro()})
	began := n.Loads[i].Began
	if i == 0 && n.Way == bursts {
		_ = n.out.Encode(message{Loads: true}) // if this fails, the parent notices that the line is missing
	}
	n.mu.Unlock()
	long := n.Load
	if n.Spread > 0 {
		long += rand.N(n.Spread)
	}
	ok := sleepUntil(ctx, time.Now().Add(long))
	n.mu.Lock()
	defer n.mu.Unlock()
	n.Loads[i].Ended = time.Now().UnixMicro()
	if !ok {
		return nil, ctx.Err()
	}
	p := product(key)
	p.Seq, p.Began, p.Ended = int64(n.Process)<<32|int64(i), began, n.Loads[i].Ended
	return p, nil
}

var description = strings.Repeat("As good as it gets. ", 40)

// product returns a product of about 1 KiB of JSON.
func product(key string) *peers.Product {
	return &peers.Product{
		ID: key, Name: "The product " + key, Description: description, Price: 12.5, Stock: 7,
		Tags: []string{"new", "blue", "fragile", "organic"}, Ratings: []float64{4.5, 3, 5, 4, 2.5},
	}
}

func (n *node) send(m message) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_ = n.out.Encode(m) // if this fails, the parent notices that the line is missing
}

// sumUp returns the result. A load that still runs counts as ended at this moment.
func (n *node) sumUp(cpu time.Duration) (*result, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := n.result
	r.Failed += int64(n.callers)
	if n.callers > 0 {
		r.Error = cmp.Or(r.Error, "a Get does not return")
	}
	r.CPU, r.RSS = cpu.Microseconds(), residentBytes()
	r.Loads = append([]span(nil), n.Loads...)
	for i := range r.Loads {
		r.Loads[i].Ended = cmp.Or(r.Loads[i].Ended, time.Now().UnixMicro())
	}
	var err, err2 error
	r.WarmGets, err = n.warm.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
	r.ColdGets, err2 = n.cold.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
	return &r, errors.Join(err, err2)
}

// cpuTime returns the CPU time of this process, in user and kernel mode.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// residentBytes returns the resident memory of this process, or 0 on a system without /proc. residentBytes does not use
// Getrusage, because Getrusage returns the peak, which may even be the peak of the parent process before exec.
func residentBytes() int64 {
	text, _ := os.ReadFile("/proc/self/statm")
	var all, resident int64
	_, _ = fmt.Sscan(string(text), &all, &resident)
	return resident * int64(os.Getpagesize())
}
