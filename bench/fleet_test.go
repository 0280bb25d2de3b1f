package main

import (
	"context"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/refill-go/refill/bench/peers"
	"github.com/refill-go/refill/internal/realtest"
)

func TestMain(m *testing.M) { realtest.Main(m) }

// Each suite runs for half a second with two small processes. The suite must produce a table without errors, and a
// report that can be written and read again. If its ctx is cancelled, the suite must return an error. The test does not
// check speed.
func TestSuites(t *testing.T) {
	realtest.StartRedis(t) // skips the test if Redis is not installed
	for name, run := range map[string]func(context.Context, *bench) error{
		"hot":        func(ctx context.Context, b *bench) error { return b.flow(ctx, b.flows()[0]) },
		"invalidate": func(ctx context.Context, b *bench) error { return b.flow(ctx, b.flows()[len(b.flows())-1]) },
		"cold":       func(ctx context.Context, b *bench) error { return b.coldStart(ctx) },
		"killed":     func(ctx context.Context, b *bench) error { return b.killedLoader(ctx) },
		"wait":       wait,
		"mixed":      mixed,
		"idle":       idle,
		"nodes":      func(ctx context.Context, b *bench) error { return b.scaleNodes(ctx) },
		"keys":       func(ctx context.Context, b *bench) error { return b.scaleKeys(ctx) },
		"cluster":    func(ctx context.Context, b *bench) error { return b.scaleCluster(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := &bench{
				rounds: 1, length: 500 * time.Millisecond, only: regexp.MustCompile("^refill$"), stage: newStage(),
				processes: 2, callers: 5, nodes: 4, keys: 100, rate: 1000,
			}
			defer b.close()
			if err := run(t.Context(), b); err != nil {
				t.Fatal(err)
			}
			if len(b.report.Tables) != 1 || len(b.report.Tables[0].Rows) == 0 {
				t.Fatalf("%+v", b.report)
			}
			table := b.report.Tables[0]
			for _, row := range table.Rows {
				if name != "keys" && name != "idle" && table.Median(row.Subject, "errors") != 0 {
					t.Errorf("%s: errors", row.Subject)
				}
			}
			if name == "killed" && table.Median("refill", "loads") != 1 {
				t.Error("no process took over")
			}
			path := filepath.Join(t.TempDir(), "report.json")
			if err := writeJSON(path, &b.report); err != nil {
				t.Fatal(err)
			}
			if r, err := readJSON(path); err != nil || len(r.Tables[0].Rows) != len(table.Rows) ||
				len(r.Tables[0].Series) != len(table.Series) {
				t.Errorf("%v, %+v", err, r)
			}
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			if err := run(ended, b); !errors.Is(err, context.Canceled) {
				t.Errorf("the suite ignores its ctx: %v", err)
			}
		})
	}
}

func TestMostAtOnce(t *testing.T) {
	for _, c := range []struct {
		spans []span
		want  int
	}{
		{nil, 0},
		{[]span{{1, 5}}, 1},
		{[]span{{1, 5}, {5, 9}}, 1},
		{[]span{{5, 9}, {1, 6}}, 2},
		{[]span{{1, 9}, {2, 3}, {4, 6}, {5, 8}}, 3},
	} {
		if got := mostAtOnce(c.spans); got != c.want {
			t.Errorf("%v: %d, want %d", c.spans, got, c.want)
		}
	}
}

func TestNextLoad(t *testing.T) {
	for _, c := range []struct {
		loads []span
		want  int64
	}{
		{nil, -1},
		{[]span{{1, 99}}, -1},
		{[]span{{150, 250}, {130, 230}}, 30},
		{[]span{{150, 250}, {50, 150}}, 0},
	} {
		if got := nextLoad(c.loads, 100); got != c.want {
			t.Errorf("%v: %d, want %d", c.loads, got, c.want)
		}
	}
}

func TestAge(t *testing.T) {
	n := &node{job: job{TTL: time.Second}, start: time.UnixMicro(0)}
	const s = 1_000_000
	p := &peers.Product{Began: 1 * s, Ended: 1.1 * s}
	if old, stale := n.age(p, 2*s, 2.05*s); old != 1.05*s || stale {
		t.Error(old, stale)
	}
	if _, stale := n.age(p, 2*s, 2.15*s); !stale {
		t.Error("not stale")
	}
	n.Invalidate = time.Second // p's load began at 1 s, so the next Invalidate is at 2 s
	if old, stale := n.age(p, 1.99*s, 2*s); old != 0 || stale {
		t.Error(old, stale)
	}
	if old, stale := n.age(p, 2.5*s, 2.5*s); old != 0.5*s || !stale {
		t.Error(old, stale)
	}
}

func TestInfoFigures(t *testing.T) {
	f := infoFigures("# Stats\r\ntotal_reads_processed:12\r\ncmdstat_get:calls=3,usec=7\r\n" +
		"errorstat_MOVED:count=2\r\nused_cpu_sys:0.25\r\nrole:master\r\n")
	if len(f) != 4 || f["total_reads_processed"] != 12 || f["cmdstat_get"] != 3 || f["errorstat_MOVED"] != 2 ||
		f["used_cpu_sys"] != 0.25 {
		t.Error(f)
	}
}

// The test draws a report twice. Both times the pictures must have the same bytes and must be valid XML. An empty
// report must give no pictures.
func TestDrawAll(t *testing.T) {
	o := &outcome{warm: newHistogram(), start: 1_000_000}
	for i := range int64(1000) {
		_ = o.warm.RecordValue(i * 1000)
	}
	o.Loads = []span{{1_050_000, 1_150_000}, {1_060_000, 1_150_000}, {2_050_000, 2_150_000}}
	hot, nodes := &Table{Name: "stampede-hot"}, &Table{Name: "scale-nodes"}
	for _, s := range []string{"refill", "sf", "goredis"} {
		hot.Series = append(hot.Series, o.loadsOverTime(s, 3*time.Second), o.percentiles(s))
	}
	if q := hot.curve("sf", queries); len(q.Y) != 30 || q.Y[0] != 20 || q.Y[10] != 10 || q.Y[1] != 0 {
		t.Errorf("%+v", q)
	}
	for i, n := range []string{"1", "2", "4"} {
		nodes.Add(n, "commands/expiry", float64(10+i))
	}
	r := &Report{Tables: []*Table{hot, nodes}}
	var first map[string]string
	for range 2 {
		drawn := drawnBy(t, r)
		if first == nil {
			first = drawn
		}
		if len(drawn) != 3 {
			t.Errorf("%d pictures", len(drawn))
		}
		for name, text := range drawn {
			if text != first[name] {
				t.Errorf("%s differs from time to time", name)
			}
			if strings.Contains(text, "NaN") || strings.Contains(text, "Inf") || !strings.Contains(text, "refill") {
				t.Errorf("%s: %s", name, text)
			}
			for dec := xml.NewDecoder(strings.NewReader(text)); ; {
				if _, err := dec.Token(); err == io.EOF {
					break
				} else if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
		}
	}
	if drawn := drawnBy(t, &Report{}); len(drawn) != 0 {
		t.Error("pictures of nothing")
	}
}

func drawnBy(t *testing.T, r *Report) map[string]string {
	t.Helper()
	dir := t.TempDir()
	if err := drawAll(dir, r); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	drawn := map[string]string{}
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		drawn[f.Name()] = string(text)
	}
	return drawn
}
