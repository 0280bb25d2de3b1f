package goredis

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/breaker"
)

// A stub answers the commands of a client in place of a server. It is a hook, so nothing reaches a network, and the
// tests run in a bubble. answer gets the commands of one round trip and sets their replies. By default, the reply to
// GET is the key itself, or nothing if the key is that of a lease. The reply to a known script is 0, and the reply to
// an unknown script is NOSCRIPT.
type stub struct {
	answer func(ctx context.Context, cmds []redis.Cmder) error

	// quiet makes a round trip that fails leave the commands without an error, as a bad hook does.
	quiet bool

	mu     sync.Mutex // guards all below
	known  map[string]bool
	trips  [][]string // each round trip: its commands, in words, without the arguments of a script
	single int        // round trips of a single command that is not a pipeline
}

func (s *stub) DialHook(redis.DialHook) redis.DialHook {
	return func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no network") }
}

func (s *stub) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		s.mu.Lock()
		s.single++
		s.mu.Unlock()
		return s.trip(ctx, []redis.Cmder{cmd})
	}
}

func (s *stub) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return s.trip
}

func (s *stub) trip(ctx context.Context, cmds []redis.Cmder) error {
	var words []string
	for _, cmd := range cmds {
		words = append(words, word(cmd))
	}
	s.mu.Lock()
	s.trips = append(s.trips, words)
	s.mu.Unlock()
	if s.answer != nil {
		if err := s.answer(ctx, cmds); err != nil {
			for _, cmd := range cmds {
				if !s.quiet {
					cmd.SetErr(err)
				}
			}
			return err
		}
	}
	for _, cmd := range cmds {
		s.reply(cmd)
	}
	return cmds[0].Err()
}

func (s *stub) reply(cmd redis.Cmder) {
	if get, ok := cmd.(*redis.StringCmd); ok && cmd.Err() == nil && get.Val() == "" {
		if key := fmt.Sprint(cmd.Args()[1]); strings.Contains(key, "/lease:") {
			cmd.SetErr(redis.Nil)
		} else {
			get.SetVal(key)
		}
	}
	run, ok := cmd.(*redis.Cmd)
	if !ok || cmd.Err() != nil || run.Val() != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch hash := redis.NewScript(fmt.Sprint(cmd.Args()[1])).Hash(); {
	case cmd.Name() == "eval":
		s.known[hash] = true
	case cmd.Name() == "evalsha" && !s.known[fmt.Sprint(cmd.Args()[1])]:
		cmd.SetErr(replyError("NOSCRIPT no matching script"))
		return
	}
	run.SetVal(int64(0))
}

// replyError is an error reply of a server.
type replyError string

func (e replyError) Error() string { return string(e) }
func (e replyError) RedisError()   {}

// word describes a command: get:1, publish:1 (by its hash) or PUBLISH:1 (by its source).
func word(cmd redis.Cmder) string {
	args := cmd.Args()
	name, key := cmd.Name(), fmt.Sprint(args[1])
	for what, x := range map[string]script{
		"acquire": acquireScript, "publish": publishScript, "release": releaseScript, "fail": failScript,
	} {
		switch key {
		case x.hash:
			name, key = what, fmt.Sprint(args[3])
		case x.source:
			name, key = strings.ToUpper(what), fmt.Sprint(args[3])
		}
	}
	return name + ":" + key[strings.LastIndex(key, ":")+1:]
}

// flight returns the round trips since the last call of flight.
func (s *stub) flight() (trips []string) {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, words := range s.trips {
		trips = append(trips, strings.Join(words, " "))
	}
	s.trips, s.single = nil, 0
	return trips
}

// stubbed runs a test in a bubble, with a Store over a stub. The Store knows the time, and the server knows all
// scripts.
func stubbed(t *testing.T, test func(t *testing.T, s *Store, server *stub)) {
	synctest.Test(t, func(t *testing.T) {
		server := &stub{known: make(map[string]bool)}
		c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true})
		defer c.Close()
		c.AddHook(server)
		test(t, newStubbed(c, server), server)
		time.Sleep(2 * stubTimeout) // until all calls have ended
	})
}

