//go:build unix

// Torture runs, one by one, the tests behind each promise of refill. TestHistory, which is random, runs for a long
// time. With -breaks, torture then breaks a copy of the code in one place for each test, runs the test on that copy,
// and requires that the test fails. Torture prints the results as the tables of docs/guarantees.md:
//
//	go run ./internal/realtest/torture            # the tests, with a long history (REFILL_TORTURE_FOR, default 5m)
//	go run ./internal/realtest/torture -breaks    # also the breaks
//	go run ./internal/realtest/torture -write     # also write the tables to docs/guarantees.md
//
// `make torture` does all three.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"
)

func main() {
	breaks := flag.Bool("breaks", false, "break the code for each test, and check that the test fails")
	write := flag.Bool("write", false, "write the tables to docs/guarantees.md")
	only := flag.String("only", "", "regular expression: run only these tests")
	flag.Parse()
	if err := torture(*breaks, *write, *only); err != nil {
		fmt.Fprintln(os.Stderr, "torture:", err)
		os.Exit(1)
	}
}

// outcome is the result of one proof.
type outcome struct {
	proof
	results []string // "result: " lines that the test logged
	took    time.Duration
	failed  bool
	caught  string // what try returned for the broken code; empty = not tried
}

func torture(breaks, write bool, only string) error {
	chosen, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	var failed []string
	outcomes := map[string]outcome{}
	for _, p := range promises {
		for _, proof := range p.proofs {
			if _, done := outcomes[proof.test]; done || !chosen.MatchString(proof.test) {
				continue
			}
			o := prove(root, proof)
			if breaks && proof.mutant.file != "" && !o.failed {
				o.caught = proof.mutant.try(root, proof)
			}
			if o.failed || o.caught != "" && o.caught != found {
				failed = append(failed, proof.test)
			}
			outcomes[proof.test] = o
		}
	}
	text := table(outcomes)
	fmt.Print(text)
	if write && only == "" {
		if err := insert(filepath.Join(root, "docs", "guarantees.md"), text); err != nil {
			return err
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("%d tests failed, or did not find their break: %s", len(failed), strings.Join(failed, ", "))
	}
	return nil
}

// moduleRoot returns the directory of go.work.
func moduleRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOWORK").Output()
	if err != nil {
		return "", err
	}
	work := strings.TrimSpace(string(out))
	if work == "" || work == "off" {
		return "", errors.New("run torture inside the repository, with its go.work")
	}
	return filepath.Dir(work), nil
}

// prove runs the test of a proof and collects its results.
func prove(root string, p proof) outcome {
	fmt.Fprintf(os.Stderr, "%s: ", p.test)
	began := time.Now()
	o := outcome{proof: p}
	passed, output := run(root, p, "-race")
	o.took = time.Since(began)
	for line := range strings.Lines(output) {
		if _, result, ok := strings.Cut(line, "result: "); ok {
			o.results = append(o.results, strings.TrimSpace(result))
		}
	}
	o.failed = !passed
	if o.failed {
		fmt.Fprintf(os.Stderr, "FAILED in %v\n%s\n", o.took.Round(time.Second), output)
	} else {
		fmt.Fprintf(os.Stderr, "ok in %v\n", o.took.Round(100*time.Millisecond))
	}
	return o
}

// run runs the test of a proof in the tree at root. passed means that the test ran and passed.
func run(root string, p proof, flags ...string) (passed bool, output string) {
	args := append([]string{"test", "-json", "-count=1", "-timeout=60m", "-run", "^" + p.test + "$"}, flags...)
	cmd := exec.Command("go", append(args, ".")...)
	cmd.Dir = filepath.Join(root, p.dir)
	cmd.Env = append(os.Environ(), "REFILL_NO_SKIP=1", "REFILL_TORTURE=1")
	out, err := cmd.Output()
	var text strings.Builder
	ran := false
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var e struct{ Action, Test, Output string }
		if dec.Decode(&e) != nil {
			break
		}
		text.WriteString(e.Output)
		ran = ran || e.Action == "pass" && e.Test == p.test
	}
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		text.Write(exit.Stderr)
	}
	return err == nil && ran, text.String()
}

const found = "found"

// try breaks a copy of the tree and runs the test of p in the copy. If the test fails, try returns found. Otherwise try
// returns a text that says what went wrong.
func (m mutant) try(root string, p proof) (caught string) {
	fmt.Fprintf(os.Stderr, "  broken: %s: ", m.name)
	defer func() { fmt.Fprintln(os.Stderr, caught) }()
	dir, err := os.MkdirTemp("", "refill-broken-")
	if err != nil {
		return err.Error()
	}
	defer os.RemoveAll(dir)
	if err := copyTree(dir, root); err != nil {
		return err.Error()
	}
	file := filepath.Join(dir, m.file)
	text, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	if n := bytes.Count(text, []byte(m.old)); n != 1 {
		return fmt.Sprintf("%q occurs %d times in %s, want 1", m.old, n, m.file)
	}
	if err := os.WriteFile(file, bytes.Replace(text, []byte(m.old), []byte(m.new), 1), 0o600); err != nil {
		return err.Error()
	}
	passed, output := run(dir, p)
	switch {
	case strings.Contains(output, "--- FAIL: "+p.test):
		return found
	case !passed:
		return "did not run: " + output
	}
	return "NOT FOUND"
}

// copyTree copies what is needed to build and test.
func copyTree(to, from string) error {
	return filepath.WalkDir(from, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if d.Name() == ".git" {
				return filepath.SkipDir
			}
			return os.MkdirAll(filepath.Join(to, rel), 0o750)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, rel), text, 0o600)
	})
}

// table formats the outcomes in Markdown.
func table(outcomes map[string]outcome) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\nRun on %s, %d cores, %s.\n",
		time.Now().UTC().Format(time.DateOnly), runtime.NumCPU(), runtime.Version())
	for _, p := range promises {
		if !slices.ContainsFunc(p.proofs, func(p proof) bool { _, done := outcomes[p.test]; return done }) {
			continue
		}
		fmt.Fprintf(&b, "\n**%s** %s\n\n", p.name, p.text)
		b.WriteString("| test | what is injected | result | a break that it finds |\n|---|---|---|---|\n")
		for _, proof := range p.proofs {
			o, done := outcomes[proof.test]
			if !done {
				continue
			}
			result := strings.Join(o.results, "; ")
			switch {
			case o.failed:
				result = "**FAILED**"
			case result == "":
				result = "holds"
			}
			broken := proof.mutant.name
			if o.caught != "" && o.caught != found {
				broken += ": **" + o.caught + "**"
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", proof.test, proof.injected, result, broken)
		}
	}
	return b.String() + "\n"
}

// In docs/guarantees.md, the tables are between these two lines.
const (
	begin = "<!-- make torture writes from here -->"
	end   = "<!-- to here -->"
)

func insert(file, text string) error {
	old, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, rest, _ := strings.Cut(string(old), begin)
	_, after, ok := strings.Cut(rest, end)
	if !ok {
		return fmt.Errorf("%s does not contain %q and %q", file, begin, end)
	}
	return os.WriteFile(file, []byte(before+begin+"\n"+text+end+after), 0o644)
}
