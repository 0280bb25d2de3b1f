// Package goredis keeps the values and locks of package refill in Redis. It uses go-redis v9, with a single server,
// Sentinel, a Cluster or a Ring.
//
//	shared := goredis.New(rdb) // any redis.UniversalClient; one per process, for all Loaders and Lockers
//	products, err := refill.New("product", loadProduct, refill.Config{TTL: time.Minute, Shared: shared})
//
// The package needs Valkey, or Redis 7.0 or newer, because it uses SET with NX and GET together.
//
// # Keys
//
// The Redis keys for the key "42" of the Loader or Locker "product" are
//
//	refill:{b}:product:42         the value, a driver.Record; lives as long as the Loader says, at least 1 s
//	refill:{b}:product/lease:42   who loads, followed by "+" if a caller waits; or, after a load that failed, "!"
//	                              (a back-off) or "?" (a note) and the failure; lives LockTTL or ErrorTTL
//	refill:{b}:product/claim:42   whose load may be stored, and since when: token@seconds.microseconds;
//	                              lives LoadTimeout + LockTTL
//	refill:{b}:product/tag:red    when the tag "red" was invalidated and expired; lives as long as values with the tag
//	refill:{b}:product/lock:42    who holds the lock of a user
//	refill:{b}:product/fence:42   the last fencing token of that lock; lives a day after the lock was last taken
//
// In these keys, refill is the [Prefix], and b is the FNV-1a hash (32 bit) of "product:42" (or "product:red") modulo
// 1024, in decimal. So all keys of a value are in one slot of a Cluster and on one shard of a Ring. A lease or lock
// without an end counts as absent, and so does a key of a foreign type.
//
// Announcements are messages on one channel, refill:notes. Every process subscribes to this channel once.
// announcement.go describes the format of the messages.
//
// # Permissions
//
// An ACL user needs these permissions:
//
//	ACL SETUSER app on >secret ~refill:* &refill:notes
//	  +get +set +del +mget +pttl +pexpire +append +setrange +time +publish
//	  +eval +evalsha +subscribe +ping
//
// A Cluster client also needs +cluster|slots. The error of a call that the ACL denies names the command. Three
// commands may be denied at a price. Without APPEND, a load is often not announced, and callers that wait for the
// load ask Redis again each 100 ms. Without SETRANGE, Expire deletes the value. Without INFO, which is not in the
// list, the Store does not warn about an old server, a replica or the policy volatile-ttl.
//
// # Promises
//
// The lease is for efficiency. Correctness comes from the claim. Every step is one command or one script, so the
// claim is checked in the same atomic act that stores the value.
//
// The promises of refill about Invalidate, and about a load that another load has overtaken, hold as long as Redis
// keeps the writes that it acknowledged. Two events can bring back an old value, for at most its remaining life: a
// failover that loses writes, and a Ring shard that returns with the data that the shard had when it went down. The
// fencing tokens of users' locks are never below the time of Redis' clock in microseconds, so the tokens rise even
// after such a loss.
//
// # Pipelines
//
// When many calls run at once, the Store sends their commands together. This holds for the steps of a fill: Get,
// Acquire, Publish, Fail and Release. A server has at most two pipelines of reads and one of scripts in flight, so
// publications do not wait for reads. A command that finds fewer in flight goes at once, alone. Otherwise the command
// waits for the next pipeline, for at most 10 ms. A command goes alone in any case if
//
//   - the client is without ContextTimeoutEnabled, or its type hides the client,
//   - the ctx of the call has no deadline, or one that is more than a second away,
//   - the arguments of the command, or the value of the key as last seen, are larger than 64 KiB.
//
// Each call keeps its own ctx and its own error. The time in the queue counts for the ctx: a call whose ctx ends in the
// queue returns the error of its ctx, and is not sent. If a pipeline fails, all its calls fail, unless go-redis repeats
// them. The circuit breaker of a Loader counts such a pipeline once.
//
// The hooks of the given client (AddHook) see gathered commands in ProcessPipelineHook, not in ProcessHook. The ctx has
// the values of the first call and the latest deadline of all. On a Cluster, a pipeline of scripts begins with an
// additional GET. A hook must not call the Store, because the call could wait for the pipeline of the hook.
//
// # Setting up the client
//
// Set ContextTimeoutEnabled in the client's options. Without this option, go-redis ignores the deadline of the ctx
// and waits for a silent server until the client's ReadTimeout is over (3 s, four attempts). A call of the Store
// still returns in time, because the Store runs the call on a goroutine that it can leave behind. The goroutine costs
// a third of the time of a GET on loopback. While 1,000 such goroutines are left behind, further calls fail at once.
// Without this option, the Store also sends each call alone, see Pipelines. The Store refuses Cluster clients that read
// from replicas, see [Store.Check].
//
// These options of go-redis matter as well:
//
//   - PoolSize (10 per CPU) bounds the pipelines and single calls that run at once. A call that finds no free
//     connection waits in a queue, and that wait counts for its StoreTimeout. A large record holds its connection
//     longer.
//   - MaxRetries (3) may stay. Every step can be repeated, because a step recognises its own token. The retries end
//     with the ctx of the call.
//   - DialTimeout (5 s), DialerRetries (5) and DialerRetryTimeout (100 ms) may stay, because a call returns when its
//     ctx ends. But a refused connection does not fail at once: go-redis dials again until the ctx ends. So a call to a
//     server that is down costs one StoreTimeout, until the breaker of the Loader opens. With DialerRetries: 1 and
//     MaxRetries: -1, such a call costs one DialerRetryTimeout.
//   - Protocol 2 and 3 both work.
//
// New and refill.New do not call the server. So a wrong address, a wrong password or a missing permission shows at the
// first Get and at the subscription, and not as an error of New. Gets still answer: each process loads for itself. The
// Loader reports EventStoreDown with the cause ("goredis: disconnected: dial tcp …: connection refused"). The
// EventStoreError of a call often says only "context deadline exceeded", because go-redis was still dialling. After
// five such calls in a row, the Loader reports EventBreakerOpen. The cause of a wrong password contains WRONGPASS, and
// that of a missing password contains NOAUTH. Call Ping on the client at the start of the program if a wrong address
// must end the program.
//
// Every Loader is a subscriber. While a Store has a subscriber, it keeps a small client of its own, with the Options of
// the given client. This client carries the subscription and the renewals of leases, so that a renewal does not queue
// behind hundreds of GETs. Behind Sentinel, the given client carries the renewals. The small client does not learn of a
// failover, so it would renew leases at the old master. The small client has none of the hooks (AddHook) of the given
// client.
//
// A client of your own type also works if the type embeds *redis.Client, *redis.ClusterClient or *redis.Ring. If the
// type hides its client, the Store makes no small client and uses the connections of the given client. A type must not
// hide a Ring, because the Store must subscribe at every shard. Close the Loaders before the client.
package goredis
