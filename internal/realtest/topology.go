//go:build unix

package realtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// This file starts servers that can replace each other: a master with replicas behind Sentinel, and a Cluster.

// syncAtOnce makes a master serve its first replica at once. By default a master waits five seconds for further
// replicas. A replica is not promoted before it has finished its first sync.
var syncAtOnce = []string{"--repl-diskless-sync-delay", "0"}

// Sentinel is a master and two replicas, watched by three sentinels. The sentinels replace a master that has been
// silent for about 0.7 s. Only the goroutine of the test may call the methods.
type Sentinel struct {
	t         testing.TB
	servers   []*Redis // servers[0] is the first master
	sentinels []*sentinel
}

// sentinel is one sentinel process.
type sentinel struct {
	*Process
	addr string
}

const masterName = "m"

// sentinelTimers makes sentinels faster than by default. Times are milliseconds. By default a sentinel that was delayed
// itself, for instance on a busy machine, enters TILT mode and does nothing for half a minute. The ping-period has two
// bounds. A sentinel that has lost the connection to a server reconnects after one ping-period, so a ping-period must
// be much shorter than the time after which a server counts as down. A replica is promoted only if it has answered
// within the last five ping-periods, so a ping-period must not be too short either.
var sentinelTimers = []any{
	"sentinel", "debug", "info-period", 500, "ask-period", 100, "ping-period", 350, "publish-period", 100,
	"tilt-trigger", 20_000, "tilt-period", 100,
}

// sentinelPublishPeriod is set when all sentinels have found each other. If a server reports itself as master for four
// publish-periods, although the sentinels know another master, the sentinels make that server a replica. With a short
// publish-period, the sentinels would do this to a replica that is just being promoted.
var sentinelPublishPeriod = []any{"sentinel", "debug", "publish-period", 500}

// StartSentinel starts a master, two replicas and three sentinels. StartSentinel returns when all sentinels know each
// other and both replicas follow the master. All processes end with the test.
func StartSentinel(t testing.TB) *Sentinel {
	t.Helper()
	s := &Sentinel{t: t}
	master := StartRedis(t, syncAtOnce...)
	host, port, _ := net.SplitHostPort(master.Addr())
	s.servers = []*Redis{master}
	for range 2 {
		s.servers = append(s.servers, StartRedis(t, slices.Concat(syncAtOnce, []string{"--replicaof", host, port})...))
	}
	// The replicas must follow the master before the sentinels start. A sentinel asks the master for its replicas when
	// the sentinel starts, and then only every 10 s.
	s.await("the replicas follow the master", func() bool {
		return follows(s.servers[1], master) && follows(s.servers[2], master)
	})
	// The third sentinel notices a dead master later than the first two. If three sentinels began a failover at the
	// same moment, each would vote for itself, and all would retry seconds later. If only two begin, one of the two
	// gets the vote of the third sentinel.
	for _, downAfter := range []int{700, 700, 2500} {
		s.sentinels = append(s.sentinels, startSentinel(t, host, port, downAfter))
	}
	s.await("the sentinels know all others", func() bool {
		return s.all(func(m map[string]string) bool {
			return m["num-slaves"] == "2" && m["num-other-sentinels"] == "2" && m["flags"] == "master"
		})
	})
	for _, one := range s.sentinels {
		if _, err := command(one.addr, sentinelPublishPeriod...); err != nil {
			t.Fatalf("realtest: sentinel on %s: %v", one.addr, err)
		}
	}
	return s
}

