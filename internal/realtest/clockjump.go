//go:build linux

package realtest

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// WallClock is the wall clock of one server. A test can set this clock. The server's monotonic clock does not
// change.
type WallClock struct {
	t    testing.TB
	file *os.File // holds the offset; the server maps it into memory
}

// clockShim is the source of a library that the server loads before libc. Its functions replace those of libc. They
// call the kernel directly, so neither libc nor the vDSO is used.
const clockShim = `
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset; /* in seconds */

__attribute__((constructor)) static void begin(void) {
	const char *path = getenv("REFILL_REALTEST_CLOCK");
	int fd = path ? open(path, O_RDONLY) : -1;
	if (fd < 0) return;
	void *p = mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
	if (p != MAP_FAILED) offset = p;
	close(fd);
}

int clock_gettime(clockid_t id, struct timespec *ts) {
	int r = syscall(SYS_clock_gettime, id, ts);
	if (r == 0 && offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) ts->tv_sec += *offset;
	return r;
}

int gettimeofday(struct timeval *restrict tv, void *restrict tz) {
	struct timespec ts;
	int r = clock_gettime(CLOCK_REALTIME, &ts);
	if (r == 0 && tv) { tv->tv_sec = ts.tv_sec; tv->tv_usec = ts.tv_nsec / 1000; }
	return r;
}

time_t time(time_t *t) {
	struct timespec ts;
	clock_gettime(CLOCK_REALTIME, &ts);
	if (t) *t = ts.tv_sec;
	return ts.tv_sec;
}
`

// StartRedisWithClock is [StartRedis] for a server with a separate wall clock. At the start that clock differs by
// off from the machine's clock. StartRedisWithClock needs gcc. Without gcc the test is skipped, or fails with
// REFILL_NO_SKIP=1.
func StartRedisWithClock(t testing.TB, off time.Duration, args ...string) (*Redis, *WallClock) {
	t.Helper()
	gcc, dir := program(t, "gcc"), t.TempDir()
	source, shim, clock := filepath.Join(dir, "clock.c"), filepath.Join(dir, "clock.so"), filepath.Join(dir, "offset")
	if err := os.WriteFile(source, []byte(clockShim), 0o600); err != nil {
		t.Fatalf("realtest: clock: %v", err)
	}
	if out, err := exec.Command(gcc, "-O1", "-shared", "-fPIC", "-o", shim, source).CombinedOutput(); err != nil {
		t.Fatalf("realtest: clock: gcc: %v\n%s", err, out)
	}
	file, err := os.Create(clock)
	if err != nil {
		t.Fatalf("realtest: clock: %v", err)
	}
	t.Cleanup(func() { _ = file.Close() })
	c := &WallClock{t: t, file: file}
	c.Set(off)
	return startRedis(t, []string{"LD_PRELOAD=" + shim, "REFILL_REALTEST_CLOCK=" + clock}, args), c
}

// Set makes the wall clock of the server differ by off, in whole seconds, from this machine's clock. The change is
// immediate, and Restart keeps it.
func (c *WallClock) Set(off time.Duration) {
	c.t.Helper()
	seconds := binary.NativeEndian.AppendUint64(nil, uint64(int64(off/time.Second)))
	if _, err := c.file.WriteAt(seconds, 0); err != nil {
		c.t.Fatalf("realtest: clock: %v", err)
	}
}
