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

// mutant is a flaw of a place, and the cases that have to find it, whatever others do.
type mutant struct{ flaw, foundBy string }

// storeMutants break the rules of refill.Store.
var storeMutants = []mutant{
	{"check", "check"},
	{"get-empty", "get-absent"},
	{"get-lease", "get-absent"},
	{"get-own-node", "get-bytes"},
	{"get-text", "get-bytes"},
	{"get-shares", "get-bytes"},
	{"publish-eats", "get-bytes"},
	{"publish-cuts", "get-large"},
	{"many-sorted", "getmany-order"},
	{"many-skips", "getmany-order"},
	{"many-once", "getmany-order"},
	{"many-empty", "getmany-order"},
	{"many-decodes", "getmany-foreign"},
	{"many-garbled-error", "getmany-foreign"},
	{"keep-endless", "keep-ends"},
	{"keep-short", "keep-ends"},
	{"expire-drops-end", "keep-ends"},
	{"keys-fold", "keys-apart"},
	{"keys-trim", "keys-apart"},
	{"keys-suffix", "keys-apart"},
	{"locks-are-leases", "locks-apart"},

	{"lease-shared", "begin-exclusive race-one-winner"},
	{"lease-per-node", "begin-exclusive"},
	{"holder-unknown", "begin-exclusive"},
	{"begin-no-claim", "begin-takes-both"},
	{"begin-once-endless", "begin-takes-both"},
	{"begin-ttls-swapped", "begin-takes-both lease-ends claim-ends"},
	{"late-begin-revives", "begin-late"},
	{"begin-again-moves", "begin-late"},
	{"begin-again-lies", "begin-late"},
	{"own-token-lost", "begin-own-token"},
	{"own-token-once", "begin-own-token"},
	{"left-missing", "begin-left"},
	{"left-not-forced", "begin-left"},
	{"left-unit", "begin-left"},
	{"left-of-asker", "begin-left"},
	{"held-lengthens", "begin-left"},
	{"held-takes-claim", "begin-held"},
	{"held-drops-claim", "begin-held"},
	{"held-frees-lease", "begin-held"},
	{"begin-refuses-any", "begin-sees"},
	{"begin-absent-other", "begin-sees"},
	{"begin-unseen", "begin-other"},
	{"begin-seen-prefix", "begin-other"},
	{"begin-other-takes", "begin-other begin-other-first"},
	{"begin-other-loud", "begin-other begin-other-first notes-silence"},
	{"begin-other-no-record", "begin-other get-large"},
	{"begin-other-frees-any", "begin-other-first"},
	{"held-before-other", "begin-other-first"},
	{"force-held-before-other", "begin-other-first"},
	{"begin-other-keeps-lease", "begin-other-gives-back"},
	{"begin-other-silent", "begin-other-gives-back"},
	{"begin-foreign", "begin-foreign"},
	{"begin-foreign-error", "begin-foreign"},
	{"clock-other", "begin-clock expire-marks"},
	{"begin-clock-back", "begin-clock"},

	{"lease-endless", "lease-ends"},
	{"begin-first-claim-stays", "lease-taken-over"},
	{"publish-needs-lease", "lease-over-claim-stands"},
	{"claim-endless", "claim-ends"},

	{"renew-idle", "renew-lengthens"},
	{"renew-without-claim", "renew-needs-both"},
	{"renew-without-lease", "renew-needs-both"},
	{"renew-creates", "renew-never-creates"},
	{"renew-any", "renew-not-mine"},

	{"wait-unknown", "publish-quiet"},
	{"wait-not-forced", "publish-quiet"},
	{"mark-lost-by-repeat", "quiet-after-repeat"},
	{"mark-lost-by-renewal", "quiet-after-repeat"},
	{"quiet-after-lease", "quiet-after-lease publish-before-heir"},

	{"mark-in-holder", "begin-awaited"},
	{"mark-blocks-begin", "begin-awaited quiet-after-repeat"},
	{"mark-blocks-other", "begin-awaited"},
	{"mark-endless", "lease-ends-awaited"},
	{"mark-blocks-renew", "renew-awaited"},
	{"mark-blocks-publish", "publish-awaited"},
	{"mark-blocks-refusal", "publish-awaited"},
	{"mark-blocks-fail", "fail-awaited"},
	{"mark-blocks-release", "release-awaited"},

	{"publish-without-claim", "publish-needs-claim publish-refused lease-taken-over race-void"},
	{"refused-keeps-lease", "publish-needs-claim"},
	{"refused-silent", "publish-needs-claim"},
	{"refused-frees-all", "publish-refused lease-taken-over"},
	{"refused-loud", "publish-refused notes-silence"},
	{"publish-keeps-lease", "publish-frees"},
	{"publish-keeps-claim", "publish-repeated"},
	{"publish-frees-own-lease", "publish-before-heir"},
	{"publish-repeated-refused", "publish-repeated"},

	{"fail-no-back-off", "fail-backs-off"},
	{"back-off-ignored", "fail-backs-off"},
	{"back-off-holder", "fail-backs-off"},
	{"mark-in-failure", "fail-backs-off"},
	{"fail-keeps-claim", "fail-backs-off fail-one-of-two"},
	{"fail-text", "fail-text"},
	{"fail-endless", "fail-ends"},
	{"fail-zero-keeps-lease", "fail-no-back-off"},
	{"fail-silent", "fail-no-back-off notes-in-order"},
	{"fail-any", "fail-not-mine lease-taken-over"},
	{"fail-needs-both", "fail-one-of-two"},
	{"fail-needs-claim", "fail-one-of-two"},
	{"force-ignored", "fail-forced"},
	{"force-steals", "fail-forced begin-left"},
	{"fail-takes-lease", "fail-before-heir"},
	{"fail-drops-value", "fail-keeps-value"},

	{"release-keeps-claim", "release-frees release-each-own"},
	{"release-silent", "release-frees publish-needs-claim"},
	{"release-loud", "release-frees notes-silence"},
	{"release-any", "release-each-own lease-taken-over"},
	{"release-by-claim", "release-before-heir"},
	{"release-needs-lease", "release-each-own"},
	{"release-needs-claim", "release-frees"},

	{"invalidate-keeps-value", "invalidate-clears"},
	{"invalidate-keeps-lease", "invalidate-clears"},
	{"invalidate-keeps-claim", "invalidate-clears race-void"},
	{"invalidate-keeps-back-off", "void-ends-back-off"},
	{"invalidate-silent", "void-many notes-in-order"},
	{"expire-keeps-lease", "expire-voids-loads"},
	{"expire-keeps-claim", "expire-voids-loads race-void"},
	{"expire-keeps-back-off", "void-ends-back-off"},
	{"expire-moves", "expire-marks"},
	{"expire-rewrites", "expire-marks"},
	{"expire-clock", "expire-marks"},
	{"expire-deletes", "expire-marks expire-voids-loads"},
	{"expire-keeps-foreign", "expire-foreign"},
	{"expire-strict", "expire-foreign"},
	{"void-first", "void-many"},
	{"void-one-note", "void-many"},
	{"void-none-error", "void-many"},

	{"tags-sorted", "tags-unknown"},
	{"tags-always-known", "tags-unknown"},
	{"hold-no-reach", "hold-makes-known-with-reach"},
	{"hold-first", "hold-makes-known-with-reach"},
	{"hold-loud", "hold-makes-known-with-reach"},
	{"hold-overwrites", "hold-keeps"},
	{"hold-shortens", "hold-keeps"},
	{"hold-idle", "hold-keeps"},
	{"tag-void-silent", "tag-invalidate tag-expire"},
	{"tag-void-first", "tag-invalidate tag-expire"},
	{"tag-void-once", "tag-invalidate tag-expire"},
	{"tag-voids-all", "tag-invalidate tag-expire"},
	{"tag-rounds", "tag-invalidate tag-expire"},
	{"tag-clock", "tag-invalidate tag-expire"},
	{"tag-note-no-at", "tag-invalidate tag-expire"},
	{"tag-note-no-token", "tag-invalidate tag-expire"},
	{"tag-note-as-key", "tag-invalidate tag-expire"},
	{"tag-invalidate-forgets", "tag-voids-keep-each-other"},
	{"tag-expire-invalidates", "tag-voids-keep-each-other"},
	{"tag-expire-revives", "tag-voids-keep-each-other"},
	{"tag-void-shortens", "tag-voids-keep-life"},
	{"tag-void-keeps-end", "tag-voids-keep-life"},
	{"tag-voids-key", "tag-is-no-key"},
	{"tag-voids-load", "tag-is-no-key"},
	{"invalidate-drops-tag", "tag-is-no-key"},
	{"tags-fold", "tags-apart"},
	{"tag-endless", "tag-mark-ends"},
	{"tags-own-node", "tags-agree"},
	{"tag-clock-back", "tags-agree"},
	{"race-hold", "race-tags"},
	{"race-tag-void", "race-tags"},

	{"note-no-up", "notes-in-order"},
	{"note-no-replaced", "notes-in-order"},
	{"note-own-node", "notes-in-order"},
	{"note-first-ear", "notes-in-order"},
	{"note-prefix", "notes-names-apart"},
	{"note-utf8", "notes-any-key"},
	{"note-record-limit", "notes-record"},
	{"note-record-always", "notes-record"},
	{"note-drops", "notes-burst"},
	{"note-reverse", "notes-burst"},
	{"stop-at-once", "notes-stop"},
	{"stop-leaves-queue", "notes-stop"},
	{"stop-all", "notes-stop"},

	{"ctx-ignored", "ctx-over"},
	{"race-begin", "race-one-winner"},
	{"race-publish", "race-void"},
	{"race-invalidate", "race-void"},
	{"race-expire", "race-void"},

	{"endless-lease-held", "endless-lease"},
	{"garbled-lease-error", "garbled-lease"},
	{"foreign-claim-error", "foreign-claim"},
	{"renew-garbled-error", "foreign-claim"},
	{"garbled-value-error", "garbled-value"},
	{"garbled-expire-error", "garbled-value"},
	{"foreign-tag-error", "foreign-mark"},
	{"foreign-tag-known", "foreign-mark"},
	{"foreign-tag-endless", "foreign-mark"},
	{"full-keeps-lease", "no-room"},
	{"silent-hangs", "silent-server"},
	{"silent-fine", "silent-server"},
	{"break-unheard", "broken-subscription"},
	{"break-no-up", "broken-subscription"},
	{"break-deaf", "broken-subscription"},
}

