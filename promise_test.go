package refill_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
)

const ms = time.Millisecond

// A load that takes longer than both TTL and LockTTL: its value is dead when it is published. Everybody who waited takes
// it all the same; else each node would load in turn, three seconds each (design-review V9).
func TestLoadLongerThanTTLAndLockTTL(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 3 * time.Second}
		nodes := fleet(t, 8, d, refill.Config{TTL: time.Second, LockTTL: time.Second})
		var wg sync.WaitGroup
		began := time.Now()
		for i := range 80 {
			wg.Go(func() { get(t, nodes[i%8], "k") })
		}
		wg.Wait()
		if took := time.Since(began); took > 3100*ms {
			t.Errorf("the last waiter had its value after %v", took)
		}
		if n := d.loads.Load(); n != 1 {
			t.Errorf("%d loads, want 1", n)
		}
	})
}

func TestADeadHoldersWorkIsTakenOver(t *testing.T) {
	for _, lostPush := range []bool{false, true} {
		t.Run(fmt.Sprintf("lostPush=%v", lostPush), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 500 * ms}
				shared := refill.NewMemory()
				a, b := newSpy(shared), newSpy(shared)
				na := node(t, d.load, refill.Config{Shared: a})
				nb := node(t, d.load, refill.Config{Shared: b})
				go func() { _, _ = na.Get(t.Context(), "k") }()
				time.Sleep(400 * ms) // renewed once
				a.died.Store(true)
				b.mute.Store(lostPush)
				died := time.Now()
				get(t, nb, "k")
				d.mu.Lock()
				defer d.mu.Unlock()
				if len(d.begins) != 2 || d.begins[1].Sub(died) > 1500*ms {
					t.Errorf("loads began %v after the death, want the second within LockTTL + 500 ms", d.begins)
				}
			})
		})
	}
}

// G3: a filler that was frozen past its lease and claim must not overwrite what was published since.
func TestAnOvertakenFillerDoesNotPublish(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 2 * time.Second}
		shared := refill.NewMemory()
		a := newSpy(shared)
		var ev events
		na := node(t, d.load, refill.Config{TTL: time.Minute, Shared: a, OnEvent: ev.on})
		nb := node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared})
		var wg sync.WaitGroup
		wg.Go(func() { get(t, na, "k") }) // reads v0
		time.Sleep(100 * ms)
		a.died.Store(true) // frozen: no renewal
		d.version.Store(1)
		wg.Go(func() { get(t, nb, "k") }) // takes over at 1 s
		time.Sleep(1500 * ms)
		a.died.Store(false) // resumes: its load ends at 2 s, that of b at 3 s
		wg.Wait()
		if v := get(t, nb, "k"); v != "k v1" {
			t.Errorf("%q is served, want v1", v)
		}
		if v := get(t, na, "k"); v != "k v1" {
			t.Errorf("the overtaken node serves %q, want v1", v)
		}
		if ev.of(refill.EventRefused) != 1 || ev.of(refill.EventLeaseLost) != 1 {
			t.Errorf("events %v, want one refused and one lease-lost", ev.count)
		}
	})
}

func TestCallersLeaveOnTheirOwn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		l := fleet(t, 1, d, refill.Config{})[0]
		leader, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := l.Get(leader, "k"); !errors.Is(err, context.Canceled) {
				t.Errorf("leader: %v, want its cancellation", err)
			}
		})
		time.Sleep(100 * ms)
		wg.Go(func() { get(t, l, "k") }) // a follower
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 30*ms)
			defer cancel()
			began := time.Now()
			if _, err := l.Get(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 30*ms {
				t.Errorf("impatient follower: %v after %v", err, time.Since(began))
			}
		})
		time.Sleep(100 * ms)
		cancel()
		wg.Wait()
		if n := d.loads.Load(); n != 1 {
			t.Errorf("%d loads, want 1", n)
		}
	})
}

// When the last caller leaves, the load's ctx ends, there is no back-off, nobody joins the dying flight, and a node
// that waited is woken at once.
func TestTheLastCallerTakesTheLoadAlong(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		var ev events
		nodes := fleet(t, 2, d, refill.Config{OnEvent: ev.on})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = nodes[0].Get(ctx, "k") })
		time.Sleep(100 * ms)
		wg.Go(func() {
			began := time.Now()
			get(t, nodes[1], "k")
			if took := time.Since(began); took != 1100*ms { // 100 ms until the cancel, then its own load
				t.Errorf("the waiting node had its value after %v", took)
			}
		})
		time.Sleep(100 * ms)
		cancel()
		synctest.Wait() // the caller has left
		get(t, nodes[0], "k")
		wg.Wait()
		if ev.of(refill.EventAbandoned) != 1 || d.loads.Load() != 2 {
			t.Errorf("%d loads, events %v", d.loads.Load(), ev.count)
		}
	})
}

