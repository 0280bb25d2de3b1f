//go:build unix

package realtest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// wireConn is a connection that speaks Redis' protocol.
type wireConn struct {
	net.Conn
	in *bufio.Reader
}

func dial(t *testing.T, addr string) wireConn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return wireConn{conn, bufio.NewReader(conn)}
}

// wire encodes a command.
func wire(words ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(words))
	for _, w := range words {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(w), w)
	}
	return b.String()
}

func (c wireConn) send(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
}

// readLine returns the first line of the next reply.
func (c wireConn) readLine(within time.Duration) (string, error) {
	_ = c.SetReadDeadline(time.Now().Add(within))
	line, err := c.in.ReadString('\n')
	return strings.TrimSpace(line), err
}

// works fails the test unless a command on this connection gets its reply.
func (c wireConn) works(t *testing.T) {
	t.Helper()
	c.send(t, wire("PING"))
	if pong, err := c.readLine(waitLimit); pong != "+PONG" {
		t.Fatalf("the reply to PING is %q, %v", pong, err)
	}
}

func TestProxyLosesAReply(t *testing.T) {
	for _, pieces := range []int{1, 2} {
		t.Run(fmt.Sprint(pieces, " pieces"), func(t *testing.T) {
			server := miniredis.RunT(t)
			p := StartProxy(t, server.Addr())
			c, other := dial(t, p.Addr()), dial(t, p.Addr())
			c.works(t)

			lost := p.LoseReply("incr")
			other.works(t) // LoseReply must ignore this other request
			text := wire("INCR", "n")
			c.send(t, text[:len(text)/pieces])
			if pieces > 1 {
				other.works(t)
				c.send(t, text[len(text)/pieces:])
			}
			if line, err := c.readLine(waitLimit); !errors.Is(err, syscall.ECONNRESET) {
				t.Fatalf("the reply that had to be lost is %q, %v", line, err)
			}
			<-lost
			if n, err := server.Get("n"); n != "1" {
				t.Errorf("the request was executed %q times, %v", n, err)
			}
			other.works(t) // the proxy must cut only one connection, and only once
			other.send(t, wire("INCR", "n"))
			if line, err := other.readLine(waitLimit); line != ":2" {
				t.Errorf("the reply to the second INCR is %q, %v", line, err)
			}
		})
	}
}

func TestProxyDelays(t *testing.T) {
	p := StartProxy(t, miniredis.RunT(t).Addr())
	c := dial(t, p.Addr())
	c.works(t)
	p.Delay(50 * time.Millisecond)
	began := time.Now()
	c.works(t)
	if took := time.Since(began); took < 50*time.Millisecond {
		t.Errorf("a reply delayed by 50 ms arrived after %v", took)
	}
	p.Delay(time.Hour)
	c.send(t, wire("PING")) // the reply waits an hour; Cleanup must end this wait
}

func TestProxyBlackHole(t *testing.T) {
	p := StartProxy(t, miniredis.RunT(t).Addr())
	earlier := dial(t, p.Addr())
	earlier.works(t)
	p.BlackHole()
	later := dial(t, p.Addr())
	for _, c := range []wireConn{earlier, later} {
		c.send(t, wire("PING"))
		if line, err := c.readLine(20 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a black hole answered %q, %v", line, err)
		}
	}
	p.Heal()
	for _, c := range []wireConn{earlier, later} {
		if line, err := c.readLine(waitLimit); line != "+PONG" {
			t.Errorf("after Heal: %q, %v", line, err)
		}
	}
	p.BlackHole()
	later.send(t, wire("PING")) // the proxy holds this request back; Cleanup must end the wait
}

func TestProxyResetsAndRefuses(t *testing.T) {
	p := StartProxy(t, miniredis.RunT(t).Addr())
	c := dial(t, p.Addr())
	c.works(t)
	p.Reset()
	if line, err := c.readLine(waitLimit); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after Reset: %q, %v", line, err)
	}
	c = dial(t, p.Addr())
	c.works(t)
	p.Refuse()
	if line, err := c.readLine(waitLimit); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after Refuse: %q, %v", line, err)
	}
	if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a new connection after Refuse: %v", err)
	}
	p.Heal()
	dial(t, p.Addr()).works(t)
}

func TestProxyWithoutServer(t *testing.T) {
	p := StartProxy(t, loopback(freePort(t)))
	conn, err := net.Dial("tcp", p.Addr())
	if err == nil { // Dial may succeed before the proxy cuts the connection
		t.Cleanup(func() { _ = conn.Close() })
		_, err = conn.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a proxy without a server answers with %v", err)
	}
}

func TestProxyBeforeRealRedis(t *testing.T) {
	r := StartRedis(t)
	p := StartProxy(t, r.Addr())
	c := dial(t, p.Addr())
	c.works(t)
	lost := p.LoseReply("INCR")
	c.send(t, wire("incr", "n"))
	<-lost
	if line, err := c.readLine(waitLimit); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the reply that had to be lost is %q, %v", line, err)
	}
	c = dial(t, p.Addr())
	c.send(t, wire("INCR", "n"))
	if line, err := c.readLine(waitLimit); line != ":2" {
		t.Errorf("INCR after an INCR whose reply was lost: %q, %v", line, err)
	}
}
