package refill_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file tests values that the store has not confirmed. The store did not answer the publication of such a value,
// or the value was loaded without the store. The Loader serves such a value while the store does not answer. When the
// store answers again, the next Get compares the value with the store.

// The store stops answering node l before the end of a load on l, so the publication of l has no answer. The lease
// ends, and the peer loads and stores a newer value. The newer value replaces no value and no node waits for it, so the
// store does not announce it. Then l reaches the store again. The next Get on l must return the newer value.
func TestAPublicationWithoutAnAnswer(t *testing.T) {
	for name, get := range map[string]func(ctx context.Context, l *refill.Loader[string]) (string, error){
		"Get": func(ctx context.Context, l *refill.Loader[string]) (string, error) { return l.Get(ctx, "k") },
		"GetMany": func(ctx context.Context, l *refill.Loader[string]) (string, error) {
			m, err := l.GetMany(ctx, []string{"k", "other"})
			return m["k"], err
		},
		"Peek": func(ctx context.Context, l *refill.Loader[string]) (string, error) {
			r, ok := l.Peek(ctx, "k")
			if !ok {
				return "", errors.New("Peek found nothing")
			}
			return r.Value, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 100 * ms}
				s, l, peer := pair(t, d, refill.Config{TTL: time.Minute})
				s.onStep(func(_ context.Context, step string) error {
					if step == "acquire" {
						s.stuck.Store(true)
					}
					return nil
				})
				if v, err := l.Get(t.Context(), "k"); v != "k v0" || err != nil {
					t.Errorf("got %q, %v without the store, want \"k v0\"", v, err)
				}
				time.Sleep(2 * time.Second)
				d.version.Store(1)
				if v, err := peer.Get(t.Context(), "k"); v != "k v1" || err != nil {
					t.Errorf("got %q, %v on the peer, want \"k v1\"", v, err)
				}
				s.onStep(nil)
				s.stuck.Store(false)
				time.Sleep(500 * ms) // until a probe has found that the store answers
				if v, err := get(t.Context(), l); v != "k v1" || err != nil {
					t.Errorf("got %q, %v, want the newer value \"k v1\"", v, err)
				}
			})
		})
	}
}

// The reply to a publication is lost, although the store has the value. At the next Get the store confirms the value.
// After that, Gets are hits that do not call the store.
func TestAnUnconfirmedValueIsConfirmed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := &db{}
		s, l, peer := pair(t, d, refill.Config{TTL: time.Minute})
		s.onStep(func(_ context.Context, step string) error {
			if step == "publish" {
				return errDown
			}
			return nil
		})
		get(t, l, "k")
		s.onStep(nil)
		synctest.Wait()
		if r, err := l.GetResult(t.Context(), "k"); err != nil || r.Outcome != refill.OutcomeShared {
			t.Errorf("got %v, %v, want the value of the store", r.Outcome, err)
		}
		calls := s.calls.Load()
		for range 10 {
			get(t, l, "k")
		}
		if n := s.calls.Load() - calls; n != 0 {
			t.Errorf("got %d calls of the store for 10 Gets of a confirmed value, want 0", n)
		}
		get(t, peer, "k")
		if n := d.loads.Load(); n != 1 {
			t.Errorf("got %d loads, want 1", n)
		}
	})
}

// outages are three ways in which the store does not answer a node. With "cut", calls fail and the subscription is
// lost. With "down", calls fail. With "slow", a call blocks until its ctx ends.
var outages = map[string]func(s *spy, down bool){
	"cut":  (*spy).cut,
	"down": func(s *spy, down bool) { s.down.Store(down) },
	"slow": func(s *spy, down bool) { s.stuck.Store(down) },
}

