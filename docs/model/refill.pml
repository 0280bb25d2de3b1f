/*
 * refill.pml - the protocol of refill as a model that spin searches to its end.
 *
 * One key, one Redis, a few nodes. The scripts in backend/goredis/lua are atomic, so each is one step here; between any
 * two steps anything else may happen. That is also how a process is paused: it just takes no step while the others do
 * and while its lease and its claim run out.
 *
 * Time has no length here. Whatever ends by time may end at any moment, in any order: a superset of what can happen.
 *
 * What may happen in a run, each by -D:
 *   NODES=n GETS=n   Gets 1..GETS, one after the other on nodes 0..NODES-1 and round again (default 2 and 3)
 *   VOIDS=n AT=n     n Invalidates, each after a write to the database, on the nodes from AT on (default 1 and 0)
 *   SOFT             these are Expires: the value stays, marked stale
 *   STALE            StaleFor is not 0: stale values are served, and refreshed behind
 *   SPARE            ... and some are past StaleFor, and kept for StaleIfError: who finds one waits
 *   TTL=n            n values grow old
 *   FAILS            loads fail, or are abandoned by their callers
 *   BIG              records do not travel with their announcement
 *   FAULTS           a lease or a claim may run out at any moment, also while its holder loads or is paused
 *   CYCLES           no renewals, so that a search for cycles finds others
 *   DEATH            one node may die at any moment
 *   LOSSY=n          n times a subscription breaks, loses announcements, and comes back
 *
 * What must hold is said where it is checked, by the names G1.. of the README. The table in docs/model/README.md says
 * which rule can be taken out by -D, and what goes wrong then.
 */

#ifndef NODES
#define NODES 2
#endif
#ifndef GETS
#define GETS 3
#endif
#ifndef VOIDS
#define VOIDS 1
#endif
#ifndef AT
#define AT 0
#endif

/* A token names one fill, and the record that it made. A flight leads at most once, so here its Get is its token. */
#define NOBODY 0
#define BACKOFF 100 /* what Fail leaves in the place of a lease: a lease that nobody holds */
#define node(token) ((token - 1) % NODES)

mtype = { filled, failed, released, voided, up }; /* announcements; up is what a Listen says of itself */
mtype = { idle, leased, loading };                /* how far a flight is with its own fill; leased = a refresh between its two steps */
mtype = { refresh, served };                      /* a flight for whom nobody waits: its caller has gone, or all have got a stale value */
mtype = { whole, broken, down };                  /* a subscription; broken = and the node does not know it yet */

/* ---- The store: what stands in Redis under the key. ---- */

byte value;  /* token of the record, NOBODY = none */
bool marked; /* the record was marked stale by Expire */
byte lease;  /* the refill lock: who loads. For efficiency. */
byte claim;  /* whose load may be stored. For correctness. */
bool awaiting; /* the '+' in the lease: somebody has noted that it waits for the holder. Ends with this very lease */

chan inbox[NODES] = [8] of { mtype, byte, byte }; /* what PUBLISH has sent, per node and in order */

/* ---- The nodes. ---- */

byte l1[NODES];        /* token of the entry in L1 */
bool l1marked[NODES];  /* it was read with Expire's mark */
bool l1old[NODES];     /* superseded: served as a stale one */
byte l1at[NODES];      /* the entry's epoch, noted before its read began */
byte epoch[NODES] = 1; /* now; raised by whatever makes entries invalid. 0 = of no time */
byte flying[NODES];    /* the flight that a Get may join */
mtype link[NODES] = whole;
bool dead[NODES];

/* A flight that waits. Of call.notes it needs the first one only: then it asks the store, and forgets the others. */
bool waits[GETS + 1];
mtype heard[GETS + 1];
byte heardFrom[GETS + 1];
bool overdue[GETS + 1]; /* the lease that it waits for has run out: its timer is due */
byte lostTo[GETS + 1];  /* the fill that it waits for */
mtype phase[GETS + 1] = idle;
mtype unwanted[GETS + 1]; /* 0 = somebody waits for this flight */

/* ---- What only the checks look at. ---- */