// startSentinel starts one sentinel. The sentinel considers a server down after downAfter milliseconds of silence. The
// sentinel writes its state to its configuration file, so each sentinel needs a file of its own.
func startSentinel(t testing.TB, host, port string, downAfter int) *sentinel {
	t.Helper()
	path, dir, own := program(t, "redis-server"), t.TempDir(), freePort(t)
	config := filepath.Join(dir, "sentinel.conf")
	text := fmt.Sprintf("port %d\nbind 127.0.0.1\ndir %s\nlogfile log\n"+
		"sentinel monitor m %s %s 2\nsentinel down-after-milliseconds m %d\nsentinel failover-timeout m 1000\n",
		own, dir, host, port, downAfter)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatalf("realtest: sentinel: %v", err)
	}
	p, err := launch(t, "redis-sentinel", exec.Command(path, config, "--sentinel"))
	if err != nil {
		t.Fatalf("realtest: sentinel: %v", err)
	}
	s := &sentinel{Process: p, addr: loopback(own)}
	t.Cleanup(func() {
		s.Kill()
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Logf("realtest: log of the sentinel on %s:\n%s", s.addr, lastLines(log, 40))
		}
	})
	configured := func() bool {
		_, err = command(s.addr, sentinelTimers...)
		return err == nil || p.gone()
	}
	if !eventually(configured) || err != nil {
		t.Fatalf("realtest: sentinel on %s: %v", s.addr, err)
	}
	return s
}

// Addrs returns the addresses of the sentinels.
func (s *Sentinel) Addrs() []string {
	addrs := make([]string, len(s.sentinels))
	for i, one := range s.sentinels {
		addrs[i] = one.addr
	}
	return addrs
}

// MasterName returns the name of the master in the configuration of the sentinels.
func (s *Sentinel) MasterName() string { return masterName }

// Master waits until all sentinels name the same master, and returns that server.
func (s *Sentinel) Master() *Redis {
	s.t.Helper()
	var master *Redis
	s.await("the sentinels agree on a master", func() bool { master = s.named(); return master != nil })
	return master
}

// Replicas returns the running servers except the master.
func (s *Sentinel) Replicas() []*Redis {
	s.t.Helper()
	master := s.Master()
	return slices.DeleteFunc(slices.Clone(s.servers), func(r *Redis) bool { return r == master || r.gone() })
}

// CutReplicas freezes the replicas and cuts their links. Writes that the master accepts from now on do not reach
// another server. ThawReplicas lets the replicas continue. If the master still runs, the replicas then reconnect.
func (s *Sentinel) CutReplicas() {
	s.t.Helper()
	master := s.Master()
	for _, r := range s.Replicas() {
		r.Freeze()
	}
	// Without the cut, a replica that continues would read the writes that have arrived in its socket meanwhile.
	if _, err := master.ask("CLIENT KILL TYPE replica"); err != nil {
		s.t.Fatalf("realtest: cutting the replicas of %s: %v", master.Addr(), err)
	}
}

// ThawReplicas ends CutReplicas.
func (s *Sentinel) ThawReplicas() {
	s.t.Helper()
	for _, r := range s.servers {
		if !r.gone() {
			r.Thaw()
		}
	}
}

// Failover makes the sentinels replace a healthy master. When the new master accepts writes, Failover returns it. The
// old master still accepts writes for a moment, and those writes are lost.
func (s *Sentinel) Failover() *Redis {
	s.t.Helper()
	old := s.Master()
	s.await("the last failover has ended", func() bool {
		for _, r := range s.servers {
			if r != old && !r.gone() && !follows(r, old) {
				return false
			}
		}
		return s.all(func(m map[string]string) bool { return m["flags"] == "master" }) && s.allKnowReplicas()
	})
	s.await("a sentinel fails over", func() bool { // a sentinel refuses while it knows no suitable replica
		_, err := command(s.sentinels[0].addr, "sentinel", "failover", masterName)
		return err == nil
	})
	return s.NextMaster(old)
}

// KillMaster kills the master (SIGKILL) and returns that server. The sentinels replace the master within one or two
// seconds, see NextMaster.
func (s *Sentinel) KillMaster() *Redis {
	s.t.Helper()
	master := s.Master()
	master.Kill()
	return master
}

