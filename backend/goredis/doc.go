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
// The Redis keys for the key "42" of the Loader or Locker "product" are
//
//	refill:{b}:product:42         the value, a driver.Record; lives as long as the Loader says, at least 1 s
//	refill:{b}:product/lease:42   who loads, followed by "+" if a caller waits; or "!" and the failure of the last load;
//	                              lives LockTTL or ErrorTTL
//	refill:{b}:product/claim:42   whose load may be stored, and since when: token@seconds.microseconds;
//	                              lives LoadTimeout + LockTTL
//	refill:{b}:product/tag:red    when the tag "red" was invalidated and expired; lives as long as its values
//	refill:{b}:product/lock:42    who holds the lock of a user
//	refill:{b}:product/fence:42   the last fencing token of that lock; lives a day after the lock was last taken
//
// Here refill is the [Prefix], and b is the FNV-1a hash (32 bit) of "product:42" (or "product:red") modulo 1024, in
// decimal. So all keys of a value are in one slot of a Cluster and on one shard of a Ring. A lease or lock without an
// end counts as absent, and so does a key of a foreign type.
//
// Announcements are messages on one channel, refill:notes. Every process subscribes to it once. Their format is
// described in announcement.go. An ACL user needs the keys refill:* and the channel refill:notes.
//
// # Promises
//
// The lock is for efficiency; correctness comes from the claim. Every step is one command or one script, so the claim
// is checked in the same atomic act that stores the value.
//
// The promises of refill about Invalidate and about overtaken loads hold as long as Redis keeps the writes that it
// acknowledged. Two events can bring back an old value, for at most its remaining life: a failover that loses writes,
// and a Ring shard that returns with the data that the shard had when it went down. The fencing tokens of users' locks
// are never below the microseconds of Redis' clock, so they rise even after such a loss.
//
// # Setting up the client
//
// Set ContextTimeoutEnabled in the client's options. Without this option, go-redis ignores the deadline of the ctx and
// waits for a silent server until its ReadTimeout is over (3 s, four attempts). The Store then leaves such a call
// behind and returns in time. This costs a goroutine per call. Clients that read from replicas are refused, see
// [Store.Check].
//
// While a Store has a subscriber (every Loader is one), it keeps a small client of its own, with the Options of the
// given client. This client carries the subscription and the renewals of leases, so that a renewal does not queue
// behind hundreds of GETs. Behind Sentinel, renewals stay on the given client, because the small client does not learn
// of a failover and would renew leases at the old master. Hooks (AddHook) are not copied to the small client.
//
// A client of your own type also works if the type embeds *redis.Client, *redis.ClusterClient or *redis.Ring. If the
// type hides its client, the Store makes no small client and uses the connections of the given one. A Ring must not be
// hidden. Close the Loaders before the client.
package goredis
