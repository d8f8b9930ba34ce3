// Package proxytest is a TCP proxy between NATS clients and their server that
// mistreats messages: it drops them whole, sends them twice, holds one back
// until later ones have passed, or cuts the connection in the middle of one.
// TCP does none of the first three, but servers do, when they elect leaders,
// shed load or move buffers, and a program has to bear them.
//
// It parses as much of the protocol as tells where a message begins and ends.
// Only tests import it.
package proxytest

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"maps"
	"net"
	"regexp"
	"strconv"
	"sync"
	"time"
)

// Fate is what becomes of a message.
type Fate int

// The fates.
const (
	Pass   Fate = iota
	Drop        // it never arrives
	Double      // it arrives twice in a row
	Delay       // it arrives behind some of those that follow it
	Tear        // half of it arrives, and then the connection is gone
)

// String names the fate of a message.
func (f Fate) String() string {
	return [...]string{"pass", "drop", "double", "delay", "tear"}[f]
}

// A delayed message passes behind so many later ones of its connection, or
// after so long if fewer come. The time is below every timeout of a client:
// what waits longer has been given up and sent again.
const (
	holdMessages = 3
	holdTime     = 300 * time.Millisecond
)

// Message is what a fate is chosen for: one PUB or HPUB of a client, or one
// MSG or HMSG to it.
type Message struct {
	ToClient bool
	Subject  string
	Wire     []byte // all of it, as it goes over the wire
}

// Proxy forwards connections to a server. Its methods may be called from
// several goroutines.
type Proxy struct {
	listener net.Listener
	target   string
	running  sync.WaitGroup

	mu     sync.Mutex
	down   bool
	judge  func(Message) Fate
	counts map[Fate]int
	conns  map[net.Conn]bool
}

// New listens on a loopback port and forwards to target, HOST:PORT.
func New(target string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listening: %w", err)
	}
	p := &Proxy{listener: l, target: target, conns: map[net.Conn]bool{}, counts: map[Fate]int{}}
	p.running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // closed
			}
			p.running.Go(func() { p.serve(c) })
		}
	})
	return p, nil
}

// URL is where clients connect.
func (p *Proxy) URL() string { return "nats://" + p.listener.Addr().String() }

// Disturb lets judge choose the fate of each message from now on. It is called
// from one goroutine at a time; nil lets all of them pass.
func (p *Proxy) Disturb(judge func(Message) Fate) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.judge = judge
}

// Counts says how many messages have met each fate.
func (p *Proxy) Counts() map[Fate]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.counts)
}

// Cut ends all connections, and refuses new ones while down.
func (p *Proxy) Cut(down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = down
	if down {
		for c := range p.conns {
			c.Close()
		}
	}
}

// Close ends all connections and waits for their goroutines.
func (p *Proxy) Close() {
	p.listener.Close()
	p.Cut(true)
	p.running.Wait()
}

func (p *Proxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.DialTimeout("tcp", p.target, 5*time.Second)
	if err != nil {
		return // it is away; the client tries again
	}
	defer server.Close()
	p.mu.Lock()
	if p.down {
		p.mu.Unlock()
		return
	}
	p.conns[client], p.conns[server] = true, true
	p.mu.Unlock()
	cut := func() { client.Close(); server.Close() }
	var both sync.WaitGroup
	both.Go(func() { defer cut(); p.forward(&lane{to: server, cut: cut}, client, false) })
	both.Go(func() { defer cut(); p.forward(&lane{to: client, cut: cut}, server, true) })
	both.Wait()
	p.mu.Lock()
	delete(p.conns, client)
	delete(p.conns, server)
	p.mu.Unlock()
}

// forward moves one direction of a connection until either end is gone.
func (p *Proxy) forward(l *lane, from net.Conn, toClient bool) {
	defer l.close()
	r := bufio.NewReaderSize(from, 64<<10)
	for {
		wire, subject, err := read(r, toClient)
		if err != nil {
			return
		}
		fate := Pass
		if subject != "" {
			fate = p.fate(Message{toClient, subject, wire})
		}
		if l.send(wire, fate, subject != "") != nil {
			return
		}
	}
}

func (p *Proxy) fate(m Message) Fate {
	p.mu.Lock()
	defer p.mu.Unlock()
	fate := Pass
	if p.judge != nil {
		fate = p.judge(m)
	}
	p.counts[fate]++
	return fate
}

// elsewhere is where a server tells of its other addresses. Clients that knew
// them would go around the proxy.
var elsewhere = regexp.MustCompile(`"connect_urls":\[[^\]]*\],?`)

// read reads one line of the protocol, and the payload behind it if it has
// one. subject is empty for what is no message.
func read(r *bufio.Reader, toClient bool) (wire []byte, subject string, err error) {
	wire, err = r.ReadBytes('\n')
	if err != nil {
		return nil, "", err
	}
	fields := bytes.Fields(wire)
	if len(fields) == 0 {
		return wire, "", nil
	}
	op := string(bytes.ToUpper(fields[0]))
	if toClient && op == "INFO" {
		return elsewhere.ReplaceAll(wire, nil), "", nil
	}
	if carries := op == "PUB" || op == "HPUB" || toClient && (op == "MSG" || op == "HMSG"); !carries || len(fields) < 3 {
		return wire, "", nil
	}
	size, err := strconv.Atoi(string(fields[len(fields)-1]))
	if err != nil || size < 0 {
		return nil, "", fmt.Errorf("reading %q: the last field is no size", wire)
	}
	head := len(wire)
	wire = append(wire, make([]byte, size+2)...) // and CR LF
	_, err = io.ReadFull(r, wire[head:])
	return wire, string(fields[1]), err
}

// lane is one direction of a connection, with what is held back in it.
type lane struct {
	to  net.Conn
	cut func()

	mu     sync.Mutex
	held   []held
	closed bool
}

type held struct {
	wire []byte
	left int // messages that are to pass it
}

func (l *lane) send(wire []byte, fate Fate, message bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch fate {
	case Drop:
		return nil
	case Delay:
		l.held = append(l.held, held{bytes.Clone(wire), holdMessages})
		time.AfterFunc(holdTime, l.flush)
		return nil
	case Tear:
		_, err := l.to.Write(wire[:len(wire)/2])
		l.cut()
		return err
	case Double:
		if _, err := l.to.Write(wire); err != nil {
			return err
		}
	}
	if _, err := l.to.Write(wire); err != nil || !message {
		return err
	}
	keep := l.held[:0]
	for _, h := range l.held {
		if h.left--; h.left > 0 {
			keep = append(keep, h)
			continue
		}
		if _, err := l.to.Write(h.wire); err != nil {
			return err
		}
	}
	l.held = keep
	return nil
}

// flush sends what has been held for long enough, or is about to be.
func (l *lane) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.held {
		if !l.closed {
			_, _ = l.to.Write(h.wire) // a connection that is gone shows elsewhere
		}
	}
	l.held = nil
}

func (l *lane) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}
