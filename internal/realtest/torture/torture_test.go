//go:build unix

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Each proof in promises must name a test that exists, and each break must apply to exactly one place. Each promise
// must have at least one break.
func TestPromises(t *testing.T) {
	root := filepath.Join("..", "..", "..")
	for _, p := range promises {
		broken := 0
		for _, proof := range p.proofs {
			if !declares(t, filepath.Join(root, proof.dir), proof.test) {
				t.Errorf("%s: there is no %s in %s", p.name, proof.test, proof.dir)
			}
			m := proof.mutant
			if m.name == "" {
				continue
			}
			broken++
			text, err := os.ReadFile(filepath.Join(root, m.file))
			if err != nil {
				t.Fatal(err)
			}
			if n := bytes.Count(text, []byte(m.old)); n != 1 {
				t.Errorf("%s: %q, which the break replaces, occurs %d times in %s, want 1", proof.test, m.old, n, m.file)
			}
		}
		if broken == 0 {
			t.Errorf("%s has no break, so no test of it is known to fail", p.name)
		}
	}
}

func declares(t *testing.T, dir, test string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "\nfunc "+test+"(") {
			return true
		}
	}
	return false
}