// NextMaster waits until all sentinels name a master other than old, and that master accepts writes.
func (s *Sentinel) NextMaster(old *Redis) *Redis {
	s.t.Helper()
	var next *Redis
	s.await("there is a master other than "+old.Addr(), func() bool {
		if next = s.named(); next == nil || next == old {
			return false
		}
		role, err := next.ask("INFO replication")
		return err == nil && strings.Contains(role, "role:master")
	})
	return next
}

// named returns the master that all sentinels name to clients, or nil while the sentinels do not agree.
func (s *Sentinel) named() *Redis {
	name := ""
	for i, one := range s.sentinels {
		reply, err := command(one.addr, "sentinel", "get-master-addr-by-name", masterName)
		addr, ok := reply.([]any)
		if err != nil || !ok || len(addr) != 2 {
			return nil
		}
		this := net.JoinHostPort(fmt.Sprint(addr[0]), fmt.Sprint(addr[1]))
		if i > 0 && this != name {
			return nil
		}
		name = this
	}
	for _, r := range s.servers {
		if r.Addr() == name {
			return r
		}
	}
	return nil
}

// all reports whether the function is returns true for each sentinel's view of the master.
func (s *Sentinel) all(is func(view map[string]string) bool) bool {
	for _, one := range s.sentinels {
		view, err := masterView(one.addr)
		if err != nil || !is(view) {
			return false
		}
	}
	return true
}

// allKnowReplicas reports whether every sentinel knows every running replica as a replica. A sentinel may still believe
// that a restarted server is a master, although it is a replica now. Such a sentinel would make the server a replica
// again just when the server is promoted the next time.
func (s *Sentinel) allKnowReplicas() bool {
	for _, one := range s.sentinels {
		replicas, err := ask(one.addr, (*redis.SentinelClient).Replicas)
		if err != nil || slices.ContainsFunc(replicas, func(r map[string]string) bool {
			return r["role-reported"] != "slave" && !strings.Contains(r["flags"], "down")
		}) {
			return false
		}
	}
	return true
}

// masterView returns what a sentinel reports about the master.
func masterView(addr string) (map[string]string, error) {
	return ask(addr, (*redis.SentinelClient).Master)
}

// ask calls a method of a sentinel client for the master.
func ask[V any, R interface{ Result() (V, error) }](
	addr string, what func(*redis.SentinelClient, context.Context, string) R,
) (V, error) {
	c := redis.NewSentinelClient(&redis.Options{Addr: addr, PoolSize: 1, MaxRetries: -1})
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	return what(c, ctx, masterName).Result()
}

func (s *Sentinel) await(what string, is func() bool) {
	s.t.Helper()
	if !eventually(is) {
		s.t.Fatalf("realtest: sentinel: not true within %v: %s", waitLimit, what)
	}
}

// follows reports whether a replica follows this master.
func follows(r, master *Redis) bool {
	info, err := r.ask("INFO replication")
	_, port, _ := net.SplitHostPort(master.Addr())
	return err == nil && strings.Contains(info, "master_link_status:up") &&
		strings.Contains(info, "master_port:"+port+"\r\n")
}

// command sends one command and returns the reply as go-redis reads it.
func command(addr string, args ...any) (any, error) {
	c := redis.NewClient(&redis.Options{Addr: addr, PoolSize: 1, MaxRetries: -1})
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	return c.Do(ctx, args...).Result()
}

// Cluster is a Redis Cluster: masters that share the 16,384 slots evenly, and replicas of each. A replica replaces a
// master that has been silent for a second. Only the goroutine of the test may call the methods.
type Cluster struct {
	t     testing.TB
	nodes []*clusterNode // masters first
}

type clusterNode struct {
	*Redis
	id string
}

const slots = 16384

