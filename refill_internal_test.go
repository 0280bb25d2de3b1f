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

// A caller joins a background refresh that does not get the lease.
//
//  1. Another fill holds the lease.
//  2. A background refresh is about to acquire in mode Try: no caller waits.
//  3. The L1 entry is gone. A caller joins the refresh and waits for its value.
//  4. The refresh must register a waiter on the lease. Otherwise the holder publishes without an announcement.
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
