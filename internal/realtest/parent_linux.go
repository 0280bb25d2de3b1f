package realtest

import "syscall"

// dieWithParent lets the kernel end a process with the test binary that started it: a test that panics or times out
// runs no Cleanup, and a process that is stopped cannot notice anything.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
