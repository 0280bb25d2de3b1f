//go:build unix

package realtest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Redis is a redis-server of one test. The server has its own port and no persistence, and allows DEBUG.
type Redis struct {
	*Process // the current process; Restart replaces it

	t    testing.TB
	path string   // path of redis-server
	args []string // as given to StartRedis
	env  []string // added to the environment of the test
	dir  string
	port int
}

// errPortTaken means that another process has taken the port.
var errPortTaken = errors.New("the port is taken")

// StartRedis starts a redis-server and returns when the server answers. On the command line, args come after the
// arguments of this package, and so override these. The server ends with the test.
func StartRedis(t testing.TB, args ...string) *Redis {
	t.Helper()
	return startRedis(t, nil, args)
}

func startRedis(t testing.TB, env, args []string) *Redis {
	t.Helper()
	r := &Redis{t: t, path: program(t, "redis-server"), args: args, env: env, dir: t.TempDir()}
	t.Cleanup(func() {
		if r.Process != nil {
			r.Kill()
		}
		if t.Failed() {
			t.Logf("realtest: log of redis-server on %s:\n%s", r.Addr(), r.log())
		}
	})
	for range 20 {
		r.port = freePort(t)
		err := r.start()
		if err == nil {
			return r
		}
		if !errors.Is(err, errPortTaken) {
			t.Fatalf("realtest: redis-server: %v", err)
		}
	}
	t.Fatalf("realtest: redis-server: %v, at twenty attempts", errPortTaken)
	return nil
}

// Addr is where the server listens, as "host:port". Restart does not change it.
func (r *Redis) Addr() string { return loopback(r.port) }

// Restart kills the server if it is running. Then it starts the server again on the same port, without data.
func (r *Redis) Restart() {
	r.t.Helper()
	r.Kill()
	var err error
	if !eventually(func() bool { err = r.start(); return !errors.Is(err, errPortTaken) }) || err != nil {
		r.t.Fatalf("realtest: restarting redis-server on %s: %v", r.Addr(), err)
	}
}

// Commandstats returns how often each command was called since the start, or since ResetStats. Names are in lower case
// ("set", "evalsha", "cluster|slots"). The counts include commands that scripts call, but not the commands that this
// package sends.
func (r *Redis) Commandstats(t testing.TB) map[string]int64 {
	t.Helper()
	info, err := r.ask("INFO commandstats")
	if err != nil {
		t.Fatalf("realtest: INFO commandstats: %v", err)
	}
	calls := map[string]int64{}
	for line := range strings.Lines(info) {
		// cmdstat_set:calls=2,usec=11,usec_per_call=5.50,…
		name, figures, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
		if !ok {
			continue
		}
		first, _, _ := strings.Cut(figures, ",")
		if calls[name], err = strconv.ParseInt(first, 10, 64); err != nil {
			t.Fatalf("realtest: INFO commandstats: %q: %v", line, err)
		}
	}
	delete(calls, "info")
	delete(calls, "config|resetstat")
	return calls
}

// ResetStats sets the counts of Commandstats to zero.
func (r *Redis) ResetStats(t testing.TB) {
	t.Helper()
	if _, err := r.ask("CONFIG RESETSTAT"); err != nil {
		t.Fatalf("realtest: CONFIG RESETSTAT: %v", err)
	}
}

// start runs redis-server on r.port and waits until the server answers.
func (r *Redis) start() error {
	out, err := os.Create(filepath.Join(r.dir, "log"))
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }() // the server has its own file descriptor
	cmd := exec.Command(r.path, append([]string{
		"--port", strconv.Itoa(r.port), "--bind", "127.0.0.1", "--dir", r.dir,
		"--save", "", "--appendonly", "no", "--enable-debug-command", "local",
	}, r.args...)...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = append(os.Environ(), r.env...)
	p, err := launch(r.t, "redis-server", cmd)
	if err != nil {
		return err
	}
	r.Process = p
	answers := eventually(func() bool { return p.gone() || r.answers() })
	switch {
	case p.gone() && strings.Contains(r.log(), "Address already in use"):
		return errPortTaken
	case p.gone():
		return fmt.Errorf("it exited at once: %w\n%s", p.err, r.log())
	case !answers:
		return fmt.Errorf("no answer within %v\n%s", waitLimit, r.log())
	}
	return nil
}

// answers reports whether the server that r started answers. If another process had taken the port, that process
// might answer the PING.
func (r *Redis) answers() bool {
	if pong, err := r.ask("PING"); err != nil || pong != "PONG" {
		return false
	}
	info, err := r.ask("INFO server")
	return err == nil && strings.Contains(info, fmt.Sprintf("process_id:%d\r\n", r.Pid()))
}

// ask sends one command, a line of Redis' inline protocol, on a new connection. ask does not use a client library,
// because a client library would send HELLO first, and Commandstats would count that HELLO.
func (r *Redis) ask(command string) (string, error) {
	conn, err := net.DialTimeout("tcp", r.Addr(), waitLimit)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(waitLimit)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, command+"\r\n"); err != nil {
		return "", err
	}
	in := bufio.NewReader(conn)
	line, err := in.ReadString('\n')
	if err != nil {
		return "", err
	}
	kind, rest := line[0], strings.TrimSpace(line[1:])
	switch kind {
	case '+', ':':
		return rest, nil
	case '$':
		n, err := strconv.Atoi(rest)
		if err != nil || n < 0 {
			return "", fmt.Errorf("unexpected reply of the server: %q", line)
		}
		text := make([]byte, n)
		_, err = io.ReadFull(in, text)
		return string(text), err
	default:
		return "", fmt.Errorf("unexpected reply of the server: %q", line)
	}
}

// log returns the last 20 lines of the server's log.
func (r *Redis) log() string {
	text, err := os.ReadFile(filepath.Join(r.dir, "log"))
	if err != nil {
		return err.Error()
	}
	return string(lastLines(text, 20))
}

// program returns the path of the executable with this name. It looks into $PATH, and then into dirs, which are
// patterns of filepath.Glob. Without the executable the test is skipped, or fails with REFILL_NO_SKIP=1.
func program(t testing.TB, name string, dirs ...string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	for _, dir := range dirs {
		if found, _ := filepath.Glob(filepath.Join(dir, name)); err != nil && len(found) > 0 {
			return found[len(found)-1]
		}
	}
	switch {
	case err == nil:
		return path
	case os.Getenv("REFILL_NO_SKIP") == "1":
		t.Fatalf("%s is not installed, and REFILL_NO_SKIP=1 forbids skipping tests that need it", name)
	default:
		t.Skipf("%s is not installed: `make test` installs it where it can", name)
	}
	return ""
}

// lastLines returns the last n lines of text.
func lastLines(text []byte, n int) []byte {
	text = bytes.TrimRight(text, "\n")
	lines := bytes.Split(text, []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-n):], []byte("\n"))
}
