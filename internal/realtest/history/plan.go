package history

import (
	"math/rand/v2"
	"slices"
	"time"
)

// The kinds of faults. A fault is soft if every node can still reach its store, but may lose its subscription or its
// scripts, or may find foreign bytes. A fault is mild if all promises hold in spite of the fault.
const (
	FaultKill      = "kill"       // kill -9 of a process; the node starts again at the end
	FaultFreeze    = "freeze"     // SIGSTOP of a process, SIGCONT at the end
	FaultSlow      = "slow"       // the proxy of a node delays every reply by more than StoreTimeout
	FaultReset     = "reset"      // the proxy cuts all connections of a node
	FaultBlackHole = "black-hole" // nothing passes the proxy
	FaultRefuse    = "refuse"     // the proxy refuses connections
	FaultLose      = "lose-reply" // the server executes the next command Arg of a node, and the reply is lost
	FaultJitter    = "jitter"     // mild: replies of a node are up to 10 ms late, in changing order
	FaultNoDB      = "no-db"      // mild: each load of a node fails at once

	FaultRedisFreeze = "redis-freeze"
	FaultRedisKill   = "redis-kill" // the server starts again, empty, at the end
	FaultPubSub      = "pubsub"     // soft: CLIENT KILL TYPE pubsub
	FaultFlush       = "flush"      // soft: SCRIPT FLUSH
	FaultGarbage     = "garbage"    // soft: foreign bytes under the value, lease or claim of a key
)

// perNode lists the faults of one node, perRedis the faults of Redis. A fault that is listed twice is drawn twice as
// often. lostReplies lists the commands whose reply FaultLose may discard.
var (
	perNode = []string{
		FaultKill, FaultKill, FaultFreeze, FaultFreeze, FaultSlow, FaultReset, FaultBlackHole, FaultRefuse,
		FaultLose, FaultLose, FaultLose, FaultNoDB, FaultNoDB,
	}
	perRedis = []string{
		FaultRedisFreeze, FaultRedisKill, FaultPubSub, FaultPubSub, FaultFlush, FaultGarbage, FaultGarbage, FaultGarbage,
	}
	lostReplies = []string{"evalsha", "get", "set", "subscribe", "eval"}
)

// soft reports whether every node can still reach its store during such a fault.
func soft(op string) bool { return op == FaultPubSub || op == FaultFlush || op == FaultGarbage }

// mild reports whether all promises hold during such a fault.
func mild(op string) bool { return op == FaultJitter || op == FaultNoDB }

// Planned is one fault of a plan.
type Planned struct {
	Op    string
	Node  int // -1: Redis
	At    time.Duration
	For   time.Duration   // 0: the fault ends at once
	Arg   string          // of FaultLose: the command whose reply is lost
	Steps []time.Duration // of FaultJitter: for how long replies are late, then for how long in time, and so on
	Seed  uint64          // for random numbers during the fault
}

// A plan consists of cycles. A cycle begins with a quiet part, in which Check can judge G1 and the bounds of a healthy
// fleet. The quiet part of each cycle but the first has one stopLong. Then come faults of all kinds, and then a calm
// part in which the fleet heals. Mild faults occur in all parts.
const (
	cycle = 10 * time.Second
	quiet = 3 * time.Second
	calm  = 2 * time.Second // at the end of each cycle and of the plan
)

// NewPlan draws the faults of a run. The same seed gives the same faults.
func NewPlan(seed uint64, length time.Duration, nodes int) []Planned {
	rnd := rand.New(rand.NewPCG(seed, 1))
	var plan []Planned
	busy := make([]time.Duration, nodes+1) // by node: when its last fault ends; the last element is for Redis
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
	alone := cycle + time.Second // when the next stopLong begins; the first quiet part has none
	for at := 500 * time.Millisecond; at < length-calm; {
		if at >= alone && at < length-calm-time.Second {
			add(stopLong(rnd, at, nodes))
			at += between(rnd, 1300, 1600)
			alone += cycle
			continue
		}
		in := at % cycle
		if in < quiet || in > cycle-calm {
			if rnd.IntN(3) == 0 {
				add(noDB(rnd, at, nodes))
			} else {
				add(jitter(rnd, at, nodes))
			}
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

// draw draws a fault, its victim and its length. About a third of the faults last longer than a lease (LockTTL 300
// ms).
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
	case FaultNoDB:
		p.For = between(rnd, 300, 1200)
	case FaultLose:
		p.For, p.Arg = between(rnd, 50, 300), lostReplies[rnd.IntN(len(lostReplies))]
	}
	return p
}

// stopLong draws a kill or freeze of one process while the rest of the fleet is healthy. The fault lasts so long
// that another process must take over a load.
func stopLong(rnd *rand.Rand, at time.Duration, nodes int) Planned {
	op := FaultKill
	if rnd.IntN(2) == 0 {
		op = FaultFreeze
	}
	return Planned{Op: op, Node: rnd.IntN(nodes), At: at, For: between(rnd, 900, 1000)}
}

// noDB draws a time in which a node cannot reach its database.
func noDB(rnd *rand.Rand, at time.Duration, nodes int) Planned {
	return Planned{Op: FaultNoDB, Node: rnd.IntN(nodes), At: at, For: between(rnd, 300, 1200)}
}

// jitter draws a time in which a node's replies are alternately late and in time. So the reply to the first of
// several requests may arrive last.
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
