package refill

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/refill-go/refill/driver"
)

// This file holds the errors that callers see.

// The errors of this package. Test for them with errors.Is.
var (
	// ErrNotFound is wrapped by a load function to say that there is nothing under the key. The absence is cached for
	// Config.NotFoundTTL. Get returns the absence as an error that wraps ErrNotFound, although an absence is an answer,
	// not a failure.
	ErrNotFound = errors.New("refill: not found")

	// ErrOverloaded is returned if Config.MaxLoads loads are running while the store does not answer, because nothing else
	// limits the load on the database then. It is also returned if Config.MaxWaiters callers are waiting already. Answer
	// with 503. The next try may succeed.
	ErrOverloaded = errors.New("refill: overloaded")

	// ErrClosed is returned by every call after Close.
	ErrClosed = errors.New("refill: closed")

	// ErrLocked is returned by TryLock if another holder has the lock. If Lock gives up waiting, it joins ErrLocked to the
	// error of ctx.
	ErrLocked = errors.New("refill: locked")

	// ErrLost is the cause of a Lock's context, and the error of its Release, if the holder no longer had the lock: the
	// lock expired or was deleted. What the holder did since then may have overlapped with the work of another holder.
	ErrLost = errors.New("refill: lock lost")

	// ErrInvalid is wrapped by every error about an input: a setting, a key, a value that cannot be encoded. The text of
	// the error names the input. Another try fails as well.
	ErrInvalid = driver.ErrInvalid
)

// LoadError says that a load failed. All callers of the node that loaded get the same error. Callers of other nodes get
// only the text of the error, because an error value cannot be sent. On those nodes errors.Is finds a time-out, but no
// error of the database.
type LoadError struct {
	Key        string        // as given to Get, or the hash of the key, see Loader.Get
	Node       string        // the node whose load failed
	Panic      bool          // the load function panicked, or ended its goroutine
	Timeout    bool          // the load ran longer than Config.LoadTimeout; errors.Is(err, context.DeadlineExceeded)
	RetryAfter time.Duration // the next load of this key begins no earlier than this after the error; 0 = at once
	Err        error         // what the load function returned, or its text when another node loaded

	failures int // of the key in a row, including this one
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

// Is makes a time-out match context.DeadlineExceeded, on every node.
func (e *LoadError) Is(target error) bool {
	return e.Timeout && target == context.DeadlineExceeded
}

// absence is the error of a cached absence. It has the text of the load's own error, and errors.Is matches it with
// ErrNotFound.
type absence struct{ text string }

func (a *absence) Error() string   { return a.text }
func (a *absence) Is(t error) bool { return t == ErrNotFound }

// invalid returns an error about an input. field names the input.
func invalid(field, format string, args ...any) error { return driver.Invalid(field, format, args...) }
