package goredis

import (
	"hash/fnv"
	"strconv"
	"strings"
)

// buckets is how many hash tags the keys of a prefix are spread over. All in this file is the key format, and final: with
// another one, two releases in one fleet would neither see each other's values nor each other's locks.
const buckets = 1024

// keys are the Redis keys of one "name:key".
type keys struct {
	full string // "name:key"
	head string // prefix, bucket and name
	tail string // the key
}

func (s *Store) keys(full string) keys {
	name, key, _ := strings.Cut(full, ":")
	return keys{full: full, head: s.prefix + ":{" + bucket(full) + "}:" + name, tail: ":" + key}
}

func bucket(full string) string {
	h := fnv.New32a()
	h.Write([]byte(full)) // never fails, hash.Hash
	return strconv.FormatUint(uint64(h.Sum32()%buckets), 10)
}

func (k keys) value() string { return k.head + k.tail }
func (k keys) lease() string { return k.head + "/lease" + k.tail }
func (k keys) claim() string { return k.head + "/claim" + k.tail }
func (k keys) lock() string  { return k.head + "/lock" + k.tail }
func (k keys) fence() string { return k.head + "/fence" + k.tail }

// mark is the key of a tag, where k was made of "name:tag".
func (k keys) mark() string { return k.head + "/tag" + k.tail }

// fill is what the scripts of a fill get as KEYS.
func (k keys) fill() []string { return []string{k.value(), k.lease(), k.claim()} }

// channel is where everything under the prefix is announced.
func (s *Store) channel() string { return s.prefix + ":notes" }
