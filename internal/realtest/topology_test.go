//go:build unix

package realtest

import (
	"slices"
	"strings"
	"testing"
)

func TestSentinelReplacesItsMaster(t *testing.T) {
	t.Parallel()
	s := StartSentinel(t)
	if got := len(s.Addrs()); got != 3 {
		t.Fatalf("%d sentinels", got)
	}
	first := s.Master()
	if n := len(s.Replicas()); first != s.servers[0] || n != 2 {
		t.Fatalf("the master is %s, with %d replicas", first.Addr(), n)
	}
	s.CutReplicas()
	if _, err := first.ask("SET lost 1"); err != nil {
		t.Fatal(err)
	}
	if s.KillMaster() != first {
		t.Fatal("KillMaster killed another server")
	}
	s.ThawReplicas()
	second := s.NextMaster(first)
	if second == first || s.Master() != second {
		t.Fatalf("the master after the kill is %s, then %s", second.Addr(), s.Master().Addr())
	}
	if n, err := second.ask("EXISTS lost"); n != "0" || err != nil {
		t.Errorf("EXISTS of a key that was written after CutReplicas: %s, %v", n, err)
	}
	first.Restart()
	third := s.Failover()
	if third == second {
		t.Error("Failover returned the same master")
	}
	if reply, err := third.ask("SET a 1"); reply != "OK" || err != nil {
		t.Errorf("the new master accepts no writes: %q, %v", reply, err)
	}
}

func TestClusterMovesAndFailsOver(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, 3, 1)
	if n := len(c.Addrs()); n != 6 {
		t.Fatalf("%d nodes", n)
	}
	const key = "{a}:1"
	from := c.NodeFor(key)
	if _, err := from.ask("SET " + key + " here"); err != nil {
		t.Fatal(err)
	}
	to := c.NodeFor("{b}:1")
	if to == from {
		t.Fatal("the two keys are on one node")
	}
	m := c.OpenSlot(c.Slot(key), to)
	if text, err := from.ask("GET " + key); text != "here" || err != nil {
		t.Errorf("during the move the key is read as %q, %v", text, err)
	}
	if _, err := from.ask("GET {a}:2"); err == nil || !strings.Contains(err.Error(), "ASK ") {
		t.Errorf("another key of the slot: %v", err)
	}
	m.MoveKeys()
	m.Finish()
	if got := c.NodeFor(key); got != to {
		t.Errorf("the slot is at %s", got.Addr())
	}
	if text, err := to.ask("GET " + key); text != "here" || err != nil {
		t.Errorf("moved, the key is read as %q, %v", text, err)
	}
	c.MoveSlot(c.Slot(key), from)
	if c.NodeFor(key) != from {
		t.Error("the slot did not move back")
	}

	replica := c.Replicas(from)
	if len(replica) != 1 {
		t.Fatalf("%d replicas", len(replica))
	}
	if got := c.Failover(from); got != replica[0] {
		t.Errorf("%s is master after a failover to %s", got.Addr(), replica[0].Addr())
	}
	if text, err := replica[0].ask("GET " + key); text != "here" || err != nil {
		t.Errorf("after a failover the key is read as %q, %v", text, err)
	}
	replica[0].Kill()
	if got := c.NextMaster(key, replica[0]); got != from {
		t.Errorf("%s replaces the server that was killed", got.Addr())
	}
}

func TestClusterView(t *testing.T) {
	view, err := parseView("a 127.0.0.1:1@2 myself,master - 0 0 1 connected 0-5 7 9-16383 [6-<-b]\n" +
		"b 127.0.0.1:3@4,name slave a 0 0 2 connected\n" +
		"c 127.0.0.1:5@6 handshake - 0 0 0 connected\n" +
		"d 127.0.0.1:7@8 master,fail - 0 0 3 disconnected 6 8\n")
	if err != nil {
		t.Fatal(err)
	}
	if len(view) != 3 || view.replicas() != 1 || view["b"].master != "a" || !view.covered() {
		t.Errorf("%+v", view)
	}
	for slot, owner := range map[int]string{0: "a", 5: "a", 6: "d", 7: "a", 8: "d", 16383: "a"} {
		if !view.has(owner, slot) || slices.ContainsFunc([]string{"a", "b", "d"}, func(id string) bool {
			return id != owner && view.has(id, slot)
		}) {
			t.Errorf("slot %d does not belong to %s alone", slot, owner)
		}
	}
	for _, text := range []string{"a b c\n", "a 127.0.0.1:1@2 master - 0 0 1 connected 0-x\n"} {
		if _, err := parseView(text); err == nil {
			t.Errorf("parseView(%q) returns no error", text)
		}
	}
}
