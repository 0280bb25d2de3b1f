//go:build unix

package main

// promise is one guarantee, in the words of README.md, with the tests that fail if refill breaks the guarantee.
type promise struct {
	name, text string
	proofs     []proof
}

type proof struct {
	test, dir string // dir is the package, from the root of the repository
	injected  string
	mutant    mutant
}

// mutant is a change of refill's code that breaks the promise. The test of the proof must then fail.
type mutant struct{ name, file, old, new string }

const (
	memory = "."                 // tests with nodes over a store in memory, in a synctest bubble
	real   = "internal/realtest" // tests with real processes and servers

	redis   = "backend/goredis/lua/"
	store   = "backend/memory/store.go"
	flight  = "internal/flight/flight.go"
	group   = "internal/flight/group.go"
	l1      = "internal/l1/l1.go"
	epoch   = "internal/l1/epoch.go"
	breaker = "internal/breaker/store.go"
)

// anyMayPublish lets a node publish without a claim.
var anyMayPublish = mutant{
	"publish ignores the claim", redis + "publish.lua",
	"if claimant ~= ARGV[1] or ARGV[9] ~= '' and ARGV[9] ~= seconds .. '.' .. micros then", "if false then",
}

var promises = []promise{
	{"G1–G8", "together, on the whole history of a fleet.", []proof{
		{"TestHistory", real, "4 processes Get, invalidate, expire and refresh 5 keys while processes are killed and " +
			"frozen, " +
			"Redis is killed and frozen, connections are slow, cut, refused and swallowed, replies are lost, subscriptions " +
			"dropped, scripts flushed, foreign bytes planted; [package history](../internal/realtest/history) judges it",
			anyMayPublish},
	}},
	{"G1", "Redis healthy: one load per key per expiry in the whole cluster.", []proof{
		{"TestOneLoadPerExpiry", real, "8 processes × 200 callers, 10 s, TTL 1 s, with and without StaleFor", mutant{
			"a refill that loses the lease does not wait", "acquire.go",
			"\tr.awaited = a.Holder\n", "\tif a.Holder != \"\" {\n\t\treturn r.withoutStore()\n\t}\n",
		}},
		{"TestLoadOutlastsTTLAndLock", real, "a load of 3 s, TTL and LockTTL 1 s, 8 processes", mutant{
			"the lease is not renewed in time", "stale.go", "return ttl / 3 }", "return ttl * 2 }",
		}},
		{"TestAPublishBetweenLookupAndAcquire", memory, "a publication between the read and the lease of another " +
			"node", mutant{
			"Acquire ignores the record", store,
			`case i.value.data != "" && driver.RecordToken([]byte(i.value.data)) != r.Seen:`, "case false:",
		}},
		{"TestWaitersDoNotPoll", real, "20 callers wait 2.5 s for another node", mutant{}},
		{"TestGetManyOnTwoNodes", real, "2 nodes GetMany the same 1,000 keys, 300 missing: single server, Cluster", mutant{
			"each key is read on its own as well", "refill.go", "} else if s != nil {", "} else if s != nil && false {",
		}},
		{"TestXFetchDistribution", memory, "early refresh at random moments, 1 and 8 nodes", mutant{
			"the fleet refreshes without the lease", "acquire.go",
			"\tcase r.flight.Unawaited():\n",
			"\tcase r.flight.Unawaited():\n\t\tif true {\n\t\t\treturn r.withoutStore()\n\t\t}\n",
		}},
		{"TestXFetchDrawsOnce", memory, "early refresh of a value that is read again each 10 ms", mutant{
			"the moment is drawn at each read", "entry.go", "uniform(l.l1.Hash(r.Token))", "uniform(rand.Uint64())",
		}},
	}},
	{"G2", "After Invalidate or Expire has returned, no load that began before it is served as fresh.", []proof{
		{"TestInvalidateDuringALoadElsewhere", real, "Invalidate while another node loads", mutant{
			"Invalidate leaves the claim", redis + "invalidate.lua",
			"redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])", "redis.call('DEL', KEYS[1], KEYS[2])",
		}},
		{"TestExpireRejectsALoadElsewhere", memory, "Expire while another node loads", mutant{
			"Expire leaves lease and claim", store,
			"i.lease, i.claim = expiring{}, expiring{}\n\t\tif b :=", "if b :=",
		}},
		{"TestAGetCompletesAPendingInvalidate", memory, "an Invalidate that Redis accepts only at a second try", mutant{
			"a Get reads before the second try", "refill.go", "\tif !r.retries.Empty() {\n", "\tif false {\n",
		}},
		{"TestAFlightAcrossABreakOfTheSubscription", memory, "an Invalidate missed by the flight of another node", mutant{
			"flights can be joined after the subscription returned", "invalidate.go", "\tl.flights.ForgetAll() ", "\t",
		}},
		{"TestInvalidateIsDoneWhenItReturns", memory, "Gets during and right after Invalidate", mutant{
			"a flight can still be joined", "invalidate.go", "\tl.flights.Forget(key)\n", "",
		}},
		{"TestAReadOvertakenByAnInvalidate", memory, "an announcement between the reply of a GET and L1", mutant{
			"no epoch of the key", epoch, "\t\ts.keys[h%keyStripes].Add(1)\n", "\t\t_ = s\n",
		}},
		{"TestAReadAcrossABreakOfTheSubscription", memory, "an announcement lost with the subscription", mutant{
			"no epoch of the subscription", epoch,
			"return e.subscription == c.subscription.Load() && s.notInvalidated(hash, e.epoch, e.tags)",
			"return s.notInvalidated(hash, e.epoch, e.tags)",
		}},
		{"TestInvalidateTagDuringALoad", memory, "InvalidateTag during a load whose tags are not known yet", mutant{
			"L1 ignores tags", epoch, " && (tags == nil || !s.tagInvalidated(tags))", "",
		}},
		{"TestInvalidateTag", memory, "InvalidateTag whose announcement is lost, on a node without L1", mutant{
			"the tag state is ignored", "tags.go",
			"if !s.Known || lifeIn(e).began <= micros(s.Invalidated) {", "if !s.Known {",
		}},
		{"TestLostTagState", memory, "the store has lost the state of a tag", mutant{
			"an unknown tag counts as valid", "tags.go", "if !s.Known || lifeIn(e)", "if lifeIn(e)",
		}},
		{"TestInvalidateTagOfAnySize", real, "InvalidateTag of 10 and of 5,000 values (100,000 here), and during a bulk load",
			mutant{}},
		{"TestDelayedMessages", real, "messages of the subscription 100 ms late", mutant{}},
		{"TestLostMessages", real, "messages of the subscription lost unnoticed", mutant{
			"LocalTTL is ignored", "entry.go",
			"e.TrustUntil = min(e.TrustUntil, life.freshUntil)", "e.TrustUntil = life.freshUntil",
		}},
	}},
	{"G3", "An overtaken, paused or resumed filler never overwrites a newer value.", []proof{
		{"TestFrozenLoader", real, "SIGSTOP of the loading process past its lease, SIGCONT during and after the next load",
			anyMayPublish},
		{"TestAnOvertakenFillerDoesNotPublish", memory, "a load that outlives its lease, and the next holder", mutant{
			"publish ignores the claim", store,
			`if i.claim.data != r.Token || r.Token == "" || !r.Began.IsZero() && !r.Began.Equal(i.claim.began) {`, "if false {",
		}},
		{"TestFailoverTwoHolders", real, "Sentinel failover to a replica that never saw the lease: two nodes hold it",
			anyMayPublish},
		{"TestFailoverTwoLockHolders", real, "the same with a user's lock: the fence rises", mutant{
			"the fence is a bare counter", redis + "lock.lua", "fence = math.max(fence + 1, micros())", "fence = fence + 1",
		}},
	}},
	{"G4", "A holder that dies or freezes is replaced within LockTTL + 500 ms; no caller waits longer than its " +
		"own context.",
		[]proof{
			{"TestKilledLoader", real, "kill -9 of the loading process", mutant{
				"a waiter waits longer than the lease lives", "stale.go",
				"return left + 2*time.Millisecond", "return 3*left + time.Second",
			}},
			{"TestFrozenHolderOfALock", real, "SIGSTOP of the holder of a user's lock", mutant{
				"Unlock ignores the token", redis + "unlock.lua",
				"if redis.call('MGET', KEYS[1])[1] ~= ARGV[1] then return 0 end", "",
			}},
			{"TestCallersLeaveOnTheirOwn", memory, "callers with contexts of their own", mutant{
				"a caller waits for the load", flight,
				"\tcase <-ctx.Done():\n\t\treturn a, ctx.Err()\n\tcase <-f.done:\n\t\tif f.delivered() {",
				"\tcase <-f.done:\n\t\tif f.delivered() {",
			}},
		}},
	{"G5", "Nothing older than TTL + StaleFor (+ StaleIfError on failure), from the start of its load, is " +
		"served.", []proof{
		{"FuzzLife", memory, "lives of all sorts, judged at all moments", mutant{
			"TTL + StaleFor is not the end", "stale.go", "case now < l.staleUntil:", "case now < l.end:",
		}},
		{"TestStaleOnErrorKeepsItsBound", memory, "a failing refresh across the end of StaleIfError", mutant{
			"StaleIfError has no end", "outage.go",
			"if lifeIn(e).at(r.now()) <= errorOnly && r.l1.NotInvalidated(e)", "if r.l1.NotInvalidated(e)",
		}},
		{"TestClockSetBackEndsValues", real, "the clock of Redis set back by an hour: values", mutant{
			"an entry from the future is a hit", l1, " || now < e.NotBefore", "",
		}},
		{"TestClockSetBackFreesLeases", real, "the clock of Redis set back by an hour: leases and back-offs", mutant{
			"a lease may live for ever", redis + "acquire.lua", "left > ARGV[5] + ARGV[8] and", "false and",
		}},
		{"TestNodesAnHourOff", real, "the clocks of the nodes an hour off that of Redis, each way", mutant{}},
		{"TestClockIsSetUnderTraffic", real, "the clock of Redis set by an hour under traffic, each way", mutant{}},
	}},
	{"G6", "A cancelled, panicking, hanging or failing load harms no other key, and no other caller beyond " +
		"sharing its error.",
		[]proof{
			{"TestTheLastCallerCancelsTheLoad", memory, "callers that leave, one by one", mutant{
				"a cancelled load leaves a back-off", "publish.go",
				"cause != nil {\n\t\tr.emit(Event{Kind: EventLoadAbandoned",
				"cause != nil && false {\n\t\tr.emit(Event{Kind: EventLoadAbandoned",
			}},
			{"TestPanicAndGoexitAreErrors", memory, "panic and runtime.Goexit in the load function", mutant{
				"Goexit counts as a value", "load.go",
				"\t\treturn loaded[V]{err: errGoexit, panicked: true}", "\t\treturn loaded[V]{}",
			}},
			{"TestLoadTimeout", memory, "a load that hangs, and ignores its ctx", mutant{
				"no time-out", "load.go", "r.cfg.LoadTimeout, errLoadTimeout)", "time.Hour, errLoadTimeout)",
			}},
			{"TestAFailureFromBeforeAnInvalidate", memory, "a load that fails after an Invalidate, while there is no " +
				"store", mutant{
				"a failure has no epoch", "backoff.go", "left <= 0 || past.epoch != epoch", "left <= 0",
			}},
			{"TestFailingLoad", real, "a failing database, 80 callers in 8 processes, a back-off that grows", mutant{
				"no back-off in the store", redis + "fail.lua",
				"redis.pcall('SET', KEYS[2], ARGV[6] .. ARGV[4], 'PX', ARGV[5])", "",
			}},
		}},
	{"G7", "Redis slow, gone, failing over, restarted empty, full, or answering garbage: Get answers within its " +
		"bounds, with at most MaxLoads loads at a time per process.", []proof{
		{"TestOutage", real, "Redis killed and back empty, frozen and back: 8 processes, 1,000 hot keys", mutant{
			"a load without the store takes no load slot", "outage.go",
			"free, _, err := r.loadSlot(nil, patience.C)", "free, err := func() {}, error(nil)",
		}},
		{"TestBreaker", memory, "a store that does not answer", mutant{
			"the breaker never opens", breaker, "b.failed.Add(1) >= openAfter", "false",
		}},
		{"TestMaxLoads", memory, "20 Gets of cold keys at MaxLoads 4, with and without a store", mutant{
			"no load is refused", "load.go", "case <-giveUp:\n", "case <-make(chan int):\n",
		}},
		{"TestMaxWaiters", memory, "more callers than may wait", mutant{
			"no caller is refused", group, "n >= g.maxWaiters && !exempt", "false",
		}},
		{"TestFullRedis", real, "a Redis at maxmemory", mutant{}},
		{"TestCutReplies", real, "replies and announcements cut in the middle", mutant{}},
		{"TestHalfOpenConnections", real, "Redis dies behind a network that swallows everything", mutant{}},
		{"TestForeignBytes", real, "foreign types, damaged records, other versions under our keys", mutant{
			"the sum is not checked", "driver/record.go",
			"binary.BigEndian.Uint32(b[offSum:]) != crc32.Checksum(b[offToken:], castagnoli)", "false",
		}},
		{"TestFailoverUnderTraffic", real, "kill -9 of the master under traffic: Sentinel, Cluster of 3 + 3", mutant{}},
		{"TestSlotMovesUnderTraffic", real, "the slot of the hot key moves between masters of a Cluster", mutant{}},
		{"TestReadOnlyReplica", real, "a server that is a read-only replica, and is promoted", mutant{
			"a failed Invalidate is forgotten", "invalidate.go", "\t\tl.retryLater(left, false, expire)\n", "",
		}},
		{"TestRestartEmptyUnderTraffic", real, "kill -9 of Redis under traffic, back empty at once", mutant{}},
		{"TestServerStalls", real, "CLIENT PAUSE WRITE, DEBUG SLEEP, SCRIPT FLUSH under traffic", mutant{
			"a forgotten script is an error", "backend/goredis/script.go",
			`redis.HasErrorPrefix(cmd.Err(), "NOSCRIPT")`, "false",
		}},
	}},
	{"G8", "Nothing is left behind by any path; Close waits LoadTimeout at most and names what still runs.", []proof{
		{"TestLostReplies", real, "the reply to each step lost after the server carried it out, with and without a " +
			"client that " +
			"tries again", mutant{
			"a released lease stays", redis + "release.lua",
			"if not free(KEYS[2], KEYS[3], ARGV[1]) then return 0 end", "if true then return 0 end",
		}},
		{"TestGoredisLeavesNothing", real, "ends of listeners, watchers and Loaders", mutant{
			"the last listener does not end the subscription", "backend/goredis/pubsub.go",
			"if p.users--; p.users == 0 {", "if p.users--; p.users < 0 {",
		}},
		{"TestClose", memory, "Close during refreshes, loads, and a load that does not end", mutant{
			"a refresh is not cancelled", group,
			"\t\tif f.background && f.waiters == 0 {\n\t\t\tf.cancel(ErrClosed)", "\t\tif false {\n\t\t\tf.cancel(ErrClosed)",
		}},
	}},
}
