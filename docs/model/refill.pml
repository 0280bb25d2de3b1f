/*
 * refill.pml - the protocol of refill as a model that spin searches to its end.
 *
 * One key, one Redis, a few nodes. The scripts in backend/goredis/lua are atomic, so each of them is one step here.
 * Between any two steps anything else may happen. That is also how a process is paused: it takes no step while other
 * processes do, and while its lease and its claim run out.
 *
 * Time has no length here. What ends by time may end at any moment and in any order: a superset of what can happen.
 *
 * What may happen in a run, each by -D:
 *   NODES=n GETS=n   Gets 1..GETS, one after the other on nodes 0..NODES-1 and round again (default 2 and 3)
 *   INVALIDATIONS=n  n Invalidates, each after a write to the database (default 1),
 *   AT=n             ... on the nodes from n on (default 0)
 *   EXPIRE           the Invalidates are Expires: the value stays, marked stale
 *   STALE            StaleFor is not 0: stale values are served, and refreshed in the background
 *   ERROR_ONLY       ... and some values are past StaleFor, and kept for StaleIfError: a Get that finds one waits
 *   TTL=n            n values grow old
 *   FAILS            loads fail, or are abandoned by their callers
 *   LASTING          notes and back-offs do not end by time
 *   LARGE            records do not travel with their announcement
 *   FAULTS           a lease or a claim may run out at any moment, also while its holder loads or is paused
 *   CYCLES           no renewals, so that a search for cycles finds others
 *   DEATH            one node may die at any moment
 *   LOSSY=n          n times a subscription breaks, loses announcements, and comes back
 *   CUT              node 0 loses the store once, and reaches it again. A call that gets no answer has run, or runs
 *                    later, or never runs. The database also changes without an Invalidate
 *
 * What must hold is stated where it is checked, by the names G1.. of the README. The table in docs/model/README.md
 * lists the rules that can be taken out by -D, and what goes wrong without each.
 */

#ifndef NODES
#define NODES 2
#endif
#ifndef GETS
#define GETS 3
#endif
#ifndef INVALIDATIONS
#define INVALIDATIONS 1
#endif
#ifndef AT
#define AT 0
#endif

/* A token names one fill, and its record. A flight loads at most once, so the token is the number of its Get. */
#define NONE 0
#define node(token) ((token - 1) % NODES)

/* Fail leaves the number of the failed load in the place of the lease, as a note or as a back-off. */
#define NOTE 50     /* one node has failed. The lease is free, and the fill that takes it learns of the failure */
#define BACKOFF 100 /* two nodes have failed in a row. No fill gets the lease */
#define isHeld(lease) (lease != NONE && lease < NOTE)
#define isNote(lease) (lease > NOTE && lease < BACKOFF)
#define isBackOff(lease) (lease > BACKOFF)

/*
 * Announcements. Fail announces failed if it leaves a note, and failedForAll if it leaves a back-off. The node itself
 * makes the message subscribed, when its subscription works again.
 */
mtype = { filled, failed, failedForAll, released, invalidated, subscribed };
/* The phase of a fill. leased: a refresh between its two steps. */
mtype = { idle, leased, loading };
/* A flight without waiters: a refresh, or a flight that has served all its callers a stale value. */
mtype = { refresh, served };
/* A subscription. broken: the node does not know it yet. */
mtype = { connected, broken, down };

/* ---- The store: what Redis holds under the key. ---- */

byte value;        /* token of the record */
bool markedStale;  /* Expire has marked the record stale */
byte lease;        /* the refill lock: which fill may load now. For efficiency. */
byte claim;        /* which load may be stored. For correctness. */
bool leaseAwaited; /* the '+' in the lease: a flight waits for the holder. It ends with the lease */

chan inbox[NODES] = [8] of { mtype, byte, byte }; /* announcements on their way, per node and in order */

/* ---- The nodes. ---- */

byte l1[NODES];            /* token of the entry in L1 */
bool l1MarkedStale[NODES]; /* it was read as marked stale */
bool l1Superseded[NODES];  /* another record is stored: served as stale */
byte l1Epoch[NODES];       /* epoch of the entry, noted before its read began */
byte epoch[NODES] = 1;     /* current epoch; raised by all that makes entries invalid. 0 is never current */
byte flight[NODES];        /* the flight that a Get may join */
byte heldBack[NODES];      /* the failed load because of which this node does not load now */
bool forAll[GETS + 1];     /* the failure of this load was the second in a row, so it counts for all nodes */
mtype subscription[NODES] = connected;
bool dead[NODES];