// StartCluster starts a Cluster. It returns when every node knows all nodes, all slots are served, and every replica
// follows its master. StartCluster takes two seconds, because a master of a new cluster waits two seconds before it
// serves. All processes end with the test.
func StartCluster(t testing.TB, masters, replicasEach int) *Cluster {
	t.Helper()
	c := &Cluster{t: t}
	for range masters * (1 + replicasEach) {
		c.start()
	}
	first := c.nodes[0]
	for i, n := range c.nodes {
		if i < masters {
			c.must(n, "cluster", "addslotsrange", i*slots/masters, (i+1)*slots/masters-1)
			c.must(n, "cluster", "set-config-epoch", i+1)
		}
		if i > 0 {
			host, port, _ := net.SplitHostPort(n.Addr())
			c.must(first, "cluster", "meet", host, port, c.busPort(n))
		}
	}
	c.await("all nodes know each other", func() bool {
		return c.everywhere(func(v clusterView) bool { return len(v) == len(c.nodes) })
	})
	for i, n := range c.nodes[masters:] {
		c.must(n, "cluster", "replicate", c.nodes[i%masters].id)
	}
	unlinked := func() bool {
		for i, n := range c.nodes[masters:] {
			if !follows(n.Redis, c.nodes[i%masters].Redis) {
				return true
			}
		}
		return false
	}
	c.await("the cluster is healthy", func() bool {
		return c.everywhere(func(v clusterView) bool { return v.covered() && v.replicas() == len(c.nodes)-masters }) &&
			!slices.ContainsFunc(c.nodes, func(n *clusterNode) bool { return !n.serves() }) && !unlinked()
	})
	return c
}

// start adds a node that does not know the other nodes yet.
func (c *Cluster) start() {
	c.t.Helper()
	n := &clusterNode{Redis: StartRedis(c.t, slices.Concat(syncAtOnce, []string{
		"--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-allow-replica-migration", "no",
		"--cluster-port", strconv.Itoa(freePort(c.t)), // the default may be in the kernel's local port range, see listen
	})...)}
	id, err := n.ask("CLUSTER MYID")
	if err != nil {
		c.t.Fatalf("realtest: cluster: %v", err)
	}
	n.id = id
	c.nodes = append(c.nodes, n)
}

// busPort returns the port that a node uses to talk to other nodes.
func (c *Cluster) busPort(n *clusterNode) string {
	c.t.Helper()
	reply, err := command(n.Addr(), "config", "get", "cluster-port")
	if pairs, ok := reply.(map[any]any); ok && err == nil {
		return fmt.Sprint(pairs["cluster-port"])
	}
	c.t.Fatalf("realtest: cluster: CONFIG GET cluster-port: %v, %v", reply, err)
	return ""
}

// Servers returns all nodes: first the nodes that were masters at the start, then the replicas.
func (c *Cluster) Servers() []*Redis {
	servers := make([]*Redis, len(c.nodes))
	for i, n := range c.nodes {
		servers[i] = n.Redis
	}
	return servers
}

// Addrs returns the addresses of all nodes, in the order of Servers.
func (c *Cluster) Addrs() []string {
	addrs := make([]string, len(c.nodes))
	for i, n := range c.nodes {
		addrs[i] = n.Addr()
	}
	return addrs
}

// Slot returns the slot of a key.
func (c *Cluster) Slot(key string) int {
	c.t.Helper()
	slot, ok := c.must(c.running()[0], "cluster", "keyslot", key).(int64)
	if !ok {
		c.t.Fatalf("realtest: cluster: CLUSTER KEYSLOT %q: unexpected reply", key)
	}
	return int(slot)
}

// NodeFor waits until all running nodes agree on a running master for the slot of the key, and returns that master.
func (c *Cluster) NodeFor(key string) *Redis {
	c.t.Helper()
	return c.owner(c.Slot(key), nil).Redis
}

// Replicas returns the running replicas of a master.
func (c *Cluster) Replicas(master *Redis) (replicas []*Redis) {
	c.t.Helper()
	id := c.node(master).id
	for _, n := range c.running() {
		if view, err := viewOf(n); err == nil && view[n.id].master == id {
			replicas = append(replicas, n.Redis)
		}
	}
	return replicas
}

