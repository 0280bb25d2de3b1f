package main

import (
	"fmt"
	"os"
	"testing"
)

// stage lets realtest start servers and processes outside of a test. realtest takes a testing.TB, but calls only the
// methods that stage defines. Fatalf ends the program.
type stage struct {
	testing.TB

	up   *stage // the stage of which this stage is a part; nil for the outermost stage
	undo []func()
	bad  bool // a problem was reported
}

func newStage() *stage { return &stage{} }

// sub returns a stage whose servers and processes can be ended before those of s.
func (s *stage) sub() *stage { return &stage{up: s} }

func (*stage) Helper()                    {}
func (s *stage) Failed() bool             { return s.bad }
func (*stage) Logf(f string, args ...any) { fmt.Fprintf(os.Stderr, f+"\n", args...) }
func (s *stage) Cleanup(f func())         { s.undo = append(s.undo, f) }

// Errorf reports a problem. The program goes on.
func (s *stage) Errorf(f string, args ...any) {
	s.bad = true
	s.Logf(f, args...)
}

// Fatalf ends all servers and processes, and then the program.
func (s *stage) Fatalf(f string, args ...any) {
	s.Errorf(f, args...)
	for ; s != nil; s = s.up {
		s.close()
	}
	os.Exit(1)
}

// Skipf ends the program. realtest calls it if a server is not installed.
func (s *stage) Skipf(f string, args ...any) { s.Fatalf(f, args...) }

// TempDir returns a new directory. close removes this directory.
func (s *stage) TempDir() string {
	dir, err := os.MkdirTemp("", "refill-bench-")
	if err != nil {
		s.Fatalf("bench: %v", err)
	}
	s.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// close calls the functions given to Cleanup, the last function first.
func (s *stage) close() {
	for i := len(s.undo) - 1; i >= 0; i-- {
		s.undo[i]()
	}
	s.undo = nil
}
