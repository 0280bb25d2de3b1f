package refill_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
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
	products, err := refill.New("product", loadProduct, refill.Config{TTL: time.Minute})
	if err != nil {
		log.Fatal(err)
	}
	defer products.Close()

	var wg sync.WaitGroup
	var served atomic.Int64
	for range 100 {
		wg.Go(func() {
			if _, err := products.Get(context.Background(), "42"); err == nil {
				served.Add(1)
			}
		})
	}
	wg.Wait()
	fmt.Println(served.Load(), "requests served by", queries.Load(), "query") // loadProduct counts its calls
	// Output: 100 requests served by 1 query
}

// Two nodes share one store. In production the store is Redis: see backend/goredis. The store of backend/memory is
// shared within one process, so it suits tests of several nodes.
func ExampleConfig_severalNodes() {
	var loads atomic.Int64
	load := func(_ context.Context, key string) (string, error) {
		loads.Add(1)
		return "value of " + key, nil
	}
	cfg := refill.Config{TTL: time.Minute, Shared: memory.New()}
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

	for _, node := range []*refill.Loader[string]{a, b} {
		value, err := node.Get(context.Background(), "k")
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(value)
	}
	fmt.Println(loads.Load(), "load")
	// Output:
	// value of k
	// value of k
	// 1 load
}