byte db;              /* the version in the database; every write raises it */
byte saw[GETS + 1];   /* the version that a load read */
byte began[GETS + 1]; /* loads in the order of their claims */
bool aged[GETS + 1];  /* TTL has passed since the load began: the same on every node, since the record says so */
byte claims;
byte lastStored;         /* began of the newest record that ever was in the store */
byte gone;               /* versions below it must not enter the store as fresh any more */
byte promised[NODES];    /* versions below it must not be served as fresh to a Get that begins on this node now ... */
byte promisedL1[NODES];  /* ... or, after the return of a subscription, not by L1 */
byte wants[GETS + 1];    /* the same for all who have joined this flight */
bool due = true;         /* a load is due: there is nothing, or it is past its time, or voided, or its load has ended with nothing */
bool resting;            /* a load has failed, and its back-off is not over */

/* ---- What keeps the search small. ---- */

bool begun[GETS + 1]; /* the Get has begun: the next of its node may */
byte open[NODES];     /* Gets of a node that have not ended */

#ifdef LOSSY
byte breaks = LOSSY;
#endif

byte i; /* of a loop within one step; always left at 0 */

#define fresh(token, mark) (token != NOBODY && !aged[token] && !(mark))
#define valid(n) (l1[n] != NOBODY && l1at[n] == epoch[n] && link[n] != down)

/* The epoch to note before a read begins: of no time while announcements may be missed. */
#define noted(n) (link[n] == down -> 0 : epoch[n])

/* Where no Get is left, nothing is changed by what is heard. */
#define hearing(n) (link[n] == whole && !dead[n] && open[n] > 0)

/* ---- The scripts: one step each. ---- */

/* A note of a release has a token, too, but nobody looks at it: it is left out. */
inline announce(kind, token, replaced)
{
	i = 0;
	do
	:: i < NODES && hearing(i) ->
		assert(nfull(inbox[i])); /* else the model is too small, not the protocol wrong */
		inbox[i]!kind, token, replaced;
		i++
	:: i < NODES && !hearing(i) -> i++
	:: i == NODES -> i = 0; break
	od
}

inline freeLease()
{
	lease = NOBODY;
	awaiting = false
}

/* A lease that is the token's already stays as it is, also marked. */
inline takeLease(token)
{
#ifdef OWN_LEASE_ANEW
	awaiting = false;
#else
	if :: lease != token -> awaiting = false :: else fi;
#endif
	lease = token
}

/* common.lua, free: had says that anything was the token's. */
inline free(token, had)
{
	had = (lease == token || claim == token);
	if :: lease == token -> freeLease() :: else fi;
	if :: claim == token -> claim = NOBODY :: else fi
}

/* begin.lua: what it looks at. */
#ifdef NO_SECOND_LOOK
#define otherThan(seen) false
#else
#define otherThan(seen) (value != NOBODY && value != seen)
#endif
#ifdef NO_LEASE_CHECK
#define heldFrom(token) false
#else
#define heldFrom(token) (lease != NOBODY && lease != token)
#endif

/* begin.lua, when the value is the one that was seen and nobody else has the lease: both in the same act. */
inline takeBoth(token)
{
#ifndef FAULTS
	assert(claim == NOBODY || dead[node(claim)]); /* G1: one load at a time ... */
	assert(!fresh(value, marked));  /* ... none while there is a fresh value ... */
	assert(due);                    /* ... and one per expiry */
	assert(!resting);               /* G6: after a failure, none before the back-off is over */
	due = false;
#endif
	takeLease(token);
	claim = token;
	claims++;
	began[token] = claims;
	saw[token] = db; /* the load reads the database as early as it can: later it would only see what is newer */
	phase[token] = loading
}

/* publish.lua: when it may be quiet. The lease must be there still: the mark of one that ran out is lost. */
#ifdef QUIET_IS_DEAF
#define unawaited(token) true
#else
#ifdef QUIET_WITHOUT_LEASE
#define unawaited(token) (!awaiting)
#else
#define unawaited(token) (lease == token && !awaiting)
#endif
#endif