// lockMutants break the rules of refill.LockDriver.
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
	{"ctx-ignored", "ctx-over"},
	{"wake-nobody", "watch-wakes locker-wakes"},
	{"wake-one", "watch-wakes"},
	{"wake-own-node", "watch-wakes locker-wakes"},
	{"wake-once", "watch-again"},
	{"watch-stays", "watch-stops"},
	{"watch-stops-all", "watch-stops"},
	{"watch-break-silent", "watch-breaks"},
	{"silent-hangs", "silent-server"},
	{"lock-race", "race"},
}

// The suites pass a place without a flaw, hooks included, and find each flaw by the case whose rule it breaks. And each
// case finds some flaw: one that cannot fail is not a test.
func TestStoreMutants(t *testing.T) {
	TestStore(t, StoreHarness{Bubble: true, World: func(t testing.TB) StoreWorld { return newPlace("").storeWorld(t) }})
	cases := map[string]caseOver{}
	for _, c := range storeCases() {
		cases[c.name] = func(t testing.TB, p *place) { c.test(t, StoreHarness{World: p.storeWorld}) }
	}
	findFlaws(t, cases, storeMutants)
}

func TestLockMutants(t *testing.T) {
	TestLockDriver(t, LockHarness{Bubble: true, World: func(t testing.TB) LockWorld { return newPlace("").lockWorld(t) }})
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
				for try := 1; !failed && try < 20; try++ { // now and then a flaw wins its race
					failed, log = fails(t, cases[name], m.flaw)
				}
				if !failed {
					t.Errorf("case %s does not find it", name)
				} else if !strings.Contains(log, "the rule: ") {
					t.Errorf("case %s finds it, but does not explain the rule", name)
				}
				t.Logf("%s: %s", name, log)
			}
		})
	}
	for name := range cases {
		if !finds[name] {
			t.Errorf("no mutant is found by case %s", name)
		}
	}
}

