package statefile

import (
	"slices"

	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go/format"
)

// group is one row group on its way from captured rows to bytes.
type group struct {
	cfg    Config
	rows   []Rows
	n      int // rows in all
	buf    []byte
	parts  []extent // of buf, in order; what lies between them is not written
	size   int64    // of all parts
	chunks [numColumns]chunk
	done   chan error // of the goroutine that encodes it
}

type extent struct{ lo, hi int }

// keep makes buf[lo:], the end of buf, part of the row group, and returns its
// offset there.
func (g *group) keep(lo int) (offset int64) {
	offset = g.size
	g.parts = append(g.parts, extent{lo, len(g.buf)})
	g.size += int64(len(g.buf) - lo)
	return offset
}

// encode writes the row group into buf.
func (g *group) encode(e *encoder) error {
	g.buf, g.parts, g.size = g.buf[:0], g.parts[:0], 0
	g.chunks = newChunks()
	for i, column := range [numColumns]func(*encoder, *chunk) error{
		colSeqID: g.seqIDs, colPos: g.positions, colState: g.states, colNorm: g.norms, colVec: g.vectors,
	} {
		if err := column(e, &g.chunks[i]); err != nil {
			return err
		}
	}
	return nil
}

func newChunks() (c [numColumns]chunk) {
	for i, m := range [numColumns]format.ColumnMetaData{
		colSeqID: {Type: format.ByteArray, Encoding: []format.Encoding{format.Plain, format.RLEDictionary}, PathInSchema: []string{"seq_id"}},
		colPos:   {Type: format.Int32, Encoding: []format.Encoding{format.DeltaBinaryPacked}, PathInSchema: []string{"pos"}},
		colState: {Type: format.Int32, Encoding: []format.Encoding{format.Plain}, PathInSchema: []string{"state"}},
		colNorm:  {Type: format.Float, Encoding: []format.Encoding{format.Plain}, PathInSchema: []string{"norm"}},
		colVec:   {Type: format.Float, Encoding: []format.Encoding{format.RLE, format.ByteStreamSplit}, PathInSchema: vecPath},
	} {
		m.Codec = format.Zstd
		c[i].meta = m
	}
	return c
}

// vectors writes the column vec, page after page. It has no bounds: those of
// single values say nothing about vectors.
func (g *group) vectors(e *encoder, c *chunk) error {
	raw := pieces{rows: g.rows}
	for first := 0; first < g.n; {
		n := min(g.cfg.pageRows(), g.n-first)
		if err := g.vectorPage(e, c, &raw, first, n); err != nil {
			return err
		}
		first += n
	}
	return nil
}

// vectorPage writes the next n rows of raw as one page. The body is made in
// place, before the size of its header is known: the header then goes to the
// end of the room that is left for it, and the rest of the room is skipped.
func (g *group) vectorPage(e *encoder, c *chunk, raw *pieces, first, n int) error {
	const room = 128 // larger than any header of a data page
	values := n * g.cfg.Hidden
	body := len(g.buf) + room
	g.buf = slices.Grow(g.buf, room+8*n+values*g.cfg.DType.Size()+1024)[:body]
	g.buf = appendRepetition(g.buf, n, g.cfg.Hidden)
	repetition := len(g.buf) - body
	g.buf = appendRun(g.buf, values, 1, 1) // every element is there
	levels := len(g.buf) - body
	var err error
	if g.buf, err = e.appendFrame(g.buf, g.cfg.DType, raw, values); err != nil {
		return err
	}
	h := dataPage(n, values, format.ByteStreamSplit, repetition, levels-repetition)
	if err := e.finishHeader(&h, levels+4*values, g.buf[body:]); err != nil {
		return err
	}
	head := body - e.header.Len()
	copy(g.buf[head:], e.header.Bytes())
	c.count(&h, g.keep(head), int64(first), e.header.Len())
	return nil
}

// appendRepetition appends the repetition levels of n lists of hidden
// elements: 0 begins a list, 1 goes on with it.
func appendRepetition(dst []byte, n, hidden int) []byte {
	if hidden == 1 {
		return appendRun(dst, n, 0, 1)
	}
	for range n {
		dst = appendRun(dst, 1, 0, 1)
		dst = appendRun(dst, hidden-1, 1, 1)
	}
	return dst
}

// appendFrame appends a ZSTD frame with the byte-stream split of the next n
// values of raw.
func (e *encoder) appendFrame(dst []byte, d schemas.DType, raw *pieces, n int) ([]byte, error) {
	dst = appendFrameHeader(dst, 4*n)
	var err error
	if d == schemas.F32 {
		e.plane = slices.Grow(e.plane[:0], 4*n)[:4*n]
		var planes [4][]byte
		for i := range planes {
			planes[i] = e.plane[i*n : (i+1)*n]
		}
		for at := planes; len(at[0]) > 0; {
			src := raw.next(4 * len(at[0]))
			splitF32(at, src)
			for i := range at {
				at[i] = at[i][len(src)/4:]
			}
		}
		for i, p := range planes {
			if dst, err = appendPlane(dst, p, i == 3, e.huff); err != nil {
				return nil, err
			}
		}
		return dst, nil
	}
	// The two low planes of bf16 are zero.
	for left := 2 * n; left > 0; left -= min(left, maxBlock) {
		dst = append(appendBlockHeader(dst, blockRLE, min(left, maxBlock), false), 0)
	}
	// The next plane is mantissa and nearly always noise: it is split right
	// into the frame. The last one waits beside it.
	e.plane = slices.Grow(e.plane[:0], n)[:n]
	for lo := 0; lo < n; lo += maxBlock {
		size := min(maxBlock, n-lo)
		begin := len(dst)
		dst = appendBlockHeader(dst, blockRaw, size, false)
		at := len(dst)
		dst = slices.Grow(dst, size)[:at+size]
		for low, high := dst[at:], e.plane[lo:lo+size]; len(low) > 0; {
			src := raw.next(2 * len(low))
			splitBF16(low[:len(src)/2], high[:len(src)/2], src)
			low, high = low[len(src)/2:], high[len(src)/2:]
		}
		if size < minSampled || !isNoise(dst[at:]) {
			e.block = append(e.block[:0], dst[at:]...)
			if dst, err = appendBlock(dst[:begin], e.block, false, e.huff); err != nil {
				return nil, err
			}
		}
	}
	return appendPlane(dst, e.plane, true, e.huff)
}

// pieces walks the captured bytes of several Rows as if they were one.
type pieces struct {
	rows []Rows
	at   int // in rows[0].Raw
}

// next returns the next bytes, at most n and at least one, and moves past
// them. The caller never asks for more than there is.
func (p *pieces) next(n int) []byte {
	for p.at == len(p.rows[0].Raw) {
		p.rows, p.at = p.rows[1:], 0
	}
	b := p.rows[0].Raw[p.at:]
	b = b[:min(n, len(b))]
	p.at += len(b)
	return b
}
