// Package retry repeats work that failed because a server did not answer, until the work succeeds or is no longer
// needed.
package retry

import (
	"context"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"
)

const (
	maxPending = 10_000
	pause      = 500 * time.Millisecond
)

// ErrFull is the error that done gets for work that does not fit into the Queue.
var ErrFull = errors.New("retry: too much work is pending")

// Queue holds at most one piece of work W per key K. A goroutine runs while work is pending.
type Queue[K, W comparable] struct {
	try   func(ctx context.Context, key K, work W) error
	done  func(key K, work W, err error)
	merge func(old, new W) W

	wake  chan struct{} // holds one request to try now
	ctx   context.Context
	stop  context.CancelFunc
	group sync.WaitGroup

	size    atomic.Int32 // number of entries in pending, for Empty
	mu      sync.Mutex   // guards all below
	pending map[K]item[W]
	running bool
}

type item[W comparable] struct {
	work  W
	until time.Time // after this moment, the work is no longer needed
}

// New returns an empty Queue. try does the work. done is called when a piece of work leaves the Queue, or does not fit
// into the Queue. The error that done gets is nil after try has succeeded, the error of the last try if the work is no
// longer needed, and [ErrFull] if the Queue has no room. If work is added for a key that has pending work, merge
// combines the pending and the added work. merge runs under a mutex. try and done run without a mutex.
func New[K, W comparable](
	try func(context.Context, K, W) error, done func(K, W, error), merge func(old, new W) W,
) *Queue[K, W] {
	q := &Queue[K, W]{
		try: try, done: done, merge: merge, wake: make(chan struct{}, 1), pending: make(map[K]item[W]),
	}
	q.ctx, q.stop = context.WithCancel(context.Background())
	return q
}

// Add queues work for keys. The work is no longer needed after until.
func (q *Queue[K, W]) Add(keys []K, work W, until time.Time) {
	for _, key := range q.add(keys, work, until) {
		q.done(key, work, ErrFull)
	}
}

// add returns the keys whose work does not fit into the queue.
func (q *Queue[K, W]) add(keys []K, work W, until time.Time) (rejected []K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, key := range keys {
		old, there := q.pending[key]
		switch {
		case there:
			q.pending[key] = item[W]{q.merge(old.work, work), until}
		case len(q.pending) >= maxPending:
			rejected = append(rejected, key)
		default:
			q.pending[key] = item[W]{work, until}
		}
	}
	q.size.Store(int32(len(q.pending)))
	if !q.running && q.ctx.Err() == nil {
		q.running = true
		q.group.Go(q.run)
	}
	return rejected
}

// Empty reports whether no work is pending. It takes no mutex.
func (q *Queue[K, W]) Empty() bool { return q.size.Load() == 0 }

// Has reports whether work is pending for a key.
func (q *Queue[K, W]) Has(key K) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	_, there := q.pending[key]
	return there
}

// TryNow does the pending work of a key at once, if there is any. If this try fails, TryNow returns its error, and
// the work stays pending.
func (q *Queue[K, W]) TryNow(key K) error {
	q.mu.Lock()
	i, there := q.pending[key]
	q.mu.Unlock()
	if !there {
		return nil
	}
	if err := q.try(q.ctx, key, i.work); err != nil {
		return err
	}
	if q.remove(key, i) {
		q.done(key, i.work, nil)
	}
	return nil
}

// Wake makes the queue try all pending work at once. The Loader calls Wake when the server may be back.
func (q *Queue[K, W]) Wake() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

func (q *Queue[K, W]) run() {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		select {
		case <-q.ctx.Done():
			return
		case <-q.wake:
		case <-timer.C:
		}
		if !q.tryAll() {
			return
		}
		timer.Reset(pause)
	}
}

// tryAll tries all pending work, and reports whether any work is still pending.
func (q *Queue[K, W]) tryAll() bool {
	q.mu.Lock()
	tries := maps.Clone(q.pending)
	q.mu.Unlock()
	for key, i := range tries {
		if !q.isPending(key, i) {
			continue // TryNow has done the work meanwhile, or Add has changed the work
		}
		err := q.try(q.ctx, key, i.work)
		if err != nil && !time.Now().After(i.until) {
			break // the server is still gone, so the other keys would fail as well
		}
		if q.remove(key, i) {
			q.done(key, i.work, err)
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.running = len(q.pending) > 0
	return q.running
}

func (q *Queue[K, W]) isPending(key K, i item[W]) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pending[key] == i
}

// remove drops work that is done, unless Add has changed the work of the key meanwhile. remove reports whether it has
// dropped the work.
func (q *Queue[K, W]) remove(key K, i item[W]) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending[key] != i {
		return false
	}
	delete(q.pending, key)
	q.size.Store(int32(len(q.pending)))
	return true
}

// Close ends the goroutine and waits for it. Pending work stays undone.
func (q *Queue[K, W]) Close() {
	q.mu.Lock() // add checks ctx under mu, so it starts no goroutine after this stop
	q.stop()
	q.mu.Unlock()
	q.group.Wait()
}
