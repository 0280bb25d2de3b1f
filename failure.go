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
	if f.Node == l.node.id {
		if own := l.ownFailure(key); own != nil {
			return own
		}
	}
	return &LoadError{
		Key: key, Node: f.Node, Panic: f.Panic, Timeout: f.Timeout, RetryAfter: left, Err: errors.New(f.Text),
	}
}

// ownFailure is the error of this process's own last load of key, while its back-off lasts and nothing has voided that load.
func (l *Loader[V]) ownFailure(key string) *LoadError {
	return l.failures.recall(key, l.local.note(key).stripe)
}

// failures are those of this process's own loads, while their back-off lasts: with the error itself, of which only text
// stands in the store, and for the time that there is no store to leave it in.
type failures struct {
	mu    sync.Mutex
	byKey map[string]ownFailure
}

type ownFailure struct {
	err    *LoadError
	until  time.Time
	stripe uint32 // epoch of the key, noted before the load began: as for an entry of L1, it is judged when it is read
}

// maxFailures bounds the memory. A failure more is only forgotten, which costs a load.
const maxFailures = 4096

func (f *failures) remember(key string, err *LoadError, stripe uint32) {
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
		f.byKey[key] = ownFailure{err, now.Add(err.RetryAfter), stripe}
	}
}

// recall returns the failure of key if it still counts, with what is left of its back-off.
func (f *failures) recall(key string, stripe uint32) *LoadError {
	f.mu.Lock()
	defer f.mu.Unlock()
	own, there := f.byKey[key]
	if !there {
		return nil
	}
	left := time.Until(own.until)
	if left <= 0 || own.stripe != stripe {
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