func TestPanicAndGoexitAreErrors(t *testing.T) {
	cause := errors.New("cause")
	for name, load := range map[string]func(context.Context, string) (string, error){
		"panic":       func(context.Context, string) (string, error) { panic("ouch") },
		"panic error": func(context.Context, string) (string, error) { panic(cause) },
		"nil pointer": func(context.Context, string) (string, error) { var p *string; return *p, nil },
		"Goexit":      func(context.Context, string) (string, error) { runtime.Goexit(); return "", nil },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				shared := refill.NewMemory()
				a := node(t, load, refill.Config{Shared: shared})
				b := node(t, func(context.Context, string) (string, error) { return "fine", nil }, refill.Config{Shared: shared})
				_, err := a.Get(t.Context(), "k")
				var le *refill.LoadError
				if !errors.As(err, &le) || !le.Panic || le.Timeout || le.RetryAfter != time.Second {
					t.Fatalf("%v, want a LoadError that says panic", err)
				}
				if name == "panic error" && !errors.Is(err, cause) {
					t.Errorf("the panic's error is lost")
				}
				_, err = b.Get(t.Context(), "k") // the back-off, from another node
				if !errors.As(err, &le) || !le.Panic || strings.Contains(err.Error(), "\n") {
					t.Errorf("elsewhere: %v", err)
				}
				get(t, b, "other")
				time.Sleep(1001 * ms)
				get(t, b, "k")
			})
		})
	}
}

// A load function that ignores its ctx is left behind at LoadTimeout, and keeps its MaxLoads slot while it really runs.
func TestLoadTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan struct{})
		var runs atomic.Int64
		load := func(ctx context.Context, key string) (string, error) {
			if key == "k" && runs.Add(1) == 1 {
				<-release
			}
			return "v", nil
		}
		shared := refill.NewMemory()
		l := node(t, load, refill.Config{Shared: shared, LoadTimeout: 2 * time.Second, MaxLoads: 1})
		other := node(t, load, refill.Config{Shared: shared})
		began := time.Now()
		var wg sync.WaitGroup
		timedOut := func(where string, err error) {
			var le *refill.LoadError
			if !errors.As(err, &le) || !le.Timeout || !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 2*time.Second {
				t.Errorf("%s: %v after %v, want a time-out after 2 s", where, err, time.Since(began))
			}
		}
		wg.Go(func() {
			_, err := l.Get(t.Context(), "k")
			timedOut("here", err)
		})
		synctest.Wait() // l loads
		_, err := other.Get(t.Context(), "k")
		timedOut("elsewhere", err)
		wg.Wait()
		time.Sleep(1001 * ms)
		get(t, other, "k") // free for another try
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := l.Get(ctx, "new"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the only slot is taken, yet: %v", err)
		}
		close(release)
		get(t, l, "new")
	})
}

func TestStaleIfError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		var ev events
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleIfError: 5 * time.Second, Jitter: -1, OnEvent: ev.on})
		get(t, nodes[0], "k")
		d.fail(errors.New("boom"))
		time.Sleep(2 * time.Second) // past TTL, no StaleFor: callers wait for the load, and it fails
		for i, l := range nodes {
			r, err := l.GetResult(t.Context(), "k")
			if err != nil || r.Value != "k v0" || r.Outcome != refill.EventStaleOnError || r.Age < 2*time.Second || r.Remaining != 0 {
				t.Errorf("node %d: %+v, %v", i, r, err)
			}
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("%d loads, want 2: the back-off holds for both nodes", n)
		}
		time.Sleep(4 * time.Second)
		if _, err := nodes[0].Get(t.Context(), "k"); err == nil {
			t.Error("served past StaleIfError")
		}
	})
}

