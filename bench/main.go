// Bench measures refill, its peers (other libraries), and raw operations such as a bare GET, which no cache can beat.
// One run measures all of these subjects on one machine, with servers that bench starts.
//
//	go run ./bench -suite l1,l2 -rounds 5
//	go run ./bench -suite stampede -peers 'refill|rocks|sturdyc' -json out.json -svg pictures
//
// Tables go to stdout as Markdown, progress to stderr. Compare ratios, because absolute times depend on the machine.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

// bench is one run of the program.
type bench struct {
	rounds int            // samples per figure (times turnChunks in suites with turns); a table shows the median
	length time.Duration  // of each run with traffic
	only   *regexp.Regexp // the subjects to measure
	tables *regexp.Regexp // the tables to make, in the suites l2, miss, stampede and scale
	report Report

	processes, callers int    // processes of a fleet, and callers in each process
	nodes, keys        int    // the largest numbers in the suite scale
	rate               int    // Gets per second of the whole fleet in the suite mixed
	profiles           string // directory for CPU profiles

	*stage // starts servers and processes, and ends them
}

// suites are in the order in which they run.
var suites = []struct {
	name, about string
	run         func(context.Context, *bench) error
}{
	{"l1", "hits in the memory of the process", l1},
	{"l2", "hits in Redis", l2},
	{"miss", "new keys, each of which one caller loads", miss},
	{"again", "a Get right after a load of its key", again},
	{"heap", "what an entry in memory needs", heap},
	{"idle", "what Loaders cost that are not used", idle},
	{"stampede", "one hot key in a fleet: expiry, slow loads, cold start, invalidation, kill -9", stampede},
	{"wait", "what a caller loses by waiting for a load on another node", wait},
	{"mixed", "many keys, most of them rarely asked for", mixed},
	{"scale", "refill alone: more nodes, more keys, a Cluster", scale},
}

func main() {
	if slices.Contains(os.Args, "-test.run=^$") {
		testing.Init() // realtest starts a child with the flags of a test binary
	}
	realtest.Main(program{})
}

// program is what realtest.Main runs in the process that the user starts. In a child process, realtest.Main runs a
// function registered with realtest.Child.
type program struct{}

// Run returns the exit status.
func (program) Run() int {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

func run() error {
	var names []string
	what := "what to measure, of"
	for _, s := range suites {
		names, what = append(names, s.name), what+fmt.Sprintf("\n%-10s%s", s.name, s.about)
	}
	var b bench
	suite := flag.String("suite", strings.Join(names, ","), what+"\n")
	only := flag.String("peers", "", "regexp of subjects; empty = all")
	tables := flag.String("tables", "", "regexp of the tables of l2, miss, stampede and scale; empty = all")
	flag.IntVar(&b.rounds, "rounds", 5, "samples per figure; five times as many in l2 and miss")
	flag.DurationVar(&b.length, "for", 10*time.Second, "length of each run with traffic")
	flag.IntVar(&b.processes, "processes", 8, "size of a fleet")
	flag.IntVar(&b.callers, "callers", 200, "in each process of a fleet")
	flag.IntVar(&b.nodes, "nodes", 64, "as many at most in the suite scale")
	flag.IntVar(&b.keys, "keys", 1_000_000, "as many at most in the suite scale")
	flag.IntVar(&b.rate, "rate", 15_500, "Gets per second of the fleet in mixed; more keep the processors busier")
	flag.StringVar(&b.profiles, "profile", "",
		"directory for a CPU profile of each process, of the last run of a subject")
	toJSON := flag.String("json", "", "file for every sample")
	toSVG := flag.String("svg", "", "directory for pictures")
	from := flag.String("from", "", "a file of -json to draw from: nothing is measured")
	flag.Parse()

	if *from != "" {
		return redraw(*from, *toSVG)
	}
	for name := range strings.SplitSeq(*suite, ",") {
		if !slices.Contains(names, name) {
			return fmt.Errorf("-suite: %q, must be one of %s", name, strings.Join(names, ", "))
		}
	}
	for name, value := range map[string]int{
		"rounds": b.rounds, "processes": b.processes, "callers": b.callers, "nodes": b.nodes, "keys": b.keys,
		"rate": b.rate,
	} {
		if value < 1 {
			return fmt.Errorf("-%s: %d, must be at least 1", name, value)
		}
	}
	var err, err2 error
	b.only, err = regexp.Compile(*only)
	b.tables, err2 = regexp.Compile(*tables)
	if err = errors.Join(err, err2); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	b.report, b.stage = Report{Machine: machine(), Args: os.Args[1:]}, newStage()
	defer b.stage.close()
	stopProfile, err := profile(b.profiles, "bench")
	if err != nil {
		return fmt.Errorf("-profile: %w", err)
	}
	defer stopProfile()
	if err := b.measure(ctx, strings.Split(*suite, ",")); err != nil {
		return err
	}
	return errors.Join(writeJSON(*toJSON, &b.report), drawAll(*toSVG, &b.report))
}

// measure runs the suites with the given names.
func (b *bench) measure(ctx context.Context, names []string) error {
	for _, s := range suites {
		if !slices.Contains(names, s.name) {
			continue
		}
		if err := s.run(ctx, b); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// subjects returns the peers for which fits returns true and -peers matches. The peers named in always do not depend on
// -peers.
func (b *bench) subjects(fits func(peers.Peer) bool, always ...string) (fit []peers.Peer) {
	for _, p := range peers.All() {
		if fits(p) && (b.only.MatchString(p.Name) || slices.Contains(always, p.Name)) {
			fit = append(fit, p)
		}
	}
	return fit
}

// profile writes a CPU profile of this process until stop is called. If dir is empty, profile does nothing.
func profile(dir, name string) (stop func(), err error) {
	if dir == "" {
		return func() {}, nil
	}
	f, err := os.Create(filepath.Join(dir, name+".prof"))
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() {
		pprof.StopCPUProfile()
		_ = f.Close() // if this fails, pprof reports that the profile is truncated
	}, nil
}

// progress prints to stderr what runs now.
func (b *bench) progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s "+format+"\n", append([]any{time.Now().Format(time.TimeOnly)}, args...)...)
}

// done adds a complete table to the report, and prints the table.
func (b *bench) done(t *Table) {
	b.report.Tables = append(b.report.Tables, t)
	t.Write(os.Stdout)
}

// redraw draws the report of an earlier run.
func redraw(file, dir string) error {
	if dir == "" {
		return errors.New("-from: needs -svg")
	}
	r, err := readJSON(file)
	if err != nil {
		return fmt.Errorf("-from: %s: %w", file, err)
	}
	return drawAll(dir, &r)
}

func readJSON(file string) (r Report, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(text, &r)
}

func writeJSON(file string, r *Report) error {
	if file == "" {
		return nil
	}
	text, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}
