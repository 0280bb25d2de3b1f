package refill_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill"
)

// Product is what the examples load.
type Product struct {
	ID    string
	Price int
}

var queries atomic.Int64

// loadProduct stands for a database query.
func loadProduct(ctx context.Context, id string) (Product, error) {
	queries.Add(1)
	select {
	case <-time.After(50 * time.Millisecond):
		return Product{ID: id, Price: 100}, nil
	case <-ctx.Done():
		return Product{}, ctx.Err()
	}
}

// The program of the README: a hundred requests at once, one query.
func Example() {
	products, err := refill.New("product", loadProduct, refill.Config{
		TTL:      time.Minute,      // fresh for this long
		StaleFor: 10 * time.Minute, // then served stale, while one node refills
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer products.Close()

	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, err := products.Get(r.Context(), r.URL.Query().Get("id"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, "%s costs %d", p.ID, p.Price)
	})

	var wg sync.WaitGroup
	var served atomic.Int64
	for range 100 {
		wg.Go(func() {
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, httptest.NewRequest("GET", "/product?id=42", nil))
			if w.Body.String() == "42 costs 100" {
				served.Add(1)
			}
		})
	}
	wg.Wait()
	fmt.Println(served.Load(), "requests served by", queries.Load(), "query")
	// Output: 100 requests served by 1 query
}

// Two nodes over one store. In production the store is Redis, see backend/goredis; NewMemory shares within one process,
// which is what a test of several nodes needs.
func ExampleNewMemory() {
	loads := 0
	load := func(_ context.Context, key string) (string, error) { loads++; return "value of " + key, nil }
	cfg := refill.Config{TTL: time.Minute, Shared: refill.NewMemory()}
	a, err := refill.New("thing", load, cfg)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer a.Close()
	b, err := refill.New("thing", load, cfg)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer b.Close()

	v, _ := a.Get(context.Background(), "k")
	w, _ := b.Get(context.Background(), "k")
	fmt.Println(v, "|", w, "|", loads, "load")
	// Output: value of k | value of k | 1 load
}

