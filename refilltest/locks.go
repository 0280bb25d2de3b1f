package refilltest

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/refill-go/refill/driver"
)

// LockHarness tells [TestLocks] how to make the lock services that it tests.
type LockHarness struct {
	// World makes an empty place and two nodes that share it, see [StoreHarness].
	World func(t testing.TB) LockWorld

	// Bubble runs each case inside testing/synctest, see [StoreHarness].
	Bubble bool

	// Short is the ttl of a lock whose end a case waits for. Some eight cases wait for such an end. Short is at least
	// 200 ms, and not shorter than the shortest ttl that the service grants. Default 400 ms.
	Short time.Duration

	// NoFence says that the service has no fencing tokens: LockResult.Fence is always 0.
	NoFence bool
}

// LockWorld is one place that two nodes share.
type LockWorld struct {
	// A and B are two nodes over the same place, see [StoreWorld].
	A, B driver.Locks

	// Pass lets time pass for the service. Nil means time.Sleep. If Pass is set, the suite assumes that the service's
	// time does not pass by itself. It then skips the cases in which time must pass for both the service and the
	// process.
	Pass func(d time.Duration)

	// Delete removes the lock of key, whichever token holds the lock, as an operator would. Nil if the place does not
	// allow this.
	Delete func(key string)

	// Silence and Break are described at [StoreWorld].
	Silence func(silent bool)
	Break   func()
}

// TestLocks runs the suite: one subtest per rule of [driver.Locks], used directly and through a [refill.Locker].
func TestLocks(t *testing.T, h LockHarness) {
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
	return slices.Concat(holderCases, watchCases, lockRaceCases, lockerCases)
}

func (c lockCase) test(t testing.TB, h LockHarness) {
	explain(t, c.explanation)
	w := h.World(t)
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	t.Cleanup(cancel)
	c.run(&locks{TB: t, LockWorld: w, clock: newClock(h.Short, w.Pass), ctx: ctx, noFence: h.NoFence})
}

// locks is the world of a case. Its methods are the steps that cases consist of. A step that does not do what the case
// wants ends the case.
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

func (l *locks) try(d driver.Locks, key, token string, ttl time.Duration) driver.LockResult {
	l.Helper()
	s, err := d.TryLock(l.ctx, key, token, ttl)
	l.ok(err, "TryLock(%q, %s)", key, token)
	return s
}

// win takes the lock, which must be free, and returns its fence.
func (l *locks) win(d driver.Locks, key, token string, ttl time.Duration) uint64 {
	l.Helper()
	s := l.try(d, key, token, ttl)
	if !s.Won {
		l.Fatalf("TryLock(%q, %s) = %+v, want Won: the lock is free", key, token, s)
	}
	if l.noFence != (s.Fence == 0) {
		l.Fatalf("TryLock(%q, %s) = %+v, but LockHarness.NoFence is %v", key, token, s, l.noFence)
	}
	return s.Fence
}

// lose tries to take the lock. It demands that the lock is held, with a remaining life of at most ttl and not much
// less.
func (l *locks) lose(d driver.Locks, key, token string, ttl time.Duration) {
	l.Helper()
	s := l.try(d, key, token, long)
	if s.Won || s.Left <= 0 || s.Left > ttl || s.Left <= ttl-callTime {
		l.Fatalf("TryLock(%q, %s) = %+v, want not Won, and Left at most %v and not much less", key, token, s, ttl)
	}
}

func (l *locks) extend(d driver.Locks, key, token string, ttl time.Duration, want bool) {
	l.Helper()
	mine, err := d.Extend(l.ctx, key, token, ttl)
	l.ok(err, "Extend(%q, %s)", key, token)
	if mine != want {
		l.Fatalf("Extend(%q, %s) = %v, want %v", key, token, mine, want)
	}
}

func (l *locks) unlock(d driver.Locks, key, token string, want bool) {
	l.Helper()
	mine, err := d.Unlock(l.ctx, key, token)
	l.ok(err, "Unlock(%q, %s)", key, token)
	if mine != want {
		l.Fatalf("Unlock(%q, %s) = %v, want %v", key, token, mine, want)
	}
}

// takeOver waits until a short lock has ended by itself and token has taken the lock. It returns the fence of token.
func (l *locks) takeOver(d driver.Locks, key, token string) (fence uint64) {
	l.Helper()
	won := func() bool {
		s := l.try(d, key, token, long)
		fence = s.Fence
		return s.Won
	}
	if !l.runOut(won) {
		l.Fatalf("TryLock(%q, %s) is not Won long after the end of the lock of %v", key, token, l.short)
	}
	return fence
}

// wantLarger demands that a fence is larger than the fence of the holder before.
func (l *locks) wantLarger(fence, before uint64) {
	l.Helper()
	if !l.noFence && fence <= before {
		l.Fatalf("fence %d after %d, want it larger", fence, before)
	}
}

