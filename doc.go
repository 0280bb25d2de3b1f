// Package refill keeps a cache from stampeding its database. When a hot entry expires, one caller of one node loads it
// again, under a refill lock in Redis; every other caller, on every node, is served the stale value or waits for that one
// load.
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
//	     fresh          stale                   spare                dead
//	     served         served at once,         served if the        gone
//	                    one node refreshes it   load fails
//
// Both windows count from the end of TTL, as in RFC 5861, so they overlap: the longer one is the end. The times stand in
// the record, by the clock of Redis, and hold on every node whatever its own clock or Config says. With Config.EarlyRefresh
// or Config.XFetch a refresh begins while the value is still fresh; with Config.SoftTimeout callers wait a moment for the
// refresh of a stale one.
//
// # One Get
//
//  0. Local. A fresh entry of this process (L1) is returned: no lock, timer, allocation or system clock. A stale one is
//     returned, too, and at most one refresh of the key runs in this process; so for a fresh one that is due early.
//  1. Flight. Otherwise one call per key and process goes on; all callers of the key join it. Each leaves when its own
//     ctx ends; the flight ends with the last of them.
//  2. Shared. It reads the store: one plain GET. Fresh: that is the answer. Stale: handed out at once, and the flight goes
//     on as a refresh. A node that knows that its entry is past its time does not ask; nor does one whose looks mostly
//     find nothing, since the next step finds what is there, too.
//  3. Lease. It takes the refill lock and the claim, the right to store, unless another value is there than the one it
//     saw: then that is taken. If another has the lock, a refresh leaves; a caller without a value waits for the
//     announcement of the result, or the end of the lease.
//  4. Load. The load function runs, at most MaxLoads at once; the lease is renewed meanwhile.
//  5. Publish. If the claim is still its own, the record is stored and, if it replaces one or somebody waits, announced,
//     which wakes every waiter on every node; a small record travels in the announcement itself. If not, an Invalidate or a newer load came between: nothing is
//     stored. The callers of this flight get the value that they waited for either way.
//  6. Failure. The error is left in the place of the lease for ErrorTTL: a back-off is a lease that nobody holds. It goes
//     to every waiter on every node; a spare value is served in its place.
//  7. Redis gone. What L1 has is served, loads run in each process within MaxLoads, more are refused (ErrOverloaded). After
//     a few time-outs a circuit breaker spares everybody the next ones, and probes. When Redis is back, everything heals
//     by itself.
//
// [Loader.Invalidate] deletes value, lease and claim in one step and announces it, [Loader.Expire] marks the value as
// stale and does the same; so a load in flight, here or elsewhere, cannot be stored, and nobody waits for it.
//
// [Loader.GetMany] is this for many keys: each has a flight, a lease and a claim of its own; what they share is one read of
// the store and, with [NewBulk], one load of exactly the keys whose leases were won.
//
// Values may be in groups, see [Fill.Tag]: [Loader.InvalidateTag] writes one mark in the store, the moment at which the
// group was voided, and announces it. A value is void if its load began no later.
//
// The lock is for efficiency; correctness comes from the claim. A holder that was frozen past its lease may load beside
// another one, but it stores nothing.
//
// # What to know
//
//   - Values are shared between callers and nodes of one process: treat them as read-only.
//   - The key must hold all that the load depends on. The load's ctx has the values of the first caller's, and its
//     result goes to everybody.
//   - Invalidate after the transaction has committed, not before.
//   - A codec leaves things out (JSON: unexported fields). Every node sees the value without them, the loading one, too.
//   - An absence is an answer: wrap [ErrNotFound].
//   - Guarantees about invalidation hold while Redis keeps the writes that it acknowledged. A failover that loses some
//     can bring back an old value for at most its remaining life.
//
// Locks for users run on the same lease engine: see [Locker].
package refill