func newStubbed(c redis.UniversalClient, servers ...*stub) *Store {
	s := New(c)
	s.clock.learn(sample{server: time.Now()})
	for _, x := range []script{acquireScript, publishScript, releaseScript, failScript} {
		s.known.hashes.Store(x.hash, true)
		for _, server := range servers {
			server.known[x.hash] = true
		}
	}
	return s
}

const stubTimeout = 250 * time.Millisecond // the default StoreTimeout

// A caller makes one call of a Store on a goroutine of its own.
type caller struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error
	took   time.Duration
}

func start(t *testing.T, f func(ctx context.Context) error) *caller {
	return startWithin(t, stubTimeout, f)
}

func startWithin(t *testing.T, d time.Duration, f func(ctx context.Context) error) *caller {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	c := &caller{cancel: cancel, done: make(chan struct{})}
	began := time.Now()
	go func() {
		defer close(c.done)
		defer cancel()
		c.err = f(ctx)
		c.took = time.Since(began)
	}()
	synctest.Wait()
	return c
}

// get returns a call that reads a key. The answer of the stub is the key, so a caller that gets the answer of another
// caller is found out.
func get(s *Store, key string) func(context.Context) error {
	return func(ctx context.Context) error {
		b, err := s.Get(ctx, "p:"+key)
		if want := s.keys("p:" + key).value(); err == nil && string(b) != want {
			return fmt.Errorf("read %q, want %q", b, want)
		}
		return err
	}
}

func publish(s *Store, key string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := s.Publish(ctx, driver.PublishRequest{Key: "p:" + key, Token: "a#1", Record: []byte("x")})
		return err
	}
}

func release(s *Store, key string) func(context.Context) error {
	return func(ctx context.Context) error { return s.Release(ctx, "p:"+key, "a#1") }
}

// acquire calls Acquire, whose reply from the stub is not an Acquired one.
func acquire(s *Store, key string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := s.Acquire(ctx, driver.AcquireRequest{Key: "p:" + key, Token: "a#1", Mode: driver.Wait})
		if errors.Is(err, errReply) || err != nil && strings.Contains(err.Error(), "unexpected type") {
			return nil
		}
		return err
	}
}

func (c *caller) wants(t *testing.T, want error, within time.Duration) {
	t.Helper()
	<-c.done
	if !errors.Is(c.err, want) || want == nil && c.err != nil || c.took > within {
		t.Errorf("%v after %v, want %v within %v", c.err, c.took, want, within)
	}
}

func wantTrips(t *testing.T, server *stub, want ...string) {
	t.Helper()
	if got := server.flight(); strings.Join(got, " | ") != strings.Join(want, " | ") {
		t.Errorf("round trips %q, want %q", got, want)
	}
}

// slow makes each round trip of the stub last d.
func slow(d time.Duration) func(context.Context, []redis.Cmder) error {
	return func(context.Context, []redis.Cmder) error { time.Sleep(d); return nil }
}

// If two reads are in flight, further reads wait, and must go out together when the first of the two returns. The same
// holds for scripts if one script is in flight. All callers must get their own answers, and nothing may be sent twice.
func TestCallsAreGathered(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		server.answer = slow(time.Millisecond)
		var callers []*caller
		for i := range 6 {
			callers = append(callers, start(t, get(s, fmt.Sprint(i))))
		}
		for i := range 4 {
			callers = append(callers, start(t, publish(s, fmt.Sprint(i))))
		}
		for _, c := range callers {
			c.wants(t, nil, 2*time.Millisecond)
		}
		if server.single != 3 {
			t.Errorf("%d commands went alone, want 3", server.single)
		}
		got := strings.Join(server.flight(), "|")
		for _, want := range []string{"get:0|get:1|publish:0|", "get:2 get:3 get:4 get:5", "publish:1 publish:2 publish:3"} {
			if !strings.Contains(got, want) {
				t.Errorf("round trips %q, want %q among them", got, want)
			}
		}
	})
}

