package goredis

import (
	"bytes"
	"context"
	"net"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/refill-go/refill/driver"
)

// FuzzReplies lets a server send the same bytes as the reply to every step. No step may panic or hang. Acquire may
// return Acquired only with the time of the claim. Publish may return only the defined results, and GetMany and Tags
// must return one result per key or tag.
func FuzzReplies(f *testing.F) {
	for _, reply := range []string{
		"$-1\r\n", "$0\r\n\r\n", "+OK\r\n", ":1\r\n", ":2\r\n", "-ERR no\r\n", "-WRONGTYPE no\r\n", "-NOSCRIPT no\r\n",
		"-OOM no\r\n", "-READONLY no\r\n", "-LOADING no\r\n", "*0\r\n", "*-1\r\n", "*1\r\n:1\r\n",
		"*3\r\n:0\r\n$1\r\na\r\n:5\r\n", "*3\r\n:0\r\n$1\r\n1\r\n$1\r\n2\r\n", "*3\r\n:0\r\n$1\r\nx\r\n$1\r\n2\r\n",
		"*4\r\n:1\r\n$1\r\n1\r\n$1\r\n2\r\n:7\r\n", "*3\r\n:9\r\n$20\r\n99999999999999999999\r\n$1\r\n2\r\n",
		"$5\r\nabc", "*2\r\n$1\r\na\r\n", "hello", "", "\r\n", "$3\r\na#1\r\n:-1\r\n", "$3\r\nb#1\r\n:100\r\n",
		":7\r\n", ":-1\r\n", "*2\r\n:0\r\n$1\r\n1\r\n", "*2\r\n:1\r\n$6\r\nrecord\r\n", "*2\r\n:1\r\n$0\r\n\r\n",
		"*3\r\n:2\r\n$3\r\nb#1\r\n:100\r\n",
		"*2\r\n:3\r\n$4\r\nboom\r\n", "$5\r\n?boom\r\n", "*4\r\n:0\r\n$1\r\n1\r\n$1\r\n2\r\n$4\r\nboom\r\n",
		"*3\r\n:2\r\n$3\r\nb#1\r\n:-1\r\n", "*2\r\n:2\r\n$5\r\n!boom\r\n", "$4\r\nb#1+\r\n", "$5\r\n!boom\r\n",
		"*3\r\n:9\r\n$1\r\n1\r\n$1\r\n2\r\n", "_\r\n", "#t\r\n", "%1\r\n+a\r\n:1\r\n",
	} {
		f.Add([]byte(reply))
	}
	f.Fuzz(func(t *testing.T, reply []byte) {
		c := redis.NewClient(&redis.Options{
			Addr: "127.0.0.1:1", Protocol: 2, DisableIdentity: true, MaxRetries: -1, ContextTimeoutEnabled: true,
			ConnMaxLifetime: 1, // one connection per request, because the server hangs up
			Dialer:          func(context.Context, string, string) (net.Conn, error) { return constantServer(reply), nil },
		})
		defer c.Close()
		s := New(c)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, _ = s.Get(ctx, "product:42")
		for _, mode := range []driver.Mode{driver.Try, driver.Wait, driver.Force, driver.Look} {
			r, err := s.Acquire(ctx, driver.AcquireRequest{
				Key: "product:42", Token: "a#1", LeaseTTL: time.Minute, ClaimTTL: time.Minute, Mode: mode,
			})
			if err != nil {
				continue
			}
			acquired, changed := r.State == driver.Acquired, r.State == driver.Changed
			if r.State > driver.Free || acquired == r.Now.IsZero() || changed != (r.Record != nil) || r.Left < 0 {
				t.Errorf("%q, mode %d: acquired %+v", reply, mode, r)
			}
		}
		result, err := s.Publish(ctx, driver.PublishRequest{Key: "product:42", Token: "a#1"})
		if err == nil && result > driver.StoreFull {
			t.Errorf("%q: published with result %d", reply, result)
		}
		leases := []driver.Lease{{Key: "product:42", Token: "a#1"}, {Key: "product:43", Token: "a#2"}}
		if mine, err := s.Renew(ctx, time.Minute, leases...); err == nil && len(mine) != 2 {
			t.Errorf("%q: %d results of two leases", reply, len(mine))
		}
		_ = s.Fail(ctx, driver.FailRequest{Key: "product:42", Token: "a#1", Failure: "boom", TTL: time.Second})
		_ = s.Invalidate(ctx, "a#1", "product:42", "product:43")
		if all, err := s.GetMany(ctx, "product:42", "product:43"); err == nil && len(all) != 2 {
			t.Errorf("%q: %d records of two keys", reply, len(all))
		}
		if all, err := s.Tags(ctx, "product:red", "product:blue"); err == nil && len(all) != 2 {
			t.Errorf("%q: %d states of two tags", reply, len(all))
		}
		_ = s.EnsureTags(ctx, time.Minute, time.Minute, "product:red", "product:blue")
		_ = s.InvalidateTags(ctx, "a#1", time.Minute, "product:red", "product:blue")
		_, _ = s.TryLock(ctx, "job:42", "a#1", time.Minute)
		if ctx.Err() != nil {
			t.Errorf("%q: a step hangs", reply)
		}
	})
}

// constantServer returns a connection to a server that sends the same reply to any request, and then hangs up.
func constantServer(reply []byte) net.Conn {
	client, server := net.Pipe()
	go func() {
		defer server.Close()
		_ = server.SetDeadline(time.Now().Add(time.Second))
		answer, request := []byte("-ERR unknown command\r\n"), make([]byte, 64<<10)
		// The client sends a greeting first, which the server answers with an error. Then the client sends the request in
		// one piece.
		for greeting := true; greeting; {
			n, err := server.Read(request)
			if err != nil {
				return
			}
			if greeting = bytes.Contains(request[:n], []byte("hello")); !greeting {
				answer = reply
			}
			if _, err := server.Write(answer); err != nil {
				return
			}
		}
	}()
	return client
}
