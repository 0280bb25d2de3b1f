package httprefill

import (
	"net/http"
	"strings"
)

// This file decides from a request whether the cache may answer it, and with which credentials it came. fillRequest
// makes the request that the handler gets when the response may be for all clients.

// class is the set of credentials that came with a request.
type class uint8

const (
	withCookie class = 1 << iota
	withAuthorization
	allClasses = withCookie | withAuthorization
)

func classOf(r *http.Request) class {
	var c class
	if len(r.Header["Cookie"]) > 0 {
		c |= withCookie
	}
	if len(r.Header["Authorization"]) > 0 || r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		c |= withAuthorization
	}
	return c
}

// bypassFields lists the fields of requests that only the handler can answer. Such a request wants a part of the
// response or another protocol, states a condition that protects a write, or claims to be a different request.
var bypassFields = [...]string{
	"Range", "Upgrade", "Expect", "If-Match", "If-Unmodified-Since",
	"X-Original-Url", "X-Rewrite-Url", "X-Http-Method", "X-Http-Method-Override", "X-Method-Override",
}

// eligible reports whether r may be answered from the cache.
func eligible(r *http.Request) bool {
	if r.Method != http.MethodGet && r.Method != http.MethodHead || r.ContentLength != 0 || len(r.TransferEncoding) > 0 {
		return false
	}
	for _, name := range bypassFields {
		if len(r.Header[name]) > 0 {
			return false
		}
	}
	for _, accept := range r.Header["Accept"] {
		if strings.Contains(strings.ToLower(accept), "text/event-stream") {
			return false
		}
	}
	return true
}

// fillRequest returns the request that the handler gets when its response may be for all clients: r as a plain GET.
// A condition would make the handler answer 304 to clients that have nothing yet. A URL in absolute form would let
// the client choose a scheme and a host that are not in the key. The host is spelled as in the key, so that a client
// that asks for GOOD.example does not put this spelling into the links of all clients.
//
// The copy is made before r is answered. A background refresh runs after the answer, when r must no longer be used.
func fillRequest(r *http.Request) *http.Request {
	fill := r.Clone(r.Context())
	fill.Body = http.NoBody
	fill.Host = hostOf(r)
	if fill.URL.Host != "" || fill.URL.Scheme != "" {
		fill.URL.Host, fill.URL.Scheme, fill.URL.User = "", "", nil
		fill.RequestURI = fill.URL.RequestURI()
	}
	for _, name := range [...]string{"If-None-Match", "If-Modified-Since", "If-Range"} {
		delete(fill.Header, name)
	}
	return fill
}
