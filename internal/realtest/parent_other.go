//go:build unix && !linux

package realtest

import "syscall"

// dieWithParent does nothing here: a test binary that panics or times out may leave servers behind.
func dieWithParent() *syscall.SysProcAttr { return nil }
