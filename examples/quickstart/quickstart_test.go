package main

import (
	"context"
	"runtime"
	"strings"
	"testing"
	"time"
)

// The test runs the program with smaller scenes, and checks what the program claims. With refill, no request fails. A
// scene has one query per expiry, or, while the database fails, one query per second on each of two nodes. Without
// refill, a scene has at least ten times as many queries. No goroutine is left behind.
func TestStory(t *testing.T) {
	before := runtime.NumGoroutine()
	s := size{
		requests: 90, ttl: 500 * time.Millisecond, query: 30 * time.Millisecond, slow: 150 * time.Millisecond,
		outage: 1200 * time.Millisecond,
	}
	var out strings.Builder
	scenes, err := run(t.Context(), &out, "", "", s)
	t.Log("\n" + out.String())
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range scenes {
		without, with := r[0], r[1]
		most := int64(1) // one query per expiry
		if i == 2 {
			most = 2 * (1 + int64(s.outage/time.Second)) // two nodes probe per second while the database fails
		}
		if with.queries < 1 || with.queries > most {
			t.Errorf("scene %d: %d queries with refill, want 1 to %d", i+1, with.queries, most)
		}
		if without.queries < 10*with.queries {
			t.Errorf("scene %d: %d queries without refill: no stampede", i+1, without.queries)
		}
		for _, r := range r {
			if sum := r.fresh + r.stale + r.waited + r.failed; sum != r.requests {
				t.Errorf("scene %d: %d requests, but %d answers counted", i+1, r.requests, sum)
			}
		}
		if with.failed > 0 {
			t.Errorf("scene %d: %d requests failed with refill", i+1, with.failed)
		}
	}
	if r := scenes[0][1]; r.stale == 0 || r.waited > 0 {
		t.Errorf("expiry: %d stale, %d waited; want all answered at once", r.stale, r.waited)
	}
	if r := scenes[1][1]; r.waited == 0 || r.stale > 0 {
		t.Errorf("no entry: %d waited, %d stale; there is nothing stale", r.waited, r.stale)
	}
	if r := scenes[2]; r[0].failed != r[0].requests || r[1].stale != r[1].requests {
		t.Errorf("failure: %d of %d failed without, %d of %d stale with",
			r[0].failed, r[0].requests, r[1].stale, r[1].requests)
	}
	for deadline := time.Now().Add(2 * time.Second); runtime.NumGoroutine() > before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<16)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
		}
	}
}

func TestUnreachable(t *testing.T) {
	for _, c := range []struct{ name, redis, dsn, want string }{
		{"redis", "127.0.0.1:1", "", "redis at 127.0.0.1:1 does not answer"},
		{"database", "", "postgres://127.0.0.1:1/x?sslmode=disable", "the database does not work"},
		{"file", "", "/no/such/folder/x.db", "the database does not work"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if _, err := run(ctx, t.Output(), c.redis, c.dsn, full); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}
