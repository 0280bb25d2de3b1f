package refilltest

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refill-go/refill"
)

var noteCases = []storeCase{
	{
		"notes-in-order",
		`Every kind of announcement reaches every listener of the name on every node, with its fields and in the order of the
acts; NoteUp comes first. Those who wait hear of nothing else: a kind that is missing is slept out, a field that is
missing turns "take this value" into one more read per node.`,
		notesInOrder,
	},
	{
		"notes-names-apart",
		`A listener hears the keys of its own name only: "a" neither "ab" nor "a.b". A Loader that hears of another's key drops
or takes what is not its own.`,
		notesNamesApart,
	},
	{
		"notes-any-key",
		`An announcement carries the key byte for byte. An encoding that does not survive all bytes (JSON and UTF-8) wakes
nobody for some keys.`,
		notesAnyKey,
	},
	{
		"notes-record",
		`A record of up to MaxNoteRecord bytes travels with its announcement, byte for byte, a larger one does not. The first
saves each node a read per refill; the second would send a megabyte to every node for each of them.`,
		notesRecord,
	},
	{
		"notes-silence",
		`What frees nothing announces nothing. A wake-up without a cause sends all who wait back to the store: a stampede.`,
		notesSilence,
	},
	{
		"notes-burst",
		`Announcements that come fast are all heard, in order. A buffer that drops some leaves nodes with an old value until
LocalTTL, and nobody knows.`,
		notesBurst,
	},
	{
		"notes-stop",
		`stop returns when hear runs no more: nothing is heard after it, and other listeners go on. A Loader frees what hear
uses once stop has returned.`,
		notesStop,
	},
}

func notesInOrder(s *stores) {
	ears := []*ear{s.listen(s.A, "product"), s.listen(s.A, "product"), s.listen(s.B, "product")}
	hear := func(n refill.Note) {
		s.Helper()
		n.Key = key
		for _, e := range ears {
			e.hears(n)
		}
	}
	v1, v2 := s.record("a#1", "v1"), s.record("b#1", "v2")
	s.begin(s.A, key, "a#1", long)
	s.finish(s.A, key, "a#1", v1, refill.PublishStored)
	hear(refill.Note{Kind: refill.NoteFilled, Token: "a#1", Record: v1})

	s.begin(s.B, key, "b#1", long)
	p := refill.Publication{Key: key, Token: "b#1", Replaced: "a#1", Record: v2, Keep: long}
	_, err := s.B.Publish(s.ctx, p)
	s.ok(err, "Publish")
	hear(refill.Note{Kind: refill.NoteFilled, Token: "b#1", Replaced: "a#1", Record: v2})

	s.begin(s.A, key, "a#2", long)
	s.fail(s.A, key, "a#2", "boom", long)
	hear(refill.Note{Kind: refill.NoteFailed, Token: "a#2", Failure: "boom"})
	s.expire(s.B, "b#2", key)
	hear(refill.Note{Kind: refill.NoteExpired, Token: "b#2"})
	s.begin(s.A, key, "a#3", long)
	s.release(s.A, key, "a#3")
	hear(refill.Note{Kind: refill.NoteReleased, Token: "a#3"})
	s.invalidate(s.B, "b#3", key)
	hear(refill.Note{Kind: refill.NoteInvalidated, Token: "b#3"})
	ears[0].heardAll(key)
	for _, e := range ears[1:] {
		e.hears(refill.Note{Kind: refill.NoteInvalidated, Key: key, Token: "end#1"})
	}
}

func notesNamesApart(s *stores) {
	names := []string{"a", "ab", "a.b", "a-b", "A", "b", "a_", "aa"}
	ears := make([]*ear, len(names))
	for i, name := range names {
		ears[i] = s.listen(s.A, name)
	}
	for _, name := range names {
		s.invalidate(s.B, "b#1", name+":b:42")
		s.expire(s.B, "b#1", name+":b:42")
	}
	for i, name := range names {
		ears[i].hears(refill.Note{Kind: refill.NoteInvalidated, Key: name + ":b:42", Token: "b#1"})
		ears[i].hears(refill.Note{Kind: refill.NoteExpired, Key: name + ":b:42", Token: "b#1"})
		ears[i].heardAll(name + ":b:42")
	}
}

