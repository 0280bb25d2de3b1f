package refill_test

import (
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"
)

// The README must show the body of the function Example word for word. Since go test runs Example, the program of the
// README then prints the output of Example.
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

// Each test and example that the README or a page of docs names must exist.
func TestDocsNameRealTests(t *testing.T) {
	var code strings.Builder
	err := fs.WalkDir(os.DirFS("."), ".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		code.Write(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	pages, err := fs.Glob(os.DirFS("."), "docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(code.String(), "package realtest") {
		t.Skip("internal/realtest is a module of its own, and not here")
	}
	names := regexp.MustCompile("`((?:Test|Fuzz|Example)[A-Za-z_]*)`")
	for _, page := range append(pages, "README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names.FindAllStringSubmatch(string(text), -1) {
			if !strings.Contains(code.String(), "func "+name[1]+"(") {
				t.Errorf("%s names %s, which is not a test", page, name[1])
			}
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
