package httprefill

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// This file decides about responses in three steps: mayStore (RFC 9111, 3), howLong (4.2) and mayReuse (4). The
// functions are pure: the time is an argument. In doubt a response is not shared. The numbers in the comments are
// sections of RFC 9111.

// verdict is the decision about one response.
type verdict struct {
	kind kind
	why  error // not shared: the reason; failed: a *failure

	// The fields below belong to a shared response.
	freshness
	open class    // requests with these credentials may get the response as well
	drop []string // fields that are not stored, see cacheControl.drop
}

type kind uint8

const (
	uncacheable kind = iota // only for the request that it was made for
	shared                  // for all requests, and for the store
	failed                  // no response, but an error
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

// judge decides about a response to a request of class c. The run began at began, and the header came at now. A 5xx
// response that says how long it is fresh is a response like any other. Without that, it is a failure.
func judge(status int, h http.Header, c class, t terms, began, now time.Time) verdict {
	cc := parseCacheControl(h["Cache-Control"])
	v := verdict{kind: shared, open: cc.opens(), drop: cc.drop}
	why := mayStore(status, h, &cc)
	if why == nil && !mayReuse(v.open, c) {
		why = errors.New("the request had credentials, and the response is not public")
	}
	v.freshness = howLong(h, &cc, t, began, now)
	if why == nil && v.lifetime <= v.age {
		why = errors.New("no explicit lifetime is left")
	}
	switch {
	case why == nil:
		return v
	case status >= 500:
		return verdict{kind: failed, why: &failure{status: status}}
	}
	return verdict{why: why}
}

// mayStore returns why a response must not be stored, or nil (3). howLong decides whether storing it makes sense.
func mayStore(status int, h http.Header, cc *cacheControl) error {
	switch {
	case status < 200 || status > 999 || status == http.StatusPartialContent || status == http.StatusNotModified:
		return errors.New("status " + strconv.Itoa(status))
	case cc.bad:
		return errors.New("Cache-Control cannot be parsed")
	case cc.mustUnderstand && !understood(status): // 5.2.2.3
		return errors.New("must-understand, and status " + strconv.Itoa(status))
	case cc.noStore && !cc.mustUnderstand, cc.noCache, cc.private:
		return errors.New("Cache-Control: " + strings.Join(h["Cache-Control"], ", "))
	}
	if name := bound(h); name != "" {
		return errors.New(name)
	}
	return nil
}

// understood reports whether this cache knows what a status means for caching: the statuses of RFC 9110 but 206 and
// 304, which concern stored responses.
func understood(status int) bool {
	switch {
	case status >= 200 && status <= 205, status >= 300 && status <= 308 && status != 304 && status != 306:
		return true
	case status >= 400 && status <= 417, status == 421, status == 422, status == 426, status >= 500 && status <= 505:
		return true
	}
	return false
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

// opens returns the credentials that a request may carry and still get the response from the cache. 0 means that only
// requests without credentials may get it. For Authorization, the rules are those of 3.5. The RFC does not mention
// cookies. Here a request with cookies may get the response only if the response has public or s-maxage.
func (cc *cacheControl) opens() class {
	switch {
	case cc.public || cc.sMaxAge.set:
		return allClasses
	case cc.mustRevalidate:
		return withAuthorization
	}
	return 0
}

// mayReuse reports whether a request of class c may get a stored response that is open to the classes in open (3.5, 4).
// The Loader judges the age of the response.
func mayReuse(open, c class) bool { return c&^open == 0 }

// freshness says how long a response may be served.
type freshness struct {
	lifetime     time.Duration // counted from the moment when the response was generated (4.2.1); 0 = not said
	age          time.Duration // how old the response was when its run began (4.2.3)
	staleFor     time.Duration // how long the response may be served stale, after its lifetime (4.2.4)
	staleIfError time.Duration // how long the response may be served in place of an error, after its lifetime
}

// howLong returns how long a response is fresh and may be served stale.
func howLong(h http.Header, cc *cacheControl, t terms, began, now time.Time) (f freshness) {
	f.age = ageOf(h, began, now)
	f.lifetime = min(cc.lifetime(h, now), f.age+t.most)
	f.staleFor, f.staleIfError = cc.stale(t)
	return f
}

// lifetime returns how long the response is fresh, counted from its generation (4.2.1). It returns 0 if the response
// does not say how long. A directive that is there but not valid makes the response stale, whatever Expires says. So
// does an Expires that is not valid, or that has more than one line (5.3).
func (cc *cacheControl) lifetime(h http.Header, now time.Time) time.Duration {
	switch expires := h["Expires"]; {
	case cc.sMaxAge.set:
		return cc.sMaxAge.d
	case cc.maxAge.set:
		return cc.maxAge.d
	case len(expires) == 1:
		if until, ok := parseDate(expires[0], now); ok {
			return max(0, until.Sub(dateOf(h, now)))
		}
	}
	return 0
}

// stale returns how long the response may be served stale, and how long in place of an error (4.2.4). Without a
// directive of RFC 5861, the settings of Config count. must-revalidate, proxy-revalidate and s-maxage forbid both, also
// beside such a directive (5.2.2.2, 5.2.2.8, 5.2.2.10).
func (cc *cacheControl) stale(t terms) (staleFor, staleIfError time.Duration) {
	if cc.mustRevalidate || cc.proxyRevalidate || cc.sMaxAge.set {
		return 0, 0
	}
	staleFor, staleIfError = t.staleFor, t.staleIfError
	if cc.staleWhileRevalidate.set {
		staleFor = cc.staleWhileRevalidate.d
	}
	if cc.staleIfError.set {
		staleIfError = cc.staleIfError.d
	}
	return staleFor, staleIfError
}

// ageOf returns how old the response was when its run began (4.2.3). Age and Date may give different ages, and the
// larger one counts. Age is from the moment of the request. Date is compared with the moment of the response, so the
// time that the run took until then is no part of the age at its beginning.
func ageOf(h http.Header, began, now time.Time) time.Duration {
	var age time.Duration
	if values := h["Age"]; len(values) > 0 {
		first, _, _ := strings.Cut(values[0], ",")
		age, _ = parseSeconds(strings.TrimSpace(first)) // 0 if first is not a number
	}
	apparent := now.Sub(dateOf(h, now)).Truncate(time.Second) // a Date has whole seconds
	return max(age, apparent-now.Sub(began), 0)
}

// dateOf returns the Date of the response, or now if there is no Date, or not exactly one that can be parsed (RFC 9110,
// 6.6.1).
func dateOf(h http.Header, now time.Time) time.Time {
	if values := h["Date"]; len(values) == 1 {
		if t, ok := parseDate(values[0], now); ok {
			return t
		}
	}
	return now
}

// without returns h without the named fields. It returns h itself if there is nothing to leave out.
func without(h http.Header, names []string) http.Header {
	if !slices.ContainsFunc(names, func(name string) bool { return h[name] != nil }) {
		return h
	}
	h = h.Clone()
	for _, name := range names {
		delete(h, name)
	}
	return h
}
