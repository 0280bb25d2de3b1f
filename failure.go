package refill

import (
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"time"
)

// loadError wraps what a load of this node failed with. The back-off grows with each failure of the key in a row, here or
// elsewhere, as far as this node knows.
func (l *Loader[V]) loadError(c *call[V], err error, panicked bool) *LoadError {
	e := &LoadError{
		Key: c.key, Node: l.node.id, Err: err, Panic: panicked, Timeout: errors.Is(err, errLoadTimeout),
		failures: l.failures.inARow(c.key, c.at.stripe) + 1,
	}
	e.RetryAfter = backOff(l.cfg.ErrorTTL, l.cfg.MaxErrorTTL, e.failures)
	return e
}

// failure is a LoadError on its way to other nodes.
type failure struct {
	Node     string `json:"node"`
	Text     string `json:"text"`
	Panic    bool   `json:"panic,omitempty"`
	Timeout  bool   `json:"timeout,omitempty"`
	Failures int    `json:"failures"` // in a row
	BackOff  int64  `json:"back_off"` // ms; 0 = none
}

// maxFailure is how much of an error's text travels.
const maxFailure = 1 << 10

// wire is what of e travels: the first line of its cause.
func (e *LoadError) wire() string {
	text, _, _ := strings.Cut(e.Err.Error(), "\n")
	b, err := json.Marshal(failure{
		e.Node, text[:min(len(text), maxFailure)], e.Panic, e.Timeout, e.failures, e.RetryAfter.Milliseconds(),
	})
	if err != nil {
		return "{}" // cannot be: strings, bools and numbers
	}
	return string(b)
}

// loadErrorOf is the LoadError that was left in the store, or announced. left is what the store says is left of its
// back-off, 0 = not asked for.
func (l *Loader[V]) loadErrorOf(key, wire string, left time.Duration) *LoadError {
	f := failure{BackOff: l.cfg.ErrorTTL.Milliseconds()}
	if json.Unmarshal([]byte(wire), &f) != nil {
		f.Text = wire
	}
	if f.Node == l.node.id {
		if own := l.failure(key); own != nil && own.Node == f.Node {
			return own
		}
	}
	if left <= 0 {
		left = min(max(0, time.Duration(f.BackOff)*time.Millisecond), l.cfg.MaxErrorTTL)
	}
	return &LoadError{
		Key: key, Node: f.Node, Panic: f.Panic, Timeout: f.Timeout, RetryAfter: left, Err: errors.New(f.Text),
		failures: f.Failures,
	}
}

// failure is the error of the last load of key that this process made or heard of, while its back-off lasts and nothing has
// voided that load.
func (l *Loader[V]) failure(key string) *LoadError {
	return l.failures.recall(key, l.local.note(key).stripe)
}

// failures are those of loads in this process, with the error itself, of which only text stands in the store, and those
// heard of: to count them, and for the time that there is no store to leave a back-off in.
type failures struct {
	mu    sync.Mutex
	byKey map[string]pastFailure
}

type pastFailure struct {
	err    *LoadError
	until  time.Time
	stripe uint32 // epoch of the key, noted before the load began: as for an entry of L1, it is judged when it is read
}

// maxFailures bounds the memory. A failure more is only forgotten, which costs a load, or lets a back-off begin anew.
const maxFailures = 4096

// remember keeps a failure for its back-off, and as long again: a failure later than that is the first one in a row.
func (f *failures) remember(key string, err *LoadError, stripe uint32) {
	if err.RetryAfter <= 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if len(f.byKey) >= maxFailures {
		for k, old := range f.byKey {
			if old.over(now) {
				delete(f.byKey, k)
			}
		}
	}
	if len(f.byKey) < maxFailures {
		f.byKey[key] = pastFailure{err, now.Add(err.RetryAfter), stripe}
	}
}

func (p pastFailure) over(now time.Time) bool { return now.After(p.until.Add(p.err.RetryAfter)) }

// recall returns the failure of key if it still counts, with what is left of its back-off.
func (f *failures) recall(key string, stripe uint32) *LoadError {
	f.mu.Lock()
	defer f.mu.Unlock()
	past, there := f.byKey[key]
	left := time.Until(past.until)
	if !there || left <= 0 || past.stripe != stripe {
		return nil
	}
	err := *past.err
	err.RetryAfter = left
	return &err
}

// inARow is how many loads of key have failed one after the other until now.
func (f *failures) inARow(key string, stripe uint32) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	past, there := f.byKey[key]
	if !there || past.stripe != stripe || past.over(time.Now()) {
		return 0
	}
	return past.err.failures
}

// forget reports whether there was something to forget.
func (f *failures) forget(key string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.byKey)
	delete(f.byKey, key)
	return len(f.byKey) < n
}
