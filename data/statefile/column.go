package statefile

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"math"
	"math/bits"
	"sync"

	"github.com/klauspost/compress/huff0"
	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go/encoding/delta"
	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"
)

// The leaf columns of schemas.State, in order. A test compares them with the
// schema that parquet-go derives from the struct.
const (
	colSeqID = iota
	colPos
	colState
	colNorm
	colVec
	numColumns
)

// vecPath is the column that takes nearly all of a dataset's space.
var vecPath = []string{"vec", "list", "element"}

// encoder is what one goroutine needs to encode row groups. Encoders are kept
// between files: the ZSTD encoder of the narrow columns alone is megabytes.
type encoder struct {
	huff   *huff0.Scratch
	zstd   *zstd.Encoder
	header bytes.Buffer
	thrift *thrift.Encoder
	plain  []byte // values of a narrow column before compression
	plane  []byte // byte planes of a page of vectors
	block  []byte
	frame  []byte // of a meter
	pos    []int32
}

var encoders sync.Pool // *encoder

func getEncoder() (*encoder, error) {
	if e, _ := encoders.Get().(*encoder); e != nil {
		return e, nil
	}
	z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
		zstd.WithEncoderCRC(false), zstd.WithSingleSegment(true), zstd.WithZeroFrames(true), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, err
	}
	e := &encoder{huff: newScratch(), zstd: z}
	e.thrift = thrift.NewEncoder(new(thrift.CompactProtocol).NewWriter(&e.header))
	return e, nil
}

// chunk is one column of a row group on its way. Offsets count from the start
// of the row group.
type chunk struct {
	meta  format.ColumnMetaData
	index *format.ColumnIndex // nil for none
	pages []format.PageLocation
}

// finishHeader encodes the header of a page into e.header. body holds levels
// and compressed values, which take size bytes uncompressed.
func (e *encoder) finishHeader(h *format.PageHeader, size int, body []byte) error {
	h.UncompressedPageSize = int32(size)
	h.CompressedPageSize = int32(len(body))
	h.CRC = int32(crc32.ChecksumIEEE(body))
	e.header.Reset()
	return e.thrift.Encode(h)
}

// appendPage compresses e.plain and appends it as one page of a narrow
// column, which has no levels.
func (g *group) appendPage(e *encoder, c *chunk, h format.PageHeader) error {
	e.block = e.zstd.EncodeAll(e.plain, e.block[:0])
	if err := e.finishHeader(&h, len(e.plain), e.block); err != nil {
		return err
	}
	at := len(g.buf)
	g.buf = append(append(g.buf, e.header.Bytes()...), e.block...)
	c.count(&h, g.keep(at), 0, e.header.Len())
	return nil
}

// count enters a page that begins at at into the chunk's metadata.
func (c *chunk) count(h *format.PageHeader, at, firstRow int64, headerSize int) {
	encoding := h.DataPageHeaderV2.V.Encoding
	if h.Type == format.DictionaryPage {
		encoding = h.DictionaryPageHeader.V.Encoding
		c.meta.DictionaryPageOffset = at
	} else {
		if len(c.pages) == 0 {
			c.meta.DataPageOffset = at
		}
		c.pages = append(c.pages, format.PageLocation{Offset: at, CompressedPageSize: int32(headerSize) + h.CompressedPageSize, FirstRowIndex: firstRow})
		c.meta.NumValues += int64(h.DataPageHeaderV2.V.NumValues)
	}
	c.meta.TotalUncompressedSize += int64(headerSize) + int64(h.UncompressedPageSize)
	c.meta.TotalCompressedSize += int64(headerSize) + int64(h.CompressedPageSize)
	if s := c.meta.EncodingStats; len(s) > 0 && s[len(s)-1].PageType == h.Type {
		s[len(s)-1].Count++
	} else {
		c.meta.EncodingStats = append(s, format.PageEncodingStats{PageType: h.Type, Encoding: encoding, Count: 1})
	}
}

// narrow appends a narrow column whose encoded values are e.plain, as one
// page. The bounds are nil for none.
func (g *group) narrow(e *encoder, c *chunk, enc format.Encoding, low, high []byte) error {
	h := dataPage(g.n, g.n, enc, 0, 0)
	if err := g.appendPage(e, c, h); err != nil {
		return err
	}
	if low != nil {
		c.meta.Statistics.MinValue, c.meta.Statistics.MaxValue = low, high
		c.index = &format.ColumnIndex{
			NullPages: []bool{false}, NullCounts: []int64{0},
			MinValues: [][]byte{low}, MaxValues: [][]byte{high}, BoundaryOrder: format.Ascending,
		}
	}
	return nil
}