func notesAnyKey(s *stores) {
	for _, k := range oddKeys() {
		if !strings.HasPrefix(k, "product:") {
			continue
		}
		e := s.listen(s.A, "product")
		v := s.record("b#1", k)
		s.fill(s.B, k, "b#1", v)
		e.hears(refill.Note{Kind: refill.NoteFilled, Key: k, Token: "b#1", Record: v})
		s.expire(s.B, "b#2", k)
		e.hears(refill.Note{Kind: refill.NoteExpired, Key: k, Token: "b#2"})
		e.heardAll(k)
		e.stop()
	}
}

func notesRecord(s *stores) {
	e := s.listen(s.B, "product")
	empty := len(s.record("a#1", ""))
	for _, size := range []int{empty, 1000, refill.MaxNoteRecord - 1, refill.MaxNoteRecord, refill.MaxNoteRecord + 1, 100 << 10} {
		payload := make([]byte, size-empty)
		rand.Read(payload)
		v := s.record("a#1", string(payload))
		s.fill(s.A, key, "a#1", v)
		want := refill.Note{Kind: refill.NoteFilled, Key: key, Token: "a#1"}
		if size <= refill.MaxNoteRecord {
			want.Record = v
		}
		e.hears(want)
	}
	e.heardAll(key)
}

func notesSilence(s *stores) {
	s.fill(s.A, key, "a#1", s.record("a#1", "v1"))
	s.begin(s.A, key, "a#2", long)
	e := s.listen(s.B, "product")
	s.holds(key, s.record("a#1", "v1"))
	s.try(s.B, key, "b#1", long, refill.AskOnce)
	s.try(s.B, key, "b#1", long, refill.AskLeft)
	s.try(s.B, key, "b#1", long, refill.AskForce)
	s.try(s.A, key, "a#2", long, refill.AskLeft)
	s.ask(s.B, refill.Bid{Key: key, Token: "b#1", Seen: "a#0", LeaseTTL: long, ClaimTTL: long, Ask: refill.AskLeft})
	s.renew(s.A, key, "a#2", true)
	s.renew(s.B, key, "b#1", false)
	s.finish(s.B, key, "b#1", s.record("b#1", "x"), refill.PublishRefused)
	s.fail(s.B, key, "b#1", "boom", long)
	s.release(s.B, key, "b#1")
	e.heardAll(key)
	s.release(s.B, key, "b#1")
	s.fail(s.B, key, "b#1", "boom", 0)
	e.heardAll(key)
}

func notesBurst(s *stores) {
	const burst = 500
	e := s.listen(s.B, "product")
	for i := range burst {
		s.invalidate(s.A, fmt.Sprintf("a#%d", i), key)
	}
	for i := range burst {
		e.hears(refill.Note{Kind: refill.NoteInvalidated, Key: key, Token: fmt.Sprintf("a#%d", i)})
	}
}

// notesStop stops a listener in the midst of hear, with more to hear behind it.
func notesStop(s *stores) {
	const burst = 10
	e := s.listen(s.A, "product")
	up, inside, leave, stopped, told := make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{})
	rise, enter := sync.OnceFunc(func() { close(up) }), sync.OnceFunc(func() { close(inside) })
	var returned, late atomic.Bool
	stop := s.A.Listen("product", func(n refill.Note) {
		switch n.Kind {
		case refill.NoteUp:
			rise()
		case refill.NoteInvalidated:
			enter()
			<-leave
			spin()
			if returned.Load() {
				late.Store(true)
			}
		}
	})
	wait(s, up, "NoteUp")
	// On goroutines of their own: hear must not block, and while it does here, any call of the store may wait for it.
	go func() {
		defer close(told)
		for range burst {
			if err := s.B.Invalidate(s.ctx, "b#1", key); err != nil {
				s.Errorf("Invalidate: %v", err)
			}
		}
	}()
	wait(s, inside, "an announcement")
	spin()
	go func() { stop(); returned.Store(true); close(stopped) }()
	spin()
	select {
	case <-stopped:
		s.Errorf("stop returned while hear was running")
	default:
	}
	close(leave)
	wait(s, stopped, "the return of stop")
	wait(s, told, "the return of Invalidate")
	for range burst {
		e.hears(refill.Note{Kind: refill.NoteInvalidated, Key: key, Token: "b#1"})
	}
	e.heardAll(key)
	for range 3 { // for a hear that runs still, or again
		spin()
	}
	if late.Load() {
		s.Fatalf("hear ran after stop had returned")
	}
}

