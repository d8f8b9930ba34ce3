package statefile

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"strconv"
	"sync"

	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"
)

const magic = "PAR1"

// maxGroups is how many row groups the format can number.
const maxGroups = 1 << 15

// file is what lies around row groups: the magic numbers, the indexes of
// their pages, and the footer.
type file struct {
	out     io.Writer
	offset  int64
	groups  []format.RowGroup
	indexes [][numColumns]pageIndex // by row group
	rows    int64
	kv      []format.KeyValue
	err     error // the first; nothing is written after it
}

// pageIndex is what is known of a chunk's pages.
type pageIndex struct {
	bounds []byte // an encoded format.ColumnIndex, empty for none
	pages  format.OffsetIndex
}

// NumRows is how many rows were written so far.
func (f *file) NumRows() int64 { return f.rows }

// SetKeyValueMetadata puts a key and its value into the footer.
func (f *file) SetKeyValueMetadata(key, value string) {
	f.kv = append(f.kv, format.KeyValue{Key: key, Value: value})
}

func (f *file) write(b []byte) {
	if f.err != nil {
		return
	}
	if f.offset == 0 {
		b = append([]byte(magic), b...)
	}
	n, err := f.out.Write(b)
	f.offset += int64(n)
	f.err = err
}

// begin writes the magic number in front of the first row group.
func (f *file) begin() {
	if f.offset == 0 {
		f.write(nil)
	}
}

// add enters a row group whose bytes were written from start on. The offsets
// in it count from base.
func (f *file) add(rg format.RowGroup, indexes [numColumns]pageIndex, start, base int64) {
	if len(f.groups) == maxGroups && f.err == nil {
		f.err = fmt.Errorf("more than %d row groups in a file", maxGroups)
	}
	shift := start - base
	rg.FileOffset, rg.Ordinal = start, int16(len(f.groups))
	for i := range rg.Columns {
		c := &rg.Columns[i]
		c.MetaData.DataPageOffset += shift
		if i == colSeqID {
			c.MetaData.DictionaryPageOffset += shift
		}
		for p := range indexes[i].pages.PageLocations {
			indexes[i].pages.PageLocations[p].Offset += shift
		}
	}
	f.groups = append(f.groups, rg)
	f.indexes = append(f.indexes, indexes)
	f.rows += rg.NumRows
}

// finish writes the indexes and the footer.
func (f *file) finish() error {
	f.begin()
	var buf bytes.Buffer
	enc := thrift.NewEncoder(new(thrift.CompactProtocol).NewWriter(&buf))
	end := func() int64 { return f.offset + int64(buf.Len()) }
	for i := range f.groups {
		for j := range f.indexes[i] {
			if b := f.indexes[i][j].bounds; len(b) > 0 {
				c := &f.groups[i].Columns[j]
				c.ColumnIndexOffset, c.ColumnIndexLength = end(), int32(len(b))
				buf.Write(b)
			}
		}
	}
	for i := range f.groups {
		for j := range f.indexes[i] {
			c, at := &f.groups[i].Columns[j], end()
			if err := enc.Encode(&f.indexes[i][j].pages); err != nil {
				return err
			}
			c.OffsetIndexOffset, c.OffsetIndexLength = at, int32(end()-at)
		}
	}
	like := template()
	at := end()
	if err := enc.Encode(&format.FileMetaData{
		Version: like.Version, Schema: like.Schema, ColumnOrders: like.ColumnOrders,
		NumRows: f.rows, RowGroups: f.groups, KeyValueMetadata: f.kv,
		CreatedBy: fmt.Sprintf("draftscope version %d(build statefile)", schemas.FormatVersion),
	}); err != nil {
		return err
	}
	buf.Write(binary.LittleEndian.AppendUint32(nil, uint32(end()-at)))
	buf.WriteString(magic)
	f.write(buf.Bytes())
	return f.err
}

// template is the footer of a file without rows as parquet-go writes it: the
// one place where the table's schema comes from is its row struct.
var template = sync.OnceValue(func() *format.FileMetaData {
	w := parquet.NewGenericWriter[schemas.State](io.Discard, plainOptions(Config{}.withDefaults())...)
	_ = w.Close() // nothing fails that writes nowhere
	return w.File().Metadata()
})

// plainOptions is how parquet-go writes the table.
func plainOptions(cfg Config) []parquet.WriterOption {
	return []parquet.WriterOption{
		parquet.Compression(&planeCodec), // the narrow columns name their own
		parquet.PageBufferSize(cfg.PageBytes),
		parquet.SkipPageBounds(vecPath...),
		parquet.SkipPageStatistics(vecPath...),
		parquet.WriteBufferSize(0),
		parquet.CreatedBy("draftscope", strconv.Itoa(schemas.FormatVersion), "parquet-go"),
	}
}

var planeCodec PlaneCodec
