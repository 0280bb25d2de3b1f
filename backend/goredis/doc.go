// Package goredis keeps the values and locks of package refill in Redis, over go-redis v9: on a single server, behind
// Sentinel, on a Cluster or on a Ring.
//
//	shared := goredis.New(rdb) // any redis.UniversalClient; one per process, for all Loaders and Lockers
//	products, err := refill.New("product", loadProduct, refill.Config{TTL: time.Minute, Shared: shared})
//
// It needs Redis 7.0 or newer, or Valkey (SET with NX and GET together).
//
// # Keys
//
// The key "42" of the Loader or Locker "product" stands under
//
//	refill:{b}:product:42         the value, a refill.Record; lives as long as the Loader says, at least 1 s
//	refill:{b}:product/lease:42   who loads, with a "+" if somebody waits; or "!" and the failure of the last load; lives
//	                              LockTTL or ErrorTTL
//	refill:{b}:product/claim:42   whose load may be stored, and since when: token@seconds.microseconds; lives LoadTimeout + LockTTL
//	refill:{b}:product/tag:red    when all that carries the tag "red" was invalidated and expired; lives as long as that
//	refill:{b}:product/lock:42    who holds the lock of a user
//	refill:{b}:product/fence:42   the last fencing token of that lock; lives a day beyond the last taking of it
//
// where refill is the [Prefix] and b is the FNV-1a hash (32 bit) of "product:42" (or "product:red") modulo 1024, in decimal:
// all keys of a value are in one slot of a Cluster and on one shard of a Ring. A lease or a lock without an end, and a key
// of a foreign type, counts as absent.
//
// Announcements are messages on the one channel refill:notes, which every process subscribes to once. The format
// stands in note.go. An ACL user needs the keys refill:* and the channel refill:notes.
//
// # Promises
//
// The lock is for efficiency; correctness comes from the claim. Every step is one command or one script, so that the
// claim is checked in the same act that stores the value. What refill promises about Invalidate and about overtaken loads
// holds while Redis keeps the writes that it acknowledged: a failover that loses some, or a shard of a Ring that comes
// back with what it held when it went, can bring back an old value for at most its remaining life. The fencing tokens
// of users' locks are never below the microseconds of Redis' clock, so that they rise even over such a loss.
//
// # Setting up the client
//
// Set ContextTimeoutEnabled in the client's options. Without it go-redis waits for a silent server until its ReadTimeout
// (3 s, four tries) whatever the ctx says; the Store then leaves such calls behind and returns in time, at the price of a
// goroutine per call. Clients that read from replicas are refused, see [Store.Check].
//
// While somebody listens (every Loader does), the Store has a small client of its own beside the given one, made from
// its Options: for the subscription and for renewals, which must not queue behind hundreds of GETs. (Behind Sentinel it
// serves the subscription alone, since only the given client follows a failover.) Hooks (AddHook) are not copied to it. A
// client of another type that embeds *redis.Client, *redis.ClusterClient or *redis.Ring works alike; one that hides them
// shares its own connections with the Store, and a Ring must not be hidden. Close the Loaders before the client.
package goredis
