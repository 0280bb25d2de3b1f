package main

import (
	"context"
	"io"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill"
)

// tally counts how the requests of a fleet were answered.
type tally struct{ fresh, stale, waited atomic.Int64 }

// onEvent is Config.OnEvent. onEvent counts Gets by outcome. Each Get causes one event with an outcome; all other
// events have no outcome. Failed requests are counted by fire, not by onEvent.
func (t *tally) onEvent(e refill.Event) {
	switch e.Outcome {
	case refill.OutcomeHit, refill.OutcomeShared: // from memory, or from Redis
		t.fresh.Add(1)
	case refill.OutcomeStale, refill.OutcomeStaleOnError:
		t.stale.Add(1)
	case refill.OutcomeLoaded, refill.OutcomeCoalesced, refill.OutcomeLoadedElsewhere: // waited for the database
		t.waited.Add(1)
	}
}

// report is the result of the requests of a scene to one fleet.
type report struct {
	requests, failed, queries, fresh, stale, waited int64
	p50, p99                                        time.Duration
}

// fire sends n requests to the nodes in turn, evenly spread over the time over. If over is 0, all requests start at
// once.
func fire(ctx context.Context, client *http.Client, urls []string, n int, over time.Duration) report {
	took := make([]time.Duration, n)
	var failed atomic.Int64
	var all sync.WaitGroup
	began := time.Now()
	for i := range n {
		all.Go(func() {
			// The latency counts from the moment at which the request was due, so that delays in this program count as
			// well.
			due := began.Add(over * time.Duration(i) / time.Duration(n))
			if pause(ctx, time.Until(due)) != nil || !ok(ctx, client, urls[i%len(urls)]) {
				failed.Add(1)
			}
			took[i] = time.Since(due)
		})
	}
	all.Wait()
	slices.Sort(took)
	return report{requests: int64(n), failed: failed.Load(), p50: took[n/2], p99: took[n*99/100]}
}

// ok reports whether a request was answered with a product.
func ok(ctx context.Context, client *http.Client, url string) bool {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	response, err := client.Do(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	_, err = io.Copy(io.Discard, response.Body) // reads to the end, so that the client can use the connection again
	return err == nil && response.StatusCode == http.StatusOK
}
