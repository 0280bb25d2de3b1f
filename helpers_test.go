package refill_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/refill-go/refill"
	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file contains the helpers of the tests. db and table are fake databases that count their loads. node, pair,
// fleet and bulk make Loaders. Each of these Loaders stands for one node, that is, one process of a fleet. spy is a
// store that counts calls, and that can fail or hang.

const ms = time.Millisecond

// Loaders without a Logger do not log into the output of the tests.
func init() { slog.SetDefault(slog.New(slog.DiscardHandler)) }

// bubble runs f in a testing/synctest bubble. Time in the bubble is simulated: a sleep takes no real time, and lasts
// exactly as long as asked. A goroutine that is still running when f returns fails the test.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// db is a fake database that counts its loads. Each load takes the duration took.
type db struct {
	took    time.Duration // after the first load, only slow may change took
	loads   atomic.Int64  // all loads that have begun
	now     atomic.Int64  // loads that run now
	most    atomic.Int64  // the largest number of loads running at once
	version atomic.Int64  // part of each value: load returns "KEY vVERSION"
	mu      sync.Mutex    // guards the next two, and took after the first load
	err     error         // what load returns beside the value; nil = no error
	begins  []time.Time   // when each load began
}

func (d *db) load(ctx context.Context, key string) (string, error) {
	d.loads.Add(1)
	n := d.now.Add(1)
	defer d.now.Add(-1)
	for m := d.most.Load(); n > m && !d.most.CompareAndSwap(m, n); m = d.most.Load() {
	}
	d.mu.Lock()
	err, took := d.err, d.took
	d.begins = append(d.begins, time.Now())
	d.mu.Unlock()
	value := fmt.Sprintf("%s v%d", key, d.version.Load()) // a load reads the version at its start, as a query does
	select {
	case <-time.After(took):
	case <-ctx.Done():
		return "", ctx.Err()
	}
	return value, err
}

func (d *db) slow(took time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.took = took
}

func (d *db) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

// tagged is a load function that takes the tags of a value from the key. The value of key "a,b:1" has the tags a and b.
func (d *db) tagged(ctx context.Context, key string) (string, error) {
	tags, _, _ := strings.Cut(key, ":")
	refill.FillFrom(ctx).Tag(strings.Split(tags, ",")...)
	return d.load(ctx, key)
}

// table is a fake database with a bulk load function, which records the keys of each call.
type table struct {
	took  time.Duration
	mu    sync.Mutex
	calls [][]string      // the keys of each call of load, sorted
	err   error           // what load returns beside the rows; nil = no error
	lacks map[string]bool // keys for which load returns no row
}

