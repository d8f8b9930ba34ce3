package cpu

import (
	"math"
	"unsafe"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"
)

// plain holds the inner loops on gonum's vectors and plain Go. They run where
// the AVX2 kernels cannot, or with the build tag purego.
type plain struct{}

// multiply sets c = a·wᵀ, or adds that to c, on this goroutine. Element i, j
// is always the dot product of a's row i and w's row j in one fixed order,
// whatever else the call holds.
//
// gonum splits K into blocks, and so sums in another order, once a product
// has four or more blocks of 64 x 64 in its result: tileRows x tileCols stays
// below, and each element is one dot product over all of K.
func (plain) multiply(c, a, w matrix, add bool) {
	var beta float32
	if add {
		beta = 1
	}
	if !onBoundary(w) {
		w = repack(w)
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

// mix adds Σ weights[j]·v's row j to o, in the order of j.
func (plain) mix(o, weights []float32, v matrix) {
	for j, s := range weights {
		blas32.Axpy(s, blas32.Vector{N: v.cols, Inc: 1, Data: v.row(j)}, blas32.Vector{N: len(o), Inc: 1, Data: o})
	}
}

// exps sets dst[i] = e^(x[i]-shift) and returns the sum in float64, in four
// strands of fixed order. dst may be x; shift is about the largest of x.
func (plain) exps(dst, x []float32, shift float32) float64 {
	var s0, s1, s2, s3 float64
	i := 0
	for ; i+4 <= len(x); i += 4 {
		a, b, c, d := exp(x[i]-shift), exp(x[i+1]-shift), exp(x[i+2]-shift), exp(x[i+3]-shift)
		dst[i], dst[i+1], dst[i+2], dst[i+3] = a, b, c, d
		s0 += float64(a)
		s1 += float64(b)
		s2 += float64(c)
		s3 += float64(d)
	}
	for ; i < len(x); i++ {
		a := exp(x[i] - shift)
		dst[i] = a
		s0 += float64(a)
	}
	return (s0 + s1) + (s2 + s3)
}

// cross is Σ p·(x-shift) in float64, in four strands of fixed order.
func (plain) cross(p, x []float32, shift float32) float64 {
	var s0, s1, s2, s3 float64
	p = p[:len(x)]
	i := 0
	for ; i+4 <= len(x); i += 4 {
		s0 += float64(p[i] * (x[i] - shift))
		s1 += float64(p[i+1] * (x[i+1] - shift))
		s2 += float64(p[i+2] * (x[i+2] - shift))
		s3 += float64(p[i+3] * (x[i+3] - shift))
	}
	for ; i < len(x); i++ {
		s0 += float64(p[i] * (x[i] - shift))
	}
	return (s0 + s1) + (s2 + s3)
}

// largest is the largest value, NaN left out; -Inf when there is none.
func (plain) largest(x []float32) float32 {
	top := float32(math.Inf(-1))
	for _, v := range x {
		if v > top {
			top = v
		}
	}
	return top
}

// above returns an index such that no value before it exceeds limit.
func (plain) above(x []float32, limit float32) int {
	for i, v := range x {
		if v > limit {
			return i
		}
	}
	return len(x)
}

// count is the number of values above limit.
func (plain) count(x []float32, limit float32) int {
	n := 0
	for _, v := range x {
		if v > limit {
			n++
		}
	}
	return n
}

// apart is Σ |p - q·scale|.
func (plain) apart(p, q []float32, scale float32) float64 {
	var s0, s1 float64
	p = p[:len(q)]
	i := 0
	for ; i+2 <= len(q); i += 2 {
		s0 += math.Abs(float64(p[i]) - float64(q[i]*scale))
		s1 += math.Abs(float64(p[i+1]) - float64(q[i+1]*scale))
	}
	if i < len(q) {
		s0 += math.Abs(float64(p[i]) - float64(q[i]*scale))
	}
	return s0 + s1
}

// mixture is Σ m log m of m = (p + q·scale)/2; nothing comes of m = 0.
func (plain) mixture(p, q []float32, scale float32) float64 {
	sum := 0.0
	p = p[:len(q)]
	for i, v := range q {
		if m := (float64(p[i]) + float64(v*scale)) / 2; m != 0 {
			sum += m * math.Log(m)
		}
	}
	return sum
}

// gate sets dst = sigmoid(g)·x, or g·sigmoid(g)·x where times is set.
func (plain) gate(dst, g, x []float32, times bool) {
	for i, v := range g {
		s := 1 / (1 + exp(-v))
		if times {
			s *= v
		}
		dst[i] = s * x[i]
	}
}

// squares is Σ x² in float64, in four strands of fixed order.
func (plain) squares(x []float32) float64 {
	var s0, s1, s2, s3 float64
	for ; len(x) >= 4; x = x[4:] {
		a, b, c, d := float64(x[0]), float64(x[1]), float64(x[2]), float64(x[3])
		s0 += a * a
		s1 += b * b
		s2 += c * c
		s3 += d * d
	}
	for _, v := range x {
		s0 += float64(v) * float64(v)
	}
	return (s0 + s1) + (s2 + s3)
}

// scaled sets dst = x·s·w. dst may be x.
func (plain) scaled(dst, x, w []float32, s float32) {
	for i, v := range x {
		dst[i] = v * s * w[i]
	}
}