func dataPage(rows, values int, enc format.Encoding, repetition, definition int) format.PageHeader {
	return format.PageHeader{
		Type: format.DataPageV2,
		DataPageHeaderV2: thrift.New(format.DataPageHeaderV2{
			NumValues: int32(values), NumRows: int32(rows), Encoding: enc,
			RepetitionLevelsByteLength: int32(repetition), DefinitionLevelsByteLength: int32(definition),
			IsCompressed: thrift.New(true),
		}),
	}
}

// seqIDs writes the column seq_id: a dictionary in the order of appearance,
// and one run of indexes for each stretch of rows.
func (g *group) seqIDs(e *encoder, c *chunk) error {
	numbers := map[string]int{}
	e.plain = e.plain[:0]
	low, high := g.rows[0].SeqID, g.rows[0].SeqID
	for _, r := range g.rows {
		if _, ok := numbers[r.SeqID]; ok {
			continue
		}
		numbers[r.SeqID] = len(numbers)
		e.plain = binary.LittleEndian.AppendUint32(e.plain, uint32(len(r.SeqID)))
		e.plain = append(e.plain, r.SeqID...)
		low, high = min(low, r.SeqID), max(high, r.SeqID)
	}
	h := format.PageHeader{Type: format.DictionaryPage, DictionaryPageHeader: thrift.New(format.DictionaryPageHeader{
		NumValues: int32(len(numbers)), Encoding: format.Plain,
	})}
	if err := g.appendPage(e, c, h); err != nil {
		return err
	}
	width := max(1, bits.Len(uint(len(numbers)-1)))
	e.plain = append(e.plain[:0], byte(width))
	for _, r := range g.rows {
		e.plain = appendRun(e.plain, len(r.Norms), numbers[r.SeqID], width)
	}
	return g.narrow(e, c, format.RLEDictionary, []byte(low), []byte(high))
}

// appendRun appends a run of n equal values of width bits in Parquet's
// RLE and bit-packing hybrid.
func appendRun(dst []byte, n, value, width int) []byte {
	dst = binary.AppendUvarint(dst, uint64(n)<<1)
	for ; width > 0; width -= 8 {
		dst = append(dst, byte(value))
		value >>= 8
	}
	return dst
}

func (g *group) positions(e *encoder, c *chunk) error {
	e.pos = e.pos[:0]
	for _, r := range g.rows {
		for i := range r.Norms {
			e.pos = append(e.pos, r.Pos+int32(i))
		}
	}
	low, high := e.pos[0], e.pos[0]
	for _, p := range e.pos {
		low, high = min(low, p), max(high, p)
	}
	var codec delta.BinaryPackedEncoding
	var err error
	if e.plain, err = codec.EncodeInt32(e.plain[:0], e.pos); err != nil {
		return err
	}
	return g.narrow(e, c, format.DeltaBinaryPacked, le32(uint32(low)), le32(uint32(high)))
}

func (g *group) states(e *encoder, c *chunk) error {
	state := uint32(g.rows[0].State)
	e.plain = e.plain[:0]
	for range g.n {
		e.plain = binary.LittleEndian.AppendUint32(e.plain, state)
	}
	return g.narrow(e, c, format.Plain, le32(state), le32(state))
}

func (g *group) norms(e *encoder, c *chunk) error {
	e.plain = e.plain[:0]
	low, high := float32(math.Inf(1)), float32(math.Inf(-1))
	ordered := true
	for _, r := range g.rows {
		for _, v := range r.Norms {
			e.plain = binary.LittleEndian.AppendUint32(e.plain, math.Float32bits(v))
			ordered = ordered && v == v
			low, high = min(low, v), max(high, v)
		}
	}
	if !ordered { // bounds of a column with NaN would mislead
		return g.narrow(e, c, format.Plain, nil, nil)
	}
	if low == 0 { // the format asks for the smaller zero
		low = float32(math.Copysign(0, -1))
	}
	return g.narrow(e, c, format.Plain, le32(math.Float32bits(low)), le32(math.Float32bits(high)))
}

func le32(v uint32) []byte { return binary.LittleEndian.AppendUint32(nil, v) }
