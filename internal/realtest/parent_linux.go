package realtest

import "syscall"

// dieWithParent makes the kernel kill a process when the test binary that started it ends. A test that panics or times
// out runs no Cleanup, and a stopped process cannot detect the end of its parent itself.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
