package refill_test

import (
	"errors"
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"
)

// The program of the README is the first example, word for word, so what it prints is checked.
func TestReadmeProgramIsTheExample(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	examples, err := os.ReadFile("example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	program := between(t, string(readme), "func main() {\n", "\n}\n")
	example := between(t, string(examples), "func Example() {\n", "\n\t// Output:")
	if program != example {
		t.Errorf("the README's main:\n%s\n\nthe Example:\n%s", program, example)
	}
	if !strings.Contains(string(readme), "\n100 requests served by 1 query\n") {
		t.Error("the README does not show the program's output")
	}
}

// The tests and examples that the README names as proofs exist.
func TestReadmeNamesRealTests(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var code strings.Builder
	for _, dir := range []string{".", "internal/realtest"} {
		files, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) {
			t.Skip("internal/realtest is a module of its own, and not here")
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if strings.HasSuffix(f.Name(), "_test.go") {
				b, err := os.ReadFile(dir + "/" + f.Name())
				if err != nil {
					t.Fatal(err)
				}
				code.Write(b)
			}
		}
	}
	for _, name := range regexp.MustCompile("`((?:Test|Fuzz|Example)[A-Za-z_]*)`").FindAllStringSubmatch(string(readme), -1) {
		if !strings.Contains(code.String(), "func "+name[1]+"(") {
			t.Errorf("the README names %s, which is no test", name[1])
		}
	}
}

func between(t *testing.T, s, from, to string) string {
	t.Helper()
	_, s, ok1 := strings.Cut(s, from)
	s, _, ok2 := strings.Cut(s, to)
	if !ok1 || !ok2 {
		t.Fatalf("no text between %q and %q", from, to)
	}
	return s
}
