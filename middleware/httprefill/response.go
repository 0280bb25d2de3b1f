package httprefill

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"
)

// response is the value that the Loader keeps: a complete response that may be shared, or the fact that the response
// is uncacheable. Requests share a response, so no code changes it.
type response struct {
	uncacheable bool // the response belongs to the one request that it was made for; never stored

	open     class         // requests with these credentials may get the response as well
	born     time.Time     // when the response was generated: the start of its run minus its Age
	lifetime time.Duration // counted from born
	spare    time.Duration // how long after its lifetime the response may be served, stale or in place of an error
	pattern  string        // Request.Pattern, if a ServeMux behind the middleware has set it
	status   int
	header   http.Header
	body     []byte
}

// serves reports whether a request of class c may get p. The Loader judges the age of p.
func (p *response) serves(c class) bool { return !p.uncacheable && mayReuse(p.open, c) }

// age returns the age of p. The result is never negative, although the node that stored p may have a clock ahead of
// this node's clock.
func (p *response) age(now time.Time) time.Duration { return max(0, now.Sub(p.born)) }

// write answers r with p. own is true if the handler ran for r.
func (p *response) write(w http.ResponseWriter, r *http.Request, own bool) {
	setPattern(r, p.pattern)
	h := w.Header()
	overlay(h, nil, p.header)
	now := time.Now()
	age := p.age(now)
	if !own || age >= time.Second {
		h.Set("Age", fmt.Sprintf("%d", age/time.Second))
	}
	outcome := "fwd=miss"
	if !own {
		outcome = fmt.Sprintf("hit; ttl=%d", int64((p.lifetime-age).Truncate(time.Second)/time.Second))
	}
	h.Add("Cache-Status", cacheName+"; "+outcome)
	switch {
	case notModified(r.Header, p):
		for _, name := range [...]string{"Content-Type", "Content-Length", "Content-Language"} {
			delete(h, name)
		}
		w.WriteHeader(http.StatusNotModified)
	case !bodyAllowed(p.status):
		w.WriteHeader(p.status)
	default:
		h.Set("Content-Length", fmt.Sprintf("%d", len(p.body)))
		w.WriteHeader(p.status)
		if r.Method != http.MethodHead {
			_, _ = w.Write(p.body) // an error means that the client has left
		}
	}
}

// cacheName is the name of this cache in Cache-Status.
const cacheName = "refill"

// notModified reports whether the client already has p. It evaluates those conditions of RFC 9110, 13.2.2, that a
// cache may evaluate itself.
func notModified(request http.Header, p *response) bool {
	if p.status != http.StatusOK {
		return false
	}
	if tags := request["If-None-Match"]; len(tags) > 0 {
		return matches(strings.Join(tags, ","), p.header.Get("ETag"))
	}
	since, modified := request["If-Modified-Since"], p.header["Last-Modified"]
	if len(since) != 1 || len(modified) != 1 {
		return false
	}
	has, ok := parseDate(since[0], time.Now())
	is, ok2 := parseDate(modified[0], time.Now())
	return ok && ok2 && !is.After(has)
}

// matches reports whether a list of entity tags contains tag, by weak comparison. An entity tag may contain commas, so
// matches does not split the list.
func matches(list, tag string) bool {
	tag = strings.TrimPrefix(tag, "W/")
	if strings.TrimSpace(list) == "*" {
		return true
	}
	if len(tag) < 2 || tag[0] != '"' {
		return false
	}
	for {
		list = strings.TrimPrefix(strings.TrimLeft(list, " \t,"), "W/")
		if list == "" || list[0] != '"' {
			return false
		}
		end := strings.IndexByte(list[1:], '"') + 2
		if end == 1 {
			return false
		}
		if list[:end] == tag {
			return true
		}
		list = list[end:]
	}
}

// bodyAllowed reports whether a final response of this status has a body.
func bodyAllowed(status int) bool {
	return status != http.StatusNoContent && status != http.StatusNotModified
}

// overlay puts the fields of from into h, in place of the fields that an outer middleware has set in h. A handler
// that writes straight to h would also replace those fields. Set-Cookie and Vary are not replaced. Their values are
// added to those in before, the fields that h had at first.
func overlay(h, before, from http.Header) {
	for name, values := range from {
		if name == "Set-Cookie" || name == "Vary" {
			values = append(slices.Clip(before[name]), values...)
		}
		h[name] = slices.Clone(values)
	}
}

// limits bounds the responses that may be shared, in bytes.
type limits struct {
	body   int // Config.MaxBody
	header int // Config.MaxHeader, see headerSize
}

// headerSize returns the length of h in bytes, as HTTP/1.1 sends it: one line per value.
func headerSize(h http.Header) (n int) {
	for name, values := range h {
		for _, value := range values {
			n += len(name) + len(": ") + len(value) + len("\r\n")
		}
	}
	return n
}

// canonical returns h with the names of its fields in canonical spelling. A handler may write h["set-cookie"] = …, and
// net/http sends such a field as it is. A test of the canonical name alone would overlook the field, and the cookie of
// one user would be stored for all users. If a field has several spellings, the result has the values of all of them,
// those of the canonical spelling first. canonical returns h itself if all names are canonical.
func canonical(h http.Header) http.Header {
	var others []string
	for name := range h {
		if http.CanonicalHeaderKey(name) != name {
			others = append(others, name)
		}
	}
	if len(others) == 0 {
		return h
	}
	c := maps.Clone(h)
	slices.Sort(others)
	for _, name := range others {
		delete(c, name)
	}
	for _, name := range others {
		key := http.CanonicalHeaderKey(name)
		c[key] = append(slices.Clip(c[key]), h[name]...)
	}
	return c
}

