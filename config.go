package refill

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/refill-go/refill/backend/memory"
	"github.com/refill-go/refill/driver"
)

// This file is what a user can set: the fields, their defaults, and the errors and warnings of New about them.

// Config is how a Loader works. The zero value of a field stands for the default of that field. Only TTL has no
// default. A negative value turns a feature off where the field says so. Elsewhere a negative value is an error. New
// copies the Config.
type Config struct {
	// TTL is how long a value is served as fresh, counted from the start of its load. Required: how old data may be is
	// your decision.
	TTL time.Duration

	// StaleFor is how long after TTL a value is still served, at once, while one node of the fleet refreshes the value in
	// the background (stale-while-revalidate, RFC 5861). StaleFor is added to TTL. Default 0: callers wait for the refill.
	StaleFor time.Duration

	// StaleIfError is how long after TTL a value is served in place of an error if the refill of the value fails
	// (stale-if-error, RFC 5861). StaleIfError is added to TTL. Default: StaleFor. Negative: off.
	StaleIfError time.Duration

	// EarlyRefresh is the share of TTL after which the next Get refreshes a fresh value in the background. So a hot key
	// never expires while it is in use. With 0.8, a refresh begins at 80 % of TTL. Below 1. Default 0: off. A negative
	// value is off as well.
	EarlyRefresh float64

	// XFetch is the beta of probabilistic early refresh: the longer the load of a value took, the earlier a node refreshes
	// the value. The moment of the refresh is drawn once per value and node. On average that moment is beta load times
	// before the end of TTL. It is never in the first half of TTL. 1 is the usual value of XFetch. Nodes draw
	// independently, and the result of the first refresh is announced to all nodes, so most nodes never start a refresh.
	// Default 0: off. A negative value is off as well. (Vattani, Chierichetti, Lowenstein, Optimal Probabilistic Cache
	// Stampede Prevention, PVLDB 8(8), 2015.)
	XFetch float64

	// SoftTimeout is how long a Get waits for the refill of a stale value before it returns the stale value. The refill
	// goes on after that. SoftTimeout has an effect only with StaleFor. Default 0: stale values are returned at once.
	SoftTimeout time.Duration

	// LocalTTL is how long this process answers from its own memory (L1) before it reads the shared store again. Changes
	// on other nodes are announced. If an announcement is lost unnoticed, LocalTTL bounds how long L1 serves the old value
	// as fresh. Default: TTL, at most 1 min. Negative: off, so every Get reads the store.
	LocalTTL time.Duration

	// LockTTL is how long the refill lock outlives a process that died while it held the lock. The lock is renewed each
	// third of LockTTL while a load runs, so loads may take longer than LockTTL. Another node takes over within LockTTL +
	// 500 ms. Default 1 s, at least 200 ms.
	LockTTL time.Duration

	// StoreTimeout bounds every call of the shared store. Default 250 ms, and at most LockTTL/4. The reason for LockTTL/4:
	// if a renewal gets no answer, it must be repeated while the lock still lives.
	StoreTimeout time.Duration

	// LoadTimeout bounds a load. When it is over, the ctx of the load is cancelled, and the callers get a *LoadError with
	// Timeout set. The key can then be loaded again, even if the load function does not return. Default 10 s.
	LoadTimeout time.Duration

	// ErrorTTL is the back-off after a failed load. Until the back-off is over, every Get of the key on every node returns
	// the error of that load (or a stale value, see StaleIfError), and no node asks the database for the key. Default 1 s.
	// Negative: off. Callers that waited for the failed load share its error even then. Invalidate, Expire and Refresh end
	// a back-off.
	ErrorTTL time.Duration

	// MaxErrorTTL lets the back-off of a key double with each failure in a row, up to MaxErrorTTL. Default: ErrorTTL, so
	// the back-off does not grow.
	MaxErrorTTL time.Duration

	// NotFoundTTL is how long an absence (ErrNotFound) is cached. Default: TTL, at most 10 s. Negative: off.
	NotFoundTTL time.Duration

	// Tags are the tags of every value of this Loader, see Fill.Tag. With Tags: {"all"}, InvalidateTag(ctx, "all")
	// invalidates all values of this Loader. Default: none.
	Tags []string

	// Jitter shortens the TTL of each stored value by a random share, which is at most Jitter. So values that were loaded
	// together do not expire together. Default 0.1. Negative: off. Below 1.
	Jitter float64

	// MaxLoads is how many loads of this Loader may run at once in this process. A bulk load counts as one. Further loads
	// wait. While the shared store does not answer, they return ErrOverloaded instead. Default 64. Negative: no limit.
	MaxLoads int

	// BulkWindow is how long a Get of a Loader made by NewBulk waits for other Gets that have to load, so that one call
	// loads the keys of all these Gets. Default 0: a Get does not wait. GetMany needs no BulkWindow.
	BulkWindow time.Duration

	// MaxWaiters is how many callers of this Loader may wait at once in this process, for loads here or on other nodes.
	// Further callers get ErrOverloaded at once. A Get that L1 answers never waits. Default 10,000. Negative: no limit.
	MaxWaiters int

	// LocalEntries and LocalBytes bound L1. LocalEntries is the number of entries (default 10,000). LocalBytes, if set, is
	// the sum of the sizes of the encoded values in bytes (default: not bounded). A value larger than a quarter of
	// LocalBytes may not stay in L1.
	LocalEntries int
	LocalBytes   int64

	// Shared is the store that the fleet shares, see backend/goredis. One store per process is enough for all Loaders of
	// the process. Default nil: this process alone, with a backend/memory store of its own.
	Shared driver.Store

	// Codec turns values into bytes and back. Default: JSON, and for a V of []byte or string the bytes themselves. Callers
	// get the value that was decoded from the stored bytes. So a part that the codec leaves out (JSON: unexported fields,
	// `json:"-"`) is missing even on the node that loaded the value. The module refill/codec has CBOR and compression.
	Codec Codec

	// OnEvent is called for every Event. It is called from many goroutines at once: callers, flights and the subscription.
	// OnEvent must be fast, because Gets and announcements wait for it. It must not panic, and must not call Close. No
	// lock of refill is held during the call. Default: no events.
	OnEvent func(Event)
}

