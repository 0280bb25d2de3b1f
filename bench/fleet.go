package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/internal/realtest"
)

// outcome sums up the results of all processes of a fleet.
type outcome struct {
	result // sums over the processes; but Oldest, Longest and RSS are the largest, and First is the earliest

	warm, cold *hdrhistogram.Histogram
	start      int64 // µs since 1970
	redis      serverStats
	killed     int64 // when killAfter made the parent kill a process, µs since 1970
}

// fleet is a job that runs in several processes, with the Redis servers in the field servers or, if servers is nil,
// with one new empty Redis.
type fleet struct {
	*stage
	job
	processes int
	servers   []*realtest.Redis
	killAfter time.Duration // how long after the first load begins its process is killed (kill -9); 0 = no kill
}

// run starts the processes, lets them begin at the same moment and sums up their results. When run returns, all its
// processes and servers have ended.
func (b *bench) run(ctx context.Context, f fleet) outcome {
	f.stage, f.Profiles = b.sub(), b.profiles
	defer f.close()
	if f.servers == nil {
		f.servers = []*realtest.Redis{realtest.StartRedis(f)}
	}
	f.Redis = nil
	for _, s := range f.servers {
		f.Redis = append(f.Redis, s.Addr())
	}
	f.Instances, f.Keys, f.Entries = max(1, f.Instances), max(1, f.Keys), max(1000, f.Entries, f.Keys)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.Fatalf("%v", err)
	}
	defer l.Close()
	f.Starter = l.Addr().String()
	nodes := make([]*realtest.Proc, f.processes)
	for i := range nodes {
		f.Process = i
		nodes[i] = realtest.StartChild(f, "node", f.job)
	}
	servers := newServerWatch(f)
	before, start := f.begin(ctx, l, servers)
	o := f.collect(nodes)
	o.start, o.redis = start, servers.stats(ctx, f).less(before)
	for _, n := range nodes {
		n.Kill()
	}
	if o.Error != "" {
		b.progress("%s: %d of %d Gets failed: %.200s", f.Peer, o.Failed, o.Gets, o.Error)
	}
	return o
}

// begin waits until all processes are ready. Then begin sends each process the moment at which all processes must
// start.
func (f fleet) begin(ctx context.Context, l net.Listener, servers serverWatch) (before serverStats, start int64) {
	_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(30 * time.Second))
	conns := make([]net.Conn, f.processes)
	for i := range conns {
		var err error
		if conns[i], err = l.Accept(); err != nil {
			f.Fatalf("%s: a process does not become ready: %v", f.Peer, err)
		}
		defer conns[i].Close()
	}
	before = servers.stats(ctx, f)
	start = time.Now().Add(200 * time.Millisecond).UnixMicro()
	for _, c := range conns {
		if _, err := c.Write(binary.BigEndian.AppendUint64(nil, uint64(start))); err != nil {
			f.Fatalf("%s: a process ended before it began: %v", f.Peer, err)
		}
	}
	return before, start
}

// collect reads the messages of the processes until each process has sent its result.
func (f fleet) collect(nodes []*realtest.Proc) outcome {
	type line struct {
		process int
		message
	}
	lines := make(chan line)
	for i, n := range nodes {
		go func() {
			for m := (message{}); n.NextWithin(&m, f.For+time.Minute); m = (message{}) {
				lines <- line{i, m}
				if m.Result != nil {
					return
				}
			}
			lines <- line{process: i, message: message{Result: &result{Failed: 1, Error: "a process is gone"}}}
		}()
	}
	o := outcome{warm: newHistogram(), cold: newHistogram()}
	for left, killed := len(nodes), -1; left > 0; {
		switch s := <-lines; {
		case s.Result != nil:
			left--
			if s.process != killed {
				o.add(f, s.Result)
			}
		case s.Loads && f.killAfter > 0 && killed < 0:
			killed = s.process
			time.Sleep(f.killAfter)
			o.killed = time.Now().UnixMicro()
			nodes[killed].Kill()
		}
	}
	slices.SortFunc(o.Loads, func(a, b span) int { return cmp.Compare(a.Began, b.Began) })
	return o
}

func (o *outcome) add(f fleet, r *result) {
	for h, text := range map[*hdrhistogram.Histogram][]byte{o.warm: r.WarmGets, o.cold: r.ColdGets} {
		if text == nil {
			continue
		}
		part, err := hdrhistogram.Decode(text)
		if err != nil {
			f.Fatalf("%s: %v", f.Peer, err)
		}
		h.Merge(part)
	}
	o.Gets += r.Gets
	o.Failed += r.Failed
	o.Error = cmp.Or(o.Error, r.Error)
	o.Stale += r.Stale
	o.Oldest = max(o.Oldest, r.Oldest)
	o.Loads = append(o.Loads, r.Loads...)
	o.Relayed += r.Relayed
	o.CPU += r.CPU
	o.RSS = max(o.RSS, r.RSS)
	if r.First > 0 && (o.First == 0 || r.First < o.First) {
		o.First = r.First
	}
	for i, ns := range r.Longest {
		if i == len(o.Longest) {
			o.Longest = append(o.Longest, 0)
		}
		o.Longest[i] = max(o.Longest[i], ns)
	}
}

