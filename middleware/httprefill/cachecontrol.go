package httprefill

import (
	"net/http"
	"strconv"
	"strings"
	"time"
)

// cacheControl is the part of a response's Cache-Control that matters to a shared cache (RFC 9111, 5.2.2; RFC 5861).
type cacheControl struct {
	bad bool // a quoted string does not end

	noStore, noCache, private, public, mustRevalidate, proxyRevalidate, mustUnderstand bool

	drop []string // the canonical names of the fields that no-cache="…" and private="…" list

	maxAge, sMaxAge, staleWhileRevalidate, staleIfError seconds
}

// seconds is a time that a directive may have set.
type seconds struct {
	d   time.Duration
	set bool
}

// parseCacheControl reads the lines of a Cache-Control. If a directive occurs twice, the first one counts (4.2.1). A
// number that cannot be parsed counts as 0, so the response is stale. Unknown directives are skipped.
func parseCacheControl(lines []string) cacheControl {
	var cc cacheControl
	rest := strings.Join(lines, ",")
	for rest != "" {
		var directive string
		var ok bool
		directive, rest, ok = cutDirective(rest)
		if !ok {
			cc.bad = true
			return cc
		}
		name, value, has := strings.Cut(directive, "=")
		cc.add(strings.ToLower(strings.TrimSpace(name)), unquote(strings.TrimSpace(value)), has)
	}
	return cc
}

// add notes a directive. has says that the directive has a value.
func (cc *cacheControl) add(name, value string, has bool) {
	switch name {
	case "no-store":
		cc.noStore = true
	case "no-cache":
		cc.noCache = cc.noCache || !has || !cc.addDrop(value)
	case "private":
		cc.private = cc.private || !has || !cc.addDrop(value)
	case "public":
		cc.public = true
	case "must-revalidate":
		cc.mustRevalidate = true
	case "proxy-revalidate":
		cc.proxyRevalidate = true
	case "must-understand":
		cc.mustUnderstand = true
	case "max-age":
		cc.maxAge.first(value)
	case "s-maxage":
		cc.sMaxAge.first(value)
	case "stale-while-revalidate":
		cc.staleWhileRevalidate.first(value)
	case "stale-if-error":
		cc.staleIfError.first(value)
	}
}

// addDrop adds the field names of a list to drop. It returns false if the list is empty or not valid. Then the
// directive counts as if it had no list, and covers the whole response.
func (cc *cacheControl) addDrop(list string) (ok bool) {
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		if name == "" {
			continue
		}
		if !isToken(name) {
			return false
		}
		cc.drop, ok = append(cc.drop, http.CanonicalHeaderKey(name)), true
	}
	return ok
}

// isToken reports whether s is a token (RFC 9110, 5.6.2), as every field name is.
func isToken(s string) bool {
	for _, c := range []byte(s) {
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	return s != ""
}

func (s *seconds) first(value string) {
	if !s.set {
		s.d, _ = parseSeconds(value)
		s.set = true
	}
}

// parseSeconds reads delta-seconds, which are digits only. A number that is too large counts as 2³¹ (1.2.2).
func parseSeconds(s string) (time.Duration, bool) {
	if s == "" || strings.Trim(s, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n > 1<<31 {
		n = 1 << 31
	}
	return time.Duration(n) * time.Second, true
}

// cutDirective cuts s after the first comma outside of a quoted string. ok is false if a quoted string does not end.
func cutDirective(s string) (directive, rest string, ok bool) {
	quoted := false
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == '"':
			quoted = !quoted
		case s[i] == '\\' && quoted:
			i++
		case s[i] == ',' && !quoted:
			return s[:i], s[i+1:], true
		}
	}
	return s, "", !quoted
}

// unquote returns the text of a quoted string. Any other s is returned as it is.
func unquote(s string) string {
	if len(s) < 2 || s[0] != '"' || s[len(s)-1] != '"' {
		return s
	}
	s = s[1 : len(s)-1]
	if !strings.Contains(s, `\`) {
		return s
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) {
			i++
		}
		b = append(b, s[i])
	}
	return string(b)
}
