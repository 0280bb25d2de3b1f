package refilltest

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// mutant names a flaw of a place, and the cases that must find this flaw. Other cases may find the flaw as well.
type mutant struct{ flaw, foundBy string }

// storeMutants break the rules of driver.Store.
var storeMutants = []mutant{
	{"check", "check"},
	{"get-empty", "get-absent"},
	{"get-lease", "get-absent"},
	{"get-own-node", "get-bytes"},
	{"get-text", "get-bytes"},
	{"get-shares", "get-bytes"},
	{"publish-eats", "get-bytes"},
	{"publish-cuts", "get-large"},
	{"getmany-sorted", "getmany-order"},
	{"getmany-skips", "getmany-order"},
	{"getmany-once", "getmany-order"},
	{"getmany-empty", "getmany-order"},
	{"getmany-decodes", "getmany-foreign"},
	{"getmany-garbled-error", "getmany-foreign"},
	{"keep-endless", "keep-ends"},
	{"keep-short", "keep-ends"},
	{"expire-drops-end", "keep-ends"},
	{"keys-fold", "keys-apart"},
	{"keys-trim", "keys-apart"},
	{"keys-suffix", "keys-apart"},
	{"locks-are-leases", "locks-apart"},

	{"lease-shared", "acquire-exclusive race-one-winner"},
	{"lease-per-node", "acquire-exclusive"},
	{"holder-unknown", "acquire-exclusive"},
	{"acquire-no-claim", "acquire-takes-lease-and-claim"},
	{"acquire-try-endless", "acquire-takes-lease-and-claim"},
	{"acquire-ttls-swapped", "acquire-takes-lease-and-claim lease-ends claim-ends"},
	{"acquire-replay-revives", "acquire-replayed"},
	{"acquire-replay-moves-claim", "acquire-replayed"},
	{"acquire-replay-wrong-now", "acquire-replayed"},
	{"own-token-lost", "acquire-own-token"},
	{"own-token-once", "acquire-own-token"},
	{"left-missing", "acquire-left"},
	{"left-not-forced", "acquire-left"},
	{"left-unit", "acquire-left"},
	{"left-of-requester", "acquire-left"},
	{"held-lengthens", "acquire-left"},
	{"held-takes-claim", "acquire-held"},
	{"held-drops-claim", "acquire-held"},
	{"held-frees-lease", "acquire-held"},
	{"acquire-always-changed", "acquire-seen"},
	{"acquire-absent-changed", "acquire-seen"},
	{"acquire-never-changed", "acquire-changed"},
	{"acquire-seen-prefix", "acquire-changed"},
	{"changed-takes-lease", "acquire-changed acquire-changed-before-held"},
	{"changed-announces-always", "acquire-changed acquire-changed-before-held subscribe-nothing-freed"},
	{"changed-no-record", "acquire-changed get-large"},
	{"changed-frees-any", "acquire-changed-before-held"},
	{"held-before-changed", "acquire-changed-before-held"},
	{"force-held-before-changed", "acquire-changed-before-held"},
	{"changed-keeps-lease", "acquire-changed-frees-lease"},
	{"changed-silent", "acquire-changed-frees-lease"},
	{"acquire-foreign", "acquire-foreign"},
	{"acquire-foreign-error", "acquire-foreign"},
	{"clock-other", "acquire-clock expire-marks-once"},
	{"acquire-clock-back", "acquire-clock"},

	{"lease-endless", "lease-ends"},
	{"acquire-keeps-old-claim", "lease-taken-over"},
	{"publish-needs-lease", "lease-ended-claim-valid"},
	{"claim-endless", "claim-ends"},

	{"renew-idle", "renew-extends"},
	{"renew-without-claim", "renew-needs-lease-and-claim"},
	{"renew-without-lease", "renew-needs-lease-and-claim"},
	{"renew-creates", "renew-never-creates"},
	{"renew-any", "renew-not-mine"},
	{"renew-none-error", "renew-many"},
	{"renew-only-first", "renew-many"},
	{"renew-all-or-none", "renew-many"},
	{"renew-reversed", "renew-many"},

	{"look-takes-lease", "look-takes-nothing"},
	{"look-takes-claim", "look-takes-nothing"},
	{"look-own-free", "look-held"},
	{"look-no-left", "look-held"},
	{"look-not-noted", "look-noted"},
	{"look-ignores-record", "look-changed"},
	{"look-frees-lease", "look-changed"},
	{"look-ignores-back-off", "look-failure"},
	{"look-eats-note", "look-failure"},
	{"look-no-note", "look-failure"},

	{"waiter-not-noted", "publish-announces-if-awaited"},
	{"waiter-not-noted-force", "publish-announces-if-awaited"},
	{"waiter-lost-by-repeat", "lease-stays-awaited"},
	{"waiter-lost-by-renewal", "lease-stays-awaited"},
	{"silent-after-lease-end", "publish-after-lease-end publish-lease-taken"},

	{"awaited-in-holder", "acquire-awaited"},
	{"awaited-blocks-acquire", "acquire-awaited lease-stays-awaited"},
	{"awaited-blocks-changed", "acquire-awaited"},
	{"awaited-endless", "lease-ends-awaited"},
	{"awaited-blocks-renew", "renew-awaited"},
	{"awaited-blocks-publish", "publish-awaited"},
	{"awaited-blocks-rejection", "publish-awaited"},
	{"awaited-blocks-fail", "fail-awaited"},
	{"awaited-blocks-release", "release-awaited"},

	{"publish-without-claim", "publish-needs-claim publish-rejected lease-taken-over race-invalidate"},
	{"rejected-keeps-lease", "publish-needs-claim"},
	{"rejected-silent", "publish-needs-claim"},
	{"rejected-frees-all", "publish-rejected lease-taken-over"},
	{"rejected-announces-always", "publish-rejected subscribe-nothing-freed"},
	{"publish-keeps-lease", "publish-frees"},
	{"publish-keeps-claim", "publish-repeated"},
	{"publish-frees-own-lease", "publish-lease-taken"},
	{"publish-repeated-rejected", "publish-repeated"},

	{"fail-no-back-off", "fail-leaves-back-off"},
	{"back-off-ignored", "fail-leaves-back-off"},
	{"back-off-holder", "fail-leaves-back-off"},
	{"awaited-in-failure", "fail-leaves-back-off"},
	{"fail-keeps-claim", "fail-leaves-back-off fail-lease-or-claim"},
	{"fail-text", "fail-text"},
	{"fail-endless", "back-off-ends"},
	{"fail-zero-keeps-lease", "fail-no-back-off"},
	{"fail-silent", "fail-no-back-off subscribe-in-order"},
	{"fail-any", "fail-not-mine lease-taken-over"},
	{"fail-needs-both", "fail-lease-or-claim"},
	{"fail-needs-claim", "fail-lease-or-claim"},
	{"force-obeys-back-off", "force-ignores-back-off"},
	{"force-steals", "force-ignores-back-off acquire-left"},
	{"fail-takes-lease", "fail-lease-taken"},
	{"fail-drops-value", "fail-keeps-value"},
	{"force-says-back-off", "force-ignores-back-off"},

	{"note-blocks", "note-leaves-lease-free"},
	{"note-blocks-try", "note-leaves-lease-free note-replaced"},
	{"note-unsaid", "note-leaves-lease-free"},
	{"note-text", "note-text"},
	{"note-endless", "note-ends"},
	{"note-zero", "note-ends"},
	{"note-stays", "note-once"},
	{"note-any", "note-keeps-lease"},
	{"note-takes-lease", "note-keeps-lease"},
	{"note-keeps-first", "note-replaced"},
	{"invalidate-keeps-note", "note-ended-by-invalidate"},
	{"expire-keeps-note", "note-ended-by-invalidate"},
	{"drop-keeps-value", "fail-drops-value"},
	{"drop-silent", "fail-drops-value"},
	{"drop-late", "fail-drops-value"},
	{"drop-any", "fail-drops-own"},

	{"release-keeps-claim", "release-frees release-not-mine"},
	{"release-silent", "release-frees publish-needs-claim"},
	{"release-announces-always", "release-frees subscribe-nothing-freed"},
	{"release-any", "release-not-mine lease-taken-over"},
	{"release-by-claim", "release-lease-taken"},
	{"release-needs-lease", "release-not-mine"},
	{"release-needs-claim", "release-frees"},

	{"invalidate-keeps-value", "invalidate-deletes"},
	{"invalidate-keeps-lease", "invalidate-deletes"},
	{"invalidate-keeps-claim", "invalidate-deletes race-invalidate"},
	{"invalidate-keeps-back-off", "invalidate-ends-back-off"},
	{"invalidate-silent", "invalidate-many subscribe-in-order"},
	{"expire-keeps-lease", "expire-rejects-loads"},
	{"expire-keeps-claim", "expire-rejects-loads race-invalidate"},
	{"expire-keeps-back-off", "invalidate-ends-back-off"},
	{"expire-moves", "expire-marks-once"},
	{"expire-rewrites", "expire-marks-once"},
	{"expire-clock", "expire-marks-once"},
	{"expire-deletes", "expire-marks-once expire-rejects-loads"},
	{"expire-keeps-foreign", "expire-foreign"},
	{"expire-strict", "expire-foreign"},
	{"only-first-key", "invalidate-many"},
	{"one-announcement", "invalidate-many"},
	{"no-keys-error", "invalidate-many"},

	{"tags-sorted", "tags-unknown"},
	{"tags-always-known", "tags-unknown"},
	{"ensure-no-reach", "ensure-makes-known"},
	{"ensure-first", "ensure-makes-known"},
	{"ensure-announces", "ensure-makes-known"},
	{"ensure-overwrites", "ensure-keeps"},
	{"ensure-shortens", "ensure-keeps"},
	{"ensure-idle", "ensure-keeps"},
	{"tag-silent", "tag-invalidate tag-expire"},
	{"tag-only-first", "tag-invalidate tag-expire"},
	{"tag-only-once", "tag-invalidate tag-expire"},
	{"tag-changes-all", "tag-invalidate tag-expire"},
	{"tag-rounds", "tag-invalidate tag-expire"},
	{"tag-clock", "tag-invalidate tag-expire"},
	{"tag-announcement-no-at", "tag-invalidate tag-expire"},
	{"tag-announcement-no-token", "tag-invalidate tag-expire"},
	{"tag-announcement-as-key", "tag-invalidate tag-expire"},
	{"tag-invalidate-forgets", "tag-moments-independent"},
	{"tag-expire-invalidates", "tag-moments-independent"},
	{"tag-expire-revives", "tag-moments-independent"},
	{"tag-shortens", "tag-keeps-longer-life"},
	{"tag-keeps-end", "tag-keeps-longer-life"},
	{"tag-deletes-value", "tag-is-not-a-key"},
	{"tag-deletes-claim", "tag-is-not-a-key"},
	{"invalidate-drops-tag", "tag-is-not-a-key"},
	{"tags-fold", "tags-apart"},
	{"tag-endless", "tag-state-ends"},
	{"tags-own-node", "tags-agree"},
	{"tag-clock-back", "tags-agree"},
	{"race-ensure", "race-tags"},
	{"race-tag-change", "race-tags"},

	{"no-subscribed", "subscribe-in-order"},
	{"announce-no-replaced", "subscribe-in-order"},
	{"announce-own-node", "subscribe-in-order"},
	{"announce-first-listener", "subscribe-in-order"},
	{"announce-prefix", "subscribe-names-apart"},
	{"announce-utf8", "subscribe-any-key"},
	{"announce-record-limit", "subscribe-record"},
	{"announce-record-always", "subscribe-record"},
	{"announce-drops", "subscribe-burst"},
	{"announce-reverse", "subscribe-burst"},
	{"stop-at-once", "subscribe-stop"},
	{"stop-leaves-queue", "subscribe-stop"},
	{"stop-all", "subscribe-stop"},

	{"ctx-ignored", "ctx-ended"},
	{"race-acquire", "race-one-winner"},
	{"race-publish", "race-invalidate"},
	{"race-invalidate", "race-invalidate"},
	{"race-expire", "race-invalidate"},

	{"endless-lease-held", "endless-lease"},
	{"garbled-lease-error", "garbled-lease"},
	{"foreign-claim-error", "foreign-claim"},
	{"renew-garbled-error", "foreign-claim"},
	{"garbled-value-error", "garbled-value"},
	{"garbled-expire-error", "garbled-value"},
	{"foreign-tag-error", "foreign-tag-state"},
	{"foreign-tag-known", "foreign-tag-state"},
	{"foreign-tag-endless", "foreign-tag-state"},
	{"full-keeps-lease", "store-full"},
	{"silent-hangs", "silent-server"},
	{"silent-fine", "silent-server"},
	{"break-unreported", "broken-subscription"},
	{"break-no-subscribed", "broken-subscription"},
	{"break-ends-subscription", "broken-subscription"},
}