// fails runs a case over a broken place, in a bubble and on a goroutine of its own: a case that fails ends its goroutine.
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
		time.Sleep(long) // a bubble wants its goroutines ended, also those of a broken store
		failed, log = r.failed, r.log.String()
	})
	return failed, log
}

// recorder is the testing.TB of a case that is to fail.
type recorder struct {
	testing.TB
	mu       sync.Mutex
	failed   bool
	log      strings.Builder
	cleanups []func() // of the case's goroutine
}

func (r *recorder) note(failed bool, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = r.failed || failed
	r.log.WriteString(text + "\n")
}

func (r *recorder) Helper()                   {}
func (r *recorder) Cleanup(f func())          { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Logf(f string, a ...any)   { r.note(false, fmt.Sprintf(f, a...)) }
func (r *recorder) Errorf(f string, a ...any) { r.note(true, fmt.Sprintf(f, a...)) }
func (r *recorder) Fatalf(f string, a ...any) { r.note(true, fmt.Sprintf(f, a...)); runtime.Goexit() }
func (r *recorder) Skipf(f string, a ...any)  { r.note(false, fmt.Sprintf(f, a...)); runtime.Goexit() }
func (r *recorder) Failed() bool              { r.mu.Lock(); defer r.mu.Unlock(); return r.failed }
