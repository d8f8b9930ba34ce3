//go:build amd64 && !purego

package cpu

import (
	"unsafe"

	vector "golang.org/x/sys/cpu"
)

// vectors are the inner loops in AVX2 with fused multiply-add, or the plain
// ones on a processor that has neither.
type vectors struct {
	plain
	avx2 bool
}

// kernels are the inner loops of this build.
var kernels = vectors{avx2: vector.X86.HasAVX2 && vector.X86.HasFMA}

// kernelName says which they are.
func kernelName() string {
	if kernels.avx2 {
		return "avx2"
	}
	return "gonum"
}

// blockBytes is how much of w is gone through for all rows of a at a time, so
// that it stays in the first cache.
const blockBytes = 24 << 10

// blockCols is how many rows of w that are at most.
const blockCols = 192

// multiply is plain.multiply on tiles of 4 x 3 dot products. A dot product
// is eight strands of K, joined by one tree at the end; rows that are missing
// at the edge are filled in by doubling another, so an element never depends
// on the tile it falls into.
func (v vectors) multiply(c, a, w matrix, add bool) {
	if !v.avx2 {
		v.plain.multiply(c, a, w, add)
		return
	}
	block := min(max(12, blockBytes/4/a.cols/12*12), blockCols)
	if c.rows <= 4 {
		block = blockCols // w is read once, whatever the order
	}
	// Three results are stored as four values, so a row of out is one longer.
	const stride = blockCols + 1
	var out [4 * stride]float32
	for left := 0; left < c.cols; left += block {
		n := min(block, c.cols-left)
		for i := 0; i < c.rows; i += 4 {
			rows := min(4, c.rows-i)
			var from [4]*float32
			for r := range from {
				from[r] = &a.data[(i+min(r, rows-1))*a.stride]
			}
			at := func(j int) *float32 { return &w.data[(left+j)*w.stride] }
			if rows == 1 {
				// A single row, as in decoding, has a kernel that wastes nothing.
				tiles := n / 12
				if tiles > 0 {
					dots1(&out[0], from[0], at(0), w.stride*4, tiles, a.cols/8*32, a.cols%8)
				}
				if more := n/3 - tiles*4; more > 0 {
					dots(&out[tiles*12], stride*4, &from, at(tiles*12), w.stride*4, more, a.cols/8*32, a.cols%8)
				}
			} else if whole := n / 3; whole > 0 {
				dots(&out[0], stride*4, &from, at(0), w.stride*4, whole, a.cols/8*32, a.cols%8)
			}
			for j := n / 3 * 3; j < n; j++ {
				// One row of w, three times; the last copies go beyond n.
				var one [16]float32
				dots(&one[0], 16, &from, at(j), 0, 1, a.cols/8*32, a.cols%8)
				for r := range rows {
					out[r*stride+j] = one[r*4]
				}
			}
			for r := range rows {
				dst, sums := c.row(i + r)[left:left+n], out[r*stride:r*stride+n]
				if !add {
					copy(dst, sums)
					continue
				}
				for j, s := range sums {
					dst[j] += s
				}
			}
		}
	}
}

func (v vectors) mix(o, weights []float32, rows matrix) {
	switch {
	case !v.avx2:
		v.plain.mix(o, weights, rows)
	case len(o) > 0 && len(weights) > 0:
		_ = rows.row(len(weights) - 1)[len(o)-1]
		mix(&o[0], &weights[0], len(weights), &rows.data[0], rows.stride*4, len(o))
	}
}

func (v vectors) exps(dst, x []float32, shift float32) float64 {
	switch {
	case !v.avx2:
		return v.plain.exps(dst, x, shift)
	case len(x) == 0:
		return 0
	}
	dst = dst[:len(x)]
	return exps(&dst[0], &x[0], len(x), shift)
}

func (v vectors) cross(p, x []float32, shift float32) float64 {
	switch {
	case !v.avx2:
		return v.plain.cross(p, x, shift)
	case len(x) == 0:
		return 0
	}
	p = p[:len(x)]
	return cross(&p[0], &x[0], len(x), shift)
}

