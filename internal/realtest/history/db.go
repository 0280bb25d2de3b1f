//go:build unix

package history

import (
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// DB is the database behind the caches: a version number per key, in a file that all processes map into memory. So it
// is linearizable, costs nothing, and survives every process.
type DB struct {
	memory []byte
}

const dbSize = 4096

// OpenDB maps the file, and creates it if it does not exist.
func OpenDB(path string) (*DB, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // the mapping stays valid
	if err := file.Truncate(dbSize); err != nil {
		return nil, err
	}
	memory, err := syscall.Mmap(int(file.Fd()), 0, dbSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	return &DB{memory}, err
}

// Row is the version of the key with this number.
func (d *DB) Row(key int) *atomic.Int64 { return (*atomic.Int64)(unsafe.Pointer(&d.memory[8*key])) }

// Close unmaps the file.
func (d *DB) Close() error { return syscall.Munmap(d.memory) }
