//go:build unix

package tap

import (
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// wire reads a socket and keeps the descriptors that come with the bytes.
type wire struct {
	conn *net.UnixConn
	fds  []*os.File
}

// maxFiles is how many descriptors may wait to be asked for.
const maxFiles = 4

// Read implements [io.Reader].
func (w *wire) Read(p []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4*maxFiles))
	n, oobn, _, _, err := w.conn.ReadMsgUnix(p, oob)
	if oobn > 0 {
		if err := w.keep(oob[:oobn]); err != nil {
			return 0, err
		}
	}
	n = max(n, 0) // it is -1 with an error
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

func (w *wire) keep(oob []byte) error {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return badProtocol("unreadable control data: %v", err)
	}
	for i := range list {
		fds, err := unix.ParseUnixRights(&list[i])
		if err != nil {
			continue // no descriptors
		}
		for _, fd := range fds {
			w.fds = append(w.fds, os.NewFile(uintptr(fd), "ring"))
		}
	}
	if len(w.fds) > maxFiles {
		w.closeFiles()
		return badProtocol("more than %d descriptors", maxFiles)
	}
	return nil
}

func (w *wire) take() *os.File {
	if len(w.fds) == 0 {
		return nil
	}
	f := w.fds[0]
	w.fds = w.fds[1:]
	return f
}

func (w *wire) closeFiles() {
	for _, f := range w.fds {
		f.Close()
	}
	w.fds = nil
}
