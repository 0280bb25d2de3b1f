//go:build unix

package realtest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/realtest"
)

// The tests of this file make many calls of one Store at once, so that goredis sends these calls in pipelines. Then the
// tests break what the calls share: the connection, the server or the scripts. Each call must end with its own answer,
// and in its own time.

// gatheredTimeout is the time-out of most calls here. It is the longest time-out with which goredis still sends a call
// in a pipeline, because the machine is busy.
const gatheredTimeout = time.Second

// pipelineCounter counts the pipelines of a client and their commands.
type pipelineCounter struct{ pipelines, commands atomic.Int64 }

func (p *pipelineCounter) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (p *pipelineCounter) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (p *pipelineCounter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		p.pipelines.Add(1)
		p.commands.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}

// gathered returns a Store that already knows the time of its server, and a counter of the pipelines of its client.
func gathered(t testing.TB, c redis.UniversalClient) (*goredis.Store, *pipelineCounter) {
	t.Helper()
	t.Cleanup(func() { c.Close() })
	s, count := goredis.New(c), new(pipelineCounter)
	goredisMustAcquire(t, s, "product:warm", "a#1")
	if err := s.Release(context.Background(), "product:warm", "a#1"); err != nil {
		t.Fatal(err)
	}
	c.(interface{ AddHook(redis.Hook) }).AddHook(count)
	return s, count
}

// within makes one call with a time-out.
func within(d time.Duration, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return f(ctx)
}

