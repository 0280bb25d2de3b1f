//go:build unix

package realtest_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/internal/realtest"
	"github.com/refill-go/refill/refilltest"
)

// A goredisWorld is one or more servers, and makes clients of these servers. All cases of a suite share one world, and
// each case has a key prefix of its own.
type goredisWorld struct {
	servers []*goredisServer
	client  func(t testing.TB) redis.UniversalClient // makes a new client
	pass    func(time.Duration)                      // lets time pass for the servers; nil = by sleeping
	count   atomic.Int64                             // how many prefixes were given out
}

type goredisServer struct{ *realtest.Redis }

func (r *goredisServer) do(t testing.TB, args ...any) any {
	t.Helper()
	c := redis.NewClient(&redis.Options{Addr: r.Addr(), PoolSize: 1})
	defer c.Close()
	reply, err := c.Do(context.Background(), args...).Result()
	if err != nil {
		t.Fatal(args, err)
	}
	return reply
}

// connections counts the connections of a server, without the connection that this call makes.
func (r *goredisServer) connections(t testing.TB) int {
	list, _ := r.do(t, "client", "list").(string)
	return strings.Count(list, "\n") - 1
}

// goredisWorlds are the topologies and client settings on which goredis must work.
var goredisWorlds = map[string]func(t testing.TB) *goredisWorld{
	"single":    func(t testing.TB) *goredisWorld { return overSingle(t, redis.Options{}) },
	"deadlines": func(t testing.TB) *goredisWorld { return overSingle(t, redis.Options{ContextTimeoutEnabled: true}) },
	"resp2":     func(t testing.TB) *goredisWorld { return overSingle(t, redis.Options{Protocol: 2}) },
	"hidden":    overHidden,
	"cluster":   overCluster,
	"ring":      overRing,
}

func overSingle(t testing.TB, o redis.Options) *goredisWorld {
	server := realtest.StartRedis(t)
	o.Addr = server.Addr()
	return &goredisWorld{
		servers: []*goredisServer{{server}},
		client:  func(testing.TB) redis.UniversalClient { return redis.NewClient(&o) },
	}
}

// hidden hides the type of a client, so that goredis sees only a redis.UniversalClient.
type hidden struct{ redis.UniversalClient }

func overHidden(t testing.TB) *goredisWorld {
	w := overSingle(t, redis.Options{})
	open := w.client
	w.client = func(t testing.TB) redis.UniversalClient { return hidden{open(t)} }
	return w
}

func overCluster(t testing.TB) *goredisWorld {
	server := realtest.StartRedis(t, "--cluster-enabled", "yes")
	w := &goredisWorld{servers: []*goredisServer{{server}}}
	w.servers[0].do(t, "cluster", "addslotsrange", 0, 16383)
	eventually(t, "the cluster is up", func() bool {
		info, _ := w.servers[0].do(t, "cluster", "info").(string)
		return strings.Contains(info, "cluster_state:ok")
	})
	w.client = func(testing.TB) redis.UniversalClient {
		return redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{server.Addr()}})
	}
	return w
}

func overRing(t testing.TB) *goredisWorld {
	addrs, servers := map[string]string{}, []*goredisServer{}
	for i := range 3 {
		server := realtest.StartRedis(t)
		addrs[fmt.Sprint("shard", i)] = server.Addr()
		servers = append(servers, &goredisServer{server})
	}
	return &goredisWorld{servers: servers, client: func(testing.TB) redis.UniversalClient {
		return redis.NewRing(&redis.RingOptions{Addrs: addrs})
	}}
}

// overMiniredis is a world whose server runs in this process. The clients need no network, so they work in a synctest
// bubble. The server has no running clock: the test advances its time.
func overMiniredis(t testing.TB) *goredisWorld {
	server := miniredis.NewMiniRedis()
	t.Cleanup(func() {
		synctest.Wait() // until no command runs, because Close must not run during a command
		server.Close()
	})
	dial := func(context.Context, string, string) (net.Conn, error) {
		conn, err := server.Dial()
		if err != nil {
			return nil, err
		}
		return newBufferedConn(conn), nil
	}
	return &goredisWorld{pass: server.FastForward, client: func(testing.TB) redis.UniversalClient {
		return redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", Dialer: dial}) // an empty address would be resolved
	}}
}

// bufferedConn is a net.Pipe whose writes do not wait for the reader. A real socket has a buffer as well. Without a
// buffer, a client that writes a long pipeline and a server that writes its first replies would wait for each other.
type bufferedConn struct {
	net.Conn
	writes chan []byte
	closed chan struct{}
	once   sync.Once
}

func newBufferedConn(conn net.Conn) *bufferedConn {
	c := &bufferedConn{Conn: conn, writes: make(chan []byte, 1000), closed: make(chan struct{})}
	go func() {
		for {
			select {
			case b := <-c.writes:
				if _, err := conn.Write(b); err != nil {
					return
				}
			case <-c.closed:
				return
			}
		}
	}()
	return c
}