/* publish.lua. stored says whether the record was. */
inline publish(token, replaced, stored)
{
#ifdef NO_CLAIM_CHECK
	stored = true;
#else
	stored = (claim == token);
#endif
	if
	:: stored ->
		assert(began[token] > lastStored); /* G3: never over a newer one */
		assert(saw[token] >= gone);        /* G2: never, once an Invalidate has voided it */
		lastStored = began[token];
		claim = NOBODY;
		value = token;
		marked = false;
		if
		:: replaced == NOBODY && unawaited(token) /* Publication.Quiet */
		:: else -> announce(filled, token, replaced)
		fi;
		freeLease() /* whosever it is */
	:: else ->
#ifndef REFUSED_KEEPS_LEASE
		if
		:: lease == token ->
			freeLease();
#ifndef SILENT_REFUSAL
			announce(released, NOBODY, NOBODY)
#endif
		:: else
		fi
#endif
	fi;
	assert(lease != token); /* who ends a fill leaves no lease behind */
	began[token] = 0;
	phase[token] = idle
}

/* fail.lua. */
inline fail(token, had)
{
	free(token, had);
	if
	:: had ->
#ifndef NO_BACKOFF
		if :: lease == NOBODY -> lease = BACKOFF :: else fi;
#endif
		resting = true;
		due = true;
		announce(failed, token, NOBODY)
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
		if :: phase[token] == loading -> due = true :: else fi;
#ifndef SILENT_RELEASE
		announce(released, NOBODY, NOBODY)
#endif
	:: else
	fi;
	had = false;
	began[token] = 0;
	phase[token] = idle
}

/* invalidate.lua and expire.lua. */
inline voidKey(n, version)
{
#ifdef SOFT
	marked = (value != NOBODY);
#else
	value = NOBODY;
	marked = false;
#endif
#ifndef VOID_KEEPS_LEASE
	freeLease();
	resting = false;
#endif
#ifndef VOID_KEEPS_CLAIM
	claim = NOBODY;
#endif
	if :: gone < version -> gone = version :: else fi;
	due = true;
	announce(voided, n, version)
}

/* ---- A node's own state. ---- */

inline put(n, token, mark, noted_at)
{
	l1[n] = token;
	l1marked[n] = mark;
	l1old[n] = false;
#ifdef EPOCH_AT_INSERT
	l1at[n] = noted(n)
#else
	l1at[n] = noted_at
#endif
}

/* Loader.keep. It looks at the epoch first, but not in the same act: what is void may get in, or not. */
inline keep(n, token, mark, noted_at)
{
	if
	:: put(n, token, mark, noted_at)
	:: noted_at != epoch[n] -> skip
	fi
}

/* local.void and local.heard: what is in L1, and what is on its way there, is no hit any more. */
inline raise(n)
{
	epoch[n]++;
	l1[n] = NOBODY;
	l1marked[n] = false;
	l1old[n] = false;
	l1at[n] = 0
}

/* Loader.drop. */
inline drop(n)
{
	raise(n);
#ifndef NO_DETACH
	flying[n] = NOBODY /* flights.detach: it flies on for those who have joined */
#endif
}

inline promise(n, version)
{
	if :: promised[n] < version -> promised[n] = version :: else fi
}

/* flights.tell. */
inline tell(n, kind, token)
{
	i = 1;
	do
	:: i <= GETS ->
		if
		:: node(i) == n && waits[i] && heard[i] == 0 -> heard[i] = kind; heardFrom[i] = token
		:: else
		fi;
		i++
	:: else -> i = 0; break
	od
}

/* ---- One Get: Loader.get, and the flight that it may start. ---- */

#ifdef WAITER_TAKES_ANY
#define awaited(token) true
#else
#define awaited(token) (token == lostTo[me])
#endif

#ifdef RENEW_CREATES
#define renews(token) (lease != token)
#else
#define renews(token) (lease == token && claim == token)
#endif

/* Nothing was heard that would wake this flight, and nothing is on its way. */
#define unheard(n) (heard[me] == 0 && empty(inbox[n]) && link[n] == whole)

inline woken()
{
	waits[me] = false; heard[me] = 0; heardFrom[me] = NOBODY; overdue[me] = false; yes = false
}