// storable returns a copy of h that may be stored and sent to other clients. The copy lacks the fields that concern
// one connection, and the fields that write sets for each answer.
func storable(h http.Header, now time.Time) http.Header {
	h = h.Clone()
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			h.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range [...]string{
		"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authentication-Info",
		"Proxy-Authorization", "Te", "Age", "Content-Length",
	} {
		delete(h, name)
	}
	if _, set := h["Date"]; !set { // without a stored Date, the server would set a new Date in each answer
		h.Set("Date", now.UTC().Format(http.TimeFormat))
	}
	return h
}

// setPattern sets the Pattern of a request that was answered, as the ServeMux behind the middleware has set it in the
// request of the handler's run. A middleware outside reads it, for instance to count requests by route.
func setPattern(r *http.Request, pattern string) {
	if pattern != "" {
		r.Pattern = pattern
	}
}

// codec is the encoding of responses, version 2. A field is a uvarint, or has the given number of bytes. The length of
// a string precedes the string:
//
//	1 version · 1 flags (1 cookie, 2 authorization) · 8 born in µs since 1970, big-endian · lifetime in µs ·
//	spare in µs · pattern · status · number of fields, then each, by name in ascending order: name · number of values,
//	then each · body
type codec struct{}

const (
	version           = 2
	flagCookie        = 1
	flagAuthorization = 2
	allFlags          = flagCookie | flagAuthorization
)

// Name is stored in every record.
func (codec) Name() string { return "httprefill2" }

// Marshal encodes a *response.
func (codec) Marshal(v any) ([]byte, error) {
	p, ok := v.(*response)
	if !ok || p == nil || p.uncacheable {
		return nil, fmt.Errorf("httprefill: cannot store %T", v)
	}
	b := make([]byte, 0, 512+len(p.body))
	b = append(b, version, p.flags())
	b = binary.BigEndian.AppendUint64(b, uint64(p.born.UnixMicro()))
	b = binary.AppendUvarint(b, uint64(p.lifetime.Microseconds()))
	b = binary.AppendUvarint(b, uint64(p.spare.Microseconds()))
	b = appendString(b, p.pattern)
	b = binary.AppendUvarint(b, uint64(p.status))
	b = binary.AppendUvarint(b, uint64(len(p.header)))
	for _, name := range slices.Sorted(maps.Keys(p.header)) {
		b = appendString(b, name)
		b = binary.AppendUvarint(b, uint64(len(p.header[name])))
		for _, value := range p.header[name] {
			b = appendString(b, value)
		}
	}
	return appendString(b, p.body), nil
}

func (p *response) flags() (f byte) {
	if p.open&withCookie != 0 {
		f |= flagCookie
	}
	if p.open&withAuthorization != 0 {
		f |= flagAuthorization
	}
	return f
}

// Unmarshal decodes the bytes that Marshal made. Unmarshal refuses all other bytes, and the Loader treats a refused
// record as a miss.
func (codec) Unmarshal(data []byte, pointer any) error {
	target, ok := pointer.(**response)
	if !ok {
		return fmt.Errorf("httprefill: cannot decode into %T", pointer)
	}
	d := decoder{rest: data}
	if d.byte() != version {
		return errEncoding
	}
	flags := d.byte()
	p := &response{}
	if flags&flagCookie != 0 {
		p.open |= withCookie
	}
	if flags&flagAuthorization != 0 {
		p.open |= withAuthorization
	}
	p.born = time.UnixMicro(int64(d.uint64()))
	p.lifetime = time.Duration(d.uvarint(maxSpan)) * time.Microsecond
	p.spare = time.Duration(d.uvarint(maxSpan)) * time.Microsecond
	p.pattern = string(d.bytes())
	p.status = int(d.uvarint(999))
	p.header = d.header()
	p.body = d.bytes()
	if d.bad || len(d.rest) > 0 || flags&^allFlags != 0 || p.status < 200 {
		return errEncoding
	}
	*target = p
	return nil
}

// maxSpan is longer than any lifetime that a response can ask for, in µs, and fits a time.Duration.
const maxSpan = uint64(1 << 52)

var errEncoding = errors.New("httprefill: not a response of this version")

func appendString[S string | []byte](b []byte, s S) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// decoder reads parts from the front of rest. Past the end, or at a number out of bounds, the decoder sets bad. It
// does not panic.
type decoder struct {
	rest []byte
	bad  bool
}

func (d *decoder) take(n uint64) []byte {
	if n > uint64(len(d.rest)) {
		d.bad, d.rest = true, nil
		return nil
	}
	part := d.rest[:n:n]
	d.rest = d.rest[n:]
	return part
}

func (d *decoder) byte() byte {
	if b := d.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) uint64() uint64 {
	if b := d.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (d *decoder) uvarint(most uint64) uint64 {
	n, size := binary.Uvarint(d.rest)
	if size <= 0 || n > most {
		d.bad, d.rest = true, nil
		return 0
	}
	d.rest = d.rest[size:]
	return n
}

func (d *decoder) bytes() []byte { return d.take(d.uvarint(uint64(len(d.rest)))) }

// count reads how many parts follow. Each part takes at least one byte. So count refuses a number above the number of
// bytes left, before the caller reserves memory for that number.
func (d *decoder) count() int { return int(d.uvarint(uint64(len(d.rest)))) }

func (d *decoder) header() http.Header {
	n := d.count()
	h := make(http.Header, min(n, 64))
	last := ""
	for i := 0; i < n && !d.bad; i++ {
		name := string(d.bytes())
		if name <= last {
			d.bad = true
		}
		last = name
		var values []string // stays nil for a field without values: a handler suppresses a field with nil
		for range d.count() {
			values = append(values, string(d.bytes()))
		}
		h[name] = values
	}
	return h
}
