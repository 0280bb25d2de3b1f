//go:build unix

package realtest_test

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/backend/goredis"
	"github.com/refill-go/refill/driver"
	"github.com/refill-go/refill/internal/realtest"
	"github.com/refill-go/refill/refilltest"
)

// aclOfDoc returns the rules of the ACL SETUSER command in the package doc of goredis, and the commands among them. The
// rules do not include the name of the user.
func aclOfDoc(t testing.TB) (rules, commands []string) {
	t.Helper()
	text, err := os.ReadFile("../../backend/goredis/doc.go")
	if err != nil {
		t.Fatal(err)
	}
	_, after, found := strings.Cut(string(text), "//\tACL SETUSER app ")
	block, _, ended := strings.Cut(after, "\n//\n")
	if !found || !ended {
		t.Fatal("the doc has no ACL SETUSER")
	}
	rules = strings.Fields(strings.ReplaceAll(block, "//", ""))
	for _, rule := range rules {
		if command, ok := strings.CutPrefix(rule, "+"); ok {
			commands = append(commands, command)
		}
	}
	return rules, commands
}

// setACL creates the ACL user app with these rules, which include the password.
func setACL(t testing.TB, server *realtest.Redis, rules ...string) {
	t.Helper()
	args := []any{"acl", "setuser", "app", "reset"}
	for _, rule := range rules {
		args = append(args, rule)
	}
	(&goredisServer{server}).do(t, args...)
}

// An ACL user has exactly the commands, keys and channels of the package doc. On each topology, all steps of
// goredisSteps must work, and announcements must arrive.
func TestGoredisACL(t *testing.T) {
	rules, _ := aclOfDoc(t)
	for name, extra := range map[string][]string{"single": nil, "ring": nil, "cluster": {"+cluster|slots"}} {
		t.Run(name, func(t *testing.T) {
			w := goredisWorlds[name](t)
			var addrs []string
			for _, server := range w.servers {
				setACL(t, server.Redis, append(slices.Clone(rules), extra...)...)
				addrs = append(addrs, server.Addr())
			}
			o := &redis.UniversalOptions{
				Addrs: addrs, Username: "app", Password: "secret", MaxRetries: -1, IsClusterMode: name == "cluster",
			}
			c := redis.NewUniversalClient(o)
			if name == "ring" {
				shards := map[string]string{}
				for i, addr := range addrs {
					shards[fmt.Sprint(i)] = addr
				}
				c = redis.NewRing(&redis.RingOptions{Addrs: shards, Username: "app", Password: "secret", MaxRetries: -1})
			}
			defer c.Close()
			s := goredis.New(c)
			e := goredisSubscribe(t, s, "product")
			e.next(driver.Subscribed)
			for _, step := range goredisSteps(t) {
				if err := step.call(t.Context(), s); err != nil {
					t.Errorf("%s: %v", step.name, err)
				}
			}
			e.next(driver.Filled)
		})
	}
}

// The suites run as an ACL user with the commands of the package doc. Only the permitted keys and channels differ from
// the package doc, because each case has a key prefix of its own.
func TestGoredisSuitesUnderACL(t *testing.T) {
	rules, _ := aclOfDoc(t)
	w := overSingle(t, redis.Options{})
	server := w.servers[0]
	setACL(t, server.Redis, append(slices.Clone(rules), "allkeys", "allchannels")...)
	app := func(t testing.TB, prefix goredisPrefix) *goredis.Store {
		c := redis.NewClient(&redis.Options{Addr: server.Addr(), Username: "app", Password: "secret"})
		t.Cleanup(func() { c.Close() })
		return goredis.New(c, prefix.option())
	}
	refilltest.TestStore(t, refilltest.StoreHarness{World: func(t testing.TB) refilltest.StoreWorld {
		prefix := w.prefix()
		return refilltest.StoreWorld{A: app(t, prefix), B: app(t, prefix)}
	}})
	refilltest.TestLocks(t, refilltest.LockHarness{World: func(t testing.TB) refilltest.LockWorld {
		prefix := w.prefix()
		return refilltest.LockWorld{A: app(t, prefix), B: app(t, prefix)}
	}})
}

// The doc of package goredis lists the commands that refill needs. For each command of the list, the ACL of a user
// lacks this one command. Then a call of the Store or the subscription must fail, and the error must name the command
// and the ACL. If the list calls the command optional, no call may fail. PING counts as optional here: refill sends the
// first PING after a second without messages, and the test does not wait for that.
func TestGoredisACLNamesTheCommand(t *testing.T) {
	server := realtest.StartRedis(t)
	rules, commands := aclOfDoc(t)
	optional := []string{"append", "setrange", "ping"}
	for _, command := range commands {
		t.Run(command, func(t *testing.T) {
			(&goredisServer{server}).do(t, "flushall")
			setACL(t, server, append(slices.Clone(rules), "-"+command)...)
			s, _ := goredisOn(t, &redis.Options{
				Addr: server.Addr(), Username: "app", Password: "secret", MaxRetries: -1,
			})
			var errs []error
			events := make(chan error, 100)
			stop := s.Subscribe("product", func(a driver.Announcement) {
				if a.Kind == driver.Subscribed || a.Kind == driver.Disconnected {
					events <- a.Err
				}
			})
			defer stop()
			errs = append(errs, <-events)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			for range 2 { // in the second round, the Store sends the hashes of the scripts
				for _, step := range goredisSteps(t) {
					errs = append(errs, step.call(ctx, s))
				}
			}
			named, failed := regexp.MustCompile(`(?i)\bACL\b.*\b`+command+`\b`), false
			for _, err := range errs {
				if err != nil {
					failed = true
					if !named.MatchString(err.Error()) {
						t.Errorf("the error does not name the ACL and %s: %v", command, err)
					}
				}
			}
			if must := !slices.Contains(optional, command); failed != must {
				t.Errorf("failed: %v, want %v", failed, must)
			}
		})
	}
}
