package refill

import (
	"crypto/rand"
	"encoding/hex"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"
)

// node names one Loader or Locker in the fleet, and makes its tokens: "host-random#counter".
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
		if r == '#' || r == '!' || r <= ' ' || r > '~' {
			return '_'
		}
		return r
	}, host[:min(len(host), 32)])
	var b [6]byte
	rand.Read(b[:]) // never fails, crypto/rand
	return &node{id: host + "-" + hex.EncodeToString(b[:])}
}

// token makes a token that nobody has used before.
func (n *node) token() string {
	return n.id + "#" + strconv.FormatUint(n.count.Add(1), 36)
}

// made reports whether token is one of this node's.
func (n *node) made(token string) bool { return nodeOf(token) == n.id }

// nodeOf is the node that made token.
func nodeOf(token string) string {
	id, _, _ := strings.Cut(token, "#")
	return id
}

// isNil sees through an interface that holds a nil pointer.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	r := reflect.ValueOf(v)
	return r.Kind() == reflect.Pointer && r.IsNil()
}
