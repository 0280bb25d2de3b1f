package refill_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
)

// This file tests load functions that still run after LoadTimeout. At LoadTimeout, the Loader frees the load slot of
// such a function. But the Loader does not load the key of that function again until the function has returned.

// hanging is a database. A load of a key that begins with "hang" ignores its ctx, and waits until release is closed.
type hanging struct {
	db
	release chan struct{}
	mu      sync.Mutex
	hung    int // guarded by mu: number of loads that have waited, or still wait, for release
}

func newHanging() *hanging { return &hanging{release: make(chan struct{})} }

func (d *hanging) load(ctx context.Context, key string) (string, error) {
	if strings.HasPrefix(key, "hang") {
		d.mu.Lock()
		d.hung++
		d.mu.Unlock()
		<-d.release
	}
	return d.db.load(ctx, key)
}

// loads returns the number of loads of keys that begin with "hang".
func (d *hanging) loads() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.hung
}

// getFor calls Get with a ctx whose deadline is d from now. getFor returns how long Get took, and the error of Get.
func getFor(t *testing.T, l *refill.Loader[string], key string, d time.Duration) (time.Duration, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	began := time.Now()
	_, err := l.Get(ctx, key)
	return time.Since(began), err
}

// The load function of one key hangs. The test calls Get of this key four times, ten seconds apart. The node must call
// the function once, and must still load other keys. Another node must load the key that hangs.
func TestOneKeyThatHangs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := newHanging()
		shared := memory.New()
		cfg := refill.Config{MaxLoads: 4, LoadTimeout: time.Second, Shared: shared, TTL: time.Minute}
		l := node(t, d.load, cfg)
		peer := node(t, (&db{}).load, cfg)
		for i := range 4 {
			if _, err := getFor(t, l, "hang", 5*time.Second); !isTimeout(err) {
				t.Errorf("Get %d: got %v, want a LoadError with Timeout", i, err)
			}
			time.Sleep(10 * time.Second)
		}
		if n := d.loads(); n != 1 {
			t.Errorf("got %d loads of the key that hangs, want 1", n)
		}
		if took, err := getFor(t, l, "other", time.Minute); err != nil || took != 0 {
			t.Errorf("Get of another key: %v after %v, want a value within LockTTL", err, took)
		}
		if err := l.Refresh(t.Context(), "hang"); !isTimeout(err) || d.loads() != 1 {
			t.Errorf("Refresh: got %v after %d loads, want a LoadError with Timeout, after 1", err, d.loads())
		}
		get(t, peer, "hang")
		get(t, l, "hang") // the value of the peer
		close(d.release)
		synctest.Wait()
		if err := l.Refresh(t.Context(), "hang"); err != nil || d.loads() != 2 {
			t.Errorf("Refresh after the function has returned: %v after %d loads, want success after 2", err, d.loads())
		}
	})
}

func isTimeout(err error) bool {
	var failure *refill.LoadError
	return errors.As(err, &failure) && failure.Timeout
}

// MaxLoads load functions hang beyond LoadTimeout, and MaxLoads more functions hang in all load slots. A further Get
// must fail with ErrOverloaded within LockTTL. When the functions have returned, Gets must return values again.
func TestManyKeysThatHang(t *testing.T) {
	// After failed loads of three keys, a node lets other nodes load first: it waits as long as its last failed load took,
	// but at most LockTTL (1 s by default). So each Get below may take up to 1 s longer.
	const yield = time.Second
	for _, slots := range []int{1, 4} {
		t.Run(fmt.Sprint("MaxLoads ", slots), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := newHanging()
				l := node(t, d.load, refill.Config{MaxLoads: slots, LoadTimeout: time.Second, TTL: time.Minute})
				for i := range 2 * slots {
					if _, err := getFor(t, l, fmt.Sprint("hang", i), 5*time.Second); !isTimeout(err) {
						t.Errorf("Get %d: got %v, want a LoadError with Timeout", i, err)
					}
				}
				for i := range 3 {
					took, err := getFor(t, l, fmt.Sprint("k", i), time.Minute)
					if !errors.Is(err, refill.ErrOverloaded) || took > yield {
						t.Errorf("Get %d: got %v after %v, want ErrOverloaded within LockTTL", i, err, took)
					}
				}
				if n := d.loads(); n != 2*slots {
					t.Errorf("got %d loads, want %d", n, 2*slots)
				}
				close(d.release)
				synctest.Wait()
				if took, err := getFor(t, l, "k", time.Minute); err != nil || took > yield {
					t.Errorf("Get after the functions have returned: %v after %v, want a value within LockTTL", err, took)
				}
			})
		})
	}
}