// lockMutants break the rules of driver.Locks.
var lockMutants = []mutant{
	{"check", "check"},
	{"lock-shared", "exclusive race locker-excludes locker-gives-up"},
	{"lock-left-missing", "exclusive"},
	{"lock-left-long", "exclusive locker-takes-over"},
	{"own-token-lost", "own-token"},
	{"own-token-new-fence", "own-token"},
	{"lock-endless", "ends locker-takes-over"},
	{"fence-restarts", "fence-rises"},
	{"fence-restarts-at-end", "fence-rises"},
	{"fence-constant", "fence-rises race"},
	{"fence-missing", "exclusive"},
	{"extend-idle", "extend locker-renews"},
	{"extend-only-more", "extend"},
	{"extend-any", "extend-not-mine"},
	{"extend-creates", "extend-not-mine"},
	{"extend-blind", "ends extend-not-mine locker-loses"},
	{"unlock-any", "unlock-not-mine ends"},
	{"unlock-says-yes", "unlock-not-mine ends locker-loses"},
	{"unlock-idle", "exclusive"},
	{"keys-fold", "keys-apart"},
	{"ctx-ignored", "ctx-ended"},
	{"wake-none", "watch-wakes locker-wakes"},
	{"wake-one", "watch-wakes"},
	{"wake-own-node", "watch-wakes locker-wakes"},
	{"wake-once", "watch-again"},
	{"watch-stays", "watch-stops"},
	{"watch-stops-all", "watch-stops"},
	{"watch-break-silent", "watch-breaks"},
	{"silent-hangs", "silent-server"},
	{"lock-race", "race"},
}

