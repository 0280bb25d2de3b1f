package goredis

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// A request is a command that waits for a pipeline. Its caller fills it in, and then only the sender writes to it. The
// caller reads cmd and again after done was closed, and must not touch cmd if it leaves before.
type request struct {
	ctx   context.Context // of the caller
	since time.Time       // when the request was put into the queue
	cmd   redis.Cmder     // for a script: made when the request is sent
	size  int             // of the arguments, in bytes

	script  script // the zero script for a plain command
	keys    []string
	args    []any
	isEnd   bool // ends a fill, so that the request goes before all others
	refused int  // how often the server did not know the script

	sent  atomic.Pointer[exchange] // the pipeline of the request; nil while the request is in the queue
	again bool                     // the caller must send the command again, alone
	done  chan struct{}            // closed when cmd has its reply
}

// A group bounds the pipelines of one kind to one server, and holds the queue for the next pipeline. A nil group
// bounds nothing.
type group struct {
	p    *pipelines
	most int // how many pipelines may be in flight; further commands wait

	mu      sync.Mutex // guards all below; no other lock is taken while it is held
	running int        // pipelines in flight: senders, and commands that went alone
	// The requests in ends free leases and claims, and go before those in others. Otherwise a burst of Acquires would
	// delay the publications that other nodes wait for. Each end follows an Acquire, so ends cannot hold others up for
	// ever.
	ends, others []*request
	timer        *time.Timer // calls late
	armed        bool        // timer is running; true while a request waits
}

// enter reports whether a command may go at once, alone. The caller then calls leave.
func (g *group) enter() bool {
	if g == nil {
		return true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.running >= g.most {
		return false
	}
	g.running++
	return true
}

func (g *group) leave() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running--
	g.start()
}

// start starts a sender if a request waits and a pipeline may open. The caller holds mu.
func (g *group) start() {
	if g.running < g.most && len(g.ends)+len(g.others) > 0 {
		g.running++
		go g.send()
	}
}

// wait puts r into the queue, and returns nil when r.cmd has its reply, which may be an error. It returns the error of
// ctx as soon as ctx ends, even if the pipeline of r is still within its time, or if r still waits for a pipeline. If
// r still waits, r will not be sent. If r was sent, the server may have executed the command.
func (g *group) wait(ctx context.Context, r *request) error {
	r.ctx, r.since, r.done = ctx, time.Now(), make(chan struct{})
	g.add(r)
	select {
	case <-r.done:
		if r.again {
			return errAlone
		}
		return nil
	case <-ctx.Done():
	}
	if of := r.sent.Load(); of != nil {
		return &exchangeError{ctx.Err(), of}
	}
	return &exchangeError{fmt.Errorf("%w while the call waited for a pipeline", ctx.Err()), nil}
}

// add puts requests into the queue. A request whose script was refused goes with the ends, because it has waited
// before.
func (g *group) add(all ...*request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range all {
		q := &g.others
		if r.isEnd || r.refused > 0 {
			q = &g.ends
		}
		*q = append(*q, r)
	}
	g.start()
	if !g.armed && len(all) > 0 {
		g.arm(patience)
	}
}

func (g *group) arm(d time.Duration) {
	if g.armed = true; g.timer == nil {
		g.timer = time.AfterFunc(d, g.late)
	} else {
		g.timer.Reset(d)
	}
}

// late opens one more pipeline if a request has waited for the time of patience.
func (g *group) late() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.armed = false
	left := patience
	for _, q := range [][]*request{g.ends, g.others} {
		if len(q) > 0 {
			g.armed, left = true, min(left, patience-time.Since(q[0].since))
		}
	}
	if !g.armed {
		return
	}
	if left <= 0 {
		g.running++
		go g.send()
		left = patience
	}
	g.arm(left)
}

// send sends pipelines until the queue is empty. An additional sender, which late has started, ends as soon as one of
// its pipelines took less than patience.
func (g *group) send() {
	took := patience
	for {
		batch := g.take(took)
		if len(batch) == 0 {
			return
		}
		began := time.Now()
		g.p.exchange(batch, g)
		took = time.Since(began)
	}
}

// take removes the next pipeline from the queue. It leaves out requests whose ctx has ended, because their callers have
// left. If take returns nothing, the sender ends: the queue is empty, or there are more senders than most and this
// sender's last pipeline was quick. took is the duration of that pipeline.
func (g *group) take(took time.Duration) (batch []*request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.running > g.most && took < patience {
		g.running--
		return nil
	}
	of, bytes := new(exchange), 0
	for _, q := range []*[]*request{&g.ends, &g.others} {
		n := 0
		for ; n < len(*q) && len(batch) < maxBatch && bytes < maxBatchBytes; n++ {
			if r := (*q)[n]; r.ctx.Err() == nil {
				batch, bytes = append(batch, r), bytes+r.size
				r.sent.Store(of)
			}
		}
		*q = slices.Delete(*q, 0, n)
	}
	if len(batch) == 0 {
		g.running--
	}
	return batch
}
