package refill

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// A refresh asks for the lease as one for whom nobody waits. It has lost the entry that it was to refresh, a caller joins who
// does wait, and the lease is another's: its holder has to know of that caller, else it ends in silence.
func TestCallerJoinsARefreshThatLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, ctx := NewMemory(), t.Context()
		l, err := New("thing", func(context.Context, string) (string, error) { return "ours", nil },
			Config{TTL: time.Minute, Shared: shared})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		const key, other = "thing:k", "other#1"
		b := Bid{Key: key, Token: other, LeaseTTL: time.Minute, ClaimTTL: time.Minute}
		if r, err := shared.Begin(ctx, b); err != nil || r.State != BeginTaken {
			t.Fatal(r, err)
		}
		refresh, err := l.flights.join(ctx, ticket[string]{key: "k", given: "k", load: l.load, ask: AskOnce, behind: true})
		if err != nil {
			t.Fatal(err)
		}
		caller, err := l.flights.join(ctx, ticket[string]{key: "k", given: "k", load: l.load, ask: AskLeft})
		if err != nil || caller.call != refresh.call {
			t.Fatal("no place in the refresh", err)
		}
		l.flights.launch(refresh.call)
		synctest.Wait()
		r := Record{Token: other, LoadBegan: time.Now(), FreshUntil: time.Now().Add(time.Minute), Kind: l.kind, Payload: []byte("theirs")}
		record, err := r.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		p := Publication{Key: key, Token: other, Record: record, Keep: time.Minute, Quiet: true}
		if state, err := shared.Publish(ctx, p); err != nil || state != PublishStored {
			t.Fatal(state, err)
		}
		published := time.Now()
		a, _ := l.wait(ctx, caller)
		if late := time.Since(published); a.entry == nil || a.entry.value != "theirs" || late != 0 {
			t.Errorf("%+v, %v after it was published", a, late)
		}
	})
}
