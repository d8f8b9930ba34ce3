package tap

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

const kindMemfd = "memfd"

// mapRing maps the memory behind f, which it closes. The memory must be
// sealed against shrinking: reading behind the end of a file that another
// process has cut would end this one.
func mapRing(f *os.File, ad ringAd, width int64) (*ring, error) {
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("reading the size of the ring: %w", err)
	}
	if err := ad.check(width, st.Size()); err != nil {
		return nil, err
	}
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		return nil, badProtocol("the ring's memory is not sealed against shrinking")
	}
	raw, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping the ring: %w", err)
	}
	head, err := unix.Mmap(int(f.Fd()), 0, headBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("mapping the ring's counters: %w", err), unix.Munmap(raw))
	}
	return &ring{
		raw: raw, ad: ad, width: width,
		head:    (*counters)(unsafe.Pointer(&head[0])), // a page begins aligned
		release: func() error { return errors.Join(unix.Munmap(raw), unix.Munmap(head)) },
	}, nil
}
