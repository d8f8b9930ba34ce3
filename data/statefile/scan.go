package statefile

import (
	"encoding/binary"
	"fmt"
	"io"
)

// ScanThrift walks one struct in Thrift's compact protocol, such as Parquet's
// footer or an index, and refuses lengths that b cannot hold. It allocates
// nothing: Thrift's decoder allocates what a list's length promises, so that a
// few bytes can ask it for any amount of memory.
func ScanThrift(b []byte) error {
	s := thriftScan{b: b}
	return s.fields()
}

type thriftScan struct {
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
	// maxDepth is far beyond what the format nests.
	maxDepth = 32
	// minListed is the fewest bytes of a struct in any list of the format: a
	// key-value without a value. Shorter ones only blow up memory.
	minListed = 3
)

func (s *thriftScan) skip(n uint64) error {
	if n > uint64(len(s.b)) {
		return fmt.Errorf("%d bytes are promised and %d are left", n, len(s.b))
	}
	s.b = s.b[n:]
	return nil
}

func (s *thriftScan) next() (byte, error) {
	if len(s.b) == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	v := s.b[0]
	s.b = s.b[1:]
	return v, nil
}

func (s *thriftScan) varint() (uint64, error) {
	v, n := binary.Uvarint(s.b)
	if n <= 0 {
		return 0, io.ErrUnexpectedEOF
	}
	s.b = s.b[n:]
	return v, nil
}

// fields walks a struct up to its end.
func (s *thriftScan) fields() error {
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
func (s *thriftScan) value(t byte) error {
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

func (s *thriftScan) list() error {
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

func (s *thriftScan) pairs() error {
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
func (s *thriftScan) items(n uint64, types ...byte) error {
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
