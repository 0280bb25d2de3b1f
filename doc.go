// Package refill keeps a cache from stampeding its database. When a value expires that many callers ask for, one caller
// on one node loads the value again, under a refill lock in Redis. Every other caller, on every node, gets the stale
// value or waits for that load.
//
//	shared := goredis.New(rdb) // any redis.UniversalClient; one per process, for all Loaders
//	products, err := refill.New("product", loadProduct, refill.Config{
//		TTL:      time.Minute,      // fresh for this long, counted from the start of the load
//		StaleFor: 10 * time.Minute, // then served stale, while one node refills
//		Shared:   shared,           // nil = this process alone
//	})
//	p, err := products.Get(ctx, "42")
//
// # The life of a value
//
//	load begins        TTL                 + StaleFor         + StaleIfError
//	     │──────────────│───────────────────────│────────────────────│
//	     fresh          stale                   error-only           expired
//	     served         served at once,         served if the        gone
//	                    one node refreshes it   load fails
//
// StaleFor and StaleIfError both count from the end of TTL, as in RFC 5861, so the two windows overlap. The value is
// expired when the longer window has ended. The stored record holds the times of the value, by the clock of Redis.
// Every node obeys these times, whatever its own clock or Config says. With Config.EarlyRefresh or Config.XFetch, a
// refresh begins while the value is still fresh. With Config.SoftTimeout, a Get waits at most that long for the refresh
// before it returns the stale value.
//
// # One Get
//
//  0. L1. L1 is the memory of this process. Get returns a fresh entry of L1 without a lock, timer, allocation or system
//     clock. Get also returns a stale entry, and starts a refresh in the background. At most one refresh per key runs
//     in this process.
//  1. Flight. If L1 has neither a fresh nor a stale entry, all callers of the key in this process share one flight. A
//     flight is one attempt to get the value. Each caller stops waiting when its own ctx ends. When the last caller has
//     left, the flight is cancelled, unless it refreshes a value in the background.
//  2. Look up. The flight reads the store with one GET. If the value is fresh, the flight answers its callers and ends.
//     If the value is stale, the flight answers its callers and goes on as a refresh. The flight may skip this read,
//     because step 3 finds a newer value in the store as well.
//  3. Acquire. One Redis script takes the refill lock and the claim. The claim is the right to store the value. If the
//     store holds a value that the flight has not seen, the flight uses that value and takes no lock. If another node
//     has the lock, a refresh in the background ends. A flight whose callers have no value yet waits for the
//     announcement of the result, or for the end of the lock.
//  4. Load. The load function runs. At most Config.MaxLoads loads run at once. The lock is renewed during the load.
//  5. Publish. If the flight still has the claim, the store keeps the value. The store announces the value to all nodes
//     if the value replaces another value, or if a caller on another node waits. A record of at most 4 KiB travels in
//     the announcement. If the claim is gone, an Invalidate or a newer load came first, and the store does not keep the
//     value. The callers of this flight get the value in either case.
//  6. Fail. If the load fails, the callers on this node get the error, and this node does not load the key for
//     Config.ErrorTTL. If other nodes wait for the load, one of them loads at once. If that second load fails as well,
//     all waiters get its error. Redis then holds a back-off in place of the lock: no node loads the key for
//     Config.ErrorTTL. If Config.StaleIfError allows it, callers get an old value instead of an error.
//  7. Without the store. If Redis does not answer, Get serves what L1 has. Otherwise each process loads by itself, with
//     at most Config.MaxLoads loads at once. A load that gets no place within Config.StoreTimeout is refused with
//     [ErrOverloaded]. After one slow failure, Gets that L1 can answer do not wait for Redis. After five slow failures
//     in a row a circuit breaker opens, and all Gets skip Redis. A probe finds out when Redis answers again. From then
//     on, a Get of a value that Redis has not confirmed looks up the value in Redis first. So the Loader recovers by
//     itself.
//
// [Loader.Invalidate] deletes the value, the lock and the claim in one step, and announces the deletion.
// [Loader.Expire] does the same to lock and claim, but keeps the value and marks it as stale. After either call has
// returned, a load that was in progress on any node cannot be stored. No later Get on this node waits for that load.
//
// [Loader.GetMany] is Get for many keys. Each key has its own flight, lock and claim. The keys share one read of the
// store. With [NewBulk], one load gets the values of all keys whose locks this node has acquired.
//
// Values can be grouped by tags, see [Fill.Tag]. [Loader.InvalidateTag] stores the moment of the invalidation and
// announces the invalidation. A value with the tag is invalid if its load began at that moment or earlier.
//
// The lock is for efficiency. Correctness comes from the claim. If a holder was frozen past the end of its lock,
// another node may load at the same time. But the frozen holder cannot store its value, because the other node has
// taken the claim.
//
// # What to know
//
//   - Values are shared between callers: treat them as read-only.
//   - The key must hold all that the load depends on. The reason: the load runs with the ctx values of the first
//     caller, and all callers get the result of that load.
//   - A load function may Get other keys. If two load functions Get each other's keys, both wait until
//     Config.LoadTimeout.
//   - Call Invalidate after the transaction has committed, not before.
//   - A codec may leave out parts of a value (JSON: unexported fields). Get returns the value without these parts on
//     every node, including the node that loaded the value.
//   - An absence is an answer: the load function returns an error that wraps [ErrNotFound].
//   - A load function can set the TTL and the tags of its value, the back-off after its failure, and more, see [Fill]
//     and docs/what-a-load-may-say.md.
//   - The guarantees about invalidation hold while Redis keeps the writes that it acknowledged. A failover that loses
//     some of these writes can bring back an old value, for at most the remaining life of that value.
//   - If a process image is cloned (a snapshot of a virtual machine, a restored container), make the Loader after the
//     cloning. Two clones of one Loader have the same identity in the fleet. So both may load a key at once. Each clone
//     also ignores the announcements of the other clone's invalidations, so its L1 may serve an old value until
//     LocalTTL is over.
//
// Package refill also has locks for users, see [Locker]. These locks use the same lease engine as the refill lock.
package refill