func TestAbsence(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Minute, StaleFor: time.Hour, NotFoundTTL: 2 * time.Second, Jitter: -1})
		d.fail(fmt.Errorf("no row 42: %w", refill.ErrNotFound))
		for range 3 {
			for _, l := range nodes {
				if _, err := l.Get(t.Context(), "k"); !errors.Is(err, refill.ErrNotFound) || err.Error() != "no row 42: refill: not found" {
					t.Errorf("got %v", err)
				}
			}
		}
		if n := d.loads.Load(); n != 1 {
			t.Errorf("%d loads, want 1: an absence is an answer", n)
		}
		d.fail(nil)
		time.Sleep(2*time.Second + 50*ms) // and a tick of the coarse clock
		get(t, nodes[1], "k")             // never a stale absence
		get(t, nodes[0], "k")
		d.fail(refill.ErrNotFound) // deleted: the absence replaces the stale value
		if err := nodes[0].Refresh(t.Context(), "k"); err != nil {
			t.Errorf("Refresh to an absence: %v", err)
		}
		synctest.Wait()
		for i, l := range nodes {
			if v, err := l.Get(t.Context(), "k"); !errors.Is(err, refill.ErrNotFound) {
				t.Errorf("node %d: %q, %v after the row was deleted", i, v, err)
			}
		}
	})
}

func TestAbsenceNotCached(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms, err: refill.ErrNotFound}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Minute, NotFoundTTL: -1})
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				if _, err := nodes[i%2].Get(t.Context(), "k"); !errors.Is(err, refill.ErrNotFound) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if n := d.loads.Load(); n != 1 {
			t.Errorf("%d loads for those who waited for it, want 1", n)
		}
		_, _ = nodes[0].Get(t.Context(), "k")
		if n := d.loads.Load(); n != 2 {
			t.Errorf("%d loads, want 2: it is not cached", n)
		}
	})
}

// An absence that is not cached still replaces the stale value, on every node.
func TestAbsenceNotCachedReplacesAStaleValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleFor: time.Hour, NotFoundTTL: -1})
		for _, l := range nodes {
			get(t, l, "k")
		}
		d.fail(refill.ErrNotFound)
		time.Sleep(2 * time.Second)
		get(t, nodes[0], "k") // stale, and refreshed behind
		time.Sleep(100 * ms)
		for i, l := range nodes {
			if v, err := l.Get(t.Context(), "k"); !errors.Is(err, refill.ErrNotFound) {
				t.Errorf("node %d: %q, %v", i, v, err)
			}
		}
	})
}

func TestExpire(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Minute, StaleFor: time.Minute})
		for _, l := range nodes {
			get(t, l, "k")
		}
		d.version.Store(1)
		if err := nodes[0].Expire(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // the push
		for i, l := range nodes {
			r, err := l.GetResult(t.Context(), "k")
			if err != nil || r.Outcome != refill.EventStale || r.Value != "k v0" || r.Remaining != 0 {
				t.Errorf("node %d: %+v, %v, want the old value as a stale one", i, r, err)
			}
		}
		time.Sleep(150 * ms)
		for i, l := range nodes {
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d: %q after the refresh", i, v)
			}
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("%d loads, want 2", n)
		}
	})
}

// V4: a load that began before Expire returned must not make its value fresh.
func TestExpireVoidsALoadElsewhere(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Minute})
		var wg sync.WaitGroup
		wg.Go(func() { get(t, nodes[0], "k") })
		time.Sleep(50 * ms)
		d.version.Store(1)
		if err := nodes[1].Expire(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		for i, l := range nodes {
			if v := get(t, l, "k"); v != "k v1" {
				t.Errorf("node %d serves %q", i, v)
			}
		}
	})
}

func TestRefresh(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Minute})
		for _, l := range nodes {
			get(t, l, "k")
		}
		d.version.Store(1)
		var wg sync.WaitGroup
		for _, l := range nodes { // both at once: one load
			wg.Go(func() {
				if err := l.Refresh(t.Context(), "k"); err != nil {
					t.Error(err)
				}
				if v := get(t, l, "k"); v != "k v1" {
					t.Errorf("%q after Refresh", v)
				}
			})
		}
		wg.Wait()
		if n := d.loads.Load(); n != 2 {
			t.Errorf("%d loads, want 2", n)
		}
		d.fail(errors.New("boom"))
		if err := nodes[0].Refresh(t.Context(), "k"); err == nil {
			t.Error("a failed Refresh says nothing")
		}
		if v := get(t, nodes[0], "k"); v != "k v1" {
			t.Errorf("%q after a failed Refresh", v)
		}
		d.fail(nil)
		d.version.Store(2)
		if err := nodes[1].Refresh(t.Context(), "k", "k2"); err != nil { // within the back-off
			t.Errorf("Refresh does not end the back-off: %v", err)
		}
		synctest.Wait()
		for i, l := range nodes { // the push carried the value
			if v := get(t, l, "k"); v != "k v2" {
				t.Errorf("node %d: %q", i, v)
			}
		}
	})
}

func TestInvalidateEndsTheBackOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms, err: errors.New("boom")}
		nodes := fleet(t, 2, d, refill.Config{ErrorTTL: time.Hour})
		_, _ = nodes[0].Get(t.Context(), "k")
		d.fail(nil)
		if err := nodes[1].Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		get(t, nodes[0], "k")
	})
}

func TestOutcomes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		var ev events
		nodes := fleet(t, 2, d, refill.Config{TTL: time.Second, StaleFor: 10 * time.Second, Jitter: -1, OnEvent: ev.on})
		want := func(l *refill.Loader[string], outcome refill.EventKind, age time.Duration) {
			t.Helper()
			r, err := l.GetResult(t.Context(), "k")
			if err != nil || r.Outcome != outcome || r.Age != age || r.Remaining != max(0, time.Second-age) || r.Node == "" {
				t.Errorf("%+v, %v, want %v at %v", r, err, outcome, age)
			}
		}
		if _, ok := nodes[0].Peek(t.Context(), "k"); ok {
			t.Error("Peek found something")
		}
		var wg sync.WaitGroup
		wg.Go(func() { want(nodes[0], refill.EventLed, 100*ms) })
		time.Sleep(ms)
		wg.Go(func() { want(nodes[0], refill.EventJoined, 100*ms) })
		wg.Go(func() { want(nodes[1], refill.EventWaited, 100*ms) })
		wg.Wait()
		want(nodes[0], refill.EventHit, 100*ms)
		time.Sleep(900 * ms)
		if r, ok := nodes[1].Peek(t.Context(), "k"); !ok || r.Outcome != refill.EventStale || r.Age != time.Second {
			t.Errorf("Peek: %+v, %v", r, ok)
		}
		if n := d.loads.Load(); n != 1 {
			t.Errorf("Peek loaded: %d", n)
		}
		want(nodes[1], refill.EventStale, time.Second)
		time.Sleep(200 * ms)
		want(nodes[1], refill.EventHit, 200*ms)
		want(nodes[0], refill.EventHit, 200*ms)
		for kind, n := range map[refill.EventKind]int{
			refill.EventLed: 1, refill.EventJoined: 1, refill.EventWaited: 1, refill.EventHit: 3, refill.EventStale: 1,
			refill.EventLoaded: 2, refill.EventPublished: 2, refill.EventStoreUp: 2,
		} {
			if ev.of(kind) != n {
				t.Errorf("%d events %v, want %d", ev.of(kind), kind, n)
			}
		}
	})
}

func TestFill(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var loads atomic.Int64
		var kept *refill.Fill
		load := func(ctx context.Context, key string) (string, error) {
			n := loads.Add(1)
			f := refill.FillFrom(ctx)
			kept = f
			switch key {
			case "long":
				f.SetTTL(time.Hour)
			case "stale":
				f.SetStaleFor(time.Hour)
			case "over":
				f.SetTTL(-time.Second)
			case "never":
				f.NoStore()
			}
			return fmt.Sprint(n), nil
		}
		shared := refill.NewMemory()
		l := node(t, load, refill.Config{TTL: time.Second, Jitter: -1, Shared: shared})
		other := node(t, load, refill.Config{TTL: time.Second, Jitter: -1, Shared: shared})
		long, stale := get(t, l, "long"), get(t, l, "stale")
		kept.NoStore() // too late
		time.Sleep(30 * time.Minute)
		if v := get(t, other, "long"); v != long {
			t.Errorf("own TTL: %q, want %q", v, long)
		}
		if r, err := other.GetResult(t.Context(), "stale"); err != nil || r.Value != stale || r.Outcome != refill.EventStale {
			t.Errorf("own StaleFor: %+v, %v", r, err)
		}
		time.Sleep(ms)
		for _, key := range []string{"never", "over"} {
			if a, b := get(t, l, key), get(t, l, key); a == b {
				t.Errorf("%s: %q twice, it must not be cached", key, a)
			}
		}
		b, _ := shared.Get(t.Context(), "thing:never")
		if r, err := refill.DecodeRecord(b); err != nil || !r.NoStore || len(r.Payload) > 0 {
			t.Errorf("NoStore left %+v, %v; want a mark", r, err)
		}
		refill.FillFrom(t.Context()).SetTTL(time.Hour) // outside of a load: nothing
	})
}