// A place without a flaw must pass the suite, including the cases that need hooks. The case whose rule a flaw breaks
// must find this flaw. Each case must find at least one flaw, because a case that cannot fail is not a test.
func TestStoreMutants(t *testing.T) {
	TestStore(t, StoreHarness{Bubble: true, World: func(t testing.TB) StoreWorld { return newPlace("").storeWorld(t) }})
	cases := map[string]caseOver{}
	for _, c := range storeCases() {
		cases[c.name] = func(t testing.TB, p *place) { c.test(t, StoreHarness{World: p.storeWorld}) }
	}
	findFlaws(t, cases, storeMutants)
}

func TestLockMutants(t *testing.T) {
	TestLocks(t, LockHarness{Bubble: true, World: func(t testing.TB) LockWorld { return newPlace("").lockWorld(t) }})
	cases := map[string]caseOver{}
	for _, c := range lockCases() {
		cases[c.name] = func(t testing.TB, p *place) { c.test(t, LockHarness{World: p.lockWorld}) }
	}
	findFlaws(t, cases, lockMutants)
}

// caseOver runs one case over a place.
type caseOver func(t testing.TB, p *place)

func findFlaws(t *testing.T, cases map[string]caseOver, mutants []mutant) {
	finds := map[string]bool{}
	for _, m := range mutants {
		t.Run(m.flaw, func(t *testing.T) {
			for name := range strings.FieldsSeq(m.foundBy) {
				finds[name] = true
				if cases[name] == nil {
					t.Fatalf("there is no case %s", name)
				}
				failed, log := fails(t, cases[name], m.flaw)
				for try := 1; !failed && try < 20; try++ { // by chance, a race may show no failure
					failed, log = fails(t, cases[name], m.flaw)
				}
				if !failed {
					t.Errorf("case %s does not find the flaw", name)
				} else if !strings.Contains(log, "the rule: ") {
					t.Errorf("case %s finds the flaw but does not explain the rule", name)
				}
				t.Logf("%s: %s", name, log)
			}
		})
	}
	for name := range cases {
		if !finds[name] {
			t.Errorf("case %s finds no mutant", name)
		}
	}
}