/* A flight that waits. Only its first announcement counts: then it asks the store, and forgets the others. */
bool waits[GETS + 1];
mtype announced[GETS + 1];
byte announcedToken[GETS + 1];
bool overdue[GETS + 1];     /* the lease that it waits for has run out: its timer is due */
byte holder[GETS + 1];      /* the fill that it waits for */
mtype phase[GETS + 1] = idle;
mtype background[GETS + 1]; /* 0: a caller waits for this flight */

/* ---- Variables for the checks only. ---- */

byte db;                /* version in the database; every write raises it */
byte saw[GETS + 1];     /* version that the load of a token has read */
byte began[GETS + 1];   /* position of the load in the order of the claims */
bool aged[GETS + 1];    /* TTL has passed since the load began. The same on every node: the record holds the time */
byte claims;
byte lastStored;        /* began of the newest record that was ever stored */
byte invalidBelow;      /* versions below it must no longer enter the store as fresh */
byte promised[NODES];   /* versions below it must not be served as fresh to a new Get on this node ... */
byte promisedL1[NODES]; /* ... or, after a subscription has returned, not by L1 */
byte wants[GETS + 1];   /* the same for all callers that have joined this flight */
bool due = true;        /* a load is due: no value, an old or invalidated one, or a load that ended without one */
bool backingOff;        /* two nodes have failed, and the back-off is not over */
bool hasFailed[NODES];  /* a load of this node has failed */
byte sick;              /* how many nodes have failed loads */
byte asked;             /* loads since the last value, Invalidate, abandoned load, or end of a note or back-off */

/* ---- What keeps the search small. ---- */

bool started[GETS + 1]; /* the Get has begun: the next Get of its node may begin */
byte openGets[NODES];   /* Gets of a node that have not ended */

#ifdef LOSSY
byte breaks = LOSSY;
#endif
#ifdef CUT
bool cut;                /* node 0 gets no answer from the store */
bool unconfirmed[NODES]; /* the entry in L1 may be missing in the store */
bool pending[NODES];     /* an Invalidate of this node had no answer, and has to be repeated ... */
byte pendingVersion;     /* ... for this version */
bool writes = true;      /* one more write without an Invalidate */
#endif

byte i; /* loop counter within one step; always left at 0 */

#define fresh(token, stale) (token != NONE && !aged[token] && !(stale))
#ifdef CUT
#define isCut(n) (cut && n == 0)
#ifdef UNCONFIRMED_IS_HIT
#define confirmed(n) true
#else
#define confirmed(n) (!unconfirmed[n])
#endif
#else
#define isCut(n) false
#define confirmed(n) true
#endif
#define notInvalidated(n) (l1[n] != NONE && l1Epoch[n] == epoch[n])
#define valid(n) (notInvalidated(n) && confirmed(n) && subscription[n] != down)

/* The epoch to note before a read begins: never current while announcements may be missed. */
#define epochOf(n) (subscription[n] == down -> 0 : epoch[n])

/* On a node without open Gets, announcements change nothing. */
#define receives(n) (subscription[n] == connected && !dead[n] && openGets[n] > 0)

/* ---- The scripts: one step each. ---- */

/* The announcement of a release also has a token. No node uses it, so it is left out here. */
inline announce(kind, token, replaced)
{
	i = 0;
	do
	:: i < NODES && receives(i) ->
		assert(nfull(inbox[i])); /* otherwise the model is too small; the protocol is not wrong */
		inbox[i]!kind, token, replaced;
		i++
	:: i < NODES && !receives(i) -> i++
	:: i == NODES -> i = 0; break
	od
}

inline freeLease()
{
	lease = NONE;
	leaseAwaited = false
}

/* A lease that already belongs to the token stays as it is, with its '+'. */
inline takeLease(token)
{
#ifdef LEASE_SET_AGAIN
	leaseAwaited = false;
#else
	if :: lease != token -> leaseAwaited = false :: else fi;
#endif
	lease = token
}

/* common.lua, free. had: lease or claim belonged to the token. */
inline free(token, had)
{
	had = (lease == token || claim == token);
	if :: lease == token -> freeLease() :: else fi;
	if :: claim == token -> claim = NONE :: else fi
}

/* acquire.lua: what it compares. */
#ifdef NO_VALUE_CHECK
#define changed(seen) false
#else
#define changed(seen) (value != NONE && value != seen)
#endif
#ifdef NO_LEASE_CHECK
#define heldByAnother(token) false
#else
#define heldByAnother(token) (isHeld(lease) && lease != token)
#endif