func (d *table) load(ctx context.Context, keys []string) (map[string]string, error) {
	d.mu.Lock()
	d.calls = append(d.calls, slices.Sorted(slices.Values(keys)))
	err := d.err
	d.mu.Unlock()
	select {
	case <-time.After(d.took):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	rows := map[string]string{}
	for _, key := range keys {
		if !d.lacks[key] {
			rows[key] = "row " + key
		}
	}
	return rows, err
}

func (d *table) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

// asked returns the keys of each call of load since the previous call of asked. The keys of a call are sorted.
func (d *table) asked() (calls [][]string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	calls, d.calls = d.calls, nil
	return calls
}

// says returns a load function that sleeps for the time took and then returns value. The load function ignores its ctx.
func says(value string, took time.Duration) func(context.Context, string) (string, error) {
	return func(context.Context, string) (string, error) {
		time.Sleep(took)
		return value, nil
	}
}

// never returns a load function that fails the test if it is called.
func never(t *testing.T) func(context.Context, string) (string, error) {
	return func(context.Context, string) (string, error) {
		t.Error("the load function was called, want no load")
		return "unexpected", nil
	}
}

// node makes a Loader of strings with the name thing. The Loader is closed at the end of the test.
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

// pair makes two nodes that share one store. Node l reaches the store through the spy s. Node peer has no spy.
func pair(t *testing.T, d *db, cfg refill.Config) (s *spy, l, peer *refill.Loader[string]) {
	t.Helper()
	shared := memory.New()
	s = newSpy(shared)
	cfg.Shared = s
	l = node(t, d.load, cfg)
	cfg.Shared = shared
	return s, l, node(t, d.load, cfg)
}

// tagPair does what pair does, but the load function of the two nodes is d.tagged.
func tagPair(t *testing.T, d *db, cfg refill.Config) (s *spy, l, peer *refill.Loader[string]) {
	t.Helper()
	shared := memory.New()
	s = newSpy(shared)
	cfg.Shared = s
	l = node(t, d.tagged, cfg)
	cfg.Shared = shared
	return s, l, node(t, d.tagged, cfg)
}

// fleet makes n nodes that share one store and the database d.
func fleet(t *testing.T, n int, d *db, cfg refill.Config) []*refill.Loader[string] {
	t.Helper()
	if cfg.Shared == nil {
		cfg.Shared = memory.New()
	}
	if cfg.TTL == 0 {
		cfg.TTL = time.Second
	}
	nodes := make([]*refill.Loader[string], n)
	for i := range nodes {
		l, err := refill.New("thing", d.load, cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := l.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
		nodes[i] = l
	}
	return nodes
}

func bulk(t *testing.T, d *table, cfg refill.Config) *refill.Loader[string] {
	t.Helper()
	if cfg.TTL == 0 {
		cfg.TTL = time.Minute
	}
	l, err := refill.NewBulk("thing", d.load, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func get(t *testing.T, l *refill.Loader[string], key string) string {
	t.Helper()
	v, err := l.Get(t.Context(), key)
	if err != nil {
		t.Errorf("Get(%q): %v", key, err)
	}
	return v
}

// behind calls Get on a new goroutine. The returned function waits until that Get has returned. Defer the returned
// function, so that the Get ends before the ctx of the test does.
func behind(t *testing.T, l *refill.Loader[string], key string) (wait func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		get(t, l, key)
	}()
	return func() { <-done }
}

// all calls GetMany, and fails the test unless GetMany returns the row of each key.
func all(t *testing.T, l *refill.Loader[string], keys []string) {
	t.Helper()
	got, err := l.GetMany(t.Context(), keys)
	if err != nil {
		t.Error(err)
	}
	for _, key := range keys {
		if got[key] != "row "+key {
			t.Errorf("GetMany: got %q for %s, want %q", got[key], key, "row "+key)
		}
	}
}

func names(from, to int) (keys []string) {
	for i := from; i < to; i++ {
		keys = append(keys, fmt.Sprintf("k%04d", i))
	}
	return keys
}

var errDown = errors.New("store is down")

// spy is the connection of one node to a store. A spy counts calls, can lose the connection, and can run functions of a
// test during a call.
type spy struct {
	driver.Store
	down  atomic.Bool // calls fail, and announcements are lost
	died  atomic.Bool // calls fail, and announcements are lost, because the node has died
	mute  atomic.Bool // announcements are lost, and the node does not notice
	stuck atomic.Bool // a call blocks until its ctx ends

	calls       atomic.Int64 // calls of any method that a Loader uses
	gets        atomic.Int64 // calls of Get
	many        atomic.Int64 // calls of GetMany
	reading     atomic.Int64 // calls of GetMany that have not returned
	acquires    atomic.Int64 // calls of Acquire
	lastAcquire atomic.Pointer[driver.AcquireRequest]
	ensures     atomic.Int64 // calls of EnsureTags

	forgetTags  atomic.Bool         // Tags returns no tag state
	noTags      atomic.Bool         // Tags blocks until its ctx ends
	ensureFails atomic.Bool         // EnsureTags fails
	ensureTook  time.Duration       // how long EnsureTags takes
	manyTook    time.Duration       // how long GetMany takes
	renameTag   func(string) string // if set, renames the tags that go to the store; a new name has no tag state

	mu       sync.Mutex
	announce func(driver.Announcement)
	held     []driver.Announcement // while hold is true: announcements to deliver when hold ends
	hold     bool
	keys     []string // keys of all Gets, and of all Acquires that did not return Held
	afterGet func()   // runs between the reply to a Get and the return of that Get
	after    func(ctx context.Context, step string) error
}

func newSpy(s driver.Store) *spy { return &spy{Store: s} }

// holdAnnouncements(true) holds announcements back. holdAnnouncements(false) delivers them.
func (s *spy) holdAnnouncements(hold bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hold = hold
	for _, n := range s.held {
		s.announce(n)
	}
	s.held = nil
}

// loseLastHeld drops the newest of the announcements that are held back.
func (s *spy) loseLastHeld() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = s.held[:len(s.held)-1]
}

func (s *spy) onGet(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.afterGet = f
}

// onStep sets a function that runs after the store has carried out a step of a refill ("acquire", "renew", "publish",
// "release") and before the node gets the reply. If the function returns an error, the error replaces the reply.
func (s *spy) onStep(after func(ctx context.Context, step string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.after = after
}

func (s *spy) did(ctx context.Context, step string, err error) error {
	s.mu.Lock()
	after := s.after
	s.mu.Unlock()
	if after == nil || err != nil {
		return err
	}
	return after(ctx, step)
}

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

// cut(true) makes the store unreachable, and breaks the subscription. cut(false) restores store and subscription.
func (s *spy) cut(down bool) {
	s.down.Store(down)
	n := driver.Announcement{Kind: driver.Subscribed}
	if down {
		n = driver.Announcement{Kind: driver.Disconnected, Err: errDown}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.announce(n)
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

func (s *spy) Acquire(ctx context.Context, a driver.AcquireRequest) (driver.AcquireResult, error) {
	s.acquires.Add(1)
	s.lastAcquire.Store(&a)
	if err := s.call(ctx); err != nil {
		return driver.AcquireResult{}, err
	}
	r, err := s.Store.Acquire(ctx, a)
	if err == nil && r.State != driver.Held {
		s.mu.Lock()
		s.keys = append(s.keys, a.Key)
		s.mu.Unlock()
	}
	return r, s.did(ctx, "acquire", err)
}

func (s *spy) Renew(ctx context.Context, ttl time.Duration, leases ...driver.Lease) ([]bool, error) {
	if err := s.call(ctx); err != nil {
		return nil, err
	}
	mine, err := s.Store.Renew(ctx, ttl, leases...)
	return mine, s.did(ctx, "renew", err)
}

func (s *spy) Publish(ctx context.Context, p driver.PublishRequest) (driver.PublishResult, error) {
	if err := s.call(ctx); err != nil {
		return 0, err
	}
	result, err := s.Store.Publish(ctx, p)
	return result, s.did(ctx, "publish", err)
}

func (s *spy) Fail(ctx context.Context, f driver.FailRequest) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	return s.Store.Fail(ctx, f)
}

func (s *spy) Release(ctx context.Context, key, token string) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	return s.did(ctx, "release", s.Store.Release(ctx, key, token))
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
	s.reading.Add(1)
	defer s.reading.Add(-1)
	if err := s.call(ctx); err != nil {
		return nil, err
	}
	time.Sleep(s.manyTook)
	return s.Store.GetMany(ctx, keys...)
}

func (s *spy) renamed(tags []string) []string {
	if s.renameTag == nil {
		return tags
	}
	tags = slices.Clone(tags)
	for i := range tags {
		tags[i] = s.renameTag(tags[i])
	}
	return tags
}

func (s *spy) Tags(ctx context.Context, tags ...string) ([]driver.TagState, error) {
	if err := s.call(ctx); err != nil {
		return nil, err
	}
	if s.noTags.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if s.forgetTags.Load() {
		return make([]driver.TagState, len(tags)), nil
	}
	return s.Store.Tags(ctx, s.renamed(tags)...)
}

func (s *spy) EnsureTags(ctx context.Context, reach, keep time.Duration, tags ...string) error {
	s.ensures.Add(1)
	if err := s.call(ctx); err != nil {
		return err
	}
	if s.ensureFails.Load() {
		return errDown
	}
	if s.ensureTook > 0 {
		select {
		case <-time.After(s.ensureTook):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return s.Store.EnsureTags(ctx, reach, keep, s.renamed(tags)...)
}

func (s *spy) InvalidateTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	return s.Store.InvalidateTags(ctx, by, keep, s.renamed(tags)...)
}

func (s *spy) ExpireTags(ctx context.Context, by string, keep time.Duration, tags ...string) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	return s.Store.ExpireTags(ctx, by, keep, s.renamed(tags)...)
}

func (s *spy) Subscribe(name string, announce func(driver.Announcement)) func() {
	s.mu.Lock()
	s.announce = announce
	s.mu.Unlock()
	return s.Store.Subscribe(name, func(n driver.Announcement) {
		if !s.down.Load() && !s.died.Load() && !s.mute.Load() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.hold {
				s.held = append(s.held, n)
				return
			}
			announce(n)
		}
	})
}

// acquireRequest returns the AcquireRequest of a node that has read the record of key, and that waits if another node
// has the refill lock.
func acquireRequest(t *testing.T, shared driver.Store, key, token string) driver.AcquireRequest {
	t.Helper()
	record, err := shared.Get(t.Context(), key)
	if err != nil {
		t.Error(err)
	}
	return driver.AcquireRequest{
		Key: key, Token: token, Seen: driver.RecordToken(record),
		LeaseTTL: time.Second, ClaimTTL: time.Second, Mode: driver.Wait,
	}
}

// lockIsFree fails the test if the store has a refill lock of thing:key, or a back-off in place of that lock.
func lockIsFree(t *testing.T, shared driver.Store, key string) {
	t.Helper()
	r, err := shared.Acquire(t.Context(), acquireRequest(t, shared, "thing:"+key, "outsider#1"))
	if err != nil || r.State != driver.Acquired {
		t.Errorf("acquire of %q: got %+v, %v; want a free refill lock", key, r, err)
	}
	if err := shared.Release(t.Context(), "thing:"+key, "outsider#1"); err != nil {
		t.Error(err)
	}
}

// foreign stores the bytes record under a key of shared. Tests use foreign for bytes that refill cannot read.
func foreign(t *testing.T, shared driver.Store, key string, record []byte) {
	t.Helper()
	ctx := t.Context()
	if r, err := shared.Acquire(ctx, acquireRequest(t, shared, key, "x#1")); err != nil || r.State != driver.Acquired {
		t.Fatalf("acquire of %q: got %+v, %v; want a free refill lock", key, r, err)
	}
	p := driver.PublishRequest{Key: key, Token: "x#1", Record: record, Keep: time.Hour}
	if _, err := shared.Publish(ctx, p); err != nil {
		t.Fatal(err)
	}
}

// events counts the events that Config.OnEvent receives.
type events struct {
	mu    sync.Mutex
	count map[any]int // by EventKind; an EventGet also counts under its Outcome
	last  map[any]refill.Event
}

func (e *events) on(ev refill.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.count == nil {
		e.count, e.last = map[any]int{}, map[any]refill.Event{}
	}
	kinds := []any{ev.Kind}
	if ev.Kind == refill.EventGet {
		kinds = append(kinds, ev.Outcome)
	}
	for _, k := range kinds {
		e.count[k]++
		e.last[k] = ev
	}
}

// of returns the number of events of a kind, or of Gets with an outcome.
func (e *events) of(k any) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.count[k]
}

type panicky struct{ S string }

func (panicky) MarshalJSON() ([]byte, error) { panic("in the codec") }

// invalidationsOfRed are the four ways to invalidate or expire the value of the key red:1. Loaders that load with
// db.tagged give this value the tag red.
var invalidationsOfRed = map[string]func(context.Context, *refill.Loader[string]) error{
	"Invalidate":    func(ctx context.Context, l *refill.Loader[string]) error { return l.Invalidate(ctx, "red:1") },
	"Expire":        func(ctx context.Context, l *refill.Loader[string]) error { return l.Expire(ctx, "red:1") },
	"InvalidateTag": func(ctx context.Context, l *refill.Loader[string]) error { return l.InvalidateTag(ctx, "red") },
	"ExpireTag":     func(ctx context.Context, l *refill.Loader[string]) error { return l.ExpireTag(ctx, "red") },
}
