//go:build unix

package safetensors

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// mapFile maps f read-only. The mapping outlives f and ends with release. A
// file that another process cuts while it is mapped ends this process, as
// with any memory map.
func mapFile(f *os.File) (raw []byte, release func() error, err error) {
	st, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if st.IsDir() {
		return nil, nil, errors.New("it is a directory")
	}
	n := st.Size()
	if n == 0 || int64(int(n)) != n {
		return nil, func() error { return nil }, nil
	}
	raw, err = unix.Mmap(int(f.Fd()), 0, int(n), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil, err
	}
	return raw, func() error { return unix.Munmap(raw) }, nil
}
