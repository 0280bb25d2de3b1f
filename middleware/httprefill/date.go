package httprefill

import (
	"strings"
	"time"
)

// parseDate reads an HTTP-date (RFC 9110, 5.6.7): an IMF-fixdate, or one of the obsolete forms of RFC 850 and asctime.
// Letters may have any case (RFC 9111, 4.2). Nothing else is accepted, because an Expires that is not valid means that
// the response is stale. now decides the century of a year with two digits.
func parseDate(s string, now time.Time) (time.Time, bool) {
	for _, form := range [...]func(*dateScanner){imfFixdate, rfc850Date, asctimeDate} {
		d := dateScanner{rest: s}
		form(&d)
		if t, ok := d.time(now); ok {
			return t, true
		}
	}
	return time.Time{}, false
}

// imfFixdate reads "Sun, 06 Nov 1994 08:49:37 GMT".
func imfFixdate(d *dateScanner) { d.afterWeekday(3, " ", 4) }

// rfc850Date reads "Sunday, 06-Nov-94 08:49:37 GMT".
func rfc850Date(d *dateScanner) { d.afterWeekday(0, "-", 2) }

// afterWeekday reads a date whose weekday ends in a comma. weekday is the length of its name, as for name. Day, month
// and year have sep between them.
func (d *dateScanner) afterWeekday(weekday int, sep string, yearDigits int) {
	d.name(weekdays[:], weekday)
	d.text(", ")
	d.day = d.number(2)
	d.text(sep)
	d.month = 1 + d.name(months[:], 3)
	d.text(sep)
	d.year, d.shortYear = d.number(yearDigits), yearDigits == 2
	d.text(" ")
	d.clock()
	d.text(" GMT")
}

// asctimeDate reads "Sun Nov  6 08:49:37 1994".
func asctimeDate(d *dateScanner) {
	d.name(weekdays[:], 3)
	d.text(" ")
	d.month = 1 + d.name(months[:], 3)
	d.text(" ")
	if strings.HasPrefix(d.rest, " ") {
		d.text(" ")
		d.day = d.number(1)
	} else {
		d.day = d.number(2)
	}
	d.text(" ")
	d.clock()
	d.text(" ")
	d.year = d.number(4)
}

var (
	weekdays = [...]string{"sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday"}
	months   = [...]string{
		"january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
		"december",
	}
)

// dateScanner reads the parts of a date from the front of rest. At a part that does not fit, it sets bad.
type dateScanner struct {
	rest string
	bad  bool

	year, month, day, hour, minute, second int
	shortYear                              bool // year has two digits
}

func (d *dateScanner) text(s string) {
	if len(d.rest) < len(s) || !strings.EqualFold(d.rest[:len(s)], s) {
		d.bad = true
		return
	}
	d.rest = d.rest[len(s):]
}

func (d *dateScanner) number(digits int) (n int) {
	if len(d.rest) < digits {
		d.bad = true
		return 0
	}
	for _, c := range []byte(d.rest[:digits]) {
		if c < '0' || c > '9' {
			d.bad = true
			return 0
		}
		n = 10*n + int(c-'0')
	}
	d.rest = d.rest[digits:]
	return n
}

// name reads one of the names, cut to a length unless short is 0, and returns its index.
func (d *dateScanner) name(names []string, short int) int {
	for i, name := range names {
		if short > 0 {
			name = name[:short]
		}
		if len(d.rest) >= len(name) && strings.EqualFold(d.rest[:len(name)], name) {
			d.rest = d.rest[len(name):]
			return i
		}
	}
	d.bad = true
	return 0
}

func (d *dateScanner) clock() {
	d.hour = d.number(2)
	d.text(":")
	d.minute = d.number(2)
	d.text(":")
	d.second = d.number(2)
}

// time returns the date, if it has a valid form and exists. The second 60 is a leap second. A year of two digits that
// would be more than 50 years ahead is in the past (RFC 9110, 5.6.7).
func (d *dateScanner) time(now time.Time) (time.Time, bool) {
	if d.bad || d.rest != "" || d.hour > 23 || d.minute > 59 || d.second > 60 {
		return time.Time{}, false
	}
	year := d.year
	if d.shortYear {
		year += now.UTC().Year() / 100 * 100
		if d.in(year).After(now.AddDate(50, 0, 0)) {
			year -= 100
		}
	}
	t := d.in(year)
	return t, time.Date(year, time.Month(d.month), d.day, 0, 0, 0, 0, time.UTC).Day() == d.day
}

func (d *dateScanner) in(year int) time.Time {
	return time.Date(year, time.Month(d.month), d.day, d.hour, d.minute, d.second, 0, time.UTC)
}
