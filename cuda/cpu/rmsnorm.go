package cpu

import (
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// RMSNorm implements [cuda.Device]. The mean of squares is summed in float64.
func (d *Device) RMSNorm(dst, x, w cuda.Tensor, eps, gain float32) error {
	const op = "rmsnorm"
	var out, in, weight matrix
	if err := views(op, operand{"dst", dst, &out}, operand{"x", x, &in}, operand{"w", w, &weight}); err != nil {
		return err
	}
	if out.rows != in.rows || out.cols != in.cols || weight.rows != 1 || weight.cols != in.cols {
		return shapeError(op, "dst %s, x %s, w %s: want [M N], [M N], [1 N]", out, in, weight)
	}
	if in.cols == 0 || in.rows == 0 {
		return nil
	}
	scale := make([]float32, in.cols)
	for j, v := range weight.row(0) {
		scale[j] = gain + v
	}
	d.rows(in.rows, in.cols*2, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			src, y := in.row(i), out.row(i)
			inv := float32(1 / math.Sqrt(sumSquares(src)/float64(len(src))+float64(eps)))
			for j, v := range src {
				y[j] = v * inv * scale[j]
			}
		}
	})
	return nil
}

// sumSquares is Σ x² in float64, in four strands of fixed order.
func sumSquares(x []float32) float64 {
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
