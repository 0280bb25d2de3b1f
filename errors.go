package refill

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// The errors that this package answers with. Test for them with errors.Is.
var (
	// ErrNotFound is what a load function wraps to say that there is nothing under the key. The absence is cached
	// for Config.NotFoundTTL and returned as an error that wraps ErrNotFound: it is an answer, not a failure.
	ErrNotFound = errors.New("refill: not found")

	// ErrOverloaded is returned when Config.MaxLoads loads are running and the store does not answer, so that
	// nothing else bounds the load on the database, and when Config.MaxWaiters callers wait already. Answer with 503
	// and try again later.
	ErrOverloaded = errors.New("refill: overloaded")

	// ErrClosed is returned by every call after Close.
	ErrClosed = errors.New("refill: closed")

	// ErrLocked is returned by TryLock when somebody else holds the lock, and joined to the ctx error by a Lock
	// that gave up waiting.
	ErrLocked = errors.New("refill: locked")

	// ErrLost is the cause of a Lock's context, and the error of its Release, when the lock was not its holder's
	// any more: it ran out, or somebody deleted it. What the holder did since may have overlapped with another.
	ErrLost = errors.New("refill: lock lost")

	// ErrInvalid is wrapped by every error about an input: a setting, a key, a value that cannot be encoded. The
	// text names it. Trying again does not help.
	ErrInvalid = errors.New("refill: invalid")
)

// LoadError says that a load failed. All callers that waited for the load get the same one; those of other nodes get
// its text, since an error value cannot travel: there errors.Is finds a time-out but not the database's own errors.
type LoadError struct {
	Key        string        // as given to Get, or its hash, see there
	Node       string        // the node whose load failed
	Panic      bool          // the load function panicked, or ended its goroutine
	Timeout    bool          // it ran longer than Config.LoadTimeout; errors.Is(err, context.DeadlineExceeded)
	RetryAfter time.Duration // the next load of this key begins no earlier than this after the error; 0 = at once
	Err        error         // what the load function returned, or its text when another node loaded

	failures int // of the key in a row, this one included
}

// Error names the key, the node and the cause.
func (e *LoadError) Error() string {
	what := "load failed"
	switch {
	case e.Panic:
		what = "load panicked"
	case e.Timeout:
		what = "load timed out"
	}
	return fmt.Sprintf("refill: %s: %s on %s: %v", e.Key, what, e.Node, e.Err)
}

// Unwrap returns the cause.
func (e *LoadError) Unwrap() error { return e.Err }

// Is makes a time-out a context.DeadlineExceeded, on every node.
func (e *LoadError) Is(target error) bool {
	return e.Timeout && target == context.DeadlineExceeded
}

// absence is the error of a cached absence: the text of the load's own error, and ErrNotFound by errors.Is.
type absence struct{ text string }

func (a *absence) Error() string   { return a.text }
func (a *absence) Is(t error) bool { return t == ErrNotFound }

// invalid makes an error about an input; field names it.
func invalid(field, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", ErrInvalid, field, fmt.Sprintf(format, args...))
}
