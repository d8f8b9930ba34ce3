package statefile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/klauspost/compress/huff0"
	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go/format"
)

// PlaneCodec compresses pages of byte-stream-split floats. It writes standard
// ZSTD frames, so every reader of Parquet reads them, but it does not search
// for matches: captured states hold none, and searching is where a general
// encoder spends its time.
//
// A byte-stream-split page of n floats is four planes of n bytes: first every
// value's lowest byte, last every value's sign and exponent. The codec cuts
// its input into these four planes and gives each what it deserves:
//
//   - one repeated byte, such as the two zero planes of a bf16 capture, is
//     four bytes per 128 KiB (a run-length block);
//   - a skewed plane, such as the exponents, is Huffman coded (a compressed
//     block of literals without any sequence);
//   - noise, such as the mantissa, is stored as it is (a raw block).
//
// Any other input round-trips too, only less well. The zero value is ready;
// one codec may serve many goroutines. It satisfies parquet-go's
// compress.Codec.
type PlaneCodec struct {
	scratches sync.Pool // *huff0.Scratch
	decoders  sync.Pool // *zstd.Decoder
}

const (
	// maxBlock is ZSTD's limit of a block, before and after compression.
	maxBlock = 128 << 10
	// minHuffman is the smallest plane worth a Huffman table.
	minHuffman = 64
	// gainShift asks a Huffman block to save at least 1/64 of its input. A
	// block that saves less costs more time to read than the bytes are worth.
	gainShift = 6
	// maxDecoded bounds what a hostile frame can make Decode allocate. A
	// Parquet page holds at most 2^31-1 bytes.
	maxDecoded = math.MaxInt32
)

// The block types of RFC 8878, §3.1.1.2.
const (
	blockRaw        = 0
	blockRLE        = 1
	blockCompressed = 2
)

// String is the codec's name in messages.
func (*PlaneCodec) String() string { return "ZSTD" }

// CompressionCodec is the codec's number in the Parquet format: its frames
// are ZSTD frames.
func (*PlaneCodec) CompressionCodec() format.CompressionCodec { return format.Zstd }

// Encode overwrites dst with one frame that holds src, and returns it,
// reallocated when it was too small.
func (c *PlaneCodec) Encode(dst, src []byte) ([]byte, error) {
	if len(src) > maxDecoded {
		return nil, fmt.Errorf("compressing a page: %d bytes, the format's limit is %d", len(src), maxDecoded)
	}
	scratch, _ := c.scratches.Get().(*huff0.Scratch)
	if scratch == nil {
		scratch = newScratch()
	}
	defer c.scratches.Put(scratch)

	dst = appendFrameHeader(dst[:0], len(src))
	if len(src) == 0 {
		return appendBlockHeader(dst, blockRaw, 0, true), nil
	}
	for plane := range 4 {
		lo, hi := len(src)/4*plane, len(src)/4*(plane+1)
		if plane == 3 {
			hi = len(src)
		}
		var err error
		if dst, err = appendPlane(dst, src[lo:hi], hi == len(src), scratch); err != nil {
			return nil, err
		}
	}
	return dst, nil
}

func newScratch() *huff0.Scratch {
	return &huff0.Scratch{Reuse: huff0.ReusePolicyNone, WantLogLess: gainShift}
}

// appendFrameHeader begins a frame of size bytes: the magic number, then a
// descriptor that says: single segment, content size in four bytes, no
// checksum, no dictionary.
func appendFrameHeader(dst []byte, size int) []byte {
	dst = append(dst, 0x28, 0xb5, 0x2f, 0xfd, 0xa0)
	return binary.LittleEndian.AppendUint32(dst, uint32(size))
}

// appendPlane appends the blocks of one plane; last says that the frame ends
// with it.
func appendPlane(dst, plane []byte, last bool, scratch *huff0.Scratch) ([]byte, error) {
	for len(plane) > 0 {
		b := plane[:min(maxBlock, len(plane))]
		plane = plane[len(b):]
		var err error
		if dst, err = appendBlock(dst, b, last && len(plane) == 0, scratch); err != nil {
			return nil, err
		}
	}
	return dst, nil
}