// Callers one after the other must go alone, without a goroutine of the Store.
func TestACallByItselfIsNotGathered(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		for range 3 {
			start(t, get(s, "1")).wants(t, nil, 0)
			start(t, publish(s, "1")).wants(t, nil, 0)
		}
		if server.single != 6 {
			t.Errorf("%d commands went alone, want 6", server.single)
		}
	})
}

// A pipeline has at most maxBatch commands. It takes no further command once its arguments have maxBatchBytes. The
// commands that are left must go out in the next pipeline.
func TestPipelinesAreBounded(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		server.answer = slow(time.Millisecond)
		for i := range mostReads + maxBatch + 10 {
			start(t, get(s, fmt.Sprint(i)))
		}
		time.Sleep(10 * time.Millisecond)
		var sizes []int
		for _, words := range server.flight() {
			sizes = append(sizes, strings.Count(words, ":"))
		}
		slices.Sort(sizes)
		if fmt.Sprint(sizes) != fmt.Sprint([]int{1, 1, 10, maxBatch}) {
			t.Errorf("round trips of %v commands", sizes)
		}
		record := []byte(strings.Repeat("x", maxShared-1000))
		for i := range 7 {
			start(t, func(ctx context.Context) error {
				_, err := s.Publish(ctx, driver.PublishRequest{Key: fmt.Sprint("p:", i), Token: "a#1", Record: record})
				return err
			})
		}
		time.Sleep(10 * time.Millisecond)
		sizes = nil
		for _, words := range server.flight() {
			sizes = append(sizes, strings.Count(words, ":"))
		}
		if fmt.Sprint(sizes) != fmt.Sprint([]int{1, 5, 1}) {
			t.Errorf("round trips of %v commands with 63 KB each", sizes)
		}
	})
}

// A call with a large argument must go at once, alone, and so must a read of a key whose value was large. Other calls
// do not wait for such a call.
func TestLargeCallsGoAlone(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		server.answer = slow(time.Millisecond)
		busy := func() {
			for range mostReads {
				start(t, get(s, "small"))
			}
			start(t, publish(s, "small"))
		}
		busy()
		start(t, func(ctx context.Context) error {
			_, err := s.Publish(ctx, driver.PublishRequest{Key: "p:large", Token: "a#1", Record: make([]byte, maxShared+1)})
			return err
		}).wants(t, nil, time.Millisecond)
		synctest.Wait()
		server.flight()
		busy()
		start(t, get(s, "large"))
		wantTrips(t, server, "get:small", "get:small", "publish:small", "get:large")
		time.Sleep(time.Second) // the value was small this time
		busy()
		start(t, get(s, "large"))
		wantTrips(t, server, "get:small", "get:small", "publish:small")
		time.Sleep(time.Second)
		for range mostReads { // large reads do not hold up small ones
			s.pipelines.large.note(s.keys("p:large").value(), maxShared+1)
			start(t, get(s, "large"))
		}
		server.flight()
		start(t, get(s, "small"))
		wantTrips(t, server, "get:small")
	})
}

// A caller leaves as soon as its ctx ends. If its command waits, the command must not be sent. If the command was sent,
// the pipeline goes on for the other callers, also when the caller was the first of the pipeline. A late reply must not
// be written to the command that the caller has returned already. Otherwise the race detector would report it.
func TestACallerLeaves(t *testing.T) {
	for name, c := range map[string]struct {
		call func(s *Store, key string) func(context.Context) error
		most int
	}{"get": {get, mostReads}, "publish": {publish, mostScripts}} {
		t.Run(name, func(t *testing.T) {
			stubbed(t, func(t *testing.T, s *Store, server *stub) {
				server.answer = slow(5 * time.Millisecond)
				var first []*caller
				for range c.most {
					first = append(first, start(t, c.call(s, "0")))
				}
				waiting, left, stays := start(t, c.call(s, "1")), start(t, c.call(s, "2")), start(t, c.call(s, "3"))
				waiting.cancel()
				waiting.wants(t, context.Canceled, 0)
				for _, c := range first {
					c.wants(t, nil, 5*time.Millisecond)
				}
				synctest.Wait()
				left.cancel()
				left.wants(t, context.Canceled, 5*time.Millisecond)
				stays.wants(t, nil, 10*time.Millisecond)
				if got := server.flight(); len(got) != c.most+1 || got[c.most] != name+":2 "+name+":3" {
					t.Errorf("round trips %q", got)
				}
			})
		})
	}
}

