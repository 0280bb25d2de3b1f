package refill_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

// sparse is a pair whose node l has looked for many keys that nobody had: from now on it bids without a look.
func sparse(t *testing.T, d *db, cfg refill.Config) (s *spy, l, peer *refill.Loader[string]) {
	t.Helper()
	s, l, peer = pair(t, d, cfg)
	for i := range 40 {
		get(t, l, fmt.Sprint("rare ", i))
	}
	s.gets.Store(0)
	s.calls.Store(0)
	d.loads.Store(0)
	return s, l, peer
}

// Where most looks find nothing, a load costs two calls of the store, and what is there is found all the same.
func TestABidInsteadOfALook(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		s, l, peer := sparse(t, d, refill.Config{TTL: time.Minute})
		get(t, l, "another")
		if gets, calls := s.gets.Load(), s.calls.Load(); gets != 0 || calls != 2 {
			t.Errorf("%d GETs in %d calls of the store for a load, want a bid and a publication", gets, calls)
		}
		get(t, peer, "known")
		if r, err := l.GetResult(t.Context(), "known"); err != nil || r.Outcome != refill.EventShared {
			t.Errorf("%+v, %v, want what the store has", r, err)
		}
		if n := d.loads.Load(); n != 2 {
			t.Errorf("%d loads of two keys", n)
		}
		nobodyHas(t, s.Store, "known")
	})
}

// A node whose own memory trusts a value no more asks for it: the store may say that it is good still.
func TestNoBidForAValueThatIsGood(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: ms}
		s, l, _ := sparse(t, d, refill.Config{TTL: time.Hour, LocalTTL: 10 * time.Second})
		get(t, l, "k")
		time.Sleep(11 * time.Second)
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.EventShared || d.loads.Load() != 1 || s.gets.Load() != 1 {
			t.Errorf("%+v, %v, %d loads, %d GETs, want what the store has", r, err, d.loads.Load(), s.gets.Load())
		}
	})
}

// A bid that has lost is as good as one after a look: its caller is told of the result in the moment in which it is there.
func TestABidThatLosesWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		_, l, peer := sparse(t, d, refill.Config{TTL: time.Minute})
		defer behind(t, peer, "k")()
		time.Sleep(40 * ms)
		began := time.Now()
		get(t, l, "k")
		if took := time.Since(began); took != 60*ms || d.loads.Load() != 1 {
			t.Errorf("%v and %d loads, want the 60ms that the other node's load still took", took, d.loads.Load())
		}
	})
}

// The result is announced while the answer to the bid is on its way.
func TestABidOvertakenByTheResult(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		shared := refill.NewMemory()
		way := &tap{Store: shared}
		l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: way})
		for i := range 40 {
			get(t, l, fmt.Sprint("rare ", i))
		}
		defer behind(t, node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared}), "k")()
		time.Sleep(50 * ms)
		way.on(func(_ context.Context, step string) error {
			time.Sleep(100 * ms)
			return nil
		})
		began := time.Now()
		get(t, l, "k")
		if took := time.Since(began); took != 100*ms {
			t.Errorf("%v, want the 100ms that the answer took", took)
		}
	})
}

// A key whose value is stale in the store is served at once, and refreshed.
func TestABidFindsAStaleValue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		_, l, peer := sparse(t, d, refill.Config{TTL: time.Second, StaleFor: time.Minute, Jitter: -1})
		get(t, peer, "k")
		time.Sleep(2 * time.Second)
		began := time.Now()
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.EventStale || time.Since(began) != 0 {
			t.Errorf("%+v, %v after %v, want the stale value at once", r, err, time.Since(began))
		}
		time.Sleep(150 * ms)
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.EventHit || d.loads.Load() != 2 {
			t.Errorf("%+v, %v, %d loads: it was not refreshed", r, err, d.loads.Load())
		}
	})
}

// Without a place among MaxLoads there is nothing to bid for: the node looks, and finds what does not have to be loaded.
func TestNoBidWithoutASlot(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: 100 * ms}
		s, l, peer := sparse(t, d, refill.Config{TTL: time.Minute, MaxLoads: 1})
		get(t, peer, "known")
		defer behind(t, l, "long")()
		time.Sleep(50 * ms)
		began := time.Now()
		get(t, l, "known")
		if took := time.Since(began); took != 0 || s.gets.Load() != 1 {
			t.Errorf("%v and %d GETs, want one look, at once", took, s.gets.Load())
		}
	})
}

// The store fails right then: the value is loaded without it, and the lease that may have been taken is given back when the
// flight is on its way already.
func TestABidThatFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: ms}
		s, l, _ := sparse(t, d, refill.Config{TTL: time.Minute})
		s.down.Store(true)
		if v := get(t, l, "k"); v == "" {
			t.Error("nothing was loaded")
		}
		s.down.Store(false)
		nobodyHas(t, s.Store, "k")
	})
}

// The caller leaves while its bid is on its way: what the bid has won is free again at once.
func TestABidWhoseCallerLeaves(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{took: time.Second}
		s, l, _ := sparse(t, d, refill.Config{TTL: time.Minute})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*ms, cancel)
		if _, err := l.Get(ctx, "k"); !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want the ctx's error", err)
		}
		time.Sleep(ms)
		nobodyHas(t, s.Store, "k")
	})
}

// bids remembers what it was asked for last.
type bids struct {
	refill.Store
	last atomic.Pointer[refill.Bid]
}

func (s *bids) Begin(ctx context.Context, b refill.Bid) (refill.Begun, error) {
	s.last.Store(&b)
	return s.Store.Begin(ctx, b)
}

// The network keeps a copy of a bid, and delivers it when the load was voided. What the load has found is not stored.
func TestACopyOfABidAfterAnInvalidate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := refill.NewMemory()
		way, d := &bids{Store: shared}, &db{took: 100 * ms}
		l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: way})
		loaded := behind(t, l, "k")
		time.Sleep(50 * ms)
		if err := shared.Invalidate(t.Context(), "peer#1", "thing:k"); err != nil {
			t.Fatal(err)
		}
		if r, err := shared.Begin(t.Context(), *way.last.Load()); err != nil || r.State != refill.BeginTaken {
			t.Fatal(r, err)
		}
		loaded()
		if record, err := shared.Get(t.Context(), "thing:k"); err != nil || record != nil {
			t.Errorf("%q, %v: what was loaded before the Invalidate was stored", record, err)
		}
		nobodyHas(t, shared, "k")
	})
}
