package driver

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"reflect"
	"strings"
	"testing"
	"time"
)

func someRecord() Record {
	return Record{
		Token:     "web-1-00ff#2s",
		LoadBegan: time.UnixMicro(1_763_700_000_000_000), FreshUntil: time.UnixMicro(1_763_700_060_000_000),
		StaleFor: 10 * time.Minute, StaleIfError: time.Hour, LoadTook: 12345 * time.Microsecond,
		Kind: "json main.Product", Payload: []byte(`{"ID":42}`),
	}
}

// goldenRecord is someRecord as bytes. The format is final, because nodes of different releases share one Redis. If
// TestRecordGolden fails, give the changed format a new version, and leave this value as it is.
const goldenRecord = "" +
	"524631" + "0000000000000000" + "85ae6244" +
	"0d" + "7765622d312d303066662332 73" + // token
	"00" +
	"0006441367fd8800" + "000644136b910f00" + // began, fresh
	"0000000023c34600" + "00000000d693a400" + "0000000000003039" + // stale for, if error, took
	"0011" + "6a736f6e206d61696e2e50726f64756374" +
	"0000" +
	"7b224944223a34327d"

func TestRecordGolden(t *testing.T) {
	r := someRecord()
	b, err := r.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	want, err := hex.DecodeString(strings.ReplaceAll(goldenRecord, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, want) {
		t.Errorf("got  %x\nwant %x", b, want)
	}
	back, err := DecodeRecord(want)
	if err != nil {
		t.Fatal(err)
	}
	if back.Token != r.Token || !back.LoadBegan.Equal(r.LoadBegan) || !back.FreshUntil.Equal(r.FreshUntil) ||
		back.StaleFor != r.StaleFor || back.StaleIfError != r.StaleIfError || back.LoadTook != r.LoadTook ||
		back.Kind != r.Kind || string(back.Payload) != string(r.Payload) || back.NotFound || !back.ExpiredAt.IsZero() {
		t.Errorf("decoded %+v", back)
	}
}

// Validator, tags and no-store of a record are written and read back. readExtra must skip a field with an unknown
// letter, and must refuse a field that is cut off. Append must refuse a tag that is too long.
func TestRecordExtra(t *testing.T) {
	r := someRecord()
	r.Validator, r.Tags, r.NoStore = `W/"7"`, []string{"shop 7", ""}, true
	b, err := r.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	back, err := DecodeRecord(b)
	if err != nil || back.Validator != r.Validator || !reflect.DeepEqual(back.Tags, r.Tags) || !back.NoStore {
		t.Errorf("%+v, %v", back, err)
	}
	var read Record
	if !read.readExtra([]byte("z\x00\x03???v\x00\x01x")) || read.Validator != "x" {
		t.Errorf("%+v: an unknown field is not skipped", read)
	}
	if read.readExtra([]byte("v\x00\x05x")) {
		t.Error("a field that is cut off was read")
	}
	r.Tags = []string{strings.Repeat("t", 1<<16)}
	if _, err := r.Append(nil); err == nil {
		t.Error("too much of it was written")
	}
}

// The test changes the first field of extra in an encoded record. If the field gets an unknown letter, DecodeRecord
// must skip that field. If the field gets a length beyond the end of extra, DecodeRecord must refuse the record.
func TestExtraOfALaterRelease(t *testing.T) {
	r := Record{
		Token: "n#1", LoadBegan: time.UnixMicro(1), FreshUntil: time.UnixMicro(2), Kind: "raw string",
		Validator: "abc", Tags: []string{"t"},
	}
	at := offToken + 1 + len(r.Token) + 1 + 5*8 + 2 + len(r.Kind) + 2 // where the extra begins
	for name, c := range map[string]struct {
		change func(b []byte)
		fine   bool
	}{
		"another letter": {func(b []byte) { b[at] = 'z' }, true},
		"cut off":        {func(b []byte) { b[at+2] = 200 }, false},
	} {
		b, err := r.Append(nil)
		if err != nil || b[at] != 'v' {
			t.Fatalf("%v, %q", err, b)
		}
		c.change(b)
		binary.BigEndian.PutUint32(b[offSum:], crc32.Checksum(b[offToken:], castagnoli))
		got, err := DecodeRecord(b)
		if (err == nil) != c.fine ||
			c.fine && (got.Validator != "" || len(got.Tags) != 1 || len(RecordTags(b)) != 1) ||
			!c.fine && RecordTags(b) != nil {
			t.Errorf("%s: %+v, %v; tags %v", name, got, err, RecordTags(b))
		}
	}
}

func TestExpireRecordKeepsTheSum(t *testing.T) {
	r := someRecord()
	b, _ := r.Append(nil)
	at := time.UnixMicro(1_763_700_001_000_000)
	if !ExpireRecord(b, at) {
		t.Fatal("not expired")
	}
	ExpireRecord(b, at.Add(time.Second)) // must change nothing: the record is already marked
	back, err := DecodeRecord(b)
	if err != nil {
		t.Fatal(err)
	}
	if !back.ExpiredAt.Equal(at) {
		t.Errorf("expired at %v, want %v", back.ExpiredAt, at)
	}
	if ExpireRecord([]byte("RF2 a record of a later release, padded to the length of a record, and more"), at) {
		t.Error("a later version was marked")
	}
}

func TestDecodeRecordIsStrict(t *testing.T) {
	r := someRecord()
	good, _ := r.Append(nil)
	for i := range good {
		if i >= offExpired && i < offSum {
			continue // Expire changes these bytes, so the sum does not cover them
		}
		bad := bytes.Clone(good)
		bad[i] ^= 0x10
		if _, err := DecodeRecord(bad); err == nil {
			t.Errorf("byte %d changed, and the record was still read", i)
		}
	}
	for n := range good {
		if _, err := DecodeRecord(good[:n]); err == nil {
			t.Errorf("cut at %d, and the record was still read", n)
		}
	}
	for _, r := range []Record{{}, {Token: strings.Repeat("t", 256)}, {Token: "t", Kind: strings.Repeat("k", 1<<16)},
		{Token: "t", StaleFor: -1000}, {Token: "t", LoadBegan: time.UnixMicro(-5)},
	} {
		if _, err := r.Append(nil); err == nil {
			t.Errorf("token of %d, kind of %d bytes accepted", len(r.Token), len(r.Kind))
		}
	}
}

func FuzzDecodeRecord(f *testing.F) {
	r := someRecord()
	b, _ := r.Append(nil)
	f.Add(b)
	f.Add(b[:20])
	r.Validator, r.Tags = "v", []string{"a", "b"}
	b, _ = r.Append(nil)
	f.Add(b)
	f.Add([]byte("RF1"))
	f.Fuzz(func(t *testing.T, b []byte) {
		token := RecordToken(b)
		r, err := DecodeRecord(b)
		if err != nil {
			ExpireRecord(bytes.Clone(b), time.Now())
			return
		}
		if r.Token != token {
			t.Errorf("RecordToken %q, decoded %q", token, r.Token)
		}
		if r.StaleFor < 0 || r.StaleIfError < 0 || r.LoadTook < 0 {
			t.Errorf("negative span: %+v", r)
		}
		again, err := r.Append(nil)
		if err != nil {
			t.Errorf("%+v was read, and cannot be written: %v", r, err)
		}
		if same, err := DecodeRecord(again); err != nil || !reflect.DeepEqual(same, r) {
			t.Errorf("%+v became %+v, %v", r, same, err)
		}
	})
}