// The server answers after the deadlines of some callers. Each of these must return at its own deadline, and the others
// must get their answers. The ctx of the pipeline must end at the latest deadline.
func TestEachCallHasItsOwnTime(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		server.answer = func(ctx context.Context, cmds []redis.Cmder) error {
			if len(cmds) > 1 {
				end, _ := ctx.Deadline()
				if left := time.Until(end); left != 300*time.Millisecond-time.Millisecond {
					t.Errorf("the pipeline has %v left", left)
				}
				time.Sleep(200 * time.Millisecond)
			}
			time.Sleep(time.Millisecond)
			return ctx.Err()
		}
		first := start(t, publish(s, "0"))
		short := startWithin(t, 50*time.Millisecond, publish(s, "1"))
		long := startWithin(t, 300*time.Millisecond, publish(s, "2"))
		first.wants(t, nil, time.Millisecond)
		short.wants(t, context.DeadlineExceeded, 50*time.Millisecond)
		long.wants(t, nil, 202*time.Millisecond)
	})
}

// The server does not answer the first pipelines. The calls behind them must not wait for longer than patience.
func TestAStuckPipelineHoldsUpNoOther(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		stuck := 0
		server.answer = func(ctx context.Context, cmds []redis.Cmder) error {
			if strings.HasSuffix(word(cmds[0]), ":stuck") {
				stuck++
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}
		for range 3 {
			start(t, get(s, "stuck"))
		}
		start(t, publish(s, "stuck"))
		for i := range 5 {
			start(t, get(s, fmt.Sprint(i)))
			start(t, publish(s, fmt.Sprint(i))).wants(t, nil, patience)
		}
		time.Sleep(stubTimeout)
		synctest.Wait()
		if stuck != 4 {
			t.Errorf("%d round trips with a stuck call, want 4", stuck)
		}
		if n := len(s.pipelines.servers); n != 1 {
			t.Fatalf("%d servers", n)
		}
		for kind := range 2 {
			if g := &s.pipelines.servers[nil][kind]; g.running != 0 || len(g.ends)+len(g.others) != 0 {
				t.Errorf("kind %d: %d run, %d and %d wait, though all calls have ended", kind, g.running, len(g.ends),
					len(g.others))
			}
		}
	})
}

// While the server is slow, more than mostScripts pipelines open. When the server is quick again, the additional
// pipelines must end, although commands arrive all the time.
func TestAdditionalPipelinesEnd(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		began := time.Now()
		var trips atomic.Int64
		server.answer = func(context.Context, []redis.Cmder) error {
			if time.Since(began) < 100*time.Millisecond {
				time.Sleep(3 * patience)
			} // the pipelines do not end at the same moment, so that each finds commands in the queue
			time.Sleep(time.Millisecond + time.Duration(trips.Add(1)%7)*33*time.Microsecond)
			return nil
		}
		running := func() int {
			g := &s.pipelines.servers[nil][scripts] // start has made it
			g.mu.Lock()
			defer g.mu.Unlock()
			return g.running
		}
		most := 0
		for time.Since(began) < 160*time.Millisecond {
			start(t, publish(s, "1"))
			time.Sleep(20 * time.Microsecond)
			most = max(most, running())
		}
		if now := running(); most < 3 || now > mostScripts {
			t.Errorf("up to %d pipelines, and %d in the end, want at least 3, and %d", most, now, mostScripts)
		}
	})
}

