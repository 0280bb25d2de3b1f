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
// StaleFor and StaleIfError both count from the end of TTL, as in RFC 5861, so they overlap; the longer one ends the
// life. The times are part of the stored record, by the clock of Redis. They hold on every node, whatever its own clock
// or Config says. With Config.EarlyRefresh or Config.XFetch a refresh begins while the value is still fresh. With
// Config.SoftTimeout callers wait a moment for the refresh of a stale value.
//
// # One Get
//
//  0. L1. A fresh entry of this process is returned: no lock, timer, allocation or system clock. A stale entry is
//     returned as well, and at most one refresh of its key runs in this process.
//  1. Flight. Otherwise all callers of a key in this process share one flight. Each caller leaves when its own ctx
//     ends. The flight ends with its last caller.
//  2. Look up. The flight reads the store: one GET. A fresh value is the answer. A stale value is the answer as well,
//     and the flight goes on as a refresh. The read is skipped if step 3 is cheaper or finds the same.
//  3. Acquire. One script takes the refill lock, and the claim: the right to store. If the store holds another value
//     than the one seen, that value is used instead. If another node has the lock, a refresh leaves; a caller without a
//     value waits for the announcement of the result, or for the end of the lock.
//  4. Load. The load function runs, at most Config.MaxLoads at once. The lock is renewed meanwhile.
//  5. Publish. If the claim still holds, the value is stored, and announced to all nodes if it replaces one or if a
//     caller waits. A small value travels in the announcement. If the claim is gone, an Invalidate or a newer load came
//     first, and nothing is stored. The callers of this flight get the value either way.
//  6. Fail. If the load fails, its error goes to every waiter on every node, and a back-off takes the place of the lock
//     for Config.ErrorTTL. An old value is served instead if Config.StaleIfError allows it.
//  7. Without the store. If Redis does not answer, L1 is served, and each process loads by itself, within
//     Config.MaxLoads; more loads are refused with [ErrOverloaded]. After five slow failures in a row a circuit breaker
//     opens, and Gets skip Redis until a probe succeeds. When Redis is back, everything heals by itself.
//
// [Loader.Invalidate] deletes value, lock and claim in one step, and announces it. [Loader.Expire] marks the value as
// stale instead. So a load in progress, here or on another node, cannot be stored, and no later Get waits for it.
//
// [Loader.GetMany] does this for many keys. Each key has its own flight, lock and claim. The keys share one read of the
// store and, with [NewBulk], one load of exactly the keys whose locks were acquired.
//
// Values can be grouped by tags, see [Fill.Tag]. [Loader.InvalidateTag] stores the moment of the invalidation and
// announces it. A value is invalid if its load began no later.
//
// The lock is for efficiency; correctness comes from the claim. A holder that was frozen past its lock may load at the
// same time as another node, but it stores nothing.
//
// # What to know
//
//   - Values are shared between callers: treat them as read-only.
//   - The key must hold all that the load depends on. The ctx of the load has the values of the first caller's ctx, and
//     all callers get its result.
//   - Call Invalidate after the transaction has committed, not before.
//   - A codec may leave things out (JSON: unexported fields). No node sees them, not even the one that loaded the
//     value.
//   - An absence is an answer: the load function wraps [ErrNotFound].
//   - The guarantees about invalidation hold while Redis keeps the writes that it acknowledged. A failover that loses
//     some can bring back an old value, for at most its remaining life.
//
// Locks for users run on the same lease engine: see [Locker].
package refill