var holderCases = []lockCase{
	{
		"check",
		`Check returns what is wrong with the configuration of the service. A service under test must have nothing wrong. In
production refill.NewLocker reports the error.`,
		func(l *locks) {
			l.ok(l.A.Check(), "Check of A")
			l.ok(l.B.Check(), "Check of B")
		},
	},
	{
		"exclusive",
		`TryLock takes the lock if it is free. Otherwise it returns the remaining life of the holder's lock. Each key has
its own lock. A lock exists to prevent two holders. With a wrong Left, waiters poll, or wait for a holder that has
died.`,
		lockExclusive,
	},
	{
		"own-token",
		`A lock that belongs to the token already counts as won, with the same fence: the reply to an earlier try was lost,
and the client sent it again. Otherwise the holder waits for itself until its lock ends.`,
		lockOwnToken,
	},
	{
		"ends",
		`The lock ends by itself, and then its holder can neither extend nor free it. Otherwise a holder that died locks
the key for ever, or a late holder extends or frees the lock of the next one.`,
		lockEnds,
	},
	{
		"fence-rises",
		`The fence is larger than that of every earlier holder of the key, on any node, after Unlock and after the end of a
lock. If the counter starts again, the protected resource rejects the new holder and accepts the frozen one.`,
		lockFenceRises,
	},
	{
		"extend",
		`Extend sets the remaining life of the lock to ttl if the lock belongs to the token. Otherwise work that takes longer
than the lock's ttl loses its lock.`,
		lockExtend,
	},
	{
		"extend-not-mine",
		`Extend does not change the lock of another token, and never creates a lock. Without that check, a node that has
lost its lock extends the lock of a holder that has died. If Extend creates a lock, a key without a holder is locked
(Redisson issue 7272).`,
		lockExtendNotMine,
	},
	{
		"unlock-not-mine",
		`Unlock frees the lock only if it belongs to the token. Otherwise the late Unlock of a holder whose lock has ended
frees the lock of the next holder, and a third gets it at the same time.`,
		lockUnlockNotMine,
	},
	{
		"keys-apart",
		`The lock of one key is never that of another key, whatever characters the keys contain. Otherwise work on one thing
waits for unrelated work, or one Unlock frees the lock of another.`,
		lockKeysApart,
	},
	{
		"ctx-ended",
		`A call whose ctx has already ended returns an error and changes nothing. Its caller has left, so a lock that it takes
has no holder.`,
		lockCtxEnded,
	},
	{
		"silent-server",
		`Every call returns when its ctx ends, even if the server does not answer. If a renewal hangs, the lock ends and its
holder does not learn of it.`,
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
			l.Fatalf("repeated TryLock returns fence %d, want %d as before", again, fence)
		}
	}
	l.lose(l.B, key, "b#1", long)
	l.unlock(l.A, key, "a#1", true) // one Unlock is enough, however often TryLock has won
	l.wantLarger(l.win(l.B, key, "b#1", long), fence)
}

func lockEnds(l *locks) {
	l.win(l.A, key, "a#1", l.short)
	l.takeOver(l.B, key, "b#1")
	l.extend(l.A, key, "a#1", long, false)
	l.unlock(l.A, key, "a#1", false)
	l.lose(l.A, key, "a#2", long)
	l.extend(l.B, key, "b#1", long, true)
}

func lockFenceRises(l *locks) {
	var last uint64
	for i, d := range []driver.Locks{l.A, l.B, l.A, l.A, l.B, l.B} {
		token := fmt.Sprintf("n#%d", i)
		fence := l.win(d, key, token, long)
		l.wantLarger(fence, last)
		last = fence
		l.unlock(d, key, token, true)
	}
	l.wantLarger(l.win(l.A, key, "a#1", l.short), last)
	last = l.win(l.A, key, "a#1", l.short)
	l.wantLarger(l.takeOver(l.B, key, "b#1"), last)
}

func lockExtend(l *locks) {
	l.win(l.A, key, "a#1", l.short)
	l.extend(l.A, key, "a#1", long, true)
	l.lose(l.B, key, "b#1", long)
	l.pass(2 * l.short)
	l.lose(l.B, key, "b#1", long)
	l.extend(l.A, key, "a#1", l.short, true) // the end can also move closer
	l.takeOver(l.B, key, "b#1")
}

func lockExtendNotMine(l *locks) {
	l.extend(l.A, key, "a#1", long, false) // a free lock
	l.win(l.A, key, "a#2", l.short)
	l.extend(l.B, key, "b#1", long, false)
	l.takeOver(l.B, key, "b#2")
	l.unlock(l.B, key, "b#2", true)
	l.extend(l.B, key, "b#2", long, false)
	l.win(l.A, key, "a#3", long)
}

func lockUnlockNotMine(l *locks) {
	l.unlock(l.A, key, "a#0", false) // a free lock
	l.win(l.A, key, "a#1", l.short)
	l.takeOver(l.B, key, "b#1")
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

func lockCtxEnded(l *locks) {
	l.win(l.A, key, "a#1", long)
	ctx, cancel := context.WithCancel(l.ctx)
	cancel()
	for _, c := range l.calls(key, "product:43") {
		if err := c.do(ctx); err == nil {
			l.Fatalf("%s with a ctx that has ended returns no error", c.name)
		}
	}
	l.win(l.B, "product:43", "b#1", long)
	l.lose(l.B, key, "b#1", long)
	l.extend(l.A, key, "a#1", long, true)
}

// calls returns one call of the Locks of LockWorld.A for each method. TryLock takes the lock of the key free, with the
// token a#2. The other methods are about the lock of key, which the token a#1 holds.
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
	silent := fault(l, l.Silence)
	silent(true)
	for _, c := range l.calls(key, "product:43") {
		wantGivesUp(l, l.ctx, c)
	}
	silent(false)
	answers := func() bool { _, err := l.A.Extend(l.ctx, key, "a#1", long); return err == nil }
	for deadline := time.Now().Add(patience); !answers(); <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			l.Fatalf("Extend still returns errors %v after the server answers again", patience)
		}
	}
	l.win(l.A, "product:44", "a#3", long)
}
