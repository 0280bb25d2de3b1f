//go:build unix

package realtest

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy passes connections on to a server, and harms them when told to. What it is told holds for the connections that
// are there and for those to come, until [Proxy.Heal].
type Proxy struct {
	t      testing.TB
	target string
	addr   string
	wg     sync.WaitGroup // all goroutines of the proxy

	mu       sync.Mutex // guards all below
	listener net.Listener
	links    map[*link]struct{}
	delay    time.Duration
	held     chan struct{} // closed by the end of a BlackHole; nil when there is none
	lose     *lostReply    // armed
	mute     []byte        // what the server says is dropped where it contains this; nil = nothing is
	short    *shortReply   // armed
}

// link is one connection of a client and the one to the server that belongs to it.
type link struct {
	client, server *net.TCPConn
	once           sync.Once
	cut            chan struct{} // closed when the link is cut
	lost           chan *lostReply
}

// lostReply is a reply that is not to arrive.
type lostReply struct {
	match     []byte        // lower case
	forwarded chan struct{} // closed when the server has the request
	done      chan struct{} // closed when the connection is cut
}

// shortReply is what is to be cut in the middle.
type shortReply struct {
	match []byte
	bytes int
	done  chan struct{} // closed when the connection is cut
}

// StartProxy starts a proxy in front of the server at target. It ends with the test.
func StartProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	l := listen(t)
	p := &Proxy{t: t, target: target, addr: l.Addr().String(), links: map[*link]struct{}{}}
	p.open(l)
	t.Cleanup(func() {
		p.Refuse()
		p.wg.Wait()
	})
	return p
}

// Addr is where clients connect, as "host:port".
func (p *Proxy) Addr() string { return p.addr }

// Delay lets everything that the server says arrive later by d.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// LoseReply waits for the next request that contains match, in upper or lower case, lets the server carry it out, throws
// the reply away and cuts that connection: the client cannot know what has become of its request. The channel is closed
// when all that has happened. It takes a client that has one request under way per connection, as go-redis has.
func (p *Proxy) LoseReply(match string) <-chan struct{} {
	lost := &lostReply{
		match:     bytes.ToLower([]byte(match)),
		forwarded: make(chan struct{}),
		done:      make(chan struct{}),
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lose = lost
	return lost.done
}

// LoseMessages drops what the server says that contains match, and nobody is told: messages of a subscription for example.
// It takes a server that says one thing at a time on a connection, as one to a subscriber does where little is said.
func (p *Proxy) LoseMessages(match string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mute = []byte(match)
}

// CutReply waits for the next thing that the server says that contains match, lets the first bytes of it pass and cuts that
// connection. The channel is closed when that has happened.
func (p *Proxy) CutReply(match string, bytes int) <-chan struct{} {
	short := &shortReply{match: []byte(match), bytes: bytes, done: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.short = short
	return short.done
}

// BlackHole holds back what either side says, without cutting anything: new connections are made, and get no answer.
// What was held back arrives after Heal, as TCP makes it arrive after a partition.
func (p *Proxy) BlackHole() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held == nil {
		p.held = make(chan struct{})
	}
}

// Reset cuts every connection (RST). New ones are let in.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := range p.links {
		k.reset()
	}
}

// Refuse cuts every connection and refuses new ones.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
	p.mu.Unlock()
	p.Reset()
}

// Heal ends Delay, LoseReply, LoseMessages, CutReply, BlackHole and Refuse.
func (p *Proxy) Heal() {
	p.t.Helper()
	p.mu.Lock()
	p.delay, p.lose, p.mute, p.short = 0, nil, nil, nil
	if p.held != nil {
		close(p.held)
		p.held = nil
	}
	refused := p.listener == nil
	p.mu.Unlock()
	if refused {
		l, err := net.Listen("tcp", p.addr)
		if err != nil {
			p.t.Fatalf("realtest: the proxy on %s again: %v", p.addr, err)
		}
		p.open(l)
	}
}

// open lets connections in.
func (p *Proxy) open(l net.Listener) {
	p.mu.Lock()
	p.listener = l
	p.mu.Unlock()
	p.wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return // Refuse
			}
			p.wg.Go(func() { p.pass(l, client.(*net.TCPConn)) })
		}
	})
}

