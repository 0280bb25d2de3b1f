package refill

import (
	"crypto/sha256"
	"encoding/hex"
)

// maxKey is the longest key, in bytes, that is used as it is.
const maxKey = 512

// A key is spelled in the store, in L1 and in announcements as it is given, or as "#" and its SHA-256: where it is longer
// than maxKey, where it holds control characters, which garble logs and consoles, and where it begins with '#', so that
// nobody can ask for a key that is spelled like another one's.
func spelled(key string) string {
	if asGiven(key) && !hasControl(key) {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return "#" + hex.EncodeToString(sum[:])
}

// asGiven reports whether a key may be looked up in L1 as it is given. One with control characters is not there.
func asGiven(key string) bool { return key != "" && len(key) <= maxKey && key[0] != '#' }

func hasControl(key string) bool {
	for i := range len(key) {
		if c := key[i]; c < ' ' || c == 0x7f {
			return true
		}
	}
	return false
}

// spell returns how a key is spelled.
func (l *Loader[V]) spell(key string) (string, error) {
	switch {
	case l.flights.closing.Load():
		return "", ErrClosed
	case key == "":
		return "", invalid("key", "empty")
	}
	return spelled(key), nil
}
