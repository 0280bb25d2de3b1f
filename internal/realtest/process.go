//go:build unix

package realtest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// Limits of every wait in this package; a healthy machine needs a fraction of them.
const (
	waitLimit = 30 * time.Second
	pollEvery = 2 * time.Millisecond
)

// Process is an operating system process that the test started: a server or a child.
type Process struct {
	t     testing.TB
	name  string
	cmd   *exec.Cmd
	ended chan struct{} // closed once the process was waited for
	err   error         // how it ended; written before ended is closed
}

// launch starts cmd. The caller ends it with Kill, which t.Cleanup may call at any time.
func launch(t testing.TB, name string, cmd *exec.Cmd) (*Process, error) {
	cmd.SysProcAttr = dieWithParent()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &Process{t: t, name: name, cmd: cmd, ended: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// Pid is the process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Freeze stops the process where it is (SIGSTOP) and returns when all its threads stand still.
func (p *Process) Freeze() {
	p.t.Helper()
	p.signal(syscall.SIGSTOP)
	if !eventually(func() bool { return p.gone() || standsStill(p.Pid()) }) {
		p.t.Fatalf("realtest: %s (pid %d) does not stand still after SIGSTOP", p.name, p.Pid())
	}
}

// Thaw lets a frozen process go on (SIGCONT).
func (p *Process) Thaw() {
	p.t.Helper()
	p.signal(syscall.SIGCONT)
}

// Kill ends the process as kill -9 does and returns when it is gone. To kill it twice does no harm.
func (p *Process) Kill() {
	p.t.Helper()
	p.signal(syscall.SIGCONT)
	p.signal(syscall.SIGKILL)
	select {
	case <-p.ended:
	case <-time.After(waitLimit):
		p.t.Errorf("realtest: %s (pid %d) does not end after SIGKILL", p.name, p.Pid())
	}
}

// signal sends s, unless the process is gone.
func (p *Process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("realtest: %v to %s (pid %d): %v", s, p.name, p.Pid(), err)
	}
}

// gone says whether the process has ended.
func (p *Process) gone() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// standsStill says whether every thread of the process is stopped. A signal is on its way for a moment, and a test that
// goes on too early meets a process that still runs. Without a /proc to look at it answers yes.
func standsStill(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, thread := range threads {
		stat, err := os.ReadFile(thread)
		if err != nil {
			continue // this thread has ended
		}
		// "pid (name) state …": the name may hold anything, a parenthesis too.
		_, state, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')'):], []byte(" "))
		if len(state) > 0 && state[0] != 'T' {
			return false
		}
	}
	return true
}

// eventually asks until the answer is yes, and gives up after waitLimit.
func eventually(ask func() bool) bool {
	for deadline := time.Now().Add(waitLimit); ; time.Sleep(pollEvery) {
		if ask() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
	}
}

// listen opens a free port of the loopback, out of 20,000–29,999. The kernel gives connections their own ports from a
// range above these (32,768 up on Linux): there, a client that keeps dialling a dead server is sooner or later given the
// server's port for its own end, connects to itself, and keeps the server from coming back.
func listen(t testing.TB) net.Listener {
	t.Helper()
	var err error
	for range 200 {
		var l net.Listener
		if l, err = net.Listen("tcp", loopback(20_000+rand.IntN(10_000))); err == nil {
			return l
		}
	}
	t.Fatalf("realtest: no free port: %v", err)
	return nil
}

// freePort is a port that was free a moment ago: whoever takes it has to be ready to try again.
func freePort(t testing.TB) int {
	t.Helper()
	l := listen(t)
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port
}

// loopback is the address of a port of this machine.
func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
