package httprefill

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// This file decides from a status and a header whether a response may be shared, and for how long. The functions are
// pure: now is an argument. In doubt a response is not shared.

// verdict is the decision about one response.
type verdict struct {
	kind kind
	why  error // not shared: the reason; failed: a *failure

	// The fields below belong to a shared response.
	lifetime     time.Duration // counted from the moment when the response was generated
	age          time.Duration // how old the response was when it reached this node
	staleFor     time.Duration // how long the response may be served stale, after its lifetime
	staleIfError time.Duration // how long the response may be served in place of an error, after its lifetime
	open         class         // requests with these credentials may get the response as well
}

type kind uint8

const (
	uncacheable kind = iota // only for the request that it was made for
	shared                  // for all requests, and for the store
	failed                  // no response, but an error that all waiters get
)

func notShared(format string, args ...any) verdict {
	return verdict{why: fmt.Errorf(format, args...)}
}

// terms holds the settings of Config that limit lifetimes.
type terms struct {
	most         time.Duration // Config.TTL: the upper limit of lifetime - age
	staleFor     time.Duration // Config.StaleFor, for a response without stale-while-revalidate
	staleIfError time.Duration // Config.StaleIfError, for a response without stale-if-error; 0 = off
}

// cacheable lists the statuses that may be shared if the response says for how long.
var cacheable = [...]int{
	http.StatusOK, http.StatusNonAuthoritativeInfo, http.StatusNoContent, http.StatusMovedPermanently,
	http.StatusPermanentRedirect, http.StatusNotFound, http.StatusGone,
}

// judge decides about a response to a request of class c.
func judge(status int, h http.Header, c class, t terms, now time.Time) verdict {
	if status >= 500 {
		return verdict{kind: failed, why: &failure{status: status}}
	}
	if !slices.Contains(cacheable[:], status) {
		return notShared("status %d", status)
	}
	if v := bound(h); v != "" {
		return notShared("%s", v)
	}
	cc := parseCacheControl(h["Cache-Control"])
	if cc.forbids {
		return notShared("Cache-Control: %s", strings.Join(h["Cache-Control"], ", "))
	}
	v := verdict{kind: shared, age: ageOf(h, now), open: cc.opens()}
	if c&^v.open != 0 {
		return notShared("the request had credentials, and the response is not public")
	}
	v.lifetime = min(cc.lifetime(h, now), v.age+t.most)
	if v.lifetime <= v.age {
		return notShared("no explicit lifetime is left")
	}
	v.staleFor, v.staleIfError = cc.stale(t)
	return v
}

// stale returns how long the response may be served stale, and how long in place of an error. Without a directive of
// RFC 5861, the settings of Config count. must-revalidate and proxy-revalidate forbid both. s-maxage implies
// proxy-revalidate (RFC 9111, 5.2.2.10), so s-maxage forbids to serve the response in place of an error, and excludes
// Config.StaleFor. But s-maxage leaves the stale-while-revalidate that the response itself asks for.
func (cc *cacheControl) stale(t terms) (staleFor, staleIfError time.Duration) {
	if cc.strict {
		return 0, 0
	}
	if !cc.hasSMaxAge {
		staleFor, staleIfError = t.staleFor, t.staleIfError
	}
	if cc.hasSWR {
		staleFor = cc.swr
	}
	if cc.hasSIE && !cc.hasSMaxAge {
		staleIfError = cc.sie
	}
	return staleFor, staleIfError
}

// bound returns the name of a header field that binds a response to the request that it was made for, whatever
// Cache-Control says. It returns "" if the response has no such field.
func bound(h http.Header) string {
	for _, name := range [...]string{
		"Set-Cookie", "Set-Cookie2", "Vary", "Content-Encoding", "Content-Range", "Upgrade", "Trailer",
		"Transfer-Encoding",
	} {
		if len(h[name]) > 0 {
			return name
		}
	}
	for _, origin := range h["Access-Control-Allow-Origin"] {
		if origin != "*" {
			return "Access-Control-Allow-Origin"
		}
	}
	for _, kind := range h["Content-Type"] {
		kind = strings.ToLower(kind)
		if strings.Contains(kind, "text/event-stream") || strings.Contains(kind, "multipart/x-mixed-replace") {
			return "Content-Type: " + kind
		}
	}
	return ""
}

