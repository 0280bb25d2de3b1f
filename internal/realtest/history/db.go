//go:build unix

package history

import (
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// DB is the database behind the caches. It holds a version number per key, and a mark per node (Gone), in a file that
// all processes map into memory. So reads and writes are atomic and cost almost nothing, and the data survives the
// death of a process.
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

// Row returns the version of the key with this index in [Keys].
func (d *DB) Row(key int) *atomic.Int64 { return (*atomic.Int64)(unsafe.Pointer(&d.memory[8*key])) }

// Gone returns the mark of the node with this number. If the mark is not 0, the node cannot reach the database.
func (d *DB) Gone(node int) *atomic.Int64 {
	return (*atomic.Int64)(unsafe.Pointer(&d.memory[dbSize/2+8*node]))
}

// Close unmaps the file.
func (d *DB) Close() error { return syscall.Munmap(d.memory) }