func (v vectors) largest(x []float32) float32 {
	if !v.avx2 || len(x) < 16 {
		return v.plain.largest(x)
	}
	return largest(unsafe.SliceData(x), len(x))
}

func (v vectors) above(x []float32, limit float32) int {
	if !v.avx2 {
		return v.plain.above(x, limit)
	}
	return above(unsafe.SliceData(x), len(x), limit)
}

func (v vectors) count(x []float32, limit float32) int {
	if !v.avx2 {
		return v.plain.count(x, limit)
	}
	whole := len(x) &^ 7
	return count(unsafe.SliceData(x), whole, limit) + v.plain.count(x[whole:], limit)
}

func (v vectors) apart(p, q []float32, scale float32) float64 {
	switch {
	case !v.avx2:
		return v.plain.apart(p, q, scale)
	case len(q) == 0:
		return 0
	}
	p = p[:len(q)]
	return apart(&p[0], &q[0], len(q), scale)
}

func (v vectors) mixture(p, q []float32, scale float32) float64 {
	switch {
	case !v.avx2:
		return v.plain.mixture(p, q, scale)
	case len(q) == 0:
		return 0
	}
	p = p[:len(q)]
	return mixture(&p[0], &q[0], len(q), scale)
}

func (v vectors) gate(dst, g, x []float32, times bool) {
	if !v.avx2 || len(g) == 0 {
		v.plain.gate(dst, g, x, times)
		return
	}
	flag := 0
	if times {
		flag = 1
	}
	dst, x = dst[:len(g)], x[:len(g)]
	gate(&dst[0], &g[0], &x[0], len(g), flag)
}

func (v vectors) squares(x []float32) float64 {
	if !v.avx2 {
		return v.plain.squares(x)
	}
	return squares(unsafe.SliceData(x), len(x))
}

func (v vectors) scaled(dst, x, w []float32, s float32) {
	if !v.avx2 || len(x) == 0 {
		v.plain.scaled(dst, x, w, s)
		return
	}
	dst, w = dst[:len(x)], w[:len(x)]
	scaled(&dst[0], &x[0], &w[0], len(x), s)
}

// dots computes tiles of 4 rows of a by 3 rows of w; row r of the results
// starts stride bytes after row r-1, and every three are written as four.
// Rows of w are ldw bytes apart. body is the bytes of a row in whole vectors,
// rest the values that follow.
//
//go:noescape
func dots(out *float32, stride int, a *[4]*float32, w *float32, ldw, tiles, body, rest int)

// dots1 computes tiles of one row of a by 12 rows of w in the same order.
//
//go:noescape
func dots1(out, a, w *float32, ldw, tiles, body, rest int)

// mix adds Σ w[j]·v[j] to o, for n > 0 rows of v that are ldv bytes apart.
//
//go:noescape
func mix(o, w *float32, n int, v *float32, ldv, cols int)

// exps, cross, apart and mixture are as their plain forms, in eight strands.
//
//go:noescape
func exps(dst, x *float32, n int, shift float32) float64

//go:noescape
func apart(p, q *float32, n int, scale float32) float64

//go:noescape
func mixture(p, q *float32, n int, scale float32) float64

//go:noescape
func cross(p, x *float32, n int, shift float32) float64

// above returns how many values, a multiple of 8, come before the first
// eight that hold one above limit, or before the last n mod 8.
//
//go:noescape
func above(x *float32, n int, limit float32) int

//go:noescape
func largest(x *float32, n int) float32

// count is as its plain form, for n a multiple of 8.
//
//go:noescape
func count(x *float32, n int, limit float32) int

// gate, squares and scaled are as their plain forms; times is 0 or 1.
//
//go:noescape
func gate(dst, by, x *float32, n, times int)

//go:noescape
func squares(x *float32, n int) float64

//go:noescape
func scaled(dst, x, w *float32, n int, s float32)