// spin lets other goroutines run. It is not a sleep, which would not end in a bubble if one of them waits for a mutex; and
// if it is too short, then something broken passes this time, and nothing sound fails.
func spin() {
	for range 1000 {
		runtime.Gosched()
	}
}

// ear hears the announcements of one name.
type ear struct {
	s     *stores
	notes chan refill.Note
	stop  func()
}

// maxUnheard is how many announcements an ear holds; no case makes more.
const maxUnheard = 1 << 12

// listen starts to listen and waits until the subscription stands. Warnings are about the server, not about its rules.
func (s *stores) listen(st refill.Store, name string) *ear {
	s.Helper()
	e := &ear{s: s, notes: make(chan refill.Note, maxUnheard)}
	e.stop = sync.OnceFunc(st.Listen(name, func(n refill.Note) {
		if n.Kind == refill.NoteWarning {
			return
		}
		select {
		case e.notes <- n:
		default: // a store that never stops announcing
		}
	}))
	s.Cleanup(e.stop)
	if n := e.next("NoteUp"); n.Kind != refill.NoteUp {
		s.Fatalf("Listen(%q): first heard %s, want NoteUp", name, noteText(n))
	}
	return e
}

// next is the next note; want says what it is waited for.
func (e *ear) next(want string) refill.Note {
	e.s.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case n := <-e.notes:
		return n
	case <-timer.C:
		e.s.Fatalf("heard nothing for %v, want %s", patience, want)
		return refill.Note{}
	}
}

// hears demands the next note.
func (e *ear) hears(want refill.Note) {
	e.s.Helper()
	if got := e.next(noteText(want)); !sameNote(got, want) {
		e.s.Fatalf("heard %s\n want %s", noteText(got), noteText(want))
	}
}

// heardAll demands that nothing about key was announced that has not been heard. Notes about one key come in order, so
// nothing has to be waited for: the case's last act is announced, and nothing must come before it.
func (e *ear) heardAll(key string) {
	e.s.Helper()
	e.s.invalidate(e.s.A, "end#1", key)
	e.hears(refill.Note{Kind: refill.NoteInvalidated, Key: key, Token: "end#1"})
}

func sameNote(a, b refill.Note) bool {
	return a.Kind == b.Kind && a.Key == b.Key && a.Token == b.Token && a.Replaced == b.Replaced &&
		a.Failure == b.Failure && a.At.Equal(b.At) && bytes.Equal(a.Record, b.Record)
}

func noteText(n refill.Note) string {
	kind := nameOf(int(n.Kind), "no kind", "NoteUp", "NoteDown", "NoteWarning", "NoteFilled", "NoteFailed",
		"NoteInvalidated", "NoteExpired", "NoteReleased", "NoteTagInvalidated", "NoteTagExpired")
	return fmt.Sprintf("%s{Key: %s, Token: %q, Replaced: %q, Record: %s, Failure: %q, At: %v, Err: %v}",
		kind, shown([]byte(n.Key)), n.Token, n.Replaced, shown(n.Record), n.Failure, n.At, n.Err)
}

// shown is b in short: a record of a megabyte is not readable.
func shown(b []byte) string {
	const most = 48
	switch {
	case b == nil:
		return "nothing"
	case len(b) > most:
		return fmt.Sprintf("%q… (%d bytes)", b[:most], len(b))
	}
	return fmt.Sprintf("%q", b)
}
