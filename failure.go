package refill

import (
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"time"
)

// loadError wraps what a load of this node failed with.
func (l *Loader[V]) loadError(c *call[V], err error, panicked bool) *LoadError {
	return &LoadError{
		Key: c.key, Node: l.node.id, Err: err, Panic: panicked, RetryAfter: l.cfg.ErrorTTL,
		Timeout: errors.Is(err, errLoadTimeout),
	}
}

// failure is a LoadError on its way to other nodes.
type failure struct {
	Node    string `json:"node"`
	Text    string `json:"text"`
	Panic   bool   `json:"panic,omitempty"`
	Timeout bool   `json:"timeout,omitempty"`
}

// maxFailure is how much of an error's text travels.
const maxFailure = 1 << 10

// wire is what of e travels: the first line of its cause.
func (e *LoadError) wire() string {
	text, _, _ := strings.Cut(e.Err.Error(), "\n")
	b, err := json.Marshal(failure{e.Node, text[:min(len(text), maxFailure)], e.Panic, e.Timeout})
	if err != nil {
		return "{}" // cannot be: strings and bools
	}
	return string(b)
}

// loadErrorOf is the LoadError that was left in the store, or announced.
func (l *Loader[V]) loadErrorOf(key, wire string, left time.Duration) *LoadError {
	if left <= 0 {
		left = l.cfg.ErrorTTL // not asked for
	}
	var f failure
	if json.Unmarshal([]byte(wire), &f) != nil {
		f.Text = wire
	}
	if own := l.failures.recall(key); own != nil && f.Node == l.node.id {
		return own
	}
	return &LoadError{
		Key: key, Node: f.Node, Panic: f.Panic, Timeout: f.Timeout, RetryAfter: left, Err: errors.New(f.Text),
	}
}

// failures are those of this process's own loads, while their back-off lasts: with the error itself, of which only text
// stands in the store, and for the time that there is no store to leave it in.
type failures struct {
	mu    sync.Mutex
	byKey map[string]ownFailure
}

type ownFailure struct {
	err   *LoadError
	until time.Time
}

// maxFailures bounds the memory. A failure more is only forgotten, which costs a load.
const maxFailures = 4096

func (f *failures) remember(key string, err *LoadError) {
	if err.RetryAfter <= 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if len(f.byKey) >= maxFailures {
		for k, old := range f.byKey {
			if !now.Before(old.until) {
				delete(f.byKey, k)
			}
		}
	}
	if len(f.byKey) < maxFailures {
		f.byKey[key] = ownFailure{err, now.Add(err.RetryAfter)}
	}
}

// recall returns the failure of key if its back-off is not over, with what is left of that.
func (f *failures) recall(key string) *LoadError {
	f.mu.Lock()
	defer f.mu.Unlock()
	own, there := f.byKey[key]
	left := time.Until(own.until)
	if !there || left <= 0 {
		delete(f.byKey, key)
		return nil
	}
	err := *own.err
	err.RetryAfter = left
	return &err
}

func (f *failures) forget(key string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.byKey, key)
}
