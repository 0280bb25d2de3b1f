package refilltest

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

// LockHarness tells [TestLockDriver] how to make what it tests.
type LockHarness struct {
	// World makes an empty place and two nodes over it, see [StoreHarness].
	World func(t testing.TB) LockWorld

	// Bubble runs each case inside testing/synctest, see [StoreHarness].
	Bubble bool

	// Short is the lease that the cases about its end wait for, some eight of them: at least 200 ms, and the least that the
	// store grants. Default 400 ms.
	Short time.Duration

	// NoFence says that the store has no fencing token, so that LockState.Fence is 0.
	NoFence bool
}

// LockWorld is one place that two nodes share.
type LockWorld struct {
	// A and B are two nodes over the same place.
	A, B refill.LockDriver

	// Pass lets time pass for the store. Nil is time.Sleep. Where it is set, time is taken not to pass by itself, and what
	// needs both the store's time and the process's is skipped.
	Pass func(d time.Duration)

	// Delete, where the place allows it, takes the lock of key away from whoever holds it, as an operator would.
	Delete func(key string)

	// Silence and Break, where the place allows them, are those of [StoreWorld].
	Silence func(silent bool)
	Break   func()
}

// TestLockDriver runs the suite: one subtest per rule of [refill.LockDriver], by itself and under a [refill.Locker].
func TestLockDriver(t *testing.T, h LockHarness) {
	for _, c := range lockCases() {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, h.Bubble, func(t testing.TB) { c.test(t, h) })
		})
	}
}

type lockCase struct {
	name        string
	explanation string
	run         func(l *locks)
}

func lockCases() []lockCase {
	return slices.Concat(driverCases, watchCases, lockRaceCases, lockerCases)
}

func (c lockCase) test(t testing.TB, h LockHarness) {
	explain(t, c.explanation)
	w := h.World(t)
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	t.Cleanup(cancel)
	c.run(&locks{TB: t, LockWorld: w, clock: newClock(h.Short, w.Pass), ctx: ctx, noFence: h.NoFence})
}

// locks is the world of a case, with the words in which cases are told. A word that does not come true ends the case.
type locks struct {
	testing.TB
	LockWorld
	clock
	ctx     context.Context
	noFence bool
}

func (l *locks) ok(err error, call string, args ...any) {
	l.Helper()
	if err != nil {
		l.Fatalf(call+": %v", append(args, err)...)
	}
}

func (l *locks) try(d refill.LockDriver, key, token string, ttl time.Duration) refill.LockState {
	l.Helper()
	s, err := d.TryLock(l.ctx, key, token, ttl)
	l.ok(err, "TryLock(%q, %s)", key, token)
	return s
}

// win takes the lock, which has to be free, and returns its fence.
func (l *locks) win(d refill.LockDriver, key, token string, ttl time.Duration) uint64 {
	l.Helper()
	s := l.try(d, key, token, ttl)
	if !s.Won {
		l.Fatalf("TryLock(%q, %s) = %+v, want it won: the lock is free", key, token, s)
	}
	if l.noFence != (s.Fence == 0) {
		l.Fatalf("TryLock(%q, %s) = %+v, and LockHarness.NoFence is %v", key, token, s, l.noFence)
	}
	return s.Fence
}

// lose finds the lock held for at most ttl.
func (l *locks) lose(d refill.LockDriver, key, token string, ttl time.Duration) {
	l.Helper()
	s := l.try(d, key, token, long)
	if s.Won || s.Left <= 0 || s.Left > ttl || s.Left <= ttl-callTime {
		l.Fatalf("TryLock(%q, %s) = %+v, want it lost, and Left at most %v and not much less", key, token, s, ttl)
	}
}

func (l *locks) extend(d refill.LockDriver, key, token string, ttl time.Duration, want bool) {
	l.Helper()
	mine, err := d.Extend(l.ctx, key, token, ttl)
	l.ok(err, "Extend(%q, %s)", key, token)
	if mine != want {
		l.Fatalf("Extend(%q, %s) = %v, want %v", key, token, mine, want)
	}
}

func (l *locks) unlock(d refill.LockDriver, key, token string, want bool) {
	l.Helper()
	mine, err := d.Unlock(l.ctx, key, token)
	l.ok(err, "Unlock(%q, %s)", key, token)
	if mine != want {
		l.Fatalf("Unlock(%q, %s) = %v, want %v", key, token, mine, want)
	}
}

