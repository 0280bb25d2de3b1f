package httprefill

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// This file is what a request says: whether it may be answered from the cache at all, for whom, under which key, and
// what of it the handler gets to see on behalf of all.

// class says which credentials came with a request: a set of the bits below.
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

// goesStraight lists the fields that make a request one for the handler itself: it wants a part, a stream or another
// protocol, or states a condition that is not about saving a transfer, or claims to be another request than it looks.
var goesStraight = [...]string{
	"Range", "Upgrade", "Expect", "If-Match", "If-Unmodified-Since",
	"X-Original-Url", "X-Rewrite-Url", "X-Http-Method", "X-Http-Method-Override", "X-Method-Override",
}

// eligible reports whether r may be answered from the cache.
func eligible(r *http.Request) bool {
	if r.Method != http.MethodGet && r.Method != http.MethodHead || r.ContentLength != 0 || len(r.TransferEncoding) > 0 {
		return false
	}
	for _, name := range goesStraight {
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

// The fields that handlers behind a proxy make URLs of. They are part of the key, or else a client that reaches us with
// one of its own poisons the page for all.
const (
	forwardedHost   = "X-Forwarded-Host"
	forwardedProto  = "X-Forwarded-Proto"
	forwardedPrefix = "X-Forwarded-Prefix"
)

// keyOf is the key of the response to r.
func keyOf(r *http.Request) string {
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	return key(scheme, strings.Join(r.Header[forwardedProto], "\n"), r)
}

// keysOf lists the keys that a response to r may have, whoever spoke TLS to whom.
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

// maxKey is the longest key that is used as it is, in bytes.
const maxKey = 250

// key puts together what the response to r may depend on: "http 11.5.4 example.com/path?a=1". The numbers are the lengths
// of the parts that follow, so that no two requests have the same key; parts that are empty at the end are left out.
//
// A long key is cut, and ends in the SHA-256 of all of it. It is longer than any whole one, so that nobody can ask for a
// URL that looks like it.
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

// rewrittenFrom is the path and query that the client asked for, if something has rewritten the URL on its way to this
// middleware: two handlers behind two StripPrefix see the same URL, and must not get one another's responses.
func rewrittenFrom(r *http.Request, path, query string) string {
	if rest, ok := strings.CutPrefix(r.RequestURI, path); r.RequestURI == "" || ok && rest == query {
		return ""
	}
	asked, err := url.ParseRequestURI(r.RequestURI)
	if err != nil {
		return r.RequestURI
	}
	// Absolute form, or written in another way than Go does: not rewritten.
	if asked.EscapedPath() == r.URL.EscapedPath() && asked.RawQuery == r.URL.RawQuery && asked.ForceQuery == r.URL.ForceQuery {
		return ""
	}
	return asked.RequestURI()
}

// fillRequest is what the handler gets to see when its response may be for all: r as a plain GET. A condition would
// make it answer 304 to those who have nothing yet; a URL in absolute form would let the client choose a scheme and a
// host that are not in the key.
//
// It is made while r still belongs to us: a refresh runs after the request has been answered.
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