/* Loader.recall: a node that knows that its entry is past its time does not ask for it. The middle case is a refresh's only. */
inline recall()
{
	if
	:: valid(n) && !fresh(l1[n], l1marked[n]) -> seen = l1[n]; goto Bid
	:: valid(n) && fresh(l1[n], l1marked[n]) && !l1old[n] -> /* a flight that ended a moment ago has put it there */
		assert(saw[l1[n]] >= wants[me]);
		finish();
		goto end_over
	:: else -> goto Look
	fi
}

inline leave()
{
	open[n]--;
	if
	:: open[n] == 0 ->
		do :: nempty(inbox[n]) -> inbox[n]?_, _, _ :: empty(inbox[n]) -> break od;
		l1[n] = NOBODY; l1marked[n] = false; l1old[n] = false; l1at[n] = 0
	:: else
	fi
}

/* flights.end. The rest is forgotten, so that states that differ in nothing that matters are one. */
inline finish()
{
	leave();
	if :: flying[n] == me -> flying[n] = NOBODY :: else fi;
	woken();
	lostTo[me] = NOBODY; wants[me] = 0; seen = 0; at = 0; rec = NOBODY; mark = false; once = false; unwanted[me] = 0
}

proctype Get(byte me)
{
	byte n = node(me);
	byte seen;   /* call.seen: token of the record in the store, as far as known */
	byte at;     /* call.at */
	byte rec;    /* a record in hand: the reply to a Get or a Begin, or what travelled with a note */
	bool mark;   /* ... and whether Expire had marked it */
	bool behind; /* the caller has got a stale value */
	bool once;   /* AskOnce: nobody waits */
	bool yes;    /* another reply */

	{
	/* Steps 0 and 1: L1, then the flight of this process. The Gets of one node are alike, so one order of them will do. */
	atomic { me <= NODES || begun[me - NODES];
		begun[me] = true;
		if
		:: valid(n) && fresh(l1[n], l1marked[n]) ->
			assert(saw[l1[n]] >= promised[n] && saw[l1[n]] >= promisedL1[n]); /* G2: L1 never serves what was invalidated */
			behind = l1old[n];
			if :: !behind -> leave(); goto end_over :: else fi
		:: else ->
#ifdef STALE
			if
			:: behind = valid(n)
#ifdef SPARE
			:: valid(n) /* past StaleFor */
#endif
			fi
#endif
		fi;
		if
		:: flying[n] != NOBODY ->
			/* Join. One who joins waits for nothing but this flight's end: all that counts is what it may be given. */
			if
			:: !behind ->
				wants[flying[n]] = promised[n];
				if :: unwanted[flying[n]] == refresh -> unwanted[flying[n]] = 0 :: else fi
			:: else
			fi;
			behind = false;
			leave();
			goto end_over
		:: else ->
			flying[n] = me;
			wants[me] = promised[n]
		fi;
		if
		:: !behind -> recall()
		:: else ->
			behind = false;
			unwanted[me] = refresh;
			if :: once = true :: skip /* not the first try for this entry */ fi
		fi
	}
	atomic { recall() } /* a refresh begins when its caller has gone: L1 may have changed since */

Look: /* Step 2. */
	atomic { at = noted(n); rec = value; mark = marked }

Take: /* Loader.take: a record in hand. The store may have changed since. */
	atomic {
		seen = rec;
		if
		:: rec == NOBODY
		:: rec != NOBODY && (fresh(rec, mark) || rec == lostTo[me]) ->
			assert(saw[rec] >= wants[me]); /* G2: no Get is answered with what was invalidated before it began */
			keep(n, rec, mark, at);
			finish();
			goto end_over
		:: else ->
#ifdef STALE
			if
			:: keep(n, rec, mark, at); unwanted[me] = served
#ifdef SPARE
			:: unwanted[me] != served /* past StaleFor */
#endif
			fi
#endif
		fi;
		rec = NOBODY;
		mark = false
	}

Bid: /* Step 3: Store.Begin. What was heard before counts no more: the store is asked. */
	atomic {
		if
		:: phase[me] == leased /* the second step of AskOnce */
		:: else ->
			at = noted(n);
			if
			:: once && lease == NOBODY -> /* its first step, SET NX: all but one of a fleet leave here */
				takeLease(me);
				phase[me] = leased;
				goto Bid /* ends the atomic: anything may come between */
			:: once && lease != NOBODY && lease != BACKOFF && !unwanted[me] -> once = false /* AskLeft: somebody has joined */
			:: once && (lease == BACKOFF || lease != NOBODY && unwanted[me]) -> finish(); goto end_over
			:: !once
			fi
		fi;
		phase[me] = idle;
		/* begin.lua: the second look; the lease with the right to store, or the mark that somebody waits. */
		if
		:: otherThan(seen) ->
			rec = value; mark = marked;
			if
			:: lease == me ->
				freeLease();
#ifndef SILENT_GIVE_BACK
				announce(released, NOBODY, NOBODY)
#endif
			:: else
			fi;
			goto Take
		:: !otherThan(seen) && lease == BACKOFF -> finish(); goto end_over /* with the error that was left there */
		:: !otherThan(seen) && lease != BACKOFF && heldFrom(me) ->
			awaiting = true;
			if
			:: unwanted[me] -> finish(); goto end_over /* others do what a refresh would do */
			:: !unwanted[me] && once -> once = false; goto Bid /* AskLeft: somebody has joined */
			:: !unwanted[me] && !once
			fi;
#ifndef FAULTS
			assert(phase[lease] != loading || claim == lease); /* nobody waits for a load that cannot be stored any more */
#endif
			lostTo[me] = lease;
			waits[me] = true
		:: !otherThan(seen) && lease != BACKOFF && !heldFrom(me) ->
			takeBoth(me);
			goto Load
		fi
	}

Await: /* The announcement, or the end of the lease, whichever is first. */
	atomic {
		if
		:: heard[me] != 0 ->
			yes = awaited(heardFrom[me]); /* Loader.react */
			if
#ifndef BIG
			:: heard[me] == filled && yes ->
				rec = heardFrom[me];
				woken();
				goto Take
#endif
			:: heard[me] == failed && yes -> /* with its error */
				finish();
				goto end_over
			:: else
			fi;
			if
			:: heard[me] == filled -> woken(); goto Look
			:: else -> woken(); goto Bid
			fi
		:: overdue[me] -> woken(); goto Bid
		:: unheard(n) && !overdue[me] && lease != lostTo[me] ->
			assert(false) /* asleep beside a lease that was freed: nothing but the timer would wake it */
#ifdef LOSSY
		:: link[n] != whole && lease != lostTo[me] -> woken(); goto Bid /* the timer */
#endif
		fi
	}

Load: /* Step 4: the load runs. */
	do
#ifndef CYCLES
	:: atomic { renews(me) -> takeLease(me) } /* Renew: renew.lua. Nothing has a length here: all that counts is that it creates none */
#endif
	:: atomic { /* Step 5: publish.lua. */
		publish(me, seen, yes);
		break }
#ifdef FAILS
	:: atomic { fail(me, yes); finish(); goto end_over }    /* Step 6: fail.lua. */
	:: atomic { release(me, yes); finish(); goto end_over } /* the last caller has left */
#endif
	od;

	atomic { /* The reply to Publish is in hand. */
		if
		:: yes -> keep(n, me, false, at)
		:: else /* what was refused is not for L1 either */
		fi;
		assert(saw[me] >= wants[me]); /* G2: nobody has joined who may not have this value */
		finish()
	}
	}
#ifdef DEATH
	unless { dead[n] }
#endif
	;
end_over:
	false
}

