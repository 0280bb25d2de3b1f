//go:build unix

package realtest

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// If envChild is set, a test binary acts as a child and runs no tests. envChild holds the name of the child's function,
// and envArgs the arguments of that function.
const (
	envChild = "REFILL_REALTEST_CHILD"
	envArgs  = "REFILL_REALTEST_ARGS"
)

// linesAhead is how many lines of a child may wait until the test reads them. If a child writes more lines, it blocks
// until the test has read some of them.
const linesAhead = 4096

var (
	children = map[string]ChildFunc{} // by name; written before Main, only read afterwards
	mainRuns bool                     // Main was called in this process
)

// ChildFunc is what a child process does. args is the argument of StartChild, as JSON. The test gets each value that
// the function encodes to out from [Proc.Next]. Only one goroutine at a time may use out. ctx ends when the test
// calls [Proc.Stop] or has ended. If the function does not return within 5 s after that, the process exits with
// status 2. If the function returns an error, the process prints the error and exits with status 1.
type ChildFunc func(ctx context.Context, args json.RawMessage, out *json.Encoder) error

// Child registers fn under a name. Call Child from an init function, or before [Main].
func Child(name string, fn ChildFunc) {
	if children[name] != nil {
		panic("realtest: two children have the name " + name)
	}
	children[name] = fn
}

// Main must be called by TestMain. In a child process, Main runs the function of the child. In the test's process, Main
// runs the tests. Main does not return. Loaders without a Config.Logger log nothing, in the tests and in child
// processes.
func Main(m interface{ Run() int }) {
	mainRuns = true
	slog.SetDefault(slog.New(slog.DiscardHandler))
	if name := os.Getenv(envChild); name != "" {
		os.Exit(runChild(name))
	}
	os.Exit(m.Run())
}

// runChild runs the function with this name and returns the exit status.
func runChild(name string) int {
	flag.Parse() // testing.Short panics before flag.Parse
	out := json.NewEncoder(os.Stdout)
	os.Stdout = os.Stderr // a stray print must not get between the lines for Next
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // returns after Stop, or when the test binary has ended
		cancel()
		time.Sleep(5 * time.Second)
		fmt.Fprintf(os.Stderr, "realtest: the child %s did not return after its context had ended\n", name)
		os.Exit(2)
	}()
	fn := children[name]
	if fn == nil {
		fmt.Fprintf(os.Stderr, "realtest: there is no child with the name %s\n", name)
		return 2
	}
	if err := fn(ctx, json.RawMessage(os.Getenv(envArgs)), out); err != nil {
		fmt.Fprintf(os.Stderr, "realtest: the child %s: %v\n", name, err)
		return 1
	}
	return 0
}

// Proc is a child process that runs one function of the test binary.
type Proc struct {
	*Process

	lines  chan json.RawMessage // closed at the end of the child's output
	stdin  io.Closer            // closing it ends the child's context
	stderr string               // the name of the file with what the child printed
	judged bool                 // the test has learned how the child ended (Wait, Stop), or has killed the child
}

// StartChild starts the function registered under name in its own process. The function receives args as JSON, at most
// 100 KB. The child is killed at the end of the test. The test fails if the child finds a data race, and if the child
// failed by itself and the test called neither Wait nor Stop.
func StartChild(t testing.TB, name string, args any) *Proc {
	t.Helper()
	if !mainRuns || children[name] == nil {
		t.Fatalf("realtest: TestMain has to call realtest.Main, after realtest.Child(%q, …)", name)
	}
	text, err := json.Marshal(args)
	if err != nil {
		t.Fatalf("realtest: arguments of the child %s: %v", name, err)
	}
	p := &Proc{lines: make(chan json.RawMessage, linesAhead), stderr: filepath.Join(t.TempDir(), "stderr")}
	if err := p.start(t, name, string(text)); err != nil {
		t.Fatalf("realtest: the child %s: %v", name, err)
	}
	t.Cleanup(p.cleanup)
	return p
}

