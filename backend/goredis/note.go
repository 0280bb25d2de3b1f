package goredis

import (
	"strconv"
	"strings"

	"github.com/refill-go/refill"
)

// The format of an announcement, as lua/common.lua writes it:
//
//	RN1 <kind> <t> <r> <k> <token><replaced><key><rest>
//
// in one line of text up to the token; t, r and k are the lengths in bytes, in decimal, of what follows them, so that
// every one of these may hold any bytes. <key> is "name:key". The kinds:
//
//	f  filled            replaced is the token of the record replaced, rest the new record if it is small
//	x  failed            rest is the failure
//	i  invalidated
//	e  expired
//	r  released
//	u  unlocked          a user's lock, not a lease
//	I  tag-invalidated   <key> is "name:tag", rest the moment: microseconds since 1970, in decimal
//	E  tag-expired       the same
//
// Whatever does not read exactly like this is ignored, so that a later release may add RN2 on the same channel.

// noteUnlocked is what a Watch waits for. The Loader never sees it.
const noteUnlocked refill.NoteKind = 255

const noteMagic = "RN1 "

var noteKinds = map[string]refill.NoteKind{
	"f": refill.NoteFilled,
	"x": refill.NoteFailed,
	"i": refill.NoteInvalidated,
	"e": refill.NoteExpired,
	"r": refill.NoteReleased,
	"u": noteUnlocked,

	kindTagInvalidated: refill.NoteTagInvalidated,
	kindTagExpired:     refill.NoteTagExpired,
}

// The kinds that lua/voidtag.lua is told.
const (
	kindTagInvalidated = "I"
	kindTagExpired     = "E"
)

// parseNote reads an announcement. The record is a copy; all listeners share it.
func parseNote(message string) (n refill.Note, ok bool) {
	text, ok := strings.CutPrefix(message, noteMagic)
	if !ok {
		return n, false
	}
	kind, text, _ := strings.Cut(text, " ")
	if n.Kind, ok = noteKinds[kind]; !ok {
		return n, false
	}
	var lengths [3]int
	for i := range lengths {
		var digits string
		digits, text, _ = strings.Cut(text, " ")
		if lengths[i], ok = parseLength(digits); !ok {
			return n, false
		}
	}
	for i, field := range []*string{&n.Token, &n.Replaced, &n.Key} {
		if lengths[i] > len(text) {
			return n, false
		}
		*field, text = text[:lengths[i]], text[lengths[i]:]
	}
	if strings.IndexByte(n.Key, ':') < 1 {
		return n, false
	}
	switch {
	case n.Kind == refill.NoteFailed:
		n.Failure = text
	case n.Kind == refill.NoteFilled && text != "":
		n.Record = []byte(text)
	case n.Kind == refill.NoteTagInvalidated || n.Kind == refill.NoteTagExpired:
		n.At, ok = parseMoment(text)
		return n, ok && !n.At.IsZero()
	case text != "":
		return n, false
	}
	return n, true
}

// parseLength takes a number in its one canonical form.
func parseLength(digits string) (int, bool) {
	n, err := strconv.ParseUint(digits, 10, 31)
	return int(n), err == nil && strconv.FormatUint(n, 10) == digits
}
