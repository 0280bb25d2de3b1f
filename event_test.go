package refill_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests calls of Close by OnEvent, and the lines that Config.Logger gets.

// OnEvent calls Close at the first event of each kind: during Gets, loads and retries, on the goroutine of the breaker,
// and on the goroutine of the subscription. Close would wait for the goroutine that calls OnEvent, so Close must return
// ErrInvalid at once. The Loader must go on working.
func TestCloseFromOnEvent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSpy(memory.New())
		var (
			l    *refill.Loader[string]
			mu   sync.Mutex
			seen = map[refill.EventKind]bool{}
		)
		l = node(t, d.load, refill.Config{TTL: time.Hour, Shared: s, OnEvent: func(e refill.Event) {
			mu.Lock()
			first := !seen[e.Kind]
			seen[e.Kind] = true
			mu.Unlock()
			if !first || l == nil { // l is nil while New runs
				return
			}
			began := time.Now()
			if err := l.Close(); !errors.Is(err, refill.ErrInvalid) || time.Since(began) != 0 {
				t.Errorf("Close during %q: got %v after %v, want ErrInvalid at once", e.Kind, err, time.Since(began))
			}
		}})
		mu.Lock()
		clear(seen)
		mu.Unlock()
		get(t, l, "k")
		get(t, l, "k")
		d.fail(errDown)
		_, _ = l.Get(t.Context(), "failing")
		d.fail(nil)
		s.stuck.Store(true)
		for i := range 5 {
			get(t, l, fmt.Sprint(i))
		}
		_ = l.Invalidate(t.Context(), "k")
		s.stuck.Store(false)
		s.cut(true)
		s.cut(false)
		time.Sleep(time.Second)
		synctest.Wait()
		get(t, l, "after")
		mu.Lock()
		defer mu.Unlock()
		for _, kind := range []refill.EventKind{
			refill.EventGet, refill.EventLoaded, refill.EventLoadFailed, refill.EventPublished, refill.EventStoreError,
			refill.EventStoreDown, refill.EventStoreUp, refill.EventBreakerOpen, refill.EventBreakerClosed,
			refill.EventInvalidateRetried,
		} {
			if !seen[kind] {
				t.Errorf("there was no event %q", kind)
			}
		}
	})
}

// logged is a slog.Handler that keeps all log lines.
type logged struct {
	mu    sync.Mutex
	lines []string // "LEVEL message name=value…"; true replaces the value of node, which is random
}

func (h *logged) Enabled(context.Context, slog.Level) bool { return true }
func (h *logged) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h *logged) WithGroup(string) slog.Handler            { return h }

func (h *logged) Handle(_ context.Context, r slog.Record) error {
	line := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "node" {
			a.Value = slog.StringValue(fmt.Sprint(a.Value.String() != ""))
		}
		line += " " + a.String()
		return true
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lines = append(h.lines, line)
	return nil
}

// take returns the lines since the previous take. The lines are sorted, because goroutines may log in any order.
func (h *logged) take() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	lines := h.lines
	h.lines = nil
	slices.Sort(lines)
	return lines
}