// Failover makes a replica replace its healthy master. When all nodes agree on the new master, Failover returns it.
func (c *Cluster) Failover(master *Redis) *Redis {
	c.t.Helper()
	slot := c.firstSlot(master)
	replicas := c.Replicas(master)
	if len(replicas) == 0 {
		c.t.Fatalf("realtest: cluster: %s has no replica", master.Addr())
	}
	c.must(c.node(replicas[0]), "cluster", "failover")
	return c.owner(slot, c.node(master)).Redis
}

// NextMaster waits until all running nodes agree on a master other than old for the slot of a key. It returns that
// master as soon as the master serves requests. After a kill -9 this takes about two seconds.
func (c *Cluster) NextMaster(key string, old *Redis) *Redis {
	c.t.Helper()
	next := c.owner(c.Slot(key), c.node(old))
	c.await("the new master serves requests", next.serves)
	return next.Redis
}

// MoveSlot moves a slot with its keys to another master, as resharding does. To test what happens during the move, use
// [Cluster.OpenSlot].
func (c *Cluster) MoveSlot(slot int, to *Redis) {
	c.t.Helper()
	m := c.OpenSlot(slot, to)
	m.MoveKeys()
	m.Finish()
}

// SlotMove is a slot that moves from one master to another. Until Finish, the old master answers for the keys that
// it still has. For other keys it redirects the client to the new master (ASK). A command about several keys fails
// (TRYAGAIN) while the keys are split between the two masters.
type SlotMove struct {
	c        *Cluster
	slot     int
	from, to *clusterNode
}

// OpenSlot begins the move of a slot to another master. The keys stay on the old master until MoveKeys or Finish.
func (c *Cluster) OpenSlot(slot int, to *Redis) *SlotMove {
	c.t.Helper()
	m := &SlotMove{c: c, slot: slot, from: c.owner(slot, nil), to: c.node(to)}
	c.must(m.to, "cluster", "setslot", slot, "importing", m.from.id)
	c.must(m.from, "cluster", "setslot", slot, "migrating", m.to.id)
	return m
}

// MoveKeys moves the keys that are in the slot now.
func (m *SlotMove) MoveKeys() {
	m.c.t.Helper()
	host, port, _ := net.SplitHostPort(m.to.Addr())
	for {
		keys, ok := m.c.must(m.from, "cluster", "getkeysinslot", m.slot, 100).([]any)
		if !ok || len(keys) == 0 {
			return
		}
		m.c.must(m.from, append([]any{"migrate", host, port, "", 0, waitLimit.Milliseconds(), "keys"}, keys...)...)
	}
}

// Finish moves the keys that are still in the slot, and gives the slot to its new master. Finish returns when all
// nodes know the new master.
func (m *SlotMove) Finish() {
	m.c.t.Helper()
	m.MoveKeys() // while a slot is open, its old master accepts no new keys
	// The new master must be the first node that learns of the new owner. Otherwise it would redirect clients to the
	// old master.
	nodes := slices.Concat([]*clusterNode{m.to, m.from}, m.c.running())
	for _, n := range nodes {
		view, err := viewOf(n)
		if err == nil && view[n.id].master != "" {
			continue // a replica learns the owner from its master
		}
		m.c.must(n, "cluster", "setslot", m.slot, "node", m.to.id)
	}
	m.c.owner(m.slot, m.from)
}

// owner waits until all running nodes agree on the owner of a slot, which must be running and must not be except.
func (c *Cluster) owner(slot int, except *clusterNode) (owner *clusterNode) {
	c.t.Helper()
	c.await(fmt.Sprintf("all nodes agree on a master of slot %d", slot), func() bool {
		for _, n := range c.nodes {
			if n != except && !n.gone() && c.everywhere(func(v clusterView) bool { return v.has(n.id, slot) }) {
				owner = n
				return true
			}
		}
		return false
	})
	return owner
}

