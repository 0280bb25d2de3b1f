package httprefill

import (
	"net/http"
	"testing"
	"time"
)

func TestParseDate(t *testing.T) {
	want := time.Date(1994, 11, 6, 8, 49, 37, 0, time.UTC)
	for _, s := range []string{
		"Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994",
		"sun, 06 nov 1994 08:49:37 gmt", "SUNDAY, 06-NOV-94 08:49:37 GMT", "SUN NOV  6 08:49:37 1994",
		"Sun Nov 06 08:49:37 1994",
	} {
		if got, ok := parseDate(s, noon); !ok || !got.Equal(want) {
			t.Errorf("%q: %v, %v", s, got, ok)
		}
	}
	for _, s := range []string{
		"", "0", "-1", "Sun", "Sun, 06 Nov 1994 08:49:37", "Sun, 06 Nov 1994 08:49:37 UTC",
		"Sun, 06 Nov 1994 08:49:37 AEST", "Sun, 06 Nov 1994 08:49:37 +0000", "Sun, 06 Nov 94 08:49:37 GMT",
		"Sun 06 Nov 1994 08:49:37 GMT", "Sun,  06 Nov 1994 08:49:37 GMT", "Sun, 06  Nov 1994 08:49:37 GMT",
		"Sun, 06-Nov-1994 08:49:37 GMT", "Sun, 06 Nov 1994 08.49.37 GMT", "Sun, 06 Nov 1994 8:49:37 GMT",
		"Sun, 6 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49 GMT", "Sun, 06 Nov 1994 08:49:37 GMT ",
		" Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06 Nov 1994 08:49:37 GMT", "Sun, 06-Nov-94 08:49:37 GMT",
		"Sunday, 06-Nov-1994 08:49:37 GMT", "Sun Nov 6 08:49:37 1994", "Sun Nov  6 08:49:37 1994 GMT",
		"Sun, 31 Feb 1994 08:49:37 GMT", "Sun, 00 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 24:00:00 GMT",
		"Sun, 06 Nov 1994 08:60:00 GMT", "Sun, 06 Nov 1994 08:49:61 GMT", "Xyz, 06 Nov 1994 08:49:37 GMT",
		"Sun, 06 Xyz 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49:37 GMT, Sun, 06 Nov 1994 08:49:37 GMT",
		"Sun, \uff10\uff16 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 19\u212a4 08:49:37 GMT", "1994-11-06T08:49:37Z",
	} {
		if got, ok := parseDate(s, noon); ok {
			t.Errorf("%q: %v", s, got)
		}
	}
}

// A year of two digits is at most 50 years ahead of now, which is 2026.
func TestParseDateWithAShortYear(t *testing.T) {
	for year, want := range map[string]int{"26": 2026, "75": 2075, "76": 2076, "77": 1977, "99": 1999, "00": 2000} {
		if got, ok := parseDate("Friday, 20-Nov-"+year+" 10:00:00 GMT", noon); !ok || got.Year() != want {
			t.Errorf("%s: %v, %v; want %d", year, got, ok, want)
		}
	}
}

// Every date that net/http sends must be read, and what is read must not change when it is sent again.
func FuzzParseDate(f *testing.F) {
	f.Add("Sun, 06 Nov 1994 08:49:37 GMT", int64(784111777))
	f.Add("Sunday, 06-Nov-94 08:49:37 GMT", int64(0))
	f.Add("Sun Nov  6 08:49:37 1994", int64(-1))
	f.Fuzz(func(t *testing.T, s string, unix int64) {
		if d, ok := parseDate(s, noon); ok {
			again, ok := parseDate(d.Format(http.TimeFormat), noon)
			if d.Year() <= 9999 && (!ok || !again.Equal(d)) {
				t.Errorf("%q: %v, then %v, %v", s, d, again, ok)
			}
		}
		d := time.Unix(unix, 0).UTC()
		if y := d.Year(); y < 0 || y > 9999 {
			return
		}
		if got, ok := parseDate(d.Format(http.TimeFormat), noon); !ok || !got.Equal(d) {
			t.Errorf("%v: %v, %v", d, got, ok)
		}
	})
}
