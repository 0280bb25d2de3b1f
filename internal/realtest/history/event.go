// Package history records what a fleet of Loaders does under faults, and checks the record against the promises of refill.
//
// Each process writes what happens to it as JSON lines into a file of its own ([Log]); the test writes what it does to them.
// [Read] puts all files together, [Check] looks for what must not be in there. [Run] is what a process of the fleet
// does, [NewPlan] makes the faults from a seed.
//
// Times are nanoseconds since 1970 by the wall clock (time.Time.UnixNano): all processes and Redis are on one machine, so
// they can be compared with each other, and with the times in the records, which are Redis's TIME. Whoever sets that
// machine's clock back during a run spoils the run.
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
	Get     Kind = "get"     // a Get, written when it has returned
	Load    Kind = "load"    // a run of the load function, written when it begins and again when it ends
	Void    Kind = "void"    // an Invalidate or Expire, written when it begins and again when it ends
	Refresh Kind = "refresh" // a Refresh, written when it begins and again when it ends
	Note    Kind = "note"    // something that OnEvent told: Op is the event's name
	Gap     Kind = "gap"     // this process (or the test, or Redis) did not run between Begin and End: the machine was busy
	Sample  Kind = "sample"  // what the test saw in Redis itself
	Fault   Kind = "fault"   // what the test did to Process (empty: to Redis, so to all); Op says what
)

// Event is one line of a history.
type Event struct {
	Kind    Kind   `json:"k"`
	Process string `json:"p,omitempty"` // "n2.3" is the third life of node n2
	ID      int64  `json:"i,omitempty"` // of a Load, Void or Refresh in its process
	Key     string `json:"key,omitempty"`
	Begin   int64  `json:"b"`
	End     int64  `json:"e,omitempty"` // 0 = not known: the process was killed before
	// Op is invalidate or expire, the kind of a fault, the name of an event.
	Op string `json:"op,omitempty"`
	// Outcome of a Get is refill's own word, and empty for those that do not tell; of a Load: ok, absent, failed, ended (its
	// context was over); of a Sample: fresh or expired.
	Outcome string `json:"o,omitempty"`
	// Err is empty for nil, else one of the Err constants, or the whole text of an error that should not be.
	Err      string `json:"err,omitempty"`
	Deadline int64  `json:"d,omitempty"` // of a Get's context
	Version  int64  `json:"v,omitempty"` // of a Void: what the database held when it began; of a Load: what it read
	Value    *Value `json:"val,omitempty"`
}

// The errors that a Get may return.
const (
	ErrCtx        = "ctx"
	ErrAbsent     = "absent"     // ErrNotFound, with the load that said so as Value
	ErrLoad       = "load"       // a LoadError, with the load that failed as Value
	ErrTimeout    = "timeout"    // a LoadError about LoadTimeout
	ErrOverloaded = "overloaded" // ErrOverloaded
	ErrStore      = "store"      // of a Void: Redis did not answer
)

// Value names the load that made it. It is what the fleet caches; absences and failures carry it in their text.
type Value struct {
	Key     string `json:"key"`
	Version int64  `json:"v"`
	Began   int64  `json:"b"`
	Process string `json:"p"`
	Load    int64  `json:"l"` // the ID of the Load
}

// Log writes a history to a file. Each event is one write, so a process that is killed leaves all
// but its last line whole.
type Log struct {
	mu   sync.Mutex // guards file
	file *os.File
}

// Create begins a file.
func Create(path string) (*Log, error) {
	file, err := os.Create(path)
	return &Log{file: file}, err
}

// Write adds an event.
func (l *Log) Write(e Event) {
	line, err := json.Marshal(e)
	if err != nil {
		panic(err) // cannot be: strings and numbers
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = l.file.Write(append(line, '\n')) // a history that lacks something is found to be wrong when it is checked
}

// Close ends the file.
func (l *Log) Close() error { return l.file.Close() }

// Now is the time as a history has it.
func Now() int64 { return time.Now().UnixNano() }

// Read puts the files of a directory together. An event that was written twice counts once, as it was written last.
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

// decode reads one file. The last line may be cut short: its writer was killed. Any other line must be whole.
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
			if at, there := begun[id]; there {
				events[at] = e
				continue
			}
			begun[id] = len(events)
		}
		events = append(events, e)
	}
}

// node is the node of a process: "n2" of "n2.3".
func node(process string) string {
	name, _, _ := strings.Cut(process, ".")
	return name
}

// since shows an event with its times, in milliseconds from start.
func (e Event) since(start int64) string {
	at := func(t int64) string {
		if t == 0 {
			return "?"
		}
		return fmt.Sprintf("%.3f", float64(t-start)/1e6)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "[%s, %s] ms %-5s %-8s %s", at(e.Begin), at(e.End), e.Process, e.Kind, e.Key)
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