/* acquire.lua, if the value is the one that was seen and no other fill has the lease: take both in one act. */
inline acquireBoth(token)
{
#ifndef FAULTS
	assert(claim == NONE || dead[node(claim)]); /* G1: one load at a time ... */
	assert(!fresh(value, markedStale));         /* ... none while there is a fresh value ... */
	assert(due);                                /* ... and one per expiry */
	assert(!backingOff);                        /* G6: after two failures, none before the back-off is over */
	due = false;
#ifdef FAILS
	asked++;
	assert(asked <= 2);                         /* G6: at most two loads per back-off */
#endif
#endif
	takeLease(token);
	claim = token;
	claims++;
	began[token] = claims;
	saw[token] = db; /* the load reads the database as early as possible: a later read would see newer data */
	phase[token] = loading
}

/* publish.lua: when it may skip the announcement. The lease must still be there: one that ran out has lost its '+'. */
#ifdef NO_AWAITED_CHECK
#define unawaited(token) true
#else
#ifdef SILENT_WITHOUT_LEASE
#define unawaited(token) (!leaseAwaited)
#else
#define unawaited(token) (lease == token && !leaseAwaited)
#endif
#endif

/* Nodes may still remember a failure of the key. */
#ifdef SILENT_AFTER_FAILURE
#define afterFailure(n) false
#else
#define afterFailure(n) (heldBack[n] != NONE || earlier != NONE)
#endif

/* publish.lua. stored: the record was stored. */
inline publish(token, replaced, stored)
{
#ifdef NO_CLAIM_CHECK
	stored = true;
#else
	stored = (claim == token);
#endif
	if
	:: stored ->
		assert(began[token] > lastStored);   /* G3: never over a newer one */
		assert(saw[token] >= invalidBelow); /* G2: never a version that was invalidated */
		lastStored = began[token];
		asked = 0;
		claim = NONE;
		value = token;
		markedStale = false;
		if
		:: replaced == NONE && unawaited(token) && !afterFailure(n) /* PublishRequest.AnnounceIfAwaited */
		:: else -> announce(filled, token, replaced)
		fi;
		freeLease() /* the lease of any fill */
	:: else ->
#ifndef REJECT_KEEPS_LEASE
		if
		:: lease == token ->
			freeLease();
#ifndef SILENT_REJECT
			announce(released, NONE, NONE)
#endif
		:: else
		fi
#endif
	fi;
	heldBack[n] = NONE;
	assert(lease != token); /* the end of a fill leaves no lease behind */
	began[token] = 0;
	phase[token] = idle
}

/* The failure of this load is the second in a row, so it counts for all nodes. */
#ifdef FIRST_FAILURE_HOLDS_ALL
#define second() true
#else
#define second() (earlier != NONE)
#endif

/*
 * The node remembers its failure, unless the key was invalidated here during the load. Then comes fail.lua. The lease
 * of another fill stays.
 */
inline fail(n, token, had)
{
	if :: epochRead == epoch[n] -> heldBack[n] = token :: else fi;
	if :: !hasFailed[n] -> hasFailed[n] = true; sick++ :: else fi;
	free(token, had);
	if
	:: had ->
		due = true;
		if
		:: second() ->
			forAll[token] = true;
			backingOff = true;
#ifndef NO_BACKOFF
			if :: !isHeld(lease) -> lease = BACKOFF + token :: else fi;
#endif
			announce(failedForAll, token, NONE)
		:: else ->
			if :: !isHeld(lease) && !isBackOff(lease) -> lease = NOTE + token :: else fi;
			announce(failed, token, NONE)
		fi
	:: else
	fi;
	had = false;
	began[token] = 0;
	phase[token] = idle
}

/* release.lua. */
inline release(token, had)
{
	free(token, had);
	if
	:: had ->
		if :: phase[token] == loading -> due = true; asked = 0 :: else fi;
#ifndef SILENT_RELEASE
		announce(released, NONE, NONE)
#endif
	:: else
	fi;
	had = false;
	began[token] = 0;
	phase[token] = idle
}

/* invalidate.lua and expire.lua. */
inline invalidateKey(n, version)
{
#ifdef EXPIRE
	markedStale = (value != NONE);
#else
	value = NONE;
	markedStale = false;
#endif
#ifndef INVALIDATE_KEEPS_LEASE
#ifdef INVALIDATE_KEEPS_BACKOFF
	if :: isHeld(lease) -> freeLease() :: else fi;
#else
	freeLease();
#endif
	backingOff = false;
	asked = 0;
#endif
#ifndef INVALIDATE_KEEPS_CLAIM
	claim = NONE;
#endif
	if :: invalidBelow < version -> invalidBelow = version :: else fi;
	due = true;
	announce(invalidated, n, version)
}

/* ---- The state of a node. ---- */

