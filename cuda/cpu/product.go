package cpu

import (
	"unsafe"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"
)

const kernelName = "gonum"

// Tiles of a product. gonum splits K into blocks, and so sums in another
// order, once a product has four or more blocks of 64 x 64 in its result;
// 64 x 192 stays below, and each element is one dot product over all of K.
const (
	tileRows = 64
	tileCols = 192
)

// product sets c = a·wᵀ, or adds that to c, sharing the tiles among the
// device's threads.
func (d *Device) product(c, a, w matrix, add bool) {
	down, across := (c.rows+tileRows-1)/tileRows, (c.cols+tileCols-1)/tileCols
	cost := min(c.rows, tileRows) * min(c.cols, tileCols) * a.cols
	d.each(down*across, cost, func(i int) {
		// Consecutive tiles share the rows of w, which then stay in cache.
		r, n := i%down*tileRows, i/down*tileCols
		r1, n1 := min(r+tileRows, c.rows), min(n+tileCols, c.cols)
		multiply(c.block(r, r1, n, n1), a.block(r, r1, 0, a.cols), w.block(n, n1, 0, w.cols), add)
	})
}

// multiply is product for one tile or less, on this goroutine. Element i, j
// is always the dot product of a's row i and w's row j in one fixed order,
// whatever else the tile holds.
func multiply(c, a, w matrix, add bool) {
	if c.rows == 0 || c.cols == 0 {
		return
	}
	beta := float32(0)
	if add {
		beta = 1
	}
	if a.cols == 0 {
		for i := range c.rows {
			if !add {
				clear(c.row(i))
			}
		}
		return
	}
	if !onBoundary(w) {
		w = repack(w)
	}
	if !add {
		// beta = 0 clears by assignment, so old NaNs do not survive.
		beta = 0
	}
	for lo := 0; lo < c.rows; lo += tileRows {
		hi := min(lo+tileRows, c.rows)
		for left := 0; left < c.cols; left += tileCols {
			right := min(left+tileCols, c.cols)
			blas32.Gemm(blas.NoTrans, blas.Trans, 1,
				general(a.block(lo, hi, 0, a.cols)), general(w.block(left, right, 0, w.cols)),
				beta, general(c.block(lo, hi, left, right)))
		}
	}
}

// onBoundary says whether every row of w starts on a 16-byte boundary.
// gonum's dot product peels its second operand up to such a boundary first,
// so the order of the sum, and with it the last bit, depends on the address.
func onBoundary(w matrix) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(w.data)))%16 == 0 && (w.stride%4 == 0 || w.rows == 1)
}

// repack copies w to rows that start on boundaries.
func repack(w matrix) matrix {
	packed := dense(w.rows, w.cols)
	for i := range w.rows {
		copy(packed.row(i), w.row(i))
	}
	return packed
}

func general(m matrix) blas32.General {
	return blas32.General{Rows: m.rows, Cols: m.cols, Stride: m.stride, Data: m.data}
}

// addScaled adds s·x to dst, which are as long as one another.
func addScaled(dst, x []float32, s float32) {
	blas32.Axpy(s, blas32.Vector{N: len(x), Inc: 1, Data: x}, blas32.Vector{N: len(dst), Inc: 1, Data: dst})
}
