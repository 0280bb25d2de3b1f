package refill

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/refill-go/refill/driver"
)

// This file makes and checks names: keys, names of Loaders, nodes and tokens.

// maxKey is the longest key, in bytes, that is stored unchanged.
const maxKey = 512

// storeKey returns a key (or a tag) as it stands in the store, in L1, in announcements, events and errors. Most keys
// stand there unchanged. Three kinds of keys are replaced by "#" and their SHA-256: keys that are longer than maxKey,
// keys with control characters, which garble logs, and keys that begin with '#'. Without this rule, a key that begins
// with '#' could look like the replacement of another key.
func storeKey(key string) string {
	if isPlain(key) && !hasControl(key) {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return "#" + hex.EncodeToString(sum[:])
}

// isPlain reports whether L1 can be asked for a key as it is given. isPlain need not look for control characters: L1
// holds a key with control characters under its hash, so L1 does not find the key as given.
func isPlain(key string) bool { return key != "" && len(key) <= maxKey && key[0] != '#' }

func hasControl(key string) bool {
	for i := range len(key) {
		if c := key[i]; c < ' ' || c == 0x7f {
			return true
		}
	}
	return false
}

// storeKey returns the form in which the store holds a key that a user has given. It returns an error if the key is
// empty or the Loader is closed.
func (l *Loader[V]) storeKey(key string) (string, error) {
	switch {
	case l.flights.Closed():
		return "", ErrClosed
	case key == "":
		return "", invalid("key", "empty")
	}
	return storeKey(key), nil
}

// full returns a key or tag with the name of the Loader in front, as driver.Store wants it.
func (l *Loader[V]) full(key string) string { return l.name + ":" + key }

// short undoes full: it removes the name of the Loader.
func (l *Loader[V]) short(full string) string { return strings.TrimPrefix(full, l.name+":") }

// maxName is the longest name of a Loader, in bytes.
const maxName = 64

// checkName returns an error for a name that would be unreadable or ambiguous in the keys of a store or in metrics.
func checkName(name string) error {
	if name == "" {
		return invalid("name", "empty")
	}
	if len(name) > maxName {
		return invalid("name", "%d bytes, at most %d", len(name), maxName)
	}
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
	if rest := strings.Trim(name, allowed); rest != "" {
		return invalid("name", "%q: letters, digits, '.', '_' and '-' only", name)
	}
	return nil
}

// names holds the names of the Loaders of this process, with the kind of their records. Two Loaders with one name and
// different kinds must not share a store. Otherwise each of the two would read the records of the other as misses, and
// replace them by a load of its own, without end.
var names = registry{users: make(map[nameIn]*nameUse)}

type registry struct {
	mu    sync.Mutex
	users map[nameIn]*nameUse
}

type nameIn struct {
	store driver.Store
	name  string
}

type nameUse struct {
	kind    string
	of      reflect.Type // the value type; kind has only the last part of the path of its package
	loaders int          // Loaders that use the name and are not closed
}

// enter registers that a Loader keeps values of a type under a name in a store. The caller calls leave when the Loader
// closes. A store that cannot be compared cannot be registered, so enter accepts every name for such a store.
func (r *registry) enter(s driver.Store, name, kind string, of reflect.Type) (leave func(), err error) {
	if !reflect.ValueOf(s).Comparable() {
		return func() {}, nil
	}
	at := nameIn{s, name}
	r.mu.Lock()
	defer r.mu.Unlock()
	u := r.users[at]
	switch {
	case u == nil:
		u = &nameUse{kind: kind, of: of}
		r.users[at] = u
	case u.kind != kind:
		return nil, invalid("name", "%q is already in use for %q in this store; it cannot hold %q as well",
			name, u.kind, kind)
	case u.of != of:
		return nil, invalid("name", "%q is already in use for another type %v in this store", name, of)
	}
	u.loaders++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if u.loaders--; u.loaders == 0 {
			delete(r.users, at)
		}
	}, nil
}

// node identifies one Loader or Locker in the fleet, and makes its tokens: "host-random#counter". Two clones of one
// process image (a snapshot of a virtual machine, a restored container) have the same id and counter. A random part in
// each token would not tell the clones apart, because nodes are compared by id: each clone would still take the
// announcements of the other clone for its own.
type node struct {
	id    string
	count atomic.Uint64
}

func newNode() *node {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "node"
	}
	host = strings.Map(func(r rune) rune {
		if r == '#' || r == '!' || r == '?' || r <= ' ' || r > '~' {
			return '_'
		}
		return r
	}, host[:min(len(host), 32)])
	var b [6]byte
	rand.Read(b[:]) // never fails, see crypto/rand
	return &node{id: host + "-" + hex.EncodeToString(b[:])}
}

// token makes a token that was never used before.
func (n *node) token() string {
	return tokenOf(n.id, n.count.Add(1))
}

// made reports whether this node made token.
func (n *node) made(token string) bool { return nodeOf(token) == n.id }

// tokenOf returns the token with the number count of a node.
func tokenOf(node string, count uint64) string {
	var buf [64]byte // nearly every token fits, so the result is the only allocation
	return string(strconv.AppendUint(append(append(buf[:0], node...), '#'), count, 36))
}

// splitToken undoes tokenOf. ok is false if another program made the token, in a form that tokenOf does not return.
func splitToken(token string) (node string, count uint64, ok bool) {
	node, digits, _ := strings.Cut(token, "#")
	count, err := strconv.ParseUint(digits, 36, 64)
	var buf [16]byte
	return node, count, err == nil && string(strconv.AppendUint(buf[:0], count, 36)) == digits
}

// nodeOf returns the node that made token.
func nodeOf(token string) string {
	id, _, _ := strings.Cut(token, "#")
	return id
}

// isNil reports whether v is nil, or an interface that holds a nil pointer.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	r := reflect.ValueOf(v)
	return r.Kind() == reflect.Pointer && r.IsNil()
}
