package goredis

import (
	"context"
	_ "embed"
	"fmt"

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

// A script is one atomic step. A server that has run it once knows it by its hash.
type script struct{ source, hash string }

func newScript(source string) script {
	source = luaCommon + source
	return script{source: source, hash: redis.NewScript(source).Hash()}
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

// run runs the script. If the server does not know the script, run sends the source. This happens after a restart, a
// failover or a flush.
func (x script) run(ctx context.Context, c client, keys []string, args ...any) *redis.Cmd {
	cmd := c.EvalSha(ctx, x.hash, keys, args...)
	if unknown(cmd) {
		cmd = c.Eval(ctx, x.source, keys, args...)
	}
	return cmd
}

// An invocation is one of many runs of a script.
type invocation struct {
	keys []string
	args []any
}

// runMany runs the script once per invocation, in one pipeline. On a Cluster or a Ring each invocation goes to the
// server of its keys. A server that does not know the script gets the source once, with the first invocation that it
// refused.
func (x script) runMany(ctx context.Context, c client, all []invocation) error {
	var failed []error
	for todo := all; len(todo) > 0; {
		var refused []invocation
		for i, cmd := range x.pipe(ctx, c, todo) {
			if unknown(cmd) {
				refused = append(refused, todo[i])
			} else if cmd.Err() != nil {
				failed = append(failed, cmd.Err())
			}
		}
		if todo = refused; len(todo) > 0 {
			if err := c.Eval(ctx, x.source, todo[0].keys, todo[0].args...).Err(); err != nil {
				failed = append(failed, err)
			}
			todo = todo[1:]
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d keys failed: %w", len(failed), len(all), failed[0])
}

func (x script) pipe(ctx context.Context, c client, all []invocation) []*redis.Cmd {
	p, cmds := c.Pipeline(), make([]*redis.Cmd, len(all))
	for i, v := range all {
		cmds[i] = p.EvalSha(ctx, x.hash, v.keys, v.args...)
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

func unknown(cmd *redis.Cmd) bool { return redis.HasErrorPrefix(cmd.Err(), "NOSCRIPT") }

// wrongType reports that a key holds a foreign type.
func wrongType(err error) bool { return redis.HasErrorPrefix(err, "WRONGTYPE") }
