package refill

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/l1"
)

// An entry of L1 must not grow into a larger size class of Go's allocator by accident, because L1 may hold very many.
func TestSizeOfAnEntry(t *testing.T) {
	for name, c := range map[string]struct{ size, want uintptr }{
		"pointer":          {unsafe.Sizeof(entry[*int]{}), 112},
		"string":           {unsafe.Sizeof(entry[string]{}), 128},
		"slice":            {unsafe.Sizeof(entry[[]byte]{}), 128},
		"struct, 40 bytes": {unsafe.Sizeof(entry[[5]int64]{}), 144},
	} {
		if c.size > c.want {
			t.Errorf("%s: an entry has %d bytes, want %d at most", name, c.size, c.want)
		}
	}
}

// An entry keeps the token, the life and the terms of a record in a short form. All of them must come out of the entry
// as they were in the record.
func TestAnEntrySaysWhatItsRecordSays(t *testing.T) {
	began := time.UnixMicro(1_700_000_000_123_456).UTC()
	usual := driver.Record{
		Token: "host-0123456789ab#3f", LoadBegan: began, LoadTook: time.Second, FreshUntil: began.Add(59*time.Second + 7001),
		StaleFor: time.Minute, StaleIfError: time.Hour,
	}
	for name, change := range map[string]func(*driver.Record){
		"usual":                 func(*driver.Record) {},
		"own spans":             func(r *driver.Record) { r.StaleFor, r.StaleIfError = time.Microsecond, 1000*time.Hour },
		"long spans":            func(r *driver.Record) { r.StaleFor = 290 * 365 * 24 * time.Hour },
		"never stale":           func(r *driver.Record) { r.StaleFor, r.StaleIfError = 0, 0 },
		"no TTL":                func(r *driver.Record) { r.FreshUntil = r.LoadBegan },
		"expired":               func(r *driver.Record) { r.ExpiredAt = began.Add(time.Second) },
		"absent":                func(r *driver.Record) { r.NotFound = true },
		"no-store":              func(r *driver.Record) { r.NoStore = true },
		"validator":             func(r *driver.Record) { r.Validator = "v" },
		"tags":                  func(r *driver.Record) { r.Tags = []string{"a", "b"} },
		"no count":              func(r *driver.Record) { r.Token = "host" },
		"empty count":           func(r *driver.Record) { r.Token = "host#" },
		"no node":               func(r *driver.Record) { r.Token = "#1" },
		"count of another form": func(r *driver.Record) { r.Token = "host#03F" },
		"count with a sign":     func(r *driver.Record) { r.Token = "host#+3" },
		"largest count":         func(r *driver.Record) { r.Token = tokenOf("host", math.MaxUint64) },
		"count too large":       func(r *driver.Record) { r.Token = tokenOf("host", math.MaxUint64) + "0" },
		"two counts":            func(r *driver.Record) { r.Token = "host#1#2" },
	} {
		for _, early := range []float64{0, 0.5} {
			t.Run(fmt.Sprint(name, ", EarlyRefresh ", early), func(t *testing.T) {
				l, err := New[string]("thing", nil, Config{
					TTL: time.Minute, StaleFor: time.Minute, StaleIfError: time.Hour, EarlyRefresh: early,
				})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				r := usual
				change(&r)
				e := l.newEntry("k", &r, l1.Epoch{})
				want := lifeOf(&r)
				want.refreshAt = refreshFrom(want, r.LoadTook, early, 0, 1)
				if got := lifeIn(e); got != want {
					t.Errorf("life %+v, want %+v", got, want)
				}
				if e.NotBefore != want.notBefore() {
					t.Errorf("NotBefore %d, want %d", e.NotBefore, want.notBefore())
				}
				if got := e.Data.token(); got != r.Token {
					t.Errorf("token %q, want %q", got, r.Token)
				}
				if got := resultOf(e, OutcomeHit, 0); got.Node != nodeOf(r.Token) || got.Validator != r.Validator ||
					!slices.Equal(got.Tags, r.Tags) {
					t.Errorf("got %+v", got)
				}
				if e.Data.noStore() != r.NoStore {
					t.Errorf("noStore %v, want %v", e.Data.noStore(), r.NoStore)
				}
			})
		}
	}
}

// A tag was expired after the load of an entry. The entry must then have the life that counts from this moment.
func TestAnEntryWhoseTagWasExpired(t *testing.T) {
	l, err := New[string]("thing", nil, Config{TTL: time.Minute, StaleFor: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	began := l.store.Now()
	r := driver.Record{
		Token: l.node.token(), LoadBegan: began, FreshUntil: began.Add(time.Minute), StaleFor: time.Minute,
		Tags: []string{"t"},
	}
	e, at := l.newEntry("k", &r, l1.Epoch{}), began.Add(time.Second)
	if !l.tagsValid(e, tagStates{"t": {Known: true, Expired: at}}) {
		t.Fatal("not valid")
	}
	if got, want := lifeIn(e), lifeOf(&r).expiredAt(at.UnixMicro()); got != want {
		t.Errorf("life %+v, want %+v", got, want)
	}
}