/* ---- A write to the database, then Invalidate or Expire: Loader.voidAll. ---- */

proctype Void(byte n)
{
	byte version;
	{
#ifdef DROP_BEFORE_SCRIPT
	atomic { drop(n) };
#endif
	atomic {
		db++; /* The write: as late as it can, so that every load that began before the script has seen less. */
		version = db;
		voidKey(n, version)
	}
	atomic {
#ifndef DROP_BEFORE_SCRIPT
#ifndef WAIT_FOR_OWN_PUSH
		drop(n); /* the store comes first: a read that begins between the two would bring the old value back */
#endif
#endif
		promise(n, version) /* Invalidate returns */
	}
	}
#ifdef DEATH
	unless { dead[n] }
#endif
}

/* ---- What a node hears: Loader.hear. ---- */

proctype Listen(byte n)
{
	mtype kind;
	byte token, replaced;
end:
	do
	:: atomic { inbox[n]?kind, token, replaced ->
		if
		:: kind == voided ->
#ifdef WAIT_FOR_OWN_PUSH
			drop(n);
			promise(n, replaced);
#else
			if
			:: token != n -> drop(n); promise(n, replaced)
			:: else /* our own: Invalidate carries it out before it returns */
			fi;
#endif
			token = NOBODY
		:: kind == filled && valid(n) && l1[n] != token ->
			/* Loader.replace: only over the very record that was replaced, and with that one's epoch. */
			if
#ifdef FILL_OVER_ANY
			:: true -> put(n, token, false, l1at[n])
#else
#ifndef BIG
			:: l1[n] == replaced -> put(n, token, false, l1at[n])
#endif
#endif
			:: else -> l1old[n] = true
			fi
#ifdef FILL_OVER_ANY
		:: kind == filled && !valid(n) -> put(n, token, false, epoch[n])
#endif
		:: else
		fi;
		tell(n, kind, token);
		kind = 0; token = 0; replaced = 0
		}
#ifdef LOSSY
	/* The break, the moment when the node hears of it, and the return. */
	:: atomic { breaks > 0 && link[n] == whole && open[n] > 0 ->
		breaks--;
		do :: nempty(inbox[n]) -> inbox[n]?_, _, _ :: empty(inbox[n]) -> break od;
		link[n] = broken }
	:: atomic { link[n] == broken ->
		link[n] = down;
#ifndef BREAK_KEEPS_EPOCH
		raise(n)
#endif
		}
	:: atomic { link[n] == down ->
		link[n] = whole;
#ifndef BREAK_KEEPS_EPOCH
#ifndef RETURN_KEEPS_EPOCH
		raise(n);
#endif
#endif
		promisedL1[n] = gone; /* what was missed counts as heard, by L1 */
		promise(n, gone);     /* and by later Gets */
#ifndef RETURN_KEEPS_FLIGHT
		flying[n] = NOBODY;
#endif
		tell(n, up, NOBODY) } /* whoever waits may have missed what it waits for */
#endif
	od
}

