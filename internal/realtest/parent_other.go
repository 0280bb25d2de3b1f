//go:build unix && !linux

package realtest

import "syscall"

// dieWithParent returns nil, because this system cannot end a process with its parent. A test binary that panics or
// times out may leave servers behind.
func dieWithParent() *syscall.SysProcAttr { return nil }
