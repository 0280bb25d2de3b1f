package refill_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

// spy is one node's way to a store: it counts the calls, and can be cut.
type spy struct {
	refill.Store
	down  atomic.Bool // calls fail, announcements are not heard
	died  atomic.Bool // as down, but the calls seem to work: a process that is gone says nothing
	mute  atomic.Bool // announcements are lost and nobody notices
	stuck atomic.Bool // calls are not answered
	calls atomic.Int64
	gets  atomic.Int64
	many  atomic.Int64 // GetManys

	forgetTags atomic.Bool // it knows no tag
	noTags     atomic.Bool // it does not answer what it knows of tags

	mu       sync.Mutex
	hear     func(refill.Note)
	held     []refill.Note // announcements on their way, while hold is set
	hold     bool
	keys     []string // of all Gets, and of all Begins that were not too late
	afterGet func()   // runs when a Get has its reply and has not returned yet
}

// holdNotes keeps announcements on their way until it is called with false.
func (s *spy) holdNotes(hold bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hold = hold
	for _, n := range s.held {
		s.hear(n)
	}
	s.held = nil
}

// loseLast loses the announcement that was held last.
func (s *spy) loseLast() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = s.held[:len(s.held)-1]
}

func (s *spy) onGet(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.afterGet = f
}

func newSpy(s refill.Store) *spy { return &spy{Store: s} }

var errDown = errors.New("store is down")

func (s *spy) call(ctx context.Context) error {
	s.calls.Add(1)
	if s.stuck.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	if s.down.Load() || s.died.Load() {
		return errDown
	}
	return nil
}

// cut makes the store unreachable, or brings it back.
func (s *spy) cut(down bool) {
	s.down.Store(down)
	n := refill.Note{Kind: refill.NoteUp}
	if down {
		n = refill.Note{Kind: refill.NoteDown, Err: errDown}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hear(n)
}

func (s *spy) Get(ctx context.Context, key string) ([]byte, error) {
	s.gets.Add(1)
	if err := s.call(ctx); err != nil {
		return nil, err
	}
	record, err := s.Store.Get(ctx, key)
	s.mu.Lock()
	s.keys = append(s.keys, key)
	after := s.afterGet
	s.mu.Unlock()
	if after != nil {
		after()
	}
	return record, err
}

func (s *spy) Begin(ctx context.Context, b refill.Bid) (refill.Begun, error) {
	if err := s.call(ctx); err != nil {
		return refill.Begun{}, err
	}
	r, err := s.Store.Begin(ctx, b)
	if err == nil && r.State != refill.BeginHeld {
		s.mu.Lock()
		s.keys = append(s.keys, b.Key)
		s.mu.Unlock()
	}
	return r, err
}

// bid is what an outsider says who will wait for the refill lock of key, and has seen the record that is there.
func bid(t *testing.T, shared refill.Store, key, token string) refill.Bid {
	t.Helper()
	record, err := shared.Get(t.Context(), key)
	if err != nil {
		t.Error(err)
	}
	return refill.Bid{
		Key: key, Token: token, Seen: refill.RecordToken(record),
		LeaseTTL: time.Second, ClaimTTL: time.Second, Ask: refill.AskLeft,
	}
}

func (s *spy) Renew(ctx context.Context, key, token string, ttl time.Duration) (bool, error) {
	if err := s.call(ctx); err != nil {
		return false, err
	}
	return s.Store.Renew(ctx, key, token, ttl)
}

func (s *spy) Publish(ctx context.Context, p refill.Publication) (refill.Published, error) {
	if err := s.call(ctx); err != nil {
		return 0, err
	}
	return s.Store.Publish(ctx, p)
}

func (s *spy) Fail(ctx context.Context, key, token, failure string, ttl time.Duration) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	return s.Store.Fail(ctx, key, token, failure, ttl)
}

func (s *spy) Release(ctx context.Context, key, token string) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	return s.Store.Release(ctx, key, token)
}

func (s *spy) Invalidate(ctx context.Context, by string, keys ...string) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	return s.Store.Invalidate(ctx, by, keys...)
}

func (s *spy) Expire(ctx context.Context, by string, keys ...string) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	return s.Store.Expire(ctx, by, keys...)
}

func (s *spy) GetMany(ctx context.Context, keys ...string) ([][]byte, error) {
	s.many.Add(1)
	if err := s.call(ctx); err != nil {
		return nil, err
	}
	return s.Store.GetMany(ctx, keys...)
}

func (s *spy) Tags(ctx context.Context, tags ...string) ([]refill.TagState, error) {
	if err := s.call(ctx); err != nil {
		return nil, err
	}
	if s.noTags.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if s.forgetTags.Load() {
		return make([]refill.TagState, len(tags)), nil
	}
	return s.Store.Tags(ctx, tags...)
}

func (s *spy) HoldTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	return s.Store.HoldTags(ctx, reach, keep, tags...)
}

func (s *spy) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	return s.Store.InvalidateTags(ctx, by, keep, tags...)
}

func (s *spy) ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	return s.Store.ExpireTags(ctx, by, keep, tags...)
}

func (s *spy) Listen(name string, hear func(refill.Note)) func() {
	s.mu.Lock()
	s.hear = hear
	s.mu.Unlock()
	return s.Store.Listen(name, func(n refill.Note) {
		if !s.down.Load() && !s.died.Load() && !s.mute.Load() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.hold {
				s.held = append(s.held, n)
				return
			}
			hear(n)
		}
	})
}

// events counts what OnEvent sees.
type events struct {
	mu    sync.Mutex
	count map[refill.EventKind]int
	last  map[refill.EventKind]refill.Event
}

func (e *events) on(ev refill.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.count == nil {
		e.count, e.last = map[refill.EventKind]int{}, map[refill.EventKind]refill.Event{}
	}
	e.count[ev.Kind]++
	e.last[ev.Kind] = ev
}

func (e *events) of(k refill.EventKind) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.count[k]
}

// node makes one Loader of strings named thing and closes it at the end.
func node(t *testing.T, load func(context.Context, string) (string, error), cfg refill.Config) *refill.Loader[string] {
	t.Helper()
	if cfg.TTL == 0 {
		cfg.TTL = time.Second
	}
	l, err := refill.New("thing", load, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// pair makes a node behind a spy, and a peer that nothing comes between, over one store.
func pair(t *testing.T, d *db, cfg refill.Config) (s *spy, l, peer *refill.Loader[string]) {
	t.Helper()
	shared := refill.NewMemory()
	s = newSpy(shared)
	cfg.Shared = s
	l = node(t, d.load, cfg)
	cfg.Shared = shared
	return s, l, node(t, d.load, cfg)
}