// atOnce runs f for 0 to n-1 at the same time, and waits for all.
func atOnce(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// fill takes the lease of a key, and then stores a record, reports a failed load, or gives the lease back, as how says.
// It checks each answer.
func fill(t testing.TB, s *goredis.Store, key, token string, how int) error {
	var acquired driver.AcquireResult
	err := within(gatheredTimeout, func(ctx context.Context) (err error) {
		acquired, err = s.Acquire(ctx, driver.AcquireRequest{
			Key: key, Token: token, LeaseTTL: time.Minute, ClaimTTL: time.Minute, Mode: driver.Mode(how % 2),
		})
		return err
	})
	if err != nil || acquired.State != driver.Acquired || acquired.Failure != "" {
		return fmt.Errorf("%s acquired as %+v: %w", key, acquired, err)
	}
	record := goredisRecord(t, token, strings.Repeat(token, 1+how%50))
	switch how % 4 {
	case 0:
		err = within(gatheredTimeout, func(ctx context.Context) error { return s.Release(ctx, key, token) })
		record = nil
	case 1:
		err = within(gatheredTimeout, func(ctx context.Context) error {
			return s.Fail(ctx, driver.FailRequest{Key: key, Token: token, Failure: key, TTL: time.Minute})
		})
		record = nil
	default:
		var result driver.PublishResult
		err = within(gatheredTimeout, func(ctx context.Context) (err error) {
			result, err = s.Publish(ctx, driver.PublishRequest{
				Key: key, Token: token, Began: acquired.Now, Record: record, Keep: time.Minute,
			})
			return err
		})
		if err == nil && result != driver.Stored {
			err = fmt.Errorf("publish: %d", result)
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return reads(s, key, record)
}

// reads reads a key, and returns an error unless the value is want.
func reads(s *goredis.Store, key string, want []byte) error {
	var got []byte
	err := within(gatheredTimeout, func(ctx context.Context) (err error) {
		got, err = s.Get(ctx, key)
		return err
	})
	if err == nil && !bytes.Equal(got, want) {
		err = fmt.Errorf("%.40q, want %.40q", got, want)
	}
	if err != nil {
		return fmt.Errorf("get %s: %w", key, err)
	}
	return nil
}

// 1,000 callers fill and read keys of their own at once. Each must get its own answers, and each script must run once.
func TestGoredisGathersCalls(t *testing.T) {
	worlds := map[string]func() redis.UniversalClient{
		"cluster": overNodes(realtest.StartCluster(t, 3, 0)),
		"ring": func() redis.UniversalClient {
			return redis.NewRing(&redis.RingOptions{ContextTimeoutEnabled: true, Addrs: map[string]string{
				"a": realtest.StartRedis(t).Addr(), "b": realtest.StartRedis(t).Addr(),
			}})
		},
	}
	server := realtest.StartRedis(t)
	worlds["single"] = overOne(server)
	for name, open := range worlds {
		t.Run(name, func(t *testing.T) {
			s, count := gathered(t, open())
			server.ResetStats(t)
			const n = 1000
			atOnce(n, func(i int) {
				if err := fill(t, s, fmt.Sprint("product:", i), fmt.Sprintf("a#%d", i), i); err != nil {
					t.Error(err)
				}
			})
			p, c := count.pipelines.Load(), count.commands.Load()
			t.Logf("%d commands in %d pipelines", c, p)
			if p == 0 || c < 3*p {
				t.Error("the calls were not gathered")
			}
			if stats := server.Commandstats(t); name == "single" && stats["evalsha"]+stats["eval"] != 2*n {
				t.Errorf("%d and %d runs of scripts, want %d together", stats["evalsha"], stats["eval"], 2*n)
			}
		})
	}
}

// The connections break while 100 reads and 100 publications are in flight. A client with retries repeats these calls,
// so each call must get its own answer. Without retries, each call must end at once, with its answer or with an error.
func TestGoredisGatheredCallsOnABrokenConnection(t *testing.T) {
	ring := func(addr string) redis.UniversalClient {
		return redis.NewRing(&redis.RingOptions{ContextTimeoutEnabled: true, Addrs: map[string]string{"a": addr}})
	}
	single := func(addr string) redis.UniversalClient {
		return redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	}
	never := func(addr string) redis.UniversalClient {
		return redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1})
	}
	for name, open := range map[string]func(addr string) redis.UniversalClient{
		"single": single, "ring": ring, "without retries": never,
	} {
		t.Run(name, func(t *testing.T) {
			server := realtest.StartRedis(t)
			proxy := realtest.StartProxy(t, server.Addr())
			s, count := gathered(t, open(proxy.Addr()))
			const n = 100
			for i := range n {
				goredisMustAcquire(t, s, fmt.Sprint("product:", i), "a#1")
			}
			for range 5 {
				proxy.BlackHole()
				before := count.commands.Load()
				var broken atomic.Bool
				go func() {
					for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
						if count.commands.Load() >= before+n { // most calls are in flight
							break
						}
					}
					broken.Store(true)
					proxy.Reset()
					proxy.Heal()
				}()
				atOnce(2*n, func(i int) {
					key := fmt.Sprint("product:", i/2)
					err := within(gatheredTimeout, func(ctx context.Context) error {
						if i%2 == 0 {
							_, err := s.Get(ctx, key)
							return err
						}
						_, err := s.Publish(ctx, driver.PublishRequest{Key: key, Token: "a#1", Record: []byte(key), Keep: time.Minute})
						return err
					})
					if err != nil && (name != "without retries" || errors.Is(err, context.DeadlineExceeded)) {
						t.Errorf("%s: %v", key, err)
					}
				})
				if !broken.Load() {
					t.Error("the calls ended before the connections broke")
				}
			}
			for i := range n {
				if name == "without retries" {
					break
				}
				if err := reads(s, fmt.Sprint("product:", i), fmt.Append(nil, "product:", i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// The server is frozen under calls with different time-outs. Each must end at its own time-out. When the server answers
// again, so must the Store.
func TestGoredisGatheredCallsOnAFrozenServer(t *testing.T) {
	server := realtest.StartRedis(t)
	s, _ := gathered(t, overOne(server)())
	server.Freeze()
	atOnce(300, func(i int) {
		timeout := 100*time.Millisecond + time.Duration(i)*time.Millisecond
		steps := goredisSteps(t)
		step := goredisStep{"Get", steps[0].call}
		if i%2 == 0 {
			step = goredisStep{"Release", func(ctx context.Context, s *goredis.Store) error {
				return s.Release(ctx, fmt.Sprint("product:", i), "a#1")
			}}
		}
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		goredisInTime(t, step, s, ctx, timeout+100*time.Millisecond, context.DeadlineExceeded)
	})
	server.Thaw()
	atOnce(100, func(i int) {
		if err := fill(t, s, fmt.Sprint("product:", i), fmt.Sprintf("a#%d", i), i); err != nil {
			t.Error(err)
		}
	})
}

// A value of 16 MiB is written and read beside small ones. Every call must get its own answer.
func TestGoredisGatheredCallsBesideALargeValue(t *testing.T) {
	s, _ := gathered(t, overOne(realtest.StartRedis(t))())
	other, _ := gathered(t, overOne(realtest.StartRedis(t))()) // a Store that has not seen the size of the value
	for _, s := range []*goredis.Store{s, other} {
		large := bytes.Repeat([]byte("large"), 16<<20/5)
		goredisMustAcquire(t, s, "product:large", "a#1")
		var ended atomic.Bool
		var wg sync.WaitGroup
		for i := range 64 {
			wg.Go(func() {
				for n := 0; !ended.Load(); n++ {
					if err := fill(t, s, fmt.Sprintf("product:%d.%d", i, n), fmt.Sprintf("a#%d.%d", i, n), 2); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		ctx := context.Background()
		publish := driver.PublishRequest{Key: "product:large", Token: "a#1", Record: large, Keep: time.Minute}
		if result, err := s.Publish(ctx, publish); err != nil || result != driver.Stored {
			t.Error(result, err)
		}
		for range 5 {
			if err := reads(s, "product:large", large); err != nil {
				t.Error(err)
			}
		}
		ended.Store(true)
		wg.Wait()
	}
}

// The scripts are flushed again and again under traffic. No call may fail.
func TestGoredisGatheredCallsWhileScriptsAreFlushed(t *testing.T) {
	server := realtest.StartRedis(t)
	s, _ := gathered(t, overOne(server)())
	flusher := redis.NewClient(&redis.Options{Addr: server.Addr()})
	t.Cleanup(func() { flusher.Close() })
	var ended atomic.Bool
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			for n := 0; !ended.Load(); n++ {
				if err := fill(t, s, fmt.Sprintf("product:%d.%d", i, n), fmt.Sprintf("a#%d.%d", i, n), n); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 200 {
		flusher.ScriptFlush(context.Background())
	}
	ended.Store(true)
	wg.Wait()
}

// excuse reports whether a call may fail with err while a slot moves. go-redis follows at most three redirects, and
// then returns the redirect as an error.
func excuse(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || redis.HasErrorPrefix(err, "TRYAGAIN") ||
		redis.HasErrorPrefix(err, "MOVED") || redis.HasErrorPrefix(err, "ASK")
}

// A slot of a Cluster moves to another master under traffic, and back. While the slot is open, calls about its keys may
// fail as they do without pipelines. No other call may fail, and no call may get a wrong answer.
func TestGoredisGatheredCallsWhileASlotMoves(t *testing.T) {
	cluster := realtest.StartCluster(t, 3, 0)
	s, _ := gathered(t, overNodes(cluster)())
	const moving = "product:moving"
	slot := cluster.Slot(redisKeyOf(moving))
	from, to := cluster.NodeFor(redisKeyOf(moving)), (*realtest.Redis)(nil)
	for _, r := range cluster.Servers() {
		if r != from {
			to = r
		}
	}
	var keys []string // half of them in the slot that moves
	for i, others := 0, 0; len(keys) < 32; i++ {
		key := fmt.Sprint("product:", i)
		if in := cluster.Slot(redisKeyOf(key)) == slot; in || others < 16 {
			keys = append(keys, key)
			if !in {
				others++
			}
		}
	}
	var ended, open atomic.Bool
	var fills, excused atomic.Int64
	var wg sync.WaitGroup
	for _, key := range keys {
		moves := cluster.Slot(redisKeyOf(key)) == slot
		wg.Go(func() {
			for n := 0; !ended.Load(); n++ {
				before := open.Load()
				err := fill(t, s, key, fmt.Sprintf("a#%d", n), 2)
				switch {
				case err == nil:
					fills.Add(1)
				case moves && (before || open.Load()) && excuse(err):
					excused.Add(1)
				default:
					t.Errorf("the slot moves: %v, %.200v", moves, err)
					return
				}
				for end := time.Now().Add(10 * time.Second); err != nil || time.Now().Before(end); {
					invalidate := func(ctx context.Context) error { return s.Invalidate(ctx, "b", key) }
					if err = within(gatheredTimeout, invalidate); err == nil {
						break
					}
				}
			}
		})
	}
	for range 2 {
		open.Store(true)
		m := cluster.OpenSlot(slot, to)
		time.Sleep(100 * time.Millisecond) // the time of the move, not a synchronisation
		m.MoveKeys()
		m.Finish()
		time.Sleep(gatheredTimeout) // until the calls that began during the move have ended
		open.Store(false)
		was := fills.Load()
		eventually(t, "keys are filled after the move", func() bool { return fills.Load() > was+100 })
		from, to = to, from
	}
	ended.Store(true)
	wg.Wait()
	t.Logf("%d fills, %d excused", fills.Load(), excused.Load())
}

func redisKeyOf(full string) string { return goredisPrefix("refill").key(full, "") }

// BenchmarkGathered measures a read of 1 KiB by many callers at once.
func BenchmarkGathered(b *testing.B) {
	for _, callers := range []int{1, 16, 64} {
		b.Run(fmt.Sprint(callers, " callers"), func(b *testing.B) {
			s, count := gathered(b, overOne(realtest.StartRedis(b))())
			goredisMustAcquire(b, s, "product:1", "a#1")
			if _, err := s.Publish(context.Background(), driver.PublishRequest{
				Key: "product:1", Token: "a#1", Record: goredisRecord(b, "a#1", strings.Repeat("x", 1024)), Keep: time.Hour,
			}); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			b.ResetTimer()
			var n atomic.Int64
			atOnce(callers, func(int) {
				for n.Add(1) <= int64(b.N) {
					get := func(ctx context.Context) error { _, err := s.Get(ctx, "product:1"); return err }
					if err := within(gatheredTimeout, get); err != nil {
						b.Error(err)
					}
				}
			})
			b.ReportMetric(float64(count.commands.Load())/float64(b.N), "gathered/op")
		})
	}
}