inline put(n, token, recMarkedStale, entryEpoch)
{
	l1[n] = token;
	l1MarkedStale[n] = recMarkedStale;
	l1Superseded[n] = false;
#ifdef CUT
	unconfirmed[n] = false;
#endif
#ifdef EPOCH_AT_INSERT
	l1Epoch[n] = epochOf(n)
#else
	l1Epoch[n] = entryEpoch
#endif
}

/* Put into L1. The epoch is compared first, but not in the same act: an invalid entry may get in, or not. */
inline putL1(n, token, recMarkedStale, entryEpoch)
{
	if
	:: put(n, token, recMarkedStale, entryEpoch)
	:: entryEpoch != epoch[n] -> skip
	fi
}

/* Raise the epoch: what is in L1, and what is on its way there, is no longer a hit. */
inline raiseEpoch(n)
{
	epoch[n]++;
#ifdef CUT
	unconfirmed[n] = false;
#endif
	l1[n] = NONE;
	l1MarkedStale[n] = false;
	l1Superseded[n] = false;
	l1Epoch[n] = 0
}

/* Invalidate on this node: L1, the flight, and the failure that this node remembers. */
inline dropLocal(n)
{
	raiseEpoch(n);
#ifndef INVALIDATE_KEEPS_MEMORY
	heldBack[n] = NONE;
#endif
	asked = 0;
#ifndef NO_DETACH
	flight[n] = NONE /* Forget: the flight goes on for the callers that have joined */
#endif
}

inline promise(n, version)
{
	if :: promised[n] < version -> promised[n] = version :: else fi
}

/* Hand an announcement to the waiting flights of the node. */
inline notify(n, kind, token)
{
	i = 1;
	do
	:: i <= GETS ->
		if
		:: node(i) == n && waits[i] && announced[i] == 0 -> announced[i] = kind; announcedToken[i] = token
		:: else
		fi;
		i++
	:: else -> i = 0; break
	od
}

/* ---- One Get, and the flight that it may start. ---- */

#ifdef WAITER_TAKES_ANY
#define fromHolder(token) true
#else
#define fromHolder(token) (token == holder[me])
#endif

#ifdef RENEW_CREATES
#define renewable(token) (lease != token)
#else
#define renewable(token) (lease == token && claim == token)
#endif

/* acquire.go, heldBack. */
#ifdef HELD_BACK_LOADS
#define mayNotLoad(n) false
#else
#define mayNotLoad(n) (heldBack[n] != NONE)
#endif

/* acquire.go, onFailure: the failure that is announced is the second in a row, of another node than the first. */
#ifdef FIRST_FAILURE_ANSWERS
#define secondOf(token) true
#else
#define secondOf(token) (earlier != NONE && node(earlier) != node(token))
#endif

/*
 * acquire.go, waitForOthers: an Invalidate or another fill has ended what this node remembers. A back-off for all nodes
 * has ended if the store has only a note. (The announcement of the back-off may arrive after an Invalidate here.)
 */
#ifdef NOTE_KEEPS_BACKOFF
#define outdated(token) (!isNote(lease))
#else
#define outdated(token) (!isNote(lease) || forAll[token])
#endif

/* A node that is held back gives up only over a note. So no other node loads, and no Invalidate has come. */
#define noOtherLoad() assert(isNote(lease))

/* The callers get the error of a failed load. */
inline answerFailure(token)
{
	assert(hasFailed[n] || sick >= 2); /* G6: the failures of one node are no answer on another node */
	assert(saw[token] >= wants[me]);   /* Invalidate ends notes and back-offs */
	endFlight()
}

/* No announcement has arrived that would wake this flight, and none is on its way. */
#define nothingAnnounced(n) (announced[me] == 0 && empty(inbox[n]) && subscription[n] == connected)

inline stopWaiting()
{
	waits[me] = false; announced[me] = 0; announcedToken[me] = NONE; overdue[me] = false; ok = false
}

/* begin: a node that knows that its entry is past its TTL skips the read. Only a refresh takes the middle case. */
inline begin()
{
#ifdef CUT
#ifndef PENDING_LAST
	if
	:: pending[n] && !isCut(n) -> invalidateKey(n, pendingVersion); pending[n] = false
	:: pending[n] && isCut(n) -> epochRead = epochOf(n); goto WithoutStore
	:: else
	fi;
#endif
#endif
	if
	:: valid(n) && !fresh(l1[n], l1MarkedStale[n]) -> seen = l1[n]; goto Acquire
	:: valid(n) && fresh(l1[n], l1MarkedStale[n]) && !l1Superseded[n] -> /* from a flight that has just ended */
		assert(saw[l1[n]] >= wants[me]);
		endFlight();
		goto end_over
	:: else -> goto LookUp
	fi
}

