// Package realtest starts real servers and real processes for tests, and injects faults. Realtest is a separate module,
// so that no dependency of a test reaches the go.mod of a user. A test that needs a real server belongs to this module,
// to examples/ or to bench/. Such a test cannot be in the root module, because the root module does not require
// realtest.
//
// # A server
//
// [StartRedis] starts an empty redis-server for one test, on a free port of the loopback. The server ends with the
// test:
//
//	server := realtest.StartRedis(t, "--maxmemory", "2mb") // further arguments go to redis-server
//	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
//
//	server.Freeze() // SIGSTOP: connections stay open, nothing answers (to the client, a partition)
//	server.Thaw()
//	server.Kill()    // kill -9: connections are refused
//	server.Restart() // the same port, empty
//
//	server.ResetStats(t)
//	// …
//	calls := server.Commandstats(t) // calls["set"], calls["evalsha"], …
//
// # Servers that replace each other
//
// [StartSentinel] starts a master and two replicas behind three sentinels, in half a second. [StartCluster] starts a
// Redis Cluster, in two seconds. The returned [Sentinel] and [Cluster] know the current master, and can replace it:
//
//	s := realtest.StartSentinel(t)
//	rdb := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: s.MasterName(), SentinelAddrs: s.Addrs()})
//	s.CutReplicas() // later writes reach only the master, and are lost when it is killed
//	old := s.KillMaster()
//	s.ThawReplicas()
//	next := s.NextMaster(old)
//	next = s.Failover() // replaces a healthy master
//
//	c := realtest.StartCluster(t, 3, 1) // three masters with one replica each
//	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs()})
//	master := c.NodeFor("some key")
//	m := c.OpenSlot(c.Slot("some key"), c.NodeFor("another")) // now single keys get ASK, several TRYAGAIN
//	m.Finish()
//	master.Kill()
//	next := c.NextMaster("some key", master)
//
// On Linux [StartRedisWithClock] starts one server whose wall clock the test can set.
//
// If redis-server is missing, the test is skipped. With REFILL_NO_SKIP=1, as in CI, the test fails.
//
// [StartPostgres] and [StartMariaDB] start a database server in one or two seconds, and return its port:
//
//	port := realtest.StartPostgres(t, "-c", "max_connections=20") // further arguments go to the server
//	db, err := sqlx.Open("pgx", fmt.Sprintf("postgres://refill@127.0.0.1:%d/postgres", port))
//
// # Other processes
//
// A promise about many nodes is tested with many processes. The test binary starts itself again and runs one
// function in the new process. The test registers such functions before it calls [Main]. TestMain calls Main in
// place of m.Run:
//
//	func init() { realtest.Child("node", node) }
//
//	func TestMain(m *testing.M) { realtest.Main(m) }
//
//	// node runs in its own process. ctx ends when the test calls Stop, or has ended.
//	func node(ctx context.Context, args json.RawMessage, out *json.Encoder) error {
//		var addr string
//		if err := json.Unmarshal(args, &addr); err != nil {
//			return err
//		}
//		return out.Encode(event{Name: "ready"}) // a line for Next
//	}
//
//	func TestFrozenNode(t *testing.T) {
//		child := realtest.StartChild(t, "node", server.Addr())
//		var e event
//		child.Next(&e)  // the next line; fails the test if there is none
//		child.Freeze()  // a child has Thaw, Kill and Pid as well, like a server
//		child.Thaw()
//		err := child.Stop() // ends its ctx and waits; Wait only waits
//	}
//
// What a child prints to stderr or stdout is shown if the test fails. A data race in a child fails the test of its
// parent.
//
// # The network
//
// A [Proxy] stands between a client and a server and injects faults. Heal ends the faults:
//
//	proxy := realtest.StartProxy(t, server.Addr()) // clients use proxy.Addr()
//	lost := proxy.LoseReply("set")                 // the next SET is executed, its reply is lost: the connection is cut
//	<-lost
//	proxy.Delay(20 * time.Millisecond) // each reply arrives so much later
//	proxy.LoseMessages("RN1 ")         // messages that contain this are dropped, silently
//	cut := proxy.CutReply("RF1", 20)   // the next reply that contains this is cut after 20 bytes
//	proxy.BlackHole()                  // nothing passes, but no connection is cut
//	proxy.Reset()                      // cut all connections, accept new ones
//	proxy.Refuse()                     // cut all connections, refuse new ones
//	proxy.Heal()
//
// # Rules
//
// A test does not sleep for a fixed time, but waits, up to a limit, until a condition holds. This package sends signals
// only to processes that it started, by their id. A method of this package that can fail the test may be called only on
// the goroutine of the test.
package realtest