func (c *bufferedConn) Write(b []byte) (int, error) {
	select {
	case <-c.closed:
		return 0, net.ErrClosed
	case c.writes <- bytes.Clone(b):
		return len(b), nil
	}
}

func (c *bufferedConn) SetWriteDeadline(time.Time) error { return nil }
func (c *bufferedConn) SetDeadline(t time.Time) error    { return c.SetReadDeadline(t) }

func (c *bufferedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// full forbids SET to all clients. Then a SET in a script fails, as on a full server. The setting maxmemory would not
// do: a full Redis 7.0 still executes the writes of a script that has deleted something before.
func (w *goredisWorld) full(t testing.TB, full bool) {
	right := "+set"
	if full {
		right = "-set"
	}
	for _, server := range w.servers {
		server.do(t, "acl", "setuser", "default", right)
	}
}

func (w *goredisWorld) open(t testing.TB) redis.UniversalClient {
	c := w.client(t)
	t.Cleanup(func() { c.Close() })
	return c
}

func (w *goredisWorld) stores(t testing.TB) refilltest.StoreWorld {
	a, ctx, prefix := w.open(t), context.Background(), w.prefix()
	names := map[refilltest.Part]string{
		refilltest.PartLease: "/lease", refilltest.PartClaim: "/claim", refilltest.PartTag: "/tag",
	}
	must := func(cmd redis.Cmder) {
		t.Helper()
		if err := cmd.Err(); err != nil {
			t.Fatal(err)
		}
	}
	world := refilltest.StoreWorld{
		A: goredis.New(a, prefix.option()), B: goredis.New(w.open(t), prefix.option()), Pass: w.pass,
		Plant: func(key string, p refilltest.Part, data string) { must(a.Set(ctx, prefix.key(key, names[p]), data, 0)) },
		Garble: func(key string, p refilltest.Part) {
			must(a.Del(ctx, prefix.key(key, names[p])))
			must(a.RPush(ctx, prefix.key(key, names[p]), "garbage"))
		},
	}
	if w.servers != nil {
		world.Silence, world.Break = w.silence, func() { w.cut(t) }
		world.Full = func(full bool) { w.full(t, full) }
	}
	return world
}

func (w *goredisWorld) locks(t testing.TB) refilltest.LockWorld {
	a, prefix := w.open(t), w.prefix()
	world := refilltest.LockWorld{
		A: goredis.New(a, prefix.option()), B: goredis.New(w.open(t), prefix.option()), Pass: w.pass,
		Delete: func(key string) { a.Del(context.Background(), prefix.key(key, "/lock")) },
	}
	if w.servers != nil {
		world.Silence, world.Break = w.silence, func() { w.cut(t) }
	}
	return world
}

// silence freezes or thaws the servers. A frozen server keeps its connections open and answers nothing.
func (w *goredisWorld) silence(silent bool) {
	for _, server := range w.servers {
		if silent {
			server.Freeze()
		} else {
			server.Thaw()
		}
	}
}

// cut cuts all subscriptions.
func (w *goredisWorld) cut(t testing.TB) {
	for _, server := range w.servers {
		server.do(t, "client", "kill", "type", "pubsub")
	}
}

func (w *goredisWorld) prefix() goredisPrefix {
	return goredisPrefix(fmt.Sprint("case-", w.count.Add(1)))
}

type goredisPrefix string

func (p goredisPrefix) option() goredis.Option { return goredis.Prefix(string(p)) }

// key returns a Redis key. key implements the key format independently of goredis, so that the tests fail if goredis
// changes the format.
func (p goredisPrefix) key(full, part string) string {
	name, key, _ := strings.Cut(full, ":")
	hash := uint32(2166136261)
	for i := range len(full) {
		hash = (hash ^ uint32(full[i])) * 16777619
	}
	return fmt.Sprintf("%s:{%d}:%s%s:%s", p, hash%1024, name, part, key)
}

func TestGoredisStore(t *testing.T) {
	for name, make := range goredisWorlds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := make(t)
			refilltest.TestStore(t, refilltest.StoreHarness{World: w.stores})
		})
	}
}

func TestGoredisLocks(t *testing.T) {
	for name, make := range goredisWorlds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := make(t)
			refilltest.TestLocks(t, refilltest.LockHarness{World: w.locks})
		})
	}
}

// The suites run in synctest bubbles, so a goroutine or timer that is left behind fails the test.
func TestGoredisInABubble(t *testing.T) {
	refilltest.TestStore(t, refilltest.StoreHarness{Bubble: true, World: func(t testing.TB) refilltest.StoreWorld {
		return overMiniredis(t).stores(t)
	}})
	refilltest.TestLocks(t, refilltest.LockHarness{Bubble: true, World: func(t testing.TB) refilltest.LockWorld {
		return overMiniredis(t).locks(t)
	}})
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not true within 10 s: %s", what)
		}
	}
}