// appendBlock appends the best of the three kinds of block for b, which is
// not empty.
func appendBlock(dst, b []byte, last bool, scratch *huff0.Scratch) ([]byte, error) {
	if isRun(b) {
		return append(appendBlockHeader(dst, blockRLE, len(b), last), b[0]), nil
	}
	if len(b) >= minHuffman && !isNoise(b) {
		out, _, err := huff0.Compress4X(b, scratch)
		switch {
		case err == nil:
			// Literals section: Huffman coded in four streams, sizes in 18
			// bits each (§3.1.1.3.1.1); then a zero: no sequences.
			size := 5 + len(out) + 1
			if size >= len(b) {
				break
			}
			dst = appendBlockHeader(dst, blockCompressed, size, last)
			h := uint64(2 | 3<<2 | len(b)<<4 | len(out)<<22)
			dst = append(dst, byte(h), byte(h>>8), byte(h>>16), byte(h>>24), byte(h>>32))
			dst = append(dst, out...)
			return append(dst, 0), nil
		case !errors.Is(err, huff0.ErrIncompressible) && !errors.Is(err, huff0.ErrUseRLE):
			return nil, fmt.Errorf("compressing a page: %w", err)
		}
	}
	return append(appendBlockHeader(dst, blockRaw, len(b), last), b...), nil
}

func appendBlockHeader(dst []byte, kind, size int, last bool) []byte {
	h := kind<<1 | size<<3
	if last {
		h |= 1
	}
	return append(dst, byte(h), byte(h>>8), byte(h>>16))
}

// isRun reports whether b is one byte repeated.
func isRun(b []byte) bool {
	want := uint64(b[0]) * 0x0101010101010101
	for len(b) >= 8 {
		if binary.LittleEndian.Uint64(b) != want {
			return false
		}
		b = b[8:]
	}
	for _, v := range b {
		if v != byte(want) {
			return false
		}
	}
	return true
}

const (
	// A sample is noise when two of its bytes are equal less often than
	// 1 in 2^7.875 times. That makes its Rényi entropy, and so its Shannon
	// entropy, larger than what a Huffman block must stay below.
	sampleSize   = 4096
	samplePieces = 8
	maxEqual     = sampleSize * (sampleSize - 1) / 235
	// minSampled is the smallest block worth a look at a sample first.
	minSampled = 4 * sampleSize
)

// isNoise reports whether a sample of a large block says that a Huffman table
// would not pay. It costs a fraction of counting the whole block.
func isNoise(b []byte) bool {
	if len(b) < minSampled {
		return false
	}
	var counts [256]uint32
	for i := range samplePieces {
		at := (len(b) - sampleSize/samplePieces) / (samplePieces - 1) * i
		for _, v := range b[at : at+sampleSize/samplePieces] {
			counts[v]++
		}
	}
	equal := 0
	for _, c := range counts {
		equal += int(c) * (int(c) - 1)
	}
	return equal < maxEqual
}

// Decode overwrites dst with the content of the frames in src, and returns
// it. The result lies in dst whenever dst is large enough: parquet-go drops
// what a codec decodes elsewhere (its issue 608).
func (c *PlaneCodec) Decode(dst, src []byte) ([]byte, error) {
	dec, _ := c.decoders.Get().(*zstd.Decoder)
	if dec == nil {
		var err error
		dec, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxDecoded))
		if err != nil {
			return nil, fmt.Errorf("decompressing a page: %w", err)
		}
	}
	defer c.decoders.Put(dec)
	out, err := dec.DecodeAll(src, dst[:0])
	if err != nil {
		return nil, fmt.Errorf("decompressing a page: %w", err)
	}
	if len(out) > 0 && len(out) <= cap(dst) && &out[0] != &dst[:1][0] {
		out = append(dst[:0], out...)
	}
	return out, nil
}