// firstSlot returns the first slot of a master.
func (c *Cluster) firstSlot(master *Redis) int {
	c.t.Helper()
	n := c.node(master)
	view, err := viewOf(n)
	if err != nil || len(view[n.id].slots) == 0 {
		c.t.Fatalf("realtest: cluster: %s has no slot (%v)", master.Addr(), err)
	}
	return view[n.id].slots[0][0]
}

func (c *Cluster) node(r *Redis) *clusterNode {
	c.t.Helper()
	i := slices.IndexFunc(c.nodes, func(n *clusterNode) bool { return n.Redis == r })
	if i < 0 {
		c.t.Fatalf("realtest: cluster: %s is not a node of this cluster", r.Addr())
	}
	return c.nodes[i]
}

func (c *Cluster) running() []*clusterNode {
	return slices.DeleteFunc(slices.Clone(c.nodes), func(n *clusterNode) bool { return n.gone() })
}

// everywhere reports whether the function is returns true for the view of every running node.
func (c *Cluster) everywhere(is func(clusterView) bool) bool {
	for _, n := range c.running() {
		if view, err := viewOf(n); err != nil || !is(view) {
			return false
		}
	}
	return true
}

func (c *Cluster) must(n *clusterNode, args ...any) any {
	c.t.Helper()
	reply, err := command(n.Addr(), args...)
	if err != nil {
		c.t.Fatalf("realtest: cluster: %s: %v: %v", n.Addr(), args, err)
	}
	return reply
}

func (c *Cluster) await(what string, is func() bool) {
	c.t.Helper()
	if !eventually(is) {
		c.t.Fatalf("realtest: cluster: not true within %v: %s", waitLimit, what)
	}
}

// serves reports whether a node considers the cluster state ok.
func (n *clusterNode) serves() bool {
	info, err := n.ask("CLUSTER INFO")
	return err == nil && strings.Contains(info, "cluster_state:ok")
}

// clusterView is what one node knows about all nodes, by node id. Nodes that are still in the handshake are not in the
// view.
type clusterView map[string]clusterMember

type clusterMember struct {
	master string // of a replica: the id of its master
	slots  [][2]int
}

// viewOf returns the view of a node.
func viewOf(n *clusterNode) (clusterView, error) {
	text, err := n.ask("CLUSTER NODES")
	if err != nil {
		return nil, err
	}
	return parseView(text)
}

// parseView reads the reply to CLUSTER NODES. The reply has one line per node:
//
//	id ip:port@busport,name flags master ping pong epoch link slot slot-slot [slot->-id]
func parseView(text string) (clusterView, error) {
	view := clusterView{}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 8 {
			return nil, fmt.Errorf("CLUSTER NODES: %q", line)
		}
		if flags := fields[2]; strings.Contains(flags, "handshake") || strings.Contains(flags, "noaddr") {
			continue
		}
		m := clusterMember{}
		if fields[3] != "-" {
			m.master = fields[3]
		}
		for _, field := range fields[8:] {
			if strings.HasPrefix(field, "[") {
				continue // a slot that is being moved
			}
			low, high, isRange := strings.Cut(field, "-")
			if !isRange {
				high = low
			}
			first, err := strconv.Atoi(low)
			last, err2 := strconv.Atoi(high)
			if err := errors.Join(err, err2); err != nil {
				return nil, fmt.Errorf("CLUSTER NODES: %q: %w", line, err)
			}
			m.slots = append(m.slots, [2]int{first, last})
		}
		view[fields[0]] = m
	}
	return view, nil
}

// has reports whether a node has a slot.
func (v clusterView) has(id string, slot int) bool {
	return slices.ContainsFunc(v[id].slots, func(s [2]int) bool { return s[0] <= slot && slot <= s[1] })
}

// covered reports whether every slot has a master.
func (v clusterView) covered() bool {
	n := 0
	for _, m := range v {
		for _, s := range m.slots {
			n += s[1] - s[0] + 1
		}
	}
	return n == slots
}

func (v clusterView) replicas() (n int) {
	for _, m := range v {
		if m.master != "" {
			n++
		}
	}
	return n
}
