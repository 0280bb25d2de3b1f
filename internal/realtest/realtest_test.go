//go:build unix

package realtest

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
)

func TestMain(m *testing.M) { Main(m) }

// fakeT is a testing.TB that a test of this package runs and that may fail or be skipped. fakeT records what its test
// logged.
type fakeT struct {
	testing.TB // nil unless a test of this package sets it

	mu      sync.Mutex
	log     strings.Builder
	failed  bool
	skipped bool
	cleanup []func()
}

func (f *fakeT) Helper()          {}
func (f *fakeT) Cleanup(c func()) { f.cleanup = append(f.cleanup, c) }

func (f *fakeT) Failed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failed
}

func (f *fakeT) Logf(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fmt.Fprintf(&f.log, format+"\n", args...)
}

func (f *fakeT) Errorf(format string, args ...any) {
	f.Logf(format, args...)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed = true
}

func (f *fakeT) Fatalf(format string, args ...any) {
	f.Errorf(format, args...)
	runtime.Goexit()
}

func (f *fakeT) Skipf(format string, args ...any) {
	f.Logf(format, args...)
	f.mu.Lock()
	f.skipped = true
	f.mu.Unlock()
	runtime.Goexit()
}

// run runs a test and then its clean-ups.
func (f *fakeT) run(test func(t testing.TB)) {
	for _, part := range []func(){func() { test(f) }, func() {
		for i := range f.cleanup {
			f.cleanup[len(f.cleanup)-1-i]()
		}
	}} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			part()
		}()
		<-done
	}
}

func TestMissingProgramSkipsOrFails(t *testing.T) {
	for _, noSkip := range []bool{false, true} {
		t.Run(fmt.Sprint("no skip: ", noSkip), func(t *testing.T) {
			t.Setenv("REFILL_NO_SKIP", map[bool]string{true: "1"}[noSkip])
			var f fakeT
			f.run(func(t testing.TB) { program(t, "refill-no-such-server") })
			if f.failed != noSkip || f.skipped == noSkip {
				t.Errorf("failed %v, skipped %v: %s", f.failed, f.skipped, f.log.String())
			}
			if !strings.Contains(f.log.String(), "refill-no-such-server is not installed") {
				t.Errorf("the message does not name the missing program: %s", f.log.String())
			}
		})
	}
}

func TestPortsStayBelowTheKernels(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		t.Skip("this system does not tell its local port range")
	}
	var first int
	if _, err := fmt.Sscan(string(text), &first); err != nil {
		t.Fatal(err)
	}
	if port := freePort(t); port >= first {
		t.Errorf("port %d is in the range that the kernel gives to connections (from %d)", port, first)
	}
}
