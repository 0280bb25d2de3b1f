package goredis

import (
	"strconv"
	"strings"

	"github.com/refill-go/refill/driver"
)

// lua/common.lua writes an announcement in this format:
//
//	RN1 <kind> <t> <r> <k> <token><replaced><key><rest>
//
// <t>, <r> and <k> are the lengths of <token>, <replaced> and <key> in bytes, as decimal numbers. So these three
// fields may contain any bytes. <key> is "name:key". The kinds are:
//
//	f  filled            replaced is the token of the record that was replaced, rest is the new record if it is small
//	x  failed            rest is the failure
//	i  invalidated
//	e  expired
//	r  released
//	u  unlocked          a user's lock, not a lease
//	I  tag-invalidated   <key> is "name:tag", rest is the moment: microseconds since 1970, in decimal
//	E  tag-expired       as for I
//
// parseAnnouncement ignores a message of any other format. So a later release may add RN2 on the same channel.

// unlocked is the kind "u": a user's lock was freed. Such an announcement wakes the watchers of the lock. It is passed
// to no Loader.
const unlocked driver.AnnouncementKind = 255

const announcementMagic = "RN1 "

var announcementKinds = map[string]driver.AnnouncementKind{
	"f": driver.Filled,
	"x": driver.Failed,
	"i": driver.Invalidated,
	"e": driver.Expired,
	"r": driver.Released,
	"u": unlocked,

	kindTagInvalidated: driver.TagInvalidated,
	kindTagExpired:     driver.TagExpired,
}

// lua/changetag.lua gets one of these kinds of announcements as an argument.
const (
	kindTagInvalidated = "I"
	kindTagExpired     = "E"
)

// parseAnnouncement reads a message. The Record of the result is a copy, and all listeners share this copy.
func parseAnnouncement(message string) (a driver.Announcement, ok bool) {
	text, ok := strings.CutPrefix(message, announcementMagic)
	if !ok {
		return a, false
	}
	kind, text, _ := strings.Cut(text, " ")
	if a.Kind, ok = announcementKinds[kind]; !ok {
		return a, false
	}
	var lengths [3]int
	for i := range lengths {
		var digits string
		digits, text, _ = strings.Cut(text, " ")
		if lengths[i], ok = parseLength(digits); !ok {
			return a, false
		}
	}
	for i, field := range []*string{&a.Token, &a.Replaced, &a.Key} {
		if lengths[i] > len(text) {
			return a, false
		}
		*field, text = text[:lengths[i]], text[lengths[i]:]
	}
	if strings.IndexByte(a.Key, ':') < 1 {
		return a, false
	}
	switch {
	case a.Kind == driver.Failed:
		a.Failure = text
	case a.Kind == driver.Filled && text != "":
		a.Record = []byte(text)
	case a.Kind == driver.TagInvalidated || a.Kind == driver.TagExpired:
		a.At, ok = parseMoment(text)
		return a, ok && !a.At.IsZero()
	case text != "":
		return a, false
	}
	return a, true
}

// parseLength reads a number in its canonical form: no sign, no leading zero.
func parseLength(digits string) (int, bool) {
	n, err := strconv.ParseUint(digits, 10, 31)
	return int(n), err == nil && strconv.FormatUint(n, 10) == digits
}