// withDefaults checks a Config and fills in its defaults. In the result no value is negative: 0 stands for off, and the
// largest number stands for no limit.
func (c Config) withDefaults() (Config, error) {
	for _, check := range []func(*Config) error{(*Config).times, (*Config).bounds, (*Config).parts} {
		if err := check(&c); err != nil {
			return c, err
		}
	}
	return c, nil
}

// setting is a duration of Config.
type setting struct {
	name      string
	value     *time.Duration
	byDefault time.Duration // what 0 stands for
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

// storeTimeout checks how long a call of the store may take, given a lease of lockTTL. If a renewal gets no answer, it
// must be repeated before the lease ends.
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

// maxSpan bounds every span, so that a date plus a few spans can be represented.
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

// maxBeta is far above any useful beta. It bounds the times that are computed from beta.
const maxBeta = 100.0

// limit applies the default of a number that bounds something.
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
	}
	if c.LocalBytes < 0 {
		return invalid("LocalBytes", "%d is negative; 0 is no bound", c.LocalBytes)
	}
	return nil
}

func (c *Config) parts() error {
	if c.Shared == nil {
		c.Shared = memory.New()
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

// warnings returns a warning for each setting that New accepts although the setting is doubtful: it has no effect, or a
// surprising effect.
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
	warn(c.LoadTimeout > max(life, 10*time.Second), "LoadTimeout", // the default causes no warning
		"%v: a load may take longer than its value lives (%v)", c.LoadTimeout, life)
	warn(c.NotFoundTTL > c.TTL, "NotFoundTTL", "%v: an absence lives longer than a value (%v)", c.NotFoundTTL, c.TTL)
	warn(c.StaleIfError > 0 && c.StaleIfError < c.StaleFor, "StaleIfError",
		"%v has no effect below StaleFor (%v)", c.StaleIfError, c.StaleFor)
	warn(c.ErrorTTL > time.Minute && c.ErrorTTL > c.TTL, "ErrorTTL",
		"%v: one failed load keeps a key away for longer than a value lives", c.ErrorTTL)
	warn(c.LocalTTL == 0 && c.LocalBytes > 0, "LocalBytes",
		"%d has no effect: LocalTTL is off, so there is no L1", c.LocalBytes)
	warn(c.EarlyRefresh > 0 && c.EarlyRefresh < 0.5, "EarlyRefresh",
		"%v: values are refreshed more than twice per TTL", c.EarlyRefresh)
	return warnings
}
