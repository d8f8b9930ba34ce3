//go:build !unix

package tap

import (
	"net"
	"os"
)

// wire reads a socket. Descriptors do not come through it here.
type wire struct {
	conn *net.UnixConn
}

// Read implements [io.Reader].
func (w *wire) Read(p []byte) (int, error) { return w.conn.Read(p) }

func (w *wire) take() *os.File { return nil }
func (w *wire) closeFiles()    {}
