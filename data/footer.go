package data

import (
	"encoding/binary"
	"fmt"
	"io"
)

// Parquet's footer is one struct in Thrift's compact protocol. Its decoder
// allocates what a list's length promises, so that a footer of a few bytes can
// ask for any amount of memory. footerScan walks the footer first, allocating
// nothing, and refuses lengths that the bytes cannot hold.
type footerScan struct {
	b     []byte
	depth int
}

// The types of the compact protocol.
const (
	thriftStop   = 0
	thriftTrue   = 1
	thriftFalse  = 2
	thriftI8     = 3
	thriftI16    = 4
	thriftI32    = 5
	thriftI64    = 6
	thriftDouble = 7
	thriftBinary = 8
	thriftList   = 9
	thriftSet    = 10
	thriftMap    = 11
	thriftStruct = 12
	thriftUUID   = 13
)

const (
	// maxFooter bounds what is read of a footer.
	maxFooter = 256 << 20
	// maxDepth is far beyond what the format nests.
	maxDepth = 32
	// minListed is the fewest bytes of a struct in any list of the format: a
	// key-value without a value. Shorter ones only blow up memory.
	minListed = 3
)

// checkFooter reads the length at the end of r, which has size bytes, and
// scans the footer before it.
func checkFooter(r io.ReaderAt, size int64) error {
	if size < 12 {
		return fmt.Errorf("%w: %d bytes are no Parquet file", ErrDamaged, size)
	}
	var tail [8]byte
	if _, err := r.ReadAt(tail[:], size-8); err != nil {
		return err
	}
	if string(tail[4:]) != "PAR1" {
		return fmt.Errorf("%w: no Parquet footer at its end: it was cut, or is no Parquet file", ErrDamaged)
	}
	n := int64(binary.LittleEndian.Uint32(tail[:]))
	if n+12 > size || n > maxFooter {
		return fmt.Errorf("%w: its footer claims %d bytes of %d", ErrDamaged, n, size)
	}
	b := make([]byte, n)
	if _, err := r.ReadAt(b, size-8-n); err != nil {
		return err
	}
	s := footerScan{b: b}
	if err := s.fields(); err != nil {
		return fmt.Errorf("%w: its footer: %w", ErrDamaged, err)
	}
	return nil
}

func (s *footerScan) skip(n uint64) error {
	if n > uint64(len(s.b)) {
		return fmt.Errorf("%d bytes are promised and %d are left", n, len(s.b))
	}
	s.b = s.b[n:]
	return nil
}

func (s *footerScan) next() (byte, error) {
	if len(s.b) == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	v := s.b[0]
	s.b = s.b[1:]
	return v, nil
}

func (s *footerScan) varint() (uint64, error) {
	v, n := binary.Uvarint(s.b)
	if n <= 0 {
		return 0, io.ErrUnexpectedEOF
	}
	s.b = s.b[n:]
	return v, nil
}

// fields walks a struct up to its end.
func (s *footerScan) fields() error {
	if s.depth++; s.depth > maxDepth {
		return fmt.Errorf("nested deeper than %d", maxDepth)
	}
	defer func() { s.depth-- }()
	for {
		h, err := s.next()
		if err != nil {
			return err
		}
		if h&0xf == thriftStop {
			return nil
		}
		if h>>4 == 0 { // the field's number follows
			if _, err := s.varint(); err != nil {
				return err
			}
		}
		if t := h & 0xf; t == thriftTrue || t == thriftFalse {
			continue // the type is the value
		}
		if err := s.value(h & 0xf); err != nil {
			return err
		}
	}
}

// value walks one value of type t, as it stands in a list or after a field's
// header.
func (s *footerScan) value(t byte) error {
	switch t {
	case thriftTrue, thriftFalse, thriftI8:
		return s.skip(1)
	case thriftI16, thriftI32, thriftI64:
		_, err := s.varint()
		return err
	case thriftDouble:
		return s.skip(8)
	case thriftUUID:
		return s.skip(16)
	case thriftBinary:
		n, err := s.varint()
		if err != nil {
			return err
		}
		return s.skip(n)
	case thriftList, thriftSet:
		return s.list()
	case thriftMap:
		return s.pairs()
	case thriftStruct:
		return s.fields()
	}
	return fmt.Errorf("unknown type %d", t)
}

func (s *footerScan) list() error {
	h, err := s.next()
	if err != nil {
		return err
	}
	n := uint64(h >> 4)
	if n == 15 {
		if n, err = s.varint(); err != nil {
			return err
		}
	}
	return s.items(n, h&0xf)
}

func (s *footerScan) pairs() error {
	n, err := s.varint()
	if err != nil || n == 0 {
		return err
	}
	types, err := s.next()
	if err != nil {
		return err
	}
	return s.items(n, types>>4, types&0xf)
}

// items walks n times values of the given types.
func (s *footerScan) items(n uint64, types ...byte) error {
	if s.depth++; s.depth > maxDepth {
		return fmt.Errorf("nested deeper than %d", maxDepth)
	}
	defer func() { s.depth-- }()
	if n > uint64(len(s.b)) {
		return fmt.Errorf("a list of %d items in %d bytes", n, len(s.b))
	}
	for range n {
		for _, t := range types {
			before := len(s.b)
			if err := s.value(t); err != nil {
				return err
			}
			if t == thriftStruct && before-len(s.b) < minListed {
				return fmt.Errorf("an empty item in a list of %d", n)
			}
		}
	}
	return nil
}