// After the transaction has committed, Invalidate: no load that began before can be served as fresh any more.
func ExampleLoader_Invalidate() {
	price := 100
	prices, err := refill.New("price", func(context.Context, string) (int, error) { return price, nil },
		refill.Config{TTL: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()
	ctx := context.Background()

	before, _ := prices.Get(ctx, "42")
	price = 90 // UPDATE … ; COMMIT
	if err := prices.Invalidate(ctx, "42"); err != nil {
		fmt.Println("tried again in the background:", err)
	}
	after, _ := prices.Get(ctx, "42")
	fmt.Println(before, after)
	// Output: 100 90
}

// Expire keeps the old value servable while the new one is loaded.
func ExampleLoader_Expire() {
	var version atomic.Int64
	things, err := refill.New("thing", func(context.Context, string) (int64, error) { return version.Add(1), nil },
		refill.Config{TTL: time.Hour, StaleFor: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer things.Close()
	ctx := context.Background()

	_, _ = things.Get(ctx, "k")
	_ = things.Expire(ctx, "k")
	r, _ := things.GetResult(ctx, "k")
	fmt.Println(r.Value, r.Outcome)
	// Output: 1 stale
}

// Refresh loads ahead of traffic.
func ExampleLoader_Refresh() {
	loads := 0
	things, err := refill.New("thing", func(_ context.Context, key string) (string, error) { loads++; return key, nil },
		refill.Config{TTL: time.Hour, MaxLoads: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer things.Close()
	ctx := context.Background()

	if err := things.Refresh(ctx, "a", "b", "c"); err != nil {
		fmt.Println(err)
	}
	_, _ = things.Get(ctx, "a")
	fmt.Println(loads, "loads")
	// Output: 3 loads
}

// GetResult says how a value came, for a header or a log.
func ExampleLoader_GetResult() {
	things, err := refill.New("thing", func(context.Context, string) (string, error) { return "v", nil },
		refill.Config{TTL: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer things.Close()

	for range 2 {
		r, err := things.GetResult(context.Background(), "k")
		fmt.Println(r.Value, r.Outcome, r.Age < time.Minute, err)
	}
	// Output:
	// v led true <nil>
	// v hit true <nil>
}

// Peek looks without loading.
func ExampleLoader_Peek() {
	things, err := refill.New("thing", func(context.Context, string) (string, error) { return "v", nil },
		refill.Config{TTL: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer things.Close()
	ctx := context.Background()

	_, before := things.Peek(ctx, "k")
	_, _ = things.Get(ctx, "k")
	r, after := things.Peek(ctx, "k")
	fmt.Println(before, after, r.Value)
	// Output: false true v
}

// GetWith takes the load function with the call. It may run later, and for others: it must depend on ctx and key alone.
func ExampleLoader_GetWith() {
	pages, err := refill.New[string]("page", nil, refill.Config{TTL: time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pages.Close()

	page, err := pages.GetWith(context.Background(), "/about", func(_ context.Context, key string) (string, error) {
		return "<h1>" + key + "</h1>", nil
	})
	fmt.Println(page, err)
	// Output: <h1>/about</h1> <nil>
}

// A value can have a TTL of its own.
func ExampleFillFrom() {
	tokens, err := refill.New("token", func(ctx context.Context, user string) (string, error) {
		token, expires := "t-"+user, time.Now().Add(time.Hour) // what the issuer says
		refill.FillFrom(ctx).SetTTL(time.Until(expires))
		return token, nil
	}, refill.Config{TTL: time.Minute, Jitter: -1})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer tokens.Close()

	r, err := tokens.GetResult(context.Background(), "ada")
	fmt.Println(r.Value, r.Remaining.Round(time.Minute), err)
	// Output: t-ada 1h0m0s <nil>
}

// An absence is an answer: it is cached, for NotFoundTTL.
func ExampleErrNotFound() {
	queries := 0
	users, err := refill.New("user", func(_ context.Context, id string) (string, error) {
		queries++
		return "", fmt.Errorf("user %s: %w", id, refill.ErrNotFound)
	}, refill.Config{TTL: time.Minute, NotFoundTTL: 5 * time.Second})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer users.Close()

	for range 2 {
		_, err := users.Get(context.Background(), "42")
		fmt.Println(errors.Is(err, refill.ErrNotFound), err)
	}
	fmt.Println(queries, "query")
	// Output:
	// true user 42: refill: not found
	// true user 42: refill: not found
	// 1 query
}

// A refund must not be paid twice: try once, and leave if somebody is at it.
func ExampleLocker_TryLock() {
	locks, err := refill.NewLocker("refund", refill.NewMemory(), refill.LockConfig{TTL: 10 * time.Second})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()

	lock, err := locks.TryLock(ctx, "order 42")
	if errors.Is(err, refill.ErrLocked) {
		return // somebody else pays it
	}
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = locks.TryLock(ctx, "order 42")
	fmt.Println(errors.Is(err, refill.ErrLocked), lock.Fence())
	fmt.Println(lock.Release(ctx))
	// Output:
	// true 1
	// <nil>
}

// OnEvent sees every outcome: count them.
func ExampleConfig_onEvent() {
	counts := make(map[string]int) // behind a mutex where Gets run at once
	things, err := refill.New("thing", func(context.Context, string) (string, error) { return "v", nil }, refill.Config{
		TTL: time.Hour,
		OnEvent: func(e refill.Event) {
			if e.Kind <= refill.EventError {
				counts[e.Kind.String()]++
			}
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer things.Close()

	for range 3 {
		_, _ = things.Get(context.Background(), "k")
	}
	fmt.Println(counts)
	// Output: map[hit:2 led:1]
}
