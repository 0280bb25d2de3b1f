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

// Product is the type of the values that the examples load.
type Product struct {
	ID    string
	Price int
}

var queries atomic.Int64

// loadProduct stands for a database query that takes 50 ms.
func loadProduct(ctx context.Context, id string) (Product, error) {
	queries.Add(1)
	select {
	case <-time.After(50 * time.Millisecond):
		return Product{ID: id, Price: 100}, nil
	case <-ctx.Done():
		return Product{}, ctx.Err()
	}
}

// This example is the program of the README. A hundred requests arrive at the same time and cost one query.
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

// Two nodes share one store. In production the store is Redis, and package backend/goredis connects to it. The store
// of package backend/memory lives in one process, so a test can use it to run several nodes.
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

// Call Invalidate after the transaction has committed. Once Invalidate has returned, no value is served as fresh from
// the store if its load began before the Invalidate.
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
		fmt.Println(err) // log the error: the write is done, and refill repeats the call in the background
	}
	after, err := prices.Get(ctx, "42")
	fmt.Println(before, after, err)
	// Output: 100 90 <nil>
}

// Expire keeps the old value. Callers are served the old value as stale while one load fetches the new value.
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
		fmt.Println(err) // log the error: refill repeats the call in the background
	}
	r, err := things.GetResult(ctx, "k")
	fmt.Println(r.Value, r.Outcome, err)
	// Output: 1 stale <nil>
}

// Refresh loads keys before the first request asks for these keys.
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

// Peek returns a cached value. Peek never loads.
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

// Each call of GetWith brings its own load function. refill may run the function after this call has returned, and may
// give its result to other callers. So the function must use no other input than its ctx and key.
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

// A load calls SetTTL to give its value a TTL of its own.
func ExampleFillFrom() {
	tokens, err := refill.New("token", func(ctx context.Context, user string) (string, error) {
		token, expires := "t-"+user, time.Now().Add(time.Hour) // the issuer of the token says when it expires
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

// A load returns an error that wraps ErrNotFound if its value does not exist. The absence is cached for NotFoundTTL.
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

// Two workers must not pay the same refund at once. Worker 2 finds the lock held and leaves. The lock is for
// efficiency. The fence is for correctness: each new lock has a larger fence, and the database refuses a payment whose
// fence is smaller than the fence of the last payment.
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
				fmt.Println(err) // the lock was lost, or the store did not answer; an unreleased lock ends within TTL
			}
		}()

		// Pay with lock.Context(), which ends when the lock is lost or released. Send the fence to the database.
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

// OnEvent receives one EventGet per Get. Here OnEvent counts the outcomes.
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

// With EarlyRefresh, a hot key is refreshed while its value is still fresh. No caller waits for the refresh, and no
// caller is served a stale value.
func ExampleConfig_earlyRefresh() {
	var loads atomic.Int64
	published := make(chan struct{}, 2)
	prices, err := refill.New("price", func(context.Context, string) (int64, error) {
		return loads.Add(1), nil
	}, refill.Config{
		TTL:          time.Hour,
		EarlyRefresh: 0.000001, // a share of TTL; with the usual 0.8, the refresh begins after 48 minutes
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
	time.Sleep(10 * time.Millisecond) // longer than a millionth of TTL

	old, err := prices.GetResult(ctx, "42") // returns the fresh value, and starts a background refresh
	fmt.Println(old.Value, old.Outcome, err)
	<-published
	refreshed, err := prices.GetResult(ctx, "42")
	fmt.Println(refreshed.Value, refreshed.Outcome, err)
	// Output:
	// 1 hit <nil>
	// 2 hit <nil>
}

// With SoftTimeout, callers wait up to SoftTimeout for the refresh of a stale value. If the refresh takes longer, the
// callers get the stale value, and the refresh goes on.
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

// If a load fails within StaleIfError, GetResult returns the old value with the outcome stale-on-error. The nodes load
// again after the back-off, which is ErrorTTL at first. Each further failure doubles the back-off, up to MaxErrorTTL.
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

// If the database reports that the previous value is still valid, the load calls NotModified. NotModified keeps the
// previous value for another TTL, so the database need not send the value again.
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

// A load calls NoStore if its value must not be cached. refill remembers for 10 s that the key is uncacheable. Within
// the 10 s callers load the key in parallel, and no caller waits for another node.
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

// InvalidateTag invalidates all values of a tag with one call, however many values there are. A load that is in
// progress cannot store its value if the value has the tag.
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
	price.Store(90) // shop 1 changes all its prices and commits the transaction
	if err := prices.InvalidateTag(ctx, "shop 1"); err != nil {
		fmt.Println(err) // log the error: the write is done, and refill repeats the call in the background
	}
	now, err := prices.GetMany(ctx, ids)
	fmt.Println(now["1/apple"], now["1/pear"], now["2/apple"], err)
	// Output: 90 90 100 <nil>
}

// A Loader from NewBulk loads all missing keys of a GetMany with one query.
func ExampleNewBulk() {
	products, err := refill.NewBulk("product", func(_ context.Context, ids []string) (map[string]Product, error) {
		slices.Sort(ids)
		fmt.Println("SELECT … WHERE id IN", ids)
		found := make(map[string]Product)
		for _, id := range ids {
			if id != "gone" { // Get of a key that is not in the map returns ErrNotFound
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

// New returns an error for an invalid setting. New accepts a setting that has no effect, and reports a warning to
// OnEvent.
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

// A key can be any string. The store gets a hash of a key that is longer than 512 bytes, has control characters or
// begins with '#'. The name of a Loader belongs to one type of value. Give a new type a new name. Then the old
// and the new release of a program can share one Redis.
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
