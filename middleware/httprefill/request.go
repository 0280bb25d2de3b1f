package httprefill

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// This file decides from a request whether the cache may answer it, with which credentials it came, and which key it
// has. fillRequest makes the request that the handler gets when the response may be for all clients.

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

// Handlers behind a proxy make URLs from the header fields below, so these fields are part of the key. Otherwise a
// client that sends such a field would poison the page for all clients.
const (
	forwardedHost   = "X-Forwarded-Host"
	forwardedProto  = "X-Forwarded-Proto"
	forwardedPrefix = "X-Forwarded-Prefix"
)

// keyOf returns the key of the response to r.
func keyOf(r *http.Request) string {
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	return key(scheme, strings.Join(r.Header[forwardedProto], "\n"), r)
}

// keysOf lists the keys that a response to r may have. The key depends on where TLS ends: at this server, at a proxy,
// or nowhere.
func keysOf(r *http.Request) []string {
	protos := []string{"", "http", "https"}
	if sent := strings.Join(r.Header[forwardedProto], "\n"); sent != "" && sent != "http" && sent != "https" {
		protos = append(protos, sent)
	}
	var keys []string
	for _, proto := range protos {
		keys = append(keys, key("http", proto, r), key("https", proto, r))
	}
	return keys
}

// maxKey is the length, in bytes, of the longest key that is not cut.
const maxKey = 250

// key joins everything that the response to r may depend on: "http 11.5.4 example.com/path?a=1". The numbers are the
// lengths of the parts that follow them, so that different requests have different keys. Empty parts at the end are
// left out.
//
// A long key is cut, and ends in the SHA-256 of the whole key. A cut key is longer than any key that is not cut, so no
// client can ask for another URL with the same key.
func key(scheme, proto string, r *http.Request) string {
	host := r.Host
	if host == "" {
		host = r.URL.Host
	}
	path := r.URL.EscapedPath()
	if path == "" {
		path = "/"
	}
	query := r.URL.RawQuery
	if query != "" || r.URL.ForceQuery {
		query = "?" + query
	}
	parts := []string{
		strings.ToLower(host), path, query, rewrittenFrom(r, path, query), proto,
		strings.Join(r.Header[forwardedHost], "\n"), strings.Join(r.Header[forwardedPrefix], "\n"),
	}
	for parts[len(parts)-1] == "" {
		parts = parts[:len(parts)-1]
	}
	b := make([]byte, 0, 128)
	b = append(b, scheme...)
	for i, part := range parts {
		b = append(b, " ."[min(i, 1)])
		b = strconv.AppendInt(b, int64(len(part)), 10)
	}
	b = append(b, ' ')
	for _, part := range parts {
		b = append(b, part...)
	}
	if len(b) <= maxKey {
		return string(b)
	}
	sum := sha256.Sum256(b)
	const hash = 2 * sha256.Size
	return string(b[:maxKey-hash]) + "#" + hex.EncodeToString(sum[:])
}

// rewrittenFrom returns the path and query that the client asked for, if another handler rewrote the URL before this
// middleware. Otherwise it returns "". Two handlers behind two StripPrefix see the same URL, but must not get each
// other's responses. So the key holds the path that the client asked for.
func rewrittenFrom(r *http.Request, path, query string) string {
	if rest, ok := strings.CutPrefix(r.RequestURI, path); r.RequestURI == "" || ok && rest == query {
		return ""
	}
	asked, err := url.ParseRequestURI(r.RequestURI)
	if err != nil {
		return r.RequestURI
	}
	// Here the request target has the absolute form, or another spelling than Go gives it. No handler rewrote the URL.
	if asked.EscapedPath() == r.URL.EscapedPath() && asked.RawQuery == r.URL.RawQuery &&
		asked.ForceQuery == r.URL.ForceQuery {
		return ""
	}
	return asked.RequestURI()
}

// fillRequest returns the request that the handler gets when its response may be for all clients: r as a plain GET.
// A condition would make the handler answer 304 to clients that have nothing yet. A URL in absolute form would let
// the client choose a scheme and a host that are not in the key.
//
// The copy is made before r is answered. A background refresh runs after the answer, when r must no longer be used.
func fillRequest(r *http.Request) *http.Request {
	fill := r.Clone(r.Context())
	fill.Body = http.NoBody
	if fill.URL.Host != "" || fill.URL.Scheme != "" {
		fill.URL.Host, fill.URL.Scheme, fill.URL.User = "", "", nil
		fill.RequestURI = fill.URL.RequestURI()
	}
	for _, name := range [...]string{"If-None-Match", "If-Modified-Since", "If-Range"} {
		delete(fill.Header, name)
	}
	return fill
}
