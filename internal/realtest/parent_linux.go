package realtest

import "syscall"

// dieWithParent makes the kernel kill a process when the test binary that started it ends. This is needed because a
// test that panics or times out runs no Cleanup. A frozen process could not detect the end of its parent itself.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
