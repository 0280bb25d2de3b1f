package refill_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/refill-go/refill"
)

// A hot key is refreshed before it expires: nobody ever waits for it, nobody is served anything stale.
func ExampleConfig_earlyRefresh() {
	loads := 0
	stored := make(chan struct{}, 2)
	prices, err := refill.New("price", func(context.Context, string) (int, error) { loads++; return loads, nil }, refill.Config{
		TTL:          time.Hour,
		EarlyRefresh: 0.000001, // at 0.8 it would be after 48 minutes
		// XFetch: 1 draws the moment instead, the earlier the longer the load takes.
		OnEvent: func(e refill.Event) {
			if e.Kind == refill.EventPublished {
				stored <- struct{}{}
			}
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()
	ctx := context.Background()
	first, _ := prices.Get(ctx, "42")
	<-stored
	time.Sleep(10 * time.Millisecond)       // a millionth of an hour is over
	again, _ := prices.GetResult(ctx, "42") // still fresh, and refreshed behind
	<-stored                                // by a load that nobody waited for
	refreshed, _ := prices.GetResult(ctx, "42")
	fmt.Println(first, again.Value, again.Outcome, refreshed.Value)
	// Output: 1 1 hit 2
}

// Callers wait a moment for a refill, and take the stale value if it takes longer. The refill goes on.
func ExampleConfig_softTimeout() {
	slow := make(chan struct{})
	loads := 0
	prices, err := refill.New("price", func(ctx context.Context, _ string) (int, error) {
		if loads++; loads > 1 {
			<-slow // the database has a bad day
		}
		return loads, nil
	}, refill.Config{TTL: time.Hour, StaleFor: time.Hour, SoftTimeout: 20 * time.Millisecond})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()
	ctx := context.Background()
	_, _ = prices.Get(ctx, "42")
	_ = prices.Expire(ctx, "42")
	r, _ := prices.GetResult(ctx, "42")
	fmt.Println(r.Value, r.Outcome)
	close(slow)
	_ = prices.Refresh(ctx, "42") // waits for the refill that is under way
	r, _ = prices.GetResult(ctx, "42")
	fmt.Println(r.Value > 1, r.Outcome)
	// Output:
	// 1 stale
	// true hit
}

// The database fails: a value that is not too old is served in place of the error, and GetResult says so.
// The next try is a second later, for the whole fleet, then two, four, up to half a minute.
func ExampleConfig_staleIfError() {
	loads := 0
	prices, err := refill.New("price", func(context.Context, string) (int, error) {
		if loads++; loads > 1 {
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
	_, _ = prices.Get(ctx, "42")
	_ = prices.Expire(ctx, "42")
	for range 3 {
		r, err := prices.GetResult(ctx, "42")
		fmt.Println(r.Value, r.Outcome, err)
	}
	fmt.Println(loads, "queries")
	// Output:
	// 100 stale-on-error <nil>
	// 100 stale-on-error <nil>
	// 100 stale-on-error <nil>
	// 2 queries
}

// The database says that nothing has changed: the value in hand gets another life, and is not sent again.
func ExampleNotModified() {
	type article struct{ Text string }
	version := "v1"
	articles, err := refill.New("article", func(ctx context.Context, id string) (article, error) {
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
	_, _ = articles.Get(ctx, "7")
	_ = articles.Refresh(ctx, "7")
	version = "v2"
	_ = articles.Refresh(ctx, "7")
	r, _ := articles.GetResult(ctx, "7")
	fmt.Println(r.Value.Text, r.Validator)
	// Output:
	// read in full
	// not modified
	// read in full
	// text of 7 v2 v2
}

// Some values must not be shared. That is remembered, so that callers on other nodes do not queue for them.
func ExampleFill_NoStore() {
	loads := 0
	reports, err := refill.New("report", func(ctx context.Context, id string) (string, error) {
		loads++
		fill := refill.FillFrom(ctx)
		switch {
		case strings.HasPrefix(id, "draft"):
			fill.NoStore()
		case strings.HasPrefix(id, "archive"):
			fill.SetTTL(24 * time.Hour) // and this one lives longer than others
		}
		return "report " + id, nil
	}, refill.Config{TTL: time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer reports.Close()
	ctx := context.Background()
	for _, id := range []string{"draft 1", "draft 1", "archive 2", "archive 2"} {
		_, _ = reports.Get(ctx, id)
	}
	fmt.Println(loads, "loads")
	// Output: 3 loads
}

// A group of values is voided at once, whatever their number, and a load that is under way with them.
func ExampleLoader_InvalidateTag() {
	price := 100
	prices, err := refill.New("price", func(ctx context.Context, id string) (int, error) {
		shop, _, _ := strings.Cut(id, "/")
		refill.FillFrom(ctx).Tag("shop " + shop)
		return price, nil
	}, refill.Config{TTL: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()
	ctx := context.Background()
	ids := []string{"1/apple", "1/pear", "2/apple"}
	_, _ = prices.GetMany(ctx, ids)
	price = 90 // shop 1 changes all its prices, and commits
	_ = prices.InvalidateTag(ctx, "shop 1")
	now, _ := prices.GetMany(ctx, ids)
	fmt.Println(now["1/apple"], now["1/pear"], now["2/apple"])
	// Output: 90 90 100
}

// One query for all that is missing.
func ExampleNewBulk() {
	products, err := refill.NewBulk("product", func(ctx context.Context, ids []string) (map[string]Product, error) {
		slices.Sort(ids)
		fmt.Println("SELECT … WHERE id IN", ids)
		found := map[string]Product{}
		for _, id := range ids {
			if id != "gone" { // what is not in the map does not exist
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
	_, _ = products.Get(ctx, "1")
	got, err := products.GetMany(ctx, []string{"1", "2", "3", "gone"})
	fmt.Println(len(got), err)
	// Output:
	// SELECT … WHERE id IN [1]
	// SELECT … WHERE id IN [2 3 gone]
	// 3 <nil>
}

// GetMany returns what there is, with an error per key that has none.
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

// New refuses what cannot be meant, and says through OnEvent what has no effect.
func ExampleConfig_advice() {
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
	prices.Close()
	// Output:
	// refill: invalid: StaleFor: -1s is negative
	// store-up <nil>
	// config-doubt refill: SoftTimeout: 1s, but StaleFor is 0: there is nothing to serve after it
}

// A key may be any string: what would be too long, or garble a log, is hashed before it reaches the store. A name
// belongs to one type; give a new one to values of a new meaning, and two releases can share one Redis.
func ExampleNew_keysAndNames() {
	shared := refill.NewMemory()
	pages, err := refill.New("page", func(_ context.Context, url string) (string, error) {
		return fmt.Sprint(len(url), " bytes of URL"), nil
	}, refill.Config{TTL: time.Minute, Shared: shared})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pages.Close()
	page, _ := pages.Get(context.Background(), "https://example.com/?q="+strings.Repeat("x", 10_000))
	fmt.Println(page)

	count := func(context.Context, string) (int, error) { return 1, nil }
	_, err = refill.New("page", count, refill.Config{TTL: time.Minute, Shared: shared})
	fmt.Println(err)
	v2, err := refill.New("page.v2", count, refill.Config{TTL: time.Minute, Shared: shared})
	fmt.Println(err)
	v2.Close()
	// Output:
	// 10023 bytes of URL
	// refill: invalid: name: "page" is in use for "raw string" in this store, and cannot be for "json int", too
	// <nil>
}