// fails runs a case over a broken place, in a bubble. The case gets a goroutine of its own, because a case that fails
// ends its goroutine.
func fails(t *testing.T, run caseOver, flaw string) (failed bool, log string) {
	synctest.Test(t, func(t *testing.T) {
		r := &recorder{TB: t}
		done := make(chan struct{})
		go func() {
			defer close(done)
			run(r, newPlace(flaw))
		}()
		<-done
		for _, f := range slices.Backward(r.cleanups) {
			f()
		}
		time.Sleep(long) // all goroutines of a bubble must end, also those of a broken store
		failed, log = r.failed, r.log.String()
	})
	return failed, log
}

// recorder is the testing.TB of a case that should fail.
type recorder struct {
	testing.TB
	mu       sync.Mutex
	failed   bool
	log      strings.Builder
	cleanups []func() // used by the goroutine of the case only
}

func (r *recorder) write(failed bool, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = r.failed || failed
	r.log.WriteString(text + "\n")
}

func (r *recorder) Helper()                   {}
func (r *recorder) Cleanup(f func())          { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Logf(f string, a ...any)   { r.write(false, fmt.Sprintf(f, a...)) }
func (r *recorder) Errorf(f string, a ...any) { r.write(true, fmt.Sprintf(f, a...)) }
func (r *recorder) Fatalf(f string, a ...any) { r.write(true, fmt.Sprintf(f, a...)); runtime.Goexit() }
func (r *recorder) Skipf(f string, a ...any)  { r.write(false, fmt.Sprintf(f, a...)); runtime.Goexit() }
func (r *recorder) Failed() bool              { r.mu.Lock(); defer r.mu.Unlock(); return r.failed }
