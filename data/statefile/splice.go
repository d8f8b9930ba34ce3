package statefile

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"
)

// ErrForeign marks a file that does not hold the table states as this package
// lays it out. It can be read, but not joined to others.
var ErrForeign = errors.New("not laid out as a states file")

// Splicer joins finished files of the table states. It copies the bytes of
// their row groups and decodes none; only the indexes and the footer are
// written anew. Files of either writer will do. It serves one goroutine.
type Splicer struct {
	file
	buf []byte
}

// NewSplicer makes a splicer that writes a new file.
func NewSplicer(out io.Writer) *Splicer { return &Splicer{file: file{out: out}} }

// Source is a finished file.
type Source struct {
	io.ReaderAt
	Size     int64
	Metadata *format.FileMetaData
}

// Append copies one row group of src.
func (s *Splicer) Append(src Source, group int) error {
	if s.err != nil {
		return s.err
	}
	rg, start, end, err := src.rowGroup(group)
	if err != nil {
		return fmt.Errorf("splicing row group %d: %w", group, err)
	}
	var indexes [numColumns]pageIndex
	for i := range rg.Columns {
		if indexes[i], err = src.pageIndex(&rg.Columns[i]); err != nil {
			return fmt.Errorf("splicing row group %d: %w", group, err)
		}
	}
	s.begin()
	at := s.offset
	if s.buf == nil {
		s.buf = make([]byte, 1<<20)
	}
	for pos := start; pos < end; {
		b := s.buf[:min(int64(len(s.buf)), end-pos)]
		if _, err := src.ReadAt(b, pos); err != nil {
			return fmt.Errorf("splicing row group %d: %w", group, err)
		}
		if s.write(b); s.err != nil {
			return s.err
		}
		pos += int64(len(b))
	}
	s.add(rg, indexes, at, start)
	return s.err
}

// Flush is there for symmetry: nothing waits to be written.
func (s *Splicer) Flush() error {
	s.begin()
	return s.err
}

// Close writes the indexes and the footer.
func (s *Splicer) Close() error { return s.finish() }

// rowGroup copies the metadata of a row group, and finds where its bytes are.
func (src Source) rowGroup(group int) (rg format.RowGroup, start, end int64, err error) {
	if !sameSchema(src.Metadata) || group < 0 || group >= len(src.Metadata.RowGroups) {
		return rg, 0, 0, ErrForeign
	}
	rg = src.Metadata.RowGroups[group]
	rg.Columns = append([]format.ColumnChunk(nil), rg.Columns...)
	if len(rg.Columns) != numColumns {
		return rg, 0, 0, ErrForeign
	}
	for i := range rg.Columns {
		m := &rg.Columns[i].MetaData
		at := m.DataPageOffset
		if i == colSeqID {
			at = m.DictionaryPageOffset
			start, end = at, at
		} else if m.DictionaryPageOffset != 0 {
			return rg, 0, 0, ErrForeign
		}
		if at != end || at < int64(len(magic)) || m.BloomFilterOffset != 0 || m.TotalCompressedSize < 0 || m.TotalCompressedSize > src.Size-at {
			return rg, 0, 0, ErrForeign
		}
		end += m.TotalCompressedSize
	}
	return rg, start, end, nil
}

// pageIndex reads what the file says about a chunk's pages, and takes the
// places of this index out of the chunk.
func (src Source) pageIndex(c *format.ColumnChunk) (x pageIndex, err error) {
	if x.bounds, err = src.read(c.ColumnIndexOffset, c.ColumnIndexLength); err != nil {
		return x, err
	}
	b, err := src.read(c.OffsetIndexOffset, c.OffsetIndexLength)
	if err != nil {
		return x, err
	}
	if len(b) == 0 {
		return x, ErrForeign
	}
	if err := ScanThrift(b); err != nil {
		return x, fmt.Errorf("its offset index: %w", err)
	}
	if err := thrift.NewDecoder(new(thrift.CompactProtocol).NewReader(bytes.NewReader(b))).Decode(&x.pages); err != nil {
		return x, fmt.Errorf("its offset index: %w", err)
	}
	c.ColumnIndexOffset, c.ColumnIndexLength, c.OffsetIndexOffset, c.OffsetIndexLength = 0, 0, 0, 0
	return x, nil
}

// read reads part of the file; at offset 0 nothing is meant.
func (src Source) read(offset int64, n int32) ([]byte, error) {
	if offset == 0 || n == 0 {
		return nil, nil
	}
	if offset < 0 || n < 0 || int64(n) > src.Size-offset {
		return nil, ErrForeign
	}
	b := make([]byte, n)
	_, err := src.ReadAt(b, offset)
	return b, err
}

// sameSchema reports whether a footer's schema is the table's.
func sameSchema(md *format.FileMetaData) bool {
	encode := func(schema thrift.Slice[format.SchemaElement]) []byte {
		b, err := thrift.Marshal(new(thrift.CompactProtocol), &format.FileMetaData{Schema: schema})
		if err != nil {
			return nil
		}
		return b
	}
	have := encode(md.Schema)
	return have != nil && bytes.Equal(have, encode(template().Schema))
}