// ended waits for a short lock to end by itself; token takes it then.
func (l *locks) ended(d refill.LockDriver, key, token string) (fence uint64) {
	l.Helper()
	won := func() bool {
		s := l.try(d, key, token, long)
		fence = s.Fence
		return s.Won
	}
	if !l.ends(won) {
		l.Fatalf("TryLock(%q, %s) is not won although the lock of %v is long over", key, token, l.short)
	}
	return fence
}

// after demands that a fence is larger than that of the holder before.
func (l *locks) after(fence, before uint64) {
	l.Helper()
	if !l.noFence && fence <= before {
		l.Fatalf("fence %d after %d, want it larger", fence, before)
	}
}

var driverCases = []lockCase{
	{
		"check",
		`Check says what is wrong with the driver as it was set up: nothing, or the suite has nothing to test.`,
		func(l *locks) {
			l.ok(l.A.Check(), "Check of A")
			l.ok(l.B.Check(), "Check of B")
		},
	},
	{
		"exclusive",
		`TryLock takes the lock if it is free, and says otherwise how long the holder's lease has to live. Each key has its own.
Two holders are what a lock is there to prevent; a wrong Left makes those who wait poll, or wait behind a dead holder.`,
		lockExclusive,
	},
	{
		"own-token",
		`The token's own lock counts as taken, with the same fence: the reply to an earlier try was lost and the client sent
it again. Otherwise the holder waits for itself until its lease is over.`,
		lockOwnToken,
	},
	{
		"ends",
		`The lock ends by itself, and then its holder can neither extend nor free it. Otherwise a dead holder locks for ever
(seeds row 2), or a late one touches what is another's by now.`,
		lockEnds,
	},
	{
		"fence-rises",
		`The fence is larger than that of every earlier holder of the key, on whatever node, after Unlock and after the end of
a lease. A counter that starts again lets the resource refuse the new holder and believe the frozen one.`,
		lockFenceRises,
	},
	{
		"extend",
		`Extend lets the lock live for ttl from now if it is the token's. Work that is longer than the lease depends on it.`,
		lockExtend,
	},
	{
		"extend-not-mine",
		`Extend changes nothing of another's lock, and never creates one. An extension without the owner check prolongs a dead
holder's lease; one that creates locks a key whose holder has gone (Redisson 7272).`,
		lockExtendNotMine,
	},
	{
		"unlock-not-mine",
		`Unlock frees the lock only if it is the token's. A late Unlock of a holder whose lease ran out must not free the next
one's: a third would come in (seeds row 5).`,
		lockUnlockNotMine,
	},
	{
		"keys-apart",
		`The lock of one key is never that of another, whatever characters the keys hold.`,
		lockKeysApart,
	},
	{
		"ctx-over",
		`A call whose ctx is over already returns an error and changes nothing.`,
		lockCtxOver,
	},
	{
		"silent-server",
		`Every call returns when its ctx ends, also when the server does not answer. A renewal that hangs lets the lock end
without its holder being told.`,
		lockSilentServer,
	},
}

func lockExclusive(l *locks) {
	l.win(l.A, key, "a#1", long)
	l.lose(l.A, key, "a#2", long)
	l.lose(l.B, key, "b#1", long)
	l.win(l.B, "product:43", "b#2", long)
	l.win(l.B, "user:42", "b#3", long)
	l.unlock(l.A, key, "a#1", true)
	l.win(l.B, key, "b#1", long)
	l.lose(l.A, key, "a#3", long)
}

func lockOwnToken(l *locks) {
	fence := l.win(l.A, key, "a#1", long)
	for range 2 {
		if again := l.win(l.A, key, "a#1", long); again != fence {
			l.Fatalf("fence %d of the token's own lock, taken before with fence %d", again, fence)
		}
	}
	l.lose(l.B, key, "b#1", long)
	l.unlock(l.A, key, "a#1", true) // once is enough, it is not counted
	l.after(l.win(l.B, key, "b#1", long), fence)
}

func lockEnds(l *locks) {
	l.win(l.A, key, "a#1", l.short)
	l.ended(l.B, key, "b#1")
	l.extend(l.A, key, "a#1", long, false)
	l.unlock(l.A, key, "a#1", false)
	l.lose(l.A, key, "a#2", long)
	l.extend(l.B, key, "b#1", long, true)
}