func TestCodec(t *testing.T) {
	type leaky struct {
		Shown  int
		hidden int
		Fn     func() `json:"-"`
	}
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		l, err := refill.New("leaky", func(context.Context, string) (leaky, error) { return leaky{1, 2, func() {}}, nil },
			refill.Config{TTL: time.Minute, Shared: shared})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if v, err := l.Get(t.Context(), "k"); err != nil || v.Shown != 1 || v.hidden != 0 || v.Fn != nil {
			t.Errorf("%+v, %v: the node that loads must see what the others see", v, err)
		}
		var ev events
		bad, err := refill.New("bad", func(context.Context, string) (map[string]any, error) {
			return map[string]any{"c": make(chan int)}, nil
		}, refill.Config{TTL: time.Minute, Shared: shared, OnEvent: ev.on})
		if err != nil {
			t.Fatal(err)
		}
		defer bad.Close()
		v, err := bad.Get(t.Context(), "the key")
		if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), `"the key"`) || !strings.Contains(err.Error(), "json") {
			t.Errorf("%v, want ErrInvalid that names key and codec", err)
		}
		if v["c"] == nil {
			t.Error("the value that was loaded is lost")
		}
	})
}

type panicky struct{ S string }

func (panicky) MarshalJSON() ([]byte, error) { panic("in the codec") }

func TestCodecPanic(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l, err := refill.New("panicky", func(context.Context, string) (panicky, error) { return panicky{"v"}, nil }, refill.Config{TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if v, err := l.Get(t.Context(), "k"); !errors.Is(err, refill.ErrInvalid) || v.S != "v" {
			t.Errorf("%+v, %v", v, err)
		}
	})
}

// foreign puts bytes under a key of shared as somebody else's fill would.
func foreign(t *testing.T, shared refill.Store, key string, record []byte) {
	t.Helper()
	ctx := t.Context()
	if r, err := shared.Begin(ctx, bid(t, shared, key, "x#1")); err != nil || r.State != refill.BeginTaken {
		t.Fatal(r, err)
	}
	if _, err := shared.Publish(ctx, refill.Publication{Key: key, Token: "x#1", Record: record, Keep: time.Hour}); err != nil {
		t.Fatal(err)
	}
}

func TestABadRecordIsAMissAndAnEvent(t *testing.T) {
	rec := refill.Record{Token: "x#1", LoadBegan: time.Now(), FreshUntil: time.Now().Add(time.Hour), Kind: "raw string", Payload: []byte("v")}
	good, err := rec.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	other := rec
	other.Kind = "json main.Other"
	otherType, _ := other.Append(nil)
	flipped := append([]byte(nil), good...)
	flipped[len(flipped)-1] ^= 1
	future := append([]byte("RF2"), good[3:]...)
	for name, record := range map[string][]byte{
		"foreign": []byte("hello"), "empty-ish": {0}, "flipped": flipped, "cut": good[:40], "other type": otherType, "future version": future,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 10 * ms}
				shared := refill.NewMemory()
				foreign(t, shared, "thing:k", record)
				var ev events
				l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared, OnEvent: ev.on})
				if v := get(t, l, "k"); v != "k v0" || d.loads.Load() != 1 {
					t.Errorf("%q after %d loads", v, d.loads.Load())
				}
				if ev.of(refill.EventBadRecord) == 0 {
					t.Error("no event")
				}
				if v := get(t, node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared}), "k"); v != "k v0" || d.loads.Load() != 1 {
					t.Error("it was not replaced")
				}
			})
		})
	}
}