// Many reads and Acquires wait. Publications must not wait for the reads, and must go before all Acquires, because
// other nodes wait for them.
func TestEndsOfFillsGoFirst(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		server.answer = slow(time.Millisecond)
		for i := range 10 {
			start(t, get(s, fmt.Sprint(i)))
		}
		start(t, publish(s, "0")).wants(t, nil, time.Millisecond)
		time.Sleep(10 * time.Millisecond)
		server.flight()
		start(t, acquire(s, "0"))
		for i := range maxBatch {
			start(t, acquire(s, fmt.Sprint(i)))
		}
		start(t, release(s, "1"))
		start(t, publish(s, "2"))
		time.Sleep(10 * time.Millisecond)
		if trips := server.flight(); !strings.HasPrefix(trips[1], "release:1 publish:2 acquire:0 acquire:1 ") {
			t.Errorf("%.100q", trips[1])
		}
	})
}

// The server forgets its scripts. Only the refused commands must be sent again, and each pipeline must have the source
// of a script at most once.
func TestScriptsThatWereFlushed(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		server.answer = slow(time.Millisecond)
		callers := []*caller{start(t, publish(s, "0"))}
		for i := range 3 {
			callers = append(callers, start(t, release(s, fmt.Sprint(i))), start(t, publish(s, fmt.Sprint(i))))
		}
		server.mu.Lock()
		delete(server.known, releaseScript.hash)
		server.mu.Unlock()
		for _, c := range callers {
			c.wants(t, nil, 3*time.Millisecond)
		}
		wantTrips(t, server, "publish:0", "release:0 publish:0 release:1 publish:1 release:2 publish:2",
			"RELEASE:0 release:1 release:2")
	})
}

// Two Loaders share a Store. Each pipeline with calls of both fails. Each Loader must count one failure per pipeline,
// and none for a call that was not sent.
func TestTheBreakerCountsAPipelineOnce(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		const timeout = 50 * time.Millisecond // a failure counts if it took at least a tenth of this time
		server.answer = func(_ context.Context, cmds []redis.Cmder) error {
			time.Sleep(patience + timeout/10)
			if len(cmds) > 1 {
				return io.EOF
			}
			return nil
		}
		opened := make(chan string, 100)
		var breakers []*breaker.Breaker
		for _, name := range []string{"a", "b"} {
			b := breaker.New(s, timeout, func(error) { opened <- name }, func() {})
			defer b.Close()
			breakers = append(breakers, b)
		}
		for range 100 {
			blocks := start(t, release(s, "1"))
			waits := startWithin(t, patience-time.Millisecond, func(ctx context.Context) error {
				return breakers[0].Release(ctx, "p:1", "a#1")
			})
			waits.wants(t, context.DeadlineExceeded, patience-time.Millisecond)
			blocks.wants(t, nil, time.Second)
		}
		if len(opened) != 0 {
			t.Error("open after calls that were never sent")
		}
		for range 5 {
			if len(opened) != 0 {
				t.Error("open after less than five pipelines that failed")
			}
			calls := []*caller{start(t, release(s, "1"))}
			for i := range 40 {
				calls = append(calls, start(t, func(ctx context.Context) error {
					return breakers[i%2].Release(ctx, "p:1", "a#1")
				}))
			}
			for i, c := range calls {
				if <-c.done; i > 0 && !errors.Is(c.err, io.EOF) {
					t.Error(c.err)
				}
			}
		}
		synctest.Wait()
		if len(opened) != 2 {
			t.Errorf("%d breakers opened after five pipelines that failed, want 2", len(opened))
		}
	})
}