// Node l loads a value without the store. Then the store answers again, and has an older value. While its own value is
// fresh, node l must serve it without further loads.
func TestAnOlderValueInTheStore(t *testing.T) {
	for name, outage := range outages {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				s, l, peer := pair(t, d, refill.Config{TTL: time.Minute, Jitter: -1})
				get(t, peer, "k")
				time.Sleep(20 * time.Second)
				d.version.Store(1)
				outage(s, true)
				if v := get(t, l, "k"); v != "k v1" {
					t.Errorf("got %q without the store, want \"k v1\"", v)
				}
				outage(s, false)
				wrong := 0
				for range 59 {
					if v := get(t, l, "k"); v != "k v1" {
						wrong++
					}
					if all, err := l.GetMany(t.Context(), []string{"k"}); all["k"] != "k v1" || err != nil {
						wrong++
					}
					time.Sleep(time.Second)
				}
				if wrong > 0 {
					t.Errorf("%d of 118 answers were not \"k v1\", whose load began later", wrong)
				}
				// The TTL of the record in the store ended 40 s after the outage, so one load under the lease may have followed.
				if n := d.loads.Load(); n > 3 {
					t.Errorf("got %d loads, want 3 at most", n)
				}
			})
		})
	}
}

// Node l loads a value without the store. Then the store answers again, and has no value of the key. Now both nodes ask
// for the key three times. The fleet must load the key once more, under the lease.
func TestNoValueInTheStore(t *testing.T) {
	for name, outage := range outages {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{took: 100 * ms}
				s, l, peer := pair(t, d, refill.Config{TTL: time.Minute})
				outage(s, true)
				get(t, l, "k")
				outage(s, false)
				synctest.Wait()
				for range 3 {
					stopped := behind(t, peer, "k")
					get(t, l, "k")
					stopped()
				}
				if n := d.loads.Load(); n != 2 {
					t.Errorf("got %d loads, want 2: one without the store, and one after it", n)
				}
			})
		})
	}
}

// A value is loaded while the store does not answer. Until the store answers, the value must be served from L1, without
// a further load.
func TestAnUnconfirmedValueDuringAnOutage(t *testing.T) {
	for name, outage := range outages {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				s, l, _ := pair(t, d, refill.Config{TTL: time.Minute, Jitter: -1})
				outage(s, true)
				for i := range 59 {
					if v := get(t, l, "k"); v != "k v0" {
						t.Errorf("after %d s: got %q, want \"k v0\"", i, v)
					}
					time.Sleep(time.Second)
				}
				if n := d.loads.Load(); n != 1 {
					t.Errorf("got %d loads, want 1", n)
				}
				outage(s, false)
			})
		})
	}
}

// A node serves an unconfirmed value instead of an older record of the store. But if the unconfirmed value is
// invalidated, on this node or on another node, the value must not be served any longer.
func TestAnUnconfirmedValueIsInvalidated(t *testing.T) {
	for name, invalidate := range map[string]func(ctx context.Context, l, peer *refill.Loader[string]) error{
		"here":      func(ctx context.Context, l, _ *refill.Loader[string]) error { return l.Invalidate(ctx, "k") },
		"elsewhere": func(ctx context.Context, _, peer *refill.Loader[string]) error { return peer.Invalidate(ctx, "k") },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				s, l, peer := pair(t, d, refill.Config{TTL: time.Minute, Jitter: -1})
				s.down.Store(true)
				get(t, l, "k")
				s.down.Store(false)
				d.version.Store(1)
				if err := invalidate(t.Context(), l, peer); err != nil {
					t.Error(err)
				}
				synctest.Wait()
				if v := get(t, l, "k"); v != "k v1" {
					t.Errorf("got %q, want \"k v1\"", v)
				}
			})
		})
	}
}

