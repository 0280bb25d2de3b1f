package goredis

import (
	"fmt"
	"reflect"
	"strconv"
	"testing"
	"time"

	"github.com/refill-go/refill"
)

// announcement writes what lua/common.lua writes.
func announcement(kind, token, replaced, key, rest string) string {
	return fmt.Sprintf("RN1 %s %d %d %d %s%s%s%s", kind, len(token), len(replaced), len(key), token, replaced, key, rest)
}

func TestNotes(t *testing.T) {
	const key = "product:4 2\n:\xff\x00"
	for _, c := range []struct {
		message string
		want    refill.Note
	}{
		{"RN1 f 3 3 10 a#1b#2product:42RF1", refill.Note{Kind: refill.NoteFilled, Token: "a#1", Replaced: "b#2", Key: "product:42", Record: []byte("RF1")}},
		{announcement("f", "a#1", "", key, ""), refill.Note{Kind: refill.NoteFilled, Token: "a#1", Key: key}},
		{announcement("f", "a b", "1 2", key, "r\x00 "), refill.Note{Kind: refill.NoteFilled, Token: "a b", Replaced: "1 2", Key: key, Record: []byte("r\x00 ")}},
		{announcement("x", "a#1", "", key, "boom"), refill.Note{Kind: refill.NoteFailed, Token: "a#1", Key: key, Failure: "boom"}},
		{announcement("x", "a#1", "", key, ""), refill.Note{Kind: refill.NoteFailed, Token: "a#1", Key: key}},
		{announcement("i", "a#1", "", key, ""), refill.Note{Kind: refill.NoteInvalidated, Token: "a#1", Key: key}},
		{announcement("e", "a#1", "", key, ""), refill.Note{Kind: refill.NoteExpired, Token: "a#1", Key: key}},
		{announcement("r", "a#1", "", key, ""), refill.Note{Kind: refill.NoteReleased, Token: "a#1", Key: key}},
		{announcement("I", "a#1", "", key, "1700000000000042"), refill.Note{Kind: refill.NoteTagInvalidated, Token: "a#1", Key: key, At: time.UnixMicro(1700000000000042)}},
		{announcement("E", "", "", "product:", "1"), refill.Note{Kind: refill.NoteTagExpired, Key: "product:", At: time.UnixMicro(1)}},
		{announcement("u", "", "", "job:", ""), refill.Note{Kind: noteUnlocked, Key: "job:"}},
	} {
		if got, ok := parseNote(c.message); !ok || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q: %+v, %v, want %+v", c.message, got, ok, c.want)
		}
	}
}

func TestForeignNotesAreIgnored(t *testing.T) {
	for _, message := range []string{
		"", "RN1", "RN1 ", "RN1 i", "RN1 i ", "hello", `{"kind":"i"}`,
		"RN2 i 3 0 3 a#1a:b", "rn1 i 3 0 3 a#1a:b", " RN1 i 3 0 3 a#1a:b",
		"RN1 z 3 0 3 a#1a:b", "RN1 ii 3 0 3 a#1a:b", "RN1  3 0 3 a#1a:b",
		"RN1 i 3 0 4 a#1a:b", "RN1 i 3 0 2 a#1a:b", "RN1 i 9 0 3 a#1a:b", "RN1 i 3 9 3 a#1a:b",
		"RN1 i 03 0 3 a#1a:b", "RN1 i +3 0 3 a#1a:b", "RN1 i -3 0 3 a#1a:b", "RN1 i 3  3 a#1a:b", "RN1 i 3 0 3a#1a:b",
		"RN1 i 3 0 99999999999999999999 a#1a:b", "RN1 i 3 0 4294967299 a#1a:b",
		"RN1 i 3 0 3 a#1a-b", "RN1 i 3 0 2 a#1:b", "RN1 i 3 0 0 a#1",
		"RN1 i 3 0 3 a#1a:bmore", "RN1 e 3 0 3 a#1a:bmore", "RN1 r 3 0 3 a#1a:bmore", "RN1 u 3 0 3 a#1a:bmore",
		"RN1 I 3 0 3 a#1a:b", "RN1 I 3 0 3 a#1a:bmore", "RN1 I 3 0 3 a#1a:b0", "RN1 E 3 0 3 a#1a:b017", "RN1 E 3 0 3 a#1a:b-17",
		"RN1 E 3 0 3 a#1a:b+17", "RN1 E 3 0 3 a#1a:b 17", "RN1 E 3 0 3 a#1a:b17 ", "RN1 E 3 0 3 a#1a:b1.7e15",
		"RN1 I 3 0 3 a#1a:b9000000000000000", "RN1 I 3 0 3 a#1a:b99999999999999999999", "RN1 i 3 0 3 a#1a:b17",
	} {
		if n, ok := parseNote(message); ok {
			t.Errorf("%q was read as %+v", message, n)
		}
	}
}

func FuzzParseNote(f *testing.F) {
	f.Add("RN1 f 3 3 10 a#1b#2product:42RF1")
	f.Add("RN1 x 3 0 3 a#1a:bboom")
	f.Add("RN1 u 0 0 2 a:")
	f.Add("RN1 I 3 0 3 a#1a:b1700000000000042")
	f.Add("RN1 E 0 0 2 a:1")
	letters := map[refill.NoteKind]string{}
	for letter, kind := range noteKinds {
		letters[kind] = letter
	}
	f.Fuzz(func(t *testing.T, message string) {
		n, ok := parseNote(message)
		if !ok {
			return
		}
		rest := string(n.Record) + n.Failure
		if !n.At.IsZero() {
			rest += strconv.FormatInt(n.At.UnixMicro(), 10)
		}
		if again := announcement(letters[n.Kind], n.Token, n.Replaced, n.Key, rest); again != message {
			t.Errorf("%q was read as %+v, which is written %q", message, n, again)
		}
	})
}
