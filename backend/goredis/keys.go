package goredis

import (
	"hash/fnv"
	"strconv"
	"strings"
)

// buckets is how many Redis hash tags ({0} to {1023}) the keys of a prefix are spread over. This file defines the key
// format, which is final. If two releases in one fleet had different formats, neither release would see the values and
// locks of the other release.
const buckets = 1024

// keys are the Redis keys of one "name:key".
type keys struct{ full, prefix, bucket, name, key string }

func (s *Store) keys(full string) keys {
	name, key, _ := strings.Cut(full, ":")
	return keys{full, s.prefix, bucket(full), name, key}
}

func bucket(full string) string {
	h := fnv.New32a()
	h.Write([]byte(full)) // never fails, see hash.Hash
	return strconv.FormatUint(uint64(h.Sum32()%buckets), 10)
}

func (k keys) of(what string) string {
	return k.prefix + ":{" + k.bucket + "}:" + k.name + what + ":" + k.key
}

func (k keys) value() string { return k.of("") }
func (k keys) lease() string { return k.of("/lease") }
func (k keys) lock() string  { return k.of("/lock") }
func (k keys) fence() string { return k.of("/fence") }

// tagState is the Redis key of a tag's state, if k was made from "name:tag".
func (k keys) tagState() string { return k.of("/tag") }

// fill returns the Redis keys of value, lease and claim, in the order in which the scripts take them. The three keys
// are parts of one string, which takes one allocation.
func (k keys) fill() []string {
	begin, end := k.prefix+":{"+k.bucket+"}:"+k.name, ":"+k.key
	all := begin + end + begin + "/lease" + end + begin + "/claim" + end
	lease := len(begin) + len(end)
	claim := 2*lease + len("/lease")
	return []string{all[:lease], all[lease:claim], all[claim:]}
}

// channel is the channel of all announcements under a prefix.
func channel(prefix string) string { return prefix + ":notes" }
