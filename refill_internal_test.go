package refill

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/flight"
)

// A caller joins a background refresh that then fails to get the lease.
//
//  1. Another node holds the lease.
//  2. A background refresh begins. The Acquire of this refresh will use mode Try, because no caller waits.
//  3. A caller finds no L1 entry. So the caller joins the refresh and waits for the value.
//  4. The Acquire of the refresh finds that the lease is taken. The refresh must call Acquire again in mode Wait, which
//     notes a waiter on the lease. Otherwise the holder of the lease publishes without an announcement.
func TestCallerJoinsARefreshThatLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, ctx := memory.New(), t.Context()
		l, err := New("thing", func(context.Context, string) (string, error) { return "ours", nil },
			Config{TTL: time.Minute, Shared: shared})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		const key, other = "thing:k", "other#1"
		a := driver.AcquireRequest{Key: key, Token: other, LeaseTTL: time.Minute, ClaimTTL: time.Minute}
		if r, err := shared.Acquire(ctx, a); err != nil || r.State != driver.Acquired {
			t.Fatalf("Acquire: got %+v, %v, want Acquired", r, err)
		}
		q := request[string]{key: "k", given: "k", loadKey: l.load, mode: driver.Try, want: flight.Background}
		refresh, err := l.join(ctx, q)
		if err != nil {
			t.Fatal(err)
		}
		caller, err := l.join(ctx, request[string]{key: "k", given: "k", loadKey: l.load, mode: driver.Wait})
		if err != nil || caller.flight != refresh.flight {
			t.Fatalf("the caller did not join the refresh: %v", err)
		}
		l.launch(refresh.flight, q)
		synctest.Wait()
		r := driver.Record{
			Token: other, LoadBegan: time.Now(), FreshUntil: time.Now().Add(time.Minute), Kind: l.kind,
			Payload: []byte("theirs"),
		}
		record, err := r.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		p := driver.PublishRequest{Key: key, Token: other, Record: record, Keep: time.Minute, AnnounceIfAwaited: true}
		if result, err := shared.Publish(ctx, p); err != nil || result != driver.Stored {
			t.Fatalf("Publish: got %v, %v, want Stored", result, err)
		}
		published := time.Now()
		got := l.wait(ctx, caller)
		if late := time.Since(published); got == nil || got.entry == nil || got.entry.Data.value != "theirs" || late != 0 {
			t.Errorf("got %+v %v after it was published, want \"theirs\" at once", got, late)
		}
	})
}

// A flight must read L1 again, although its caller has just found nothing there.
//
//  1. A caller finds nothing in L1.
//  2. The flight of another caller stores the value in L1 and ends.
//  3. The first caller starts a new flight.
//  4. The new flight reads L1, finds the value, and does not load. Without this read, it would load the key again.
func TestMissAtTheEndOfAFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		loads, ctx := 0, t.Context()
		l, err := New("thing", func(context.Context, string) (string, error) { loads++; return "v", nil },
			Config{TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		q, err := l.request(ctx, "k", GetOptions[string]{})
		if err != nil || l.fromL1(ctx, q, 0) != nil {
			t.Fatalf("got an answer of L1 or %v, want a miss", err)
		}
		if _, err := l.Get(ctx, "k"); err != nil {
			t.Fatal(err)
		}
		m, err := l.join(ctx, q)
		if err != nil || m.role != flight.Leader {
			t.Fatalf("joined as %v, %v, want a new flight", m.role, err)
		}
		l.start(ctx, m.flight, q)
		if a := l.wait(ctx, m); a == nil || a.outcome != OutcomeHit || loads != 1 {
			t.Errorf("got %+v after %d loads, want a hit after 1", a, loads)
		}
	})
}
