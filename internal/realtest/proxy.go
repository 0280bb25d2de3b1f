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

// Proxy forwards connections to a server, and injects faults. A fault applies to existing and to new connections, until
// [Proxy.Heal].
type Proxy struct {
	t      testing.TB
	target string
	addr   string
	wg     sync.WaitGroup // all goroutines of the proxy

	mu       sync.Mutex // guards all below
	listener net.Listener
	links    map[*link]struct{}
	delay    time.Duration
	held     chan struct{} // closed when BlackHole ends; nil without BlackHole
	lose     *lostReply    // armed
	drop     []byte        // messages of the server that contain this are dropped; nil = none
	short    *shortReply   // armed
}

// link is a connection of a client together with its connection to the server.
type link struct {
	client, server *net.TCPConn
	once           sync.Once
	cut            chan struct{} // closed when the link is cut
	lost           chan *lostReply
}

// lostReply is a reply that LoseReply discards.
type lostReply struct {
	match     []byte        // lower case
	forwarded chan struct{} // closed when the server has the request
	done      chan struct{} // closed when the connection is cut
}

// shortReply is a reply that CutReply cuts.
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

// Addr is the address for clients, as "host:port".
func (p *Proxy) Addr() string { return p.addr }

// Delay delays everything that the server sends by d.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// LoseReply waits for the next request that contains match, in upper or lower case. It lets the server execute the
// request, discards the reply and cuts that connection. So the client cannot know whether its request was executed. The
// channel is closed when all this has happened. The client must send one request at a time on a connection, as go-redis
// does.
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

// LoseMessages silently drops what the server sends if it contains match, for example messages of a subscription. The
// server must send one message at a time on a connection, as it does to a subscriber that receives few messages.
func (p *Proxy) LoseMessages(match string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop = []byte(match)
}

// CutReply waits for the next reply or message of the server that contains match, forwards its first bytes and cuts
// that connection. The channel is closed when that has happened.
func (p *Proxy) CutReply(match string, bytes int) <-chan struct{} {
	short := &shortReply{match: []byte(match), bytes: bytes, done: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.short = short
	return short.done
}

// BlackHole holds back what either side sends, without cutting any connection. New connections are accepted and get no
// answer. What was held back arrives after Heal, as it does with TCP after a partition.
func (p *Proxy) BlackHole() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held == nil {
		p.held = make(chan struct{})
	}
}

// Reset cuts every connection (RST). New ones are accepted.
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
	p.delay, p.lose, p.drop, p.short = 0, nil, nil, nil
	if p.held != nil {
		close(p.held)
		p.held = nil
	}
	refused := p.listener == nil
	p.mu.Unlock()
	if refused {
		l, err := net.Listen("tcp", p.addr)
		if err != nil {
			p.t.Fatalf("realtest: reopening the proxy on %s: %v", p.addr, err)
		}
		p.open(l)
	}
}

// open accepts connections.
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

// pass serves one connection until both sides have closed it, or it is cut.
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

// requests forwards what the client sends.
func (p *Proxy) requests(k *link) {
	var seen []byte // the end of what was sent, for a match that arrives in two pieces
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

// replies forwards what the server sends.
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
			_ = k.client.CloseWrite() // the client receives those bytes, and then the end
			_, _ = io.Copy(io.Discard, k.client)
			k.reset()
			close(short.done)
			return
		}
		if n > 0 && !p.drops(buf[:n]) {
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

// match searches for the armed request in what the client sent before and now. A match disarms it. It also returns the
// end of that text, for the next call.
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

// shortens returns the armed cut if it matches sent, and disarms it.
func (p *Proxy) shortens(sent []byte) *shortReply {
	p.mu.Lock()
	defer p.mu.Unlock()
	short := p.short
	if short == nil || !bytes.Contains(sent, short.match) {
		return nil
	}
	p.short = nil
	return short
}

// drops reports whether LoseMessages drops sent.
func (p *Proxy) drops(sent []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.drop != nil && bytes.Contains(sent, p.drop)
}

// wait waits for the time of Delay. It returns false if the link was cut.
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

// gate waits for the end of a BlackHole. It returns false if the link was cut.
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

// lose discards the reply and cuts the link. Before the cut it closes the sending side and reads to the end. If the
// connection were cut at once, the server might never read a request that is in its buffer.
func (k *link) lose(lost *lostReply) {
	<-lost.forwarded
	_ = k.server.CloseWrite()
	_ = k.server.SetReadDeadline(time.Now().Add(waitLimit))
	_, _ = io.Copy(io.Discard, k.server)
	k.reset()
	close(lost.done)
}

// end forwards the end of one side to the other: as an end of data, or as a cut.
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

// reset closes a connection with RST: the other side sees an error, not the end of data.
func reset(conn *net.TCPConn) {
	_ = conn.SetLinger(0)
	_ = conn.Close()
}
