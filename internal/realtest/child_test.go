//go:build unix

package realtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func init() {
	Child("echo", echo)
	Child("count", count)
	Child("fail", func(context.Context, json.RawMessage, *json.Encoder) error {
		fmt.Println("a stray print") // must not get between the lines for Next
		return errors.New("it went wrong")
	})
	Child("race", func(_ context.Context, _ json.RawMessage, out *json.Encoder) error {
		fmt.Fprintln(os.Stderr, "WARNING: DATA RACE")
		return out.Encode("raced")
	})
	Child("parent", parent)
}

// echo writes its arguments, and "goodbye" at the end.
func echo(ctx context.Context, args json.RawMessage, out *json.Encoder) error {
	if err := out.Encode(args); err != nil {
		return err
	}
	<-ctx.Done()
	return out.Encode("goodbye")
}

// count counts until its context ends.
func count(ctx context.Context, _ json.RawMessage, out *json.Encoder) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if err := out.Encode(i); err != nil {
				return err
			}
		}
	}
}

// parent starts a process and writes its pid.
func parent(ctx context.Context, _ json.RawMessage, out *json.Encoder) error {
	p, err := launch(&fakeT{}, "sleep", exec.Command("sleep", "600"))
	if err != nil {
		return err
	}
	p.Freeze()
	defer p.Kill()
	if err := out.Encode(p.Pid()); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func TestChildTakesArgumentsAndStops(t *testing.T) {
	type point struct{ X, Y int }
	child := StartChild(t, "echo", point{1, 2})
	var got point
	if child.Next(&got); got != (point{1, 2}) {
		t.Errorf("the child received %v", got)
	}
	if child.Pid() == os.Getpid() {
		t.Error("the child runs in this process")
	}
	if err := child.Stop(); err != nil {
		t.Fatal(err)
	}
	var word string
	if child.Next(&word); word != "goodbye" {
		t.Errorf("the last line of the child is %q", word)
	}
	if child.NextWithin(&word, time.Minute) {
		t.Errorf("a child that had ended wrote %q", word)
	}
}

func TestChildFreezeThawKill(t *testing.T) {
	child := StartChild(t, "count", nil)
	var n int
	child.Next(&n)
	child.Freeze()
	for child.NextWithin(&n, 50*time.Millisecond) { // skips the lines that the child wrote before the freeze
	}
	frozen := n
	child.Thaw()
	if child.Next(&n); n != frozen+1 {
		t.Errorf("frozen at %d, the child continued with %d", frozen, n)
	}
	child.Freeze()
	child.Kill()
	for child.NextWithin(&n, time.Minute) {
	}
	if n > frozen+10_000 {
		t.Errorf("a killed child kept counting: %d", n)
	}
	if err := child.Wait(); err == nil {
		t.Error("Wait returns no error for a killed child")
	}
}

func TestChildErrorReachesTheTest(t *testing.T) {
	err := StartChild(t, "fail", nil).Wait()
	if err == nil || !strings.Contains(err.Error(), "it went wrong") || !strings.Contains(err.Error(), "a stray print") {
		t.Errorf("Wait returns %v", err)
	}
}

// tempT is a fakeT with the temporary folders of a real test.
func tempT(t *testing.T) *fakeT { return &fakeT{TB: t} }

func TestChildTroubleFailsTheTest(t *testing.T) {
	for name, test := range map[string]struct {
		run  func(t testing.TB)
		want string
	}{
		"an unread error": {func(t testing.TB) { <-StartChild(t, "fail", nil).ended }, "it went wrong"},
		"a race":          {func(t testing.TB) { _ = StartChild(t, "race", nil).Wait() }, "a data race in the child"},
		"no line":         {func(t testing.TB) { StartChild(t, "fail", nil).Next(new(int)) }, "wrote no further line"},
		"another type":    {func(t testing.TB) { StartChild(t, "race", nil).Next(new(int)) }, `wrote "raced"`},
		"an unknown name": {func(t testing.TB) { StartChild(t, "unregistered", nil) }, "TestMain has to call"},
	} {
		t.Run(name, func(t *testing.T) {
			f := tempT(t)
			if f.run(test.run); !f.failed || !strings.Contains(f.log.String(), test.want) {
				t.Errorf("failed %v, logged %q", f.failed, f.log.String())
			}
		})
	}
}

func TestGrandchildDiesWithChild(t *testing.T) {
	if dieWithParent() == nil {
		t.Skip("this system cannot end a process with its parent")
	}
	child := StartChild(t, "parent", nil)
	var pid int
	child.Next(&pid)
	child.Kill()
	ended := func() bool { // a zombie has ended too; nothing waits for it, because its parent is gone
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || strings.Contains(string(stat), ") Z ")
	}
	if !eventually(ended) {
		t.Errorf("pid %d outlived its parent", pid)
	}
}
