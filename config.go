package refill

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"
)

// Config is how a Loader works. The zero value of a field stands for its default; only TTL has none. A negative value
// turns a feature off where that is said, and is an error elsewhere. New copies the Config.
type Config struct {
	// TTL is how long a value is served without a thought, counted from the start of its load. Required: how old data
	// may be is a decision that nobody can take for you.
	TTL time.Duration

	// StaleFor is how long after TTL a value is still served, at once, while one node of the fleet refreshes it in the
	// background (stale-while-revalidate, RFC 5861). It adds to TTL. Default 0: callers wait for the refill.
	StaleFor time.Duration

	// StaleIfError is how long after TTL a value is served in place of an error when its refill fails
	// (stale-if-error, RFC 5861). It adds to TTL. Default: as StaleFor. Negative: off.
	StaleIfError time.Duration

	// EarlyRefresh is the share of TTL after which a fresh value is refreshed behind the next Get, so that a hot key never
	// expires under its callers: 0.8 begins at 80 %. Default 0: off, as is anything negative. Below 1.
	EarlyRefresh float64

	// XFetch is the beta of probabilistic early refresh: a node refreshes a value earlier the longer its load took, at a
	// moment drawn once per value and node, on the average beta load times before its end, never in its first half. 1 is
	// the usual value. Nodes draw apart and the first one's result is pushed to all, so most never have to try. Default 0:
	// off, as is anything negative.
	// (Vattani, Chierichetti, Lowenstein, Optimal Probabilistic Cache Stampede Prevention, PVLDB 8(8), 2015.)
	XFetch float64

	// SoftTimeout is how long a Get waits for the refill of a stale value before it takes the stale one; the refill goes
	// on. It needs StaleFor. Default 0: stale values are served at once.
	SoftTimeout time.Duration

	// LocalTTL is how long this process answers from its own memory (L1) before it looks at the shared store again. Changes
	// made elsewhere are pushed; this is the bound for a push that got lost unnoticed. Default: TTL, at most 1 min.
	// Negative: off, every Get asks the store.
	LocalTTL time.Duration

	// LockTTL is how long the refill lock outlives a process that died with it; it is renewed at each third while
	// a load runs, so loads may be longer. Another node takes over within LockTTL + 500 ms. Default 1 s, at least 200 ms.
	LockTTL time.Duration

	// StoreTimeout bounds every call of the shared store. Default 250 ms, or LockTTL/4 where that is less, and never more:
	// a renewal that got stuck has to be tried again within the lock's life.
	StoreTimeout time.Duration

	// LoadTimeout bounds a load: then its ctx is cancelled, its callers get a *LoadError with Timeout set, and the key
	// is free for another try, even if the function does not return. Default 10 s.
	LoadTimeout time.Duration

	// ErrorTTL is the back-off after a failed load: until it is over, every Get of the key on every node is answered with
	// that error (or a stale value, see StaleIfError) and the database is left alone. Default 1 s. Negative: off, the
	// error is still shared by those who waited. Invalidate, Expire and Refresh end it.
	ErrorTTL time.Duration

	// MaxErrorTTL lets the back-off of a key double with each failure in a row, up to this. Default: ErrorTTL, it does not
	// grow.
	MaxErrorTTL time.Duration

	// NotFoundTTL is how long an absence (ErrNotFound) is cached. Default: TTL, at most 10 s. Negative: off.
	NotFoundTTL time.Duration

	// Tags are groups that every value of this Loader is in, see Fill.Tag: with Tags: {"all"}, InvalidateTag(ctx, "all") voids
	// them all. Default: none.
	Tags []string

	// Jitter shortens the TTL of each stored value by a random share up to this one, so that values loaded together do
	// not expire together. Default 0.1. Negative: off. Below 1.
	Jitter float64

	// MaxLoads is how many loads of this Loader may run at once in this process; a bulk load counts as one. More wait
	// their turn, or get ErrOverloaded while the shared store does not answer. Default 64. Negative: no limit.
	MaxLoads int

	// BulkWindow is how long a Get of a Loader made by NewBulk waits for others whose keys have to be loaded, too, so that
	// one call loads all of them. Default 0: it does not wait. GetMany needs none.
	BulkWindow time.Duration

	// MaxWaiters is how many callers of this Loader may wait at once in this process, for loads here or elsewhere; more get
	// ErrOverloaded at once. What L1 answers never waits. Default 10,000. Negative: no limit.
	MaxWaiters int

	// LocalEntries and LocalBytes bound L1: the number of entries (default 10,000), and, if set, the sum of the sizes of the
	// encoded values in bytes (default: no such bound). A value above a quarter of LocalBytes may not stay in L1.
	LocalEntries int
	LocalBytes   int64

	// Shared is the store that the fleet shares, one per process for all its Loaders: see backend/goredis. Default nil:
	// this process alone, with a store of its own (NewMemory).
	Shared Store

	// Codec turns values into bytes and back. Default: JSON, and for a V of []byte or string the bytes themselves.
	// What the codec leaves out (JSON: unexported fields, `json:"-"`) is left out on the node that loaded it, too:
	// callers get what was decoded from what was stored. The module refill/codec has others: CBOR, and compression.
	Codec Codec

	// OnEvent sees every outcome, see EventKind. It is called from many goroutines at once, of callers, flights and the
	// subscription, so it must be quick and must not panic. Default: nobody looks.
	OnEvent func(Event)
}