#ifdef CUT
/*
 * outage.go, loadLocally, and publish.go, publishRecord: put a value into L1 that the store has not confirmed. A later
 * Get of this node must not get an older value.
 */
inline putUnconfirmed(n, token, entryEpoch)
{
	if
	:: entryEpoch == epoch[n] -> put(n, token, false, entryEpoch); unconfirmed[n] = true; promise(n, saw[token])
	:: else
	fi
}

/* outage.go, unconfirmedAfter: the value of this node is newer than the record in hand. */
#ifdef STORED_FIRST
#define ownIsNewer(n, token) false
#else
#define ownIsNewer(n, token) (notInvalidated(n) && unconfirmed[n] && saw[l1[n]] > saw[token])
#endif
#endif

inline endGet()
{
	openGets[n]--;
	if
	:: openGets[n] == 0 ->
#ifdef CUT
		unconfirmed[n] = false;
#endif
		do :: nempty(inbox[n]) -> inbox[n]?_, _, _ :: empty(inbox[n]) -> break od;
		l1[n] = NONE; l1MarkedStale[n] = false; l1Superseded[n] = false; l1Epoch[n] = 0;
		heldBack[n] = NONE
	:: else
	fi
}

/* The end of a flight. The rest is cleared, so that states with the same future are one state. */
inline endFlight()
{
	endGet();
	if :: flight[n] == me -> flight[n] = NONE :: else fi;
	stopWaiting();
	holder[me] = NONE; wants[me] = 0; seen = 0; epochRead = 0; rec = NONE;
	recMarkedStale = false; tryMode = false; look = false; earlier = NONE; background[me] = 0
}