// Call Invalidate after the transaction has committed. No load that began before Invalidate is then served as fresh.
func ExampleLoader_Invalidate() {
	var price atomic.Int64 // stands for a row of the database
	price.Store(100)
	prices, err := refill.New("price", func(context.Context, string) (int64, error) {
		return price.Load(), nil
	}, refill.Config{TTL: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()
	ctx := context.Background()

	before, err := prices.Get(ctx, "42")
	if err != nil {
		fmt.Println(err)
		return
	}
	price.Store(90) // UPDATE … ; COMMIT
	if err := prices.Invalidate(ctx, "42"); err != nil {
		fmt.Println(err) // log it: the write is done, and refill retries in the background
	}
	after, err := prices.Get(ctx, "42")
	fmt.Println(before, after, err)
	// Output: 100 90 <nil>
}

// Expire keeps the old value, which is served as stale while the new one is loaded.
func ExampleLoader_Expire() {
	var version atomic.Int64
	things, err := refill.New("thing", func(context.Context, string) (int64, error) {
		return version.Add(1), nil
	}, refill.Config{TTL: time.Hour, StaleFor: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer things.Close()
	ctx := context.Background()

	if _, err := things.Get(ctx, "k"); err != nil {
		fmt.Println(err)
		return
	}
	if err := things.Expire(ctx, "k"); err != nil {
		fmt.Println(err) // log it: refill retries in the background
	}
	r, err := things.GetResult(ctx, "k")
	fmt.Println(r.Value, r.Outcome, err)
	// Output: 1 stale <nil>
}

// Refresh loads keys before the first request asks for them.
func ExampleLoader_Refresh() {
	var loads atomic.Int64
	things, err := refill.New("thing", func(_ context.Context, key string) (string, error) {
		loads.Add(1)
		return key, nil
	}, refill.Config{TTL: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer things.Close()
	ctx := context.Background()

	if err := things.Refresh(ctx, "a", "b", "c"); err != nil {
		fmt.Println(err)
		return
	}
	r, err := things.GetResult(ctx, "a")
	fmt.Println(r.Value, r.Outcome, err)
	fmt.Println(loads.Load(), "loads")
	// Output:
	// a hit <nil>
	// 3 loads
}

// GetResult returns a value with its outcome and age, for example for a header or a log.
func ExampleLoader_GetResult() {
	things, err := refill.New("thing", func(context.Context, string) (string, error) {
		return "v", nil
	}, refill.Config{TTL: time.Hour})
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
	// v loaded true <nil>
	// v hit true <nil>
}

// Peek returns a value that is cached. It never loads.
func ExampleLoader_Peek() {
	things, err := refill.New("thing", func(context.Context, string) (string, error) {
		return "v", nil
	}, refill.Config{TTL: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer things.Close()
	ctx := context.Background()

	_, before := things.Peek(ctx, "k")
	if _, err := things.Get(ctx, "k"); err != nil {
		fmt.Println(err)
		return
	}
	r, after := things.Peek(ctx, "k")
	fmt.Println(before, after, r.Value)
	// Output: false true v
}

// GetWith takes the load function with the call. The function may run later, and for other callers, so it must depend
// only on ctx and key.
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

// A load can set the TTL of its value.
func ExampleFillFrom() {
	tokens, err := refill.New("token", func(ctx context.Context, user string) (string, error) {
		token, expires := "t-"+user, time.Now().Add(time.Hour) // from the issuer of the token
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

// An absence is an answer. It is cached for NotFoundTTL.
func ExampleErrNotFound() {
	var loads atomic.Int64
	users, err := refill.New("user", func(_ context.Context, id string) (string, error) {
		loads.Add(1)
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
	fmt.Println(loads.Load(), "load")
	// Output:
	// true user 42: refill: not found
	// true user 42: refill: not found
	// 1 load
}

// Two workers must not pay the same refund at once. The second one finds the lock held and leaves. The lock is for
// efficiency; correctness comes from the fence, which the database checks.
func ExampleLocker_TryLock() {
	locks, err := refill.NewLocker("refund", memory.New(), refill.LockConfig{TTL: 10 * time.Second})
	if err != nil {
		fmt.Println(err)
		return
	}
	pay := func(ctx context.Context, worker string) error {
		lock, err := locks.TryLock(ctx, "order 42")
		if errors.Is(err, refill.ErrLocked) {
			fmt.Println(worker, "leaves: another worker has the lock")
			return nil
		}
		if err != nil {
			return err // the store did not answer
		}
		defer func() {
			if err := lock.Release(ctx); err != nil {
				fmt.Println(err) // the lock was lost, or the store did not answer: then the lock ends within TTL
			}
		}()

		// Pay with lock.Context(), which ends with the lock. Send the fence along.
		fmt.Println(worker, "pays with fence", lock.Fence())
		return nil
	}

	ctx := context.Background()
	held, err := locks.TryLock(ctx, "order 42")
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := pay(ctx, "worker 2"); err != nil {
		fmt.Println(err)
	}
	if err := held.Release(ctx); err != nil {
		fmt.Println(err)
	}
	if err := pay(ctx, "worker 3"); err != nil {
		fmt.Println(err)
	}
	// Output:
	// worker 2 leaves: another worker has the lock
	// worker 3 pays with fence 2
}

// OnEvent receives one event per Get. Here it counts the outcomes.
func ExampleConfig_onEvent() {
	var mu sync.Mutex // OnEvent is called from many goroutines at once
	counts := make(map[string]int)
	things, err := refill.New("thing", func(context.Context, string) (string, error) {
		return "v", nil
	}, refill.Config{
		TTL: time.Hour,
		OnEvent: func(e refill.Event) {
			if e.Kind == refill.EventGet {
				mu.Lock()
				defer mu.Unlock()
				counts[e.Outcome.String()]++
			}
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer things.Close()

	for range 3 {
		if _, err := things.Get(context.Background(), "k"); err != nil {
			fmt.Println(err)
			return
		}
	}
	mu.Lock()
	defer mu.Unlock()
	fmt.Println(counts)
	// Output: map[hit:2 loaded:1]
}

// A hot key is refreshed while it is fresh. No caller waits for the refresh, and no caller is served a stale value.
func ExampleConfig_earlyRefresh() {
	var loads atomic.Int64
	published := make(chan struct{}, 2)
	prices, err := refill.New("price", func(context.Context, string) (int64, error) {
		return loads.Add(1), nil
	}, refill.Config{
		TTL:          time.Hour,
		EarlyRefresh: 0.000001, // a share of TTL, usually 0.8: refreshed after 48 minutes
		OnEvent: func(e refill.Event) {
			if e.Kind == refill.EventPublished {
				published <- struct{}{}
			}
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()
	ctx := context.Background()

	if _, err := prices.Get(ctx, "42"); err != nil {
		fmt.Println(err)
		return
	}
	<-published
	time.Sleep(10 * time.Millisecond) // a millionth of an hour has passed

	old, err := prices.GetResult(ctx, "42") // still fresh: served at once, and refreshed in the background
	fmt.Println(old.Value, old.Outcome, err)
	<-published
	refreshed, err := prices.GetResult(ctx, "42")
	fmt.Println(refreshed.Value, refreshed.Outcome, err)
	// Output:
	// 1 hit <nil>
	// 2 hit <nil>
}

// Callers wait up to SoftTimeout for the refresh of a stale value. If the refresh takes longer, the callers get the
// stale value, and the refresh goes on.
func ExampleConfig_softTimeout() {
	slow := make(chan struct{})
	var loads atomic.Int64
	prices, err := refill.New("price", func(ctx context.Context, _ string) (int64, error) {
		n := loads.Add(1)
		if n > 1 { // the database is slow
			select {
			case <-slow:
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		}
		return n, nil
	}, refill.Config{TTL: time.Hour, StaleFor: time.Hour, SoftTimeout: 20 * time.Millisecond})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()
	ctx := context.Background()

	if _, err := prices.Get(ctx, "42"); err != nil {
		fmt.Println(err)
		return
	}
	if err := prices.Expire(ctx, "42"); err != nil {
		fmt.Println(err)
		return
	}
	r, err := prices.GetResult(ctx, "42")
	fmt.Println(r.Value, r.Outcome, err)

	close(slow)                                       // the database answers
	if err := prices.Refresh(ctx, "42"); err != nil { // waits for the refresh that is in progress
		fmt.Println(err)
		return
	}
	r, err = prices.GetResult(ctx, "42")
	fmt.Println(r.Value > 1, r.Outcome, err)
	// Output:
	// 1 stale <nil>
	// true hit <nil>
}

// If the database fails, an old value is served within StaleIfError, and GetResult reports it. The fleet tries again
// after ErrorTTL. Each further failure doubles this back-off, up to MaxErrorTTL.
func ExampleConfig_staleIfError() {
	var loads atomic.Int64
	prices, err := refill.New("price", func(context.Context, string) (int, error) {
		if loads.Add(1) > 1 {
			return 0, errors.New("connection refused")
		}
		return 100, nil
	}, refill.Config{
		TTL: time.Hour, StaleIfError: 24 * time.Hour,
		ErrorTTL: time.Second, MaxErrorTTL: 30 * time.Second,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()
	ctx := context.Background()

	if _, err := prices.Get(ctx, "42"); err != nil {
		fmt.Println(err)
		return
	}
	if err := prices.Expire(ctx, "42"); err != nil {
		fmt.Println(err)
		return
	}
	for range 3 {
		r, err := prices.GetResult(ctx, "42")
		fmt.Println(r.Value, r.Outcome, err)
	}
	fmt.Println(loads.Load(), "loads")
	// Output:
	// 100 stale-on-error <nil>
	// 100 stale-on-error <nil>
	// 100 stale-on-error <nil>
	// 2 loads
}

// If the database reports that the previous value is still valid, NotModified gives that value another TTL. The
// database does not send the value again.
func ExampleNotModified() {
	type article struct{ Text string }
	var current atomic.Value // the version in the database
	current.Store("v1")
	articles, err := refill.New("article", func(ctx context.Context, id string) (article, error) {
		version := current.Load().(string)
		if _, known, ok := refill.Previous[article](ctx); ok && known == version {
			fmt.Println("not modified")
			return refill.NotModified[article](ctx)
		}
		fmt.Println("read in full")
		refill.FillFrom(ctx).SetValidator(version)
		return article{"text of " + id + " " + version}, nil
	}, refill.Config{TTL: time.Hour, StaleFor: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer articles.Close()
	ctx := context.Background()

	for _, version := range []string{"v1", "v1", "v2"} {
		current.Store(version)
		if err := articles.Refresh(ctx, "7"); err != nil {
			fmt.Println(err)
			return
		}
	}
	r, err := articles.GetResult(ctx, "7")
	fmt.Println(r.Value.Text, r.Validator, err)
	// Output:
	// read in full
	// not modified
	// read in full
	// text of 7 v2 v2 <nil>
}

// A load calls NoStore if its value must not be cached. The decision is remembered for 10 s, so that callers load in
// parallel instead of waiting for another node.
func ExampleFill_NoStore() {
	var loads atomic.Int64
	reports, err := refill.New("report", func(ctx context.Context, id string) (string, error) {
		loads.Add(1)
		fill := refill.FillFrom(ctx)
		switch {
		case strings.HasPrefix(id, "draft"):
			fill.NoStore()
		case strings.HasPrefix(id, "archive"):
			fill.SetTTL(24 * time.Hour) // longer than other values
		}
		return "report " + id, nil
	}, refill.Config{TTL: time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer reports.Close()

	for _, id := range []string{"draft 1", "draft 1", "archive 2", "archive 2"} {
		if _, err := reports.Get(context.Background(), id); err != nil {
			fmt.Println(err)
			return
		}
	}
	fmt.Println(loads.Load(), "loads")
	// Output: 3 loads
}

// InvalidateTag invalidates all values of a tag at once, however many there are. A load in progress cannot store its
// value if the value has the tag.
func ExampleLoader_InvalidateTag() {
	var price atomic.Int64 // stands for the database
	price.Store(100)
	prices, err := refill.New("price", func(ctx context.Context, id string) (int64, error) {
		shop, _, _ := strings.Cut(id, "/")
		refill.FillFrom(ctx).Tag("shop " + shop)
		return price.Load(), nil
	}, refill.Config{TTL: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()
	ctx := context.Background()

	ids := []string{"1/apple", "1/pear", "2/apple"}
	if _, err := prices.GetMany(ctx, ids); err != nil {
		fmt.Println(err)
		return
	}
	price.Store(90) // shop 1 changes all its prices, and commits
	if err := prices.InvalidateTag(ctx, "shop 1"); err != nil {
		fmt.Println(err) // log it: the write is done, and refill retries in the background
	}
	now, err := prices.GetMany(ctx, ids)
	fmt.Println(now["1/apple"], now["1/pear"], now["2/apple"], err)
	// Output: 90 90 100 <nil>
}

// NewBulk loads all missing keys of a GetMany with one query.
func ExampleNewBulk() {
	products, err := refill.NewBulk("product", func(_ context.Context, ids []string) (map[string]Product, error) {
		slices.Sort(ids)
		fmt.Println("SELECT … WHERE id IN", ids)
		found := make(map[string]Product)
		for _, id := range ids {
			if id != "gone" { // a key that is missing from the map is not found
				found[id] = Product{ID: id, Price: 100}
			}
		}
		return found, nil
	}, refill.Config{TTL: time.Minute, StaleFor: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer products.Close()
	ctx := context.Background()

	if _, err := products.Get(ctx, "1"); err != nil {
		fmt.Println(err)
		return
	}
	got, err := products.GetMany(ctx, []string{"1", "2", "3", "gone"})
	fmt.Println(len(got), err)
	// Output:
	// SELECT … WHERE id IN [1]
	// SELECT … WHERE id IN [2 3 gone]
	// 3 <nil>
}

// GetMany returns the values that it can get, and a KeyErrors with one error for each key that failed.
func ExampleLoader_GetMany() {
	products, err := refill.New("product", func(_ context.Context, id string) (Product, error) {
		if id == "13" {
			return Product{}, errors.New("shard is down")
		}
		return Product{ID: id, Price: 100}, nil
	}, refill.Config{TTL: time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer products.Close()

	got, err := products.GetMany(context.Background(), []string{"12", "13", "14"})
	fmt.Println(len(got), "products")
	var failed *refill.KeyErrors
	if errors.As(err, &failed) {
		for key, err := range failed.Errs {
			fmt.Println(key, errors.Unwrap(err))
		}
	}
	// Output:
	// 2 products
	// 13 shard is down
}

// New rejects invalid settings. A setting without effect is reported to OnEvent.
func ExampleConfig_warnings() {
	load := func(context.Context, string) (int, error) { return 1, nil }
	_, err := refill.New("price", load, refill.Config{TTL: time.Minute, StaleFor: -time.Second})
	fmt.Println(err)

	prices, err := refill.New("price", load, refill.Config{
		TTL: time.Minute, SoftTimeout: time.Second,
		OnEvent: func(e refill.Event) { fmt.Println(e.Kind, e.Err) },
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()
	// Output:
	// refill: invalid: StaleFor: -1s is negative
	// store-up <nil>
	// config-warning refill: SoftTimeout: 1s has no effect: StaleFor is 0, so there is no stale value to return
}

// A key can be any string. A key that is too long for the store, or that would garble a log, is hashed before it is
// stored. A name belongs to one type of value. Give a new type a new name, so that two releases can share one Redis.
func ExampleNew_keysAndNames() {
	shared := memory.New()
	pages, err := refill.New("page", func(_ context.Context, url string) (string, error) {
		return fmt.Sprint(len(url), " bytes of URL"), nil
	}, refill.Config{TTL: time.Minute, Shared: shared})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pages.Close()

	page, err := pages.Get(context.Background(), "https://example.com/?q="+strings.Repeat("x", 10_000))
	fmt.Println(page, err)

	count := func(context.Context, string) (int, error) { return 1, nil }
	_, err = refill.New("page", count, refill.Config{TTL: time.Minute, Shared: shared})
	fmt.Println(err)
	v2, err := refill.New("page.v2", count, refill.Config{TTL: time.Minute, Shared: shared})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer v2.Close()
	// Output:
	// 10023 bytes of URL <nil>
	// refill: invalid: name: "page" is already in use for "raw string" in this store; it cannot hold "json int" as well
}
