package main

import (
	"context"
	"fmt"
	"time"
)

// scene is one thing that happens to a hot entry.
type scene struct {
	title   string
	prepare func(context.Context) error
	query   time.Duration // how long a query takes
	down    bool          // the database fails
	over    time.Duration // the time over which the requests are spread; 0 = all at once
	moral   func(without, with report) string
}

func (d *demo) scenes() []scene {
	return []scene{{
		title:   fmt.Sprintf("A hot entry expires: %d requests at once, a query takes %v", d.requests, d.query),
		prepare: d.expired,
		query:   d.query,
		moral: func(without, with report) string {
			return fmt.Sprintf("%d database queries without, %d with: one caller on one node runs the query, the others "+
				"get the old value.", without.queries, with.queries)
		},
	}, {
		title:   fmt.Sprintf("No entry at all and a slow database: %v a query, %d at a time", d.slow, poolSize),
		prepare: d.gone,
		query:   d.slow,
		moral: func(without, with report) string {
			return fmt.Sprintf("%d queries without, which queue for the database; %d with: %d callers on %d nodes waited "+
				"for it.", without.queries, with.queries, with.waited, fleetSize)
		},
	}, {
		title:   fmt.Sprintf("The entry expires and the database fails: %d requests within %v", d.requests, d.outage),
		prepare: d.expired,
		query:   d.query,
		down:    true,
		over:    d.outage,
		moral: func(without, with report) string {
			return fmt.Sprintf("%d visitors saw an error without, %d with; %d queries without, %d with: two nodes "+
				"probe once per second.", without.failed, with.failed, without.queries, with.queries)
		},
	}}
}

const heading = "                   requests  db queries  failed   fresh  stale  waited       p50       p99"

// play prepares a scene. Then it sends the same traffic to the first fleet, and after that to the second fleet.
func (d *demo) play(ctx context.Context, number int, s scene) (reports [2]report, err error) {
	fmt.Fprintf(d.out, "%d. %s\n", number, s.title)
	if err := s.prepare(ctx); err != nil {
		return reports, err
	}
	d.database.delay.Store(int64(s.query))
	d.database.down.Store(s.down)
	defer d.database.delay.Store(0)
	defer d.database.down.Store(false)
	fmt.Fprintln(d.out, heading)
	for i, f := range d.fleets {
		r := d.measure(ctx, f, s.over)
		if ctx.Err() != nil {
			return reports, ctx.Err()
		}
		fmt.Fprintf(d.out, "   %-15s %8d  %10d  %6d   %5d  %5d  %6d  %8s  %8s\n", f.name,
			r.requests, r.queries, r.failed, r.fresh, r.stale, r.waited, millis(r.p50), millis(r.p99))
		reports[i] = r
	}
	fmt.Fprintf(d.out, "   %s\n\n", s.moral(reports[0], reports[1]))
	return reports, s.check(reports[0], reports[1])
}

const settle = 150 * time.Millisecond

// measure sends the requests of a scene to a fleet, and counts queries and answers.
func (d *demo) measure(ctx context.Context, f *fleet, over time.Duration) report {
	r := fire(ctx, d.client, f.urls, d.requests, over)
	_ = pause(ctx, settle) // a background refresh may end after the last answer; its query counts as well
	r.queries = d.database.queries.Swap(0)
	r.fresh, r.stale, r.waited = f.tally.fresh.Swap(0), f.tally.stale.Swap(0), f.tally.waited.Swap(0)
	return r
}

// check returns an error if the reports contradict what the program claims.
func (s *scene) check(without, with report) error {
	switch {
	case with.failed > 0:
		return fmt.Errorf("%d of %d requests failed with refill", with.failed, with.requests)
	case without.failed > 0 && !s.down:
		return fmt.Errorf("%d of %d requests failed without refill", without.failed, without.requests)
	case with.queries == 0 || with.queries >= without.queries:
		return fmt.Errorf("%d queries with refill and %d without", with.queries, without.queries)
	}
	return nil
}

// expired fills the caches of both fleets, and waits until the entries are past their TTL. The requests that fill the
// caches also open all connections.
func (d *demo) expired(ctx context.Context) error {
	for _, f := range d.fleets {
		d.measure(ctx, f, 0)
	}
	return pause(ctx, d.ttl)
}

// gone empties the caches of both fleets.
func (d *demo) gone(ctx context.Context) error {
	for _, f := range d.fleets {
		if err := f.forget(ctx); err != nil {
			return fmt.Errorf("the caches could not be emptied: %w", err)
		}
	}
	return nil
}

func millis(d time.Duration) string { return fmt.Sprintf("%.0f ms", d.Seconds()*1000) }