proctype Get(byte me)
{
	byte n = node(me);
	byte seen;           /* token of the record in the store, as far as known */
	byte epochRead;      /* epoch noted before the last read began */
	byte rec;            /* a record in hand: from a GET, from Acquire, or from an announcement */
	bool recMarkedStale; /* ... and whether Expire has marked it stale */
	bool callerServed;   /* the caller has been served a stale value */
	bool tryMode;        /* Mode Try: no caller waits */
	bool look;           /* Mode Look: this node is held back */
	byte earlier;        /* the last failed load of another node */
#ifdef CUT
	byte replaced;       /* what a late request to publish replaces */
#endif
	bool ok;             /* a reply */

	{
	/* Steps 0 and 1: L1, then the flight of this process. The Gets of one node are alike, so one order is enough. */
	atomic { me <= NODES || started[me - NODES];
		started[me] = true;
		if
		:: valid(n) && fresh(l1[n], l1MarkedStale[n]) ->
			assert(saw[l1[n]] >= promised[n] && saw[l1[n]] >= promisedL1[n]); /* G2: L1 never serves what was invalidated */
#ifdef CUT
			assert(saw[l1[n]] >= saw[value] || nempty(inbox[n]) || l1Superseded[n]); /* nor what a newer record replaced */
#endif
			callerServed = l1Superseded[n];
			if :: !callerServed -> endGet(); goto end_over :: else fi
		:: else ->
#ifdef STALE
			if
			:: callerServed = valid(n)
#ifdef ERROR_ONLY
			:: valid(n) /* past StaleFor */
#endif
			fi
#endif
		fi;
		if
		:: flight[n] != NONE ->
			/* Join. A joined caller only waits for the end of this flight. What counts is which answers it may be given. */
			if
			:: !callerServed ->
				wants[flight[n]] = promised[n];
				if :: background[flight[n]] == refresh -> background[flight[n]] = 0 :: else fi
			:: else
			fi;
			callerServed = false;
			endGet();
			goto end_over
		:: else ->
			flight[n] = me;
			wants[me] = promised[n]
		fi;
		if
		:: !callerServed -> begin()
		:: else ->
			callerServed = false;
			background[me] = refresh;
			if :: tryMode = true :: skip /* not the first try for this entry */ fi
		fi
	}
	atomic { begin() } /* a refresh begins after its caller has gone: L1 may have changed since */

LookUp: /* Step 2: a plain GET. */
	atomic {
		epochRead = epochOf(n);
#ifdef CUT
		if :: isCut(n) -> goto WithoutStore :: else fi;
#endif
		rec = value; recMarkedStale = markedStale
	}

Serve: /* A record is in hand. The store may have changed since. */
	atomic {
		seen = rec;
#ifdef CUT
		if
		:: rec != NONE && ownIsNewer(n, rec) ->
			assert(saw[l1[n]] >= wants[me]);
			endFlight();
			goto end_over
		:: else
		fi;
#endif
		if
		:: rec == NONE
		:: rec != NONE && (fresh(rec, recMarkedStale) || rec == holder[me]) ->
			assert(saw[rec] >= wants[me]); /* G2: no Get is answered with a value that was invalidated before it began */
			putL1(n, rec, recMarkedStale, epochRead);
			endFlight();
			goto end_over
		:: else ->
#ifdef STALE
			if
			:: putL1(n, rec, recMarkedStale, epochRead); background[me] = served
#ifdef ERROR_ONLY
			:: background[me] != served /* past StaleFor */
#endif
			fi
#endif
		fi;
		rec = NONE;
		recMarkedStale = false
	}

Acquire: /* Step 3: driver.Store.Acquire. Earlier announcements no longer count: the store is asked. */
	atomic {
#ifdef CUT
		if
		:: isCut(n) ->
			epochRead = epochOf(n);
			if /* the call has run, or never runs. What it took ends by time */
			:: !changed(seen) && !heldByAnother(me) -> acquireBoth(me); phase[me] = idle
			:: true
			fi;
			goto WithoutStore
		:: else
		fi;
#endif
		if
		:: phase[me] == leased /* the second step of Mode Try */
		:: else ->
			epochRead = epochOf(n);
			look = mayNotLoad(n);
			if
#ifdef HELD_BACK_DOES_NOT_LOOK
			:: look -> noOtherLoad(); answerFailure(heldBack[n]); goto end_over
#else
			:: look && background[me] -> answerFailure(heldBack[n]); goto end_over
			:: look && !background[me]
#endif
			:: !look && tryMode && lease == NONE -> /* its first step, SET NX: all nodes but one leave here */
				takeLease(me);
				phase[me] = leased;
				goto Acquire /* ends the atomic: anything may happen in between */
			:: !look && tryMode && isHeld(lease) && !background[me] -> tryMode = false /* a caller joined: Wait */
			:: !look && tryMode && isHeld(lease) && background[me] -> endFlight(); goto end_over
			:: !look && tryMode && isBackOff(lease) -> answerFailure(lease - BACKOFF); goto end_over
			:: !look && (!tryMode || isNote(lease)) /* SET NX does not replace a note, but the script does */
			fi
		fi;
		phase[me] = idle;
		/* acquire.lua: compare the value; take lease and claim, or note with '+' that this flight waits. */
		if
		:: changed(seen) ->
			rec = value; recMarkedStale = markedStale;
			if
			:: lease == me ->
				freeLease();
#ifndef SILENT_CHANGED
				announce(released, NONE, NONE)
#endif
			:: else
			fi;
			goto Serve
		:: !changed(seen) && isBackOff(lease) -> answerFailure(lease - BACKOFF); goto end_over
		:: !changed(seen) && !isBackOff(lease) && heldByAnother(me) ->
			leaseAwaited = true;
			if
			:: background[me] -> endFlight(); goto end_over /* another node already refreshes the key */
			:: !background[me] && tryMode -> tryMode = false; goto Acquire /* Mode Wait: a caller has joined */
			:: !background[me] && !tryMode
			fi;
#ifndef FAULTS
			assert(phase[lease] != loading || claim == lease); /* no flight waits for a load that can no longer be stored */
#endif
			holder[me] = lease;
			look = false;
			waits[me] = true
		:: !changed(seen) && !isBackOff(lease) && !heldByAnother(me) && look -> /* Mode Look takes nothing */
			if
#ifndef LOOK_BELIEVES_MEMORY
			:: outdated(heldBack[n]) -> heldBack[n] = NONE; look = false; goto Acquire
#endif
			:: else -> noOtherLoad(); answerFailure(heldBack[n]); goto end_over
			fi
		:: !changed(seen) && !isBackOff(lease) && !heldByAnother(me) && !look ->
#ifndef NOTE_NOT_TOLD
			if :: isNote(lease) && node(lease - NOTE) != n -> earlier = lease - NOTE :: else fi;
#endif
			acquireBoth(me);
			goto Load
		fi
	}

Wait: /* The announcement, or the end of the lease, whichever is first. */
	atomic {
		if
		:: announced[me] != 0 ->
			ok = fromHolder(announcedToken[me]); /* onAnnouncement */
			if
#ifndef LARGE
			:: announced[me] == filled && ok ->
				rec = announcedToken[me];
				stopWaiting();
				goto Serve
#endif
			:: (announced[me] == failedForAll || announced[me] == failed && secondOf(announcedToken[me])) && ok ->
				answerFailure(announcedToken[me]);
				goto end_over
			:: announced[me] == failed && !secondOf(announcedToken[me]) && ok && node(announcedToken[me]) != n ->
				earlier = announcedToken[me] /* one of the waiting flights loads again */
			:: else
			fi;
			if
			:: announced[me] == filled -> stopWaiting(); goto LookUp
			:: else -> stopWaiting(); goto Acquire
			fi
		:: overdue[me] -> stopWaiting(); goto Acquire
		:: nothingAnnounced(n) && !overdue[me] && lease != holder[me] ->
			assert(false) /* asleep while the lease is free: only the timer would wake it */
#ifdef LOSSY
		:: subscription[n] != connected && lease != holder[me] -> stopWaiting(); goto Acquire /* the timer */
#endif
		fi
	}

Load: /* Step 4: the load runs. */
	do
#ifndef CYCLES
	:: atomic { renewable(me) -> takeLease(me) } /* renew.lua. What counts here: it creates no lease */
#endif
	:: atomic { /* Step 5: publish.lua. */
#ifdef CUT
		if
		:: isCut(n) ->
			assert(saw[me] >= wants[me]);
			putUnconfirmed(n, me, epochRead);
			if
			:: publish(me, seen, ok); endFlight(); goto end_over
			:: began[me] = 0; phase[me] = idle; endFlight(); goto end_over
			:: replaced = seen; endFlight(); goto Late
			fi
		:: else
		fi;
#endif
		publish(me, seen, ok);
		break }
#ifdef FAILS
	:: atomic { fail(n, me, ok); endFlight(); goto end_over } /* Step 6: fail.lua. */
	:: atomic { release(me, ok); endFlight(); goto end_over } /* the last caller has left */
#endif
	od;

	atomic { /* The reply to Publish is in hand. */
		if
		:: ok -> putL1(n, me, false, epochRead)
		:: else /* a rejected record does not enter L1 either */
		fi;
		assert(saw[me] >= wants[me]); /* G2: every caller that has joined may have this value */
		endFlight();
		goto end_over
	}

#ifdef CUT
WithoutStore: /* Step 7: serve what L1 has, or load without a lease. */
	atomic {
		if
		:: notInvalidated(n) && fresh(l1[n], l1MarkedStale[n]) ->
			assert(saw[l1[n]] >= wants[me]);
			endFlight();
			goto end_over
		:: else -> saw[me] = db
		fi
	}
	atomic {
		assert(saw[me] >= wants[me]);
		putUnconfirmed(n, me, epochRead);
		endFlight();
		goto end_over
	}

Late: /* The callers have their value, and the request to publish it arrives now. */
	atomic { publish(me, replaced, ok); ok = false; replaced = 0 }
#endif
	}
#ifdef DEATH
	unless { dead[n] }
#endif
	;
end_over:
	false
}

