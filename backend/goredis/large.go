package goredis

import (
	"hash/maphash"
	"sync/atomic"
)

// largeKeys remembers the keys whose value was longer than maxShared when it was last read or written. A pipeline with
// such a key would hold up the commands behind it. Keys with the same hash share a bit.
type largeKeys [1024]atomic.Uint64

var largeSeed = maphash.MakeSeed()

func (l *largeKeys) at(key string) (word *atomic.Uint64, bit uint64) {
	h := maphash.String(largeSeed, key)
	return &l[h>>6%uint64(len(l))], 1 << (h & 63)
}

func (l *largeKeys) has(key string) bool {
	word, bit := l.at(key)
	return word.Load()&bit != 0
}

// note remembers the size of a value, in bytes.
func (l *largeKeys) note(key string, size int) {
	switch word, bit := l.at(key); {
	case size > maxShared:
		word.Or(bit)
	case word.Load()&bit != 0: // reading a shared cache line is cheaper than writing it
		word.And(^bit)
	}
}
