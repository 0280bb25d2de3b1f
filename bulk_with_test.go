package refill_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

// GetManyWith returns the outcome of each key. Key a is a hit, b is loaded, c is absent, the load of d fails, and e is
// stale. With NoStale, e must be loaded. With Refresh, a must be loaded again. If the options have a load function,
// GetManyWith must call that function in place of the bulk load function.
func TestGetManyWith(t *testing.T) {
	bubble(t, func(t *testing.T) {
		boom := errors.New("boom")
		load := func(context.Context, []string) (map[string]string, error) {
			return map[string]string{"a": "a", "b": "b", "e": "new"},
				&refill.KeyErrors{Errs: map[string]error{"d": boom}}
		}
		l, err := refill.NewBulk("thing", load, refill.Config{
			TTL: time.Minute, StaleFor: time.Hour, Jitter: -1, ErrorTTL: -1,
		})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ctx := t.Context()
		if _, err := l.GetWith(ctx, "e", func(ctx context.Context, _ string) (string, error) {
			refill.FillFrom(ctx).SetTTL(time.Second)
			return "old", nil
		}); err != nil {
			t.Fatal(err)
		}
		get(t, l, "a")
		time.Sleep(2 * time.Second)
		type want map[string]refill.Outcome
		check := func(what string, o refill.GetOptions[string], want want) {
			t.Helper()
			got, err := l.GetManyWith(ctx, []string{"a", "b", "c", "d", "e", "a"}, o)
			var failed *refill.KeyErrors
			if !errors.As(err, &failed) || len(failed.Errs) != 1 || !errors.Is(failed.Errs["d"], boom) {
				t.Errorf("%s: got error %v, want that of d", what, err)
			}
			if len(got) != len(want) || !got["c"].Absent {
				t.Errorf("%s: got %+v, want c absent and %v", what, got, want)
			}
			for key, o := range want {
				if r := got[key]; r.Outcome != o {
					t.Errorf("%s: %s: got %q (%v), want %v", what, key, r.Value, r.Outcome, o)
				}
			}
			time.Sleep(100 * ms)
		}
		check("plain", refill.GetOptions[string]{}, want{
			"a": refill.OutcomeHit, "b": refill.OutcomeLoaded, "c": refill.OutcomeLoaded, "e": refill.OutcomeStale,
		})
		if err := l.Expire(ctx, "e"); err != nil {
			t.Fatal(err)
		}
		check("NoStale", refill.GetOptions[string]{NoStale: true}, want{
			"a": refill.OutcomeHit, "b": refill.OutcomeHit, "c": refill.OutcomeHit, "e": refill.OutcomeLoaded,
		})
		check("Refresh", refill.GetOptions[string]{Refresh: true}, want{
			"a": refill.OutcomeLoaded, "b": refill.OutcomeLoaded, "c": refill.OutcomeLoaded, "e": refill.OutcomeLoaded,
		})
		got, err := l.GetManyWith(ctx, []string{"x", "y"}, refill.GetOptions[string]{
			Load: func(_ context.Context, key string) (string, error) { return "own " + key, nil },
		})
		if err != nil || got["x"].Value != "own x" || got["y"].Value != "own y" {
			t.Errorf("Load: got %+v, %v, want the values of the function of the call", got, err)
		}
	})
}