// cacheControl is the part of Cache-Control that matters to a shared cache.
type cacheControl struct {
	forbids bool // no-store, no-cache, private, or cannot be parsed
	public  bool
	strict  bool // must-revalidate or proxy-revalidate
	must    bool // must-revalidate

	maxAge, sMaxAge, swr, sie             time.Duration // swr is stale-while-revalidate, sie is stale-if-error
	hasMaxAge, hasSMaxAge, hasSWR, hasSIE bool
}

// opens returns the credentials with which a request may get the response from the cache. The rules are those of RFC
// 9111, 3.5. Cookies, which the RFC does not mention, need public or s-maxage.
func (cc *cacheControl) opens() class {
	switch {
	case cc.public || cc.hasSMaxAge:
		return allClasses
	case cc.must:
		return withAuthorization
	}
	return 0
}

// lifetime returns how long the response is fresh, counted from its generation. It returns 0 if the response does
// not say how long.
func (cc *cacheControl) lifetime(h http.Header, now time.Time) time.Duration {
	switch expires := h["Expires"]; {
	case cc.hasSMaxAge:
		return cc.sMaxAge
	case cc.hasMaxAge:
		return cc.maxAge
	case len(expires) == 1:
		until, ok := parseDate(expires[0])
		if !ok {
			return 0
		}
		if date, ok := dateOf(h, now); ok {
			return max(0, until.Sub(date))
		}
	}
	return 0
}

// ageOf returns how old a response already is. Age and Date may give different ages, and the larger one counts.
func ageOf(h http.Header, now time.Time) time.Duration {
	var age time.Duration
	if values := h["Age"]; len(values) > 0 {
		first, _, _ := strings.Cut(values[0], ",")
		age, _ = parseSeconds(strings.TrimSpace(first)) // 0 if first is not a number
	}
	if date, ok := dateOf(h, now); ok {
		age = max(age, now.Sub(date).Truncate(time.Second)) // a Date has whole seconds
	}
	return age
}

// dateOf returns the Date of the response, or now if the response has no Date. It returns false if the Date cannot
// be parsed.
func dateOf(h http.Header, now time.Time) (time.Time, bool) {
	switch values := h["Date"]; len(values) {
	case 0:
		return now, true
	case 1:
		return parseDate(values[0])
	}
	return time.Time{}, false
}

// parseDate accepts only an IMF-fixdate.
func parseDate(s string) (time.Time, bool) {
	t, err := time.Parse(http.TimeFormat, s)
	return t, err == nil && t.Format(http.TimeFormat) == s
}

// parseSeconds reads delta-seconds, which are digits only. A number that is too large counts as about 68 years.
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

// parseCacheControl reads the lines of a Cache-Control. If a directive occurs twice, the smaller number counts. A
// number that cannot be parsed counts as 0. Unknown directives are skipped.
func parseCacheControl(lines []string) cacheControl {
	var cc cacheControl
	rest := strings.Join(lines, ",")
	for rest != "" {
		var directive string
		var ok bool
		directive, rest, ok = cutDirective(rest)
		if !ok {
			cc.forbids = true
			return cc
		}
		name, value, _ := strings.Cut(directive, "=")
		cc.add(strings.ToLower(strings.TrimSpace(name)), strings.TrimSpace(value))
	}
	return cc
}

func (cc *cacheControl) add(name, value string) {
	switch name {
	case "no-store", "no-cache", "private":
		cc.forbids = true
	case "public":
		cc.public = true
	case "must-revalidate":
		cc.must, cc.strict = true, true
	case "proxy-revalidate":
		cc.strict = true
	case "max-age":
		smaller(&cc.maxAge, &cc.hasMaxAge, value)
	case "s-maxage":
		smaller(&cc.sMaxAge, &cc.hasSMaxAge, value)
	case "stale-while-revalidate":
		smaller(&cc.swr, &cc.hasSWR, value)
	case "stale-if-error":
		smaller(&cc.sie, &cc.hasSIE, value)
	}
}

func smaller(field *time.Duration, has *bool, value string) {
	d, _ := parseSeconds(value)
	if !*has || d < *field {
		*field, *has = d, true
	}
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
