package goredis

import (
	"context"
	_ "embed"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

//go:embed lua/common.lua
var luaCommon string

//go:embed lua/acquire.lua
var luaAcquire string

//go:embed lua/renew.lua
var luaRenew string

//go:embed lua/publish.lua
var luaPublish string

//go:embed lua/fail.lua
var luaFail string

//go:embed lua/release.lua
var luaRelease string

//go:embed lua/invalidate.lua
var luaInvalidate string

//go:embed lua/expire.lua
var luaExpire string

//go:embed lua/ensuretag.lua
var luaEnsureTag string

//go:embed lua/changetag.lua
var luaChangeTag string

//go:embed lua/lock.lua
var luaLock string

//go:embed lua/extend.lua
var luaExtend string

//go:embed lua/unlock.lua
var luaUnlock string

// A script is one atomic step. A server that has run the script once can run it again by its hash.
type script struct {
	source, hash string
	arg          any // the hash, as an argument of a command; converted once, because a conversion allocates
}

func newScript(source string) script {
	source = luaCommon + source
	hash := redis.NewScript(source).Hash()
	return script{source: source, hash: hash, arg: hash}
}

var (
	acquireScript    = newScript(luaAcquire)
	renewScript      = newScript(luaRenew)
	publishScript    = newScript(luaPublish)
	failScript       = newScript(luaFail)
	releaseScript    = newScript(luaRelease)
	invalidateScript = newScript(luaInvalidate)
	expireScript     = newScript(luaExpire)
	ensureTagScript  = newScript(luaEnsureTag)
	changeTagScript  = newScript(luaChangeTag)
	lockScript       = newScript(luaLock)
	extendScript     = newScript(luaExtend)
	unlockScript     = newScript(luaUnlock)
)

// knownScripts are the scripts that a server has run for this Store, by their hashes. To a server that may not know a
// script, the Store sends the source at once. Trying the hash first would cost a second round trip. At 120 ms per round
// trip, the first use of a script would then outlast StoreTimeout. If a server does not know a hash, the server was
// restarted or replaced, or its scripts were flushed. So after such a reply, no script counts as known until a server
// has run it again.
type knownScripts struct{ hashes sync.Map }

func (k *knownScripts) has(x script) bool {
	_, ok := k.hashes.Load(x.hash)
	return ok
}

// learn updates the known scripts from cmd, the reply to one run of x.
func (k *knownScripts) learn(x script, cmd *redis.Cmd) {
	switch {
	case unknown(cmd):
		k.hashes.Clear()
	case cmd.Err() == nil && !k.has(x):
		k.hashes.Store(x.hash, true)
	}
}

// command returns the command that runs the script, by its source or by its hash. Eval and EvalSha of go-redis make the
// same command, but allocate more.
func (x script) command(ctx context.Context, bySource bool, keys []string, args []any) *redis.Cmd {
	all := make([]any, 3, 3+len(keys)+len(args))
	if bySource {
		all[0], all[1] = "eval", x.source
	} else {
		all[0], all[1] = "evalsha", x.arg
	}
	all[2] = len(keys)
	for _, key := range keys {
		all = append(all, key)
	}
	cmd := redis.NewCmd(ctx, append(all, args...)...)
	cmd.SetFirstKeyPos(3)
	return cmd
}

// run runs the script by its hash if a server has run it before, and by its source otherwise. It also sends the source
// if the server does not know the hash.
func (x script) run(ctx context.Context, known *knownScripts, c client, keys []string, args ...any) *redis.Cmd {
	if known.has(x) {
		cmd := x.command(ctx, false, keys, args)
		_ = c.Process(ctx, cmd)
		if x.explain(cmd); !unknown(cmd) {
			return cmd
		}
		known.learn(x, cmd)
	}
	cmd := x.command(ctx, true, keys, args)
	_ = c.Process(ctx, cmd)
	known.learn(x, cmd)
	x.explain(cmd)
	return cmd
}

var (
	scriptLine = regexp.MustCompile(`@user_script:(\d+)`)
	luaCall    = regexp.MustCompile(`redis\.p?call\('(\w+)'`)
)

// explain changes the error of a script that ran a command which the ACL denies. Redis 7.0 then reports the line of
// the script, but not the command. explain adds the name of the command.
func (x script) explain(cmd *redis.Cmd) {
	err := cmd.Err()
	if err == nil || !strings.Contains(err.Error(), "user executing the script") {
		return
	}
	if m := scriptLine.FindStringSubmatch(err.Error()); m != nil {
		n, _ := strconv.Atoi(m[1])
		if lines := strings.Split(x.source, "\n"); n > 0 && n <= len(lines) {
			if m := luaCall.FindStringSubmatch(lines[n-1]); m != nil {
				cmd.SetErr(fmt.Errorf("the ACL of Redis denies %s: %w", m[1], err))
			}
		}
	}
}

// An invocation is one of many runs of a script.
type invocation struct {
	keys []string
	args []any
}

// runMany runs the script once per invocation, in one pipeline. On a Cluster or a Ring each invocation goes to the
// server of its keys. If a server may not know the script, the first maxSources invocations carry the source. An
// invocation whose server does not know the hash is sent again in a new pipeline, with the source.
func (x script) runMany(ctx context.Context, known *knownScripts, c client, all []invocation) error {
	_, err := x.runEach(ctx, known, c, all)
	return err
}

// maxSources is how many invocations of a pipeline carry the source, which has 4 to 6 KB. On a Cluster or a Ring, the
// keys of 16 invocations are nearly always spread over all servers.
const maxSources = 16

// runEach does what runMany does, and returns the replies. replies[i] is nil if the run for all[i] failed.
func (x script) runEach(
	ctx context.Context, known *knownScripts, c client, all []invocation,
) (replies []any, err error) {
	replies = make([]any, len(all))
	failed, todo := 0, make([]int, len(all)) // todo has indices of all
	for i := range todo {
		todo[i] = i
	}
	sources := 0
	if !known.has(x) {
		sources = maxSources
	}
	for ; len(todo) > 0; sources = maxSources {
		var refused []int
		for j, cmd := range x.pipe(ctx, c, all, todo, sources) {
			known.learn(x, cmd)
			x.explain(cmd)
			switch {
			case unknown(cmd) && j >= sources:
				refused = append(refused, todo[j])
			case cmd.Err() == nil:
				replies[todo[j]] = cmd.Val()
			default:
				if failed++; err == nil {
					err = cmd.Err()
				}
			}
		}
		todo = refused
	}
	if failed > 0 {
		err = fmt.Errorf("%d of %d keys failed: %w", failed, len(all), err)
	}
	return replies, err
}

// pipe sends the invocations with the given indices in one pipeline. sources is how many of them, from the first on,
// carry the source of the script. The other invocations carry its hash.
func (x script) pipe(ctx context.Context, c client, all []invocation, indices []int, sources int) []*redis.Cmd {
	p, cmds := c.Pipeline(), make([]*redis.Cmd, len(indices))
	for j, i := range indices {
		cmds[j] = x.command(ctx, j < sources, all[i].keys, all[i].args)
		_ = p.Process(ctx, cmds[j])
	}
	if _, err := p.Exec(ctx); err != nil {
		// A hook may fail without setting the error of the commands.
		for _, cmd := range cmds {
			if cmd.Err() == nil && cmd.Val() == nil {
				cmd.SetErr(err)
			}
		}
	}
	return cmds
}

func unknown(cmd *redis.Cmd) bool {
	return cmd.Err() != nil && redis.HasErrorPrefix(cmd.Err(), "NOSCRIPT") // the first test avoids an allocation
}

// isFull reports whether err says that Redis is at maxmemory and evicts nothing.
func isFull(err error) bool { return redis.HasErrorPrefix(err, "OOM") }

// wrongType reports whether err says that a key holds a foreign type.
func wrongType(err error) bool { return redis.HasErrorPrefix(err, "WRONGTYPE") }