// mostAtOnce returns the highest number of spans that overlap. A span that begins where another span ends does not
// overlap with that span.
func mostAtOnce(spans []span) (most int) {
	type edge struct {
		at   int64
		step int
	}
	var edges []edge
	for _, s := range spans {
		edges = append(edges, edge{s.Began, 1}, edge{s.Ended, -1})
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Or(cmp.Compare(a.at, b.at), a.step-b.step) })
	now := 0
	for _, e := range edges {
		now += e.step
		most = max(most, now)
	}
	return most
}

// serverStats is what the servers of a fleet did.
//
// Commands counts the commands of clients and the commands that scripts call, because commandstats of Redis (7.0)
// counts both alike. Commands does not count commands that only set up a connection. Reads is how often a server read
// from a socket, which is once per command or pipeline. So Reads is the number of round trips, including those that set
// up connections. Moved is how often a server of a Cluster replied MOVED.
type serverStats struct {
	Commands, Reads, Connections, Moved int64
	In, Out                             int64 // bytes received and sent by the servers
	CPU                                 time.Duration
}

func (s serverStats) less(o serverStats) serverStats {
	s.Commands -= o.Commands
	s.Reads -= o.Reads
	s.Moved -= o.Moved
	s.In -= o.In
	s.Out -= o.Out
	s.CPU -= o.CPU
	return s // Connections is the current number, not a count since the start, so it stays
}

// serverWatch reads the statistics of the servers of a fleet. It has one client per server.
type serverWatch []*redis.Client

func newServerWatch(f fleet) (w serverWatch) {
	for _, s := range f.servers {
		rdb := redis.NewClient(&redis.Options{Addr: s.Addr(), PoolSize: 1})
		f.Cleanup(func() { _ = rdb.Close() })
		w = append(w, rdb)
	}
	return w
}

// setsUp matches the commands by which clients set up a connection, and INFO, which stats sends.
var setsUp = regexp.MustCompile(`^cmdstat_(info|hello|auth|select|command|client\||cluster\||readonly)`)

// stats returns the sums over all servers, without the commands and connections of serverWatch.
func (w serverWatch) stats(ctx context.Context, f fleet) (sum serverStats) {
	for _, rdb := range w {
		text, err := rdb.Info(ctx, "everything").Result()
		if err != nil {
			f.Fatalf("INFO: %v", err)
		}
		figure := infoFigures(text)
		for name, n := range figure {
			if strings.HasPrefix(name, "cmdstat_") && !setsUp.MatchString(name) {
				sum.Commands += int64(n)
			}
		}
		sum.Reads += int64(figure["total_reads_processed"]) - int64(figure["cmdstat_info"])
		sum.In += int64(figure["total_net_input_bytes"])
		sum.Out += int64(figure["total_net_output_bytes"])
		sum.Connections += int64(figure["connected_clients"]) - 1
		sum.Moved += int64(figure["errorstat_MOVED"])
		sum.CPU += time.Duration((figure["used_cpu_user"] + figure["used_cpu_sys"]) * float64(time.Second))
	}
	return sum
}

// infoFigures parses lines of "name:figure" and "name:calls=figure,…".
func infoFigures(text string) map[string]float64 {
	figures := map[string]float64{}
	for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), ":")
		value, _, _ = strings.Cut(value, ",")
		value = value[strings.IndexByte(value, '=')+1:]
		if f, err := strconv.ParseFloat(value, 64); err == nil {
			figures[name] = f
		}
	}
	return figures
}

// ms returns a percentile of a histogram of ns, in ms. It returns NaN if the histogram is empty.
func ms(h *hdrhistogram.Histogram, percent float64) float64 {
	if h.TotalCount() == 0 {
		return math.NaN()
	}
	return float64(h.ValueAtPercentile(percent)) / 1e6
}

// life is the longest time from a value to the next value of the key: the interval of Invalidate if there is one, and
// otherwise TTL, or Load if a load takes longer than TTL.
func (j job) life() time.Duration { return cmp.Or(j.Invalidate, max(j.TTL, j.Load)) }

// expiries is how many values of one key follow each other in a run, including the first value, which is loaded into an
// empty store.
func (j job) expiries() float64 { return math.Ceil(float64(j.For) / float64(j.life())) }

// midLife returns j with a run length (For) of about the given time. The run ends in the middle of the life of a value,
// so that small delays do not change how many values there are in a run.
func (j job) midLife(about time.Duration) job {
	lives := max(1, (about+j.life()/2)/j.life())
	j.For = lives*j.life() - j.life()/2
	return j
}

func (j job) String() string {
	return fmt.Sprintf("%d callers in each, TTL %v, a load takes %v, %v", j.Callers, j.TTL, j.Load, j.For)
}
