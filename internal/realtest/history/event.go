// Package history records what a fleet of Loaders does under faults, and checks this record (the history) against the
// guarantees of refill (G1 to G8 in docs/guarantees.md).
//
// Each process of the fleet executes [Run], and writes its events as JSON lines to its own file ([Log]). The test
// draws the faults from a seed ([NewPlan]), and writes the injected faults to another file. [Read] reads all files,
// and [Check] reports every broken promise.
//
// Times are nanoseconds since 1970 by the wall clock (time.Time.UnixNano). All processes and Redis run on one
// machine. So these times can be compared with each other, and with the times in records, which come from Redis's
// TIME. If the machine's clock is set back during a run, the result of the run is worthless.
package history

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Kind is the kind of an Event.
type Kind string

// The kinds of events.
const (
	Get          Kind = "get"          // a Get, written when it has returned
	Load         Kind = "load"         // a run of the load function, written when it begins and again when it ends
	Invalidation Kind = "invalidation" // an Invalidate or Expire, written when it begins and again when it ends
	Refresh      Kind = "refresh"      // a Refresh, written when it begins and again when it ends
	OnEvent      Kind = "on-event"     // an event that the Loader reported to OnEvent: Op is the name of its kind
	Gap          Kind = "gap"          // Process (empty: the test or Redis) did not run in this time: the machine was busy
	Sample       Kind = "sample"       // a value that the test read from Redis itself
	Fault        Kind = "fault"        // what the test did to Process (empty: to Redis); Op is the kind of fault
)

// Event is one line of a history.
type Event struct {
	Kind    Kind   `json:"k"`
	Process string `json:"p,omitempty"` // "n2.3" is the third process of node n2
	ID      int64  `json:"i,omitempty"` // numbers the Loads of a process, and its Invalidations and Refreshes
	Key     string `json:"key,omitempty"`
	Begin   int64  `json:"b"`
	End     int64  `json:"e,omitempty"` // 0 = unknown, because the process was killed before the end
	// Op of an Invalidation is "invalidate" or "expire", Op of a Fault is its kind, and Op of an OnEvent is the name of
	// the event kind of refill. Op of a Load is FaultNoDB if the load could not reach the database.
	Op string `json:"op,omitempty"`
	// Outcome of a Get is the string of its refill.Outcome, or empty if the call returns no Outcome. Outcome of a Load
	// is ok, absent, failed, or ended (the context of the load had ended). Outcome of a Sample is fresh or expired.
	Outcome string `json:"o,omitempty"`
	// Err is empty for nil. Otherwise it is one of the Err constants, or the text of an error that must not occur.
	Err      string `json:"err,omitempty"`
	Deadline int64  `json:"d,omitempty"` // when the context of a Get ends
	// Version is what the database held when an Invalidation began, or what a Load read.
	Version int64  `json:"v,omitempty"`
	Value   *Value `json:"val,omitempty"`
}

// The errors that a Get may return.
const (
	ErrCtx        = "ctx"        // the error of the Get's context
	ErrAbsent     = "absent"     // ErrNotFound; Value names the load that returned it
	ErrLoad       = "load"       // a LoadError; Value names the load that failed
	ErrTimeout    = "timeout"    // a LoadError whose Timeout is true
	ErrOverloaded = "overloaded" // refill.ErrOverloaded
	ErrStore      = "store"      // of an Invalidation: Redis did not answer
)

// Value is what the fleet caches. A Value names the load that made it. If a load fails or returns ErrNotFound, the
// text of its error contains the Value.
type Value struct {
	Key     string `json:"key"`
	Version int64  `json:"v"`
	Began   int64  `json:"b"`
	Process string `json:"p"`
	Load    int64  `json:"l"` // the ID of the Load
}

// Log writes a history to a file. Write writes an event with a single system call. So if the process is killed, only
// the last line of the file can be incomplete.
type Log struct {
	mu   sync.Mutex // guards file
	file *os.File
}

// Create creates the file.
func Create(path string) (*Log, error) {
	file, err := os.Create(path)
	return &Log{file: file}, err
}

// Write adds an event.
func (l *Log) Write(e Event) {
	line, err := json.Marshal(e)
	if err != nil {
		panic(err) // impossible: strings and numbers
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = l.file.Write(append(line, '\n')) // if a line is lost, Check reports a violation
}

// Close closes the file.
func (l *Log) Close() error { return l.file.Close() }

// Now returns the current time in nanoseconds since 1970.
func Now() int64 { return time.Now().UnixNano() }

// Read returns the events of all files of a directory. An event that was written at its begin and at its end counts
// once, as written last.
func Read(dir string) ([]Event, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		return nil, err
	}
	slices.Sort(files)
	var all []Event
	for _, name := range files {
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		events, err := decode(file)
		_ = file.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, events...)
	}
	return all, nil
}

// decode reads one file. The last line may be incomplete, because its writer was killed. Any other incomplete line
// is an error.
func decode(r io.Reader) ([]Event, error) {
	type identity struct {
		process string
		kind    Kind
		id      int64
	}
	var events []Event
	begun := map[identity]int{}
	for in := bufio.NewReader(r); ; {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return events, nil
		}
		if err != nil {
			return nil, err
		}
		var e Event
		if err := json.Unmarshal(bytes.TrimSpace(line), &e); err != nil {
			return nil, fmt.Errorf("%q: %w", line, err)
		}
		if e.ID != 0 {
			id := identity{e.Process, e.Kind, e.ID}
			if at, known := begun[id]; known {
				events[at] = e
				continue
			}
			begun[id] = len(events)
		}
		events = append(events, e)
	}
}

// node returns the node of a process, for instance "n2" for "n2.3".
func node(process string) string {
	name, _, _ := strings.Cut(process, ".")
	return name
}

// since formats an event with its times, in milliseconds from start.
func (e Event) since(start int64) string {
	at := func(t int64) string {
		if t == 0 {
			return "?"
		}
		return fmt.Sprintf("%.3f", float64(t-start)/1e6)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "[%s, %s] ms %-5s %-12s %s", at(e.Begin), at(e.End), e.Process, e.Kind, e.Key)
	for _, word := range []string{e.Op, e.Outcome, e.Err} {
		if word != "" {
			b.WriteString(" " + word)
		}
	}
	if e.ID != 0 {
		fmt.Fprintf(&b, " #%d", e.ID)
	}
	if e.Version != 0 {
		fmt.Fprintf(&b, " v%d", e.Version)
	}
	if v := e.Value; v != nil {
		fmt.Fprintf(&b, " of load %s#%d (v%d, began %s)", v.Process, v.Load, v.Version, at(v.Began))
	}
	return b.String()
}
