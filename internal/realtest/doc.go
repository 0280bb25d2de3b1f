// Package realtest starts real servers and real processes for tests, and harms them on purpose. It is a module of its
// own, so that nothing that only tests need reaches the go.mod of a user: a test that needs a real server lives in this
// module (or in examples/, bench/), never in the root module, which does not require it.
//
// # A server
//
// [StartRedis] starts a redis-server of its own for one test, empty, on a free port of the loopback, and ends it with
// the test:
//
//	server := realtest.StartRedis(t, "--maxmemory", "2mb") // further arguments go to redis-server
//	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
//
//	server.Freeze() // SIGSTOP: connections stay, nothing answers (a partition, as the client sees it)
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
// [StartSentinel] starts a master and two replicas behind three sentinels, in half a second; [StartCluster] a Redis Cluster, in
// two. They know who is master, and change it:
//
//	s := realtest.StartSentinel(t)
//	rdb := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: s.MasterName(), SentinelAddrs: s.Addrs()})
//	s.CutReplicas() // what the master takes from now on is lost with it
//	old := s.KillMaster()
//	s.ThawReplicas()
//	next := s.NextMaster(old)
//	next = s.Failover() // of a healthy master
//
//	c := realtest.StartCluster(t, 3, 1) // three masters with one replica each
//	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs()})
//	master := c.NodeFor("some key")
//	m := c.OpenSlot(c.Slot("some key"), c.NodeFor("another")) // keys are ASKed for, and several at once TRYAGAIN
//	m.Finish()
//	master.Kill()
//	next := c.NextMaster("some key", master)
//
// On Linux [StartRedisWithClock] starts one server whose wall clock the test sets.
//
// Where redis-server is missing the test is skipped; with REFILL_NO_SKIP=1, as in CI, it fails.
//
// # Other processes
//
// A promise about many nodes is tested with many processes: the test binary starts itself again and runs one function
// there. Functions are registered before [Main] runs, which takes the place of m.Run:
//
//	func init() { realtest.Child("node", node) }
//
//	func TestMain(m *testing.M) { realtest.Main(m) }
//
//	// node runs in a process of its own. ctx ends when the test calls Stop, or is gone.
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
//		child.Next(&e)  // the next line; fails the test when none comes
//		child.Freeze()  // Thaw, Kill, Pid: as for a server
//		child.Thaw()
//		err := child.Stop() // ends its ctx and waits; Wait only waits
//	}
//
// What a child prints elsewhere is shown when the test fails; a data race in a child fails the test of its parent.
//
// # The network between
//
// A [Proxy] stands between a client and a server and harms what passes; Heal ends the harm:
//
//	proxy := realtest.StartProxy(t, server.Addr()) // clients use proxy.Addr()
//	lost := proxy.LoseReply("set")                 // the next SET is carried out, its reply is lost: the connection is cut
//	<-lost
//	proxy.Delay(20 * time.Millisecond) // each reply comes so much later
//	proxy.LoseMessages("RN1 ")         // what the server says with this in it is dropped, silently
//	cut := proxy.CutReply("RF1", 20)   // the next thing said with this in it is cut after 20 bytes
//	proxy.BlackHole()                  // nothing passes any more, nothing is cut
//	proxy.Reset()                      // cut all connections, let new ones in
//	proxy.Refuse()                     // cut all connections, refuse new ones
//	proxy.Heal()
//
// # Rules
//
// No test sleeps for a fixed time: it waits for what it needs to see, with a limit. Only processes started here are
// signalled, by their id. Methods that can fail a test are called from the goroutine of that test.
package realtest