/* ---- A write to the database, then Invalidate or Expire. ---- */

proctype Invalidate(byte n)
{
	byte version;
	{
#ifdef DROP_BEFORE_SCRIPT
	atomic { dropLocal(n) };
#endif
	atomic {
		db++; /* The write is as late as possible: every load that began before the script has read an older version. */
		version = db;
#ifdef CUT
		if
		:: isCut(n) ->
			pendingVersion = version;
			pending[n] = true; /* before L1 is clear */
			if :: invalidateKey(n, version) :: true fi /* the call has run, or never runs */
		:: else -> invalidateKey(n, version)
		fi
#else
		invalidateKey(n, version)
#endif
	}
	atomic {
#ifndef DROP_BEFORE_SCRIPT
#ifndef WAIT_FOR_OWN_ANNOUNCEMENT
		dropLocal(n); /* the store comes first: a read that begins between the two steps would bring the old value back */
#endif
#endif
		promise(n, version) /* Invalidate returns, with an error if it had no answer */
	}
#ifdef CUT
	if /* it is repeated in the background */
	:: atomic { pending[n] && !isCut(n) -> invalidateKey(n, version); pending[n] = false }
	:: atomic { !pending[n] && !isCut(n) }
	fi
#endif
	}
#ifdef DEATH
	unless { dead[n] }
#endif
}

/* ---- What a node does with announcements. ---- */

