package statefile

import (
	"encoding/binary"
	"math"

	"github.com/draftscope/draftscope/schemas"
)

// splitBF16 puts the low byte of every two-byte value of src into low and
// its high byte into high, which have half of src's length.
func splitBF16(low, high, src []byte) {
	n := splitBlocks(low, high, src)
	splitPlain(low[n:], high[n:], src[2*n:])
}

// splitPlain is splitBF16 eight values at a time.
func splitPlain(low, high, src []byte) {
	const even = 0x00ff00ff00ff00ff
	for len(src) >= 16 && len(low) >= 8 && len(high) >= 8 {
		a, b := binary.LittleEndian.Uint64(src), binary.LittleEndian.Uint64(src[8:])
		binary.LittleEndian.PutUint64(low, pack(a&even)|pack(b&even)<<32)
		binary.LittleEndian.PutUint64(high, pack(a>>8&even)|pack(b>>8&even)<<32)
		src, low, high = src[16:], low[8:], high[8:]
	}
	for i := range low {
		low[i], high[i] = src[2*i], src[2*i+1]
	}
}

// pack moves bytes 0, 2, 4 and 6 of x, whose others are zero, to its low half.
func pack(x uint64) uint64 {
	x = (x | x>>8) & 0x0000ffff0000ffff
	return (x | x>>16) & 0xffffffff
}

// splitF32 puts byte i of every four-byte value of src into plane i. A plane
// has a quarter of src's length.
func splitF32(planes [4][]byte, src []byte) {
	n := len(src) / 4
	p0, p1, p2, p3 := planes[0][:n], planes[1][:n], planes[2][:n], planes[3][:n]
	i := 0
	for ; i+4 <= n; i += 4 {
		s := src[4*i : 4*i+16]
		a, b := binary.LittleEndian.Uint64(s), binary.LittleEndian.Uint64(s[8:])
		// Even bytes of a: planes 0 and 2 of two values; odd bytes: 1 and 3.
		const even = 0x00ff00ff00ff00ff
		e, o := pack(a&even)|pack(b&even)<<32, pack(a>>8&even)|pack(b>>8&even)<<32
		e0, o0 := pack(e&even), pack(o&even)
		e2, o2 := pack(e>>8&even), pack(o>>8&even)
		binary.LittleEndian.PutUint32(p0[i:], uint32(e0))
		binary.LittleEndian.PutUint32(p1[i:], uint32(o0))
		binary.LittleEndian.PutUint32(p2[i:], uint32(e2))
		binary.LittleEndian.PutUint32(p3[i:], uint32(o2))
	}
	for ; i < n; i++ {
		p0[i], p1[i], p2[i], p3[i] = src[4*i], src[4*i+1], src[4*i+2], src[4*i+3]
	}
}

// AppendNorms appends the Euclidean length of every row of raw, which holds
// rows of hidden values of dtype d, to dst. Squares are summed in double
// precision. A row with a NaN or an infinity has a length that is not finite,
// as has one whose length is past float32's range; all others are finite.
func AppendNorms(dst []float32, d schemas.DType, hidden int, raw []byte) []float32 {
	width := hidden * d.Size()
	sum := sumF32
	if d == schemas.BF16 {
		sum = sumBF16
	}
	for ; len(raw) >= width; raw = raw[width:] {
		dst = append(dst, float32(math.Sqrt(sum(raw[:width]))))
	}
	return dst
}

// sumBF16 is the sum of squares of a row. Eight sums run side by side, or each
// addition would wait for the one before; the order is the same on every
// machine, and with it the last bit.
func sumBF16(row []byte) float64 {
	var sums [8]float64
	n := squareBlocks(&sums, row)
	squaresPlain(&sums, row[2*n:])
	return sums[0] + sums[1] + (sums[2] + sums[3]) + (sums[4] + sums[5] + (sums[6] + sums[7]))
}

// squaresPlain adds the square of value i of row to sum i%8.
func squaresPlain(sums *[8]float64, row []byte) {
	square := func(bits uint32) float64 {
		v := float64(math.Float32frombits(bits))
		return float64(v * v) // rounded: not to be fused with the sum
	}
	for ; len(row) >= 16; row = row[16:] {
		x, y := binary.LittleEndian.Uint64(row), binary.LittleEndian.Uint64(row[8:])
		sums[0] += square(uint32(x) << 16)
		sums[1] += square(uint32(x) & 0xffff0000)
		sums[2] += square(uint32(x>>32) << 16)
		sums[3] += square(uint32(x>>32) & 0xffff0000)
		sums[4] += square(uint32(y) << 16)
		sums[5] += square(uint32(y) & 0xffff0000)
		sums[6] += square(uint32(y>>32) << 16)
		sums[7] += square(uint32(y>>32) & 0xffff0000)
	}
	for i := range len(row) / 2 {
		sums[i] += square(uint32(binary.LittleEndian.Uint16(row[2*i:])) << 16)
	}
}

func sumF32(row []byte) float64 {
	var s0, s1, s2, s3 float64
	for len(row) >= 16 {
		x, y := binary.LittleEndian.Uint64(row), binary.LittleEndian.Uint64(row[8:])
		v0 := float64(math.Float32frombits(uint32(x)))
		v1 := float64(math.Float32frombits(uint32(x >> 32)))
		v2 := float64(math.Float32frombits(uint32(y)))
		v3 := float64(math.Float32frombits(uint32(y >> 32)))
		s0 += v0 * v0
		s1 += v1 * v1
		s2 += v2 * v2
		s3 += v3 * v3
		row = row[16:]
	}
	for ; len(row) >= 4; row = row[4:] {
		v := float64(math.Float32frombits(binary.LittleEndian.Uint32(row)))
		s0 += v * v
	}
	return s0 + s1 + (s2 + s3)
}
