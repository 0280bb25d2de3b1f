package realtest

import "syscall"

// dieWithParent makes the kernel kill a process when the test binary that started it ends. Without that, a process
// would stay after a test that panics or times out, because such a test runs no Cleanup. The process cannot watch its
// parent itself, because the process may be frozen.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