// start runs the test binary as a child.
func (p *Proc) start(t testing.TB, name, args string) error {
	cmd := exec.Command(os.Args[0], "-test.run=^$") // if TestMain does not call Main, no test runs
	cmd.Env = append(os.Environ(), envChild+"="+name, envArgs+"="+args,
		"GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0") // by default the race detector takes a second to exit
	stderr, err := os.Create(p.stderr)
	if err != nil {
		return err
	}
	defer func() { _ = stderr.Close() }()
	// The pipes come from os.Pipe. exec.Cmd would close its own pipes at the end of the process, although these pipes
	// may still hold lines that read has not read.
	in, stdin, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	stdout, out, err := os.Pipe()
	if err != nil {
		return errors.Join(err, stdin.Close())
	}
	defer func() { _ = out.Close() }()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, stderr
	if p.Process, err = launch(t, name, cmd); err != nil {
		return errors.Join(err, stdin.Close(), stdout.Close())
	}
	p.stdin = stdin
	go p.read(stdout)
	return nil
}

// read sends the lines of the child to p.lines, until the child's output ends.
func (p *Proc) read(stdout io.ReadCloser) {
	defer func() { _ = stdout.Close() }()
	defer close(p.lines)
	for dec := json.NewDecoder(stdout); ; {
		var line json.RawMessage
		if dec.Decode(&line) != nil {
			return // the end of the output, or a line that Kill has cut short
		}
		p.lines <- line
	}
}

// Next decodes the next line of the child into v. Next fails the test if no line comes within 30 s, or if the output of
// the child has ended.
func (p *Proc) Next(v any) {
	p.t.Helper()
	if !p.NextWithin(v, waitLimit) {
		p.t.Fatalf("realtest: the child %s wrote no further line\n%s", p.name, p.printed())
	}
}

// NextWithin decodes the next line of the child into v. NextWithin returns false if no line comes within d, or if the
// output of the child has ended.
func (p *Proc) NextWithin(v any, d time.Duration) bool {
	p.t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case line, ok := <-p.lines:
		if !ok {
			return false
		}
		if err := json.Unmarshal(line, v); err != nil {
			p.t.Fatalf("realtest: the child %s wrote %s: %v", p.name, line, err)
		}
		return true
	case <-timer.C:
		return false
	}
}

// Stop ends the context of the child and waits until the child has ended. Stop returns the same error as [Proc.Wait].
func (p *Proc) Stop() error {
	p.t.Helper()
	_ = p.stdin.Close()
	return p.Wait()
}

// Wait waits until the child has ended by itself. If the child failed, the error contains what the child printed.
// Next still returns the lines that the test has not read.
func (p *Proc) Wait() error {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(waitLimit):
		p.t.Fatalf("realtest: the child %s did not end\n%s", p.name, p.printed())
	}
	p.judged = true
	if p.err != nil {
		return fmt.Errorf("the child %s: %w\n%s", p.name, p.err, p.printed())
	}
	return nil
}

// Kill kills the child with SIGKILL and returns when it has ended.
func (p *Proc) Kill() {
	p.t.Helper()
	p.judged = p.judged || !p.gone()
	p.Process.Kill()
}

// cleanup kills the child and reports failures that the test has not seen.
func (p *Proc) cleanup() {
	p.Kill()
	_ = p.stdin.Close()
	for range p.lines { // so that read can end
	}
	switch {
	case strings.Contains(p.printed(), "WARNING: DATA RACE"):
		p.t.Errorf("realtest: a data race in the child %s\n%s", p.name, p.printed())
	case !p.judged && p.err != nil:
		p.t.Errorf("realtest: the child %s failed: %v\n%s", p.name, p.err, p.printed())
	case p.t.Failed():
		p.t.Logf("realtest: the child %s printed:\n%s", p.name, p.printed())
	}
}

// printed returns the last 200 lines that the child printed, without the JSON lines for Next.
func (p *Proc) printed() string {
	text, err := os.ReadFile(p.stderr)
	if err != nil {
		return err.Error()
	}
	return string(lastLines(text, 200))
}
