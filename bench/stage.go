package main

import (
	"fmt"
	"os"
	"testing"
)

// stage starts servers and processes outside of a test. realtest asks for a testing.TB, but needs only these few
// methods. A failure ends the program.
type stage struct {
	testing.TB

	up   *stage // the stage that this one is a part of
	undo []func()
	bad  bool // a problem was reported
}

func newStage() *stage { return &stage{} }

// sub is a stage that can end before the whole.
func (s *stage) sub() *stage { return &stage{up: s} }

func (*stage) Helper()                    {}
func (s *stage) Failed() bool             { return s.bad }
func (*stage) Logf(f string, args ...any) { fmt.Fprintf(os.Stderr, f+"\n", args...) }
func (s *stage) Cleanup(f func())         { s.undo = append(s.undo, f) }

// Errorf reports a problem with something that is no longer needed.
func (s *stage) Errorf(f string, args ...any) {
	s.bad = true
	s.Logf(f, args...)
}

// Fatalf ends what was started, and then the program.
func (s *stage) Fatalf(f string, args ...any) {
	s.Errorf(f, args...)
	for ; s != nil; s = s.up {
		s.close()
	}
	os.Exit(1)
}

// Skipf is called where a server is not installed.
func (s *stage) Skipf(f string, args ...any) { s.Fatalf(f, args...) }

// TempDir is removed by close.
func (s *stage) TempDir() string {
	dir, err := os.MkdirTemp("", "refill-bench-")
	if err != nil {
		s.Fatalf("bench: %v", err)
	}
	s.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// close ends what was started, the last one first.
func (s *stage) close() {
	for i := len(s.undo) - 1; i >= 0; i-- {
		s.undo[i]()
	}
	s.undo = nil
}
