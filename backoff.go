package refill

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// This file handles loads that failed: the error as other nodes get it, and the back-offs that this process knows.

// loadError wraps the error of a load of this node. If another node has failed just before, the failure holds the whole
// fleet back. The back-off grows with each failure of the key in a row, unless the load has set a back-off. If one node
// fails and another node fails right after it, the two failures count as one.
func (r *refill[V]) loadError(err error, panicked bool, t terms) *LoadError {
	e := &LoadError{
		Key: r.key, Node: r.node.id, Err: err, Panic: panicked, Timeout: errors.Is(err, errLoadTimeout),
		fleet: r.earlier != nil, failures: r.backoffs.failures(r.key, r.epoch.Key) + 1,
	}
	if e.fleet {
		e.failures = max(e.failures, r.earlier.failures)
	}
	e.RetryAfter = t.errorTTL.or(backOff(r.cfg.ErrorTTL, r.cfg.MaxErrorTTL, e.failures))
	return e
}

// failing counts the loads of this node that failed in a row. Several failed loads of one key count as one.
type failing struct {
	any, full atomic.Bool  // any: n > 0; full: n == sickAfter; written with n under mu, read without mu
	last      atomic.Int64 // how long the last failed load took

	mu   sync.Mutex        // guards the next two
	keys [sickAfter]string // the first n are the keys whose loads failed
	n    int
}

// sickAfter is how many different keys must fail in a row before the node itself is taken for the cause.
const sickAfter = 3

// note counts a load. A load that was cancelled because all callers have left counts as failed. The reason: on a node
// whose database does not answer, callers often leave before LoadTimeout.
func (f *failing) note(key string, failed bool, took time.Duration) {
	if !failed && !f.any.Load() {
		return
	}
	f.last.Store(int64(took))
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case !failed:
		f.n = 0
	case f.n < sickAfter && !slices.Contains(f.keys[:f.n], key):
		f.keys[f.n] = key
		f.n++
	}
	f.any.Store(f.n > 0)
	f.full.Store(f.n == sickAfter)
}

func (f *failing) took() time.Duration { return time.Duration(f.last.Load()) }

// sick reports whether loads of sickAfter different keys have failed on this node since the last load that succeeded.
func (f *failing) sick() bool { return f.full.Load() }

// wireError is the part of a LoadError that other nodes get.
type wireError struct {
	Node     string `json:"node"`
	Text     string `json:"text"`
	Panic    bool   `json:"panic,omitempty"`
	Timeout  bool   `json:"timeout,omitempty"`
	Fleet    bool   `json:"fleet,omitempty"`
	Failures int    `json:"failures"` // how many loads of the key have failed in a row
	BackOff  int64  `json:"back_off"` // ms; 0 = none
}

// backOff is the length of the back-off. The result is from 0 to maxSpan, even if a foreign program has written the
// JSON text.
func (w wireError) backOff() time.Duration {
	return time.Duration(min(max(w.BackOff, 0), maxSpan.Milliseconds())) * time.Millisecond
}

// saidBackOff returns the length of the back-off that is noted in a failure from the store, and 0 if none is noted.
func saidBackOff(wire string) time.Duration {
	var w wireError
	if json.Unmarshal([]byte(wire), &w) != nil {
		return 0
	}
	return w.backOff()
}

// maxWireText is how much of an error's text is sent to other nodes, in bytes.
const maxWireText = 1 << 10

// wire returns the JSON text that other nodes get of e. It has the first line of the cause, cut to maxWireText.
func (e *LoadError) wire() string {
	text, _, _ := strings.Cut(e.Err.Error(), "\n")
	b, err := json.Marshal(wireError{
		e.Node, text[:min(len(text), maxWireText)], e.Panic, e.Timeout, e.fleet, e.failures, e.RetryAfter.Milliseconds(),
	})
	if err != nil {
		return "{}" // cannot happen: a wireError has only strings, bools and numbers
	}
	return string(b)
}

// loadErrorOf returns the LoadError that a node left in the store or announced. If the load failed on this node and its
// back-off still lasts, loadErrorOf returns the original error. left is the rest of the back-off by the store's count;
// 0 = unknown.
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
		left = w.backOff()
	}
	return &LoadError{
		Key: key, Node: w.Node, Panic: w.Panic, Timeout: w.Timeout, RetryAfter: left, Err: errors.New(w.Text),
		fleet: w.Fleet, failures: w.Failures,
	}
}

// backOffOf returns the error of the last failed load of key that this process knows of. It returns nil if the back-off
// of that load is over, or if key was invalidated after that load began.
func (l *Loader[V]) backOffOf(key string) *LoadError {
	return l.backoffs.get(key, l.l1.Epoch(key).Key)
}

// backoffs are the failed loads that this process knows of. They have three uses. They keep the error itself, because
// the store has only the text of the error. They count failures in a row. While the store does not answer, they are the
// only back-off of this process.
type backoffs struct {
	mu    sync.Mutex
	byKey map[string]pastFailure
}

type pastFailure struct {
	err   *LoadError
	until time.Time // end of the back-off
	epoch uint32    // l1.Epoch.Key before the load began; another epoch now means that the key was invalidated
}

// maxBackoffs bounds the memory of backoffs. While backoffs is full, further failures are not remembered. A key whose
// failure is not remembered may be loaded once too often, or its back-off may start again at ErrorTTL.
const maxBackoffs = 4096

// remember keeps a failure for twice its back-off. If the next load of the key fails after that time, its failure
// counts as the first in a row.
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

// get returns the failure of key while the back-off of that failure lasts, and nil after that. RetryAfter of the result
// is what is left of the back-off.
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
