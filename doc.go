// Package refill keeps a cache from stampeding its database. When a hot entry expires, one caller on one node loads it
// again, under a refill lock in Redis. Every other caller, on every node, is served the stale value or waits for that
// one load.
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
// StaleFor and StaleIfError both count from the end of TTL, as in RFC 5861, so the two overlap. The longer one ends the
// life of the value. The stored record holds these times, by the clock of Redis. They hold on every node, whatever the
// node's own clock or Config says. With Config.EarlyRefresh or Config.XFetch, a refresh begins while the value is still
// fresh. With Config.SoftTimeout, callers wait a moment for the refresh of a stale value.
//
// # One Get
//
//  0. L1. Get returns a fresh entry of this process without a lock, timer, allocation or system clock. Get returns a
//     stale entry as well, and at most one refresh per key runs in this process.
//  1. Flight. Otherwise all callers of a key in this process share one flight. Each caller leaves when its own ctx
//     ends. The flight ends with its last caller.
//  2. Look up. The flight reads the store: one GET. A fresh value is the answer. A stale value is the answer as well,
//     and the flight goes on as a refresh. The flight skips the read if step 3 is cheaper or finds the same.
//  3. Acquire. One script takes the refill lock and the claim. The claim is the right to store. If the store holds
//     another value than the one that the flight has seen, the flight uses the value of the store instead. If another
//     node has the lock, a refresh ends. A flight whose callers have no value waits for the announcement of the result,
//     or for the end of the lock.
//  4. Load. The load function runs. At most Config.MaxLoads loads run at once. The lock is renewed during the load.
//  5. Publish. If the claim still holds, the value is stored. The value is also announced to all nodes if it replaces
//     another value or if a caller waits. A small value travels in the announcement. If the claim is gone, an
//     Invalidate or a newer load came first, and nothing is stored. The callers of this flight get the value in either
//     case.
//  6. Fail. If the load fails, every waiter on every node gets its error, and a back-off takes the place of the lock
//     for Config.ErrorTTL. Callers get an old value instead of the error if Config.StaleIfError allows that.
//  7. Without the store. If Redis does not answer, Get serves what L1 has, and each process loads by itself, at most
//     Config.MaxLoads at once. Further loads are refused with [ErrOverloaded]. After five slow failures in a row a
//     circuit breaker opens, and Gets skip Redis until a probe succeeds. When Redis is back, the Loader recovers by
//     itself.
//
// [Loader.Invalidate] deletes the value, the lock and the claim in one step, and announces the deletion.
// [Loader.Expire] marks the value as stale instead of deleting it. After either call, a load in progress, here or on
// another node, cannot be stored, and no later Get waits for that load.
//
// [Loader.GetMany] is Get for many keys. Each key has its own flight, lock and claim. The keys share one read of the
// store. With [NewBulk] they also share one load, of exactly the keys whose locks were acquired.
//
// Values can be grouped by tags, see [Fill.Tag]. [Loader.InvalidateTag] stores the moment of the invalidation and
// announces the invalidation. A value is invalid if its load began at that moment or earlier.
//
// The lock is for efficiency. Correctness comes from the claim: a holder that was frozen past the end of its lock may
// load at the same time as another node, but the frozen holder stores nothing.
//
// # What to know
//
//   - Values are shared between callers: treat them as read-only.
//   - The key must hold all that the load depends on. The ctx of the load has the values of the first caller's ctx, and
//     all callers get the result of that load.
//   - Call Invalidate after the transaction has committed, not before.
//   - A codec may leave out parts of a value (JSON: unexported fields). No node sees these parts, not even the node
//     that loaded the value.
//   - An absence is an answer: the load function returns an error that wraps [ErrNotFound].
//   - The guarantees about invalidation hold while Redis keeps the writes that it acknowledged. A failover that loses
//     some of these writes can bring back an old value, for at most the remaining life of that value.
//
// Locks for users run on the same lease engine: see [Locker].
package refill