proctype Subscription(byte n)
{
	mtype kind;
	byte token, replaced;
end:
	do
	:: atomic { inbox[n]?kind, token, replaced ->
		if
		:: kind == invalidated ->
#ifdef WAIT_FOR_OWN_ANNOUNCEMENT
			dropLocal(n);
			promise(n, replaced);
#else
			if
			:: token != n -> dropLocal(n); promise(n, replaced)
			:: else /* our own: Invalidate does it before it returns */
			fi;
#endif
			token = NONE
		:: kind == filled && valid(n) && l1[n] != token ->
			/* L1 takes the record only over the one that it replaced, and with the epoch of that entry. */
			if
#ifdef FILL_OVER_ANY
			:: true -> put(n, token, false, l1Epoch[n])
#else
#ifndef LARGE
			:: l1[n] == replaced -> put(n, token, false, l1Epoch[n])
#endif
#endif
			:: else -> l1Superseded[n] = true
			fi
#ifdef FILL_OVER_ANY
		:: kind == filled && !valid(n) -> put(n, token, false, epoch[n])
#endif
		:: else
		fi;
		if
		:: kind == failedForAll && node(token) != n -> heldBack[n] = token /* a node knows its own failures already */
		:: kind == filled -> heldBack[n] = NONE
		:: else
		fi;
		notify(n, kind, token);
		kind = 0; token = 0; replaced = 0
		}
#ifdef LOSSY
	/* The break, the moment at which the node notices it, and the return. */
	:: atomic { breaks > 0 && subscription[n] == connected && openGets[n] > 0 ->
		breaks--;
		do :: nempty(inbox[n]) -> inbox[n]?_, _, _ :: empty(inbox[n]) -> break od;
		subscription[n] = broken }
	:: atomic { subscription[n] == broken ->
		subscription[n] = down;
#ifndef BREAK_KEEPS_EPOCH
		raiseEpoch(n)
#endif
		}
	:: atomic { subscription[n] == down ->
		subscription[n] = connected;
#ifndef BREAK_KEEPS_EPOCH
#ifndef RETURN_KEEPS_EPOCH
		raiseEpoch(n);
#endif
#endif
		promisedL1[n] = invalidBelow; /* from now on, missed invalidations bind L1 */
		promise(n, invalidBelow);     /* and later Gets */
#ifndef RETURN_KEEPS_FLIGHT
		flight[n] = NONE;
#endif
		notify(n, subscribed, NONE) } /* a waiting flight may have missed its announcement */
#endif
	od
}

/* ---- Time. ---- */

/* The holder renews in time, and no pause is longer than a lease. Only FAULTS ends such a lease. */
#ifdef FAULTS
#define renewed(token) false
#else
#define renewed(token) (!dead[node(token)] && (phase[token] == leased || (phase[token] == loading && claim == token)))
#endif

proctype Time()
{
#ifdef TTL
	byte ages = TTL;
#endif
end:
	do
	:: atomic { isHeld(lease) && !renewed(lease) ->
		i = 1;
		do
		:: i <= GETS ->
			if :: waits[i] && holder[i] == lease -> overdue[i] = true :: else fi;
			i++
		:: else -> i = 0; break
		od;
		freeLease() }
#ifndef LASTING
	:: atomic { isBackOff(lease) -> lease = NONE; backingOff = false; asked = 0 }
	:: atomic { isNote(lease) -> lease = NONE; asked = 0 }
	:: atomic { heldBack[0] != NONE -> heldBack[0] = NONE; asked = 0 }
	:: atomic { heldBack[1] != NONE -> heldBack[1] = NONE; asked = 0 }
#if NODES > 2
	:: atomic { heldBack[2] != NONE -> heldBack[2] = NONE; asked = 0 }
#endif
#endif
#ifdef FAULTS
	:: atomic { claim != NONE -> claim = NONE }
#endif
#ifdef CUT
	:: atomic { writes -> writes = false; db++ }
#endif
#ifdef TTL
	:: atomic { ages > 0 && value != NONE && !aged[value] -> ages--; aged[value] = true; due = true }
	:: atomic { ages > 0 && claim != NONE && !aged[claim] -> /* a load longer than TTL */
		ages--; aged[claim] = true; due = true }
	:: atomic { value != NONE && aged[value] -> value = NONE; markedStale = false }  /* Redis deletes it */
#endif
	od
}

#ifdef CUT
proctype Outage()
{
	cut = true;
	cut = false
}
#endif

#ifdef DEATH
inline dies(n)
{
	atomic {
		dead[n] = true;
		if :: claim != NONE && node(claim) == n -> due = true :: else fi
	}
}

proctype Death()
{
	if
	:: dies(0)
	:: dies(1)
	:: true
	fi
}
#endif

init
{
	byte k;
	atomic {
		for (k : 0 .. NODES - 1) { run Subscription(k) }
		run Time();
		k = 0;
		do :: k < INVALIDATIONS -> run Invalidate((k + AT) % NODES); k++ :: else -> break od;
#ifdef DEATH
		run Death();
#endif
#ifdef CUT
		run Outage();
#endif
		for (k : 1 .. GETS) { openGets[node(k)]++; run Get(k) }
		k = 0
	}
}
