//go:build unix

package main

// promise is one guarantee, in the words of README.md, and the tests that could refute it.
type promise struct {
	name, text string
	proofs     []proof
}

type proof struct {
	test, dir string // dir is the package, from the root of the repository
	injected  string
	mutant    mutant
}

// mutant is a break of our code that the test of a proof has to notice.
type mutant struct{ name, file, old, new string }

const (
	memory = "."                 // nodes over a store in memory, in a bubble whose time is exact
	real   = "internal/realtest" // processes and servers
	redis  = "backend/goredis/lua/"
)

// anyMayPublish is the break that the claim exists for.
var anyMayPublish = mutant{"publish does not look at the claim", redis + "publish.lua", "if claimant ~= ARGV[1] or ARGV[9] ~= '' and ARGV[9] ~= seconds .. '.' .. micros then", "if false then"}

var promises = []promise{
	{"G1–G8", "together, on the whole history of a fleet.", []proof{
		{"TestHistory", real, "4 processes Get, invalidate, expire and refresh 5 keys while processes are killed and frozen, Redis is " +
			"killed and frozen, connections are slow, cut, refused and swallowed, replies lost, subscriptions dropped, scripts flushed, " +
			"garbage planted; [package history](../internal/realtest/history) judges it", anyMayPublish},
	}},
	{"G1", "Redis healthy: one load per key per expiry in the whole cluster.", []proof{
		{"TestOneLoadPerExpiry", real, "8 processes × 200 callers, 10 s, TTL 1 s, with and without StaleFor", mutant{
			"a loser of the lease does not wait for it", "refill.go", "\tc.lostTo = held.Holder\n\treturn l.await(c, held.Left)", "\treturn false, false, l.alone(c)",
		}},
		{"TestLoadOutlastsTTLAndLock", real, "a load of 3 s, TTL and LockTTL 1 s, 8 processes", mutant{
			"the lease is not renewed in time", "stale.go", "return ttl / 3 }", "return ttl * 2 }",
		}},
		{"TestASecondLookUnderTheLease", memory, "a publish between the look and the lease of another node", mutant{
			"the claim does not look at the value", "memory.go", `case c.value.data != "" && RecordToken([]byte(c.value.data)) != b.Seen:`, "case false:",
		}},
		{"TestNobodyPolls", real, "20 callers wait 2.5 s for another node", mutant{}},
		{"TestGetManyOnTwoNodes", real, "2 nodes GetMany the same 1,000 keys, 300 missing: single server, Cluster", mutant{
			"each key is read on its own", "refill.go", "if s, err, ok := g.sight(c); ok {", "if s, err, ok := g.sight(c); ok && false {",
		}},
		{"TestXFetchDistribution", memory, "early refresh at drawn moments, 1 and 8 nodes", mutant{
			"the fleet refreshes without the lease", "refill.go", "\tcase c.behind && !l.flights.wanted(c):", "\tcase c.behind:\n\t\treturn false, false, l.alone(c)\n\tcase c.behind && !l.flights.wanted(c):",
		}},
		{"TestXFetchDrawsOnce", memory, "early refresh of a value that is read again each 10 ms", mutant{
			"the moment is drawn at each read", "local.go", "maphash.String(l.seed, token)>>11", "rand.Uint64()>>11",
		}},
	}},
	{"G2", "After Invalidate or Expire has returned, no load that began before it is served as fresh.", []proof{
		{"TestInvalidateDuringALoadElsewhere", real, "Invalidate while another node loads", mutant{
			"Invalidate leaves the claim", redis + "invalidate.lua", "redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])", "redis.call('DEL', KEYS[1], KEYS[2])",
		}},
		{"TestExpireVoidsALoadElsewhere", memory, "Expire while another node loads", mutant{
			"Expire leaves lease and claim", "memory.go", "c.lease, c.claim = timed{}, timed{}\n\t\tif b :=", "if b :=",
		}},
		{"TestALateInvalidateIsCarriedOutHereToo", memory, "an Invalidate that Redis takes only at a second try", mutant{
			"the second try does not drop L1", "void.go", "\tl.drop(key) // a Get", "\t// a Get",
		}},
		{"TestAFlightAcrossABreakOfTheSubscription", memory, "an Invalidate missed by the flight of another node", mutant{
			"the return does not detach flights", "void.go", "\t\tl.flights.detachAll() // what", "\t\t// what",
		}},
		{"TestInvalidateIsDoneWhenItReturns", memory, "Gets from inside and right behind Invalidate", mutant{
			"a flight is not detached", "void.go", "\tl.flights.detach(key)\n", "",
		}},
		{"TestAReadOvertakenByAnInvalidate", memory, "an announcement between the reply of a GET and L1", mutant{
			"no epoch of the key", "local.go", "\tl.stripes[h%epochStripes].Add(1)\n", "\t_ = h\n",
		}},
		{"TestAReadAcrossABreakOfTheSubscription", memory, "an announcement lost with the subscription", mutant{
			"no epoch of the subscription", "local.go", "return e.at.session == l.session.Load() && l.unvoided(e)", "return l.unvoided(e)",
		}},
		{"TestInvalidateTagDuringALoad", memory, "InvalidateTag while a load is under way whose tags nobody knows yet", mutant{
			"L1 does not compare", "local.go", " && (e.more == nil || l.tagVoided(e) <= e.at.tags)", "",
		}},
		{"TestInvalidateTag", memory, "InvalidateTag whose push is lost, on a node without L1", mutant{
			"the mark is not compared", "tags.go", "if !s.Known || e.life.began <= micros(s.Invalidated) {", "if !s.Known {",
		}},
		{"TestLostMark", memory, "the store has lost the mark of a tag", mutant{
			"a tag without a mark is taken for valid", "tags.go", "if !s.Known || e.life", "if e.life",
		}},
		{"TestInvalidateTagOfAnySize", real, "InvalidateTag of 10 and of 5,000 values (100,000 here), and during a bulk load", mutant{}},
		{"TestDelayedMessages", real, "messages of the subscription 100 ms late", mutant{}},
		{"TestLostMessages", real, "messages of the subscription lost unnoticed", mutant{
			"LocalTTL is not heeded", "local.go", "e.trusted = min(e.life.fresh, now+l.ttl)", "e.trusted = e.life.fresh",
		}},
	}},
	{"G3", "An overtaken, paused or resumed filler never overwrites a newer value.", []proof{
		{"TestFrozenLoader", real, "SIGSTOP of the loading process past its lease, SIGCONT beside and behind its heir", anyMayPublish},
		{"TestAnOvertakenFillerDoesNotPublish", memory, "a load that outlives its lease, and its heir", mutant{
			"publish does not look at the claim", "memory.go", `if c.claim.data != p.Token || p.Token == "" || !p.Began.IsZero() && !p.Began.Equal(c.claim.began) {`, "if false {",
		}},
		{"TestFailoverTwoHolders", real, "Sentinel failover to a replica that never saw the lease: two nodes hold it", anyMayPublish},
		{"TestFailoverTwoLockHolders", real, "the same with a user's lock: the fence rises", mutant{
			"the fence is a bare counter", redis + "lock.lua", "fence = math.max(fence + 1, micros())", "fence = fence + 1",
		}},
	}},
	{"G4", "A holder that dies or freezes is replaced within LockTTL + 500 ms; nobody waits longer than its own context.", []proof{
		{"TestKilledLoader", real, "kill -9 of the loading process", mutant{
			"a waiter sleeps longer than the lease lives", "stale.go", "return left + 2*time.Millisecond", "return 3*left + time.Second",
		}},
		{"TestFrozenHolderOfALock", real, "SIGSTOP of the holder of a user's lock", mutant{
			"a lock is freed without a look at whose it is", redis + "unlock.lua", "if redis.call('MGET', KEYS[1])[1] ~= ARGV[1] then return 0 end", "",
		}},
		{"TestCallersLeaveOnTheirOwn", memory, "callers with contexts of their own", mutant{
			"a caller waits for the load", "loader.go", "\tcase <-ctx.Done():\n\t\treturn answer[V]{err: ctx.Err()}, true\n\t}\n\ta := c.answer", "\t}\n\ta := c.answer",
		}},
	}},
	{"G5", "Nothing older than TTL + StaleFor (+ StaleIfError on failure), from the start of its load, is served.", []proof{
		{"FuzzLife", memory, "lives of all sorts, judged at all moments", mutant{
			"TTL + StaleFor is not the end", "stale.go", "case now < l.stale:", "case now < l.dead:",
		}},
		{"TestStaleOnErrorKeepsItsBound", memory, "a failing refresh across the end of StaleIfError", mutant{
			"what is spare has no end", "refill.go", "if e.life.at(l.now()) <= Spare && l.local.unvoided(e) && !c.forced {", "if l.local.unvoided(e) && !c.forced {",
		}},
		{"TestClockSetBackEndsValues", real, "the clock of Redis set back by an hour: values", mutant{
			"an entry from the future is a hit", "loader.go", " || e.life.began > now+maxFuture", "",
		}},
		{"TestClockSetBackFreesLeases", real, "the clock of Redis set back by an hour: leases and back-offs", mutant{
			"a lease may live for ever", redis + "begin.lua", "left > ARGV[5] + ARGV[8] and", "false and",
		}},
		{"TestNodesAnHourOff", real, "the clocks of the nodes an hour off that of Redis, each way", mutant{}},
		{"TestClockIsSetUnderTraffic", real, "the clock of Redis set by an hour under traffic, each way", mutant{}},
	}},
	{"G6", "A cancelled, panicking, hanging or failing load harms no other key, and no other caller beyond sharing its error.", []proof{
		{"TestTheLastCallerTakesTheLoadAlong", memory, "callers that leave, one by one", mutant{
			"a cancelled load leaves a back-off", "refill.go", "if cause := context.Cause(c.ctx); cause != nil {\n\t\tl.emit(Event{Kind: EventAbandoned", "if cause := context.Cause(c.ctx); false {\n\t\tl.emit(Event{Kind: EventAbandoned",
		}},
		{"TestPanicAndGoexitAreErrors", memory, "panic and runtime.Goexit in the load function", mutant{
			"Goexit is taken for a value", "refill.go", "\tr := loaded[V]{err: errGoexit, panicked: true}", "\tr := loaded[V]{}",
		}},
		{"TestLoadTimeout", memory, "a load that hangs, and does not heed its ctx", mutant{
			"no time-out", "refill.go", "l.cfg.LoadTimeout, errLoadTimeout)", "time.Hour, errLoadTimeout)",
		}},
		{"TestAFailureFromBeforeAnInvalidate", memory, "a load that fails after an Invalidate, while there is no store", mutant{
			"a failure has no epoch", "failure.go", "left <= 0 || past.stripe != stripe", "left <= 0",
		}},
		{"TestFailingLoad", real, "a failing database, 80 callers in 8 processes, a back-off that grows", mutant{
			"no back-off in the store", redis + "fail.lua", "redis.pcall('SET', KEYS[2], '!' .. ARGV[4], 'PX', ARGV[5])", "",
		}},
	}},
	{"G7", "Redis slow, gone, failing over, restarted empty, full, or answering garbage: Get answers within its bounds, with at most MaxLoads loads at a time per process.", []proof{
		{"TestOutage", real, "Redis killed and back empty, frozen and back: 8 processes, 1,000 hot keys", mutant{
			"a load without the store takes no place of MaxLoads", "refill.go", "free, _, err := l.slot(c, nil, patience.C)", "free, err := func() {}, error(nil)",
		}},
		{"TestBreaker", memory, "a store that does not answer", mutant{
			"the breaker never opens", "breaker.go", "b.failed.Add(1) >= breakAfter", "false",
		}},
		{"TestMaxLoads", memory, "20 Gets of cold keys at MaxLoads 4, with and without a store", mutant{
			"nobody is shed", "refill.go", "case <-impatient:\n", "case <-make(chan int):\n",
		}},
		{"TestMaxWaiters", memory, "more callers than may wait", mutant{
			"nobody is refused", "flight.go", "f.waiting >= f.room && outerFill(ctx) == nil", "false",
		}},
		{"TestFullRedis", real, "a Redis at maxmemory", mutant{}},
		{"TestCutReplies", real, "replies and announcements cut in the middle", mutant{}},
		{"TestHalfOpenConnections", real, "Redis dies behind a network that swallows everything", mutant{}},
		{"TestForeignBytes", real, "foreign types, damaged records, other versions under our keys", mutant{
			"the sum is not checked", "record.go", "binary.BigEndian.Uint32(b[offSum:]) != crc32.Checksum(b[offToken:], castagnoli)", "false",
		}},
		{"TestFailoverUnderTraffic", real, "kill -9 of the master under traffic: Sentinel, Cluster of 3 + 3", mutant{}},
		{"TestSlotMovesUnderTraffic", real, "the slot of the hot key moves between masters of a Cluster", mutant{}},
		{"TestReadOnlyReplica", real, "a server that is a read-only replica, and is promoted", mutant{
			"a failed Invalidate is forgotten", "void.go", "\t\tl.voids.add(full, voiding{soft: soft, until: time.Now().Add(l.longestLife())})\n", "",
		}},
		{"TestRestartEmptyUnderTraffic", real, "kill -9 of Redis under traffic, back empty at once", mutant{}},
		{"TestServerStalls", real, "CLIENT PAUSE WRITE, DEBUG SLEEP, SCRIPT FLUSH under traffic", mutant{
			"a forgotten script is an error", "backend/goredis/script.go", "\tif unknown(cmd) {\n\t\tcmd = c.Eval", "\tif false {\n\t\tcmd = c.Eval",
		}},
	}},
	{"G8", "Nothing is left behind by any path; Close waits LoadTimeout at most and names what still runs.", []proof{
		{"TestLostReplies", real, "the reply to each step lost after the server carried it out, with and without a client that tries again", mutant{
			"a released lease stays", redis + "release.lua", "if not free(KEYS[2], KEYS[3], ARGV[1]) then return 0 end", "if true then return 0 end",
		}},
		{"TestGoredisLeavesNothing", real, "ends of listeners, watchers and Loaders", mutant{
			"the last listener does not end the session", "backend/goredis/hub.go", "if h.users--; h.users == 0 {", "if h.users--; h.users < 0 {",
		}},
		{"TestClose", memory, "Close beside refreshes, loads, and one that does not end", mutant{
			"a refresh is not cancelled", "flight.go", "\t\tif f.needless(c) {\n\t\t\tc.cancel(errClosing)", "\t\tif false {\n\t\t\tc.cancel(errClosing)",
		}},
	}},
}
