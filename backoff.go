package refill

import (
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"time"
)

// This file is about loads that failed: the error as it is sent to other nodes, and the back-offs that this process
// knows.

// loadError wraps the error of a load of this node. The back-off grows with each failure of the key in a row. Failures
// on other nodes count as well, as far as this node knows of them.
func (r *refill[V]) loadError(err error, panicked bool) *LoadError {
	e := &LoadError{
		Key: r.key, Node: r.node.id, Err: err, Panic: panicked, Timeout: errors.Is(err, errLoadTimeout),
		failures: r.backoffs.failures(r.key, r.epoch.Key) + 1,
	}
	e.RetryAfter = backOff(r.cfg.ErrorTTL, r.cfg.MaxErrorTTL, e.failures)
	return e
}

// wireError is the part of a LoadError that other nodes get.
type wireError struct {
	Node     string `json:"node"`
	Text     string `json:"text"`
	Panic    bool   `json:"panic,omitempty"`
	Timeout  bool   `json:"timeout,omitempty"`
	Failures int    `json:"failures"` // in a row
	BackOff  int64  `json:"back_off"` // ms; 0 = none
}

// maxWireText is how much of an error's text is sent.
const maxWireText = 1 << 10

// wire returns the text that other nodes get of e. It has the first line of the cause.
func (e *LoadError) wire() string {
	text, _, _ := strings.Cut(e.Err.Error(), "\n")
	b, err := json.Marshal(wireError{
		e.Node, text[:min(len(text), maxWireText)], e.Panic, e.Timeout, e.failures, e.RetryAfter.Milliseconds(),
	})
	if err != nil {
		return "{}" // impossible: strings, bools and numbers
	}
	return string(b)
}

// loadErrorOf returns the LoadError that a node left in the store or announced. left is the remaining back-off as the
// store counts it; 0 = unknown.
func (l *Loader[V]) loadErrorOf(key, wire string, left time.Duration) *LoadError {
	w := wireError{BackOff: l.cfg.ErrorTTL.Milliseconds()}
	if json.Unmarshal([]byte(wire), &w) != nil {
		w.Text = wire
	}
	if w.Node == l.node.id {
		if own := l.backOffOf(key); own != nil && own.Node == w.Node {
			return own
		}
	}
	if left <= 0 {
		left = min(max(0, time.Duration(w.BackOff)*time.Millisecond), l.cfg.MaxErrorTTL)
	}
	return &LoadError{
		Key: key, Node: w.Node, Panic: w.Panic, Timeout: w.Timeout, RetryAfter: left, Err: errors.New(w.Text),
		failures: w.Failures,
	}
}

// backOffOf returns the error of the last failed load of key that this process knows of. It returns nil if the back-off
// of that load is over, or if an invalidation came after the load began.
func (l *Loader[V]) backOffOf(key string) *LoadError {
	return l.backoffs.get(key, l.l1.Epoch(key).Key)
}

// backoffs are the failed loads that this process knows of. They have three uses. They keep the error itself, while the
// store has only the text of the error. They count failures. They hold loads back if there is no store in which to
// leave a back-off.
type backoffs struct {
	mu    sync.Mutex
	byKey map[string]pastFailure
}

type pastFailure struct {
	err   *LoadError
	until time.Time
	epoch uint32 // l1.Epoch.Key before the load began: like an entry of L1, a failure is judged when it is read
}

// maxBackoffs bounds the memory of backoffs. Further failures are not remembered, which costs a load, or starts a
// back-off anew.
const maxBackoffs = 4096

// remember keeps a failure for the time of its back-off, and for the same time again. A failure after that counts as
// the first failure in a row.
func (b *backoffs) remember(key string, err *LoadError, epoch uint32) {
	if err.RetryAfter <= 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if len(b.byKey) >= maxBackoffs {
		for k, old := range b.byKey {
			if old.isOver(now) {
				delete(b.byKey, k)
			}
		}
	}
	if b.byKey == nil {
		b.byKey = make(map[string]pastFailure)
	}
	if len(b.byKey) < maxBackoffs {
		b.byKey[key] = pastFailure{err, now.Add(err.RetryAfter), epoch}
	}
}

func (p pastFailure) isOver(now time.Time) bool { return now.After(p.until.Add(p.err.RetryAfter)) }

// get returns the failure of key if the back-off of that failure lasts. RetryAfter is what is left of the back-off.
func (b *backoffs) get(key string, epoch uint32) *LoadError {
	b.mu.Lock()
	defer b.mu.Unlock()
	past, there := b.byKey[key]
	left := time.Until(past.until)
	if !there || left <= 0 || past.epoch != epoch {
		return nil
	}
	err := *past.err
	err.RetryAfter = left
	return &err
}

// failures returns how many loads of key have failed in a row until now.
func (b *backoffs) failures(key string, epoch uint32) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	past, there := b.byKey[key]
	if !there || past.epoch != epoch || past.isOver(time.Now()) {
		return 0
	}
	return past.err.failures
}

// forget removes the failure of key. It reports whether there was a failure to remove.
func (b *backoffs) forget(key string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := len(b.byKey)
	delete(b.byKey, key)
	return len(b.byKey) < n
}
