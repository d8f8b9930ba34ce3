package tap

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// Listener waits for engines at a unix socket.
type Listener struct {
	path string
	l    *net.UnixListener
}

// Listen opens the socket at path, for this user only. A socket that a dead
// daemon left there is replaced; one that answers is in use.
func Listen(path string) (*Listener, error) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close()
		return nil, fmt.Errorf("opening socket %s: %w: another daemon listens there", path, syscall.EADDRINUSE)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode()&fs.ModeSocket != 0 {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("removing the socket that a dead daemon left: %w", err)
		}
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("opening socket %s: %w: something that is no socket is there; choose another path", path, syscall.EADDRINUSE)
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("opening socket %s: %w; make its folder first", path, fs.ErrNotExist)
	case errors.Is(err, syscall.EINVAL):
		return nil, fmt.Errorf("opening socket %s: %w: the path has %d bytes, and a system takes about 100; choose a shorter one", path, syscall.EINVAL, len(path))
	case err != nil:
		return nil, fmt.Errorf("opening socket %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("closing socket %s to others: %w", path, err), l.Close())
	}
	return &Listener{path, l}, nil
}

// Close stops listening. Engines that are connected stay so.
func (l *Listener) Close() error { return l.l.Close() }

// helloWait is how long a connection may take to say hello.
const helloWait = 10 * time.Second

// Accept waits for the next engine and its hello. What connects and does not
// speak the protocol is refused and costs its connection, nothing else.
func (l *Listener) Accept(ctx context.Context, refused func(error)) (*Engine, error) {
	stop := context.AfterFunc(ctx, func() { _ = l.l.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if stop() {
			return
		}
		_ = l.l.SetDeadline(time.Time{}) // the next Accept has a context of its own
	}()
	for {
		conn, err := l.l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			return nil, fmt.Errorf("waiting for an engine at %s: %w", l.path, err)
		}
		e := newEngine(conn)
		if err := e.readHello(); err != nil {
			e.Refuse(err)
			refused(err)
			continue
		}
		return e, nil
	}
}

// Engine is a connected engine that has said hello. It is either given to a
// [Source] or refused.
type Engine struct {
	Hello Hello

	conn *net.UnixConn
	wire *wire
	in   *bufio.Reader
	buf  []byte

	write sync.Mutex // of conn
}

func newEngine(conn *net.UnixConn) *Engine {
	w := &wire{conn: conn}
	return &Engine{conn: conn, wire: w, in: bufio.NewReaderSize(w, 64<<10)}
}

func (e *Engine) readHello() error {
	_ = e.conn.SetReadDeadline(time.Now().Add(helloWait))
	kind, body, err := e.read()
	if err != nil {
		return err
	}
	if kind != typeHello {
		return badProtocol("it begins with %q, want %s", kind, typeHello)
	}
	if e.Hello, err = decode[Hello](kind, body); err != nil {
		return err
	}
	h := e.Hello
	switch {
	case h.Protocol != Protocol:
		return badProtocol("version %d, this daemon speaks %d; use the draftscope-tap that belongs to it", h.Protocol, Protocol)
	case h.Model.Layers < 1 || h.Model.Layers > 1<<12 || h.Model.Hidden < 1 || h.Model.Hidden > 1<<20 || h.Model.Vocab < 1 || h.Model.Vocab > 1<<30:
		return badProtocol("a model of %d layers, hidden %d, vocabulary %d", h.Model.Layers, h.Model.Hidden, h.Model.Vocab)
	}
	if _, err := formatOf(h.DType); err != nil {
		return err
	}
	return e.conn.SetReadDeadline(time.Time{})
}

func (e *Engine) read() (kind string, body []byte, err error) {
	kind, body, e.buf, err = readFrame(e.in, e.buf)
	return kind, body, err
}

// sendWait is how long an engine may leave its socket unread before it counts
// as dead.
const sendWait = 10 * time.Second

func (e *Engine) send(m any) error {
	data, err := frame(m)
	if err != nil {
		return err
	}
	e.write.Lock()
	defer e.write.Unlock()
	_ = e.conn.SetWriteDeadline(time.Now().Add(sendWait))
	if _, err := e.conn.Write(data); err != nil {
		return fmt.Errorf("sending to the engine: %w", err)
	}
	return nil
}

// Refuse tells the engine why it is not wanted and closes the connection.
func (e *Engine) Refuse(reason error) {
	_ = e.send(struct { // it may be gone
		Type   string `json:"type"`
		Reason string `json:"reason"`
	}{typeRefuse, reason.Error()})
	e.close()
}

func (e *Engine) close() {
	e.conn.Close()
}