// Node l cannot complete an Invalidate, because the store does not answer. Then the store answers again, and still has
// the old value. The next call on l must complete the Invalidate before it reads the store.
func TestAPendingInvalidateComesFirst(t *testing.T) {
	for name, read := range map[string]func(ctx context.Context, l *refill.Loader[string]) (string, error){
		"Get": func(ctx context.Context, l *refill.Loader[string]) (string, error) { return l.Get(ctx, "k") },
		"GetMany": func(ctx context.Context, l *refill.Loader[string]) (string, error) {
			m, err := l.GetMany(ctx, []string{"k", "other"})
			return m["k"], err
		},
		"Refresh": func(ctx context.Context, l *refill.Loader[string]) (string, error) {
			if err := l.Refresh(ctx, "k"); err != nil {
				return "", err
			}
			return l.Get(ctx, "k")
		},
	} {
		for _, expire := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, expire %v", name, expire), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					var ev events
					shared := memory.New()
					s := newSpy(shared)
					d := &db{took: ms}
					l := node(t, d.load, refill.Config{TTL: time.Minute, Shared: s, OnEvent: ev.on})
					peer := node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared})
					get(t, l, "k")
					s.down.Store(true)
					d.version.Store(1)
					invalidate := l.Invalidate
					if expire {
						invalidate = l.Expire
					}
					if err := invalidate(t.Context(), "k"); err == nil {
						t.Error("the invalidation succeeded, want an error: the store does not answer")
					}
					s.down.Store(false)
					if v, err := read(t.Context(), l); v != "k v1" || err != nil {
						t.Errorf("got %q, %v, want \"k v1\"", v, err)
					}
					synctest.Wait()
					if n := ev.of(refill.EventInvalidateRetried); n != 1 {
						t.Errorf("got %d retried invalidations, want 1", n)
					}
					time.Sleep(2 * time.Second)
					if v := get(t, peer, "k"); v != "k v1" {
						t.Errorf("got %q on the peer, want \"k v1\"", v)
					}
					// GetMany also loads "other", so its loads are not counted. Two loads are usual. A third load is
					// possible if the background retry of the invalidation runs at the moment of the read.
					if n := d.loads.Load(); name != "GetMany" && n > 3 {
						t.Errorf("got %d loads, want 2 or 3: later retries have removed the new value", n)
					}
				})
			})
		}
	}
}

// A refill on node l has found no value and waits for a load slot. Meanwhile the peer loads and stores an old value,
// and an Invalidate on l does not reach the store. Then the refill gets its slot, and reads the old value. L1 of node l
// must not keep this value, so a later Get must return the new value, although the store still refuses the Invalidate.
func TestAPendingInvalidateOfARunningRefill(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := memory.New()
		s := &refusesInvalidate{Store: shared}
		d := &db{}
		l := node(t, func(ctx context.Context, key string) (string, error) {
			if key == "busy" {
				time.Sleep(time.Second)
			}
			return d.load(ctx, key)
		}, refill.Config{TTL: time.Minute, MaxLoads: 1, Shared: s})
		peer := node(t, d.load, refill.Config{TTL: time.Minute, Shared: shared})
		defer behind(t, l, "busy")()
		synctest.Wait()
		wait := behind(t, l, "k")
		synctest.Wait()
		get(t, peer, "k")
		d.version.Store(1)
		if err := l.Invalidate(t.Context(), "k"); err == nil {
			t.Error("the Invalidate succeeded, want an error")
		}
		wait()
		if v := get(t, l, "k"); v != "k v1" {
			t.Errorf("got %q after the Invalidate, want \"k v1\"", v)
		}
	})
}

// refusesInvalidate is a store whose Invalidate fails.
type refusesInvalidate struct{ driver.Store }

func (*refusesInvalidate) Invalidate(context.Context, string, ...string) error { return errDown }

// Node l cannot complete an Invalidate, because the store does not answer. A Get on l during the outage must not return
// the old value. The Get must load without the store.
func TestAPendingInvalidateDuringAnOutage(t *testing.T) {
	for name, outage := range outages {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				d := &db{}
				s, l, peer := pair(t, d, refill.Config{TTL: time.Minute})
				get(t, l, "k")
				outage(s, true)
				d.version.Store(1)
				if err := l.Invalidate(t.Context(), "k"); err == nil {
					t.Error("Invalidate succeeded, want an error: the store does not answer")
				}
				if v := get(t, l, "k"); v != "k v1" {
					t.Errorf("got %q during the outage, want \"k v1\"", v)
				}
				outage(s, false)
				if v := get(t, l, "k"); v != "k v1" {
					t.Errorf("got %q after the outage, want \"k v1\"", v)
				}
				synctest.Wait()
				if v := get(t, peer, "k"); v != "k v1" {
					t.Errorf("got %q on the peer, want \"k v1\"", v)
				}
			})
		})
	}
}