// Five Gets wait for a load slot while load functions hang in all slots. A slot becomes free when its function outlives
// LoadTimeout (1 s). Each of the five Gets must return a value or ErrOverloaded within 2 s.
func TestQueueBehindLoadsThatHang(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := newHanging()
		l := node(t, d.load, refill.Config{MaxLoads: 2, LoadTimeout: time.Second, TTL: time.Minute})
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() { _, _ = getFor(t, l, fmt.Sprint("hang", i), time.Minute) })
		}
		synctest.Wait()
		for i := range 5 {
			wg.Go(func() {
				took, err := getFor(t, l, fmt.Sprint("k", i), time.Minute)
				if took > 2*time.Second || err != nil && !errors.Is(err, refill.ErrOverloaded) {
					t.Errorf("got %v after %v, want a value or ErrOverloaded within 2 s", err, took)
				}
			})
		}
		wg.Wait()
		close(d.release)
		synctest.Wait()
	})
}

// Two load functions hang, and all of their callers leave before LoadTimeout. The functions still run, so they must
// occupy their load slots until LoadTimeout. At LoadTimeout, the slots must be free.
func TestAbandonedLoadsThatHang(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := newHanging()
		l := node(t, d.load, refill.Config{MaxLoads: 2, LoadTimeout: 2 * time.Second, TTL: time.Minute})
		for i := range 2 {
			if _, err := getFor(t, l, fmt.Sprint("hang", i), 100*ms); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Get %d: got %v, want the error of the ctx", i, err)
			}
		}
		if _, err := getFor(t, l, "k", time.Second); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Get before LoadTimeout: got %v, want the error of the ctx: both slots are taken", err)
		}
		if took, err := getFor(t, l, "k", time.Minute); err != nil || took != 800*ms {
			t.Errorf("got %v after %v, want a value after 800 ms, when the first load is 2 s old", err, took)
		}
		time.Sleep(time.Second)
		if took, err := getFor(t, l, "hang0", time.Minute); !isTimeout(err) || took != 0 || d.loads() != 2 {
			t.Errorf("got %v after %v and %d loads, want a LoadError with Timeout at once, after 2", err, took, d.loads())
		}
		close(d.release)
		synctest.Wait()
		get(t, l, "hang0")
	})
}

// A bulk load function hangs. The Loader must not load the keys of this call again before the function has returned.
// The Loader must still load other keys.
func TestABulkLoadThatHangs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release, calls := make(chan struct{}), 0
		load := func(_ context.Context, keys []string) (map[string]string, error) {
			rows := map[string]string{}
			for _, key := range keys {
				if key == "hang" {
					calls++
					<-release
				}
				rows[key] = "row " + key
			}
			return rows, nil
		}
		l, err := refill.NewBulk("thing", load, refill.Config{MaxLoads: 1, LoadTimeout: time.Second, TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		for i := range 3 {
			_, err := l.GetMany(t.Context(), []string{"hang", "with it"})
			if !isTimeout(err) {
				t.Errorf("GetMany %d: got %v, want a LoadError with Timeout", i, err)
			}
			time.Sleep(10 * time.Second)
		}
		all(t, l, []string{"a", "b"})
		close(release)
		synctest.Wait()
		if calls != 1 {
			t.Errorf("got %d calls with the key that hangs, want 1", calls)
		}
		all(t, l, []string{"hang", "with it"})
	})
}