// pass serves one connection until both sides have ended it, or it is cut.
func (p *Proxy) pass(l net.Listener, client *net.TCPConn) {
	server, err := net.DialTimeout("tcp", p.target, waitLimit)
	if err != nil {
		reset(client)
		return
	}
	k := &link{
		client: client, server: server.(*net.TCPConn),
		cut: make(chan struct{}), lost: make(chan *lostReply, 1),
	}
	defer k.reset()
	p.mu.Lock()
	refused := p.listener != l
	p.links[k] = struct{}{}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.links, k)
		p.mu.Unlock()
	}()
	if refused {
		return
	}
	var both sync.WaitGroup
	both.Go(func() { p.requests(k) })
	both.Go(func() { p.replies(k) })
	both.Wait()
}

// requests passes on what the client says.
func (p *Proxy) requests(k *link) {
	var seen []byte // the end of what was said, for a match in two pieces
	for buf := make([]byte, 64<<10); ; {
		n, err := k.client.Read(buf)
		if !p.gate(k) {
			return
		}
		if n > 0 {
			var lost *lostReply
			lost, seen = p.match(seen, buf[:n])
			if lost != nil {
				k.lost <- lost // before the server can answer
			}
			_, err := k.server.Write(buf[:n])
			if lost != nil {
				close(lost.forwarded)
				return
			}
			if err != nil {
				k.reset()
				return
			}
		}
		if err != nil {
			k.end(k.server, err)
			return
		}
	}
}

// replies passes on what the server says.
func (p *Proxy) replies(k *link) {
	for buf := make([]byte, 64<<10); ; {
		n, err := k.server.Read(buf)
		select {
		case lost := <-k.lost:
			k.lose(lost)
			return
		default:
		}
		if !p.wait(k) || !p.gate(k) {
			return
		}
		if short := p.shortens(buf[:n]); short != nil {
			_, _ = k.client.Write(buf[:min(n, short.bytes)])
			_ = k.client.CloseWrite() // what was said arrives, and then the end
			_, _ = io.Copy(io.Discard, k.client)
			k.reset()
			close(short.done)
			return
		}
		if n > 0 && !p.muted(buf[:n]) {
			if _, err := k.client.Write(buf[:n]); err != nil {
				k.reset()
				return
			}
		}
		if err != nil {
			k.end(k.client, err)
			return
		}
	}
}

// match looks for the armed request in what was said before and now; a match disarms it. It returns the end of all that,
// to be looked at again with what comes next.
func (p *Proxy) match(before, now []byte) (*lostReply, []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lose == nil {
		return nil, nil
	}
	text := append(before, bytes.ToLower(now)...)
	if lost := p.lose; bytes.Contains(text, lost.match) {
		p.lose = nil
		return lost, nil
	}
	return nil, text[max(0, len(text)-len(p.lose.match)):]
}

// shortens returns the armed cut if it is for said, and disarms it.
func (p *Proxy) shortens(said []byte) *shortReply {
	p.mu.Lock()
	defer p.mu.Unlock()
	short := p.short
	if short == nil || !bytes.Contains(said, short.match) {
		return nil
	}
	p.short = nil
	return short
}

// muted says whether LoseMessages drops said.
func (p *Proxy) muted(said []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mute != nil && bytes.Contains(said, p.mute)
}

// wait takes the time of Delay; false when the link was cut.
func (p *Proxy) wait(k *link) bool {
	p.mu.Lock()
	delay := p.delay
	p.mu.Unlock()
	if delay <= 0 {
		return true
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-k.cut:
		return false
	}
}

// gate waits for the end of a BlackHole; false when the link was cut.
func (p *Proxy) gate(k *link) bool {
	for {
		p.mu.Lock()
		held := p.held
		p.mu.Unlock()
		if held == nil {
			return true
		}
		select {
		case <-held:
		case <-k.cut:
			return false
		}
	}
}

// lose throws the reply away and cuts the link. The server is told of the end and heard out before: cut at once, it might
// never read a request that lies in its buffer.
func (k *link) lose(lost *lostReply) {
	<-lost.forwarded
	_ = k.server.CloseWrite()
	_ = k.server.SetReadDeadline(time.Now().Add(waitLimit))
	_, _ = io.Copy(io.Discard, k.server)
	k.reset()
	close(lost.done)
}

// end passes the end of one side on to the other: its last word, or a cut.
func (k *link) end(other *net.TCPConn, err error) {
	if !errors.Is(err, io.EOF) || other.CloseWrite() != nil {
		k.reset()
	}
}

// reset cuts both sides.
func (k *link) reset() {
	k.once.Do(func() {
		close(k.cut)
		reset(k.client)
		reset(k.server)
	})
}

// reset closes a connection in the hard way: the other end sees an error, not an end.
func reset(conn *net.TCPConn) {
	_ = conn.SetLinger(0)
	_ = conn.Close()
}
