//go:build unix

package realtest

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestRedisCountsCommands(t *testing.T) {
	r := StartRedis(t)
	for _, command := range []string{"SET a 1", "SET a 2", "GET a", `EVAL "return redis.call('del','a')" 0`} {
		if _, err := r.ask(command); err != nil {
			t.Fatalf("%s: %v", command, err)
		}
	}
	calls := r.Commandstats(t)
	for name, want := range map[string]int64{"set": 2, "get": 1, "eval": 1, "del": 1, "info": 0} {
		if calls[name] != want {
			t.Errorf("%s was called %d times, Commandstats returns %d", name, want, calls[name])
		}
	}
	r.ResetStats(t)
	if calls := r.Commandstats(t); len(calls) != 0 {
		t.Errorf("after ResetStats: %v", calls)
	}
}

func TestRedisTakesArguments(t *testing.T) {
	r := StartRedis(t, "--maxmemory", "2mb")
	r.Restart()
	if info, err := r.ask("INFO memory"); err != nil || !strings.Contains(info, "maxmemory:2097152\r\n") {
		t.Errorf("maxmemory is not what StartRedis was given: %v", err)
	}
}

func TestRedisFreezeAndThaw(t *testing.T) {
	r := StartRedis(t)
	conn, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	r.Freeze()
	if _, err := io.WriteString(conn, "PING\r\n"); err != nil {
		t.Fatalf("a frozen server still accepts what is sent: %v", err)
	}
	answer := make([]byte, 16)
	_ = conn.SetReadDeadline(time.Now().Add(30 * time.Millisecond))
	if n, err := conn.Read(answer); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a frozen server answered %q, %v", answer[:n], err)
	}
	r.Thaw()
	_ = conn.SetReadDeadline(time.Now().Add(waitLimit))
	if n, err := conn.Read(answer); err != nil || string(answer[:n]) != "+PONG\r\n" {
		t.Fatalf("after Thaw the server answered %q, %v", answer[:n], err)
	}
}

func TestRedisKillAndRestart(t *testing.T) {
	r := StartRedis(t)
	if _, err := r.ask("SET a 1"); err != nil {
		t.Fatal(err)
	}
	addr, pid := r.Addr(), r.Pid()
	r.Freeze()
	r.Kill() // Kill must work on a frozen server, and a second time
	r.Kill()
	if _, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("dialling a killed server returned %v", err)
	}
	r.Restart()
	if r.Addr() != addr || r.Pid() == pid {
		t.Errorf("the server moved from %s to %s, pid %d to %d", addr, r.Addr(), pid, r.Pid())
	}
	if size, err := r.ask("DBSIZE"); err != nil || size != "0" {
		t.Errorf("after Restart DBSIZE is %q, %v", size, err)
	}
}

func TestRedisEndsWithItsTest(t *testing.T) {
	var addr string
	t.Run("a test", func(t *testing.T) {
		r := StartRedis(t)
		r.Freeze()
		addr = r.Addr()
	})
	if _, err := net.Dial("tcp", addr); addr != "" && !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the server outlived its test: %v", err)
	}
}

func TestRedisServersDoNotShareAPort(t *testing.T) {
	first := StartRedis(t)
	second := &Redis{t: t, path: first.path, dir: t.TempDir(), port: first.port}
	if err := second.start(); !errors.Is(err, errPortTaken) {
		t.Fatalf("a second server on %s: %v", first.Addr(), err)
	}

	var all sync.Map
	t.Run("many", func(t *testing.T) {
		for range 6 {
			t.Run("one", func(t *testing.T) {
				t.Parallel()
				r := StartRedis(t)
				if other, taken := all.LoadOrStore(r.Addr(), r.Pid()); taken {
					t.Errorf("%s belongs to pid %v and to pid %d", r.Addr(), other, r.Pid())
				}
			})
		}
	})
}

func TestRedisReportsWhyItCannotStart(t *testing.T) {
	path := program(t, "redis-server")
	r := &Redis{t: t, path: path, dir: t.TempDir(), port: freePort(t), args: []string{"--no-such-setting", "1"}}
	if err := r.start(); err == nil || !strings.Contains(err.Error(), "no-such-setting") {
		t.Errorf("start returned %v", err)
	}
}
