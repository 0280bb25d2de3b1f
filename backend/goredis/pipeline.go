package goredis

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// This file gathers the commands of concurrent calls into pipelines. A command that finds fewer than group.most
// pipelines in flight goes at once, alone, on the goroutine of its caller. Otherwise the command waits in the queue of
// its group. When a pipeline returns, a sender goroutine sends the whole queue as the next pipeline. So under load a
// round trip carries many commands, and the slower the server is, the more commands one round trip carries.
//
// Only calls for which inTime is true are gathered. go-redis ends their pipeline at its deadline, so no pipeline needs
// a goroutine that can be left behind. The caller of a gathered command leaves at once when its ctx ends.

const (
	// mostReads and mostScripts are how many pipelines of a kind one server has in flight. Both numbers were measured.
	// For reads, 2 was faster than 1 and than 4 with 16 or more callers. For scripts, 1 gave the shortest worst
	// latencies on a busy machine.
	mostReads, mostScripts = 2, 1

	// patience is how long a command waits at most before one more pipeline opens for the queue. So a broken connection,
	// a large reply or a distant server delays the commands behind it by patience, and not by a whole round trip.
	patience = 10 * time.Millisecond

	maxBatch      = 128       // commands in a pipeline
	maxBatchBytes = 256 << 10 // arguments in a pipeline, in bytes
	maxShared     = 64 << 10  // bytes of arguments, or of the value; a larger command goes alone, outside of the groups
	maxServers    = 1024      // bounds the memory for servers that no longer exist
)

var errAlone = errors.New("goredis: to be sent again, alone") // from group.wait to its caller

// pipelines are the groups of a Store. Each server has groups of its own, so that a slow server holds up no other.
type pipelines struct {
	client client
	known  *knownScripts
	calls  *calls
	// serverOf returns the client of the server that has a key, or nil if there is only one server. serverOf itself is
	// nil if the client does not show its servers. Then nothing is gathered.
	serverOf func(ctx context.Context, key string) (*redis.Client, error)
	retries  bool // after a broken connection the client repeats a single command, but no pipeline: a Ring
	cluster  bool // the client is a Cluster client
	large    largeKeys

	mu      sync.Mutex // guards servers
	servers map[*redis.Client]*[2]group
}

// A server has a group for each kind of command, so that publications do not wait for reads.
const (
	reads = iota
	scripts
)

func (p *pipelines) setUp(c redis.UniversalClient, s *Store) {
	p.client, p.known, p.calls, p.servers = c, &s.known, &s.calls, make(map[*redis.Client]*[2]group)
	switch c := c.(type) {
	case singleClient:
		p.serverOf = func(context.Context, string) (*redis.Client, error) { return nil, nil }
	case clusterClient:
		p.serverOf, p.cluster = c.MasterForKey, true
	case ringClient:
		p.serverOf = func(_ context.Context, key string) (*redis.Client, error) { return c.GetShardClientForKey(key) }
		p.retries = c.Options().MaxRetries > 0
	}
}

