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
	// ErrNotFound says that there is nothing under a key. A load function returns an error that wraps ErrNotFound. This
	// absence is cached for Config.NotFoundTTL, and Get returns it as an error that wraps ErrNotFound. An absence is an
	// answer, not a failure, so it causes no back-off. The error of Get has only the text of the load's error, even on
	// the node that loaded. So errors.Is does not find errors that the load wraps beside ErrNotFound, for instance
	// sql.ErrNoRows.
	ErrNotFound = errors.New("refill: not found")

	// ErrOverloaded is returned in three cases. In the first case, the store does not answer and Config.MaxLoads loads
	// are running. Without this limit, the whole fleet could overload the database. In the second case,
	// Config.MaxWaiters callers are waiting already. In the third case, Config.MaxLoads load functions have outlived
	// Config.LoadTimeout and still run, and Config.MaxLoads other loads are running as well. A server should answer
	// with status 503. A later try may succeed.
	ErrOverloaded = errors.New("refill: overloaded")

	// ErrClosed is returned by every call after Close.
	ErrClosed = errors.New("refill: closed")

	// ErrLocked is returned by TryLock if another holder has the lock. If ctx ends while Lock waits, the error of Lock
	// wraps both ErrLocked and the error of ctx.
	ErrLocked = errors.New("refill: locked")

	// ErrLost says that a holder no longer has its lock, because the lock expired or was deleted. ErrLost is the cause
	// of the context of such a Lock, and the error of its Release. Since then another holder may have had the lock, and
	// may have worked at the same time.
	ErrLost = errors.New("refill: lock lost")

	// ErrInvalid is wrapped by every error about an input: a setting, a key, a value that cannot be encoded. The text of
	// the error names the input. Another try with the same input fails as well.
	ErrInvalid = driver.ErrInvalid
)

// LoadError says that a load failed. On the node that loaded, all callers get the error of the load itself. On other
// nodes, callers get only the text of that error, because an error value cannot be sent. On those nodes errors.Is finds
// a time-out, but no error of the database.
type LoadError struct {
	Key        string        // as given to Get, or "#" and the hash of the key, see Loader.Get
	Node       string        // the node whose load failed
	Panic      bool          // the load function panicked, or ended its goroutine
	Timeout    bool          // the load ran longer than Config.LoadTimeout; errors.Is(err, context.DeadlineExceeded)
	RetryAfter time.Duration // what is left of the back-off of this key; 0 = there is none
	Err        error         // what the load function returned, or its text when another node loaded

	fleet    bool // the failure holds all nodes back, because two nodes in a row have failed
	failures int  // how many loads of the key have failed in a row, including this one
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

// absence is the error of a cached absence. It has the text of the error that the load returned. errors.Is matches an
// absence with ErrNotFound.
type absence struct{ text string }

func (a *absence) Error() string   { return a.text }
func (a *absence) Is(t error) bool { return t == ErrNotFound }

// invalid returns an error about an input. field names the input.
func invalid(field, format string, args ...any) error { return driver.Invalid(field, format, args...) }