func TestBadInput(t *testing.T) {
	load := func(context.Context, string) (string, error) { return "v", nil }
	if _, err := refill.New("", load, refill.Config{TTL: time.Second}); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "name") {
		t.Errorf("empty name: %v", err)
	}
	if _, err := refill.New("x", load, refill.Config{}); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "TTL: required") {
		t.Errorf("no TTL: %v", err)
	}
	bubble(t, func(t *testing.T) {
		ctx := t.Context()
		l := node(t, nil, refill.Config{})
		if _, err := l.Get(ctx, "k"); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "load") {
			t.Errorf("nil load, Get: %v", err)
		}
		if err := l.Refresh(ctx, "k"); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "load") {
			t.Errorf("nil load, Refresh: %v", err)
		}
		if _, err := l.GetWith(ctx, "k", nil); !errors.Is(err, refill.ErrInvalid) {
			t.Errorf("nil load, GetWith: %v", err)
		}
		if v, err := l.GetWith(ctx, "k", load); err != nil || v != "v" {
			t.Errorf("GetWith: %q, %v", v, err)
		}
		for name, f := range map[string]func(string) error{
			"Get":        func(k string) error { _, err := l.GetWith(ctx, k, load); return err },
			"Invalidate": func(k string) error { return l.Invalidate(ctx, "fine", k) },
			"Expire":     func(k string) error { return l.Expire(ctx, k) },
		} {
			if err := f(""); !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), "key: empty") {
				t.Errorf("%s of an empty key: %v", name, err)
			}
		}
		if err := errors.Join(l.Invalidate(ctx), l.Expire(ctx)); err != nil {
			t.Errorf("no keys: %v", err)
		}
		over, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := l.GetWith(over, "k2", load); !errors.Is(err, context.Canceled) {
			t.Errorf("a ctx that is over: %v", err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		_, e1 := l.GetWith(ctx, "k", load) // L1 holds it
		_, e2 := l.Get(ctx, "k")
		_, e3 := l.GetResult(ctx, "k")
		_, ok := l.Peek(ctx, "k")
		for i, err := range []error{e1, e2, e3, l.Invalidate(ctx, "k"), l.Expire(ctx, "k")} {
			if !errors.Is(err, refill.ErrClosed) {
				t.Errorf("call %d after Close: %v", i, err)
			}
		}
		if ok {
			t.Error("Peek after Close found something")
		}
		if err := l.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
	})
}

func TestNestedGets(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var l *refill.Loader[string]
		load := func(ctx context.Context, key string) (string, error) {
			switch key {
			case "self":
				return l.Get(ctx, "self")
			case "ring a":
				return l.Get(ctx, "ring b")
			case "ring b":
				return l.Get(ctx, "ring a")
			case "outer", "outer 2":
				time.Sleep(10 * ms)
				v, err := l.Get(ctx, "inner")
				return "outer of " + v, err
			}
			time.Sleep(100 * ms)
			return key, nil
		}
		l = node(t, load, refill.Config{TTL: time.Minute, MaxLoads: 1})
		for _, key := range []string{"self", "ring a"} {
			began := time.Now()
			if _, err := l.Get(t.Context(), key); !errors.Is(err, refill.ErrInvalid) || time.Since(began) > 0 {
				t.Errorf("%s: %v after %v, want an error at once", key, err, time.Since(began))
			}
		}
		// The only slot is taken by outer; inner takes none. Nor does it when somebody else queued for it first.
		var wg sync.WaitGroup
		began := time.Now()
		wg.Go(func() {
			if v := get(t, l, "outer"); v != "outer of inner" {
				t.Error(v)
			}
		})
		time.Sleep(ms)
		wg.Go(func() { get(t, l, "inner") })
		wg.Wait()
		if time.Since(began) > 200*ms {
			t.Errorf("took %v: it waited for itself", time.Since(began))
		}
	})
}

func TestMaxLoads(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		s := newSpy(refill.NewMemory())
		l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: s, MaxLoads: 4})
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() { get(t, l, fmt.Sprint(i)) }) // the store is well: they queue
		}
		wg.Wait()
		if d.most.Load() != 4 || d.loads.Load() != 20 {
			t.Errorf("%d at once, %d in all, want 4 and 20", d.most.Load(), d.loads.Load())
		}
		s.cut(true)
		d.slow(time.Second)
		var shed, served atomic.Int64
		began := time.Now()
		for i := range 20 {
			wg.Go(func() {
				switch _, err := l.Get(t.Context(), fmt.Sprint("new ", i)); {
				case err == nil:
					served.Add(1)
				case errors.Is(err, refill.ErrOverloaded) && time.Since(began) == 250*ms:
					shed.Add(1)
				default:
					t.Errorf("%v after %v", err, time.Since(began))
				}
			})
		}
		wg.Wait()
		if shed.Load() != 16 || served.Load() != 4 || d.most.Load() != 4 {
			t.Errorf("%d shed, %d served, %d at once: want 16, 4, 4", shed.Load(), served.Load(), d.most.Load())
		}
	})
}

func TestWithoutTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		shared := refill.NewMemory()
		s := newSpy(shared)
		var ev events
		l := node(t, d.load, refill.Config{TTL: time.Minute, StaleFor: time.Minute, Shared: s, Jitter: -1, OnEvent: ev.on})
		peer := node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared})
		get(t, l, "k")
		get(t, peer, "gone")
		get(t, l, "gone")
		s.cut(true)
		if v := get(t, l, "k"); v != "k v0" || d.loads.Load() != 2 {
			t.Errorf("%q after %d loads: L1 still has it", v, d.loads.Load())
		}
		get(t, l, "new")
		get(t, l, "new") // loaded here, served from here
		if n := d.loads.Load(); n != 3 {
			t.Errorf("%d loads, want 3", n)
		}
		d.version.Store(1)
		if err := l.Invalidate(t.Context(), "k", "gone"); err == nil {
			t.Error("Invalidate could not reach the store, and says nothing")
		}
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("%q after Invalidate: what this node holds must be gone all the same", v)
		}
		s.cut(false)
		time.Sleep(time.Second)
		if n := ev.of(refill.EventVoidRetried); n != 2 {
			t.Errorf("%d invalidations carried out after the return, want 2", n)
		}
		if v := get(t, peer, "gone"); v != "gone v1" {
			t.Errorf("the peer serves %q: the Invalidate was lost", v)
		}
		get(t, l, "k")
		calls := s.calls.Load()
		get(t, l, "k")
		if s.calls.Load() != calls {
			t.Error("L1 is not believed after the return")
		}
	})
}

// Nothing that was in L1 before a break of the subscription counts after it: an announcement may have been missed.
func TestABreakOfTheSubscription(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Minute})
		get(t, l, "k")
		s.cut(true)
		d.version.Store(1)
		if err := peer.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		s.down.Store(false) // the store answers, but announcements are not heard yet
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("%q: with the subscription broken the store is asked first", v)
		}
		gets := s.gets.Load()
		get(t, l, "k")
		if s.gets.Load() != gets+1 {
			t.Error("L1 was believed while announcements could not be heard")
		}
	})
}

// A push that nobody noticed the loss of: L1 follows within LocalTTL.
func TestALostPush(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 10 * ms}
		shared := refill.NewMemory()
		s := newSpy(shared)
		l := node(t, d.load, refill.Config{TTL: time.Hour, LocalTTL: 5 * time.Second, Shared: s})
		peer := node(t, d.load, refill.Config{TTL: time.Hour, Shared: shared})
		get(t, l, "k")
		s.mute.Store(true)
		d.version.Store(1)
		if err := peer.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(4900 * ms)
		if v := get(t, l, "k"); v != "k v0" {
			t.Fatalf("%q: the test is void", v)
		}
		time.Sleep(200 * ms)
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("%q past LocalTTL", v)
		}
	})
}

func TestAPushCarriesASmallValueAndAnnouncesALargeOne(t *testing.T) {
	for _, size := range []int{10, 100_000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var version atomic.Int64
				load := func(context.Context, string) (string, error) {
					return strings.Repeat(fmt.Sprint(version.Load()), size), nil
				}
				shared := refill.NewMemory()
				s := newSpy(shared)
				a := node(t, load, refill.Config{TTL: time.Hour, Shared: shared})
				b := node(t, load, refill.Config{TTL: time.Hour, Shared: s})
				get(t, a, "k")
				get(t, b, "k")
				version.Store(1)
				if err := a.Refresh(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				gets := s.gets.Load()
				first := get(t, b, "k")
				synctest.Wait()
				second := get(t, b, "k")
				if size < refill.MaxNoteRecord {
					if first[0] != '1' || s.gets.Load() != gets {
						t.Errorf("starts with %q after %d GETs: the push carried the value", first[0], s.gets.Load()-gets)
					}
				} else if first[0] != '0' || second[0] != '1' || s.gets.Load() != gets+1 {
					t.Errorf("first %q, then %q, %d GETs: want the old one at once, and the new one fetched behind", first[0], second[0], s.gets.Load()-gets)
				}
			})
		})
	}
}