// group returns the group of a command about key, or nil if the command goes alone. size is the length of the
// arguments, in bytes.
func (p *pipelines) group(ctx context.Context, kind int, key string, size int) *group {
	if p.serverOf == nil || size > maxShared || p.large.has(key) || !p.calls.inTime(ctx) {
		return nil
	}
	server, err := p.serverOf(ctx, key)
	if err != nil {
		return nil // the command will fail as well
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	g := p.servers[server]
	if g == nil {
		if len(p.servers) >= maxServers {
			clear(p.servers) // commands in progress keep their groups
		}
		g = &[2]group{reads: {p: p, most: mostReads}, scripts: {p: p, most: mostScripts}}
		p.servers[server] = g
	}
	return &g[kind]
}

// get sends GET.
func (p *pipelines) get(ctx context.Context, key string) *redis.StringCmd {
	g := p.group(ctx, reads, key, 0)
	cmd := send(ctx, p, g, len(key), func() *redis.StringCmd { return redis.NewStringCmd(ctx, "get", key) })
	if cmd.Err() == nil {
		p.large.note(key, len(cmd.Val()))
	}
	return cmd
}

// set sends a SET that belongs to a fill of k. args is the whole command.
func (p *pipelines) set(ctx context.Context, k keys, args ...any) *redis.Cmd {
	g := p.group(ctx, scripts, k.value(), 0)
	return send(ctx, p, g, sizeOf(args), func() *redis.Cmd { return redis.NewCmd(ctx, args...) })
}

// send sends a command alone or in a pipeline of g. g may be nil.
func send[C redis.Cmder](ctx context.Context, p *pipelines, g *group, size int, newCmd func() C) C {
	cmd := newCmd()
	if g.enter() {
		defer g.leave()
	} else if err := g.wait(ctx, &request{cmd: cmd, size: size}); err == nil {
		return cmd
	} else if !errors.Is(err, errAlone) {
		cmd = newCmd() // the pipeline may still write to the other one
		cmd.SetErr(err)
		return cmd
	}
	_ = p.client.Process(ctx, cmd)
	return cmd
}

// run runs a script, alone or in a pipeline. isEnd is set for the scripts that end a fill.
func (p *pipelines) run(ctx context.Context, x script, isEnd bool, k keys, args ...any) *redis.Cmd {
	keys, size := k.fill(), sizeOf(args)
	g := p.group(ctx, scripts, keys[0], size)
	if g.enter() {
		defer g.leave()
	} else {
		r := &request{script: x, keys: keys, args: args, isEnd: isEnd, size: size}
		if err := g.wait(ctx, r); err == nil {
			return r.cmd.(*redis.Cmd)
		} else if !errors.Is(err, errAlone) {
			cmd := redis.NewCmd(ctx)
			cmd.SetErr(err)
			return cmd
		}
	}
	return x.run(ctx, p.known, p.client, keys, args...)
}

// sizeOf returns the length of the texts in args, in bytes.
func sizeOf(args []any) (n int) {
	for _, a := range args {
		if text, ok := a.(string); ok {
			n += len(text)
		}
	}
	return n
}

// exchange sends one pipeline, and gives each request its reply. No caller can cancel the pipeline. Its own deadline is
// the latest of the deadlines of its requests.
func (p *pipelines) exchange(batch []*request, g *group) {
	end := time.Time{}
	for _, r := range batch {
		if d, _ := r.ctx.Deadline(); d.After(end) {
			end = d
		}
	}
	ctx, cancel := context.WithDeadline(context.WithoutCancel(batch[0].ctx), end)
	defer cancel()
	pipe, sources := p.client.Pipeline(), []string(nil)
	if p.cluster && len(batch[0].keys) > 0 {
		// If the first reply is TRYAGAIN, go-redis repeats the whole pipeline. It also repeats, at the same time, each
		// command that the server has redirected, which is a data race. So the pipeline begins with a GET, whose reply
		// is never TRYAGAIN.
		pipe.Get(ctx, batch[0].keys[1])
	}
	for _, r := range batch {
		sources = p.put(ctx, pipe, r, sources)
	}
	cmds, err := pipe.Exec(ctx)
	if err != nil && !slices.ContainsFunc(cmds, func(c redis.Cmder) bool { return c.Err() != nil }) {
		for _, r := range batch {
			r.cmd.SetErr(err) // no command failed, so a hook did
		}
	}
	var refused []*request
	for _, r := range batch {
		if p.settle(r) {
			close(r.done)
		} else {
			refused = append(refused, r)
		}
	}
	g.add(refused...)
}

// put puts a request into a pipeline. sources has the hashes of the scripts whose source the pipeline carries already.
// The later runs of these scripts need only the hash, because a server executes a pipeline in order. A request that
// was refused twice carries the source in any case, because its key has moved to another server of the Cluster.
func (p *pipelines) put(ctx context.Context, pipe redis.Pipeliner, r *request, sources []string) []string {
	if x := r.script; x.hash != "" {
		bySource := r.refused >= 2 || !p.known.has(x) && !slices.Contains(sources, x.hash)
		if bySource {
			sources = append(sources, x.hash)
		}
		r.cmd = x.command(ctx, bySource, r.keys, r.args)
	}
	_ = pipe.Process(ctx, r.cmd)
	return sources
}

// settle looks at the reply to a request. It returns false if the request must be sent again because the server does
// not know the script.
func (p *pipelines) settle(r *request) bool {
	err := r.cmd.Err()
	if cmd, ok := r.cmd.(*redis.Cmd); ok && r.script.hash != "" {
		p.known.learn(r.script, cmd)
		if unknown(cmd) && cmd.Name() == "evalsha" {
			r.refused++
			return false
		}
		r.script.explain(cmd)
	}
	switch {
	case err == nil, errors.Is(err, redis.Nil):
	case errors.As(err, new(redis.Error)):
		r.again = slices.ContainsFunc(passing, func(prefix string) bool { return redis.HasErrorPrefix(err, prefix) })
	default:
		r.again = p.retries && ended(r.ctx) == nil
		r.cmd.SetErr(&exchangeError{err, r.sent.Load()})
	}
	return true
}

// passing are the prefixes of the error replies after which go-redis repeats a single command. In a pipeline, go-redis
// looks for them only in the first reply, so the caller of a request with such a reply sends the command again, alone.
// go-redis follows MOVED and ASK in both cases.
var passing = []string{"TRYAGAIN", "LOADING", "CLUSTERDOWN", "MASTERDOWN", "READONLY"}