/* ---- Time. ---- */

/* The holder renews in time, and is not paused for longer than a lease: nothing but FAULTS ends such a lease. */
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
	:: atomic { lease != NOBODY && lease != BACKOFF && !renewed(lease) ->
		i = 1;
		do
		:: i <= GETS ->
			if :: waits[i] && lostTo[i] == lease -> overdue[i] = true :: else fi;
			i++
		:: else -> i = 0; break
		od;
		freeLease() }
	:: atomic { lease == BACKOFF -> lease = NOBODY; resting = false }
#ifdef FAULTS
	:: atomic { claim != NOBODY -> claim = NOBODY }
#endif
#ifdef TTL
	:: atomic { ages > 0 && value != NOBODY && !aged[value] -> ages--; aged[value] = true; due = true }
	:: atomic { ages > 0 && claim != NOBODY && !aged[claim] -> ages--; aged[claim] = true; due = true } /* a load longer than TTL */
	:: atomic { value != NOBODY && aged[value] -> value = NOBODY; marked = false }  /* Redis deletes it */
#endif
	od
}

#ifdef DEATH
inline dies(n)
{
	atomic {
		dead[n] = true;
		if :: claim != NOBODY && node(claim) == n -> due = true :: else fi
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
		for (k : 0 .. NODES - 1) { run Listen(k) }
		run Time();
		k = 0;
		do :: k < VOIDS -> run Void((k + AT) % NODES); k++ :: else -> break od;
#ifdef DEATH
		run Death();
#endif
		for (k : 1 .. GETS) { open[node(k)]++; run Get(k) }
		k = 0
	}
}
