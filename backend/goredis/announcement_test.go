package goredis

import (
	"fmt"
	"reflect"
	"strconv"
	"testing"
	"time"

	"github.com/refill-go/refill/driver"
)

// encode writes an announcement as lua/common.lua does.
func encode(kind, token, replaced, key, rest string) string {
	return fmt.Sprintf("RN1 %s %d %d %d %s%s%s%s", kind, len(token), len(replaced), len(key), token, replaced, key, rest)
}

func TestParseAnnouncement(t *testing.T) {
	const key = "product:4 2\n:\xff\x00"
	for _, c := range []struct {
		message string
		want    driver.Announcement
	}{
		{
			"RN1 f 3 3 10 a#1b#2product:42RF1",
			driver.Announcement{
				Kind: driver.Filled, Token: "a#1", Replaced: "b#2", Key: "product:42", Record: []byte("RF1"),
			},
		},
		{encode("f", "a#1", "", key, ""), driver.Announcement{Kind: driver.Filled, Token: "a#1", Key: key}},
		{
			encode("f", "a b", "1 2", key, "r\x00 "),
			driver.Announcement{Kind: driver.Filled, Token: "a b", Replaced: "1 2", Key: key, Record: []byte("r\x00 ")},
		},
		{
			encode("x", "a#1", "", key, "boom"),
			driver.Announcement{Kind: driver.Failed, Token: "a#1", Key: key, Failure: "boom"},
		},
		{encode("x", "a#1", "", key, ""), driver.Announcement{Kind: driver.Failed, Token: "a#1", Key: key}},
		{encode("i", "a#1", "", key, ""), driver.Announcement{Kind: driver.Invalidated, Token: "a#1", Key: key}},
		{encode("e", "a#1", "", key, ""), driver.Announcement{Kind: driver.Expired, Token: "a#1", Key: key}},
		{encode("r", "a#1", "", key, ""), driver.Announcement{Kind: driver.Released, Token: "a#1", Key: key}},
		{
			encode("I", "a#1", "", key, "1700000000000042"),
			driver.Announcement{Kind: driver.TagInvalidated, Token: "a#1", Key: key, At: time.UnixMicro(1700000000000042)},
		},
		{
			encode("E", "", "", "product:", "1"),
			driver.Announcement{Kind: driver.TagExpired, Key: "product:", At: time.UnixMicro(1)},
		},
		{encode("u", "", "", "job:", ""), driver.Announcement{Kind: unlocked, Key: "job:"}},
	} {
		if got, ok := parseAnnouncement(c.message); !ok || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q: %+v, %v, want %+v", c.message, got, ok, c.want)
		}
	}
}

func TestForeignMessagesAreIgnored(t *testing.T) {
	for _, message := range []string{
		"", "RN1", "RN1 ", "RN1 i", "RN1 i ", "hello", `{"kind":"i"}`,
		"RN2 i 3 0 3 a#1a:b", "rn1 i 3 0 3 a#1a:b", " RN1 i 3 0 3 a#1a:b",
		"RN1 z 3 0 3 a#1a:b", "RN1 ii 3 0 3 a#1a:b", "RN1  3 0 3 a#1a:b",
		"RN1 i 3 0 4 a#1a:b", "RN1 i 3 0 2 a#1a:b", "RN1 i 9 0 3 a#1a:b", "RN1 i 3 9 3 a#1a:b",
		"RN1 i 03 0 3 a#1a:b", "RN1 i +3 0 3 a#1a:b", "RN1 i -3 0 3 a#1a:b", "RN1 i 3  3 a#1a:b", "RN1 i 3 0 3a#1a:b",
		"RN1 i 3 0 99999999999999999999 a#1a:b", "RN1 i 3 0 4294967299 a#1a:b",
		"RN1 i 3 0 3 a#1a-b", "RN1 i 3 0 2 a#1:b", "RN1 i 3 0 0 a#1",
		"RN1 i 3 0 3 a#1a:bmore", "RN1 e 3 0 3 a#1a:bmore", "RN1 r 3 0 3 a#1a:bmore", "RN1 u 3 0 3 a#1a:bmore",
		"RN1 I 3 0 3 a#1a:b", "RN1 I 3 0 3 a#1a:bmore", "RN1 I 3 0 3 a#1a:b0", "RN1 E 3 0 3 a#1a:b017",
		"RN1 E 3 0 3 a#1a:b-17",
		"RN1 E 3 0 3 a#1a:b+17", "RN1 E 3 0 3 a#1a:b 17", "RN1 E 3 0 3 a#1a:b17 ", "RN1 E 3 0 3 a#1a:b1.7e15",
		"RN1 I 3 0 3 a#1a:b9000000000000000", "RN1 I 3 0 3 a#1a:b99999999999999999999", "RN1 i 3 0 3 a#1a:b17",
	} {
		if a, ok := parseAnnouncement(message); ok {
			t.Errorf("%q was read as %+v", message, a)
		}
	}
}

func FuzzParseAnnouncement(f *testing.F) {
	f.Add("RN1 f 3 3 10 a#1b#2product:42RF1")
	f.Add("RN1 x 3 0 3 a#1a:bboom")
	f.Add("RN1 u 0 0 2 a:")
	f.Add("RN1 I 3 0 3 a#1a:b1700000000000042")
	f.Add("RN1 E 0 0 2 a:1")
	letters := map[driver.AnnouncementKind]string{}
	for letter, kind := range announcementKinds {
		letters[kind] = letter
	}
	f.Fuzz(func(t *testing.T, message string) {
		a, ok := parseAnnouncement(message)
		if !ok {
			return
		}
		rest := string(a.Record) + a.Failure
		if !a.At.IsZero() {
			rest += strconv.FormatInt(a.At.UnixMicro(), 10)
		}
		if again := encode(letters[a.Kind], a.Token, a.Replaced, a.Key, rest); again != message {
			t.Errorf("%q was read as %+v, which is written %q", message, a, again)
		}
	})
}
