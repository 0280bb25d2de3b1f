package refill

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/refill-go/refill/backend/memory"
)

func TestConfigErrorsNameTheField(t *testing.T) {
	const s = time.Second
	for _, c := range []struct {
		field string
		cfg   Config
	}{
		{"TTL", Config{}},
		{"TTL", Config{TTL: -s}},
		{"TTL", Config{TTL: time.Microsecond}},
		{"TTL", Config{TTL: 100 * 365 * 24 * time.Hour}},
		{"StaleFor", Config{TTL: s, StaleFor: -1}},
		{"LockTTL", Config{TTL: s, LockTTL: -s}},
		{"LockTTL", Config{TTL: s, LockTTL: 199 * time.Millisecond}},
		{"StoreTimeout", Config{TTL: s, StoreTimeout: -1}},
		{"StoreTimeout", Config{TTL: s, StoreTimeout: 300 * time.Millisecond}},
		{"LoadTimeout", Config{TTL: s, LoadTimeout: -1}},
		{"Jitter", Config{TTL: s, Jitter: 1}},
		{"Jitter", Config{TTL: s, Jitter: math.NaN()}},
		{"EarlyRefresh", Config{TTL: s, EarlyRefresh: 1}},
		{"EarlyRefresh", Config{TTL: s, EarlyRefresh: math.NaN()}},
		{"XFetch", Config{TTL: s, XFetch: math.Inf(1)}},
		{"XFetch", Config{TTL: s, XFetch: math.NaN()}},
		{"SoftTimeout", Config{TTL: s, SoftTimeout: -1}},
		{"MaxErrorTTL", Config{TTL: s, MaxErrorTTL: -1}},
		{"MaxErrorTTL", Config{TTL: s, ErrorTTL: 2 * s, MaxErrorTTL: s}},
		{"MaxErrorTTL", Config{TTL: s, ErrorTTL: -1, MaxErrorTTL: s}},
		{"Tags", Config{TTL: s, Tags: []string{"a", ""}}},
		{"Tags", Config{TTL: s, Tags: make([]string, 65)}},
		{"LocalEntries", Config{TTL: s, LocalEntries: -1}},
		{"LocalEntries", Config{TTL: s, LocalEntries: maxLocalEntries + 1}},
		{"Shared", Config{TTL: s, Shared: (*memory.Store)(nil)}},
		{"Codec", Config{TTL: s, Codec: nameless{}}},
		{"Codec", Config{TTL: s, Codec: (*nameless)(nil)}},
	} {
		_, err := c.cfg.withDefaults()
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), ": "+c.field+": ") {
			t.Errorf("%+v: got %v, want ErrInvalid that names %s", c.cfg, err, c.field)
		}
	}
}

type nameless struct{ jsonCodec }

func (nameless) Name() string { return "" }

func TestConfigDefaults(t *testing.T) {
	c, err := Config{TTL: 5 * time.Second, StaleFor: time.Minute}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	c.Shared = nil
	want := Config{
		TTL: 5 * time.Second, StaleFor: time.Minute, StaleIfError: time.Minute, LocalTTL: 5 * time.Second,
		LockTTL: time.Second, StoreTimeout: 250 * time.Millisecond, LoadTimeout: 10 * time.Second, ErrorTTL: time.Second,
		MaxErrorTTL: time.Second, NotFoundTTL: 5 * time.Second, Jitter: 0.1,
		MaxLoads: 64, MaxWaiters: 10_000, LocalEntries: 10_000, LocalBytes: 64 << 20,
	}
	if c.TTL != want.TTL || c.StaleIfError != want.StaleIfError || c.LocalTTL != want.LocalTTL ||
		c.LockTTL != want.LockTTL || c.StoreTimeout != want.StoreTimeout || c.LoadTimeout != want.LoadTimeout ||
		c.ErrorTTL != want.ErrorTTL || c.MaxErrorTTL != want.MaxErrorTTL || c.NotFoundTTL != want.NotFoundTTL ||
		c.Jitter != want.Jitter || c.MaxLoads != want.MaxLoads || c.MaxWaiters != want.MaxWaiters ||
		c.LocalEntries != want.LocalEntries || c.LocalBytes != want.LocalBytes {
		t.Errorf("got  %+v\nwant %+v", c, want)
	}
	c, err = Config{TTL: time.Hour, LockTTL: 400 * time.Millisecond}.withDefaults()
	if err != nil || c.LocalTTL != time.Minute || c.NotFoundTTL != 10*time.Second ||
		c.StoreTimeout != 100*time.Millisecond {
		t.Errorf("got %+v, %v; want LocalTTL 1 min, NotFoundTTL 10 s, StoreTimeout 100 ms", c, err)
	}
	c, err = Config{
		TTL: time.Hour, LocalTTL: -1, StaleIfError: -1, ErrorTTL: -1, NotFoundTTL: -1, Jitter: -1, MaxLoads: -1,
		EarlyRefresh: -1, XFetch: -1,
	}.withDefaults()
	if err != nil || c.LocalTTL != 0 || c.StaleIfError != 0 || c.ErrorTTL != 0 || c.NotFoundTTL != 0 ||
		c.Jitter != 0 || c.MaxLoads < maxSlots {
		t.Errorf("got %+v, %v; want all settings off", c, err)
	}
}
