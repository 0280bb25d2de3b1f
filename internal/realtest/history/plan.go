package history

import (
	"math/rand/v2"
	"slices"
	"time"
)

// The kinds of faults. Soft ones leave every node its store; the mild one leaves Redis what the promises call healthy.
const (
	FaultKill      = "kill"       // kill -9 of a process, started again at the end
	FaultFreeze    = "freeze"     // SIGSTOP … SIGCONT of a process
	FaultSlow      = "slow"       // the proxy of a node holds every reply back for longer than StoreTimeout
	FaultReset     = "reset"      // the proxy cuts all connections of a node
	FaultBlackHole = "black-hole" // nothing passes the proxy
	FaultRefuse    = "refuse"     // the proxy refuses connections
	FaultLose      = "lose-reply" // a command of the kind Arg is carried out, its reply is lost
	FaultJitter    = "jitter"     // mild: replies of a node come up to 10 ms late, in changing order

	FaultRedisFreeze = "redis-freeze"
	FaultRedisKill   = "redis-kill" // started again, empty, at the end
	FaultPubSub      = "pubsub"     // soft: CLIENT KILL TYPE pubsub
	FaultFlush       = "flush"      // soft: SCRIPT FLUSH
	FaultGarbage     = "garbage"    // soft: foreign bytes under the value, lease or claim of a key
)

// perNode is what happens to one node, as often as it stands here; perRedis to Redis.
var (
	perNode = []string{
		FaultKill, FaultKill, FaultFreeze, FaultFreeze, FaultSlow, FaultReset, FaultBlackHole, FaultRefuse,
		FaultLose, FaultLose, FaultLose,
	}
	perRedis = []string{
		FaultRedisFreeze, FaultRedisKill, FaultPubSub, FaultPubSub, FaultFlush, FaultGarbage, FaultGarbage, FaultGarbage,
	}
	lost = []string{"evalsha", "get", "set", "subscribe", "eval"}
)

// soft says of a fault that every node can still reach its store at all times.
func soft(op string) bool { return op == FaultPubSub || op == FaultFlush || op == FaultGarbage }

// mild says of a fault that it is none, as far as the promises go.
func mild(op string) bool { return op == FaultJitter }

// Planned is one fault of a plan.
type Planned struct {
	Op    string
	Node  int // -1: Redis
	At    time.Duration
	For   time.Duration // 0: it is over at once
	Arg   string        // the command whose reply is lost
	Steps []time.Duration
	Seed  uint64 // for what is drawn while it happens
}

// A cycle of a plan is a quiet part, where G1 and the bounds of a healthy fleet can be checked, and a storm.
const (
	cycle = 10 * time.Second
	quiet = 3 * time.Second
	calm  = 2 * time.Second // at the end of a cycle and of the plan: what was broken heals
)

// NewPlan draws the faults of a run: the same ones for the same seed.
func NewPlan(seed uint64, length time.Duration, nodes int) []Planned {
	rnd := rand.New(rand.NewPCG(seed, 1))
	var plan []Planned
	busy := make([]time.Duration, nodes+1) // until when a node (and, as the last, Redis) has a fault already
	add := func(p Planned) {
		who := p.Node
		if who < 0 {
			who = nodes
		}
		if p.At < busy[who] {
			return
		}
		busy[who] = p.At + p.For + 50*time.Millisecond
		plan = append(plan, p)
	}
	lone := cycle + time.Second // in each cycle but the first, so that a short run has all of its quiet part for G1
	for at := 500 * time.Millisecond; at < length-calm; {
		if at >= lone && at < length-calm-time.Second {
			add(stopLong(rnd, at, nodes))
			at += between(rnd, 1300, 1600)
			lone += cycle
			continue
		}
		in := at % cycle
		if in < quiet || in > cycle-calm {
			add(jitter(rnd, at, nodes))
			at += between(rnd, 300, 900)
			continue
		}
		p := draw(rnd, nodes)
		p.At, p.Seed = at, rnd.Uint64()
		add(p)
		if rnd.IntN(4) == 0 {
			add(jitter(rnd, at, nodes))
		}
		at += between(rnd, 100, 900)
	}
	slices.SortStableFunc(plan, func(a, b Planned) int { return int(a.At - b.At) })
	return plan
}

// draw draws what happens, to whom, and for how long: half of the times for longer than a lease lasts.
func draw(rnd *rand.Rand, nodes int) Planned {
	p := Planned{Node: -1, Op: perRedis[rnd.IntN(len(perRedis))]}
	if rnd.IntN(3) > 0 {
		p.Node, p.Op = rnd.IntN(nodes), perNode[rnd.IntN(len(perNode))]
	}
	switch p.Op {
	case FaultKill, FaultRedisKill:
		p.For = between(rnd, 10, 1000)
	case FaultFreeze:
		p.For = between(rnd, 20, 1300)
	case FaultRedisFreeze, FaultBlackHole, FaultRefuse:
		p.For = between(rnd, 20, 900)
	case FaultSlow:
		p.For = between(rnd, 100, 700)
	case FaultLose:
		p.For, p.Arg = between(rnd, 50, 300), lost[rnd.IntN(len(lost))]
	}
	return p
}

// stopLong draws a process that stops while all else is well, for so long that another one has to take over.
func stopLong(rnd *rand.Rand, at time.Duration, nodes int) Planned {
	op := FaultKill
	if rnd.IntN(2) == 0 {
		op = FaultFreeze
	}
	return Planned{Op: op, Node: rnd.IntN(nodes), At: at, For: between(rnd, 900, 1000)}
}

// jitter draws a time in which a node's replies are held back, or not, by turns: what was asked for first may be answered
// last.
func jitter(rnd *rand.Rand, at time.Duration, nodes int) Planned {
	p := Planned{Op: FaultJitter, Node: rnd.IntN(nodes), At: at, For: between(rnd, 200, 700)}
	for t := time.Duration(0); t < p.For; {
		step := between(rnd, 2, 16)
		p.Steps = append(p.Steps, step)
		t += step
	}
	return p
}

func between(rnd *rand.Rand, least, most int) time.Duration {
	return time.Duration(least+rnd.IntN(most-least)) * time.Millisecond
}
