package refill

import (
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file defines Config: its fields, their defaults, and the errors and warnings that New reports about them.

// Config holds the settings of a Loader. A field that is zero gets its default. Only TTL has no default: it must be
// set. A negative value turns a feature off where the comment of the field says so. In any other field, a negative
// value is an error. New copies the Config.
type Config struct {
	// TTL is how long a value is served as fresh, counted from the start of its load. TTL is required, because only you
	// can decide how old your data may be.
	TTL time.Duration

	// StaleFor is how long after the end of TTL a value is still served as stale. Get returns a stale value at once, while
	// one node of the fleet refreshes the value in the background (stale-while-revalidate, RFC 5861). StaleFor is added to
	// TTL. Default 0: after TTL, callers wait for the refill.
	//
	// StaleFor belongs to the value. The node that loads the value stores its StaleFor in the record, and all nodes
	// obey the record, whatever their own Config says. So a new StaleFor holds for values that are loaded from then on.
	// To stop serving values that were stored with the old StaleFor, call Invalidate for their keys.
	StaleFor time.Duration

	// StaleIfError is a time after the end of TTL. If a refill fails within that time, Get returns the old value
	// instead of the error (stale-if-error, RFC 5861). StaleIfError is added to TTL. Default: the StaleFor of the
	// value, which is Config.StaleFor or what the load sets with Fill.SetStaleFor. Negative: off.
	StaleIfError time.Duration

	// EarlyRefresh is a share of TTL, below 1. When this share of TTL is over, the next Get starts a refresh in the
	// background, although the value is still fresh. With 0.8, for instance, a refresh may begin at 80 % of TTL. So the
	// value of a key that callers often ask for does not expire. Default 0: off. A negative value is off as well.
	EarlyRefresh float64

	// XFetch turns on probabilistic early refresh: the longer the load of a value took, the earlier a node refreshes
	// the value. XFetch is the factor beta of the algorithm in the source below, and its usual value is 1. Each node
	// draws one random moment per value. From that moment on, the next Get on that node starts a refresh. On average
	// the moment lies beta times the duration of the load before the end of TTL. The moment never lies in the first
	// half of TTL. Nodes draw independently, and the first refresh is announced to all nodes. So most nodes never start
	// a refresh. Default 0: off. A negative value is off as well. Source: Vattani, Chierichetti, Lowenstein, Optimal
	// Probabilistic Cache Stampede Prevention, PVLDB 8(8), 2015.
	XFetch float64

	// SoftTimeout is how long a Get of a stale value waits for the refill before it returns the stale value. The refill
	// then goes on in the background. SoftTimeout has an effect only with StaleFor. Default 0: Get returns a stale
	// value at once.
	SoftTimeout time.Duration

	// LocalTTL is how long this process serves a value from its own memory (L1) before it reads the shared store again.
	// Other nodes announce their changes, and this process then updates L1. If an announcement is lost unnoticed, L1
	// serves the old value as fresh for LocalTTL at most. Default: TTL, at most 1 min. Negative: off, so every Get reads
	// the store.
	LocalTTL time.Duration

	// LockTTL is how long the refill lock stays taken after its holder has died. While a load runs, the holder renews the
	// lock each third of LockTTL, so a load may take longer than LockTTL. Another node takes over from a dead holder
	// within LockTTL + 500 ms. Default 1 s, at least 200 ms.
	LockTTL time.Duration

	// StoreTimeout bounds each call of the shared store. Default: 250 ms or LockTTL/4, whichever is shorter. At most
	// LockTTL/4: if a renewal of the lock gets no answer, there must be time to repeat the renewal.
	StoreTimeout time.Duration

	// LoadTimeout bounds a load. When LoadTimeout is over, the ctx of the load is cancelled, and the callers get a
	// *LoadError with Timeout set. If the load function goes on, it no longer counts among MaxLoads. This process does
	// not load the key again until that function has returned. Other nodes can load the key. Default 10 s. The time
	// counts from the call of the load function. If keys wait for that call (see BulkWindow), the wait does not count.
	LoadTimeout time.Duration

	// ErrorTTL is the back-off after a failed load. The cause may be the node itself. So after the first failure of a
	// key, only the node that failed does not load the key until ErrorTTL is over. Gets on that node return the error
	// (or an old value, see StaleIfError), unless the store has a value or another node loads. Another node may try
	// once. If that node fails as well, no node loads the key until ErrorTTL is over, and every Get on every node
	// returns the error. So a database that is down is asked twice per key and back-off. The drawback: if only two
	// nodes cannot reach the database, these two can make a key fail for the whole fleet, for one ErrorTTL at a time.
	//
	// Default 1 s. Negative: off. With ErrorTTL off, the callers that wait for a load that fails still share its error.
	// Invalidate, Expire and Refresh end a back-off.
	ErrorTTL time.Duration

	// MaxErrorTTL lets the back-off grow. The back-off of a key doubles with each failure in a row, up to MaxErrorTTL.
	// Default: ErrorTTL, so the back-off does not grow.
	MaxErrorTTL time.Duration

	// NotFoundTTL is how long an absence (ErrNotFound) is cached. Default: TTL, at most 10 s. Negative: off. A load can
	// set another TTL for its absence, see Fill.SetTTL.
	NotFoundTTL time.Duration

	// Tags are tags that every value of this Loader has, see Fill.Tag. If Tags holds "all", for instance,
	// InvalidateTag(ctx, "all") invalidates all values of this Loader. Default: none.
	Tags []string

	// Jitter shortens the TTL of each stored value by a random share between 0 and Jitter. So values that were loaded
	// together do not expire together. Below 1. Default 0.1. Negative: off.
	Jitter float64

	// MaxLoads is how many loads of this Loader may run at once in this process. A bulk load counts as one load. A
	// further load waits for the end of another load. While the shared store does not answer, a further load waits for
	// StoreTimeout at most, and then its callers get ErrOverloaded. A refresh that no caller waits for does not queue:
	// a later Get tries again. A load function that runs longer than LoadTimeout no longer counts. But if MaxLoads such
	// functions run beside MaxLoads other loads, callers that need a further load get ErrOverloaded as well. Default
	// 64. Negative: no limit.
	//
	// MaxLoads also holds for a Get that a load of another Loader makes. There is one exception: if loads of this
	// Loader Get keys of that other Loader as well, loads of the two Loaders could wait for each other's places for
	// ever. So if no place is free, such a Get loads beyond MaxLoads. The same holds for a Get that a load of this
	// Loader itself makes.
	MaxLoads int

	// BulkWindow is for Loaders made by NewBulk. A Get that has to load waits for BulkWindow, so that other Gets can add
	// their keys to the same call of the load function. Default 0: a Get loads its key at once and alone. GetMany does not
	// need BulkWindow to load its keys together.
	BulkWindow time.Duration

	// MaxWaiters is how many callers of this Loader may wait at once in this process, for the store or for a load. A
	// further caller gets a stale value of L1 or, if L1 has none, ErrOverloaded. A Get that L1 answers never waits, and
	// does not count. Default 10,000. Negative: no limit.
	MaxWaiters int

	// LocalEntries and LocalBytes bound L1. LocalEntries is the largest number of entries. Default of LocalEntries:
	// 10,000. At most 1<<30. LocalBytes is the largest sum of the sizes of all entries, in bytes. The size of an entry
	// is the memory that its key, its decoded value and its management take, some 500 bytes at least. See [Sizer].
	// Default of LocalBytes: 64 MiB. Negative LocalBytes: no bound. L1 does not keep a value that is larger than a
	// quarter of LocalBytes. An entry counts as LocalBytes/LocalEntries at least, so L1 may hold fewer small values if
	// others are large. Besides these bounds, a Loader takes about 1 MiB, and some KiB before its first value.
	LocalEntries int
	LocalBytes   int64

	// Shared is the store that all nodes of the fleet share, see backend/goredis. All Loaders of a process can use one
	// store. Default nil: the Loader works for this process alone, with a backend/memory store of its own. LocalEntries
	// and LocalBytes bound that store as well.
	Shared driver.Store

	// Codec turns values into bytes and back. Default: JSON. If V is []byte or string, the default stores the bytes
	// unchanged. Normally, the node that has loaded a value keeps the value as the load function returned it. But if
	// the codec may leave out a part of a value of type V (unexported fields, fields with the tag "-") or may decode
	// the part as another type (interfaces), the node keeps the decoded value. So that part is missing on all nodes
	// alike. The first values and a sample of the others are decoded once as a check. If that fails, Get returns the
	// value and an error that wraps [ErrInvalid]. The module refill/codec has CBOR and compression.
	Codec Codec

	// The Loader calls OnEvent for every Event, from many goroutines at once: callers, flights and the subscription.
	// OnEvent must be fast, because Gets and announcements wait for it. OnEvent must not panic. OnEvent must not call
	// Close of a Loader (such a Close returns an error), and must not wait for a goroutine that calls Close. No mutex
	// of refill is held during the call. Default: no events.
	OnEvent func(Event)

	// Logger gets the few lines that an operator needs. At level Warn: no announcements can be received, because the
	// store cannot be reached or its address is wrong; the circuit breaker has opened; a setting of the store or of
	// Config is doubtful; the store held bytes that are no record of this Loader; an invalidation was given up. At
	// level Info: announcements can be received again; the circuit breaker has closed. No line is about a single Get,
	// and nothing is logged while all is well. Foreign bytes and invalidations that were given up each cause one line a
	// minute at most. Loaders that share both a store and a Logger log each change of the state of the store once. A
	// line has the attributes loader and node, and, if they are known, key and error. Default: slog.Default(), at the
	// time of the line. slog.New(slog.DiscardHandler) turns the lines off.
	Logger *slog.Logger
}

// withDefaults checks a Config and fills in its defaults. In the result, 0 stands for off, and the largest number
// stands for no limit. Only EarlyRefresh and XFetch may stay negative, which also means off.
func (c Config) withDefaults() (Config, error) {
	for _, check := range []func(*Config) error{(*Config).times, (*Config).bounds, (*Config).parts} {
		if err := check(&c); err != nil {
			return c, err
		}
	}
	return c, nil
}

// setting is a duration of Config or LockConfig.
type setting struct {
	name      string
	value     *time.Duration
	byDefault time.Duration // replaces 0
	least     time.Duration
	canBeOff  bool // a negative value means off
}

func (c *Config) times() error {
	if c.TTL == 0 {
		return invalid("TTL", "required")
	}
	const ms = time.Millisecond
	settings := []setting{
		{"TTL", &c.TTL, 0, ms, false},
		{"StaleFor", &c.StaleFor, 0, 0, false},
		{"StaleIfError", &c.StaleIfError, c.StaleFor, 0, true},
		{"LocalTTL", &c.LocalTTL, min(c.TTL, time.Minute), ms, true},
		{"LockTTL", &c.LockTTL, time.Second, 200 * ms, false},
		{"StoreTimeout", &c.StoreTimeout, 0, ms, false},
		{"LoadTimeout", &c.LoadTimeout, 10 * time.Second, ms, false},
		{"ErrorTTL", &c.ErrorTTL, time.Second, ms, true},
		{"NotFoundTTL", &c.NotFoundTTL, min(c.TTL, 10*time.Second), ms, true},
		{"SoftTimeout", &c.SoftTimeout, 0, ms, false},
		{"MaxErrorTTL", &c.MaxErrorTTL, 0, ms, false},
		{"BulkWindow", &c.BulkWindow, 0, 0, false},
	}
	for _, s := range settings {
		if err := s.apply(); err != nil {
			return err
		}
	}
	switch {
	case c.MaxErrorTTL == 0:
		c.MaxErrorTTL = c.ErrorTTL
	case c.MaxErrorTTL < c.ErrorTTL:
		return invalid("MaxErrorTTL", "%v is below ErrorTTL (%v)", c.MaxErrorTTL, c.ErrorTTL)
	case c.ErrorTTL == 0:
		return invalid("MaxErrorTTL", "%v, but ErrorTTL is off, so no back-off can grow", c.MaxErrorTTL)
	}
	var err error
	c.StoreTimeout, err = storeTimeout(c.StoreTimeout, c.LockTTL, "LockTTL")
	return err
}

// storeTimeout returns the StoreTimeout to use. set is the configured StoreTimeout, or 0. If set is too long for a
// lease of lockTTL, storeTimeout returns an error. If a renewal gets no answer, there must be time to repeat the
// renewal before the lease ends.
func storeTimeout(set, lockTTL time.Duration, nameOfTTL string) (time.Duration, error) {
	most := lockTTL / 4
	if set == 0 {
		return min(250*time.Millisecond, most), nil
	}
	if set > most {
		return 0, invalid("StoreTimeout", "%v is above %s/4 (%v): a renewal without an answer could not be repeated in time",
			set, nameOfTTL, most)
	}
	return set, nil
}

// maxSpan is the longest duration in Config, LockConfig and Fill. So a time plus a few such durations cannot overflow.
const maxSpan = 20 * 365 * 24 * time.Hour

func (s setting) apply() error {
	switch v := *s.value; {
	case v == 0:
		*s.value = s.byDefault
	case v < 0 && s.canBeOff:
		*s.value = 0
	case v < 0:
		return invalid(s.name, "%v is negative", v)
	case v < s.least:
		return invalid(s.name, "%v is below %v", v, s.least)
	case v > maxSpan:
		return invalid(s.name, "%v is above %v", v, maxSpan)
	}
	return nil
}

// maxBeta is the largest XFetch that New accepts. It is far above any useful value. Without a bound, times that are
// computed from beta could overflow.
const maxBeta = 100.0

// limit returns MaxLoads or MaxWaiters with its default applied, and math.MaxInt for no limit.
func limit(set, byDefault int) int {
	switch {
	case set < 0:
		return math.MaxInt
	case set == 0:
		return byDefault
	}
	return set
}

func (c *Config) bounds() error {
	switch {
	case math.IsNaN(c.Jitter) || c.Jitter >= 1:
		return invalid("Jitter", "%v, must be below 1", c.Jitter)
	case c.Jitter < 0:
		c.Jitter = 0
	case c.Jitter == 0:
		c.Jitter = 0.1
	}
	if math.IsNaN(c.EarlyRefresh) || c.EarlyRefresh >= 1 {
		return invalid("EarlyRefresh", "%v, must be below 1", c.EarlyRefresh)
	}
	if math.IsNaN(c.XFetch) || c.XFetch > maxBeta {
		return invalid("XFetch", "%v, must be %v at most", c.XFetch, maxBeta)
	}
	c.MaxLoads = limit(c.MaxLoads, 64)
	c.MaxWaiters = limit(c.MaxWaiters, 10_000)
	switch {
	case c.LocalEntries < 0:
		return invalid("LocalEntries", "%d is negative; LocalTTL: -1 turns L1 off", c.LocalEntries)
	case c.LocalEntries == 0:
		c.LocalEntries = 10_000
	case c.LocalEntries > maxLocalEntries:
		return invalid("LocalEntries", "%d is above %d", c.LocalEntries, maxLocalEntries)
	}
	switch {
	case c.LocalBytes < 0:
		c.LocalBytes = math.MaxInt64
	case c.LocalBytes == 0:
		c.LocalBytes = defaultLocalBytes
	}
	return nil
}

const defaultLocalBytes = 64 << 20

// maxLocalEntries is the largest LocalEntries that New accepts. It is far above what fits into memory. Without a bound,
// sizes that are computed from LocalEntries could overflow.
const maxLocalEntries = 1 << 30

func (c *Config) parts() error {
	if c.Shared == nil {
		c.Shared = memory.NewSized(c.LocalEntries, c.LocalBytes)
	} else if isNil(c.Shared) {
		return invalid("Shared", "nil %T", c.Shared)
	}
	if err := c.Shared.Check(); err != nil {
		return invalid("Shared", "%v", err)
	}
	if err := validateTags("Tags", c.Tags); err != nil {
		return err
	}
	c.Tags = slices.Clone(c.Tags)
	switch {
	case c.Codec == nil:
	case isNil(c.Codec):
		return invalid("Codec", "nil %T", c.Codec)
	case c.Codec.Name() == "":
		return invalid("Codec", "%T has no name", c.Codec)
	}
	return nil
}

// warnings returns a warning for each setting that New accepts although it has no effect, or a surprising effect.
func (c *Config) warnings() (warnings []error) {
	warn := func(doubtful bool, field, format string, args ...any) {
		if doubtful {
			warnings = append(warnings, fmt.Errorf("refill: %s: %s", field, fmt.Sprintf(format, args...)))
		}
	}
	life := c.TTL + max(c.StaleFor, c.StaleIfError)
	warn(c.SoftTimeout > 0 && c.StaleFor == 0, "SoftTimeout",
		"%v has no effect: StaleFor is 0, so there is no stale value to return", c.SoftTimeout)
	warn(c.SoftTimeout >= c.LoadTimeout, "SoftTimeout",
		"%v has no effect: LoadTimeout (%v) expires first", c.SoftTimeout, c.LoadTimeout)
	warn(c.LocalTTL > c.TTL, "LocalTTL", "%v has no effect above TTL (%v)", c.LocalTTL, c.TTL)
	warn(c.LoadTimeout > max(life, 10*time.Second), "LoadTimeout", // 10 s is the default, which must not warn
		"%v: a load may take longer than its value lives (%v)", c.LoadTimeout, life)
	warn(c.NotFoundTTL > c.TTL, "NotFoundTTL", "%v: an absence lives longer than a value (%v)", c.NotFoundTTL, c.TTL)
	warn(c.StaleIfError > 0 && c.StaleIfError < c.StaleFor, "StaleIfError",
		"%v has no effect below StaleFor (%v)", c.StaleIfError, c.StaleFor)
	warn(c.ErrorTTL > time.Minute && c.ErrorTTL > c.TTL, "ErrorTTL",
		"%v: one failed load keeps a key away for longer than a value lives", c.ErrorTTL)
	warn(c.LocalTTL == 0 && c.LocalBytes != defaultLocalBytes, "LocalBytes",
		"%d has no effect: LocalTTL is off, so there is no L1", c.LocalBytes)
	warn(c.EarlyRefresh > 0 && c.EarlyRefresh < 0.5, "EarlyRefresh",
		"%v: values are refreshed more than twice per TTL", c.EarlyRefresh)
	return warnings
}