// Codec encodes values of one type. Its methods are called from many goroutines.
type Codec interface {
	// Name stands in every record. A record of another name is a miss, so change it when the bytes change.
	Name() string
	Marshal(v any) ([]byte, error)
	Unmarshal(data []byte, pointer any) error
}

type jsonCodec struct{}

func (jsonCodec) Name() string                       { return "json" }
func (jsonCodec) Marshal(v any) ([]byte, error)      { return json.Marshal(v) }
func (jsonCodec) Unmarshal(data []byte, p any) error { return json.Unmarshal(data, p) }

// rawCodec leaves []byte and string as they are. Decoding []byte shares the record's memory, which is the Loader's own.
type rawCodec struct{}

func (rawCodec) Name() string { return "raw" }

func (rawCodec) Marshal(v any) ([]byte, error) {
	if s, ok := v.(string); ok {
		return []byte(s), nil
	}
	return v.([]byte), nil
}

func (rawCodec) Unmarshal(data []byte, p any) error {
	switch p := p.(type) {
	case *string:
		*p = string(data)
	case *[]byte:
		*p = data[:len(data):len(data)]
	}
	return nil
}

// codecFor returns the codec of a value type and the kind that its records carry.
func codecFor[V any](c Codec) (Codec, string) {
	if c == nil {
		c = jsonCodec{}
		switch any((*V)(nil)).(type) {
		case *string, *[]byte:
			c = rawCodec{}
		}
	}
	return c, c.Name() + " " + reflect.TypeFor[V]().String()
}

// withDefaults checks a Config and fills in what it leaves open. In the result nothing is negative: off is 0, and
// no limit is the largest number.
func (c Config) withDefaults() (Config, error) {
	for _, check := range []func(*Config) error{(*Config).times, (*Config).bounds, (*Config).parts} {
		if err := check(&c); err != nil {
			return c, err
		}
	}
	return c, nil
}

// A setting is a duration of Config: what 0 stands for, its bounds, and whether negative means off.
type setting struct {
	name     string
	value    *time.Duration
	unset    time.Duration
	least    time.Duration
	offBelow bool
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
		if err := s.settle(); err != nil {
			return err
		}
	}
	switch {
	case c.MaxErrorTTL == 0:
		c.MaxErrorTTL = c.ErrorTTL
	case c.MaxErrorTTL < c.ErrorTTL:
		return invalid("MaxErrorTTL", "%v is below ErrorTTL (%v)", c.MaxErrorTTL, c.ErrorTTL)
	case c.ErrorTTL == 0:
		return invalid("MaxErrorTTL", "%v, but ErrorTTL is off: there is nothing to grow", c.MaxErrorTTL)
	}
	var err error
	c.StoreTimeout, err = storeTimeout(c.StoreTimeout, c.LockTTL, "LockTTL")
	return err
}

// storeTimeout settles how long a call of the store may take beside a lease of lockTTL: a renewal that got stuck has to
// be tried again before the lease is over.
func storeTimeout(set, lockTTL time.Duration, nameOfTTL string) (time.Duration, error) {
	most := lockTTL / 4
	if set == 0 {
		return min(250*time.Millisecond, most), nil
	}
	if set > most {
		return 0, invalid("StoreTimeout", "%v is above %s/4 (%v): a stuck renewal could not be tried again in time", set, nameOfTTL, most)
	}
	return set, nil
}

// maxSpan bounds every span so that sums of a few of them and a date stay representable.
const maxSpan = 20 * 365 * 24 * time.Hour

func (s setting) settle() error {
	switch v := *s.value; {
	case v == 0:
		*s.value = s.unset
	case v < 0 && s.offBelow:
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

// maxBeta is more than anybody means; it keeps sums representable.
const maxBeta = 100.0

// limit settles a number that bounds something.
func limit(set, unset int) int {
	switch {
	case set < 0:
		return math.MaxInt
	case set == 0:
		return unset
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
		c.Shared = NewMemory()
	} else if isNil(c.Shared) {
		return invalid("Shared", "nil %T", c.Shared)
	}
	if err := c.Shared.Check(); err != nil {
		return invalid("Shared", "%v", err)
	}
	if err := checkTags("Tags", c.Tags); err != nil {
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

// maxName is the longest name of a Loader, in bytes.
const maxName = 64

// checkName accepts what stays readable and unambiguous in a store's keys and in metrics.
func checkName(name string) error {
	if name == "" {
		return invalid("name", "empty")
	}
	if len(name) > maxName {
		return invalid("name", "%d bytes, at most %d", len(name), maxName)
	}
	const fine = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
	if rest := strings.Trim(name, fine); rest != "" {
		return invalid("name", "%q: letters, digits, '.', '_' and '-' only", name)
	}
	return nil
}
