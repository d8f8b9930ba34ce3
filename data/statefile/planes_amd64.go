//go:build amd64 && !purego

package statefile

import "golang.org/x/sys/cpu"

// avx2 says that the loops below may be used.
var avx2 = cpu.X86.HasAVX2

// splitBlocks splits a first part of src and says how many values that was.
func splitBlocks(low, high, src []byte) int {
	blocks := len(src) / 64
	if !avx2 || blocks == 0 {
		return 0
	}
	_, _ = low[32*blocks-1], high[32*blocks-1]
	split32(&low[0], &high[0], &src[0], blocks)
	return 32 * blocks
}

// squareBlocks adds the squares of a first part of row, in bf16, to sums, value
// i to sum i%8, and says how many values that was.
func squareBlocks(sums *[8]float64, row []byte) int {
	blocks := len(row) / 16
	if !avx2 || blocks == 0 {
		return 0
	}
	squares8(sums, &row[0], blocks)
	return 8 * blocks
}

//go:noescape
func split32(low, high, src *byte, blocks int)

//go:noescape
func squares8(sums *[8]float64, src *byte, blocks int)