func lockFenceRises(l *locks) {
	var last uint64
	for i, d := range []refill.LockDriver{l.A, l.B, l.A, l.A, l.B, l.B} {
		token := fmt.Sprintf("n#%d", i)
		fence := l.win(d, key, token, long)
		l.after(fence, last)
		last = fence
		l.unlock(d, key, token, true)
	}
	l.after(l.win(l.A, key, "a#1", l.short), last)
	last = l.win(l.A, key, "a#1", l.short)
	l.after(l.ended(l.B, key, "b#1"), last)
}

func lockExtend(l *locks) {
	l.win(l.A, key, "a#1", l.short)
	l.extend(l.A, key, "a#1", long, true)
	l.lose(l.B, key, "b#1", long)
	l.pass(2 * l.short)
	l.lose(l.B, key, "b#1", long)
	l.extend(l.A, key, "a#1", l.short, true) // from now: it can also come nearer
	l.ended(l.B, key, "b#1")
}

func lockExtendNotMine(l *locks) {
	l.extend(l.A, key, "a#1", long, false) // nobody's
	l.win(l.A, key, "a#2", l.short)
	l.extend(l.B, key, "b#1", long, false)
	l.ended(l.B, key, "b#2")
	l.unlock(l.B, key, "b#2", true)
	l.extend(l.B, key, "b#2", long, false)
	l.win(l.A, key, "a#3", long)
}

func lockUnlockNotMine(l *locks) {
	l.unlock(l.A, key, "a#0", false) // nobody's
	l.win(l.A, key, "a#1", l.short)
	l.ended(l.B, key, "b#1")
	l.unlock(l.A, key, "a#1", false)
	l.lose(l.A, key, "a#2", long)
	l.unlock(l.B, key, "b#1", true)
	l.unlock(l.B, key, "b#1", false)
	l.win(l.A, key, "a#3", long)
	l.unlock(l.B, key, "b#1", false)
	l.lose(l.B, key, "b#2", long)
}

func lockKeysApart(l *locks) {
	keys := oddKeys()
	token := func(i int) string { return fmt.Sprintf("a#%d", i) }
	for i, k := range keys {
		l.win(l.A, k, token(i), long)
	}
	for i, k := range keys {
		l.extend(l.B, k, token(i), long, true)
		if i > 0 {
			l.extend(l.B, k, token(i-1), long, false)
		}
	}
	for i, k := range keys {
		l.unlock(l.A, k, token(i), true)
		l.win(l.B, k, "b#1", long)
	}
}

func lockCtxOver(l *locks) {
	l.win(l.A, key, "a#1", long)
	ctx, cancel := context.WithCancel(l.ctx)
	cancel()
	for _, c := range l.calls(key, "product:43") {
		if err := c.do(ctx); err == nil {
			l.Fatalf("%s with a ctx that is over gives no error", c.name)
		}
	}
	l.win(l.B, "product:43", "b#1", long)
	l.lose(l.B, key, "b#1", long)
	l.extend(l.A, key, "a#1", long, true)
}

// calls are all calls of A: about key by the token a#1, and for the lock of free by a#2.
func (l *locks) calls(key, free string) []call {
	return []call{
		{"TryLock", func(ctx context.Context) error { _, err := l.A.TryLock(ctx, free, "a#2", long); return err }},
		{"Extend", func(ctx context.Context) error { _, err := l.A.Extend(ctx, key, "a#1", long); return err }},
		{"Unlock", func(ctx context.Context) error { _, err := l.A.Unlock(ctx, key, "a#1"); return err }},
	}
}

func lockSilentServer(l *locks) {
	needs(l, "LockWorld.Silence", l.Silence != nil)
	l.win(l.A, key, "a#1", long)
	silent := undone(l, l.Silence)
	silent(true)
	for _, c := range l.calls(key, "product:43") {
		giveUp(l, l.ctx, c)
	}
	silent(false)
	answers := func() bool { _, err := l.A.Extend(l.ctx, key, "a#1", long); return err == nil }
	for deadline := time.Now().Add(patience); !answers(); <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			l.Fatalf("Extend gives errors %v after the server answers again", patience)
		}
	}
	l.win(l.A, "product:44", "a#3", long)
}
