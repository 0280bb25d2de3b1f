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

// Every wait in this package polls at pollEvery and gives up after waitLimit. On a healthy machine a wait is far
// shorter than waitLimit.
const (
	waitLimit = 30 * time.Second
	pollEvery = 2 * time.Millisecond
)

// Process is an operating system process that the test started: a server or a child.
type Process struct {
	t     testing.TB
	name  string
	cmd   *exec.Cmd
	ended chan struct{} // closed when the process has ended and Wait has returned
	err   error         // how the process ended; written before ended is closed
}

// launch starts cmd. The caller ends the process with Kill, which t.Cleanup may call at any time.
func launch(t testing.TB, name string, cmd *exec.Cmd) (*Process, error) {
	return launchAs(t, name, cmd, nil)
}

// launchAs is launch for a process of another user. nil: the user of the test.
func launchAs(t testing.TB, name string, cmd *exec.Cmd, as *syscall.Credential) (*Process, error) {
	cmd.SysProcAttr = dieWithParent()
	if as != nil {
		if cmd.SysProcAttr == nil {
			cmd.SysProcAttr = new(syscall.SysProcAttr)
		}
		cmd.SysProcAttr.Credential = as
	}
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

// Freeze stops the process (SIGSTOP) and returns when all its threads have stopped.
func (p *Process) Freeze() {
	p.t.Helper()
	p.signal(syscall.SIGSTOP)
	if !eventually(func() bool { return p.gone() || isStopped(p.Pid()) }) {
		p.t.Fatalf("realtest: %s (pid %d) did not stop after SIGSTOP", p.name, p.Pid())
	}
}

// Thaw lets a frozen process continue (SIGCONT).
func (p *Process) Thaw() {
	p.t.Helper()
	p.signal(syscall.SIGCONT)
}

// Kill kills the process (SIGKILL) and returns when the process has ended. A second call of Kill has no effect.
func (p *Process) Kill() {
	p.t.Helper()
	p.signal(syscall.SIGCONT)
	p.signal(syscall.SIGKILL)
	select {
	case <-p.ended:
	case <-time.After(waitLimit):
		p.t.Errorf("realtest: %s (pid %d) did not end after SIGKILL", p.name, p.Pid())
	}
}

// signal sends s, unless the process has ended.
func (p *Process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("realtest: sending %v to %s (pid %d): %v", s, p.name, p.Pid(), err)
	}
}

// gone reports whether the process has ended.
func (p *Process) gone() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// isStopped reports whether every thread of the process has stopped. After SIGSTOP, a process runs for another moment,
// and the test must not continue before the process has stopped. On a system without /proc, isStopped returns true.
func isStopped(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, thread := range threads {
		stat, err := os.ReadFile(thread)
		if err != nil {
			continue // this thread has ended
		}
		// "pid (name) state …": the name may contain anything, even a parenthesis.
		_, state, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')'):], []byte(" "))
		if len(state) > 0 && state[0] != 'T' {
			return false
		}
	}
	return true
}

// eventually calls ask until ask returns true, and gives up after waitLimit.
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

// accepts reports whether a server accepts connections on a port of the loopback.
func accepts(port int) bool {
	conn, err := net.Dial("tcp", loopback(port))
	if err == nil {
		_ = conn.Close()
	}
	return err == nil
}

// listen opens a free port of the loopback, out of 20,000–29,999. The kernel takes the local ports of connections from
// a higher range (32,768 and up on Linux). A server with a port of that range could lose the port: 1. The test kills
// the server. 2. A client dials the server again and again, and the kernel gives the client the port of the server as
// its local port. 3. The client connects to itself, and the server cannot start again.
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

// freePort returns a port that was free a moment ago. Another process may take the port before the caller does, so the
// caller must be ready to retry.
func freePort(t testing.TB) int {
	t.Helper()
	l := listen(t)
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port
}

// loopback is the loopback address with this port.
func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