// Ten Loaders share a store and a Logger. At an outage, each of the ten Loaders notices the outage, but the Logger must
// get only one line about the subscription and one line about the breakers. At the end of the outage, the Logger must
// get one line about each again. A further Loader has a Logger of its own. The second Logger must get the same lines as
// the first.
func TestLogOfAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSharedSpy()
		ours, own := &logged{}, &logged{}
		cfg := refill.Config{TTL: time.Hour, Shared: s, Logger: slog.New(ours)}
		var nodes []*refill.Loader[string]
		for range 10 {
			nodes = append(nodes, node(t, d.load, cfg))
		}
		cfg.Logger = slog.New(slog.DiscardHandler)
		nodes = append(nodes, node(t, d.load, cfg))
		cfg.Logger = slog.New(own)
		nodes = append(nodes, node(t, d.load, cfg))
		if lines := append(ours.take(), own.take()...); len(lines) != 0 {
			t.Errorf("lines while all is well: %q", lines)
		}
		for round := range 2 {
			s.hang(true)
			for n, l := range nodes {
				for i := range 5 {
					get(t, l, fmt.Sprint(round, n, i))
				}
			}
			synctest.Wait() // until the breaker has called OnEvent on its goroutine
			want := []string{
				"WARN refill: circuit breaker open: Gets do without the store, which did not answer in time " +
					"loader=thing node=true error=context deadline exceeded",
				"WARN refill: store down: no announcements can be received loader=thing node=true error=store is down",
			}
			if a, b := ours.take(), own.take(); !slices.Equal(a, want) || !slices.Equal(b, want) {
				t.Errorf("lines of an outage: %q and %q, want %q", a, b, want)
			}
			s.hang(false)
			time.Sleep(time.Second)
			synctest.Wait()
			want = []string{
				"INFO refill: circuit breaker closed: the store answers again loader=thing node=true",
				"INFO refill: store up: announcements can be received again loader=thing node=true",
			}
			if a, b := ours.take(), own.take(); !slices.Equal(a, want) || !slices.Equal(b, want) {
				t.Errorf("lines of the recovery: %q and %q, want %q", a, b, want)
			}
		}
	})
}

// Three things are doubtful: the store holds foreign bytes under four keys, a setting of Config has no effect, and the
// store warns twice about a setting of the server. Bad records must be logged at most once a minute. The setting of
// Config and the warning of the store must be logged once each.
func TestLogOfDoubtfulThings(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSharedSpy()
		lines := &logged{}
		cfg := refill.Config{TTL: time.Hour, LocalTTL: 2 * time.Hour, Shared: s, Logger: slog.New(lines)}
		l := node(t, d.load, cfg)
		want := "WARN refill: doubtful setting of Config loader=thing"
		if got := lines.take(); len(got) != 1 || !strings.HasPrefix(got[0], want) {
			t.Errorf("lines of New: %q, want one about LocalTTL", got)
		}
		node(t, d.load, cfg)
		lines.take()
		s.mu.Lock()
		handles := slices.Clone(s.handles)
		s.mu.Unlock()
		for range 2 {
			for _, handle := range handles {
				handle(driver.Announcement{Kind: driver.Warning, Err: errors.New("maxmemory-policy")})
			}
		}
		want = "WARN refill: doubtful setting of the store loader=thing node=true error=maxmemory-policy"
		if got := lines.take(); !slices.Equal(got, []string{want}) {
			t.Errorf("lines of two warnings, to two Loaders: %q, want %q", got, want)
		}
		for i := range 4 {
			foreign(t, s.Store, fmt.Sprint("thing:", i), []byte("foreign"))
		}
		for i, want := range []int{1, 0, 0, 1} {
			get(t, l, fmt.Sprint(i))
			got := lines.take()
			if len(got) != want || want == 1 && !strings.HasPrefix(got[0], "WARN refill: bad record") {
				t.Errorf("bad record %d: lines %q, want %d", i, got, want)
			}
			time.Sleep(25 * time.Second)
		}
	})
}

// An Invalidate fails, because the store is down, and the Loader retries it in the background. If a retry succeeds in
// time, nothing must be logged. If the store stays down until the Loader gives the retries up, one line must be logged.
func TestLogOfAnInvalidationThatWasGivenUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s := newSpy(memory.New())
		lines := &logged{}
		l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: s, Logger: slog.New(lines)})
		for range 2 {
			s.down.Store(true)
			if err := l.Invalidate(t.Context(), "k"); err == nil {
				t.Error("Invalidate returned no error")
			}
			s.down.Store(false)
			time.Sleep(time.Second)
		}
		if got := lines.take(); len(got) != 0 {
			t.Errorf("lines of invalidations that were repeated: %q, want none", got)
		}
		s.down.Store(true)
		_ = l.Invalidate(t.Context(), "k", "l")
		time.Sleep(time.Hour)
		if got := lines.take(); len(got) != 1 || !strings.HasPrefix(got[0], "WARN refill: invalidation given up") {
			t.Errorf("lines %q, want one", got)
		}
	})
}
