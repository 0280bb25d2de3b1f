package httprefill

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// This file makes the key of a request: everything that a response may depend on.

// Handlers behind a proxy make URLs from the header fields below, so these fields are part of the key. Otherwise a
// client that sends such a field would poison the page for all clients.
const (
	forwardedHost   = "X-Forwarded-Host"
	forwardedProto  = "X-Forwarded-Proto"
	forwardedPrefix = "X-Forwarded-Prefix"
)

// originFields lists further fields that handlers and frameworks make URLs from.
var originFields = [...]string{
	"Forwarded", "Front-End-Https", "X-Envoy-Original-Path", "X-Forwarded-Path", "X-Forwarded-Port",
	"X-Forwarded-Protocol", "X-Forwarded-Scheme", "X-Forwarded-Server", "X-Forwarded-Ssl", "X-Forwarded-Uri",
	"X-Forwarded-Url", "X-Host", "X-Http-Host-Override", "X-Original-Host", "X-Script-Name", "X-Url-Scheme",
}

// keyer makes the keys of requests.
type keyer struct {
	fields []string                   // further fields in the key: originFields and Config.KeyHeaders
	more   func(*http.Request) string // Config.Key, or nil
}

func newKeyer(headers []string, more func(*http.Request) string) keyer {
	k := keyer{fields: originFields[:len(originFields):len(originFields)], more: more}
	for _, name := range headers {
		k.fields = append(k.fields, http.CanonicalHeaderKey(name))
	}
	return k
}

// of returns the key of the response to r. page is a tag that the response has, so that Invalidate finds the responses
// to all requests that differ only in fields that Invalidate does not know. If the request has no such field, page is
// empty, because Invalidate can list the keys of such requests, see keysOf. A tag costs one command when another node
// reads the response.
func (k keyer) of(r *http.Request) (key, page string) {
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	var room [32]string // on the stack
	parts := partsOf(room[:0], r, strings.Join(r.Header[forwardedProto], "\n"))
	known := len(parts)
	for _, name := range k.fields {
		parts = append(parts, strings.Join(r.Header[name], "\n"))
	}
	if k.more != nil {
		parts = append(parts, k.more(r))
	}
	if parts = trim(parts); len(parts) > known {
		page = pageOf(r)
	}
	return join(scheme, parts), page
}

// keysOf lists the keys that a response to r may have, if its request has none of the further fields. The key depends
// on where TLS ends: at this server, at a proxy, or nowhere.
func keysOf(r *http.Request) []string {
	protos := []string{"", "http", "https"}
	if sent := strings.Join(r.Header[forwardedProto], "\n"); sent != "" && sent != "http" && sent != "https" {
		protos = append(protos, sent)
	}
	var keys []string
	for _, proto := range protos {
		parts := trim(partsOf(nil, r, proto))
		keys = append(keys, join("http", parts), join("https", parts))
	}
	return keys
}

// pageOf returns the tag of all responses that Invalidate(r) removes and keysOf(r) does not list.
func pageOf(r *http.Request) string { return join("page", trim(partsOf(nil, r, ""))) }

// partsOf appends to parts the parts of the key that Invalidate knows of.
func partsOf(parts []string, r *http.Request, proto string) []string {
	path := r.URL.EscapedPath()
	if path == "" {
		path = "/"
	}
	query := r.URL.RawQuery
	if query != "" || r.URL.ForceQuery {
		query = "?" + query
	}
	return append(parts,
		hostOf(r), path, query, rewrittenFrom(r, path, query), proto,
		strings.Join(r.Header[forwardedHost], "\n"), strings.Join(r.Header[forwardedPrefix], "\n"))
}

// hostOf returns the host of r as it is in the key.
func hostOf(r *http.Request) string {
	if r.Host == "" {
		return strings.ToLower(r.URL.Host)
	}
	return strings.ToLower(r.Host)
}

// trim returns parts without the empty parts at the end.
func trim(parts []string) []string {
	for len(parts) > 0 && parts[len(parts)-1] == "" {
		parts = parts[:len(parts)-1]
	}
	return parts
}

// maxKey is the length, in bytes, of the longest key that is not cut.
const maxKey = 250

// join joins the parts of a key: "http 11.5.4 example.com/path?a=1". The numbers are the lengths of the parts that
// follow them, so that different requests have different keys.
//
// A long key is cut, and ends in the SHA-256 of the whole key. A cut key is longer than any key that is not cut, so no
// client can ask for another URL with the same key.
func join(first string, parts []string) string {
	b := make([]byte, 0, 128)
	b = append(b, first...)
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