// A server of a Cluster or of a Ring does not answer. Calls to another server must not wait at all.
func TestASlowServerHoldsUpNoOther(t *testing.T) {
	for name, newClient := range map[string]func(client func(*redis.Options) *redis.Client) redis.UniversalClient{
		"cluster": func(client func(*redis.Options) *redis.Client) redis.UniversalClient {
			return redis.NewClusterClient(&redis.ClusterOptions{
				ContextTimeoutEnabled: true, NewClient: client,
				ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
					return []redis.ClusterSlot{
						{Start: 0, End: 8191, Nodes: []redis.ClusterNode{{Addr: "127.0.0.1:1"}}},
						{Start: 8192, End: 16383, Nodes: []redis.ClusterNode{{Addr: "127.0.0.1:2"}}},
					}, nil
				},
			})
		},
		"ring": func(client func(*redis.Options) *redis.Client) redis.UniversalClient {
			return redis.NewRing(&redis.RingOptions{
				ContextTimeoutEnabled: true, NewClient: client, HeartbeatFrequency: time.Hour,
				Addrs: map[string]string{"1": "127.0.0.1:1", "2": "127.0.0.1:2"},
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				stuck, well := &stub{known: make(map[string]bool)}, &stub{known: make(map[string]bool)}
				stuck.answer = func(ctx context.Context, cmds []redis.Cmder) error {
					<-ctx.Done()
					return ctx.Err()
				}
				c := newClient(func(o *redis.Options) *redis.Client {
					c := redis.NewClient(o)
					if strings.HasSuffix(o.Addr, ":1") {
						c.AddHook(stuck)
					} else {
						c.AddHook(well)
					}
					return c
				})
				defer c.Close()
				s := newStubbed(c, stuck, well)
				var slow, quick []*caller
				busy := "" // a key of the server that answers
				for i := range 100 {
					key := fmt.Sprint(i)
					one, err := s.pipelines.serverOf(t.Context(), s.keys("p:"+key).value())
					if err != nil {
						t.Fatal(err)
					}
					if strings.HasSuffix(one.Options().Addr, ":1") {
						slow = append(slow, start(t, get(s, key)), start(t, publish(s, key)))
					} else {
						quick, busy = append(quick, start(t, get(s, key)), start(t, publish(s, key))), key
					}
				}
				for _, c := range quick {
					c.wants(t, nil, 0)
				}
				for _, c := range slow {
					c.wants(t, context.DeadlineExceeded, stubTimeout)
				}
				if len(slow) < 20 || len(quick) < 20 || len(stuck.flight()) >= len(slow) {
					t.Errorf("%d calls to the one server and %d to the other", len(slow), len(quick))
				}
				well.answer = func(context.Context, []redis.Cmder) error { time.Sleep(time.Millisecond); return nil }
				var gathered []*caller
				for range 10 {
					gathered = append(gathered, start(t, get(s, busy)), start(t, release(s, busy)))
				}
				for _, c := range gathered {
					c.wants(t, nil, 2*time.Millisecond)
				}
				time.Sleep(time.Second)
			})
		})
	}
}

// go-redis repeats a single command after some errors, but not a command of a pipeline. Such a command must be repeated
// alone. The others keep their replies.
func TestWhatGoRedisDoesNotRepeatInAPipeline(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		server.answer = func(_ context.Context, cmds []redis.Cmder) error {
			time.Sleep(time.Millisecond)
			if len(cmds) > 1 {
				cmds[1].SetErr(replyError("TRYAGAIN keys are split"))
			}
			return nil
		}
		callers := []*caller{start(t, publish(s, "0"))}
		for i := range 3 {
			callers = append(callers, start(t, publish(s, fmt.Sprint(i))))
		}
		for _, c := range callers {
			c.wants(t, nil, 3*time.Millisecond)
		}
		wantTrips(t, server, "publish:0", "publish:0 publish:1 publish:2", "publish:1")
	})
}

// A hook fails without giving the commands an error. All calls of the pipeline must fail.
func TestAHookThatFails(t *testing.T) {
	stubbed(t, func(t *testing.T, s *Store, server *stub) {
		server.quiet = true
		server.answer = func(_ context.Context, cmds []redis.Cmder) error {
			if time.Sleep(time.Millisecond); len(cmds) > 1 {
				return io.EOF
			}
			return nil
		}
		callers := []*caller{start(t, publish(s, "0"))}
		for i := range 3 {
			callers = append(callers, start(t, publish(s, fmt.Sprint(i))))
		}
		for i, c := range callers {
			if <-c.done; i > 0 && !errors.Is(c.err, io.EOF) {
				t.Errorf("%d: %v", i, c.err)
			}
		}
	})
}
