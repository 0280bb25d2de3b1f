package refill_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

// This file tests how New checks a Config: the bounds of settings, and the warnings about doubtful settings.

// New accepts a setting at its bound. Beyond the bound, New returns an error that names the field.
func TestConfigBounds(t *testing.T) {
	for name, cfg := range map[string]refill.Config{
		"a back-off that may not grow": {ErrorTTL: 5 * time.Second, MaxErrorTTL: 5 * time.Second},
		"the largest XFetch":           {XFetch: 100},
	} {
		cfg.TTL = time.Minute
		if l, err := refill.New("x", never(t), cfg); err != nil {
			t.Errorf("%s: got %v, want no error", name, err)
		} else {
			_ = l.Close()
		}
	}
	for name, cfg := range map[string]refill.Config{"BulkWindow": {BulkWindow: -1}, "XFetch": {XFetch: 101}} {
		cfg.TTL = time.Minute
		_, err := refill.New("x", never(t), cfg)
		if !errors.Is(err, refill.ErrInvalid) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: got %v, want ErrInvalid that names the field", name, err)
		}
	}
}

// If a setting has no effect or a surprising effect, New accepts the setting. New must then report one warning that
// names the field.
func TestConfigWarnings(t *testing.T) {
	for field, cfg := range map[string]refill.Config{
		" short": {TTL: time.Second}, // the default settings cause no warning
		"": {
			TTL: time.Minute, StaleFor: time.Hour, SoftTimeout: time.Second, EarlyRefresh: 0.9, LocalBytes: 1 << 20,
		},
		"SoftTimeout":  {TTL: time.Minute, SoftTimeout: time.Second},
		"LocalTTL":     {TTL: time.Minute, LocalTTL: time.Hour},
		"LoadTimeout":  {TTL: time.Minute, LoadTimeout: time.Hour},
		"NotFoundTTL":  {TTL: time.Minute, NotFoundTTL: time.Hour},
		"StaleIfError": {TTL: time.Minute, StaleFor: time.Hour, StaleIfError: time.Second},
		"ErrorTTL":     {TTL: time.Minute, ErrorTTL: time.Hour},
		"LocalBytes":   {TTL: time.Minute, LocalTTL: -1, LocalBytes: 1},
		"EarlyRefresh": {TTL: time.Minute, EarlyRefresh: 0.1},
	} {
		var warnings []error
		cfg.OnEvent = func(e refill.Event) {
			if e.Kind == refill.EventConfigWarning {
				warnings = append(warnings, e.Err)
			}
		}
		l, err := refill.New("x", never(t), cfg)
		if err != nil {
			t.Errorf("%s: got %v, want no error", field, err)
			continue
		}
		fine := field == "" || field == " short"
		switch {
		case fine && len(warnings) > 0:
			t.Errorf("%q: got warnings %q, want none", field, warnings)
		case !fine && (len(warnings) != 1 || !strings.HasPrefix(warnings[0].Error(), "refill: "+field+": ")):
			t.Errorf("%q: got warnings %q, want one that names the field", field, warnings)
		}
		_ = l.Close()
	}
}

// A Config with default settings must cause no warning, for short and long TTLs.
func TestNoWarningsAboutDefaults(t *testing.T) {
	for _, ttl := range []time.Duration{100 * ms, time.Second, time.Minute, 24 * time.Hour} {
		l := node(t, never(t), refill.Config{TTL: ttl, StaleIfError: time.Hour, OnEvent: func(e refill.Event) {
			if e.Kind == refill.EventConfigWarning {
				t.Errorf("TTL %v: got warning %v, want none", ttl, e.Err)
			}
		}})
		_ = l.Close()
	}
}
