//go:build unix

package realtest

import (
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// StartPostgres starts an empty PostgreSQL server, and returns when the server accepts connections. The server listens
// at 127.0.0.1 with the returned port. The user "refill" needs no password. The server ends with the test.
func StartPostgres(t testing.TB, args ...string) (port int) {
	t.Helper()
	s := newSQLServer(t, "postgres", "postgres")
	initdb := program(t, "initdb", "/usr/lib/postgresql/*/bin")
	s.run(initdb, "-D", s.data, "-U", "refill", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	const ready = "ready to accept connections"
	return s.start(program(t, "postgres", "/usr/lib/postgresql/*/bin"), ready, func(port int) []string {
		return append([]string{
			"-D", s.data, "-p", strconv.Itoa(port), "-c", "listen_addresses=127.0.0.1",
			"-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "autovacuum=off",
		}, args...)
	})
}

// StartMariaDB starts an empty MariaDB server, and returns when the server accepts connections. The server listens at
// 127.0.0.1 with the returned port. Every user may connect without a password. The server ends with the test.
func StartMariaDB(t testing.TB, args ...string) (port int) {
	t.Helper()
	s := newSQLServer(t, "mariadbd", "mysql")
	install := program(t, "mariadb-install-db", "/usr/bin")
	s.run(install, "--no-defaults", "--datadir="+s.data, "--auth-root-authentication-method=normal", "--skip-test-db")
	return s.start(program(t, "mariadbd", "/usr/sbin"), "ready for connections", func(port int) []string {
		return append([]string{
			"--no-defaults", "--datadir=" + s.data, "--port=" + strconv.Itoa(port), "--bind-address=127.0.0.1",
			"--socket=" + filepath.Join(s.dir, "socket"), "--pid-file=" + filepath.Join(s.dir, "pid"), "--skip-grant-tables",
			"--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=32M",
		}, args...)
	})
}

// sqlServer is a database server of one test. The database servers refuse to run as root. So if the test is root, they
// run as another user, who owns the directory.
type sqlServer struct {
	t    testing.TB
	name string
	dir  string // not t.TempDir(), which only the user of the test may enter
	data string // below dir
	as   *syscall.Credential
}

func newSQLServer(t testing.TB, name, account string) *sqlServer {
	t.Helper()
	dir, err := os.MkdirTemp("", "refill-"+name+"-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := &sqlServer{t: t, name: name, dir: dir, data: filepath.Join(dir, "data")}
	if os.Getuid() != 0 {
		return s
	}
	u, err := user.Lookup(account)
	if err != nil {
		if u, err = user.Lookup("nobody"); err != nil {
			t.Fatalf("realtest: root cannot run %s, and there is no other user: %v", name, err)
		}
	}
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	if err := os.Chown(dir, uid, gid); err != nil {
		t.Fatal(err)
	}
	s.as = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	return s
}

func (s *sqlServer) command(path string, args ...string) *exec.Cmd {
	cmd := exec.Command(path, args...)
	cmd.Dir = s.dir
	cmd.Env = append(os.Environ(), "HOME="+s.dir)
	return cmd
}

// run runs a program to its end.
func (s *sqlServer) run(path string, args ...string) {
	s.t.Helper()
	cmd := s.command(path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.as}
	if out, err := cmd.CombinedOutput(); err != nil {
		s.t.Fatalf("realtest: %s: %v\n%s", path, err, lastLines(out, 20))
	}
}

// start starts the server on a free port, and waits until its log says that it is ready.
func (s *sqlServer) start(path, ready string, args func(port int) []string) (port int) {
	s.t.Helper()
	log := filepath.Join(s.dir, "log")
	for range 5 {
		port := freePort(s.t)
		out, err := os.Create(log)
		if err != nil {
			s.t.Fatal(err)
		}
		cmd := s.command(path, args(port)...)
		cmd.Stdout, cmd.Stderr = out, out
		p, err := launchAs(s.t, s.name, cmd, s.as)
		_ = out.Close() // the server has its own file descriptor
		if err != nil {
			s.t.Fatalf("realtest: %s: %v", s.name, err)
		}
		s.t.Cleanup(func() {
			p.signal(syscall.SIGQUIT) // both servers end at once, with their children
			if !eventually(p.gone) {
				p.Kill()
			}
		})
		isReady := func() bool {
			text, err := os.ReadFile(log)
			return err == nil && strings.Contains(string(text), ready)
		}
		if eventually(func() bool { return p.gone() || isReady() }) && !p.gone() {
			return port
		}
	}
	text, _ := os.ReadFile(log)
	s.t.Fatalf("realtest: %s does not start:\n%s", s.name, lastLines(text, 20))
	return 0
}
