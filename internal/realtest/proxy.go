//go:build unix

package realtest

import (
	"bytes"
	"errors"
	"io"
	"net"
	"slices"
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
	held     chan struct{} // closed when the current BlackHole ends; nil = no BlackHole
	lose     *lostReply    // the reply to lose; set by LoseReply, reset to nil when a request matches
	drop     []byte        // messages of the server that contain this are dropped; nil = none
	short    *shortReply   // the reply to cut; set by CutReply, reset to nil when a reply matches
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
	match     [][]byte      // in lower case: a request that contains one of these texts matches
	forwarded chan struct{} // closed when the proxy has forwarded the request
	done      chan struct{} // closed when the connection is cut
}

// shortReply is a reply that CutReply cuts.
type shortReply struct {
	match []byte
	bytes int
	done  chan struct{} // closed when the connection is cut
}

// StartProxy starts a proxy in front of the server at target. The proxy ends with the test.
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

// Delay makes everything that the server sends arrive later by d.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// LoseReply makes the proxy lose the reply to the next request that contains one of the matches, in upper or lower
// case. The server executes that request. The proxy discards the reply, cuts the connection and then closes the
// channel. So the client cannot know whether its request was executed. The client must send one request at a time on a
// connection, as go-redis does.
func (p *Proxy) LoseReply(matches ...string) <-chan struct{} {
	lost := &lostReply{forwarded: make(chan struct{}), done: make(chan struct{})}
	for _, match := range matches {
		lost.match = append(lost.match, bytes.ToLower([]byte(match)))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lose = lost
	return lost.done
}

// LoseMessages makes the proxy silently drop each message of the server that contains match, for example messages of
// a subscription. The server must send one message at a time on a connection, as it does to a subscriber that
// receives few messages.
func (p *Proxy) LoseMessages(match string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop = []byte(match)
}

// CutReply makes the proxy cut the next reply or message of the server that contains match. The proxy forwards the
// given number of its bytes, cuts the connection and then closes the channel.
func (p *Proxy) CutReply(match string, bytes int) <-chan struct{} {
	short := &shortReply{match: []byte(match), bytes: bytes, done: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.short = short
	return short.done
}

// BlackHole makes the proxy hold back what either side sends, without cutting a connection. The proxy accepts new
// connections, but clients get no answer there. Data that was held back arrives after Heal, as with TCP after a
// partition.
func (p *Proxy) BlackHole() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held == nil {
		p.held = make(chan struct{})
	}
}

// Reset cuts every connection (RST). The proxy still accepts new connections.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := range p.links {
		k.reset()
	}
}

// Refuse cuts every connection and refuses new connections.
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

// open accepts the connections of l until Refuse closes l.
func (p *Proxy) open(l net.Listener) {
	p.mu.Lock()
	p.listener = l
	p.mu.Unlock()
	p.wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return // Refuse has closed l
			}
			p.wg.Go(func() { p.pass(l, client.(*net.TCPConn)) })
		}
	})
}

// pass serves one connection until both sides have closed it, or until the proxy has cut it.
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
	var seen []byte // the end of what was sent before, because a match may arrive in two pieces
	for buf := make([]byte, 64<<10); ; {
		n, err := k.client.Read(buf)
		if !p.gate(k) {
			return
		}
		if n > 0 {
			var lost *lostReply
			lost, seen = p.match(seen, buf[:n])
			if lost != nil {
				k.lost <- lost // before the request is forwarded, so that replies knows it before the reply arrives
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
			_ = k.client.CloseWrite() // the client receives these bytes, and then the end of the data
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

// match searches for the texts of p.lose in what the client has sent: now is the newest piece, and before is the end of
// the earlier pieces. If match finds a text, it resets p.lose to nil and returns the old p.lose. Otherwise match
// returns the end of before and now, which the caller passes as before in the next call.
func (p *Proxy) match(before, now []byte) (*lostReply, []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lose == nil {
		return nil, nil
	}
	text := append(before, bytes.ToLower(now)...)
	longest := 0
	for _, match := range p.lose.match {
		longest = max(longest, len(match))
	}
	if lost := p.lose; slices.ContainsFunc(lost.match, func(m []byte) bool { return bytes.Contains(text, m) }) {
		p.lose = nil
		return lost, nil
	}
	return nil, text[max(0, len(text)-longest):]
}

// shortens returns p.short and resets p.short to nil, if sent contains the text to cut. Otherwise it returns nil.
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

// drops reports whether sent contains the text given to LoseMessages, so that the proxy must drop sent.
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

// lose discards the reply and cuts the link. Before the cut, lose closes the sending direction to the server and reads
// until the server has closed. An immediate cut could destroy a request that the server has not read yet.
func (k *link) lose(lost *lostReply) {
	<-lost.forwarded
	_ = k.server.CloseWrite()
	_ = k.server.SetReadDeadline(time.Now().Add(waitLimit))
	_, _ = io.Copy(io.Discard, k.server)
	k.reset()
	close(lost.done)
}

// end is called when reading from one side of the link has ended with err. other is the connection to the opposite
// side. If err is io.EOF, end closes the sending direction of other. After any other error, end cuts the link.
func (k *link) end(other *net.TCPConn, err error) {
	if !errors.Is(err, io.EOF) || other.CloseWrite() != nil {
		k.reset()
	}
}

// reset cuts the connections to the client and to the server.
func (k *link) reset() {
	k.once.Do(func() {
		close(k.cut)
		reset(k.client)
		reset(k.server)
	})
}

// reset closes a connection with RST, so that the other side sees an error, not the end of data.
func reset(conn *net.TCPConn) {
	_ = conn.SetLinger(0)
	_ = conn.Close()
}