// ristretto shows a new key late and turns some away: the front carries what was just loaded.
func TestAJustLoadedValueIsThere(t *testing.T) {
	for name, cfg := range map[string]refill.Config{
		"default": {}, "by bytes": {LocalBytes: 1 << 20}, "larger than a front slot": {LocalBytes: 1 << 14}, "full": {LocalEntries: 100},
	} {
		t.Run(name, func(t *testing.T) {
			d := &db{}
			s := newSpy(refill.NewMemory())
			cfg.TTL, cfg.Shared = time.Minute, s
			l := node(t, d.load, cfg)
			for i := range 2000 {
				key := fmt.Sprint(i)
				get(t, l, key)
				calls := s.calls.Load()
				get(t, l, key)
				if s.calls.Load() != calls {
					t.Fatalf("key %d: the store was asked for what was just loaded", i)
				}
			}
			if n := d.loads.Load(); n != 2000 {
				t.Errorf("%d loads of 2000", n)
			}
		})
	}
}

func TestLocalTTLOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		s := newSpy(refill.NewMemory())
		l := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: 10 * time.Second, LocalTTL: -1, Jitter: -1, Shared: s})
		get(t, l, "k")
		gets := s.gets.Load()
		get(t, l, "k")
		if s.gets.Load() != gets+1 {
			t.Error("no L1, yet the store was not asked")
		}
		time.Sleep(time.Second)
		for range 3 { // the first starts a refresh, the others are served stale beside it
			if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.EventStale {
				t.Errorf("%+v, %v", r, err)
			}
		}
		time.Sleep(150 * ms)
		if n := d.loads.Load(); n != 2 {
			t.Errorf("%d loads, want 2", n)
		}
	})
}

func TestAHitAllocatesNothing(t *testing.T) {
	d := &db{}
	l := node(t, d.load, refill.Config{TTL: time.Hour})
	ctx := t.Context()
	get(t, l, "k")
	if n := testing.AllocsPerRun(1000, func() { _, _ = l.Get(ctx, "k") }); n != 0 {
		t.Errorf("%v allocations a hit", n)
	}
}

func TestClose(t *testing.T) {
	t.Run("a background refresh is cancelled, a wait is not", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			d := &db{took: 100 * ms}
			var ev events
			l := node(t, d.load, refill.Config{TTL: time.Second, StaleFor: time.Hour, Jitter: -1, OnEvent: ev.on})
			get(t, l, "stale")
			time.Sleep(2 * time.Second)
			get(t, l, "stale") // starts a refresh
			synctest.Wait()
			d.slow(500 * ms)
			var wg sync.WaitGroup
			wg.Go(func() { get(t, l, "wanted") })
			synctest.Wait()
			began := time.Now()
			if err := l.Close(); err != nil || time.Since(began) != 500*ms {
				t.Errorf("Close: %v after %v, want nil after the wanted load's 500 ms", err, time.Since(began))
			}
			wg.Wait()
			if n := ev.of(refill.EventAbandoned); n != 1 {
				t.Errorf("%d abandoned, want the refresh: %v", n, ev.count)
			}
		})
	})
	t.Run("what does not end is named", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			release := make(chan struct{})
			l := node(t, func(context.Context, string) (string, error) { <-release; return "", nil },
				refill.Config{LoadTimeout: 3 * time.Second})
			go func() { _, _ = l.Get(t.Context(), "stuck") }()
			synctest.Wait()
			began := time.Now()
			if err := l.Close(); err == nil || !strings.Contains(err.Error(), "stuck") || time.Since(began) != 3*time.Second {
				t.Errorf("Close: %v after %v", err, time.Since(began))
			}
			close(release)
		})
	})
	t.Run("what was aborted gives its lease back first", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			s := newSpy(refill.NewMemory())
			d := &db{took: 2 * time.Second}
			l := node(t, d.load, refill.Config{LoadTimeout: 3 * time.Second, MaxLoads: 1, Shared: s})
			go func() { _, _ = l.Get(t.Context(), "first") }()
			time.Sleep(100 * ms)
			d.slow(time.Hour)
			go func() { _, _ = l.Get(t.Context(), "queued") }() // loads from 2 s on
			synctest.Wait()
			began := time.Now()
			time.AfterFunc(2900*ms, func() { s.stuck.Store(true) })
			if err := l.Close(); err == nil || time.Since(began) != 3250*ms {
				t.Errorf("Close: %v after %v, want a StoreTimeout more than LoadTimeout", err, time.Since(began))
			}
		})
	})
}
